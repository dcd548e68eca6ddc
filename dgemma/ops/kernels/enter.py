"""How a canvas enters the stack, in memory that never moves.

The tokens' vectors, the norm before the self-conditioning, and the numbers of the step (its heat
and what decides its draws) are fetched by one kernel; behind the product another adds and norms.
Each value is rounded where the definition rounds it.

L canvas length, T rows of the pass, N steps, D width, V vocabulary.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from dgemma.ops.kernels.launch import after, early
from dgemma.ops.kernels.pieces import inverse_rms


@dataclass(frozen=True, slots=True)
class Table:
    """The tokens' vectors."""

    weight_VD: Tensor
    scale: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Numbers:
    """What is fetched for the step at hand, and where it goes."""

    index_1: Tensor  # steps taken
    heat_N: Tensor
    uniform_NL: Tensor
    heat_L: Tensor
    uniform_L: Tensor


def conditioned(
    tokens_L: Tensor, soft_LD: Tensor, table: Table, norm: tuple[Tensor, float], numbers: Numbers
) -> tuple[Tensor, Tensor]:
    """The canvas's vectors, and its soft embeddings normed; `norm`: its weight and epsilon."""
    vector_LD, normed_LD = torch.empty_like(soft_LD), torch.empty_like(soft_LD)
    weight_D, eps = norm
    _conditioned[(len(tokens_L),)](
        tokens_L,
        table.weight_VD,
        soft_LD,
        weight_D,
        vector_LD,
        normed_LD,
        numbers.index_1,
        numbers.heat_N,
        numbers.uniform_NL,
        numbers.heat_L,
        numbers.uniform_L,
        table.scale,
        eps,
        L=len(tokens_L),
        **_sizes(soft_LD.shape[1]),
    )
    return vector_LD, normed_LD


def unconditioned(
    block_L: Tensor, tokens_L: Tensor, table: Table, eps: float, numbers: Numbers
) -> Tensor:
    """A block's vectors, and behind them a fresh canvas's as they enter, [2 L, D]."""
    length, width = len(tokens_L), table.weight_VD.shape[1]
    out_TD = table.weight_VD.new_empty(2 * length, width)
    _unconditioned[(2 * length,)](
        block_L,
        tokens_L,
        table.weight_VD,
        out_TD,
        numbers.index_1,
        numbers.heat_N,
        numbers.uniform_NL,
        numbers.heat_L,
        numbers.uniform_L,
        table.scale,
        eps,
        L=length,
        **_sizes(width),
    )
    return out_TD


def add_and_norm(x_TD: Tensor, part_TD: Tensor, eps: float) -> Tensor:
    """Add what the self-conditioning gives, and norm the sum."""
    out_TD = torch.empty_like(x_TD)
    _add_and_norm[(len(x_TD),)](x_TD, part_TD, out_TD, eps, **_sizes(x_TD.shape[1]))
    return out_TD


def _sizes(width: int) -> dict[str, int | bool]:
    block = triton.next_power_of_2(width)
    return {"D": width, "BLOCK": block, "num_warps": max(1, min(8, block // 512)), **early()}


@triton.jit
def _conditioned(
    tokens_L,
    table_VD,
    soft_LD,
    weight_D,
    vector_LD,
    normed_LD,
    index_1,
    heat_N,
    uniform_NL,
    heat_L,
    uniform_L,
    scale,
    eps,
    L: tl.constexpr,
    D: tl.constexpr,
    BLOCK: tl.constexpr,
    EARLY: tl.constexpr,
):
    after(EARLY)
    row = tl.program_id(0)
    d = tl.arange(0, BLOCK)
    x = _vector(table_VD, tl.load(tokens_L + row), scale, d, D)
    tl.store(vector_LD + row * D + d, x, mask=d < D)
    soft = tl.load(soft_LD + row * D + d, mask=d < D, other=0.0).to(tl.float32)
    weight = tl.load(weight_D + d, mask=d < D, other=0.0).to(tl.float32)
    normed = soft * inverse_rms(soft, D, eps) * weight
    tl.store(normed_LD + row * D + d, normed.to(normed_LD.dtype.element_ty), mask=d < D)
    _fetch(index_1, heat_N, uniform_NL, heat_L, uniform_L, row, L)


@triton.jit
def _unconditioned(
    block_L,
    tokens_L,
    table_VD,
    out_TD,
    index_1,
    heat_N,
    uniform_NL,
    heat_L,
    uniform_L,
    scale,
    eps,
    L: tl.constexpr,
    D: tl.constexpr,
    BLOCK: tl.constexpr,
    EARLY: tl.constexpr,
):
    after(EARLY)
    row = tl.program_id(0)
    d = tl.arange(0, BLOCK)
    if row < L:
        block = _vector(table_VD, tl.load(block_L + row), scale, d, D)
        tl.store(out_TD + row * D + d, block, mask=d < D)
    else:
        x = _vector(table_VD, tl.load(tokens_L + row - L), scale, d, D).to(tl.float32)
        x = x * inverse_rms(x, D, eps)
        tl.store(out_TD + row * D + d, x.to(out_TD.dtype.element_ty), mask=d < D)
        _fetch(index_1, heat_N, uniform_NL, heat_L, uniform_L, row - L, L)


@triton.jit
def _vector(table_VD, token, scale, d, D: tl.constexpr):
    """A token's vector, zero outside of it."""
    x = tl.load(table_VD + token.to(tl.int64) * D + d, mask=d < D, other=0.0)
    return (x.to(tl.float32) * scale).to(table_VD.dtype.element_ty)


@triton.jit
def _fetch(index_1, heat_N, uniform_NL, heat_L, uniform_L, row, L: tl.constexpr):
    """The numbers of this step for one position; row 0 of the noise was the fresh canvas's."""
    index = tl.load(index_1)
    tl.store(heat_L + row, tl.load(heat_N + index))
    tl.store(uniform_L + row, tl.load(uniform_NL + (index + 1) * L + row))


@triton.jit
def _add_and_norm(
    x_TD,
    part_TD,
    out_TD,
    eps,
    D: tl.constexpr,
    BLOCK: tl.constexpr,
    EARLY: tl.constexpr,
):
    after(EARLY)
    d = tl.arange(0, BLOCK)
    at = tl.program_id(0) * D + d
    x = tl.load(x_TD + at, mask=d < D, other=0.0).to(tl.float32)
    x += tl.load(part_TD + at, mask=d < D, other=0.0).to(tl.float32)
    x = x.to(x_TD.dtype.element_ty).to(tl.float32)
    x = x * inverse_rms(x, D, eps)
    tl.store(out_TD + at, x.to(out_TD.dtype.element_ty), mask=d < D)
