"""A layer's experts, nine tenths of its weights, in 8-bit floats.

From 16-bit weights, or exactly the numbers of a checkpoint that has them so. `packed` puts them
into a model.
"""

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from dgemma.model import Experts
from dgemma.ops.experts import mix
from dgemma.ops.fp8 import E4M3, fp8_choices, quantize, reads_8
from dgemma.ops.quantized import Quantized

if TYPE_CHECKING:
    from dgemma.ops.kernels.buckets import Buckets


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

    def reads_8(self, x_TD: Tensor) -> bool:
        """Whether rows such as these may come quantized already."""
        return reads_8(x_TD, *self.stored)

    def choices(
        self,
        x: Tensor | Quantized,
        ids_TK: Tensor,
        into: "Buckets | None" = None,
        dtype: torch.dtype | None = None,
    ) -> Tensor:
        """`dtype`: of what is given, for rows that come quantized."""
        return fp8_choices(x, ids_TK, *self.stored, into, dtype)

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
