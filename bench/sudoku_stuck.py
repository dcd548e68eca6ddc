"""Why Sudoku canvases do not settle: what the model believes of them when they are given up.

    python bench/sudoku_stuck.py --model DIRECTORY --puzzles FILE [--limit 64] [--seed 0]

A line of FILE is a puzzle and its solution, 81 digits each. For every puzzle that does not settle,
givens pinned and no new attempt: how many cells the model is sure of, and how many of these are
right; the same for the others. Then the puzzles again with the right sure cells among the givens:
what is solved now was within the model's reach, and its own mistakes were in the way.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

from dgemma.canvas import Canvas
from dgemma.engine import Engine
from dgemma.engine.sudoku import Attempt, How, plan
from dgemma.engine.trials import first_canvases, last_canvas
from dgemma.text.slots import Slots
from dgemma.text.sudoku import reply_slots

SURE = 0.1  # nats of entropy


def solve(engine: Engine, puzzles: Sequence[str], layout: Slots, seed: int) -> list[Canvas]:
    """The canvas of each puzzle as one attempt leaves it."""
    how = How(seed=seed)
    attempts = [Attempt(index, puzzle) for index, puzzle in enumerate(puzzles)]
    jobs = [engine.submit(plan(engine, attempt, layout, how)) for attempt in attempts]
    for _ in first_canvases(engine, jobs):
        pass
    return [last_canvas(job) for job in jobs]


def grid(canvas: Canvas, layout: Slots) -> str:
    """What the canvas would say now; 0 where that is no digit."""
    tokens = canvas.guess_L[list(layout.positions)].tolist()
    digits = [dict(zip(own, "123456789", strict=True)) for own in layout.tokens]
    return "".join(own.get(token, "0") for own, token in zip(digits, tokens, strict=True))


def believed(puzzle: str, canvas: Canvas, layout: Slots) -> tuple[list[int], list[int]]:
    """The cells that are not given: those the model is sure of, and the others."""
    entropy = canvas.entropy_L[list(layout.positions)].tolist()
    cells = [cell for cell in range(81) if puzzle[cell] == "0"]
    sure = [cell for cell in cells if entropy[cell] < SURE]
    return sure, [cell for cell in cells if entropy[cell] >= SURE]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="nano")
    parser.add_argument("--puzzles", type=Path, required=True)
    parser.add_argument("--limit", type=int, default=64)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="auto")
    arguments = parser.parse_args()
    lines = arguments.puzzles.read_text(encoding="utf-8").splitlines()[: arguments.limit]
    solutions = dict(line.split() for line in lines)
    engine = Engine.load(arguments.model, device=arguments.device)
    layout, eased = reply_slots(engine.tokenizer), {}
    puzzles = list(solutions)
    for puzzle, canvas in zip(puzzles, solve(engine, puzzles, layout, arguments.seed), strict=True):
        if bool(canvas.settled):
            continue
        said, solution = grid(canvas, layout), solutions[puzzle]
        sure, unsure = believed(puzzle, canvas, layout)
        right = [cell for cell in sure if said[cell] == solution[cell]]
        guessed = sum(said[cell] == solution[cell] for cell in unsure)
        print(f"sure of {len(sure)}, {len(right)} right; of {len(unsure)} others {guessed} right")
        known = set(right)
        cells = enumerate(puzzle)
        eased["".join(solution[n] if n in known else cell for n, cell in cells)] = solution
    print(f"{len(eased)} of {len(puzzles)} did not settle")
    canvases = solve(engine, list(eased), layout, arguments.seed) if eased else []
    solved = [
        bool(canvas.settled) and grid(canvas, layout) == solution
        for canvas, solution in zip(canvases, eased.values(), strict=True)
    ]
    print(f"with the right sure cells given, {sum(solved)} of {len(solved)} are solved")


if __name__ == "__main__":
    main()
