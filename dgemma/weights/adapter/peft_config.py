"""`adapter_config.json`, read strictly: all that it asks for is done, or it is refused by name."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dgemma.errors import CheckpointError, ConfigError
from dgemma.weights.adapter.pairs import Adapter

BASE_MODEL = "base_model_name_or_path"
REQUIRED_KEYS = {"peft_type", "r", "lora_alpha", "target_modules"}
IGNORED: dict[str, str] = {
    "auto_mapping": "classes of another library",
    "corda_config": "how the adapter was first drawn (what matters of it is checked)",
    "eva_config": "how the adapter was first drawn (what matters of it is checked)",
    "loftq_config": "how the adapter was first drawn (what matters of it is checked)",
    "lora_ga_config": "how the adapter was first drawn (what matters of it is checked)",
    "ensure_weight_tying": "concerns the embedding table, which takes no adapter",
    "exclude_modules": "the tensor names say which modules there are",
    "layers_pattern": "the tensor names say which layers there are",
    "layers_to_transform": "the tensor names say which layers there are",
    "inference_mode": "whether another library would train it",
    "lora_dropout": "zero at inference",
    "megatron_core": "only read with megatron_config (checked)",
    "qalora_group_size": "only read with use_qalora (checked)",
    "peft_version": "who wrote the file",
    "revision": "of the base model, whose shapes are checked",
    "runtime_config": "how another library would run it",
    "task_type": "the wrapper of another library; the weights are the same",
}
# Each changes what the tensors mean, and must be off; with what it stands for.
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
    # The others, such as pissa and loftq, take something out of the base weights first: their
    # adapters do not fit the released ones.
    "init_lora_weights": (True, False, "gaussian", "eva", "orthogonal"),
    "use_rslora": (False, True, None),
}


def read_config(path: Path) -> dict[str, Any]:
    """The config of an adapter, once this build is sure to do all that it asks for."""
    try:
        raw = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is damaged: its JSON cannot be read ({error})") from None
    if not isinstance(raw, dict):
        raise CheckpointError(f"{path} must hold a JSON object, not a {type(raw).__name__}")
    # Before the other keys: those of another method would all be unknown.
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
        # In full: `q_proj` alone would also mean the image tower's.
        "target_modules": modules,
        "task_type": None,
        "use_dora": False,
        "use_rslora": adapter.use_rslora,
    }
