"""A layer for the CPU: products of the same rows are one, and what lies between takes fewer passes.

The weights may lie in memory in any form: `Lay` says which. A pass over a canvas of a small model
spends most of its time between products, so their number counts as much as their size.

T tokens of a pass, D width, N/M query/key heads, X both and perhaps those of the values, H head
width.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from dgemma.model import Attention, Context, FeedForward, Norm, Turns
from dgemma.ops.experts import gated, gated_by_sigmoid
from dgemma.ops.linear import Linear
from dgemma.ops.norm import rms_norm
from dgemma.ops.rope import rotate

Lay = Callable[[Tensor], Linear]  # puts a weight [O, I] into the form of its products


class Product(nn.Module):
    """One product, or several of the same rows, whose outputs lie behind one another."""

    def __init__(self, lay: Lay, *sources: nn.Linear) -> None:
        super().__init__()
        self.product = lay(torch.cat([source.weight for source in sources]))

    def forward(self, x: Tensor) -> Tensor:
        return self.product(x)


class JoinedFeedForward(nn.Module):
    """Gate and up as one product."""

    def __init__(self, source: FeedForward, lay: Lay) -> None:
        super().__init__()
        self.gate_up_proj = Product(lay, source.gate_proj, source.up_proj)
        self.down_proj = Product(lay, source.down_proj)

    def forward(self, x_TD: Tensor) -> Tensor:
        gate_up = self.gate_up_proj(x_TD)
        # In 16 bits each step is rounded, as elsewhere.
        hidden_TI = (gated_by_sigmoid if x_TD.dtype == torch.float32 else gated)(gate_up)
        return self.down_proj(hidden_TI)  # type: ignore[no-any-return]


class JoinedAttention(nn.Module):
    """Queries, keys and values as one product, one norm and, but for values, one rotation."""

    def __init__(self, source: Attention, lay: Lay) -> None:
        super().__init__()
        self.layer, self.kind, self.eps = source.layer, source.kind, source.eps
        self.width, self.keys = source.shape.head_dim, source.shape.num_kv_heads
        self.queries = source.q_proj.out_features // self.width
        parts = [p for p in (source.q_proj, source.k_proj, source.v_proj) if p is not None]
        self.qkv_proj, self.o_proj = Product(lay, *parts), Product(lay, source.o_proj)
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


def joined(module: nn.Module, lay: Lay) -> nn.Module | None:
    """The CPU's form of a module; None: it has none itself, but what is in it may."""
    if isinstance(module, nn.Linear):
        return Product(lay, module)
    # Beside an adapter a product is a module of its own.
    is_plain = all(isinstance(child, nn.Linear | Norm) for child in module.children())
    if type(module) is FeedForward and is_plain:
        return JoinedFeedForward(module, lay)
    if isinstance(module, Attention) and is_plain:
        return JoinedAttention(module, lay)
    return None


@torch.no_grad()
def swap(module: nn.Module, form: Callable[[nn.Module], nn.Module | None]) -> None:
    """Swap all modules below one for their other form, in place, where `form` gives one."""
    # Names, not modules: each weight must be free to go once its other form stands.
    for name in [name for name, _ in module.named_children()]:
        child = module.get_submodule(name)
        other = form(child)
        if other is None:
            swap(child, form)
        else:
            setattr(module, name, other)
