"""Products in 8-bit floats (e4m3): a factor for each output of a weight, and for each row it meets.

Half the bytes of bfloat16, which is what a step's time is made of. Activations are quantized on
their way, row by row ("dynamic"); sums are float32.

T tokens, K experts per token, A choices, E experts, D width, I expert width, O outputs.
"""

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from dgemma.ops.experts import GroupedLinear, choices, one_by_one
from dgemma.ops.fast import is_on
from dgemma.ops.linear import Linear
from dgemma.ops.quantized import Quantized

if TYPE_CHECKING:
    from dgemma.ops.kernels.buckets import Buckets

E4M3 = torch.float8_e4m3fn
LARGEST = 448.0
LEAST = 1e-12  # a row of zeros has a factor too
CAPABILITY = (8, 9)  # of a GPU that has them


def has_e4m3(device: torch.device) -> bool:
    """Whether there is arithmetic for these numbers; on a CPU it is done by definition."""
    if device.type != "cuda":
        return True
    return torch.version.hip is None and torch.cuda.get_device_capability(device) >= CAPABILITY


def quantize(x: Tensor) -> Quantized:
    """Each row (of the last dimension) with a factor that lets its greatest be the greatest."""
    if is_on(x) and x.dim() == 2 and x.is_contiguous():
        from dgemma.ops.kernels import experts as kernels

        return Quantized(*kernels.quantize(x))
    factor = x.float().abs().amax(-1).clamp(min=LEAST) / LARGEST
    return Quantized((x.float() / factor[..., None]).to(E4M3), factor)


def fp8_choices(
    x: Tensor | Quantized,
    ids_TK: Tensor,
    gate_up: Quantized,
    down: Quantized,
    into: "Buckets | None" = None,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """What each choice of each token gives, [A, D], not yet weighted.

    Rows may come quantized where `reads_8` says so; then `dtype` is that of what is given.
    """
    if isinstance(x, Tensor):
        if not _has_kernel(x, gate_up, down):
            return choices(x, ids_TK, fp8_grouped(gate_up), fp8_grouped(down))
        from dgemma.ops.kernels import experts_1

        if len(x) <= experts_1.FEW:  # rows stay in 16 bits: there is nothing to save
            factors = (gate_up.factor, down.factor)
            return experts_1.choices(x, ids_TK, gate_up.numbers, down.numbers, factors)
        dtype = x.dtype
        x = quantize(x)
    from dgemma.ops.kernels import experts as kernels

    assert dtype is not None, "quantized rows do not tell what type they had"
    return kernels.choices_8(x, ids_TK, gate_up, down, dtype, into)


def reads_8(x_TD: Tensor, gate_up: Quantized, down: Quantized) -> bool:
    """Whether rows such as these are quantized for such experts, and may come so already."""
    if not _has_kernel(x_TD, gate_up, down):
        return False
    from dgemma.ops.kernels import experts_1

    return len(x_TD) > experts_1.FEW


def _has_kernel(x_TD: Tensor, gate_up: Quantized, down: Quantized) -> bool:
    # The copy engine wants rows of a multiple of 16 bytes.
    is_aligned = all(weight.numbers.shape[2] % 16 == 0 for weight in (gate_up, down))
    return is_aligned and is_on(x_TD, "experts")


def fp8_grouped(weight_EOD: Quantized) -> GroupedLinear:
    """The definition, one expert at a time."""
    pairs = zip(weight_EOD.numbers, weight_EOD.factor, strict=True)
    return one_by_one([fp8_linear(Quantized(*pair)) for pair in pairs])


def fp8_linear(weight_OD: Quantized) -> Linear:
    """A product of a quantized weight with rows that are quantized for it."""

    def apply(x_TD: Tensor) -> Tensor:
        return F.linear(quantize(x_TD).whole(), weight_OD.whole()).to(x_TD.dtype)

    return apply
