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

from dgemma.train.lines import LineTokens, Span

Ints = NDArray[np.int32]
NOTHING = -1  # asked for nothing; belongs to no canvas; belongs to no example
MOST_OPENED = 2 / 3  # of a canvas's lines
ECHO_REACH = 4  # positions


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
    lines: LineTokens | None = None  # what lines are, where any are to be opened
    level_power: float = 1.0  # of the level, drawn evenly; below 1 high levels are oftener
    fill_share: float = 1.0  # of what fills a last canvas, that is asked for: it is soon learned
    echo_share: float = 0.0  # of the noise, tokens that stand near it: a sampler's doubled words
    rolls: bool = True  # whether steps of the sampler may change a canvas (`train/rollout.py`)


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """How one example is cut."""

    canvas_length: int
    max_rows: int
    copies: int = 1  # of each canvas, noised apart: the clean text serves them all; 0: it alone
    learn_prompt: bool = True  # whether the causal pass is asked for the prompt's own tokens
    causal_share: float = 1.0  # of the examples, those that the causal pass is asked for at all

    @property
    def canvas_rows(self) -> int:
        """What a canvas costs: the rows of its copies and as many clean ones as it has tokens."""
        return (1 + self.copies) * self.canvas_length


class Reply(NamedTuple):
    """What canvases are made of."""

    clean_CL: Ints
    held_C: NDArray[np.integer]  # tokens of the text in each; what fills it up comes behind them
    lines: list[Span]  # where lines of code stand, counted from the first canvas; some before it


def lay_out(
    example: Example, layout: Layout, corruption: Corruption, rng: np.random.Generator
) -> Ints | None:
    """The rows of an example, or None where not one canvas can be made of it."""
    prompt, reply = example
    lines = [] if corruption.lines is None else corruption.lines.spans(reply)
    if not len(prompt):
        prompt, reply = cut_text(reply, layout, lines, rng)
        lines = [(start - len(prompt), stop - len(prompt)) for start, stop in lines]
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
    shown = Reply(filled_CL.reshape(count, length), held_C, lines)
    canvases = [_canvas_rows(len(prompt), shown, corruption, rng) for _ in range(layout.copies)]
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
    text: NDArray[np.integer], layout: Layout, lines: Sequence[Span], rng: np.random.Generator
) -> Example:
    """Cut a plain text in two, so that canvases begin anywhere in it.

    Where it has lines of code, half of them begin with one: so does the canvas of somebody who asks
    for a line.
    """
    starts = [start for start, _ in lines if start > 0]
    if starts and rng.random() < 0.5:
        first = starts[int(rng.integers(len(starts)))]
    else:
        first = 1 + int(rng.integers(max(1, min(layout.canvas_length, len(text) - 1))))
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
    begin: int, reply: Reply, corruption: Corruption, rng: np.random.Generator
) -> Ints:
    clean_CL = reply.clean_CL
    count, length = clean_CL.shape
    level_CL, pinned_CL = _levels(reply, corruption, rng)
    noise_CL = rng.integers(corruption.vocab_size, size=clean_CL.shape, dtype=np.int32)
    is_noise_CL = rng.random(clean_CL.shape) < level_CL
    if corruption.echo_share > 0:
        noise_CL = _echoed(noise_CL, clean_CL, is_noise_CL, corruption.echo_share, rng)
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


def _echoed(
    noise_CL: Ints,
    clean_CL: Ints,
    is_noise_CL: NDArray[np.bool_],
    share: float,
    rng: np.random.Generator,
) -> Ints:
    """Noise that in part repeats a token near it. Only tokens that stand there clean are repeated:
    others would tell of a text that is not to be seen.
    """
    length = clean_CL.shape[1]
    side_CL = 2 * rng.integers(2, size=clean_CL.shape) - 1
    source_CL = np.arange(length) + side_CL * rng.integers(1, ECHO_REACH + 1, size=clean_CL.shape)
    is_inside_CL = (source_CL >= 0) & (source_CL < length)
    source_CL = source_CL.clip(0, length - 1)
    is_seen_CL = is_inside_CL & ~np.take_along_axis(is_noise_CL, source_CL, axis=1)
    is_echo_CL = is_seen_CL & (rng.random(clean_CL.shape) < share)
    return np.where(is_echo_CL, np.take_along_axis(clean_CL, source_CL, axis=1), noise_CL)


def _levels(
    reply: Reply, corruption: Corruption, rng: np.random.Generator
) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
    """The probability of noise at each position, and the positions that are given."""
    count, length = reply.clean_CL.shape
    level_C = rng.uniform(corruption.lowest, corruption.highest, count) ** corruption.level_power
    level_CL = np.repeat(level_C[:, None], length, axis=1)
    pinned_CL = np.zeros((count, length), bool)
    for canvas in np.flatnonzero(rng.random(count) < corruption.hole_share):
        is_hole_L = np.zeros(length, bool)
        if corruption.line_share > 0 and rng.random() < corruption.line_share:
            for start, stop in _opened(lines_of(reply, int(canvas)), rng):
                is_hole_L[start:stop] = True
        else:
            # Not behind the text: of short ones a quarter of what is open would be mere fill.
            held = reply.held_C[canvas]
            is_hole_L[:held] = _holes(held, rng)
        if not is_hole_L.any():
            continue
        # A hole begins as noise alone, so high levels matter more than in a whole canvas.
        level_CL[canvas] = np.where(is_hole_L, np.sqrt(level_C[canvas]), 0.0)
        pinned_CL[canvas] = ~is_hole_L
    return level_CL, pinned_CL


def lines_of(reply: Reply, canvas: int) -> list[Span]:
    """Those that end on a canvas, which holds the last tokens of one that began before it."""
    first, length = canvas * reply.clean_CL.shape[1], reply.clean_CL.shape[1]
    own = [(max(0, start - first), stop - first) for start, stop in reply.lines]
    return [(start, stop) for start, stop in own if start + 1 < stop <= length]


def _opened(lines: Sequence[Span], rng: np.random.Generator) -> list[Span]:
    """Up to two thirds of the lines; the first is one of them for half of the canvases.

    One is what is asked for, more of them teach more in as many rows. None where there are none.
    """
    count = min(len(lines), 1 + int(rng.random() * MOST_OPENED * len(lines)))
    chosen = rng.permutation(len(lines))[:count]
    if count and rng.random() < 0.5:
        chosen[0] = 0  # twice, perhaps: it is opened once
    return [lines[int(number)] for number in chosen]


def _holes(length: int, rng: np.random.Generator) -> NDArray[np.bool_]:
    """One to three spans, short ones oftener; half of the canvases begin with one."""
    is_hole_L = np.zeros(length, bool)
    for number in range(int(rng.integers(1, 4))):
        size = min(length, int(np.exp(rng.uniform(np.log(2), np.log(max(3, 0.6 * length))))))
        at_start = number == 0 and rng.random() < 0.5
        first = 0 if at_start else int(rng.integers(length - size + 1))
        is_hole_L[first : first + size] = True
    return is_hole_L
