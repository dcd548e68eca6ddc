"""Strict reading of `config.json` and `generation_config.json`.

Every key is either used, or checked against the one value this build supports, or named below as
ignored with the reason. Anything else is refused by name: a new architecture flag must not vanish.
"""

import json
from collections.abc import Mapping
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any, cast

from dgemma.config.shape import (
    ARCHITECTURES,
    FULL,
    SLIDING,
    Family,
    GenerationConfig,
    LayerType,
    LongReply,
    ModelConfig,
)
from dgemma.errors import CheckpointError, ConfigError

# What the reference classes assume when the key is absent: they write no key for their default.
SOFTCAP_WHEN_ABSENT: dict[Family, float | None] = {"diffusion_gemma": 30.0, "gemma4": None}

IGNORED_TOP: dict[str, str] = {
    "architectures": "model_type already names the architecture",
    "eos_token_id": "read with the generation defaults, where they name no stop ids",
    "quantization_config": "read with the weights, whose files it describes",
    "initializer_range": "only used to draw random weights",
    "transformers_version": "who wrote the file",
    "vision_soft_tokens_per_image": "belongs to the image processor",
    "audio_config": "audio is not part of this build",
    "audio_token_id": "audio is not part of this build",
    "boa_token_id": "audio is not part of this build",
    "eoa_token_id": "audio is not part of this build",
    "eoa_token_index": "audio is not part of this build",
    "video_token_id": "belongs to the image processor",
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
VISION_KEYS = frozenset(
    """_name_or_path architectures attention_bias attention_dropout chunk_size_feed_forward
    default_output_length dtype global_head_dim head_dim hidden_activation hidden_size id2label
    initializer_range intermediate_size is_encoder_decoder label2id max_position_embeddings
    model_type num_attention_heads num_hidden_layers num_key_value_heads output_attentions
    output_hidden_states patch_size pooling_kernel_size position_embedding_size problem_type
    return_dict rms_norm_eps rope_parameters standardize use_clipped_linears""".split()
)
IGNORED_GENERATION: dict[str, str] = {
    "transformers_version": "who wrote the file",
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
    """Read a file of that form, whatever it is called."""
    return read_config(_read_json(path), str(path))


def load_generation_config(directory: Path) -> GenerationConfig:
    """Read `generation_config.json`; what it does not say is as in the released one.

    Stop ids that it does not name are those of `config.json`.
    """
    path = directory / "generation_config.json"
    raw = _read_json(path) if path.exists() else {}
    stops = raw.get("eos_token_id")
    if stops is None:
        stops = _read_json(directory / "config.json").get("eos_token_id")
    return read_generation_config({**raw, "eos_token_id": stops}, str(path))


def read_config(raw: Mapping[str, Any], source: str = "config") -> ModelConfig:
    """Turn the parsed `config.json` into a ModelConfig, refusing what is not understood."""
    family = raw.get("model_type")
    if family not in ARCHITECTURES:
        raise ConfigError(
            f"{source}: model_type is {family!r}; this build runs {' and '.join(ARCHITECTURES)}"
        )
    _refuse_unknown(raw, TOP_KEYS | IGNORED_TOP.keys(), source)
    if raw.get("tie_word_embeddings", True) is not True:
        raise ConfigError(f"{source}: tie_word_embeddings must be true")
    if raw.get("audio_config") is not None:
        raise ConfigError(f"{source}: audio_config is set, but this build has no audio")
    text = _need(raw, "text_config", source)
    vision = raw.get("vision_config")
    if vision is not None:
        _refuse_unknown(vision, VISION_KEYS, f"{source}: vision_config")
    media = ("boi_token_id", "eoi_token_id", "image_token_id")
    return _read_text(
        cast(Family, family),
        text,
        f"{source}: text_config",
        canvas_length=raw.get("canvas_length", 256),
        long_reply=_long_reply(raw.get("long_reply"), source),
        dtype=raw.get("dtype") or text.get("dtype") or "float32",
        vision=vision,
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
    return ModelConfig(
        family=family,
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
    """Head size and key/value heads of full layers, from either spelling in the wild."""
    if "per_layer_config" not in text:
        kv_heads = text.get("num_global_key_value_heads") or text.get("num_key_value_heads")
        return _need(text, "global_head_dim", source), kv_heads or 0
    full = [layer for layer, kind in enumerate(layer_types) if kind == FULL]
    overrides: dict[int, Any] = {int(key): value for key, value in text["per_layer_config"].items()}
    shapes = [overrides.get(layer, {}) for layer in full]
    if set(overrides) - set(full) or any(shape != shapes[0] for shape in shapes):
        raise ConfigError(
            f"{source}: per_layer_config may only describe the full_attention layers {full}, all "
            f"alike; it describes {sorted(overrides)}"
        )
    _refuse_unknown(shapes[0], frozenset({"head_dim", "num_key_value_heads"}), source)
    kv_heads = shapes[0].get("num_key_value_heads", _need(text, "num_key_value_heads", source))
    return shapes[0].get("head_dim", _need(text, "head_dim", source)), kv_heads


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
        "sliding_rope_theta": float(_need(sliding, "rope_theta", source)),
        "full_rope_theta": float(_need(full, "rope_theta", source)),
        "full_rotary_fraction": float(full.get("partial_rotary_factor", 1.0)),
    }


def read_generation_config(raw: Mapping[str, Any], source: str = "config") -> GenerationConfig:
    """Read the released generation defaults; null means "not set" there, so our default holds."""
    plain = set(GenerationConfig.__slots__) - {"entropy_bound", "stop_ids"}
    known = plain | {"sampler_config", "eos_token_id"} | IGNORED_GENERATION.keys()
    _refuse_unknown(raw, known, source)
    values = {key: raw[key] for key in plain if raw.get(key) is not None}
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


def _read_json(path: Path) -> Mapping[str, Any]:
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(f"{path} does not exist; a checkpoint needs one") from None
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise CheckpointError(f"{path} is not valid JSON: {error}") from None
    if not isinstance(raw, dict):
        raise CheckpointError(f"{path} must hold a JSON object, not {type(raw).__name__}")
    return raw


def _refuse_unknown(raw: Mapping[str, Any], known: frozenset[str] | set[str], source: str) -> None:
    if not isinstance(raw, Mapping):
        raise ConfigError(f"{source} must be an object, not a {type(raw).__name__}")
    unknown = sorted(raw.keys() - known)
    if unknown:
        raise ConfigError(
            f"{source}: this build does not know {', '.join(unknown)}; the model may need a newer "
            "dgemma"
        )


def _need(raw: Mapping[str, Any], key: str, source: str) -> Any:
    value = raw.get(key)
    if value is None:
        raise ConfigError(f"{source}: {key} is missing")
    return value
