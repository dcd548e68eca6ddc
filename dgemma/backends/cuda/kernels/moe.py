"""The mixture of experts, expert by expert: each weight tile is read once, for all of its tokens.

A canvas of 256 tokens reaches all 128 experts of the released model, 16 rows each, so a step reads
every expert weight and does little with it: the time is that of the reading. A program takes one
tile of one expert's columns and a share of that expert's rows (`buckets.py`).

T tokens, K experts per token, A = T * K choices (number t * K + k), E experts, D width, I expert
width.
"""

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from dgemma.backends.cuda.configs import MoeConfig, moe_config
from dgemma.backends.cuda.kernels import moe_decode
from dgemma.backends.cuda.kernels.helpers import activate, factor_8
from dgemma.backends.cuda.kernels.moe_sort import Buckets, buckets, most_shares, share
from dgemma.backends.cuda.kernels.pdl import gdc_wait, pdl_kwargs


@dataclass(frozen=True, slots=True)
class Scales:
    """Scales of an fp8 GEMM: one for each row and each output."""

    rows: Tensor  # of tokens, or of choices
    columns_EO: Tensor
    dtype: torch.dtype  # of the result


def gate_up(
    x_TD: Tensor,
    weight_EID: Tensor,
    into: Buckets,
    top_k: int,
    tile: MoeConfig,
    scales: Scales | None = None,
) -> Tensor:
    """gelu(gate) * up of every choice, [A, I]; gate rows come first in a weight."""
    num_experts, double, width = weight_EID.shape
    inner = double // 2
    dtype = x_TD.dtype if scales is None else scales.dtype
    hidden_AI = x_TD.new_empty(len(x_TD) * top_k, inner, dtype=dtype)
    _gate_up[(most_shares(into, len(hidden_AI), tile) * triton.cdiv(inner, tile.columns),)](
        x_TD,
        _weights(weight_EID, tile),
        hidden_AI,
        hidden_AI if scales is None else scales.rows,
        hidden_AI if scales is None else scales.columns_EO,
        into.choice_ES,
        into.count_E,
        into.choice_ES.shape[1],
        TOP=top_k,
        E=num_experts,
        P=triton.next_power_of_2(num_experts),
        D=width,
        I=inner,
        **_options(tile, fp8_out=scales is not None),
    )
    return hidden_AI


def down(
    hidden_AI: Tensor,
    weight_EDI: Tensor,
    into: Buckets,
    tile: MoeConfig,
    scales: Scales | None = None,
) -> Tensor:
    """Every choice's output, [A, D], not yet weighted."""
    num_experts, width, inner = weight_EDI.shape
    dtype = hidden_AI.dtype if scales is None else scales.dtype
    out_AD = hidden_AI.new_empty(len(hidden_AI), width, dtype=dtype)
    _down[(most_shares(into, len(hidden_AI), tile) * triton.cdiv(width, tile.columns),)](
        hidden_AI,
        _weights(weight_EDI, tile),
        out_AD,
        out_AD if scales is None else scales.rows,
        out_AD if scales is None else scales.columns_EO,
        into.choice_ES,
        into.count_E,
        into.choice_ES.shape[1],
        E=num_experts,
        P=triton.next_power_of_2(num_experts),
        D=width,
        I=inner,
        **_options(tile, fp8_out=scales is not None),
    )
    return out_AD


def expert_outputs(
    x_TD: Tensor,
    ids_TK: Tensor,
    gate_up_EID: Tensor,
    down_EDI: Tensor,
    into: Buckets | None = None,
) -> Tensor:
    """Compute the output of each (token, expert) assignment, [A, D], not yet weighted."""
    if len(x_TD) <= moe_decode.FEW:
        return moe_decode.expert_outputs(x_TD, ids_TK, gate_up_EID, down_EDI)
    chosen = moe_config(ids_TK.numel(), len(gate_up_EID))
    into = into or buckets(ids_TK, len(gate_up_EID))
    hidden_AI = gate_up(x_TD.contiguous(), gate_up_EID, into, ids_TK.shape[1], chosen.gate_up)
    return down(hidden_AI, down_EDI, into, chosen.down)


def expert_outputs_fp8(
    x: tuple[Tensor, Tensor],
    ids_TK: Tensor,
    gate_up_8: tuple[Tensor, Tensor],
    down_8: tuple[Tensor, Tensor],
    dtype: torch.dtype,
    into: Buckets | None = None,
) -> Tensor:
    """`choices` with 8-bit weights and activations, each with its factors."""
    chosen = moe_config(ids_TK.numel(), len(gate_up_8[0]), 8)
    into = into or buckets(ids_TK, len(gate_up_8[0]))
    scales = Scales(x[1], gate_up_8[1], dtype)
    hidden_AI = gate_up(x[0], gate_up_8[0], into, ids_TK.shape[1], chosen.gate_up, scales)
    hidden_8, factor_A = quantize(hidden_AI)
    return down(hidden_8, down_8[0], into, chosen.down, Scales(factor_A, down_8[1], dtype))


def quantize(x_TD: Tensor) -> tuple[Tensor, Tensor]:
    """Each row in 8 bits (e4m3), and its factor."""
    rows, width = x_TD.shape
    out_TD = torch.empty(x_TD.shape, dtype=torch.float8_e4m3fn, device=x_TD.device)
    factor_T = torch.empty(rows, dtype=torch.float32, device=x_TD.device)
    block = triton.next_power_of_2(width)
    _quantize[(rows,)](x_TD, out_TD, factor_T, D=width, BLOCK=block, num_warps=4, **pdl_kwargs())
    return out_TD, factor_T


def _weights(weight_EON: Tensor, tile: MoeConfig) -> Tensor | TensorDescriptor:
    """A tile may reach past its expert's columns: what it computes there is not stored."""
    if not tile.tma:
        return weight_EON
    return TensorDescriptor.from_tensor(weight_EON.flatten(0, 1), [tile.columns, tile.depth])


def _options(tile: MoeConfig, *, fp8_out: bool) -> dict[str, Any]:
    # To come early was timed with 8 bits; 16-bit experts stay as their moe_config were found.
    return {
        **(pdl_kwargs() if fp8_out else {"PDL": False}),
        "HAS_SCALES": fp8_out,
        "BM": tile.rows,
        "BN": tile.columns,
        "BK": tile.depth,
        "SWAP": tile.swap,
        "TMA": tile.tma,
        "num_warps": tile.warps,
        "num_stages": tile.stages,
    }


@triton.jit
def _tile(
    weights, first, columns, offset, N, D, BN: tl.constexpr, BK: tl.constexpr, TMA: tl.constexpr
):
    """[BN, BK] of a matrix whose rows from `first` on are the N columns of the output."""
    if TMA:
        tile = weights.load([first + columns, offset])
    else:
        n = columns + tl.arange(0, BN)
        k = offset + tl.arange(0, BK)
        at = (first + n).to(tl.int64)[:, None] * D + k[None, :]
        if D % BK == 0:
            tile = tl.load(weights + at, mask=(n < N)[:, None], other=0.0)
        else:
            tile = tl.load(weights + at, mask=(n < N)[:, None] & (k < D)[None, :], other=0.0)
    return tile


@triton.jit
def _rows(x, row, is_row, offset, D, BK: tl.constexpr):
    k = offset + tl.arange(0, BK)
    at = row.to(tl.int64)[:, None] * D + k[None, :]
    if D % BK == 0:
        part = tl.load(x + at, mask=is_row[:, None], other=0.0)
    else:
        part = tl.load(x + at, mask=is_row[:, None] & (k < D)[None, :], other=0.0)
    return part


@triton.jit
def _gate_up(
    x,
    weights,
    out,
    row_scale,
    column_scale,
    choice_ES,
    count_E,
    capacity,
    HAS_SCALES: tl.constexpr,
    TOP: tl.constexpr,
    E: tl.constexpr,
    P: tl.constexpr,
    D: tl.constexpr,
    I: tl.constexpr,  # noqa: E741
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    SWAP: tl.constexpr,
    TMA: tl.constexpr,
    PDL: tl.constexpr,
):
    gdc_wait(PDL)
    moe_config: tl.constexpr = (I + BN - 1) // BN
    columns = (tl.program_id(0) % moe_config) * BN
    expert, begin, count = share(count_E, tl.program_id(0) // moe_config, E, P, BM)
    gate = expert * (2 * I)
    up = gate + I
    n = columns + tl.arange(0, BN)
    if begin < count:
        m = begin + tl.arange(0, BM)
        is_row = m < count
        choice = tl.load(choice_ES + expert * capacity + m, mask=is_row, other=0)
        row = choice // TOP
        if SWAP:
            gates = tl.zeros((BN, BM), dtype=tl.float32)
            ups = tl.zeros((BN, BM), dtype=tl.float32)
        else:
            gates = tl.zeros((BM, BN), dtype=tl.float32)
            ups = tl.zeros((BM, BN), dtype=tl.float32)
        for offset in range(0, D, BK):
            part = _rows(x, row, is_row, offset, D, BK)
            gate_tile = _tile(weights, gate, columns, offset, I, D, BN, BK, TMA)
            up_tile = _tile(weights, up, columns, offset, I, D, BN, BK, TMA)
            if SWAP:
                gates = tl.dot(gate_tile, tl.trans(part), gates)
                ups = tl.dot(up_tile, tl.trans(part), ups)
            else:
                gates = tl.dot(part, tl.trans(gate_tile), gates)
                ups = tl.dot(part, tl.trans(up_tile), ups)
        if SWAP:
            gates = tl.trans(gates)
            ups = tl.trans(ups)
        if HAS_SCALES:
            factor = tl.load(row_scale + row, mask=is_row, other=0.0)[:, None]
            gates *= factor * tl.load(column_scale + gate + n, mask=n < I, other=0.0)[None, :]
            ups *= factor * tl.load(column_scale + up + n, mask=n < I, other=0.0)[None, :]
        hidden = activate(gates, ups)
        at = choice.to(tl.int64)[:, None] * I + n[None, :]
        is_here = is_row[:, None] & (n < I)[None, :]
        tl.store(out + at, hidden.to(out.dtype.element_ty), mask=is_here)


@triton.jit
def _down(
    hidden,
    weights,
    out,
    row_scale,
    column_scale,
    choice_ES,
    count_E,
    capacity,
    HAS_SCALES: tl.constexpr,
    E: tl.constexpr,
    P: tl.constexpr,
    D: tl.constexpr,
    I: tl.constexpr,  # noqa: E741
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    SWAP: tl.constexpr,
    TMA: tl.constexpr,
    PDL: tl.constexpr,
):
    gdc_wait(PDL)
    moe_config: tl.constexpr = (D + BN - 1) // BN
    columns = (tl.program_id(0) % moe_config) * BN
    expert, begin, count = share(count_E, tl.program_id(0) // moe_config, E, P, BM)
    n = columns + tl.arange(0, BN)
    if begin < count:
        m = begin + tl.arange(0, BM)
        is_row = m < count
        choice = tl.load(choice_ES + expert * capacity + m, mask=is_row, other=0)
        if SWAP:
            total = tl.zeros((BN, BM), dtype=tl.float32)
        else:
            total = tl.zeros((BM, BN), dtype=tl.float32)
        for offset in range(0, I, BK):
            part = _rows(hidden, choice, is_row, offset, I, BK)
            tile = _tile(weights, expert * D, columns, offset, D, I, BN, BK, TMA)
            if SWAP:
                total = tl.dot(tile, tl.trans(part), total)
            else:
                total = tl.dot(part, tl.trans(tile), total)
        if SWAP:
            total = tl.trans(total)
        if HAS_SCALES:
            factor = tl.load(row_scale + choice, mask=is_row, other=0.0)[:, None]
            total *= factor * tl.load(column_scale + expert * D + n, mask=n < D, other=0.0)[None, :]
        at = choice.to(tl.int64)[:, None] * D + n[None, :]
        is_here = is_row[:, None] & (n < D)[None, :]
        tl.store(out + at, total.to(out.dtype.element_ty), mask=is_here)


@triton.jit
def _quantize(x_TD, out_TD, factor_T, D: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    gdc_wait(PDL)
    row = tl.program_id(0).to(tl.int64)
    d = tl.arange(0, BLOCK)
    x = tl.load(x_TD + row * D + d, mask=d < D, other=0.0).to(tl.float32)
    factor = factor_8(x)
    tl.store(factor_T + row, factor)
    tl.store(out_TD + row * D + d, (x / factor).to(tl.float8e4nv), mask=d < D)
