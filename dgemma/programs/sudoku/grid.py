"""Sudoku as text: puzzles of 81 characters, the prompt, replies, and equivalent forms.

A puzzle or a solution is a string of 81 digits, row by row, 0 for an empty cell. Nothing here
solves anything. Its tokens are written without running the tokenizer, for any that encodes each
digit as one token, with the space before it ("▁5") or without ("▁", "5"); others are refused.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random

from dgemma.errors import CheckpointError, UsageError
from dgemma.text.control_tokens import TURN_END
from dgemma.text.tokenizer import Tokenizer

CELLS = 81
RESTARTS = 8  # of the command and of evaluation: new attempts where a canvas does not converge
TASK = "Solve this Sudoku."
READ_TASK = "Read this Sudoku."  # about a picture
DIGITS = "123456789"
NUM_CHECKS = 4  # random fillings of the grid compared with the tokenizer's own encoding


@dataclass(frozen=True, slots=True)
class SlotTemplate:
    """Token ids of a text, the positions of its slots, and the token of each value in each slot."""

    ids: tuple[int, ...]
    positions: tuple[int, ...]  # of each slot in `ids`
    tokens: tuple[tuple[int, ...], ...]  # [slot][value]

    def fill(self, values: Sequence[int]) -> list[int]:
        """Return the ids with these values in the slots."""
        ids = list(self.ids)
        for position, tokens, value in zip(self.positions, self.tokens, values, strict=True):
            ids[position] = tokens[value]
        return ids


def find_slots(
    encode: Callable[[Sequence[int]], Sequence[int]], slots: int, values: int
) -> SlotTemplate:
    """Find the slots of the text that `encode` writes for values from 0 to `values` - 1."""
    fillings = [tuple(encode([value] * slots)) for value in range(values)]
    if len({len(ids) for ids in fillings}) > 1:
        raise _refusal()
    columns = list(zip(*fillings, strict=True))
    positions = tuple(p for p, column in enumerate(columns) if len(set(column)) > 1)
    if len(positions) != slots:
        raise _refusal()
    template = SlotTemplate(fillings[0], positions, tuple(columns[p] for p in positions))
    rng = Random(0)
    for _ in range(NUM_CHECKS):
        filling = [rng.randrange(values) for _ in range(slots)]
        if template.fill(filling) != list(encode(filling)):
            raise _refusal()
    return template


def _refusal() -> CheckpointError:
    return CheckpointError(
        "this tokenizer merges a cell of the grid with its neighbours; "
        "use a model whose tokenizer splits digits"
    )


def parse(text: str) -> str:
    """Read a puzzle of 81 characters; 0 or . for an empty cell, white space is ignored."""
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
    """Return the user turn."""
    return f"{TASK}\n{grid_text(puzzle)}"


def reply_slots(tokenizer: Tokenizer) -> SlotTemplate:
    """Return a reply's token ids with its end; value v of a slot is digit v + 1."""

    def encode(values: Sequence[int]) -> Sequence[int]:
        grid = grid_text("".join(DIGITS[value] for value in values))
        return [*tokenizer.encode(grid), tokenizer.control_ids[TURN_END]]

    return find_slots(encode, CELLS, len(DIGITS))


def read_reply(text: str) -> str | None:
    """Return the 81 digits of a reply that is a full grid in the agreed form, else None."""
    cells = "".join(text.split())
    is_full = len(cells) == CELLS and set(cells) <= set(DIGITS)
    return cells if is_full and grid_text(cells) == text.strip() else None


def read_givens(text: str) -> str | None:
    """Return the 81 digits of a grid in the agreed form, 0 for an empty cell, else None."""
    cells = "".join(text.split())
    is_full = len(cells) == CELLS and set(cells) <= set("0" + DIGITS)
    return cells if is_full and grid_text(cells) == text.strip() else None


def is_solution(puzzle: str, reply: str) -> bool:
    """True if a reply, in text or as 81 digits, keeps the givens and obeys every rule."""
    cells = reply if len(reply) == CELLS else read_reply(reply)
    if cells is None or any(given not in ("0", c) for given, c in zip(puzzle, cells, strict=True)):
        return False
    return all("".join(sorted(cells[i] for i in unit)) == DIGITS for _, unit in units())


def units() -> list[tuple[str, tuple[int, ...]]]:
    """Return the 27 rows, columns and boxes: a name, and the cells of each."""
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
    """Name two equal givens in one unit; nothing if there are none."""
    for name, unit in units():
        given = [cells[i] for i in unit if cells[i] != "0"]
        for digit in given:
            if given.count(digit) > 1:
                return f"{digit}s in {name}"
    return ""


# --- equivalent forms


@dataclass(frozen=True, slots=True)
class GridSymmetry:
    """An equivalent form of a grid: a permutation of its cells and of its digits.

    Rows may move within their band and bands among each other, columns likewise, the grid may be
    transposed, and digits renamed: a solution of one form is a solution of every other.
    """

    cells: tuple[int, ...] = tuple(range(CELLS))  # of the original grid, in the new order
    digits: str = "0" + DIGITS  # new names of 0 to 9; 0, an empty cell, keeps its name

    def write(self, grid: str) -> str:
        """Write a puzzle or a solution in this form."""
        return "".join(self.digits[int(grid[cell])] for cell in self.cells)

    def read(self, grid: str) -> str:
        """Return the original of a grid that was written in this form."""
        old = dict(zip(self.cells, grid, strict=True))
        return "".join(self.original_digit(old[cell]) for cell in range(CELLS))

    def original_digit(self, name: str) -> str:
        return str(self.digits.index(name))


ORIGINAL = GridSymmetry()


def random_form(rng: Random) -> GridSymmetry:
    rows, columns = _shuffled_lines(rng), _shuffled_lines(rng)
    cells = [9 * row + column for row in rows for column in columns]
    if rng.random() < 0.5:
        cells = [9 * (cell % 9) + cell // 9 for cell in cells]
    return GridSymmetry(tuple(cells), "0" + "".join(rng.sample(DIGITS, len(DIGITS))))


def _shuffled_lines(rng: Random) -> list[int]:
    """Shuffle nine rows or columns within their bands, and the bands among each other."""
    return [3 * band + line for band in rng.sample(range(3), 3) for line in rng.sample(range(3), 3)]
