"""Holes filled with known and searched length, beside AR that sees only what stands before them.

    python bench/fill.py [--model DIR] [--limit 20] [--sets humaneval,prose] [--form base]
        [--heldout DIR] [--data DIR] [--seed 0] [--device cpu] [--threads 1] [--samples 5]

`humaneval` is HumanEval single-line infilling: exact match, and the problems' own tests. `prose`
are words and sentences taken out of held-out stories: exact match, and likeness to the original
(difflib's ratio over words). Known length: the hole has as many tokens as the original. Searched:
nothing is told. AR writes greedily after the prefix: to the end of the line, or as many tokens as
the original had. Generated code runs in `dgemma.eval.sandbox`; see there what that does not hold
off. The table goes to stdout, progress to stderr.
"""

import argparse
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from pathlib import Path
from random import Random

import torch

from dgemma import Engine
from dgemma.device import describe_device
from dgemma.engine.fill import FORMS, Filled, FillOptions, Form
from dgemma.eval.answers import tune
from dgemma.eval.data import HELDOUT, SHARED, Data, read_jsonl
from dgemma.eval.holes import Hole, go_on
from dgemma.eval.measure import Case, Measure
from dgemma.eval.report import table
from dgemma.eval.sandbox import passing
from dgemma.train.rewrite import make_hole

HUMANEVAL = "HumanEval-SingleLineInfilling.jsonl.gz"
STORY = 800  # characters of a story
LONGEST = 32  # tokens of a prose hole
MAX_TOKENS = 64  # of a hole whose length is searched


@dataclass(frozen=True, slots=True)
class Settings:
    data: Data
    limit: int
    seed: int
    form: Form | None
    samples: int


def humaneval(engine: Engine, settings: Settings) -> list[Measure]:
    records = read_jsonl(settings.data.evaluation(HUMANEVAL), settings.limit)
    holes = [Hole(r["prompt"], r["canonical_solution"], r["suffix"]) for r in records]
    tests = [f"{r['test']}\ncheck({r['entry_point']})\n" for r in records]
    measures = []
    for name, lines, filled in every_way(engine, holes, settings, "humaneval"):
        programs = [
            f"{hole.whole(line)}\n{test}"
            for hole, line, test in zip(holes, lines, tests, strict=True)
        ]
        case = Case("humaneval", "ar" if name == "ar" else "diffusion", f"{name}: ")
        both = zip(lines, holes, strict=True)
        measures += [
            case.share("exact", [line.strip() == hole.middle.strip() for line, hole in both]),
            case.share("tests pass", passing(programs)),
            *costs(case, filled),
        ]
    return measures


def prose(engine: Engine, settings: Settings) -> list[Measure]:
    rng, holes = Random(settings.seed), list[Hole]()
    for record in settings.data.records("stories.jsonl", None):
        text = record["text"][:STORY]
        span = make_hole(text, rng)
        if span is None or len(holes) == settings.limit:
            continue
        hole = Hole(text[: span[0]], text[span[0] : span[1]], text[span[1] :])
        if len(engine.tokenizer.encode(hole.middle)) <= LONGEST:
            holes.append(hole)
    measures = []
    for name, texts, filled in every_way(engine, holes, settings, "prose"):
        both = list(zip(texts, holes, strict=True))
        case = Case("prose", "ar" if name == "ar" else "diffusion", f"{name}: ")
        measures += [
            case.share("exact", [text.strip() == hole.middle.strip() for text, hole in both]),
            case.mean("likeness", [likeness(text, hole.middle) for text, hole in both], "ratio"),
            *costs(case, filled),
        ]
        measures += [
            case.text(f"sample {i + 1}", f"{hole.middle!r}\n{text!r}")
            for i, (text, hole) in enumerate(both[: settings.samples])
        ]
    return measures


def every_way(
    engine: Engine, holes: Sequence[Hole], settings: Settings, label: str
) -> list[tuple[str, list[str], list[Filled]]]:
    """What stands in the holes: length known, length searched, and AR."""
    ways = []
    for name in ("known length", "searched length"):
        filled = []
        for number, hole in enumerate(holes):
            size = len(engine.tokenizer.encode(hole.middle))
            options = FillOptions(
                lengths=(size,) if name == "known length" else None,
                max_tokens=MAX_TOKENS,
                single_line=label == "humaneval",
                form=settings.form,
                seed=settings.seed + number,
            )
            begun = time.perf_counter()
            filled.append(engine.fill([hole.prefix, hole.suffix], options))
            seconds = time.perf_counter() - begun
            print(f"{label}, {name}: {number + 1}/{len(holes)}, {seconds:.1f} s", file=sys.stderr)
        ways.append((name, [one.holes[0].text for one in filled], filled))
    ways.append(("ar", [text or "" for text in go_on(engine, holes, f"{label}, ar")], []))
    return ways


def costs(case: Case, filled: Sequence[Filled]) -> list[Measure]:
    if not filled:
        return []
    return [
        case.mean("steps of all canvases", [float(one.steps) for one in filled], "steps"),
        case.mean("canvases", [float(one.canvases) for one in filled], "canvases"),
        case.mean("seconds", [one.seconds for one in filled], "seconds"),
    ]


def likeness(text: str, original: str) -> float:
    return SequenceMatcher(None, text.split(), original.split(), autojunk=False).ratio()


SETS = {"humaneval": humaneval, "prose": prose}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default="nano")
    parser.add_argument("--limit", type=int, default=20)
    parser.add_argument("--sets", default=",".join(SETS))
    parser.add_argument("--form", choices=FORMS)
    parser.add_argument("--heldout", type=Path, default=HELDOUT)
    parser.add_argument("--data", type=Path, default=SHARED)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--samples", type=int, default=5)
    given = parser.parse_args()
    if given.threads:
        torch.set_num_threads(given.threads)
    engine = Engine.load(given.model, device=given.device, dtype=given.dtype)
    tune(engine, engine.max_rows)
    data = Data(given.heldout, given.data)
    settings = Settings(data, given.limit, given.seed, given.form, given.samples)
    measures = [m for name in given.sets.split(",") for m in SETS[name](engine, settings)]
    where = describe_device(engine.device)
    print(f"{given.model}, {where}, seed {given.seed}, {given.limit} holes a set")
    print(table(measures))


if __name__ == "__main__":
    main()
