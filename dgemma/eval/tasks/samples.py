"""Ten stories and ten infills as they come, seeds 0 to 9: for a model card, nothing picked."""

from dgemma.engine import Engine
from dgemma.eval.data import Data, MissingData
from dgemma.eval.holes import cut, fill
from dgemma.eval.measure import Case, Measure
from dgemma.eval.tasks.infill import read_holes
from dgemma.eval.tasks.stories import prompt, write

TASK = "samples"
COUNT = 10
AROUND = 400  # characters shown on either side of a hole


def samples(engine: Engine, data: Data, limit: int | None, seed: int) -> list[Measure]:
    """Stories to the first prompts, and holes spread over the held-out file."""
    case, count = Case(TASK, "diffusion"), min(limit or COUNT, COUNT)
    told = write(engine, "diffusion", count, seed)
    measures = [
        case.text(f"story, seed {seed + i}", f"{prompt(i)}\n\n{text.strip()}")
        for i, text in enumerate(told)
    ]
    try:
        holes = read_holes(engine, data, count)
    except MissingData as reason:
        return [*measures, Case(TASK, prefix="infill: ").skipped(str(reason))]
    filled = fill(engine, holes, seed, f"{TASK}, infill")
    for i, (hole, one) in enumerate(zip(holes, filled, strict=True)):
        answer = "" if one is None else one.text
        shown = cut(hole, AROUND).whole(f"[[{answer}]]")
        text = f"{shown}\n\n(what stood there: {hole.middle.strip()})"
        measures.append(case.text(f"infill, seed {seed + i}", text))
    return measures
