"""Products in whole numbers of eight bits, for CPUs: exact sums, a factor a row on either side.

    y = (round(x / a) @ w.T) * a * b        a: a factor for each row of x; b: for each output

CPUs with VNNI instructions multiply such numbers about four times as fast as float32. Weights lose
nothing if they are stored so already; activations are rounded on their way, row by row. Sums are
whole numbers, so a row's result never depends on the rows beside it.

T rows, A choices, E experts, I inputs, O outputs.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from dgemma.backends.cpu.packed_linear import Linear
from dgemma.model.moe import gelu_and_mul_cpu
from dgemma.quant.qtensor import Quantized

# As tensors, which small passes take several times as fast as plain numbers.
STEP = torch.tensor(1 / 127)  # of the greatest number in a row
LEAST = torch.tensor(1e-12)  # a row of zeros has a factor too

# Rounded rows in the order of their experts, and these, to each row's own product.
Int8Grouped = Callable[[Quantized, Tensor], Tensor]


def quantize_rows(x_TI: Tensor) -> Quantized:
    """Each row with the factor that lets its greatest be the greatest."""
    x_TI = x_TI.float()
    scratch_TI = x_TI.abs()
    factor_T1 = torch.maximum(scratch_TI.amax(-1, keepdim=True), LEAST).mul_(STEP)
    torch.div(x_TI, factor_T1, out=scratch_TI).round_()
    return Quantized(scratch_TI.to(torch.int8), factor_T1.squeeze(-1))


def int8_linear(weight: Quantized) -> Linear:
    """A product of a whole weight [O, I] with rows that are rounded for it."""
    numbers_IO = weight.numbers.t()

    def apply(x: Tensor) -> Tensor:
        numbers_TI, factor_T = quantize_rows(x.reshape(-1, x.shape[-1]))
        sums_TO = torch._int_mm(numbers_TI, numbers_IO)
        out_TO = _multiplied_out(sums_TO, weight.factor, factor_T)
        return out_TO.view(*x.shape[:-1], -1).to(x.dtype)

    return apply


def int8_grouped(weight_EOI: Quantized) -> Int8Grouped:
    """The same for stacked experts, whose rows lie one behind the other and are rounded already."""
    each_IO = [numbers_OI.t() for numbers_OI in weight_EOI.numbers]
    outputs = weight_EOI.numbers.shape[1]

    def apply(rows: Quantized, expert_A: Tensor) -> Tensor:
        counts = torch.bincount(expert_A, minlength=len(each_IO)).tolist()
        sums_AO = torch.empty(len(expert_A), outputs, dtype=torch.int32)
        parts = zip(
            torch.split(rows.numbers, counts), each_IO, torch.split(sums_AO, counts), strict=True
        )
        for numbers, numbers_IO, sums in parts:
            if len(numbers):
                torch._int_mm(numbers, numbers_IO, out=sums)
        return _multiplied_out(sums_AO, weight_EOI.factor.index_select(0, expert_A), rows.factor)

    return apply


def int8_experts(
    x_TD: Tensor, ids_TK: Tensor, share_TK: Tensor, gate_up: Int8Grouped, down: Int8Grouped
) -> Tensor:
    """`experts` of `ops/experts.py`, whose tokens are rounded once, not once for each expert.

    Shares are multiplied into the factors of what comes last: one number for a row.
    """
    expert_A, order_A = ids_TK.flatten().sort(stable=True)
    token_A = order_A // ids_TK.shape[1]
    rows = Quantized(*(part.index_select(0, token_A) for part in quantize_rows(x_TD)))
    hidden = quantize_rows(gelu_and_mul_cpu(gate_up(rows, expert_A)))
    share_A = share_TK.flatten().index_select(0, order_A)
    out_AD = down(Quantized(hidden.numbers, hidden.factor * share_A), expert_A)
    # In the order of each token's choices, so that sums do not depend on others'.
    out_TKD = out_AD.index_select(0, order_A.argsort()).view(*ids_TK.shape, -1)
    return out_TKD.sum(1).to(x_TD.dtype)


def int8_reference(x_TI: Tensor, weight: Quantized) -> Tensor:
    """The definition, with sums in float64, which are exact."""
    numbers_TI, factor_T = quantize_rows(x_TI)
    sums_TO = numbers_TI.double() @ weight.numbers.double().T
    return (sums_TO.float() * weight.factor * factor_T[:, None]).to(x_TI.dtype)


def _multiplied_out(sums_TO: Tensor, of_outputs: Tensor, of_rows_T: Tensor) -> Tensor:
    """Dequantize integer sums in place by the scales of outputs and rows."""
    out_TO = sums_TO.view(torch.float32).copy_(sums_TO)
    return out_TO.mul_(of_outputs).mul_(of_rows_T[:, None])
