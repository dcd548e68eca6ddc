"""A layer's experts, nine tenths of its weights, in 8-bit floats.

From 16-bit weights, or exactly the numbers of a checkpoint that has them so. `packed` puts them
into a model.
"""

import torch
from torch import Tensor, nn

from dgemma.model.gemma import Experts
from dgemma.model.moe import moe_forward
from dgemma.quant.fp8 import E4M3, fp8_grouped, quantize
from dgemma.quant.qtensor import Quantized


class Fp8Experts(nn.Module):
    """The mixture of experts with 8-bit weights; names and shapes as in the released layouts."""

    gate_up_proj: Tensor
    gate_up_scale: Tensor
    down_proj: Tensor
    down_scale: Tensor

    def __init__(self, source: Experts) -> None:
        super().__init__()
        self._hold(quantize_stacked(source.gate_up_proj), quantize_stacked(source.down_proj))

    @classmethod
    def packed(cls, gate_up: Quantized, down: Quantized) -> "Fp8Experts":
        """Exactly the numbers of a checkpoint."""
        made = cls.__new__(cls)
        nn.Module.__init__(made)
        made._hold(gate_up, down)
        return made

    def _hold(self, gate_up: Quantized, down: Quantized) -> None:
        for name, (weight, factor) in (("gate_up", gate_up), ("down", down)):
            self.register_buffer(f"{name}_proj", weight)
            self.register_buffer(f"{name}_scale", factor)

    @property
    def stored(self) -> tuple[Quantized, Quantized]:
        gate_up = Quantized(self.gate_up_proj, self.gate_up_scale)
        return gate_up, Quantized(self.down_proj, self.down_scale)

    def forward(self, x_TD: Tensor, ids_TK: Tensor, share_TK: Tensor) -> Tensor:
        gate_up, down = (fp8_grouped(weight) for weight in self.stored)
        return moe_forward(x_TD, ids_TK, share_TK, gate_up, down)


@torch.no_grad()
def quantize_stacked(weight_EOD: Tensor) -> Quantized:
    """Expert by expert, so that no float32 copy of the whole is made."""
    numbers = torch.empty(weight_EOD.shape, dtype=E4M3, device=weight_EOD.device)
    factor = torch.empty(weight_EOD.shape[:2], dtype=torch.float32, device=weight_EOD.device)
    for index, weight_OD in enumerate(weight_EOD):
        numbers[index], factor[index] = quantize(weight_OD)
    return Quantized(numbers, factor)
