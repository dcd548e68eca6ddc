"""Turns a model's experts, nine tenths of its weights, into 8-bit floats, layer by layer.

Modules are swapped from outside, in place: never more than one layer is there twice. The router,
norms, attention, the dense part, head and embedding stay as they are. The model can then no longer
be trained or saved.
"""

import torch
from torch import Tensor, nn

from dgemma.model import Experts, Gemma
from dgemma.ops.experts import mix
from dgemma.ops.fp8 import E4M3, Quantized, fp8_choices, quantize


class Fp8Experts(nn.Module):
    """The mixture of experts with 8-bit weights; names and shapes as in the released layouts."""

    gate_up_proj: Tensor
    gate_up_scale: Tensor
    down_proj: Tensor
    down_scale: Tensor

    def __init__(self, source: Experts) -> None:
        super().__init__()
        for name in ("gate_up", "down"):
            weight, factor = quantize_stacked(getattr(source, f"{name}_proj"))
            self.register_buffer(f"{name}_proj", weight)
            self.register_buffer(f"{name}_scale", factor)

    def choices(self, x_TD: Tensor, ids_TK: Tensor) -> Tensor:
        gate_up = Quantized(self.gate_up_proj, self.gate_up_scale)
        return fp8_choices(x_TD, ids_TK, gate_up, Quantized(self.down_proj, self.down_scale))

    def forward(self, x_TD: Tensor, ids_TK: Tensor, share_TK: Tensor) -> Tensor:
        return mix(self.choices(x_TD, ids_TK), share_TK).to(x_TD.dtype)


@torch.no_grad()
def quantize_stacked(weight_EOD: Tensor) -> Quantized:
    """Expert by expert, so that no float32 copy of the whole is made."""
    numbers = torch.empty(weight_EOD.shape, dtype=E4M3, device=weight_EOD.device)
    factor = torch.empty(weight_EOD.shape[:2], dtype=torch.float32, device=weight_EOD.device)
    for index, weight_OD in enumerate(weight_EOD):
        numbers[index], factor[index] = quantize(weight_OD)
    return Quantized(numbers, factor)


def quantize_experts(model: Gemma) -> Gemma:
    """Swap every layer's experts for their 8-bit form, in place."""
    model.requires_grad_(False)
    for layer in model.layers:
        layer.experts = Fp8Experts(layer.experts)  # type: ignore[arg-type]
    return model
