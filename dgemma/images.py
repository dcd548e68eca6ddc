"""Pictures: decoding of untrusted files, and the pixels for the image tower.

Pillow decodes a few formats, within limits that are checked before a pixel is decoded. A picture is
rotated by its EXIF orientation, put on white where transparent, and resized to a budget of soft
tokens. Pixels equal those of transformers' `Gemma4ImageProcessorPil` bit for bit; `docs/images.md`
lists the inputs where we differ on purpose. This module knows neither text nor tensors.
"""

from __future__ import annotations

import math
from base64 import b64decode
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from hashlib import blake2b
from io import BytesIO
from pathlib import Path
from threading import Semaphore
from typing import TYPE_CHECKING, Literal, get_args

from dgemma.config.vision_config import IMAGE_BUDGETS, VisionConfig
from dgemma.errors import UsageError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from PIL.Image import Image as PILImage

Detail = Literal["low", "auto", "high", "original"]
DETAILS: tuple[Detail, ...] = get_args(Detail)
DETAIL_TOKENS = {"low": IMAGE_BUDGETS[0], "high": IMAGE_BUDGETS[-1]}

FORMATS = ("JPEG", "PNG", "WEBP", "GIF")  # the only ones of Pillow's forty parsers
MAX_BYTES = 20_000_000  # size of an encoded picture
MAX_PIXELS = 64_000_000
MAX_SIDE = 32_768
MAX_DECODING = 2  # pictures decoded at once: one of 64 megapixels takes 256 MB
# Below this scale screen text of 12 pixels is less than 7 pixels high, which is unreadable.
READABLE_SCALE = 0.6
DIGEST_VERSION = b"dgemma-image-1"  # changed whenever decoding gives other pixels
ID_BITS = 62
RESCALE = 0.00392156862745098  # 1 / 255, as in the released processor

decoding = Semaphore(MAX_DECODING)


@dataclass(frozen=True, slots=True, eq=False)
class Image:
    """A picture in a message: an encoded file, or a Pillow image.

    `tokens` is its budget, one of 70, 140, 280, 560 and 1120 soft tokens. Without it `detail`
    chooses: `low` is 70, `auto` the checkpoint's default, `high` 1120, and `original` the smallest
    that holds every pixel, at most 1120.
    """

    source: bytes | PILImage
    detail: Detail = "auto"
    tokens: int | None = None
    name: str = "the picture"  # in notes and errors
    _pictures: dict[VisionConfig, Picture] = field(default_factory=dict, init=False, repr=False)

    def __post_init__(self) -> None:
        if self.detail not in DETAILS:
            raise UsageError(f"detail is {self.detail!r}; it must be one of {', '.join(DETAILS)}")
        if self.tokens is not None and self.tokens not in IMAGE_BUDGETS:
            allowed = ", ".join(map(str, IMAGE_BUDGETS))
            raise UsageError(f"image tokens are {self.tokens}; they must be one of {allowed}")
        if isinstance(self.source, bytes) and len(self.source) > MAX_BYTES:
            raise UsageError(_too_many_bytes(self.name, len(self.source)))

    @classmethod
    def open(cls, path: str | Path, detail: Detail = "auto", tokens: int | None = None) -> Image:
        """Read a file; its size is checked before it is read."""
        refuse_address(str(path), "a file")
        path = Path(path)
        try:
            size = path.stat().st_size
            if size > MAX_BYTES:
                raise UsageError(_too_many_bytes(path.name, size))
            return cls(path.read_bytes(), detail, tokens, path.name)
        except OSError as error:
            reason = error.strerror or error
            raise UsageError(f"the picture {path} cannot be read: {reason}") from None

    @classmethod
    def from_base64(cls, text: str, detail: Detail = "auto") -> Image:
        """Decode base64, as in a `data:` URL; its length is checked first."""
        if len(text) > 4 * (MAX_BYTES // 3 + 1):
            raise UsageError(_too_many_bytes("the picture", len(text) * 3 // 4))
        try:
            return cls(b64decode(text, validate=True), detail)
        except ValueError:
            raise UsageError("the picture is not valid base64; encode its bytes") from None

    def budget(self, vision: VisionConfig, width: int, height: int) -> int:
        """Budget of soft tokens for a picture of this size."""
        if self.tokens is not None:
            return self.tokens
        if self.detail == "original":
            area = vision.cell**2
            holds = (count for count in IMAGE_BUDGETS if count * area >= width * height)
            return next(holds, IMAGE_BUDGETS[-1])
        return DETAIL_TOKENS.get(self.detail, vision.default_output_length)

    def prepare(self, vision: VisionConfig) -> Picture:
        """Decode and resize once; slow, callable from any thread."""
        if vision not in self._pictures:
            with decoding:
                pixels = self.decoded()
                budget = self.budget(vision, *pixels.size)
                self._pictures[vision] = fit(pixels, budget, vision, self.name)
        return self._pictures[vision]

    def squared(self) -> Image:
        """Return the picture padded to a square with its corner's colour; decodes it."""
        from PIL import Image as Pillow

        with decoding:
            pixels = self.decoded()
        width, height = pixels.size
        side = max(width, height)
        square = Pillow.new("RGB", (side, side), pixels.getpixel((0, 0)))
        square.paste(pixels, ((side - width) // 2, (side - height) // 2))
        return replace(self, source=square)

    def decoded(self, max_pixels: int = MAX_PIXELS) -> PILImage:
        """Return the picture upright, in RGB."""
        if isinstance(self.source, bytes):
            return rgb(decode(self.source, self.name, max_pixels))
        return rgb(self.source)


@dataclass(frozen=True, eq=False)
class Picture:
    """Pixels for the tower: resized to whole soft tokens, 8 bits, RGB."""

    pixels: NDArray[np.uint8]  # [height, width, 3]
    vision: VisionConfig
    budget: int  # limit of soft tokens
    width: int  # of the original
    height: int
    name: str = "the picture"
    is_frame: bool = False  # a frame of a video

    @property
    def rows(self) -> int:
        """Patches from top to bottom."""
        return len(self.pixels) // self.vision.patch_size

    @property
    def columns(self) -> int:
        return int(self.pixels.shape[1]) // self.vision.patch_size

    @property
    def num_tokens(self) -> int:
        return self.rows * self.columns // self.vision.pooling_kernel_size**2

    @property
    def num_bytes(self) -> int:
        return self.pixels.nbytes

    def patches(self) -> NDArray[np.float32]:
        """Return patches row by row, [patches, numbers], between 0 and 1."""
        import numpy as np

        size = self.vision.patch_size
        values = (self.pixels.astype(np.float64) * RESCALE).astype(np.float32)
        grid = values.reshape(self.rows, size, self.columns, size, 3)
        return grid.transpose(0, 2, 1, 3, 4).reshape(self.rows * self.columns, -1)

    @cached_property
    def digest(self) -> bytes:
        """Identify the pixels: equal for any encoding of one picture."""
        size = b"|%d|%d|" % self.pixels.shape[:2]
        return blake2b(DIGEST_VERSION + size + self.pixels.tobytes(), digest_size=32).digest()

    @cached_property
    def cache_ids(self) -> tuple[int, ...]:
        """Return negative ids of the soft tokens for the prefix cache, unique to this picture.

        Each depends on all pixels, so that a prefix cannot match half a picture.
        """
        return tuple(
            -1 - (_hash_of(self.digest, index) >> (64 - ID_BITS))
            for index in range(self.num_tokens)
        )

    @property
    def scale(self) -> float:
        """Length of a side relative to the original's."""
        resized_height, resized_width = self.pixels.shape[:2]
        return math.sqrt(resized_height * resized_width / (self.width * self.height))

    @property
    def note(self) -> str:
        """Return a note if small text was lost, with what would keep it."""
        if self.scale >= READABLE_SCALE:
            return ""
        height, width = self.pixels.shape[:2]
        advice = f"{IMAGE_BUDGETS[-1]} image tokens keep more of it"
        if self.budget == IMAGE_BUDGETS[-1]:
            advice = "crop it"
        elif self.is_frame:
            advice = "show it as a picture to have it read"
        return (
            f"{self.name} was shrunk from {self.width}x{self.height} to {width}x{height} pixels, "
            f"{self.num_tokens} tokens: small text in it is lost; {advice}"
        )


def _hash_of(digest: bytes, index: int) -> int:
    hashed = blake2b(digest + index.to_bytes(4, "big"), digest_size=8).digest()
    return int.from_bytes(hashed, "big")


def refuse_address(text: str, form: str, what: str = "the picture") -> None:
    """Refuse a web address in place of a picture; `form` is what to send."""
    if text[:6].lower().startswith(("http:/", "https:")):
        raise UsageError(f"no address is opened; send {what} as {form}")


def _too_many_bytes(name: str, size: int) -> str:
    return (
        f"{name} has {size / 1e6:.1f} MB; a picture may have {MAX_BYTES / 1e6:.0f} MB: save it "
        "smaller"
    )


def decode(data: bytes, name: str, max_pixels: int = MAX_PIXELS) -> PILImage:
    """Decode the first frame of an encoded picture, checking limits first."""
    from PIL import Image as Pillow
    from PIL import UnidentifiedImageError
    from PIL.Image import DecompressionBombError, DecompressionBombWarning

    try:
        image = Pillow.open(BytesIO(data), formats=FORMATS)
        check_size(image, name, max_pixels)
        image.seek(0)
        image.load()
        return image
    except UsageError:
        raise
    except (DecompressionBombError, DecompressionBombWarning):
        raise UsageError(f"{name} claims too many pixels; {_limits(max_pixels)}") from None
    except UnidentifiedImageError:
        raise UsageError(
            f"{name} is not a {', '.join(FORMATS[:-1])} or {FORMATS[-1]} file; convert it to one"
        ) from None
    except Exception as error:  # a parser may raise anything on damaged bytes
        kind = type(error).__name__
        raise UsageError(
            f"{name} is damaged and cannot be decoded ({kind}); save it anew"
        ) from None


def check_size(image: PILImage, name: str, max_pixels: int = MAX_PIXELS) -> None:
    """Check the size stated in a picture's header."""
    width, height = image.size
    if width < 1 or height < 1:
        raise UsageError(f"{name} is {width}x{height} pixels, which is nothing; send a picture")
    if width * height > max_pixels or max(width, height) > MAX_SIDE:
        raise UsageError(f"{name} is {width}x{height} pixels; {_limits(max_pixels)}")


def _limits(max_pixels: int) -> str:
    megapixels = max_pixels // 1_000_000
    return f"a picture may have {megapixels} megapixels and sides of {MAX_SIDE}: save it smaller"


def rgb(image: PILImage) -> PILImage:
    """Turn by EXIF orientation, reduce to 8 bits, put on white, convert to RGB."""
    from PIL import Image as Pillow

    image = _turned(image)
    if image.mode.startswith("I"):  # 16-bit grayscale, which Pillow would clip to white
        image = _to_uint8(image)
    if "A" in image.getbands() or image.info.get("transparency") is not None:
        image = image.convert("RGBA")
        white = Pillow.new("RGBA", image.size, (255, 255, 255, 255))
        image = Pillow.alpha_composite(white, image)
    return image.convert("RGB")


def _turned(image: PILImage) -> PILImage:
    from PIL import ImageOps

    try:
        return ImageOps.exif_transpose(image)
    except Exception:  # damaged EXIF: shown unrotated, as in browsers
        return image


def _to_uint8(image: PILImage) -> PILImage:
    import numpy as np
    from PIL import Image as Pillow

    values = np.asarray(image).astype(np.int64).clip(0, 65_535)
    return Pillow.fromarray((values // 257).astype(np.uint8))


def target_size(height: int, width: int, budget: int, vision: VisionConfig) -> tuple[int, int]:
    """Return height and width that use a budget of soft tokens and keep the aspect ratio.

    Both are multiples of a soft token's side, rounded down; small pictures are enlarged.
    """
    cell = vision.cell
    factor = math.sqrt(budget * cell**2 / (height * width))
    rows, columns = (math.floor(factor * side / cell) for side in (height, width))
    if rows == 0:
        rows, columns = 1, min(width // height, budget)
    elif columns == 0:
        rows, columns = min(height // width, budget), 1
    return rows * cell, columns * cell


def fit(image: PILImage, budget: int, vision: VisionConfig, name: str = "the picture") -> Picture:
    """Resize an RGB image to a budget."""
    import numpy as np
    from PIL.Image import Resampling

    width, height = image.size
    rows, columns = target_size(height, width, budget, vision)
    if (columns, rows) != image.size:
        image = image.resize((columns, rows), resample=Resampling.BICUBIC)
    return Picture(np.array(image), vision, budget, width, height, name)


def key_ids(ids: Sequence[int], pictures: Sequence[tuple[int, Picture]]) -> tuple[int, ...]:
    """Replace the ids of soft tokens, which begin at the given positions, by their cache ids."""
    keyed = list(ids)
    for begin, picture in pictures:
        keyed[begin : begin + picture.num_tokens] = picture.cache_ids
    return tuple(keyed)
