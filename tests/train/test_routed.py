"""The experts with gradients, and their choice, against the definition."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from dgemma.model.moe import SLOT_ALIGNMENT, assign_slots, moe_reference, moe_with_grad, topk

REPEATABLE = settings(deadline=None, derandomize=True, database=None, max_examples=40)
ROUTINGS = given(
    tokens=st.integers(1, 40),
    experts=st.integers(1, 6),
    chosen=st.integers(1, 6),
    seed=st.integers(0, 99),
)


def case(
    tokens: int, experts: int, chosen: int, seed: int, dtype: torch.dtype = torch.float32
) -> list[Tensor]:
    """Inputs, choices, shares and weights; some experts are chosen by nobody."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=dtype)

    used = max(chosen, experts - 1)
    ids_TK = torch.stack(
        [torch.randperm(used, generator=generator)[:chosen] for _ in range(tokens)]
    )
    width, inner = 6, 4
    weights = [draw(experts, 2 * inner, width), draw(experts, width, inner)]
    return [draw(tokens, width), ids_TK, draw(tokens, chosen), *weights]


@REPEATABLE
@ROUTINGS
def test_values_and_gradients_are_those_of_the_definition(
    tokens: int, experts: int, chosen: int, seed: int
) -> None:
    inputs = case(tokens, experts, min(chosen, experts), seed)
    found = []
    for function in (moe_with_grad, moe_reference):
        leaves = [x.clone().requires_grad_(x.is_floating_point()) for x in inputs]
        out_TD = function(*leaves)
        out_TD.square().sum().backward()
        found.append([out_TD, *(x.grad for x in leaves if x.is_floating_point())])
    for mine, reference in zip(*found, strict=True):
        assert (mine - reference).abs().max() < 1e-4 * max(1.0, reference.abs().max().item())


@pytest.mark.parametrize(("experts", "chosen"), [(3, 2), (4, 1), (1, 1)])
def test_gradients_are_derivatives(experts: int, chosen: int) -> None:
    x_TD, ids_TK, *others = case(5, experts, chosen, seed=3, dtype=torch.float64)
    leaves = [x.requires_grad_() for x in (x_TD, *others)]

    def function(x_TD: Tensor, *rest: Tensor) -> Tensor:
        return moe_with_grad(x_TD, ids_TK, *rest)

    assert torch.autograd.gradcheck(function, leaves)


@REPEATABLE
@ROUTINGS
def test_every_choice_has_its_own_slot_in_its_experts_range(
    tokens: int, experts: int, chosen: int, seed: int
) -> None:
    ids_TK = case(tokens, experts, min(chosen, experts), seed)[1]
    slots = assign_slots(ids_TK, experts)
    flat, ends = slots.slot_TK.flatten().tolist(), [0, *slots.ends_E.tolist()]
    assert len(set(flat)) == len(flat)
    assert all(end % SLOT_ALIGNMENT == 0 for end in ends)
    for choice, (slot, expert) in enumerate(zip(flat, ids_TK.flatten().tolist(), strict=True)):
        assert ends[expert] <= slot < ends[expert + 1]
        assert slots.assignment_S[slot] == choice
    assert (slots.assignment_S >= 0).sum() == len(flat)
    assert slots.ends_E[-1] <= len(slots.assignment_S)


def test_what_stands_in_slots_of_nobody_reaches_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """The grouped kernel leaves rows of nobody as it finds them."""
    from dgemma.model import moe as routed

    plain = routed.grouped_slots

    def careless(x_SD: Tensor, weight_EOD: Tensor, ends_E: Tensor) -> Tensor:
        out = plain(x_SD, weight_EOD, ends_E)
        is_nobodys = torch.arange(len(out)) >= ends_E[-1]
        return torch.where(is_nobodys[:, None], float("nan"), out)

    inputs = case(7, 3, 2, seed=1)
    expected = moe_reference(*inputs)
    monkeypatch.setattr(routed, "grouped_slots", careless)
    leaves = [x.clone().requires_grad_(x.is_floating_point()) for x in inputs]
    out_TD = moe_with_grad(*leaves)
    out_TD.sum().backward()
    assert torch.allclose(out_TD, expected, atol=1e-5)
    assert all(leaf.grad.isfinite().all() for leaf in leaves if leaf.grad is not None)


@pytest.mark.parametrize("count", [1, 2, 4, 5])
def test_the_compiled_choice_is_that_of_topk(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    p_TE = torch.randn(50, 8, generator=torch.Generator().manual_seed(0)).softmax(-1)
    expected = p_TE.topk(count, dim=-1)
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    values_TK, ids_TK = topk(p_TE.clone().requires_grad_(), count)
    assert torch.equal(ids_TK, expected.indices) and torch.equal(values_TK, expected.values)


def test_gradients_of_the_compiled_choice_are_those_of_topk(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = []
    for is_compiling in (False, True):
        monkeypatch.setattr(torch.compiler, "is_compiling", lambda now=is_compiling: now)
        p_TE = torch.randn(9, 5, generator=torch.Generator().manual_seed(1)).requires_grad_()
        values_TK, _ = topk(p_TE.softmax(-1), 3)
        (values_TK * torch.arange(1, 4)).sum().backward()
        found.append(p_TE.grad)
    assert torch.allclose(*found)
