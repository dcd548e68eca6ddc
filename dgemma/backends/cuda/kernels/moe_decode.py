"""The experts' GEMVs for a few tokens, one assignment at a time: weights are streamed.

One token reaches 8 of 128 experts, each with one row, so an MMA would be nearly empty. A program
computes a few outputs of one assignment, looks up its expert itself, and sums products in float32.
All of its weights are loaded before the first is used. Activations stay 16-bit whatever the weights
are: 16-bit, fp8 (a scale for each output) or packed (`unpack.py`).

T tokens, K experts per token, A = T * K assignments, E experts, D width, I expert width.
"""

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from dgemma.backends.cuda.configs import MOE_DECODE, MoeDecodeConfig
from dgemma.backends.cuda.kernels.common import gelu_mul, launch
from dgemma.backends.cuda.kernels.unpack import (
    PackedWeight,
    load_packed,
    packed_args,
    packed_kwargs,
    skip_outputs,
    unpack,
)

MAX_TOKENS = 4  # with more, several share an expert


def expert_outputs(
    x_TD: Tensor,
    ids_TK: Tensor,
    gate_up_EXD: Tensor,
    down_EDI: Tensor,
    scales: tuple[Tensor | None, Tensor | None] = (None, None),
) -> Tensor:
    """Compute each assignment's output, [A, D], unweighted; `scales`: of fp8 weights."""
    config = MOE_DECODE[min(16, 8 * gate_up_EXD.element_size())]
    hidden_AI = gate_up(x_TD, ids_TK, gate_up_EXD, config.gate_up, scales[0])
    return down(hidden_AI, ids_TK, down_EDI, config.down, scales[1])


def expert_outputs_packed(
    x_TD: Tensor, ids_TK: Tensor, gate_up: PackedWeight, down: PackedWeight
) -> Tensor:
    """Compute `expert_outputs` with packed weights."""
    hidden_AI = gate_up_packed(x_TD, ids_TK, gate_up, MOE_DECODE[4].gate_up)
    return down_packed(hidden_AI, ids_TK, down, MOE_DECODE[4].down)


def gate_up(
    x_TD: Tensor,
    ids_TK: Tensor,
    weight_EXD: Tensor,
    config: MoeDecodeConfig,
    scale_EX: Tensor | None = None,
) -> Tensor:
    """gelu(gate) * up of every assignment, [A, I]; the gate half comes first in a weight."""
    out_AI = x_TD.new_empty(ids_TK.numel(), weight_EXD.shape[1] // 2)
    scale = out_AI if scale_EX is None else scale_EX
    weights = (weight_EXD, scale)
    kwargs = {"GATED": True, "HAS_SCALE": scale_EX is not None, "K": weight_EXD.shape[2]}
    return _launch(_gemv, (x_TD.contiguous(), ids_TK, *weights), out_AI, config, kwargs)


def down(
    hidden_AI: Tensor,
    ids_TK: Tensor,
    weight_EDI: Tensor,
    config: MoeDecodeConfig,
    scale_ED: Tensor | None = None,
) -> Tensor:
    """Output of every assignment, [A, D], not yet weighted."""
    out_AD = hidden_AI.new_empty(len(hidden_AI), weight_EDI.shape[1])
    scale = out_AD if scale_ED is None else scale_ED
    kwargs = {"GATED": False, "HAS_SCALE": scale_ED is not None, "K": weight_EDI.shape[2]}
    return _launch(_gemv, (hidden_AI, ids_TK, weight_EDI, scale), out_AD, config, kwargs)


def gate_up_packed(
    x_TD: Tensor,
    ids_TK: Tensor,
    weight: PackedWeight,
    config: MoeDecodeConfig,
) -> Tensor:
    out_AI = x_TD.new_empty(ids_TK.numel(), weight.outputs // 2)
    kwargs = {"GATED": True, "K": weight.inputs, **packed_kwargs(weight)}
    inputs = (x_TD.contiguous(), ids_TK, *packed_args(weight))
    return _launch(_gemv_packed, inputs, out_AI, config, kwargs)


def down_packed(
    hidden_AI: Tensor,
    ids_TK: Tensor,
    weight: PackedWeight,
    config: MoeDecodeConfig,
) -> Tensor:
    out_AD = hidden_AI.new_empty(len(hidden_AI), weight.outputs)
    kwargs = {"GATED": False, "K": weight.inputs, **packed_kwargs(weight)}
    inputs = (hidden_AI, ids_TK, *packed_args(weight))
    return _launch(_gemv_packed, inputs, out_AD, config, kwargs)


def _launch(
    kernel: Any,
    inputs: tuple[Tensor, ...],
    out_AN: Tensor,
    config: MoeDecodeConfig,
    kwargs: dict[str, Any],
) -> Tensor:
    assignments, outputs = out_AN.shape
    x, ids_TK, *weights = inputs
    launch(kernel, (assignments, triton.cdiv(outputs, config.columns)))(
        x,
        ids_TK.contiguous(),
        *weights,
        out_AN,
        TOP_K=ids_TK.shape[1],
        N=outputs,
        BN=config.columns,
        BK=config.depth,
        num_warps=config.warps,
        maxnreg=config.registers,
        **kwargs,
    )
    return out_AN


@triton.jit
def _load_weight(weights, n, k, N: tl.constexpr, K: tl.constexpr, DIVIDES: tl.constexpr):
    at = weights + n[:, None] * K + k[None, :]
    if DIVIDES:
        tile = tl.load(at)
    else:
        tile = tl.load(at, mask=(n < N)[:, None] & (k < K)[None, :], other=0.0)
    return tile.to(tl.float32)


@triton.jit
def _load_row(x, n, k, K: tl.constexpr, DIVIDES: tl.constexpr):
    """Load a row once per output, so that each thread has the inputs of its weights.

    Nearly all of these loads hit the L1 cache; none waits for another thread.
    """
    at = x + n[:, None] * 0 + k[None, :]
    if DIVIDES:
        row = tl.load(at)
    else:
        row = tl.load(at, mask=(n >= 0)[:, None] & (k < K)[None, :], other=0.0)
    return row.to(tl.float32)


@triton.jit
def _gemv(
    x,
    ids,
    weights,
    scale,
    out,
    GATED: tl.constexpr,
    HAS_SCALE: tl.constexpr,
    TOP_K: tl.constexpr,
    K: tl.constexpr,
    N: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
):
    divides: tl.constexpr = N % BN == 0 and K % BK == 0
    assignment = tl.program_id(0)
    expert = tl.load(ids + assignment).to(tl.int64)
    n = tl.program_id(1) * BN + tl.arange(0, BN)
    first = expert * (2 * N if GATED else N)  # output of all experts
    x += (assignment // TOP_K if GATED else assignment) * K
    weights += first * K
    total = tl.zeros((BN, BK), dtype=tl.float32)
    up = tl.zeros((BN, BK), dtype=tl.float32)
    for offset in tl.static_range(0, K, BK):
        k = offset + tl.arange(0, BK)
        row = _load_row(x, n, k, K, divides)
        total += _load_weight(weights, n, k, N, K, divides) * row
        if GATED:
            up += _load_weight(weights + N * K, n, k, N, K, divides) * row
    total = tl.sum(total, 1)
    if HAS_SCALE:
        total *= tl.load(scale + first + n, mask=n < N, other=0.0)
    if GATED:
        up = tl.sum(up, 1)
        if HAS_SCALE:
            up *= tl.load(scale + first + N + n, mask=n < N, other=0.0)
        total = gelu_mul(total, up)
    tl.store(out + assignment * N + n, total.to(out.dtype.element_ty), mask=n < N)


@triton.jit
def _load_row_packed(x, n, block, K: tl.constexpr, BLOCKS: tl.constexpr):
    """Load the inputs of the four weights of each word."""
    c = tl.arange(0, 16 * BLOCKS)
    k = block * 64 + c // 16 * 64 + c % 16
    divides: tl.constexpr = K % (64 * BLOCKS) == 0
    first = _load_row(x, n, k, K, divides)
    second = _load_row(x + 16, n, k, K, divides)
    third = _load_row(x + 32, n, k, K, divides)
    return first, second, third, _load_row(x + 48, n, k, K, divides)


@triton.jit
def _add_packed(
    total,
    row,
    planes,
    n,
    block: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    BN: tl.constexpr,
    BLOCKS: tl.constexpr,
    DIVIDES: tl.constexpr,
    dtype: tl.constexpr,
    BITS: tl.constexpr,
    SCALES: tl.constexpr,
    USE_PTX: tl.constexpr,
):
    """Add the products of some blocks of weights with a row."""
    PART: tl.constexpr = block % 2 if BLOCKS == 1 else 0
    packed = load_packed(planes, n, block, N, K, BLOCKS, DIVIDES, BITS, SCALES)
    a, b, c, d = unpack(packed, PART, BN, BLOCKS, dtype, BITS, SCALES, USE_PTX)
    total += a.to(tl.float32) * row[0]
    total += b.to(tl.float32) * row[1]
    total += c.to(tl.float32) * row[2]
    return total + d.to(tl.float32) * row[3]


@triton.jit
def _gemv_packed(
    x,
    ids,
    words,
    extra,
    scales,
    above,
    global_scale_EH,
    out,
    GATED: tl.constexpr,
    TOP_K: tl.constexpr,
    K: tl.constexpr,
    N: tl.constexpr,
    BITS: tl.constexpr,
    SCALES: tl.constexpr,
    USE_PTX: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
):
    blocks: tl.constexpr = BK // 64
    divides: tl.constexpr = N % BN == 0 and K % BK == 0
    dtype: tl.constexpr = x.dtype.element_ty
    outputs: tl.constexpr = 2 * N if GATED else N
    assignment = tl.program_id(0)
    expert = tl.load(ids + assignment).to(tl.int64)
    n = tl.program_id(1) * BN + tl.arange(0, BN)
    planes = skip_outputs(words, extra, scales, above, expert * outputs, K, BITS, SCALES)
    x += (assignment // TOP_K if GATED else assignment) * K
    total = tl.zeros((BN, BK // 4), dtype=tl.float32)
    up = tl.zeros((BN, BK // 4), dtype=tl.float32)
    for block in tl.static_range(0, K // 64, blocks):
        row = _load_row_packed(x, n, block, K, blocks)
        total = _add_packed(
            total, row, planes, n, block, N, K, BN, blocks, divides, dtype, BITS, SCALES, USE_PTX
        )
        if GATED:
            ups = skip_outputs(*planes, N, K, BITS, SCALES)
            up = _add_packed(
                up, row, ups, n, block, N, K, BN, blocks, divides, dtype, BITS, SCALES, USE_PTX
            )
    total = tl.sum(total, 1)
    if SCALES == "nvfp4":
        total *= tl.load(global_scale_EH + (2 * expert if GATED else expert))
    if GATED:
        up = tl.sum(up, 1)
        if SCALES == "nvfp4":
            up *= tl.load(global_scale_EH + 2 * expert + 1)
        total = gelu_mul(total, up)
    tl.store(out + assignment * N + n, total.to(out.dtype.element_ty), mask=n < N)
