"""Products with the weights outside the experts, 16-bit or 8-bit, by what suits the rows at hand.

Very few rows go to a kernel that streams the weight; with 8-bit weights, rows are quantized too
(each by its greatest), unless they are very few. Rows may come quantized already: the kernels
between the products have them whole, and write them so.

T tokens, I inputs, O outputs, S parts of a product.
"""

from functools import cache
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dgemma.ops.experts import gated as plain_gated
from dgemma.ops.fast import is_on
from dgemma.ops.fp8 import has_e4m3, quantize
from dgemma.ops.kernels.cuts import MOST, Cut
from dgemma.ops.quantized import Quantized

FEW = 2  # so many rows are streamed past
ALIGNED = 16  # bytes; what the 8-bit product asks of both dimensions
PIECE = 1 << 14  # rows of a vocabulary that are multiplied out together

Rows = Tensor | Quantized

_has_e4m3 = cache(has_e4m3)  # asked by every product


class Weight(NamedTuple):
    """As it is stored: an 8-bit one has a factor for each output."""

    numbers_OI: Tensor
    factor_O: Tensor | None = None

    @property
    def is_8(self) -> bool:
        return self.factor_O is not None


class Fp8Linear(nn.Module):
    """A product with an 8-bit weight; names and shapes as in the released "FP8 dynamic" layout."""

    weight: Tensor
    weight_scale: Tensor

    def __init__(self, weight_OI: Tensor, weight_scale_O1: Tensor) -> None:
        super().__init__()
        self.register_buffer("weight", weight_OI)
        self.register_buffer("weight_scale", weight_scale_O1.float())

    @classmethod
    @torch.no_grad()
    def of(cls, source: nn.Linear) -> "Fp8Linear":
        numbers_OI, factor_O = quantize(source.weight.detach())
        return cls(numbers_OI, factor_O[:, None])

    @property
    def stored(self) -> Weight:
        return Weight(self.weight, self.weight_scale[:, 0])

    def forward(self, x_TI: Tensor) -> Tensor:
        return product(x_TI, self.stored, x_TI.dtype)


def is_few(x_TI: Tensor) -> bool:
    """Whether rows are so few that the weight is streamed past them."""
    return len(x_TI) <= FEW and is_on(x_TI) and x_TI.is_contiguous()


def reads_8(x_TI: Tensor, weight: Weight) -> bool:
    """Whether rows such as these are quantized for such a weight, and may come so already."""
    return weight.is_8 and not is_few(x_TI) and _has_e4m3(x_TI.device)


def product(x: Rows, weight: Weight, dtype: torch.dtype, cut: Cut | None = None) -> Tensor:
    """x @ weight.T, in the type asked for.

    `cut`: how our kernel divides it, where it takes such rows; it may come in parts, [S, T, O].
    """
    if isinstance(x, Tensor):
        if is_few(x) and _can_stream(weight):
            from dgemma.ops.kernels import vector

            return vector.product(x, *weight)
        if weight.factor_O is None:
            return F.linear(x, weight.numbers_OI)
        x = quantize(x)
    assert weight.factor_O is not None, "quantized rows are for quantized weights"
    stored = Quantized(weight.numbers_OI, weight.factor_O)
    if cut is not None and _is_for_cuts(x.numbers, stored.numbers):
        from dgemma.ops.kernels import dense_8

        return dense_8.product(x, stored, dtype, cut)
    if _has_product_8(stored.numbers) and is_on(x.numbers):
        return _product_8(x, stored, dtype)
    return F.linear(x.whole(), stored.whole()).to(dtype)


def gated_product(x: Rows, weight: Weight, dtype: torch.dtype) -> Rows:
    """gelu(gate) * up for a weight that holds the gate half first; quantized if the rows were."""
    if isinstance(x, Tensor) and is_few(x) and _can_stream(weight):
        from dgemma.ops.kernels import vector

        return vector.gated_product(x, *weight)
    return gated(product(x, weight, dtype), eight=isinstance(x, Quantized))


def gated(gate_up_TX: Tensor, *, eight: bool = False) -> Rows:
    """gelu(gate) * up, for a projection that holds the gate half first; if asked, quantized."""
    if is_on(gate_up_TX):
        from dgemma.ops.kernels import layer

        out = layer.gated(gate_up_TX, eight=eight)
        return Quantized(*out) if isinstance(out, tuple) else out
    out_TI = plain_gated(gate_up_TX)
    return quantize(out_TI) if eight else out_TI


def scores(hidden_TD: Tensor, weight: Weight, out_TV: Tensor | None = None) -> Tensor:
    """What the head says of every token, before the soft cap; written to `out_TV` if given."""
    if weight.factor_O is None:
        if out_TV is None:
            return F.linear(hidden_TD, weight.numbers_OI)
        return torch.mm(hidden_TD, weight.numbers_OI.t(), out=out_TV)
    if out_TV is None:
        if is_few(hidden_TD) and _can_stream(weight):
            return product(hidden_TD, weight, hidden_TD.dtype)
        out_TV = hidden_TD.new_empty(len(hidden_TD), len(weight.numbers_OI))
    x, stored = quantize(hidden_TD), Quantized(weight.numbers_OI, weight.factor_O)
    if _has_product_8(stored.numbers) and is_on(x.numbers):
        return _product_8(x, stored, out_TV.dtype, out_TV)
    whole_TD = x.whole()
    parts = zip(*(torch.split(part, PIECE) for part in (*stored, out_TV.t())), strict=True)
    for numbers, factor, out_PT in parts:
        out_PT.copy_(F.linear(whole_TD, Quantized(numbers, factor).whole()).t())
    return out_TV


def head_logits(hidden_TD: Tensor, weight: Weight, softcap: float | None, out_TV: Tensor) -> Tensor:
    """Soft-capped float32 logits of every token, written to `out_TV`."""
    if is_few(hidden_TD) and _can_stream(weight):
        from dgemma.ops.kernels import vector

        return vector.scores(hidden_TD, weight, softcap, out_TV)
    raw_TV = scores(hidden_TD, weight).float()
    return out_TV.copy_(raw_TV if softcap is None else torch.tanh(raw_TV / softcap) * softcap)


def _product_8(
    x: Quantized, stored: Quantized, dtype: torch.dtype, out_TO: Tensor | None = None
) -> Tensor:
    into = {} if out_TO is None else {"out": out_TO}
    return torch._scaled_mm(
        x.numbers,
        stored.numbers.t(),
        scale_a=x.factor[:, None],
        scale_b=stored.factor[None],
        out_dtype=dtype,
        use_fast_accum=True,
        **into,
    )


def _can_stream(weight: Weight) -> bool:
    return weight.factor_O is None or _has_e4m3(weight.numbers_OI.device)


def _is_for_cuts(x_TI: Tensor, numbers_OI: Tensor) -> bool:
    # The copy engine wants rows of a multiple of 16 bytes.
    is_aligned = numbers_OI.shape[1] % ALIGNED == 0
    is_some = FEW < len(x_TI) <= MOST
    return is_some and is_aligned and is_on(x_TI) and _has_e4m3(x_TI.device)


def _has_product_8(numbers_OI: Tensor) -> bool:
    is_aligned = all(size % ALIGNED == 0 for size in numbers_OI.shape)
    return numbers_OI.device.type == "cuda" and is_aligned and _has_e4m3(numbers_OI.device)
