"""The mixture of experts where gradients are wanted: the same function, laid out for its backward.

Each expert's rows begin at a multiple of 8, which the grouped kernel needs for the gradient of the
weights, and both ways between tokens and slots are gathers: a gather's own gradient would be a
scatter with additions, which is slow and, on a GPU, not the same twice.

T tokens, K experts per token, E experts, S slots, D width, I expert width.
"""

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from dgemma.model.moe import gelu_and_mul

ALIGNMENT = 8


class Slots(NamedTuple):
    """Slot of each (token, expert) assignment among rows sorted by expert, and back."""

    slot_TK: Tensor
    choice_S: Tensor  # number of the choice, T * K in all; -1: an empty slot
    ends_E: Tensor  # int32: where each expert's slots end


def routed_experts(
    x_TD: Tensor, ids_TK: Tensor, share_TK: Tensor, gate_up_EID: Tensor, down_EDI: Tensor
) -> Tensor:
    """Each token through its experts, weighted and summed."""
    slots = assign(ids_TK, len(gate_up_EID))
    x_SD = _Spread.apply(x_TD, slots.slot_TK, slots.choice_S)  # type: ignore[no-untyped-call]
    hidden_SI = gelu_and_mul(grouped(x_SD, gate_up_EID, slots.ends_E))
    out_SD = grouped(hidden_SI, down_EDI, slots.ends_E)
    out_TKD: Tensor = _Collect.apply(out_SD, slots.slot_TK, slots.choice_S)  # type: ignore[no-untyped-call]
    return (out_TKD * share_TK.to(out_TKD.dtype)[..., None]).sum(1).to(x_TD.dtype)


def assign(ids_TK: Tensor, num_experts: int) -> Slots:
    """Give every choice a slot; empty slots close each expert's range, and the whole."""
    flat_A = ids_TK.flatten()
    choices = len(flat_A)
    experts_E = torch.arange(num_experts, device=flat_A.device)
    counts_E = (flat_A[None] == experts_E[:, None]).sum(-1)
    padded_E = (counts_E + ALIGNMENT - 1) // ALIGNMENT * ALIGNMENT
    ends_E = padded_E.cumsum(0)
    order_A = flat_A.argsort(stable=True)
    # The rank among all choices, moved by the empty slots of the experts before.
    gap_E = (ends_E - padded_E) - (counts_E.cumsum(0) - counts_E)
    sorted_slot_A = torch.arange(choices, device=flat_A.device) + gap_E[flat_A[order_A]]
    slot_A = torch.empty_like(order_A).scatter_(0, order_A, sorted_slot_A)
    # The most there can be; those behind the last expert's end belong to nobody.
    size = -(-choices // ALIGNMENT) * ALIGNMENT + ALIGNMENT * num_experts
    choice_S = order_A.new_full((size,), -1).scatter_(0, sorted_slot_A, order_A)
    return Slots(slot_A.view_as(ids_TK), choice_S, ends_E.to(torch.int32))


def grouped(x_SD: Tensor, weight_EOD: Tensor, ends_E: Tensor) -> Tensor:
    """Each expert's rows times its own weight; what stands in rows of nobody is not defined."""
    if x_SD.device.type == "cuda":
        return F.grouped_mm(x_SD, weight_EOD.transpose(1, 2), offs=ends_E)
    ends = [0, *ends_E.tolist()]
    pieces = [x_SD[a:b] @ w.T for a, b, w in zip(ends, ends[1:], weight_EOD, strict=False)]
    rest = x_SD.new_zeros(len(x_SD) - ends[-1], weight_EOD.shape[1])
    return torch.cat([*pieces, rest])


class _Spread(torch.autograd.Function):
    """Tokens to slots; backwards, the sum over a token's slots."""

    @staticmethod
    def forward(ctx: Any, x_TD: Tensor, slot_TK: Tensor, choice_S: Tensor) -> Tensor:
        ctx.save_for_backward(slot_TK)
        x_SD = x_TD[choice_S.clamp(min=0) // slot_TK.shape[1]]
        return torch.where(choice_S[:, None] >= 0, x_SD, 0)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        (slot_TK,) = ctx.saved_tensors
        return grads[0][slot_TK].sum(1), None, None


class _Collect(torch.autograd.Function):
    """Slots to the choices of each token; backwards, empty slots get nothing."""

    @staticmethod
    def forward(ctx: Any, out_SD: Tensor, slot_TK: Tensor, choice_S: Tensor) -> Tensor:
        ctx.save_for_backward(choice_S)
        return out_SD[slot_TK]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        (choice_S,) = ctx.saved_tensors
        grad_SD = grads[0].flatten(0, 1)[choice_S.clamp(min=0)]
        return torch.where(choice_S[:, None] >= 0, grad_SD, 0), None, None
