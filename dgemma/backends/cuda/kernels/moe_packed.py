"""The experts' GEMMs with packed weights and 16-bit activations, grouped by expert.

As in `moe.py`, a weight is read once for all rows of its expert; here it is also unpacked once, in
registers, on its way to the MMA: NVFP4 or GGUF blocks, see `unpack.py`. Unpacking replaces the
weights' bytes as the bottleneck, so it takes few instructions. Weights are the left operand, from
registers. Those of gate and up are in one tile, and a loop iteration has several steps of the
depth: the MMA runs on one while the next is unpacked, instead of being waited for each time.

T tokens, K experts per token, A assignments, E experts, D width, I expert width.
"""

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from dgemma.backends.cuda.configs import MoeConfig, for_bits, moe_config
from dgemma.backends.cuda.kernels.common import gdc_wait, gelu_mul, launch, pdl_kwargs
from dgemma.backends.cuda.kernels.moe import Buckets, row_block, sort_by_expert
from dgemma.backends.cuda.kernels.unpack import (
    PackedWeight,
    load_packed,
    packed_args,
    packed_kwargs,
    skip_outputs,
    unpack,
)


def expert_outputs(
    x_TD: Tensor,
    ids_TK: Tensor,
    gate_up_weight: PackedWeight,
    down_weight: PackedWeight,
    buckets: Buckets | None = None,
) -> Tensor:
    """Compute the output of each (token, expert) assignment, [A, D], not yet weighted."""
    num_experts = len(gate_up_weight.words_EW)
    config = moe_config(ids_TK.numel(), num_experts, 4)
    buckets = buckets or sort_by_expert(ids_TK, num_experts)
    x_TD, top_k = x_TD.contiguous(), ids_TK.shape[1]
    hidden_AI = gate_up(x_TD, gate_up_weight, buckets, top_k, config.gate_up)
    return down(hidden_AI, down_weight, buckets, config.down)


def gate_up(
    x_TD: Tensor,
    weight: PackedWeight,
    buckets: Buckets,
    top_k: int,
    config: MoeConfig,
    *,
    ptx: bool = True,
) -> Tensor:
    """gelu(gate) * up of every assignment, [A, I]; the gate half comes first."""
    out_AI = x_TD.new_empty(len(x_TD) * top_k, weight.outputs // 2)
    kwargs = {"GATED": True, "TOP_K": top_k, **packed_kwargs(weight, ptx=ptx)}
    return _launch(x_TD, weight, out_AI, buckets, config, kwargs)


def down(
    hidden_AI: Tensor,
    weight: PackedWeight,
    buckets: Buckets,
    config: MoeConfig,
    *,
    ptx: bool = True,
) -> Tensor:
    """Output of every assignment, [A, D], not yet weighted."""
    out_AD = hidden_AI.new_empty(len(hidden_AI), weight.outputs)
    kwargs = {"GATED": False, "TOP_K": 1, **packed_kwargs(weight, ptx=ptx)}
    return _launch(hidden_AI, weight, out_AD, buckets, config, kwargs)


def _launch(
    x: Tensor,
    weight: PackedWeight,
    out_AN: Tensor,
    buckets: Buckets,
    config: MoeConfig,
    kwargs: dict[str, Any],
) -> Tensor:
    assignments, outputs = out_AN.shape
    blocks = buckets.max_row_blocks(assignments, config)
    launch(_grouped_gemm_packed, (blocks * triton.cdiv(outputs, config.columns),))(
        x,
        *packed_args(weight),
        out_AN,
        *buckets.arguments,
        K=weight.inputs,
        N=outputs,
        **buckets.kwargs,
        **kwargs,
        **_kwargs(for_bits(config, kwargs["BITS"])),
    )
    return out_AN


def _kwargs(config: MoeConfig) -> dict[str, Any]:
    return {
        **pdl_kwargs(),
        "ONE_DOT": config.one_dot,
        "BM": config.rows,
        "BN": config.columns,
        "BK": config.depth,
        "UNROLL": config.unroll,
        "SHARE": config.share_scales,
        "num_warps": config.warps,
        "num_stages": config.stages,
        "maxnreg": config.registers,
    }


@triton.jit
def _to_input_order(tile, N: tl.constexpr, BLOCKS: tl.constexpr):
    """Join four tiles to one, [N, 64 * BLOCKS], in the order of the inputs: no data moves."""
    pairs = tl.join(tl.join(tile[0], tile[2]), tl.join(tile[1], tile[3]))
    blocks = tl.permute(tl.reshape(pairs, (N, BLOCKS, 16, 4)), (0, 1, 3, 2))
    return tl.reshape(blocks, (N, 64 * BLOCKS))


@triton.jit
def _load_rows(
    x,
    row,
    is_row,
    block,
    K: tl.constexpr,
    BLOCKS: tl.constexpr,
    ONE_DOT: tl.constexpr,
    DIVIDES: tl.constexpr,
):
    """Load the inputs of the four weights of each word; with ONE_DOT the first has all of them."""
    if ONE_DOT:
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
    if not ONE_DOT:
        second = tl.load(at + 16, mask=here, other=0.0)
        third = tl.load(at + 32, mask=here, other=0.0)
        fourth = tl.load(at + 48, mask=here, other=0.0)
    return first, second, third, fourth


@triton.jit
def _dot(tiles, rows, total, N: tl.constexpr, BLOCKS: tl.constexpr, ONE_DOT: tl.constexpr):
    """Multiply [N, BK] in four tiles by rows in four parts; with ONE_DOT, in one MMA."""
    if ONE_DOT:
        total = tl.dot(_to_input_order(tiles, N, BLOCKS), tl.trans(rows[0]), total)
    else:
        total = tl.dot(tiles[0], tl.trans(rows[0]), total)
        total = tl.dot(tiles[1], tl.trans(rows[1]), total)
        total = tl.dot(tiles[2], tl.trans(rows[2]), total)
        total = tl.dot(tiles[3], tl.trans(rows[3]), total)
    return total


@triton.jit
def _grouped_gemm_packed(
    x,
    words,
    extra,
    scales,
    above,
    global_scale_EH,
    out,
    assignment_ES,
    count_E,
    capacity,
    GATED: tl.constexpr,
    TOP_K: tl.constexpr,
    E: tl.constexpr,
    P: tl.constexpr,
    K: tl.constexpr,
    N: tl.constexpr,
    BITS: tl.constexpr,
    SCALES: tl.constexpr,
    USE_PTX: tl.constexpr,
    ONE_DOT: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    UNROLL: tl.constexpr,
    SHARE: tl.constexpr,
    PDL: tl.constexpr,
):
    """GATED: gelu(gate) * up of tokens, whose weights are [2 N, K]; otherwise of assignments."""
    gdc_wait(PDL)
    num_tiles: tl.constexpr = (N + BN - 1) // BN
    blocks: tl.constexpr = BK // 64
    # Two blocks of five-bit weights share bytes: both are in one iteration.
    parts: tl.constexpr = 2 if BITS == 5 and blocks == 1 else 1
    unrolled: tl.constexpr = 1 if parts == 2 else UNROLL
    size: tl.constexpr = blocks * parts * unrolled
    steps: tl.constexpr = (K // 64 + size - 1) // size * unrolled
    whole: tl.constexpr = steps * blocks * parts * 64 == K
    dtype: tl.constexpr = x.dtype.element_ty
    divides: tl.constexpr = N % BN == 0 and whole
    ON: tl.constexpr = 2 * N if GATED else N  # outputs of a weight
    BO: tl.constexpr = 2 * BN if GATED else BN  # of them in a tile
    expert, begin, count = row_block(count_E, tl.program_id(0) // num_tiles, E, P, BM)
    n = (tl.program_id(0) % num_tiles) * BN + tl.arange(0, BN)
    # Gate and up of the same outputs in one tile. Outputs past the end of gate are those of up:
    # they are not stored.
    o = n
    if GATED:
        r = tl.arange(0, BO)
        o = (tl.program_id(0) % num_tiles) * BN + r % BN + r // BN * N
    index = expert.to(tl.int64)
    planes = skip_outputs(words, extra, scales, above, index * ON, K, BITS, SCALES)
    if begin < count:
        m = begin + tl.arange(0, BM)
        is_row = m < count
        assignment = tl.load(assignment_ES + expert * capacity + m, mask=is_row, other=0)
        row = assignment // TOP_K if GATED else assignment
        total = tl.zeros((BO, BM), dtype=tl.float32)
        for step in tl.range(0, steps, loop_unroll_factor=unrolled):
            for part in tl.static_range(parts):
                block = (step * parts + part) * blocks
                packed = load_packed(planes, o, block, ON, K, blocks, divides, BITS, SCALES)
                rows = _load_rows(x, row, is_row, block, K, blocks, ONE_DOT, whole)
                tiles = unpack(packed, part, BO, blocks, dtype, BITS, SCALES, USE_PTX, SHARE)
                total = _dot(tiles, rows, total, BO, blocks, ONE_DOT)
        if GATED:
            gates, ups = tl.split(tl.permute(tl.reshape(total, (2, BN, BM)), (1, 2, 0)))
            if SCALES == "nvfp4":
                gates *= tl.load(global_scale_EH + 2 * expert)
                ups *= tl.load(global_scale_EH + 2 * expert + 1)
            result = gelu_mul(gates, ups).to(out.dtype.element_ty)
        else:
            if SCALES == "nvfp4":
                total *= tl.load(global_scale_EH + expert)
            result = total.to(out.dtype.element_ty)
        at = assignment.to(tl.int64)[:, None] * N + n[None, :]
        tl.store(out + at, tl.trans(result), mask=is_row[:, None] & (n < N)[None, :])
