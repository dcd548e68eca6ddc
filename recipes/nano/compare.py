"""Evaluate a nano on some of each held-out set, in about a minute on a GPU.

    python -m recipes.nano.compare --model nano --data out/run14 --out before.json

The tasks of `dgemma eval` with fewer cases and without the slowest parts, and one measure more: the
loss of the tokens right after a clean text, by a canvas of noise and by the causal mode.
`--merge NAME=FILE...` prints such files side by side.
"""

from __future__ import annotations

import argparse
import json
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch

from dgemma.engine import Engine
from dgemma.eval.answers import set_batch_size
from dgemma.eval.data import Data, spread
from dgemma.eval.evaluate import BATCH_SIZES, TASKS
from dgemma.eval.infill import SECTIONS, continue_prefixes, fill_canvases
from dgemma.eval.likelihood import causal_losses, denoising_losses
from dgemma.eval.measure import Case, Measure, as_json, format_value
from dgemma.eval.replies import read_puzzles, solve_all, sudoku_measures
from dgemma.programs.infill.infill import end_id
from dgemma.programs.sudoku.solve import SudokuParams
from dgemma.weights.hub import find_checkpoint

NEXT_TOKENS = (1, 8)  # after the clean text
MAX_TOKENS = 385  # of a text, in whole canvases after the first token


def puzzles(engine: Engine, data: Data, limit: int | None, seed: int) -> list[Measure]:
    """Solve puzzles with free givens at the first attempt."""
    measures = []
    for path in data.puzzles("sudoku_*.txt"):
        results = solve_all(
            engine, read_puzzles(path)[:limit], SudokuParams(pinned=False, seed=seed)
        )
        name = path.stem.removeprefix("sudoku_")
        measures += sudoku_measures(results, Case("sudoku", "diffusion", f"{name}: "))[:1]
    return measures


def lines(engine: Engine, data: Data, limit: int | None, seed: int) -> list[Measure]:
    """Fill held-out lines by one canvas, and by AR from the text before them."""
    measures = []
    for name in ("package", "problem"):
        holes = spread(list(SECTIONS[name](engine, data)), limit)
        filled = fill_canvases(engine, holes, seed, name)
        by_mode = {
            "diffusion": ["" if one is None else one.text for one in filled],
            "ar": [text or "" for text in continue_prefixes(engine, holes, name)],
        }
        for mode, texts in by_mode.items():
            exact = [a.middle.strip() == b.strip() for a, b in zip(holes, texts, strict=True)]
            measures.append(Case("infill", mode, f"{name}: ").share("exact", exact))
    return measures


def next_tokens(engine: Engine, data: Data, limit: int | None, seed: int) -> list[Measure]:
    """Compare the losses of the first tokens of pure-noise canvases with the causal losses."""
    config, measures = engine.model.config, []
    length = config.canvas_length
    ids = [
        [config.bos_token_id, *engine.tokenizer.encode(text)][:MAX_TOKENS]
        for text in data.texts("stories.jsonl", limit)
    ]
    causal = causal_losses(engine.model, ids)
    denoising = denoising_losses(engine.model, ids, 1.0, end_id(engine), seed)
    for count in NEXT_TOKENS:
        for mode, losses in (
            ("diffusion", [one.self_conditioned for one in denoising]),
            ("ar", causal),
        ):
            chosen = [[x for i, x in enumerate(row) if i % length < count] for row in losses]
            rates = [(sum(row), float(len(row))) for row in chosen if row]
            case = Case("next_tokens", mode, "stories: ")
            measures.append(case.rate(f"first {count} of a canvas", rates, "nats/token"))
    return measures


Task = Callable[[Engine, Data, int | None, int], list[Measure]]
# What is asked first comes first: a run may be cut.
PARTS: Mapping[str, tuple[Task, int]] = {
    "next_tokens": (next_tokens, 60),
    "sudoku": (puzzles, 300),
    "json_calls": (TASKS["json_calls"], 300),
    "stories": (TASKS["stories"], 24),
    **{name: (TASKS[name], 200) for name in ("questions", "rewrites", "extraction", "citations")},
    "talk": (TASKS["talk"], 200),
    "infill": (lines, 300),
    "tools": (TASKS["tools"], 200),
    "fix": (TASKS["fix"], 60),
}


def run(model: str, data: Data, out: Path, limit: int | None, seconds: float) -> None:
    """Write the measures after each part; no part begins after `seconds`."""
    began = time.monotonic()
    engine = Engine.load(find_checkpoint(model))
    set_batch_size(engine, BATCH_SIZES[engine.device.type])
    measures: list[Measure] = []
    for name, (task, count) in PARTS.items():
        if time.monotonic() - began > seconds:
            print(f"{name}: no time left", flush=True)
            continue
        start = time.monotonic()
        try:
            measures += task(engine, data, min(count, limit or count), 0)
        except Exception:
            traceback.print_exc()  # the other parts are wanted all the same
        print(f"{model}: {name} {time.monotonic() - start:.1f} s", flush=True)
        out.write_text(json.dumps(as_json(measures), indent=1), encoding="utf-8")


def side_by_side(files: Mapping[str, Path]) -> str:
    """Return a Markdown table with a column per file and mode."""
    cells: dict[tuple[str, str], dict[tuple[str, str], str]] = {}
    for label, path in files.items():
        for record in json.loads(path.read_text(encoding="utf-8")):
            measure = Measure(**record)
            row = cells.setdefault((measure.task, measure.name), {})
            row[label, "ar" if measure.mode == "ar" else "diffusion"] = format_value(measure)
    columns = [(label, mode) for mode in ("diffusion", "ar") for label in files]
    heads = ["task", "measure", *(f"{mode}, {label}" for label, mode in columns)]
    body = [
        [task, name, *(row.get(column, "") for column in columns)]
        for (task, name), row in cells.items()
    ]
    table = [heads, ["---"] * len(heads), *body]
    return "\n".join("| " + " | ".join(line) + " |" for line in table) + "\n"


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--model", default="nano")
    parser.add_argument(
        "--data", type=Path, default=Path("out/run14"), help="of recipes.nano.carry"
    )
    parser.add_argument("--out", type=Path, default=Path("compare.json"))
    parser.add_argument("--limit", type=int, help="most cases of each part")
    parser.add_argument("--seconds", type=float, default=1e9, help="begin no part after these")
    parser.add_argument("--merge", nargs="+", metavar="NAME=FILE")
    options = parser.parse_args(arguments)
    if options.merge:
        pairs = (one.partition("=") for one in options.merge)
        print(side_by_side({name: Path(path) for name, _, path in pairs}))
        return
    torch.set_num_threads(max(1, min(8, torch.get_num_threads())))
    data = Data(options.data / "heldout", options.data / "shared")
    run(options.model, data, options.out, options.limit, options.seconds)


if __name__ == "__main__":
    main()
