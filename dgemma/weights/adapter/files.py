"""The two files of an adapter, as PEFT reads and writes them.

    adapter_config.json
    adapter_model.safetensors         base_model.model.{module}.lora_A.weight, ... lora_B.weight

Here one stack serves both modes, so one pair A, B does. In transformers encoder and decoder are
apart: files are written with every layer's pair under both names, and read if the two are equal or
only the decoder's is there.
"""

import json
import os
import re
import tempfile
from pathlib import Path

import torch
from torch import Tensor

from dgemma.config import Family
from dgemma.errors import CheckpointError, ConfigError, UsageError
from dgemma.weights.adapter.pairs import NO_TARGET, NO_TARGETS, Adapter, Pair, Pairs, ends_in
from dgemma.weights.adapter.peft_config import BASE_MODEL, config_to_json, read_config
from dgemma.weights.files import listing, read_header
from dgemma.weights.mapped import MappedTensors
from dgemma.weights.names import ENCODER_PREFIX, SELF_CONDITIONING, TEXT_PREFIX
from dgemma.weights.save import write_safetensors

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
PICKLED = "adapter_model.bin"
PEFT_PREFIX = "base_model.model."
PAIR_NAME = re.compile(re.escape(PEFT_PREFIX) + r"(?P<module>.+)\.lora_(?P<half>[AB])\.weight")


def load_adapter(path: Path) -> Adapter:
    """Read the adapter of a directory, or of either of its two files."""
    directory = _find(path)
    try:
        raw, pairs = read_config(directory / CONFIG), _read_pairs(directory / WEIGHTS)
    except OSError as error:
        raise CheckpointError(f"cannot read {error.filename}: {error.strerror}") from None
    _check_covered(raw["target_modules"], pairs, directory)
    family, pairs = _one_stack(pairs, directory)
    try:
        return Adapter(
            family=family,
            rank=raw["r"],
            alpha=raw["lora_alpha"],
            use_rslora=bool(raw.get("use_rslora")),
            base_model=raw.get(BASE_MODEL),
            pairs=pairs,
        )
    except (CheckpointError, ConfigError) as error:
        raise type(error)(f"{directory}: {error}") from None


def save_adapter(adapter: Adapter, directory: Path, *, overwrite: bool = False) -> None:
    """Write the two files, under the names that make PEFT adapt transformers' model alike."""
    there = [name for name in (CONFIG, WEIGHTS) if (directory / name).exists()]
    if there and not overwrite:
        raise UsageError(
            f"{directory} already holds an adapter ({listing(there)}); allow overwriting it or "
            "choose another directory"
        )
    stored = {
        module: pair
        for name, pair in sorted(adapter.pairs.items())
        for module in _stored_modules(adapter.family, name)
    }
    tensors = {
        f"{PEFT_PREFIX}{module}.lora_{half}.weight": tensor
        for module, pair in stored.items()
        for half, tensor in zip("AB", pair, strict=True)
    }
    text = json.dumps(config_to_json(adapter, list(stored)), indent=2, sort_keys=True) + "\n"
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".saving-", dir=directory) as place:
            write_safetensors(Path(place, WEIGHTS), tensors, next(iter(tensors.values())).dtype)
            Path(place, CONFIG).write_text(text, encoding="utf-8")
            # An old config beside new tensors must never look whole.
            (directory / CONFIG).unlink(missing_ok=True)
            for name in (WEIGHTS, CONFIG):
                os.replace(Path(place, name), directory / name)
    except OSError as error:
        raise CheckpointError(
            f"cannot save to {directory}: {error.strerror}; check its free space and permissions"
        ) from None


def _find(path: Path) -> Path:
    """The directory of an adapter, both of its files there."""
    directory = path.parent if path.name in (CONFIG, WEIGHTS) else path
    missing = [name for name in (CONFIG, WEIGHTS) if not (directory / name).is_file()]
    if missing:
        pickled = f" ({PICKLED} is not read)" if (directory / PICKLED).exists() else ""
        raise CheckpointError(
            f"{path} is not an adapter, that is, a directory with {CONFIG} and {WEIGHTS} or the "
            f"path of either: it lacks {' and '.join(missing)}{pickled}"
        )
    return directory


def _read_pairs(path: Path) -> dict[str, Pair]:
    """The pairs of a file by their stored module."""
    stored = read_header(path)
    no_targets = [name for name in stored if NO_TARGETS & set(name.split("."))]
    if no_targets:
        raise CheckpointError(f"{path} holds {listing(no_targets)}, but {NO_TARGET}")
    unknown = [name for name in stored if not PAIR_NAME.fullmatch(name)]
    if unknown:
        raise CheckpointError(
            f"{path} holds the unknown {listing(unknown)}; an adapter's tensors are named "
            f"{PEFT_PREFIX}MODULE.lora_A.weight and lora_B.weight"
        )
    tensors, halves = MappedTensors(stored), dict[str, dict[str, Tensor]]()
    for match in filter(None, map(PAIR_NAME.fullmatch, stored)):
        tensor = tensors[match[0]].clone()  # a file may change under a view of it
        if not torch.isfinite(tensor).all():
            raise CheckpointError(f"{path}: {match[0]} holds NaN or infinity")
        halves.setdefault(match["module"], {})[match["half"]] = tensor
    lone = [f"lora_{half} of {name}" for name, h in halves.items() if len(h) == 1 for half in h]
    if lone:
        raise CheckpointError(f"{path} holds only {listing(lone)}; A and B come in pairs")
    return {name: Pair(a_RI=h["A"], b_OR=h["B"]) for name, h in halves.items()}


def _check_covered(targets: list[str] | str, pairs: Pairs, directory: Path) -> None:
    """PEFT leaves out, without a word, tensors that its list of targets does not cover."""
    # A pattern is the writer's own and could take for ever to match: the tensor names count.
    if isinstance(targets, str):
        return
    stray = [name for name in pairs if not any(ends_in(name, target) for target in targets)]
    if stray:
        raise CheckpointError(
            f"{directory}: {WEIGHTS} holds {listing(stray)}, which target_modules in {CONFIG} "
            "does not name"
        )


def _one_stack(pairs: Pairs, directory: Path) -> tuple[Family, dict[str, Pair]]:
    """The family an adapter is for, and its pairs by their module in `Gemma`."""
    prefixes = (*TEXT_PREFIX.values(), ENCODER_PREFIX)
    stray = [name for name in pairs if not name.startswith(prefixes)]
    if stray:
        raise CheckpointError(
            f"{directory} adapts {listing(stray)}; only what begins with {', '.join(prefixes)} can "
            "be adapted"
        )
    stacks = {
        prefix: {n.removeprefix(prefix): p for n, p in pairs.items() if n.startswith(prefix)}
        for prefix in prefixes
    }
    encoder = stacks[ENCODER_PREFIX]
    families = [family for family, prefix in TEXT_PREFIX.items() if stacks[prefix]]
    if len(families) > 1 or (encoder and "gemma4" in families):
        used = [prefix for prefix, stack in stacks.items() if stack]
        raise CheckpointError(f"{directory} mixes two models: {' and '.join(used)}")
    family: Family = families[0] if families else "diffusion_gemma"
    stack = stacks[TEXT_PREFIX[family]]
    if encoder:
        _check_encoder(encoder, stack, directory)
    return family, stack


def _check_encoder(encoder: Pairs, decoder: Pairs, directory: Path) -> None:
    """The encoder's pairs must be those of the decoder, each of them."""
    layers = {name for name in decoder if not name.startswith(SELF_CONDITIONING)}
    differing = sorted(encoder.keys() ^ layers) + [
        name
        for name in sorted(encoder.keys() & layers)
        if not all(map(_are_same, encoder[name], decoder[name]))
    ]
    if differing:
        raise CheckpointError(
            f"{directory} adapts encoder and decoder differently in {listing(differing)}; here one "
            "stack serves as both, so train one adapter for the two"
        )


def _are_same(a: Tensor, b: Tensor) -> bool:
    return a.dtype == b.dtype and torch.equal(a, b)


def _stored_modules(family: Family, name: str) -> list[str]:
    """Where the reference has this module: in both of its stacks, unless it is of the canvas."""
    modules = [TEXT_PREFIX[family] + name]
    if family == "diffusion_gemma" and not name.startswith(SELF_CONDITIONING):
        modules.append(ENCODER_PREFIX + name)
    return modules
