"""From a checkpoint directory to a model on a device: strict, memory-mapped, one tensor at a time.

Everything is checked before the first weight moves. A weight that needs neither another device nor
another type stays a view of its file; any other exists once, in its place. Weights stored in fewer
bits are multiplied out as they are read, and only `int8` and `quantized` know of them.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from dgemma.config import GenerationConfig, ModelConfig, load_config, load_generation_config
from dgemma.errors import CheckpointError, UsageError
from dgemma.model import Gemma
from dgemma.weights.check import check_copies, check_names
from dgemma.weights.files import INDEX, SINGLE, listing
from dgemma.weights.mapped import DTYPES, Tensors
from dgemma.weights.names import Entry, Group, skeleton
from dgemma.weights.quantized import open_checkpoint

Progress = Callable[[int, int], None]  # bytes in place, bytes in all


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """A model with what its files say beside the weights."""

    model: Gemma
    generation: GenerationConfig = field(default_factory=GenerationConfig)
    vision: Mapping[str, Tensor] = field(default_factory=dict)  # stored names, on the CPU
    directory: Path | None = None  # None: not read from files

    @property
    def config(self) -> ModelConfig:
        return self.model.config


def load_model(
    directory: Path,
    *,
    device: torch.device | str = "cpu",
    dtype: torch.dtype | None = None,
    verify: bool = False,
    on_tensor: Progress | None = None,
) -> Checkpoint:
    """Load a checkpoint; `verify` refuses NaN and infinity.

    `dtype` None keeps the type of the file; what it holds in 8 bits is float32, and what one of the
    released layouts holds in 8 or 4 bits takes the type of the weights beside it.
    """
    if dtype not in (None, *DTYPES.values()):
        raise UsageError(f"weights can be {listing(map(str, DTYPES.values()))}, not {dtype}")
    if not directory.is_dir():
        raise CheckpointError(
            f"{directory} is not a directory; a checkpoint is one that holds config.json and "
            f"{SINGLE}, or {INDEX} and its shards"
        )
    config, generation = load_config(directory), load_generation_config(directory)
    tensors = open_checkpoint(directory, config)
    stored = tensors.stored
    entries = check_names(config, stored, directory)
    text, vision = _group(entries, "text"), _group(entries, "vision")
    if dtype is None:
        _check_one_dtype({name: stored[name].dtype for name in text}, directory)
    check_copies(entries, tensors, directory)
    if verify:
        _check_finite(tensors, [*text, *vision], dtype)
    total, done, weights = sum(stored[name].num_bytes for name in text), 0, {}
    for name, parameter in text.items():
        weights[parameter] = _place(tensors[name], device, dtype or DTYPES[stored[name].dtype])
        done += stored[name].num_bytes
        if on_tensor is not None:
            on_tensor(done, total)
    return Checkpoint(
        model=fill(skeleton(config), weights),
        generation=generation,
        vision={name: tensors[name] for name in vision},
        directory=directory,
    )


def fill(model: Gemma, weights: Mapping[str, Tensor]) -> Gemma:
    """Put weights into a skeleton; the tensors themselves become its parameters."""
    model.load_state_dict(weights, strict=True, assign=True)
    return model.requires_grad_(False).eval()


def _place(tensor: Tensor, device: torch.device | str, dtype: torch.dtype) -> Tensor:
    # Moving first leaves the conversion to the device, where it is quick.
    return tensor.to(device).to(dtype)


def _group(entries: Mapping[str, Entry], group: Group) -> dict[str, str]:
    return {name: entry.of for name, entry in entries.items() if entry.group == group}


def _check_one_dtype(dtypes: Mapping[str, str], directory: Path) -> None:
    first = next(iter(dtypes.values()))
    others = [f"{name} ({dtype})" for name, dtype in dtypes.items() if dtype != first]
    if others:
        raise CheckpointError(
            f"{directory} mixes {first} with {listing(others)}; say which dtype to load it in"
        )


def _check_finite(tensors: Tensors, names: list[str], dtype: torch.dtype | None) -> None:
    for name in names:
        if not torch.isfinite(tensors[name]).all():
            raise CheckpointError(f"{name} holds NaN or infinity; the checkpoint is damaged")
        if dtype is not None and not torch.isfinite(tensors[name].to(dtype)).all():
            raise CheckpointError(f"{name} has values beyond {dtype}; load it in another dtype")
