"""Weights in whole numbers of eight bits, with one float32 scale for each row.

A scale keeps 16 significant bits, so that each product with a whole number is exact in float32,
alike on every machine, and gives the same numbers when it is quantized again.
"""

import torch
from torch import Tensor

from dgemma.quant.qtensor import Quantized

LARGEST = 127
DROPPED_BITS = 0xFF  # of a scale's 24: the seven of a whole number more still fit a float32


def quantize(weight: Tensor) -> Quantized:
    """The whole numbers nearest to a weight, and the scales that its rows' largest values set."""
    exact = weight.detach().to("cpu", torch.float32)
    scale = exact.abs().amax(-1) / LARGEST
    # Upwards, so that the largest value is not cut off.
    scale = ((scale.view(torch.int32) + DROPPED_BITS) & ~DROPPED_BITS).view(torch.float32)
    scale = torch.where(scale > 0, scale, 1.0)
    whole = (exact / scale[..., None]).round()
    return Quantized(whole.to(torch.int8), scale)
