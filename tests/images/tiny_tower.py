"""Tiny image towers with random weights, their twins in transformers, and pictures for them."""

import zlib
from dataclasses import replace
from functools import cache
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image as Pillow
from torch import Tensor

import dgemma
from dgemma.config import FULL, SLIDING, GenerationConfig, ModelConfig, VisionConfig
from dgemma.engine import Engine
from dgemma.engine.image_features import ImageFeatures
from dgemma.images import Image, Picture
from dgemma.model.gemma import Gemma
from dgemma.model.vision import Grid, ImageEncoder
from dgemma.text.chat import ChatTemplate, Message
from dgemma.text.tokenizer import Tokenizer
from tests.tiny import TINY, shake, twin

TOWER = VisionConfig(
    hidden_size=24,
    intermediate_size=40,
    num_hidden_layers=3,
    num_attention_heads=3,
    num_key_value_heads=3,
    head_dim=8,
    patch_size=4,
    position_embedding_size=64,
    standardize=True,
)
IMAGE, BOI, EOI = 58, 59, 60  # ids of the tiny vocabulary
SEEING = replace(
    TINY,
    layer_types=(SLIDING, FULL, SLIDING, FULL),  # a canvas does not see the last full layer's rule
    vision=TOWER,
    media_ids={"boi_token_id": BOI, "eoi_token_id": EOI, "image_token_id": IMAGE},
)


def shaken(reference: torch.nn.Module, seed: int, size: float = 0.3) -> None:
    """Give every weight a random value, the standardization too, which starts as the identity."""
    shake(reference, seed, size)
    generator = torch.Generator().manual_seed(seed)
    for name, buffer in reference.named_buffers():
        if name.endswith("std_bias"):
            buffer.copy_(torch.randn(buffer.shape, generator=generator))
        elif name.endswith("std_scale"):
            buffer.copy_(0.3 + 0.1 * torch.randn(buffer.shape, generator=generator))


def reference_of(config: ModelConfig, seed: int = 0, size: float = 0.3) -> Any:
    reference = twin(config)
    shaken(reference, seed, size)
    return reference


def encoder_of(
    config: ModelConfig, reference: torch.nn.Module, prefix: str = "model.encoder."
) -> ImageEncoder:
    """Return our tower with the reference's weights."""
    assert config.vision is not None
    encoder = ImageEncoder(config.vision, config.hidden_size)
    theirs = reference.state_dict()
    encoder.load_state_dict({n: theirs[prefix + n].clone() for n in encoder.state_dict()})
    return encoder.eval().requires_grad_(False)


def random_patches(vision: VisionConfig, grid: Grid, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(grid.rows * grid.columns, vision.patch_width, generator=generator)


def padded(pictures: list[tuple[Tensor, Grid]], length: int | None = None) -> tuple[Tensor, Tensor]:
    """Return pixels and positions of pictures as the reference wants them, padded to one length."""
    length = length or max(len(patches) for patches, _ in pictures)
    pixels, positions = [], []
    for patches, grid in pictures:
        rest = length - len(patches)
        pixels.append(torch.nn.functional.pad(patches, (0, 0, 0, rest)))
        place = grid.positions(torch.device("cpu")).T
        positions.append(torch.nn.functional.pad(place, (0, 0, 0, rest), value=-1))
    return torch.stack(pixels), torch.stack(positions)


def small_picture(rows: int, columns: int, seed: int, vision: VisionConfig = TOWER) -> Picture:
    """Return a picture of `rows` by `columns` soft tokens of noise."""
    size = (rows * vision.cell, columns * vision.cell, 3)
    pixels = np.random.default_rng(seed).integers(0, 256, size, dtype=np.uint8)
    return Picture(pixels, vision, rows * columns, size[1], size[0])


def photo(width: int, height: int, seed: int = 0, mode: str = "RGB") -> Pillow.Image:
    """Return smooth shapes and noise, in any mode."""
    generator = np.random.default_rng(seed)
    y, x = np.mgrid[0:height, 0:width]
    bands = {"L": 1, "LA": 2, "RGB": 3, "RGBA": 4, "CMYK": 4}.get(mode, 3)
    speed, phase = generator.uniform(1, 9, (2, bands)), generator.uniform(0, 6, bands)
    waves = [
        128
        + 90 * np.sin(x / speed[0, band] + y / speed[1, band] + phase[band])
        + generator.normal(0, 20, x.shape)
        for band in range(bands)
    ]
    values = np.stack(waves, -1).clip(0, 255).astype(np.uint8)
    if mode in ("L", "LA", "RGB", "RGBA", "CMYK"):
        flat = values[..., 0] if bands == 1 else values
        return Pillow.fromarray(flat, mode=None) if mode != "CMYK" else _cmyk(flat)
    return Pillow.fromarray(values).convert(mode)


def encoded(image: Pillow.Image, form: str = "PNG", **options: Any) -> bytes:
    stream = BytesIO()
    image.save(stream, form, **options)
    return stream.getvalue()


def _cmyk(values: Any) -> Pillow.Image:
    return Pillow.merge("CMYK", [Pillow.fromarray(values[..., band]) for band in range(4)])


def chunk(kind: bytes, data: bytes) -> bytes:
    return len(data).to_bytes(4) + kind + data + zlib.crc32(kind + data).to_bytes(4)


def png_of(width: int, height: int) -> bytes:
    """A small PNG that claims a size."""
    head = width.to_bytes(4) + height.to_bytes(4) + bytes([8, 2, 0, 0, 0])
    body = zlib.compress(bytes(1000))
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", body) + chunk(b"IEND", b"")


# --- engines

LARGE = replace(TOWER, position_embedding_size=256, num_hidden_layers=2, hidden_size=16)
NANO = Path(dgemma.__file__).parent / "models" / "nano"


@cache
def seeing_weights(seed: int = 0) -> tuple[Gemma, ImageEncoder]:
    """Return a random model with nano's vocabulary, and its tower."""
    tokenizer = Tokenizer.load(NANO)
    ids = {"boi_token_id": 17, "eoi_token_id": 21, "image_token_id": 19}
    config = replace(SEEING, vocab_size=tokenizer.vocab_size, vision=LARGE, media_ids=ids)
    config = replace(config, max_position_embeddings=2048, sliding_window=40)
    model, encoder = Gemma(config), ImageEncoder(LARGE, config.hidden_size)
    shake(model, seed)
    for layer in model.layers:
        layer.layer_scalar.fill_(1.0)
    shaken(encoder, seed + 1)
    return model.eval().requires_grad_(False), encoder.eval().requires_grad_(False)


def seeing_engine(prefix_bytes: int = 1 << 24, chunk: int = 64) -> Engine:
    """Return an engine with a random tower and nano's template."""
    model, encoder = seeing_weights()
    tokenizer = Tokenizer.load(NANO)
    # One step: the most likely tokens, which no draw near a boundary can change.
    generation = GenerationConfig(max_denoising_steps=1, max_new_tokens=8, stop_ids=(1,))
    template = ChatTemplate.load(NANO, tokenizer)
    engine = Engine(model, tokenizer, template, generation, prefix_bytes=prefix_bytes)
    engine.images, engine.chunk = ImageFeatures(LARGE, lambda: encoder), chunk
    return engine


def noise_image(seed: int, size: tuple[int, int] = (60, 40), tokens: int = 70) -> Image:
    """Return a picture of noise as a file."""
    stream = BytesIO()
    photo(*size, seed=seed).save(stream, "PNG")
    return Image(stream.getvalue(), tokens=tokens)


def seen(*parts: Any) -> Message:
    return Message(role="user", content=parts)
