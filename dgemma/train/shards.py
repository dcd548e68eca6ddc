"""Tensors that are spread over several processes: in one piece, and back. Others pass as they are.

Sharded tensors are PyTorch's DTensor, which is imported only where there is one.
"""

from typing import Any

import torch
from torch import Tensor


def whole(tensor: Tensor) -> Tensor:
    """A sharded tensor in one piece, on every process; all of them must ask for it."""
    gather = getattr(tensor, "full_tensor", None)
    return tensor if gather is None else gather()


def local(tensor: Tensor) -> Tensor:
    """The part of a sharded tensor that lies here, sharing its memory."""
    take = getattr(tensor, "to_local", None)
    return tensor if take is None else take()


def like(piece: Tensor, model: Tensor) -> Tensor:
    """A whole tensor, the same on every process, sharded as `model` is."""
    piece, mesh = piece.to(model.device), getattr(model, "device_mesh", None)
    if mesh is None:
        return piece
    from torch.distributed.tensor import distribute_tensor

    placements = model.placements  # type: ignore[attr-defined]
    # Every process has all of it, so that nothing need be sent.
    return distribute_tensor(piece, mesh, placements, src_data_rank=None)


def gathered(tree: Any, *, keep: bool) -> Any:
    """A tree of dicts and lists with its tensors whole and on the CPU; without them if not `keep`.

    All processes take part, one tensor at a time; those that do not keep need no memory for it.
    """
    if isinstance(tree, Tensor):
        found = whole(tree.detach())
        return found.cpu() if keep else None
    if isinstance(tree, dict):
        return {key: gathered(value, keep=keep) for key, value in tree.items()}
    if isinstance(tree, list):
        return [gathered(value, keep=keep) for value in tree]
    return tree


def spread(tree: Any, model: Tensor) -> Any:
    """What an optimizer remembers of one weight, sharded as the weight is."""
    return {
        key: like(value, model)
        if isinstance(value, Tensor) and value.shape == model.shape
        else value
        for key, value in tree.items()
    }


@torch.no_grad()
def are_finite(tensors: list[Tensor]) -> Tensor:
    """Whether each tensor holds numbers only, as far as it lies here."""
    return torch.stack([local(tensor).detach().isfinite().all() for tensor in tensors])
