"""Generate the puzzles nano is trained on, and held-out ones.

    python -m recipes.nano.bank [--out out/nano] [--sudoku 300000] [--colouring 200000]
    python -m recipes.nano.bank --only heldout [--out out/nano]

Writes puzzles/sudoku.npz and raw/colouring.jsonl for training, and under heldout/ 1,000 puzzles of
each of three Sudoku levels and 1,000 graphs. A held-out puzzle is no symmetry of a training one:
grids and graphs are split by a number that no symmetry changes. Everything is random and generated
here; no published list is read.
"""

import argparse
import json
import time
from pathlib import Path

import numpy as np

from dgemma.train.sudoku import SudokuBank, add_clues
from recipes.nano import colouring, sudoku

TRAINING_SEED, HELD_OUT_SEED = 1, 2
LEVELS = ((36, 45), (28, 35), (22, 27))
NUM_HELD_OUT = 1000  # puzzles of each set


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("out/nano"))
    parser.add_argument("--sudoku", type=int, default=300_000, help="training puzzles")
    parser.add_argument("--colouring", type=int, default=200_000, help="training graphs")
    parser.add_argument("--only", choices=["heldout"], help="no training puzzles")
    options = parser.parse_args()
    held_out = options.out / "heldout"
    begin = time.perf_counter()
    write_sudoku(held_out)
    rng = np.random.default_rng(HELD_OUT_SEED)
    write_colouring(held_out, colouring.make_bank(rng, NUM_HELD_OUT, held_out=True))
    if options.only is None:
        write_training(options.out, options.sudoku, options.colouring)
    print(
        f"wrote {held_out if options.only else options.out} in {time.perf_counter() - begin:.0f} s"
    )


def write_training(out: Path, sudokus: int, colourings: int) -> None:
    """Write the training puzzles: a bank of Sudoku, and graphs as drawn, one for each in a bank."""
    rng = np.random.default_rng(TRAINING_SEED)
    graphs = colouring.make_bank(rng, colourings, held_out=False)
    write_colouring(out / "raw", colouring.draw(graphs, rng, colourings))
    rng = np.random.default_rng(TRAINING_SEED)
    bank = sudoku.make_bank(rng, sudokus, held_out=False)
    bank.save(out / "puzzles" / "sudoku.npz")


def write_sudoku(folder: Path) -> None:
    """Write held-out Sudoku: a puzzle and its solution a line, each of 81 digits."""
    rng = np.random.default_rng(HELD_OUT_SEED)
    bank = sudoku.make_bank(rng, 12 * NUM_HELD_OUT, held_out=True)
    used_B = np.zeros(len(bank), np.bool_)
    # The hardest first: few minimal puzzles have so few clues.
    for low, high in reversed(LEVELS):
        lines = []
        for num_clues in spread(low, high, NUM_HELD_OUT):
            index = first_fit(bank, used_B, num_clues)
            used_B[index] = True
            clues_1C = add_clues(rng, bank.minimal_B81[[index]], np.array([num_clues]))
            solution_C = bank.solutions_B81[index]
            lines.append(f"{digits(solution_C * clues_1C[0])} {digits(solution_C)}")
        rng.shuffle(lines)  # so that the first few are a fair sample
        write(folder / f"sudoku_{low}-{high}.txt", lines)


def first_fit(bank: SudokuBank, used_B: np.ndarray, num_clues: int) -> int:
    """Return the first unused grid whose minimal puzzle has at most so many clues."""
    fits_B = ~used_B & (bank.minimal_B81.sum(axis=1) <= num_clues)
    if not fits_B.any():
        raise SystemExit(f"too few minimal puzzles with {num_clues} clues; make more of them")
    return int(fits_B.argmax())


def spread(low: int, high: int, count: int) -> list[int]:
    """Return equally many of each number of clues, the fewest first."""
    return sorted(low + i % (high - low + 1) for i in range(count))


def write_colouring(folder: Path, bank: colouring.ColouringBank) -> None:
    """Write graphs: prompt and reply as JSON lines."""
    write(folder / colouring.FILE, [json.dumps(record) for record in colouring.records(bank)])


def digits(cells_C: np.ndarray) -> str:
    return "".join(map(str, cells_C))


def write(path: Path, lines: list[str]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
