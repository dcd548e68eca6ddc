"""Unpacks 4-bit weights in a kernel: `ops/nvfp4_order.py` says how their bits are laid.

Twice: in the GPU's own instructions, about one and a half for a weight, and in Triton's, three
times as many, which the interpreter can run. Both give the same bits.
"""

import os

import triton
import triton.language as tl

from dgemma.backends.cuda.support import INTERPRET

# Two words in, the first numbers of both in one register, the second in the next, and so on, each
# times its scale. Both words are of one output and one block, whatever the layout: neighbours.
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


def is_compiled() -> bool:
    """True if kernels are compiled for a GPU and may use its instructions."""
    return os.environ.get(INTERPRET) != "1"


@triton.jit
def spread(scale, N: tl.constexpr, BLOCKS: tl.constexpr):
    """One number for each output and block, to all words of the block."""
    wide = tl.broadcast_to(scale[:, :, None], (N, BLOCKS, 16))
    return tl.reshape(wide, (N, BLOCKS * 16))


@triton.jit
def bits_to(bits, scale_bits, dtype: tl.constexpr):
    """The product of what two tensors of bfloat16 bits stand for."""
    number = (bits << 16).to(tl.float32, bitcast=True)
    return (number * (scale_bits << 16).to(tl.float32, bitcast=True)).to(dtype)


@triton.jit
def unpack(
    words, scales, N: tl.constexpr, BLOCKS: tl.constexpr, dtype: tl.constexpr, FAST: tl.constexpr
):
    """[N, 16 * BLOCKS] words and [N, BLOCKS] scales to four tiles, one for each place in a word."""
    first = spread((scales & 0x0FF00FF0) | 0x70007000, N, BLOCKS)
    turned = (scales << 8) | ((scales >> 24) & 0xFF)
    second = spread((turned & 0x0FF00FF0) | 0x70007000, N, BLOCKS)
    if FAST:
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
        a = bits_to(word & 0x81C0, first & 0xFFFF, dtype)
        b = bits_to((swapped << 4) & 0x81C0, first >> 16, dtype)
        c = bits_to(((word << 2) ^ (word << 6)) & 0x81C0, second & 0xFFFF, dtype)
        d = bits_to(((word << 2) ^ swapped) & 0x81C0, second >> 16, dtype)
    return a, b, c, d


@triton.jit
def in_order(tile, N: tl.constexpr, BLOCKS: tl.constexpr):
    """Four tiles to one, [N, 64 * BLOCKS], in the order of the inputs: nothing moves but names."""
    pairs = tl.join(tl.join(tile[0], tile[2]), tl.join(tile[1], tile[3]))
    blocks = tl.permute(tl.reshape(pairs, (N, BLOCKS, 16, 4)), (0, 1, 3, 2))
    return tl.reshape(blocks, (N, 64 * BLOCKS))


@triton.jit
def load_words(
    words, n, block, N: tl.constexpr, K: tl.constexpr, BLOCKS: tl.constexpr, DIVIDES: tl.constexpr
):
    """Words of outputs `n` (of N) in the blocks from `block` on (of inputs, of K)."""
    c = tl.arange(0, 16 * BLOCKS)
    b = block + c // 16
    at = ((n // 16) * (K // 64 * 256) + n % 16 * 16)[:, None] + (b * 256 + c % 16)[None, :]
    if DIVIDES:
        found = tl.load(words + at)
    else:
        found = tl.load(words + at, mask=(n < N)[:, None] & (b < K // 64)[None, :], other=0)
    return found


@triton.jit
def load_scales(
    scales, n, block, N: tl.constexpr, K: tl.constexpr, BLOCKS: tl.constexpr, DIVIDES: tl.constexpr
):
    b = block + tl.arange(0, BLOCKS)
    at = ((n // 16) * (K // 64 * 16) + n % 16)[:, None] + (b * 16)[None, :]
    if DIVIDES:
        found = tl.load(scales + at)
    else:
        found = tl.load(scales + at, mask=(n < N)[:, None] & (b < K // 64)[None, :], other=0)
    return found
