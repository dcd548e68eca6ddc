"""Make the puzzles nano is trained on, and those it is asked afterwards.

python recipes/puzzle_bank.py [--out out/nano] [--sudoku 300000] [--colouring 200000]
python recipes/puzzle_bank.py --only heldout [--out out/nano]

Writes puzzles/sudoku.npz and puzzles/colouring.npz for training, and under heldout/ 1,000 puzzles
of each of three Sudoku levels and 1,000 graphs. What is held out differs from all training puzzles
even up to symmetry: grids and graphs are split by a number that no symmetry changes. Everything is
random and made here; no published list is read.
"""

import argparse
import json
import time
from pathlib import Path

import numpy as np

from dgemma.text import colouring as colouring_text
from dgemma.train.puzzles import colouring, sudoku

TRAINING_SEED, HELD_OUT_SEED = 1, 2
LEVELS = ((36, 45), (28, 35), (22, 27))
HELD_OUT = 1000  # puzzles a set


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("out/nano"))
    parser.add_argument("--sudoku", type=int, default=300_000, help="training puzzles")
    parser.add_argument("--colouring", type=int, default=200_000, help="training graphs")
    parser.add_argument("--only", choices=["heldout"], help="no training puzzles")
    choices = parser.parse_args()
    banks, held_out = choices.out / "puzzles", choices.out / "heldout"
    begin = time.perf_counter()
    write_sudoku(held_out)
    write_colouring(held_out)
    if choices.only is None:
        write_banks(banks, choices.sudoku, choices.colouring)
    written = held_out if choices.only else f"{banks} and {held_out}"
    print(f"wrote {written} in {time.perf_counter() - begin:.0f} s")


def write_banks(folder: Path, sudokus: int, colourings: int) -> None:
    """Training puzzles."""
    rng = np.random.default_rng(TRAINING_SEED)
    colouring.make_bank(rng, colourings, held_out=False).save(folder / "colouring.npz")
    rng = np.random.default_rng(TRAINING_SEED)
    sudoku.make_bank(rng, sudokus, held_out=False).save(folder / "sudoku.npz")


def write_sudoku(folder: Path) -> None:
    """Held-out Sudoku: a puzzle and its solution a line, each of 81 digits."""
    rng = np.random.default_rng(HELD_OUT_SEED)
    bank = sudoku.make_bank(rng, 12 * HELD_OUT, held_out=True)
    taken = np.zeros(len(bank), np.bool_)
    # The hardest first: few minimal puzzles have as few clues as they ask for.
    for low, high in reversed(LEVELS):
        lines = []
        for wanted in spread(low, high, HELD_OUT):
            index = first_fit(bank, taken, wanted)
            taken[index] = True
            clues_1C = sudoku.add_clues(rng, bank.minimal_B81[[index]], np.array([wanted]))
            solution_C = bank.solutions_B81[index]
            lines.append(f"{digits(solution_C * clues_1C[0])} {digits(solution_C)}")
        rng.shuffle(lines)  # so that the first few are a fair sample
        write(folder / f"sudoku_{low}-{high}.txt", lines)


def first_fit(bank: sudoku.SudokuBank, taken: np.ndarray, wanted: int) -> int:
    """The first grid that is still free and whose minimal puzzle has at most so many clues."""
    fits_B = ~taken & (bank.minimal_B81.sum(axis=1) <= wanted)
    if not fits_B.any():
        raise SystemExit(f"too few minimal puzzles with {wanted} clues; make more of them")
    return int(fits_B.argmax())


def spread(low: int, high: int, count: int) -> list[int]:
    """Equally many of each number of clues, the fewest first."""
    return sorted(low + i % (high - low + 1) for i in range(count))


def write_colouring(folder: Path) -> None:
    """Held-out graphs: prompt and reply as JSON lines."""
    rng = np.random.default_rng(HELD_OUT_SEED)
    bank = colouring.make_bank(rng, HELD_OUT, held_out=True)
    lines = []
    for puzzle, colours in colouring.puzzles(bank):
        prompt, reply = colouring_text.prompt_text(puzzle), colouring_text.reply_text(colours)
        lines.append(json.dumps({"prompt": prompt, "reply": reply}))
    write(folder / "colouring.jsonl", lines)


def digits(cells_C: np.ndarray) -> str:
    return "".join(map(str, cells_C))


def write(path: Path, lines: list[str]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
