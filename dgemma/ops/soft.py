"""The mean vector under a distribution over the vocabulary, by vectors in 8-bit floats (e4m3).

    mean = p_top w_top + sum over parts of  f_part (q_part @ n_part)

The likeliest token's vector is taken as it is: what a position is sure of is not rounded. All other
probabilities, times the factors of their vectors' numbers n, are rounded to 8 bits (q), in each
part of the vocabulary beside that part's greatest: many small ones so count for what they are, and
are lost only where one that is half a million times as great stands in the same part.

T positions, V vocabulary, D width, S parts.
"""

import torch
from torch import Tensor

from dgemma.ops.fast import is_on
from dgemma.ops.fp8 import E4M3
from dgemma.ops.soft_table import SMALLEST, SoftTable


def soft_mean(p_TV: Tensor, weight_VD: Tensor, table: SoftTable) -> Tensor:
    """The mean vector under each position's distribution, in the weight's type."""
    if is_on(p_TV, "row_stats"):
        from dgemma.ops.kernels import soft_8

        return soft_8.mean(soft_8.shares_of(p_TV, table), table, weight_VD)
    return soft_mean_reference(p_TV, weight_VD, table)


def soft_mean_reference(p_TV: Tensor, weight_VD: Tensor, table: SoftTable) -> Tensor:
    """The definition, in float32."""
    top_p_T, top_T = p_TV.float().max(-1)
    rest_TV = p_TV.float().scatter(-1, top_T[:, None], 0.0)
    mean_TD = top_p_T[:, None] * weight_VD[top_T].float()
    pieces = (torch.split(part, table.share, dim=-1) for part in (rest_TV, *table[:2]))
    for p_TW, numbers_DW, beside_W in zip(*pieces, strict=True):
        peak_T1 = p_TW.amax(-1, keepdim=True).clamp(min=SMALLEST)
        rounded_TW = (p_TW / peak_T1 * beside_W).to(E4M3).float()
        mean_TD += peak_T1 * table.unit_1 * (rounded_TW @ numbers_DW.float().t())
    return mean_TD.to(weight_VD.dtype)
