"""From a model to a checkpoint directory in the released layout, which others read too.

All files are written under a hidden directory beside their place and then renamed, the one that
makes the checkpoint whole last. Written tensor by tensor: the safetensors package would want a
whole shard in memory. `int8` and `quantize` write their own layouts by the same means.
"""

import json
import os
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from dgemma.config import config_to_json, generation_config_to_json
from dgemma.errors import CheckpointError, UsageError
from dgemma.weights.files import (
    COMPANIONS,
    CONFIGS,
    ENTRY_POINTS,
    INDEX,
    INT8_INDEX,
    LENGTH_BYTES,
    SINGLE,
    find_shards,
    listing,
)
from dgemma.weights.int8 import EIGHT, Bits, to_int8
from dgemma.weights.load import Checkpoint
from dgemma.weights.mapped import DTYPES, STORED_DTYPES
from dgemma.weights.names import BUFFER_ENDINGS, TEXT_PREFIX, skeleton, stored_names

DTYPE_NAMES = {dtype: name for name, dtype in STORED_DTYPES.items()}
ALIGNMENT = 64  # bytes; a cache line, so that views of the mapped file are quick to read


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What is written: files in order, each with its tensors, and what names them all."""

    files: Mapping[str, Mapping[str, Tensor]]
    dtype: torch.dtype | None  # of every tensor; None: each keeps its own
    num_parameters: int
    index: str = INDEX


def save_checkpoint(
    checkpoint: Checkpoint,
    directory: Path,
    *,
    tokenizer_from: Path | None = None,
    max_shard_bytes: int = 5_000_000_000,
    overwrite: bool = False,
) -> None:
    """Write a checkpoint that is whole or does not look it; all tensors take the model's dtype."""
    if not overwrite:
        refuse_existing(directory)
    dtype = _dtype(checkpoint)
    tensors = released_tensors(checkpoint)
    shards = split(tensors, dtype, max_shard_bytes)
    files = {SINGLE: shards[0]} if len(shards) == 1 else name_files("model", shards)
    plan = Plan(files=files, dtype=dtype, num_parameters=_count(tensors))
    _save(checkpoint, plan, directory, tokenizer_from)


def save_int8(
    checkpoint: Checkpoint,
    directory: Path,
    *,
    bits: Bits = EIGHT,
    tokenizer_from: Path | None = None,
    max_shard_bytes: int = 8_000_000,
    overwrite: bool = False,
) -> None:
    """Write a checkpoint in 8 bits or fewer, for this package alone; it is read as float32."""
    if not overwrite:
        refuse_existing(directory)
    tensors = released_tensors(checkpoint)
    files = name_files("int8", split(to_int8(tensors, bits), None, max_shard_bytes))
    plan = Plan(files=files, dtype=None, num_parameters=_count(tensors), index=INT8_INDEX)
    _save(checkpoint, plan, directory, tokenizer_from)


def released_tensors(checkpoint: Checkpoint) -> dict[str, Tensor]:
    """Every tensor of the released layout under its stored name, sorted by name."""
    names = stored_names(checkpoint.config)
    weights = checkpoint.model.state_dict()
    missing = sorted(skeleton(checkpoint.config).state_dict().keys() - weights.keys())
    if missing:
        raise UsageError(
            f"this model lacks {listing(missing)}; a packed or adapted model cannot be saved: save "
            "the checkpoint it was loaded from"
        )
    vision = {name for name, entry in names.items() if entry.group == "vision"}
    if checkpoint.vision and checkpoint.vision.keys() != vision:
        wrong = sorted(checkpoint.vision.keys() ^ vision)
        raise CheckpointError(f"the image tower is not the config's: {listing(wrong)}")
    prefix = TEXT_PREFIX[checkpoint.config.family]
    text = {prefix + name: weight for name, weight in weights.items()}
    twins = {name: text[entry.of] for name, entry in names.items() if entry.group == "twin"}
    return dict(sorted({**text, **twins, **checkpoint.vision}.items()))


def split(
    tensors: Mapping[str, Tensor], dtype: torch.dtype | None, max_shard_bytes: int
) -> list[dict[str, Tensor]]:
    """Tensors by file; a shard passes the limit only by a single tensor that is larger."""
    if max_shard_bytes <= 0:
        raise UsageError(f"max_shard_bytes must be positive, not {max_shard_bytes}")
    shards: list[dict[str, Tensor]] = [{}]
    room = max_shard_bytes
    for name, tensor in tensors.items():
        num_bytes = tensor_bytes(tensor, dtype)
        if shards[-1] and num_bytes > room:
            shards.append({})
            room = max_shard_bytes
        shards[-1][name] = tensor
        room -= num_bytes
    return shards


def write_safetensors(path: Path, tensors: Mapping[str, Tensor], dtype: torch.dtype | None) -> None:
    """Write one file, all in one type or each tensor in its own; one at a time is in memory."""
    # Odd sizes go last: there may be no gaps, and one layer scalar would misalign all that follows.
    ordered = dict(
        sorted(tensors.items(), key=lambda item: tensor_bytes(item[1], dtype) % ALIGNMENT > 0)
    )
    with path.open("wb") as file:
        file.write(header_bytes(ordered, dtype))
        for tensor in ordered.values():
            flat = tensor.detach().to(dtype or tensor.dtype).cpu().contiguous().view(-1)
            file.write(flat.view(torch.uint8).numpy().data)
        sync(file)


def tensor_bytes(tensor: Tensor, dtype: torch.dtype | None) -> int:
    return tensor.numel() * (dtype or tensor.dtype).itemsize


def header_bytes(tensors: Mapping[str, Tensor], dtype: torch.dtype | None) -> bytes:
    """The start of a file that holds these tensors in order; looks at types and shapes alone."""
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


def _save(checkpoint: Checkpoint, plan: Plan, directory: Path, companions: Path | None) -> None:
    save_whole(
        directory,
        lambda place: [*copy_companions(companions, place), *_write_all(checkpoint, plan, place)],
    )


def save_whole(directory: Path, write: Callable[[Path], list[str]]) -> None:
    """Have files written into a hidden directory, and rename all of them, in order, when done."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        place = Path(tempfile.mkdtemp(prefix=".saving-", dir=directory))
        try:
            names = write(place)
        except BaseException:
            shutil.rmtree(place)
            raise
        _publish(place, directory, names)
    except OSError as error:
        raise CheckpointError(
            f"cannot save to {directory}: {error.strerror}; check its free space and permissions"
        ) from None


def name_files(
    stem: str, shards: Sequence[Mapping[str, Tensor]]
) -> dict[str, Mapping[str, Tensor]]:
    count = len(shards)
    return {f"{stem}-{i:05d}-of-{count:05d}.safetensors": s for i, s in enumerate(shards, start=1)}


def refuse_existing(directory: Path, advice: str = "overwrite it (--overwrite) or choose") -> None:
    names = [name for name in (*CONFIGS, *ENTRY_POINTS) if (directory / name).exists()]
    names += [path.name for path in find_shards(directory)]
    if names:
        raise UsageError(
            f"{directory} already holds a checkpoint ({listing(names)}); {advice} another directory"
        )


def _dtype(checkpoint: Checkpoint) -> torch.dtype:
    weights = checkpoint.model.state_dict().values()
    dtypes: set[torch.dtype] = {weight.dtype for weight in weights}
    if len(dtypes) > 1 or not dtypes <= set(DTYPES.values()):
        raise CheckpointError(
            f"weights of {listing(sorted(map(str, dtypes)))} cannot be saved; they must all be one "
            f"of {listing(map(str, DTYPES.values()))}"
        )
    return dtypes.pop()


def _write_all(checkpoint: Checkpoint, plan: Plan, place: Path) -> list[str]:
    """Write weights and configs; the returned names end with the one that makes them whole."""
    dtype = plan.dtype or torch.float32
    config = replace(checkpoint.config, dtype=str(dtype).removeprefix("torch."))
    write_json(place / "config.json", config_to_json(config))
    write_json(place / "generation_config.json", generation_config_to_json(checkpoint.generation))
    for name, tensors in plan.files.items():
        write_safetensors(place / name, tensors, plan.dtype)
    if SINGLE in plan.files:
        return [*CONFIGS, SINGLE]
    write_json(place / plan.index, _index(plan))
    return [*CONFIGS, *plan.files, plan.index]


def _count(tensors: Mapping[str, Tensor]) -> int:
    """Parameters as others count them: the reference keeps some of the tensors as buffers."""
    return sum(w.numel() for name, w in tensors.items() if not name.endswith(BUFFER_ENDINGS))


def _index(plan: Plan) -> dict[str, Any]:
    tensors = [tensor for shard in plan.files.values() for tensor in shard.values()]
    return {
        "metadata": {
            "total_parameters": plan.num_parameters,
            "total_size": sum(tensor_bytes(tensor, plan.dtype) for tensor in tensors),
        },
        "weight_map": {name: file for file, shard in plan.files.items() for name in shard},
    }


def write_json(path: Path, raw: Mapping[str, Any]) -> None:
    with path.open("wb") as file:
        file.write(json.dumps(raw, indent=2, sort_keys=True).encode() + b"\n")
        sync(file)


def sync(file: BinaryIO) -> None:
    file.flush()
    os.fsync(file.fileno())


def copy_companions(source: Path | None, place: Path) -> list[str]:
    if source is None:
        return []
    names = [name for name in COMPANIONS if (source / name).is_file()]
    for name in names:
        shutil.copyfile(source / name, place / name)
    return names


def _publish(place: Path, directory: Path, names: list[str]) -> None:
    # The old entry point goes first: a mixture of old and new shards must never look whole.
    entry_points = [directory / name for name in ENTRY_POINTS]
    for old in (*entry_points, *find_shards(directory)):
        old.unlink(missing_ok=True)
    for name in names:
        os.replace(place / name, directory / name)
    place.rmdir()
