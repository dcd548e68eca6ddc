"""A model in whole numbers of eight bits, for the CPU: modules are swapped from outside.

All products but the router's, which decides and is small, and the mean of the token table, whose
probabilities need more than eight bits. The token table stays as it is beside its 8-bit form, since
tokens are looked up in it. The model can then no longer be trained or saved.
"""

import torch
from torch import Tensor, nn

from dgemma.model import Experts, Gemma, TokenTable
from dgemma.ops.experts import choices, mix
from dgemma.ops.int8 import int8_grouped, int8_linear
from dgemma.ops.linear import Linear, can_pack, linear, packed_linear
from dgemma.weights.int8 import quantize

ROUTER = "router"


class Int8Linear(nn.Module):
    def __init__(self, source: nn.Linear) -> None:
        super().__init__()
        self.product = int8_linear(quantize(source.weight))

    def forward(self, x: Tensor) -> Tensor:
        return self.product(x)


class Int8Experts(nn.Module):
    def __init__(self, source: Experts) -> None:
        super().__init__()
        self.gate_up = int8_grouped(quantize(source.gate_up_proj))
        self.down = int8_grouped(quantize(source.down_proj))

    def choices(self, x_TD: Tensor, ids_TK: Tensor) -> Tensor:
        return choices(x_TD, ids_TK, self.gate_up, self.down)

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
    places = [
        (parent, name)
        for path, parent in module.named_modules()
        for name, child in parent.named_children()
        if isinstance(child, nn.Linear | Experts) and path.rpartition(".")[2] != ROUTER
    ]
    for parent, name in places:
        child = parent.get_submodule(name)
        whole = Int8Experts(child) if isinstance(child, Experts) else Int8Linear(child)
        setattr(parent, name, whole)


def _mean_product(weight_VD: Tensor) -> tuple[Linear, torch.dtype]:
    """p @ weight, in bfloat16 where the CPU has it, which is twice as fast."""
    half_DV = weight_VD.T.to(torch.bfloat16)
    if can_pack(half_DV):
        return packed_linear(half_DV), torch.bfloat16
    whole_DV = weight_VD.T
    product = packed_linear(whole_DV) if can_pack(weight_VD) else linear(whole_DV)
    return product, weight_VD.dtype
