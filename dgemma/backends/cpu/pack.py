"""Lays a model's weights out for the CPU, once after loading: modules are swapped from outside.

The packed model computes the same function and cannot be trained or saved. The embedding table is
kept as it is beside its packed forms, since tokens are looked up in it.
"""

from torch import Tensor, nn

from dgemma.backends.cpu.fused_layer import joined, swap
from dgemma.backends.cpu.packed_linear import can_pack, packed_linear
from dgemma.backends.cpu.soft_embed import LOST, mean
from dgemma.model.gemma import Experts, Gemma, TokenTable
from dgemma.model.moe import moe_forward, per_expert


class PackedExperts(nn.Module):
    def __init__(self, source: Experts) -> None:
        super().__init__()
        self.gate_up = per_expert([packed_linear(weight) for weight in source.gate_up_proj])
        self.down = per_expert([packed_linear(weight) for weight in source.down_proj])

    def forward(self, x_TD: Tensor, ids_TK: Tensor, share_TK: Tensor) -> Tensor:
        return moe_forward(x_TD, ids_TK, share_TK, self.gate_up, self.down)


class PackedTable(TokenTable):
    def __init__(self, source: TokenTable) -> None:
        super().__init__(*source.weight.shape)
        self.weight = source.weight
        self.product = packed_linear(source.weight)
        self.transposed = packed_linear(source.weight.T)

    def score(self, hidden_TD: Tensor) -> Tensor:
        return self.product(hidden_TD)

    def mean(self, p_TV: Tensor) -> Tensor:
        return mean(p_TV, self.weight, self.transposed, LOST[self.weight.dtype]) * self.scale


def pack(model: Gemma) -> Gemma:
    """Swap every weight's module for its packed form, in place; where there is none, do nothing."""
    if not can_pack(model.embed_tokens.weight):
        return model
    model.requires_grad_(False)
    model.embed_tokens = PackedTable(model.embed_tokens)
    swap(model, _packed)
    return model


def _packed(module: nn.Module) -> nn.Module | None:
    if isinstance(module, Experts):
        return PackedExperts(module)
    return joined(module, packed_linear)
