"""The PTX that unpacks weights, run step by step on the CPU, gives the weights of the blocks."""

import re
import struct
from collections.abc import Callable

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from dgemma.backends.cuda.kernels import unpack_ptx as unpack
from dgemma.quant.gguf_tiles import EXPONENT, TILE_FORMATS, TiledBlocks, tile_blocks
from tests.kernels.small import random_stack

Words = NDArray[np.uint32]
DEPTH = 256


def to_bf16(values: NDArray[np.float64]) -> Words:
    """Round to bfloat16 once, as `fma` does."""
    bits = values.astype(np.float32).view(np.uint32).astype(np.uint64)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint32)


def from_bf16(bits: Words) -> NDArray[np.float64]:
    return (bits << 16).astype(np.uint32).view(np.float32).astype(np.float64)


class Ptx:
    """Runs the few instructions that the kernels use, on many threads at once."""

    def __init__(self, *inputs: Words, outputs: int) -> None:
        self.values = {f"${outputs + i}": value for i, value in enumerate(inputs)}
        self.shape = inputs[0].shape

    def read(self, name: str) -> Words:
        if re.fullmatch(r"0x[0-9A-F]+|\d+", name):
            return np.full(self.shape, int(name, 0), np.uint32)
        if name.startswith("0f"):
            return np.full(self.shape, int(name[2:], 16), np.uint32)
        return self.values[name]

    def run(self, text: str) -> None:
        for line in text.strip("{}\n").split(";"):
            line = line.strip()
            if line and not line.startswith(".reg"):
                operation, _, rest = line.partition(" ")
                names = re.findall(r"\{[^}]*\}|[^,\s]+", rest)
                self.step(operation, names[0], names[1:])

    def step(self, operation: str, target: str, names: list[str]) -> None:
        if operation == "mov.b32":
            self.move(target, names[0])
            return
        self.values[target] = OPERATIONS[operation](*map(self.read, names)).astype(np.uint32)

    def move(self, target: str, name: str) -> None:
        if target.startswith("{"):
            low, high = target.strip("{}").split(", ")
            self.values[low], self.values[high] = self.read(name) & 0xFFFF, self.read(name) >> 16
        elif name.startswith("{"):
            low, high = (self.read(half) for half in name.strip("{}").split(", "))
            self.values[target] = low | high << 16
        else:
            self.values[target] = self.read(name)


def prmt(a: Words, b: Words, selector: Words) -> Words:
    both = a.astype(np.uint64) | b.astype(np.uint64) << 32
    chosen = [both >> (8 * (int(selector[0]) >> 4 * i & 7)) & 255 for i in range(4)]
    return sum(byte << 8 * i for i, byte in enumerate(chosen))  # type: ignore[return-value]


def lop3(a: Words, b: Words, c: Words, table: Words) -> Words:
    assert int(table[0]) == 0xEA
    return a & b | c


def fma_bf16x2(a: Words, b: Words, c: Words) -> Words:
    halves = []
    for shift in (0, 16):
        x, y, z = (from_bf16(word >> shift & 0xFFFF) for word in (a, b, c))
        halves.append(to_bf16(x * y + z))
    return halves[0] | halves[1] << 16


def float32(*words: Words) -> list[NDArray[np.float64]]:
    return [word.view(np.float32).astype(np.float64) for word in words]


def bits_of(values: NDArray[np.float64]) -> Words:
    return values.astype(np.float32).view(np.uint32)


OPERATIONS: dict[str, Callable[..., Words]] = {
    "prmt.b32": prmt,
    "lop3.b32": lop3,
    "and.b32": lambda a, b: a & b,
    "or.b32": lambda a, b: a | b,
    "shl.b32": lambda a, n: a << n,
    "shr.u32": lambda a, n: a >> n,
    "fma.rn.bf16x2": fma_bf16x2,
    "cvt.f32.f16": lambda a: bits_of(a.astype(np.uint16).view(np.float16).astype(np.float64)),
    "mul.f32": lambda a, b: bits_of(np.multiply(*float32(a, b))),
    "add.f32": lambda a, b: bits_of(np.add(*float32(a, b))),
    "fma.rn.f32": lambda a, b, c: bits_of(np.multiply(*float32(a, b)) + float32(c)[0]),
    "cvt.rn.bf16x2.f32": lambda a, b: to_bf16(float32(b)[0]) | to_bf16(float32(a)[0]) << 16,
}


def planes(tiled: TiledBlocks, blocks: int) -> tuple[Words, ...]:
    """Return words [B, rows, 16], extra bytes, scale words [B, rows] and those of 256 inputs."""
    words = tiled.words_EW[0].view(blocks, 16, 16).numpy()
    extra = tiled.extra_EW[0].view(-1, 16, 16).numpy() if tiled.format.extra_blocks else words
    scales = tiled.scales_EW[0].view(blocks, tiled.format.scale_words, 16).numpy()
    above = tiled.super_EW[0].view(-1, 16).numpy() if tiled.format.has_super else scales
    is_wide = tiled.format.bits == 8
    unsigned = words.view(np.uint32) if is_wide else words.view(np.uint16).astype(np.uint32)
    return (
        unsigned,
        extra.astype(np.uint32),
        scales.view(np.uint32),
        np.ascontiguousarray(above).view(np.uint32),
    )


def half(words: Words, shift: int) -> NDArray[np.float64]:
    bits = (words >> shift & 0xFFFF).astype(np.uint16)
    return bits.view(np.float16).astype(np.float64)


def pairs(tiled: TiledBlocks, block: int, scales: Words, above: Words) -> list[Words]:
    """Scale and offset of each group, as two bfloat16; `_pair` and the PTX of K-quants."""
    fmt = tiled.format
    middle = 2.0 ** (fmt.bits - 1) - 0.5
    if fmt.scales == "k":
        ptx = Ptx(scales[block, 0], above[block // 4], outputs=2)
        ptx.run(str((unpack.K_PAIRS_4 if fmt.bits == 4 else unpack.K_PAIRS_5).value))
        return [ptx.values["$0"], ptx.values["$1"]]
    found = []
    for group in range(4 if fmt.scales == "q6" else 2):
        if fmt.scales == "q6":
            signed = (scales[block, 0] >> (8 * group) & 255).astype(np.uint8).view(np.int8)
            scale = signed * half(above[block // 4], 0)
            offset = -0.5 * scale
        elif fmt.scales == "affine":
            scale = half(scales[block, group], 0)
            offset = middle * scale + half(scales[block, group], 16)
        else:
            scale = half(scales[block, 0], 16 * group)
            offset = scale * (0.0 if fmt.bits == 8 else -0.5)
        found.append(to_bf16(scale * 2.0 ** (EXPONENT + fmt.bits)) | to_bf16(offset) << 16)
    return found


@pytest.mark.parametrize("name", TILE_FORMATS)
def test_the_instructions_give_the_weights(name: str) -> None:
    weight = random_stack(name, 1, 16, DEPTH)
    if name == "Q8_0":
        values = weight.tensors[0].packed.view(-1, 34)[:, 2:]
        values[values == 128] = 3  # -128 is not for these
    tiled = tile_blocks(weight, "cpu")
    blocks, bits = DEPTH // 64, tiled.format.bits
    words, extra, scales, above = planes(tiled, blocks)
    want = tiled.dequantize(0).view(16, blocks, 4, 16).numpy()
    for block in range(blocks):
        groups = pairs(tiled, block, scales, above)
        spread = [g for group in groups for g in (np.repeat(group, 8),) * 2]
        first, second = (words[block, :, i::2].ravel() for i in (0, 1))
        inputs = [first, second] if bits == 8 else [first | second << 16]
        if bits in (5, 6):
            mine = extra[block // tiled.format.extra_blocks]
            inputs.append(mine[:, 0::2].ravel() & 0xFFFF | mine[:, 1::2].ravel() << 16)
        text = {4: unpack.UNPACK_4, 5: unpack.UNPACK_5, 6: unpack.UNPACK_6, 8: unpack.UNPACK_8}
        chosen = unpack.UNPACK_5_ODD if bits == 5 and block % 2 else text[bits]
        ptx = Ptx(*inputs, *spread, outputs=4)
        ptx.run(str(chosen.value))
        for j in range(4):
            out = ptx.values[f"${j}"].reshape(16, 8)
            got = np.stack([from_bf16(out & 0xFFFF), from_bf16(out >> 16)], -1).reshape(16, 16)
            largest = np.abs(want[:, block]).max()
            assert np.abs(got - want[:, block, j]).max() <= 0.006 * largest


def test_floats_are_written_as_ptx_has_them() -> None:
    assert unpack._float(1.0) == "0f3F800000"
    assert struct.pack(">f", -(2.0**59)).hex().upper() == unpack._float(-(2.0**59))[2:]
    assert torch.finfo(torch.bfloat16).max > 2.0**127
