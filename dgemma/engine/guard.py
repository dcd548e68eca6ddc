"""Tells a canvas that went wrong: empty, caught in a loop, or not a number."""

import math
from collections.abc import Collection, Sequence

NOT_A_NUMBER = "not a number"
LONGEST_PERIOD = 8  # tokens in a phrase that is repeated
SHORTEST_LOOP = 32  # tokens that must repeat before it counts as a loop


def fault(
    ids: Sequence[int], entropy: Sequence[float], stops: Collection[int], *, is_first: bool
) -> str:
    """Why a canvas that has settled or run out of steps should be done again, or nothing.

    A canvas that begins with a stop is the plain end of a reply, unless it is the first.
    """
    if any(math.isnan(value) for value in entropy):
        return NOT_A_NUMBER
    body = ids[: next((i for i, token in enumerate(ids) if token in stops), len(ids))]
    if is_first and not body:
        return "empty"
    return "repetition" if loops(body) else ""


def loops(ids: Sequence[int]) -> bool:
    """Whether the text ends in a short phrase over and over, for at least half of its length."""
    span = max(SHORTEST_LOOP, len(ids) // 2)
    if len(ids) < span + LONGEST_PERIOD:
        return False
    tail = ids[len(ids) - span - LONGEST_PERIOD :]
    return any(
        all(tail[i] == tail[i - period] for i in range(LONGEST_PERIOD, len(tail)))
        for period in range(1, LONGEST_PERIOD + 1)
    )
