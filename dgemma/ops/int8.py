"""Products in whole numbers of eight bits, for CPUs: exact sums, a factor a row on either side.

    y = (round(x / a) @ w.T) * a * b        a: a factor for each row of x; b: for each output

CPUs with VNNI instructions multiply such numbers about four times as fast as float32. Weights lose
nothing if they are stored so already; activations are rounded on their way, row by row. Sums are
whole numbers, so a row's result never depends on the rows beside it.

T rows, A choices, E experts, I inputs, O outputs.
"""

import torch
from torch import Tensor

from dgemma.ops.experts import GroupedLinear
from dgemma.ops.linear import Linear
from dgemma.ops.quantized import Quantized

LARGEST = 127
LEAST = 1e-12  # a row of zeros has a factor too
PIECE = 1 << 18  # sums at a time; what a core's cache holds


def quantize_rows(x_TI: Tensor) -> Quantized:
    """Each row with the factor that lets its greatest be the greatest."""
    x_TI = x_TI.float()
    factor_T1 = x_TI.abs().amax(-1, keepdim=True).clamp_(min=LEAST).div_(LARGEST)
    return Quantized((x_TI / factor_T1).round_().to(torch.int8), factor_T1.squeeze(-1))


def int8_linear(weight: Quantized) -> Linear:
    """A product of a whole weight [O, I] with rows that are rounded for it."""

    def apply(x: Tensor) -> Tensor:
        numbers_TI, factor_T = quantize_rows(x.reshape(-1, x.shape[-1]))
        out_TO = torch.empty(len(numbers_TI), len(weight.numbers))
        _fill(out_TO, numbers_TI, weight)
        return out_TO.mul_(factor_T[:, None]).view(*x.shape[:-1], -1).to(x.dtype)

    return apply


def int8_grouped(weight_EOI: Quantized) -> GroupedLinear:
    """The same for stacked experts, whose rows lie one behind the other."""
    each = [Quantized(*pair) for pair in zip(*weight_EOI, strict=True)]

    def apply(x_AI: Tensor, expert_A: Tensor) -> Tensor:
        counts = torch.bincount(expert_A, minlength=len(each)).tolist()
        numbers_AI, factor_A = quantize_rows(x_AI)
        out_AO = torch.empty(len(x_AI), weight_EOI.numbers.shape[1])
        parts = zip(torch.split(out_AO, counts), torch.split(numbers_AI, counts), each, strict=True)
        for out, numbers, weight in parts:
            _fill(out, numbers, weight)
        return out_AO.mul_(factor_A[:, None]).to(x_AI.dtype)

    return apply


def int8_reference(x_TI: Tensor, weight: Quantized) -> Tensor:
    """The definition, with sums in float64, which are exact."""
    numbers_TI, factor_T = quantize_rows(x_TI)
    sums_TO = numbers_TI.double() @ weight.numbers.double().T
    return (sums_TO.float() * weight.factor * factor_T[:, None]).to(x_TI.dtype)


def _fill(out_TO: Tensor, numbers_TI: Tensor, weight: Quantized) -> None:
    """Write the products of whole rows with a weight, its factors applied."""
    rows = max(1, PIECE // max(1, out_TO.shape[1]))
    for out, numbers in zip(torch.split(out_TO, rows), torch.split(numbers_TI, rows), strict=True):
        if len(out):
            out.copy_(torch._int_mm(numbers, weight.numbers.t())).mul_(weight.factor)
