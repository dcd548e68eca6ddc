"""Engines of random weights: whatever they write, a constraint must hold."""

from dataclasses import replace
from functools import cache

import torch

from dgemma.config import GenerationConfig
from dgemma.constrain.vocabulary import vocabulary
from dgemma.engine import Engine
from dgemma.text.chat import ChatTemplate, Prompt
from dgemma.weights.load import random_model
from tests.text.small import TEMPLATE, small_tokenizer
from tests.tiny import TINY, shake

TOKENIZER = small_tokenizer()
EOS, TURN, RESPONSE = (
    TOKENIZER.control_ids[name] for name in ("<eos>", "<turn|>", "<|tool_response>")
)
VOCABULARY = vocabulary(TOKENIZER, (EOS, TURN, RESPONSE))
OPEN, CLOSE = (TOKENIZER.control_ids[name] for name in ("<|channel>", "<channel|>"))


@cache
def random_engine(seed: int, canvas: int = 16) -> Engine:
    """One of a few models, some of them sure of themselves; shared between tests."""
    config = replace(TINY, vocab_size=TOKENIZER.vocab_size, canvas_length=canvas, vision=None)
    model = random_model(config, seed=seed)
    shake(model, seed, size=(0.1, 0.3, 1.0)[seed % 3])
    generation = GenerationConfig(
        stop_ids=(EOS, TURN, RESPONSE), max_new_tokens=4 * canvas, max_denoising_steps=10
    )
    return Engine(model.eval(), TOKENIZER, ChatTemplate(TEMPLATE, TOKENIZER), generation)


def random_prompt(seed: int, *, in_thought: bool = False) -> Prompt:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(300, TOKENIZER.vocab_size, (5,), generator=generator).tolist()
    return Prompt(text="", ids=tuple(ids), in_thought=in_thought)
