"""The mixture of experts with 4-bit weights and 16-bit activations, expert by expert.

As in `experts.py`, a weight is read once for all rows of its expert; here it is also unpacked once,
in registers, on its way to the matrix unit. That takes the place of the weights' bytes as what the
time goes into, so it is done in few instructions: see `ops/nvfp4_order.py` for the order of bits.
The matrix unit takes weights on the left (its tall side), from registers. Those of gate and up lie
in one tile, and several steps of the depth in one turn of the loop: the matrix unit then works on
one step while the next is unpacked, where it would else be waited for after every instruction.

T tokens, K experts per token, A choices, E experts, D width, I expert width.
"""

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from dgemma.backends.cuda.configs import MoeConfig, moe_config
from dgemma.backends.cuda.kernels import moe_decode
from dgemma.backends.cuda.kernels.helpers import activate
from dgemma.backends.cuda.kernels.moe_sort import Buckets, buckets, most_shares, share
from dgemma.backends.cuda.kernels.nvfp4_unpack import (
    in_order,
    is_compiled,
    load_scales,
    load_words,
    unpack,
)
from dgemma.backends.cuda.kernels.pdl import gdc_wait, pdl_kwargs
from dgemma.quant.nvfp4_tiles import Laid


def expert_outputs_nvfp4(
    x_TD: Tensor, ids_TK: Tensor, gate_up: Laid, down: Laid, into: Buckets | None = None
) -> Tensor:
    """Compute the output of each (token, expert) assignment, [A, D], not yet weighted."""
    if len(x_TD) <= moe_decode.FEW:
        return moe_decode.expert_outputs_nvfp4(x_TD, ids_TK, gate_up, down)
    num_experts = len(gate_up.words_EW)
    chosen = moe_config(ids_TK.numel(), num_experts, 4)
    into = into or buckets(ids_TK, num_experts)
    hidden_AI = gate_up_4(x_TD.contiguous(), gate_up, into, ids_TK.shape[1], chosen.gate_up)
    return down_4(hidden_AI, down, into, chosen.down)


def gate_up_4(
    x_TD: Tensor, weight: Laid, into: Buckets, top_k: int, tile: MoeConfig, *, fast: bool = True
) -> Tensor:
    """gelu(gate) * up of every choice, [A, I]; gate rows come first."""
    inner = weight.outputs // 2
    hidden_AI = x_TD.new_empty(len(x_TD) * top_k, inner)
    _gate_up_4[(most_shares(into, len(hidden_AI), tile) * triton.cdiv(inner, tile.columns),)](
        x_TD,
        weight.words_EW,
        weight.scales_EW,
        weight.factor_EH,
        hidden_AI,
        into.choice_ES,
        into.count_E,
        into.choice_ES.shape[1],
        TOP=top_k,
        E=len(weight.words_EW),
        P=triton.next_power_of_2(len(weight.words_EW)),
        D=weight.inputs,
        I=inner,
        **_options(tile, fast=fast),
    )
    return hidden_AI


def down_4(
    hidden_AI: Tensor, weight: Laid, into: Buckets, tile: MoeConfig, *, fast: bool = True
) -> Tensor:
    """Every choice's output, [A, D], not yet weighted."""
    out_AD = hidden_AI.new_empty(len(hidden_AI), weight.outputs)
    shares = most_shares(into, len(hidden_AI), tile)
    _down_4[(shares * triton.cdiv(weight.outputs, tile.columns),)](
        hidden_AI,
        weight.words_EW,
        weight.scales_EW,
        weight.factor_EH,
        out_AD,
        into.choice_ES,
        into.count_E,
        into.choice_ES.shape[1],
        E=len(weight.words_EW),
        P=triton.next_power_of_2(len(weight.words_EW)),
        D=weight.outputs,
        I=weight.inputs,
        **_options(tile, fast=fast),
    )
    return out_AD


def _options(tile: MoeConfig, *, fast: bool) -> dict[str, Any]:
    return {
        **pdl_kwargs(),
        "FAST": fast and is_compiled(),
        "WHOLE": tile.whole,
        "BM": tile.rows,
        "BN": tile.columns,
        "BK": tile.depth,
        "UNROLL": tile.unroll,
        "num_warps": tile.warps,
        "num_stages": tile.stages,
        "maxnreg": tile.registers,
    }


@triton.jit
def _rows_4(
    x,
    row,
    is_row,
    block,
    K: tl.constexpr,
    BLOCKS: tl.constexpr,
    WHOLE: tl.constexpr,
    DIVIDES: tl.constexpr,
):
    """The columns of rows that meet the four places of words; whole, the first has all of them."""
    if WHOLE:
        k = block * 64 + tl.arange(0, 64 * BLOCKS)
    else:
        c = tl.arange(0, 16 * BLOCKS)
        k = block * 64 + c // 16 * 64 + c % 16
    at = x + row.to(tl.int64)[:, None] * K + k[None, :]
    if DIVIDES:
        here = is_row[:, None]
    else:
        here = is_row[:, None] & (k < K)[None, :]
    first = tl.load(at, mask=here, other=0.0)
    second = first
    third = first
    fourth = first
    if not WHOLE:
        second = tl.load(at + 16, mask=here, other=0.0)
        third = tl.load(at + 32, mask=here, other=0.0)
        fourth = tl.load(at + 48, mask=here, other=0.0)
    return first, second, third, fourth


@triton.jit
def _dot_4(tile, part, total, N: tl.constexpr, BLOCKS: tl.constexpr, WHOLE: tl.constexpr):
    """[BN, BK] in four moe_config times rows in four parts; whole, in one product."""
    if WHOLE:
        total = tl.dot(in_order(tile, N, BLOCKS), tl.trans(part[0]), total)
    else:
        total = tl.dot(tile[0], tl.trans(part[0]), total)
        total = tl.dot(tile[1], tl.trans(part[1]), total)
        total = tl.dot(tile[2], tl.trans(part[2]), total)
        total = tl.dot(tile[3], tl.trans(part[3]), total)
    return total


@triton.jit
def _gate_up_4(
    x,
    words,
    scales,
    factor_E2,
    out,
    choice_ES,
    count_E,
    capacity,
    TOP: tl.constexpr,
    E: tl.constexpr,
    P: tl.constexpr,
    D: tl.constexpr,
    I: tl.constexpr,  # noqa: E741
    FAST: tl.constexpr,
    WHOLE: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    UNROLL: tl.constexpr,
    PDL: tl.constexpr,
):
    gdc_wait(PDL)
    moe_config: tl.constexpr = (I + BN - 1) // BN
    blocks: tl.constexpr = BK // 64
    turns: tl.constexpr = (D // 64 + blocks * UNROLL - 1) // (blocks * UNROLL) * UNROLL
    whole: tl.constexpr = turns * blocks * 64 == D
    expert, begin, count = share(count_E, tl.program_id(0) // moe_config, E, P, BM)
    n = (tl.program_id(0) % moe_config) * BN + tl.arange(0, BN)
    # Gate and up of the same outputs, one behind the other in one tile. What lies behind the last
    # output of gate is of up: it is not stored.
    r = tl.arange(0, 2 * BN)
    both = (tl.program_id(0) % moe_config) * BN + r % BN + r // BN * I
    divides: tl.constexpr = I % BN == 0 and whole
    words += expert.to(tl.int64) * (2 * I * D // 4)
    scales += expert.to(tl.int64) * (2 * I * D // 64)
    if begin < count:
        m = begin + tl.arange(0, BM)
        is_row = m < count
        choice = tl.load(choice_ES + expert * capacity + m, mask=is_row, other=0)
        total = tl.zeros((2 * BN, BM), dtype=tl.float32)
        for turn in tl.range(0, turns, loop_unroll_factor=UNROLL):
            block = turn * blocks
            found = load_words(words, both, block, 2 * I, D, blocks, divides)
            scale = load_scales(scales, both, block, 2 * I, D, blocks, divides)
            part = _rows_4(x, choice // TOP, is_row, block, D, blocks, WHOLE, whole)
            tile = unpack(found, scale, 2 * BN, blocks, x.dtype.element_ty, FAST)
            total = _dot_4(tile, part, total, 2 * BN, blocks, WHOLE)
        gates, ups = tl.split(tl.permute(tl.reshape(total, (2, BN, BM)), (1, 2, 0)))
        gates *= tl.load(factor_E2 + 2 * expert)
        ups *= tl.load(factor_E2 + 2 * expert + 1)
        hidden = activate(gates, ups).to(out.dtype.element_ty)
        at = choice.to(tl.int64)[:, None] * I + n[None, :]
        tl.store(out + at, tl.trans(hidden), mask=is_row[:, None] & (n < I)[None, :])


@triton.jit
def _down_4(
    hidden,
    words,
    scales,
    factor_E,
    out,
    choice_ES,
    count_E,
    capacity,
    E: tl.constexpr,
    P: tl.constexpr,
    D: tl.constexpr,
    I: tl.constexpr,  # noqa: E741
    FAST: tl.constexpr,
    WHOLE: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    UNROLL: tl.constexpr,
    PDL: tl.constexpr,
):
    gdc_wait(PDL)
    moe_config: tl.constexpr = (D + BN - 1) // BN
    blocks: tl.constexpr = BK // 64
    turns: tl.constexpr = (I // 64 + blocks * UNROLL - 1) // (blocks * UNROLL) * UNROLL
    whole: tl.constexpr = turns * blocks * 64 == I
    divides: tl.constexpr = D % BN == 0 and whole
    expert, begin, count = share(count_E, tl.program_id(0) // moe_config, E, P, BM)
    n = (tl.program_id(0) % moe_config) * BN + tl.arange(0, BN)
    words += expert.to(tl.int64) * (D * I // 4)
    scales += expert.to(tl.int64) * (D * I // 64)
    if begin < count:
        m = begin + tl.arange(0, BM)
        is_row = m < count
        choice = tl.load(choice_ES + expert * capacity + m, mask=is_row, other=0)
        total = tl.zeros((BN, BM), dtype=tl.float32)
        for turn in tl.range(0, turns, loop_unroll_factor=UNROLL):
            block = turn * blocks
            found = load_words(words, n, block, D, I, blocks, divides)
            scale = load_scales(scales, n, block, D, I, blocks, divides)
            part = _rows_4(hidden, choice, is_row, block, I, blocks, WHOLE, whole)
            tile = unpack(found, scale, BN, blocks, hidden.dtype.element_ty, FAST)
            total = _dot_4(tile, part, total, BN, blocks, WHOLE)
        total *= tl.load(factor_E + expert)
        at = choice.to(tl.int64)[:, None] * D + n[None, :]
        done = tl.trans(total.to(out.dtype.element_ty))
        tl.store(out + at, done, mask=is_row[:, None] & (n < D)[None, :])
