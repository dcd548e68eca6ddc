"""Files of a checkpoint directory, and the byte range of each tensor, checked before use.

file: 8 bytes: length n | n bytes: JSON {name: dtype, shape, data_offsets} | tensor bytes

Headers are parsed here, not by the safetensors package, so that a refusal can name file and tensor.
Any set of names is accepted; `names` checks them. Imports only the standard library: finding a
model must not wait for torch.
"""

import hashlib
import math
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dgemma.config.strict_json import open_regular, parse_json, read_json, read_regular
from dgemma.errors import CheckpointError

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
SHARDS = "model-*-of-*.safetensors"
# Separate names, so that other programs do not read the integers as weights (docs/decisions/021).
# The files hold integers of eight bits or fewer (docs/decisions/021).
INT8_INDEX = "int8.safetensors.index.json"
INT8_SHARDS = "int8-*-of-*.safetensors"
ROW_SCALE = ".row_scale"  # suffix of the scales of an 8-bit tensor, one per row
GROUP_SCALE = ".group_scale"  # suffix of the scales of a 4- to 6-bit tensor, one per group
ENTRY_POINTS = (SINGLE, INDEX, INT8_INDEX)  # a checkpoint has exactly one
GGUF_SUFFIX = ".gguf"
CONFIGS = ("config.json", "generation_config.json")
COMPANIONS = (
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "processor_config.json",
)
SAVED = ".saved"  # a whole checkpoint whose files are not yet linked into its directory
SHA256 = "sha256"  # key in an index's metadata: hexadecimal digest of each file
HUB_METADATA = ".cache/huggingface/download"  # metadata of a hub download
DIGEST = re.compile(r"[0-9a-f]{64}")
LENGTH_BYTES = 8
MAX_HEADER_BYTES = 32_000_000  # the format allows 100 MB, which take gigabytes once parsed
MAX_FILE_NAME = 200  # characters of a shard's name
MAX_DIMS = 8  # dimensions of a tensor
ITEM_BYTES = {"BF16": 2, "F16": 2, "F32": 4}  # supported dtypes
INT8_ITEM_BYTES = {"I8": 1, "U8": 1, "F16": 2, "F32": 4}  # dtypes of the integer layout
PACKED_ITEM_BYTES = {**ITEM_BYTES, "I8": 1, "U8": 1, "F8_E4M3": 1}  # dtypes of any checkpoint
IMAGE_PROJECTION = "embed_vision.embedding_projection.weight"  # suffix of its name
FIELDS = {"dtype", "shape", "data_offsets"}

TensorShape = tuple[int, ...]
OnProgress = Callable[[int, int], None]  # (done, total) in bytes, tensors or lines


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredTensor:
    """File and byte range of one tensor. `start` and `stop` count from the start of the file."""

    path: Path
    dtype: str  # the file's name for it
    shape: tuple[int, ...]
    start: int
    stop: int

    @property
    def num_bytes(self) -> int:
        return self.stop - self.start


def read_headers(directory: Path, types: Mapping[str, int] = ITEM_BYTES) -> dict[str, StoredTensor]:
    """Read all tensor headers of a checkpoint directory; refuses inconsistent files.

    `types`: allowed dtypes with their sizes; the package's integer layout has others.
    """
    try:
        weights = find_weights(directory)
        if weights.name == SINGLE:
            return read_header(weights, types)
        is_int8 = weights.name == INT8_INDEX
        return _read_shards(weights, INT8_ITEM_BYTES if is_int8 else types)
    except OSError as error:
        raise CheckpointError(f"cannot read {error.filename}: {error.strerror}") from None


def has_image_tower(directory: Path) -> bool:
    """True if a checkpoint stores an image tower that is not all zeros, as `export` writes."""
    stored = read_headers(directory, PACKED_ITEM_BYTES)
    for tensor in (t for name, t in stored.items() if name.endswith(IMAGE_PROJECTION)):
        with open_regular(tensor.path) as file:
            file.seek(tensor.start)
            return any(file.read(tensor.num_bytes))
    return False


def find_weights(directory: Path) -> Path:
    """Return the single weight file of a directory, or the index of its shards."""
    entries = [directory / name for name in ENTRY_POINTS if (directory / name).exists()]
    if len(entries) > 1:
        names = " and ".join(path.name for path in entries)
        raise CheckpointError(f"{directory} holds both {names}; remove what is not meant")
    if not entries:
        stray = [path.name for path in find_shards(directory)]
        has = f"only {listing(stray)}" if stray else "none of them"
        raise CheckpointError(
            f"{directory} should hold {SINGLE}, {INDEX} or {INT8_INDEX}, and has {has}; download "
            "or save the checkpoint again"
        )
    if entries[0].name != SINGLE:
        _check_shards_exist(entries[0], _read_index(entries[0]))
    return entries[0]


def whole_checkpoint(directory: Path) -> Path:
    """Return the directory to read: a complete but unpublished save inside it, or itself."""
    saved = directory / SAVED
    return saved if saved.is_dir() else directory


def verify_digests(directory: Path) -> dict[str, str]:
    """Compare the weight files with their recorded SHA-256; raises on a mismatch.

    Digests are recorded in the index, as this package writes it, or by the hub, for a download.
    Returns those that exist.
    """
    entry = find_weights(directory)
    names = [entry.name]
    recorded: Mapping[str, Any] = {}
    if entry.name != SINGLE:
        index = read_json(entry)
        names = sorted(set(index["weight_map"].values()))
        metadata = index.get("metadata")
        recorded = metadata.get(SHA256) or {} if isinstance(metadata, dict) else {}
        if not isinstance(recorded, dict):
            raise CheckpointError(f"{entry}: {SHA256} should be an object of files and digests")
    found: dict[str, str] = {}
    for name in names:
        expected = recorded.get(name) or _hub_digest(directory / name)
        if expected is None:
            continue
        found[name] = file_digest(directory / name)
        if found[name] != expected:
            raise CheckpointError(
                f"{directory / name} is damaged: its SHA-256 is {found[name]}, not {expected!r:.70}"
                "; fetch or save it again"
            )
    return found


def file_digest(path: Path) -> str:
    """Return the SHA-256 of a regular file in hexadecimal."""
    with open_regular(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()  # type: ignore[arg-type]


def _hub_digest(path: Path) -> str | None:
    """Return the hub's digest of a large file: the name of its blob, or its ETag."""
    blob = path.resolve().name
    if path.is_symlink() and DIGEST.fullmatch(blob):
        return blob
    stated = path.parent / HUB_METADATA / f"{path.name}.metadata"
    if not stated.is_file():
        return None
    lines = read_regular(stated).decode("utf-8", "replace").splitlines()
    return lines[1] if len(lines) > 1 and DIGEST.fullmatch(lines[1]) else None


def find_shards(directory: Path) -> list[Path]:
    """Return all files of a directory with shard names."""
    return sorted(path for pattern in (SHARDS, INT8_SHARDS) for path in directory.glob(pattern))


def read_header(path: Path, types: Mapping[str, int] = ITEM_BYTES) -> dict[str, StoredTensor]:
    """Read the header of a file; refuses unsupported dtypes and wrong byte ranges."""
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        length = int.from_bytes(file.read(LENGTH_BYTES), "little")
        data_start = LENGTH_BYTES + length
        if not 2 <= length <= MAX_HEADER_BYTES or data_start > size:
            raise CheckpointError(
                f"{path} is not a safetensors file, or is cut short: its header should have "
                f"{length} bytes, the file has {size}"
            )
        raw = parse_json(file.read(length), str(path))
    raw.pop("__metadata__", None)
    tensors = {name: _read_entry(path, data_start, name, entry) for name, entry in raw.items()}
    ordered = dict(sorted(tensors.items(), key=lambda item: (item[1].start, item[1].stop)))
    _check_sizes(path, ordered, types)
    _check_ranges(path, ordered, data_start, size)
    return ordered


def listing(names: Iterable[str], limit: int = 4) -> str:
    """Write the first few names, and the number of others."""
    names = list(names)
    more = len(names) - limit
    return ", ".join(names[:limit]) + (f" and {more} more" if more > 0 else "")


def describe(findings: Mapping[str, Sequence[str]]) -> str:
    """Write problems by kind with the names concerned, or an empty string."""
    return "; ".join(f"{what} {listing(names)}" for what, names in findings.items() if names)


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
        mapped = [f"{name} in {weight_map[name]}" for name in lost]
        raise CheckpointError(f"{index} places {listing(mapped)}, but it is not there")
    unlisted = sorted(tensors.keys() - weight_map.keys())
    if unlisted:
        raise CheckpointError(f"{index} does not list {listing(unlisted)}, which its shards hold")
    return tensors


def _read_index(index: Path) -> dict[str, str]:
    raw = read_json(index)
    # `total_size` and `total_parameters` are ignored: writers count them differently, and the
    # headers have exact sizes.
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
    if not isinstance(name, str) or not name.isprintable() or len(name) > MAX_FILE_NAME:
        return False
    return name not in ("", ".", "..") and not {"/", "\\"} & set(name)


def _check_shards_exist(index: Path, weight_map: Mapping[str, str]) -> None:
    shards = sorted(set(weight_map.values()))
    missing = [name for name in shards if not (index.parent / name).exists()]
    if missing:
        raise CheckpointError(
            f"{index} names {listing(missing)}, which {index.parent} does not hold; download the "
            "checkpoint again"
        )


def _read_entry(path: Path, data_start: int, name: str, entry: Any) -> StoredTensor:
    if not isinstance(entry, dict) or entry.keys() != FIELDS:
        raise CheckpointError(f"{path}: {name} should have dtype, shape and data_offsets")
    shape, offsets = entry["shape"], entry["data_offsets"]
    if not _are_counts(shape) or not _are_counts(offsets) or len(offsets) != 2:
        raise CheckpointError(
            f"{path}: {name} has shape {str(shape)[:80]} and data_offsets {str(offsets)[:80]}"
        )
    return StoredTensor(
        path=path,
        dtype=str(entry["dtype"]),
        shape=tuple(shape),
        start=data_start + offsets[0],
        stop=data_start + offsets[1],
    )


def _are_counts(values: Any) -> bool:
    """True for a short list of numbers that a file can hold."""
    is_short = isinstance(values, list) and len(values) <= MAX_DIMS
    return is_short and all(type(value) is int and 0 <= value < 1 << 63 for value in values)


def _check_sizes(path: Path, tensors: Mapping[str, StoredTensor], types: Mapping[str, int]) -> None:
    """Refuse unknown dtypes, and byte ranges that do not match shape and dtype."""
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
    """Refuse gaps and overlaps between byte ranges, and trailing bytes."""
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
