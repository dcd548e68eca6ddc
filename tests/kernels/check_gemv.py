"""GEMVs of very few rows by kernels that stream the weight."""

import pytest
import torch
from torch import Tensor

from dgemma.backends.cuda import gemm as gemms
from dgemma.backends.cuda.configs import GemvConfig
from dgemma.backends.cuda.kernels import gemv as kernels
from dgemma.backends.cuda.kernels import residual_norm, router
from dgemma.model.moe import gelu_and_mul
from dgemma.quant.fp8 import LinearWeight, quantize

EPS = 1e-6


def normal(seed: int, *shape: int, scale: float = 1.0) -> Tensor:
    return scale * torch.randn(shape, generator=torch.Generator().manual_seed(seed))


CONFIGS = [
    (1, 32, 16, GemvConfig(4, 32)),
    (3, 40, 10, GemvConfig(4, 16)),  # neither depth nor outputs divide evenly
    (2, 64, 12, GemvConfig(1, 64, warps=2)),
]


@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize(("rows", "depth", "outputs", "config"), CONFIGS)
def test_products_agree(rows: int, depth: int, outputs: int, config: GemvConfig, fp8: bool) -> None:
    x_TD, weight = normal(1, rows, depth), normal(2, outputs, depth, scale=depth**-0.5)
    values, scale = quantize(weight) if fp8 else (weight, None)
    whole = weight if scale is None else values.float() * scale[:, None]
    got = kernels.gemv(x_TD, values, scale, config)
    torch.testing.assert_close(got, x_TD @ whole.T, atol=2e-6, rtol=1e-5)
    got = kernels.gemv_gelu_mul(x_TD, values, scale, config)
    torch.testing.assert_close(got, gelu_and_mul(x_TD @ whole.T), atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize("cap", [None, 3.0])
def test_logits_are_capped_on_their_way(cap: float | None, fp8: bool) -> None:
    """An fp8 head meets rows that are not rounded."""
    x_TD, weight = normal(1, 2, 40), LinearWeight(normal(2, 24, 40))
    whole_VD = weight.values_OI
    if fp8:
        found = quantize(weight.values_OI)
        weight, whole_VD = LinearWeight(*found), found.dequantize()
    out = torch.empty(2, 24)
    got = kernels.logits(x_TD, weight, cap, out)
    raw = x_TD @ whole_VD.T
    want = raw if cap is None else torch.tanh(raw / cap) * cap
    assert got.data_ptr() == out.data_ptr()
    torch.testing.assert_close(out, want, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("num_experts", [4, 6])
def test_residual_add_norm_and_router_in_one_agree_with_both(num_experts: int) -> None:
    x, y = normal(1, 3, 40), normal(2, 3, 40)
    norms = tuple(1 + 0.1 * normal(seed, 40) for seed in range(10, 14))
    router_ED, scale_E = normal(3, num_experts, 40), 1 + 0.1 * normal(4, num_experts)
    *want, router_TD = residual_norm.residual_add_norm(x, y, norms, EPS)
    got, logits_1TE = kernels.residual_add_norm_router(x, y, norms, router_ED, EPS)
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, atol=2e-6, rtol=1e-5)
    torch.testing.assert_close(logits_1TE[0], router_TD @ router_ED.T, atol=5e-6, rtol=1e-5)
    ids, weights, buckets = router.topk(router.RouterLogits(logits_1TE), scale_E, 2)
    want_ids, want_weights, _ = router.topk(router.router_logits(router_TD, router_ED), scale_E, 2)
    assert buckets is None
    assert ids.tolist() == want_ids.tolist()
    torch.testing.assert_close(weights, want_weights, atol=1e-5, rtol=1e-5)


def test_few_rows_are_streamed_and_more_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[int] = []

    def gemv(x: Tensor, weight: Tensor, scale: Tensor | None) -> Tensor:
        taken.append(len(x))
        return x @ weight.T

    monkeypatch.setattr(kernels, "gemv", gemv)
    weight, most = LinearWeight(normal(1, 8, 16)), gemms.MAX_GEMV_ROWS
    for rows in (1, most, most + 1):
        gemms.gemm(normal(2, rows, 16), weight, torch.float32)
    assert taken == [1, most]
    gemms.gemm(normal(2, 16, 1).t(), weight, torch.float32)  # one row is always contiguous
    gemms.gemm(normal(2, 16, 2).t(), weight, torch.float32)
    assert taken == [1, most, 1]
