"""Draw samples of composed pictures with their transcriptions, of the training split or held-out.

Held-out pictures have other fonts and other sentences.
"""

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from dgemma.model.vision import Grid
from dgemma.text.tokenizer import Tokenizer
from dgemma.train.sudoku import SudokuBank, add_clues, random_symmetries
from dgemma.weights.hub import NANO_DIRECTORY
from recipes.nano.pictures import task
from recipes.nano.pictures.compose import Atlas, Composer, Pictures

SIDE = 11  # soft tokens of a square picture's side
# Soft tokens of lines by rows and columns: all have 132.
LINE_GRIDS = ((2, 66), (3, 44), (3, 44), (4, 33), (4, 33), (6, 22), (11, 12))
MIN_EM = 22  # pixels of a line's em; longer texts need a wider picture
HELD_OUT_EVERY = 50
NUM_SCENES = 20_000


class Sample(NamedTuple):
    pictures: Pictures
    tokens: Tensor  # of the transcription, padded with -1
    grid: Grid
    solution: Tensor | None = None  # tokens of a Sudoku's solution


class Source:
    """Draws samples of one split: training faces and sentences, or held-out ones."""

    def __init__(self, path: Path, device: torch.device, seed: int, *, held_out: bool) -> None:
        self.device, self.rng = device, np.random.default_rng(seed)
        self.generator = torch.Generator(device).manual_seed(seed)
        self.tokenizer = Tokenizer.load(NANO_DIRECTORY)
        self.table = task.grid_table(self.tokenizer).to(device)
        with np.load(path) as file:
            raw: dict[str, Any] = {name: file[name] for name in file.files}
        faces = np.flatnonzero(raw["held_out"] == held_out)
        glyphs, advance, middle = (
            torch.from_numpy(raw[name][faces]).to(device)
            for name in ("glyphs", "advance", "middle")
        )
        self.num_faces = len(faces)
        self.composer = Composer(Atlas.of(glyphs, advance, middle), self.generator)
        is_ours = (np.arange(len(raw["chars"])) % HELD_OUT_EVERY == 0) == held_out
        self.chars, self.owner, self.tokens = (
            torch.from_numpy(raw[name][is_ours].astype(np.int64)).to(device)
            for name in ("chars", "owner", "tokens")
        )
        mean = torch.zeros(256, device=device)
        mean[: advance.shape[1]] = advance.mean(0)
        ems = mean[self.chars].sum(1)  # width of each sentence, roughly
        self.fitting = {
            columns: torch.nonzero(ems * MIN_EM < columns * 32 * 0.85)[:, 0]
            for _, columns in LINE_GRIDS
        }
        minimal = np.unpackbits(raw["minimal"], axis=1, count=81).view(bool)
        self.bank = SudokuBank(raw["solutions"], minimal)
        scenes = 500 if held_out else NUM_SCENES
        self.scenes = task.make_scenes(self.tokenizer, scenes, seed, device)

    def randint(self, high: int, count: int) -> Tensor:
        return torch.randint(high, (count,), generator=self.generator, device=self.device)

    def sudoku(self, count: int, *, solved: bool = False) -> Sample:
        """Draw grids: random digits, or with `solved` easy puzzles with their solutions."""
        if solved:
            puzzle, solution = self._puzzles(count)
        else:
            puzzle = torch.randint(1, 10, (count, 81), generator=self.generator, device=self.device)
            density = self.composer.uniform(count, 0.2, 0.75)
            puzzle = puzzle * (self.composer.uniform(count, 0, 1, 81) < density)
            solution = None
        pictures = self.composer.sudoku(puzzle, self.randint(self.num_faces, count), 32 * SIDE)
        answer = None if solution is None else task.grid_tokens(solution, self.table)
        tokens = task.grid_tokens(puzzle, self.table)
        return Sample(pictures, tokens, Grid(2 * SIDE, 2 * SIDE), answer)

    def _puzzles(self, count: int) -> tuple[Tensor, Tensor]:
        chosen = self.rng.integers(len(self.bank), size=count)
        number = self.rng.integers(26, 46, size=count)
        clues = add_clues(self.rng, self.bank.minimal_B81[chosen], number)
        cells, labels = random_symmetries(self.rng, count)
        solution = np.take_along_axis(self.bank.solutions_B81[chosen], cells, axis=1)
        solution = np.take_along_axis(labels, solution.astype(np.intp), axis=1)
        clues = np.take_along_axis(clues, cells, axis=1)
        both = (solution * clues, solution)
        return tuple(torch.from_numpy(x.astype(np.int64)).to(self.device) for x in both)  # type: ignore[return-value]

    def line(self, count: int) -> Sample:
        """Draw lines that fit a grid of soft tokens; some have their letters or words changed."""
        rows, columns = LINE_GRIDS[int(self.rng.integers(len(LINE_GRIDS)))]
        fits = self.fitting[columns]
        chosen = fits[self.randint(len(fits), count)]
        tokens = self.tokens[chosen].where(self.tokens[chosen] > 0, -1)
        faces = self.randint(self.num_faces, count)
        chars, owner = self.chars[chosen], self.owner[chosen]
        pictures = self.composer.line(chars, owner, faces, 32 * rows, 32 * columns)
        return Sample(pictures, tokens, Grid(2 * rows, 2 * columns))

    def shapes(self, count: int) -> Sample:
        chosen = self.randint(len(self.scenes.form), count)
        form, colour = self.scenes.form[chosen], self.scenes.colour[chosen]
        pictures = self.composer.shapes(form, colour, 32 * SIDE)
        return Sample(pictures, self.scenes.tokens[chosen], Grid(2 * SIDE, 2 * SIDE))
