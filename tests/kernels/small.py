"""A small model whose shapes the kernels support, with caches and canvases."""

from dataclasses import replace

import torch

from dgemma.backends.reference import commit
from dgemma.diffusion.canvas import NO_PINS, Noise, Pins
from dgemma.diffusion.denoise import CanvasState, start
from dgemma.diffusion.sampler import Sampler
from dgemma.model.gemma import Gemma
from dgemma.model.kv_cache import Capacity, KVCache
from dgemma.quant.gguf import BlockTensor, BlockWeight
from dgemma.quant.gguf_tiles import BLOCK_FORMATS
from dgemma.weights.load import random_model
from tests.tiny import TINY

CPU = torch.device("cpu")
SMALL = replace(
    TINY,
    vocab_size=96,
    moe_intermediate_size=16,
    head_dim=16,
    global_head_dim=32,
    sliding_window=6,
    canvas_length=4,
)


def model(seed: int = 0, sharpness: float = 6.0) -> Gemma:
    """Random weights; sharp enough that some positions are decided."""
    made = random_model(SMALL, seed=seed).requires_grad_(False)
    made.embed_tokens.weight.mul_(sharpness)
    return made


def cache(of: Gemma, prompt: int) -> KVCache:
    cache = KVCache(of.config, Capacity(tokens=prompt + 16, segment=16), torch.float32, CPU)
    commit(of, cache, torch.arange(prompt) % SMALL.vocab_size, chunk=8)
    return cache


def new_state(sampler: Sampler, block: int, pins: Pins = NO_PINS, length: int = 4) -> CanvasState:
    noise = Noise(seed=3).block(block, sampler.max_denoising_steps, length, SMALL.vocab_size, CPU)
    return start(sampler, noise, pins)


def random_stack(name: str, experts: int, outputs: int, inputs: int, seed: int = 0) -> BlockWeight:
    """Draw every bit of stacked matrices in a GGUF format; scales are small, of any sign."""
    block = BLOCK_FORMATS[name]
    generator = torch.Generator().manual_seed(seed)
    count = experts * outputs * inputs // block.num_weights
    packed = torch.randint(256, (count, block.num_bytes), dtype=torch.uint8, generator=generator)
    size = 1e-6 if name == "Q6_K" else 1e-4  # its scales are times an int8
    scales = (size * torch.randn(count, 2, generator=generator)).half().view(torch.uint8)
    start = 208 if name == "Q6_K" else 0
    width = 2 if name in ("Q6_K", "Q4_0", "Q5_0", "Q8_0") else 4
    packed[:, start : start + width] = scales[:, :width]
    return BlockWeight((BlockTensor(packed.flatten(), block, (experts, outputs, inputs)),))
