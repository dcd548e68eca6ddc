"""Packing: an example's clean text and its noised canvases as rows of a training sequence.

A row is one position of a packed sequence. A clean row holds a token of the text, is read causally
and has the next token as its target. A canvas row holds a token that may be noise and has the clean
one as its target. Both run in one pass, so gradients of the canvases reach the text they attend to:
no cache stops them.

Rows are the columns of an int32 array with one line per field; `rng_key` is a random number of a
canvas, which seeds its sampler steps (NONE: it takes none), and `weight` the weight in the loss.

N rows, C canvases, L canvas length; B packed sequences, T rows in each.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dgemma.train.corruption import (
    NONE,
    CanvasText,
    Corruption,
    RowArray,
    TokenSpan,
    corrupt,
)

FIELDS = (
    *("token", "target", "position", "canvas", "start"),
    *("pinned", "example", "rng_key", "weight"),
)
TOKEN, TARGET, POSITION, CANVAS, START, PINNED, EXAMPLE, RNG_KEY, WEIGHT = range(len(FIELDS))
PADDING = np.array([0, NONE, 0, NONE, 1, 0, NONE, 0, 1], np.int32)


class Example(NamedTuple):
    """Tokens before the first canvas, and tokens of the canvases. Plain text has no prompt."""

    prompt: NDArray[np.integer]
    reply: NDArray[np.integer]


@dataclass(frozen=True, slots=True)
class Batch:
    """The fields of packed rows, each [B, T], on a device."""

    token: Tensor
    target: Tensor
    position: Tensor
    canvas: Tensor
    start: Tensor
    pinned: Tensor
    example: Tensor
    rng_key: Tensor
    weight: Tensor

    @classmethod
    def of(cls, rows: Tensor, device: torch.device | str) -> "Batch":
        """Copy rows made by `Mixture.batch` to a device."""
        return cls(*rows.to(device, non_blocking=True).long().unbind(0))

    def even(self, limit: int | None = None) -> "Batch":
        """Return every second of the first `limit` sequences: the self-conditioned ones.

        Contiguous like the self-conditioning pass's tokens, so that both share compiled code.
        """
        return Batch(*[getattr(self, name)[:limit:2].contiguous() for name in FIELDS])

    def split(self, count: int) -> "tuple[Batch, Batch]":
        """Return the first `count` sequences, and the others."""
        fields = [getattr(self, name) for name in FIELDS]
        return Batch(*[x[:count] for x in fields]), Batch(*[x[count:] for x in fields])

    def concat(self, other: "Batch") -> "Batch":
        """Append the sequences of another batch."""
        return Batch(*[torch.cat([getattr(self, n), getattr(other, n)]) for n in FIELDS])

    @property
    def is_canvas(self) -> Tensor:
        return self.canvas > NONE


class RowCounts(NamedTuple):
    """Rows of a batch that have a target."""

    canvas: int  # canvas rows, by their weights
    clean: int

    @classmethod
    def of(cls, rows: RowArray) -> "RowCounts":
        has_target = rows[TARGET] > NONE
        is_canvas = rows[CANVAS] > NONE
        canvas = rows[WEIGHT][has_target & is_canvas].sum()
        return cls(int(canvas), int(np.count_nonzero(has_target & ~is_canvas)))


def count_real_rows(rows: RowArray) -> list[int]:
    """Count the rows of each sequence that belong to an example."""
    return [int(count) for count in np.count_nonzero(rows[EXAMPLE] > NONE, axis=-1)]


@dataclass(frozen=True, slots=True, kw_only=True)
class PackingLayout:
    """Division of an example into canvases, and the targets of its clean text."""

    canvas_length: int
    max_rows: int
    copies: int = 1  # copies of each canvas with independent noise; 0: clean rows only
    train_on_prompt: bool = True  # whether the prompt's tokens are causal targets
    causal_fraction: float = 1.0  # fraction of examples with causal targets

    @property
    def rows_per_canvas(self) -> int:
        """Rows of a canvas: one per token and copy, and one clean row per token."""
        return (1 + self.copies) * self.canvas_length


def pack_example(
    example: Example, layout: PackingLayout, corruption: Corruption, rng: np.random.Generator
) -> RowArray | None:
    """Return the rows of an example; None if it is too short for a canvas."""
    prompt, reply = example
    lines = [] if corruption.lines is None else corruption.lines.spans(reply)
    if not len(prompt):
        prompt, reply = split_text(reply, layout, lines, rng)
        lines = [(start - len(prompt), stop - len(prompt)) for start, stop in lines]
    length = layout.canvas_length
    # Plain text may be a piece of a longer text; a whole text ends with <eos>.
    is_complete = len(reply) > 0 and (len(example.prompt) > 0 or reply[-1] == corruption.eos_id)
    count = -(-len(reply) // length) if is_complete else len(reply) // length
    count = min(count, (layout.max_rows - len(prompt)) // layout.rows_per_canvas)
    if count <= 0:
        return None
    clean = _clean_rows(prompt, reply[: count * length], layout)
    if layout.causal_fraction < 1 and rng.random() >= layout.causal_fraction:
        clean[TARGET] = NONE
    padded = np.full(count * length, corruption.eos_id, np.int32)
    padded[: len(reply)] = reply[: count * length]
    length_C = np.minimum(length, len(reply) - length * np.arange(count))
    text = CanvasText(padded.reshape(count, length), length_C, lines)
    canvases = [_canvas_rows(len(prompt), text, corruption, rng) for _ in range(layout.copies)]
    for number, rows in enumerate(canvases):
        rows[CANVAS] += number * count
        if corruption.padding_loss_fraction < 1:
            padding = rows[TARGET, len(reply) :]
            padding[rng.random(len(padding)) >= corruption.padding_loss_fraction] = NONE
    return np.concatenate([clean, *canvases], axis=1)


def split_text(
    text: NDArray[np.integer],
    layout: PackingLayout,
    lines: Sequence[TokenSpan],
    rng: np.random.Generator,
) -> Example:
    """Split a plain text in two, so that canvases start anywhere in it.

    If it has code lines, half of the splits are at the start of one, as in an infill request.
    """
    starts = [start for start, _ in lines if start > 0]
    if starts and rng.random() < 0.5:
        first = starts[int(rng.integers(len(starts)))]
    else:
        first = 1 + int(rng.integers(max(1, min(layout.canvas_length, len(text) - 1))))
    return Example(text[:first], text[first:])


def _clean_rows(
    prompt: NDArray[np.integer], reply: NDArray[np.integer], layout: PackingLayout
) -> RowArray:
    text = np.concatenate([prompt, reply]).astype(np.int32)
    rows = np.empty((len(FIELDS), len(text)), np.int32)
    rows[TOKEN] = text
    rows[TARGET, :-1] = text[1:]
    rows[TARGET, -1] = NONE
    if not layout.train_on_prompt:
        rows[TARGET, : len(prompt) - 1] = NONE
    rows[POSITION] = np.arange(len(text))
    rows[START] = rows[POSITION] + 1
    rows[CANVAS], rows[PINNED], rows[EXAMPLE], rows[RNG_KEY], rows[WEIGHT] = NONE, 0, 0, 0, 1
    return rows


def _canvas_rows(
    begin: int, text: CanvasText, corruption: Corruption, rng: np.random.Generator
) -> RowArray:
    """Make the rows of one noised copy of all canvases, starting at position `begin`."""
    count, length = text.clean_CL.shape
    noisy = corrupt(text, corruption, rng)
    rows = np.empty((len(FIELDS), count * length), np.int32)
    rows[TOKEN] = noisy.token_CL.ravel()
    rows[TARGET] = np.where(noisy.pinned_CL, NONE, text.clean_CL).ravel()
    rows[POSITION] = begin + np.arange(count * length)
    rows[CANVAS] = np.repeat(np.arange(count, dtype=np.int32), length)
    rows[START] = begin + rows[CANVAS] * length
    rows[PINNED] = noisy.pinned_CL.ravel()
    rows[EXAMPLE] = 0
    rows[RNG_KEY] = np.repeat(noisy.rng_key_C, length)
    rows[WEIGHT] = np.repeat(noisy.weight_C, length)
    return rows
