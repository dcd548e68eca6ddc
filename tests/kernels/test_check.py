"""The check of kernels by layers: what rounding does is let pass, a fault is not.

Nothing here needs kernels: definitions stand in for them, a little off or wrong.
"""

import re
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from dgemma.cache import Pass
from dgemma.config import SLIDING
from dgemma.graph import check as checks
from dgemma.graph.check import BITS_8, BITS_16, Verdicts, _bounds, check
from dgemma.graph.check_routes import Routes
from dgemma.graph.record import _texts
from dgemma.model import Gemma, Turns
from dgemma.ops.fast import FAMILIES, Family
from dgemma.ops.fused import Routed, RouterWeights, routed
from dgemma.stack import Attend, ByContext, Fused, Stack, layers_of
from dgemma.weights.packed import FORMS, Form, shrink_model
from dgemma.weights.random import random_model
from tests.kernels.small import SMALL

# Few experts, of which few are taken: what one of them gives is much of a row.
FEW = replace(SMALL, hidden_size=64, num_experts=8, sliding_window=300, canvas_length=16)
CHUNK = 316
ROUNDING = 0.008  # of bfloat16
Change = Callable[[Tensor], Tensor]  # of what attention gives to a pass


@pytest.fixture(scope="module")
def model() -> Gemma:
    return random_model(FEW, seed=3).requires_grad_(False)


@pytest.fixture
def attention(monkeypatch: pytest.MonkeyPatch) -> Callable[[Change], None]:
    """Sets what stands in for the kernels of attention."""

    def use(change: Change) -> None:
        def attend(context: Pass, probe: Stack, by_table: bool) -> Attend:
            plain = ByContext(context, probe.eps)
            if not by_table:
                return plain

            def changed(layer: Fused, qkv_TX: Tensor, turns: Turns) -> Tensor:
                return change(plain(layer, qkv_TX, turns))

            return changed

        monkeypatch.setattr(checks, "_attend", attend)

    return use


def verdict(of: Gemma, family: Family = "attention") -> str:
    known: Verdicts = {other: "" for other in FAMILIES if other != family}
    return check(of, Stack(of), known)[family]


def rounded(heads_TX: Tensor) -> Tensor:
    drawn_TX = torch.rand(heads_TX.shape, generator=torch.Generator().manual_seed(1))
    return heads_TX * (1 + ROUNDING * (drawn_TX - 0.5))


def one_row_wrong(heads_TX: Tensor, share: float = 1.0) -> Tensor:
    """In a chunk the row before the last gets what is the last's, or a share of it."""
    wrong_TX = heads_TX.clone()
    if len(heads_TX) == CHUNK:
        wrong_TX[-2] = torch.lerp(heads_TX[-2], heads_TX[-1], share)
    return wrong_TX


def test_a_router_that_rounding_decides_is_no_fault(
    model: Gemma, attention: Callable[[Change], None]
) -> None:
    attention(rounded)
    runs = []
    for by_table in (True, False):  # each with its own choice
        probe, routes = checks._one_layer(FEW, Stack(model), SLIDING), Routes()
        probe.watch = routes.note
        with torch.inference_mode():
            rows_TD = checks._passes(model, probe, SLIDING, by_table=by_table)
        runs.append((rows_TD, torch.cat(routes.chosen).sort(-1).values))
    (a_TD, a_TK), (b_TD, b_TK) = runs
    off_T, is_other_T = (a_TD - b_TD).norm(dim=-1) / b_TD.norm(dim=-1), (a_TK != b_TK).any(-1)
    # Rows that go elsewhere are far off, further than any bound that tells a fault.
    assert 0 < is_other_T.sum() < 0.05 * len(off_T)
    assert off_T[is_other_T].max() > 0.6 > 20 * off_T[~is_other_T].max()
    assert verdict(model) == ""


@pytest.mark.parametrize("share", [1.0, 0.4])
def test_one_wrong_row_is_a_fault(
    model: Gemma, attention: Callable[[Change], None], share: float
) -> None:
    attention(lambda heads_TX: heads_TX)
    assert verdict(model) == ""
    attention(lambda heads_TX: one_row_wrong(rounded(heads_TX), share))
    # The other rows are as near as rounding leaves them.
    assert re.match(r"a chunk: it is off by 0.00\d+ \(", verdict(model))


CHOICES: list[tuple[Change, str]] = [
    (lambda ids_TK: (ids_TK + 3) % FEW.num_experts, "too low"),
    (lambda ids_TK: ids_TK[:, :1].expand(-1, 2), "one of them twice"),
    (lambda ids_TK: ids_TK + FEW.num_experts, "its check raised"),  # by experts that are asked
]


@pytest.mark.parametrize(("change", "said"), CHOICES)
def test_a_wrong_choice_is_a_fault(
    model: Gemma, monkeypatch: pytest.MonkeyPatch, change: Change, said: str
) -> None:
    """Of one token. It is judged though the run by definition takes it over."""

    def wrong(x_TD: Tensor, router: RouterWeights) -> Routed:
        ids_TK = routed(x_TD, router).ids_TK
        if len(x_TD) == CHUNK:
            ids_TK = torch.cat([ids_TK[:-1], change(ids_TK[-1:])])
        scores_TE = F.linear(x_TD, router.weight_ED)
        at_TK = ids_TK % FEW.num_experts
        return Routed(ids_TK, scores_TE.gather(1, at_TK).softmax(-1) * router.scale_E[at_TK])

    monkeypatch.setattr("dgemma.stack.routed", wrong)
    assert said in verdict(model, "experts")


def test_wrong_shares_are_a_fault(model: Gemma, monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(x_TD: Tensor, router: RouterWeights) -> Routed:
        found = routed(x_TD, router)
        return Routed(found.ids_TK, found.share_TK.flip(-1))

    monkeypatch.setattr("dgemma.stack.routed", wrong)
    assert "it is off by" in verdict(model, "experts")


def test_bounds_are_wider_where_rows_are_quantized() -> None:
    for form, bounds in ((Form(), BITS_16), (Form(dense="fp8"), BITS_8), (FORMS["fp8"], BITS_8)):
        (layer, *_) = layers_of(shrink_model(random_model(FEW, seed=3), form))
        assert _bounds(layer) == bounds


def test_another_check_asks_for_other_verdicts() -> None:
    names = {path.name for path in _texts()}
    assert {"stack.py", "check.py", "check_routes.py", "attention.py"} <= names
