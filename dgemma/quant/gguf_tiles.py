"""GGUF blocks in the order that GPU kernels read: the same bits, rearranged at load.

A tile is 16 outputs by 64 inputs, as in `nvfp4.py`: word `c` of an output holds the values of
inputs c, 16 + c, 32 + c and 48 + c, so that the values in one position of the words share a scale.
Scales keep the file's integers, and nothing is rounded: `TiledBlocks.dequantize` equals
`BlockFormat.decode` bit for bit.

    w = scale * q - min      Q4_1, Q5_1, which store -min; times 6-bit integers: Q4_K, Q5_K
    w = scale * (q - half)   Q4_0, Q5_0; times an int8: Q6_K
    w = scale * q            Q8_0, signed

A value q of n bits is stored as sign and magnitude of q - half + 1/2, half = 2^(n-1), whose
magnitude is an integer and a half: a kernel gets it as a subnormal bfloat16 by a shift and a mask
that also sets the last bit. A 16-bit word has the sign and three bits of the magnitude of four
values, permuted so that one byte swap and two shifts reach all of them (`unpack_words`); what is
left of wider values is in the bytes of the plane `extra`. Q8_0 has 32-bit words of bytes with sign
and magnitude; its zero with a sign is -128.

E experts, O outputs, I inputs, W words; B blocks of 64 inputs of a row, C words of such a block,
J values of a word.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import prod
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dgemma.device import empty_cache
from dgemma.errors import UsageError
from dgemma.model.gemma import Experts
from dgemma.model.moe import GroupedLinear, Linear, moe_forward, per_expert
from dgemma.quant.gguf import (
    FORMATS,
    SUPER_BLOCK,
    BlockTensor,
    BlockWeight,
    fifth_bits,
    five_bit_values,
    k_nibbles,
    k_scales,
    nibbles,
    six_bit_values,
)
from dgemma.quant.gguf_encode import encode
from dgemma.quant.nvfp4 import TILE_DEPTH, TILE_ROWS, can_tile

BlockScales = Literal["symmetric", "affine", "k", "q6"]
WORDS = TILE_DEPTH // 4  # of an output in a tile
WEIGHTS_AT_ONCE = 1 << 24  # repacked together, with about forty bytes each
EXPONENT = 125  # a kernel multiplies a scale by 2^(125 + bits), which bfloat16 must hold
ROUNDING = 0.99


@dataclass(frozen=True, slots=True)
class TileFormat:
    """Bits of a value, and the kind of its scales."""

    name: str
    bits: int
    scales: BlockScales

    @property
    def extra_blocks(self) -> int:
        """Blocks of 64 inputs that share the bytes of the extra plane; 0: there is none."""
        return {5: 2, 6: 1}.get(self.bits, 0)

    @property
    def scale_words(self) -> int:
        return 2 if self.scales == "affine" else 1

    @property
    def has_super(self) -> bool:
        """True if the scales of 256 inputs share one or two more."""
        return self.scales in ("k", "q6")

    def num_bytes(self, shape: tuple[int, ...]) -> int:
        """Return the bytes of stacked matrices."""
        count, inputs = prod(shape), shape[-1]
        words = 8 if self.bits == 8 else 4
        scales = self.scale_words * 32 / TILE_DEPTH + self.has_super * 32 / SUPER_BLOCK
        extra = self.extra_bytes(inputs) * (count // inputs)
        return int(count * (words + scales) / 8) + extra

    def extra_bytes(self, inputs: int) -> int:
        """Return the bytes of the extra plane for one output."""
        blocks = inputs // TILE_DEPTH
        return WORDS * -(-blocks // self.extra_blocks) if self.extra_blocks else 0


TILE_FORMATS = {
    fmt.name: fmt
    for fmt in (
        TileFormat("Q4_0", 4, "symmetric"),
        TileFormat("Q5_0", 5, "symmetric"),
        TileFormat("Q8_0", 8, "symmetric"),
        TileFormat("Q4_1", 4, "affine"),
        TileFormat("Q5_1", 5, "affine"),
        TileFormat("Q4_K", 4, "k"),
        TileFormat("Q5_K", 5, "k"),
        TileFormat("Q6_K", 6, "q6"),
    )
}
BLOCK_FORMATS = {block.name: block for block in FORMATS.values()}


@dataclass(frozen=True, slots=True, kw_only=True)
class TiledBlocks:
    """Stacked matrices of one format in tiles; planes are flat from the second dimension on."""

    format: TileFormat
    outputs: int
    inputs: int
    words_EW: Tensor  # int16, Q8_0: int32; [E, O / 16, I / 64, 16, 16]
    extra_EW: Tensor  # int8 [E, O / 16, ceil(I / 64 / extra_blocks), 16, 16]; else empty
    scales_EW: Tensor  # int32 [E, O / 16, I / 64, scale_words, 16]
    super_EW: Tensor  # int32 [E, O / 16, I / 256, 16]; else empty
    is_exact: bool = False  # a kernel must compute weights in float32: out of range for bfloat16

    @classmethod
    def empty(
        cls, name: str, experts: int, outputs: int, inputs: int, device: torch.device | str
    ) -> "TiledBlocks":
        fmt = TILE_FORMATS[name]
        tiles = outputs // TILE_ROWS * (inputs // TILE_DEPTH)

        def plane(size: int, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.empty(experts, size, dtype=dtype, device=device)

        return cls(
            format=fmt,
            outputs=outputs,
            inputs=inputs,
            words_EW=plane(
                tiles * TILE_ROWS * WORDS, torch.int32 if fmt.bits == 8 else torch.int16
            ),
            extra_EW=plane(outputs * fmt.extra_bytes(inputs), torch.int8),
            scales_EW=plane(tiles * TILE_ROWS * fmt.scale_words),
            super_EW=plane(outputs * inputs // SUPER_BLOCK if fmt.has_super else 0),
        )

    @property
    def planes(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return self.words_EW, self.extra_EW, self.scales_EW, self.super_EW

    def with_planes(self, planes: tuple[Tensor, ...]) -> "TiledBlocks":
        """Return the same matrices on other memory."""
        words, extra, scales, above = planes or (torch.empty(0),) * 4
        return replace(self, words_EW=words, extra_EW=extra, scales_EW=scales, super_EW=above)

    def write(self, block_RB: Tensor, experts: slice) -> Tensor:
        """Repack the blocks of some experts; return a 0-d flag: kernels must be exact."""
        fmt = self.format
        count = experts.stop - experts.start
        values, scales, above = _fields(fmt, block_RB)
        code = _sign_magnitude(fmt, values).reshape(-1, self.inputs // TILE_DEPTH, 4, WORDS)
        words, extra = _to_words(fmt, code)
        tiled = (words, extra, scales.view(len(code), code.shape[1], -1), above.view(len(code), -1))
        for number, (plane, rows) in enumerate(zip(self.planes, tiled, strict=True)):
            if plane.shape[1] == 0:
                continue
            tile = rows.reshape(-1, TILE_ROWS, *rows.shape[1:]).transpose(1, 2)
            tile = tile.transpose(2, 3) if number == 2 else tile
            plane[experts].copy_(tile.reshape(count, -1))
        return _needs_float32(fmt, values, scales, above)

    def dequantize(self, expert: int) -> Tensor:
        """Return one expert's weights in float32, as `BlockFormat.decode` does."""
        fmt, blocks = self.format, self.inputs // TILE_DEPTH
        shape = (self.outputs // TILE_ROWS, blocks, TILE_ROWS)
        words = self.words_EW[expert].view(*shape, WORDS).transpose(1, 2)
        extra = self.extra_EW[expert]
        if fmt.extra_blocks:
            extra = extra.view(shape[0], -1, TILE_ROWS, WORDS).transpose(1, 2)
        code = _from_words(fmt, words, extra)
        scales = self.scales_EW[expert].view(-1, blocks, fmt.scale_words, TILE_ROWS)
        scales = scales.permute(0, 3, 1, 2).reshape(len(code), blocks, -1)
        above = self.super_EW[expert]
        if fmt.has_super:
            above = above.view(-1, self.inputs // SUPER_BLOCK, TILE_ROWS)
            above = above.transpose(1, 2).reshape(len(code), -1)
        scale, minimum = _factors(fmt, scales, above)  # of each 16 inputs
        values = _as_values(fmt, code).reshape(len(code), -1, 16)
        weight = values * scale.view(len(code), -1, 1)
        if minimum is not None:
            weight = weight - minimum.view(len(code), -1, 1)
        return weight.view(len(code), self.inputs)


def can_tile_blocks(weight: BlockWeight) -> bool:
    """True if kernels support the weight's shape and its single format."""
    names = {tensor.format.name for tensor in weight.tensors}
    outputs = [tensor.shape[-2] for tensor in weight.tensors]
    is_known = len(names) == 1 and names <= TILE_FORMATS.keys()
    return is_known and all(can_tile(size, weight.shape[-1]) for size in outputs)


@torch.no_grad()
def tile_blocks(weight: BlockWeight, device: torch.device | str) -> TiledBlocks:
    """Repack stacked matrices on a device, some experts at a time."""
    if not can_tile_blocks(weight):
        names = ", ".join(sorted({tensor.format.name for tensor in weight.tensors}))
        raise UsageError(
            f"experts of {list(weight.shape)} in {names} have no GPU kernels; these take "
            f"{', '.join(TILE_FORMATS)} in multiples of {TILE_ROWS} outputs and {TILE_DEPTH} "
            "inputs: use --quant nvfp4, or none"
        )
    experts, outputs, inputs = weight.shape
    block = weight.tensors[0].format
    tiled = TiledBlocks.empty(block.name, experts, outputs, inputs, device)
    count = max(1, WEIGHTS_AT_ONCE // (outputs * inputs))
    exact = torch.zeros((), dtype=torch.bool, device=device)
    for begin in range(0, experts, count):
        some = slice(begin, min(begin + count, experts))
        parts = [_expert_bytes(tensor, some).to(device) for tensor in weight.tensors]
        rows = parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)
        exact |= tiled.write(rows.reshape(-1, block.num_bytes), some)
        del parts, rows
    empty_cache(device)  # otherwise the next weight would reuse parts of this workspace
    return replace(tiled, is_exact=bool(exact))


def _expert_bytes(tensor: BlockTensor, experts: slice) -> Tensor:
    return tensor.packed.view(tensor.shape[0], -1)[experts]


# --- blocks to tiles


def _fields(fmt: TileFormat, block_RB: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the values of blocks in order, and their scales in words."""
    empty = block_RB.new_empty(0).view(torch.int32)
    if fmt.scales == "k":
        values = k_nibbles(block_RB) if fmt.bits == 4 else five_bit_values(block_RB)
        scales = torch.stack(k_scales(block_RB), -1)  # scale and min of each 32 inputs
        return values, _words_of(scales), _words_of(block_RB[:, :4])
    if fmt.scales == "q6":
        above = block_RB[:, 208:].contiguous().view(torch.int16).int() & 0xFFFF
        return six_bit_values(block_RB), _words_of(block_RB[:, 192:208]), above
    size = 4 if fmt.scales == "affine" else 2
    if fmt.bits == 8:
        values = block_RB[:, size:]
    elif fmt.bits == 5:
        values = nibbles(block_RB[:, size + 4 :]) | fifth_bits(block_RB[:, size : size + 4])
    else:
        values = nibbles(block_RB[:, size:])
    return values, _words_of(block_RB[:, :size]), empty


def _words_of(packed: Tensor) -> Tensor:
    return packed.contiguous().view(-1).view(torch.int32)


def _sign_magnitude(fmt: TileFormat, values: Tensor) -> Tensor:
    """Encode values in int32: the sign above the magnitude."""
    if fmt.bits == 8:
        signed = values.contiguous().view(torch.int8).int()
        return (signed < 0) << 7 | signed.abs() & 127
    half = 1 << (fmt.bits - 1)
    q = values.int()
    return torch.where(q < half, half | (half - 1 - q), q - half)


def _to_words(fmt: TileFormat, code: Tensor) -> tuple[Tensor, Tensor]:
    """Return the words and the extra plane of codes [rows, B, J, C]."""
    if fmt.bits == 8:
        shifts = torch.arange(0, 32, 8, device=code.device)[:, None]
        words = (code << shifts).sum(2).to(torch.int32)  # bits are disjoint
        return words, words.new_empty(*words.shape[:2], 0, dtype=torch.int8)
    low = fmt.bits - 4
    sign, top = code >> (fmt.bits - 1), code >> low & 7
    a, b, c, d = (sign << 3 | top).unbind(2)
    words = (a & 8) << 12 | (a & 7) << 4 | (b & 8) << 4 | (b & 7) << 12
    words |= (c & 8) << 8 | (c & 7) | (d & 8) | (d & 7) << 8
    return words.to(torch.int16), _extra_bytes(fmt, code & (1 << low) - 1)


def _extra_bytes(fmt: TileFormat, bits: Tensor) -> Tensor:
    """Pack the low bits of magnitudes, [rows, B, J, C], to bytes of one block, or of two."""
    if not fmt.extra_blocks:
        return bits.new_empty(*bits.shape[:2], 0, dtype=torch.int8)
    shifts = (fmt.bits - 4) * torch.arange(4, device=bits.device)[:, None]
    packed = (bits << shifts).sum(2)  # bits are disjoint
    if fmt.extra_blocks == 2:
        packed = F.pad(packed, (0, 0, 0, packed.shape[1] % 2))
        packed = packed[:, 0::2] | packed[:, 1::2] << 4
    return packed.to(torch.int8)


# --- tiles to values


def unpack_words(word: Tensor) -> Tensor:
    """Unpack words (0 to 65535) to the signs (bit 15) and magnitudes (bits 6 to 4) of values."""
    swapped = ((word >> 8) | (word << 8)) & 0xFFFF
    return torch.stack((word, swapped, word << 4, swapped << 4), 2) & 0x8070


def _from_words(fmt: TileFormat, words: Tensor, extra: Tensor) -> Tensor:
    """Return codes [rows, B, J, C] of words and bytes [N, 16, B, C]."""
    words = words.flatten(0, 1)
    if fmt.bits == 8:
        shifts = torch.arange(0, 32, 8, device=words.device)[:, None]
        return words[:, :, None] >> shifts & 255
    low = fmt.bits - 4
    parts = unpack_words(words.int() & 0xFFFF)
    code = (parts >> 15) << (fmt.bits - 1) | (parts >> 4 & 7) << low
    if low:
        packed = extra.flatten(0, 1).int() & 255
        if fmt.extra_blocks == 2:
            packed = torch.stack((packed & 15, packed >> 4), 2).flatten(1, 2)[:, : words.shape[1]]
        shifts = low * torch.arange(4, device=words.device)[:, None]
        code |= packed[:, :, None] >> shifts & (1 << low) - 1
    return code


def _as_values(fmt: TileFormat, code: Tensor) -> Tensor:
    """Return q in float32; less half where scales are symmetric."""
    sign, magnitude = code >> (fmt.bits - 1) & 1, code & (1 << (fmt.bits - 1)) - 1
    if fmt.bits == 8:
        negative = torch.where(magnitude == 0, -128, -magnitude)
        return torch.where(sign == 1, negative, magnitude).float()
    half = 1 << (fmt.bits - 1)
    q = torch.where(sign == 1, half - 1 - magnitude, half + magnitude)
    return (q - half if fmt.scales in ("symmetric", "q6") else q).float()


def _factors(fmt: TileFormat, scales: Tensor, above: Tensor) -> tuple[Tensor, Tensor | None]:
    """Return scale and minimum of each 16 inputs, from words of the planes by row and block."""
    halves = _as(scales, torch.float16)
    if fmt.scales == "symmetric":
        return halves.repeat_interleave(2, -1), None
    if fmt.scales == "affine":
        scale, shift = halves[..., 0::2], halves[..., 1::2]
        return scale.repeat_interleave(2, -1), -shift.repeat_interleave(2, -1)
    each = _as(above, torch.float16).view(len(above), -1, 2)
    each = each.repeat_interleave(4, 1)  # of each block
    if fmt.scales == "q6":
        return _as(scales, torch.int8) * each[..., :1], None
    both = _as(scales, torch.uint8)
    scale, minimum = both[..., 0::2] * each[..., :1], both[..., 1::2] * each[..., 1:]
    return scale.repeat_interleave(2, -1), minimum.repeat_interleave(2, -1)


def _as(words: Tensor, dtype: torch.dtype) -> Tensor:
    """Read the last dimension as narrower numbers, in float32."""
    return words.flatten().view(dtype).float().view(*words.shape[:-1], -1)


def _needs_float32(fmt: TileFormat, values: Tensor, scales: Tensor, above: Tensor) -> Tensor:
    """True, 0-d, if a scale is too large for a kernel's bfloat16, or a value is -128."""
    rows = above.view(-1, 1) if fmt.has_super else scales.view(-1, 1)
    words = scales.view(len(rows), -1, 1)
    scale, _ = _factors(fmt, words, rows)
    limit = 2.0 ** (128 - EXPONENT - fmt.bits) * ROUNDING
    found = ~(scale.abs().amax() < limit)
    return found | (values == 128).any() if fmt.bits == 8 else found


# --- modules


class TiledBlockExperts(nn.Module):
    """A layer's experts in tiles of GGUF blocks; activations are 16-bit."""

    def __init__(self, gate_up: TiledBlocks, down: TiledBlocks) -> None:
        super().__init__()
        self._both = (gate_up.with_planes(()), down.with_planes(()))  # see `both`
        for name, plane in self._named_planes(gate_up, down):
            self.register_buffer(name, plane)

    @staticmethod
    def _named_planes(*both: TiledBlocks) -> Iterator[tuple[str, Tensor]]:
        for part, tiled in zip(("gate_up", "down"), both, strict=True):
            for name, plane in zip(
                ("words", "extra", "scales", "super"), tiled.planes, strict=True
            ):
                yield f"{part}_{name}", plane

    @classmethod
    def from_blocks(
        cls, gate_up: BlockWeight, down: BlockWeight, device: torch.device | str
    ) -> "TiledBlockExperts":
        return cls(tile_blocks(gate_up, device), tile_blocks(down, device))

    @classmethod
    def quantized(cls, source: Experts) -> "TiledBlockExperts":
        """Quantize 16-bit experts like a Q4_K_M: Q4_K, or Q5_0 where rows do not fit its blocks."""
        gate_up, down = (_quantized(w) for w in (source.gate_up_proj, source.down_proj))
        return cls.from_blocks(gate_up, down, source.gate_up_proj.device)

    @property
    def formats(self) -> tuple[str, ...]:
        return tuple(tiled.format.name for tiled in self._both)

    @property
    def both(self) -> tuple[TiledBlocks, TiledBlocks]:
        """The weights of gate and up, and of down, over the module's buffers."""
        buffers = list(self.buffers())
        gate_up, down = self._both
        return gate_up.with_planes(tuple(buffers[:4])), down.with_planes(tuple(buffers[4:]))

    def forward(self, x_TD: Tensor, topk_ids_TK: Tensor, topk_weights_TK: Tensor) -> Tensor:
        gate_up, down = (tiled_grouped(tiled) for tiled in self.both)
        return moe_forward(x_TD, topk_ids_TK, topk_weights_TK, gate_up, down)


def _quantized(weight_EOI: Tensor) -> BlockWeight:
    block = BLOCK_FORMATS["Q5_0" if weight_EOI.shape[-1] % SUPER_BLOCK else "Q4_K"]
    packed = encode(weight_EOI.detach().float().cpu(), block).flatten()
    return BlockWeight((BlockTensor(packed, block, tuple(weight_EOI.shape)),))


def tiled_grouped(weight: TiledBlocks) -> GroupedLinear:
    """Multiply one expert at a time, dequantizing its weights."""

    def product(expert: int) -> Linear:
        return lambda x_TD: F.linear(x_TD.float(), weight.dequantize(expert)).to(x_TD.dtype)

    return per_expert([product(expert) for expert in range(len(weight.words_EW))])
