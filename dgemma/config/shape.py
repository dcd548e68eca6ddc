"""The shape of a model and its defaults for generating, checked as they are made."""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from math import inf
from typing import Any, Literal

from dgemma.errors import ConfigError

Family = Literal["diffusion_gemma", "gemma4"]
LayerType = Literal["sliding_attention", "full_attention"]

SLIDING: LayerType = "sliding_attention"
FULL: LayerType = "full_attention"

ARCHITECTURES: dict[Family, str] = {
    "diffusion_gemma": "DiffusionGemmaForBlockDiffusion",
    "gemma4": "Gemma4ForConditionalGeneration",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionShape:
    """The geometry of one kind of attention layer."""

    num_kv_heads: int
    head_dim: int
    window: int | None  # tokens a causal query sees, itself included; None sees all
    rope_theta: float
    rotary_fraction: float  # share of the head that rotates; the rest carries no position
    has_value: bool  # False: V is the raw K projection


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """The shape of one Gemma stack. Field names are those of the released file."""

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
    long_reply: "LongReply | None" = None  # None: as any other
    pad_token_id: int = 0
    bos_token_id: int = 2
    dtype: str = "bfloat16"
    vision: Mapping[str, Any] | None = None
    media_ids: Mapping[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        sizes = [f.name for f in fields(self) if f.type is int and not f.name.endswith("_token_id")]
        bad = {
            name: value
            for name in sizes
            if type(value := getattr(self, name)) is not int or value <= 0
        }
        if bad:
            raise ConfigError(f"sizes must be positive whole numbers, but the config says {bad}")
        self._check_heads()
        self._check_layers()
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
        if unknown or not self.layer_types:
            raise ConfigError(f"layer_types may hold {SLIDING} and {FULL}, not {sorted(unknown)}")
        if self.layer_types[-1] != FULL:
            raise ConfigError(f"the last layer must be {FULL}: the reference silently forces it")

    @property
    def num_hidden_layers(self) -> int:
        return len(self.layer_types)

    @property
    def can_denoise(self) -> bool:
        """Whether the checkpoint has the self-conditioning block; a Gemma 4 has only AR mode."""
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
    """How a model writes what does not end in one canvas: in shorter ones, and more freely.

    The names are those of `generation_config.json`, but for `reach`, which is `sampler.Apart`'s.
    """

    canvas_length: int
    entropy_bound: float
    t_max: float
    t_min: float
    max_denoising_steps: int
    reach: int = 0  # of two doubtful positions so near only one is decided in a step; 0: both are

    def applied(self, generation: "GenerationConfig") -> "GenerationConfig":
        """The defaults of such a reply."""
        same = [name for name in self.__slots__ if name not in ("canvas_length", "reach")]
        return replace(generation, **{name: getattr(self, name) for name in same})

    def check(self, whole: int) -> None:
        """Refuse what a model with so long a canvas cannot do."""
        for name in ("canvas_length", "max_denoising_steps", "reach"):
            _require(type(getattr(self, name)) is int, name, getattr(self, name), "a whole number")
        for name in ("entropy_bound", "t_max", "t_min"):
            value = getattr(self, name)
            is_number = type(value) in (int, float) and 0 < value < inf
            _require(is_number, name, value, "a number above 0")
        is_within = 1 <= self.canvas_length <= whole
        _require(is_within, "canvas_length", self.canvas_length, f"from 1 to the model's, {whole}")
        steps = self.max_denoising_steps
        _require(steps >= 1, "max_denoising_steps", steps, "1 or more")
        _require(self.reach >= 0, "reach", self.reach, "0 or more")
        _require(self.t_max >= self.t_min, "t_max", self.t_max, f"t_min, {self.t_min}, or more")


def _require(holds: bool, name: str, value: object, allowed: str) -> None:
    if not holds:
        raise ConfigError(f"long_reply: {name} is {value!r}; it must be {allowed}")


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationConfig:
    """The released defaults of `generate`; the sampler turns them into its own knobs."""

    max_denoising_steps: int = 48
    t_max: float = 0.8
    t_min: float = 0.4
    entropy_bound: float = 0.1
    stability_threshold: int = 1
    confidence_threshold: float = 0.005
    max_new_tokens: int = 256
    stop_ids: tuple[int, ...] = (1,)
    pad_token_id: int = 0

    def __post_init__(self) -> None:
        for name in ("max_denoising_steps", "stability_threshold", "max_new_tokens"):
            if type(getattr(self, name)) is not int:
                raise ConfigError(f"{name} is {getattr(self, name)!r}; it must be a whole number")
        for name in ("t_max", "t_min", "entropy_bound", "confidence_threshold"):
            if type(getattr(self, name)) not in (int, float):
                raise ConfigError(f"{name} is {getattr(self, name)!r}; it must be a number")
        if not self.stop_ids or any(type(token) is not int for token in self.stop_ids):
            raise ConfigError(
                f"eos_token_id is {self.stop_ids}; it must be one id or a list of ids"
            )
