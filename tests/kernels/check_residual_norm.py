"""The kernels between a layer's GEMMs agree with their definitions."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from dgemma.backends.cuda.kernels import residual_norm as kernels
from dgemma.model.moe import gelu_and_mul, weighted_sum
from dgemma.model.norm_rope import rms_norm
from dgemma.quant.fp8 import quantize

EPS = 1e-6
Weights = tuple[Tensor, ...]


def normal(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def residual_add_norm(x_TD: Tensor, attended_TD: Tensor, weights: Weights) -> Weights:
    """Define `residual_add_norm`, as a layer of the model computes it."""
    post_D, dense_D, expert_D, router_D = weights
    x_TD = x_TD + rms_norm(attended_TD, post_D, EPS)
    router_TD = rms_norm(x_TD, None, EPS) * router_D * x_TD.shape[1] ** -0.5
    return x_TD, rms_norm(x_TD, dense_D, EPS), rms_norm(x_TD, expert_D, EPS), router_TD


def layer_epilogue(
    x_TD: Tensor, dense_TD: Tensor, mixed: tuple[Tensor, Tensor], weights: Weights
) -> Weights:
    """Define `layer_epilogue`, as a layer of the model and the norm after it compute it."""
    dense_D, expert_D, both_D, scalar, next_D = weights
    sum_TD = rms_norm(dense_TD, dense_D, EPS) + rms_norm(weighted_sum(*mixed), expert_D, EPS)
    x_TD = (x_TD + rms_norm(sum_TD, both_D, EPS)) * scalar
    return x_TD, rms_norm(x_TD, next_D, EPS)


def drawn(width: int) -> tuple[Weights, Weights, tuple[Tensor, Tensor]]:
    """Draw the norms' weights, and outputs of three experts with their top-k weights."""
    weights = [1 + 0.1 * normal(seed, width) for seed in range(10, 15)]
    mixed = normal(4, 15, width), normal(5, 5, 3).softmax(-1)
    return tuple(weights[:4]), (*weights[:3], torch.tensor([0.7]), weights[4]), mixed


@pytest.mark.parametrize("width", [40, 64])
def test_norms_and_sums_agree(width: int) -> None:
    x, y, z = (normal(seed, 5, width) for seed in range(3))
    norms, ffn_norms, mixed = drawn(width)
    pairs = [
        ((kernels.norm(x, norms[0], EPS),), (rms_norm(x, norms[0], EPS),)),
        ((kernels.norm(x, None, EPS),), (rms_norm(x, None, EPS),)),
        (kernels.residual_add_norm(x, y, norms, EPS), residual_add_norm(x, y, norms)),
        (
            kernels.layer_epilogue(x, z, mixed, ffn_norms, EPS),
            layer_epilogue(x, z, mixed, ffn_norms),
        ),
        ((kernels.gelu_and_mul(y),), (gelu_and_mul(y),)),
    ]
    for got, want in pairs:
        assert len(got) == len(want)
        for a, b in zip(got, want, strict=True):
            torch.testing.assert_close(a, b, atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize("count", [1, 3])
def test_splits_of_a_gemm_are_added(count: int) -> None:
    x, parts = normal(0, 5, 40), normal(1, count, 5, 40)
    norms, ffn_norms, mixed = drawn(40)
    whole = parts.sum(0)
    want = *residual_add_norm(x, whole, norms), *layer_epilogue(x, whole, mixed, ffn_norms)
    for given in (whole, parts):
        got = (
            *kernels.residual_add_norm(x, given, norms, EPS),
            *kernels.layer_epilogue(x, given, mixed, ffn_norms, EPS),
        )
        for a, b in zip(got, want, strict=True):
            torch.testing.assert_close(a, b, atol=4e-6, rtol=1e-5)


@pytest.mark.parametrize("width", [40, 64])
def test_rows_written_in_fp8_are_the_16_bit_ones_quantized(width: int) -> None:
    x, y, z = (normal(seed, 5, width) for seed in range(3))
    norms, ffn_norms, mixed = drawn(width)
    # Rows and who reads them; the others stay whole.
    works: list[tuple[Callable[..., object], str, int]] = [
        (lambda **how: kernels.residual_add_norm(x, y, norms, EPS, **how), "fp8_out", 1),
        (lambda **how: kernels.residual_add_norm(x, y, norms, EPS, **how), "fp8_experts", 2),
        (lambda **how: kernels.layer_epilogue(x, z, mixed, ffn_norms, EPS, **how), "fp8_out", 1),
        (lambda **how: (x, kernels.gelu_and_mul(y, **how)), "fp8_out", 1),
    ]
    for work, reader, index in works:
        wholes, found = list(work()), list(work(**{reader: True}))
        whole, (values, scale) = wholes.pop(index), found.pop(index)
        assert all(torch.equal(a, b) for a, b in zip(found, wholes, strict=True))
        want = quantize(whole)
        torch.testing.assert_close(scale, want.scale, atol=0, rtol=1e-6)
        assert values.dtype == torch.float8_e4m3fn
        assert torch.equal(values.float(), want.values.float())


@pytest.mark.parametrize("many", [1000, 4])
def test_rows_are_quantized_alone_and_several_at_a_time(
    many: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernels, "MANY_ROWS", many)
    x_TD = normal(7, 6, 40)
    x_TD[3] = 0.0
    got, want = kernels.quantize(x_TD), quantize(x_TD)
    torch.testing.assert_close(got[1], want.scale, atol=0, rtol=1e-6)
    assert torch.equal(got[0].float(), want.values.float())
