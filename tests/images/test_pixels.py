"""Pixels against transformers' processor, and decoding of what strangers send."""

import io
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image as Pillow
from transformers.models.gemma4.image_processing_pil_gemma4 import (
    Gemma4ImageProcessorPil,
    get_aspect_ratio_preserving_size,
)

from dgemma.config import IMAGE_BUDGETS, VisionConfig
from dgemma.errors import UsageError
from dgemma.images import MAX_BYTES, MAX_PIXELS, Image, key_ids, target_size
from tests.images.fuzz import num_refused
from tests.images.tiny_tower import TOWER, encoded, photo, png_of

RELEASED = replace(TOWER, patch_size=16, position_embedding_size=10_240)
MODES = ("RGB", "RGBA", "L", "LA", "P", "1", "CMYK", "YCbCr", "HSV", "PA")
SIZES = ((64, 48), (10, 10), (333, 200), (900, 3), (3, 900), (768, 768), (31, 127))


def theirs(image: Pillow.Image, budget: int) -> Any:
    processor = Gemma4ImageProcessorPil(max_soft_tokens=budget)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return processor(image, return_tensors="np")


def mine(image: Pillow.Image, budget: int) -> Any:
    return Image(image, tokens=budget).prepare(RELEASED)


def check_equal(image: Pillow.Image, budget: int) -> None:
    expected, picture = theirs(image, budget), mine(image, budget)
    count = picture.rows * picture.columns
    assert picture.num_tokens == expected["num_soft_tokens_per_image"][0]
    assert np.array_equal(picture.patches(), expected["pixel_values"][0][:count])
    assert not expected["pixel_values"][0][count:].any()
    last = expected["image_position_ids"][0][count - 1].tolist()
    assert last == [picture.columns - 1, picture.rows - 1]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("size", SIZES, ids=lambda size: f"{size[0]}x{size[1]}")
def test_pixels_equal_the_reference_s_bit_for_bit(mode: str, size: tuple[int, int]) -> None:
    check_equal(photo(*size, mode=mode), budget=70)


@pytest.mark.parametrize("budget", IMAGE_BUDGETS)
def test_every_budget_gives_the_reference_s_pixels(budget: int) -> None:
    check_equal(photo(210, 160), budget)


def test_transparent_colours_of_a_palette_become_white() -> None:
    image = photo(60, 40, mode="P")
    image.info["transparency"] = 7
    check_equal(image, 70)
    glass = Pillow.new("RGBA", (48, 48), (200, 10, 10, 0))
    assert (mine(glass, 70).pixels == 255).all()


@settings(deadline=None, derandomize=True, database=None, max_examples=300)
@given(
    height=st.integers(1, 5000),
    width=st.integers(1, 5000),
    budget=st.sampled_from(IMAGE_BUDGETS),
)
def test_the_target_size_is_the_reference_s(height: int, width: int, budget: int) -> None:
    expected = get_aspect_ratio_preserving_size(height, width, 16, 9 * budget, 3)
    assert target_size(height, width, budget, RELEASED) == expected


def prepared(data: bytes, vision: VisionConfig = RELEASED, **options: Any) -> Any:
    return Image(data, **options).prepare(vision)


@pytest.mark.parametrize("form", ["PNG", "GIF", "WEBP", "JPEG"])
def test_an_encoded_picture_gives_the_pixels_of_its_decoding(form: str) -> None:
    data = encoded(photo(80, 50), form)
    decoded = Pillow.open(io.BytesIO(data))
    expected = mine(decoded.convert("RGB"), 70)
    assert np.array_equal(prepared(data, tokens=70).pixels, expected.pixels)


TURNS: dict[int, Callable[[Any], Any]] = {
    1: lambda a: a,
    2: np.fliplr,
    3: lambda a: np.rot90(a, 2),
    4: np.flipud,
    5: lambda a: a.transpose(1, 0, 2),
    6: lambda a: np.rot90(a, 3),
    7: lambda a: np.rot90(a.transpose(1, 0, 2), 2),
    8: np.rot90,
}


@pytest.mark.parametrize("orientation", TURNS)
def test_a_photograph_is_turned_as_its_exif_says(orientation: int) -> None:
    image = photo(96, 48)
    exif = Pillow.Exif()
    exif[0x0112] = orientation
    picture = prepared(encoded(image, exif=exif), tokens=70)
    upright = Pillow.fromarray(np.ascontiguousarray(TURNS[orientation](np.array(image))))
    assert np.array_equal(picture.pixels, mine(upright, 70).pixels)


def test_16_bit_grey_keeps_its_brightness() -> None:
    values = np.linspace(0, 65_535, 96 * 96).reshape(96, 96).astype(np.uint16)
    picture = prepared(encoded(Pillow.fromarray(values)), tokens=70)
    assert abs(picture.pixels.mean() - 127.5) < 1


def test_the_first_frame_of_an_animation_counts() -> None:
    frames = [Pillow.new("RGB", (48, 48), colour) for colour in ("red", "blue")]
    for form in ("GIF", "WEBP"):
        data = encoded(frames[0], form, save_all=True, append_images=frames[1:])
        red, _, blue = prepared(data, tokens=70).pixels.reshape(-1, 3).mean(0)
        assert red > 240 and blue < 15


def test_one_picture_has_one_digest_however_it_is_encoded() -> None:
    image = photo(100, 60)
    png, webp = encoded(image), encoded(image, "WEBP", lossless=True)
    first, second = prepared(png), prepared(webp)
    assert first.digest == second.digest and first.cache_ids == second.cache_ids
    assert first.digest != prepared(png, tokens=560).digest
    assert first.digest != prepared(encoded(photo(100, 60, seed=1))).digest
    ids = first.cache_ids
    assert len(set(ids)) == first.num_tokens and all(-(1 << 62) <= i < 0 for i in ids)
    keyed = key_ids([5, *[19] * first.num_tokens, 6], [(1, first)])
    assert keyed == (5, *ids, 6)


@pytest.mark.parametrize(
    ("options", "tokens"),
    [
        ({}, 256),
        ({"detail": "low"}, 64),
        ({"detail": "high"}, 1089),
        ({"detail": "original"}, 64),
        ({"detail": "high", "tokens": 140}, 121),
    ],
)
def test_detail_and_tokens_choose_the_budget(options: dict[str, Any], tokens: int) -> None:
    assert prepared(encoded(photo(100, 100)), **options).num_tokens == tokens


def test_a_picture_that_is_shrunk_much_says_so() -> None:
    screen = Pillow.new("L", (1920, 1080))
    note = Image(screen, name="screen.png").prepare(RELEASED).note
    assert note == (
        "screen.png was shrunk from 1920x1080 to 1056x576 pixels, 264 tokens: small text in it is "
        "lost; 1120 image tokens keep more of it"
    )
    assert mine(screen, 1120).note == ""
    assert mine(Pillow.new("L", (4400, 3300)), 1120).note.endswith(
        "small text in it is lost; crop it"
    )


# --- refusals


def refusal(data: bytes, **options: Any) -> str:
    with pytest.raises(UsageError) as refused:
        prepared(data, **options)
    return str(refused.value)


@pytest.mark.parametrize("size", [(12_000, 12_000), (40_000, 4_000), (8_001, 8_001), (33_000, 10)])
def test_a_bomb_is_refused_before_it_is_decoded(
    size: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    from PIL import ImageFile

    def load(self: Any) -> None:
        raise AssertionError("decoded")

    monkeypatch.setattr(ImageFile.ImageFile, "load", load)
    data = png_of(*size)
    assert len(data) < 200
    assert "64 megapixels" in refusal(data)


def test_other_formats_are_refused_by_content_not_by_name() -> None:
    image = photo(40, 40)
    for form in ("BMP", "TIFF", "PPM", "TGA", "ICO", "PDF"):
        assert "is not a JPEG, PNG, WEBP or GIF file" in refusal(encoded(image, form))
    for data in (b"", b"hello", b"<svg/>", b"%!PS-Adobe", b"SIMPLE  ="):
        assert "is not a JPEG, PNG, WEBP or GIF file" in refusal(data, name="p.png")


@pytest.mark.parametrize("form", ["PNG", "JPEG", "GIF", "WEBP"])
def test_a_truncated_picture_is_refused(form: str) -> None:
    data = encoded(photo(200, 200), form)
    assert "cannot be decoded" in refusal(data[: len(data) // 2])


def test_options_and_sizes_that_are_none_are_refused(tmp_path: Path) -> None:
    data = encoded(photo(8, 8))
    with pytest.raises(UsageError, match=r"image tokens are 100.*70, 140, 280, 560, 1120"):
        Image(data, tokens=100)
    with pytest.raises(UsageError, match=r"detail is 'huge'.*low, auto, high, original"):
        Image(data, detail="huge")  # type: ignore[arg-type]
    with pytest.raises(UsageError, match=r"20.0 MB; a picture may have 20 MB"):
        Image(bytes(MAX_BYTES + 1))
    with pytest.raises(UsageError, match=r"nothing.png cannot be read: No such file"):
        Image.open(tmp_path / "nothing.png")
    with pytest.raises(UsageError, match="cannot be read: Is a directory"):
        Image.open(tmp_path)
    large = tmp_path / "large.png"
    with large.open("wb") as file:
        file.truncate(MAX_BYTES + 1)
    with pytest.raises(UsageError, match=r"large.png has 20.0 MB"):
        Image.open(large)
    with pytest.raises(UsageError, match="not valid base64"):
        Image.from_base64("no base64!")
    with pytest.raises(UsageError, match="a picture may have 20 MB"):
        Image.from_base64("A" * (MAX_BYTES * 4 // 3 + 8))
    assert MAX_PIXELS == 64_000_000


def test_spoilt_pictures_are_decoded_or_refused_by_a_sentence() -> None:
    """`python -m tests.images.fuzz` runs thousands, and watches memory."""
    assert 60 < num_refused(240) < 240
