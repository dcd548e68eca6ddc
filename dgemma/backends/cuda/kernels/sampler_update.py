"""The sampler's update of all canvases of a pass in one launch: `EntropyBound` of the reference.

One program a canvas accepts positions, writes the canvas that the next step reads, and the two
flags that the host reads. Positions are not sorted: each adds up the entropies below its own.

C canvases, L canvas length, P the power of two above it, E table entries, N steps, G groups.
"""

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from dgemma.backends.cuda.kernels.logit_stats import MASS, SURVIVORS
from dgemma.backends.cuda.kernels.pdl import gdc_wait, pdl_kwargs
from dgemma.backends.cuda.kernels.soft_embed_topk import Likely, flag_bytes

MAX_LENGTH = 1024  # a canvas whose pairs of positions one program compares in good time
PAIRS = 8192  # of positions, compared at once


@dataclass(frozen=True, slots=True, kw_only=True)
class Stats:
    """Statistics of each position, [C * L]."""

    draw_T: Tensor
    top_T: Tensor
    entropy_T: Tensor
    likely: Likely


@dataclass(frozen=True, slots=True, kw_only=True)
class CanvasStates:
    """Canvases by table entry; rows of one entry may be apart from the next by a common stride."""

    tokens_EL: Tensor
    guess_EL: Tensor
    kept_EL: Tensor
    entropy_EL: Tensor
    pinned_EL: Tensor
    settled_E: Tensor
    steady_E: Tensor
    step_E: Tensor  # steps taken
    noise_ENL: Tensor
    rule_E3: Tensor  # float32: entropy bound, confidence threshold, stability threshold
    flags_E2: Tensor  # converged; likely tokens suffice. May be host memory


def update(states: CanvasStates, stats: Stats, entry_C: Tensor) -> None:
    """Advance each canvas by one step, in place."""
    length, groups = states.tokens_EL.shape[1], stats.likely.count_TG.shape[1]
    size = triton.next_power_of_2(length)
    pinned_EL, kept_EL = flag_bytes(states.pinned_EL), flag_bytes(states.kept_EL)
    settled_E, flags_E2 = flag_bytes(states.settled_E), flag_bytes(states.flags_E2)
    _update[(len(entry_C),)](
        entry_C,
        stats.draw_T,
        stats.top_T,
        stats.entropy_T,
        stats.likely.count_TG,
        stats.likely.mass_TG,
        pinned_EL,
        states.noise_ENL,
        states.tokens_EL,
        states.guess_EL,
        kept_EL,
        states.entropy_EL,
        settled_E,
        states.steady_E,
        states.step_E,
        states.rule_E3,
        flags_E2,
        pinned_EL.stride(0),
        states.tokens_EL.stride(0),
        states.entropy_EL.stride(0),
        states.noise_ENL.shape[1],
        L=length,
        P=size,
        B=min(size, max(1, PAIRS // size)),
        GROUPS=groups,
        G=triton.next_power_of_2(groups),
        S=SURVIVORS,
        MASS=MASS,
        num_warps=8,
        **pdl_kwargs(),
    )


@triton.jit(do_not_specialize=["num_noise"])
def _update(
    entry_C,
    draw_T,
    top_T,
    found_T,
    count_TG,
    mass_TG,
    pinned_EL,
    noise_ENL,
    tokens_EL,
    guess_EL,
    kept_EL,
    entropy_EL,
    settled_E,
    steady_E,
    step_E,
    rule_E3,
    flags_E2,
    stride_1,
    stride_8,
    stride_4,
    num_noise,
    L: tl.constexpr,
    P: tl.constexpr,
    B: tl.constexpr,
    GROUPS: tl.constexpr,
    G: tl.constexpr,
    S: tl.constexpr,
    MASS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Strides of an entry: of bytes, of 8-byte and of 4-byte numbers."""
    gdc_wait(PDL)
    slot = tl.program_id(0)
    entry = tl.load(entry_C + slot).to(tl.int64)
    i = tl.arange(0, P)
    is_in = i < L
    step = tl.minimum(tl.load(step_E + entry), num_noise - 2)  # padding steps for ever
    pinned_L, tokens_L = pinned_EL + entry * stride_1, tokens_EL + entry * stride_8
    guess_L, entropy_L = guess_EL + entry * stride_8, entropy_EL + entry * stride_4
    found_L = found_T + slot * L
    pinned = tl.load(pinned_L + i, mask=is_in, other=1) == 1  # as is all beyond the canvas
    entropy = tl.load(found_L + i, mask=is_in, other=0.0)
    token = tl.load(tokens_L + i, mask=is_in, other=0)
    top = tl.load(top_T + slot * L + i, mask=is_in, other=0)
    bound = tl.load(rule_E3 + entry * 3)
    kept = _accepted(found_L, pinned_L, entropy, pinned, bound, L, P, B)

    is_same = pinned | (tl.load(guess_L + i, mask=is_in, other=0) == top)
    steady = tl.load(steady_E + entry * stride_8) + 1
    steady = tl.where(tl.min(is_same.to(tl.int32), 0) != 0, steady, 0)
    is_open = (~pinned).to(tl.int32)
    num_open = tl.sum(is_open, 0)
    total = tl.sum((entropy * is_open.to(tl.float32)).to(tl.float64), 0)
    mean = (total / tl.maximum(num_open, 1).to(tl.float64)).to(tl.float32)
    is_sure = mean < tl.load(rule_E3 + entry * 3 + 1)
    is_stable = steady >= tl.load(rule_E3 + entry * 3 + 2).to(tl.int64)
    settled = (is_stable & is_sure) | (num_open == 0)

    draw = tl.load(draw_T + slot * L + i, mask=is_in, other=0)
    noise = tl.load(noise_ENL + (entry * num_noise + step + 1) * L + i, mask=is_in, other=0)
    tl.store(tokens_L + i, tl.where(pinned, token, tl.where(kept, draw, noise)), mask=is_in)
    tl.store(guess_L + i, tl.where(pinned, token, top), mask=is_in)
    tl.store(kept_EL + entry * stride_1 + i, (kept | pinned).to(tl.uint8), mask=is_in)
    tl.store(entropy_L + i, tl.where(pinned, 0.0, entropy), mask=is_in)
    suffice = _suffice(count_TG, mass_TG, slot, L, P, GROUPS, G, S, MASS)
    tl.store(steady_E + entry * stride_8, steady)
    tl.store(settled_E + entry * stride_1, settled.to(tl.uint8))
    tl.store(flags_E2 + entry * 2, settled.to(tl.uint8))
    tl.store(flags_E2 + entry * 2 + 1, suffice.to(tl.uint8))
    tl.store(step_E + entry, step + 1)


@triton.jit
def _accepted(
    found_L,
    pinned_L,
    entropy,
    pinned,
    bound,
    L: tl.constexpr,
    P: tl.constexpr,
    B: tl.constexpr,
):
    """Open positions below which entropies add up to the bound at most.

    Summed in float64 and rounded then, as a running sum on a CPU is. Equal ones count in order.
    """
    i = tl.arange(0, P)
    upto = tl.zeros((P,), dtype=tl.float64)
    for first in range(0, L, B):
        j = first + tl.arange(0, B)
        is_open = tl.load(pinned_L + j, mask=j < L, other=1) != 1
        other = tl.load(found_L + j, mask=j < L, other=0.0)
        less = other[None, :] < entropy[:, None]
        comes = less | ((other[None, :] == entropy[:, None]) & (j[None, :] <= i[:, None]))
        added = tl.where(is_open, other, 0.0).to(tl.float64)  # before it is spread: few numbers
        upto += tl.sum(tl.where(comes, added[None, :], 0.0), 1)
    return (upto.to(tl.float32) - entropy <= bound) & ~pinned


@triton.jit
def _suffice(
    count_TG,
    mass_TG,
    slot,
    L: tl.constexpr,
    P: tl.constexpr,
    GROUPS: tl.constexpr,
    G: tl.constexpr,
    S: tl.constexpr,
    MASS: tl.constexpr,
):
    """True if the likely tokens of every position are few and hold enough."""
    i = tl.arange(0, P)
    g = tl.arange(0, G)
    at = (slot * L + i)[:, None] * GROUPS + g[None, :]
    is_in = (i < L)[:, None] & (g < GROUPS)[None, :]
    count = tl.sum(tl.load(count_TG + at, mask=is_in, other=0), 1)
    mass = tl.sum(tl.load(mass_TG + at, mask=is_in, other=0.0), 1)
    return tl.min((((count <= S) & (mass >= MASS)) | (i >= L)).to(tl.int32), 0)
