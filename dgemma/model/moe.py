"""Mixture of experts: each token runs through its top-k experts; outputs are weighted and summed.

T tokens, K experts per token, A = T * K (token, expert) assignments, E experts, D width, I expert
width, O output width.
"""

from collections.abc import Callable, Sequence
from math import pi

import torch
import torch.nn.functional as F
from torch import Tensor

MAX_UNROLLED_TOPK = 4  # a compiled top-k of at most this size is unrolled
# gelu_tanh(x) = x * sigmoid(SLOPE * x + CUBIC * x^3); SLOPE as a tensor, to start an addcmul with.
SLOPE = torch.tensor(2 * (2 / pi) ** 0.5)
CUBIC = 0.044715 * SLOPE.item()

Linear = Callable[[Tensor], Tensor]
# Maps rows sorted by expert, and the expert of each unsorted row, to each row's expert output.
GroupedLinear = Callable[[Tensor, Tensor], Tensor]


def gelu_and_mul(gate_up: Tensor) -> Tensor:
    """gelu(gate) * up, for a projection that holds the gate half first."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.gelu(gate, approximate="tanh") * up


def gelu_and_mul_cpu(gate_up: Tensor) -> Tensor:
    """Compute `gelu_and_mul` in float32 without a gradient, in about half the time of `tanh`."""
    gate_up = gate_up.float()
    gate, up = gate_up.chunk(2, dim=-1)
    # Strided like the gate, so that each row is a loop of its own: torch rounds the last elements
    # of a loop differently, and the result must not depend on the number of rows.
    sigmoid = torch.empty_like(gate_up).chunk(2, dim=-1)[0]
    torch.addcmul(SLOPE, gate, gate, value=CUBIC, out=sigmoid).mul_(gate).sigmoid_()
    return sigmoid.mul_(gate).mul_(up)


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
    """Run each expert once over all of its tokens and sum the weighted outputs of each token."""
    out_AD = expert_outputs(x_TD, topk_ids_TK, gate_up, down)
    return weighted_sum(out_AD, topk_weights_TK).to(x_TD.dtype)


def expert_outputs(
    x_TD: Tensor, topk_ids_TK: Tensor, gate_up: GroupedLinear, down: GroupedLinear
) -> Tensor:
    """Compute the output of each assignment, [A, D], not yet weighted.

    Assignments are sorted by expert, so that an expert's tokens are one slice, and put back in
    token order before the sum: the order of additions never depends on the routing.
    """
    expert_A = topk_ids_TK.flatten()
    order_A = expert_A.argsort(stable=True)
    x_AD = x_TD.index_select(0, order_A // topk_ids_TK.shape[1])
    hidden_AI = gelu_and_mul(gate_up(x_AD, expert_A))
    return down(hidden_AI, expert_A).index_select(0, order_A.argsort())


def weighted_sum(out_AD: Tensor, topk_weights_TK: Tensor) -> Tensor:
    """Sum each token's expert outputs by the router's weights."""
    out_TKD = out_AD.view(*topk_weights_TK.shape, -1).to(topk_weights_TK.dtype)
    return torch.einsum("tk,tkd->td", topk_weights_TK, out_TKD)


def grouped_linear(weight_EOD: Tensor) -> GroupedLinear:
    """Multiply by stacked weights: in one kernel on a GPU, by one call per expert elsewhere."""
    # The kernel wants rows of a multiple of 16 bytes.
    is_aligned = weight_EOD.shape[1] % 8 == 0 and weight_EOD.shape[2] % 8 == 0
    if weight_EOD.device.type == "cuda" and weight_EOD.dtype == torch.bfloat16 and is_aligned:
        return grouped_mm(weight_EOD)
    return per_expert([linear(weight) for weight in weight_EOD])


def linear(weight_OI: Tensor) -> Linear:
    """Return x -> x @ weight.T."""
    return lambda x: F.linear(x, weight_OI)


def per_expert(linears: Sequence[Linear]) -> GroupedLinear:
    """Call each expert's own linear on its slice of the rows."""

    def apply(x_AD: Tensor, expert_A: Tensor) -> Tensor:
        counts = torch.bincount(expert_A, minlength=len(linears)).tolist()
        slices = torch.split(x_AD, counts)
        return torch.cat([f(x) for f, x in zip(linears, slices, strict=True) if len(x)])

    return apply


def grouped_mm(weight_EOD: Tensor) -> GroupedLinear:
    """Multiply all experts in one kernel; counts stay on the device, so nothing synchronizes."""

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
