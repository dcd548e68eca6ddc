"""Products of very few rows by kernels that stream the weight."""

import pytest
import torch
from torch import Tensor

from dgemma.ops import dense, fused
from dgemma.ops.experts import gated
from dgemma.ops.fast import switched
from dgemma.ops.fp8 import quantize
from dgemma.ops.kernels import vector as kernels

EPS = 1e-6


def normal(seed: int, *shape: int, scale: float = 1.0) -> Tensor:
    return scale * torch.randn(shape, generator=torch.Generator().manual_seed(seed))


FORMS = [
    (1, 32, 16, kernels.Cut(4, 32)),
    (3, 40, 10, kernels.Cut(4, 16)),  # neither depth nor outputs divide evenly
    (2, 64, 12, kernels.Cut(1, 64, warps=2)),
]


@pytest.mark.parametrize("eight", [False, True])
@pytest.mark.parametrize(("rows", "depth", "outputs", "form"), FORMS)
def test_products_agree(
    rows: int, depth: int, outputs: int, form: kernels.Cut, eight: bool
) -> None:
    x_TD, weight = normal(1, rows, depth), normal(2, outputs, depth, scale=depth**-0.5)
    numbers, factor = quantize(weight) if eight else (weight, None)
    whole = weight if factor is None else numbers.float() * factor[:, None]
    got = kernels.product(x_TD, numbers, factor, form)
    torch.testing.assert_close(got, x_TD @ whole.T, atol=2e-6, rtol=1e-5)
    got = kernels.gated_product(x_TD, numbers, factor, form)
    torch.testing.assert_close(got, gated(x_TD @ whole.T), atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize("eight", [False, True])
@pytest.mark.parametrize("cap", [None, 3.0])
def test_the_head_s_scores_are_capped_on_their_way(cap: float | None, eight: bool) -> None:
    x_TD, weight = normal(1, 2, 40), dense.Weight(normal(2, 24, 40))
    whole_VD = weight.numbers_OI
    if eight:
        found = quantize(weight.numbers_OI)
        weight, whole_VD = dense.Weight(*found), found.whole()
    out, want = torch.empty(2, 24), torch.empty(2, 24)
    with torch.inference_mode():
        # By definition rows would be rounded to 8 bits as well.
        dense.head_logits(x_TD, dense.Weight(whole_VD), cap, want)
        with switched(True):
            got = dense.head_logits(x_TD, weight, cap, out)
            raw = dense.scores(x_TD, weight)
    assert got.data_ptr() == out.data_ptr()
    torch.testing.assert_close(out, want, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(raw, x_TD @ whole_VD.T, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("num_experts", [4, 6])
def test_joining_and_routing_in_one_agree_with_both(num_experts: int) -> None:
    x, y = normal(1, 3, 40), normal(2, 3, 40)
    joining = fused.JoinWeights(*(1 + 0.1 * normal(seed, 40) for seed in range(10, 14)))
    scale = 1 + 0.1 * normal(4, num_experts)
    router = fused.RouterWeights(normal(3, num_experts, 40), scale, 2)
    with torch.inference_mode():
        want = fused.join(x, y, joining, EPS)
        want_routed = fused.routed(want.router_TD, router)
        with switched(True):
            got, routed = fused.join_few(x, y, joining, router, EPS)
    for name in ("x_TD", "dense_TD", "expert_TD"):
        torch.testing.assert_close(getattr(got, name), getattr(want, name), atol=2e-6, rtol=1e-5)
    assert routed.into is None
    assert routed.ids_TK.tolist() == want_routed.ids_TK.tolist()
    torch.testing.assert_close(routed.share_TK, want_routed.share_TK, atol=1e-5, rtol=1e-5)


def test_few_rows_are_streamed_and_more_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[int] = []

    def product(x: Tensor, weight: Tensor, factor: Tensor | None) -> Tensor:
        taken.append(len(x))
        return x @ weight.T

    monkeypatch.setattr(kernels, "product", product)
    weight = dense.Weight(normal(1, 8, 16))
    with torch.inference_mode(), switched(True):
        for rows in (1, dense.FEW, dense.FEW + 1):
            dense.product(normal(2, rows, 16), weight, torch.float32)
    assert taken == [1, dense.FEW]
