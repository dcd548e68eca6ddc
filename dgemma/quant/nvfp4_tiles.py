"""Four-bit weights in the order the kernels read them: unpacked by few operations, in long runs.

A block is 16 outputs by 64 inputs. Each output has 16 words of 16 bits and one of 32 in it: word
`c` holds the numbers of inputs c, 16 + c, 32 + c and 48 + c, and the 32 bits are the scales of the
four groups of 16 inputs, so all that stands in one place of a word shares a scale. Nothing is
added: 4.5 bits a weight.

The bits of a word are mixed so that each number comes out where a bfloat16 has its sign and the
last two bits of its exponent and the first of its mantissa, by one or two shifts, one exclusive or
and one mask (`unmix`). Read as a bfloat16 that is the number times 2^-126. A scale is kept as the
bits of its bfloat16 times 2^119, less those that are always the same; the product of both is exact,
and lacks 2^7, which is in the factor.

E experts, O outputs, K inputs, W words.
"""

from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from dgemma.errors import UsageError
from dgemma.quant.nvfp4 import GROUP, Packed

ROWS, DEPTH = 16, 64  # of a block
GROUPS = DEPTH // GROUP
MASK = 0x81C0  # sign, two bits of the exponent, one of the mantissa
SCALE_MASK, SCALE_BITS = 0x0FF00FF0, 0x70007000
LACKS = 2.0**7


class Laid(NamedTuple):
    """Stacked matrices in four bits, in the kernels' order."""

    words_EW: Tensor  # int16: [E, O / 16, K / 64, 16, 16], flat from the second on
    scales_EW: Tensor  # int32: [E, O / 16, K / 64, 16], the same
    factor_EH: Tensor  # float32, times 2^7; H parts of the outputs, equally long (gate and up: 2)
    outputs: int
    inputs: int

    def whole(self, expert: int) -> Tensor:
        """Dequantize one expert to float32, rounded once."""
        words = self.words_EW[expert].view(-1, self.inputs // DEPTH, ROWS, DEPTH // GROUPS)
        scales = self.scales_EW[expert].view(-1, self.inputs // DEPTH, ROWS)
        numbers = unmix(words.int() & 0xFFFF)  # [..., 16 words, 4 parts]
        parts = _as_float(numbers) * _as_float(_scale_bits(scales))[..., None, :]
        blocks = parts.transpose(-1, -2).flatten(-2)  # rows, depth
        matrix = blocks.transpose(1, 2).reshape(self.factor_EH.shape[1], -1, self.inputs)
        return (matrix * self.factor_EH[expert][:, None, None]).flatten(0, 1)


def fits(outputs: int, inputs: int) -> bool:
    return outputs % ROWS == 0 and inputs % DEPTH == 0


def unmix(word: Tensor) -> Tensor:
    """The four numbers of words (0 to 65535), as the bits of a bfloat16; a new last dimension."""
    swapped = ((word >> 8) | (word << 8)) & 0xFFFF
    mixed = (word, swapped << 4, (word << 2) ^ (word << 6), (word << 2) ^ swapped)
    return torch.stack(mixed, -1) & MASK


def empty(experts: int, outputs: int, inputs: int, parts: int, device: torch.device) -> Laid:
    """Room for so many matrices."""
    if not fits(outputs // parts, inputs):
        raise UsageError(
            f"4-bit kernels take multiples of {ROWS} outputs and {DEPTH} inputs, not "
            f"{outputs // parts} and {inputs}"
        )
    size = outputs * inputs
    words_EW = torch.empty(experts, size // 4, dtype=torch.int16, device=device)
    scales_EW = torch.empty(experts, size // DEPTH, dtype=torch.int32, device=device)
    factor_EH = torch.empty(experts, parts, dtype=torch.float32, device=device)
    return Laid(words_EW, scales_EW, factor_EH, outputs, inputs)


def lay(packed: Packed, into: Laid, expert: int, part: int = 0) -> None:
    """Put a matrix into its place. A group whose scale is zero becomes one of zeros."""
    parts = into.factor_EH.shape[1]
    words, scales = blocks(packed)
    for room, filled in ((into.words_EW, words), (into.scales_EW, scales)):
        room[expert].view(parts, -1)[part].copy_(filled.flatten())
    into.factor_EH[expert, part] = packed.factor * LACKS


def lay_many(packed: Packed, into: Laid, begin: int) -> None:
    """Put whole stacked matrices, [E, O, I] with a factor each, into their places from one on."""
    numbers_EOI, scale_EOG, factor_E11 = packed
    count = len(numbers_EOI)
    rows = Packed(numbers_EOI.flatten(0, 1), scale_EOG.flatten(0, 1), factor_E11)
    for room, filled in zip((into.words_EW, into.scales_EW), blocks(rows), strict=True):
        room[begin : begin + count].copy_(filled.reshape(count, -1))
    into.factor_EH[begin : begin + count] = factor_E11.view(count, 1) * LACKS


def blocks(packed: Packed) -> tuple[Tensor, Tensor]:
    """Words and scales of a matrix, block by block."""
    outputs, half = packed.numbers_OI.shape
    scale = packed.scale_OG.view(torch.uint8).int().view(outputs, -1, GROUPS) & 0x7F
    code = torch.stack([packed.numbers_OI & 15, packed.numbers_OI >> 4], -1).int()
    code = code.view(outputs, half * 2 // DEPTH, GROUPS, GROUP) * (scale > 0)[..., None]
    index = code[:, :, 0] | code[:, :, 1] << 4 | code[:, :, 2] << 8 | code[:, :, 3] << 12
    table = _mixed(packed.numbers_OI.device)
    words = table[index].view(-1, ROWS, *index.shape[1:]).transpose(1, 2)
    bits = _scale_code(scale)
    joined = bits[..., 0] << 4 | bits[..., 1] << 20 | bits[..., 3] << 12
    joined = joined | bits[..., 2] >> 4 | (bits[..., 2] & 15) << 28
    return words, joined.view(-1, ROWS, joined.shape[-1]).transpose(1, 2)


@cache
def _mixed(device: torch.device) -> Tensor:
    """The word of each four numbers: `unmix` gives each four exactly once."""
    word = torch.arange(1 << 16, device=device)
    bits = unmix(word)
    codes = (bits >> 12 & 8) | (bits >> 6 & 7)
    index = (codes << torch.arange(0, 16, 4, device=device)).sum(-1)
    table = torch.empty_like(word)
    table[index] = word
    return table.short()


def _scale_code(byte: Tensor) -> Tensor:
    """Five bits of an exponent and three of a mantissa, of positive e4m3 numbers; 1.0 for zero."""
    number = byte.to(torch.uint8).view(torch.float8_e4m3fn).float()
    number = torch.where(number > 0, number, 1.0) * 2.0**119
    return number.view(torch.int32) >> 20 & 0xFF


def _scale_bits(joined: Tensor) -> Tensor:
    """The four scales as the bits of bfloat16 numbers, in a new last dimension."""
    turned = joined << 8 | (joined >> 24 & 0xFF)
    pairs = [(word & SCALE_MASK) | SCALE_BITS for word in (joined, turned)]
    return torch.stack([part for pair in pairs for part in (pair & 0xFFFF, pair >> 16)], -1)


def _as_float(bits: Tensor) -> Tensor:
    """Reinterpret bits as bfloat16 numbers."""
    return (bits.int() << 16).view(torch.float32)
