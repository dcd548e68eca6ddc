"""A Gemma 4 assistant (MTP drafter): drafts from the target's last hidden state and its keys.

Its few dense layers have queries only. They attend to the keys and values cached by the target's
last layer of each type, all from the position of the last chosen token. Each draft token is the
input for the next one. Parameter names are those of transformers' `gemma4_assistant`; ordered
embeddings are not supported.

D width of the assistant, B of the target, N query heads, H head width, S cached keys, V vocabulary.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dgemma.config import FULL, SLIDING, AttentionShape, LayerType, ModelConfig
from dgemma.errors import ConfigError
from dgemma.model.attention import KVSegment, attention
from dgemma.model.gemma import FeedForward, Gemma, Norm
from dgemma.model.kv_cache import KVCache
from dgemma.model.norm_rope import apply_rope, cos_sin, inverse_frequencies

MODEL_TYPE = "gemma4_assistant"
SIZES = "vocab_size hidden_size intermediate_size num_attention_heads".split()
# Config keys with the only values supported here.
FIXED = {
    "enable_moe_block": False,
    "use_double_wide_mlp": False,
    "hidden_size_per_layer_input": 0,
    "vocab_size_per_layer_input": 0,
}
SharedKeys = Mapping[LayerType, list[KVSegment]]


@dataclass(frozen=True, slots=True, kw_only=True)
class AssistantConfig:
    """Sizes of a drafter; its attention has the target's shapes."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    layer_types: tuple[LayerType, ...]
    rms_norm_eps: float
    backbone_hidden_size: int

    @classmethod
    def read(cls, raw: Mapping[str, Any], source: str) -> "AssistantConfig":
        """Read a parsed config.json; refuses what is not supported."""
        if raw.get("model_type") != MODEL_TYPE:
            found = raw.get("model_type")
            raise ConfigError(f"{source}: model_type is {found!r}; a drafter has {MODEL_TYPE}")
        if raw.get("use_ordered_embeddings"):
            raise ConfigError(f"{source}: use_ordered_embeddings is true; this build needs false")
        text = raw.get("text_config") or {}
        for key, allowed in FIXED.items():
            if text.get(key) not in (None, allowed):
                raise ConfigError(f"{source}: {key} is {text[key]!r}; this build needs {allowed}")
        missing = [key for key in (*SIZES, "layer_types") if text.get(key) is None]
        if missing or type(raw.get("backbone_hidden_size")) is not int:
            name = missing[0] if missing else "backbone_hidden_size"
            raise ConfigError(f"{source}: {name} is missing")
        types = tuple(text["layer_types"])
        if not types or set(types) - {FULL, SLIDING}:
            raise ConfigError(f"{source}: layer_types are {types}; use {SLIDING} and {FULL}")
        return cls(
            **{key: text[key] for key in SIZES},
            layer_types=types,
            rms_norm_eps=text.get("rms_norm_eps", 1e-6),
            backbone_hidden_size=raw["backbone_hidden_size"],
        )

    def check_target(self, target: ModelConfig, path: Path) -> None:
        """Refuse a drafter that was made for another model."""
        pairs = {
            "vocab_size": (self.vocab_size, target.vocab_size),
            "backbone_hidden_size": (self.backbone_hidden_size, target.hidden_size),
        }
        for name, (own, theirs) in pairs.items():
            if own != theirs:
                raise ConfigError(
                    f"{path}: {name} is {own}, the model's {theirs}; the drafter is for another one"
                )


class AssistantAttention(nn.Module):
    """Attention of the drafter's queries to the target's keys."""

    def __init__(self, config: AssistantConfig, shape: AttentionShape) -> None:
        super().__init__()
        self.shape, width = shape, config.num_attention_heads * shape.head_dim
        self.q_proj = nn.Linear(config.hidden_size, width, bias=False)
        self.q_norm = Norm(shape.head_dim, config.rms_norm_eps)
        self.o_proj = nn.Linear(width, config.hidden_size, bias=False)

    def forward(self, x_1D: Tensor, position: int, keys: list[KVSegment]) -> Tensor:
        q_1NH = self.q_norm(self.q_proj(x_1D).view(1, -1, self.shape.head_dim))
        frequencies = inverse_frequencies(self.shape, x_1D.device)
        at = torch.tensor([position], device=x_1D.device)
        q_1NH = apply_rope(q_1NH, *cos_sin(at, frequencies))
        return self.o_proj(attention(q_1NH, keys).reshape(1, -1))  # type: ignore[no-any-return]


class AssistantLayer(nn.Module):
    """A dense Gemma 4 layer without keys and values of its own."""

    def __init__(self, config: AssistantConfig, shape: AttentionShape) -> None:
        super().__init__()
        width, eps = config.hidden_size, config.rms_norm_eps
        self.self_attn = AssistantAttention(config, shape)
        self.mlp = FeedForward(width, config.intermediate_size)
        self.input_layernorm = Norm(width, eps)
        self.post_attention_layernorm = Norm(width, eps)
        self.pre_feedforward_layernorm = Norm(width, eps)
        self.post_feedforward_layernorm = Norm(width, eps)
        self.register_buffer("layer_scalar", torch.empty(1))

    layer_scalar: Tensor

    def forward(self, x_1D: Tensor, position: int, keys: list[KVSegment]) -> Tensor:
        attended_1D = self.self_attn(self.input_layernorm(x_1D), position, keys)
        x_1D = x_1D + self.post_attention_layernorm(attended_1D)
        dense_1D = self.mlp(self.pre_feedforward_layernorm(x_1D))
        x_1D = x_1D + self.post_feedforward_layernorm(dense_1D)
        return x_1D * self.layer_scalar


class Assistant(nn.Module):
    """The drafter of one target model."""

    def __init__(self, config: AssistantConfig, target: ModelConfig) -> None:
        super().__init__()
        self.config, self.target = config, target
        types = target.layer_types
        # The target's last layer of each type provides the keys.
        self.shared = {kind: len(types) - 1 - types[::-1].index(kind) for kind in set(types)}
        width, backbone = config.hidden_size, config.backbone_hidden_size
        shapes = [target.attention(self.shared[kind]) for kind in config.layer_types]
        self.layers = nn.ModuleList(AssistantLayer(config, shape) for shape in shapes)
        self.norm = Norm(width, config.rms_norm_eps)
        self.pre_projection = nn.Linear(2 * backbone, width, bias=False)
        self.post_projection = nn.Linear(width, backbone, bias=False)
        self.lm_head = nn.Linear(width, config.vocab_size, bias=False)

    def forward(self, inputs_1B: Tensor, position: int, keys: SharedKeys) -> tuple[Tensor, Tensor]:
        """Return logits, and the hidden state that takes the target's place for the next token."""
        x_1D = self.pre_projection(inputs_1B)
        for kind, layer in zip(self.config.layer_types, self.layers, strict=True):
            x_1D = layer(x_1D, position, keys[kind])
        x_1D = self.norm(x_1D)
        return F.linear(x_1D, self.lm_head.weight), self.post_projection(x_1D)

    def keys(self, cache: KVCache) -> SharedKeys:
        """Return the target's keys that are visible to a drafted token."""
        length, found = cache.length, dict[LayerType, list[KVSegment]]()
        for kind, layer in self.shared.items():
            window = self.target.attention(layer).window
            begin = 0 if window is None else max(0, length - window - 1)  # inclusive
            found[kind] = cache.read(layer, begin, length)
        return found

    @torch.inference_mode()
    def draft(
        self, model: Gemma, cache: KVCache, token: int, hidden_1B: Tensor, count: int
    ) -> tuple[int, ...]:
        """Draft tokens after an uncached one, starting from the hidden state that chose it."""
        keys, position, drafted = self.keys(cache), cache.length, list[int]()
        for _ in range(count):
            embeds_1B = model.embed(torch.tensor([token], device=hidden_1B.device))
            inputs = torch.cat([embeds_1B, hidden_1B], dim=-1)
            logits_1V, hidden_1B = self(inputs, position, keys)
            token = int(logits_1V.argmax())
            drafted.append(token)
        return tuple(drafted)
