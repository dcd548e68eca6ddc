"""Quantize a checkpoint to a released scheme, and measure the change of its outputs.

Headers follow from names and shapes and are written first; weights are converted one at a time. LM
head, embedding, router, norms, self-conditioning and image tower become bfloat16, as in the
releases. `input_scale` is 1: it is for programs that quantize activations, and a good value would
need calibration.
"""

import re
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from dgemma.config import ModelConfig, generation_config_to_json
from dgemma.errors import CheckpointError, UsageError
from dgemma.model.forward_batch import ForwardBatch, Segment
from dgemma.model.gemma import Gemma
from dgemma.model.kv_cache import Capacity, KVCache
from dgemma.quant import nvfp4
from dgemma.weights.files import CONFIGS, INDEX, SHA256, OnProgress
from dgemma.weights.gguf_checkpoint import is_gguf
from dgemma.weights.load import count_parameters, load_model
from dgemma.weights.names import check_copies, check_names
from dgemma.weights.quant_schemes import (
    CONFIG_KEY,
    MODELOPT_FILE,
    QuantScheme,
    expert_slices,
    modelopt_file,
    read_scheme,
    scheme_to_json,
)
from dgemma.weights.quantized_tensors import open_checkpoint
from dgemma.weights.safetensors_io import STORED_DTYPES, HashedFile, Tensors, header_bytes, sync
from dgemma.weights.save import (
    copy_companions,
    name_files,
    refuse_existing,
    save_atomically,
    split,
    write_json,
)
from dgemma.weights.source import config_json, generation_config, model_config

E4M3, FP8_MAX = torch.float8_e4m3fn, 448.0
LOW_HALF = 0xFFFF  # low bits of a float32 that bfloat16 drops
PLAIN_MODULES = "lm_head embed_tokens embed_vision router self_conditioning vision_tower".split()
PROMPT_LENGTH, NUM_STEPS = 64, 4  # prompt length and steps of a comparison
MAX_COMPARED_PARAMETERS = 300_000_000
PackedTensors = dict[str, Tensor]  # tensors by suffix of the module's name


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantLoss:
    """Relative error of a group of weights: RMS of the change over RMS of the weights."""

    layer: int
    part: str  # experts, self_attn or mlp
    relative: float


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizeResult:
    losses: tuple[QuantLoss, ...]
    source_bytes: int
    bytes: int


class LossSums:
    """Sums of squares by layer and part."""

    def __init__(self) -> None:
        self.sums: dict[tuple[int, str], list[float]] = {}

    def add(self, module: str, weight_OI: Tensor, dequantized_OI: Tensor) -> None:
        match = re.search(r"\.layers\.(\d+)\.(\w+)", module)
        assert match is not None, module
        sums = self.sums.setdefault((int(match[1]), match[2]), [0.0, 0.0])
        sums[0] += (weight_OI - dequantized_OI).double().square().sum().item()
        sums[1] += weight_OI.double().square().sum().item()

    def losses(self) -> tuple[QuantLoss, ...]:
        return tuple(
            QuantLoss(layer=layer, part=part, relative=(change / size) ** 0.5 if size else 0.0)
            for (layer, part), (change, size) in sorted(self.sums.items())
        )


def quantize_checkpoint(
    source: Path,
    directory: Path,
    scheme: QuantScheme,
    *,
    max_shard_bytes: int = 5_000_000_000,
    on_tensor: OnProgress | None = None,
) -> QuantizeResult:
    """Write a checkpoint in a released scheme; never overwrites one."""
    refuse_existing(directory, "choose")
    already = read_scheme(source)
    if already is not None:
        raise UsageError(f"{source} is stored as {already.name} already; quantize its original")
    config = model_config(source)
    tensors = open_checkpoint(source, config)
    specs = check_names(config, tensors.stored, source)
    check_copies(specs, tensors, source)
    names = sorted(name for name, spec in specs.items() if spec.group != "tied")
    outlines: dict[str, Tensor] = {}
    for name in names:
        outlines |= _outline(name, tensors.stored[name].shape, scheme)
    losses = LossSums()
    converted = _convert(names, tensors, scheme, losses)
    files = name_files("model", split(outlines, None, max_shard_bytes))
    shards = _ShardWriter(files, converted, len(outlines), on_tensor)

    def write(hidden: Path) -> list[str]:
        configs = _write_configs(source, hidden, scheme)
        return [*copy_companions(source, hidden), *configs, *shards.write(hidden)]

    save_atomically(directory, write)
    written = sum(tensor.numel() * tensor.dtype.itemsize for tensor in outlines.values())
    source_bytes = sum(tensors.stored[name].num_bytes for name in names)
    return QuantizeResult(losses=losses.losses(), source_bytes=source_bytes, bytes=written)


def pack_fp8(weight_OI: Tensor) -> PackedTensors:
    """Quantize per row: scale = absmax / FP8_MAX, rounded up to bfloat16 so that nothing clips."""
    scale = weight_OI.abs().amax(-1, keepdim=True) / FP8_MAX
    scale = ((scale.view(torch.int32) + LOW_HALF) & ~LOW_HALF).view(torch.float32)
    scale = torch.where(scale > 0, scale, 1.0)
    values = (weight_OI / scale).clamp(-FP8_MAX, FP8_MAX).to(E4M3)
    return {".weight": values, ".weight_scale": scale.bfloat16()}


def pack_nvfp4(weight_OI: Tensor, scale_2: Tensor) -> PackedTensors:
    """Quantize to four bits; gate and up of an expert share a global scale."""
    packed = nvfp4.quantize(weight_OI, scale_2)
    return {
        ".weight": packed.values_OI,
        ".weight_scale": packed.scale_OG,
        ".weight_scale_2": packed.global_scale,
        ".input_scale": torch.ones(()),
    }


def dequantize(packed: PackedTensors) -> Tensor:
    if ".weight_scale_2" not in packed:
        return packed[".weight"].float() * packed[".weight_scale"].float()
    scale_2 = packed[".weight_scale_2"]
    return nvfp4.Nvfp4Tensor(packed[".weight"], packed[".weight_scale"], scale_2).dequantize()


class _ShardWriter:
    """Writes shards from a stream of tensors."""

    def __init__(
        self,
        files: Mapping[str, Mapping[str, Tensor]],
        stream: Iterator[tuple[str, Tensor]],
        total: int,
        on_tensor: OnProgress | None,
    ) -> None:
        self.files, self.total, self.on_tensor = files, total, on_tensor
        self.numbered = enumerate(stream, start=1)

    def write(self, hidden: Path) -> list[str]:
        """Write all files and their index; return their names, the index last."""
        digests: dict[str, str] = {}
        for name, outline in self.files.items():
            with (hidden / name).open("wb") as file:
                hashed = HashedFile(file)
                hashed.write(header_bytes(outline, None))
                for expected, empty in outline.items():
                    hashed.write(self._next(expected, empty))
                sync(file)
            digests[name] = hashed.hexdigest()
        weight_map = {name: file for file, inside in self.files.items() for name in inside}
        outlines = [tensor for inside in self.files.values() for tensor in inside.values()]
        size = sum(tensor.numel() * tensor.dtype.itemsize for tensor in outlines)
        metadata = {"total_size": size, SHA256: digests}
        write_json(hidden / INDEX, {"metadata": metadata, "weight_map": weight_map})
        return [*self.files, INDEX]

    def _next(self, expected: str, empty: Tensor) -> memoryview:
        number, (name, tensor) = next(self.numbered)
        made, planned = (tensor.dtype, tensor.shape), (empty.dtype, empty.shape)
        assert (name, made) == (expected, planned), f"{name} {made}, not {expected} {planned}"
        if self.on_tensor is not None:
            self.on_tensor(number, self.total)
        return tensor.contiguous().view(-1).view(torch.uint8).numpy().data


def _outline(name: str, shape: tuple[int, ...], scheme: QuantScheme) -> dict[str, Tensor]:
    """Return the tensors written for a source tensor, on the meta device, in order."""
    outline: dict[str, Tensor] = {}
    for module, size in _packed_modules(name, shape, scheme).items():
        if scheme.name == "nvfp4" and size[-1] % nvfp4.GROUP:
            raise UsageError(
                f"{name} has rows of {size[-1]} numbers, which cannot be split into groups of "
                f"{nvfp4.GROUP}; use fp8"
            )
        for suffix, spec in scheme.tensors((size[0], size[1])).items():
            dtype = STORED_DTYPES[spec.dtypes[0]]
            outline[module + suffix] = torch.empty(spec.shape, dtype=dtype, device="meta")
    return outline or {name: torch.empty(shape, dtype=torch.bfloat16, device="meta")}


def _packed_modules(
    name: str, shape: tuple[int, ...], scheme: QuantScheme
) -> dict[str, tuple[int, ...]]:
    """Return the packed matrices of a tensor with their shapes."""
    modules = expert_slices(name, shape) or {name.removesuffix(".weight"): shape}
    return {module: size for module, size in modules.items() if scheme.is_packed(module)}


def _convert(
    names: Iterable[str], tensors: Tensors, scheme: QuantScheme, losses: LossSums
) -> Iterator[tuple[str, Tensor]]:
    for name in names:
        tensor = tensors[name]
        modules = list(_packed_modules(name, tuple(tensor.shape), scheme))
        if not modules:
            yield name, _finite(name, tensor.to(torch.bfloat16))
            continue
        experts = tensor if tensor.dim() == 3 else tensor[None]
        per_expert = len(modules) // len(experts)
        for index, expert in enumerate(experts):
            chunks = _finite(name, expert.float()).chunk(per_expert)
            of_expert = modules[per_expert * index :][:per_expert]
            matrices = dict(zip(of_expert, chunks, strict=True))
            for module, packed in _pack(matrices, scheme).items():
                losses.add(module, matrices[module], dequantize(packed))
                yield from ((module + suffix, stored) for suffix, stored in packed.items())


def _finite(name: str, tensor: Tensor) -> Tensor:
    if not tensor.isfinite().all():
        raise CheckpointError(f"{name} holds NaN or infinity; it cannot be quantized")
    return tensor


def _pack(matrices: Mapping[str, Tensor], scheme: QuantScheme) -> dict[str, PackedTensors]:
    if scheme.name == "fp8":
        return {module: pack_fp8(weight.contiguous()) for module, weight in matrices.items()}
    scale_2 = nvfp4.global_scale_of(*matrices.values())
    return {module: pack_nvfp4(weight, scale_2) for module, weight in matrices.items()}


def _write_configs(source: Path, hidden: Path, scheme: QuantScheme) -> list[str]:
    """Copy the source's configs with the scheme's entries added; return their names."""
    raw = config_json(source)
    raw["dtype"] = raw["text_config"]["dtype"] = "bfloat16"
    plain = [*PLAIN_MODULES, *(["self_attn", "mlp"] if scheme.name == "nvfp4" else [])]
    pattern = "*{}*" if scheme.name == "nvfp4" else "re:.*{}.*"
    ignored = [name if name == "lm_head" else pattern.format(name) for name in plain]
    raw[CONFIG_KEY] = scheme_to_json(scheme, ignored)
    write_json(hidden / "config.json", raw)
    names = ["config.json"]
    if is_gguf(source):
        write_json(hidden / CONFIGS[1], generation_config_to_json(generation_config(source)))
        names.append(CONFIGS[1])
    elif (source / CONFIGS[1]).is_file():
        shutil.copyfile(source / CONFIGS[1], hidden / CONFIGS[1])
        names.append(CONFIGS[1])
    if scheme.name == "nvfp4":
        write_json(hidden / MODELOPT_FILE, modelopt_file(ignored))
        names.append(MODELOPT_FILE)
    return names


# --- agreement


@dataclass(frozen=True, slots=True, kw_only=True)
class Agreement:
    """Agreement of two models' distributions, over all positions."""

    positions: int
    kl: float  # mean, in nats
    worst_kl: float
    top_1: float  # fraction of positions with the same argmax


def compare(first: Path, second: Path, seed: int = 0) -> Agreement:
    """Load two checkpoints in float32 and compare them."""
    a, b = (load_model(path, dtype=torch.float32).model for path in (first, second))
    return agreement(a, b, seed)


def is_small(config: ModelConfig) -> bool:
    """True if any machine can hold two copies in float32."""
    return count_parameters(config).total <= MAX_COMPARED_PARAMETERS


@torch.inference_mode()
def agreement(
    first: Gemma, second: Gemma, seed: int, device: torch.device | str = "cpu"
) -> Agreement:
    """Compare two models on a random prompt and a canvas refined by the first one's argmax.

    Models without a denoiser are compared at all positions of the prompt.
    """
    config, generator = first.config, torch.Generator().manual_seed(seed)
    if config.layer_types != second.config.layer_types:
        raise UsageError("only models of one shape can be compared")
    prompt_T = torch.randint(config.vocab_size, (PROMPT_LENGTH,), generator=generator).to(device)
    models = [_PrefilledModel(model, prompt_T) for model in (first, second)]
    if not config.can_denoise:
        return between([model.prompt_logits for model in models])
    canvas_L = torch.randint(config.vocab_size, (config.canvas_length,), generator=generator)
    canvas_L = canvas_L.to(device)
    steps = []
    for _ in range(NUM_STEPS):
        steps.append([model.logits(canvas_L) for model in models])
        canvas_L = steps[-1][0].argmax(-1)
    return between([torch.cat(logits) for logits in zip(*steps, strict=True)])


class _PrefilledModel:
    """A model with a prompt in its KV cache."""

    def __init__(self, model: Gemma, prompt_T: Tensor) -> None:
        self.model = model
        capacity = Capacity(tokens=PROMPT_LENGTH + model.config.canvas_length)
        dtype = model.embed_tokens.weight.dtype
        self.cache = KVCache(model.config, capacity, dtype, prompt_T.device)
        batch = ForwardBatch([Segment(self.cache, len(prompt_T), commit=True)])
        self.prompt_logits = model.logits(model.encode(prompt_T, batch))
        batch.close()

    def logits(self, canvas_L: Tensor) -> Tensor:
        batch = ForwardBatch([Segment(self.cache, len(canvas_L), commit=False)])
        return self.model.logits(self.model.denoise(canvas_L, None, batch))


def between(logits: Sequence[Tensor]) -> Agreement:
    """Compare two logits tensors position by position."""
    log_p_TV, log_q_TV = (tensor.double().log_softmax(-1) for tensor in logits)
    kl_T = (log_p_TV.exp() * (log_p_TV - log_q_TV)).sum(-1)
    same_T = log_p_TV.argmax(-1) == log_q_TV.argmax(-1)
    return Agreement(
        positions=len(kl_T),
        kl=kl_T.mean().item(),
        worst_kl=kl_T.max().item(),
        top_1=same_T.double().mean().item(),
    )
