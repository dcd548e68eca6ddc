"""A model in whole numbers of eight bits, for the CPU: modules are swapped from outside.

All products but the router's, which decides and is small, and the mean of the token table, whose
probabilities need more than eight bits. The token table stays as it is beside its 8-bit form, since
tokens are looked up in it. Products of the same rows are one (see `joined`), for which these are
rounded once. The model can then no longer be trained or saved.

T tokens of a pass, D width, K experts per token, O outputs, I inputs, V vocabulary.
"""

import torch
from torch import Tensor, nn

from dgemma.backends.cpu.fused_layer import joined, swap
from dgemma.backends.cpu.int8_linear import int8_experts, int8_grouped, int8_linear
from dgemma.backends.cpu.packed_linear import Linear, can_pack, linear, packed_linear
from dgemma.backends.cpu.soft_embed import LOST, mean
from dgemma.device import has_bfloat16
from dgemma.model.gemma import Experts, Gemma, Router, TokenTable
from dgemma.quant.int8 import quantize


def lay_int8(weight_OI: Tensor) -> Linear:
    """Products with a weight that is rounded to eight bits."""
    return int8_linear(quantize(weight_OI))


class Int8Experts(nn.Module):
    def __init__(self, source: Experts) -> None:
        super().__init__()
        self.gate_up = int8_grouped(quantize(source.gate_up_proj))
        self.down = int8_grouped(quantize(source.down_proj))

    def forward(self, x_TD: Tensor, ids_TK: Tensor, share_TK: Tensor) -> Tensor:
        return int8_experts(x_TD, ids_TK, share_TK, self.gate_up, self.down)


class Int8Table(TokenTable):
    def __init__(self, source: TokenTable) -> None:
        super().__init__(*source.weight.shape)
        self.weight = source.weight
        self.product = lay_int8(source.weight)
        self.transposed = _mean_product(source.weight)

    def score(self, hidden_TD: Tensor) -> Tensor:
        return self.product(hidden_TD)

    def mean(self, p_TV: Tensor) -> Tensor:
        # What comes of it is rounded to eight bits next: more than these hold is not asked for.
        return mean(p_TV, self.weight, self.transposed, LOST[torch.int8]) * self.scale


@torch.no_grad()
def pack_int8(model: Gemma) -> Gemma:
    """Swap every weight's module for its 8-bit form, in place; adapters beside them stay."""
    model.requires_grad_(False)
    model.embed_tokens = Int8Table(model.embed_tokens)
    swap_int8(model)
    return model


def swap_int8(module: nn.Module) -> None:
    """The same for all products below a module."""
    swap(module, _int8)


def _int8(module: nn.Module) -> nn.Module | None:
    if isinstance(module, Router):
        return module
    if isinstance(module, Experts):
        return Int8Experts(module)
    return joined(module, lay_int8)


def _mean_product(weight_VD: Tensor) -> Linear:
    """p @ weight, in bfloat16 where the CPU multiplies it, which is twice as fast."""
    if has_bfloat16(weight_VD.device) and can_pack(weight_VD[:1].to(torch.bfloat16)):
        product = packed_linear(weight_VD.T.to(torch.bfloat16))
        return lambda p_TV: product(p_TV.to(torch.bfloat16)).to(weight_VD.dtype)
    return packed_linear(weight_VD.T) if can_pack(weight_VD) else linear(weight_VD.T)
