"""Make banks of Sudoku: random full grids, each reduced to the clues of a minimal puzzle.

The search makes and checks puzzles, and never solves them for a model. Its functions are written in
the part of Python that numba compiles.

B puzzles of a bank, C cells (81, row by row), U units (rows, columns, boxes). A mask has bit d - 1
set where digit d is allowed.
"""

from collections.abc import Callable, Sequence
from functools import cache
from types import FunctionType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dgemma.train.sudoku import Digits, Flags, SudokuBank

Ints = NDArray[Any]

HELD_OUT_MODULUS = 16  # one class of grids in so many is held out from training
GRIDS_PER_ROUND = 4096


# --- search

ALL_DIGITS = 0x1FF
BITS = np.array([mask.bit_count() for mask in range(512)])
LOWEST = np.array([(mask & -mask).bit_length() for mask in range(512)])  # lowest digit
# The row, the column (9 on) and the box (18 on) of each cell.
UNITS = np.array([(i // 9, 9 + i % 9, 18 + i // 27 * 3 + i % 9 // 3) for i in range(81)])


def candidates(masks_C: Ints, used_U: Ints, cell: int) -> int:
    """Return the digits allowed in a cell by its mask, row, column and box."""
    row, column, box = UNITS[cell, 0], UNITS[cell, 1], UNITS[cell, 2]
    mask: int = masks_C[cell] & ~(used_U[row] | used_U[column] | used_U[box])
    return mask


def fewest(masks_C: Ints, used_U: Ints, cells: Ints) -> tuple[int, int]:
    """Find the open cell with the fewest candidates, and these."""
    best, best_mask = 0, ALL_DIGITS
    for i in range(len(cells)):
        mask = candidates(masks_C, used_U, cells[i])
        if i == 0 or BITS[mask] < BITS[best_mask]:
            best, best_mask = i, mask
            if BITS[mask] <= 1:
                break
    return best, best_mask


def hidden_singles(masks_C: Ints, used_U: Ints, cells: Ints) -> tuple[Ints, bool]:
    """Find the digits with one cell left in each unit; False if one has no cell left."""
    once_U, twice_U = np.zeros(27, np.int64), np.zeros(27, np.int64)
    for i in range(len(cells)):
        mask = candidates(masks_C, used_U, cells[i])
        for k in range(3):
            unit = UNITS[cells[i], k]
            twice_U[unit] |= once_U[unit] & mask
            once_U[unit] |= mask
    is_possible = True
    for unit in range(27):
        is_possible = is_possible and (once_U[unit] | used_U[unit]) == ALL_DIGITS
    return once_U & ~twice_U, is_possible


def choose(masks_C: Ints, used_U: Ints, cells: Ints) -> tuple[int, int]:
    """Choose the open cell to decide next, and its candidates: none if there is no solution."""
    best, best_mask = fewest(masks_C, used_U, cells)
    if BITS[best_mask] <= 1:
        return best, best_mask
    single_U, is_possible = hidden_singles(masks_C, used_U, cells)
    if not is_possible:
        return best, 0
    for i in range(len(cells)):
        row, column, box = UNITS[cells[i], 0], UNITS[cells[i], 1], UNITS[cells[i], 2]
        single = single_U[row] | single_U[column] | single_U[box]
        if single:
            single &= candidates(masks_C, used_U, cells[i])
            if single:
                # Two digits that fit nowhere but here: no solution.
                return i, single if BITS[single] == 1 else 0
    return best, best_mask


def place(used_U: Ints, cell: int, mask: int) -> bool:
    """Mark a digit as used in its row, column and box; returns whether it was free in all."""
    is_free = True
    for k in range(3):
        unit = UNITS[cell, k]
        is_free = is_free and (used_U[unit] & mask) == 0
        used_U[unit] |= mask
    return is_free


def remove(used_U: Ints, cell: int, mask: int) -> None:
    """Undo `place`."""
    for k in range(3):
        used_U[UNITS[cell, k]] &= ~mask


def first_of(todo: int, order_9: Ints) -> int:
    """Return the digit of a mask that comes first in the order, as a mask."""
    for k in range(9):
        bit: int = 1 << (order_9[k] - 1)
        if todo & bit:
            return bit
    return 0


def search(masks_C: Ints, order_C9: Ints, limit: int, solution_C: Ints) -> int:
    """Count solutions, up to `limit`; the last one counted is in `solution_C`.

    `masks_C`: the digits allowed in each cell; `order_C9`: the order in which they are tried.
    """
    used_U = np.zeros(27, np.int64)
    cells = np.zeros(81, np.int64)  # the open ones; decided ones come first
    todo, put = np.zeros(82, np.int64), np.zeros(82, np.int64)  # at each depth, as masks
    num_open = 0
    for cell in range(81):
        if BITS[masks_C[cell]] != 1:
            cells[num_open] = cell
            num_open += 1
        elif place(used_U, cell, masks_C[cell]):
            solution_C[cell] = LOWEST[masks_C[cell]]
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
            remove(used_U, cells[depth], put[depth])
        is_new = todo[depth] != 0
        if is_new:
            cell, put[depth] = cells[depth], first_of(todo[depth], order_C9[cells[depth]])
            todo[depth] &= ~put[depth]
            solution_C[cell] = LOWEST[put[depth]]
            place(used_U, cell, put[depth])
        depth += 1 if is_new else -1
    return count


def dig(solution_C: Ints, order_C: Ints, order_C9: Ints, minimal_C: Ints) -> None:
    """Mark in `minimal_C` the clues that remain when redundant ones are removed in the given order.

    A clue is redundant if no solution of the others has another digit there.
    """
    masks_C = np.zeros(81, np.int64)
    scratch_C = np.zeros(81, np.int64)
    for cell in range(81):
        masks_C[cell] = 1 << (solution_C[cell] - 1)
        minimal_C[cell] = True
    for cell in order_C:
        digit = masks_C[cell]
        masks_C[cell] = ALL_DIGITS & ~digit
        minimal_C[cell] = search(masks_C, order_C9, 1, scratch_C) == 1
        masks_C[cell] = digit if minimal_C[cell] else ALL_DIGITS


def fill_all(digits_B819: Ints, solutions_B81: Ints) -> None:
    """Make a random full grid for each order of digits to try."""
    free_C = np.full(81, ALL_DIGITS)
    solution_C = np.zeros(81, np.int64)
    for b in range(len(solutions_B81)):
        search(free_C, digits_B819[b], 1, solution_C)
        solutions_B81[b] = solution_C


def dig_all(solutions_B81: Ints, cells_B81: Ints, digits_B819: Ints, minimal_B81: Ints) -> None:
    """Reduce every grid to a minimal puzzle, its cells in the given order."""
    solution_C = np.zeros(81, np.int64)
    for b in range(len(solutions_B81)):
        solution_C[:] = solutions_B81[b]
        dig(solution_C, cells_B81[b], digits_B819[b], minimal_B81[b])


COMPILED = (
    *(candidates, fewest, hidden_singles, choose, place, remove, first_of),
    *(search, dig, fill_all, dig_all),
)


@cache
def compiled() -> dict[str, Callable[..., Any]]:
    """Return the functions above by name, compiled if numba is installed."""
    return compile_all(COMPILED)


def compile_all(functions: Sequence[Callable[..., Any]]) -> dict[str, Callable[..., Any]]:
    """Compile functions by numba, if it is installed; a caller comes after its callees.

    Uncompiled they are the reference. A call among them must reach the compiled one, which numba
    looks up in the globals.
    """
    plain: dict[str, Any] = {function.__name__: function for function in functions}
    try:
        from numba import njit
    except ImportError:
        return plain
    fast: dict[str, Callable[..., Any]] = {}
    for name, function in plain.items():
        namespace = {**function.__globals__, **fast}
        fast[name] = njit(FunctionType(function.__code__, namespace, name))
    return fast


# --- banks


def make_bank(rng: np.random.Generator, count: int, *, held_out: bool) -> SudokuBank:
    """Make minimal puzzles from grids that belong to training, or are held out from it."""
    solutions, minimal = [], []
    missing = count
    while missing > 0:
        grids_B81 = random_grids(rng, min(GRIDS_PER_ROUND, 2 * count))
        chosen_B81 = grids_B81[is_held_out(grids_B81) == held_out][:missing]
        solutions.append(chosen_B81)
        minimal.append(minimal_clues(rng, chosen_B81))
        missing -= len(chosen_B81)
    return SudokuBank(np.concatenate(solutions), np.concatenate(minimal))


def random_grids(rng: np.random.Generator, count: int) -> Digits:
    """Make random full grids."""
    grids_B81 = np.zeros((count, 81), np.uint8)
    compiled()["fill_all"](_digit_orders(rng, count), grids_B81)
    return grids_B81


def minimal_clues(rng: np.random.Generator, solutions_B81: Digits) -> Flags:
    """Remove the redundant clues of each grid in random order; returns the remaining ones."""
    count = len(solutions_B81)
    cells_B81 = np.argsort(rng.random((count, 81)), axis=1)
    minimal_B81 = np.zeros((count, 81), np.bool_)
    compiled()["dig_all"](solutions_B81, cells_B81, _digit_orders(rng, count), minimal_B81)
    return minimal_B81


def is_held_out(solutions_B81: Digits) -> Flags:
    """Return True for grids that are for evaluation only; symmetric grids agree."""
    mixed_B = grid_class(solutions_B81) * np.uint64(0x9E3779B97F4A7C15)
    held_out: Flags = (mixed_B >> np.uint64(40)) % np.uint64(HELD_OUT_MODULUS) == 0
    return held_out


def grid_class(solutions_B81: Digits) -> NDArray[np.uint64]:
    """Compute an invariant: symmetric grids have the same number, others mostly not.

    From one row to another of its band the digits are permuted; relabelling them or shuffling
    columns leaves the lengths of that permutation's cycles as they are.
    """
    grid_B99 = solutions_B81.reshape(-1, 9, 9)
    rows_B, columns_B = _band_class(grid_B99), _band_class(grid_B99.transpose(0, 2, 1))
    low_B, high_B = np.minimum(rows_B, columns_B), np.maximum(rows_B, columns_B)
    return low_B << np.uint64(27) | high_B


def _band_class(grid_B99: Digits) -> NDArray[np.uint64]:
    """Pack the classes of three bands: 3 bits for each pair of rows, in an invariant order."""
    kinds = np.sort(
        np.stack(
            [
                [
                    _cycle_kind(grid_B99, 3 * band + i, 3 * band + j)
                    for i, j in ((0, 1), (0, 2), (1, 2))
                ]
                for band in range(3)
            ]
        ).astype(np.uint64),
        axis=1,
    )
    bands = np.sort(kinds[:, 0] << np.uint64(6) | kinds[:, 1] << np.uint64(3) | kinds[:, 2], axis=0)
    packed: NDArray[np.uint64] = bands[0] << np.uint64(18) | bands[1] << np.uint64(9) | bands[2]
    return packed


# Cubes of cycle lengths, summed: one number for each way to split 9 digits into cycles of 2 to 9.
CYCLE_SUMS = np.array([51, 81, 99, 141, 189, 243, 351, 729])


def _cycle_kind(grid_B99: Digits, i: int, j: int) -> NDArray[np.intp]:
    """Classify the permutation of digits from row i to row j by its cycle lengths, 0 to 7."""
    start_B9 = np.argsort(grid_B99[:, i], axis=1)  # the column of each digit
    next_B9 = np.take_along_axis(grid_B99[:, j], start_B9, axis=1).astype(np.int64) - 1
    digit_B9, length_B9 = next_B9, np.ones_like(next_B9)
    for _ in range(8):
        is_open_B9 = digit_B9 != np.arange(9)
        length_B9 += is_open_B9
        digit_B9 = np.where(is_open_B9, np.take_along_axis(next_B9, digit_B9, axis=1), digit_B9)
    kind_B: NDArray[np.intp] = np.searchsorted(CYCLE_SUMS, (length_B9**2).sum(axis=1))
    return kind_B


def _digit_orders(rng: np.random.Generator, count: int) -> NDArray[np.intp]:
    return np.argsort(rng.random((count, 81, 9)), axis=2) + 1
