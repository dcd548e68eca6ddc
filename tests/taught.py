"""A tiny checkpoint that converges: it knows some answers by heart, in a small tokenizer's ids."""

from dataclasses import replace
from functools import cache
from pathlib import Path

import torch

from dgemma.config import FULL, SLIDING, GenerationConfig, ModelConfig
from dgemma.engine import Engine
from dgemma.model.gemma import Gemma
from dgemma.text.chat import ChatTemplate, Message, Prompt
from dgemma.weights.load import Checkpoint, random_model
from dgemma.weights.save import save_checkpoint
from examples.memorize import memorize
from tests.text.small import TEMPLATE, make_backend, small_tokenizer
from tests.tiny import TINY

CANVAS = 16
# The second answer takes three blocks, and the bytes of its face lie in two of them.
SHORT, LONG, THOUGHT = "short", "long", "think"
ANSWERS = {
    SHORT: "one, two.",
    LONG: "0123456789abc the\U0001f600, then the second STOP and 7!",
    THOUGHT: "<|channel>thought\nhm\n<channel|>yes",
}
GENERATION = GenerationConfig(stop_ids=(1, 16), max_new_tokens=3 * CANVAS)
STEPS = 420


def taught_config() -> ModelConfig:
    return replace(
        TINY,
        vocab_size=small_tokenizer().vocab_size,
        layer_types=(SLIDING, FULL),
        sliding_window=12,
        max_position_embeddings=256,
        canvas_length=CANVAS,
        vision=None,
    )


def ask(question: str) -> Prompt:
    template = ChatTemplate(TEMPLATE, small_tokenizer())
    return template.prompt([Message(role="user", content=question)])


def answer_ids(question: str) -> list[int]:
    """An answer with its closing turn, filled up with stop ids to whole canvases."""
    ids = [*small_tokenizer().encode_control(ANSWERS[question]), GENERATION.stop_ids[1]]
    return ids + [GENERATION.stop_ids[0]] * (-len(ids) % CANVAS)


@cache
def taught_model() -> Gemma:
    """Not to be changed: all tests share it."""
    pairs = [(torch.tensor(ask(q).ids), torch.tensor(answer_ids(q))) for q in ANSWERS]
    model = random_model(taught_config(), seed=0)
    for _ in memorize(model, pairs, STEPS):
        pass
    return model


def save_taught(directory: Path) -> None:
    """Write the whole checkpoint: weights, configs, tokenizer, template."""
    directory.mkdir(parents=True, exist_ok=True)
    make_backend().save(str(directory / "tokenizer.json"))
    (directory / "chat_template.jinja").write_text(TEMPLATE, encoding="utf-8")
    checkpoint = Checkpoint(model=taught_model(), generation=GENERATION)
    save_checkpoint(checkpoint, directory, overwrite=True)


def untaught_engine() -> Engine:
    """Return an engine of random weights: its answers depend on the noise."""
    tokenizer = small_tokenizer()
    generation = replace(GENERATION, max_denoising_steps=4, stop_ids=(1,))
    model = random_model(taught_config(), seed=3)
    return Engine(model, tokenizer, ChatTemplate(TEMPLATE, tokenizer), generation)
