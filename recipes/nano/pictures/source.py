"""Draw samples of composed pictures, spelled: what each soft token has to become.

Samples are of the training split or held-out: other fonts and other sentences.

B pictures, S soft tokens of one, L characters, C printable characters, K classes of soft tokens.
"""

from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from dgemma.model.vision import Grid
from dgemma.text.tokenizer import Tokenizer
from recipes.nano.pictures.compose import (
    CELL,
    COLOURS,
    FORMS,
    NUM_CHARS,
    SHEET,
    Atlas,
    Composer,
)
from recipes.nano.pictures.glyphs import FIRST, HELD_OUT_EVERY
from recipes.nano.pictures.spelling import (
    COLOUR_PIECES,
    FILLER,
    FORM_PIECES,
    MAX_OBJECTS,
    SCENE_HEIGHTS,
    SPACE,
    line_layout,
    soft_shape,
)

MIN_FITTING = 50  # sentences of the lengths that a picture's shape may have
CHANGED = 0.35  # of the lines have random characters, of which most sentences have none
CAPITALS = 0.1  # of the lines have no small letters
A, Z = ord("a") - FIRST, ord("z") - FIRST
FILLER_CLASS, SPACE_CLASS = 0, 1


@dataclass(frozen=True, slots=True)
class Classes:
    """The tokens that soft tokens may stand for: characters, after a space or not, and words."""

    ids: tuple[int, ...]  # of the vocabulary
    pieces: tuple[str, ...]
    plain_C: Tensor  # class of each character
    spaced_C: Tensor  # the same with the space before it
    is_pair_C: Tensor  # True if that is two tokens, of which the class is the second
    form: Tensor
    colour: Tensor

    @classmethod
    def of(cls, tokenizer: Tokenizer, device: torch.device) -> "Classes":
        known: dict[int, str] = {}

        def number(piece: str) -> int:
            token = tokenizer.encode(piece.replace(SPACE, " "))[-1]
            known.setdefault(token, piece)
            return list(known).index(token)

        def numbers(pieces: list[str]) -> Tensor:
            return torch.tensor([number(piece) for piece in pieces], device=device)

        number(FILLER), number(SPACE)
        chars = [chr(FIRST + i) for i in range(NUM_CHARS)]
        plain, is_pair = numbers(chars), [len(tokenizer.encode(" " + c)) > 1 for c in chars]
        spaced = numbers([c if two else SPACE + c for c, two in zip(chars, is_pair, strict=True)])
        form, colour = numbers(FORM_PIECES), numbers(COLOUR_PIECES)
        pair = torch.tensor(is_pair, device=device)
        return cls(tuple(known), tuple(known.values()), plain, spaced, pair, form, colour)

    def text(self, classes: list[int]) -> str:
        """Return what soft tokens spell, without fillers."""
        return "".join(self.pieces[c] for c in classes if c != FILLER_CLASS).replace(SPACE, " ")


class Sample(NamedTuple):
    pixels: Tensor  # [B, H, W, 3]
    kind: Tensor  # [B, H, W] as of composed pictures
    target: Tensor  # [B, S] classes; -1 in pictures whose line does not fit
    grid: Grid


def spell_lines(
    chars_BL: Tensor, middle_BL: Tensor, rows: int, columns: int, classes: Classes
) -> Tensor:
    """Return the classes of soft tokens, [B, S], as `spelling.spell_line` and `soft_tokens` do."""
    used = chars_BL < NUM_CHARS
    chars = chars_BL.where(used, 0)
    ink = used & (chars > 0)
    before = torch.cat([ink[:, :1], ink[:, :-1]], 1)
    begins = ink & ~before
    begins[:, 0] = False
    number = ink.long().cumsum(1)
    free = ((middle_BL / CELL).floor().long() - number).clamp(min=-1)
    column = free.where(ink, -9999).cummax(1).values + number
    out = torch.full_like(column, columns)
    place = column.where(ink & (column >= 0) & (column < columns), out)
    found = torch.where(begins, classes.spaced_C[chars], classes.plain_C[chars])
    last = torch.full((len(chars), columns + 1), FILLER_CLASS, device=chars.device)
    last = last.scatter(1, place, found)
    beside = (place - 1).where(begins & classes.is_pair_C[chars] & (place > 0), out)
    is_free = last.gather(1, beside) == FILLER_CLASS
    last = last.scatter(1, beside.where(is_free, out), SPACE_CLASS)[:, :columns]
    above = torch.full((len(chars), (rows - 1) * columns), FILLER_CLASS, device=chars.device)
    fits = ((column < columns) | ~ink).all(1, keepdim=True)
    return torch.cat([above, last], 1).where(fits, -1)


class Source:
    """Draws samples of one split: training faces and sentences, or held-out ones."""

    def __init__(self, path: Path, device: torch.device, seed: int, *, held_out: bool) -> None:
        self.device, self.rng = device, Random(seed)
        self.generator = torch.Generator(device).manual_seed(seed)
        with np.load(path) as file:
            raw: dict[str, Any] = {
                name: file[name] for name in ("held_out", "glyphs", "advance", "middle", "chars")
            }
        faces = np.flatnonzero(raw["held_out"] == held_out)
        glyphs, advance, middle = (
            torch.from_numpy(raw[name][faces]).to(device)
            for name in ("glyphs", "advance", "middle")
        )
        self.num_faces = len(faces)
        self.composer = Composer(Atlas.of(glyphs, advance, middle), self.generator)
        is_ours = (np.arange(len(raw["chars"])) % HELD_OUT_EVERY == 0) == held_out
        chars = torch.from_numpy(raw["chars"][is_ours].astype(np.int64))
        mean = torch.zeros(256)
        mean[:NUM_CHARS] = advance.mean(0).cpu()
        width, order = mean[chars].sum(1).sort()  # in ems, roughly
        self.width, self.chars = width, chars[order].to(device)

    def randint(self, high: int, *size: int) -> Tensor:
        return torch.randint(high, size, generator=self.generator, device=self.device)

    def sheet(self, count: int, classes: Classes) -> Sample:
        """Draw straightened grids with random digits; an empty cell is spelled 0."""
        digits = self.randint(9, count, 81) + 1
        density = self.composer.uniform(count, 0.2, 0.75)
        digits = digits * (self.composer.uniform(count, 0, 1, 81) < density)
        drawn = self.composer.sudoku(digits, self.randint(self.num_faces, count))
        target = torch.full((count, SHEET, SHEET), FILLER_CLASS, device=self.device)
        found = classes.plain_C[digits + ord("0") - FIRST]
        target[:, 1:-1, 1:-1] = found.view(count, 9, 9)
        side = 2 * SHEET
        return Sample(drawn.pixels, drawn.kind, target.flatten(1), Grid(side, side))

    def line(self, count: int, classes: Classes) -> Sample:
        """Draw lines that may have pictures of one shape, which is that of a random one."""
        while True:
            width = float(self.width[self.rng.randrange(len(self.width))])
            rows, columns, _ = line_layout(width, self.rng)
            ratio = columns / rows
            limits = torch.tensor([1.1 * ratio - 0.4, 2.9 * ratio - 1.8])
            low, high = (int(x) for x in torch.searchsorted(self.width, limits))
            if high - low >= MIN_FITTING:
                break
        chars = self._changed(self.chars[low + self.randint(high - low, count)])
        faces = self.randint(self.num_faces, count)
        drawn = self.composer.line(chars, faces, CELL * rows, CELL * columns)
        target = spell_lines(chars, drawn.middle[..., 0], rows, columns, classes)
        return Sample(drawn.pixels, drawn.kind, target, Grid(2 * rows, 2 * columns))

    def _changed(self, chars_BL: Tensor) -> Tensor:
        """Change characters of some lines, so that rare ones are seen; write some in capitals."""
        count, shape = len(chars_BL), chars_BL.shape
        is_small = (chars_BL >= A) & (chars_BL <= Z)
        capital = chars_BL - A + ord("A") - FIRST
        chars = capital.where(is_small & self.composer.chance(count, CAPITALS), chars_BL)
        share = self.composer.uniform(count, 0, 1) * self.composer.chance(count, CHANGED)
        changes = self.composer.uniform(count, 0, 1, shape[1]) < share
        changes &= (chars > 0) & (chars < NUM_CHARS)
        return (1 + self.randint(NUM_CHARS - 1, *shape)).where(changes, chars)

    def scene(self, count: int, classes: Classes) -> Sample:
        rows, columns = soft_shape(self.rng.uniform(*SCENE_HEIGHTS), 1.0)
        form = self.randint(len(FORMS), count, MAX_OBJECTS)
        colour = self.randint(len(COLOURS), count, MAX_OBJECTS)
        number = 1 + self.randint(MAX_OBJECTS, count, 1)
        shown = torch.arange(MAX_OBJECTS, device=self.device) < number
        drawn = self.composer.shapes(form.where(shown, -1), colour, CELL * rows, CELL * columns)
        x, y = (drawn.middle / CELL).long().unbind(2)
        place = (y * columns + x.clamp(max=columns - 2)).where(shown, rows * columns)
        target = torch.full((count, rows * columns + 2), FILLER_CLASS, device=self.device)
        target = target.scatter(1, place, classes.colour[colour])
        target = target.scatter(1, place + 1, classes.form[form])[:, : rows * columns]
        return Sample(drawn.pixels, drawn.kind, target, Grid(2 * rows, 2 * columns))
