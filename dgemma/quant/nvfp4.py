"""Numbers in four bits (e2m1), sixteen to a scale of eight bits (e4m3), all under one in float32.

    weight = e2m1 * scale * factor

The product of the first two has six significant bits and is exact in bfloat16; the factor, one for
a whole matrix, brings the largest scale near the top of its range. Two numbers share a byte, the
first in its low half.

O outputs, I inputs, G groups of sixteen inputs.
"""

from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from dgemma.errors import UsageError

GROUP = 16
VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # of codes 0 to 7; 8 to 15 are their negatives
LARGEST, LARGEST_SCALE, LEAST_SCALE = 6.0, 448.0, 2.0**-9
E4M3 = torch.float8_e4m3fn


class Packed(NamedTuple):
    """A matrix in four bits."""

    numbers_OI: Tensor  # uint8, half as many as inputs
    scale_OG: Tensor  # e4m3
    factor: Tensor  # float32, a single number

    def whole(self) -> Tensor:
        """Dequantize to float32, rounded once."""
        scale_OG = self.scale_OG.float()
        groups_OGJ = unpack(self.numbers_OI).view(*scale_OG.shape, GROUP)
        return (groups_OGJ * scale_OG[..., None] * self.factor).flatten(-2)


def unpack(numbers: Tensor) -> Tensor:
    """The e2m1 numbers of packed bytes, as float32; twice as many in the last dimension."""
    codes = torch.tensor([*VALUES, *(-value for value in VALUES)], device=numbers.device)
    byte = torch.arange(256, device=numbers.device)
    pairs = torch.stack([codes[byte & 15], codes[byte >> 4]], -1)
    return pairs[numbers.int()].flatten(-2)


def factor_of(*weights: Tensor) -> Tensor:
    """The factor that fits all of these matrices."""
    largest = torch.stack([weight.abs().amax().float() for weight in weights]).amax()
    return torch.where(largest > 0, largest / (LARGEST * LARGEST_SCALE), 1.0)


def quantize(weight_OI: Tensor, factor: Tensor) -> Packed:
    """The nearest numbers, ties to even; each group's scale lets its largest be the largest."""
    if weight_OI.shape[-1] % GROUP:
        raise UsageError(f"rows of {weight_OI.shape[-1]} cannot be split into groups of {GROUP}")
    groups = weight_OI.float().reshape(*weight_OI.shape[:-1], -1, GROUP)
    scale_OG = groups.abs().amax(-1) / LARGEST / factor
    scale_OG = scale_OG.clamp(LEAST_SCALE, LARGEST_SCALE).to(E4M3)
    code = _nearest(groups / (scale_OG.float() * factor)[..., None]).flatten(-2)
    return Packed(code[..., 0::2] | code[..., 1::2] << 4, scale_OG, factor)


def _nearest(x: Tensor) -> Tensor:
    """Codes of the nearest e2m1 numbers: how many of the bounds between them a number has passed.

    On a bound the even code is meant, so every second one is passed by reaching it.
    """
    size = x.abs()
    code = (x < 0).to(torch.uint8) << 3
    for index, (low, high) in enumerate(pairwise(VALUES)):
        bound = (low + high) / 2
        code += size >= bound if index % 2 else size > bound
    return code
