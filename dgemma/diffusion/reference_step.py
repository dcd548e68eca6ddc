"""The reference implementation of a denoising step, by the model's modules.

`backends.reference` executes passes with it, and other backends are compared with it. `denoise`
repeats it without an engine.

T positions of all canvases (in `ReferenceStep` after the tokens to commit), L of one canvas, D
width, V vocabulary.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from dgemma.diffusion.canvas import Canvas
from dgemma.diffusion.denoise import CanvasState, denoise_step, update_canvas
from dgemma.diffusion.logit_stats import PositionStats, Query, position_stats
from dgemma.model.forward_batch import ForwardBatch, Segment
from dgemma.model.gemma import Gemma
from dgemma.model.kv_cache import KVCache

# Logits computed at once, [T, V]: on a GPU 64 positions of the released model, whose float32 copies
# fit beside the weights of a small card; on a CPU, what stays in its caches.
LOGIT_ELEMENTS = {"cuda": 1 << 24, "cpu": 1 << 22, "mps": 1 << 24}


class StepOutput(NamedTuple):
    """The canvases after a step, and the hidden states of the pass."""

    states: list[CanvasState]
    hidden_TD: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class ReferenceStep:
    """Implements `StepOps` with the model's modules."""

    model: Gemma
    batch: ForwardBatch  # tokens to commit, then the canvases
    states: Sequence[CanvasState]
    commits_TD: Tensor | None = None  # embeddings of the tokens to commit

    def embed(self) -> Tensor:
        commits = [] if self.commits_TD is None else [self.commits_TD]
        return torch.cat([*commits, embed_canvases(self.model, self.states)])

    def forward(self, embeds_TD: Tensor) -> Tensor:
        return self.model.stack(embeds_TD, self.batch)

    def logit_stats(self, hidden_TD: Tensor) -> tuple[PositionStats, Tensor, Tensor]:
        query = step_query(self.states)
        canvases_TD = hidden_TD[-len(query.current_T) :]
        return (*logit_stats(self.model, canvases_TD, query), hidden_TD)

    def advance(self, stats: tuple[PositionStats, Tensor, Tensor]) -> StepOutput:
        stats_T, soft_TD, hidden_TD = stats
        canvases_TD = hidden_TD[-len(soft_TD) :]
        states, end = [], 0
        for state in self.states:
            here = slice(end, end := end + state.canvas.length)
            logits_at = partial(canvas_logits, self.model, canvases_TD[here])
            canvas = update_canvas(state, stats_T.at(here), logits_at)
            canvas = self_conditioned(self.model, canvas, soft_TD[here])
            states.append(replace(state, canvas=canvas))
        return StepOutput(states, hidden_TD)


def embed_canvases(model: Gemma, states: Sequence[CanvasState]) -> Tensor:
    """Embed the canvases, concatenated, with their self-conditioning."""
    tokens_T = torch.cat([state.canvas.tokens_L for state in states])
    softs = [state.canvas.soft_LD for state in states]
    if all(soft is None for soft in softs):
        return model.embed_canvas(tokens_T, None)
    table_VD = model.embed_tokens.weight
    # Before its first step a canvas has no soft embeddings: exactly zero.
    filled = [
        table_VD.new_zeros(state.canvas.length, table_VD.shape[1]) if soft is None else soft
        for state, soft in zip(states, softs, strict=True)
    ]
    return model.embed_canvas(tokens_T, torch.cat(filled))


def step_query(states: Sequence[CanvasState]) -> Query:
    """Gather temperature, uniform number and current token of each position."""
    draw_temperatures = [state.sampler.temperature for state in states]
    is_plain = all(temperature == 1 for temperature in draw_temperatures)
    return Query(
        temperature_T=_spread(states, [state.temperature for state in states]),
        uniform_T=torch.cat([state.noise.uniform_NL[state.noise_row] for state in states]),
        current_T=torch.cat([state.canvas.tokens_L for state in states]),
        draw_temperature_T=None if is_plain else _spread(states, draw_temperatures),
    )


def _spread(states: Sequence[CanvasState], values: Sequence[float]) -> Tensor:
    """Repeat each canvas's value over its positions, in float32."""
    pairs = zip(states, values, strict=True)
    return torch.cat([torch.full_like(state.canvas.entropy_L, value) for state, value in pairs])


def logit_stats(model: Gemma, hidden_TD: Tensor, query: Query) -> tuple[PositionStats, Tensor]:
    """Statistics and soft embedding of every position, a bounded number of positions at a time."""
    softcap = model.config.final_logit_softcapping
    size = max(1, LOGIT_ELEMENTS[hidden_TD.device.type] // model.config.vocab_size)
    stats, softs = [], []
    for begin in range(0, len(hidden_TD), size):
        group = slice(begin, begin + size)
        group_stats, p_TV = position_stats(
            model.raw_logits(hidden_TD[group]), softcap, query.at(group)
        )
        stats.append(group_stats)
        softs.append(model.soft_embed(p_TV))
    return PositionStats.join(stats), torch.cat(softs)


def canvas_logits(model: Gemma, hidden_LD: Tensor, positions: Sequence[int]) -> Tensor:
    """Return the logits of the given positions of a canvas."""
    return model.logits(hidden_LD[list(positions)])


def self_conditioned(model: Gemma, canvas: Canvas, soft_LD: Tensor) -> Canvas:
    """Set self-conditioning; a pinned position is conditioned on its own token, as if converged."""
    if canvas.reopened_L is not None:
        soft_LD = soft_LD.masked_fill(canvas.reopened_L[:, None], 0.0)
    token_LD = model.embed(canvas.tokens_L)
    soft_LD = torch.where(canvas.pinned_L[:, None], token_LD, soft_LD)
    return replace(canvas, soft_LD=soft_LD, reopened_L=None)


@torch.inference_mode()
def denoise(
    model: Gemma, caches: Sequence[KVCache], states: Sequence[CanvasState]
) -> Iterator[list[CanvasState]]:
    """Yield the states after each step, until all canvases have converged or are out of steps.

    Finished canvases leave the pass and stay unchanged. The KV caches keep their lengths.
    """
    states = list(states)
    while moving := [index for index, state in enumerate(states) if not state.is_done]:
        segments = [Segment(caches[i], states[i].canvas.length, commit=False) for i in moving]
        ops = ReferenceStep(model, ForwardBatch(segments), [states[i] for i in moving])
        for index, state in zip(moving, denoise_step(ops).states, strict=True):
            states[index] = state
        yield list(states)
