"""The mean vector under a distribution over the vocabulary, by vectors in 8-bit floats (e4m3).

    mean = p_top w_top + sum over parts of  f_part (q_part @ n_part)

The likeliest token's vector is taken as it is: what a position is sure of is not rounded. All other
probabilities, times the factors of their vectors' numbers n, are rounded to 8 bits (q), in each
part of the vocabulary beside the greatest near it: many small ones so count for what they are, and
are lost only where one that is half a million times as great stands near. Near a part are all
chunks of the vocabulary that reach into it: their greatest are known before any is looked at, and
an 8-bit float keeps as many digits beside one that is too great.

T positions, V vocabulary, D width, S parts, C chunks.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from dgemma.quant.fp8 import E4M3
from dgemma.quant.soft_table import NEAR, SMALLEST, SoftTable, chunk_peaks


def soft_mean_reference(p_TV: Tensor, weight_VD: Tensor, table: SoftTable) -> Tensor:
    """The definition, in float32."""
    top_p_T, top_T = p_TV.float().max(-1)
    rest_TV = p_TV.float().scatter(-1, top_T[:, None], 0.0)
    mean_TD = top_p_T[:, None] * weight_VD[top_T].float()
    pieces = (torch.split(part, table.share, dim=-1) for part in (rest_TV, *table[:2]))
    peaks = _greatest_near(rest_TV, table.share)
    for p_TW, numbers_DW, beside_W, peak_T1 in zip(*pieces, peaks, strict=True):
        rounded_TW = (p_TW / peak_T1 * beside_W).to(E4M3).float()
        mean_TD += peak_T1 * table.unit_1 * (rounded_TW @ numbers_DW.float().t())
    return mean_TD.to(weight_VD.dtype)


def _greatest_near(rest_TV: Tensor, share: int) -> Iterator[Tensor]:
    """For each part, the greatest of all chunks that reach into it, [T, 1]."""
    peak_TC, vocab = chunk_peaks(rest_TV), rest_TV.shape[1]
    for begin in range(0, vocab, share):
        last = min(begin + share, vocab) - 1
        near_TC = peak_TC[:, begin // NEAR : last // NEAR + 1]
        yield near_TC.amax(-1, keepdim=True).clamp(min=SMALLEST)
