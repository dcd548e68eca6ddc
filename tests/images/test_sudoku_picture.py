"""Puzzles from pictures: straightened, read by the tower; refused where nothing was read."""

from dataclasses import replace
from io import BytesIO
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image as Pillow
from PIL import ImageDraw, ImageFont

from dgemma.engine import Engine
from dgemma.errors import UsageError
from dgemma.images import Image, Picture, fit
from dgemma.programs.sudoku import grid
from dgemma.programs.sudoku.solve import SudokuParams, picture_program, reading_task
from dgemma.programs.sudoku.straighten import BUDGET, SHEET, find_frame, sheet_of
from tests.images.tiny_tower import TOWER, encoded, seeing_engine

PUZZLE = "530070000600195000098000060800060003400803001700020006060000280000419005000080079"
VISION = replace(TOWER, patch_size=16, pooling_kernel_size=2)  # the cells of nano


@pytest.fixture
def engine() -> Engine:
    """nano, with soft tokens that a test chooses instead of a tower's."""
    return Engine.load("nano", device="cpu")


class Spelling:
    """Features of any picture: the embeddings of these texts, one token each, with noise."""

    def __init__(self, engine: Engine, texts: list[str]) -> None:
        ids = [engine.tokenizer.encode(text)[-1] for text in texts]
        noise = torch.randn(len(ids), 512, generator=torch.Generator().manual_seed(0))
        self.rows = engine.model.embed(torch.tensor(ids)) + 0.3 * noise

    def features(self, picture: object) -> torch.Tensor:
        return self.rows


PICTURE = Picture(np.zeros((352, 352, 3), np.uint8), VISION, budget=BUDGET, width=1, height=1)
READING: Any = SimpleNamespace(prompt=SimpleNamespace(images=[SimpleNamespace(picture=PICTURE)]))


def spelled(puzzle: str) -> list[str]:
    """Return a straightened grid's soft tokens: the cells, and newlines around them."""
    side = ["\n"] * SHEET
    rows = (["\n", *puzzle[i : i + 9], "\n"] for i in range(0, 81, 9))
    return [*side, *(cell for row in rows for cell in row), *side]


def start(engine: Engine, text: str) -> Any:
    """Run the program up to the tasks after a reading by the model that says this."""
    engine.images = Spelling(engine, ["It"] * SHEET**2)  # type: ignore[assignment]
    program = picture_program(engine, READING, "grid.png", SudokuParams())
    assert next(program) == [READING]
    return program.send([SimpleNamespace(text=text, steps=3, seconds=0.1)])  # type: ignore[list-item]


def test_a_grid_that_the_soft_tokens_spell_is_solved_without_asking(engine: Engine) -> None:
    engine.images = Spelling(engine, spelled(PUZZLE))  # type: ignore[assignment]
    program = picture_program(engine, READING, "grid.png", SudokuParams(seed=1))
    [task] = next(program)
    assert task is not READING and task.prompt.text.endswith(grid_turn(PUZZLE))


def test_a_grid_with_a_cell_that_spells_nothing_is_not_read(engine: Engine) -> None:
    cells = spelled(PUZZLE)
    cells[5 * SHEET + 5] = "\n"
    engine.images = Spelling(engine, cells)  # type: ignore[assignment]
    assert next(picture_program(engine, READING, "grid.png", SudokuParams())) == [READING]


def grid_turn(puzzle: str) -> str:
    return f"{grid.prompt_text(puzzle)}<turn|>\n<|turn>model\n"


@pytest.mark.parametrize("text", ["", "no grid", grid.grid_text(PUZZLE)[:-2]])
def test_a_reply_that_is_no_grid_is_refused(engine: Engine, text: str) -> None:
    with pytest.raises(UsageError, match=r"no Sudoku was read from grid\.png"):
        start(engine, text)


def test_a_puzzle_that_cannot_be_is_named(engine: Engine) -> None:
    with pytest.raises(UsageError, match=r"was read as 550070000.*two 5s in row 1"):
        start(engine, grid.grid_text("55" + PUZZLE[2:]))


def test_givens_are_read_in_the_agreed_form_alone() -> None:
    assert grid.read_givens(grid.grid_text(PUZZLE)) == PUZZLE
    assert grid.read_givens(PUZZLE) is None


# --- straightening


def photo(
    angle: float,
    *,
    size: tuple[int, int] = (700, 560),
    light: bool = False,
    squeeze: float = 0.0,
    digits: bool = False,
) -> Pillow.Image:
    """Draw a grid with dots or digits where PUZZLE has them, turned on paper, as a noisy JPEG file.

    `squeeze` tilts the paper backwards.
    """
    ink, paper = (235, 30) if light else (40, 225)
    flat = Pillow.new("L", (900, 900), paper)
    pen = ImageDraw.Draw(flat)
    for i in range(10):
        at = 90 + 80 * i
        pen.line((at, 88, at, 812), ink, 8 if i % 3 == 0 else 3)
        pen.line((88, at, 812, at), ink, 8 if i % 3 == 0 else 3)
    for i, digit in enumerate(PUZZLE):
        if digit != "0":
            x, y = 130 + 80 * (i % 9), 130 + 80 * (i // 9)
            if digits:
                pen.text((x, y), digit, ink, ImageFont.load_default(58), anchor="mm")
            else:
                pen.ellipse((x - 18, y - 24, x + 18, y + 24), ink)
    near = 1 - 450 * squeeze
    tilt = (1, 450 * squeeze, -(450**2) * squeeze, 0, 1 + 450 * squeeze, -(450**2) * squeeze)
    turned = flat.transform(
        flat.size,
        Pillow.Transform.PERSPECTIVE,
        [*(x / near for x in tilt), 0, squeeze / near],
        Pillow.Resampling.BICUBIC,
        fillcolor=paper,
    )
    turned = turned.rotate(angle, Pillow.Resampling.BICUBIC, fillcolor=paper)
    page = Pillow.new("L", size, paper)
    side = min(size) - 20
    page.paste(turned.resize((side, side)), (size[0] - side - 5, 7))
    noise = np.random.default_rng(0).normal(0, 7, (size[1], size[0]))
    noisy = Pillow.fromarray((np.asarray(page) + noise).clip(0, 255).astype(np.uint8))
    file = BytesIO()
    noisy.convert("RGB").save(file, "JPEG", quality=60)
    return Pillow.open(file)


@pytest.mark.parametrize("light", [False, True])
@pytest.mark.parametrize(("angle", "squeeze"), [(0, 0), (3, 1e-4), (-10, 0), (8, 3e-4)])
def test_cells_of_a_turned_grid_are_soft_tokens(angle: float, squeeze: float, light: bool) -> None:
    straight = sheet_of(Image(photo(angle, light=light, squeeze=squeeze)))
    picture = straight.prepare(VISION)
    assert picture.num_tokens == SHEET**2
    cell = len(picture.pixels) // SHEET
    rows = picture.pixels.mean(2).reshape(SHEET, cell, SHEET, cell).swapaxes(1, 2)
    inner = rows[1:-1, 1:-1, cell // 3 : -cell // 3, cell // 3 : -cell // 3].mean((2, 3)).flatten()
    is_dot = np.array([digit != "0" for digit in PUZZLE])
    dots, empty = inner[is_dot], inner[~is_dot]
    assert (dots.min() > empty.max() + 60) if light else (dots.max() < empty.min() - 60)


@pytest.mark.parametrize("light", [False, True])
@pytest.mark.parametrize(("angle", "squeeze"), [(0, 0), (3, 1e-4), (-7, 0)])
def test_nano_reads_and_solves_a_picture(
    engine: Engine, angle: float, squeeze: float, light: bool
) -> None:
    """The font is Pillow's own, which the tower was not trained on."""
    picture = photo(angle, light=light, squeeze=squeeze, digits=True)
    params = SudokuParams(seed=1)
    reading = reading_task(engine, Image(picture), params)
    result = engine.run(picture_program(engine, reading, "grid.jpg", params))
    assert result.puzzle == PUZZLE and result.is_right


def test_what_is_no_grid_is_shown_as_it_is() -> None:
    noise = Pillow.effect_noise((300, 200), 90).convert("RGB")
    frame = Pillow.new("RGB", (400, 400), "white")
    ImageDraw.Draw(frame).rectangle((40, 40, 360, 360), outline="black", width=6)
    for image in (noise, frame, Pillow.new("RGB", (5, 9)), Pillow.new("RGB", (1, 1))):
        assert find_frame(image) is None
        straight = sheet_of(Image(image))
        side = max(image.size)
        assert not isinstance(straight.source, bytes) and straight.source.size == (side, side)
        assert fit(straight.source, BUDGET, VISION).num_tokens == SHEET**2


def test_a_picture_is_padded_to_a_square_of_its_corner_s_colour() -> None:
    image = Pillow.new("RGB", (40, 20), (10, 20, 30))
    square = Image(encoded(image)).squared().source
    assert not isinstance(square, bytes) and square.size == (40, 40)
    assert square.getpixel((0, 0)) == square.getpixel((39, 39)) == (10, 20, 30)


def test_a_checkpoint_without_a_tower_refuses_by_name() -> None:
    engine = seeing_engine()
    engine.images = None
    image = Image(encoded(Pillow.new("RGB", (9, 9))))
    with pytest.raises(UsageError, match="no image tower"):
        reading_task(engine, image, SudokuParams())
