"""Sudoku from the text interface: held-out sets by number of givens, and the 17-clue list.

A puzzle counts as solved if the reply is a whole grid that obeys the rules and keeps the givens. No
solver is asked at inference: a canvas is begun again only when it did not settle.
"""

from collections.abc import Sequence
from pathlib import Path

from dgemma.engine import Engine
from dgemma.engine.sudoku import STEPS, How, Solved, follow
from dgemma.eval.answers import show
from dgemma.eval.data import Data, MissingData
from dgemma.eval.measure import Case, Measure

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
    once = solve_all(engine, puzzles, How(pinned=pinned, seed=seed))
    open_ = [one.puzzle for one in once if not is_soon(one)]
    how = How(pinned=pinned, restarts=RESTARTS, seed=seed)
    again = iter(solve_all(engine, open_, how))
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
    solved = solve_all(engine, puzzles, How(mode="ar", pinned=False, seed=seed))
    # Beside the diffusion that has no more help than AR.
    case = Case(TASK, "ar", f"{clues}, free, no restart: ")
    return [case.share("solved", [one.is_right for one in solved], "greedy")]


def solve_all(engine: Engine, puzzles: Sequence[str], how: How) -> list[Solved]:
    """Solve puzzles in the engine's batches, with progress."""
    results: dict[int, Solved] = {}
    for index, event in follow(engine, puzzles, how):
        if isinstance(event, Solved):
            results[index] = event
            show(f"{TASK}, {how.mode}", len(results), len(puzzles))
    return [results[index] for index in range(len(puzzles))]
