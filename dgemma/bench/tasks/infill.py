"""Held-out single-line infill, split by package or problem: holes of at least three tokens."""

import ast
import textwrap
import warnings
from collections.abc import Sequence

from dgemma.bench.data import Data, spread
from dgemma.bench.holes import Hole, fill, fill_as_told, go_on
from dgemma.bench.measure import Case, Measure
from dgemma.engine import Engine

TASK = "infill"
FILE = "infill.jsonl"
LIMIT = 1000
ASKED = 200  # holes that are filled one by one, as a user asks
SHORTEST = 3  # tokens


def infill(engine: Engine, data: Data, limit: int | None, seed: int) -> list[Measure]:
    """Exact match and share of non-trivial fills that parse, both modes."""
    holes = read_holes(engine, data, limit or LIMIT)
    filled = fill(engine, holes, seed, f"{TASK}, diffusion")
    texts = ["" if one is None else one.text for one in filled]
    case = Case(TASK, "diffusion")
    measures = _measures(case, holes, texts, "length known")
    done = [one for one in filled if one is not None]
    measures.append(case.mean("steps", [float(one.steps) for one in done], "steps"))
    measures.append(case.share("settled", [one.is_settled for one in done]))
    measures += _as_told(engine, spread(holes, ASKED), seed)
    texts = [text or "" for text in go_on(engine, holes, f"{TASK}, ar")]
    return measures + _measures(Case(TASK, "ar"), holes, texts, "prefix only, greedy")


def _as_told(engine: Engine, holes: Sequence[Hole], seed: int) -> list[Measure]:
    case = Case(TASK, "diffusion", "fill: ")
    filled = fill_as_told(engine, holes, seed, f"{TASK}, fill")
    note = "`fill`: both modes propose, length known"
    measures = _measures(case, holes, [one.text for one in filled], note)
    steps = [float(one.steps) for one in filled]
    return [*measures, case.mean("steps", steps, "steps", "of all canvases together")]


def read_holes(engine: Engine, data: Data, limit: int) -> list[Hole]:
    """Holes that are long enough in the model's own tokens, spread over the file."""
    holes = [Hole(r["prefix"], r["middle"], r["suffix"]) for r in data.records(FILE, None)]
    long = [h for h in holes if len(engine.tokenizer.encode(h.middle.strip())) >= SHORTEST]
    return list(spread(long, limit))


def _measures(case: Case, holes: Sequence[Hole], texts: Sequence[str], note: str) -> list[Measure]:
    both = list(zip(holes, texts, strict=True))
    real = [(hole, text) for hole, text in both if not is_trivial(text)]
    # Where the original does not parse by itself, nothing could.
    can = [(hole, text) for hole, text in real if parses(hole.whole(hole.middle))]
    return [
        case.share("exact", [text.strip() == hole.middle.strip() for hole, text in both], note),
        case.share("non-trivial", [not is_trivial(text) for text in texts]),
        case.share("parses if non-trivial", [parses(hole.whole(text)) for hole, text in can]),
    ]


def is_trivial(text: str) -> bool:
    return text.strip() in ("", "pass", "...")


def parses(source: str) -> bool:
    """Whether a function parses, methods by themselves included."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of odd escapes and the like, in others' code
            ast.parse(textwrap.dedent(source))
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    return True
