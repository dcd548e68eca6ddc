"""NVFP4 weights: e2m1 values, an e4m3 scale for each 16 of them, a float32 scale for a matrix.

    weight = e2m1 * scale * global scale

The product of the first two has six significant bits and is exact in bfloat16; the global scale
brings the largest block scale near the top of its range. Two values share a byte, the first in its
low half (`Nvfp4Tensor`, as in checkpoints).

The kernels read a tiled layout (`TiledNvfp4`). A tile is 16 outputs by 64 inputs. Each output has
16 words of 16 bits and one of 32 in it: word `c` holds the values of inputs c, 16 + c, 32 + c and
48 + c, and the 32 bits are the scales of the four groups of 16 inputs, so that the values in one
position of the words share a scale. No padding: 4.5 bits a weight.

The bits of a word are permuted so that each value lands on the sign, the last two exponent bits and
the first mantissa bit of a bfloat16 by one or two shifts, one xor and one mask (`unpack_words`).
Read as a bfloat16 that is the value times 2^-126. A scale is stored as the bits of its bfloat16
times 2^119, less those that are always the same; the product of both is exact but for a factor of
2^7, which is in the global scale.

E experts, O outputs, I inputs, G groups of sixteen inputs, W words, H parts of the outputs.
"""

from collections.abc import Iterable
from functools import cache
from itertools import pairwise
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dgemma.errors import UsageError
from dgemma.model.gemma import Experts
from dgemma.model.moe import GroupedLinear, Linear, moe_forward, per_expert
from dgemma.quant.fp8 import E4M3, FP8_MAX

GROUP = 16
E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # of codes 0 to 7; 8 to 15 are negative
E2M1_MAX, MIN_SCALE = 6.0, 2.0**-9
TILE_ROWS, TILE_DEPTH = 16, 64
TILE_GROUPS = TILE_DEPTH // GROUP
VALUE_MASK = 0x81C0  # sign, two bits of the exponent, one of the mantissa
SCALE_MASK, SCALE_BITS = 0x0FF00FF0, 0x70007000
TILE_FACTOR = 2.0**7
EXPERTS_AT_ONCE = 4  # a released layer's experts take 3 GB in float32


class Nvfp4Tensor(NamedTuple):
    """A matrix in NVFP4, as in checkpoints."""

    values_OI: Tensor  # uint8, half as many as inputs
    scale_OG: Tensor  # e4m3
    global_scale: Tensor  # float32, 0-d

    def dequantize(self) -> Tensor:
        """Return float32 weights, rounded once."""
        scale_OG = self.scale_OG.float()
        groups_OGJ = unpack(self.values_OI).view(*scale_OG.shape, GROUP)
        return (groups_OGJ * scale_OG[..., None] * self.global_scale).flatten(-2)

    def to(self, device: torch.device) -> "Nvfp4Tensor":
        return Nvfp4Tensor(*(tensor.to(device, non_blocking=True) for tensor in self))


def unpack(values: Tensor) -> Tensor:
    """Unpack bytes to e2m1 values in float32, twice as many in the last dimension."""
    codes = torch.tensor([*E2M1_VALUES, *(-v for v in E2M1_VALUES)], device=values.device)
    byte = torch.arange(256, device=values.device)
    pairs = torch.stack([codes[byte & 15], codes[byte >> 4]], -1)
    return pairs[values.int()].flatten(-2)


def global_scale_of(*weights: Tensor) -> Tensor:
    """Return the common global scale of these matrices."""
    largest = torch.stack([weight.abs().amax().float() for weight in weights]).amax()
    return torch.where(largest > 0, largest / (E2M1_MAX * FP8_MAX), 1.0)


def quantize(weight_OI: Tensor, global_scale: Tensor) -> Nvfp4Tensor:
    """Quantize per group: scale = absmax / E2M1_MAX; values round to nearest, ties to even."""
    if weight_OI.shape[-1] % GROUP:
        raise UsageError(f"rows of {weight_OI.shape[-1]} cannot be split into groups of {GROUP}")
    groups = weight_OI.float().reshape(*weight_OI.shape[:-1], -1, GROUP)
    scale_OG = groups.abs().amax(-1) / E2M1_MAX / global_scale
    scale_OG = scale_OG.clamp(MIN_SCALE, FP8_MAX).to(E4M3)
    code = _nearest(groups / (scale_OG.float() * global_scale)[..., None]).flatten(-2)
    return Nvfp4Tensor(code[..., 0::2] | code[..., 1::2] << 4, scale_OG, global_scale)


def _nearest(x: Tensor) -> Tensor:
    """Return codes of the nearest e2m1 values: the number of midpoints that x exceeds.

    On a midpoint the even code is taken, so every second midpoint counts when it is reached.
    """
    size = x.abs()
    code = (x < 0).to(torch.uint8) << 3
    for index, (low, high) in enumerate(pairwise(E2M1_VALUES)):
        midpoint = (low + high) / 2
        code += size >= midpoint if index % 2 else size > midpoint
    return code


# --- tiles


class TiledNvfp4(NamedTuple):
    """Stacked NVFP4 matrices in the layout of the kernels."""

    words_EW: Tensor  # int16: [E, O / 16, I / 64, 16, 16], flat from the second on
    scales_EW: Tensor  # int32: [E, O / 16, I / 64, 16], likewise
    global_scale_EH: Tensor  # float32, times 2^7; of H equal parts of the outputs (gate and up: 2)
    outputs: int
    inputs: int

    @classmethod
    def empty(
        cls, experts: int, outputs: int, inputs: int, parts: int, device: torch.device
    ) -> "TiledNvfp4":
        if not can_tile(outputs // parts, inputs):
            raise UsageError(
                f"NVFP4 kernels take multiples of {TILE_ROWS} outputs and {TILE_DEPTH} inputs, not "
                f"{outputs // parts} and {inputs}"
            )
        size = outputs * inputs
        words_EW = torch.empty(experts, size // 4, dtype=torch.int16, device=device)
        scales_EW = torch.empty(experts, size // TILE_DEPTH, dtype=torch.int32, device=device)
        global_scale_EH = torch.empty(experts, parts, dtype=torch.float32, device=device)
        return cls(words_EW, scales_EW, global_scale_EH, outputs, inputs)

    def write(self, weight: Nvfp4Tensor, expert: int, part: int = 0) -> None:
        """Tile one matrix. A group with scale zero becomes a group of zeros."""
        parts = self.global_scale_EH.shape[1]
        for out, tiled in zip((self.words_EW, self.scales_EW), to_tiles(weight), strict=True):
            out[expert].view(parts, -1)[part].copy_(tiled.flatten())
        self.global_scale_EH[expert, part] = weight.global_scale * TILE_FACTOR

    def write_stacked(self, weight: Nvfp4Tensor, begin: int) -> None:
        """Tile stacked matrices [E, O, I] with a global scale each, from expert `begin` on."""
        values_EOI, scale_EOG, global_scale_E11 = weight
        experts = slice(begin, begin + len(values_EOI))
        rows = Nvfp4Tensor(values_EOI.flatten(0, 1), scale_EOG.flatten(0, 1), global_scale_E11)
        for out, tiled in zip((self.words_EW, self.scales_EW), to_tiles(rows), strict=True):
            out[experts].copy_(tiled.reshape(len(values_EOI), -1))
        self.global_scale_EH[experts] = global_scale_E11.view(-1, 1) * TILE_FACTOR

    def dequantize(self, expert: int) -> Tensor:
        """Return one expert's weights in float32, rounded once."""
        shape = (-1, self.inputs // TILE_DEPTH, TILE_ROWS)
        words = self.words_EW[expert].view(*shape, TILE_DEPTH // TILE_GROUPS)
        values = unpack_words(words.int() & 0xFFFF)  # [..., 16 words, 4 groups]
        scales = _as_float(_unpack_scales(self.scales_EW[expert].view(shape)))
        tiles = (_as_float(values) * scales[..., None, :]).transpose(-1, -2).flatten(-2)
        parts = self.global_scale_EH.shape[1]
        matrix = tiles.transpose(1, 2).reshape(parts, -1, self.inputs)
        return (matrix * self.global_scale_EH[expert][:, None, None]).flatten(0, 1)


def can_tile(outputs: int, inputs: int) -> bool:
    return outputs % TILE_ROWS == 0 and inputs % TILE_DEPTH == 0


@torch.no_grad()
def quantize_tiled(weight_EOI: Tensor, parts: int) -> TiledNvfp4:
    """Quantize stacked weights a few experts at a time, without a second full copy.

    Parts of an expert's outputs share a global scale.
    """
    experts, outputs, inputs = weight_EOI.shape
    tiled = TiledNvfp4.empty(experts, outputs, inputs, parts, weight_EOI.device)
    for begin in range(0, experts, EXPERTS_AT_ONCE):
        some_EOI = weight_EOI[begin : begin + EXPERTS_AT_ONCE]
        scale_E = torch.stack([global_scale_of(weight_OI) for weight_OI in some_EOI])
        tiled.write_stacked(quantize(some_EOI, scale_E[:, None, None]), begin)
    return tiled


def to_tiles(weight: Nvfp4Tensor) -> tuple[Tensor, Tensor]:
    """Return words and scales of a matrix, tile by tile."""
    outputs, half = weight.values_OI.shape
    scale = weight.scale_OG.view(torch.uint8).int().view(outputs, -1, TILE_GROUPS) & 0x7F
    code = torch.stack([weight.values_OI & 15, weight.values_OI >> 4], -1).int()
    code = code.view(outputs, half * 2 // TILE_DEPTH, TILE_GROUPS, GROUP) * (scale > 0)[..., None]
    index = code[:, :, 0] | code[:, :, 1] << 4 | code[:, :, 2] << 8 | code[:, :, 3] << 12
    table = _word_table(weight.values_OI.device)
    words = table[index].view(-1, TILE_ROWS, *index.shape[1:]).transpose(1, 2)
    bits = _scale_code(scale)
    packed = bits[..., 0] << 4 | bits[..., 1] << 20 | bits[..., 3] << 12
    packed = packed | bits[..., 2] >> 4 | (bits[..., 2] & 15) << 28
    return words, packed.view(-1, TILE_ROWS, packed.shape[-1]).transpose(1, 2)


def unpack_words(word: Tensor) -> Tensor:
    """Unpack words (0 to 65535) to four values, as bfloat16 bits, in a new last dimension."""
    swapped = ((word >> 8) | (word << 8)) & 0xFFFF
    values = (word, swapped << 4, (word << 2) ^ (word << 6), (word << 2) ^ swapped)
    return torch.stack(values, -1) & VALUE_MASK


@cache
def _word_table(device: torch.device) -> Tensor:
    """Return the word of each four codes: the inverse of `unpack_words`, which is a bijection."""
    word = torch.arange(1 << 16, device=device)
    bits = unpack_words(word)
    codes = (bits >> 12 & 8) | (bits >> 6 & 7)
    index = (codes << torch.arange(0, 16, 4, device=device)).sum(-1)
    table = torch.empty_like(word)
    table[index] = word
    return table.short()


def _scale_code(byte: Tensor) -> Tensor:
    """Five exponent and three mantissa bits of positive e4m3 values; 1.0 for zero."""
    value = byte.to(torch.uint8).view(E4M3).float()
    value = torch.where(value > 0, value, 1.0) * 2.0**119
    return value.view(torch.int32) >> 20 & 0xFF


def _unpack_scales(packed: Tensor) -> Tensor:
    """Unpack four scales, as bfloat16 bits, in a new last dimension."""
    rotated = packed << 8 | (packed >> 24 & 0xFF)
    pairs = [(word & SCALE_MASK) | SCALE_BITS for word in (packed, rotated)]
    return torch.stack([half for pair in pairs for half in (pair & 0xFFFF, pair >> 16)], -1)


def _as_float(bits: Tensor) -> Tensor:
    """Reinterpret bits as bfloat16."""
    return (bits.int() << 16).view(torch.float32)


# --- modules


class Nvfp4Experts(nn.Module):
    """A layer's experts in NVFP4, with 16-bit activations."""

    gate_up_words: Tensor
    gate_up_scales: Tensor
    gate_up_global_scale: Tensor
    down_words: Tensor
    down_scales: Tensor
    down_global_scale: Tensor

    def __init__(self, gate_up: TiledNvfp4, down: TiledNvfp4) -> None:
        super().__init__()
        self.width, self.inner = down.outputs, down.inputs
        for name, tiled in (("gate_up", gate_up), ("down", down)):
            self.register_buffer(f"{name}_words", tiled.words_EW)
            self.register_buffer(f"{name}_scales", tiled.scales_EW)
            self.register_buffer(f"{name}_global_scale", tiled.global_scale_EH)

    @classmethod
    def quantized(cls, source: Experts) -> "Nvfp4Experts":
        """Quantize 16-bit experts; gate and up of an expert share a global scale."""
        return cls(quantize_tiled(source.gate_up_proj, 2), quantize_tiled(source.down_proj, 1))

    @classmethod
    def from_tensors(
        cls,
        experts: Iterable[tuple[Nvfp4Tensor, Nvfp4Tensor, Nvfp4Tensor]],
        num_experts: int,
        device: torch.device,
    ) -> "Nvfp4Experts":
        """Tile a checkpoint's gate, up and down of each expert, without rounding."""
        both: tuple[TiledNvfp4, TiledNvfp4] | None = None
        for index, (gate, up, down) in enumerate(experts):
            if both is None:
                inner, width = len(gate.values_OI), 2 * gate.values_OI.shape[1]
                both = (
                    TiledNvfp4.empty(num_experts, 2 * inner, width, 2, device),
                    TiledNvfp4.empty(num_experts, width, inner, 1, device),
                )
            for part, weight in enumerate((gate, up)):
                both[0].write(weight.to(device), index, part)
            both[1].write(down.to(device), index)
        assert both is not None, "a model has experts"
        return cls(*both)

    @property
    def gate_up(self) -> TiledNvfp4:
        tensors = self.gate_up_words, self.gate_up_scales, self.gate_up_global_scale
        return TiledNvfp4(*tensors, 2 * self.inner, self.width)

    @property
    def down(self) -> TiledNvfp4:
        tensors = self.down_words, self.down_scales, self.down_global_scale
        return TiledNvfp4(*tensors, self.width, self.inner)

    def forward(self, x_TD: Tensor, topk_ids_TK: Tensor, topk_weights_TK: Tensor) -> Tensor:
        gate_up, down = nvfp4_grouped(self.gate_up), nvfp4_grouped(self.down)
        return moe_forward(x_TD, topk_ids_TK, topk_weights_TK, gate_up, down)


def nvfp4_grouped(weight: TiledNvfp4) -> GroupedLinear:
    """Multiply one expert at a time, dequantizing its weights."""

    def product(expert: int) -> Linear:
        return lambda x_TD: F.linear(x_TD.float(), weight.dequantize(expert)).to(x_TD.dtype)

    return per_expert([product(expert) for expert in range(len(weight.words_EW))])
