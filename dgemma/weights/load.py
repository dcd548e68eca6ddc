"""Load a checkpoint or a GGUF file to a device: strict, memory-mapped, one layer at a time.

Everything is checked before the first weight moves. A weight that needs neither another device nor
another dtype stays a view of its file; any other is copied once. Quantized weights are dequantized
on access (`int_layout`, `quantized_tensors`), stay packed, or are quantized layer by layer
(`layer_formats`), so that at most one layer is in memory in 16 bits or more.

Tests and benchmarks use random weights of any config: each tensor is drawn on its device, in its
dtype, from a seed of its name, independent of order and other tensors.
"""

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple, cast

import torch
from torch import Tensor

from dgemma.backends.cuda.streaming import Staging
from dgemma.config import GenerationConfig, ModelConfig
from dgemma.device import empty_cache
from dgemma.errors import CheckpointError, UsageError
from dgemma.model.gemma import Gemma, Layer
from dgemma.model.vision import ImageEncoder
from dgemma.weights.files import (
    IMAGE_PROJECTION,
    INDEX,
    SINGLE,
    OnProgress,
    listing,
    whole_checkpoint,
)
from dgemma.weights.gguf_checkpoint import (
    GGUFTensors,
    dequantized_layers,
    is_gguf,
    load_blocks,
    load_tiled_experts,
)
from dgemma.weights.layer_formats import (
    LayerFormat,
    Quant,
    StoredScheme,
    check_widths,
    layer_format,
    quantize_layer,
    quantize_outside_layers,
)
from dgemma.weights.names import (
    LAYER_SCALAR,
    LAYERS,
    VISION_PREFIX,
    TensorGroup,
    TensorSpec,
    check_copies,
    check_names,
    layer_of,
    skeleton,
    vision_skeleton,
)
from dgemma.weights.quantized_tensors import QuantizedTensors, load_packed, open_checkpoint
from dgemma.weights.safetensors_io import DTYPES, Tensors
from dgemma.weights.source import generation_config, model_config


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """A model with its generation defaults, image tower and directory."""

    model: Gemma
    generation: GenerationConfig = field(default_factory=GenerationConfig)
    vision: Mapping[str, Tensor] = field(default_factory=dict)  # stored names, on the CPU
    directory: Path | None = None  # or a GGUF file; None: random weights

    @property
    def config(self) -> ModelConfig:
        return self.model.config


class Streamed(NamedTuple):
    """A GGUF format on a GPU, and the layers with experts in host memory."""

    quant: Quant
    layers: frozenset[int]


def load_model(
    directory: Path,
    *,
    device: torch.device | str = "cpu",
    dtype: torch.dtype | None = None,
    quant: Quant | Streamed = "none",
    verify: bool = False,
    on_tensor: OnProgress | None = None,
) -> Checkpoint:
    """Load a checkpoint; `verify` refuses NaN and infinity.

    dtype None keeps the file's dtype; the integer layout is float32, and packed weights of a
    released scheme take the dtype of the plain ones. `quant` is the format of the layers in memory
    (see `layer_formats`); every format but `none` is for inference only.
    """
    if dtype not in (None, *DTYPES.values()):
        raise UsageError(f"weights can be {listing(map(str, DTYPES.values()))}, not {dtype}")
    if not directory.is_dir() and not is_gguf(directory):
        raise CheckpointError(
            f"{directory} is not a directory; a checkpoint is one that holds config.json and "
            f"{SINGLE}, or {INDEX} and its shards, or a GGUF file"
        )
    directory = whole_checkpoint(directory)
    config, generation = model_config(directory), generation_config(directory)
    generation.check_vocabulary(config.vocab_size)
    tensors = open_checkpoint(directory, config)
    quant, streamed = quant if isinstance(quant, Streamed) else Streamed(quant, frozenset())
    fmt = layer_format(quant, _scheme(tensors))
    check_widths(fmt, config)
    if fmt.dense == "int8" and torch.device(device).type != "cpu":
        raise UsageError(f"int8 is for CPUs, not for {device}; use fp8, nvfp4 or none")
    specs = check_names(config, tensors.stored, directory)
    text, vision = _group(specs, "text"), _group(specs, "vision")
    if dtype is None:
        _check_one_dtype({name: tensors.stored[name].dtype for name in text}, directory)
    check_copies(specs, tensors, directory)
    if verify:
        _check_finite(tensors, [*text, *vision], dtype)
    loader = _LayerLoader(tensors, device, dtype, fmt, streamed, Staging(torch.device(device)))
    model = loader.load(skeleton(config), text, on_tensor)
    return Checkpoint(
        model=model.requires_grad_(False).eval(),
        generation=generation,
        vision={name: tensors[name] for name in vision},
        directory=directory,
    )


@dataclass(frozen=True, slots=True)
class _LayerLoader:
    """Moves weights from files to a device, in a dtype and a layer format."""

    tensors: Tensors
    device: torch.device | str
    dtype: torch.dtype | None
    format: LayerFormat
    streamed: frozenset[int]
    staging: Staging

    def load(self, model: Gemma, text: Mapping[str, str], on_tensor: OnProgress | None) -> Gemma:
        """Load the weights of a model on the meta device, layer by layer; the token table last.

        By then all layers are quantized, if requested.
        """
        stored, done = self.tensors.stored, 0
        dequantized = self._dequantized_layers(text)
        total = sum(stored[name].num_bytes for name in text)
        for index, names in _by_layer(text).items():
            if index is None:
                empty_cache(self.device)  # free the sources of quantized layers
            packed = self._load_packed(model, index, names, dense=index not in dequantized)
            weights = {}
            for name, parameter in names.items():
                if name not in packed:
                    weights[parameter] = self._move(name)
                done += stored[name].num_bytes
                if on_tensor is not None:
                    on_tensor(done, total)
            model.load_state_dict(weights, strict=False, assign=True)
            del weights  # otherwise a layer's source would outlive its quantization
            if index is None:
                quantize_outside_layers(model, self.format)
            else:
                quantize_layer(cast(Layer, model.layers[index]), self.format)
        empty_cache(self.device)
        assert not any(weight.is_meta for weight in (*model.parameters(), *model.buffers()))
        return model

    def _move(self, name: str) -> Tensor:
        dtype = self.dtype or DTYPES[self.tensors.stored[name].dtype]
        if isinstance(self.tensors, GGUFTensors):
            return self.tensors.load(name, self.device, dtype)
        # Move first: conversion is fast on the device.
        return self.tensors[name].to(self.device).to(dtype)

    def _dequantized_layers(self, text: Mapping[str, str]) -> set[int | None]:
        if self.format.dense != "gguf":
            return set()
        tensors = cast(GGUFTensors, self.tensors)
        return dequantized_layers(text, tensors, self.dtype or torch.float32)

    def _load_packed(
        self, model: Gemma, index: int | None, names: Mapping[str, str], *, dense: bool
    ) -> set[str]:
        """Load the packed weights of a layer unchanged; return their stored names.

        `dense`: linears of a GGUF file stay packed too, not only experts.
        """
        tensors = self.tensors
        if self.format.experts != _scheme(tensors):
            return set()
        prefix = "" if index is None else f"{LAYERS}{index}."
        inside = {name: parameter.removeprefix(prefix) for name, parameter in names.items()}
        module = model if index is None else model.layers[index]
        if isinstance(tensors, GGUFTensors) and self.format.dense == "gguf":
            return load_blocks(module, inside, tensors, dense=dense)
        if isinstance(tensors, GGUFTensors):
            staging = self.staging if index in self.streamed else None
            return load_tiled_experts(module, inside, tensors, self.device, staging)
        if index is None or not isinstance(tensors, QuantizedTensors):
            return set()
        return load_packed(cast(Layer, module), inside, tensors, self.device)


def has_tower(checkpoint: Checkpoint) -> bool:
    """True if the checkpoint has an image tower that is not all zeros, as `export` writes."""
    projection = [t for name, t in checkpoint.vision.items() if name.endswith(IMAGE_PROJECTION)]
    return any(bool(tensor.any()) for tensor in projection)


def load_tower(checkpoint: Checkpoint, device: torch.device, dtype: torch.dtype) -> ImageEncoder:
    """Move the image tower of a checkpoint to a device."""
    tower = vision_skeleton(checkpoint.config)
    assert tower is not None
    assert dtype != torch.float16, "the tower's features exceed the range of float16"
    prefix = VISION_PREFIX[checkpoint.config.family]
    tower.load_state_dict(
        {n.removeprefix(prefix): t.to(device, dtype) for n, t in checkpoint.vision.items()},
        strict=True,
        assign=True,
    )
    return tower.requires_grad_(False).eval()


def _scheme(tensors: Tensors) -> StoredScheme | None:
    """Return the scheme of packed tensors; None if they are plain."""
    if isinstance(tensors, GGUFTensors):
        return "gguf"
    return tensors.scheme.name if isinstance(tensors, QuantizedTensors) else None


def _by_layer(text: Mapping[str, str]) -> dict[int | None, dict[str, str]]:
    """Group stored names and parameters by layer, in order; None (outside the layers) last."""
    layers: dict[int | None, dict[str, str]] = {}
    for name, parameter in text.items():
        layers.setdefault(layer_of(parameter), {})[name] = parameter
    outside = layers.pop(None)
    return {**dict(sorted(layers.items(), key=lambda pair: cast(int, pair[0]))), None: outside}


def fill(model: Gemma, weights: Mapping[str, Tensor]) -> Gemma:
    """Assign weights to a model on the meta device."""
    model.load_state_dict(weights, strict=True, assign=True)
    return model.requires_grad_(False).eval()


def _group(specs: Mapping[str, TensorSpec], group: TensorGroup) -> dict[str, str]:
    return {name: spec.target for name, spec in specs.items() if spec.group == group}


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


# --- random weights and parameter counts

# Scales keep the residual near unit size and spread the logits.
SPREAD = 0.1  # standard deviation of norm weights
LOGIT_SCALE = 2.0  # norm of embedding rows: the standard deviation of logits


class ParameterCount(NamedTuple):
    total: int
    active: int  # weights used per token


def random_model(
    config: ModelConfig,
    seed: int,
    *,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
    on_layer: Callable[[Layer], None] | None = None,
) -> Gemma:
    """Return a model with weights determined by seed, names, shapes and device type.

    `on_layer` may transform each drawn layer, for example quantize it, so that at most one layer is
    in memory unquantized.
    """
    model = skeleton(config)
    layers: dict[int | None, dict[str, Tensor]] = {}
    for name, weight in model.state_dict().items():
        layers.setdefault(layer_of(name), {})[name] = weight
    layers[None] = layers.pop(None)  # the token table last, after all layers are quantized
    for index, shapes in layers.items():
        if index is None:
            empty_cache(device)  # free the sources of quantized layers
        weights = {}
        for name, weight in shapes.items():
            generator = torch.Generator(device).manual_seed(name_seed(seed, name))
            mean, deviation = _scale(name, tuple(weight.shape))
            empty = torch.empty(weight.shape, dtype=dtype, device=device)
            weights[name] = draw(empty, mean, deviation, generator)
        model.load_state_dict(weights, strict=False, assign=True)
        model.requires_grad_(False)
        if index is not None and on_layer is not None:
            del weights
            on_layer(cast(Layer, model.layers[index]))
    return model.eval()


def count_parameters(config: ModelConfig) -> ParameterCount:
    """Count the weights of the text model (the embedding once), and those used per token."""
    sizes = {name: weight.numel() for name, weight in skeleton(config).state_dict().items()}
    experts = sum(size for name, size in sizes.items() if ".experts." in name)
    used = experts * config.top_k_experts // config.num_experts
    total = sum(sizes.values())
    return ParameterCount(total=total, active=total - experts + used)


def short_count(count: int) -> str:
    """Write a count as in model cards: truncated to one digit."""
    unit, letter = (10**9, "B") if count >= 10**9 else (10**6, "M")
    return f"{count * 10 // unit / 10:.1f}{letter}"


def draw(empty: Tensor, mean: float, deviation: float, generator: torch.Generator) -> Tensor:
    if deviation == 0:
        return empty.fill_(mean)
    return empty.normal_(mean, deviation, generator=generator)


def name_seed(seed: int, name: str) -> int:
    digest = hashlib.blake2b(f"{seed}:{name}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def _scale(name: str, shape: tuple[int, ...]) -> tuple[float, float]:
    """Return mean and standard deviation of a weight."""
    fan_in = shape[-1]
    if name.endswith(LAYER_SCALAR):
        return 1.0, 0.0
    if name.endswith(("q_norm.weight", "k_norm.weight")):
        # Attention scores are not scaled: these norms make them unit size.
        return fan_in**-0.25, SPREAD * fan_in**-0.25
    if len(shape) == 1:
        return 1.0, SPREAD
    if name.endswith("router.proj.weight"):
        return 0.0, 1.0  # the router divides by the root of its width
    if name == "embed_tokens.weight":
        return 0.0, LOGIT_SCALE * fan_in**-0.5
    return 0.0, fan_in**-0.5
