"""The architecture of a model and its generation defaults, checked on construction."""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal, get_args

from dgemma.config.vision_config import MAX_SIZE, VisionConfig
from dgemma.errors import ConfigError

Family = Literal["diffusion_gemma", "gemma4"]
LayerType = Literal["sliding_attention", "full_attention"]
# Layers in which the tokens of one picture see each other: Google's rule, the rule of transformers'
# `generate`, or none (decision 040).
ImageAttention = Literal["sliding", "all", "causal"]

SLIDING: LayerType = "sliding_attention"
FULL: LayerType = "full_attention"

Mode = Literal["diffusion", "ar", "hybrid", "auto"]  # of a reply
MODES: tuple[Mode, ...] = get_args(Mode)
DEFAULT_MODE: Mode = "diffusion"
WHOLE_MODES = MODES[:2]  # one mode for all of a reply
Preset = Literal["quality", "balanced", "fast"]  # a name for values of the sampler
PRESETS: tuple[Preset, ...] = get_args(Preset)
# Where a checkpoint does not define a preset: its steps by this factor, its entropy bound times it.
PRESET_FACTORS: dict[str, int] = {"quality": 1, "balanced": 2, "fast": 4}
ARCHITECTURES: dict[Family, str] = {
    "diffusion_gemma": "DiffusionGemmaForBlockDiffusion",
    "gemma4": "Gemma4ForConditionalGeneration",
}


# Largest sizes that a config may state, far above any model: what lies beyond is damage, and would
# otherwise fail by an allocation. Sizes that are not listed have MAX_SIZE.
MAX_SIZES = {
    "vocab_size": 1 << 24,
    "sliding_window": 1 << 27,
    "max_position_embeddings": 1 << 27,
    "canvas_length": 1 << 14,
}
MAX_LAYERS = 4096
MAX_STEPS = 65_536  # of a canvas
MAX_STOP_IDS = 4096
MAX_NUMBER = 1e9  # of a temperature, a bound or a threshold
DTYPES = ("bfloat16", "float16", "float32")


def _is_number(value: object, low: float, high: float) -> bool:
    """True for a plain number above `low` and at most `high`; NaN is neither."""
    return type(value) in (int, float) and low < value <= high  # type: ignore[operator]


def _is_whole(value: object, low: int, high: int) -> bool:
    return type(value) is int and low <= value <= high


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionShape:
    """Head counts, head size, window and RoPE of one attention layer type."""

    num_kv_heads: int
    head_dim: int
    window: int | None  # tokens a causal query attends to, itself included; None: all
    rope_theta: float
    rotary_fraction: float  # of the head dimension that rotates; the rest has no position
    has_value: bool  # False: V is the raw K projection


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """The architecture of one Gemma stack. Field names are those of the released file."""

    family: Family = "diffusion_gemma"
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    moe_intermediate_size: int
    num_experts: int
    top_k_experts: int
    num_attention_heads: int
    num_key_value_heads: int
    num_global_key_value_heads: int
    head_dim: int
    global_head_dim: int
    layer_types: tuple[LayerType, ...]
    sliding_window: int
    sliding_rope_theta: float = 10_000.0
    full_rope_theta: float = 1_000_000.0
    full_rotary_fraction: float = 0.25
    rms_norm_eps: float = 1e-6
    final_logit_softcapping: float | None = 30.0
    max_position_embeddings: int = 262_144
    canvas_length: int = 256
    long_reply: "LongReply | None" = None  # None: long replies use the same defaults
    pad_token_id: int = 0
    bos_token_id: int = 2
    dtype: str = "bfloat16"
    vision: VisionConfig | None = None  # None: the checkpoint's family without a tower
    image_attention: ImageAttention = "sliding"
    media_ids: Mapping[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        sizes = [f.name for f in fields(self) if f.type is int and not f.name.endswith("_token_id")]
        bad = {
            name: value
            for name in sizes
            if not _is_whole(value := getattr(self, name), 1, MAX_SIZES.get(name, MAX_SIZE))
        }
        if bad:
            limits = ", ".join(f"{name} {MAX_SIZES.get(name, MAX_SIZE):,}" for name in bad)
            raise ConfigError(
                f"sizes must be positive whole numbers, at most {limits}, but the config says "
                f"{str(bad)[:200]}"
            )
        self._check_heads()
        self._check_layers()
        self._check_numbers()
        self._check_ids()
        if self.long_reply is not None:
            self.long_reply.check(self.canvas_length)

    def _check_heads(self) -> None:
        for kv_heads in (self.num_key_value_heads, self.num_global_key_value_heads):
            if self.num_attention_heads % kv_heads:
                raise ConfigError(
                    f"{self.num_attention_heads} attention heads cannot share {kv_heads} "
                    "key/value heads: the first must be a multiple of the second"
                )
        if self.head_dim % 2 or self.global_head_dim % 2:
            raise ConfigError("head sizes must be even, since rotary positions turn pairs")
        if self.top_k_experts > self.num_experts:
            raise ConfigError(f"top_k_experts {self.top_k_experts} exceeds {self.num_experts}")

    def _check_layers(self) -> None:
        unknown = set(self.layer_types) - {SLIDING, FULL}
        if len(self.layer_types) > MAX_LAYERS:
            raise ConfigError(f"{len(self.layer_types)} layers; at most {MAX_LAYERS} are allowed")
        if unknown or not self.layer_types:
            raise ConfigError(f"layer_types may hold {SLIDING} and {FULL}, not {sorted(unknown)}")
        if self.layer_types[-1] != FULL:
            raise ConfigError(f"the last layer must be {FULL}: the reference silently forces it")

    def _check_numbers(self) -> None:
        ranges: dict[str, tuple[float, float]] = {
            "rms_norm_eps": (0.0, 1.0),
            "sliding_rope_theta": (0.0, 1e12),
            "full_rope_theta": (0.0, 1e12),
            "full_rotary_fraction": (0.0, 1.0),
        }
        if self.final_logit_softcapping is not None:
            ranges["final_logit_softcapping"] = (0.0, 1e6)
        for name, (low, high) in ranges.items():
            value = getattr(self, name)
            if not _is_number(value, low, high):
                raise ConfigError(
                    f"{name} is {value!r}; it must be a number above {low:g}, at most {high:g}"
                )
        if self.dtype not in DTYPES:
            raise ConfigError(f"dtype is {self.dtype!r}; it must be one of {', '.join(DTYPES)}")

    def _check_ids(self) -> None:
        ids = {"pad_token_id": self.pad_token_id, "bos_token_id": self.bos_token_id}
        check_ids(ids, self.vocab_size)
        # The reference writes the released ids of images beside any vocabulary.
        check_ids(self.media_ids, MAX_SIZES["vocab_size"])

    @property
    def num_hidden_layers(self) -> int:
        return len(self.layer_types)

    @property
    def can_denoise(self) -> bool:
        """True if the checkpoint has the self-conditioning block; Gemma 4 decodes by AR only."""
        return self.family == "diffusion_gemma"

    def attention(self, layer: int) -> AttentionShape:
        if self.layer_types[layer] == SLIDING:
            return AttentionShape(
                num_kv_heads=self.num_key_value_heads,
                head_dim=self.head_dim,
                window=self.sliding_window,
                rope_theta=self.sliding_rope_theta,
                rotary_fraction=1.0,
                has_value=True,
            )
        return AttentionShape(
            num_kv_heads=self.num_global_key_value_heads,
            head_dim=self.global_head_dim,
            window=None,
            rope_theta=self.full_rope_theta,
            rotary_fraction=self.full_rotary_fraction,
            has_value=False,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class LongReply:
    """Canvas length and sampler defaults for replies that do not end in one canvas.

    Field names are those of `generation_config.json`; `reach` belongs to the sampler's rule.
    """

    canvas_length: int
    entropy_bound: float
    t_max: float
    t_min: float
    max_denoising_steps: int
    reach: int = 0  # minimum distance of uncertain positions accepted in one step; 0: none
    # First tokens of a canvas of noise that the causal mode verifies, drawing at t_max; 0: canvases
    # are denoised and committed. With a draft, steps and entropy bound do not matter.
    num_speculative_tokens: int = 0

    def applied(self, generation: "GenerationConfig") -> "GenerationConfig":
        """Return generation defaults with these values."""
        own = ("canvas_length", "reach", "num_speculative_tokens")
        same = [name for name in self.__slots__ if name not in own]
        return replace(generation, **{name: getattr(self, name) for name in same})

    def check(self, max_canvas: int) -> None:
        """Refuse values that a model with canvases of `max_canvas` tokens cannot run."""
        for name in ("canvas_length", "max_denoising_steps", "reach", "num_speculative_tokens"):
            _require(type(getattr(self, name)) is int, name, getattr(self, name), "a whole number")
        for name in ("entropy_bound", "t_max", "t_min"):
            value = getattr(self, name)
            _require(_is_number(value, 0, MAX_NUMBER), name, value, "a number above 0")
        is_within = 1 <= self.canvas_length <= max_canvas
        _require(
            is_within, "canvas_length", self.canvas_length, f"from 1 to the model's, {max_canvas}"
        )
        steps = self.max_denoising_steps
        allowed = f"from 1 to {MAX_STEPS}"
        _require(1 <= steps <= MAX_STEPS, "max_denoising_steps", steps, allowed)
        for name, most in {
            "reach": max_canvas,
            "num_speculative_tokens": self.canvas_length,
        }.items():
            value = getattr(self, name)
            _require(0 <= value <= most, name, value, f"from 0 to {most}")
        _require(self.t_max >= self.t_min, "t_max", self.t_max, f"t_min, {self.t_min}, or more")


def _faster_values(values: "LongReply | GenerationConfig", factor: int) -> dict[str, Any]:
    """Divide the steps of a canvas by a factor, and multiply the entropy bound by it."""
    return {
        "max_denoising_steps": max(1, values.max_denoising_steps // factor),
        "entropy_bound": values.entropy_bound * factor,
    }


def check_ids(ids: Mapping[str, object], vocab_size: int) -> None:
    """Refuse token ids that the vocabulary does not have, by the names of their keys."""
    for name, token in ids.items():
        if not _is_whole(token, 0, vocab_size - 1):
            raise ConfigError(
                f"{name} is {token!r}; the vocabulary has the ids 0 to {vocab_size - 1}"
            )


def _require(holds: bool, name: str, value: object, allowed: str) -> None:
    if not holds:
        raise ConfigError(f"long_reply: {name} is {value!r}; it must be {allowed}")


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationConfig:
    """Generation defaults of the released model."""

    max_denoising_steps: int = 48
    t_max: float = 0.8
    t_min: float = 0.4
    entropy_bound: float = 0.1
    stability_threshold: int = 1
    confidence_threshold: float = 0.005
    max_new_tokens: int = 256
    stop_ids: tuple[int, ...] = (1,)
    pad_token_id: int = 0
    long_reply: LongReply | None = None  # None: that of config.json
    presets: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)  # changes by name

    def __post_init__(self) -> None:
        limits = {
            "max_denoising_steps": (1, MAX_STEPS),
            "stability_threshold": (0, MAX_STEPS),
            "max_new_tokens": (1, MAX_SIZES["max_position_embeddings"]),
        }
        for name, (least, most) in limits.items():
            if not _is_whole(value := getattr(self, name), least, most):
                raise ConfigError(
                    f"{name} is {value!r}; it must be a whole number from {least} to {most}"
                )
        for name in ("t_max", "t_min", "entropy_bound", "confidence_threshold"):
            if not _is_number(value := getattr(self, name), -1.0, MAX_NUMBER) or value < 0:
                raise ConfigError(
                    f"{name} is {value!r}; it must be a number from 0 to {MAX_NUMBER:g}"
                )
        if type(self.pad_token_id) is not int:
            raise ConfigError(f"pad_token_id is {self.pad_token_id!r}; it must be a token id")
        is_short = 1 <= len(self.stop_ids) <= MAX_STOP_IDS
        if not is_short or any(type(token) is not int for token in self.stop_ids):
            raise ConfigError(
                f"eos_token_id is {str(self.stop_ids)[:80]}; it must be one id or a list of ids"
            )
        if self.long_reply is not None:
            self.long_reply.check(MAX_SIZES["canvas_length"])
        for name in self.presets:
            self.with_preset(name)

    def with_preset(self, name: str, long_reply: LongReply | None = None) -> "GenerationConfig":
        """Return these defaults with the values of a preset, which has no others.

        `long_reply`: that of config.json, which a preset that is not defined changes as well.
        """
        if name not in PRESETS:
            raise ConfigError(f"preset {name!r} is not known; use {', '.join(PRESETS)}")
        factor = PRESET_FACTORS[name]
        values = self.presets.get(name)
        if values is None:
            long = self.long_reply or long_reply
            values = _faster_values(self, factor)
            if long is not None:
                values["long_reply"] = replace(long, **_faster_values(long, factor))
        return replace(self, **{**values, "presets": {}})

    def check_vocabulary(self, vocab_size: int) -> None:
        """Refuse stop and padding ids that a vocabulary does not have."""
        stops = {f"eos_token_id {number}": token for number, token in enumerate(self.stop_ids)}
        check_ids({"pad_token_id": self.pad_token_id, **stops}, vocab_size)


# The released google/diffusiongemma-26B-A4B-it.
RELEASED = ModelConfig(
    vocab_size=262_144,
    hidden_size=2816,
    intermediate_size=2112,
    moe_intermediate_size=704,
    num_experts=128,
    top_k_experts=8,
    num_attention_heads=16,
    num_key_value_heads=8,
    num_global_key_value_heads=2,
    head_dim=256,
    global_head_dim=512,
    layer_types=((SLIDING,) * 5 + (FULL,)) * 5,
    sliding_window=1024,
)
