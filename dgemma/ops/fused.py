"""The stretches between a layer's products: what each computes, and its kernel where there is one.

A kernel keeps float32 inside a stretch, where the definition rounds after every op. What a product
gave may come in parts, [S, T, D], still to be added up.

T tokens, D width, E experts, K of them per token, S parts of a product's depth.
"""

from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from dgemma.ops.dense import Rows
from dgemma.ops.experts import mix, top
from dgemma.ops.fast import is_on
from dgemma.ops.fp8 import quantize
from dgemma.ops.norm import rms_norm
from dgemma.ops.quantized import Quantized

if TYPE_CHECKING:
    from dgemma.ops.kernels.buckets import Buckets
    from dgemma.ops.kernels.router import Parts


class JoinWeights(NamedTuple):
    post_D: Tensor  # norm behind attention
    dense_D: Tensor  # norms before the dense part...
    expert_D: Tensor  # ...and the experts
    router_D: Tensor  # the router's scale


class Joined(NamedTuple):
    """The stream behind attention, and what is read of it."""

    x_TD: Tensor
    dense_TD: Rows
    expert_TD: Rows
    router_TD: Tensor


class RouterWeights(NamedTuple):
    weight_ED: Tensor
    scale_E: Tensor
    top_k: int


class Routed(NamedTuple):
    """The experts of each token, their shares, and, where a kernel made them, the buckets."""

    ids_TK: Tensor
    share_TK: Tensor
    into: "Buckets | None" = None


class CloseWeights(NamedTuple):
    dense_D: Tensor  # norms behind the dense part...
    expert_D: Tensor  # ...the experts...
    both_D: Tensor  # ...and their sum
    scalar: Tensor  # of the layer
    next_D: Tensor  # norm of what comes next


def join(
    x_TD: Tensor,
    attended: Tensor,
    weights: JoinWeights,
    eps: float,
    *,
    eight: bool = False,
    experts_eight: bool = False,
) -> Joined:
    """Add what attention found (maybe in parts), and norm it for three readers.

    `eight`: for an 8-bit dense part; `experts_eight`: for experts that read 8 bits.
    """
    if is_on(x_TD):
        from dgemma.ops.kernels import layer

        how = {"eight": eight, "experts_eight": experts_eight}
        x_TD, dense, expert, router_TD = layer.join(x_TD, attended, weights, eps, **how)
        return Joined(x_TD, _rows(dense), _rows(expert), router_TD)
    x_TD = x_TD + rms_norm(_added(attended, x_TD.dtype), weights.post_D, eps)
    dense_TD = rms_norm(x_TD, weights.dense_D, eps)
    expert_TD = rms_norm(x_TD, weights.expert_D, eps)
    return Joined(
        x_TD,
        quantize(dense_TD) if eight else dense_TD,
        quantize(expert_TD) if experts_eight else expert_TD,
        rms_norm(x_TD, None, eps) * weights.router_D * x_TD.shape[-1] ** -0.5,
    )


def join_few(
    x_TD: Tensor, attended_TD: Tensor, weights: JoinWeights, router: RouterWeights, eps: float
) -> tuple[Joined, Routed]:
    """`join` and `routed` for very few rows, with a launch less; only where there are kernels."""
    from dgemma.ops.kernels import vector
    from dgemma.ops.kernels.router import Parts

    read, part_1TE = vector.join(x_TD, attended_TD, weights, router.weight_ED, eps)
    joined = Joined(*read, router_TD=read[0])
    return joined, _choose(Parts(part_1TE), router.scale_E, router.top_k)


def routed(x_TD: Tensor, router: RouterWeights) -> Routed:
    """The likeliest experts of each token, given what the router reads."""
    if is_on(x_TD):
        from dgemma.ops.kernels.router import parts

        return _choose(parts(x_TD, router.weight_ED), router.scale_E, router.top_k)
    return Routed(*route(F.linear(x_TD, router.weight_ED), router.scale_E, router.top_k))


def route(logits_TE: Tensor, scale_E: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
    """The likeliest experts of each token, and their shares."""
    if is_on(logits_TE):
        from dgemma.ops.kernels.router import Parts

        found = _choose(Parts(logits_TE[None]), scale_E, top_k)
        return found.ids_TK, found.share_TK
    p_TE = logits_TE.softmax(-1, dtype=torch.float32)
    share_TK, ids_TK = top(p_TE, top_k)
    share_TK = share_TK / share_TK.sum(-1, keepdim=True)
    return ids_TK, share_TK * scale_E[ids_TK]


def close(
    x_TD: Tensor,
    dense: Tensor,
    mixed: tuple[Tensor, Tensor],
    weights: CloseWeights,
    eps: float,
    *,
    eight: bool = False,
) -> tuple[Tensor, Rows]:
    """Mix the experts, add both parts to the stream, scale it, and norm it for what comes next.

    `dense`: maybe in parts. `mixed`: what each choice gave, [T * K, D], and its share, [T, K].
    `eight`: what comes next is an 8-bit product.
    """
    if is_on(x_TD):
        from dgemma.ops.kernels import layer

        x_TD, after = layer.close(x_TD, dense, mixed, weights, eps, eight=eight)
        return x_TD, _rows(after)
    dense_TD = rms_norm(_added(dense, x_TD.dtype), weights.dense_D, eps)
    mixed_TD = rms_norm(mix(*mixed).to(x_TD.dtype), weights.expert_D, eps)
    x_TD = x_TD + rms_norm(dense_TD + mixed_TD, weights.both_D, eps)
    x_TD = x_TD * weights.scalar
    next_TD = rms_norm(x_TD, weights.next_D, eps)
    return x_TD, quantize(next_TD) if eight else next_TD


def _choose(found: "Parts", scale_E: Tensor, top_k: int) -> Routed:
    from dgemma.ops.kernels.router import choose

    return Routed(*choose(found, scale_E, top_k))


def _rows(found: Tensor | tuple[Tensor, Tensor]) -> Rows:
    return Quantized(*found) if isinstance(found, tuple) else found


def _added(found: Tensor, dtype: torch.dtype) -> Tensor:
    return found.sum(0).to(dtype) if found.dim() == 3 else found
