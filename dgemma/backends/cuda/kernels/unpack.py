"""Unpacking of NVFP4 and GGUF weights in registers, for the experts' GEMMs and GEMVs.

A word has four weights of one output, inputs c, 16 + c, 32 + c and 48 + c of a block of 64; see
`quant/nvfp4.py` and `quant/gguf_tiles.py` for the order of bits. In PTX a weight takes about one
and a half to two and a half instructions: its bits are brought to the sign and the mantissa of a
bfloat16, two weights to a register, and one `fma` multiplies them by their scale and adds their
offset. Scale and offset of a GGUF group are computed in float32 and rounded to bfloat16. In Triton,
which the interpreter can run, weights are computed in float32 and rounded once.

N outputs of a tile, C words of an output, B blocks of 64 inputs.
"""

import struct
from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from dgemma.backends.cuda.device import is_interpreted
from dgemma.quant.gguf_tiles import EXPONENT, TiledBlocks
from dgemma.quant.nvfp4 import TiledNvfp4

PackedWeight = TiledNvfp4 | TiledBlocks

EXPONENT_OF_ONE = tl.constexpr(EXPONENT)
# Two words in; out, the first weights of both in one register, the second in the next, and so on,
# each times its scale. Both words are neighbours: of one output and one block in any layout.
UNPACK_NVFP4: tl.constexpr = tl.constexpr("""{
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

REGISTERS = (
    ".reg .b32 q, s, t, h, v0, v1, v2, v3, a, b;\n.reg .b16 s0, c0, s1, c1, s2, c2, s3, c3;\n"
)


def _scaled(group_of: tuple[int, ...], first: int) -> str:
    """Multiply four registers by their scales; groups have two operands each, from `first` on."""
    groups = sorted(set(group_of))
    text = "".join(f"mov.b32 {{s{g}, c{g}}}, ${first + 2 * g};\n" for g in groups)
    for j, g in enumerate(group_of):
        if j == 0 or group_of[j - 1] != g:
            text += f"mov.b32 a, {{s{g}, s{g}}};\nmov.b32 b, {{c{g}, c{g}}};\n"
        text += f"fma.rn.bf16x2 ${j}, v{j}, a, b;\n"
    return text


def _signs_and_magnitudes(fixed: int) -> str:
    """Bring sign and three bits of four values to their places, and set a bit below them.

    `lop3` 0xEA is (a & b) | c.
    """
    text = "prmt.b32 q, $4, 0, 0x2301;\nshl.b32 s, $4, 4;\nshl.b32 t, q, 4;\n"
    bits = f"0x{fixed:04X}{fixed:04X}"
    for j, source in enumerate(("$4", "q", "s", "t")):
        operation = f"lop3.b32 v{j}, {source}, 0x80708070, {bits}, 0xEA;\n"
        text += operation if fixed else f"and.b32 v{j}, {source}, 0x80708070;\n"
    return text


def _lower_bits(low: int, part: int = 0) -> str:
    """Add the lower bits of magnitudes from the extra bytes, and the half below them."""
    mask, half = ((1 << low) - 1) << (4 - low), 1 << (3 - low)
    text = ""
    for j in range(4):
        shift = 4 - low - low * j - 4 * part
        moved = "$5" if shift == 0 else "t"
        if shift:
            text += f"{'shl.b32' if shift > 0 else 'shr.u32'} t, $5, {abs(shift)};\n"
        text += f"lop3.b32 t, {moved}, 0x{mask:04X}{mask:04X}, 0x{half:04X}{half:04X}, 0xEA;\n"
        text += f"or.b32 v{j}, v{j}, t;\n"
    return text


def _signed_bytes() -> str:
    """Bring sign and magnitude of four bytes of two words to their places."""
    text = ""
    for j in range(4):
        text += f"prmt.b32 t, $4, $5, 0x{4 + j}{4 + j}{j}{j};\nand.b32 v{j}, t, 0x807F807F;\n"
    return text


UNPACK_4: tl.constexpr = tl.constexpr(
    "{\n" + REGISTERS + _signs_and_magnitudes(8) + _scaled((0, 0, 1, 1), 5) + "}"
)
UNPACK_5: tl.constexpr = tl.constexpr(
    "{\n" + REGISTERS + _signs_and_magnitudes(0) + _lower_bits(1) + _scaled((0, 0, 1, 1), 6) + "}"
)
UNPACK_5_ODD: tl.constexpr = tl.constexpr(
    "{\n"
    + REGISTERS
    + _signs_and_magnitudes(0)
    + _lower_bits(1, part=1)
    + _scaled((0, 0, 1, 1), 6)
    + "}"
)
UNPACK_6: tl.constexpr = tl.constexpr(
    "{\n" + REGISTERS + _signs_and_magnitudes(0) + _lower_bits(2) + _scaled((0, 1, 2, 3), 6) + "}"
)
UNPACK_8: tl.constexpr = tl.constexpr(
    "{\n" + REGISTERS + _signed_bytes() + _scaled((0, 0, 1, 1), 6) + "}"
)


def _k_pairs(bits: int) -> str:
    """Compute scale and offset of two groups from their 6-bit integers and the shared scales.

    A byte becomes a float times 2^52 as the upper mantissa bits of 2^59, which is subtracted. The
    scale is times 2^(125 + bits), the offset (half - 1/2) * scale - min.
    """
    middle = (2 ** (bits - 1) - 0.5) * 2.0 ** -(EXPONENT + bits)
    text = """.reg .b16 d, m;
.reg .b32 a;
.reg .f32 df, mf, s, t;
mov.b32 {d, m}, $3;
cvt.f32.f16 df, d;
cvt.f32.f16 mf, m;
"""
    text += f"mul.f32 df, df, {_float(2.0 ** (EXPONENT + bits - 52))};\n"
    text += f"mul.f32 mf, mf, {_float(-(2.0**-52))};\n"
    for group in range(2):
        for name, index in (("s", 2 * group), ("t", 2 * group + 1)):
            text += f"prmt.b32 a, $2, 0x5D000000, 0x7{index}44;\n"
            text += f"mov.b32 {name}, a;\nadd.f32 {name}, {name}, {_float(-(2.0**59))};\n"
        text += f"mul.f32 s, s, df;\nmul.f32 t, t, mf;\nfma.rn.f32 t, s, {_float(middle)}, t;\n"
        text += f"cvt.rn.bf16x2.f32 ${group}, t, s;\n"
    return text


def _float(value: float) -> str:
    """Write a float as PTX does."""
    return f"0f{struct.unpack('<I', struct.pack('<f', value))[0]:08X}"


K_PAIRS_4: tl.constexpr = tl.constexpr("{\n" + _k_pairs(4) + "}")
K_PAIRS_5: tl.constexpr = tl.constexpr("{\n" + _k_pairs(5) + "}")


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


def packed_kwargs(weight: PackedWeight, *, ptx: bool) -> dict[str, Any]:
    if isinstance(weight, TiledNvfp4):
        return {"BITS": 4, "SCALES": "nvfp4", "USE_PTX": ptx and use_ptx()}
    is_fast = ptx and use_ptx() and not weight.is_exact
    return {"BITS": weight.format.bits, "SCALES": weight.format.scales, "USE_PTX": is_fast}


# --- loads


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


# --- scales


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
def _factors(scales, more, GROUP: tl.constexpr, BITS: tl.constexpr, SCALES: tl.constexpr):
    """Return scale and offset of the weights in position GROUP of words: scale * (q - half + 1/2).

    The scale is times 2^60, so that it cannot be subnormal.
    """
    middle: tl.constexpr = 2.0 ** (BITS - 1) - 0.5
    if SCALES == "k":
        scale = _byte(scales, GROUP // 2 * 2, False) * (_low_half(more) * 64.0)
        minimum = _byte(scales, GROUP // 2 * 2 + 1, False) * (_high_half(more) * 2.0**-54)
        offset = scale * (middle * 2.0**-60) - minimum
    elif SCALES == "q6":
        scale = _byte(scales, GROUP, True) * (_low_half(more) * 64.0)
        offset = scale * -(2.0**-61)
    elif SCALES == "affine":
        word = scales if GROUP < 2 else more
        scale = _low_half(word) * 2.0**60
        offset = scale * (middle * 2.0**-60) + _high_half(word)
    else:
        half = _low_half(scales) if GROUP < 2 else _high_half(scales)
        scale = half * 2.0**60
        offset = half * (0.0 if BITS == 8 else -0.5)
    return scale, offset


@triton.jit
def _pair(scales, more, GROUP: tl.constexpr, BITS: tl.constexpr, SCALES: tl.constexpr):
    """Return scale and offset as two bfloat16 in a word."""
    scale, offset = _factors(scales, more, GROUP, BITS, SCALES)
    scale = scale * 2.0 ** (EXPONENT_OF_ONE + BITS - 60)
    return tl.inline_asm_elementwise(
        "cvt.rn.bf16x2.f32 $0, $2, $1;",
        "=r,r,r",
        [scale, offset],
        dtype=tl.int32,
        is_pure=True,
        pack=1,
    )


# --- weights


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
    if SCALES == "k":
        scale = _byte(scales, POSITION // 2 * 2, False) * (_low_half(more) * 2.0**-54)
        offset = -_byte(scales, POSITION // 2 * 2 + 1, False) * (_high_half(more) * 2.0**-54)
    elif SCALES == "affine":
        word = scales if POSITION < 2 else more
        scale, offset = _low_half(word), _high_half(word)
    elif SCALES == "q6":
        scale = _byte(scales, POSITION, True) * (_low_half(more) * 2.0**-54)
    else:
        scale = _low_half(scales) if POSITION < 2 else _high_half(scales)
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
    if BITS == 4:
        a, b, c, d = tl.inline_asm_elementwise(
            UNPACK_4,
            "=r,=r,=r,=r,r,r,r,r,r",
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
    elif BITS == 6:
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
    else:
        a, b, c, d = tl.inline_asm_elementwise(
            UNPACK_8,
            "=r,=r,=r,=r,r,r,r,r,r,r",
            [words, first, third],
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
