"""How far the answers of two models of one shape lie apart: on the same tokens, in the same run."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from dgemma.config import ModelConfig
from dgemma.errors import UsageError
from dgemma.model.forward_batch import ForwardBatch, Segment
from dgemma.model.gemma import Gemma
from dgemma.model.kv_cache import Capacity, KVCache
from dgemma.weights.load import load_model
from dgemma.weights.random import count_parameters

PROMPT, STEPS = 64, 4
SMALL = 300_000_000  # parameters


@dataclass(frozen=True, slots=True, kw_only=True)
class Agreement:
    """Of the second model's distributions with the first's, over all compared positions."""

    positions: int
    kl: float  # mean, in nats
    worst_kl: float
    top_1: float  # share of positions with the same likeliest token


def compare(first: Path, second: Path, seed: int = 0) -> Agreement:
    """Load two checkpoints in float32 and compare them."""
    a, b = (load_model(path, dtype=torch.float32).model for path in (first, second))
    return agreement(a, b, seed)


def is_small(config: ModelConfig) -> bool:
    """Whether two copies in float32 are no burden on any machine."""
    return count_parameters(config).total <= SMALL


@torch.inference_mode()
def agreement(
    first: Gemma, second: Gemma, seed: int, device: torch.device | str = "cpu"
) -> Agreement:
    """A random prompt, and a canvas that follows the first model's likeliest tokens from noise.

    Without a canvas mode: every position of the prompt.
    """
    config, generator = first.config, torch.Generator().manual_seed(seed)
    if config.layer_types != second.config.layer_types:
        raise UsageError("only models of one shape can be compared")
    prompt_T = torch.randint(config.vocab_size, (PROMPT,), generator=generator).to(device)
    readers = [_Reader(model, prompt_T) for model in (first, second)]
    if not config.can_denoise:
        return between([reader.prompt_logits for reader in readers])
    canvas_L = torch.randint(config.vocab_size, (config.canvas_length,), generator=generator)
    canvas_L = canvas_L.to(device)
    pairs = []
    for _ in range(STEPS):
        pairs.append([reader.logits(canvas_L) for reader in readers])
        canvas_L = pairs[-1][0].argmax(-1)
    return between([torch.cat(each) for each in zip(*pairs, strict=True)])


class _Reader:
    """A model behind a prompt."""

    def __init__(self, model: Gemma, prompt_T: Tensor) -> None:
        self.model = model
        room = Capacity(tokens=PROMPT + model.config.canvas_length)
        dtype = model.embed_tokens.weight.dtype
        self.cache = KVCache(model.config, room, dtype, prompt_T.device)
        run = ForwardBatch([Segment(self.cache, len(prompt_T), commit=True)])
        self.prompt_logits = model.logits(model.encode(prompt_T, run))
        run.close()

    def logits(self, canvas_L: Tensor) -> Tensor:
        run = ForwardBatch([Segment(self.cache, len(canvas_L), commit=False)])
        return self.model.logits(self.model.denoise(canvas_L, None, run))


def between(logits: Sequence[Tensor]) -> Agreement:
    """The distance of the second's distributions from the first's, position by position."""
    log_p_TV, log_q_TV = (each.double().log_softmax(-1) for each in logits)
    kl_T = (log_p_TV.exp() * (log_p_TV - log_q_TV)).sum(-1)
    same_T = log_p_TV.argmax(-1) == log_q_TV.argmax(-1)
    return Agreement(
        positions=len(kl_T),
        kl=kl_T.mean().item(),
        worst_kl=kl_T.max().item(),
        top_1=same_T.double().mean().item(),
    )
