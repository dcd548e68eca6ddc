"""Whole numbers of few bits with a factor for each group: how they are found, and how packed.

    weight = number * factor     one float16 for each 32 inputs of a row
    planes[k, ..., i / 8]        bit k of eight numbers, the first lowest, each + 2^(bits - 1)

Of a group's values the one farthest from zero takes the sign of which there is one number more, so
factors may be negative; in four bits that leaves a twentieth less error. A product has 8 and 11
significant bits and is exact in float32. Knows numbers alone: neither names nor files.
"""

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

GROUP = 32  # inputs with one factor; rows of another length are not stored so
# What a group's largest value is cut to, to be tried in turn: 1 / CUTS of itself.
CUTS = tuple(1 + k / 32 for k in range(12))
# The eight bits of a byte as the lowest of eight bytes.
BYTES = np.arange(256, dtype=np.uint8)[:, None]
SPREAD = np.unpackbits(BYTES, axis=1, bitorder="little").view(np.uint64)[:, 0]


class Grouped(NamedTuple):
    """Numbers, and the factor of each group of them along the last dimension."""

    numbers: Tensor  # int8 [..., I]
    factor: Tensor  # float16 [..., I / 32]

    def whole(self) -> Tensor:
        # First to float32: a product of int8 and float16 would be one of float16.
        return (_groups(self.numbers.float()) * self.factor.float()[..., None]).flatten(-2)


def reach(bits: int) -> float:
    """The largest value that numbers of so many bits stand for."""
    return float(torch.finfo(torch.float16).max * 2 ** (bits - 1))


def quantize_groups(weight: Tensor, bits: int) -> Grouped:
    """The numbers and factors whose products are nearest to a weight, of those that are tried.

    What they stand for gives the same numbers again: its largest value is the least number.
    """
    exact = _groups(weight.detach().to("cpu", torch.float32))
    least = -(2 ** (bits - 1))
    low, high = exact.aminmax(dim=-1, keepdim=True)
    largest = torch.where(high > -low, high, low)
    best, factor = torch.zeros_like(exact), torch.ones_like(largest)
    error = torch.full_like(largest, torch.inf)
    for cut in CUTS:
        tried = (largest / (least * cut)).half().float()
        tried = torch.where(tried == 0, 1.0, tried)
        numbers = (exact / tried).round_().clamp_(least, -least - 1)
        its_error = (numbers * tried - exact).square_().sum(-1, keepdim=True)
        is_better = its_error < error
        best = torch.where(is_better, numbers, best)
        factor = torch.where(is_better, tried, factor)
        error = torch.where(is_better, its_error, error)
    return Grouped(best.to(torch.int8).flatten(-2), factor.half().squeeze(-1))


def pack(numbers: Tensor, bits: int) -> Tensor:
    """Numbers in planes, one for each bit: [bits, ..., I / 8], the last byte filled with zeros."""
    above = numbers.numpy().astype(np.int16) + 2 ** (bits - 1)
    planes = np.stack([(above >> k) & 1 for k in range(bits)])
    return torch.from_numpy(np.packbits(planes.astype(np.bool_), axis=-1, bitorder="little"))


def unpack(planes: Tensor, count: int) -> Tensor:
    """The first `count` numbers of each row, int8 [..., I]."""
    # Eight numbers at a time, each in a byte of a word, which no shift here leaves.
    words = np.zeros(planes.shape[1:], np.uint64)
    for k, plane in enumerate(planes.numpy()):
        words |= np.take(SPREAD << np.uint64(k), plane)
    above = words.view(np.uint8)
    above -= np.uint8(2 ** (len(planes) - 1))  # what is below zero wraps, as in int8
    return torch.from_numpy(above.view(np.int8))[..., :count]


def _groups(weight: Tensor) -> Tensor:
    return weight.reshape(*weight.shape[:-1], -1, GROUP)
