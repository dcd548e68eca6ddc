"""A small model whose shapes the kernels support, with caches and canvases."""

import torch

from dgemma.backends.reference import commit
from dgemma.config import FULL, SLIDING
from dgemma.diffusion.canvas import NO_PINS, Noise, Pins
from dgemma.diffusion.denoise import CanvasState, start
from dgemma.diffusion.sampler import Sampler
from dgemma.model.gemma import Gemma
from dgemma.model.kv_cache import Capacity, KVCache
from dgemma.weights.load import random_model
from examples.tiny_model import tiny_config

CPU = torch.device("cpu")
SMALL = tiny_config(
    96,
    hidden_size=32,
    intermediate_size=24,
    moe_intermediate_size=16,
    layer_types=(SLIDING, FULL),
    sliding_window=6,
    canvas_length=4,
)


def model(seed: int = 0, sharpness: float = 6.0) -> Gemma:
    """Random weights; sharp enough that some positions are decided."""
    made = random_model(SMALL, seed=seed).requires_grad_(False)
    made.embed_tokens.weight.mul_(sharpness)
    return made


def cache(of: Gemma, prompt: int) -> KVCache:
    cache = KVCache(SMALL, Capacity(tokens=prompt + 16, segment=16), torch.float32, CPU)
    commit(of, cache, torch.arange(prompt) % SMALL.vocab_size, chunk=8)
    return cache


def new_state(sampler: Sampler, block: int, pins: Pins = NO_PINS, length: int = 4) -> CanvasState:
    noise = Noise(seed=3).block(block, sampler.max_denoising_steps, length, SMALL.vocab_size, CPU)
    return start(sampler, noise, pins)
