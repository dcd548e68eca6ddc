"""The Gemma stack: one set of weights, run causally (prefill, commit) or over a canvas (denoise).

The layers do not know which: a `Context` gives each token's position and visible keys. The only
difference is the embedding, where a canvas adds the previous step's soft embeddings. Parameter
names are those of the released decoder. Nothing here knows files, devices, caches, sampling or
quantization.

T tokens of a pass, D width, N/M query/key heads, H head width, E experts, K of them per token, I
expert width, V vocabulary.
"""

from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dgemma.config import ModelConfig
from dgemma.model.moe import grouped_linear, moe_forward, moe_with_grad, topk
from dgemma.model.norm_rope import CosSin, apply_rope, rms_norm, rope_cos_sin


class Context(Protocol):
    """Positions of a pass's tokens, and their attention to each other and the KV cache."""

    positions_T: Tensor

    def attend(self, layer: int, q_TNH: Tensor, k_TMH: Tensor, v_TMH: Tensor) -> Tensor: ...


class Norm(nn.Module):
    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.empty(width)), eps

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps)


class FeedForward(nn.Module):
    """Gated MLP: down(gelu(gate(x)) * up(x))."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(width, inner, bias=False)
        self.up_proj = nn.Linear(width, inner, bias=False)
        self.down_proj = nn.Linear(inner, width, bias=False)

    def forward(self, x_TD: Tensor) -> Tensor:
        return self.down_proj(self.hidden(x_TD))  # type: ignore[no-any-return]

    def hidden(self, x_TD: Tensor) -> Tensor:
        """gelu(gate(x)) * up(x)."""
        gate_TI = F.gelu(self.gate_proj(x_TD), approximate="tanh")
        return gate_TI * self.up_proj(x_TD)  # type: ignore[no-any-return]


class Attention(nn.Module):
    """Grouped-query attention with QKV norms; full layers use the raw keys as values."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        self.layer, self.shape, self.eps = layer, config.attention(layer), config.rms_norm_eps
        self.layer_type = config.layer_types[layer]
        head_dim = self.shape.head_dim
        query_width = config.num_attention_heads * head_dim
        key_width = self.shape.num_kv_heads * head_dim
        self.q_proj = nn.Linear(config.hidden_size, query_width, bias=False)
        self.k_proj = nn.Linear(config.hidden_size, key_width, bias=False)
        self.v_proj = (
            nn.Linear(config.hidden_size, key_width, bias=False) if self.shape.has_value else None
        )
        self.o_proj = nn.Linear(query_width, config.hidden_size, bias=False)
        self.q_norm, self.k_norm = Norm(head_dim, self.eps), Norm(head_dim, self.eps)

    def forward(self, x_TD: Tensor, cos_sin: CosSin, context: Context) -> Tensor:
        out_TNH = context.attend(self.layer, *self.heads(x_TD, cos_sin))
        return self.o_proj(out_TNH.reshape(len(x_TD), -1))  # type: ignore[no-any-return]

    def heads(self, x_TD: Tensor, cos_sin: CosSin) -> tuple[Tensor, Tensor, Tensor]:
        """Return normalized queries, keys and values; queries and keys are rotated."""
        heads = (len(x_TD), -1, self.shape.head_dim)
        q_TNH = self.q_proj(x_TD).view(heads)
        k_TMH = self.k_proj(x_TD).view(heads)
        v_TMH = k_TMH if self.v_proj is None else self.v_proj(x_TD).view(heads)
        q_TNH = apply_rope(self.q_norm(q_TNH), *cos_sin[self.layer_type])
        k_TMH = apply_rope(self.k_norm(k_TMH), *cos_sin[self.layer_type])
        return q_TNH, k_TMH, rms_norm(v_TMH, None, self.eps)


class Router(nn.Module):
    """Selects each token's experts and their weights."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.top_k, self.eps = config.top_k_experts, config.rms_norm_eps
        self.proj = nn.Linear(config.hidden_size, config.num_experts, bias=False)
        self.scale = nn.Parameter(torch.empty(config.hidden_size))
        self.per_expert_scale = nn.Parameter(torch.empty(config.num_experts))

    def probs(self, x_TD: Tensor) -> Tensor:
        """Return router probabilities of all experts, before the top-k."""
        x_TD = rms_norm(x_TD, None, self.eps) * self.scale * x_TD.shape[-1] ** -0.5
        return self.proj(x_TD).softmax(-1, dtype=torch.float32)  # type: ignore[no-any-return]

    def forward(self, x_TD: Tensor) -> tuple[Tensor, Tensor]:
        p_TE = self.probs(x_TD)
        weights_TK, ids_TK = topk(p_TE, self.top_k)
        weights_TK = weights_TK / weights_TK.sum(-1, keepdim=True)
        # A gather per row: its gradient is a sum over rows, without atomic additions.
        scale_TK = self.per_expert_scale.expand_as(p_TE).gather(-1, ids_TK)
        return ids_TK, weights_TK * scale_TK


class Experts(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        count, width, inner = config.num_experts, config.hidden_size, config.moe_intermediate_size
        self.gate_up_proj = nn.Parameter(torch.empty(count, 2 * inner, width))
        self.down_proj = nn.Parameter(torch.empty(count, width, inner))

    def forward(self, x_TD: Tensor, topk_ids_TK: Tensor, topk_weights_TK: Tensor) -> Tensor:
        routing = (topk_ids_TK, topk_weights_TK)
        if self.gate_up_proj.requires_grad:
            return moe_with_grad(x_TD, *routing, self.gate_up_proj, self.down_proj)
        gate_up, down = grouped_linear(self.gate_up_proj), grouped_linear(self.down_proj)
        return moe_forward(x_TD, *routing, gate_up, down)


class Layer(nn.Module):
    """Attention, then a dense MLP and the experts in parallel, each between norms."""

    layer_scalar: Tensor

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        width, eps = config.hidden_size, config.rms_norm_eps
        self.self_attn = Attention(config, layer)
        self.mlp = FeedForward(width, config.intermediate_size)
        self.router, self.experts = Router(config), Experts(config)
        self.input_layernorm = Norm(width, eps)
        self.post_attention_layernorm = Norm(width, eps)
        self.pre_feedforward_layernorm = Norm(width, eps)
        self.pre_feedforward_layernorm_2 = Norm(width, eps)
        self.post_feedforward_layernorm_1 = Norm(width, eps)
        self.post_feedforward_layernorm_2 = Norm(width, eps)
        self.post_feedforward_layernorm = Norm(width, eps)
        self.register_buffer("layer_scalar", torch.empty(1))

    def forward(self, x_TD: Tensor, cos_sin: CosSin, context: Context) -> Tensor:
        attended_TD = self.self_attn(self.input_layernorm(x_TD), cos_sin, context)
        x_TD = x_TD + self.post_attention_layernorm(attended_TD)
        dense_TD = self.mlp(self.pre_feedforward_layernorm(x_TD))
        # The router reads the raw residual, the experts the normalized one.
        mixed_TD = self.experts(self.pre_feedforward_layernorm_2(x_TD), *self.router(x_TD))
        dense_TD = self.post_feedforward_layernorm_1(dense_TD)
        mixed_TD = self.post_feedforward_layernorm_2(mixed_TD)
        x_TD = x_TD + self.post_feedforward_layernorm(dense_TD + mixed_TD)
        return x_TD * self.layer_scalar


class SelfConditioning(FeedForward):
    """Adds an MLP of the previous step's soft embeddings to the canvas embeddings."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config.hidden_size, config.intermediate_size)
        self.pre_norm = Norm(config.hidden_size, config.rms_norm_eps)
        self.eps = config.rms_norm_eps

    def condition(self, x_TD: Tensor, soft_TD: Tensor | None) -> Tensor:
        # Zero soft embeddings add exactly zero, but the final norm still applies.
        if soft_TD is not None:
            x_TD = x_TD + self(self.pre_norm(soft_TD))
        return rms_norm(x_TD, None, self.eps)


def rounded(value: float, dtype: torch.dtype) -> float:
    return torch.tensor(value, dtype=dtype).item()


class TokenTable(nn.Module):
    """The tied table: token embeddings, LM head and soft embeddings."""

    def __init__(self, vocab: int, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(vocab, width))

    @property
    def scale(self) -> float:
        """Embedding scale sqrt(width), rounded to the weights' dtype as in the reference."""
        return rounded(self.weight.shape[1] ** 0.5, self.weight.dtype)

    def forward(self, tokens_T: Tensor) -> Tensor:
        return F.embedding(tokens_T, self.weight) * self.scale

    def raw_logits(self, hidden_TD: Tensor) -> Tensor:
        """Return LM head outputs before the soft cap."""
        return F.linear(hidden_TD, self.weight)

    def soft_embed(self, p_TV: Tensor) -> Tensor:
        """Return the mean embedding under each position's distribution."""
        return p_TV.to(self.weight.dtype) @ self.weight * self.scale


class Gemma(nn.Module):
    """DiffusionGemma, or its AR sibling if there is no self-conditioning."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.embed_tokens = TokenTable(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Layer(config, i) for i in range(config.num_hidden_layers))
        self.norm = Norm(config.hidden_size, config.rms_norm_eps)
        self.self_conditioning = SelfConditioning(config) if config.can_denoise else None

    def encode(self, tokens_T: Tensor, context: Context) -> Tensor:
        """Return hidden states of causal tokens: a prompt, or a block to commit."""
        return self.stack(self.embed(tokens_T), context)

    def denoise(self, tokens_T: Tensor, soft_TD: Tensor | None, context: Context) -> Tensor:
        """Return hidden states of canvases, given the previous step's soft embeddings."""
        return self.stack(self.embed_canvas(tokens_T, soft_TD), context)

    def embed_canvas(self, tokens_T: Tensor, soft_TD: Tensor | None) -> Tensor:
        """Embed canvas tokens with their self-conditioning."""
        assert self.self_conditioning is not None, "an autoregressive model has no canvas mode"
        return self.self_conditioning.condition(self.embed(tokens_T), soft_TD)

    def stack(self, x_TD: Tensor, context: Context, cos_sin: CosSin | None = None) -> Tensor:
        """Run all layers. `cos_sin`: the RoPE tables of the context's positions, if known."""
        cos_sin = self.cos_sin(context.positions_T) if cos_sin is None else cos_sin
        for layer in self.layers:
            x_TD = layer(x_TD, cos_sin, context)
        return self.norm(x_TD)  # type: ignore[no-any-return]

    def cos_sin(self, positions_T: Tensor) -> CosSin:
        return rope_cos_sin(self.config, positions_T)

    def embed(self, tokens_T: Tensor) -> Tensor:
        return self.embed_tokens(tokens_T)  # type: ignore[no-any-return]

    def soft_embed(self, p_TV: Tensor) -> Tensor:
        """Return the mean embedding at each position, for self-conditioning."""
        return self.embed_tokens.soft_embed(p_TV)

    def raw_logits(self, hidden_TD: Tensor) -> Tensor:
        """Return logits before the soft cap, which `position_stats` applies itself."""
        return self.embed_tokens.raw_logits(hidden_TD)

    def logits(self, hidden_TD: Tensor) -> Tensor:
        """Return soft-capped float32 logits."""
        return soft_cap(self.raw_logits(hidden_TD), self.config.final_logit_softcapping)


def soft_cap(logits_TV: Tensor, cap: float | None) -> Tensor:
    """Bound logits smoothly to +-cap, in float32."""
    logits_TV = logits_TV.float()
    return logits_TV if cap is None else torch.tanh(logits_TV / cap) * cap
