"""The loop of one block: step a canvas until it settles, then commit what it guesses.

A step serves any number of rows at once: their canvases are laid end to end, go through the model
in one pass, and are advanced one by one. This module never sees a string or a request.

T positions of all canvases, L of one, D width.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from dgemma.cache import KVCache, Pass, Span
from dgemma.canvas import BlockNoise, Canvas, Pins, fresh
from dgemma.model import Gemma
from dgemma.ops.row_stats import Query, RowStats, row_stats
from dgemma.sampler import Sampler, View, advance

# Most [T, V] numbers alive at once. A GPU takes one canvas of the released model; a CPU takes what
# its caches can still do something for.
READ_OUT_ELEMENTS = {"cuda": 1 << 26, "cpu": 1 << 22}


class Walker(Protocol):
    """Narrows a canvas after each step: whoever holds a text to a grammar pins tokens here."""

    def walk(self, canvas: Canvas, view: View) -> Canvas:
        """The canvas with more pins; `soft_LD` is what is not pinned believes of itself."""


@dataclass(frozen=True, slots=True)
class Row:
    """One canvas on its way: what it is now, how it moves, and its noise."""

    canvas: Canvas
    sampler: Sampler
    noise: BlockNoise
    walker: Walker | None = None

    @property
    def is_done(self) -> bool:
        """Settled or out of steps; reading the flag waits for the device, once a step."""
        return self.canvas.num_steps >= self.sampler.max_steps or bool(self.canvas.settled)


def start(sampler: Sampler, noise: BlockNoise, pins: Pins, walker: Walker | None = None) -> Row:
    """A row about to take its first step."""
    return Row(fresh(noise.tokens_NL[0], pins), sampler, noise, walker)


def denoise(model: Gemma, caches: Sequence[KVCache], rows: Sequence[Row]) -> Iterator[list[Row]]:
    """Yield the rows after each step, until each has settled or is out of steps.

    Rows that are done leave the pass and stay as they are. The caches' lengths do not change.
    """
    rows = list(rows)
    members: list[int] = []
    context: Pass | None = None
    while moving := [index for index, row in enumerate(rows) if not row.is_done]:
        if context is None or moving != members:
            members = moving
            context = Pass([Span(caches[i], rows[i].canvas.length, commit=False) for i in moving])
        for index, row in zip(moving, step(model, context, [rows[i] for i in moving]), strict=True):
            rows[index] = row
        yield list(rows)


@torch.inference_mode()
def step(model: Gemma, context: Pass, rows: Sequence[Row]) -> list[Row]:
    """Take one step with every row."""
    return move_rows(model, model.stack(enter_rows(model, rows), context), rows)


def enter_rows(model: Gemma, rows: Sequence[Row]) -> Tensor:
    """The canvases of all rows, end to end, as they enter the stack."""
    tokens_T = torch.cat([row.canvas.tokens_L for row in rows])
    return model.enter(tokens_T, _conditioning(model, rows))


def move_rows(model: Gemma, hidden_TD: Tensor, rows: Sequence[Row]) -> list[Row]:
    """Every row after a step that left these hidden states at the positions of its canvas."""
    tokens_T = torch.cat([row.canvas.tokens_L for row in rows])
    query = Query(
        heat_T=_heats(rows),
        uniform_T=_uniforms(rows),
        held_T=tokens_T,
        temperature_T=_temperatures(rows),
    )
    stats, soft_TD = read_out(model, hidden_TD, query)
    moved, end = [], 0
    for row in rows:
        own = slice(end, end := end + row.canvas.length)
        noise_L = row.noise.tokens_NL[row.canvas.num_steps + 1]
        canvas = advance(row.canvas, stats.rows(own), noise_L, row.sampler.rule)
        canvas = replace(canvas, soft_LD=soft_TD[own])
        if row.walker is not None:
            view = View(stats.rows(own), noise_L, partial(_look, model, hidden_TD[own]))
            canvas = row.walker.walk(canvas, view)
        moved.append(replace(row, canvas=_pinned_to_own(model, canvas)))
    return moved


def read_out(model: Gemma, hidden_TD: Tensor, query: Query) -> tuple[RowStats, Tensor]:
    """Statistics and soft embedding of every position, a bounded number of positions at a time."""
    softcap = model.config.final_logit_softcapping
    size = max(1, READ_OUT_ELEMENTS[hidden_TD.device.type] // model.config.vocab_size)
    stats, softs = [], []
    for begin in range(0, len(hidden_TD), size):
        group = slice(begin, begin + size)
        part, p_TV = row_stats(model.head(hidden_TD[group]), softcap, query.rows(group))
        stats.append(part)
        softs.append(model.embed_soft(p_TV))
    return RowStats.join(stats), torch.cat(softs)


@torch.inference_mode()
def commit(model: Gemma, cache: KVCache, tokens_T: Tensor, chunk: int) -> Tensor:
    """Encode tokens behind what is cached, `chunk` at a time; returns the last hidden state."""
    hidden_TD = torch.empty(0)
    for piece_T in torch.split(tokens_T, chunk):
        context = Pass([Span(cache, len(piece_T), commit=True)])
        hidden_TD = model.encode(piece_T, context)
        context.close()
    return hidden_TD[-1:]


def _conditioning(model: Gemma, rows: Sequence[Row]) -> Tensor | None:
    """Soft embeddings of all rows; a row before its first step has none, which is exactly zero."""
    softs = [row.canvas.soft_LD for row in rows]
    if all(soft is None for soft in softs):
        return None
    table_VD = model.embed_tokens.weight
    return torch.cat(
        [
            table_VD.new_zeros(row.canvas.length, table_VD.shape[1]) if soft is None else soft
            for row, soft in zip(rows, softs, strict=True)
        ]
    )


def _pinned_to_own(model: Gemma, canvas: Canvas) -> Canvas:
    """A pinned position is conditioned on its own token, as a converged one would be."""
    assert canvas.soft_LD is not None
    own_LD = model.embed(canvas.tokens_L)
    return replace(canvas, soft_LD=torch.where(canvas.pinned_L[:, None], own_LD, canvas.soft_LD))


def _look(model: Gemma, hidden_LD: Tensor, positions: Sequence[int]) -> Tensor:
    return model.logits(hidden_LD[list(positions)])


def _heats(rows: Sequence[Row]) -> Tensor:
    heats = [
        row.canvas.entropy_L.new_full(
            (row.canvas.length,), row.sampler.heat(row.sampler.max_steps - row.canvas.num_steps)
        )
        for row in rows
    ]
    return torch.cat(heats)


def _uniforms(rows: Sequence[Row]) -> Tensor:
    return torch.cat([row.noise.uniform_NL[row.canvas.num_steps + 1] for row in rows])


def _temperatures(rows: Sequence[Row]) -> Tensor | None:
    if all(row.sampler.temperature == 1 for row in rows):
        return None
    return torch.cat(
        [torch.full_like(row.canvas.entropy_L, row.sampler.temperature) for row in rows]
    )
