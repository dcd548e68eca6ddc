"""Tensors as views of memory-mapped files: nothing is read before it is touched."""

import mmap
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from dgemma.errors import CheckpointError
from dgemma.weights.files import StoredTensor

DTYPES = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}
# No types of weights, but types of files.
PACKED_DTYPES = {"I8": torch.int8, "U8": torch.uint8, "F8_E4M3": torch.float8_e4m3fn}
STORED_DTYPES = DTYPES | PACKED_DTYPES


class Tensors(Protocol):
    """Tensors by name, and what is known of each without reading it."""

    @property
    def stored(self) -> Mapping[str, StoredTensor]: ...

    def __getitem__(self, name: str) -> Tensor: ...


class MappedTensors:
    """The tensors of checked files, by name. A tensor keeps the map of its file alive."""

    def __init__(self, stored: Mapping[str, StoredTensor]) -> None:
        self.stored = stored
        self.maps = _map_files(tensor.path for tensor in stored.values())

    def __getitem__(self, name: str) -> Tensor:
        stored, dtype = self.stored[name], STORED_DTYPES[self.stored[name].dtype]
        flat = torch.frombuffer(
            self.maps[stored.path], dtype=torch.uint8, offset=stored.start, count=stored.num_bytes
        )
        # Old writers did not align their headers; torch reads such bytes only from a copy.
        if stored.start % dtype.itemsize:
            flat = flat.clone()
        return flat.view(dtype).view(stored.shape)


def _map_files(paths: Iterable[Path]) -> dict[Path, mmap.mmap]:
    maps = {}
    for path in sorted(set(paths)):
        try:
            with path.open("rb") as file:
                # Private: torch wants writable memory, and a write must not reach the file.
                maps[path] = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        except OSError as error:
            raise CheckpointError(f"cannot map {path} into memory: {error.strerror}") from None
    return maps
