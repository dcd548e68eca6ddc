"""The mixture of experts for a few tokens, choice by choice: streams of weights past a vector.

One token reaches 8 of 128 experts, each with one row: there is nothing to share, and a matrix unit
would be empty. A program takes a few outputs of one choice, looks up its expert itself, and adds up
products in float32. All of its weights are asked for before the first is used. Activations stay in
16 bits whatever the weights have: 16, 8 (a factor for each output) or 4 (`ops/nvfp4_order.py`).

T tokens, K experts per token, A = T * K choices, E experts, D width, I expert width.
"""

import triton
import triton.language as tl
from torch import Tensor

from dgemma.backends.cuda.configs import MOE_DECODE, MoeDecodeConfig
from dgemma.backends.cuda.kernels.helpers import activate
from dgemma.backends.cuda.kernels.nvfp4_unpack import is_compiled, load_scales, load_words, unpack
from dgemma.quant.nvfp4_tiles import Laid

FEW = 4  # tokens; with more, several share an expert


def expert_outputs(
    x_TD: Tensor,
    ids_TK: Tensor,
    gate_up_EID: Tensor,
    down_EDI: Tensor,
    factors: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """Compute each assignment's output, [A, D], unweighted; `factors`: scales of fp8 weights."""
    cuts = MOE_DECODE[min(16, 8 * gate_up_EID.element_size())]
    up, down_factor = (None, None) if factors is None else factors
    hidden_AI = gate_up(x_TD, ids_TK, gate_up_EID, cuts.gate_up, up)
    return down(hidden_AI, ids_TK, down_EDI, cuts.down, down_factor)


def expert_outputs_nvfp4(x_TD: Tensor, ids_TK: Tensor, gate_up: Laid, down: Laid) -> Tensor:
    """The same with 4-bit weights."""
    hidden_AI = gate_up_4(x_TD, ids_TK, gate_up, MOE_DECODE[4].gate_up)
    return down_4(hidden_AI, ids_TK, down, MOE_DECODE[4].down)


def gate_up(
    x_TD: Tensor,
    ids_TK: Tensor,
    weight_EID: Tensor,
    cut: MoeDecodeConfig,
    factor_EI: Tensor | None = None,
) -> Tensor:
    """gelu(gate) * up of every choice, [A, I]; gate rows come first in a weight."""
    inner, width = weight_EID.shape[1] // 2, weight_EID.shape[2]
    hidden_AI = x_TD.new_empty(ids_TK.numel(), inner)
    _gate_up[(ids_TK.numel(), triton.cdiv(inner, cut.columns))](
        x_TD.contiguous(),
        ids_TK.contiguous(),
        weight_EID,
        hidden_AI if factor_EI is None else factor_EI,
        hidden_AI,
        HAS_FACTOR=factor_EI is not None,
        TOP=ids_TK.shape[1],
        D=width,
        I=inner,
        **_options(cut),
    )
    return hidden_AI


def down(
    hidden_AI: Tensor,
    ids_TK: Tensor,
    weight_EDI: Tensor,
    cut: MoeDecodeConfig,
    factor_ED: Tensor | None = None,
) -> Tensor:
    """Every choice's output, [A, D], not yet weighted."""
    width, inner = weight_EDI.shape[1:]
    out_AD = hidden_AI.new_empty(len(hidden_AI), width)
    _down[(len(hidden_AI), triton.cdiv(width, cut.columns))](
        hidden_AI,
        ids_TK.contiguous(),
        weight_EDI,
        out_AD if factor_ED is None else factor_ED,
        out_AD,
        HAS_FACTOR=factor_ED is not None,
        D=width,
        I=inner,
        **_options(cut),
    )
    return out_AD


def gate_up_4(
    x_TD: Tensor, ids_TK: Tensor, weight: Laid, cut: MoeDecodeConfig, *, fast: bool = True
) -> Tensor:
    inner = weight.outputs // 2
    hidden_AI = x_TD.new_empty(ids_TK.numel(), inner)
    _gate_up_4[(ids_TK.numel(), triton.cdiv(inner, cut.columns))](
        x_TD.contiguous(),
        ids_TK.contiguous(),
        weight.words_EW,
        weight.scales_EW,
        weight.factor_EH,
        hidden_AI,
        TOP=ids_TK.shape[1],
        D=weight.inputs,
        I=inner,
        FAST=fast and is_compiled(),
        **_options(cut),
    )
    return hidden_AI


def down_4(
    hidden_AI: Tensor, ids_TK: Tensor, weight: Laid, cut: MoeDecodeConfig, *, fast: bool = True
) -> Tensor:
    out_AD = hidden_AI.new_empty(len(hidden_AI), weight.outputs)
    _down_4[(len(hidden_AI), triton.cdiv(weight.outputs, cut.columns))](
        hidden_AI,
        ids_TK.contiguous(),
        weight.words_EW,
        weight.scales_EW,
        weight.factor_EH,
        out_AD,
        D=weight.outputs,
        I=weight.inputs,
        FAST=fast and is_compiled(),
        **_options(cut),
    )
    return out_AD


def _options(cut: MoeDecodeConfig) -> dict[str, int | None]:
    own = {"BN": cut.columns, "BK": cut.depth}
    return {**own, "num_warps": cut.warps, "maxnreg": cut.registers}


@triton.jit
def _piece(weights, n, k, N: tl.constexpr, K: tl.constexpr, DIVIDES: tl.constexpr):
    at = weights + n[:, None] * K + k[None, :]
    if DIVIDES:
        found = tl.load(at)
    else:
        found = tl.load(at, mask=(n < N)[:, None] & (k < K)[None, :], other=0.0)
    return found.to(tl.float32)


@triton.jit
def _vector(x, n, k, K: tl.constexpr, DIVIDES: tl.constexpr):
    """Once for each output: then each thread has what its weights meet, and none waits for others.

    Nearly all of these loads are answered by the first cache.
    """
    at = x + n[:, None] * 0 + k[None, :]
    if DIVIDES:
        found = tl.load(at)
    else:
        found = tl.load(at, mask=(n >= 0)[:, None] & (k < K)[None, :], other=0.0)
    return found.to(tl.float32)


@triton.jit
def _gate_up(
    x,
    ids,
    weights,
    factor,
    out,
    HAS_FACTOR: tl.constexpr,
    TOP: tl.constexpr,
    D: tl.constexpr,
    I: tl.constexpr,  # noqa: E741
    BN: tl.constexpr,
    BK: tl.constexpr,
):
    divides: tl.constexpr = I % BN == 0 and D % BK == 0
    choice = tl.program_id(0)
    expert = tl.load(ids + choice).to(tl.int64)
    n = tl.program_id(1) * BN + tl.arange(0, BN)
    x += (choice // TOP) * D
    weights += expert * (2 * I * D)
    gate = tl.zeros((BN, BK), dtype=tl.float32)
    up = tl.zeros((BN, BK), dtype=tl.float32)
    for offset in tl.static_range(0, D, BK):
        k = offset + tl.arange(0, BK)
        here = _vector(x, n, k, D, divides)
        gate += _piece(weights, n, k, I, D, divides) * here
        up += _piece(weights + I * D, n, k, I, D, divides) * here
    gate = tl.sum(gate, 1)
    up = tl.sum(up, 1)
    if HAS_FACTOR:
        gate *= tl.load(factor + expert * 2 * I + n, mask=n < I, other=0.0)
        up *= tl.load(factor + expert * 2 * I + I + n, mask=n < I, other=0.0)
    hidden = activate(gate, up).to(out.dtype.element_ty)
    tl.store(out + choice * I + n, hidden, mask=n < I)


@triton.jit
def _down(
    hidden,
    ids,
    weights,
    factor,
    out,
    HAS_FACTOR: tl.constexpr,
    D: tl.constexpr,
    I: tl.constexpr,  # noqa: E741
    BN: tl.constexpr,
    BK: tl.constexpr,
):
    divides: tl.constexpr = D % BN == 0 and I % BK == 0
    choice = tl.program_id(0)
    expert = tl.load(ids + choice).to(tl.int64)
    n = tl.program_id(1) * BN + tl.arange(0, BN)
    weights += expert * (D * I)
    total = tl.zeros((BN, BK), dtype=tl.float32)
    for offset in tl.static_range(0, I, BK):
        k = offset + tl.arange(0, BK)
        here = _vector(hidden + choice * I, n, k, I, divides)
        total += _piece(weights, n, k, D, I, divides) * here
    total = tl.sum(total, 1)
    if HAS_FACTOR:
        total *= tl.load(factor + expert * D + n, mask=n < D, other=0.0)
    tl.store(out + choice * D + n, total.to(out.dtype.element_ty), mask=n < D)


@triton.jit
def _vectors_4(x, n, block, K: tl.constexpr, BLOCKS: tl.constexpr):
    """The inputs that meet the four places of words."""
    c = tl.arange(0, 16 * BLOCKS)
    k = block * 64 + c // 16 * 64 + c % 16
    divides: tl.constexpr = K % (64 * BLOCKS) == 0
    first = _vector(x, n, k, K, divides)
    second = _vector(x + 16, n, k, K, divides)
    third = _vector(x + 32, n, k, K, divides)
    return first, second, third, _vector(x + 48, n, k, K, divides)


@triton.jit
def _add_4(
    total,
    x,
    words,
    scales,
    BN: tl.constexpr,
    BLOCKS: tl.constexpr,
    dtype: tl.constexpr,
    FAST: tl.constexpr,
):
    a, b, c, d = unpack(words, scales, BN, BLOCKS, dtype, FAST)
    total += a.to(tl.float32) * x[0]
    total += b.to(tl.float32) * x[1]
    total += c.to(tl.float32) * x[2]
    return total + d.to(tl.float32) * x[3]


@triton.jit
def _gate_up_4(
    x,
    ids,
    words,
    scales,
    factor_E2,
    out,
    TOP: tl.constexpr,
    D: tl.constexpr,
    I: tl.constexpr,  # noqa: E741
    FAST: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
):
    blocks: tl.constexpr = BK // 64
    divides: tl.constexpr = I % BN == 0 and D % BK == 0
    dtype: tl.constexpr = x.dtype.element_ty
    choice = tl.program_id(0)
    expert = tl.load(ids + choice).to(tl.int64)
    n = tl.program_id(1) * BN + tl.arange(0, BN)
    words += expert * (2 * I * D // 4)
    scales += expert * (2 * I * D // 64)
    x += (choice // TOP) * D
    gate = tl.zeros((BN, BK // 4), dtype=tl.float32)
    up = tl.zeros((BN, BK // 4), dtype=tl.float32)
    for block in tl.static_range(0, D // 64, blocks):
        here = _vectors_4(x, n, block, D, blocks)
        found = load_words(words, n, block, I, D, blocks, divides)
        scale = load_scales(scales, n, block, I, D, blocks, divides)
        gate = _add_4(gate, here, found, scale, BN, blocks, dtype, FAST)
        found = load_words(words + I * D // 4, n, block, I, D, blocks, divides)
        scale = load_scales(scales + I * D // 64, n, block, I, D, blocks, divides)
        up = _add_4(up, here, found, scale, BN, blocks, dtype, FAST)
    gate = tl.sum(gate, 1) * tl.load(factor_E2 + 2 * expert)
    up = tl.sum(up, 1) * tl.load(factor_E2 + 2 * expert + 1)
    hidden = activate(gate, up).to(out.dtype.element_ty)
    tl.store(out + choice * I + n, hidden, mask=n < I)


@triton.jit
def _down_4(
    hidden,
    ids,
    words,
    scales,
    factor_E,
    out,
    D: tl.constexpr,
    I: tl.constexpr,  # noqa: E741
    FAST: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
):
    blocks: tl.constexpr = BK // 64
    divides: tl.constexpr = D % BN == 0 and I % BK == 0
    dtype: tl.constexpr = hidden.dtype.element_ty
    choice = tl.program_id(0)
    expert = tl.load(ids + choice).to(tl.int64)
    n = tl.program_id(1) * BN + tl.arange(0, BN)
    words += expert * (D * I // 4)
    scales += expert * (D * I // 64)
    total = tl.zeros((BN, BK // 4), dtype=tl.float32)
    for block in tl.static_range(0, I // 64, blocks):
        here = _vectors_4(hidden + choice * I, n, block, I, blocks)
        found = load_words(words, n, block, D, I, blocks, divides)
        scale = load_scales(scales, n, block, D, I, blocks, divides)
        total = _add_4(total, here, found, scale, BN, blocks, dtype, FAST)
    total = tl.sum(total, 1) * tl.load(factor_E + expert)
    tl.store(out + choice * D + n, total.to(out.dtype.element_ty), mask=n < D)
