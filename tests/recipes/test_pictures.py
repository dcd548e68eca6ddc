"""Composed pictures say what they show, and a tower that learnt from them is packaged with nano."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from random import Random

import numpy as np
import pytest
import torch
from PIL import Image as Pillow
from safetensors.torch import save_file

from dgemma.config import VisionConfig
from dgemma.engine import Engine
from dgemma.errors import CheckpointError
from dgemma.images import fit
from dgemma.model.vision import Grid
from dgemma.programs.sudoku import straighten
from dgemma.text.tokenizer import Tokenizer
from dgemma.weights.files import verify_digests
from dgemma.weights.hub import NANO_DIRECTORY
from dgemma.weights.load import load_model
from recipes.nano.pictures import ship
from recipes.nano.pictures.compose import CELL, SHEET, Atlas, Composer
from recipes.nano.pictures.source import Classes, Source, spell_lines
from recipes.nano.pictures.spelling import (
    SPACE,
    Cells,
    Speller,
    ask_scene,
    caption,
    line_columns,
    line_pieces,
    spell_line,
)
from recipes.nano.pictures.tower import CONFIG, IDS, ROWS, SeeingTower, to_patches
from recipes.nano.slots import Draw

SMALL = replace(
    CONFIG, hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=1,
    num_key_value_heads=1, head_dim=32, position_embedding_size=32,
)  # fmt: skip


@pytest.fixture(scope="module")
def composer() -> Composer:
    """A composer of one face, without damage."""
    matplotlib = pytest.importorskip("matplotlib")
    from recipes.nano.pictures.glyphs import draw_face

    face = draw_face(Path(matplotlib.get_data_path()) / "fonts/ttf/DejaVuSans.ttf")
    atlas = Atlas.of(
        torch.from_numpy(face.glyphs_C)[None],
        torch.from_numpy(face.advance_C)[None],
        torch.tensor([face.middle]),
    )
    return Composer(atlas, torch.Generator().manual_seed(0), damage=0.0)


def test_patches_are_those_of_the_package() -> None:
    image = Pillow.effect_noise((352, 352), 80).convert("RGB")
    picture = fit(image, 140, CONFIG)
    assert CONFIG.cell == CELL and straighten.SHEET == SHEET
    assert picture.num_tokens == SHEET**2 and picture.pixels.shape == (352, 352, 3)
    pixels = torch.from_numpy(picture.pixels.astype(np.float32) / 255)[None]
    assert torch.allclose(to_patches(pixels)[0], torch.from_numpy(picture.patches()))


def test_a_grid_has_ink_where_it_has_digits(composer: Composer) -> None:
    digits = torch.randint(0, 10, (3, 81), generator=torch.Generator().manual_seed(1))
    found = composer.sudoku(digits, torch.zeros(3, dtype=torch.long))
    for cell, (x, y) in enumerate(found.middle[0].long().tolist()):
        near = (slice(None), slice(y - 9, y + 9), slice(x - 9, x + 9))
        assert (found.kind[near].flatten(1) == digits[:, cell, None] + 16).all()
        # Away from the lines, paper alone is smooth.
        spread = found.pixels[near].mean(3).flatten(1).std(1)
        assert ((spread > 0.04) == (digits[:, cell] > 0)).all()


def chars_of(text: str, length: int) -> torch.Tensor:
    chars = torch.full((1, length), 255)
    chars[0, : len(text)] = torch.tensor([ord(c) - 32 for c in text])
    return chars


def test_a_line_says_what_is_where(composer: Composer) -> None:
    text = "He ran."
    found = composer.line(chars_of(text, 12), torch.zeros(1, dtype=torch.long), 128, 528)
    columns = [int(x) for x in found.middle[0, : len(text), 0]]
    assert columns == sorted(columns)
    rows = found.kind[0, :, columns].mode(0)[0]
    shown = found.kind[0, :, columns].eq(chars_of(text, len(text))[0]).any(0)
    assert shown.all() and len(rows) == len(text)


@pytest.fixture(scope="module")
def classes() -> Classes:
    return Classes.of(Tokenizer.load(NANO_DIRECTORY), torch.device("cpu"))


@pytest.mark.parametrize("text", ["To be (or not) to be?", "Gate 51 @ 7", "ill will ~ ; -- ;;"])
def test_lines_are_spelled_as_the_language_model_learns_them(text: str, classes: Classes) -> None:
    speller, columns = Speller(NANO_DIRECTORY, 0), 48
    for width in (0.6, 1.1, 2.0):  # cells of a character; below 2 some spaces have no room
        centres = [(i + 0.7) * width for i in range(len(text))]
        kept = [c for c, char in zip(centres, text, strict=True) if char != " "]
        taken = line_columns(kept, columns)
        assert taken is not None
        pieces = dict(zip([2 * columns + x for x in taken], line_pieces(text), strict=True))
        wanted = speller.soft_tokens(Cells(3, columns, pieces))
        middle = torch.tensor([centres]) * CONFIG.cell
        [found] = spell_lines(chars_of(text, len(text)), middle, 3, columns, classes)
        assert [classes.ids[c] for c in found.tolist()] == wanted
        assert width < 2 or classes.text(found.tolist()) == text
    assert (
        spell_lines(chars_of("abc", 3), torch.tensor([[70.0, 80, 90]]), 2, 4, classes) < 0
    ).all()


def test_samples_have_a_class_for_each_soft_token(tmp_path: Path, classes: Classes) -> None:
    matplotlib = pytest.importorskip("matplotlib")
    from recipes.nano.pictures.glyphs import draw_face, to_chars

    face = draw_face(Path(matplotlib.get_data_path()) / "fonts/ttf/DejaVuSans.ttf")
    np.savez(
        tmp_path / "pictures.npz",
        held_out=np.array([False]),
        glyphs=face.glyphs_C[None],
        advance=face.advance_C[None],
        middle=np.array([face.middle], np.float32),
        chars=to_chars(["This is a line."] * 100),
    )
    source = Source(tmp_path / "pictures.npz", torch.device("cpu"), 0, held_out=False)
    for draw in (source.sheet, source.line, source.scene):
        sample = draw(2, classes)
        soft = sample.grid.rows * sample.grid.columns // 4
        assert soft <= CONFIG.default_output_length and sample.target.shape == (2, soft)
        assert sample.pixels.shape[1:] == (16 * sample.grid.rows, 16 * sample.grid.columns, 3)
        assert sample.kind.shape == sample.pixels.shape[:3]
        assert (sample.target > 0).sum() > 0 and sample.target.max() < len(classes.ids)
    words = classes.text(source.scene(1, classes).target[0].tolist()).split()
    assert words and len(words) % 2 == 0


def test_captions_count_and_group() -> None:
    assert caption([(0, 0), (1, 2), (0, 0)]) == "two red circles and one blue square"
    assert caption([(4, 6), (4, 6)]) == "two black crosses"


def write_state(path: Path, vision: VisionConfig, width: int = 512) -> Path:
    """Write a training's state, towards random embeddings of a few tokens."""
    tower = SeeingTower(width, vision)
    rows = torch.randn(9, width, generator=torch.Generator().manual_seed(3))
    save_file(tower.state_dict() | {IDS: torch.arange(9), ROWS: rows}, path)
    return path


def test_a_tower_is_packaged_twice_with_one_shard_more(tmp_path: Path) -> None:
    into = tmp_path / "nano"
    shutil.copytree(NANO_DIRECTORY, into)
    before = len(list(into.glob("int8-0*")))
    state = write_state(tmp_path / "state.safetensors", SMALL)
    for _ in range(2):
        ship.ship(state, into, SMALL)
        verify_digests(into)
    has_tower = (NANO_DIRECTORY / "processor_config.json").exists()
    assert len(list(into.glob("int8-0*"))) == before + (not has_tower)
    engine = Engine.load(into, device="cpu")
    assert engine.images is not None and engine.images.vision == SMALL
    assert engine.model.config.image_attention == "causal"
    assert json.loads((into / "processor_config.json").read_text())["image_seq_length"] == 280


def test_a_tower_that_is_too_large_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ship, "MAX_TOWER_BYTES", 1000)
    state = write_state(tmp_path / "state.safetensors", SMALL)
    with pytest.raises(CheckpointError, match="may ship"):
        ship.write_tower(state, load_model(NANO_DIRECTORY).model, tmp_path / "tower.safetensors")


def test_a_projection_is_aimed_at_the_embeddings_of_another_model() -> None:
    generator = torch.Generator().manual_seed(0)
    old, change, other = torch.randn(3, 40, 96, generator=generator)
    new = old + 0.1 * change
    inputs = torch.randn(40, 64, generator=generator)  # of the projection, for each token
    projection = torch.randn(96, 64, generator=generator)
    exact = projection + (old - inputs @ projection.T).T @ torch.linalg.pinv(inputs.T)
    assert torch.allclose(inputs @ exact.T, old, atol=1e-4)
    found = ship.aimed(exact, old, new)
    assert torch.allclose(inputs @ found.T, new, atol=1e-3)
    # What is seen besides, at right angles to all embeddings, stays.
    beside = other - other @ torch.linalg.pinv(old) @ old
    assert torch.allclose(ship.aimed(beside.T, old, new), beside.T, atol=1e-4)
    assert torch.equal(ship.aimed(exact, old, old), exact)


def test_training_s_tower_computes_the_package_s_features() -> None:
    tower = SeeingTower(64).eval()
    pixels = torch.rand(2, 64, 96, 3)
    seen = tower(pixels, Grid(4, 6))
    expected = tower.encoder(to_patches(pixels), Grid(4, 6))
    assert torch.allclose(seen.features, expected, atol=1e-5)
    assert seen.local.shape[:2] == seen.column.shape[:2] == (2, 24)


def test_a_line_is_spelled_a_character_a_cell_in_its_last_row() -> None:
    advance_C = np.full(95, 0.5, np.float32)
    for text in ("To be or not to be", "Gate 51", "ill will"):
        cells = spell_line(text, advance_C, Random(0))
        assert cells is not None
        first = (cells.rows - 1) * cells.columns
        assert all(first <= place < first + cells.columns for place in cells.pieces)
        assert list(cells.pieces) == sorted(cells.pieces)
        assert "".join(cells.pieces.values()).replace(SPACE, " ") == text
    assert line_columns([0.5, 0.7, 0.9, 3.0], 5) == [0, 1, 2, 3]
    assert line_columns([1.5, 1.7], 2) is None


def test_spelled_pictures_have_the_template_s_places_and_a_right_answer() -> None:
    speller = Speller(NANO_DIRECTORY, 3)
    tokenizer = speller.tokenizer
    for prompt, reply in speller.lines(["A cat.", "No. 7"], np.full((1, 95), 0.5, np.float32)):
        assert prompt.count(speller.begin) == prompt.count(speller.end) == 1
        length = prompt.index(speller.end) - prompt.index(speller.begin) - 1
        assert 200 < length <= CONFIG.default_output_length
        assert tokenizer.decode(reply[:-1]) in ("A cat.", "No. 7")
    asked = [ask_scene([(0, 0), (0, 0), (3, 2)], Draw(Random(i))) for i in range(60)]
    answers = {answer for _, answer in asked}
    assert "two red circles and one blue star" in answers
    assert answers & {"Two.", "One.", "Blue."}
    assert "Red." not in answers  # two circles have no one colour
