"""Mixture of experts: each token runs through its top-k experts; outputs are weighted and summed.

T tokens, K experts per token, A = T * K (token, expert) assignments, E experts, D width, I expert
width, O output width, S slots.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

MAX_UNROLLED_TOPK = 4  # a compiled top-k of at most this size is unrolled
SLOT_ALIGNMENT = 8

Linear = Callable[[Tensor], Tensor]
# (rows sorted by expert, expert of each unsorted row) -> expert output of each row
GroupedLinear = Callable[[Tensor, Tensor], Tensor]


def gelu_and_mul(gate_up: Tensor) -> Tensor:
    """gelu(gate) * up, for a projection that holds the gate half first."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.gelu(gate, approximate="tanh") * up


def topk(p_TE: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Return the k largest values of each row, in order, and their indices."""
    if not torch.compiler.is_compiling() or k > MAX_UNROLLED_TOPK:
        values_TK, ids_TK = p_TE.topk(k, dim=-1)
        return values_TK, ids_TK
    # Repeated argmax, which a compiler fuses with its surroundings.
    values, ids = [], []
    for _ in range(k):
        value_T1, id_T1 = p_TE.max(-1, keepdim=True)
        values.append(value_T1)
        ids.append(id_T1)
        is_taken_TE = torch.arange(p_TE.shape[-1], device=p_TE.device) == id_T1
        p_TE = torch.where(is_taken_TE, -1.0, p_TE)
    return torch.cat(values, -1), torch.cat(ids, -1)


def moe_forward(
    x_TD: Tensor,
    topk_ids_TK: Tensor,
    topk_weights_TK: Tensor,
    gate_up: GroupedLinear,
    down: GroupedLinear,
) -> Tensor:
    """Run each expert once on all of its tokens; sum each token's weighted outputs."""
    out_AD = expert_outputs(x_TD, topk_ids_TK, gate_up, down)
    return weighted_sum(out_AD, topk_weights_TK).to(x_TD.dtype)


def expert_outputs(
    x_TD: Tensor, topk_ids_TK: Tensor, gate_up: GroupedLinear, down: GroupedLinear
) -> Tensor:
    """Compute the output of each assignment, [A, D], unweighted.

    Assignments are sorted by expert, so that an expert's tokens are contiguous, and returned in
    token order: the order of additions never depends on the routing.
    """
    expert_A = topk_ids_TK.flatten()
    order_A = expert_A.argsort(stable=True)
    x_AD = x_TD.index_select(0, order_A // topk_ids_TK.shape[1])
    hidden_AI = gelu_and_mul(gate_up(x_AD, expert_A))
    return down(hidden_AI, expert_A).index_select(0, order_A.argsort())


def weighted_sum(out_AD: Tensor, topk_weights_TK: Tensor) -> Tensor:
    """Sum each token's expert outputs, weighted by the router."""
    out_TKD = out_AD.view(*topk_weights_TK.shape, -1).to(topk_weights_TK.dtype)
    return torch.einsum("tk,tkd->td", topk_weights_TK, out_TKD)


def grouped_linear(weight_EOD: Tensor) -> GroupedLinear:
    """Multiply by stacked weights: one grouped kernel on a GPU, one call per expert elsewhere."""
    # The kernel needs rows of a multiple of 16 bytes.
    is_aligned = weight_EOD.shape[1] % 8 == 0 and weight_EOD.shape[2] % 8 == 0
    if weight_EOD.device.type == "cuda" and weight_EOD.dtype == torch.bfloat16 and is_aligned:
        return grouped_mm(weight_EOD)
    return per_expert([linear(weight) for weight in weight_EOD])


def linear(weight_OI: Tensor) -> Linear:
    """Return x -> x @ weight.T."""
    return lambda x: F.linear(x, weight_OI)


def per_expert(linears: Sequence[Linear]) -> GroupedLinear:
    """Run each expert's linear on its slice of the rows."""

    def apply(x_AD: Tensor, expert_A: Tensor) -> Tensor:
        counts = torch.bincount(expert_A, minlength=len(linears)).tolist()
        slices = torch.split(x_AD, counts)
        return torch.cat([f(x) for f, x in zip(linears, slices, strict=True) if len(x)])

    return apply


def grouped_mm(weight_EOD: Tensor) -> GroupedLinear:
    """Multiply all experts in one kernel; counts stay on the device, without a sync."""

    def apply(x_AD: Tensor, expert_A: Tensor) -> Tensor:
        experts_E = torch.arange(len(weight_EOD), device=expert_A.device)
        ends_E = (expert_A[None] <= experts_E[:, None]).sum(-1, dtype=torch.int32)
        return F.grouped_mm(x_AD, weight_EOD.transpose(1, 2), offs=ends_E)

    return apply


def moe_reference(
    x_TD: Tensor,
    topk_ids_TK: Tensor,
    topk_weights_TK: Tensor,
    gate_up_EID: Tensor,
    down_EDI: Tensor,
) -> Tensor:
    """Define the layer: one token and one expert at a time."""
    out_TD = torch.zeros_like(x_TD, dtype=torch.float32)
    rows = zip(topk_ids_TK.tolist(), topk_weights_TK, strict=True)
    for t, (ids, weights) in enumerate(rows):
        for expert, weight in zip(ids, weights, strict=True):
            hidden_I = gelu_and_mul(F.linear(x_TD[t], gate_up_EID[expert]))
            out_TD[t] += weight * F.linear(hidden_I, down_EDI[expert])
    return out_TD.to(x_TD.dtype)


# --- with gradients


class ExpertSlots(NamedTuple):
    """Slot of each assignment among rows sorted by expert, and the inverse."""

    slot_TK: Tensor
    assignment_S: Tensor  # of each slot; -1: empty
    ends_E: Tensor  # int32: end of each expert's slots


def moe_with_grad(
    x_TD: Tensor,
    topk_ids_TK: Tensor,
    topk_weights_TK: Tensor,
    gate_up_EID: Tensor,
    down_EDI: Tensor,
) -> Tensor:
    """Compute `moe_forward` with gradients of the weights.

    Each expert's rows start at a multiple of 8, which the grouped kernel needs for weight
    gradients. Tokens and slots are mapped by gathers in both directions: the gradient of a gather
    would be a scatter-add, slow and, on a GPU, not deterministic.
    """
    slots = assign_slots(topk_ids_TK, len(gate_up_EID))
    x_SD = _ToSlots.apply(x_TD, slots.slot_TK, slots.assignment_S)  # type: ignore[no-untyped-call]
    hidden_SI = gelu_and_mul(grouped_slots(x_SD, gate_up_EID, slots.ends_E))
    out_SD = grouped_slots(hidden_SI, down_EDI, slots.ends_E)
    out_TKD: Tensor = _FromSlots.apply(out_SD, slots.slot_TK, slots.assignment_S)  # type: ignore[no-untyped-call]
    return (out_TKD * topk_weights_TK.to(out_TKD.dtype)[..., None]).sum(1).to(x_TD.dtype)


def assign_slots(topk_ids_TK: Tensor, num_experts: int) -> ExpertSlots:
    """Assign each row a slot; empty slots pad each expert's range and the total."""
    flat_A = topk_ids_TK.flatten()
    num_assignments = len(flat_A)
    experts_E = torch.arange(num_experts, device=flat_A.device)
    counts_E = (flat_A[None] == experts_E[:, None]).sum(-1)
    padded_E = (counts_E + SLOT_ALIGNMENT - 1) // SLOT_ALIGNMENT * SLOT_ALIGNMENT
    ends_E = padded_E.cumsum(0)
    order_A = flat_A.argsort(stable=True)
    # Rank among all assignments, shifted by the padding of earlier experts.
    gap_E = (ends_E - padded_E) - (counts_E.cumsum(0) - counts_E)
    sorted_slot_A = torch.arange(num_assignments, device=flat_A.device) + gap_E[flat_A[order_A]]
    slot_A = torch.empty_like(order_A).scatter_(0, order_A, sorted_slot_A)
    # Upper bound; slots after the last expert's end are empty.
    size = -(-num_assignments // SLOT_ALIGNMENT) * SLOT_ALIGNMENT + SLOT_ALIGNMENT * num_experts
    assignment_S = order_A.new_full((size,), -1).scatter_(0, sorted_slot_A, order_A)
    return ExpertSlots(slot_A.view_as(topk_ids_TK), assignment_S, ends_E.to(torch.int32))


def grouped_slots(x_SD: Tensor, weight_EOD: Tensor, ends_E: Tensor) -> Tensor:
    """Multiply each expert's rows by its weight; empty slots are undefined."""
    if x_SD.device.type == "cuda":
        return F.grouped_mm(x_SD, weight_EOD.transpose(1, 2), offs=ends_E)
    ends = [0, *ends_E.tolist()]
    pieces = [x_SD[a:b] @ w.T for a, b, w in zip(ends, ends[1:], weight_EOD, strict=False)]
    rest = x_SD.new_zeros(len(x_SD) - ends[-1], weight_EOD.shape[1])
    return torch.cat([*pieces, rest])


class _ToSlots(torch.autograd.Function):
    """Gather tokens to slots; the gradient sums over a token's slots."""

    @staticmethod
    def forward(ctx: Any, x_TD: Tensor, slot_TK: Tensor, assignment_S: Tensor) -> Tensor:
        ctx.save_for_backward(slot_TK)
        x_SD = x_TD[assignment_S.clamp(min=0) // slot_TK.shape[1]]
        return torch.where(assignment_S[:, None] >= 0, x_SD, 0)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        (slot_TK,) = ctx.saved_tensors
        return grads[0][slot_TK].sum(1), None, None


class _FromSlots(torch.autograd.Function):
    """Gather slots to each token's assignments; empty slots have no gradient."""

    @staticmethod
    def forward(ctx: Any, out_SD: Tensor, slot_TK: Tensor, assignment_S: Tensor) -> Tensor:
        ctx.save_for_backward(assignment_S)
        return out_SD[slot_TK]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        (assignment_S,) = ctx.saved_tensors
        grad_SD = grads[0].flatten(0, 1)[assignment_S.clamp(min=0)]
        return torch.where(assignment_S[:, None] >= 0, grad_SD, 0), None, None
