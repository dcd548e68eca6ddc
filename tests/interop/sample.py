"""Prompts and canvases for the built-in model, and our own passes over them."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from dgemma.config import ModelConfig, load_config
from dgemma.model.forward_batch import ForwardBatch, Segment
from dgemma.model.gemma import Gemma
from dgemma.model.kv_cache import Capacity, KVCache
from dgemma.programs.sudoku.grid import prompt_text
from dgemma.text.chat import ChatTemplate, Message
from dgemma.text.tokenizer import Tokenizer
from dgemma.weights.hub import NANO_DIRECTORY
from tests.tiny import CPU

PUZZLE = "530070000600195000098000060800060003400803001700020006060000280000419005000080079"
STORY = "Write a short story about a dog and a ball."


@dataclass(frozen=True)
class Case:
    name: str
    prompt_T: Tensor
    canvas_L: Tensor


def cases() -> Iterator[Case]:
    """Real prompts, and random ones around and beyond the sliding window."""
    config = load_config(NANO_DIRECTORY)
    tokenizer = Tokenizer.load(NANO_DIRECTORY)
    template = ChatTemplate.load(NANO_DIRECTORY, tokenizer)
    for name, text in (("sudoku", prompt_text(PUZZLE)), ("story", STORY)):
        ids = template.prompt([Message(role="user", content=text)]).ids
        yield Case(name, torch.tensor(ids), random_ids(config, config.canvas_length, 0))
    window = config.sliding_window
    for length in (1, window - 1, window, window + 1, 2 * window + 40):
        prompt = random_ids(config, length, length)
        yield Case(f"{length} tokens", prompt, random_ids(config, 64, length + 1))


def random_ids(config: ModelConfig, count: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(config.vocab_size, (count,), generator=generator)


@torch.inference_mode()
def our_passes(model: Gemma, case: Case) -> dict[str, Tensor]:
    """Logits of a prompt, of a canvas without and with self-conditioning, and of the next one."""
    canvas_L = case.canvas_L
    room = Capacity(tokens=len(case.prompt_T) + 2 * len(canvas_L))
    cache = KVCache(model.config, room, torch.float32, CPU)

    def encode(ids_T: Tensor) -> Tensor:
        writing = ForwardBatch([Segment(cache, len(ids_T), commit=True)])
        logits_TV = model.logits(model.encode(ids_T, writing))
        writing.close()
        return logits_TV

    def denoise(soft_LD: Tensor | None) -> Tensor:
        reading = ForwardBatch([Segment(cache, len(canvas_L), commit=False)])
        return model.logits(model.denoise(canvas_L, soft_LD, reading))

    prefill, first = encode(case.prompt_T), denoise(None)
    later = denoise(model.soft_embed(first.softmax(-1)))
    return {
        "prefill": prefill,
        "first step": first,
        "later step": later,
        "commit": encode(canvas_L),
        "next block": denoise(None),
    }
