"""Cost of pictures, for `bench/paths.py`: the tower alone, and a request with a picture.

The tower has random weights of the released shapes: times are valid, features mean nothing.
"""

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
import torch
from common import EXAMPLE, Times, gpu_memory, reset_memory, wall

from dgemma.config import VisionConfig
from dgemma.config.vision_config import RELEASED_TOWER
from dgemma.engine.image_features import ImageFeatures
from dgemma.images import Picture
from dgemma.model.vision import Grid, ImageEncoder
from dgemma.text.chat import Prompt, PromptImage

if TYPE_CHECKING:
    from _paths_common import Bench, Report

# Rows and columns of soft tokens: they fill the budgets of 70, 280 and 1,120.
SHAPES = {70: (7, 10), 280: (14, 20), 1120: (28, 40)}
FRAMES, FRAME_SHAPE = 32, (6, 11)  # of a video of 16:9
IMAGE_ID = 255  # any token: its embedding is replaced
REPEATS = 10


def images(bench: "Bench", report: "Report") -> None:
    """Time the tower by size, and the first block of a request with a picture."""
    vision = EXAMPLE.vision if bench.arguments.tiny else RELEASED_TOWER
    shapes = {280: (2, 3), 1120: (3, 4)} if bench.arguments.tiny else SHAPES
    frames = 3 if bench.arguments.tiny else FRAMES
    before = bench.memory_mib()
    encoder = random_tower(bench, vision)
    size = sum(w.numel() * w.element_size() for w in encoder.state_dict().values())
    report.extra(
        f"Tower: {size / 1e6:,.1f} MB of weights, {bench.memory_mib() - before:,.0f} MiB in memory."
    )
    for budget, shape in shapes.items():
        tower_row(bench, report, encoder, (1, shape), f"a picture of at most {budget} tokens")
    tower_row(bench, report, encoder, (frames, FRAME_SHAPE), f"{frames} frames of a video")
    bench.engine.images = ImageFeatures(vision, lambda: encoder)
    try:
        for budget, shape in shapes.items():
            first_block(bench, report, shape, budget)
    finally:
        bench.engine.images = None
        bench.forget()


@torch.inference_mode()
def random_tower(bench: "Bench", vision: VisionConfig) -> ImageEncoder:
    """Make a tower on the model's device, in bfloat16 where the model is, else in float32."""
    dtype = torch.bfloat16 if bench.dtype == torch.bfloat16 else torch.float32
    with torch.device("meta"):
        encoder = ImageEncoder(vision, bench.engine.model.config.hidden_size)
    encoder = encoder.to(dtype).to_empty(device=bench.device)
    for name, weight in encoder.state_dict().items():
        if weight.ndim > 1:
            weight.normal_(0, weight.shape[-1] ** -0.5)
        else:
            weight.fill_(0.0 if name.endswith("std_bias") else 1.0)
    return encoder.requires_grad_(False).eval()


@torch.inference_mode()
def tower_row(
    bench: "Bench",
    report: "Report",
    encoder: ImageEncoder,
    pictures: tuple[int, tuple[int, int]],
    name: str,
) -> None:
    """Time the tower alone on pictures of one size, whose patches are on the device."""
    vision, (count, (rows, columns)) = encoder.config, pictures
    pool = vision.pooling_kernel_size
    grid = Grid(rows * pool, columns * pool)
    shape = (count, grid.rows * grid.columns, vision.patch_width)
    patches_BPC = torch.rand(shape, device=bench.device)
    reset_memory(bench.device)
    times = measured(bench, lambda: encoder(patches_BPC, grid))
    peak = gpu_memory(bench.device).get("peak_allocated_gb")
    memory = "" if peak is None else f", peak {peak} GB with the model"
    tokens = count * rows * columns
    row = f"tower, {name} ({tokens} tokens{memory})"
    report.row(row, times.ms, "", 1000 * tokens / times.ms, "")


def measured(bench: "Bench", work: Callable[[], object]) -> Times:
    return wall(work, 1 if bench.arguments.tiny else REPEATS, bench.device)


def first_block(bench: "Bench", report: "Report", shape: tuple[int, int], budget: int) -> None:
    """Time one block after a prompt with a new picture, with one seen lately, and without any.

    All prompts have the same length; the prefix cache is empty each time.
    """
    picture = noise(bench, shape)
    text = bench.prompt(picture.num_tokens + bench.arguments.image_text)
    seen = with_picture(bench, picture)
    for _ in range(2):
        block_ms(bench, text)
    makes: dict[str, Callable[[], Prompt]] = {
        "no picture": lambda: text,
        "a new picture": lambda: with_picture(bench, noise(bench, shape)),
        "a picture seen lately": lambda: seen,
    }
    block_ms(bench, seen)
    without = None
    for name, make in makes.items():
        prompts = [make() for _ in range(bench.arguments.runs)]
        found = sorted(block_ms(bench, prompt) for prompt in prompts)
        total, prefill = found[(len(found) - 1) // 2]
        without = without or total
        count = f"{len(prompts[0].ids)} prompt tokens, {prefill:,.1f} ms of them prefill"
        row = f"first block, {name} of at most {budget} tokens ({count})"
        report.row(row, total, f"{total / without:.2f}x", "", "")


def block_ms(bench: "Bench", prompt: Prompt) -> tuple[float, float]:
    """Milliseconds to the end of a reply of one block, and of its prefill, tower included."""
    from _paths_common import EvalPrompt

    params = bench.diffusion(bench.arguments.steps, max_tokens=bench.canvas_length)
    bench.wait()
    begin = time.perf_counter()
    run = bench.run([EvalPrompt(prompt, params)])
    bench.wait()
    return 1000 * (time.perf_counter() - begin), 1000 * run.dones[0].prefill_seconds


def noise(bench: "Bench", shape: tuple[int, int]) -> Picture:
    """Return another picture of noise, of so many rows and columns of soft tokens."""
    images = bench.engine.images
    assert images is not None
    bench.count += 1
    cell = images.vision.cell
    size = (shape[0] * cell, shape[1] * cell, 3)
    pixels = np.random.default_rng(bench.count).integers(0, 256, size, dtype=np.uint8)
    return Picture(pixels, images.vision, shape[0] * shape[1], size[1], size[0])


def with_picture(bench: "Bench", picture: Picture) -> Prompt:
    """Return a prompt of a picture and text after it."""
    text = bench.prompt(bench.arguments.image_text)
    ids = (*[IMAGE_ID] * picture.num_tokens, *text.ids)
    return Prompt(text="", ids=ids, images=(PromptImage(0, picture),))
