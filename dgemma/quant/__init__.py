"""Quantized weight formats. Here: values with scales, and int8 weights with a scale per row.

An int8 scale has 16 significant bits, so that `values * scale` is exact in float32, the same on
every machine, and quantizes to the same values again.
"""

from typing import NamedTuple

import torch
from torch import Tensor

INT8_MAX = 127
DROPPED_BITS = 0xFF  # low bits of a 24-bit scale: its product with a 7-bit integer fits a float32


class QTensor(NamedTuple):
    """Quantized values and the scale of each row (of the last dimension)."""

    values: Tensor  # int8 or e4m3
    scale: Tensor  # float32

    def dequantize(self) -> Tensor:
        """Return `values * scale` in float32."""
        return self.values.float() * self.scale[..., None]


def quantize_int8(weight: Tensor) -> QTensor:
    """Quantize per row: scale = absmax / INT8_MAX, rounded up to 16 bits."""
    exact = weight.detach().to("cpu", torch.float32)
    scale = exact.abs().amax(-1) / INT8_MAX
    # Rounded up, so that the largest value is not clipped.
    scale = ((scale.view(torch.int32) + DROPPED_BITS) & ~DROPPED_BITS).view(torch.float32)
    scale = torch.where(scale > 0, scale, 1.0)
    return QTensor((exact / scale[..., None]).round().to(torch.int8), scale)
