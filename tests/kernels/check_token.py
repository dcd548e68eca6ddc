"""A single token: its kernels beside those of several, and beside the model as it is defined."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from dgemma.denoise import commit
from dgemma.graph.check_ends import ends_off
from dgemma.graph.token import Teller
from dgemma.model import Gemma
from dgemma.ops.fast import switched
from dgemma.ops.kernels import enter_1, router
from dgemma.ops.kernels.enter import Table
from dgemma.ops.norm import rms_norm
from dgemma.ops.rope import turns
from dgemma.stack import Stack
from dgemma.weights.packed import FORMS, shrink_model
from dgemma.weights.random import random_model
from tests.kernels import small
from tests.kernels.small import SMALL


def normal(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("num_experts", [8, 6])
def test_one_token_chooses_the_experts_that_it_chooses_among_others(num_experts: int) -> None:
    scale = 1 + 0.1 * normal(1, num_experts)
    for seed in range(4):
        logits = normal(seed, 1, 1, num_experts)
        logits[0, 0, 2] = logits[0, 0, 4] if seed else float("nan")
        twice = router.Parts(logits.expand(1, 2, num_experts).contiguous())
        ids, share, _ = router.choose(twice, scale, 3)  # one after the other
        ranked, shares, _ = router.choose(router.Parts(logits), scale, 3)
        assert torch.equal(ids[:1], ranked)
        torch.testing.assert_close(shares, share[:1])


def test_a_token_enters_in_one_launch_as_it_does_in_many() -> None:
    table_VD, weight_D = normal(1, 20, 40), 1 + 0.1 * normal(2, 40)
    token, start, pairs = torch.tensor([7]), torch.tensor([300]), normal(3, 150).abs()
    table, norm = Table(table_VD, 3.0), (weight_D, 1e-6)
    x, normed, cos, sin = enter_1.enter(token, start, table, norm, pairs)
    assert torch.equal(x, 3.0 * table_VD[7:8])
    torch.testing.assert_close(normed, rms_norm(x, weight_D, 1e-6))
    for got, want in zip((cos, sin), turns(start, pairs), strict=True):
        torch.testing.assert_close(got[None], want, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("can_denoise", [True, False])
def test_a_token_that_enters_wrong_is_found_at_the_start(
    can_denoise: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    of = small.model()
    if not can_denoise:
        of.self_conditioning = None
    stack, right = Stack(of), enter_1.enter

    def spoilt(place: int, by: float) -> Callable[..., tuple[Tensor, ...]]:
        def enter(*given: object) -> tuple[Tensor, ...]:
            found = list(right(*given))  # type: ignore[arg-type]
            found[place] = found[place] * by
            return tuple(found)

        return enter

    with torch.inference_mode():
        assert ends_off(of, stack) == ""
        for place, by in ((0, 1.1), (1, 0.9), (2, 1.1), (3, -1.0), (1, float("nan"))):
            monkeypatch.setattr(enter_1, "enter", spoilt(place, by))
            assert "how a token enters" in ends_off(of, stack)


def told(of: Gemma) -> tuple[Tensor, Tensor]:
    """The logits behind a token by kernels, and by definition."""
    row, twin = small.cache(of, 7), small.cache(of, 7)
    with switched(True):
        got = Teller(of, Stack(of)).tell(5, row)
    with torch.inference_mode():
        want = of.logits(commit(of, twin, torch.tensor([5]), chunk=8))[0]
    assert got is not None
    return got, want


@pytest.mark.usefixtures("small_cuts")
def test_a_token_s_logits_are_the_model_s() -> None:
    torch.testing.assert_close(*told(small.model()), atol=1e-4, rtol=1e-4)


@pytest.mark.usefixtures("small_cuts")
@pytest.mark.parametrize("quant", ["fp8", "nvfp4"])
def test_so_they_are_with_fewer_bits(quant: str) -> None:
    wide = {"hidden_size": 64, "moe_intermediate_size": 64, "intermediate_size": 192}
    of = shrink_model(random_model(replace(SMALL, **wide), seed=0), FORMS[quant])
    got, want = told(of)
    # By definition the row is quantized too.
    assert (got - want).norm() < 0.1 * want.norm()
