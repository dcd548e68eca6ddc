"""Model and generation configs from the metadata of a GGUF file.

Every key is used, checked against the one supported value, or ignored for a stated reason. An
unknown key of the architecture is refused, since it may change what the model computes; other
unknown keys are ignored and reported. Floats are stored in 32 bits and read as the shortest decimal
with that value, so that 0.4 is 0.4 again.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from dgemma.config import (
    FULL,
    SLIDING,
    Family,
    GenerationConfig,
    LayerType,
    LongReply,
    ModelConfig,
    read_own_generation,
)
from dgemma.config.model_config import MAX_LAYERS
from dgemma.config.strict_json import parse_json
from dgemma.errors import CheckpointError, ConfigError
from dgemma.text.control_tokens import TOOL_RESPONSE, TURN_END
from dgemma.weights.files import listing
from dgemma.weights.gguf import GGUFFile
from dgemma.weights.names import ALIASES, FAMILY_OF, ROPE_FREQS, TOKEN_EMBD

UNROTATED = 1e29  # a larger divisor of an angle means no rotation
DEFAULT_CANVAS = 256
# Fields of ModelConfig by metadata key, without the architecture prefix.
SIZES = {
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "expert_count": "num_experts",
    "expert_used_count": "top_k_experts",
    "expert_feed_forward_length": "moe_intermediate_size",
    "attention.key_length": "global_head_dim",
    "attention.key_length_swa": "head_dim",
    "attention.sliding_window": "sliding_window",
}
NUMBERS = {
    "rope.freq_base": "full_rope_theta",
    "rope.freq_base_swa": "sliding_rope_theta",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
}
BLOCK_COUNT, KV_HEADS = "block_count", "attention.head_count_kv"
PATTERN, SOFTCAP = "attention.sliding_window_pattern", "final_logit_softcapping"
# Keys that must equal another key if present.
EQUAL = {
    "attention.value_length": "attention.key_length",
    "attention.value_length_swa": "attention.key_length_swa",
    "rope.dimension_count": "attention.key_length",
    "rope.dimension_count_swa": "attention.key_length_swa",
}
CAUSAL = "attention.causal"
# Keys with one supported value each; absent means that value.
FIXED: dict[str, tuple[Any, str]] = {
    "attention.shared_kv_layers": (0, "layers that share keys and values"),
    "embedding_length_per_layer_input": (0, "per-layer embeddings"),
    "expert_gating_func": (1, "a router that is not a softmax"),
    "expert_shared_count": (0, "shared experts"),
    "rope.scaling.type": ("none", "scaled rotary positions"),
}
VOCAB_SIZE = "vocab_size"  # the rows of the token table count
CANVAS = "diffusion.canvas_length"
SAMPLER: dict[str, tuple[str, type]] = {
    "diffusion.eb_max_steps": ("max_denoising_steps", int),
    "diffusion.eb_t_min": ("t_min", float),
    "diffusion.eb_t_max": ("t_max", float),
    "diffusion.eb_entropy_bound": ("entropy_bound", float),
    "diffusion.eb_stability_threshold": ("stability_threshold", int),
    "diffusion.eb_confidence_threshold": ("confidence_threshold", float),
}
# Keys of this package: defaults of models trained with it.
LONG_REPLY = "dgemma.long_reply."
OWN_GENERATION = "dgemma.generation"  # JSON, as in generation_config.json
STOP_IDS, MAX_NEW_TOKENS = "dgemma.stop_ids", "dgemma.max_new_tokens"
IGNORED = {
    "general.": "who made the file, from what, and which mix of types it is",
    "quantize.imatrix.": "the texts by which weights were quantized",
    "split.": "read with the container",
    "tokenizer.": "read with the tokenizer",
}

OTHER_FILES = {
    "adapter": "a LoRA adapter",
    "mmproj": "an image tower (mmproj)",
    "vocab": "a vocabulary",
    "imatrix": "an importance matrix",
}
TOWER = (
    "an image tower (mmproj), not a text model; give the text model's file, and this one by "
    "--vision"
)
OTHER_DIFFUSION = "another diffusion language model"
DRAFT_MODEL = "a draft model for speculative decoding"
OTHER_MODELS = {
    "diffusiongemma": "a DiffusionGemma under names of its own ('diffusiongemma'); convert the "
    "release with llama.cpp's converter",
    "clip": TOWER,
    "mmproj": TOWER,
    "dream": OTHER_DIFFUSION,
    "llada": OTHER_DIFFUSION,
    "llada-moe": OTHER_DIFFUSION,
    "rnd1": OTHER_DIFFUSION,
    "gemma4-assistant": DRAFT_MODEL,
    "dflash": DRAFT_MODEL,
    "eagle3": DRAFT_MODEL,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class GGUFConfig:
    """The configs of a file, and notes on what was assumed or ignored."""

    config: ModelConfig
    generation: GenerationConfig
    notes: tuple[str, ...]


def read_gguf_config(file: GGUFFile) -> GGUFConfig:
    """Read the configs of a file; refuses what is not supported."""
    family = check_architecture(file)
    keys = GGUFKeys(file)
    notes: list[str] = []
    try:
        config = _model(keys, family, notes)
        generation = _generation(keys, family, notes)
    except ConfigError as error:
        raise CheckpointError(f"{file.path}: {error}") from None
    notes += keys.leftover_notes()
    return GGUFConfig(config=config, generation=generation, notes=tuple(notes))


def check_architecture(file: GGUFFile) -> Family:
    """Return the model family of a file; refuses other architectures by name."""
    name = file.value("general.architecture", str)
    kind = file.metadata.get("general.type", "model")
    if name in FAMILY_OF and kind == "model":
        return FAMILY_OF[name]
    if name in FAMILY_OF:
        what = OTHER_FILES.get(str(kind), f"a file of type {kind!r}")
        raise CheckpointError(f"{file.path} is {what}, not a model; give the model's file")
    other = f"another Gemma ({name!r})" if name.startswith("gemma") else f"a {name!r} model"
    raise CheckpointError(
        f"{file.path} holds {OTHER_MODELS.get(name, other)}; this build runs the architectures "
        f"{' and '.join(FAMILY_OF)}"
    )


class GGUFKeys:
    """The metadata of a file; records which keys were read."""

    def __init__(self, file: GGUFFile) -> None:
        self.file, self.path = file, file.path
        self.prefix = file.value("general.architecture", str) + "."
        self.used: set[str] = set()

    def has(self, key: str) -> bool:
        return key in self.file.metadata

    def get(self, key: str, kind: type) -> Any:
        self.used.add(key)
        value: Any = self.file.value(key, kind)
        return shortest(value) if kind is float else value

    def of_model(self, key: str, kind: type) -> Any:
        return self.get(self.prefix + key, kind)

    def size(self, key: str) -> int:
        """Read a number that some models store per layer; it must not vary here."""
        value = self.file.metadata.get(self.prefix + key)
        if isinstance(value, list):
            self.used.add(self.prefix + key)
            if len(set(value)) != 1 or type(value[0]) is not int:
                raise CheckpointError(
                    f"{self.path}: {self.prefix}{key} varies from layer to layer ({value[:8]}); "
                    "this build runs models in which it is constant"
                )
            return int(value[0])
        return int(self.of_model(key, int))

    def per_layer(self, key: str, count: int, kind: type) -> list[Any]:
        """Read a list with a value per layer; a single number applies to all."""
        value = self.file.metadata.get(self.prefix + key)
        self.used.add(self.prefix + key)
        values = [value] * count if type(value) is kind else value
        if (
            not isinstance(values, list)
            or len(values) != count
            or any(type(item) is not kind for item in values)
        ):
            stated = "missing" if value is None else str(value)[:60]
            raise CheckpointError(
                f"{self.path}: {self.prefix}{key} is {stated}; it should be a list of {count} "
                f"{kind.__name__}s, one for each layer"
            )
        return values

    def leftover_notes(self) -> list[str]:
        """Refuse unknown keys of the architecture; return notes on other unused keys."""
        left = [key for key in self.file.metadata if key not in self.used]
        unknown = [key for key in left if key.startswith(self.prefix)]
        if unknown:
            raise CheckpointError(
                f"{self.path}: this build does not know {listing(unknown)}; the model may need a "
                "newer dgemma"
            )
        ignored = [key for key in left if not key.startswith(tuple(IGNORED))]
        return [f"ignored keys: {listing(ignored, limit=8)}"] if ignored else []


def shortest(value: float) -> float:
    """Return the shortest decimal that a float32 holds."""
    return float(str(np.float32(value)))


def _model(keys: GGUFKeys, family: Family, notes: list[str]) -> ModelConfig:
    if not keys.has(keys.prefix + "expert_count"):
        raise CheckpointError(
            f"{keys.path} is a {keys.prefix[:-1]} model without experts (no "
            f"{keys.prefix}expert_count); this build runs the 26B-A4B mixture of experts"
        )
    count = int(keys.of_model(BLOCK_COUNT, int))
    if count > MAX_LAYERS:
        raise ConfigError(
            f"{keys.prefix}{BLOCK_COUNT} is {count}; at most {MAX_LAYERS} are allowed"
        )
    is_sliding = keys.per_layer(PATTERN, count, bool)
    kv_heads = keys.per_layer(KV_HEADS, count, int)
    sliding_heads = _constant(keys, kv_heads, is_sliding, SLIDING)
    full_heads = _constant(keys, kv_heads, is_sliding, FULL)
    sizes: dict[str, Any] = {field: keys.size(key) for key, field in SIZES.items()}
    _check_fixed(keys, family)
    softcap = keys.prefix + SOFTCAP
    return ModelConfig(
        family=family,
        layer_types=tuple(SLIDING if sliding else FULL for sliding in is_sliding),
        num_key_value_heads=sliding_heads or full_heads,
        num_global_key_value_heads=full_heads or sliding_heads,
        vocab_size=_vocab_size(keys),
        full_rotary_fraction=_rotary_fraction(keys.file, sizes["global_head_dim"]),
        final_logit_softcapping=keys.get(softcap, float) if keys.has(softcap) else None,
        canvas_length=_canvas_length(keys, family, notes),
        long_reply=_long_reply(keys),
        bos_token_id=keys.get("tokenizer.ggml.bos_token_id", int),
        pad_token_id=_optional(keys, "tokenizer.ggml.padding_token_id", 0),
        dtype="float32",
        **sizes,
        **{field: keys.of_model(key, float) for key, field in NUMBERS.items()},
    )


def _constant(
    keys: GGUFKeys, kv_heads: list[int], is_sliding: list[bool], layer_type: LayerType
) -> int:
    """Return the number of key/value heads of a layer type, constant over its layers; 0: none."""
    pairs = zip(kv_heads, is_sliding, strict=True)
    heads = sorted({count for count, sliding in pairs if sliding is (layer_type == SLIDING)})
    if len(heads) > 1:
        raise CheckpointError(
            f"{keys.path}: {keys.prefix}{KV_HEADS} gives the {layer_type} layers {heads} heads; "
            "this build runs models in which it is constant over a layer type"
        )
    return heads[0] if heads else 0


def _check_fixed(keys: GGUFKeys, family: Family) -> None:
    for key, other in EQUAL.items():
        if keys.has(keys.prefix + key) and keys.size(key) != keys.size(other):
            raise CheckpointError(
                f"{keys.path}: {keys.prefix}{key} is {keys.size(key)}; this build needs it equal "
                f"to {keys.prefix}{other}, {keys.size(other)}"
            )
    is_causal = family == "gemma4"
    fixed = FIXED | {CAUSAL: (is_causal, "attention of the other kind")}
    for key, (value, what) in fixed.items():
        keys.used.add(keys.prefix + key)
        stated = keys.file.metadata.get(keys.prefix + key, value)
        if stated != value:
            raise CheckpointError(
                f"{keys.path}: {keys.prefix}{key} is {stated!r} ({what}); this build needs "
                f"{value!r}"
            )


def _vocab_size(keys: GGUFKeys) -> int:
    table = keys.file.tensors.get(TOKEN_EMBD)
    if table is None or len(table.shape) != 2:
        raise CheckpointError(f"{keys.path} has no matrix {TOKEN_EMBD}; the model is incomplete")
    stated = keys.prefix + VOCAB_SIZE
    if keys.has(stated) and keys.get(stated, int) != table.shape[0]:
        raise CheckpointError(
            f"{keys.path}: {stated} is {keys.get(stated, int)}, and {TOKEN_EMBD} has "
            f"{table.shape[0]} rows"
        )
    return table.shape[0]


def _rotary_fraction(file: GGUFFile, head_dim: int) -> float:
    """Read the rotated fraction of full layers: divisors are 1, then practically infinite."""
    if ROPE_FREQS not in file.tensors:
        raise CheckpointError(
            f"{file.path} has no {ROPE_FREQS}, which says how much of a full layer's heads rotates"
        )
    divisors = file.dequantize(ROPE_FREQS).flatten()
    rotating = int((divisors == 1).sum())
    is_known = (
        len(divisors) == head_dim // 2
        and rotating > 0
        and bool((divisors[:rotating] == 1).all() and (divisors[rotating:] > UNROTATED).all())
    )
    if not is_known:
        raise CheckpointError(
            f"{file.path}: {ROPE_FREQS} should hold {head_dim // 2} values, first 1 and then "
            f"1e30, and does not ({len(divisors)} values, {rotating} of them 1)"
        )
    return rotating / len(divisors)


def _canvas_length(keys: GGUFKeys, family: Family, notes: list[str]) -> int:
    if family != "diffusion_gemma":
        return DEFAULT_CANVAS
    if keys.has(CANVAS):
        return int(keys.get(CANVAS, int))
    if any(alias in keys.file.tensors for alias in ALIASES.values()):
        notes.append(f"no {CANVAS}: canvases of {DEFAULT_CANVAS} tokens, as released")
        return DEFAULT_CANVAS
    raise CheckpointError(
        f"{keys.path}: {CANVAS} is missing; convert the model again with a converter that writes it"
    )


def _long_reply(keys: GGUFKeys) -> LongReply | None:
    if not any(key.startswith(LONG_REPLY) for key in keys.file.metadata):
        return None
    kinds = {field.name: field.type for field in fields(LongReply)}
    return LongReply(
        **{name: keys.get(LONG_REPLY + name, kind) for name, kind in kinds.items()}  # type: ignore[arg-type]
    )


def _optional(keys: GGUFKeys, key: str, default: int) -> int:
    return int(keys.get(key, int)) if keys.has(key) else default


def _generation(keys: GGUFKeys, family: Family, notes: list[str]) -> GenerationConfig:
    values: dict[str, Any] = {
        field: keys.get(key, kind) for key, (field, kind) in SAMPLER.items() if keys.has(key)
    }
    missing = [key for key, (field, _) in SAMPLER.items() if field not in values]
    if missing and family == "diffusion_gemma":
        default = GenerationConfig()
        which = "diffusion.eb_*" if len(missing) == len(SAMPLER) else listing(missing)
        notes.append(
            f"no sampler defaults ({which}): the released ones are used, "
            f"{default.max_denoising_steps} steps, temperature {default.t_max} to {default.t_min}, "
            f"entropy bound {default.entropy_bound}"
        )
    if keys.has(MAX_NEW_TOKENS):
        values["max_new_tokens"] = keys.get(MAX_NEW_TOKENS, int)
    if keys.has(OWN_GENERATION):
        raw = parse_json(keys.get(OWN_GENERATION, str).encode(), OWN_GENERATION)
        values |= read_own_generation(raw, OWN_GENERATION)
    stop_ids = stop_ids_of(keys.file.metadata)
    if keys.has(STOP_IDS):
        stop_ids = tuple(keys.get(STOP_IDS, list))
    pad = _optional(keys, "tokenizer.ggml.padding_token_id", 0)
    return GenerationConfig(**values, stop_ids=stop_ids, pad_token_id=pad)


def stop_ids_of(metadata: Mapping[str, Any]) -> tuple[int, ...]:
    """Return the ids that end a reply: the file stores <eos>, others are found by their text."""
    tokens = metadata.get("tokenizer.ggml.tokens", [])
    by_text = [tokens.index(name) for name in (TURN_END, TOOL_RESPONSE) if name in tokens]
    keys = ("eos", "eot", "eom")
    stated = [metadata.get(f"tokenizer.ggml.{key}_token_id") for key in keys]
    ids = [index for index in stated[:1] + by_text + stated[1:] if isinstance(index, int)]
    if not ids:
        raise ConfigError("tokenizer.ggml.eos_token_id is missing: replies would not end")
    return tuple(dict.fromkeys(ids))
