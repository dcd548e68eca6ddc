"""The five numbers of a workload and an arm, from its attempts, with bootstrap intervals.

1. latency end to end (p50, p95) and until the first usable text; 2. acceptance; 3. retry rate;
4. resources; 5. what a user sees while it runs. Together: *seconds to an accepted answer*, the
seconds of all attempts, failed ones too, by the number of accepted answers. It is infinite if none
was accepted. Intervals resample requests, with all attempts of each.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from random import Random
from statistics import median

from dgemma.engine.canvas_policy import has_loop
from dgemma.eval.attempts import Attempt
from dgemma.eval.bench import BenchRun
from dgemma.eval.checks import MIN_DISTINCT_2, distinct_n
from dgemma.eval.measure import Estimate, wilson

RESAMPLES = 1000
CONFIDENCE = 0.95
MIN_TOKENS_OFF, MAX_SHARE_OFF = 4, 0.25  # tolerance of reported token counts
MIN_ATTEMPTS = 20  # below it, p95 is the slowest or nearly so

Requests = list[list[Attempt]]  # attempts of each request


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """All numbers of a workload and an arm. None: not measured."""

    workload: str
    arm: str
    num_requests: int
    num_attempts: int
    accepted: Estimate | None  # share of attempts
    retries_per_request: float
    seconds_p50: Estimate | None
    seconds_p95: float | None
    usable_p50: float | None
    visible_p50: float | None
    seconds_to_accepted: Estimate | None
    gap_p50: float | None
    burst_p50: float | None
    taken_back: float | None
    tokens_per_second: float | None  # committed, recounted, all attempts together
    tokens_per_pass: float | None
    steps_per_block: float | None
    blocks_per_second: float | None
    distinct_2: float | None
    ram_bytes: int | None
    vram_bytes: int | None
    joules: float | None  # per attempt
    celsius: float | None
    failures: tuple[str, ...]  # errors
    reasons: dict[str, int]  # of checks that did not accept
    refused: str  # the arm cannot do it
    flags: tuple[str, ...]  # reasons to doubt the numbers


def cells(run: BenchRun) -> list[Cell]:
    """Return a cell for every workload and arm that was run, in the order of the facts."""
    groups = group_requests(run.attempts)
    found = []
    for workload in run.facts["workloads"]:
        for arm in run.facts["arms"]:
            requests = [r for r in groups if (r[0].workload, r[0].arm) == (workload, arm)]
            if requests:
                found.append(make_cell(requests))
    return found


def group_requests(attempts: Sequence[Attempt]) -> Requests:
    """Group attempts by request."""
    ordered = sorted(attempts, key=lambda attempt: attempt.key)
    return [list(group) for _, group in groupby(ordered, key=lambda attempt: attempt.key[:4])]


def make_cell(requests: Requests) -> Cell:
    """Compute the numbers of requests of one workload and one arm."""
    first = requests[0][0]
    requests = [[a for a in request if not a.refused] for request in requests]
    requests = [request for request in requests if request]
    attempts = [a for request in requests for a in request]
    done = [a for a in attempts if not a.error]
    accepted = sum(a.is_accepted for a in attempts)
    num = len(attempts)
    return Cell(
        workload=first.workload,
        arm=first.arm,
        num_requests=len(requests),
        num_attempts=num,
        accepted=Estimate(accepted / num, *wilson(accepted, num), num) if num else None,
        retries_per_request=(num - len(requests)) / len(requests) if requests else 0.0,
        seconds_p50=bootstrap(requests, median_seconds) if done else None,
        seconds_p95=quantile([a.seconds for a in done], 0.95),
        usable_p50=_median(a.first_usable for a in done),
        visible_p50=_median(a.first_visible for a in done),
        seconds_to_accepted=bootstrap(requests, seconds_to_accepted) if requests else None,
        gap_p50=_median(a.longest_gap for a in done),
        burst_p50=_median(float(a.burst) for a in done),
        taken_back=_mean([a.taken_back for a in done]),
        tokens_per_second=_rate([(a.tokens, a.seconds) for a in done]),
        tokens_per_pass=_rate([(a.tokens, a.steps) for a in done]),
        steps_per_block=_rate([(a.steps, a.blocks) for a in done]),
        blocks_per_second=_rate([(a.blocks, a.seconds) for a in done]),
        distinct_2=_mean([distinct_n(a.text) for a in done]),
        ram_bytes=max((a.ram_bytes for a in done if a.ram_bytes), default=None),
        vram_bytes=max((a.vram_bytes for a in done if a.vram_bytes), default=None),
        joules=_mean([a.joules for a in done]),
        celsius=max((a.celsius for a in done if a.celsius), default=None),
        failures=tuple(dict.fromkeys(a.error for a in attempts if a.error)),
        reasons=_reasons(attempts),
        refused=first.refused,
        flags=tuple(_flags(done)),
    )


# --- estimates


def seconds_to_accepted(requests: Requests) -> float:
    """Divide the seconds of all attempts by the accepted ones."""
    attempts = [a for request in requests for a in request]
    accepted = sum(a.is_accepted for a in attempts)
    total = sum(a.seconds for a in attempts)
    return total / accepted if accepted else math.inf


def median_seconds(requests: Requests) -> float:
    found = [a.seconds for request in requests for a in request if not a.error]
    return median(found) if found else math.inf


def bootstrap(requests: Requests, statistic: Callable[[Requests], float]) -> Estimate:
    """Return a statistic with its percentile interval over resampled requests."""
    values = sorted(resample(requests, statistic))
    tail = (1 - CONFIDENCE) / 2
    low, high = (values[round(p * (len(values) - 1))] for p in (tail, 1 - tail))
    return Estimate(statistic(requests), low, high, len(requests))


def resample(
    requests: Requests, statistic: Callable[[Requests], float], seed: int = 0
) -> list[float]:
    rng = Random(seed)
    return [statistic(rng.choices(requests, k=len(requests))) for _ in range(RESAMPLES)]


def quantile(values: Sequence[float], share: float) -> float | None:
    """Return the smallest value that at least `share` of the values do not exceed."""
    ordered = sorted(values)
    return ordered[math.ceil(share * len(ordered)) - 1] if ordered else None


def _median(values: Iterable[float | None]) -> float | None:
    found = [value for value in values if value is not None]
    return median(found) if found else None


def _mean(values: Sequence[float | None]) -> float | None:
    found = [value for value in values if value is not None]
    return sum(found) / len(found) if found else None


def _rate(pairs: Sequence[tuple[float | None, float | None]]) -> float | None:
    """Divide sums over the attempts that report both."""
    found = [(a, b) for a, b in pairs if a is not None and b is not None]
    total = sum(b for _, b in found)
    return sum(a for a, _ in found) / total if total else None


def _reasons(attempts: Sequence[Attempt]) -> dict[str, int]:
    """Count the checks that did not accept, by name, and errors."""
    counts: dict[str, int] = {}
    for attempt in attempts:
        names = {reason.partition(":")[0] for reason in attempt.reasons}
        for name in sorted(names | ({"error"} if attempt.error else set())):
            counts[name] = counts.get(name, 0) + 1
    return counts


# --- doubts


def _flags(done: Sequence[Attempt]) -> list[str]:
    """Name reasons to doubt the numbers of a cell."""
    flags = []
    looped = sum(repeats_itself(attempt.text) for attempt in done)
    if looped:
        flags.append(f"repetition collapse in {looped} of {len(done)} answers")
    wrong = sum(is_miscounted(attempt) for attempt in done)
    if wrong:
        flags.append(f"reported token counts differ from the text in {wrong} of {len(done)}")
    return flags


def repeats_itself(text: str) -> bool:
    """True if a text has few distinct word pairs, or ends in a repeated phrase."""
    value = distinct_n(text)
    words = {word: number for number, word in enumerate(dict.fromkeys(text.split()))}
    is_loop = has_loop([words[word] for word in text.split()])
    return is_loop or (value is not None and value < MIN_DISTINCT_2)


def is_miscounted(attempt: Attempt) -> bool:
    """True if the reported token count differs too much from the recounted one."""
    counted, reported = attempt.tokens, attempt.reported_tokens
    if counted is None or reported is None:
        return False
    return abs(counted - reported) > max(MIN_TOKENS_OFF, MAX_SHARE_OFF * counted)
