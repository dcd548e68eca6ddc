"""Assignments sorted by expert, and divided among programs.

An expert's rows are cut into shares of `rows` each (see `tiles.py`), one for a program; with even
routing one share is all. Where many tokens want the same expert, its shares are worked on side by
side. How many there are is known to the device alone: programs look their share up.

T tokens, K experts per token, E experts, S places for choices (number t * K + k).
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from dgemma.backends.cuda.configs import MoeConfig

SCAN = 1024  # choices looked at together when buckets are filled


@dataclass(frozen=True, slots=True)
class Buckets:
    """The choices of each expert, in the order of their numbers."""

    choice_ES: Tensor  # int32; what stands behind an expert's count is not defined
    count_E: Tensor  # int32


def buckets(ids_TK: Tensor, num_experts: int) -> Buckets:
    """Sort the choices by expert: each expert looks through all of them. Nothing waits."""
    num_tokens, top_k = ids_TK.shape
    # A token chooses an expert at most once.
    choice_ES = torch.empty(num_experts, num_tokens, dtype=torch.int32, device=ids_TK.device)
    count_E = torch.empty(num_experts, dtype=torch.int32, device=ids_TK.device)
    steps = triton.cdiv(num_tokens * top_k, SCAN)
    _buckets[(num_experts,)](
        ids_TK.contiguous(),
        choice_ES,
        count_E,
        num_tokens * top_k,
        num_tokens,
        STEPS=steps,
        BLOCK=SCAN,
    )
    return Buckets(choice_ES, count_E)


def most_shares(into: Buckets, num_choices: int, tile: MoeConfig) -> int:
    """Most row blocks there can be; programs without one exit."""
    return len(into.count_E) + num_choices // tile.rows


@triton.jit
def _buckets(
    ids, choice_ES, count_E, num_choices, capacity, STEPS: tl.constexpr, BLOCK: tl.constexpr
):
    expert = tl.program_id(0)
    total = 0
    for i in range(STEPS):
        choice = i * BLOCK + tl.arange(0, BLOCK)
        here = tl.load(ids + choice, mask=choice < num_choices, other=-1)
        own = (here == expert).to(tl.int32)
        place = total + tl.cumsum(own, 0) - 1
        tl.store(choice_ES + expert * capacity + place, choice, mask=own > 0)
        total += tl.sum(own, 0)
    tl.store(count_E + expert, total)


@triton.jit
def share(count_E, number, E: tl.constexpr, P: tl.constexpr, BM: tl.constexpr):
    """The expert of a share of rows, where it begins and how many rows the expert has.

    P is the number of experts or the next power of two.
    Shares of one expert are neighbours, so that the second to read a weight finds it in the cache.
    """
    e = tl.arange(0, P)
    count = tl.load(count_E + e, mask=e < E, other=0)
    end = tl.cumsum((count + BM - 1) // BM, 0)
    is_before = end <= number
    expert = tl.sum(is_before.to(tl.int32), 0)
    begin = (number - tl.max(tl.where(is_before, end, 0), 0)) * BM
    return expert, begin, tl.sum(tl.where(e == expert, count, 0), 0)
