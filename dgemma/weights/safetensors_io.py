"""Safetensors files: tensors as views of memory maps, and writing one tensor at a time.

Headers are read and checked in `files`.
"""

import hashlib
import json
import mmap
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, BinaryIO, Protocol

import torch
from torch import Tensor

from dgemma.config.strict_json import open_regular
from dgemma.errors import CheckpointError
from dgemma.weights.files import LENGTH_BYTES, StoredTensor

DTYPES = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}
# Storage dtypes of quantized weights.
PACKED_DTYPES = {"I8": torch.int8, "U8": torch.uint8, "F8_E4M3": torch.float8_e4m3fn}
STORED_DTYPES = DTYPES | PACKED_DTYPES
DTYPE_NAMES = {dtype: name for name, dtype in STORED_DTYPES.items()}
ALIGNMENT = 64  # bytes: a cache line, for fast reads of memory-mapped tensors


class Tensors(Protocol):
    """Tensors by name, and headers that are known without reading data."""

    @property
    def stored(self) -> Mapping[str, StoredTensor]: ...

    def __getitem__(self, name: str) -> Tensor: ...


class MappedTensors:
    """The tensors of checked files, by name. A tensor keeps its file's memory map alive."""

    def __init__(self, stored: Mapping[str, StoredTensor]) -> None:
        self.stored = stored
        self.maps = _map_files(tensor.path for tensor in stored.values())

    def __getitem__(self, name: str) -> Tensor:
        stored, dtype = self.stored[name], STORED_DTYPES[self.stored[name].dtype]
        flat = torch.frombuffer(
            self.maps[stored.path], dtype=torch.uint8, offset=stored.start, count=stored.num_bytes
        )
        # Old writers did not align headers; torch needs a copy of unaligned bytes.
        if stored.start % dtype.itemsize:
            flat = flat.clone()
        return flat.view(dtype).view(stored.shape)


def map_file(path: Path) -> mmap.mmap:
    """Map a regular file into memory, copy-on-write: torch needs writable memory."""
    with open_regular(path) as file:
        try:
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        except (OSError, ValueError) as error:  # an empty file cannot be mapped
            raise CheckpointError(f"cannot map {path} into memory: {error}") from None


def _map_files(paths: Iterable[Path]) -> dict[Path, mmap.mmap]:
    maps = {}
    for path in sorted(set(paths)):
        maps[path] = map_file(path)
    return maps


def write_safetensors(path: Path, tensors: Mapping[str, Tensor], dtype: torch.dtype | None) -> str:
    """Write one file, in one dtype or each tensor's own; return its SHA-256.

    One tensor at a time is in memory.
    """
    # Odd sizes last: gaps are not allowed, and a scalar would misalign all later tensors.
    ordered = dict(
        sorted(tensors.items(), key=lambda item: tensor_bytes(item[1], dtype) % ALIGNMENT > 0)
    )
    with path.open("wb") as file:
        hashed = HashedFile(file)
        hashed.write(header_bytes(ordered, dtype))
        for tensor in ordered.values():
            flat = tensor.detach().to(dtype or tensor.dtype).cpu().contiguous().view(-1)
            hashed.write(flat.view(torch.uint8).numpy().data)
        sync(file)
    return hashed.hexdigest()


class HashedFile:
    """A file being written, with the SHA-256 of its bytes so far."""

    def __init__(self, file: BinaryIO) -> None:
        self.file, self.digest = file, hashlib.sha256()

    def write(self, data: bytes | memoryview) -> int:
        self.digest.update(data)
        return self.file.write(data)

    def flush(self) -> None:
        self.file.flush()

    def hexdigest(self) -> str:
        return self.digest.hexdigest()


def tensor_bytes(tensor: Tensor, dtype: torch.dtype | None) -> int:
    return tensor.numel() * (dtype or tensor.dtype).itemsize


def header_bytes(tensors: Mapping[str, Tensor], dtype: torch.dtype | None) -> bytes:
    """Return the header of a file with these tensors; needs only dtypes and shapes."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    position = 0
    for name, tensor in tensors.items():
        stop = position + tensor_bytes(tensor, dtype)
        header[name] = {
            "dtype": DTYPE_NAMES[dtype or tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [position, stop],
        }
        position = stop
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(LENGTH_BYTES + len(text)) % ALIGNMENT)
    return len(text).to_bytes(LENGTH_BYTES, "little") + text


def sync(file: BinaryIO) -> None:
    file.flush()
    os.fsync(file.fileno())
