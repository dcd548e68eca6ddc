"""HumanEval single-line infilling, length known: exact match, and the problem's own unit tests.

Generated code runs in `bench.sandbox`; see there what that does and does not hold off.
"""

from collections.abc import Sequence

from dgemma.engine import Engine
from dgemma.eval.data import Data, read_jsonl
from dgemma.eval.holes import Hole, fill, go_on
from dgemma.eval.measure import Case, Measure
from dgemma.eval.sandbox import passing

TASK = "humaneval_infill"
FILE = "HumanEval-SingleLineInfilling.jsonl.gz"


def humaneval_infill(engine: Engine, data: Data, limit: int | None, seed: int) -> list[Measure]:
    """Diffusion sees both sides and the hole's length in tokens; AR sees the left side."""
    records = read_jsonl(data.evaluation(FILE), limit)
    holes = [Hole(r["prompt"], r["canonical_solution"], r["suffix"]) for r in records]
    tests = [f"{r['test']}\ncheck({r['entry_point']})\n" for r in records]
    filled = fill(engine, holes, seed, f"{TASK}, diffusion")
    lines = ["" if one is None else one.text for one in filled]
    measures = _measures(Case(TASK, "diffusion"), holes, lines, tests)
    steps = [float(one.steps) for one in filled if one is not None]
    measures.append(Case(TASK, "diffusion").mean("steps", steps, "steps"))
    lines = [text or "" for text in go_on(engine, holes, f"{TASK}, ar")]
    return measures + _measures(Case(TASK, "ar"), holes, lines, tests)


def _measures(
    case: Case, holes: Sequence[Hole], lines: Sequence[str], tests: Sequence[str]
) -> list[Measure]:
    exact = [line.strip() == hole.middle.strip() for line, hole in zip(lines, holes, strict=True)]
    programs = [
        f"{hole.whole(line)}\n{test}" for hole, line, test in zip(holes, lines, tests, strict=True)
    ]
    note = "prefix only, greedy" if case.mode == "ar" else "length known"
    return [case.share("exact", exact, note), case.share("tests pass", passing(programs), note)]
