"""Measure how nano sees: pictures drawn by Pillow in held-out fonts, as files, through the engine.

    python -m recipes.nano.pictures.measure --fonts DIR... --heldout out/nano/heldout \\
        --data out/pictures.npz [--model nano] [--limit 200] [--out results.json]

Sudoku: cells and whole grids as read, and puzzles solved from the picture end to end. Lines: the
share of wrong characters (edit distance over length), by diffusion and by AR. Shapes: captions
without a fault, by both.
"""

import argparse
import json
import time
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any

import numpy as np

from dgemma.engine import Engine, SamplingParams
from dgemma.images import Image
from dgemma.programs.sudoku.solve import (
    SudokuParams,
    SudokuResult,
    picture_program,
    reading_task,
    spelled_givens,
)
from dgemma.text.messages import Message
from recipes.nano.pictures import draw
from recipes.nano.pictures.glyphs import FIRST, HELD_OUT, HELD_OUT_EVERY, find_faces
from recipes.nano.pictures.spelling import caption, draw_objects, edit_distance

RESTARTS = 8  # those of `dgemma sudoku`


def measure_sudoku(
    engine: Engine, puzzles: Sequence[str], fonts: Sequence[Path], rng: Random
) -> dict[str, float]:
    """Read and solve puzzles from pictures."""
    cells = grids = solved = 0
    read_seconds = solve_seconds = 0.0
    params = SudokuParams(restarts=RESTARTS, seed=1)
    for puzzle in puzzles:
        image = Image(draw.draw_sudoku(puzzle, rng.choice(fonts), rng), name="grid.jpg")
        begin = time.perf_counter()
        reading = reading_task(engine, image, params)
        assert engine.images is not None
        found = spelled_givens(engine, reading.prompt.images[0].picture) or "-" * 81
        read_seconds += time.perf_counter() - begin
        cells += sum(a == b for a, b in zip(puzzle, found, strict=True))
        grids += found == puzzle
        begin = time.perf_counter()
        solved += _solves(engine, reading, puzzle, params) if found == puzzle else 0
        solve_seconds += time.perf_counter() - begin
    count = len(puzzles)
    return {
        "cells": cells / (81 * count),
        "grids": grids / count,
        "solved": solved / count,
        "seconds to read": read_seconds / count,
        "seconds to solve": solve_seconds / max(1, grids),
    }


def _solves(engine: Engine, reading: Any, puzzle: str, params: SudokuParams) -> bool:
    result: SudokuResult = engine.run(picture_program(engine, reading, "grid.jpg", params))
    return result.is_right and result.puzzle == puzzle


def measure_text(
    engine: Engine, shown: Sequence[tuple[str, bytes]], question: str, mode: Any
) -> dict[str, float]:
    """Ask about pictures whose transcriptions are known."""
    wrong = letters = exact = 0
    begin = time.perf_counter()
    for text, file in shown:
        prompt = engine.prompt([Message(role="user", content=(Image(file), question))])
        params = SamplingParams(mode=mode, seed=1, max_tokens=64)
        reply = engine.generate(prompt, params).text.strip()
        wrong, letters = wrong + edit_distance(text, reply), letters + len(text)
        exact += reply == text
    return {
        "character errors": wrong / letters,
        "exact": exact / len(shown),
        "seconds": (time.perf_counter() - begin) / len(shown),
    }


def held_out_lines(path: Path, count: int) -> list[str]:
    with np.load(path) as file:
        chars = file["chars"][::HELD_OUT_EVERY][:count]
    return ["".join(chr(FIRST + c) for c in line if c < 255) for line in chars]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--fonts", type=Path, nargs="+", required=True)
    parser.add_argument("--heldout", type=Path, help="puzzles, by recipes.nano.bank")
    parser.add_argument("--data", type=Path, default=Path("out/pictures.npz"))
    parser.add_argument("--model", default="nano")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--limit", type=int, default=200)
    parser.add_argument("--only", choices=("sudoku", "line", "shapes"))
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    rng, count = Random(7), options.limit
    engine = Engine.load(options.model, device=options.device)
    fonts = [path for path in find_faces(options.fonts) if _is_held_out(path)]
    found: dict[str, dict[str, float]] = {}
    if options.only in (None, "sudoku"):
        lines = (options.heldout / "sudoku_36-45.txt").read_text().splitlines()[:count]
        puzzles = [line.split()[0] for line in lines]
        found["sudoku 36-45"] = measure_sudoku(engine, puzzles, fonts, rng)
        print(json.dumps(found), flush=True)
    shown = {
        "line": ("What does it say?", [
            (text, draw.draw_line(text, rng.choice(fonts), rng))
            for text in held_out_lines(options.data, count)
        ]),
        "shapes": ("What is in the picture?", [
            (caption(objects), draw.draw_shapes(objects, rng))
            for objects in (draw_objects(rng) for _ in range(count))
        ]),
    }  # fmt: skip
    for name, (question, pictures) in shown.items():
        for mode in ("diffusion", "ar") if options.only in (None, name) else ():
            found[f"{name} {mode}"] = measure_text(engine, pictures, question, mode)
            print(json.dumps(found), flush=True)
    if options.out:
        options.out.write_text(json.dumps(found, indent=1) + "\n")


def _is_held_out(path: Path) -> bool:
    from PIL import ImageFont

    return str(ImageFont.truetype(path, 12).getname()[0]).startswith(HELD_OUT)


if __name__ == "__main__":
    main()
