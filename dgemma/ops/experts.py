"""The mixture of experts: each token goes through its top-k experts, weighted and summed.

T tokens, K experts per token, E experts, D width, I expert width.
"""

import torch
import torch.nn.functional as F
from torch import Tensor


def gated(gate_up: Tensor) -> Tensor:
    """gelu(gate) * up, for a projection that holds the gate half first."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.gelu(gate, approximate="tanh") * up


def experts(
    x_TD: Tensor, ids_TK: Tensor, share_TK: Tensor, gate_up_EID: Tensor, down_EDI: Tensor
) -> Tensor:
    """Run each expert once over all of its tokens.

    Assignments are sorted by expert, so an expert's tokens are one slice, and put back in token
    order before the weighted sum: the order of additions never depends on the routing.
    """
    num_tokens, top_k = ids_TK.shape
    flat_A = ids_TK.flatten()
    order_A = flat_A.argsort(stable=True)
    counts = torch.bincount(flat_A, minlength=gate_up_EID.shape[0]).tolist()
    x_AD = x_TD[order_A // top_k]
    hidden_AI = gated(_per_expert(x_AD, gate_up_EID, counts))
    out_AD = _per_expert(hidden_AI, down_EDI, counts)[order_A.argsort()]
    out_TKD = out_AD.view(num_tokens, top_k, -1).to(share_TK.dtype)
    return torch.einsum("tk,tkd->td", share_TK, out_TKD).to(x_TD.dtype)


def _per_expert(x_AD: Tensor, weight_EOD: Tensor, counts: list[int]) -> Tensor:
    """Multiply slice e of `x` with the transposed matrix e of `weight`."""
    pieces = [
        F.linear(piece, weight)
        for piece, weight in zip(torch.split(x_AD, counts), weight_EOD.unbind(), strict=True)
        if len(piece)
    ]
    return torch.cat(pieces)


def experts_reference(
    x_TD: Tensor, ids_TK: Tensor, share_TK: Tensor, gate_up_EID: Tensor, down_EDI: Tensor
) -> Tensor:
    """The definition, one token and one expert at a time."""
    out_TD = torch.zeros_like(x_TD, dtype=torch.float32)
    for t, (ids, shares) in enumerate(zip(ids_TK.tolist(), share_TK, strict=True)):
        for expert, share in zip(ids, shares, strict=True):
            hidden = gated(F.linear(x_TD[t], gate_up_EID[expert]))
            out_TD[t] += share * F.linear(hidden, down_EDI[expert])
    return out_TD.to(x_TD.dtype)
