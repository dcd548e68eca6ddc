"""Strict reading and released spelling of `config.json` and `generation_config.json`.

Every key is either used, or checked against the one value this build supports, or named below as
ignored with the reason. Anything else is refused by name: a new architecture flag must not vanish.
"""

from collections.abc import Mapping, Sequence
from dataclasses import MISSING, asdict, fields, is_dataclass
from pathlib import Path
from typing import Any, cast

from dgemma.config.model_config import (
    ARCHITECTURES,
    FULL,
    PRESETS,
    SLIDING,
    Family,
    GenerationConfig,
    ImageAttention,
    LayerType,
    LongReply,
    ModelConfig,
)
from dgemma.config.strict_json import read_json
from dgemma.config.vision_config import VISION_KEYS, read_vision, vision_to_json
from dgemma.errors import ConfigError

GENERATION_CONFIG = "generation_config.json"
TRANSFORMERS_VERSION = "5.22.2"  # whose reading of these files is tested

# Defaults of the reference classes, which write no key for a default.
SOFTCAP_WHEN_ABSENT: dict[Family, float | None] = {"diffusion_gemma": 30.0, "gemma4": None}

IGNORED_TOP: dict[str, str] = {
    "architectures": "model_type already names the architecture",
    "eos_token_id": "read with the generation defaults, where they name no stop ids",
    "quantization_config": "read with the weights, whose files it describes",
    "initializer_range": "only used to draw random weights",
    "transformers_version": "the writer of the file",
    "vision_soft_tokens_per_image": "vision_config names the same budget",
    "audio_config": "audio is not part of this build",
    "audio_token_id": "audio is not part of this build",
    "boa_token_id": "audio is not part of this build",
    "eoa_token_id": "audio is not part of this build",
    "eoa_token_index": "audio is not part of this build",
    "video_token_id": "the tokenizer names it",
}
IGNORED_TEXT: dict[str, str] = {
    "attention_dropout": "zero at inference, and our training uses none",
    "dtype": "the top-level dtype counts",
    "initializer_range": "only used to draw random weights",
    "eos_token_id": "generation_config.json holds the stop ids that count",
    "vocab_size_per_layer_input": "there are no per-layer inputs (checked)",
    "use_cache": "the cache is always used",
}
# Keys with exactly one supported value each.
REQUIRED_TEXT: dict[str, tuple[Any, ...]] = {
    "attention_bias": (False,),
    "hidden_activation": ("gelu_pytorch_tanh",),
    "tie_word_embeddings": (True,),
    "use_bidirectional_attention": ("vision", None),
    "attention_k_eq_v": (True,),
    "enable_moe_block": (True,),
    "hidden_size_per_layer_input": (0, None),
    "num_kv_shared_layers": (0,),
    "use_double_wide_mlp": (False,),
}
# The reference classes of the autoregressive sibling default to other architectures.
MUST_BE_STATED: dict[Family, tuple[str, ...]] = {
    "diffusion_gemma": (),
    "gemma4": ("attention_k_eq_v", "enable_moe_block", "hidden_size_per_layer_input"),
}
TEXT_KEYS = frozenset(
    """bos_token_id final_logit_softcapping global_head_dim head_dim hidden_size intermediate_size
    layer_types max_position_embeddings model_type moe_intermediate_size num_attention_heads
    num_experts num_global_key_value_heads num_hidden_layers num_key_value_heads pad_token_id
    per_layer_config rms_norm_eps rope_parameters sliding_window top_k_experts vocab_size""".split()
)
TOP_KEYS = frozenset(
    """boi_token_id canvas_length dtype eoi_token_id image_token_id long_reply model_type
    text_config tie_word_embeddings vision_config""".split()
)
OWN_GENERATION = ("long_reply", "presets")  # transformers 5.22 refuses a file with them
PRESET_KEYS = frozenset(
    """max_denoising_steps t_max t_min entropy_bound stability_threshold confidence_threshold
    long_reply""".split()
)
IGNORED_GENERATION: dict[str, str] = {
    "transformers_version": "the writer of the file",
    "return_dict_in_generate": "output format of another library",
    "_from_model_config": "bookkeeping of another library",
    "bos_token_id": "the chat template writes it",
    "cache_implementation": "our cache has one implementation",
    "cache_config": "our cache has one implementation",
    "disable_compile": "nothing is compiled at run time",
    "max_length": "max_new_tokens counts",
    "do_sample": "autoregressive default of the sibling; a request says what it wants",
    "temperature": "autoregressive default of the sibling; a request says what it wants",
    "top_k": "autoregressive default of the sibling; a request says what it wants",
    "top_p": "autoregressive default of the sibling; a request says what it wants",
    "output_attentions": "output format of another library",
    "output_hidden_states": "output format of another library",
    "use_cache": "the cache is always used",
}


def load_config(directory: Path) -> ModelConfig:
    """Read `config.json` of a checkpoint directory."""
    return load_config_file(directory / "config.json")


def load_config_file(path: Path) -> ModelConfig:
    """Read a config file of any name."""
    return read_config(read_json(path), str(path))


def load_generation_config(directory: Path) -> GenerationConfig:
    """Read `generation_config.json`; missing keys take the released defaults.

    Missing stop ids are read from `config.json`.
    """
    path = directory / GENERATION_CONFIG
    raw: Mapping[str, Any] = read_json(path) if path.exists() else {}
    stops = raw.get("eos_token_id")
    if stops is None:
        stops = read_json(directory / "config.json").get("eos_token_id")
    return read_generation_config({**raw, "eos_token_id": stops}, str(path))


def read_config(raw: Mapping[str, Any], source: str = "config") -> ModelConfig:
    """Turn a parsed `config.json` into a ModelConfig; refuses unknown keys."""
    family = raw.get("model_type")
    if not isinstance(family, str) or family not in ARCHITECTURES:
        raise ConfigError(
            f"{source}: model_type is {family!r}; this build runs {' and '.join(ARCHITECTURES)}"
        )
    _refuse_unknown(raw, TOP_KEYS | IGNORED_TOP.keys(), source)
    if raw.get("tie_word_embeddings", True) is not True:
        raise ConfigError(f"{source}: tie_word_embeddings must be true")
    if raw.get("audio_config") is not None:
        raise ConfigError(f"{source}: audio_config is set, but this build has no audio")
    text = _need(raw, "text_config", source)
    if not isinstance(text, Mapping):
        raise ConfigError(f"{source}: text_config must be an object, not a {type(text).__name__}")
    vision = raw.get("vision_config")
    if vision is not None:
        _refuse_unknown(vision, VISION_KEYS, f"{source}: vision_config")
    media = ("boi_token_id", "eoi_token_id", "image_token_id")
    return _read_text(
        family,
        text,
        f"{source}: text_config",
        canvas_length=raw.get("canvas_length", 256),
        long_reply=_long_reply(raw.get("long_reply"), source),
        dtype=_first_stated(raw.get("dtype"), text.get("dtype"), "float32"),
        vision=None if vision is None else read_vision(vision, f"{source}: vision_config"),
        media_ids={k: raw[k] for k in media if raw.get(k) is not None},
    )


def _long_reply(raw: Mapping[str, Any] | None, source: str) -> LongReply | None:
    if raw is None:
        return None
    source = f"{source}: long_reply"
    if not isinstance(raw, Mapping):
        raise ConfigError(f"{source} is {raw!r}; it must be an object, or left out")
    _refuse_unknown(raw, frozenset(LongReply.__slots__), source)
    needed = [field.name for field in fields(LongReply) if field.default is MISSING]
    return LongReply(**{**raw, **{name: _need(raw, name, source) for name in needed}})


def _read_text(family: Family, text: Mapping[str, Any], source: str, **top: Any) -> ModelConfig:
    _refuse_unknown(text, TEXT_KEYS | IGNORED_TEXT.keys() | REQUIRED_TEXT.keys(), source)
    for key in MUST_BE_STATED[family]:
        _need(text, key, source)
    for key, allowed in REQUIRED_TEXT.items():
        if key in text and text[key] not in allowed:
            raise ConfigError(f"{source}: {key} is {text[key]!r}; this build needs {allowed[0]!r}")
    if text.get("model_type") not in (f"{family}_text", None):
        raise ConfigError(f"{source}: model_type is {text['model_type']!r}, not '{family}_text'")
    layer_types = _need(text, "layer_types", source)
    if not isinstance(layer_types, list) or not all(isinstance(k, str) for k in layer_types):
        raise ConfigError(f"{source}: layer_types must be a list of names, not {layer_types!r}")
    layer_types = cast(tuple[LayerType, ...], tuple(layer_types))
    stated_layers = text.get("num_hidden_layers", len(layer_types))
    if stated_layers != len(layer_types):
        raise ConfigError(
            f"{source}: num_hidden_layers is {stated_layers}, layer_types has {len(layer_types)}"
        )
    global_head_dim, global_kv_heads = _full_layer_shape(text, layer_types, source)
    rope = _read_rope(text.get("rope_parameters"), source)
    same = "vocab_size hidden_size intermediate_size moe_intermediate_size num_experts".split()
    same += "top_k_experts num_attention_heads num_key_value_heads head_dim sliding_window".split()
    optional = "rms_norm_eps max_position_embeddings pad_token_id bos_token_id".split()
    image_attention: ImageAttention = "sliding"
    if text.get("use_bidirectional_attention") is None:
        image_attention = "causal"
    return ModelConfig(
        family=family,
        image_attention=image_attention,
        layer_types=layer_types,
        global_head_dim=global_head_dim,
        num_global_key_value_heads=global_kv_heads,
        final_logit_softcapping=text.get("final_logit_softcapping", SOFTCAP_WHEN_ABSENT[family]),
        **{key: _need(text, key, source) for key in same},
        **{key: text[key] for key in optional if text.get(key) is not None},
        **rope,
        **top,
    )


def _full_layer_shape(
    text: Mapping[str, Any], layer_types: tuple[LayerType, ...], source: str
) -> tuple[int, int]:
    """Read head size and key/value heads of full layers, from either published spelling."""
    if "per_layer_config" not in text:
        kv_heads = text.get("num_global_key_value_heads") or text.get("num_key_value_heads")
        return _need(text, "global_head_dim", source), kv_heads or 0
    full = [layer for layer, kind in enumerate(layer_types) if kind == FULL]
    overrides = _read_overrides(text["per_layer_config"], source)
    shapes = [overrides.get(layer, {}) for layer in full]
    if set(overrides) - set(full) or any(shape != shapes[0] for shape in shapes):
        raise ConfigError(
            f"{source}: per_layer_config may only describe the full_attention layers {full}, all "
            f"alike; it describes {sorted(overrides)}"
        )
    _refuse_unknown(shapes[0], frozenset({"head_dim", "num_key_value_heads"}), source)
    kv_heads = shapes[0].get("num_key_value_heads", _need(text, "num_key_value_heads", source))
    return shapes[0].get("head_dim", _need(text, "head_dim", source)), kv_heads


def _read_overrides(raw: Any, source: str) -> dict[int, Mapping[str, Any]]:
    is_known = isinstance(raw, Mapping) and all(
        key.isdecimal() and len(key) < 6 and isinstance(value, Mapping)
        for key, value in raw.items()
    )
    if not is_known:
        raise ConfigError(f"{source}: per_layer_config must map layer numbers to objects")
    return {int(key): value for key, value in raw.items()}


def _read_rope(rope: Mapping[str, Any] | None, source: str) -> dict[str, Any]:
    if rope is None:
        return {}
    _refuse_unknown(rope, frozenset({SLIDING, FULL}), f"{source}: rope_parameters")
    sliding, full = _need(rope, SLIDING, source), _need(rope, FULL, source)
    _refuse_unknown(sliding, frozenset({"rope_type", "rope_theta"}), f"{source}: {SLIDING}")
    known = frozenset({"rope_type", "rope_theta", "partial_rotary_factor"})
    _refuse_unknown(full, known, f"{source}: {FULL}")
    types = (sliding.get("rope_type"), full.get("rope_type"))
    if types != ("default", "proportional"):
        raise ConfigError(f"{source}: rope types are {types}, not ('default', 'proportional')")
    return {
        "sliding_rope_theta": _float(_need(sliding, "rope_theta", source)),
        "full_rope_theta": _float(_need(full, "rope_theta", source)),
        "full_rotary_fraction": _float(full.get("partial_rotary_factor", 1.0)),
    }


def read_generation_config(raw: Mapping[str, Any], source: str = "config") -> GenerationConfig:
    """Read the released generation defaults; null means "not set", so our default holds."""
    plain = set(GenerationConfig.__slots__) - {"entropy_bound", "stop_ids", *OWN_GENERATION}
    known = plain | {"sampler_config", "eos_token_id", *OWN_GENERATION} | IGNORED_GENERATION.keys()
    _refuse_unknown(raw, known, source)
    values = {key: raw[key] for key in plain if raw.get(key) is not None}
    values |= read_own_generation(raw, source)
    sampler = raw.get("sampler_config")
    if sampler is not None:
        _refuse_unknown(sampler, frozenset({"_cls_name", "entropy_bound"}), source)
        if sampler.get("_cls_name", "EntropyBoundSamplerConfig") != "EntropyBoundSamplerConfig":
            raise ConfigError(f"{source}: sampler {sampler['_cls_name']!r} is not known here")
        values["entropy_bound"] = _need(sampler, "entropy_bound", source)
    stops = raw.get("eos_token_id")
    if stops is not None:
        values["stop_ids"] = tuple(stops) if isinstance(stops, list) else (stops,)
    return GenerationConfig(**values)


def read_own_generation(raw: Mapping[str, Any], source: str) -> dict[str, Any]:
    """Read the keys of generation defaults that only this package has."""
    values: dict[str, Any] = {}
    if raw.get("long_reply") is not None:
        values["long_reply"] = _long_reply(raw["long_reply"], source)
    if raw.get("presets") is not None:
        _refuse_unknown(raw["presets"], frozenset(PRESETS), f"{source}: presets")
        presets = raw["presets"].items()
        values["presets"] = {k: _preset(v, f"{source}: preset {k}") for k, v in presets}
    return values


def _preset(raw: Mapping[str, Any], source: str) -> dict[str, Any]:
    _refuse_unknown(raw, PRESET_KEYS, source)
    if not raw:
        raise ConfigError(f"{source} is empty; it must have {', '.join(sorted(PRESET_KEYS))}")
    if "long_reply" not in raw:
        return dict(raw)
    return {**raw, "long_reply": _long_reply(raw["long_reply"], source)}


def own_generation_to_json(config: GenerationConfig) -> dict[str, Any]:
    """Return those keys as they are read, where they are set."""
    found: dict[str, Any] = {}
    if config.long_reply is not None:
        found["long_reply"] = asdict(config.long_reply)
    if config.presets:
        found["presets"] = {
            name: {k: asdict(v) if is_dataclass(v) else v for k, v in values.items()}  # type: ignore[arg-type]
            for name, values in config.presets.items()
        }
    return found


def _refuse_unknown(raw: Mapping[str, Any], known: frozenset[str] | set[str], source: str) -> None:
    if not isinstance(raw, Mapping):
        raise ConfigError(f"{source} must be an object, not a {type(raw).__name__}")
    unknown = sorted(raw.keys() - known)
    if unknown:
        raise ConfigError(
            f"{source}: this build does not know {', '.join(unknown)}; the model may need a newer "
            "dgemma"
        )


def _float(value: Any) -> Any:
    """Return a whole number as a float; what is not a number is refused with the config."""
    return float(value) if type(value) is int and abs(value) < 1 << 53 else value


def _first_stated(*values: Any) -> Any:
    return next(value for value in values if value is not None)


def _need(raw: Mapping[str, Any], key: str, source: str) -> Any:
    value = raw.get(key)
    if value is None:
        raise ConfigError(f"{source}: {key} is missing")
    return value


def config_to_json(config: ModelConfig, stop_ids: Sequence[int] = ()) -> dict[str, Any]:
    """A config as `config.json` spells it, with every key of the released file."""
    top: dict[str, Any] = {
        "architectures": [ARCHITECTURES[config.family]],
        "dtype": config.dtype,
        "initializer_range": 0.02,
        "model_type": config.family,
        "text_config": _text_to_json(config),
        "tie_word_embeddings": True,
        "transformers_version": TRANSFORMERS_VERSION,
        **config.media_ids,
    }
    if stop_ids:
        top["eos_token_id"] = list(stop_ids)
    if config.vision is not None:
        top["vision_config"] = {**vision_to_json(config.vision), "dtype": config.dtype}
        top["vision_soft_tokens_per_image"] = config.vision.default_output_length
    if config.family == "diffusion_gemma":
        top["canvas_length"] = config.canvas_length
        if config.long_reply is not None:
            top["long_reply"] = asdict(config.long_reply)
    return top


def _text_to_json(config: ModelConfig) -> dict[str, Any]:
    text: dict[str, Any] = {
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": config.bos_token_id,
        "dtype": config.dtype,
        "eos_token_id": 1,
        "final_logit_softcapping": config.final_logit_softcapping,
        "global_head_dim": config.global_head_dim,
        "hidden_activation": "gelu_pytorch_tanh",
        "initializer_range": 0.02,
        "layer_types": list(config.layer_types),
        "model_type": f"{config.family}_text",
        "num_hidden_layers": config.num_hidden_layers,
        "num_global_key_value_heads": config.num_global_key_value_heads,
        "pad_token_id": config.pad_token_id,
        "rope_parameters": {
            FULL: {
                "partial_rotary_factor": config.full_rotary_fraction,
                "rope_theta": config.full_rope_theta,
                "rope_type": "proportional",
            },
            SLIDING: {"rope_theta": config.sliding_rope_theta, "rope_type": "default"},
        },
        "tie_word_embeddings": True,
        "use_bidirectional_attention": None if config.image_attention == "causal" else "vision",
    }
    same = """head_dim hidden_size intermediate_size max_position_embeddings moe_intermediate_size
        num_attention_heads num_experts num_key_value_heads rms_norm_eps sliding_window
        top_k_experts vocab_size"""
    text |= {key: getattr(config, key) for key in same.split()}
    if config.family == "gemma4":
        text |= {"attention_k_eq_v": True, "enable_moe_block": True}
        text |= {"hidden_size_per_layer_input": 0, "num_kv_shared_layers": 0}
    return text


def generation_config_to_json(config: GenerationConfig) -> dict[str, Any]:
    """The generation defaults as `generation_config.json` spells them."""
    names = (name for name in GenerationConfig.__slots__ if name not in OWN_GENERATION)
    raw = {name: getattr(config, name) for name in names} | own_generation_to_json(config)
    raw["eos_token_id"] = list(raw.pop("stop_ids"))
    bound = raw.pop("entropy_bound")
    raw["sampler_config"] = {"_cls_name": "EntropyBoundSamplerConfig", "entropy_bound": bound}
    return raw
