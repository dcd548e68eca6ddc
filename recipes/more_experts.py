"""More experts than a trained model has: copies of them, which its routers tell apart.

    z_TD             what a router multiplies, as heard on data
    score of copy g  old score + TURN * corner_g . (a_1 z, a_2 z, ...)

Copies with the same score would be chosen together for ever. So whole sets of copies are parted:
all experts of a set gain the same by a token, most in the set whose corner of a simplex the token
lies towards. Its best experts are then copies of the old best ones, with the old shares, and the
model is nearly the old one (exactly so if TURN were endless). The directions a are drawn, seeded,
as the inputs themselves are distributed, so that short ones part them well; they do not see the
inputs' mean, or one set would have all tokens. Experts that are left, fewer than a set, are parted
from their last copies alone, and less: the two gain by it, which is taken off again on average.
What else was tried, and what it costs, says LOG.md.

T tokens, E experts, G sets, N directions, D width of the stream.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from dgemma.model.gemma import Gemma, Router

Weights = dict[str, Tensor]
TURN = 3.0  # how far sets are parted: the spread of scores, in their own unit
TURN_LEFT = 1.0  # the same, for experts that are left
SEED = 0
MEAN_GAIN = 0.8  # of the absolute value of what is spread by 1
PER_EXPERT = ("experts.gate_up_proj", "experts.down_proj", "router.per_expert_scale")


@dataclass(frozen=True, slots=True)
class Inputs:
    """What a router was given: how often, the sum, and the sum of all products with itself."""

    count: int
    sum_D: Tensor
    products_DD: Tensor

    @property
    def mean_D(self) -> Tensor:
        return self.sum_D / self.count

    @property
    def covariance_DD(self) -> Tensor:
        return self.products_DD / self.count - torch.outer(self.mean_D, self.mean_D)


Heard = dict[str, Inputs]  # by router: "layers.0.router"


@contextmanager
def hearing(model: Gemma) -> Iterator[Heard]:
    """What routers are given while this is open; in float64, as a difference is made of it."""
    heard: Heard = {}
    hooks = [
        module.proj.register_forward_pre_hook(partial(_hear, heard, name))
        for name, module in model.named_modules()
        if isinstance(module, Router)
    ]
    try:
        yield heard
    finally:
        for hook in hooks:
            hook.remove()


def _hear(heard: Heard, name: str, _: nn.Module, given: tuple[Tensor]) -> None:
    z_TD = given[0].detach().double()
    more = Inputs(len(z_TD), z_TD.sum(0), z_TD.mT @ z_TD)
    if (old := heard.get(name)) is not None:
        more = Inputs(
            old.count + more.count, old.sum_D + more.sum_D, old.products_DD + more.products_DD
        )
    heard[name] = more


def copied(weights: Mapping[str, Tensor], layer: str, count: int, inputs: Inputs) -> Weights:
    """A layer's experts, `count` of them, with a router that parts the copies."""
    rows_ED = weights[f"{layer}router.proj.weight"]
    of = torch.arange(count) % len(rows_ED)
    made = {f"{layer}{name}": weights[f"{layer}{name}"][of].clone() for name in PER_EXPERT}
    turned_ED = rows_ED[of] + turns(len(rows_ED), count, inputs).to(rows_ED.dtype)
    return {**made, f"{layer}router.proj.weight": turned_ED}


def turns(old: int, count: int, inputs: Inputs) -> Tensor:
    """What is added to the router's row of each copy."""
    sets, left = divmod(count, old)
    generator = torch.Generator().manual_seed(SEED)
    drawn_ND = _directions(sets - 1 + left, inputs, generator)
    corners_GD = TURN * corners(sets) @ drawn_ND[: sets - 1]
    added_ED = corners_GD[(torch.arange(count) // old).clamp(max=sets - 1)]
    apart_ED, mean_D = TURN_LEFT * drawn_ND[sets - 1 :], inputs.mean_D
    gain_D = TURN_LEFT * MEAN_GAIN * mean_D / mean_D.square().sum()
    last = (sets - 1) * old
    added_ED[last : last + left] -= apart_ED + gain_D
    added_ED[sets * old :] += apart_ED - gain_D
    return added_ED


def corners(count: int) -> Tensor:
    """Of a simplex around zero, at a distance of 1: [count, count - 1]."""
    axes, sizes, _ = torch.linalg.svd(torch.eye(count, dtype=torch.float64) - 1 / count)
    found = (axes * sizes)[:, : count - 1]
    return found / found.norm(dim=1, keepdim=True)


def _directions(count: int, inputs: Inputs, generator: torch.Generator) -> Tensor:
    """[N, D], by which inputs are spread by 1 around 0, by each independently of the others."""
    covariance_DD, mean_D = inputs.covariance_DD, inputs.mean_D
    sizes_D, axes_DD = torch.linalg.eigh(covariance_DD)
    noise_ND = torch.randn(count, len(mean_D), generator=generator, dtype=torch.float64)
    drawn_ND = noise_ND * sizes_D.clamp(min=0).sqrt() @ axes_DD.mT
    drawn_ND -= torch.outer(drawn_ND @ mean_D, mean_D) / mean_D.square().sum()
    shares_NN = torch.linalg.cholesky(drawn_ND @ covariance_DD @ drawn_ND.mT)
    return torch.linalg.solve_triangular(shares_NN, drawn_ND, upper=False)
