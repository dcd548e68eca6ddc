"""The stretches between a layer's products: what each computes, and its kernel where there is one.

A kernel keeps float32 inside a stretch, where the definition rounds after every op.

T tokens, D width, E experts, K of them per token.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from dgemma.ops.experts import gated as plain_gated
from dgemma.ops.experts import mix, top
from dgemma.ops.fast import is_on
from dgemma.ops.norm import rms_norm


class JoinWeights(NamedTuple):
    post_D: Tensor  # norm behind attention
    dense_D: Tensor  # norms before the dense part...
    expert_D: Tensor  # ...and the experts
    router_D: Tensor  # the router's scale


class Joined(NamedTuple):
    """The stream behind attention, and what is read of it."""

    x_TD: Tensor
    dense_TD: Tensor
    expert_TD: Tensor
    router_TD: Tensor


class CloseWeights(NamedTuple):
    dense_D: Tensor  # norms behind the dense part...
    expert_D: Tensor  # ...the experts...
    both_D: Tensor  # ...and their sum
    scalar: Tensor  # of the layer
    next_D: Tensor  # norm of what comes next


def join(x_TD: Tensor, attended_TD: Tensor, weights: JoinWeights, eps: float) -> Joined:
    """Add what attention found, and norm it for three readers."""
    if is_on(x_TD):
        from dgemma.ops.kernels import layer

        return Joined(*layer.join(x_TD, attended_TD, weights, eps))
    x_TD = x_TD + rms_norm(attended_TD, weights.post_D, eps)
    return Joined(
        x_TD,
        rms_norm(x_TD, weights.dense_D, eps),
        rms_norm(x_TD, weights.expert_D, eps),
        rms_norm(x_TD, None, eps) * weights.router_D * x_TD.shape[-1] ** -0.5,
    )


def route(logits_TE: Tensor, scale_E: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
    """The likeliest experts of each token, and their shares."""
    if is_on(logits_TE):
        from dgemma.ops.kernels import layer

        return layer.route(logits_TE, scale_E, top_k)
    p_TE = logits_TE.softmax(-1, dtype=torch.float32)
    share_TK, ids_TK = top(p_TE, top_k)
    share_TK = share_TK / share_TK.sum(-1, keepdim=True)
    return ids_TK, share_TK * scale_E[ids_TK]


def close(
    x_TD: Tensor,
    dense_TD: Tensor,
    mixed: tuple[Tensor, Tensor],
    weights: CloseWeights,
    eps: float,
) -> tuple[Tensor, Tensor]:
    """Mix the experts, add both parts to the stream, scale it, and norm it for what comes next.

    `mixed`: what each choice gave, [T * K, D], and its share, [T, K].
    """
    if is_on(x_TD):
        from dgemma.ops.kernels import layer

        return layer.close(x_TD, dense_TD, mixed, weights, eps)
    dense_TD = rms_norm(dense_TD, weights.dense_D, eps)
    mixed_TD = rms_norm(mix(*mixed).to(x_TD.dtype), weights.expert_D, eps)
    x_TD = x_TD + rms_norm(dense_TD + mixed_TD, weights.both_D, eps)
    x_TD = x_TD * weights.scalar
    return x_TD, rms_norm(x_TD, weights.next_D, eps)


def gated(gate_up_TX: Tensor) -> Tensor:
    """gelu(gate) * up, for a projection that holds the gate half first."""
    if is_on(gate_up_TX):
        from dgemma.ops.kernels import layer

        return layer.gated(gate_up_TX)
    return plain_gated(gate_up_TX)
