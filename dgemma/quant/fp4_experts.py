"""A layer's experts, nine tenths of its weights, in four bits.

From 16-bit weights, or from the numbers of a checkpoint that has them in four bits already; these
are taken over exactly. Either way they are laid once in the order the kernels read
(`ops/nvfp4_order.py`), 4.5 bits a weight. `packed` puts them into a model.

E experts, O outputs, I inputs.
"""

from collections.abc import Iterable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dgemma.model.gemma import Experts
from dgemma.model.moe import GroupedLinear, Linear, moe_forward, per_expert
from dgemma.quant.nvfp4 import Packed, factor_of, quantize
from dgemma.quant.nvfp4_tiles import Laid, empty, lay, lay_many

AT_ONCE = 4  # experts; a layer's released ones have 3 GB in float32
# An expert as a checkpoint holds it: gate, up, down.
PackedExpert = tuple[Packed, Packed, Packed]


class Fp4Experts(nn.Module):
    """The mixture of experts with 4-bit weights and 16-bit activations."""

    gate_up_words: Tensor
    gate_up_scales: Tensor
    gate_up_factor: Tensor
    down_words: Tensor
    down_scales: Tensor
    down_factor: Tensor

    def __init__(self, gate_up: Laid, down: Laid) -> None:
        super().__init__()
        self.width, self.inner = down.outputs, down.inputs
        for name, laid in (("gate_up", gate_up), ("down", down)):
            self.register_buffer(f"{name}_words", laid.words_EW)
            self.register_buffer(f"{name}_scales", laid.scales_EW)
            self.register_buffer(f"{name}_factor", laid.factor_EH)

    @classmethod
    def quantized(cls, source: Experts) -> "Fp4Experts":
        """The nearest of another's weights; gate and up of an expert share a factor."""
        return cls(lay_stacked(source.gate_up_proj, 2), lay_stacked(source.down_proj, 1))

    @classmethod
    def packed(
        cls, experts: Iterable[PackedExpert], num_experts: int, device: torch.device
    ) -> "Fp4Experts":
        """Exactly the numbers of a checkpoint, expert by expert, as they come."""
        made: tuple[Laid, Laid] | None = None
        for index, (gate, up, down) in enumerate(experts):
            made = made or _rooms(num_experts, gate, device)
            for part, packed in enumerate((gate, up)):
                lay(_moved(packed, device), made[0], index, part)
            lay(_moved(down, device), made[1], index)
        assert made is not None, "a model has experts"
        return cls(*made)

    @property
    def gate_up(self) -> Laid:
        laid = self.gate_up_words, self.gate_up_scales, self.gate_up_factor
        return Laid(*laid, 2 * self.inner, self.width)

    @property
    def down(self) -> Laid:
        return Laid(self.down_words, self.down_scales, self.down_factor, self.width, self.inner)

    def forward(self, x_TD: Tensor, ids_TK: Tensor, share_TK: Tensor) -> Tensor:
        gate_up, down = fp4_grouped(self.gate_up), fp4_grouped(self.down)
        return moe_forward(x_TD, ids_TK, share_TK, gate_up, down)


def fp4_grouped(weight: Laid) -> GroupedLinear:
    """The definition, one expert at a time; its weights are there in float32 for that long."""

    def product(expert: int) -> Linear:
        return lambda x_TD: F.linear(x_TD.float(), weight.whole(expert)).to(x_TD.dtype)

    return per_expert([product(expert) for expert in range(len(weight.words_EW))])


@torch.no_grad()
def lay_stacked(weight_EOI: Tensor, parts: int) -> Laid:
    """Stacked weights in four bits, a few experts at a time: no second copy of the whole is made.

    The parts of an expert's outputs share a factor.
    """
    experts, outputs, inputs = weight_EOI.shape
    laid = empty(experts, outputs, inputs, parts, weight_EOI.device)
    for begin in range(0, experts, AT_ONCE):
        few_EOI = weight_EOI[begin : begin + AT_ONCE]
        factor_E = torch.stack([factor_of(weight_OI) for weight_OI in few_EOI])
        lay_many(quantize(few_EOI, factor_E[:, None, None]), laid, begin)
    return laid


def _rooms(num_experts: int, gate: Packed, device: torch.device) -> tuple[Laid, Laid]:
    inner, half = gate.numbers_OI.shape
    up = empty(num_experts, 2 * inner, 2 * half, 2, device)
    return up, empty(num_experts, 2 * half, inner, 1, device)


def _moved(packed: Packed, device: torch.device) -> Packed:
    return Packed(*(tensor.to(device, non_blocking=True) for tensor in packed))
