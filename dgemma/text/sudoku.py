"""Sudoku as text: puzzles of 81 characters, the prompt, and replies read back.

A puzzle or a solution is a string of 81 digits, row by row, 0 for an empty cell. Nothing here
solves anything.
"""

from collections.abc import Sequence

from dgemma.errors import UsageError
from dgemma.text.slots import Slots, find_slots
from dgemma.text.tokenizer import Tokenizer

CELLS = 81
TASK = "Solve this Sudoku."
DIGITS = "123456789"
TURN_ENDS = "<turn|>"


def parse(text: str) -> str:
    """A puzzle in 81 characters; 0 or . for an empty cell, white space is ignored."""
    cells = "".join(text.split()).replace(".", "0")
    wrong = sorted(set(cells) - set("0" + DIGITS))
    if wrong:
        raise UsageError(
            f"a puzzle holds {wrong[0]!r}; write its cells as digits, 0 or . for an empty one"
        )
    if len(cells) != CELLS:
        raise UsageError(f"a puzzle has {len(cells)} cells; it must have 81, row by row")
    clash = _clash(cells)
    if clash:
        raise UsageError(f"a puzzle has two {clash}; mend it, since no solution can hold both")
    return cells


def grid_text(cells: str) -> str:
    """Nine lines of nine digits, separated by spaces."""
    return "\n".join(" ".join(cells[start : start + 9]) for start in range(0, CELLS, 9))


def prompt_text(puzzle: str) -> str:
    """What the user's turn says."""
    return f"{TASK}\n{grid_text(puzzle)}"


def reply_slots(tokenizer: Tokenizer) -> Slots:
    """A reply's token ids, the one that ends it included; value v of a slot is digit v + 1."""

    def encode(values: Sequence[int]) -> Sequence[int]:
        grid = grid_text("".join(DIGITS[value] for value in values))
        return [*tokenizer.encode(grid), tokenizer.control_ids[TURN_ENDS]]

    return find_slots(encode, CELLS, len(DIGITS))


def read_reply(text: str) -> str | None:
    """The 81 digits of a reply that is a full grid in the agreed form, else None."""
    cells = "".join(text.split())
    is_full = len(cells) == CELLS and set(cells) <= set(DIGITS)
    return cells if is_full and grid_text(cells) == text.strip() else None


def is_solution(puzzle: str, reply: str) -> bool:
    """Whether a reply, in text or as 81 digits, keeps the givens and obeys every rule."""
    cells = reply if len(reply) == CELLS else read_reply(reply)
    if cells is None or any(given not in ("0", c) for given, c in zip(puzzle, cells, strict=True)):
        return False
    return all("".join(sorted(cells[i] for i in unit)) == DIGITS for _, unit in units())


def units() -> list[tuple[str, tuple[int, ...]]]:
    """The 27 rows, columns and boxes: a name, and the cells of each."""
    rows = [(f"row {n + 1}", tuple(range(9 * n, 9 * n + 9))) for n in range(9)]
    columns = [(f"column {n + 1}", tuple(range(n, CELLS, 9))) for n in range(9)]
    boxes = [
        (
            f"box {n + 1}",
            tuple(27 * (n // 3) + 3 * (n % 3) + 9 * r + c for r in range(3) for c in range(3)),
        )
        for n in range(9)
    ]
    return rows + columns + boxes


def _clash(cells: str) -> str:
    """Two equal givens in one unit, in words; nothing if there are none."""
    for name, unit in units():
        given = [cells[i] for i in unit if cells[i] != "0"]
        for digit in given:
            if given.count(digit) > 1:
                return f"{digit}s in {name}"
    return ""
