"""A GGUF file as a checkpoint: its tensors by the names and shapes of the released layout.

Missing, unexpected and misshapen tensors are refused by their name in the file. Weights are
dequantized when read, or returned as blocks; the rest of the package sees released names in
float32. On a CPU experts may stay blocks of the mapped file; the token table, which each step reads
three times, is always dequantized, and as many dense layers as a memory budget allows.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from pathlib import Path

import torch
from torch import Tensor, nn

from dgemma.backends.cuda.streaming import Staging, StreamedExperts
from dgemma.config import GenerationConfig, ModelConfig
from dgemma.errors import CheckpointError
from dgemma.quant.gguf import BlockExperts, BlockLinear, BlockTensor, BlockWeight
from dgemma.quant.gguf_tiles import TiledBlockExperts
from dgemma.text.tokenizer import Tokenizer
from dgemma.weights.files import GGUF_SUFFIX, StoredTensor, listing
from dgemma.weights.gguf import GGUFFile
from dgemma.weights.gguf_config import read_gguf_config
from dgemma.weights.gguf_tokenizer import read_tokenizer
from dgemma.weights.names import (
    ALIASES,
    ENCODER_SCALE,
    OUTPUT,
    ROPE_FREQS,
    TOKEN_EMBD,
    TensorSpec,
    gguf_name,
    layer_of,
    separate_names,
    text_specs,
)

DTYPE = "F32"  # dtype of dequantized weights
# Memory for dequantized weights beyond their size in the file. With the runtime's
# memory a model then peaks at less than its file and 3 GB.
EXTRA_BYTES = 2_200_000_000
EXPERTS = ("experts.gate_up_proj", "experts.down_proj")
TABLE = "embed_tokens.weight"
PLAIN_TYPES = ("F32", "F16", "BF16")


def is_gguf(path: Path) -> bool:
    """True if a path names a GGUF file rather than a checkpoint directory."""
    return path.suffix.lower() == GGUF_SUFFIX and not path.is_dir()


class GGUFTensors:
    """Tensors by released name. `stored` has their shapes, as float32, and bytes in the file."""

    def __init__(self, file: GGUFFile, config: ModelConfig) -> None:
        self.file = file
        self.names = _assign(file, config)
        self.stored: Mapping[str, StoredTensor] = {
            name: _stored(file, names) for name, names in self.names.items()
        }

    def __getitem__(self, name: str) -> Tensor:
        return self.load(name)

    def blocks(self, name: str) -> BlockWeight:
        """Return a weight as blocks, views of the file."""
        return BlockWeight(tuple(self._block_tensor(each) for each in self.names[name]))

    def load(
        self, name: str, device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32
    ) -> Tensor:
        """Dequantize a weight on a device, and let the OS drop the pages that were read."""
        weight = self.blocks(name).dequantize(dtype, device)
        for each in self.names[name]:
            self.file.release(each)
        return weight

    def _block_tensor(self, name: str) -> BlockTensor:
        tensor = self.file.tensors[name]
        return BlockTensor(self.file.packed(name), tensor.format, tensor.shape)


@dataclass(frozen=True, slots=True, kw_only=True)
class GGUFCheckpoint:
    """An open file: configs, tensors, and notes on what was assumed or ignored."""

    file: GGUFFile
    config: ModelConfig
    generation: GenerationConfig
    tensors: GGUFTensors
    notes: tuple[str, ...]

    @property
    def path(self) -> Path:
        return self.file.path

    def tokenizer(self) -> Tokenizer:
        return read_tokenizer(self.file.metadata, self.path)

    def type_counts(self) -> dict[str, int]:
        """Count the tensors of each type, types of matrices first."""
        counts: dict[str, int] = {}
        for tensor in self.file.tensors.values():
            counts[tensor.format.name] = counts.get(tensor.format.name, 0) + 1
        return dict(sorted(counts.items(), key=lambda item: (item[0] in PLAIN_TYPES, -item[1])))


def open_gguf(path: Path) -> GGUFCheckpoint:
    """Open and check a file. Cached until the file changes."""
    try:
        status = path.stat()
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror}") from None
    return _open(path.absolute(), status.st_mtime_ns, status.st_size)


@lru_cache(maxsize=1)
def _open(path: Path, _mtime: int, _size: int) -> GGUFCheckpoint:
    file = GGUFFile(path)
    found = read_gguf_config(file)
    tensors = GGUFTensors(file, found.config)
    notes = found.notes
    if found.config.can_denoise and not any(n.endswith(ENCODER_SCALE) for n in file.tensors):
        notes += ("no layer scalars of the encoder: the decoder's are used in both modes",)
    return GGUFCheckpoint(
        file=file,
        config=found.config,
        generation=found.generation,
        tensors=tensors,
        notes=notes,
    )


def _stored(file: GGUFFile, names: tuple[str, ...]) -> StoredTensor:
    """Describe a weight; several tensors are concatenated by rows."""
    tensors = [file.tensors[name] for name in names]
    first = tensors[0]
    shape = first.shape
    if len(tensors) > 1:
        shape = (*shape[:-2], sum(tensor.shape[-2] for tensor in tensors), shape[-1])
    size = sum(tensor.num_bytes for tensor in tensors)
    start = first.start
    return StoredTensor(path=first.path, dtype=DTYPE, shape=shape, start=start, stop=start + size)


def _assign(file: GGUFFile, config: ModelConfig) -> dict[str, tuple[str, ...]]:
    """Return the file's tensors for each released name; refuses mismatches."""
    names: dict[str, tuple[str, ...]] = {}
    missing, misshapen = [], []
    for released, spec in text_specs(config).items():
        chosen = _choose(file, gguf_name(released, config), spec, config)
        if not chosen:
            missing.append(gguf_name(released, config))
            continue
        names[released] = chosen
        shape = _stored(file, chosen).shape
        if shape != spec.shape:
            misshapen.append(f"{chosen[0]} ({list(shape)}, not {list(spec.shape)})")
    used = {name for chosen in names.values() for name in chosen} | {ROPE_FREQS}
    if _is_tied_copy(file):
        used.add(OUTPUT)
    findings = {
        "it lacks": missing,
        "it has the unknown": [name for name in file.tensors if name not in used],
        "other shapes have": misshapen,
    }
    problems = [f"{what} {listing(found)}" for what, found in findings.items() if found]
    if problems:
        raise CheckpointError(f"{file.path} does not fit its metadata: {'; '.join(problems)}")
    return names


def _choose(file: GGUFFile, name: str, spec: TensorSpec, config: ModelConfig) -> tuple[str, ...]:
    """Return the file's tensors for a weight, under any accepted name."""
    if name in file.tensors:
        return (name,)
    alias = ALIASES.get(name)
    if alias is not None and alias in file.tensors:
        return (alias,)
    separate = separate_names(name)
    if separate and all(each in file.tensors for each in separate):
        return separate
    if spec.group == "twin":  # without encoder scalars, the decoder's are used
        decoder = gguf_name(spec.target, config)
        has_any = any(each.endswith("." + ENCODER_SCALE) for each in file.tensors)
        if not has_any and decoder in file.tensors:
            return (decoder,)
    return ()


def _is_tied_copy(file: GGUFFile) -> bool:
    """True if the file's LM head repeats the token table; refuses a different head."""
    if OUTPUT not in file.tensors or TOKEN_EMBD not in file.tensors:
        return False
    head, table = file.tensors[OUTPUT], file.tensors[TOKEN_EMBD]
    is_same = (head.shape, head.format) == (table.shape, table.format)
    if not is_same or not torch.equal(file.packed(OUTPUT), file.packed(TOKEN_EMBD)):
        raise CheckpointError(
            f"{file.path}: {OUTPUT} differs from {TOKEN_EMBD}; in this architecture they are one "
            "weight, and which is meant cannot be guessed"
        )
    return True


# --- blocks in a model


def dequantized_layers(
    text: Mapping[str, str], tensors: GGUFTensors, dtype: torch.dtype
) -> set[int | None]:
    """Return the layers whose dense weights are dequantized; None: self-conditioning.

    `text`: parameter by stored name.
    """
    extra: dict[int | None, int] = {}
    left = EXTRA_BYTES
    for name, parameter in text.items():
        stored = tensors.stored[name]
        size = prod(stored.shape) * dtype.itemsize - stored.num_bytes
        if parameter == TABLE:
            left -= size
        elif not parameter.endswith(EXPERTS):
            layer = layer_of(parameter)
            extra[layer] = extra.get(layer, 0) + size
    chosen: set[int | None] = set()
    for layer, of_layer in extra.items():
        if of_layer > left:
            break
        chosen.add(layer)
        left -= of_layer
    return chosen


def load_tiled_experts(
    module: nn.Module,
    names: Mapping[str, str],
    tensors: GGUFTensors,
    device: torch.device | str,
    staging: Staging | None,
) -> set[str]:
    """Repack a layer's experts on a device; with `staging`, keep them in host memory.

    `names`: parameter in the module by stored name. Returns the names loaded.
    """
    stored = {parameter: name for name, parameter in names.items()}
    if not all(parameter in stored for parameter in EXPERTS):
        return set()
    taken = {stored[parameter] for parameter in EXPERTS}
    gate_up, down = (tensors.blocks(stored[parameter]) for parameter in EXPERTS)
    experts = TiledBlockExperts.from_blocks(gate_up, down, device)
    module.experts = experts if staging is None else StreamedExperts(experts, staging)
    for name in taken:
        for each in tensors.names[name]:
            tensors.file.release(each)
    return taken


def load_blocks(
    module: nn.Module, names: Mapping[str, str], tensors: GGUFTensors, *, dense: bool
) -> set[str]:
    """Put blocks into a module: its experts and, with `dense`, its linears.

    `names`: parameter in the module by stored name. Returns the names loaded.
    """
    stored = {parameter: name for name, parameter in names.items()}
    taken = set()
    if all(parameter in stored for parameter in EXPERTS):
        gate_up, down = (tensors.blocks(stored[parameter]) for parameter in EXPERTS)
        module.experts = BlockExperts(gate_up, down)
        taken |= {stored[parameter] for parameter in EXPERTS}
    for parameter, name in stored.items():
        path = parameter.removesuffix(".weight")
        is_linear = dense and path != parameter and _is_linear(module, path)
        if is_linear and not path.startswith("router"):
            owner, _, leaf = path.rpartition(".")
            setattr(module.get_submodule(owner), leaf, BlockLinear(tensors.blocks(name)))
            taken.add(name)
    return taken


def _is_linear(module: nn.Module, path: str) -> bool:
    return type(module.get_submodule(path)) is nn.Linear
