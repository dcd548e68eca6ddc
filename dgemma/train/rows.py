"""An example as rows of a pass: its clean text, read causally, and its noised canvases.

A clean row holds a token of the text and is asked for the next one. A canvas row holds a token that
may be noise and is asked for the clean one. One pass holds both, so that gradients of the canvases
reach the text they look back on: there is no cache to stop them.

Rows are the columns of an int32 array, one line per field; `lot` is a random number of a canvas,
for what chance has still to decide about it; none where it decides nothing. `weight` says how many
rows it counts for.

N rows, C canvases, L canvas length.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int32]
NOTHING = -1  # asked for nothing; belongs to no canvas; belongs to no example


class Example(NamedTuple):
    """What stands before the first canvas, and what the canvases hold. Plain text has no prompt."""

    prompt: NDArray[np.integer]
    reply: NDArray[np.integer]


FIELDS = ("token", "target", "position", "canvas", "start", "pinned", "example", "lot", "weight")
TOKEN, TARGET, POSITION, CANVAS, START, PINNED, EXAMPLE, LOT, WEIGHT = range(len(FIELDS))
PADDING = np.array([0, NOTHING, 0, NOTHING, 1, 0, NOTHING, 0, 1], np.int32)


def real_rows(rows: Ints) -> list[int]:
    """How many rows of each sequence belong to an example."""
    return [int(count) for count in np.count_nonzero(rows[EXAMPLE] > NOTHING, axis=-1)]


class Tally(NamedTuple):
    """How many rows a batch has of each kind."""

    canvas: int  # canvas rows that are asked for something, each with its weight
    clean: int  # clean rows that are

    @classmethod
    def of(cls, rows: Ints) -> "Tally":
        is_asked = rows[TARGET] > NOTHING
        is_canvas = rows[CANVAS] > NOTHING
        canvas = rows[WEIGHT][is_asked & is_canvas].sum()
        return cls(int(canvas), int(np.count_nonzero(is_asked & ~is_canvas)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Corruption:
    """How canvases are noised.

    Most have every token replaced with one probability, the level, drawn evenly. Some have holes:
    spans whose tokens are replaced with a level that is mostly high, while all others are pinned,
    as in a text to be filled. Nothing is asked of pinned ones: no sampler looks at it.
    """

    vocab_size: int
    fill: int = 1  # the token that fills a last canvas
    lowest: float = 1e-4
    highest: float = 1.0 - 1e-4
    hole_share: float = 0.2  # of the canvases
    line_share: float = 0.0  # of these, those whose holes are lines, as code is filled
    canvas_weight: int = 1  # of what is asked in any canvas
    hole_weight: int = 1  # times that, of what is asked in a hole: a canvas with holes asks little
    breaks: tuple[int, ...] = ()  # tokens that break a line
    level_power: float = 1.0  # of the level, drawn evenly; below 1 high levels are oftener
    fill_share: float = 1.0  # of what fills a last canvas, that is asked for: it is soon learned
    rolls: bool = True  # whether steps of the sampler may change a canvas (`train/rollout.py`)


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """How one example is cut."""

    canvas_length: int
    max_rows: int
    copies: int = 1  # of each canvas, noised apart: the clean text serves them all
    learn_prompt: bool = True  # whether the causal pass is asked for the prompt's own tokens
    causal_share: float = 1.0  # of the examples, those that the causal pass is asked for at all

    @property
    def canvas_rows(self) -> int:
        """What a canvas costs: the rows of its copies and as many clean ones as it has tokens."""
        return (1 + self.copies) * self.canvas_length


def lay_out(
    example: Example, layout: Layout, corruption: Corruption, rng: np.random.Generator
) -> Ints | None:
    """The rows of an example, or None where not one canvas can be made of it."""
    prompt, reply = example
    if not len(prompt):
        prompt, reply = cut_text(reply, layout, corruption.breaks, rng)
    length = layout.canvas_length
    is_whole = len(reply) > 0 and ends(reply, example)
    count = -(-len(reply) // length) if is_whole else len(reply) // length
    count = min(count, (layout.max_rows - len(prompt)) // layout.canvas_rows)
    if count <= 0:
        return None
    clean = _clean_rows(prompt, reply[: count * length], layout)
    if layout.causal_share < 1 and rng.random() >= layout.causal_share:
        clean[TARGET] = NOTHING
    filled_CL = np.full(count * length, corruption.fill, np.int32)
    filled_CL[: len(reply)] = reply[: count * length]
    held_C = np.minimum(length, len(reply) - length * np.arange(count))
    canvases = [
        _canvas_rows(len(prompt), filled_CL.reshape(count, length), held_C, corruption, rng)
        for _ in range(layout.copies)
    ]
    for number, rows in enumerate(canvases):
        rows[CANVAS] += number * count
        if corruption.fill_share < 1:
            behind = rows[TARGET, len(reply) :]
            behind[rng.random(len(behind)) >= corruption.fill_share] = NOTHING
    return np.concatenate([clean, *canvases], axis=1)


def ends(reply: NDArray[np.integer], example: Example) -> bool:
    """Whether the text is over after `reply`: then its last canvas is filled up.

    A pair's reply is whole. A plain text may be a piece of a longer one: it is whole if it closes
    with the token that ends texts.
    """
    return bool(len(example.prompt)) or int(reply[-1]) == 1


def cut_text(
    text: NDArray[np.integer], layout: Layout, breaks: Sequence[int], rng: np.random.Generator
) -> Example:
    """Cut a plain text in two, so that canvases begin anywhere in it.

    With `breaks` half of them begin where a line does, or behind the token that indents it: so does
    the canvas of somebody who asks for a line.
    """
    most = max(1, min(layout.canvas_length, len(text) - 1))
    first = 1 + int(rng.integers(most))
    if breaks and rng.random() < 0.5:
        starts = 1 + np.flatnonzero(np.isin(text[:most], breaks))
        if len(starts):
            first = min(most, int(rng.choice(starts)) + int(rng.random() < 0.5))
    return Example(text[:first], text[first:])


def _clean_rows(prompt: NDArray[np.integer], reply: NDArray[np.integer], layout: Layout) -> Ints:
    text = np.concatenate([prompt, reply]).astype(np.int32)
    rows = np.empty((len(FIELDS), len(text)), np.int32)
    rows[TOKEN] = text
    rows[TARGET, :-1] = text[1:]
    rows[TARGET, -1] = NOTHING
    if not layout.learn_prompt:
        rows[TARGET, : len(prompt) - 1] = NOTHING
    rows[POSITION] = np.arange(len(text))
    rows[START] = rows[POSITION] + 1
    rows[CANVAS], rows[PINNED], rows[EXAMPLE], rows[LOT], rows[WEIGHT] = NOTHING, 0, 0, 0, 1
    return rows


def _canvas_rows(
    begin: int,
    clean_CL: Ints,
    held_C: NDArray[np.integer],
    corruption: Corruption,
    rng: np.random.Generator,
) -> Ints:
    """`held_C`: tokens of the text in each canvas; what fills it up comes behind them."""
    count, length = clean_CL.shape
    level_CL, pinned_CL = _levels(clean_CL, held_C, corruption, rng)
    noise_CL = rng.integers(corruption.vocab_size, size=clean_CL.shape, dtype=np.int32)
    is_noise_CL = rng.random(clean_CL.shape) < level_CL
    number_CL = np.repeat(np.arange(count, dtype=np.int32)[:, None], length, axis=1)
    rows = np.empty((len(FIELDS), count * length), np.int32)
    rows[TOKEN] = np.where(is_noise_CL, noise_CL, clean_CL).ravel()
    rows[TARGET] = np.where(pinned_CL, NOTHING, clean_CL).ravel()
    rows[POSITION] = begin + np.arange(count * length)
    rows[CANVAS] = number_CL.ravel()
    rows[START] = begin + rows[CANVAS] * length
    rows[PINNED] = pinned_CL.ravel()
    rows[EXAMPLE] = 0
    lot_C = rng.integers(1 << 31, size=count, dtype=np.int32)
    rows[LOT] = np.repeat(lot_C, length) if corruption.rolls else NOTHING
    has_hole_C = pinned_CL.any(1)
    weight_C = corruption.canvas_weight * np.where(has_hole_C, corruption.hole_weight, 1)
    rows[WEIGHT] = np.repeat(weight_C, length)
    return rows


def _levels(
    clean_CL: Ints, held_C: NDArray[np.integer], corruption: Corruption, rng: np.random.Generator
) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
    """The probability of noise at each position, and the positions that are given."""
    count, length = clean_CL.shape
    level_C = rng.uniform(corruption.lowest, corruption.highest, count) ** corruption.level_power
    level_CL = np.repeat(level_C[:, None], length, axis=1)
    pinned_CL = np.zeros((count, length), bool)
    for canvas in np.flatnonzero(rng.random(count) < corruption.hole_share):
        # Not behind the text: of short ones a quarter of what is open would be mere fill.
        is_hole_L = np.zeros(length, bool)
        text = clean_CL[canvas, : held_C[canvas]]
        is_lines = corruption.line_share > 0 and rng.random() < corruption.line_share
        found = _lines(text, corruption.breaks, rng) if is_lines else _holes(len(text), rng)
        is_hole_L[: len(text)] = found
        # A hole begins as noise alone, so high levels matter more than in a whole canvas.
        level_CL[canvas] = np.where(is_hole_L, np.sqrt(level_C[canvas]), 0.0)
        pinned_CL[canvas] = ~is_hole_L
    return level_CL, pinned_CL


def _lines(text: Ints, breaks: Sequence[int], rng: np.random.Generator) -> NDArray[np.bool_]:
    """One to four lines without their breaks, half of them without the token that indents them.

    One is what is asked for; more of them teach more in as many rows. Half of the canvases begin
    with one. Where a text has no line to open, spans as elsewhere.
    """
    stops = np.flatnonzero(np.isin(text, breaks))
    starts = np.concatenate([[0], stops[:-1] + 1]).astype(int) if len(stops) else stops
    lines = [(a, b) for a, b in zip(starts, stops, strict=True) if b - a > 1]
    if not lines:
        return _holes(len(text), rng)
    is_hole_L = np.zeros(len(text), bool)
    for number in range(int(rng.integers(1, 5))):
        at_start = number == 0 and rng.random() < 0.5
        start, stop = lines[0 if at_start else int(rng.integers(len(lines)))]
        is_hole_L[start + int(start > 0 and rng.random() < 0.5) : stop] = True
    return is_hole_L


def _holes(length: int, rng: np.random.Generator) -> NDArray[np.bool_]:
    """One to three spans, short ones oftener; half of the canvases begin with one."""
    is_hole_L = np.zeros(length, bool)
    for number in range(int(rng.integers(1, 4))):
        size = min(length, int(np.exp(rng.uniform(np.log(2), np.log(max(3, 0.6 * length))))))
        at_start = number == 0 and rng.random() < 0.5
        first = 0 if at_start else int(rng.integers(length - size + 1))
        is_hole_L[first : first + size] = True
    return is_hole_L
