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

from dgemma.config import VisionConfig
from dgemma.engine import Engine
from dgemma.errors import CheckpointError
from dgemma.images import fit
from dgemma.model.vision import Grid, ImageEncoder
from dgemma.weights.files import verify_digests
from dgemma.weights.hub import NANO_DIRECTORY
from dgemma.weights.int_layout import to_int_layout
from dgemma.weights.save import write_safetensors
from recipes.nano.pictures import ship, task
from recipes.nano.pictures.compose import NUM_CHARS, Atlas, Composer
from recipes.nano.pictures.source import SIDE
from recipes.nano.pictures.spelling import (
    SPACE,
    Speller,
    ask_scene,
    line_columns,
    spell_line,
)
from recipes.nano.pictures.tower import CONFIG, SeeingTower, to_patches
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
    assert picture.num_tokens == SIDE**2 and picture.pixels.shape == (352, 352, 3)
    pixels = torch.from_numpy(picture.pixels.astype(np.float32) / 255)[None]
    assert torch.allclose(to_patches(pixels)[0], torch.from_numpy(picture.patches()))


def test_a_grid_has_ink_where_it_has_digits(composer: Composer) -> None:
    digits = torch.randint(0, 10, (3, 81), generator=torch.Generator().manual_seed(1))
    found = composer.sudoku(digits, torch.zeros(3, dtype=torch.long), 32 * SIDE)
    for cell in range(81):
        row, column = divmod(cell, 9)
        is_cell = found.index == 10 * row + column
        for b in range(3):
            assert (found.kind[b][is_cell[b]] == digits[b, cell] + 16).all()
            # Away from the lines, paper alone is smooth.
            y, x = (place.float() for place in torch.nonzero(is_cell[b], as_tuple=True))
            near = ((y - y.mean()).abs() < 8) & ((x - x.mean()).abs() < 8)
            spread = found.pixels[b][is_cell[b]][near].mean(1).std()
            assert (spread > 0.04) == bool(digits[b, cell] > 0)


def test_a_line_names_the_token_of_each_letter(composer: Composer) -> None:
    text, owners = "He ran.", [0, 0, 0, 1, 1, 1, 2]
    chars = torch.full((1, 12), 255)
    chars[0, : len(text)] = torch.tensor([ord(c) - 32 for c in text])
    owner = torch.full((1, 12), 255)
    owner[0, : len(text)] = torch.tensor(owners)
    found = composer.line(chars, owner, torch.zeros(1, dtype=torch.long), 128, 528)
    seen = [
        (int(k), int(i), int(o))
        for k, i, o in zip(*(x[0][:, ::2].mode(0)[0] for x in found[1:]), strict=True)
    ]
    rows = [triple for triple in dict.fromkeys(seen) if triple[0] < NUM_CHARS]
    shown = {(chr(k + 32), i, o) for k, i, o in rows}
    letters = list(zip(text, owners, [0, 1, 2, 0, 1, 2, 0], strict=True))
    assert shown <= set(letters) and len(shown) >= 5


def test_captions_count_and_group() -> None:
    assert task.caption([(0, 0), (1, 2), (0, 0)]) == "two red circles and one blue square"
    assert task.caption([(4, 6), (4, 6)]) == "two black crosses"


def write_tower(path: Path, vision: VisionConfig, width: int = 512) -> Path:
    encoder = ImageEncoder(vision, width)
    for index, weight in enumerate(encoder.parameters()):
        torch.nn.init.normal_(weight, 0, 0.1, torch.Generator().manual_seed(index))
    state = {ship.VISION_PREFIX["diffusion_gemma"] + n: x for n, x in encoder.state_dict().items()}
    write_safetensors(path, to_int_layout(state), None)
    return path


def test_a_tower_is_packaged_twice_with_one_shard_more(tmp_path: Path) -> None:
    into = tmp_path / "nano"
    shutil.copytree(NANO_DIRECTORY, into)
    before = len(list(into.glob("int8-0*")))
    tower = write_tower(tmp_path / "tower.safetensors", SMALL)
    for _ in range(2):
        ship.ship(tower, into, SMALL)
        verify_digests(into)
    has_tower = (NANO_DIRECTORY / "processor_config.json").exists()
    assert len(list(into.glob("int8-0*"))) == before + (not has_tower)
    engine = Engine.load(into, device="cpu")
    assert engine.images is not None and engine.images.vision == SMALL
    assert engine.model.config.image_attention == "causal"
    assert json.loads((into / "processor_config.json").read_text())["image_seq_length"] == 280


def test_a_tower_that_is_too_large_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "tower.safetensors"
    path.write_bytes(bytes(ship.MAX_TOWER_BYTES + 1))
    with pytest.raises(CheckpointError, match="may ship"):
        ship.ship(path, tmp_path)


def test_training_s_tower_computes_the_package_s_features() -> None:
    tower = SeeingTower(64).eval()
    pixels = torch.rand(2, 64, 96, 3)
    features, local = tower(pixels, Grid(4, 6))
    expected = tower.encoder(to_patches(pixels), Grid(4, 6))
    assert torch.allclose(features, expected, atol=1e-5) and local.shape[:2] == (2, 24)


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
