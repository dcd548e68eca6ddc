"""Graph colouring from the text interface: any colouring that obeys the graph counts."""

from dgemma.engine import Engine
from dgemma.eval.data import Data
from dgemma.eval.measure import Measure
from dgemma.eval.tasks.replies import answer, read_pairs
from dgemma.text.colouring import is_solution, parse

TASK = "colouring"


def colouring(engine: Engine, data: Data, limit: int | None, seed: int) -> list[Measure]:
    """Share of valid colourings, and how many steps they took."""
    pairs = read_pairs(data, "colouring.jsonl", limit)
    puzzles = [parse(pair.prompt) for pair in pairs]
    measures = []
    for given in answer(engine, pairs, TASK, seed):
        valid = [is_solution(p, text) for p, text in zip(puzzles, given.answers, strict=True)]
        measures.append(given.case.share("valid", valid, given.note))
        measures.append(given.case.mean("steps", given.steps, "steps"))
    return measures
