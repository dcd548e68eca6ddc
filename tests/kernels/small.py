"""A model whose shapes the kernels take, and rows on it."""

import torch

from dgemma.backends.reference import commit
from dgemma.config import FULL, SLIDING, ModelConfig
from dgemma.diffusion.canvas import NO_PINS, Noise, Pins
from dgemma.diffusion.denoise import Row, start
from dgemma.diffusion.sampler import Sampler
from dgemma.model.gemma import Gemma
from dgemma.model.kv_cache import Capacity, KVCache
from dgemma.weights.random import random_model

CPU = torch.device("cpu")
SMALL = ModelConfig(
    vocab_size=96,
    hidden_size=32,
    intermediate_size=24,
    moe_intermediate_size=16,
    num_experts=4,
    top_k_experts=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    num_global_key_value_heads=1,
    head_dim=16,
    global_head_dim=32,
    layer_types=(SLIDING, FULL),
    sliding_window=6,
    max_position_embeddings=4096,
    canvas_length=4,
    dtype="float32",
)


def model(seed: int = 0, sharpness: float = 6.0) -> Gemma:
    """Random weights; sharp enough that some positions are decided."""
    made = random_model(SMALL, seed=seed).requires_grad_(False)
    made.embed_tokens.weight.mul_(sharpness)
    return made


def cache(of: Gemma, prompt: int) -> KVCache:
    row = KVCache(SMALL, Capacity(tokens=prompt + 16, segment=16), torch.float32, CPU)
    commit(of, row, torch.arange(prompt) % SMALL.vocab_size, chunk=8)
    return row


def row(sampler: Sampler, block: int, pins: Pins = NO_PINS, length: int = 4) -> Row:
    noise = Noise(seed=3).block(block, sampler.max_denoising_steps, length, SMALL.vocab_size, CPU)
    return start(sampler, noise, pins)
