"""Engines for fill and edit: of random weights, and one that knows a few texts by heart."""

from dataclasses import replace
from functools import cache

import torch

from dgemma.config import GenerationConfig
from dgemma.diffusion.sampler import Sampler
from dgemma.engine import Engine
from dgemma.text.chat import ChatTemplate
from dgemma.weights.load import random_model
from examples.memorize import memorize
from tests.taught import CANVAS, GENERATION, ask, taught_config
from tests.text.small import TEMPLATE, small_tokenizer
from tests.tiny import TINY, shake

QUICK = Sampler(max_denoising_steps=2)  # random weights do not converge anyway
BEFORE, HOLE, AFTER = "def f(x):\n", "  y = x\n", "  return y\n"
WRONG, RIGHT, REQUEST = "the caat sat", "the cat sat", "Fix."
STEPS = 420


@cache
def random_engine(seed: int, canvas: int = 12, context: int = 256) -> Engine:
    """One of a few models; not to be changed, since tests share it."""
    tokenizer = small_tokenizer()
    config = replace(
        TINY,
        vocab_size=tokenizer.vocab_size,
        canvas_length=canvas,
        max_position_embeddings=context,
        vision=None,
    )
    model = random_model(config, seed=seed)
    shake(model, seed, size=(0.1, 0.3, 1.0)[seed % 3])
    generation = GenerationConfig(stop_ids=(1, 16), max_new_tokens=2 * canvas)
    return Engine(model.eval(), tokenizer, ChatTemplate(TEMPLATE, tokenizer), generation)


@cache
def knowing_engine() -> Engine:
    """Knows a short function, and how to correct one text."""
    tokenizer, (end, turn) = small_tokenizer(), GENERATION.stop_ids
    encode, config = tokenizer.encode, taught_config()
    function = encode(HOLE) + encode(AFTER)
    pairs = [
        ([config.bos_token_id, *encode(BEFORE)], function),
        (list(ask(f"{REQUEST}\n\n{WRONG}").ids), [*encode(RIGHT), turn]),
    ]
    lessons = [
        (torch.tensor(prompt), torch.tensor((reply + [end] * CANVAS)[:CANVAS]))
        for prompt, reply in pairs
    ]
    model = random_model(config, seed=0)
    for _ in memorize(model, lessons, STEPS):
        pass
    return Engine(model, tokenizer, ChatTemplate(TEMPLATE, tokenizer), GENERATION)
