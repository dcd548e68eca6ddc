"""What may stand in holes that share a canvas, and how good it is.

The causal mode has read a candidate's text and what follows; here its log-probabilities are told
apart by the holes they belong to. Tokens do not respect seams: one that reaches into a hole is the
hole's.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from dgemma.engine.score import Score
from dgemma.text.tokenizer import Tokenizer

MOST_COUNTED = 16  # tokens as which a hole counts at most: a long and easy one would drown the rest


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """What may stand in the holes."""

    fills: tuple[str, ...]
    sizes: tuple[int, ...]  # tokens of each hole on the canvas
    settled: bool
    is_sound: bool  # no broken characters, and something to be seen in every hole
    score: float = 0.0  # causal log-probability of the holes and what follows, see `scored`
    hole_scores: tuple[float, ...] = ()  # its mean over each hole's own tokens, in nats


def given(fills: tuple[str, ...], sizes: tuple[int, ...]) -> Candidate:
    """One that no canvas wrote."""
    return Candidate(fills=fills, sizes=sizes, settled=True, is_sound=True)


def scored(
    one: Candidate,
    score: Score,
    lengths: Sequence[int],
    tokenizer: Tokenizer,
    *,
    by_total: bool = False,
) -> Candidate:
    """A candidate with its scores; `lengths`: bytes of what `score` is of, every second a hole.

    It is the mean over tokens, or with `by_total` the sum: where holes may be of any length, each
    token that says the same again would make a mean better, however little it has to do there.
    """
    places, end = _byte_places(score.ids, tokenizer), 0
    holes = []  # the bytes of each
    for number, length in enumerate(lengths):
        start, end = end, end + length
        if number % 2:
            holes.append((start, end))
    both = list(zip(score.logprobs, places, strict=True))
    own = [[p for p, (a, b) in both if a < end and b > start] for start, end in holes]
    rest = [p for p, (a, b) in both if not any(a < end and b > start for start, end in holes)]
    weights = [min(len(hole), MOST_COUNTED) for hole in own]
    total = sum(rest) + sum(w * _mean(hole) for w, hole in zip(weights, own, strict=True))
    whole = total / max(1, len(rest) + sum(weights))
    return replace(
        one,
        score=score.total if by_total else whole,
        hole_scores=tuple(_mean(hole) for hole in own),
    )


def rank(candidate: Candidate) -> tuple[bool, float]:
    """What makes one candidate better than another."""
    return candidate.is_sound, candidate.score


def _byte_places(ids: Sequence[int], tokenizer: Tokenizer) -> list[tuple[int, int]]:
    places, end = [], 0
    for token in ids:
        start, end = end, end + len(tokenizer.token_bytes(token))
        places.append((start, end))
    return places


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0
