"""Sudoku for training: a bank of minimal puzzles, drawn with clues added back and symmetries.

A bank holds full grids and, for each, which clues a minimal puzzle keeps: take one more and it has
several solutions. A draw adds random clues back, so that one bank serves every level, and applies a
random symmetry (relabelled digits, shuffled rows, columns, bands and stacks, transposition), of
which each grid has 1.2e12: in practice no puzzle is seen twice.

B puzzles of a bank, N drawn ones, 81 cells row by row, T token positions.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from dgemma.text import sudoku as text
from dgemma.text.chat import ChatTemplate, Message
from dgemma.text.slots import Slots, find_slots
from dgemma.text.tokenizer import Tokenizer
from dgemma.train.puzzles.bank import read_arrays
from dgemma.train.puzzles.search import compiled

Digits = NDArray[np.uint8]
Flags = NDArray[np.bool_]
TokenIds = NDArray[np.int32]

# Share of draws, and from how many to how many clues; a puzzle that needs more keeps its own.
LEVELS = ((0.8, 22, 27), (0.15, 28, 35), (0.05, 36, 50))
HELD_OUT_SHARE = 16  # one class of grids in so many is kept from training
CHUNK = 4096


@dataclass(frozen=True, slots=True)
class SudokuBank:
    """Full grids, and the clues of one minimal puzzle of each."""

    solutions_B81: Digits
    minimal_B81: Flags

    def __len__(self) -> int:
        return len(self.solutions_B81)

    def save(self, path: Path) -> None:
        """Write the bank, 52 bytes a puzzle: digits in 4 bits, clues in one."""
        path.parent.mkdir(parents=True, exist_ok=True)
        padded = np.pad(self.solutions_B81, ((0, 0), (0, 1)))
        digits = padded[:, 0::2] << 4 | padded[:, 1::2]
        np.savez(path, digits=digits, clues=np.packbits(self.minimal_B81, axis=1))

    @classmethod
    def load(cls, path: Path) -> "SudokuBank":
        """Read what `save` wrote."""
        packed, clues = read_arrays(path, ("digits", "clues"))
        digits = np.stack([packed >> 4, packed & 15], axis=2).reshape(len(packed), -1)[:, :81]
        return cls(np.ascontiguousarray(digits), np.unpackbits(clues, axis=1, count=81).view(bool))


def make_bank(rng: np.random.Generator, count: int, *, held_out: bool) -> SudokuBank:
    """Make minimal puzzles from grids that belong to training, or are held out from it."""
    solutions, minimal = [], []
    missing = count
    while missing > 0:
        grids_B81 = random_grids(rng, min(CHUNK, 2 * count))
        own_B81 = grids_B81[is_held_out(grids_B81) == held_out][:missing]
        solutions.append(own_B81)
        minimal.append(dig(rng, own_B81))
        missing -= len(own_B81)
    return SudokuBank(np.concatenate(solutions), np.concatenate(minimal))


def random_grids(rng: np.random.Generator, count: int) -> Digits:
    """Random full grids."""
    grids_B81 = np.zeros((count, 81), np.uint8)
    compiled()["fill_all"](_digit_orders(rng, count), grids_B81)
    return grids_B81


def dig(rng: np.random.Generator, solutions_B81: Digits) -> Flags:
    """Which clues of each grid are left when all that can go are taken in random order."""
    count = len(solutions_B81)
    cells_B81 = np.argsort(rng.random((count, 81)), axis=1)
    minimal_B81 = np.zeros((count, 81), np.bool_)
    compiled()["dig_all"](solutions_B81, cells_B81, _digit_orders(rng, count), minimal_B81)
    return minimal_B81


def is_held_out(solutions_B81: Digits) -> Flags:
    """Whether a grid may be used for evaluation only; the same for all grids symmetric to it."""
    mixed_B = grid_class(solutions_B81) * np.uint64(0x9E3779B97F4A7C15)
    held_out: Flags = (mixed_B >> np.uint64(40)) % np.uint64(HELD_OUT_SHARE) == 0
    return held_out


def grid_class(solutions_B81: Digits) -> NDArray[np.uint64]:
    """A number that no symmetry changes: symmetric grids have the same, others mostly not.

    From one row to another of its band the digits are permuted; relabelling them or shuffling
    columns leaves the lengths of that permutation's cycles as they are.
    """
    grid_B99 = solutions_B81.reshape(-1, 9, 9)
    rows_B, columns_B = _band_class(grid_B99), _band_class(grid_B99.transpose(0, 2, 1))
    low_B, high_B = np.minimum(rows_B, columns_B), np.maximum(rows_B, columns_B)
    return low_B << np.uint64(27) | high_B


def _band_class(grid_B99: Digits) -> NDArray[np.uint64]:
    """27 bits for the three bands: 3 for each pair of rows, in an order that shuffling keeps."""
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
    """Which of the eight ways the digits of row i turn into those of row j."""
    start_B9 = np.argsort(grid_B99[:, i], axis=1)  # the column of each digit
    next_B9 = np.take_along_axis(grid_B99[:, j], start_B9, axis=1).astype(np.int64) - 1
    digit_B9, length_B9 = next_B9, np.ones_like(next_B9)
    for _ in range(8):
        is_open_B9 = digit_B9 != np.arange(9)
        length_B9 += is_open_B9
        digit_B9 = np.where(is_open_B9, np.take_along_axis(next_B9, digit_B9, axis=1), digit_B9)
    kind_B: NDArray[np.intp] = np.searchsorted(CYCLE_SUMS, (length_B9**2).sum(axis=1))
    return kind_B


def draw(bank: SudokuBank, rng: np.random.Generator, count: int) -> tuple[Digits, Digits]:
    """Draw puzzles, 0 for an empty cell, and their solutions."""
    chosen = rng.integers(len(bank), size=count)
    clues_N81 = add_clues(rng, bank.minimal_B81[chosen], clue_counts(rng, count))
    solutions_N81 = bank.solutions_B81[chosen]
    cells_N81, labels_N10 = random_symmetries(rng, count)
    solutions_N81 = np.take_along_axis(solutions_N81, cells_N81, axis=1)
    solutions_N81 = np.take_along_axis(labels_N10, solutions_N81.astype(np.intp), axis=1)
    clues_N81 = np.take_along_axis(clues_N81, cells_N81, axis=1)
    return solutions_N81 * clues_N81, solutions_N81


def clue_counts(rng: np.random.Generator, count: int) -> NDArray[np.int64]:
    """How many clues to show, spread over the levels."""
    shares, lows, highs = (np.array(column) for column in zip(*LEVELS, strict=True))
    level = rng.choice(len(LEVELS), size=count, p=shares)
    return rng.integers(lows[level], highs[level], endpoint=True)


def add_clues(rng: np.random.Generator, minimal_N81: Flags, wanted_N: NDArray[np.int64]) -> Flags:
    """Add random clues up to the wanted number; none is ever taken away."""
    keys_N81 = rng.random(minimal_N81.shape, dtype=np.float32)
    keys_N81[minimal_N81] = -1
    last_N = np.maximum(wanted_N, minimal_N81.sum(axis=1)) - 1
    limit_N1 = np.take_along_axis(np.sort(keys_N81, axis=1), last_N[:, None], axis=1)
    added: Flags = keys_N81 <= limit_N1
    return added


def random_symmetries(rng: np.random.Generator, count: int) -> tuple[NDArray[np.intp], Digits]:
    """Where each cell of the new grid comes from, and the new label of each digit (0 stays)."""
    rows_N9, columns_N9 = _line_orders(rng, count), _line_orders(rng, count)
    cells_N99 = rows_N9[:, :, None] * 9 + columns_N9[:, None, :]
    turned_N99 = rows_N9[:, :, None] + columns_N9[:, None, :] * 9
    is_turned_N11 = rng.random((count, 1, 1)) < 0.5
    cells_N81 = np.where(is_turned_N11, turned_N99, cells_N99).reshape(count, 81)
    labels_N10 = np.zeros((count, 10), np.uint8)
    labels_N10[:, 1:] = np.argsort(rng.random((count, 9)), axis=1) + 1
    return cells_N81, labels_N10


def _line_orders(rng: np.random.Generator, count: int) -> NDArray[np.intp]:
    """Rows shuffled within their bands, and the bands among themselves."""
    bands_N31 = np.argsort(rng.random((count, 3)), axis=1)[:, :, None]
    inside_N33 = np.argsort(rng.random((count, 3, 3)), axis=2)
    return (3 * bands_N31 + inside_N33).reshape(count, 9)


def _digit_orders(rng: np.random.Generator, count: int) -> NDArray[np.intp]:
    return np.argsort(rng.random((count, 81, 9)), axis=2) + 1


class SudokuSource:
    """Puzzles as token ids, in the form the model is asked in."""

    def __init__(self, bank: SudokuBank, tokenizer: Tokenizer, template: ChatTemplate) -> None:
        def prompt(values: Sequence[int]) -> Sequence[int]:
            content = text.prompt_text("".join(map(str, values)))
            return template.prompt([Message(role="user", content=content)]).ids

        self.bank = bank
        self.prompt = Filler(find_slots(prompt, text.CELLS, 10))
        self.reply = Filler(text.reply_slots(tokenizer))

    def draw(self, rng: np.random.Generator, count: int) -> list[tuple[TokenIds, TokenIds]]:
        """Prompt and reply of random puzzles; the reply ends with the token that ends a turn."""
        puzzles_N81, solutions_N81 = draw(self.bank, rng, count)
        prompts_NT, replies_NT = self.prompt.fill(puzzles_N81), self.reply.fill(solutions_N81 - 1)
        return list(zip(prompts_NT, replies_NT, strict=True))


class Filler:
    """Slots as arrays, to fill many layouts at once."""

    def __init__(self, slots: Slots) -> None:
        self.ids_T = np.array(slots.ids, np.int32)
        self.positions_S = np.array(slots.positions)
        self.tokens_SV = np.array(slots.tokens, np.int32)

    def fill(self, values_NS: Digits) -> TokenIds:
        """The ids of N layouts."""
        ids_NT = np.tile(self.ids_T, (len(values_NS), 1))
        ids_NT[:, self.positions_S] = self.tokens_SV[np.arange(len(self.tokens_SV)), values_NS]
        return ids_NT
