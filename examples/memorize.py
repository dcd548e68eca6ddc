"""Overfit a tiny model to a few texts, in seconds on a CPU, by the published objective.

Each step takes one block of one text, noises several copies of it at random levels, and trains the
model to predict the clean tokens; half of the time with self-conditioning from a first pass without
it. It is the shortest way to a canvas that converges, not a trainer.

T tokens of a pass, L canvas, D width, V vocabulary.
"""

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from dgemma.config import ModelConfig
from dgemma.diffusion.canvas import corrupt
from dgemma.model.attention import KVSegment, attention_reference
from dgemma.model.gemma import Gemma

COPIES = 8  # canvases trained at once, each with its own noise


class OpenContext:
    """A clean text, causal; then canvases that see the text before their block, and themselves.

    There is no KV cache, so gradients flow through the clean text as well.
    """

    def __init__(self, config: ModelConfig, clean: int, start: int) -> None:
        self.config, self.start = config, start
        block = torch.arange(start, start + config.canvas_length)
        self.positions_T = torch.cat([torch.arange(clean), block.repeat(COPIES)])
        owners = torch.arange(COPIES).repeat_interleave(len(block))
        self.owner_T = torch.cat([torch.full((clean,), -1), owners])

    def attend(self, layer: int, q_TNH: Tensor, k_TMH: Tensor, v_TMH: Tensor) -> Tensor:
        window = self.config.attention(layer).window or 1 << 30
        query, key = self.positions_T[:, None], self.positions_T[None]
        query_owner, key_owner = self.owner_T[:, None], self.owner_T[None]
        causal = (key_owner < 0) & (key <= query) & (query - key < window)
        past = (key_owner < 0) & (key < self.start) & (key > self.start - window)
        mask = torch.where(query_owner < 0, causal, past | (key_owner == query_owner))
        return attention_reference(q_TNH, [KVSegment(k_TMH, v_TMH, mask)])


def memorize(
    model: Gemma, pairs: list[tuple[Tensor, Tensor]], steps: int, seed: int = 0
) -> Iterator[float]:
    """Train `model` to continue the first text of each pair with the second; yield the losses.

    The second text is cut into canvases, which it must fill.
    """
    generator = torch.Generator().manual_seed(seed)
    model.requires_grad_(True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min(1.0, 2 * (steps - step) / steps)
    )
    for step in range(steps):
        prompt, ending = pairs[step % len(pairs)]
        blocks = len(ending) // model.config.canvas_length
        block = int(torch.randint(blocks, (), generator=generator))
        start = len(prompt) + block * model.config.canvas_length
        loss = _loss(model, torch.cat([prompt, ending]), start, generator)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        yield loss.item()
    model.requires_grad_(False)


def _loss(model: Gemma, text_S: Tensor, start: int, generator: torch.Generator) -> Tensor:
    """Return the cross-entropy of the noised copies of one block plus that of the next token."""
    target_T = text_S[start : start + model.config.canvas_length].repeat(COPIES)
    level_T = torch.rand(COPIES, generator=generator).repeat_interleave(len(target_T) // COPIES)
    uniform_T = torch.rand(target_T.shape, generator=generator)
    noise_T = torch.randint(model.config.vocab_size, target_T.shape, generator=generator)
    canvas_T = corrupt(target_T, noise_T, uniform_T, level_T)
    context = OpenContext(model.config, len(text_S), start)
    soft_TD = None
    if torch.rand((), generator=generator) < 0.5:
        with torch.no_grad():
            _, canvas_TV = _logits(model, text_S, canvas_T, None, context)
            soft_TD = model.soft_embed(canvas_TV.softmax(-1))
    text_SV, canvas_TV = _logits(model, text_S, canvas_T, soft_TD, context)
    return F.cross_entropy(canvas_TV, target_T) + F.cross_entropy(text_SV[:-1], text_S[1:])


def _logits(
    model: Gemma, text_S: Tensor, canvas_T: Tensor, soft_TD: Tensor | None, context: OpenContext
) -> tuple[Tensor, Tensor]:
    x_TD = torch.cat([model.embed(text_S), model.embed_canvas(canvas_T, soft_TD)])
    logits_TV = model.logits(model.stack(x_TD, context))
    return logits_TV[: len(text_S)], logits_TV[len(text_S) :]
