"""Teach a tiny model a few texts by heart, in seconds on a CPU, by the published objective.

Each turn takes one block of one text, noises it at random levels in several copies, and lets the
model name the clean tokens; half of the time it is told what it thought without being told. It is
the shortest way to a canvas that settles, not a trainer.

T tokens of a pass, L canvas, D width, V vocabulary.
"""

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from dgemma.canvas import corrupt
from dgemma.config import ModelConfig
from dgemma.model import Gemma
from dgemma.ops.attention import Segment, attention_reference

COPIES = 8  # canvases trained at once, each with its own noise


class OpenContext:
    """Clean text first, causal; then canvases that see the last window of it and themselves.

    Keys and values are not kept, so gradients flow through the clean text as well.
    """

    def __init__(self, config: ModelConfig, clean: int, canvas: int) -> None:
        self.config, self.clean = config, clean
        canvas_positions = torch.arange(clean, clean + canvas).repeat(COPIES)
        self.positions_T = torch.cat([torch.arange(clean), canvas_positions])
        owners = torch.arange(COPIES).repeat_interleave(canvas)
        self.owner_T = torch.cat([torch.full((clean,), -1), owners])

    def attend(self, layer: int, q_TNH: Tensor, k_TMH: Tensor, v_TMH: Tensor) -> Tensor:
        window = self.config.attention(layer).window or 1 << 30
        query, key = self.positions_T[:, None], self.positions_T[None]
        query_owner, key_owner = self.owner_T[:, None], self.owner_T[None]
        causal = (key_owner < 0) & (key <= query) & (query - key < window)
        past = (key_owner < 0) & (key > self.clean - window)
        mask = torch.where(query_owner < 0, causal, past | (key_owner == query_owner))
        return attention_reference(q_TNH, [Segment(k_TMH, v_TMH, mask)])


def memorize(
    model: Gemma, pairs: list[tuple[Tensor, Tensor]], steps: int, seed: int = 0
) -> Iterator[float]:
    """Train `model` to go on with the second of each pair after the first; yield the losses.

    The second text is cut into canvases, which it must fill.
    """
    generator = torch.Generator().manual_seed(seed)
    model.requires_grad_(True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.0)
    length = model.config.canvas_length
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda turn: min(1.0, 2 * (steps - turn) / steps)
    )
    for turn in range(steps):
        prompt, ending = pairs[turn % len(pairs)]
        start = length * int(torch.randint(len(ending) // length, (), generator=generator))
        clean = torch.cat([prompt, ending[:start]])
        loss = _loss(model, clean, ending[start : start + length], generator)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        yield loss.item()
    model.requires_grad_(False)


def _loss(model: Gemma, clean_S: Tensor, block_L: Tensor, generator: torch.Generator) -> Tensor:
    target_T = block_L.repeat(COPIES)
    level_T = torch.rand(COPIES, generator=generator).repeat_interleave(len(block_L))
    uniform_T = torch.rand(target_T.shape, generator=generator)
    noise_T = torch.randint(model.config.vocab_size, target_T.shape, generator=generator)
    canvas_T = corrupt(target_T, noise_T, uniform_T, level_T)
    context = OpenContext(model.config, len(clean_S), len(block_L))
    soft_TD = None
    if torch.rand((), generator=generator) < 0.5:
        with torch.no_grad():
            p_TV = model.logits(_canvas_hidden(model, clean_S, canvas_T, None, context)).softmax(-1)
            soft_TD = model.embed_soft(p_TV)
    hidden_TD = _canvas_hidden(model, clean_S, canvas_T, soft_TD, context)
    return F.cross_entropy(model.logits(hidden_TD), target_T)


def _canvas_hidden(
    model: Gemma, clean_S: Tensor, canvas_T: Tensor, soft_TD: Tensor | None, context: OpenContext
) -> Tensor:
    x_TD = torch.cat([model.embed(clean_S), model.enter(canvas_T, soft_TD)])
    return model.stack(x_TD, context)[len(clean_S) :]
