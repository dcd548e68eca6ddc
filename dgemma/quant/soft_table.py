"""A vocabulary's vectors in 8-bit floats (e4m3), laid out for a sum over its tokens.

T positions, V vocabulary, C chunks of it, D width.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from dgemma.quant.fp8 import E4M3, LARGEST

# Tokens of a part. At the released width 36 parts of 22 programs each keep all 132 processors of an
# H100 or H200 busy to the end; and a sum of no more numbers than these bears the few bits in which
# the matrix unit adds up 8-bit products.
SHARE = 57 * 128
ALIGNED = 16  # bytes that a row of the vocabulary has to be a multiple of
NEAR = 2048  # tokens of which one greatest is known; row statistics by kernel leave as much
SMALLEST = 1e-30  # stands for the greatest probability of a part that has none


class SoftTable(NamedTuple):
    """A vocabulary's 8-bit vectors, laid out for a sum over its tokens."""

    numbers_DV: Tensor
    beside_V: Tensor  # the factor of each token's numbers beside the greatest one, which is 448
    unit_1: Tensor  # what a factor of 1 stands for
    share: int = SHARE

    @classmethod
    def of(cls, numbers_VD: Tensor, factor_V: Tensor) -> "SoftTable":
        """Of numbers as the head has them. A copy, since matrix units sum along memory."""
        turned_DV = numbers_VD.view(torch.uint8).t().contiguous().view(E4M3)
        unit_1 = factor_V.max()[None] / LARGEST
        return cls(turned_DV, factor_V / unit_1, unit_1)


def can_turn(vocab: int) -> bool:
    """True if the vocabulary's size is aligned as the kernels need it."""
    return vocab % ALIGNED == 0


def chunk_peaks(p_TV: Tensor) -> Tensor:
    """The greatest probability in each chunk of the vocabulary, [T, C]."""
    whole_TV = F.pad(p_TV, (0, -p_TV.shape[1] % NEAR)).contiguous()
    return whole_TV.view(len(p_TV), -1, NEAR).amax(-1)
