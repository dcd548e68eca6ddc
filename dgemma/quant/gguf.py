"""GGUF block formats: dequantization of each ggml type, and modules with packed weights.

A matrix row is a sequence of blocks; a block of B bytes holds N weights with their scales. Layouts
are those of ggml's `ggml-common.h`. Every product is exact in float32 and at most one sum rounds,
so the values equal ggml's bit for bit, with or without fused multiply-add.

R blocks, B bytes of a block, N weights of a block, G groups of a block that share a scale; T
tokens, D width, K experts per token, E experts, O outputs, I inputs.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dgemma.model.moe import Linear, moe_forward, per_expert

SUPER_BLOCK = 256  # weights in a block of the K formats
# All types of the ggml enumeration; those not in FORMATS are refused by name.
TYPE_NAMES = {
    **dict(enumerate("F32 F16 Q4_0 Q4_1".split())),
    **dict(enumerate("Q5_0 Q5_1 Q8_0 Q8_1 Q2_K Q3_K Q4_K Q5_K Q6_K Q8_K".split(), 6)),
    **dict(enumerate("IQ2_XXS IQ2_XS IQ3_XXS IQ1_S IQ4_NL IQ3_S IQ2_S IQ4_XS".split(), 16)),
    **dict(enumerate("I8 I16 I32 I64 F64 IQ1_M BF16".split(), 24)),
    **{34: "TQ1_0", 35: "TQ2_0", 39: "MXFP4", 40: "NVFP4", 41: "Q1_0"},
}
IQ4_VALUES = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
E2M1_DOUBLED = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)


@dataclass(frozen=True, slots=True)
class BlockFormat:
    """A ggml type: `num_weights` weights in `num_bytes` bytes."""

    name: str
    num_weights: int
    num_bytes: int
    decode: Callable[[Tensor], Tensor]  # uint8 [R, B] to float32, R * N values in order

    def row_bytes(self, num_weights: int) -> int:
        """Return the bytes of a row; its length must be a multiple of the block's."""
        return num_weights // self.num_weights * self.num_bytes

    def dequantize(self, packed: Tensor, shape: tuple[int, ...]) -> Tensor:
        """Dequantize packed bytes to a float32 tensor of the given shape."""
        return self.decode(packed.view(-1, self.num_bytes)).reshape(shape)


def _float16(packed: Tensor) -> Tensor:
    return packed.contiguous().view(torch.float16).float()


def _int8(packed: Tensor) -> Tensor:
    return packed.contiguous().view(torch.int8).float()


def _shifts(packed: Tensor, *shifts: int) -> Tensor:
    """Return a column of shifts, to be broadcast over bytes in the last dimension."""
    return torch.tensor(shifts, dtype=torch.uint8, device=packed.device)[:, None]


def nibbles(packed: Tensor) -> Tensor:
    """Split bytes into 4-bit values: all low halves, then all high ones."""
    return torch.cat([packed & 15, packed >> 4], -1)


def fifth_bits(packed_RB: Tensor) -> Tensor:
    """Read the 32 bits of a little-endian word as the fifth bits of 32 values."""
    word_R1 = packed_RB.contiguous().view(torch.int32)
    bits_RN = word_R1 >> torch.arange(32, dtype=torch.int32, device=packed_RB.device)
    return (bits_RN & 1).to(torch.uint8) << 4


def _lookup(table: tuple[int, ...], index: Tensor) -> Tensor:
    return torch.tensor(table, dtype=torch.float32, device=index.device)[index.int()]


def _q4_0(block_RB: Tensor) -> Tensor:
    return (nibbles(block_RB[:, 2:]).float() - 8) * _float16(block_RB[:, :2])


def _q4_1(block_RB: Tensor) -> Tensor:
    scale_R1, min_R1 = _float16(block_RB[:, :4]).chunk(2, 1)
    return nibbles(block_RB[:, 4:]) * scale_R1 + min_R1


def _q5_0(block_RB: Tensor) -> Tensor:
    values_RN = nibbles(block_RB[:, 6:]) | fifth_bits(block_RB[:, 2:6])
    return (values_RN.float() - 16) * _float16(block_RB[:, :2])


def _q5_1(block_RB: Tensor) -> Tensor:
    scale_R1, min_R1 = _float16(block_RB[:, :4]).chunk(2, 1)
    values_RN = nibbles(block_RB[:, 8:]) | fifth_bits(block_RB[:, 4:8])
    return values_RN * scale_R1 + min_R1


def _q8_0(block_RB: Tensor) -> Tensor:
    return _int8(block_RB[:, 2:]) * _float16(block_RB[:, :2])


def _q2_k(block_RB: Tensor) -> Tensor:
    """Decode 2-bit values in groups of 16, whose 4-bit scale and minimum share a byte."""
    packed_R = block_RB[:, 16:80].reshape(-1, 2, 1, 32)
    values_RGN = (packed_R >> _shifts(block_RB, 0, 2, 4, 6) & 3).view(-1, 16, 16)
    scale_R1, min_R1 = _float16(block_RB[:, 80:]).chunk(2, 1)
    both_RG = block_RB[:, :16]
    return _affine(values_RGN, scale_R1 * (both_RG & 15), min_R1 * (both_RG >> 4))


def _q3_k(block_RB: Tensor) -> Tensor:
    """Decode 3-bit values: two low bits, and a high bit that is stored inverted."""
    low_R = block_RB[:, 32:96].reshape(-1, 2, 1, 32) >> _shifts(block_RB, 0, 2, 4, 6) & 3
    high_R = block_RB[:, None, :32] >> _shifts(block_RB, *range(8)) & 1
    values_RGN = (low_R.view(-1, 8, 32).float() - 4 * (1 - high_R.float())).view(-1, 16, 16)
    packed_R = block_RB[:, 96:108]
    upper_RG = (packed_R[:, None, 8:] >> _shifts(block_RB, 0, 2, 4, 6) & 3) << 4
    scale_RG = (nibbles(packed_R[:, :8]) | upper_RG.view(-1, 16)).float() - 32
    return values_RGN * (scale_RG * _float16(block_RB[:, 108:]))[..., None]


def _q4_k(block_RB: Tensor) -> Tensor:
    return _affine(k_nibbles(block_RB), *_k_products(block_RB))


def _q5_k(block_RB: Tensor) -> Tensor:
    return _affine(five_bit_values(block_RB), *_k_products(block_RB))


def five_bit_values(block_RB: Tensor) -> Tensor:
    """Decode the values of Q5_K: nibbles, and a bit of each of eight groups in one byte."""
    fifth_RGN = (block_RB[:, None, 16:48] >> _shifts(block_RB, *range(8)) & 1) << 4
    return k_nibbles(block_RB) | fifth_RGN


def k_nibbles(block_RB: Tensor) -> Tensor:
    """Decode eight groups of 32 from the last 128 bytes, two groups to 32 bytes."""
    packed_R = block_RB[:, -128:].reshape(-1, 4, 1, 32)
    return (packed_R >> _shifts(block_RB, 0, 4) & 15).view(-1, 8, 32)


def k_scales(block_RB: Tensor) -> tuple[Tensor, Tensor]:
    """Decode the eight 6-bit scales and minimums of twelve bytes.

    The first four of each have their own bytes, whose two upper bits are the upper bits of the last
    four; the lower bits of those share bytes.
    """
    first_R4, second_R4, last_R4 = block_RB[:, 4:16].chunk(3, 1)
    scale_RG = torch.cat([first_R4 & 63, (last_R4 & 15) | (first_R4 >> 6 << 4)], 1)
    min_RG = torch.cat([second_R4 & 63, (last_R4 >> 4) | (second_R4 >> 6 << 4)], 1)
    return scale_RG, min_RG


def _k_products(block_RB: Tensor) -> tuple[Tensor, Tensor]:
    scale_RG, min_RG = k_scales(block_RB)
    scale_R1, min_R1 = _float16(block_RB[:, :4]).chunk(2, 1)
    return scale_R1 * scale_RG, min_R1 * min_RG


def _affine(values_RGN: Tensor, scale_RG: Tensor, min_RG: Tensor) -> Tensor:
    return scale_RG[..., None] * values_RGN - min_RG[..., None]


def _q6_k(block_RB: Tensor) -> Tensor:
    """Decode two halves of 128: four low bits, two high bits, an int8 scale for 16 values."""
    values_RGN = six_bit_values(block_RB).view(-1, 16, 16).float() - 32
    return values_RGN * (_int8(block_RB[:, 192:208]) * _float16(block_RB[:, 208:]))[..., None]


def six_bit_values(block_RB: Tensor) -> Tensor:
    packed_R = block_RB[:, :128].reshape(-1, 2, 1, 64)
    low_R = (packed_R >> _shifts(block_RB, 0, 4) & 15).view(-1, 2, 4, 32)
    high_R = block_RB[:, 128:192].reshape(-1, 2, 1, 32) >> _shifts(block_RB, 0, 2, 4, 6) & 3
    return low_R | high_R << 4


def _iq4_nl(block_RB: Tensor) -> Tensor:
    return _lookup(IQ4_VALUES, nibbles(block_RB[:, 2:])) * _float16(block_RB[:, :2])


def _iq4_xs(block_RB: Tensor) -> Tensor:
    """Decode eight groups of 32 table indices, each with a 6-bit scale split over two fields."""
    group_G = torch.arange(8, device=block_RB.device)
    high_R1 = block_RB[:, 2:4].contiguous().view(torch.int16).int()
    low_RG = block_RB[:, 4:8][:, group_G // 2].int() >> 4 * (group_G % 2) & 15
    scale_RG = (low_RG | (high_R1 >> 2 * group_G & 3) << 4).float() - 32
    values_RGN = _lookup(IQ4_VALUES, nibbles(block_RB[:, 8:].reshape(-1, 8, 16)))
    return values_RGN * (scale_RG * _float16(block_RB[:, :2]))[..., None]


def _mxfp4(block_RB: Tensor) -> Tensor:
    """Decode E2M1 values with an E8M0 scale; the table is doubled and the scale halved."""
    exponent_R1 = block_RB[:, :1].int()
    bits_R1 = torch.where(exponent_R1 < 2, 0x200000 << exponent_R1, (exponent_R1 - 1) << 23)
    return _lookup(E2M1_DOUBLED, nibbles(block_RB[:, 1:])) * bits_R1.view(torch.float32)


def _nvfp4(block_RB: Tensor) -> Tensor:
    """Decode four groups of 16 E2M1 values, each with an unsigned E4M3 scale; 0x7F reads as 0."""
    bits_RG = block_RB[:, :4] & 0x7F
    scale_RG = torch.where(bits_RG == 0x7F, 0, bits_RG).view(torch.float8_e4m3fn).float() / 2
    values_RGN = _lookup(E2M1_DOUBLED, nibbles(block_RB[:, 4:].reshape(-1, 4, 8)))
    return values_RGN * scale_RG[..., None]


FORMATS = {
    type_id: BlockFormat(TYPE_NAMES[type_id], num_weights, num_bytes, decode)
    for type_id, num_weights, num_bytes, decode in (
        (0, 1, 4, lambda block_RB: block_RB.contiguous().view(torch.float32)),
        (1, 1, 2, _float16),
        (2, 32, 18, _q4_0),
        (3, 32, 20, _q4_1),
        (6, 32, 22, _q5_0),
        (7, 32, 24, _q5_1),
        (8, 32, 34, _q8_0),
        (10, SUPER_BLOCK, 84, _q2_k),
        (11, SUPER_BLOCK, 110, _q3_k),
        (12, SUPER_BLOCK, 144, _q4_k),
        (13, SUPER_BLOCK, 176, _q5_k),
        (14, SUPER_BLOCK, 210, _q6_k),
        (20, 32, 18, _iq4_nl),
        (23, SUPER_BLOCK, 136, _iq4_xs),
        (30, 1, 2, lambda block_RB: block_RB.contiguous().view(torch.bfloat16).float()),
        (39, 32, 17, _mxfp4),
        (40, 64, 36, _nvfp4),
    )
}


# --- modules with packed weights
#
# A block tensor is a view of the mapped file: bytes come from the page cache, and only the
# rows in use are dequantized. An expert without tokens is never read.

# Weights decoded at once. A chunk and its temporaries stay in the caches of a CPU's cores, which is
# two to four times as fast as a whole expert; a GPU takes whole experts.
CPU_CHUNK = 1 << 18  # of each thread
GPU_CHUNK = 1 << 25


@dataclass(frozen=True, slots=True)
class BlockTensor:
    """Packed bytes and their format; a row is a whole number of blocks."""

    packed: Tensor  # uint8, flat
    format: BlockFormat
    shape: tuple[int, ...]

    def __getitem__(self, index: int) -> "BlockTensor":
        """Return one element of the first dimension, as a view."""
        size = len(self.packed) // self.shape[0]
        packed = self.packed[index * size : (index + 1) * size]
        return BlockTensor(packed, self.format, self.shape[1:])

    def chunks(self, device: torch.device) -> Iterator[Tensor]:
        """Decode runs of rows on a device, float32 [N, I]."""
        inputs = self.shape[-1]
        is_cpu = device.type == "cpu"
        num_rows = max(1, (CPU_CHUNK * torch.get_num_threads() if is_cpu else GPU_CHUNK) // inputs)
        for packed in torch.split(self.packed, num_rows * self.format.row_bytes(inputs)):
            blocks = packed.to(device).view(-1, self.format.num_bytes)
            yield self.format.decode(blocks).view(-1, inputs)


@dataclass(frozen=True, slots=True)
class BlockWeight:
    """A weight in one tensor, or in two whose rows follow each other (gate, then up)."""

    tensors: tuple[BlockTensor, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        first = self.tensors[0].shape
        if len(self.tensors) == 1:
            return first
        return (*first[:-2], sum(tensor.shape[-2] for tensor in self.tensors), first[-1])

    @property
    def num_bytes(self) -> int:
        return sum(len(tensor.packed) for tensor in self.tensors)

    def __getitem__(self, index: int) -> "BlockWeight":
        return BlockWeight(tuple(tensor[index] for tensor in self.tensors))

    def chunks(self, device: torch.device) -> Iterator[Tensor]:
        for tensor in self.tensors:
            yield from tensor.chunks(device)

    def dequantize(
        self, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu"
    ) -> Tensor:
        """Return the weight in floating point, decoded on the device."""
        out = torch.empty(self.shape, dtype=dtype, device=device)
        if len(self.shape) < 3:
            self._fill(out)
        else:
            for index, matrix in enumerate(out):
                self[index]._fill(matrix)
        return out

    def _fill(self, out: Tensor) -> None:
        rows_OI = out.view(-1, out.shape[-1])
        start = 0
        for chunk_NI in self.chunks(out.device):
            rows_OI[start : start + len(chunk_NI)] = chunk_NI
            start += len(chunk_NI)


def block_linear(weight_OI: BlockWeight) -> Linear:
    """Return x -> x @ weight.T, dequantizing a slice of the outputs at a time."""

    def apply(x_TI: Tensor) -> Tensor:
        chunks = weight_OI.chunks(x_TI.device)
        return torch.cat([F.linear(x_TI, chunk_NI.to(x_TI.dtype)) for chunk_NI in chunks], dim=-1)

    return apply


class BlockLinear(nn.Module):
    """A linear with packed weights."""

    def __init__(self, weight_OI: BlockWeight) -> None:
        super().__init__()
        self.weight_blocks = weight_OI
        self.out_features, self.in_features = weight_OI.shape

    def forward(self, x_TI: Tensor) -> Tensor:
        return block_linear(self.weight_blocks)(x_TI)


class BlockExperts(nn.Module):
    """Mixture of experts with packed weights; only experts with tokens are dequantized."""

    def __init__(self, gate_up_EOI: BlockWeight, down_EOI: BlockWeight) -> None:
        super().__init__()
        self.gate_up_blocks, self.down_blocks = gate_up_EOI, down_EOI
        experts = range(gate_up_EOI.shape[0])
        self.gate_up = per_expert([block_linear(gate_up_EOI[index]) for index in experts])
        self.down = per_expert([block_linear(down_EOI[index]) for index in experts])

    def forward(self, x_TD: Tensor, topk_ids_TK: Tensor, topk_weights_TK: Tensor) -> Tensor:
        return moe_forward(x_TD, topk_ids_TK, topk_weights_TK, self.gate_up, self.down)
