"""Sudoku from the text interface: held-out sets by number of givens, and the 17-clue list.

A puzzle counts as solved if the reply is a whole grid that obeys the rules and keeps the givens. No
solver is asked at inference: a canvas is begun again only when it did not settle.
"""

import time
from collections.abc import Sequence
from pathlib import Path

from dgemma.engine import Engine
from dgemma.engine.sudoku import STEPS
from dgemma.eval.answers import show
from dgemma.eval.data import Data, MissingData
from dgemma.eval.lockstep import greedy, settle, text_of
from dgemma.eval.measure import Case, Measure
from dgemma.eval.sudoku import Attempt, How, Solved, canvas_length, plan, solve
from dgemma.text.sudoku import reply_slots

TASK = "sudoku"
LISTED = "sudoku_17clue.txt"
LISTED_LIMIT = 1000
RESTARTS = 8


def sudoku(engine: Engine, data: Data, limit: int | None, seed: int) -> list[Measure]:
    """Every set with givens pinned and not, without and with restarts, and by AR mode."""
    measures: list[Measure] = []
    try:
        files = data.puzzles("sudoku_*.txt")  # many givens first
    except MissingData as reason:
        files, measures = [], [Case(TASK, prefix="held out: ").skipped(str(reason))]
    for path in files:
        clues, puzzles = path.stem.removeprefix("sudoku_"), read_puzzles(path)[:limit]
        for pinned in (True, False):
            measures += _diffusion(engine, puzzles, clues, pinned, seed)
        measures += _ar(engine, puzzles, clues, seed)
    try:
        listed = read_puzzles(data.evaluation(LISTED))[: limit or LISTED_LIMIT]
    except MissingData as reason:
        return [*measures, Case(TASK, prefix="17: ").skipped(str(reason))]
    return measures + _diffusion(engine, listed, "17", True, seed) + _ar(engine, listed, "17", seed)


def read_puzzles(path: Path) -> list[str]:
    """The first word of each line: 81 digits, 0 for an empty cell."""
    lines = path.read_text(encoding="utf-8").splitlines()
    return [line.split()[0] for line in lines if line.strip()]


def _diffusion(
    engine: Engine, puzzles: Sequence[str], clues: str, pinned: bool, seed: int
) -> list[Measure]:
    """Without restarts, and with: those that would be restarted are done again, from the start.

    The noise belongs to the puzzle, so the others would come out as they did.
    """
    once = solve_together(engine, puzzles, How(pinned=pinned, seed=seed))
    open_ = [one.puzzle for one in once if not is_soon(one)]
    how = How(pinned=pinned, restarts=RESTARTS, seed=seed)
    again = iter(solve_together(engine, open_, how))
    often = [one if is_soon(one) else next(again) for one in once]
    name = f"{clues}, {'pinned' if pinned else 'free'}, "
    return [
        *measures_of(once, Case(TASK, "diffusion", f"{name}no restart: ")),
        *measures_of(often, Case(TASK, "diffusion", f"{name}{RESTARTS} restarts: ")),
    ]


def is_soon(one: Solved) -> bool:
    """Whether it settled before a restart would have been made."""
    return one.settled and one.steps <= STEPS


def measures_of(solved: Sequence[Solved], case: Case) -> list[Measure]:
    return [
        case.share("solved", [one.is_right for one in solved]),
        case.share("settled", [one.settled for one in solved]),
        case.share("right if settled", [one.is_right for one in solved if one.settled]),
        case.mean("steps", [float(one.steps) for one in solved], "steps", "all attempts"),
    ]


def _ar(engine: Engine, puzzles: Sequence[str], clues: str, seed: int) -> list[Measure]:
    solved = solve_together(engine, puzzles, How(mode="ar", pinned=False, seed=seed))
    # Beside the diffusion that has no more help than AR.
    case = Case(TASK, "ar", f"{clues}, free, no restart: ")
    return [case.share("solved", [one.is_right for one in solved], "greedy")]


def solve_together(engine: Engine, puzzles: Sequence[str], how: How) -> list[Solved]:
    """What `solve` gives, in large batches; by `solve` itself where a grid takes several canvases.

    Only the seconds differ: each puzzle's are its share of the whole.
    """
    layout, begun = reply_slots(engine.tokenizer), time.perf_counter()
    if how.mode != "ar" and canvas_length(layout) > engine.model.config.canvas_length:
        return solve(
            engine,
            puzzles,
            mode=how.mode,
            pinned=how.pinned,
            restarts=how.restarts,
            seed=how.seed,
        )
    attempts = [Attempt(index, puzzle) for index, puzzle in enumerate(puzzles)]
    replies, running = [""] * len(puzzles), attempts
    while running:
        plans = [plan(engine, attempt, layout, how) for attempt in running]
        if how.mode == "ar":
            outcomes = greedy(engine.model, plans, engine.stop_ids)
        else:
            outcomes = settle(engine.model, plans)
        for attempt, own, outcome in zip(running, plans, outcomes, strict=True):
            attempt.steps += outcome.steps
            attempt.settled = outcome.is_settled
            replies[attempt.index] = text_of(own, outcome, engine.tokenizer, engine.stop_ids)
        running = [one for one in running if one.is_open(how)]
        show(f"{TASK}, {how.mode}", len(attempts) - len(running), len(attempts))
        for attempt in running:
            attempt.begin_again(how)
    share = (time.perf_counter() - begun) / max(1, len(puzzles))
    return [_solved(one, replies[one.index], share) for one in attempts]


def _solved(attempt: Attempt, reply: str, seconds: float) -> Solved:
    return Solved(
        puzzle=attempt.puzzle,
        solution=attempt.read(reply),
        settled=attempt.settled,
        steps=attempt.steps,
        restarts=attempt.restarts,
        seconds=seconds,
        reply=reply,
    )
