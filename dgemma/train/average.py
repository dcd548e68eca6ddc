"""A running mean of the weights: often better than the last ones while the rate is high."""

from collections.abc import Sequence

import torch
from torch import Tensor

from dgemma.train.shards import like, local

YOUNG = 10  # steps after which about half of the mean is of the last ones


class Average:
    """`weights` follow those that are trained, each step by a share of 1 - decay.

    Early on by a greater share, or they would long be what training began with.
    """

    def __init__(self, weights: Sequence[Tensor], decay: float) -> None:
        self.decay = decay
        self.weights = [weight.detach().clone() for weight in weights]

    @torch.no_grad()
    def update(self, weights: Sequence[Tensor], step: int) -> None:
        """Follow the weights of step 0, 1, ..."""
        share = 1 - min(self.decay, (1 + step) / (YOUNG + step))
        torch._foreach_lerp_([local(w) for w in self.weights], [local(w) for w in weights], share)

    @torch.no_grad()
    def restore(self, saved: Sequence[Tensor]) -> None:
        for weight, old in zip(self.weights, saved, strict=True):
            weight.copy_(like(old, weight))
