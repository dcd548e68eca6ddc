"""The mixture of experts: each token goes through its top-k experts, weighted and summed.

T tokens, K experts per token, A = T * K assignments, E experts, D width, I expert width.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from dgemma.ops.linear import Linear


def gated(gate_up: Tensor) -> Tensor:
    """gelu(gate) * up, for a projection that holds the gate half first."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.gelu(gate, approximate="tanh") * up


def experts(
    x_TD: Tensor,
    ids_TK: Tensor,
    share_TK: Tensor,
    gate_up: Sequence[Linear],
    down: Sequence[Linear],
) -> Tensor:
    """Run each expert once over all of its tokens.

    Assignments are sorted by expert, so an expert's tokens are one slice, and put back in token
    order before the weighted sum: the order of additions never depends on the routing.
    """
    num_tokens, top_k = ids_TK.shape
    flat_A = ids_TK.flatten()
    order_A = flat_A.argsort(stable=True)
    counts = torch.bincount(flat_A, minlength=len(gate_up)).tolist()
    hidden_AI = gated(_per_expert(x_TD.index_select(0, order_A // top_k), gate_up, counts))
    out_AD = _per_expert(hidden_AI, down, counts).index_select(0, order_A.argsort())
    out_TKD = out_AD.view(num_tokens, top_k, -1).to(share_TK.dtype)
    return torch.einsum("tk,tkd->td", share_TK, out_TKD).to(x_TD.dtype)


def _per_expert(x_AD: Tensor, products: Sequence[Linear], counts: list[int]) -> Tensor:
    """Send slice e of `x` through product e."""
    slices = torch.split(x_AD, counts)
    return torch.cat([f(x) for f, x in zip(products, slices, strict=True) if len(x)])


def experts_reference(
    x_TD: Tensor,
    ids_TK: Tensor,
    share_TK: Tensor,
    gate_up: Sequence[Linear],
    down: Sequence[Linear],
) -> Tensor:
    """The definition, one token and one expert at a time."""
    out_TD = torch.zeros_like(x_TD, dtype=torch.float32)
    for t, (ids, shares) in enumerate(zip(ids_TK.tolist(), share_TK, strict=True)):
        for expert, share in zip(ids, shares, strict=True):
            out_TD[t] += share * down[expert](gated(gate_up[expert](x_TD[t : t + 1])))[0]
    return out_TD.to(x_TD.dtype)
