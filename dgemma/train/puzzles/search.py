"""Sudoku by bitmasks: a search, and digging a full grid down to a minimal puzzle.

Used to make puzzles and to check them, never to solve them for a model. Every function is written
once, in the part of Python that numba compiles: called as they stand they are the reference, and
`compiled` gives the same in machine code where numba is installed.

Cells are 0 to 80, row by row. A mask has bit d - 1 set where digit d may stand.
"""

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dgemma.train.puzzles.fast import compile_all

Ints = NDArray[Any]

ALL = 0x1FF  # any digit
BITS = np.array([mask.bit_count() for mask in range(512)])
LOWEST = np.array([(mask & -mask).bit_length() for mask in range(512)])  # its lowest digit
# The row, the column (9 on) and the box (18 on) of each cell.
UNITS = np.array([(i // 9, 9 + i % 9, 18 + i // 27 * 3 + i % 9 // 3) for i in range(81)])


def candidates(masks_C: Ints, used_U: Ints, cell: int) -> int:
    """What may stand in a cell beside what its row, column and box hold."""
    row, column, box = UNITS[cell, 0], UNITS[cell, 1], UNITS[cell, 2]
    mask: int = masks_C[cell] & ~(used_U[row] | used_U[column] | used_U[box])
    return mask


def fewest(masks_C: Ints, used_U: Ints, cells: Ints) -> tuple[int, int]:
    """Which of the open cells has the fewest candidates, and these."""
    best, best_mask = 0, ALL
    for i in range(len(cells)):
        mask = candidates(masks_C, used_U, cells[i])
        if i == 0 or BITS[mask] < BITS[best_mask]:
            best, best_mask = i, mask
            if BITS[mask] <= 1:
                break
    return best, best_mask


def single_U(masks_C: Ints, used_U: Ints, cells: Ints) -> tuple[Ints, bool]:
    """The digits with one place left in each unit, and whether each other one has a place too."""
    once_U, twice_U = np.zeros(27, np.int64), np.zeros(27, np.int64)
    for i in range(len(cells)):
        mask = candidates(masks_C, used_U, cells[i])
        for k in range(3):
            unit = UNITS[cells[i], k]
            twice_U[unit] |= once_U[unit] & mask
            once_U[unit] |= mask
    has_places = True
    for unit in range(27):
        has_places = has_places and (once_U[unit] | used_U[unit]) == ALL
    return once_U & ~twice_U, has_places


def choose(masks_C: Ints, used_U: Ints, cells: Ints) -> tuple[int, int]:
    """Which open cell to decide next, and what to try there: nothing if there is no way on."""
    best, best_mask = fewest(masks_C, used_U, cells)
    if BITS[best_mask] <= 1:
        return best, best_mask
    alone_U, has_places = single_U(masks_C, used_U, cells)
    if not has_places:
        return best, 0
    for i in range(len(cells)):
        row, column, box = UNITS[cells[i], 0], UNITS[cells[i], 1], UNITS[cells[i], 2]
        alone = alone_U[row] | alone_U[column] | alone_U[box]
        if alone:
            alone &= candidates(masks_C, used_U, cells[i])
            if alone:
                # Two digits that can stand nowhere but here: no way on.
                return i, alone if BITS[alone] == 1 else 0
    return best, best_mask


def place(used_U: Ints, cell: int, mask: int) -> bool:
    """Note a digit in its row, column and box; tells whether it was free in all of them."""
    is_free = True
    for k in range(3):
        unit = UNITS[cell, k]
        is_free = is_free and (used_U[unit] & mask) == 0
        used_U[unit] |= mask
    return is_free


def lift(used_U: Ints, cell: int, mask: int) -> None:
    """Undo `place`."""
    for k in range(3):
        used_U[UNITS[cell, k]] &= ~mask


def first_of(todo: int, order_9: Ints) -> int:
    """The digit of a mask that comes first in the order, as a mask."""
    for k in range(9):
        bit: int = 1 << (order_9[k] - 1)
        if todo & bit:
            return bit
    return 0


def search(masks_C: Ints, order_C9: Ints, limit: int, found_C: Ints) -> int:
    """Count solutions, up to `limit`; the last one counted is in `found_C`.

    `masks_C` says what may stand in each cell; `order_C9` in which order its digits are tried.
    """
    used_U = np.zeros(27, np.int64)
    cells = np.zeros(81, np.int64)  # the open ones; those the search has decided in front
    todo, put = np.zeros(82, np.int64), np.zeros(82, np.int64)  # at each depth, as masks
    num_open = 0
    for cell in range(81):
        if BITS[masks_C[cell]] != 1:
            cells[num_open] = cell
            num_open += 1
        elif place(used_U, cell, masks_C[cell]):
            found_C[cell] = LOWEST[masks_C[cell]]
        else:
            return 0
    count, depth, is_new = 0, 0, True
    while depth >= 0 and count < limit:
        if depth == num_open:
            count, depth, is_new = count + 1, depth - 1, False
            continue
        if is_new:
            best, todo[depth] = choose(masks_C, used_U, cells[depth:num_open])
            best += depth
            cells[depth], cells[best] = cells[best], cells[depth]
        else:
            lift(used_U, cells[depth], put[depth])
        is_new = todo[depth] != 0
        if is_new:
            cell, put[depth] = cells[depth], first_of(todo[depth], order_C9[cells[depth]])
            todo[depth] &= ~put[depth]
            found_C[cell] = LOWEST[put[depth]]
            place(used_U, cell, put[depth])
        depth += 1 if is_new else -1
    return count


def dig(solution_C: Ints, order_C: Ints, order_C9: Ints, minimal_C: Ints) -> None:
    """Mark in `minimal_C` the clues that stay when all that can go are taken, in the given order.

    A clue can go if no solution of the others has another digit in its place.
    """
    masks_C = np.zeros(81, np.int64)
    scratch_C = np.zeros(81, np.int64)
    for cell in range(81):
        masks_C[cell] = 1 << (solution_C[cell] - 1)
        minimal_C[cell] = True
    for cell in order_C:
        own = masks_C[cell]
        masks_C[cell] = ALL & ~own
        minimal_C[cell] = search(masks_C, order_C9, 1, scratch_C) == 1
        masks_C[cell] = own if minimal_C[cell] else ALL


def fill_all(digits_B819: Ints, solutions_B81: Ints) -> None:
    """Fill in a random full grid for each order of digits to try."""
    free_C = np.full(81, ALL)
    found_C = np.zeros(81, np.int64)
    for b in range(len(solutions_B81)):
        search(free_C, digits_B819[b], 1, found_C)
        solutions_B81[b] = found_C


def dig_all(solutions_B81: Ints, cells_B81: Ints, digits_B819: Ints, minimal_B81: Ints) -> None:
    """Dig every grid, its cells in the given order."""
    solution_C = np.zeros(81, np.int64)
    for b in range(len(solutions_B81)):
        solution_C[:] = solutions_B81[b]
        dig(solution_C, cells_B81[b], digits_B819[b], minimal_B81[b])


PARTS = (
    *(candidates, fewest, single_U, choose, place, lift, first_of),
    *(search, dig, fill_all, dig_all),
)


@cache
def compiled() -> dict[str, Callable[..., Any]]:
    """The functions above, compiled where that is possible."""
    return compile_all(PARTS)
