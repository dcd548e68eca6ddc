"""Image features of prompts, and prefill chunks that never split a picture.

The tower is loaded for the first picture and runs once per picture; features are cached by the
digest of the pixels. Used only by the thread that steps the engine.

S soft tokens of a picture, D width of the language model.
"""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from dgemma.backends.base import ImageRows
from dgemma.config import VisionConfig
from dgemma.images import Picture
from dgemma.model.vision import Grid, ImageEncoder
from dgemma.text.chat import PromptImage
from dgemma.weights.load import Checkpoint, has_tower, load_tower

FEATURE_BYTES = 256 << 20  # about 160 pictures of 280 tokens of the released model


class ImageFeatures:
    """An image tower, loaded on first use, and a cache of the latest features."""

    def __init__(
        self,
        vision: VisionConfig,
        load: Callable[[], ImageEncoder],
        max_bytes: int = FEATURE_BYTES,
    ) -> None:
        self.vision, self.max_bytes = vision, max_bytes
        self.num_encoded = 0  # pictures encoded so far
        self._load = load
        self._encoder: ImageEncoder | None = None
        self._features: OrderedDict[bytes, Tensor] = OrderedDict()

    @property
    def is_loaded(self) -> bool:
        return self._encoder is not None

    @property
    def num_bytes(self) -> int:
        return sum(x.numel() * x.element_size() for x in self._features.values())

    def features(self, picture: Picture) -> Tensor:
        """Return the features of a picture, [S, D]."""
        found = self._features.get(picture.digest)
        if found is None:
            found = self._encode(picture)
            self._features[picture.digest] = found
        self._features.move_to_end(picture.digest)
        while len(self._features) > 1 and self.num_bytes > self.max_bytes:
            self._features.popitem(last=False)
        return found

    @torch.inference_mode()
    def _encode(self, picture: Picture) -> Tensor:
        if self._encoder is None:
            self._encoder = self._load()
        self.num_encoded += 1
        device = self._encoder.embed_vision.embedding_projection.weight.device
        patches_1PC = torch.from_numpy(picture.patches())[None].to(device)
        features_1SD: Tensor = self._encoder(patches_1PC, Grid(picture.rows, picture.columns))
        return features_1SD[0]

    def rows(self, images: Sequence[PromptImage], begin: int, end: int) -> tuple[ImageRows, ...]:
        """Return the pictures in [begin, end) of a prompt with their features."""
        inside = [image for image in images if begin <= image.begin < end]
        assert all(image.end <= end for image in inside), "a chunk cuts a picture"
        return tuple(
            ImageRows(image.begin - begin, self.features(image.picture)) for image in inside
        )


def chunk_end(begin: int, chunk: int, images: Sequence[PromptImage]) -> int:
    """Return the end of the prefill chunk that starts at `begin`.

    Prompts are cut at multiples of `chunk`. A cut inside a picture moves to the picture's start, or
    to its end if the chunk starts there. So a prompt is cut at the same places wherever it resumes.
    """
    end = begin - begin % chunk + chunk
    for image in images:
        if image.begin < end < image.end:
            return image.begin if image.begin > begin else image.end
    return end


def image_features(checkpoint: Checkpoint) -> ImageFeatures | None:
    """Return the features of a checkpoint's tower on the model's device; None without a tower.

    The tower runs in bfloat16 if the model does, else in float32, never in float16.
    """
    vision, weight = checkpoint.config.vision, checkpoint.model.embed_tokens.weight
    if vision is None or not has_tower(checkpoint):
        return None
    dtype = torch.bfloat16 if weight.dtype == torch.bfloat16 else torch.float32
    return ImageFeatures(vision, partial(load_tower, checkpoint, weight.device, dtype))
