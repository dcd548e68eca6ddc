"""The end of a step as one kernel: which positions are decided, and the canvas that comes of it.

The entropy rule of `sampler.py`, the move of the canvas and the two flags that the host reads, by
one program that writes where the next step reads. Positions are not sorted: each adds up the
entropies that come before its own.

L canvas length, P the power of two above it, N steps, G groups of chunks.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from dgemma.ops.kernels.launch import after, early
from dgemma.ops.kernels.row_stats import MASS, SURVIVORS
from dgemma.ops.kernels.sparse import Likely

LONGEST = 1024  # a canvas whose pairs of positions one program compares in good time
PAIRS = 8192  # of positions, that are compared at once


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """What a step says of each position."""

    draw_L: Tensor
    top_L: Tensor
    entropy_L: Tensor
    likely: Likely


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """A canvas in memory: what it is, its noise, and what is told of it."""

    pinned_L: Tensor
    noise_NL: Tensor
    tokens_L: Tensor
    guess_L: Tensor
    kept_L: Tensor
    entropy_L: Tensor
    settled: Tensor
    steady_steps: Tensor
    index_1: Tensor  # steps taken
    seen_2: Tensor  # settled; its likely tokens suffice. May be the host's memory


@dataclass(frozen=True, slots=True)
class Limits:
    """The entropy rule's numbers."""

    bound: float
    settle_entropy: float
    settle_steps: int


def move(held: Held, found: Found, limits: Limits) -> None:
    """Take a canvas one step on, in its place."""
    length, groups = len(held.tokens_L), found.likely.count_TG.shape[1]
    size = triton.next_power_of_2(length)
    _move[(1,)](
        found.draw_L,
        found.top_L,
        found.entropy_L,
        found.likely.count_TG,
        found.likely.mass_TG,
        held.pinned_L.view(torch.uint8),
        held.noise_NL,
        held.tokens_L,
        held.guess_L,
        held.kept_L.view(torch.uint8),
        held.entropy_L,
        held.settled.view(torch.uint8),
        held.steady_steps,
        held.index_1,
        held.seen_2.view(torch.uint8),
        limits.bound,
        limits.settle_entropy,
        limits.settle_steps,
        L=length,
        P=size,
        B=min(size, max(1, PAIRS // size)),
        GROUPS=groups,
        G=triton.next_power_of_2(groups),
        S=SURVIVORS,
        MASS=MASS,
        num_warps=8,
        **early(),
    )


@triton.jit
def _move(
    draw_L,
    top_L,
    found_L,
    count_LG,
    mass_LG,
    pinned_L,
    noise_NL,
    tokens_L,
    guess_L,
    kept_L,
    entropy_L,
    settled_0,
    steady_0,
    index_1,
    seen_2,
    bound,
    settle_entropy,
    settle_steps,
    L: tl.constexpr,
    P: tl.constexpr,
    B: tl.constexpr,
    GROUPS: tl.constexpr,
    G: tl.constexpr,
    S: tl.constexpr,
    MASS: tl.constexpr,
    EARLY: tl.constexpr,
):
    after(EARLY)
    i = tl.arange(0, P)
    is_in = i < L
    index = tl.load(index_1)
    pinned = tl.load(pinned_L + i, mask=is_in, other=1) != 0  # as is all beyond the canvas
    entropy = tl.load(found_L + i, mask=is_in, other=0.0)
    token = tl.load(tokens_L + i, mask=is_in, other=0)
    top = tl.load(top_L + i, mask=is_in, other=0)
    kept = _keepers(found_L, pinned_L, entropy, pinned, bound, L, P, B)

    is_same = pinned | (tl.load(guess_L + i, mask=is_in, other=0) == top)
    steady = tl.load(steady_0) + 1
    steady = tl.where(tl.min(is_same.to(tl.int32), 0) != 0, steady, 0)
    is_open = (~pinned).to(tl.int32)
    num_open = tl.sum(is_open, 0)
    total = tl.sum((entropy * is_open.to(tl.float32)).to(tl.float64), 0)
    mean = (total / tl.maximum(num_open, 1).to(tl.float64)).to(tl.float32)
    settled = ((steady >= settle_steps) & (mean < settle_entropy)) | (num_open == 0)

    draw = tl.load(draw_L + i, mask=is_in, other=0)
    noise = tl.load(noise_NL + (index + 1) * L + i, mask=is_in, other=0)
    tl.store(tokens_L + i, tl.where(pinned, token, tl.where(kept, draw, noise)), mask=is_in)
    tl.store(guess_L + i, tl.where(pinned, token, top), mask=is_in)
    tl.store(kept_L + i, (kept | pinned).to(tl.uint8), mask=is_in)
    tl.store(entropy_L + i, tl.where(pinned, 0.0, entropy), mask=is_in)
    suffice = _suffice(count_LG, mass_LG, L, P, GROUPS, G, S, MASS)
    tl.store(steady_0, steady)
    tl.store(settled_0, settled.to(tl.uint8))
    tl.store(seen_2, settled.to(tl.uint8))
    tl.store(seen_2 + 1, suffice.to(tl.uint8))
    tl.store(index_1, index + 1)


@triton.jit
def _keepers(
    found_L,
    pinned_L,
    entropy,
    pinned,
    bound,
    L: tl.constexpr,
    P: tl.constexpr,
    B: tl.constexpr,
):
    """The open positions before which entropies add up to the bound at most.

    Summed in float64 and rounded then, as a running sum on a CPU is. Equal ones count in order.
    """
    i = tl.arange(0, P)
    upto = tl.zeros((P,), dtype=tl.float64)
    for first in range(0, L, B):
        j = first + tl.arange(0, B)
        is_open = tl.load(pinned_L + j, mask=j < L, other=1) == 0
        other = tl.load(found_L + j, mask=j < L, other=0.0)
        less = other[None, :] < entropy[:, None]
        comes = less | ((other[None, :] == entropy[:, None]) & (j[None, :] <= i[:, None]))
        added = tl.where(is_open, other, 0.0).to(tl.float64)  # before it is spread: few numbers
        upto += tl.sum(tl.where(comes, added[None, :], 0.0), 1)
    return (upto.to(tl.float32) - entropy <= bound) & ~pinned


@triton.jit
def _suffice(
    count_LG,
    mass_LG,
    L: tl.constexpr,
    P: tl.constexpr,
    GROUPS: tl.constexpr,
    G: tl.constexpr,
    S: tl.constexpr,
    MASS: tl.constexpr,
):
    """Whether the likely tokens of every position are few and hold enough."""
    i = tl.arange(0, P)
    g = tl.arange(0, G)
    at = i[:, None] * GROUPS + g[None, :]
    is_in = (i < L)[:, None] & (g < GROUPS)[None, :]
    count = tl.sum(tl.load(count_LG + at, mask=is_in, other=0), 1)
    mass = tl.sum(tl.load(mass_LG + at, mask=is_in, other=0.0), 1)
    return tl.min((((count <= S) & (mass >= MASS)) | (i >= L)).to(tl.int32), 0)
