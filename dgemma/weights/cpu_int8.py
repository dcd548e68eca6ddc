"""A model in whole numbers of eight bits, for the CPU: modules are swapped from outside.

All products but the router's, which decides and is small, and the mean of the token table, whose
probabilities need more than eight bits. The token table stays as it is beside its 8-bit form, since
tokens are looked up in it. Products of the same rows are one, for which these are rounded once. The
model can then no longer be trained or saved.

T tokens of a pass, D width, N/M query/key heads, X both and perhaps those of the values, H head
width, K experts per token, V vocabulary.
"""

import torch
from torch import Tensor, nn

from dgemma.model import (
    Attention,
    Context,
    Experts,
    FeedForward,
    Gemma,
    Norm,
    TokenTable,
    Turns,
)
from dgemma.ops.experts import gated_by_sigmoid, mix
from dgemma.ops.int8 import int8_choices, int8_grouped, int8_linear
from dgemma.ops.linear import Linear, can_pack, linear, packed_linear
from dgemma.ops.norm import rms_norm
from dgemma.ops.rope import rotate
from dgemma.weights.int8 import quantize

ROUTER = "router"


class Int8Linear(nn.Module):
    """One product, or several of the same rows, whose outputs lie behind one another."""

    def __init__(self, *sources: nn.Linear) -> None:
        super().__init__()
        self.product = int8_linear(quantize(torch.cat([source.weight for source in sources])))

    def forward(self, x: Tensor) -> Tensor:
        return self.product(x)


class Int8FeedForward(nn.Module):
    """Gate and up as one product, for which rows are rounded once."""

    def __init__(self, source: FeedForward) -> None:
        super().__init__()
        self.gate_up_proj = Int8Linear(source.gate_proj, source.up_proj)
        self.down_proj = Int8Linear(source.down_proj)

    def forward(self, x_TD: Tensor) -> Tensor:
        return self.down_proj(gated_by_sigmoid(self.gate_up_proj(x_TD)))  # type: ignore[no-any-return]


class Int8Attention(nn.Module):
    """Queries, keys and values as one product, one norm and, but for values, one rotation."""

    def __init__(self, source: Attention) -> None:
        super().__init__()
        self.layer, self.kind, self.eps = source.layer, source.kind, source.eps
        self.width, self.keys = source.shape.head_dim, source.shape.num_kv_heads
        self.queries = source.q_proj.out_features // self.width
        parts = [p for p in (source.q_proj, source.k_proj, source.v_proj) if p is not None]
        self.qkv_proj, self.o_proj = Int8Linear(*parts), Int8Linear(source.o_proj)
        q_H, k_H = source.q_norm.weight.float(), source.k_norm.weight.float()
        self.scale_XH = torch.cat([q_H.expand(self.queries, -1), k_H.expand(self.keys, -1)])

    def forward(self, x_TD: Tensor, turns: Turns, context: Context) -> Tensor:
        heads_TXH = self.qkv_proj(x_TD).view(len(x_TD), -1, self.width)
        normed_TXH = rms_norm(heads_TXH.float(), None, self.eps)
        qk_TXH = (normed_TXH[:, : len(self.scale_XH)] * self.scale_XH).to(x_TD.dtype)
        qk_TXH = rotate(qk_TXH, *turns[self.kind])
        q_TNH, k_TMH = qk_TXH[:, : self.queries], qk_TXH[:, self.queries :]
        # The last heads: those of the values or, where these are read off the raw keys, the keys'.
        v_TMH = normed_TXH[:, -self.keys :].to(x_TD.dtype)
        out_TNH = context.attend(self.layer, q_TNH, k_TMH, v_TMH)
        return self.o_proj(out_TNH.reshape(len(x_TD), -1))  # type: ignore[no-any-return]


class Int8Experts(nn.Module):
    def __init__(self, source: Experts) -> None:
        super().__init__()
        self.gate_up = int8_grouped(quantize(source.gate_up_proj))
        self.down = int8_grouped(quantize(source.down_proj))

    def choices(self, x_TD: Tensor, ids_TK: Tensor) -> Tensor:
        return int8_choices(x_TD, ids_TK, self.gate_up, self.down)

    def forward(self, x_TD: Tensor, ids_TK: Tensor, share_TK: Tensor) -> Tensor:
        return mix(self.choices(x_TD, ids_TK), share_TK).to(x_TD.dtype)


class Int8Table(TokenTable):
    def __init__(self, source: TokenTable) -> None:
        super().__init__(*source.weight.shape)
        self.weight = source.weight
        self.product = int8_linear(quantize(source.weight))
        self.transposed, self.mean_dtype = _mean_product(source.weight)

    def score(self, hidden_TD: Tensor) -> Tensor:
        return self.product(hidden_TD)

    def mean(self, p_TV: Tensor) -> Tensor:
        return self.transposed(p_TV.to(self.mean_dtype)).to(self.weight.dtype) * self.scale


@torch.no_grad()
def pack_int8(model: Gemma) -> Gemma:
    """Swap every weight's module for its 8-bit form, in place; adapters beside them stay."""
    model.requires_grad_(False)
    model.embed_tokens = Int8Table(model.embed_tokens)
    swap_int8(model)
    return model


@torch.no_grad()
def swap_int8(module: nn.Module) -> None:
    """The same for all products below a module."""
    # Names, not modules: each weight must be free to go once its 8-bit form stands.
    for name in [name for name, _ in module.named_children() if name != ROUTER]:
        child = module.get_submodule(name)
        whole = _whole(child)
        if whole is None:
            swap_int8(child)
        else:
            setattr(module, name, whole)


def _whole(module: nn.Module) -> nn.Module | None:
    """The 8-bit form of a module; None: it has none itself, but what is in it may."""
    if isinstance(module, nn.Linear):
        return Int8Linear(module)
    if isinstance(module, Experts):
        return Int8Experts(module)
    # Beside an adapter a product is a module of its own.
    is_plain = all(isinstance(child, nn.Linear | Norm) for child in module.children())
    if type(module) is FeedForward and is_plain:
        return Int8FeedForward(module)
    if isinstance(module, Attention) and is_plain:
        return Int8Attention(module)
    return None


def _mean_product(weight_VD: Tensor) -> tuple[Linear, torch.dtype]:
    """p @ weight, in bfloat16 where the CPU has it, which is twice as fast."""
    half_DV = weight_VD.T.to(torch.bfloat16)
    if can_pack(half_DV):
        return packed_linear(half_DV), torch.bfloat16
    whole_DV = weight_VD.T
    product = packed_linear(whole_DV) if can_pack(weight_VD) else linear(whole_DV)
    return product, weight_VD.dtype
