"""Products in 8-bit floats (e4m3): a factor for each output of a weight, and for each row it meets.

Half the bytes of bfloat16, which is what a step's time is made of. Activations are quantized on
their way, row by row ("dynamic"); sums are float32.

T tokens, K experts per token, A expert_outputs, E experts, D width, I expert width, O outputs.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dgemma.model.moe import GroupedLinear, Linear, per_expert
from dgemma.quant.qtensor import Quantized

E4M3 = torch.float8_e4m3fn
LARGEST = 448.0
LEAST = 1e-12  # a row of zeros has a factor too
CAPABILITY = (8, 9)  # of a GPU that has them
PIECE = 1 << 14  # rows of a vocabulary that are dequantized together


def has_e4m3(device: torch.device) -> bool:
    """True if the device has fp8 arithmetic; a CPU computes by definition."""
    if device.type != "cuda":
        return True
    return torch.version.hip is None and torch.cuda.get_device_capability(device) >= CAPABILITY


def quantize(x: Tensor) -> Quantized:
    """Each row (of the last dimension) with a factor that lets its greatest be the greatest."""
    factor = x.float().abs().amax(-1).clamp(min=LEAST) / LARGEST
    return Quantized((x.float() / factor[..., None]).to(E4M3), factor)


def fp8_grouped(weight_EOD: Quantized) -> GroupedLinear:
    """The definition, one expert at a time."""
    pairs = zip(weight_EOD.numbers, weight_EOD.factor, strict=True)
    return per_expert([fp8_linear(Quantized(*pair)) for pair in pairs])


def fp8_linear(weight_OD: Quantized) -> Linear:
    """A product of a quantized weight with rows that are quantized for it."""

    def apply(x_TD: Tensor) -> Tensor:
        return F.linear(quantize(x_TD).whole(), weight_OD.whole()).to(x_TD.dtype)

    return apply


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
        return fp8_linear(Quantized(*self.stored))(x_TI)  # type: ignore[arg-type]


def fp8_logits(hidden_TD: Tensor, weight: Weight) -> Tensor:
    """Multiply by an fp8 LM head, a piece of the vocabulary at a time."""
    assert weight.factor_O is not None
    rows_TD = quantize(hidden_TD).whole()
    pieces = zip(*(torch.split(part, PIECE) for part in weight), strict=True)  # type: ignore[arg-type]
    logits = [F.linear(rows_TD, Quantized(*piece).whole()) for piece in pieces]
    return torch.cat(logits, dim=-1).to(hidden_TD.dtype)
