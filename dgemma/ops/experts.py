"""The mixture of experts: each token goes through its top-k experts, weighted and summed.

T tokens, K experts per token, A = T * K assignments, E experts, D width, I expert width, O outputs.
"""

from collections.abc import Callable, Sequence
from math import pi
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from dgemma.ops.fast import is_on
from dgemma.ops.linear import Linear, linear

if TYPE_CHECKING:
    from dgemma.ops.kernels.buckets import Buckets

FEW = 4  # taken one at a time when compiled
# Of gelu: 2u = SLOPE * x + CUBIC * x^3; the first as a tensor, which a pass can begin with.
SLOPE = torch.tensor(2 * (2 / pi) ** 0.5)
CUBIC = 0.044715 * SLOPE.item()

# Rows sorted by expert, and the expert of each unsorted row, to each row's own product.
GroupedLinear = Callable[[Tensor, Tensor], Tensor]


def gated(gate_up: Tensor) -> Tensor:
    """gelu(gate) * up, for a projection that holds the gate half first."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.gelu(gate, approximate="tanh") * up


def gated_by_sigmoid(gate_up: Tensor) -> Tensor:
    """The same in float32, without a gradient, in about half the time a CPU takes for `tanh`.

    x / 2 * (1 + tanh(u)) = x * sigmoid(2u)
    """
    gate_up = gate_up.float()
    gate, up = gate_up.chunk(2, dim=-1)
    # Rows lie apart, as the gate's: each is a loop of its own. Torch rounds the last few numbers of
    # a loop another way, and these should not depend on how many rows there are.
    share = torch.empty_like(gate_up).chunk(2, dim=-1)[0]
    torch.addcmul(SLOPE, gate, gate, value=CUBIC, out=share).mul_(gate).sigmoid_()
    return share.mul_(gate).mul_(up)


def top(p_TE: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The greatest values of each row, in order, and where they stand."""
    if not torch.compiler.is_compiling() or count > FEW:
        values_TK, ids_TK = p_TE.topk(count, dim=-1)
        return values_TK, ids_TK
    # The same by taking the greatest away, which a compiler fuses with what is around it.
    values, ids = [], []
    for _ in range(count):
        value_T1, id_T1 = p_TE.max(-1, keepdim=True)
        values.append(value_T1)
        ids.append(id_T1)
        is_taken_TE = torch.arange(p_TE.shape[-1], device=p_TE.device) == id_T1
        p_TE = torch.where(is_taken_TE, -1.0, p_TE)
    return torch.cat(values, -1), torch.cat(ids, -1)


def experts(
    x_TD: Tensor, ids_TK: Tensor, share_TK: Tensor, gate_up: GroupedLinear, down: GroupedLinear
) -> Tensor:
    """Run each expert once over all of its tokens, and mix what they give."""
    return mix(choices(x_TD, ids_TK, gate_up, down), share_TK).to(x_TD.dtype)


def choices(x_TD: Tensor, ids_TK: Tensor, gate_up: GroupedLinear, down: GroupedLinear) -> Tensor:
    """What each choice of each token gives, not yet weighted.

    Assignments are sorted by expert, so an expert's tokens are one slice, and put back in token
    order before the weighted sum: the order of additions never depends on the routing.
    """
    top_k = ids_TK.shape[1]
    flat_A = ids_TK.flatten()
    order_A = flat_A.argsort(stable=True)
    x_AD = x_TD.index_select(0, order_A // top_k)
    hidden_AI = gated(gate_up(x_AD, flat_A))
    return down(hidden_AI, flat_A).index_select(0, order_A.argsort())


def mix(out_AD: Tensor, share_TK: Tensor) -> Tensor:
    """The weighted sum of each token's choices."""
    out_TKD = out_AD.view(*share_TK.shape, -1).to(share_TK.dtype)
    return torch.einsum("tk,tkd->td", share_TK, out_TKD)


def stacked_choices(
    x_TD: Tensor,
    ids_TK: Tensor,
    gate_up_EID: Tensor,
    down_EDI: Tensor,
    into: "Buckets | None" = None,
) -> Tensor:
    """The same with stacked weights, by our kernels where they fit; `into`: if sorted already."""
    if is_on(x_TD, "experts"):
        from dgemma.ops.kernels import experts as kernels

        if kernels.fits(x_TD, gate_up_EID, down_EDI):
            return kernels.choices(x_TD, ids_TK, gate_up_EID, down_EDI, into)
    return choices(x_TD, ids_TK, grouped_linear(gate_up_EID), grouped_linear(down_EDI))


def grouped_linear(weight_EOD: Tensor) -> GroupedLinear:
    """Products with stacked weights: one kernel on a GPU, one call per expert elsewhere."""
    # The kernel wants rows of a multiple of 16 bytes.
    is_aligned = weight_EOD.shape[1] % 8 == 0 and weight_EOD.shape[2] % 8 == 0
    if weight_EOD.device.type == "cuda" and weight_EOD.dtype == torch.bfloat16 and is_aligned:
        return all_at_once(weight_EOD)
    return one_by_one([linear(weight) for weight in weight_EOD])


def one_by_one(products: Sequence[Linear]) -> GroupedLinear:
    def apply(x_AD: Tensor, expert_A: Tensor) -> Tensor:
        counts = torch.bincount(expert_A, minlength=len(products)).tolist()
        slices = torch.split(x_AD, counts)
        return torch.cat([f(x) for f, x in zip(products, slices, strict=True) if len(x)])

    return apply


def all_at_once(weight_EOD: Tensor) -> GroupedLinear:
    """No count leaves the device, so nothing waits."""

    def apply(x_AD: Tensor, expert_A: Tensor) -> Tensor:
        experts_E = torch.arange(len(weight_EOD), device=expert_A.device)
        ends_E = (expert_A[None] <= experts_E[:, None]).sum(-1, dtype=torch.int32)
        return F.grouped_mm(x_AD, weight_EOD.transpose(1, 2), offs=ends_E)

    return apply


def experts_reference(
    x_TD: Tensor, ids_TK: Tensor, share_TK: Tensor, gate_up_EID: Tensor, down_EDI: Tensor
) -> Tensor:
    """The definition, one token and one expert at a time."""
    out_TD = torch.zeros_like(x_TD, dtype=torch.float32)
    for t, (ids, shares) in enumerate(zip(ids_TK.tolist(), share_TK, strict=True)):
        for expert, share in zip(ids, shares, strict=True):
            hidden_I = gated(F.linear(x_TD[t], gate_up_EID[expert]))
            out_TD[t] += share * F.linear(hidden_I, down_EDI[expert])
    return out_TD.to(x_TD.dtype)
