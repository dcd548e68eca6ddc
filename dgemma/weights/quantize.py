"""From a checkpoint to one in fewer bits, in a released layout, tensor by tensor.

Which tensors a file will hold follows from names and shapes alone, so headers are written first and
weights pass through one by one: at no time is more than one of them, in both forms, in memory.
Head, embedding, router, norms, self-conditioning and image tower become bfloat16, as in the
releases; what is packed says `layouts`. The result is read by `quantized`, and by others who know
the layout.

`input_scale` is 1: it is for programs that quantize activations too, and would need texts to be set
well.
"""

import json
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from dgemma.config import load_config
from dgemma.errors import CheckpointError, UsageError
from dgemma.quant import nvfp4
from dgemma.weights.check import check_copies, check_names
from dgemma.weights.files import CONFIGS, INDEX
from dgemma.weights.layouts import (
    CONFIG_KEY,
    MODELOPT_FILE,
    Scheme,
    expert_slices,
    modelopt_file,
    read_scheme,
    scheme_to_json,
)
from dgemma.weights.mapped import STORED_DTYPES, Tensors
from dgemma.weights.quantized import open_checkpoint
from dgemma.weights.save import (
    copy_companions,
    header_bytes,
    name_files,
    refuse_existing,
    save_whole,
    split,
    sync,
    write_json,
)

E4M3, LARGEST = torch.float8_e4m3fn, 448.0
LOW_HALF = 0xFFFF  # of a float32: what bfloat16 lacks
KEPT = "lm_head embed_tokens embed_vision router self_conditioning vision_tower".split()
Progress = Callable[[int, int], None]  # tensors written, tensors in all
Packed = dict[str, Tensor]  # by what follows the module's name


@dataclass(frozen=True, slots=True, kw_only=True)
class Loss:
    """What one group of weights lost: root mean square of the change, over that of the weights."""

    layer: int
    part: str  # experts, self_attn or mlp
    relative: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Written:
    losses: tuple[Loss, ...]
    source_bytes: int
    bytes: int


class Tally:
    """Sums of squares by layer and part."""

    def __init__(self) -> None:
        self.sums: dict[tuple[int, str], list[float]] = {}

    def add(self, module: str, weight_OI: Tensor, whole_OI: Tensor) -> None:
        found = re.search(r"\.layers\.(\d+)\.(\w+)", module)
        assert found is not None, module
        sums = self.sums.setdefault((int(found[1]), found[2]), [0.0, 0.0])
        sums[0] += (weight_OI - whole_OI).double().square().sum().item()
        sums[1] += weight_OI.double().square().sum().item()

    def losses(self) -> tuple[Loss, ...]:
        return tuple(
            Loss(layer=layer, part=part, relative=(change / size) ** 0.5 if size else 0.0)
            for (layer, part), (change, size) in sorted(self.sums.items())
        )


def quantize_checkpoint(
    source: Path,
    directory: Path,
    scheme: Scheme,
    *,
    max_shard_bytes: int = 5_000_000_000,
    on_tensor: Progress | None = None,
) -> Written:
    """Write a checkpoint in one of the released layouts; never over one that is there."""
    refuse_existing(directory, "choose")
    already = read_scheme(source)
    if already is not None:
        raise UsageError(f"{source} is stored as {already.name} already; quantize its original")
    config = load_config(source)
    tensors = open_checkpoint(source, config)
    entries = check_names(config, tensors.stored, source)
    check_copies(entries, tensors, source)
    names = sorted(name for name, entry in entries.items() if entry.group != "tied")
    plan = {name: _outline(name, tensors.stored[name].shape, scheme) for name in names}
    shards = split(_join(plan), None, max_shard_bytes)
    tally = Tally()
    flow = _converted(plan, tensors, scheme, tally)
    write = _Shards(name_files("model", shards), flow, len(_join(plan)), on_tensor)
    _write(source, directory, scheme, write)
    written = sum(tensor.numel() * tensor.dtype.itemsize for tensor in _join(plan).values())
    source_bytes = sum(tensors.stored[name].num_bytes for name in names)
    return Written(losses=tally.losses(), source_bytes=source_bytes, bytes=written)


def pack_fp8(weight_OI: Tensor) -> Packed:
    """Eight bits, each row with a factor that lets its greatest be the greatest."""
    scale = weight_OI.abs().amax(-1, keepdim=True) / LARGEST
    # Upwards to a bfloat16, so that the largest value is not cut off.
    scale = ((scale.view(torch.int32) + LOW_HALF) & ~LOW_HALF).view(torch.float32)
    scale = torch.where(scale > 0, scale, 1.0)
    numbers = (weight_OI / scale).clamp(-LARGEST, LARGEST).to(E4M3)
    return {".weight": numbers, ".weight_scale": scale.bfloat16()}


def pack_nvfp4(weight_OI: Tensor, factor: Tensor) -> Packed:
    """Four bits, under a factor that gate and up of an expert share."""
    packed = nvfp4.quantize(weight_OI, factor)
    return {
        ".weight": packed.numbers_OI,
        ".weight_scale": packed.scale_OG,
        ".weight_scale_2": packed.factor,
        ".input_scale": torch.ones(()),
    }


def unpack(packed: Packed) -> Tensor:
    """What packed numbers stand for."""
    if ".weight_scale_2" not in packed:
        return packed[".weight"].float() * packed[".weight_scale"].float()
    factor = packed[".weight_scale_2"]
    return nvfp4.Packed(packed[".weight"], packed[".weight_scale"], factor).whole()


class _Shards:
    """Files of a plan, filled from a flow of tensors in the plan's order."""

    def __init__(
        self,
        files: Mapping[str, Mapping[str, Tensor]],
        flow: Iterator[tuple[str, Tensor]],
        total: int,
        on_tensor: Progress | None,
    ) -> None:
        self.files, self.flow, self.total, self.on_tensor = files, flow, total, on_tensor
        self.done = 0

    def write(self, place: Path) -> list[str]:
        """Write all files and their index; the names, the index last."""
        for name, outline in self.files.items():
            with (place / name).open("wb") as file:
                file.write(header_bytes(outline, None))
                for expected, empty in outline.items():
                    file.write(self._next(expected, empty))
                sync(file)
        weight_map = {name: file for file, inside in self.files.items() for name in inside}
        outlines = [tensor for inside in self.files.values() for tensor in inside.values()]
        size = sum(tensor.numel() * tensor.dtype.itemsize for tensor in outlines)
        write_json(place / INDEX, {"metadata": {"total_size": size}, "weight_map": weight_map})
        return [*self.files, INDEX]

    def _next(self, expected: str, empty: Tensor) -> memoryview:
        name, tensor = next(self.flow)
        made, planned = (tensor.dtype, tensor.shape), (empty.dtype, empty.shape)
        assert (name, made) == (expected, planned), f"{name} {made}, not {expected} {planned}"
        self.done += 1
        if self.on_tensor is not None:
            self.on_tensor(self.done, self.total)
        return tensor.contiguous().view(-1).view(torch.uint8).numpy().data


def _outline(name: str, shape: tuple[int, ...], scheme: Scheme) -> dict[str, Tensor]:
    """What one tensor of the source becomes, without storage, in the order it is written."""
    made: dict[str, Tensor] = {}
    for module, size in _modules(name, shape, scheme).items():
        if scheme.name == "nvfp4" and size[-1] % nvfp4.GROUP:
            raise UsageError(
                f"{name} has rows of {size[-1]} numbers, which cannot be split into groups of "
                f"{nvfp4.GROUP}; use fp8"
            )
        for ending, stored in scheme.beside((size[0], size[1])).items():
            dtype = STORED_DTYPES[stored.types[0]]
            made[module + ending] = torch.empty(stored.shape, dtype=dtype, device="meta")
    return made or {name: torch.empty(shape, dtype=torch.bfloat16, device="meta")}


def _modules(name: str, shape: tuple[int, ...], scheme: Scheme) -> dict[str, tuple[int, ...]]:
    """The matrices of a tensor that are packed; none: it stays whole."""
    modules = expert_slices(name, shape) or {name.removesuffix(".weight"): shape}
    return {module: size for module, size in modules.items() if scheme.is_packed(module)}


def _join(plan: Mapping[str, Mapping[str, Tensor]]) -> dict[str, Tensor]:
    return {name: tensor for made in plan.values() for name, tensor in made.items()}


def _converted(
    plan: Mapping[str, object], tensors: Tensors, scheme: Scheme, tally: Tally
) -> Iterator[tuple[str, Tensor]]:
    for name in plan:
        tensor = tensors[name]
        modules = list(_modules(name, tuple(tensor.shape), scheme))
        if not modules:
            yield name, _finite(name, tensor.to(torch.bfloat16))
            continue
        experts = tensor if tensor.dim() == 3 else tensor[None]
        each = len(modules) // len(experts)
        for index, expert in enumerate(experts):
            parts = _finite(name, expert.float()).chunk(each)
            matrices = dict(zip(modules[each * index :][:each], parts, strict=True))
            for module, packed in _pack(matrices, scheme).items():
                tally.add(module, matrices[module], unpack(packed))
                yield from ((module + ending, made) for ending, made in packed.items())


def _finite(name: str, tensor: Tensor) -> Tensor:
    if not tensor.isfinite().all():
        raise CheckpointError(f"{name} holds NaN or infinity; it cannot be quantized")
    return tensor


def _pack(matrices: Mapping[str, Tensor], scheme: Scheme) -> dict[str, Packed]:
    if scheme.name == "fp8":
        return {module: pack_fp8(weight.contiguous()) for module, weight in matrices.items()}
    factor = nvfp4.factor_of(*matrices.values())
    return {module: pack_nvfp4(weight, factor) for module, weight in matrices.items()}


def _write(source: Path, directory: Path, scheme: Scheme, shards: _Shards) -> None:
    def write(place: Path) -> list[str]:
        names = [*copy_companions(source, place), *_write_configs(source, place, scheme)]
        return names + shards.write(place)

    save_whole(directory, write)


def _write_configs(source: Path, place: Path, scheme: Scheme) -> list[str]:
    """The source's own words, with what is said of the layout added."""
    raw = json.loads((source / "config.json").read_text(encoding="utf-8"))
    raw["dtype"] = raw["text_config"]["dtype"] = "bfloat16"
    kept = [*KEPT, *(["self_attn", "mlp"] if scheme.name == "nvfp4" else [])]
    wild = "*{}*" if scheme.name == "nvfp4" else "re:.*{}.*"
    ignored = [name if name == "lm_head" else wild.format(name) for name in kept]
    raw[CONFIG_KEY] = scheme_to_json(scheme, ignored)
    write_json(place / "config.json", raw)
    names = ["config.json"]
    if (source / CONFIGS[1]).is_file():
        shutil.copyfile(source / CONFIGS[1], place / CONFIGS[1])
        names.append(CONFIGS[1])
    if scheme.name == "nvfp4":
        write_json(place / MODELOPT_FILE, modelopt_file(ignored))
        names.append(MODELOPT_FILE)
    return names
