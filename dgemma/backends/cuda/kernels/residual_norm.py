"""Fused elementwise kernels between the GEMMs of a layer: residual, norms, expert mixing.

Statistics are float32, and a value is rounded to the stream's type where it leaves a kernel, or
where it joins the stream. A product that was cut in parts comes so, [S, T, D], and is added up
here. What an 8-bit product reads next is written in 8 bits, since the kernel has whole rows at
hand: `fp8_out` asks for it, and gives numbers and a factor for each row instead.

T tokens, D width, S parts, A choices of experts, K of a token.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from dgemma.backends.cuda.kernels.helpers import activate, factor_8, inverse_rms
from dgemma.backends.cuda.kernels.pdl import REGISTERS, gdc_wait, pdl_kwargs

Rows = Tensor | tuple[Tensor, Tensor]  # as they are, or in 8 bits with their factors


def norm(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """Root-mean-square norm of the last dimension."""
    width, out = x.shape[-1], torch.empty_like(x)
    block = triton.next_power_of_2(width)
    _norm[(x.numel() // width,)](
        x,
        weight if weight is not None else x,
        out,
        eps,
        D=width,
        HAS_WEIGHT=weight is not None,
        BLOCK=block,
        num_warps=_warps(block),
        **pdl_kwargs(),
    )
    return out


def residual_add_norm(
    x_TD: Tensor,
    attended_TD: Tensor,
    weights: tuple[Tensor, Tensor, Tensor, Tensor],
    eps: float,
    *,
    fp8_out: bool = False,
    fp8_experts: bool = False,
) -> tuple[Tensor, Rows, Rows, Tensor]:
    """The stream behind attention, and what the dense part, the experts and the router read of it.

    Weights: of the norm behind attention, of those before the dense part and the experts, and the
    router's scale. `fp8_out`: what the dense part reads is in 8 bits; `fp8_experts`: the experts.
    """
    out_TD, router_TD = torch.empty_like(x_TD), torch.empty_like(x_TD)
    dense_TD, dense_T = _rows(x_TD, fp8_out)
    expert_TD, expert_T = _rows(x_TD, fp8_experts)
    block = triton.next_power_of_2(x_TD.shape[1])
    _residual_add_norm[(len(x_TD),)](
        x_TD,
        attended_TD,
        *weights,
        out_TD,
        dense_TD,
        dense_T,
        expert_TD,
        expert_T,
        router_TD,
        eps,
        D=x_TD.shape[1],
        PARTS=_parts(attended_TD),
        FP8_OUT=fp8_out,
        FP8_EXPERTS=fp8_experts,
        BLOCK=block,
        num_warps=_warps(block),
        **pdl_kwargs(),
    )
    dense = (dense_TD, dense_T) if fp8_out else dense_TD
    return out_TD, dense, (expert_TD, expert_T) if fp8_experts else expert_TD, router_TD


def layer_epilogue(
    x_TD: Tensor,
    dense_TD: Tensor,
    mixed: tuple[Tensor, Tensor],
    weights: tuple[Tensor, Tensor, Tensor, Tensor, Tensor],
    eps: float,
    *,
    fp8_out: bool = False,
) -> tuple[Tensor, Rows]:
    """The stream behind a layer, and normed for what comes next.

    `mixed`: what each choice gave, [A, D], and their shares. Weights: of the norms behind the dense
    part, behind the experts and behind both; the layer's scalar; of the next norm.
    """
    out_AD, share_TK = mixed
    out_TD = torch.empty_like(x_TD)
    next_TD, factor_T = _rows(x_TD, fp8_out)
    block = triton.next_power_of_2(x_TD.shape[1])
    _layer_epilogue[(len(x_TD),)](
        x_TD,
        dense_TD,
        out_AD,
        share_TK,
        *weights,
        out_TD,
        next_TD,
        factor_T,
        eps,
        D=x_TD.shape[1],
        K=share_TK.shape[1],
        PARTS=_parts(dense_TD),
        FP8_OUT=fp8_out,
        BLOCK=block,
        num_warps=_warps(block),
        maxnreg=REGISTERS,
        **pdl_kwargs(),
    )
    return out_TD, (next_TD, factor_T) if fp8_out else next_TD


def gelu_and_mul(gate_up_TX: Tensor, *, fp8_out: bool = False) -> Rows:
    """gelu(gate) * up of rows that hold the gate half first."""
    rows, double = gate_up_TX.shape
    inner = double // 2
    block = triton.next_power_of_2(inner) if fp8_out else 1024
    out_TI, factor_T = _rows(gate_up_TX.new_empty(rows, 0), fp8_out, inner)
    _gelu_and_mul[(rows, triton.cdiv(inner, block))](
        gate_up_TX,
        out_TI,
        factor_T,
        I=inner,
        FP8_OUT=fp8_out,
        BLOCK=block,
        num_warps=4 if block <= 1024 else _warps(block),
        **pdl_kwargs(),
    )
    return (out_TI, factor_T) if fp8_out else out_TI


def _rows(like_TD: Tensor, fp8_out: bool, width: int | None = None) -> tuple[Tensor, Tensor]:
    """Memory for rows, and for their factors; without any, the rows stand in for these."""
    shape = (len(like_TD), like_TD.shape[1] if width is None else width)
    if not fp8_out:
        rows_TD = like_TD.new_empty(shape)
        return rows_TD, rows_TD
    factor_T = like_TD.new_empty(len(like_TD), dtype=torch.float32)
    return like_TD.new_empty(shape, dtype=torch.float8_e4m3fn), factor_T


def _parts(found: Tensor) -> int:
    return len(found) if found.dim() == 3 else 1


def _warps(block: int) -> int:
    return max(1, min(8, block // 512))


@triton.jit
def _store(rows, factors, row, at, x, is_in, FP8_OUT: tl.constexpr):
    """A whole row, as it is or in 8 bits (e4m3) with a factor; x is zero outside of it."""
    if FP8_OUT:
        factor = factor_8(x)
        tl.store(factors + row, factor)
        x = x / factor
    tl.store(rows + at, x.to(rows.dtype.element_ty), mask=is_in)


@triton.jit
def _added(parts, at, is_in, D: tl.constexpr, PARTS: tl.constexpr):
    """A row of a product, its parts added up in their order; there is a program for each row."""
    total = tl.load(parts + at, mask=is_in, other=0.0).to(tl.float32)
    for _ in tl.static_range(1, PARTS):
        at += tl.num_programs(0) * D
        total += tl.load(parts + at, mask=is_in, other=0.0).to(tl.float32)
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
    PARTS: tl.constexpr,
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
    kind: tl.constexpr = out_TD.dtype.element_ty
    # Weights are read as they are wanted, and nothing before the wait: asked for ahead, with the
    # registers that takes, this kernel is faster alone and a step slower (LOG.md).
    attended = _added(attended_TD, at, is_in, D, PARTS)
    post = tl.load(post_D + d, mask=is_in, other=0.0).to(tl.float32)
    x = tl.load(x_TD + at, mask=is_in, other=0.0).to(tl.float32)
    x = (x + attended * inverse_rms(attended, D, eps) * post).to(kind)
    tl.store(out_TD + at, x, mask=is_in)
    x = x.to(tl.float32)
    x = x * inverse_rms(x, D, eps)
    dense = x * tl.load(dense_D + d, mask=is_in, other=0.0).to(tl.float32)
    _store(dense_TD, dense_T, row, at, dense, is_in, FP8_OUT)
    expert = x * tl.load(expert_D + d, mask=is_in, other=0.0).to(tl.float32)
    _store(expert_TD, expert_T, row, at, expert, is_in, FP8_EXPERTS)
    router = x * tl.load(router_D + d, mask=is_in, other=0.0).to(tl.float32) * D**-0.5
    tl.store(router_TD + at, router.to(kind), mask=is_in)


@triton.jit
def _layer_epilogue(
    x_TD,
    dense_TD,
    out_AD,
    share_TK,
    dense_D,
    expert_D,
    both_D,
    scalar,
    next_D,
    out_TD,
    next_TD,
    factor_T,
    eps,
    D: tl.constexpr,
    K: tl.constexpr,
    PARTS: tl.constexpr,
    FP8_OUT: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    d = tl.arange(0, BLOCK)
    is_in = d < D
    at = row * D + d
    kind: tl.constexpr = out_TD.dtype.element_ty
    # Read one after the other below, each would have to come from memory all the way.
    of_expert = tl.load(expert_D + d, mask=is_in, other=0.0)
    of_dense = tl.load(dense_D + d, mask=is_in, other=0.0)
    of_both = tl.load(both_D + d, mask=is_in, other=0.0)
    of_next = tl.load(next_D + d, mask=is_in, other=0.0)
    by = tl.load(scalar)
    gdc_wait(PDL)
    dense = _added(dense_TD, at, is_in, D, PARTS)
    before = tl.load(x_TD + at, mask=is_in, other=0.0)
    mixed = tl.zeros((BLOCK,), dtype=tl.float32)
    for k in tl.static_range(K):
        y = tl.load(out_AD + (row * K + k) * D + d, mask=is_in, other=0.0)
        mixed += tl.load(share_TK + row * K + k) * y.to(tl.float32)
    mixed = mixed * inverse_rms(mixed, D, eps) * of_expert.to(tl.float32)
    dense = dense * inverse_rms(dense, D, eps)
    both = mixed + dense * of_dense.to(tl.float32)
    both = both * inverse_rms(both, D, eps) * of_both.to(tl.float32)
    x = ((before.to(tl.float32) + both) * by.to(tl.float32)).to(kind)
    tl.store(out_TD + at, x, mask=is_in)
    x = x.to(tl.float32)
    x = x * inverse_rms(x, D, eps) * of_next.to(tl.float32)
    _store(next_TD, factor_T, row, at, x, is_in, FP8_OUT)


@triton.jit
def _gelu_and_mul(
    gate_up_TX,
    out_TI,
    factor_T,
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
    _store(out_TI, factor_T, row, row * I + i, activate(gate, up), i < I, FP8_OUT)
