"""Experts with weights in four bits and activations in sixteen, by our kernels where they fit.

T tokens, K experts per token, A choices, D width.
"""

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from dgemma.ops.experts import GroupedLinear, choices, one_by_one
from dgemma.ops.fast import is_on
from dgemma.ops.linear import Linear
from dgemma.ops.nvfp4_order import Laid

if TYPE_CHECKING:
    from dgemma.ops.kernels.buckets import Buckets


def fp4_choices(
    x_TD: Tensor, ids_TK: Tensor, gate_up: Laid, down: Laid, into: "Buckets | None" = None
) -> Tensor:
    """What each choice of each token gives, [A, D], not yet weighted; `into`: if sorted already."""
    is_known = x_TD.dtype == torch.bfloat16 or x_TD.device.type == "cpu"
    if is_on(x_TD, "experts") and is_known:
        from dgemma.ops.kernels import experts_4 as kernels

        return kernels.choices_4(x_TD, ids_TK, gate_up, down, into)
    return choices(x_TD, ids_TK, fp4_grouped(gate_up), fp4_grouped(down))


def fp4_grouped(weight: Laid) -> GroupedLinear:
    """The definition, one expert at a time; its weights are there in float32 for that long."""

    def product(expert: int) -> Linear:
        return lambda x_TD: F.linear(x_TD.float(), weight.whole(expert)).to(x_TD.dtype)

    return one_by_one([product(expert) for expert in range(len(weight.words_EW))])
