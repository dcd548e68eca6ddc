"""Other forms of a Sudoku: the same puzzle with its lines shuffled and its digits renamed.

Rows may change places within their band and bands among themselves, columns likewise, the grid may
be turned over its diagonal, and digits may have other names: a solution of one form is a solution
of every other, written in its way. Nothing here solves anything.
"""

from dataclasses import dataclass
from random import Random

from dgemma.text.sudoku import CELLS, DIGITS

KEPT = "0" + DIGITS


@dataclass(frozen=True, slots=True)
class Form:
    """How a grid is written: which of its cells stands where, and how its digits are called."""

    cells: tuple[int, ...] = tuple(range(CELLS))  # of the grid as it was, in the new order
    names: str = KEPT  # of the digits 0 to 9; 0, which is no digit but an empty cell, keeps its

    def write(self, grid: str) -> str:
        """A puzzle or a solution in this form."""
        return "".join(self.names[int(grid[cell])] for cell in self.cells)

    def read(self, grid: str) -> str:
        """What was written in this form, as it was before."""
        old = dict(zip(self.cells, grid, strict=True))
        return "".join(self.digit(old[cell]) for cell in range(CELLS))

    def digit(self, name: str) -> str:
        """The digit that is called so here."""
        return KEPT[self.names.index(name)]


AS_IT_IS = Form()


def random_form(rng: Random) -> Form:
    rows, columns = _lines(rng), _lines(rng)
    cells = [9 * row + column for row in rows for column in columns]
    if rng.random() < 0.5:
        cells = [9 * (cell % 9) + cell // 9 for cell in cells]
    return Form(tuple(cells), "0" + "".join(rng.sample(DIGITS, len(DIGITS))))


def _lines(rng: Random) -> list[int]:
    """The nine rows or columns: shuffled within their bands, and the bands among themselves."""
    return [3 * band + line for band in rng.sample(range(3), 3) for line in rng.sample(range(3), 3)]
