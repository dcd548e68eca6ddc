"""Held-out single-line infill, by package, by problem, of MBPP: holes of at least three tokens.

Sections with the same rows. A package's line may name what stands elsewhere in it; a function that
solves a problem says all that it needs itself; MBPP's problems are a set that others have too.
"""

import ast
import textwrap
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence

from dgemma.engine import Engine
from dgemma.eval import mbpp
from dgemma.eval.data import Data, MissingData, read_jsonl, spread
from dgemma.eval.holes import Hole, fill, fill_as_told, go_on
from dgemma.eval.measure import Case, Measure

TASK = "infill"
FILE = "infill.jsonl"
PROBLEMS = "problems.jsonl"
LIMIT = 1000  # of each section
ASKED = 200  # holes that are filled one by one, as a user asks
SHORTEST = 3  # tokens
OF_ONE = 4  # holes of one MBPP problem


def infill(engine: Engine, data: Data, limit: int | None, seed: int) -> list[Measure]:
    """Exact match and share of non-trivial fills that parse, both modes, of each section."""
    measures: list[Measure] = []
    for name, read in SECTIONS.items():
        try:
            holes = spread(list(read(engine, data)), limit or LIMIT)
        except MissingData as reason:
            measures.append(Case(TASK, prefix=f"{name}: ").skipped(str(reason)))
        else:
            measures += _section(engine, name, holes, seed)
    return measures


def packages(engine: Engine, data: Data) -> Iterator[Hole]:
    """Lines of packages and of Python's own library."""
    try:
        solved = {record["group"] for record in data.records(PROBLEMS, None)}
    except MissingData:
        solved = set()
    # A group lies in one section.
    records = [record for record in data.records(FILE, None) if record["group"] not in solved]
    return _long(engine, map(_hole, records))


def problems(engine: Engine, data: Data) -> Iterator[Hole]:
    return _long(engine, map(_hole, data.records(PROBLEMS, None)))


def mbpp_lines(engine: Engine, data: Data) -> Iterator[Hole]:
    """At most four lines of a problem, spread over it."""
    for record in read_jsonl(data.evaluation(mbpp.FILE), None):
        yield from spread(list(_long(engine, mbpp.line_holes(record))), OF_ONE)


SECTIONS: dict[str, Callable[[Engine, Data], Iterator[Hole]]] = {
    "package": packages,
    "problem": problems,
    "mbpp": mbpp_lines,
}


def _section(engine: Engine, name: str, holes: Sequence[Hole], seed: int) -> list[Measure]:
    label, prefix = f"{TASK} by {name}", f"{name}: "
    filled = fill(engine, holes, seed, f"{label}, diffusion")
    texts = ["" if one is None else one.text for one in filled]
    case = Case(TASK, "diffusion", prefix)
    measures = _measures(case, holes, texts, "length known")
    done = [one for one in filled if one is not None]
    measures.append(case.mean("steps", [float(one.steps) for one in done], "steps"))
    measures.append(case.share("settled", [one.is_settled for one in done]))
    measures += _as_told(engine, name, spread(holes, ASKED), seed)
    texts = [text or "" for text in go_on(engine, holes, f"{label}, ar")]
    return measures + _measures(Case(TASK, "ar", prefix), holes, texts, "prefix only, greedy")


def _as_told(engine: Engine, name: str, holes: Sequence[Hole], seed: int) -> list[Measure]:
    case = Case(TASK, "diffusion", f"{name}: fill: ")
    filled = fill_as_told(engine, holes, seed, f"{TASK} by {name}, fill")
    note = "`fill`: both modes propose, length known"
    measures = _measures(case, holes, [one.text for one in filled], note)
    steps = [float(one.steps) for one in filled]
    return [*measures, case.mean("steps", steps, "steps", "of all canvases together")]


def read_holes(engine: Engine, data: Data, limit: int) -> list[Hole]:
    """Holes of all groups together, as a sample of what was held out."""
    return list(spread(list(_long(engine, map(_hole, data.records(FILE, None)))), limit))


def _hole(record: dict[str, str]) -> Hole:
    return Hole(record["prefix"], record["middle"], record["suffix"])


def _long(engine: Engine, holes: Iterable[Hole]) -> Iterator[Hole]:
    """Those that are long enough in the model's own tokens."""
    encode = engine.tokenizer.encode
    return (hole for hole in holes if len(encode(hole.middle.strip())) >= SHORTEST)


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
