"""Layers laid out for a CPU: linears that read the same rows are merged, with fewer passes between.

The weights may be stored in any form: `Lay` says which. A pass over a canvas of a small model
spends most of its time between GEMMs, so their number counts as much as their size. `Attention` and
`FeedForward` stay the definition; only the projections in them are replaced.

T tokens of a pass, D width, N/M query/key heads, X both and perhaps those of the values, H head
width.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from dgemma.backends.cpu.packed_linear import Linear
from dgemma.model.gemma import Attention, FeedForward, Norm
from dgemma.model.moe import gelu_and_mul, gelu_and_mul_cpu
from dgemma.model.norm import rms_norm
from dgemma.model.rope import CosSin, apply_rope

Lay = Callable[[Tensor], Linear]  # puts a weight [O, I] into the form of its GEMM


class MergedLinear(nn.Module):
    """One linear, or several that read the same rows, their outputs one after the other."""

    def __init__(self, lay: Lay, *sources: nn.Linear) -> None:
        super().__init__()
        self.product = lay(torch.cat([source.weight for source in sources]))

    def forward(self, x: Tensor) -> Tensor:
        return self.product(x)


class MergedFeedForward(FeedForward):
    """Gate and up as one GEMM."""

    def __init__(self, source: FeedForward, lay: Lay) -> None:
        nn.Module.__init__(self)
        self.gate_up_proj = MergedLinear(lay, source.gate_proj, source.up_proj)
        self.down_proj = MergedLinear(lay, source.down_proj)  # type: ignore[assignment]

    def hidden(self, x_TD: Tensor) -> Tensor:
        # In 16 bits each op rounds, as elsewhere.
        activate = gelu_and_mul_cpu if x_TD.dtype == torch.float32 else gelu_and_mul
        return activate(self.gate_up_proj(x_TD))


class MergedAttention(Attention):
    """Queries, keys and values as one GEMM, one norm and, but for values, one rotation."""

    def __init__(self, source: Attention, lay: Lay) -> None:
        nn.Module.__init__(self)
        self.layer, self.kind, self.eps = source.layer, source.kind, source.eps
        self.shape, width = source.shape, source.shape.head_dim
        self.queries = source.q_proj.out_features // width
        parts = [p for p in (source.q_proj, source.k_proj, source.v_proj) if p is not None]
        self.qkv_proj = MergedLinear(lay, *parts)
        self.o_proj = MergedLinear(lay, source.o_proj)  # type: ignore[assignment]
        q_H, k_H = source.q_norm.weight.float(), source.k_norm.weight.float()
        keys = source.shape.num_kv_heads
        self.scale_XH = torch.cat([q_H.expand(self.queries, -1), k_H.expand(keys, -1)])

    def heads(self, x_TD: Tensor, cos_sin: CosSin) -> tuple[Tensor, Tensor, Tensor]:
        heads_TXH = self.qkv_proj(x_TD).view(len(x_TD), -1, self.shape.head_dim)
        normed_TXH = rms_norm(heads_TXH.float(), None, self.eps)
        qk_TXH = (normed_TXH[:, : len(self.scale_XH)] * self.scale_XH).to(x_TD.dtype)
        qk_TXH = apply_rope(qk_TXH, *cos_sin[self.kind])
        # The last heads: those of the values or, where these are read off the raw keys, the keys'.
        v_TMH = normed_TXH[:, -self.shape.num_kv_heads :].to(x_TD.dtype)
        return qk_TXH[:, : self.queries], qk_TXH[:, self.queries :], v_TMH


def joined(module: nn.Module, lay: Lay) -> nn.Module | None:
    """The CPU's form of a module; None: it has none itself, but what is in it may."""
    if isinstance(module, nn.Linear):
        return MergedLinear(lay, module)
    # Beside an adapter a product is a module of its own.
    is_plain = all(isinstance(child, nn.Linear | Norm) for child in module.children())
    if type(module) is FeedForward and is_plain:
        return MergedFeedForward(module, lay)
    if type(module) is Attention and is_plain:
        return MergedAttention(module, lay)
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
