"""The sampler's update of all canvases of a pass in one launch, by the `EntropyBound` rule.

One program per canvas accepts positions, writes the canvas that the next step reads, and the two
flags that the host reads. Positions are not sorted: each sums the entropies below its own.

C canvases, L canvas length, P the power of two above it, E table entries, N steps, G groups.
"""

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from dgemma.backends.cuda.kernels.common import gdc_wait, launch, pdl_kwargs
from dgemma.backends.cuda.kernels.logit_stats import MAX_CANDIDATES, MIN_MASS
from dgemma.backends.cuda.kernels.soft_embed_topk import Candidates, flag_bytes

MAX_LENGTH = 1024  # of a canvas: one program compares all pairs of its positions
PAIRS = 8192  # of positions, compared per step


@dataclass(frozen=True, slots=True, kw_only=True)
class Stats:
    """Statistics of each position, [C * L]."""

    draw_T: Tensor
    top_T: Tensor
    entropy_T: Tensor
    candidates: Candidates


@dataclass(frozen=True, slots=True, kw_only=True)
class CanvasStates:
    """Canvases by table entry; strided."""

    tokens_EL: Tensor
    guess_EL: Tensor
    accepted_EL: Tensor
    entropy_EL: Tensor
    pinned_EL: Tensor
    converged_E: Tensor
    stable_E: Tensor
    step_E: Tensor  # steps taken
    noise_ENL: Tensor
    rule_E3: Tensor  # float32: entropy bound, confidence threshold, stability threshold
    flags_E2: Tensor  # converged; candidates cover the mass. May be host memory


def update(states: CanvasStates, stats: Stats, entry_C: Tensor) -> None:
    """Advance each canvas by one step, in place."""
    length, groups = states.tokens_EL.shape[1], stats.candidates.count_TG.shape[1]
    size = triton.next_power_of_2(length)
    pinned_EL, accepted_EL = flag_bytes(states.pinned_EL), flag_bytes(states.accepted_EL)
    converged_E, flags_E2 = flag_bytes(states.converged_E), flag_bytes(states.flags_E2)
    launch(_update, (len(entry_C),))(
        entry_C,
        stats.draw_T,
        stats.top_T,
        stats.entropy_T,
        stats.candidates.count_TG,
        stats.candidates.mass_TG,
        pinned_EL,
        states.noise_ENL,
        states.tokens_EL,
        states.guess_EL,
        accepted_EL,
        states.entropy_EL,
        converged_E,
        states.stable_E,
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
        S=MAX_CANDIDATES,
        MIN_MASS=MIN_MASS,
        num_warps=8,
        **pdl_kwargs(),
    )


@triton.jit(do_not_specialize=["num_noise"])
def _update(
    entry_C,
    draw_T,
    top_T,
    entropy_T,
    count_TG,
    mass_TG,
    pinned_EL,
    noise_ENL,
    tokens_EL,
    guess_EL,
    accepted_EL,
    entropy_EL,
    converged_E,
    stable_E,
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
    MIN_MASS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Strides of an entry: in bytes, in 8-byte and in 4-byte elements."""
    gdc_wait(PDL)
    slot = tl.program_id(0)
    entry = tl.load(entry_C + slot).to(tl.int64)
    i = tl.arange(0, P)
    is_in = i < L
    step = tl.minimum(tl.load(step_E + entry), num_noise - 2)  # padding steps without end
    pinned_L, tokens_L = pinned_EL + entry * stride_1, tokens_EL + entry * stride_8
    guess_L, entropy_L = guess_EL + entry * stride_8, entropy_EL + entry * stride_4
    new_entropy_L = entropy_T + slot * L
    pinned = tl.load(pinned_L + i, mask=is_in, other=1) == 1  # as are positions beyond the canvas
    entropy = tl.load(new_entropy_L + i, mask=is_in, other=0.0)
    token = tl.load(tokens_L + i, mask=is_in, other=0)
    top = tl.load(top_T + slot * L + i, mask=is_in, other=0)
    bound = tl.load(rule_E3 + entry * 3)
    kept = _accepted(new_entropy_L, pinned_L, entropy, pinned, bound, L, P, B)

    is_same = pinned | (tl.load(guess_L + i, mask=is_in, other=0) == top)
    stable = tl.load(stable_E + entry * stride_8) + 1
    stable = tl.where(tl.min(is_same.to(tl.int32), 0) != 0, stable, 0)
    is_open = (~pinned).to(tl.int32)
    num_open = tl.sum(is_open, 0)
    total = tl.sum((entropy * is_open.to(tl.float32)).to(tl.float64), 0)
    mean = (total / tl.maximum(num_open, 1).to(tl.float64)).to(tl.float32)
    is_sure = mean < tl.load(rule_E3 + entry * 3 + 1)
    is_stable = stable >= tl.load(rule_E3 + entry * 3 + 2).to(tl.int64)
    converged = (is_stable & is_sure) | (num_open == 0)

    draw = tl.load(draw_T + slot * L + i, mask=is_in, other=0)
    noise = tl.load(noise_ENL + (entry * num_noise + step + 1) * L + i, mask=is_in, other=0)
    tl.store(tokens_L + i, tl.where(pinned, token, tl.where(kept, draw, noise)), mask=is_in)
    tl.store(guess_L + i, tl.where(pinned, token, top), mask=is_in)
    tl.store(accepted_EL + entry * stride_1 + i, (kept | pinned).to(tl.uint8), mask=is_in)
    tl.store(entropy_L + i, tl.where(pinned, 0.0, entropy), mask=is_in)
    is_covered = _covers_mass(count_TG, mass_TG, slot, L, P, GROUPS, G, S, MIN_MASS)
    tl.store(stable_E + entry * stride_8, stable)
    tl.store(converged_E + entry * stride_1, converged.to(tl.uint8))
    tl.store(flags_E2 + entry * 2, converged.to(tl.uint8))
    tl.store(flags_E2 + entry * 2 + 1, is_covered.to(tl.uint8))
    tl.store(step_E + entry, step + 1)


@triton.jit
def _accepted(
    new_entropy_L,
    pinned_L,
    entropy,
    pinned,
    bound,
    L: tl.constexpr,
    P: tl.constexpr,
    B: tl.constexpr,
):
    """Accept open positions whose smaller entropies sum to the bound at most.

    Summed in float64, then rounded, as a cumulative sum on a CPU is. Ties count in order.
    """
    i = tl.arange(0, P)
    upto = tl.zeros((P,), dtype=tl.float64)
    for first in range(0, L, B):
        j = first + tl.arange(0, B)
        is_open = tl.load(pinned_L + j, mask=j < L, other=1) != 1
        other = tl.load(new_entropy_L + j, mask=j < L, other=0.0)
        less = other[None, :] < entropy[:, None]
        comes = less | ((other[None, :] == entropy[:, None]) & (j[None, :] <= i[:, None]))
        added = tl.where(is_open, other, 0.0).to(tl.float64)  # converted before the broadcast
        upto += tl.sum(tl.where(comes, added[None, :], 0.0), 1)
    return (upto.to(tl.float32) - entropy <= bound) & ~pinned


@triton.jit
def _covers_mass(
    count_TG,
    mass_TG,
    slot,
    L: tl.constexpr,
    P: tl.constexpr,
    GROUPS: tl.constexpr,
    G: tl.constexpr,
    S: tl.constexpr,
    MIN_MASS: tl.constexpr,
):
    """True if the candidates of every position are few and hold MIN_MASS."""
    i = tl.arange(0, P)
    g = tl.arange(0, G)
    at = (slot * L + i)[:, None] * GROUPS + g[None, :]
    is_in = (i < L)[:, None] & (g < GROUPS)[None, :]
    count = tl.sum(tl.load(count_TG + at, mask=is_in, other=0), 1)
    mass = tl.sum(tl.load(mass_TG + at, mask=is_in, other=0.0), 1)
    return tl.min((((count <= S) & (mass >= MIN_MASS)) | (i >= L)).to(tl.int32), 0)
