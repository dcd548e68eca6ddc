"""The files of a checkpoint directory, and where in them each tensor lies, all of it checked first.

    file:  8 bytes: length n | n bytes: JSON {name: dtype, shape, data_offsets} | tensor bytes

Headers are read here and not by the safetensors package so that a refusal can name file and
tensor. Knows nothing of models: any set of names is well-formed. Which are wanted says `check`.
Standard library only: finding a model must not wait for torch.
"""

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dgemma.errors import CheckpointError

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
SHARDS = "model-*-of-*.safetensors"
# Names of their own: no other program may take whole numbers for the weights (docs/decisions/021).
# They hold numbers of eight bits or fewer (docs/decisions/029).
INT8_INDEX = "int8.safetensors.index.json"
INT8_SHARDS = "int8-*-of-*.safetensors"
ROW_SCALE = ".row_scale"  # after the name of an 8-bit tensor: what its rows are multiplied by
GROUP_SCALE = ".group_scale"  # after one of fewer bits: what groups of its rows are multiplied by
ENTRY_POINTS = (SINGLE, INDEX, INT8_INDEX)  # a checkpoint has one of them
CONFIGS = ("config.json", "generation_config.json")
COMPANIONS = (
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "processor_config.json",
)
LENGTH_BYTES = 8
MAX_HEADER_BYTES = 100_000_000  # the format's own limit
ITEM_BYTES = {"BF16": 2, "F16": 2, "F32": 4}  # the types this build reads
INT8_ITEM_BYTES = {"I8": 1, "U8": 1, "F16": 2, "F32": 4}  # in the 8-bit layout
FIELDS = {"dtype", "shape", "data_offsets"}


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredTensor:
    """Where one tensor lies. `start` and `stop` count from the beginning of the file."""

    path: Path
    dtype: str  # as the file spells it
    shape: tuple[int, ...]
    start: int
    stop: int

    @property
    def num_bytes(self) -> int:
        return self.stop - self.start


def read_headers(directory: Path, types: Mapping[str, int] = ITEM_BYTES) -> dict[str, StoredTensor]:
    """Every tensor of a checkpoint directory, once all its files agree with each other.

    `types` are those its files may hold; the 8-bit layout of this package has its own.
    """
    try:
        weights = find_weights(directory)
        if weights.name == SINGLE:
            return read_header(weights, types)
        is_int8 = weights.name == INT8_INDEX
        return _read_shards(weights, INT8_ITEM_BYTES if is_int8 else types)
    except OSError as error:
        raise CheckpointError(f"cannot read {error.filename}: {error.strerror}") from None


def find_weights(directory: Path) -> Path:
    """The single weight file of a directory, or the index of its shards, all of them present."""
    found = [directory / name for name in ENTRY_POINTS if (directory / name).is_file()]
    if len(found) > 1:
        names = " and ".join(path.name for path in found)
        raise CheckpointError(f"{directory} holds both {names}; remove what is not meant")
    if not found:
        stray = [path.name for path in find_shards(directory)]
        has = f"only {listing(stray)}" if stray else "none of them"
        raise CheckpointError(
            f"{directory} should hold {SINGLE}, {INDEX} or {INT8_INDEX}, and has {has}; download "
            "or save the checkpoint again"
        )
    if found[0].name != SINGLE:
        _check_shards_exist(found[0], _read_index(found[0]))
    return found[0]


def find_shards(directory: Path) -> list[Path]:
    """All files of a directory that are named as parts of a checkpoint."""
    return sorted(path for pattern in (SHARDS, INT8_SHARDS) for path in directory.glob(pattern))


def read_header(path: Path, types: Mapping[str, int] = ITEM_BYTES) -> dict[str, StoredTensor]:
    """The tensors of one file, of the given types, byte ranges checked against its length."""
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(LENGTH_BYTES), "little")
        data_start = LENGTH_BYTES + length
        if not 2 <= length <= MAX_HEADER_BYTES or data_start > size:
            raise CheckpointError(
                f"{path} is not a safetensors file, or is cut short: its header should have "
                f"{length} bytes, the file has {size}"
            )
        raw = _parse(path, file.read(length))
    raw.pop("__metadata__", None)
    tensors = {name: _read_entry(path, data_start, name, entry) for name, entry in raw.items()}
    ordered = dict(sorted(tensors.items(), key=lambda item: (item[1].start, item[1].stop)))
    _check_sizes(path, ordered, types)
    _check_ranges(path, ordered, data_start, size)
    return ordered


def listing(names: Iterable[str], limit: int = 4) -> str:
    """The first few names in words."""
    names = list(names)
    more = len(names) - limit
    return ", ".join(names[:limit]) + (f" and {more} more" if more > 0 else "")


def _read_shards(index: Path, types: Mapping[str, int]) -> dict[str, StoredTensor]:
    weight_map = _read_index(index)
    names = sorted(set(weight_map.values()))
    shards = {name: read_header(index.parent / name, types) for name in names}
    tensors: dict[str, StoredTensor] = {}
    for shard in shards.values():
        twice = shard.keys() & tensors.keys()
        if twice:
            raise CheckpointError(f"{index.parent}: two shards hold {listing(sorted(twice))}")
        tensors |= shard
    lost = [name for name, shard in weight_map.items() if name not in shards[shard]]
    if lost:
        places = [f"{name} in {weight_map[name]}" for name in lost]
        raise CheckpointError(f"{index} places {listing(places)}, but it is not there")
    unlisted = sorted(tensors.keys() - weight_map.keys())
    if unlisted:
        raise CheckpointError(f"{index} does not list {listing(unlisted)}, which its shards hold")
    return tensors


def _read_index(index: Path) -> dict[str, str]:
    raw = _parse(index, index.read_bytes())
    # `total_size` and `total_parameters` are left alone: writers count them differently, and the
    # headers say the same thing exactly.
    weight_map = raw.get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{index} should hold a weight_map from tensor names to files")
    outside = [name for name in weight_map.values() if not _is_plain_name(name)]
    if outside:
        raise CheckpointError(
            f"{index} names {listing(map(repr, outside))}; shards are files of the same directory"
        )
    return weight_map


def _is_plain_name(name: Any) -> bool:
    return isinstance(name, str) and name not in ("", ".", "..") and not {"/", "\\"} & set(name)


def _check_shards_exist(index: Path, weight_map: Mapping[str, str]) -> None:
    shards = sorted(set(weight_map.values()))
    missing = [name for name in shards if not (index.parent / name).is_file()]
    if missing:
        raise CheckpointError(
            f"{index} names {listing(missing)}, which {index.parent} does not hold; download the "
            "checkpoint again"
        )


def _parse(path: Path, text: bytes) -> dict[str, Any]:
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        raw = dict(pairs)
        if len(raw) < len(pairs):
            twice = {key for key, _ in pairs if sum(key == other for other, _ in pairs) > 1}
            raise CheckpointError(f"{path} lists {listing(sorted(twice))} more than once")
        return raw

    try:
        raw = json.loads(text.decode("utf-8"), object_pairs_hook=unique)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is damaged: its JSON cannot be read ({error})") from None
    if not isinstance(raw, dict):
        raise CheckpointError(f"{path} is damaged: its JSON is not an object")
    return raw


def _read_entry(path: Path, data_start: int, name: str, entry: Any) -> StoredTensor:
    if not isinstance(entry, dict) or entry.keys() != FIELDS:
        raise CheckpointError(f"{path}: {name} should have dtype, shape and data_offsets")
    shape, offsets = entry["shape"], entry["data_offsets"]
    if not _are_counts(shape) or not _are_counts(offsets) or len(offsets) != 2:
        raise CheckpointError(f"{path}: {name} has shape {shape} and data_offsets {offsets}")
    return StoredTensor(
        path=path,
        dtype=str(entry["dtype"]),
        shape=tuple(shape),
        start=data_start + offsets[0],
        stop=data_start + offsets[1],
    )


def _are_counts(values: Any) -> bool:
    return isinstance(values, list) and all(type(value) is int and value >= 0 for value in values)


def _check_sizes(path: Path, tensors: Mapping[str, StoredTensor], types: Mapping[str, int]) -> None:
    """Every tensor must be of a known type, and take the bytes that its shape needs in it."""
    for name, stored in tensors.items():
        if stored.dtype not in types:
            raise CheckpointError(
                f"{path}: {name} is stored as {stored.dtype}; this build reads {listing(types)}"
            )
        needed = math.prod(stored.shape) * types[stored.dtype]
        if stored.num_bytes != needed:
            raise CheckpointError(
                f"{path}: {name} takes {stored.num_bytes} bytes, but its shape "
                f"{list(stored.shape)} in {stored.dtype} needs {needed}"
            )


def _check_ranges(
    path: Path, tensors: Mapping[str, StoredTensor], data_start: int, size: int
) -> None:
    """Ranges must follow each other without gap or overlap, and end where the file ends."""
    position = data_start
    for name, stored in tensors.items():
        if stored.start != position:
            raise CheckpointError(
                f"{path}: {name} begins at byte {stored.start}, but the tensor before it ends at "
                f"{position}"
            )
        if stored.stop > size:
            raise CheckpointError(
                f"{path} is cut short: {name} should end at byte {stored.stop}, the file has "
                f"{size}; download it again"
            )
        position = stored.stop
    if position != size:
        raise CheckpointError(f"{path} has {size - position} bytes after its last tensor")
