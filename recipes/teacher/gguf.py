"""Reads a GGUF file: what it says of its model, and its weights as plain numbers.

Of the many ways in which such files store weights, those of "Q4_K_M" are read: float32, float16,
and blocks of 256 numbers in 4 or 6 bits. A block of the first has a factor and a least value for
every 32 of its numbers, one of the second a factor for every 16.

R blocks of a weight.
"""

import mmap
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dgemma.errors import CheckpointError

MAGIC = b"GGUF"
ALIGNMENT = 32  # of the data, where the file does not say otherwise
TEXT, LIST = 8, 9  # types of a value; the others are numbers
NUMBERS = {
    0: "B",
    1: "b",
    2: "H",
    3: "h",
    4: "I",
    5: "i",
    6: "f",
    7: "?",
    10: "Q",
    11: "q",
    12: "d",
}
BLOCK = 256


class Reader:
    """Goes through the head of a file, value by value."""

    def __init__(self, data: mmap.mmap) -> None:
        self.data, self.at = data, len(MAGIC)

    def number(self, kind: str) -> Any:
        (value,) = struct.unpack_from("<" + kind, self.data, self.at)
        self.at += struct.calcsize("<" + kind)
        return value

    def text(self) -> str:
        length = self.number("Q")
        self.at += length
        return self.data[self.at - length : self.at].decode()

    def value(self, kind: int) -> Any:
        if kind == TEXT:
            return self.text()
        if kind == LIST:
            inner, count = self.number("I"), self.number("Q")
            return [self.value(inner) for _ in range(count)]
        if kind not in NUMBERS:
            raise CheckpointError(f"a value of type {kind} is not known in a GGUF file")
        return self.number(NUMBERS[kind])


@dataclass(frozen=True, slots=True)
class Stored:
    """Where a weight lies in a file."""

    shape: tuple[int, ...]  # as torch has it, the last dimension lying closest
    kind: int
    start: int


class Gguf:
    """A file that is read when asked. `facts`: what it says of its model."""

    def __init__(self, path: Path) -> None:
        with path.open("rb") as file:
            self.data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        if self.data[: len(MAGIC)] != MAGIC:
            raise CheckpointError(f"{path} is no GGUF file: it does not begin with {MAGIC!r}")
        reader = Reader(self.data)
        self.version, count, facts = (reader.number(kind) for kind in "IQQ")
        self.facts = {reader.text(): reader.value(reader.number("I")) for _ in range(facts)}
        self.weights = dict(_weights(reader, count))
        alignment = self.facts.get("general.alignment", ALIGNMENT)
        self.begin = -(-reader.at // alignment) * alignment

    def weight(self, name: str, device: torch.device | str = "cpu") -> Tensor:
        """A weight in float32, put together on the device."""
        if name not in self.weights:
            raise CheckpointError(f"the GGUF file has no weight {name}")
        stored = self.weights[name]
        if stored.kind not in KINDS:
            raise CheckpointError(f"{name} is stored in form {stored.kind}; known: {list(KINDS)}")
        kind = KINDS[stored.kind]
        size = torch.Size(stored.shape).numel()
        start, length = self.begin + stored.start, size // kind.numbers * kind.bytes
        bytes_N = torch.frombuffer(bytearray(self.data[start : start + length]), dtype=torch.uint8)
        return kind.read(bytes_N.to(device)).reshape(stored.shape)


def _weights(reader: Reader, count: int) -> Iterator[tuple[str, Stored]]:
    for _ in range(count):
        name, dimensions = reader.text(), reader.number("I")
        shape = tuple(reader.number("Q") for _ in range(dimensions))
        yield name, Stored(shape[::-1], reader.number("I"), reader.number("Q"))


@dataclass(frozen=True, slots=True)
class Kind:
    """A way to store numbers: so many in so many bytes."""

    numbers: int
    bytes: int
    read: Callable[[Tensor], Tensor]


def read_4(bytes_N: Tensor) -> Tensor:
    """Blocks of 4 bits: factors of the block for its factors and least values, those, numbers."""
    block_RB = bytes_N.view(-1, 144)
    both_R2 = block_RB[:, :4].contiguous().view(torch.float16).float()
    factor_R8, least_R8 = _six_bits(block_RB[:, 4:16].int())
    numbers_R4X = block_RB[:, 16:].view(-1, 4, 32)
    numbers_R8X = torch.stack([numbers_R4X & 15, numbers_R4X >> 4], 2).view(-1, 8, 32).float()
    factor_R8, least_R8 = both_R2[:, :1] * factor_R8, both_R2[:, 1:] * least_R8
    return factor_R8[..., None] * numbers_R8X - least_R8[..., None]


def _six_bits(packed_RB: Tensor) -> tuple[Tensor, Tensor]:
    """Eight factors and eight least values of 6 bits, which twelve bytes hold.

    The first four of each lie in bytes of their own, whose upper two bits are the upper ones of
    the last four; the lower bits of those share bytes.
    """
    first_R4, second_R4, last_R4 = torch.split(packed_RB, 4, 1)
    factor_R8 = torch.cat([first_R4 & 63, (last_R4 & 15) | (first_R4 >> 6 << 4)], 1)
    least_R8 = torch.cat([second_R4 & 63, (last_R4 >> 4) | (second_R4 >> 6 << 4)], 1)
    return factor_R8, least_R8


def read_6(bytes_N: Tensor) -> Tensor:
    """Blocks of 6 bits: the lower four, the upper two, factors in whole numbers, their factor."""
    block_RB = bytes_N.view(-1, 210)
    low_R2X = block_RB[:, :128].view(-1, 2, 64)
    high_R2X = block_RB[:, 128:192].view(-1, 2, 32)
    lows = [low_R2X[..., :32] & 15, low_R2X[..., 32:] & 15, low_R2X[..., :32] >> 4]
    lows.append(low_R2X[..., 32:] >> 4)
    parts = [low | (high_R2X >> 2 * i & 3) << 4 for i, low in enumerate(lows)]
    numbers_RX = torch.cat(parts, -1).view(-1, BLOCK).float() - 32
    factor_RG = block_RB[:, 192:208].contiguous().view(torch.int8).float()
    whole_R1 = block_RB[:, 208:].contiguous().view(torch.float16).float()
    return numbers_RX.view(-1, 16, 16) * (factor_RG * whole_R1)[..., None]


KINDS = {
    0: Kind(1, 4, lambda bytes_N: bytes_N.view(torch.float32)),
    1: Kind(1, 2, lambda bytes_N: bytes_N.view(torch.float16).float()),
    12: Kind(BLOCK, 144, read_4),
    14: Kind(BLOCK, 210, read_6),
}
