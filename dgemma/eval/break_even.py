"""Seconds of diffusion, AR and auto by length of the reply (`dgemma bench break-even`).

A reply is cut by `max_tokens`, or ends by itself under a large limit. The modes take turns.
"""

import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

from dgemma.config import Mode
from dgemma.engine import Done, Engine, SamplingParams
from dgemma.engine.auto import GOAL, STORY, BreakEven
from dgemma.eval.workload import find_workloads

LENGTHS = (1, 2, 3, 5, 8, 13, 21, 34, 55, 89, 144, 233, 377, 512)
MODES: tuple[Mode, ...] = ("diffusion", "ar", "auto")
LIMIT = 512  # of replies that end by themselves
AREAS = ("short", "chat", "grounded", "code")  # of the workloads whose prompts those answer
WARM_UP_TOKENS = 40


@dataclass(frozen=True, slots=True, kw_only=True)
class LengthTimes:
    """Median seconds and tokens of each mode at one prompt and limit."""

    name: str
    limit: int
    seconds: dict[str, float]
    tokens: dict[str, int]

    @property
    def ratio(self) -> float:
        """Seconds of auto by those of the better mode."""
        return self.seconds["auto"] / min(self.seconds["diffusion"], self.seconds["ar"])


def time_lengths(
    engine: Engine, rounds: int, lengths: Sequence[int] = LENGTHS
) -> Iterator[LengthTimes]:
    """Time replies that a limit cuts, then replies that end by themselves."""
    for mode in MODES:
        _answer(engine, STORY, mode, WARM_UP_TOKENS, 0)
    for limit in lengths:
        yield _time(engine, "cut", STORY, limit, rounds)
    for workload in find_workloads([]):
        if workload.area in AREAS and workload.program == "generate":
            prompt = workload.cases[0].prompt
            yield _time(engine, workload.name, prompt, LIMIT, rounds)


def _time(engine: Engine, name: str, prompt: str, limit: int, rounds: int) -> LengthTimes:
    runs: dict[str, list[tuple[float, int]]] = {mode: [] for mode in MODES}
    for number in range(rounds):
        for shift in range(len(MODES)):
            mode = MODES[(number + shift) % len(MODES)]
            begun = time.perf_counter()
            done = _answer(engine, prompt, mode, limit, number)
            runs[mode].append((time.perf_counter() - begun, done.tokens))
    return LengthTimes(
        name=name,
        limit=limit,
        seconds={mode: median(seconds for seconds, _ in found) for mode, found in runs.items()},
        tokens={mode: int(median(tokens for _, tokens in found)) for mode, found in runs.items()},
    )


def _answer(engine: Engine, prompt: str, mode: Mode, limit: int, seed: int) -> Done:
    engine.prefixes.clear()  # every reply pays for its prompt
    params = SamplingParams(mode=mode, max_tokens=limit, seed=seed, retries=0)
    done: Done = engine.run_all([engine.generation(prompt, params, fit=True)])[0]
    return done


def break_even_json(costs: BreakEven, times: Sequence[LengthTimes]) -> dict[str, Any]:
    """Return everything for programs."""
    rows = [{**asdict(row), "ratio": row.ratio} for row in times]
    return {"costs": costs.describe(), "rows": rows, "goal": GOAL, **summary(times)}


def summary(times: Sequence[LengthTimes]) -> dict[str, Any]:
    worst = max(times, key=lambda row: row.ratio)
    return {
        "worst": worst.ratio,
        "worst_at": f"{worst.name} {worst.limit}",
        "within_goal": sum(row.ratio <= GOAL for row in times),
        "measured": len(times),
    }


def text_row(row: LengthTimes) -> str:
    cells = (f"{row.seconds[mode]:8.3f} s {row.tokens[mode]:4}" for mode in MODES)
    return f"{row.name:18} {row.limit:5}  {'  '.join(cells)}  {row.ratio:5.2f}"


COLUMNS = "  ".join(f"{mode:>10} tok." for mode in MODES)
HEADING = f"{'reply':18} limit  {COLUMNS}  auto / better"
