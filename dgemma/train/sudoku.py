"""Sudoku for training: puzzles drawn from a bank, with clues added back and random symmetries.

A bank holds full grids and, for each, the clues of a minimal puzzle: without any one of them it has
several solutions. A draw adds random clues back, so that one bank serves every level, and applies a
random symmetry (relabelled digits, shuffled rows, columns, bands and stacks, transposition), of
which each grid has 1.2e12: in practice no puzzle is seen twice. `recipes/nano/sudoku.py` makes
banks; nothing here solves a puzzle.

B puzzles of a bank, N drawn ones, 81 cells row by row, T token positions, S slots, V values.
"""

import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dgemma.errors import UsageError
from dgemma.programs.sudoku import grid
from dgemma.programs.sudoku.grid import SlotTemplate, find_slots
from dgemma.text.chat import ChatTemplate, Message
from dgemma.text.tokenizer import Tokenizer

Digits = NDArray[np.uint8]
Flags = NDArray[np.bool_]
TokenIds = NDArray[np.int32]

# Fraction of draws, minimum and maximum of clues; a puzzle that needs more keeps its own.
LEVELS = ((0.8, 22, 27), (0.15, 28, 35), (0.05, 36, 50))
HOW_TO_MAKE = "make one with python -m recipes.nano.bank"


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
        """Read a file that `save` wrote."""
        packed, clues = _read_arrays(path, ("digits", "clues"))
        digits = np.stack([packed >> 4, packed & 15], axis=2).reshape(len(packed), -1)[:, :81]
        return cls(np.ascontiguousarray(digits), np.unpackbits(clues, axis=1, count=81).view(bool))


def _read_arrays(path: Path, names: Sequence[str]) -> list[NDArray[Any]]:
    """Read the arrays of these names from a bank."""
    if not path.is_file() or not zipfile.is_zipfile(path):
        raise UsageError(f"{path} is not a puzzle bank; {HOW_TO_MAKE}")
    try:
        with np.load(path, allow_pickle=False) as file:
            return [file[name] for name in names]
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile) as error:
        raise UsageError(
            f"{path} is not a bank of this puzzle, or damaged ({error}); {HOW_TO_MAKE}"
        ) from None


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
    """Draw numbers of clues, spread over the levels."""
    fractions, lows, highs = (np.array(column) for column in zip(*LEVELS, strict=True))
    level = rng.choice(len(LEVELS), size=count, p=fractions)
    return rng.integers(lows[level], highs[level], endpoint=True)


def add_clues(rng: np.random.Generator, minimal_N81: Flags, count_N: NDArray[np.int64]) -> Flags:
    """Add random clues up to a number; none is ever removed."""
    keys_N81 = rng.random(minimal_N81.shape, dtype=np.float32)
    keys_N81[minimal_N81] = -1
    last_N = np.maximum(count_N, minimal_N81.sum(axis=1)) - 1
    limit_N1 = np.take_along_axis(np.sort(keys_N81, axis=1), last_N[:, None], axis=1)
    added: Flags = keys_N81 <= limit_N1
    return added


def random_symmetries(rng: np.random.Generator, count: int) -> tuple[NDArray[np.intp], Digits]:
    """Draw the source of each cell of the new grid, and the new label of each digit (0 stays)."""
    rows_N9, columns_N9 = _line_orders(rng, count), _line_orders(rng, count)
    cells_N99 = rows_N9[:, :, None] * 9 + columns_N9[:, None, :]
    transposed_N99 = rows_N9[:, :, None] + columns_N9[:, None, :] * 9
    is_transposed_N11 = rng.random((count, 1, 1)) < 0.5
    cells_N81 = np.where(is_transposed_N11, transposed_N99, cells_N99).reshape(count, 81)
    labels_N10 = np.zeros((count, 10), np.uint8)
    labels_N10[:, 1:] = np.argsort(rng.random((count, 9)), axis=1) + 1
    return cells_N81, labels_N10


def _line_orders(rng: np.random.Generator, count: int) -> NDArray[np.intp]:
    """Shuffle rows within their bands, and the bands."""
    bands_N31 = np.argsort(rng.random((count, 3)), axis=1)[:, :, None]
    inside_N33 = np.argsort(rng.random((count, 3, 3)), axis=2)
    return (3 * bands_N31 + inside_N33).reshape(count, 9)


class SudokuSource:
    """Puzzles as token ids, as prompts and replies."""

    def __init__(self, bank: SudokuBank, tokenizer: Tokenizer, template: ChatTemplate) -> None:
        def prompt(values: Sequence[int]) -> Sequence[int]:
            content = grid.prompt_text("".join(map(str, values)))
            return template.prompt([Message(role="user", content=content)]).ids

        self.bank = bank
        self.prompt = SlotFiller(find_slots(prompt, grid.CELLS, 10))
        self.reply = SlotFiller(grid.reply_slots(tokenizer))

    def draw(self, rng: np.random.Generator, count: int) -> list[tuple[TokenIds, TokenIds]]:
        """Draw prompts and replies of random puzzles; a reply ends with the end of turn."""
        puzzles_N81, solutions_N81 = draw(self.bank, rng, count)
        prompts_NT, replies_NT = self.prompt.fill(puzzles_N81), self.reply.fill(solutions_N81 - 1)
        return list(zip(prompts_NT, replies_NT, strict=True))


class SlotFiller:
    """Slots as arrays, to fill many texts at once."""

    def __init__(self, slots: SlotTemplate) -> None:
        self.ids_T = np.array(slots.ids, np.int32)
        self.positions_S = np.array(slots.positions)
        self.tokens_SV = np.array(slots.tokens, np.int32)

    def fill(self, values_NS: Digits) -> TokenIds:
        """Return the ids of N texts."""
        ids_NT = np.tile(self.ids_T, (len(values_NS), 1))
        ids_NT[:, self.positions_S] = self.tokens_SV[np.arange(len(self.tokens_SV)), values_NS]
        return ids_NT
