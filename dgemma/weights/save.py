"""Write checkpoints in the released layout, which other programs read, or the integer layout.

Files are written to a hidden directory that is renamed when complete, so that a crash leaves the
old checkpoint or the new one. The index records the SHA-256 of its shards (`info --verify`).
Tensors are written one at a time: the safetensors package would need a whole shard in memory.
"""

import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dgemma.config import ModelConfig, config_to_json, generation_config_to_json
from dgemma.config.strict_json import sync_directory
from dgemma.errors import CheckpointError, UsageError
from dgemma.weights.files import (
    COMPANIONS,
    CONFIGS,
    ENTRY_POINTS,
    INDEX,
    INT8_INDEX,
    SAVED,
    SHA256,
    SINGLE,
    find_shards,
    listing,
)
from dgemma.weights.gguf_checkpoint import is_gguf
from dgemma.weights.int_layout import INT8, Bits, to_int_layout
from dgemma.weights.load import Checkpoint, load_model
from dgemma.weights.lora import merge
from dgemma.weights.lora_files import load_adapter
from dgemma.weights.names import BUFFER_ENDINGS, TEXT_PREFIX, skeleton, stored_names
from dgemma.weights.quant_schemes import MODELOPT_FILE
from dgemma.weights.safetensors_io import DTYPES, sync, tensor_bytes, write_safetensors
from dgemma.weights.source import write_tokenizer

SAVING = ".saving-"  # prefix of a hidden directory
PARTIAL = ".link"  # suffix of a file while it is linked into the directory


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardPlan:
    """Files in order with their tensors, and the name of their index."""

    files: Mapping[str, Mapping[str, Tensor]]
    dtype: torch.dtype | None  # dtype of all tensors; None: unchanged
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
    """Write a checkpoint in the released layout; all tensors have the model's dtype."""
    if not overwrite:
        refuse_existing(directory)
    dtype = _dtype(checkpoint)
    tensors = released_tensors(checkpoint)
    shards = split(tensors, dtype, max_shard_bytes)
    files = {SINGLE: shards[0]} if len(shards) == 1 else name_files("model", shards)
    plan = ShardPlan(files=files, dtype=dtype, num_parameters=_count(tensors))
    _save(checkpoint, plan, directory, tokenizer_from)


def save_int8(
    checkpoint: Checkpoint,
    directory: Path,
    *,
    bits: Bits = INT8,
    tokenizer_from: Path | None = None,
    max_shard_bytes: int = 8_000_000,
    overwrite: bool = False,
) -> None:
    """Write a checkpoint in the integer layout, which only this package reads, as float32."""
    if not overwrite:
        refuse_existing(directory)
    tensors = released_tensors(checkpoint)
    files = name_files("int8", split(to_int_layout(tensors, bits), None, max_shard_bytes))
    plan = ShardPlan(files=files, dtype=None, num_parameters=_count(tensors), index=INT8_INDEX)
    _save(checkpoint, plan, directory, tokenizer_from)


def export(
    source: Path,
    directory: Path,
    *,
    dtype: torch.dtype | None = None,
    adapter: Path | None = None,
    overwrite: bool = False,
) -> None:
    """Write a checkpoint in the released layout, with all tensors that other programs require.

    An adapter is merged. If the config has an image tower and the checkpoint has none, as for
    `nano`, its tensors are written as zeros: transformers and mlx-vlm need them.
    """
    lora = None if adapter is None else load_adapter(adapter)
    checkpoint = load_model(source, dtype=dtype)
    if lora is not None:
        merge(checkpoint.model, lora)
    vision = checkpoint.vision or blank_vision(checkpoint.config)
    complete = replace(checkpoint, vision=vision)
    save_checkpoint(complete, directory, tokenizer_from=source, overwrite=overwrite)


def blank_vision(config: ModelConfig) -> Mapping[str, Tensor]:
    """Return an all-zero image tower for a config, or nothing if it has none."""
    specs = stored_names(config).items()
    return {name: torch.zeros(spec.shape) for name, spec in specs if spec.group == "vision"}


def released_tensors(checkpoint: Checkpoint) -> dict[str, Tensor]:
    """Return all tensors of the released layout by stored name, sorted."""
    names = stored_names(checkpoint.config)
    weights = checkpoint.model.state_dict()
    missing = sorted(skeleton(checkpoint.config).state_dict().keys() - weights.keys())
    if missing:
        raise UsageError(
            f"this model lacks {listing(missing)}; a packed or adapted model cannot be saved: save "
            "the checkpoint it was loaded from"
        )
    vision = {name for name, spec in names.items() if spec.group == "vision"}
    if checkpoint.vision and checkpoint.vision.keys() != vision:
        wrong = sorted(checkpoint.vision.keys() ^ vision)
        raise CheckpointError(f"the image tower is not the config's: {listing(wrong)}")
    prefix = TEXT_PREFIX[checkpoint.config.family]
    text = {prefix + name: weight for name, weight in weights.items()}
    twins = {name: text[spec.target] for name, spec in names.items() if spec.group == "twin"}
    return dict(sorted({**text, **twins, **checkpoint.vision}.items()))


def split(
    tensors: Mapping[str, Tensor], dtype: torch.dtype | None, max_shard_bytes: int
) -> list[dict[str, Tensor]]:
    """Split tensors into shards; only a single tensor may exceed the limit."""
    if max_shard_bytes <= 0:
        raise UsageError(f"max_shard_bytes must be positive, not {max_shard_bytes}")
    shards: list[dict[str, Tensor]] = [{}]
    free = max_shard_bytes
    for name, tensor in tensors.items():
        num_bytes = tensor_bytes(tensor, dtype)
        if shards[-1] and num_bytes > free:
            shards.append({})
            free = max_shard_bytes
        shards[-1][name] = tensor
        free -= num_bytes
    return shards


def _save(
    checkpoint: Checkpoint, plan: ShardPlan, directory: Path, companions: Path | None
) -> None:
    save_atomically(
        directory,
        lambda hidden: [
            *copy_companions(companions, hidden),
            *_write_all(checkpoint, plan, hidden),
        ],
    )


def save_atomically(directory: Path, write: Callable[[Path], list[str]]) -> None:
    """Call `write` with a hidden directory, then publish the files it names.

        .saving-x/   being written: not looked at, removed by the next save
        .saved/      whole: read instead of the directory, until its files are linked into it

    One rename divides the two, so a crash at any point leaves the old checkpoint or the new one.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True)
        _remove_remnants(directory)
        _publish(directory)  # finish an interrupted save
        hidden = Path(tempfile.mkdtemp(prefix=SAVING, dir=directory))
        try:
            with _locked(hidden):
                for name in write(hidden):
                    _sync_file(hidden / name)
                sync_directory(hidden)
                os.rename(hidden, directory / SAVED)
        except BaseException:
            shutil.rmtree(hidden, ignore_errors=True)
            raise
        sync_directory(directory)
        _publish(directory)
    except OSError as error:
        raise CheckpointError(
            f"cannot save to {directory}: {error.strerror}; check its free space and permissions"
        ) from None


def _publish(directory: Path) -> None:
    """Link the files of a complete save into its directory, entry point last, and remove it."""
    saved = directory / SAVED
    if not saved.is_dir():
        return
    new = sorted(path.name for path in saved.iterdir() if path.name != PARTIAL)
    # Unlink the old entry point first: old and new shards must never look complete together.
    old = [*(directory / name for name in (*ENTRY_POINTS, MODELOPT_FILE)), *find_shards(directory)]
    for path in old:
        path.unlink(missing_ok=True)
    for name in sorted(new, key=lambda name: name in ENTRY_POINTS):
        (saved / PARTIAL).unlink(missing_ok=True)
        try:
            os.link(saved / name, saved / PARTIAL)
        except OSError:  # the file system has no links
            shutil.copyfile(saved / name, saved / PARTIAL)
            _sync_file(saved / PARTIAL)
        os.replace(saved / PARTIAL, directory / name)
    sync_directory(directory)
    done = Path(tempfile.mkdtemp(prefix=SAVING, dir=directory))
    os.rename(saved, done)
    shutil.rmtree(done)


def _remove_remnants(directory: Path) -> None:
    """Remove hidden directories of dead saves, not of running ones."""
    for remnant in directory.glob(f"{SAVING}*"):
        with suppress(OSError), _locked(remnant):
            shutil.rmtree(remnant)


@contextmanager
def _locked(directory: Path) -> Iterator[None]:
    """Hold the lock of a directory; raises OSError if another process has it."""
    try:
        import fcntl
    except ImportError:  # Windows
        yield
        return
    handle = os.open(directory, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(handle)


def _sync_file(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())


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


def _write_all(checkpoint: Checkpoint, plan: ShardPlan, hidden: Path) -> list[str]:
    """Write weights and configs; the last name returned is the entry point."""
    dtype = plan.dtype or torch.float32
    config = replace(checkpoint.config, dtype=str(dtype).removeprefix("torch."))
    write_json(hidden / "config.json", config_to_json(config, checkpoint.generation.stop_ids))
    write_json(hidden / "generation_config.json", generation_config_to_json(checkpoint.generation))
    digests = {
        name: write_safetensors(hidden / name, tensors, plan.dtype)
        for name, tensors in plan.files.items()
    }
    if SINGLE in plan.files:
        return [*CONFIGS, SINGLE]
    write_json(hidden / plan.index, _index(plan, digests))
    return [*CONFIGS, *plan.files, plan.index]


def _count(tensors: Mapping[str, Tensor]) -> int:
    """Count parameters like the reference, which keeps some tensors as buffers."""
    return sum(w.numel() for name, w in tensors.items() if not name.endswith(BUFFER_ENDINGS))


def _index(plan: ShardPlan, digests: Mapping[str, str]) -> dict[str, Any]:
    tensors = [tensor for shard in plan.files.values() for tensor in shard.values()]
    return {
        "metadata": {
            SHA256: digests,
            "total_parameters": plan.num_parameters,
            "total_size": sum(tensor_bytes(tensor, plan.dtype) for tensor in tensors),
        },
        "weight_map": {name: file for file, shard in plan.files.items() for name in shard},
    }


def write_json(path: Path, raw: Mapping[str, Any]) -> None:
    with path.open("wb") as file:
        file.write(json.dumps(raw, indent=2, sort_keys=True).encode() + b"\n")
        sync(file)


def copy_companions(source: Path | None, hidden: Path) -> list[str]:
    if source is None:
        return []
    if is_gguf(source):
        return write_tokenizer(source, hidden)
    names = [name for name in COMPANIONS if (source / name).is_file()]
    for name in names:
        shutil.copyfile(source / name, hidden / name)
    return names
