"""From a checkpoint directory to a model on a device: strict, memory-mapped, one tensor at a time.

Everything is checked before the first weight moves. A weight that needs neither another device nor
another type stays a view of its file; any other exists once, in its place. Weights stored in fewer
bits are multiplied out as they are read, and only `int8` and `quantized` know of them; or, if asked
for, they stay so or are made so, layer by layer (`packed`).
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

import torch
from torch import Tensor

from dgemma.config import GenerationConfig, ModelConfig, load_config, load_generation_config
from dgemma.device import give_back
from dgemma.errors import CheckpointError, UsageError
from dgemma.model.gemma import Gemma, Layer
from dgemma.weights.check import check_copies, check_names
from dgemma.weights.files import INDEX, SINGLE, listing
from dgemma.weights.mapped import DTYPES, Tensors
from dgemma.weights.names import LAYERS, Entry, Group, layer_of, skeleton
from dgemma.weights.packed import (
    Form,
    Quant,
    check_widths,
    form_of,
    put_packed,
    shrink,
    shrink_table,
)
from dgemma.weights.quantized import QuantizedTensors, open_checkpoint

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
    quant: Quant = "none",
    verify: bool = False,
    on_tensor: Progress | None = None,
) -> Checkpoint:
    """Load a checkpoint; `verify` refuses NaN and infinity.

    `dtype` None keeps the type of the file; what it holds in 8 bits is float32, and what one of the
    released layouts holds in 8 or 4 bits takes the type of the weights beside it. `quant` is the
    form of the layers in memory (see `packed`); other than `none` the model can only be run.
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
    form = form_of(quant, tensors.scheme.name if isinstance(tensors, QuantizedTensors) else None)
    check_widths(form, config)
    if form.dense == "int8" and torch.device(device).type != "cpu":
        raise UsageError(f"int8 is for CPUs, not for {device}; use fp8, nvfp4 or none")
    stored = tensors.stored
    entries = check_names(config, stored, directory)
    text, vision = _group(entries, "text"), _group(entries, "vision")
    if dtype is None:
        _check_one_dtype({name: stored[name].dtype for name in text}, directory)
    check_copies(entries, tensors, directory)
    if verify:
        _check_finite(tensors, [*text, *vision], dtype)
    model = _fill_parts(skeleton(config), text, _Source(tensors, device, dtype, form), on_tensor)
    return Checkpoint(
        model=model.requires_grad_(False).eval(),
        generation=generation,
        vision={name: tensors[name] for name in vision},
        directory=directory,
    )


@dataclass(frozen=True, slots=True)
class _Source:
    """Where weights come from and what they become."""

    tensors: Tensors
    device: torch.device | str
    dtype: torch.dtype | None
    form: Form

    def place(self, name: str) -> Tensor:
        dtype = self.dtype or DTYPES[self.tensors.stored[name].dtype]
        # Moving first leaves the conversion to the device, where it is quick.
        return self.tensors[name].to(self.device).to(dtype)


def _fill_parts(
    model: Gemma, text: Mapping[str, str], source: _Source, on_tensor: Progress | None
) -> Gemma:
    """Give a skeleton its weights, a layer at a time; the token table comes last.

    By then no layer is whole any more, if they are to be smaller.
    """
    stored, done = source.tensors.stored, 0
    total = sum(stored[name].num_bytes for name in text)
    for number, names in _parts(text).items():
        if number is None:
            give_back(source.device)  # what layers were made from
        taken = _put_packed(model, number, names, source)
        weights = {}
        for name, parameter in names.items():
            if name not in taken:
                weights[parameter] = source.place(name)
            done += stored[name].num_bytes
            if on_tensor is not None:
                on_tensor(done, total)
        model.load_state_dict(weights, strict=False, assign=True)
        del weights  # or the layer's source would outlive the layer
        if number is None:
            shrink_table(model, source.form)
        else:
            shrink(cast(Layer, model.layers[number]), source.form)
    give_back(source.device)
    assert not any(weight.is_meta for weight in (*model.parameters(), *model.buffers()))
    return model


def _parts(text: Mapping[str, str]) -> dict[int | None, dict[str, str]]:
    """The stored names and parameters of each layer, in order, and of what is in none."""
    parts: dict[int | None, dict[str, str]] = {}
    for name, parameter in text.items():
        parts.setdefault(layer_of(parameter), {})[name] = parameter
    outside = parts.pop(None)
    return {**dict(sorted(parts.items(), key=lambda pair: cast(int, pair[0]))), None: outside}


def _put_packed(
    model: Gemma, number: int | None, names: Mapping[str, str], source: _Source
) -> set[str]:
    """Stored names whose weights a layer takes as they lie in the file."""
    tensors = source.tensors
    if number is None or not isinstance(tensors, QuantizedTensors):
        return set()
    if source.form.experts != tensors.scheme.name:
        return set()
    prefix = f"{LAYERS}{number}."
    inside = {name: parameter.removeprefix(prefix) for name, parameter in names.items()}
    return put_packed(cast(Layer, model.layers[number]), inside, tensors, source.device)


def fill(model: Gemma, weights: Mapping[str, Tensor]) -> Gemma:
    """Put weights into a skeleton; the tensors themselves become its parameters."""
    model.load_state_dict(weights, strict=True, assign=True)
    return model.requires_grad_(False).eval()


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
