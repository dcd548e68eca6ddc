"""Unpacking of NVFP4 and GGUF weights in registers, for the experts' GEMMs and GEMVs.

A word has four weights of one output, inputs c, 16 + c, 32 + c and 48 + c of a block of 64; see
`quant/nvfp4.py` and `quant/gguf_tiles.py` for the order of bits. In PTX a weight takes about one
and a half to two and a half instructions: its bits are brought to the sign and the mantissa of a
bfloat16, two weights to a register, and one `fma` multiplies them by their scale and adds their
offset. Scale and offset of a GGUF group are computed in float32 and rounded to bfloat16. In Triton,
which the interpreter can run, weights are computed in float32 and rounded once.

N outputs of a tile, C words of an output, B blocks of 64 inputs.
"""

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from dgemma.backends.cuda.device import is_interpreted
from dgemma.backends.cuda.kernels.unpack_ptx import (
    K_PAIRS_4,
    K_PAIRS_5,
    UNPACK_4,
    UNPACK_5,
    UNPACK_5_ODD,
    UNPACK_6,
    UNPACK_8,
    UNPACK_NVFP4,
)
from dgemma.quant.gguf_tiles import EXPONENT, TiledBlocks
from dgemma.quant.nvfp4 import TiledNvfp4

PackedWeight = TiledNvfp4 | TiledBlocks

EXPONENT_OF_ONE = tl.constexpr(EXPONENT)


def use_ptx() -> bool:
    """True if kernels are compiled and may use the GPU's own instructions."""
    return not is_interpreted()


def packed_args(weight: PackedWeight) -> tuple[Tensor, ...]:
    """Return the planes of a weight: words, extra, scales, above, global scale.

    Those that a format does not have are not read.
    """
    if isinstance(weight, TiledNvfp4):
        words, scales, global_scale = weight[:3]
        return words, scales, scales, scales, global_scale
    words, extra, scales, above = weight.planes
    no_extra, no_above = not weight.format.extra_blocks, not weight.format.has_super
    return words, scales if no_extra else extra, scales, scales if no_above else above, scales


def packed_kwargs(weight: PackedWeight, *, ptx: bool = True) -> dict[str, Any]:
    if isinstance(weight, TiledNvfp4):
        return {"BITS": 4, "SCALES": "nvfp4", "USE_PTX": ptx and use_ptx()}
    is_fast = ptx and use_ptx() and not weight.is_exact
    return {"BITS": weight.format.bits, "SCALES": weight.format.scales, "USE_PTX": is_fast}


@triton.jit
def skip_outputs(
    words,
    extra,
    scales,
    above,
    count,
    K: tl.constexpr,
    BITS: tl.constexpr,
    SCALES: tl.constexpr,
):
    """Return the planes from an output on, a multiple of 16, which may be one of a later expert."""
    blocks: tl.constexpr = K // 64
    words += count * (blocks * 16)
    scales += count * (blocks * (2 if SCALES == "affine" else 1))
    if BITS == 5 or BITS == 6:
        extra += count * ((blocks + 6 - BITS) // (7 - BITS) * 16)
    if SCALES == "k" or SCALES == "q6":
        above += count * (K // 256)
    return words, extra, scales, above


@triton.jit
def _load(pointers, n, b, N: tl.constexpr, BLOCKS: tl.constexpr, DIVIDES: tl.constexpr):
    if DIVIDES:
        tile = tl.load(pointers)
    else:
        tile = tl.load(pointers, mask=(n < N)[:, None] & (b < BLOCKS)[None, :], other=0)
    return tile


@triton.jit
def load_words(
    words,
    n,
    block,
    N: tl.constexpr,
    K: tl.constexpr,
    BLOCKS: tl.constexpr,
    DIVIDES: tl.constexpr,
):
    """Load the words of outputs `n` (of N) in the blocks from `block` on (of K inputs)."""
    c = tl.arange(0, 16 * BLOCKS)
    b = block + c // 16
    at = ((n // 16) * (K // 64 * 256) + n % 16 * 16)[:, None] + (b * 256 + c % 16)[None, :]
    return _load(words + at, n, b, N, K // 64, DIVIDES)


@triton.jit
def _load_extra(
    extra,
    n,
    block,
    N: tl.constexpr,
    K: tl.constexpr,
    BLOCKS: tl.constexpr,
    SHARING: tl.constexpr,
    DIVIDES: tl.constexpr,
):
    """Load the bytes that complete words; as many blocks as SHARING have the same."""
    c = tl.arange(0, 16 * BLOCKS)
    b = block + c // 16
    row = (n // 16) * ((K // 64 + SHARING - 1) // SHARING * 256) + n % 16 * 16
    at = row[:, None] + (b // SHARING * 256 + c % 16)[None, :]
    return _load(extra + at, n, b, N, K // 64, DIVIDES)


@triton.jit
def load_scales(
    scales,
    n,
    block,
    N: tl.constexpr,
    K: tl.constexpr,
    BLOCKS: tl.constexpr,
    COUNT: tl.constexpr,
    DIVIDES: tl.constexpr,
):
    """Load the first of COUNT words of scales of each output and block."""
    b = block + tl.arange(0, BLOCKS)
    at = ((n // 16) * (K // 64 * 16 * COUNT) + n % 16)[:, None] + (b * (16 * COUNT))[None, :]
    return _load(scales + at, n, b, N, K // 64, DIVIDES)


@triton.jit
def _load_above(
    above,
    n,
    block,
    N: tl.constexpr,
    K: tl.constexpr,
    BLOCKS: tl.constexpr,
    DIVIDES: tl.constexpr,
):
    """Load the scales that 256 inputs share."""
    b = block + tl.arange(0, BLOCKS)
    at = ((n // 16) * (K // 256 * 16) + n % 16)[:, None] + (b // 4 * 16)[None, :]
    return _load(above + at, n, b, N, K // 64, DIVIDES)


@triton.jit
def load_packed(
    planes,
    n,
    block,
    N: tl.constexpr,
    K: tl.constexpr,
    BLOCKS: tl.constexpr,
    DIVIDES: tl.constexpr,
    BITS: tl.constexpr,
    SCALES: tl.constexpr,
):
    """Load words, extra words, scales, and more scales, of outputs and blocks."""
    words = load_words(planes[0], n, block, N, K, BLOCKS, DIVIDES)
    count: tl.constexpr = 2 if SCALES == "affine" else 1
    scales = load_scales(planes[2], n, block, N, K, BLOCKS, count, DIVIDES)
    extra = scales
    if BITS == 5 or BITS == 6:
        extra = _load_extra(planes[1], n, block, N, K, BLOCKS, 7 - BITS, DIVIDES)
    more = scales
    if SCALES == "affine":
        more = load_scales(planes[2] + 16, n, block, N, K, BLOCKS, count, DIVIDES)
    if SCALES == "k" or SCALES == "q6":
        more = _load_above(planes[3], n, block, N, K, BLOCKS, DIVIDES)
    return words, extra, scales, more


@triton.jit
def _spread(scale, N: tl.constexpr, BLOCKS: tl.constexpr):
    """Broadcast the scale of an output and block to all words of the block."""
    per_word = tl.broadcast_to(scale[:, :, None], (N, BLOCKS, 16))
    return tl.reshape(per_word, (N, BLOCKS * 16))


@triton.jit
def _low_half(word):
    return (word & 0xFFFF).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def _high_half(word):
    return (word >> 16).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def _byte(word, INDEX: tl.constexpr, SIGNED: tl.constexpr):
    """Return a byte of a word, below 64 or signed, times 2^54, without a conversion.

    As the upper mantissa bits of 2^60, from which that is subtracted.
    """
    if SIGNED:
        upper = ((word >> (8 * INDEX)) & 255 ^ 128) << 15
        result = ((upper | 0x5D800000).to(tl.float32, bitcast=True) - 1.5 * 2.0**60) * 4.0
    else:
        upper = ((word >> (8 * INDEX)) & 63) << 17
        result = (upper | 0x5D800000).to(tl.float32, bitcast=True) - 2.0**60
    return result


@triton.jit
def _factors(scales, more, GROUP: tl.constexpr, SCALES: tl.constexpr):
    """Return scale and offset of the weights in position GROUP of words, exactly."""
    if SCALES == "k":
        scale = _byte(scales, GROUP // 2 * 2, False) * (_low_half(more) * 2.0**-54)
        offset = -_byte(scales, GROUP // 2 * 2 + 1, False) * (_high_half(more) * 2.0**-54)
    elif SCALES == "q6":
        scale = _byte(scales, GROUP, True) * (_low_half(more) * 2.0**-54)
        offset = scale * 0.0
    elif SCALES == "affine":
        word = scales if GROUP < 2 else more
        scale, offset = _low_half(word), _high_half(word)
    else:
        scale = _low_half(scales) if GROUP < 2 else _high_half(scales)
        offset = scale * 0.0
    return scale, offset


@triton.jit
def _pair(scales, more, GROUP: tl.constexpr, BITS: tl.constexpr, SCALES: tl.constexpr):
    """Return scale and offset of values' signs and magnitudes, as two bfloat16 in a word."""
    scale, offset = _factors(scales, more, GROUP, SCALES)
    if SCALES == "affine":
        offset += scale * (2.0 ** (BITS - 1) - 0.5)
    elif BITS < 8:
        offset = scale * -0.5
    scale = scale * 2.0**64 * 2.0 ** (EXPONENT_OF_ONE + BITS - 64)
    return tl.inline_asm_elementwise(
        "cvt.rn.bf16x2.f32 $0, $2, $1;",
        "=r,r,r",
        [scale, offset],
        dtype=tl.int32,
        is_pure=True,
        pack=1,
    )


@triton.jit
def _bf16_product(bits, scale_bits, dtype: tl.constexpr):
    """Multiply two tensors of bfloat16 bits."""
    value = (bits << 16).to(tl.float32, bitcast=True)
    return (value * (scale_bits << 16).to(tl.float32, bitcast=True)).to(dtype)


@triton.jit
def unpack_nvfp4(
    words, scales, N: tl.constexpr, BLOCKS: tl.constexpr, dtype: tl.constexpr, USE_PTX: tl.constexpr
):
    """Unpack [N, 16 * BLOCKS] words and [N, BLOCKS] scales to four tiles, one per weight of a word.

    Both ways give the same bits.
    """
    first = _spread((scales & 0x0FF00FF0) | 0x70007000, N, BLOCKS)
    rotated = (scales << 8) | ((scales >> 24) & 0xFF)
    second = _spread((rotated & 0x0FF00FF0) | 0x70007000, N, BLOCKS)
    if USE_PTX:
        a, b, c, d = tl.inline_asm_elementwise(
            UNPACK_NVFP4,
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
def _weight(
    part,
    extra,
    scales,
    more,
    POSITION: tl.constexpr,
    N: tl.constexpr,
    BLOCKS: tl.constexpr,
    dtype: tl.constexpr,
    BITS: tl.constexpr,
    SCALES: tl.constexpr,
    PART: tl.constexpr,
):
    """Compute the weights in one position of words in float32, rounded to `dtype` at the end."""
    half: tl.constexpr = 2 ** (BITS - 1)
    if BITS == 8:
        code = (part >> (8 * POSITION)) & 255
        sign, magnitude = code >> 7, code & 127
        q = tl.where(sign == 1, tl.where(magnitude == 0, -128, -magnitude), magnitude)
    else:
        low: tl.constexpr = BITS - 4
        sign, magnitude = (part >> 15) & 1, ((part >> 4) & 7) << low
        if low > 0:
            magnitude |= (extra.to(tl.int32) >> (4 * PART + low * POSITION)) & (2**low - 1)
        q = tl.where(sign == 1, -1 - magnitude, magnitude)
    scale, offset = _factors(scales, more, POSITION, SCALES)
    if SCALES == "k" or SCALES == "affine":
        product = (q + half).to(tl.float32) * _spread(scale, N, BLOCKS)
        weight = product + _spread(offset, N, BLOCKS)
    else:
        weight = q.to(tl.float32) * _spread(scale, N, BLOCKS)
    return weight.to(dtype)


@triton.jit
def _unpack_exact(
    words,
    extra,
    scales,
    more,
    N: tl.constexpr,
    BLOCKS: tl.constexpr,
    dtype: tl.constexpr,
    BITS: tl.constexpr,
    SCALES: tl.constexpr,
    PART: tl.constexpr,
):
    if BITS == 8:
        p0, p1, p2, p3 = words, words, words, words
    else:
        p0 = words.to(tl.int32) & 0xFFFF
        p1 = ((p0 >> 8) | (p0 << 8)) & 0xFFFF
        p2, p3 = p0 << 4, p1 << 4
    a = _weight(p0, extra, scales, more, 0, N, BLOCKS, dtype, BITS, SCALES, PART)
    b = _weight(p1, extra, scales, more, 1, N, BLOCKS, dtype, BITS, SCALES, PART)
    c = _weight(p2, extra, scales, more, 2, N, BLOCKS, dtype, BITS, SCALES, PART)
    d = _weight(p3, extra, scales, more, 3, N, BLOCKS, dtype, BITS, SCALES, PART)
    return a, b, c, d


@triton.jit
def _unpack_ptx(
    words,
    extra,
    scales,
    more,
    N: tl.constexpr,
    BLOCKS: tl.constexpr,
    BITS: tl.constexpr,
    SCALES: tl.constexpr,
    PART: tl.constexpr,
    SHARE: tl.constexpr,
):
    if SCALES == "k":
        pair0, pair2 = tl.inline_asm_elementwise(
            K_PAIRS_4 if BITS == 4 else K_PAIRS_5,
            "=r,=r,r,r",
            [scales, more],
            dtype=(tl.int32, tl.int32),
            is_pure=not (SHARE and BITS == 4),
            pack=1,
        )
    else:
        pair0 = _pair(scales, more, 0, BITS, SCALES)
        pair2 = _pair(scales, more, 2, BITS, SCALES)
    first, third = _spread(pair0, N, BLOCKS), _spread(pair2, N, BLOCKS)
    if BITS == 4 or BITS == 8:
        a, b, c, d = tl.inline_asm_elementwise(
            UNPACK_8 if BITS == 8 else UNPACK_4,
            "=r,=r,=r,=r,r,r,r,r,r,r" if BITS == 8 else "=r,=r,=r,=r,r,r,r,r,r",
            [words, first, third],
            dtype=(tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16),
            is_pure=True,
            pack=2,
        )
    elif BITS == 5:
        a, b, c, d = tl.inline_asm_elementwise(
            UNPACK_5_ODD if PART == 1 else UNPACK_5,
            "=r,=r,=r,=r,r,r,r,r,r,r",
            [words, extra, first, third],
            dtype=(tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16),
            is_pure=True,
            pack=2,
        )
    else:
        second = _spread(_pair(scales, more, 1, BITS, SCALES), N, BLOCKS)
        fourth = _spread(_pair(scales, more, 3, BITS, SCALES), N, BLOCKS)
        a, b, c, d = tl.inline_asm_elementwise(
            UNPACK_6,
            "=r,=r,=r,=r,r,r,r,r,r,r,r,r,r,r",
            [words, extra, first, second, third, fourth],
            dtype=(tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16),
            is_pure=True,
            pack=2,
        )
    return a, b, c, d


@triton.jit
def unpack(
    packed,
    PART: tl.constexpr,
    N: tl.constexpr,
    BLOCKS: tl.constexpr,
    dtype: tl.constexpr,
    BITS: tl.constexpr,
    SCALES: tl.constexpr,
    USE_PTX: tl.constexpr,
    SHARE: tl.constexpr = False,
):
    """Unpack what `load_packed` returns to four tiles [N, 16 * BLOCKS], one per weight of a word.

    PART is 1 for the second of two blocks that share extra bytes, if it is loaded alone. SHARE:
    scales are computed once and exchanged, which costs barriers, not by all threads that need them.
    """
    words, extra, scales, more = packed
    if SCALES == "nvfp4":
        tiles = unpack_nvfp4(words, scales, N, BLOCKS, dtype, USE_PTX)
    else:
        if BITS == 5 or BITS == 6:
            extra = extra.to(tl.int16)
        if BITS == 5 and BLOCKS > 1:
            odd = tl.arange(0, 16 * BLOCKS) // 16 % 2 * 4
            extra = (extra.to(tl.int32) >> odd[None, :]).to(tl.int16)
        if USE_PTX:
            tiles = _unpack_ptx(words, extra, scales, more, N, BLOCKS, BITS, SCALES, PART, SHARE)
        else:
            tiles = _unpack_exact(words, extra, scales, more, N, BLOCKS, dtype, BITS, SCALES, PART)
    return tiles
