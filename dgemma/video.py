"""Videos: a few frames of a file, a folder or an animation, each with its time.

Which frames are shown, their times and their pixels are those of transformers' Gemma 4 processor:
32 at equal distances, of at most 70 soft tokens, each after its time as `mm:ss`. `docs/images.md`
names the inputs where we differ on purpose. Files are decoded by PyAV, animations and folders of
frames by Pillow. Limits are checked before a frame is decoded.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dgemma.config.vision_config import IMAGE_BUDGETS, VIDEO_FRAME_BUDGET, VisionConfig
from dgemma.errors import UsageError
from dgemma.images import (
    Image,
    Picture,
    check_size,
    decoding,
    refuse_address,
    rgb,
    target_size,
)

if TYPE_CHECKING:
    from PIL.Image import Image as PILImage

NUM_FRAMES = 32
MAX_FRAMES = 60  # that are shown: a minute by the second, as the released model was made for
FRAME_RATE = 24.0  # of frames without times, as in the reference
MAX_FILE_BYTES = 1_000_000_000
MAX_SECONDS = 600
MAX_COUNT = 36_000  # frames of a video, shown or not: ten minutes of 60 a second
MAX_FRAME_PIXELS = 9_000_000  # 4K has 8.3 million
# Containers, none of which names other files; and the one protocol.
CONTAINERS = "mov,mp4,matroska,webm,avi,mpegts,mpeg,ogg,flv"
OPEN_OPTIONS = {"format_whitelist": CONTAINERS, "protocol_whitelist": "file"}
FRAME_FILES = (".jpg", ".jpeg", ".png", ".webp")

Frame = tuple[float, "PILImage"]  # its time in seconds, and the picture in RGB


@dataclass(frozen=True, slots=True, eq=False)
class Video:
    """A video in a message: a file, a folder of frames, or the frames themselves.

    `fps` is how many frames of a folder or a sequence are one second; files know their times.
    `num_frames` are shown, or all if there are fewer, of at most `tokens` soft tokens each.
    """

    source: Path | Sequence[Image]
    fps: float | None = None
    num_frames: int = NUM_FRAMES
    tokens: int = VIDEO_FRAME_BUDGET
    name: str = "the video"  # in notes and errors
    _clips: dict[VisionConfig, Clip] = field(default_factory=dict, init=False, repr=False)

    def __post_init__(self) -> None:
        if self.tokens not in IMAGE_BUDGETS:
            allowed = ", ".join(map(str, IMAGE_BUDGETS))
            raise UsageError(f"tokens of a frame are {self.tokens}; they must be one of {allowed}")
        if not 0 < self.num_frames <= MAX_FRAMES:
            raise UsageError(f"num_frames is {self.num_frames}; it must be 1 to {MAX_FRAMES}")
        if self.fps is not None and not 0 < self.fps <= 1000:
            raise UsageError(f"fps is {self.fps}; it must be above 0, at most 1000")
        if not isinstance(self.source, Path):
            _check_length(self.name, len(self.source))

    @classmethod
    def open(
        cls, path: str | Path, fps: float | None = None, num_frames: int = NUM_FRAMES
    ) -> Video:
        """Name a file or a folder of frames; it is read when a prompt is made."""
        refuse_address(str(path), "a file", "the video")
        path = Path(path)
        try:
            if not path.is_dir():
                _check_file(path, fps)
            elif not _frame_files(path):
                kinds = ", ".join(FRAME_FILES)
                raise UsageError(f"the folder {path} has no frames: files that end in {kinds}")
        except OSError as error:
            reason = error.strerror or error
            raise UsageError(f"the video {path} cannot be read: {reason}") from None
        return cls(path, fps, num_frames, name=path.name)

    def prepare(self, vision: VisionConfig) -> Clip:
        """Decode and resize the frames that are shown, once; may take long, in any thread."""
        if vision not in self._clips:
            seconds, pictures, name = [], [], f"a frame of {self.name}"
            with decoding:
                for at, image in _refusing_damage(self._frames(), self.name):
                    seconds.append(at)
                    pictures.append(fit_frame(image, self.tokens, vision, name))
            self._clips[vision] = Clip(tuple(pictures), tuple(seconds))
        return self._clips[vision]

    def _frames(self) -> Iterator[Frame]:
        if not isinstance(self.source, Path):
            return self._from_images(self.source)
        if self.source.is_dir():
            return self._from_images(_frame_files(self.source))
        return (_animation if _is_animation(self.source) else _file)(self, self.source)

    def _from_images(self, images: Sequence[Image | Path]) -> Iterator[Frame]:
        _check_length(self.name, len(images))
        for index in shown_indices(len(images), self.num_frames):
            image, name = images[index], f"frame {index + 1} of {self.name}"
            image = Image.open(image) if isinstance(image, Path) else image
            picture = replace(image, name=name).decoded(MAX_FRAME_PIXELS)
            yield index / (self.fps or FRAME_RATE), picture


@dataclass(frozen=True, slots=True, eq=False)
class Clip:
    """Frames as the tower reads them, each with its time in seconds."""

    frames: tuple[Picture, ...]
    seconds: tuple[float, ...]

    @property
    def stamps(self) -> tuple[str, ...]:
        """Return the times as a prompt has them."""
        return tuple(f"{int(at // 60):02d}:{int(at % 60):02d}" for at in self.seconds)


def shown_indices(count: int, num_frames: int) -> Sequence[int]:
    """Return which of `count` frames are shown: all, if there are no more than `num_frames`."""
    if count <= num_frames:
        return range(count)
    return [index * count // num_frames for index in range(num_frames)]


def fit_frame(image: PILImage, budget: int, vision: VisionConfig, name: str) -> Picture:
    """Resize an RGB frame to a budget.

    PyTorch resizes, since the reference does so for videos; Pillow differs by a few levels.
    """
    import numpy as np
    import torch
    from torch.nn.functional import interpolate

    width, height = image.size
    pixels_1CHW = torch.from_numpy(np.array(image)).permute(2, 0, 1)[None]
    size = target_size(height, width, budget, vision)
    if size != (height, width):
        pixels_1CHW = interpolate(pixels_1CHW, size, mode="bicubic", antialias=True)
    pixels_HWC = pixels_1CHW[0].permute(1, 2, 0).contiguous().numpy()
    return Picture(pixels_HWC, vision, budget, width, height, name, is_frame=True)


def _animation(video: Video, path: Path) -> Iterator[Frame]:
    """Read the shown frames of a GIF or WebP file; each lasts as long as the file says."""
    from PIL import Image as Pillow

    with Pillow.open(path, formats=("GIF", "WEBP")) as image:
        check_size(image, video.name, MAX_FRAME_PIXELS)
        count, seconds = getattr(image, "n_frames", 1), 0.0
        _check_length(video.name, count)
        shown = set(shown_indices(count, video.num_frames))
        for index in range(max(shown) + 1):
            image.seek(index)
            if index in shown:
                yield seconds, rgb(image.copy())
            seconds += image.info.get("duration", 0) / 1000 or 1 / FRAME_RATE


def _file(video: Video, path: Path) -> Iterator[Frame]:
    """Decode a file up to the last frame that is shown, as the reference does with PyAV."""
    _check_decoder(video.name)
    import av

    with av.open(str(path), options=OPEN_OPTIONS) as container:
        if not container.streams.video:
            raise UsageError(f"{video.name} has no video stream; give a file that has one")
        stream = container.streams.video[0]
        rate = stream.average_rate or Fraction(FRAME_RATE)
        count = stream.frames or sum(packet.size > 0 for packet in container.demux(stream))
        _check_length(video.name, count, float(count / rate))
        container.seek(0)
        stream.thread_type = "AUTO"
        shown = set(shown_indices(count, video.num_frames))
        for index, frame in enumerate(container.decode(stream)):
            _check_pixels(video.name, frame.width, frame.height)
            if index in shown:
                shown.remove(index)
                yield float(index / rate), _upright(frame)
            if not shown:
                return
    raise UsageError(f"{video.name} ends before the last of its {count} frames; save it anew")


def _upright(frame: Any) -> PILImage:
    """Return a frame turned as players show it, since telephones film on their side."""
    image: PILImage = frame.to_image()
    return image.rotate(frame.rotation, expand=True) if frame.rotation % 360 else image


def _refusing_damage(frames: Iterator[Frame], name: str) -> Iterator[Frame]:
    """Let a decoder's errors become one sentence."""
    try:
        yield from frames
    except UsageError:
        raise
    except Exception as error:  # a decoder may raise anything on damaged bytes
        kind = type(error).__name__
        raise UsageError(
            f"{name} is damaged or of another format than {CONTAINERS} ({kind}); save it as MP4"
        ) from None


def _check_file(path: Path, fps: float | None) -> None:
    size = path.stat().st_size
    if size > MAX_FILE_BYTES:
        raise UsageError(
            f"{path.name} has {size / 1e9:.1f} GB; a video may have {MAX_FILE_BYTES / 1e9:.0f} "
            "GB: cut it, or save it smaller"
        )
    if fps is not None:
        raise UsageError(f"fps is given, but {path.name} has times of its own; leave it out")
    if not _is_animation(path):
        _check_decoder(path.name)


def _check_pixels(name: str, width: int, height: int) -> None:
    if width * height > MAX_FRAME_PIXELS:
        raise UsageError(
            f"{name} is {width}x{height} pixels; a frame may have "
            f"{MAX_FRAME_PIXELS // 1_000_000} megapixels: save it smaller"
        )


def _check_length(name: str, count: int, seconds: float = 0.0) -> None:
    if not 0 < count <= MAX_COUNT or seconds > MAX_SECONDS:
        raise UsageError(
            f"{name} has {count} frames of {seconds:.0f} seconds; a video may have 1 to "
            f"{MAX_COUNT} of {MAX_SECONDS}: cut it"
        )


def _check_decoder(name: str) -> None:
    if find_spec("av") is None:
        raise UsageError(
            f'{name} needs PyAV: pip install "dgemma[video]"; a folder of frames, a GIF and a WebP '
            "need nothing"
        )


def _is_animation(path: Path) -> bool:
    with path.open("rb") as file:
        head = file.read(12)
    return head[:4] == b"GIF8" or (head[:4] == b"RIFF" and head[8:] == b"WEBP")


def _frame_files(folder: Path) -> list[Path]:
    """Return the pictures of a folder in the order of their names, 2 before 10."""

    def order(path: Path) -> list[tuple[str, int]]:
        found = re.findall(r"(\D*)(\d*)", path.name)
        return [(text, int(digits or 0)) for text, digits in found]

    return sorted((p for p in folder.iterdir() if p.suffix.lower() in FRAME_FILES), key=order)
