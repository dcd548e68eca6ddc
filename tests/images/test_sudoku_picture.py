"""Puzzles from pictures: read by the model; refused where nothing was read, or no puzzle is."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from PIL import Image as Pillow

from dgemma.engine import Engine
from dgemma.errors import UsageError
from dgemma.images import Image
from dgemma.programs.sudoku import grid
from dgemma.programs.sudoku.solve import SudokuParams, picture_program, reading_task
from tests.images.tiny_tower import encoded, seeing_engine

PUZZLE = "530070000600195000098000060800060003400803001700020006060000280000419005000080079"


@pytest.fixture
def engine() -> Engine:
    """nano, with soft tokens that a test chooses instead of a tower's."""
    return Engine.load("nano", device="cpu")


class Spelling:
    """Features of any picture: the embeddings of a text's tokens, and of newlines after it."""

    def __init__(self, engine: Engine, text: str) -> None:
        ids = engine.tokenizer.encode(text + "\n" * 30)
        noise = torch.randn(len(ids), 512, generator=torch.Generator().manual_seed(0))
        self.rows = engine.model.embed(torch.tensor(ids)) + 0.3 * noise

    def features(self, picture: object) -> torch.Tensor:
        return self.rows


READING: Any = SimpleNamespace(prompt=SimpleNamespace(images=[SimpleNamespace(picture=None)]))


def start(engine: Engine, text: str) -> Any:
    """Run the program up to the tasks after a reading by the model that says this."""
    engine.images = Spelling(engine, "It is no grid at all. " * 20)  # type: ignore[assignment]
    program = picture_program(engine, READING, "grid.png", SudokuParams())
    assert next(program) == [READING]
    return program.send([SimpleNamespace(text=text, steps=3, seconds=0.1)])  # type: ignore[list-item]


def test_a_grid_that_the_soft_tokens_spell_is_solved_without_asking(engine: Engine) -> None:
    engine.images = Spelling(engine, grid.grid_text(PUZZLE))  # type: ignore[assignment]
    program = picture_program(engine, READING, "grid.png", SudokuParams(seed=1))
    [task] = next(program)
    assert task is not READING and task.prompt.text.endswith(grid_turn(PUZZLE))


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
