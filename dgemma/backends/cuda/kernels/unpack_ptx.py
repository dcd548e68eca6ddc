"""The PTX that unpacks NVFP4 and GGUF weights, two to a register; see `unpack.py`."""

import struct

import triton.language as tl

from dgemma.quant.gguf_tiles import EXPONENT

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
