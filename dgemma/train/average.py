"""A running mean of the weights: often better than the last ones while the rate is high."""

from collections.abc import Sequence

import torch
from torch import Tensor


class Average:
    """`weights` follow those that are trained, each step by a share of 1 - decay."""

    def __init__(self, weights: Sequence[Tensor], decay: float) -> None:
        self.decay = decay
        self.weights = [weight.detach().clone() for weight in weights]

    @torch.no_grad()
    def update(self, weights: Sequence[Tensor]) -> None:
        torch._foreach_lerp_(self.weights, [w.detach() for w in weights], 1 - self.decay)

    @torch.no_grad()
    def restore(self, saved: Sequence[Tensor]) -> None:
        for weight, old in zip(self.weights, saved, strict=True):
            weight.copy_(old)
