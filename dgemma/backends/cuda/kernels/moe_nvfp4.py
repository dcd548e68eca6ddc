"""The experts' GEMMs with NVFP4 weights and 16-bit activations, grouped by expert.

As in `moe.py`, a weight is read once for all rows of its expert; here it is also unpacked once, in
registers, on its way to the MMA. Unpacking replaces the weights' bytes as the bottleneck, so it
takes few instructions: see `quant/nvfp4.py` for the order of bits. Weights are the left operand,
from registers. Those of gate and up are in one tile, and a loop iteration has several steps of the
depth: the MMA runs on one while the next is unpacked, instead of being waited for each time.

T tokens, K experts per token, A assignments, E experts, D width, I expert width.
"""

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from dgemma.backends.cuda.configs import MoeConfig, moe_config
from dgemma.backends.cuda.device import is_interpreted
from dgemma.backends.cuda.kernels.common import gdc_wait, gelu_mul, launch, pdl_kwargs
from dgemma.backends.cuda.kernels.moe import Buckets, row_block, sort_by_expert
from dgemma.quant.nvfp4 import TiledNvfp4

# Two words in; out, the first weights of both in one register, the second in the next, and so on,
# each times its scale. Both words are neighbours: of one output and one block in any layout.
UNPACK: tl.constexpr = tl.constexpr("""{
.reg .b32 q, a, b, c, d, e, f, g, z;
.reg .b16 s0, s1, s2, s3;
mov.b32 z, 0x80008000;
prmt.b32 q, $4, 0, 0x2301;
shl.b32 a, $4, 2;
shl.b32 b, $4, 6;
shl.b32 c, q, 4;
and.b32 d, $4, 0x81C081C0;
and.b32 e, c, 0x81C081C0;
lop3.b32 f, a, b, 0x81C081C0, 0x28;
lop3.b32 g, a, q, 0x81C081C0, 0x28;
mov.b32 {s0, s1}, $5;
mov.b32 {s2, s3}, $7;
mov.b32 a, {s0, s0};
fma.rn.bf16x2 $0, d, a, z;
mov.b32 a, {s1, s1};
fma.rn.bf16x2 $1, e, a, z;
mov.b32 a, {s2, s2};
fma.rn.bf16x2 $2, f, a, z;
mov.b32 a, {s3, s3};
fma.rn.bf16x2 $3, g, a, z;
}""")


def expert_outputs_nvfp4(
    x_TD: Tensor,
    ids_TK: Tensor,
    gate_up: TiledNvfp4,
    down: TiledNvfp4,
    buckets: Buckets | None = None,
) -> Tensor:
    """Compute the output of each (token, expert) assignment, [A, D], not yet weighted."""
    num_experts = len(gate_up.words_EW)
    config = moe_config(ids_TK.numel(), num_experts, 4)
    buckets = buckets or sort_by_expert(ids_TK, num_experts)
    hidden_AI = gate_up_nvfp4(x_TD.contiguous(), gate_up, buckets, ids_TK.shape[1], config.gate_up)
    return down_nvfp4(hidden_AI, down, buckets, config.down)


def gate_up_nvfp4(
    x_TD: Tensor,
    weight: TiledNvfp4,
    buckets: Buckets,
    top_k: int,
    config: MoeConfig,
    *,
    ptx: bool = True,
) -> Tensor:
    """gelu(gate) * up of every assignment, [A, I]; the gate half comes first."""
    out_AI = x_TD.new_empty(len(x_TD) * top_k, weight.outputs // 2)
    kwargs = {"GATED": True, "TOP_K": top_k, **_kwargs(config, ptx=ptx)}
    return _launch(x_TD, weight, out_AI, buckets, config, kwargs)


def down_nvfp4(
    hidden_AI: Tensor,
    weight: TiledNvfp4,
    buckets: Buckets,
    config: MoeConfig,
    *,
    ptx: bool = True,
) -> Tensor:
    """Output of every assignment, [A, D], not yet weighted."""
    out_AD = hidden_AI.new_empty(len(hidden_AI), weight.outputs)
    kwargs = {"GATED": False, "TOP_K": 1, **_kwargs(config, ptx=ptx)}
    return _launch(hidden_AI, weight, out_AD, buckets, config, kwargs)


def _launch(
    x: Tensor,
    weight: TiledNvfp4,
    out_AN: Tensor,
    buckets: Buckets,
    config: MoeConfig,
    kwargs: dict[str, Any],
) -> Tensor:
    assignments, outputs = out_AN.shape
    blocks = buckets.max_row_blocks(assignments, config)
    launch(_grouped_gemm_nvfp4, (blocks * triton.cdiv(outputs, config.columns),))(
        x,
        *weight[:3],
        out_AN,
        *buckets.arguments,
        K=weight.inputs,
        N=outputs,
        **buckets.kwargs,
        **kwargs,
    )
    return out_AN


def _kwargs(config: MoeConfig, *, ptx: bool) -> dict[str, Any]:
    return {
        **pdl_kwargs(),
        "USE_PTX": ptx and use_ptx(),
        "ONE_DOT": config.one_dot,
        "BM": config.rows,
        "BN": config.columns,
        "BK": config.depth,
        "UNROLL": config.unroll,
        "num_warps": config.warps,
        "num_stages": config.stages,
        "maxnreg": config.registers,
    }


def use_ptx() -> bool:
    """True if kernels are compiled and may use the GPU's own instructions."""
    return not is_interpreted()


@triton.jit
def _spread(scale, N: tl.constexpr, BLOCKS: tl.constexpr):
    """Broadcast the scale of an output and block to all words of the block."""
    per_word = tl.broadcast_to(scale[:, :, None], (N, BLOCKS, 16))
    return tl.reshape(per_word, (N, BLOCKS * 16))


@triton.jit
def _bf16_product(bits, scale_bits, dtype: tl.constexpr):
    """Multiply two tensors of bfloat16 bits."""
    value = (bits << 16).to(tl.float32, bitcast=True)
    return (value * (scale_bits << 16).to(tl.float32, bitcast=True)).to(dtype)


@triton.jit
def unpack(
    words, scales, N: tl.constexpr, BLOCKS: tl.constexpr, dtype: tl.constexpr, USE_PTX: tl.constexpr
):
    """Unpack [N, 16 * BLOCKS] words and [N, BLOCKS] scales to four tiles, one per weight of a word.

    In PTX about one and a half instructions per weight; in Triton, which the interpreter can run,
    three times as many. Both give the same bits.
    """
    first = _spread((scales & 0x0FF00FF0) | 0x70007000, N, BLOCKS)
    rotated = (scales << 8) | ((scales >> 24) & 0xFF)
    second = _spread((rotated & 0x0FF00FF0) | 0x70007000, N, BLOCKS)
    if USE_PTX:
        a, b, c, d = tl.inline_asm_elementwise(
            UNPACK,
            "=r,=r,=r,=r,r,r,r,r,r",
            [words, first, second],
            dtype=(tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16),
            is_pure=True,
            pack=2,
        )
    else:
        word = words.to(tl.int32) & 0xFFFF
        swapped = ((word >> 8) | (word << 8)) & 0xFFFF
        a = _bf16_product(word & 0x81C0, first & 0xFFFF, dtype)
        b = _bf16_product((swapped << 4) & 0x81C0, first >> 16, dtype)
        c = _bf16_product(((word << 2) ^ (word << 6)) & 0x81C0, second & 0xFFFF, dtype)
        d = _bf16_product(((word << 2) ^ swapped) & 0x81C0, second >> 16, dtype)
    return a, b, c, d


@triton.jit
def _to_input_order(tile, N: tl.constexpr, BLOCKS: tl.constexpr):
    """Join four tiles to one, [N, 64 * BLOCKS], in the order of the inputs: no data moves."""
    pairs = tl.join(tl.join(tile[0], tile[2]), tl.join(tile[1], tile[3]))
    blocks = tl.permute(tl.reshape(pairs, (N, BLOCKS, 16, 4)), (0, 1, 3, 2))
    return tl.reshape(blocks, (N, 64 * BLOCKS))


@triton.jit
def load_words(
    words, n, block, N: tl.constexpr, K: tl.constexpr, BLOCKS: tl.constexpr, DIVIDES: tl.constexpr
):
    """Load the words of outputs `n` (of N) in the blocks from `block` on (of K inputs)."""
    c = tl.arange(0, 16 * BLOCKS)
    b = block + c // 16
    at = ((n // 16) * (K // 64 * 256) + n % 16 * 16)[:, None] + (b * 256 + c % 16)[None, :]
    if DIVIDES:
        tile = tl.load(words + at)
    else:
        tile = tl.load(words + at, mask=(n < N)[:, None] & (b < K // 64)[None, :], other=0)
    return tile


@triton.jit
def load_scales(
    scales, n, block, N: tl.constexpr, K: tl.constexpr, BLOCKS: tl.constexpr, DIVIDES: tl.constexpr
):
    b = block + tl.arange(0, BLOCKS)
    at = ((n // 16) * (K // 64 * 16) + n % 16)[:, None] + (b * 16)[None, :]
    if DIVIDES:
        tile = tl.load(scales + at)
    else:
        tile = tl.load(scales + at, mask=(n < N)[:, None] & (b < K // 64)[None, :], other=0)
    return tile


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
def _grouped_gemm_nvfp4(
    x,
    words,
    scales,
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
    USE_PTX: tl.constexpr,
    ONE_DOT: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    UNROLL: tl.constexpr,
    PDL: tl.constexpr,
):
    """GATED: gelu(gate) * up of tokens, whose weights are [2 N, K]; otherwise of assignments."""
    gdc_wait(PDL)
    num_tiles: tl.constexpr = (N + BN - 1) // BN
    blocks: tl.constexpr = BK // 64
    steps: tl.constexpr = (K // 64 + blocks * UNROLL - 1) // (blocks * UNROLL) * UNROLL
    whole: tl.constexpr = steps * blocks * 64 == K
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
    words += expert.to(tl.int64) * (ON * K // 4)
    scales += expert.to(tl.int64) * (ON * K // 64)
    if begin < count:
        m = begin + tl.arange(0, BM)
        is_row = m < count
        assignment = tl.load(assignment_ES + expert * capacity + m, mask=is_row, other=0)
        row = assignment // TOP_K if GATED else assignment
        total = tl.zeros((BO, BM), dtype=tl.float32)
        for step in tl.range(0, steps, loop_unroll_factor=UNROLL):
            block = step * blocks
            packed = load_words(words, o, block, ON, K, blocks, divides)
            scale = load_scales(scales, o, block, ON, K, blocks, divides)
            rows = _load_rows(x, row, is_row, block, K, blocks, ONE_DOT, whole)
            tiles = unpack(packed, scale, BO, blocks, x.dtype.element_ty, USE_PTX)
            total = _dot(tiles, rows, total, BO, blocks, ONE_DOT)
        if GATED:
            gates, ups = tl.split(tl.permute(tl.reshape(total, (2, BN, BM)), (1, 2, 0)))
            gates *= tl.load(global_scale_EH + 2 * expert)
            ups *= tl.load(global_scale_EH + 2 * expert + 1)
            result = gelu_mul(gates, ups).to(out.dtype.element_ty)
        else:
            total *= tl.load(global_scale_EH + expert)
            result = total.to(out.dtype.element_ty)
        at = assignment.to(tl.int64)[:, None] * N + n[None, :]
        tl.store(out + at, tl.trans(result), mask=is_row[:, None] & (n < N)[None, :])
