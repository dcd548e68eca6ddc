"""The mean vector under each position's distribution, on a CPU: sure positions need no product.

A position whose likeliest token has all the probability but what the products' type loses anyway is
told of that token's vector alone. Each is judged by itself, so that what it is told never depends
on the rows beside it.

T positions, S of them sure, O open, V vocabulary, D width.
"""

import torch
from torch import Tensor

from dgemma.backends.cpu.packed_linear import Linear

# What a mean over a vocabulary loses by rounding, of 1.
LOST = {torch.float32: 1e-6, torch.bfloat16: 2e-3, torch.int8: 2e-3}


def mean(p_TV: Tensor, weight_VD: Tensor, product: Linear, lost: float) -> Tensor:
    """The mean of the weight's rows; `product`: p @ weight, for positions that are not sure."""
    dtype = weight_VD.dtype
    is_sure_T = p_TV.amax(-1) >= 1 - lost  # what is not a number is not sure
    sure_S, open_O = is_sure_T.nonzero()[:, 0], is_sure_T.logical_not().nonzero()[:, 0]
    if not len(sure_S):
        return product(p_TV.to(dtype))
    top_p_S, top_S = p_TV.index_select(0, sure_S).max(-1)
    mean_TD = weight_VD.new_empty(len(p_TV), weight_VD.shape[1])
    mean_TD.index_copy_(0, sure_S, weight_VD.index_select(0, top_S) * top_p_S[:, None].to(dtype))
    if len(open_O):
        mean_TD.index_copy_(0, open_O, product(p_TV.index_select(0, open_O).to(dtype)))
    return mean_TD


def mean_reference(p_TV: Tensor, weight_VD: Tensor) -> Tensor:
    """The definition, in float64."""
    return p_TV.double() @ weight_VD.double()
