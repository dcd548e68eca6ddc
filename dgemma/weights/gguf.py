"""GGUF files: metadata and tensor table, all of it checked first, and tensors from a memory map.

    "GGUF" | u32 version | u64 tensors | u64 keys
    keys:    name, u32 type, value
    tensors: name, u32 number of dims, u64 dims, u32 type, u64 offset
    padding to `general.alignment` | data, each tensor padded likewise

Strings are a u64 length and UTF-8; arrays a u32 type, a u64 count and the values. Lengths and
counts are compared with the file's size before anything is allocated. Versions 2 and 3,
little-endian. `dgemma.quant.gguf` has the packed types. Knows no architecture.

A model may be split over files STEM-00001-of-0000N.gguf, each with tensors of its own; the first
has the metadata, and is the one to open.
"""

import math
import mmap
import re
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from dgemma.errors import CheckpointError
from dgemma.quant.gguf import FORMATS, TYPE_NAMES, BlockFormat
from dgemma.weights.safetensors_io import map_file

T = TypeVar("T")

MAGIC = b"GGUF"
VERSIONS = (2, 3)
DEFAULT_ALIGNMENT = 32
MAX_DIMS = 4
MAX_NAME_BYTES = 63  # bytes of a tensor name
MAX_KEY_BYTES = 65535
STRING, ARRAY = 8, 9  # value types; the others are numbers, by their struct codes
NUMBERS = dict(zip((0, 1, 2, 3, 4, 5, 6, 7, 10, 11, 12), "BbHhIif?Qqd", strict=True))
MIN_TENSOR_BYTES = 8 + 4 + 4 + 8  # smallest table entry: empty name, no dims, type, offset
MIN_KEY_BYTES = 8 + 4 + 1
LENGTH = struct.Struct("<Q")  # length prefix of a string
SHARD_NAME = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf")


@dataclass(frozen=True, slots=True, kw_only=True)
class GGUFTensor:
    """Shape, type and byte range of a tensor. `start` counts from the beginning of its file."""

    shape: tuple[int, ...]  # torch's order: the file's dimensions reversed
    format: BlockFormat
    start: int
    path: Path

    @property
    def num_bytes(self) -> int:
        return self.format.row_bytes(math.prod(self.shape))


class _Shard:
    """One mapped file with its checked header."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.map = map_file(path)
        header = _Header(path, self.map)
        self.version = header.version()
        num_tensors, num_keys = header.count(MIN_TENSOR_BYTES), header.count(MIN_KEY_BYTES)
        self.metadata: Mapping[str, Any] = header.unique("key", header.metadata(num_keys))
        table = header.unique("tensor", header.table(num_tensors))
        self.tensors = _placed(path, table, self.metadata, header.position, len(self.map))


class GGUFFile:
    """An open file, or all files of a split model: `metadata` by key, `tensors` by name.

    Views keep the memory maps alive.
    """

    def __init__(self, path: Path) -> None:
        first = _Shard(path)
        self.path, self.version, self.metadata = path, first.version, first.metadata
        self.tensors, self._maps = first.tensors, {path: first.map}
        for shard in _other_shards(first):
            twice = sorted(self.tensors.keys() & shard.tensors.keys())
            if twice:
                raise CheckpointError(f"{shard.path} has the tensor {twice[0]} of another file")
            self.tensors |= shard.tensors
            self._maps[shard.path] = shard.map
        total = self.metadata.get("split.tensors.count", len(self.tensors))
        if total != len(self.tensors):
            raise CheckpointError(
                f"{path}: the model should have {total} tensors, and its {len(self._maps)} files "
                f"have {len(self.tensors)}; download them again"
            )

    def value(self, key: str, kind: type[T]) -> T:
        """Return a metadata value of a type; an int is accepted as a float."""
        value = self.metadata.get(key)
        if kind is float and type(value) is int:
            value = float(value)
        if type(value) is not kind:
            held = "no such key" if value is None else f"a {type(value).__name__}"
            raise CheckpointError(
                f"{self.path}: {key} should be a {kind.__name__}; there is {held}"
            )
        return value

    def packed(self, name: str) -> Tensor:
        """Return a tensor's stored bytes: a uint8 view of the map, not a copy."""
        tensor = self._tensor(name)
        return torch.frombuffer(
            self._maps[tensor.path],
            dtype=torch.uint8,
            offset=tensor.start,
            count=tensor.num_bytes,
        )

    def release(self, name: str) -> None:
        """Let the OS drop the pages of a tensor; they can be read again."""
        tensor = self._tensor(name)
        start = -(-tensor.start // mmap.PAGESIZE) * mmap.PAGESIZE
        stop = (tensor.start + tensor.num_bytes) // mmap.PAGESIZE * mmap.PAGESIZE
        if stop > start and hasattr(mmap, "MADV_DONTNEED"):
            self._maps[tensor.path].madvise(mmap.MADV_DONTNEED, start, stop - start)

    def dequantize(self, name: str, device: torch.device | str = "cpu") -> Tensor:
        """Return a tensor in float32, dequantized on the device."""
        tensor = self._tensor(name)
        return tensor.format.dequantize(self.packed(name).to(device), tensor.shape)

    def _tensor(self, name: str) -> GGUFTensor:
        if name not in self.tensors:
            raise CheckpointError(f"{self.path} has no tensor {name}; it has {len(self.tensors)}")
        return self.tensors[name]


@dataclass(frozen=True, slots=True)
class _TableEntry:
    dims: tuple[int, ...]  # the file's order, fastest first
    type_id: int
    offset: int  # from the beginning of the data


class _Header:
    """A cursor over the header that checks each read against the file size."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self.path, self.data, self.position = path, data, 0

    def version(self) -> int:
        if self.take(len(MAGIC)) != MAGIC:
            raise CheckpointError(f"{self.path} is not a GGUF file: it does not begin with GGUF")
        version = int(self.number("I"))
        if version and not version & 0xFFFF:
            raise CheckpointError(
                f"{self.path} is a big-endian GGUF file; convert it to little-endian"
            )
        if version not in VERSIONS:
            raise CheckpointError(
                f"{self.path} has GGUF version {version}; versions 2 and 3 are read, convert it"
            )
        return version

    def take(self, num_bytes: int) -> bytes:
        start, self.position = self.position, self.position + num_bytes
        if self.position > len(self.data):
            raise CheckpointError(
                f"{self.path} is cut short: its header goes on after byte {len(self.data)}, where "
                "the file ends; download it again"
            )
        return self.data[start : self.position]

    def number(self, code: str) -> Any:
        (value,) = struct.unpack("<" + code, self.take(struct.calcsize("<" + code)))
        return value

    def count(self, min_bytes: int) -> int:
        """Read a count, bounded by `bytes_left / min_bytes`."""
        count = int(self.number("Q"))
        if count * min_bytes > len(self.data) - self.position:
            raise CheckpointError(
                f"{self.path} is damaged or cut short: {count} entries are announced at byte "
                f"{self.position - 8}, and the file has {len(self.data)} bytes; download it again"
            )
        return count

    def string(self, max_bytes: int | None = None) -> str:
        length = self.count(1)
        if max_bytes is not None and length > max_bytes:
            raise CheckpointError(
                f"{self.path}: a name of {length} bytes; at most {max_bytes} are allowed"
            )
        try:
            return self.take(length).decode("utf-8")
        except UnicodeDecodeError:
            raise CheckpointError(
                f"{self.path} is damaged: the string before byte {self.position} is not UTF-8"
            ) from None

    def strings(self, count: int) -> list[str]:
        """Read many strings in a short loop: a tokenizer has 800,000 of them."""
        data, size, start, texts = self.data, len(self.data), self.position, []
        for _ in range(count):
            begin = start + LENGTH.size
            end = begin + LENGTH.unpack_from(data, start)[0] if begin <= size else size + 1
            try:
                if end > size:
                    raise ValueError
                texts.append(str(data[begin:end], "utf-8"))
            except ValueError:
                self.position = start
                self.string()  # refused by name
                raise
            start = end
        self.position = start
        return texts

    def value(self, type_id: int, key: str) -> Any:
        if type_id == STRING:
            return self.string()
        if type_id == ARRAY:
            return self.array(key)
        if type_id not in NUMBERS:
            raise CheckpointError(f"{self.path}: {key} has value type {type_id}; 0 to 12 are known")
        return self.number(NUMBERS[type_id])

    def array(self, key: str) -> list[Any]:
        type_id = int(self.number("I"))
        if type_id == STRING:
            return self.strings(self.count(LENGTH.size))
        if type_id not in NUMBERS:
            raise CheckpointError(
                f"{self.path}: {key} is an array of value type {type_id}; numbers and strings are "
                "read"
            )
        code = NUMBERS[type_id]
        count = self.count(struct.calcsize("<" + code))
        code = f"<{count}{code}"
        return list(struct.unpack(code, self.take(struct.calcsize(code))))

    def metadata(self, count: int) -> Iterator[tuple[str, Any]]:
        for _ in range(count):
            key = self.string(MAX_KEY_BYTES)
            yield key, self.value(int(self.number("I")), key)

    def table(self, count: int) -> Iterator[tuple[str, _TableEntry]]:
        for _ in range(count):
            name, num_dims = self.string(MAX_NAME_BYTES), int(self.number("I"))
            if num_dims > MAX_DIMS:
                raise CheckpointError(
                    f"{self.path}: {name} has {num_dims} dimensions; at most {MAX_DIMS} are allowed"
                )
            dims = struct.unpack(f"<{num_dims}Q", self.take(8 * num_dims))
            yield name, _TableEntry(dims, int(self.number("I")), int(self.number("Q")))

    def unique(self, what: str, pairs: Iterator[tuple[str, T]]) -> dict[str, T]:
        entries: dict[str, T] = {}
        for name, value in pairs:
            if name in entries:
                raise CheckpointError(f"{self.path} is damaged: it has the {what} {name} twice")
            entries[name] = value
        return entries


def _other_shards(first: _Shard) -> Iterator[_Shard]:
    """Open the files after the first of a split model, each checked against its number."""
    count = first.metadata.get("split.count", 1)
    if type(count) is not int or count < 1:
        raise CheckpointError(f"{first.path}: split.count is {count!r}; it is a positive number")
    if count == 1:
        return
    name = SHARD_NAME.fullmatch(first.path.name)
    if name is None or int(name[3]) != count:
        raise CheckpointError(
            f"{first.path} is one of {count} files of a split model, and such files are named "
            f"STEM-00001-of-{count:05d}.gguf; give them their names back"
        )
    paths = [
        first.path.with_name(f"{name[1]}-{number:05d}-of-{name[3]}.gguf")
        for number in range(1, count + 1)
    ]
    number = first.metadata.get("split.no")
    if int(name[2]) != 1 or number != 0:
        raise CheckpointError(
            f"{first.path} is not the first of the {count} files of its model; give {paths[0]}"
        )
    missing = [path.name for path in paths if not path.is_file()]
    if missing:
        raise CheckpointError(
            f"{first.path} is the first of {count} files, and {', '.join(missing[:4])} is not in "
            "its directory; download the missing ones"
        )
    for index, path in enumerate(paths[1:], start=1):
        shard = _Shard(path)
        numbers = [shard.metadata.get(key) for key in ("split.no", "split.count")]
        if numbers != [index, count]:
            raise CheckpointError(
                f"{path} should be file {index + 1} of {count}, and its split.no and split.count "
                f"are {numbers[0]} and {numbers[1]}; download it again"
            )
        yield shard


def _placed(
    path: Path, table: Mapping[str, _TableEntry], metadata: Mapping[str, Any], end: int, size: int
) -> dict[str, GGUFTensor]:
    """Return the tensors with their byte ranges: aligned, disjoint and in the file."""
    alignment = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
    if type(alignment) is not int or alignment < 1 or alignment & (alignment - 1):
        raise CheckpointError(f"{path}: general.alignment is {alignment}; it is a power of two")
    data_start = -(-end // alignment) * alignment
    tensors: dict[str, GGUFTensor] = {}
    position = data_start
    for name, entry in sorted(table.items(), key=lambda item: item[1].offset):
        tensor = _read_entry(path, name, entry, data_start)
        if entry.offset % alignment:
            raise CheckpointError(
                f"{path}: {name} is misaligned: its offset {entry.offset} is not a multiple of "
                f"{alignment}"
            )
        if tensor.start < position:
            raise CheckpointError(f"{path} is damaged: {name} overlaps the tensor before it")
        position = tensor.start + tensor.num_bytes
        if position > size:
            raise CheckpointError(
                f"{path} is cut short: {name} should end at byte {position}, the file has {size}; "
                "download it again"
            )
        tensors[name] = tensor
    return tensors


def _read_entry(path: Path, name: str, entry: _TableEntry, data_start: int) -> GGUFTensor:
    if entry.type_id not in FORMATS:
        known = TYPE_NAMES.get(entry.type_id, f"the unknown type {entry.type_id}")
        readable = ", ".join(block.name for block in FORMATS.values())
        raise CheckpointError(f"{path}: {name} is stored as {known}; this build reads {readable}")
    block = FORMATS[entry.type_id]
    if math.prod(entry.dims) == 0 or (entry.dims or (1,))[0] % block.num_weights:
        raise CheckpointError(
            f"{path}: {name} has dimensions {list(entry.dims)}; in {block.name} the first is a "
            f"multiple of {block.num_weights}, and none is 0"
        )
    start = data_start + entry.offset
    return GGUFTensor(shape=entry.dims[::-1], format=block, start=start, path=path)
