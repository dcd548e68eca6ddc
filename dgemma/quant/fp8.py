"""FP8 (e4m3) weights: a scale for each output, and for each row of activations ("FP8 dynamic").

Half the bytes of bfloat16, and a step is bound by bytes. Activations are quantized per row on the
fly; sums are float32. The functions here define the kernels of `backends/cuda`.

T tokens, K experts per token, E experts, D width, O outputs, I inputs.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dgemma.model.gemma import Experts
from dgemma.model.moe import GroupedLinear, Linear, moe_forward, per_expert
from dgemma.quant import QTensor

E4M3 = torch.float8_e4m3fn
FP8_MAX = 448.0
MIN_AMAX = 1e-12  # keeps the scale of a zero row positive
MIN_CAPABILITY = (8, 9)  # lowest compute capability with fp8 arithmetic
VOCAB_PIECE = 1 << 14  # vocabulary rows dequantized together


def has_e4m3(device: torch.device) -> bool:
    """True if the device has fp8 arithmetic; a CPU uses the reference."""
    if device.type != "cuda":
        return True
    return torch.version.hip is None and torch.cuda.get_device_capability(device) >= MIN_CAPABILITY


def quantize(x: Tensor) -> QTensor:
    """Quantize per row: scale = absmax / FP8_MAX."""
    scale = x.float().abs().amax(-1).clamp(min=MIN_AMAX) / FP8_MAX
    return QTensor((x.float() / scale[..., None]).to(E4M3), scale)


@torch.no_grad()
def quantize_stacked(weight_EOD: Tensor) -> QTensor:
    """Quantize one expert at a time, without a float32 copy of all."""
    values = torch.empty(weight_EOD.shape, dtype=E4M3, device=weight_EOD.device)
    scale = torch.empty(weight_EOD.shape[:2], dtype=torch.float32, device=weight_EOD.device)
    for index, weight_OD in enumerate(weight_EOD):
        values[index], scale[index] = quantize(weight_OD)
    return QTensor(values, scale)


def fp8_linear(weight_OD: QTensor) -> Linear:
    """Return x -> x @ weight.T with quantized rows."""

    def apply(x_TD: Tensor) -> Tensor:
        return F.linear(quantize(x_TD).dequantize(), weight_OD.dequantize()).to(x_TD.dtype)

    return apply


def fp8_grouped(weight_EOD: QTensor) -> GroupedLinear:
    """Apply `fp8_linear` expert by expert."""
    pairs = zip(weight_EOD.values, weight_EOD.scale, strict=True)
    return per_expert([fp8_linear(QTensor(*pair)) for pair in pairs])


def fp8_logits(hidden_TD: Tensor, weight: "LinearWeight") -> Tensor:
    """Multiply by an fp8 LM head, one slice of the vocabulary at a time."""
    assert weight.scale_O is not None
    rows_TD = quantize(hidden_TD).dequantize()
    pieces = zip(*(torch.split(x, VOCAB_PIECE) for x in weight), strict=True)  # type: ignore[arg-type]
    logits = [F.linear(rows_TD, QTensor(*piece).dequantize()) for piece in pieces]
    return torch.cat(logits, dim=-1).to(hidden_TD.dtype)


class LinearWeight(NamedTuple):
    """The stored weight of a linear; in fp8 with a scale per output."""

    values_OI: Tensor
    scale_O: Tensor | None = None

    @property
    def is_fp8(self) -> bool:
        return self.scale_O is not None


class Fp8Linear(nn.Module):
    """A linear with an fp8 weight; names and shapes of the released "FP8 dynamic" layout."""

    weight: Tensor
    weight_scale: Tensor

    def __init__(self, weight_OI: Tensor, weight_scale_O1: Tensor) -> None:
        super().__init__()
        self.register_buffer("weight", weight_OI)
        self.register_buffer("weight_scale", weight_scale_O1.float())

    @classmethod
    @torch.no_grad()
    def quantized(cls, source: nn.Linear) -> "Fp8Linear":
        values_OI, scale_O = quantize(source.weight.detach())
        return cls(values_OI, scale_O[:, None])

    @property
    def stored(self) -> LinearWeight:
        return LinearWeight(self.weight, self.weight_scale[:, 0])

    def forward(self, x_TI: Tensor) -> Tensor:
        return fp8_linear(QTensor(self.weight, self.weight_scale[:, 0]))(x_TI)


class Fp8Experts(nn.Module):
    """A layer's experts with fp8 weights; names and shapes of the released layouts."""

    gate_up_proj: Tensor
    gate_up_scale: Tensor
    down_proj: Tensor
    down_scale: Tensor

    def __init__(self, gate_up: QTensor, down: QTensor) -> None:
        super().__init__()
        for name, weight in (("gate_up", gate_up), ("down", down)):
            self.register_buffer(f"{name}_proj", weight.values)
            self.register_buffer(f"{name}_scale", weight.scale)

    @classmethod
    def quantized(cls, source: Experts) -> "Fp8Experts":
        return cls(quantize_stacked(source.gate_up_proj), quantize_stacked(source.down_proj))

    @property
    def stored(self) -> tuple[QTensor, QTensor]:
        gate_up = QTensor(self.gate_up_proj, self.gate_up_scale)
        return gate_up, QTensor(self.down_proj, self.down_scale)

    def forward(self, x_TD: Tensor, topk_ids_TK: Tensor, topk_weights_TK: Tensor) -> Tensor:
        gate_up, down = (fp8_grouped(weight) for weight in self.stored)
        return moe_forward(x_TD, topk_ids_TK, topk_weights_TK, gate_up, down)
