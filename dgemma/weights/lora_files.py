"""The two files of an adapter, as PEFT reads and writes them.

    adapter_config.json
    adapter_model.safetensors         base_model.model.{module}.lora_A.weight, ... lora_B.weight

Here one stack serves both modes, so one pair A, B does. transformers has separate encoder and
decoder stacks: each layer's pair is written under both names, and read if the two are equal or only
the decoder's exists. The config is read strictly: every key is honoured, or refused by name.
"""

import json
import os
import re
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dgemma.config import GENERATION_CONFIG, Family, GenerationConfig, generation_config_to_json
from dgemma.config.strict_json import read_json
from dgemma.errors import CheckpointError, ConfigError, UsageError
from dgemma.weights.files import listing, read_header
from dgemma.weights.lora import NO_TARGET, NO_TARGETS, Adapter, LoRAPair, Pairs, ends_in
from dgemma.weights.names import ENCODER_PREFIX, SELF_CONDITIONING, TEXT_PREFIX
from dgemma.weights.safetensors_io import MappedTensors, write_safetensors

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
PICKLED = "adapter_model.bin"
PEFT_PREFIX = "base_model.model."
PAIR_NAME = re.compile(re.escape(PEFT_PREFIX) + r"(?P<module>.+)\.lora_(?P<half>[AB])\.weight")
BASE_MODEL = "base_model_name_or_path"
REQUIRED_KEYS = {"peft_type", "r", "lora_alpha", "target_modules"}
IGNORED: dict[str, str] = {
    "auto_mapping": "classes of another library",
    "corda_config": "initialization (init_lora_weights is checked)",
    "eva_config": "initialization (init_lora_weights is checked)",
    "loftq_config": "initialization (init_lora_weights is checked)",
    "lora_ga_config": "initialization (init_lora_weights is checked)",
    "ensure_weight_tying": "concerns the embedding table, which takes no adapter",
    "exclude_modules": "the tensor names say which modules there are",
    "layers_pattern": "the tensor names say which layers there are",
    "layers_to_transform": "the tensor names say which layers there are",
    "inference_mode": "concerns training by another library",
    "lora_dropout": "zero at inference",
    "megatron_core": "only read with megatron_config (checked)",
    "qalora_group_size": "only read with use_qalora (checked)",
    "peft_version": "the writer of the file",
    "revision": "of the base model, whose shapes are checked",
    "runtime_config": "execution by another library",
    "task_type": "the wrapper of another library; the weights are the same",
}
# Each changes the meaning of the tensors and must be off.
UNSUPPORTED: dict[str, str] = {
    "alora_invocation_tokens": "an adapter that waits for certain tokens",
    "alpha_pattern": "another alpha for some modules",
    "arrow_config": "a choice among several adapters",
    "fan_in_fan_out": "transposed weights",
    "kasa_config": "singular values beside A and B",
    "layer_replication": "layers used more than once",
    "lora_bias": "a bias beside B",
    "megatron_config": "weights split over machines",
    "modules_to_save": "whole modules beside the adapter",
    "monteclora_config": "adapters drawn at random",
    "rank_pattern": "another rank for some modules",
    "target_parameters": "experts, which take no adapter",
    "trainable_token_indices": "new rows of the embedding table, which takes no adapter",
    "use_bdlora": "block-diagonal matrices",
    "use_dora": "magnitudes beside A and B",
    "use_qalora": "pooled inputs",
    "velora_config": "projected inputs",
}
OFF: tuple[Any, ...] = (None, False, [], {})
ALLOWED: dict[str, tuple[Any, ...]] = {
    "bias": ("none",),
    # Others, such as pissa and loftq, modify the base weights first: their
    # adapters do not fit the released ones.
    "init_lora_weights": (True, False, "gaussian", "eva", "orthogonal"),
    "use_rslora": (False, True, None),
}


def load_adapter(path: Path) -> Adapter:
    """Read the adapter of a directory, or of one of its two files."""
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


def save_adapter(
    adapter: Adapter,
    directory: Path,
    *,
    overwrite: bool = False,
    generation: GenerationConfig | None = None,
) -> None:
    """Write PEFT's two files.

    `generation`: defaults that `Engine.load` uses instead of the checkpoint's, in a third file.
    """
    existing = [name for name in (CONFIG, WEIGHTS) if (directory / name).exists()]
    if existing and not overwrite:
        raise UsageError(
            f"{directory} already holds an adapter ({listing(existing)}); allow overwriting it or "
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
        with tempfile.TemporaryDirectory(prefix=".saving-", dir=directory) as hidden:
            write_safetensors(Path(hidden, WEIGHTS), tensors, next(iter(tensors.values())).dtype)
            Path(hidden, CONFIG).write_text(text, encoding="utf-8")
            # An old config must never appear with new tensors.
            (directory / CONFIG).unlink(missing_ok=True)
            (directory / GENERATION_CONFIG).unlink(missing_ok=True)
            for name in (WEIGHTS, CONFIG):
                os.replace(Path(hidden, name), directory / name)
            if generation is not None:
                own = json.dumps(generation_config_to_json(generation), indent=2) + "\n"
                (directory / GENERATION_CONFIG).write_text(own, encoding="utf-8")
    except OSError as error:
        raise CheckpointError(
            f"cannot save to {directory}: {error.strerror}; check its free space and permissions"
        ) from None


def _find(path: Path) -> Path:
    """Return the directory of an adapter; refuses one that lacks a file."""
    directory = path.parent if path.name in (CONFIG, WEIGHTS) else path
    if not directory.exists():
        raise UsageError(f"{path} does not exist; give the directory of an adapter, or its file")
    missing = [name for name in (CONFIG, WEIGHTS) if not (directory / name).is_file()]
    if missing:
        pickled = f" ({PICKLED} is not read)" if (directory / PICKLED).exists() else ""
        raise CheckpointError(
            f"{path} is not an adapter, that is, a directory with {CONFIG} and {WEIGHTS} or the "
            f"path of either: it lacks {' and '.join(missing)}{pickled}"
        )
    return directory


def _read_pairs(path: Path) -> dict[str, LoRAPair]:
    """Read the pairs of a file by their stored module."""
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
        tensor = tensors[match[0]].clone()  # clone: the file may change under a view
        if not torch.isfinite(tensor).all():
            raise CheckpointError(f"{path}: {match[0]} holds NaN or infinity")
        halves.setdefault(match["module"], {})[match["half"]] = tensor
    lone = [f"lora_{half} of {name}" for name, h in halves.items() if len(h) == 1 for half in h]
    if lone:
        raise CheckpointError(f"{path} holds only {listing(lone)}; A and B come in pairs")
    return {name: LoRAPair(a_RI=h["A"], b_OR=h["B"]) for name, h in halves.items()}


def _check_covered(targets: list[str] | str, pairs: Pairs, directory: Path) -> None:
    """Refuse tensors outside the list of targets, which PEFT ignores silently."""
    # Not checked for patterns, whose match may take exponential time.
    if isinstance(targets, str):
        return
    stray = [name for name in pairs if not any(ends_in(name, target) for target in targets)]
    if stray:
        raise CheckpointError(
            f"{directory}: {WEIGHTS} holds {listing(stray)}, which target_modules in {CONFIG} "
            "does not name"
        )


def _one_stack(pairs: Pairs, directory: Path) -> tuple[Family, dict[str, LoRAPair]]:
    """Return the family of an adapter, and its pairs by module in `Gemma`."""
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
    """Refuse an encoder whose pairs differ from the decoder's."""
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
    """Return the reference's names of a module: both stacks, except for self-conditioning."""
    modules = [TEXT_PREFIX[family] + name]
    if family == "diffusion_gemma" and not name.startswith(SELF_CONDITIONING):
        modules.append(ENCODER_PREFIX + name)
    return modules


def read_config(path: Path) -> dict[str, Any]:
    """Read an adapter's config; refuses unsupported keys and values."""
    raw = read_json(path)
    # Checked first: all keys of another method would be unknown.
    if raw.get("peft_type") != "LORA":
        raise ConfigError(f"{path}: peft_type is {raw.get('peft_type')!r}; this build reads 'LORA'")
    known = REQUIRED_KEYS | IGNORED.keys() | UNSUPPORTED.keys() | ALLOWED.keys() | {BASE_MODEL}
    unknown = raw.keys() - known
    if unknown:
        raise ConfigError(
            f"{path}: this build does not know {', '.join(sorted(unknown))}; the adapter may need "
            "a newer dgemma"
        )
    missing = REQUIRED_KEYS - raw.keys()
    if missing:
        raise ConfigError(f"{path} lacks {', '.join(sorted(missing))}")
    _check_values(raw, path)
    return raw


def _check_values(raw: Mapping[str, Any], path: Path) -> None:
    for key, what in UNSUPPORTED.items():
        if raw.get(key) not in OFF:
            raise ConfigError(
                f"{path}: {key} is {raw[key]!r}, that is, {what}; this build needs it off"
            )
    for key, values in ALLOWED.items():
        if key in raw and raw[key] not in values:
            allowed = " or ".join(map(repr, values))
            raise ConfigError(f"{path}: {key} is {raw[key]!r}; this build reads {allowed}")
    if not isinstance(raw.get(BASE_MODEL), str | None):
        raise ConfigError(f"{path}: {BASE_MODEL} must be a name, not {raw[BASE_MODEL]!r}")
    targets = raw["target_modules"]
    is_list = isinstance(targets, list) and all(isinstance(target, str) for target in targets)
    if not is_list and not isinstance(targets, str):
        raise ConfigError(
            f"{path}: target_modules must be a list of names or a pattern, not {targets!r}"
        )


def config_to_json(adapter: Adapter, modules: list[str]) -> dict[str, Any]:
    return {
        BASE_MODEL: adapter.base_model,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "init_lora_weights": True,
        "lora_alpha": adapter.alpha,
        "lora_dropout": 0.0,
        "modules_to_save": None,
        "peft_type": "LORA",
        "r": adapter.rank,
        # Full names: `q_proj` alone would include the image tower's.
        "target_modules": modules,
        "task_type": None,
        "use_dora": False,
        "use_rslora": adapter.use_rslora,
    }
