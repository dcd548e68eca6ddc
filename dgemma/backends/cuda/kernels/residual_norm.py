"""Fused elementwise kernels between the GEMMs of a layer: residual, norms, expert mixing.

Statistics are float32, and a value is rounded to the residual's dtype where it leaves a kernel or
is added to the residual. The sums of a split-K GEMM, [S, T, D], are added here. For an fp8 GEMM
(`fp8_out`) rows are written in e4m3 with a scale each, since a program has whole rows.

T tokens, D width, S splits, A assignments of tokens to experts, K of a token.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from dgemma.backends.cuda.kernels.common import (
    FP8_MAX,
    FP8_MIN_AMAX,
    REGISTERS,
    fp8_scale,
    gdc_wait,
    gelu_mul,
    inverse_rms,
    launch,
    pdl_kwargs,
    row_warps,
)

# Rows to quantize from which a program takes several: a block each costs more to start than to run.
MANY_ROWS, MANY_ROWS_BLOCK = 8192, 4

OutputRows = Tensor | tuple[Tensor, Tensor]  # 16-bit, or e4m3 values and their scales


def norm(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """RMSNorm of the last dimension."""
    width, out = x.shape[-1], torch.empty_like(x)
    launch(_norm, (x.numel() // width,))(
        x,
        weight if weight is not None else x,
        out,
        eps,
        HAS_WEIGHT=weight is not None,
        **_row_kwargs(width),
    )
    return out


def quantize(x_TD: Tensor) -> tuple[Tensor, Tensor]:
    """Quantize rows to e4m3: scale = absmax / FP8_MAX."""
    out_TD, scale_T = _empty_rows(x_TD, fp8_out=True)
    rows = MANY_ROWS_BLOCK if len(x_TD) >= MANY_ROWS else 1
    kwargs = {**_row_kwargs(x_TD.shape[1]), "num_warps": 4}
    launch(_quantize, (triton.cdiv(len(x_TD), rows),))(
        x_TD, out_TD, scale_T, len(x_TD), ROWS=rows, **kwargs
    )
    return out_TD, scale_T


def residual_add_norm(
    x_TD: Tensor,
    attended_TD: Tensor,
    weights: tuple[Tensor, Tensor, Tensor, Tensor],
    eps: float,
    *,
    fp8_out: bool = False,
    fp8_experts: bool = False,
) -> tuple[Tensor, OutputRows, OutputRows, Tensor]:
    """Return the residual after attention, and the inputs of dense MLP, experts and router.

    Weights: the norms after attention, before the dense MLP and before the experts, and the
    router's scale. `fp8_out` quantizes the input of the dense MLP, `fp8_experts` of the experts.
    """
    out_TD, router_TD = torch.empty_like(x_TD), torch.empty_like(x_TD)
    dense, expert = _empty_rows(x_TD, fp8_out=fp8_out), _empty_rows(x_TD, fp8_out=fp8_experts)
    launch(_residual_add_norm, (len(x_TD),))(
        x_TD,
        attended_TD,
        *weights,
        out_TD,
        *dense,
        *expert,
        router_TD,
        eps,
        SPLITS=_num_splits(attended_TD),
        FP8_OUT=fp8_out,
        FP8_EXPERTS=fp8_experts,
        **_row_kwargs(x_TD.shape[1]),
    )
    return out_TD, dense if fp8_out else dense[0], expert if fp8_experts else expert[0], router_TD


def layer_epilogue(
    x_TD: Tensor,
    dense_TD: Tensor,
    mixed: tuple[Tensor, Tensor],
    weights: tuple[Tensor, Tensor, Tensor, Tensor, Tensor],
    eps: float,
    *,
    fp8_out: bool = False,
) -> tuple[Tensor, OutputRows]:
    """Return the residual after a layer, and normalized for the next.

    `mixed`: the experts' outputs, [A, D], and the top-k weights. Weights: the norms after the dense
    MLP, after the experts and after their sum; the layer's scalar; the next layer's input norm.
    """
    out_AD, topk_weights_TK = mixed
    out_TD, following = torch.empty_like(x_TD), _empty_rows(x_TD, fp8_out=fp8_out)
    launch(_layer_epilogue, (len(x_TD),))(
        x_TD,
        dense_TD,
        out_AD,
        topk_weights_TK,
        *weights,
        out_TD,
        *following,
        eps,
        K=topk_weights_TK.shape[1],
        SPLITS=_num_splits(dense_TD),
        FP8_OUT=fp8_out,
        maxnreg=REGISTERS,
        **_row_kwargs(x_TD.shape[1]),
    )
    return out_TD, following if fp8_out else following[0]


def gelu_and_mul(gate_up_TX: Tensor, *, fp8_out: bool = False) -> OutputRows:
    """gelu(gate) * up of rows that hold the gate half first."""
    rows, inner = len(gate_up_TX), gate_up_TX.shape[1] // 2
    block = triton.next_power_of_2(inner) if fp8_out else 1024
    out = _empty_rows(gate_up_TX[:, :inner], fp8_out=fp8_out)
    launch(_gelu_and_mul, (rows, triton.cdiv(inner, block)))(
        gate_up_TX,
        *out,
        I=inner,
        FP8_OUT=fp8_out,
        BLOCK=block,
        num_warps=4 if block <= 1024 else row_warps(block),
        **pdl_kwargs(),
    )
    return out if fp8_out else out[0]


def _row_kwargs(width: int) -> dict[str, Any]:
    """Launch arguments of a kernel with a program for each row."""
    block = triton.next_power_of_2(width)
    return {"D": width, "BLOCK": block, "num_warps": row_warps(block), **pdl_kwargs()}


def _empty_rows(like_TD: Tensor, *, fp8_out: bool) -> tuple[Tensor, Tensor]:
    """Allocate rows and, for fp8, their scales; otherwise the second is an unused argument."""
    if not fp8_out:
        rows_TD = like_TD.new_empty(like_TD.shape)
        return rows_TD, rows_TD
    values_TD = like_TD.new_empty(like_TD.shape, dtype=torch.float8_e4m3fn)
    return values_TD, like_TD.new_empty(len(like_TD), dtype=torch.float32)


def _num_splits(sums: Tensor) -> int:
    return len(sums) if sums.dim() == 3 else 1


@triton.jit
def _store_row(rows, scales, row, at, x, is_in, FP8_OUT: tl.constexpr):
    """Store a whole row, in e4m3 with a scale if FP8_OUT; x is zero outside of it."""
    if FP8_OUT:
        scale = fp8_scale(x)
        tl.store(scales + row, scale)
        x = x / scale
    tl.store(rows + at, x.to(rows.dtype.element_ty), mask=is_in)


@triton.jit
def _add_splits(sums, at, is_in, D: tl.constexpr, SPLITS: tl.constexpr):
    """Add the splits of a GEMM's row in their order; the grid has a program for each row."""
    total = tl.load(sums + at, mask=is_in, other=0.0).to(tl.float32)
    for _ in tl.static_range(1, SPLITS):
        at += tl.num_programs(0) * D
        total += tl.load(sums + at, mask=is_in, other=0.0).to(tl.float32)
    return total


@triton.jit
def _norm(
    x_TD,
    weight_D,
    out_TD,
    eps,
    D: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    gdc_wait(PDL)
    d = tl.arange(0, BLOCK)
    at = tl.program_id(0).to(tl.int64) * D + d
    x = tl.load(x_TD + at, mask=d < D, other=0.0).to(tl.float32)
    x = x * inverse_rms(x, D, eps)
    if HAS_WEIGHT:
        x = x * tl.load(weight_D + d, mask=d < D, other=0.0).to(tl.float32)
    tl.store(out_TD + at, x.to(out_TD.dtype.element_ty), mask=d < D)


@triton.jit
def _quantize(
    x_TD,
    out_TD,
    scale_T,
    rows,
    D: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    gdc_wait(PDL)
    d = tl.arange(0, BLOCK)
    if ROWS == 1:
        row = tl.program_id(0).to(tl.int64)
        x = tl.load(x_TD + row * D + d, mask=d < D, other=0.0).to(tl.float32)
        _store_row(out_TD, scale_T, row, row * D + d, x, d < D, True)
    else:
        row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
        at = row[:, None] * D + d[None, :]
        is_in = (row < rows)[:, None] & (d < D)[None, :]
        x = tl.load(x_TD + at, mask=is_in, other=0.0).to(tl.float32)
        scale = tl.maximum(tl.max(tl.abs(x), 1), FP8_MIN_AMAX) / FP8_MAX
        tl.store(scale_T + row, scale, mask=row < rows)
        tl.store(out_TD + at, (x / scale[:, None]).to(out_TD.dtype.element_ty), mask=is_in)


@triton.jit
def _residual_add_norm(
    x_TD,
    attended_TD,
    post_D,
    dense_D,
    expert_D,
    router_D,
    out_TD,
    dense_TD,
    dense_T,
    expert_TD,
    expert_T,
    router_TD,
    eps,
    D: tl.constexpr,
    SPLITS: tl.constexpr,
    FP8_OUT: tl.constexpr,
    FP8_EXPERTS: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    gdc_wait(PDL)
    row = tl.program_id(0).to(tl.int64)
    d = tl.arange(0, BLOCK)
    is_in = d < D
    at = row * D + d
    dtype: tl.constexpr = out_TD.dtype.element_ty
    # Weights are loaded where they are used, and nothing before the wait: loaded early, with the
    # registers that takes, this kernel is faster alone and a step slower (LOG.md).
    attended = _add_splits(attended_TD, at, is_in, D, SPLITS)
    post = tl.load(post_D + d, mask=is_in, other=0.0).to(tl.float32)
    x = tl.load(x_TD + at, mask=is_in, other=0.0).to(tl.float32)
    x = (x + attended * inverse_rms(attended, D, eps) * post).to(dtype)
    tl.store(out_TD + at, x, mask=is_in)
    x = x.to(tl.float32)
    x = x * inverse_rms(x, D, eps)
    dense = x * tl.load(dense_D + d, mask=is_in, other=0.0).to(tl.float32)
    _store_row(dense_TD, dense_T, row, at, dense, is_in, FP8_OUT)
    expert = x * tl.load(expert_D + d, mask=is_in, other=0.0).to(tl.float32)
    _store_row(expert_TD, expert_T, row, at, expert, is_in, FP8_EXPERTS)
    router = x * tl.load(router_D + d, mask=is_in, other=0.0).to(tl.float32) * D**-0.5
    tl.store(router_TD + at, router.to(dtype), mask=is_in)


@triton.jit
def _layer_epilogue(
    x_TD,
    dense_TD,
    out_AD,
    topk_weights_TK,
    dense_D,
    expert_D,
    both_D,
    scalar,
    next_D,
    out_TD,
    next_TD,
    scale_T,
    eps,
    D: tl.constexpr,
    K: tl.constexpr,
    SPLITS: tl.constexpr,
    FP8_OUT: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    d = tl.arange(0, BLOCK)
    is_in = d < D
    at = row * D + d
    dtype: tl.constexpr = out_TD.dtype.element_ty
    # Loaded before the wait: below, each load would wait for the memory in turn.
    expert_weight = tl.load(expert_D + d, mask=is_in, other=0.0)
    dense_weight = tl.load(dense_D + d, mask=is_in, other=0.0)
    both_weight = tl.load(both_D + d, mask=is_in, other=0.0)
    next_weight = tl.load(next_D + d, mask=is_in, other=0.0)
    layer_scalar = tl.load(scalar)
    gdc_wait(PDL)
    dense = _add_splits(dense_TD, at, is_in, D, SPLITS)
    residual = tl.load(x_TD + at, mask=is_in, other=0.0)
    mixed = tl.zeros((BLOCK,), dtype=tl.float32)
    for k in tl.static_range(K):
        y = tl.load(out_AD + (row * K + k) * D + d, mask=is_in, other=0.0)
        mixed += tl.load(topk_weights_TK + row * K + k) * y.to(tl.float32)
    mixed = mixed * inverse_rms(mixed, D, eps) * expert_weight.to(tl.float32)
    dense = dense * inverse_rms(dense, D, eps)
    both = mixed + dense * dense_weight.to(tl.float32)
    both = both * inverse_rms(both, D, eps) * both_weight.to(tl.float32)
    x = ((residual.to(tl.float32) + both) * layer_scalar.to(tl.float32)).to(dtype)
    tl.store(out_TD + at, x, mask=is_in)
    x = x.to(tl.float32)
    x = x * inverse_rms(x, D, eps) * next_weight.to(tl.float32)
    _store_row(next_TD, scale_T, row, at, x, is_in, FP8_OUT)


@triton.jit
def _gelu_and_mul(
    gate_up_TX,
    out_TI,
    scale_T,
    I: tl.constexpr,  # noqa: E741
    FP8_OUT: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    gdc_wait(PDL)
    row = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    gate = tl.load(gate_up_TX + row * 2 * I + i, mask=i < I, other=0.0).to(tl.float32)
    up = tl.load(gate_up_TX + row * 2 * I + I + i, mask=i < I, other=0.0).to(tl.float32)
    _store_row(out_TI, scale_T, row, row * I + i, gelu_mul(gate, up), i < I, FP8_OUT)
