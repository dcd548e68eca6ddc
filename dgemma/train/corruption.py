"""Corruption of canvases: uniform noise at a random level, or holes in an otherwise pinned text.

All draws come from the batch's own generator, so that a batch is a function of seed and step.

Holes may be whole lines of code, as a user would ask to have filled in. Lines of docstrings are
left out: they are a third of the tokens of documented functions, each holds more than a line of
code, and nobody infills one from the code around it. So are headers and comments.

C canvases of a text, L canvas length, N tokens of a text, V vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from dgemma.text.tokenizer import Tokenizer

NONE = -1  # no target, no canvas, no example, no rng key
EOS_ID = 1  # <eos> in the tokenizers of Gemma
MAX_OPEN_LINES = 2 / 3  # fraction of a canvas's lines
MAX_REPEAT_DISTANCE = 4  # positions
MAX_RAMP, LEFT_LEVEL = 48, 0.02  # positions from clean to noise; the level of what is clean

MIN_LINE_TOKENS = 3
# Beginnings of lines that name something new, which cannot be predicted, or that say nothing.
SKIPPED_STARTS = (b"#", b"@", b"def", b"async", b"class", b"...")
QUOTES = (b'"""', b"'''")

RowArray = NDArray[np.int32]
TokenSpan = tuple[int, int]


@dataclass(frozen=True, slots=True, eq=False)
class LineTokens:
    """Classes of tokens that matter for finding lines; one flag per token of the vocabulary."""

    breaks_V: NDArray[np.bool_]  # ends a line
    blank_V: NDArray[np.bool_]  # whitespace only: indentation at the start of a line
    quotes_V: NDArray[np.bool_]  # opens or closes a triple-quoted string
    skipped_V: NDArray[np.bool_]  # starts a line that is not code to fill in

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> "LineTokens":
        texts = [
            b"" if tokenizer.is_control(token) else tokenizer.token_bytes(token)
            for token in range(tokenizer.vocab_size)
        ]
        is_quote = [sum(text.count(mark) for mark in QUOTES) % 2 for text in texts]
        return cls(
            breaks_V=np.array([b"\n" in text for text in texts]),
            blank_V=np.array([bool(text) and not text.strip(b" \t") for text in texts]),
            quotes_V=np.array(is_quote, bool),
            skipped_V=np.array([text.lstrip().startswith(SKIPPED_STARTS) for text in texts]),
        )

    def spans(self, text_N: NDArray[np.integer]) -> list[TokenSpan]:
        """Find the code lines of a text, each without its indentation and line break.

        The text must not begin inside a docstring: quotes are counted from its start.
        """
        is_quote_N = self.quotes_V[text_N]
        is_string_N = is_quote_N | (is_quote_N.cumsum() % 2 > 0)
        stops = np.flatnonzero(self.breaks_V[text_N])
        starts = np.concatenate([[0], stops[:-1] + 1]) if len(stops) else stops
        starts = starts + self.blank_V[text_N[starts]]
        is_code = stops - starts >= MIN_LINE_TOKENS
        is_code &= ~self.skipped_V[text_N[np.minimum(starts, stops)]]
        return [
            (int(start), int(stop))
            for start, stop in zip(starts[is_code], stops[is_code], strict=True)
            if not is_string_N[start:stop].any()
        ]


@dataclass(frozen=True, slots=True, kw_only=True)
class NoiseSettings:
    """Noise of a source's canvases and their weight in the loss, as a recipe may set them."""

    noise_level_power: float = 1.0  # noise levels are u^power, u ~ U(0, 1); 0.5: mostly high levels
    # fraction of its noise that copies a clean token up to four positions away
    repeat_noise_fraction: float = 0.0
    # fraction of its canvases with holes whose holes are whole code lines, one to two thirds of
    # them, without docstrings, headers and comments. Half of its texts are split at a line then
    line_hole_fraction: float = 0.0
    # fraction of its canvases without holes that are clean on the left and noise on the right, with
    # up to 48 positions between: what a sampler leaves that accepts from left to right
    ordered_fraction: float = 0.0
    # weight of its canvas rows in the loss, against other sources' that are further from learned
    canvas_loss_weight: int = 1
    # further weight of canvases with holes, which have few targets
    hole_loss_weight: int = 1
    # whether `rollout_fraction` and `persistent_sequences` are for it; false where more than one
    # reply is right, or the model learns to distrust its own samples
    on_policy: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Corruption(NoiseSettings):
    """Noise of the canvases of a source.

    In most canvases every token is replaced with the same probability, the noise level, drawn from
    U(0, 1). In some only spans (holes) are noised, at levels that are mostly high, and all other
    tokens are pinned, as in a text to infill. Pinned tokens have no target: no sampler reads them.
    In others the level rises from left to right, as a sampler that accepts in that order has them.
    """

    vocab_size: int
    eos_id: int = EOS_ID  # ends a text, and pads its last canvas
    min_level: float = 1e-4
    max_level: float = 1.0 - 1e-4
    hole_fraction: float = 0.2  # of the canvases
    lines: LineTokens | None = None  # needed for holes of lines
    padding_loss_fraction: float = 1.0  # of the padding of a last canvas: positions with a target


class CanvasText(NamedTuple):
    """The clean text of an example's canvases."""

    clean_CL: RowArray
    length_C: NDArray[np.integer]  # tokens of the text in each canvas; the rest is padding
    lines: list[
        TokenSpan
    ]  # code lines, counted from the first canvas; the first may begin before it


class NoisyCanvases(NamedTuple):
    token_CL: RowArray
    pinned_CL: NDArray[np.bool_]
    rng_key_C: RowArray  # seeds the sampler steps of a canvas; NONE: no such steps
    weight_C: NDArray[np.integer]


def corrupt(text: CanvasText, corruption: Corruption, rng: np.random.Generator) -> NoisyCanvases:
    """Noise each canvas of a text once."""
    clean_CL = text.clean_CL
    level_CL, pinned_CL = _noise_levels(text, corruption, rng)
    noise_CL = rng.integers(corruption.vocab_size, size=clean_CL.shape, dtype=np.int32)
    is_noise_CL = rng.random(clean_CL.shape) < level_CL
    if corruption.repeat_noise_fraction > 0:
        fraction = corruption.repeat_noise_fraction
        noise_CL = _repeat_neighbours(noise_CL, clean_CL, is_noise_CL, fraction, rng)
    rng_key_C = rng.integers(1 << 31, size=len(clean_CL), dtype=np.int32)
    hole_weight_C = np.where(pinned_CL.any(1), corruption.hole_loss_weight, 1)
    return NoisyCanvases(
        token_CL=np.where(is_noise_CL, noise_CL, clean_CL),
        pinned_CL=pinned_CL,
        rng_key_C=rng_key_C if corruption.on_policy else np.full_like(rng_key_C, NONE),
        weight_C=corruption.canvas_loss_weight * hole_weight_C,
    )


def _noise_levels(
    text: CanvasText, corruption: Corruption, rng: np.random.Generator
) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
    """Draw the probability of noise at each position, and the pinned positions."""
    count, length = text.clean_CL.shape
    level_C = rng.uniform(corruption.min_level, corruption.max_level, count)
    level_C = level_C**corruption.noise_level_power
    level_CL = np.repeat(level_C[:, None], length, axis=1)
    pinned_CL = np.zeros((count, length), bool)
    for canvas in np.flatnonzero(rng.random(count) < corruption.hole_fraction):
        is_hole_L = np.zeros(length, bool)
        if corruption.line_hole_fraction > 0 and rng.random() < corruption.line_hole_fraction:
            for start, stop in _choose_lines(canvas_lines(text, int(canvas)), rng):
                is_hole_L[start:stop] = True
        else:
            # Not in the padding: with short texts a quarter of the holes would be mere padding.
            text_length = text.length_C[canvas]
            is_hole_L[:text_length] = _random_spans(text_length, rng)
        if not is_hole_L.any():
            continue
        # A hole starts as pure noise, so high levels matter more than in a whole canvas.
        level_CL[canvas] = np.where(is_hole_L, np.sqrt(level_C[canvas]), 0.0)
        pinned_CL[canvas] = ~is_hole_L
    if corruption.ordered_fraction > 0:
        is_ordered_C = ~pinned_CL.any(1) & (rng.random(count) < corruption.ordered_fraction)
        for canvas in np.flatnonzero(is_ordered_C):
            level_CL[canvas] = _rising_levels(length, int(text.length_C[canvas]), rng)
    return level_CL, pinned_CL


def _rising_levels(length: int, text_length: int, rng: np.random.Generator) -> NDArray[np.float64]:
    """Draw levels that rise to 1 within a few positions, from a random one of the text on."""
    ramp = np.exp(rng.uniform(0, np.log(MAX_RAMP)))
    start = rng.uniform(-ramp, text_length)
    level_L: NDArray[np.float64] = (np.arange(length) - start) / ramp
    return level_L.clip(LEFT_LEVEL, 1.0)


def canvas_lines(text: CanvasText, canvas: int) -> list[TokenSpan]:
    """Find the lines that end in a canvas; of one that began before it, the part inside."""
    length = text.clean_CL.shape[1]
    first = canvas * length
    spans = [(max(0, start - first), stop - first) for start, stop in text.lines]
    return [(start, stop) for start, stop in spans if start + 1 < stop <= length]


def _choose_lines(lines: Sequence[TokenSpan], rng: np.random.Generator) -> list[TokenSpan]:
    """Choose one to two thirds of the lines, in half of the canvases the first among them.

    Users ask for one; opening more of them gives more targets per row.
    """
    count = min(len(lines), 1 + int(rng.random() * MAX_OPEN_LINES * len(lines)))
    chosen = rng.permutation(len(lines))[:count]
    if count and rng.random() < 0.5:
        chosen[0] = 0  # perhaps chosen twice, which opens it once
    return [lines[int(number)] for number in chosen]


def _random_spans(length: int, rng: np.random.Generator) -> NDArray[np.bool_]:
    """Draw one to three spans of log-uniform length; half of the canvases begin with one."""
    is_hole_L = np.zeros(length, bool)
    for number in range(int(rng.integers(1, 4))):
        size = min(length, int(np.exp(rng.uniform(np.log(2), np.log(max(3, 0.6 * length))))))
        at_start = number == 0 and rng.random() < 0.5
        first = 0 if at_start else int(rng.integers(length - size + 1))
        is_hole_L[first : first + size] = True
    return is_hole_L


def _repeat_neighbours(
    noise_CL: RowArray,
    clean_CL: RowArray,
    is_noise_CL: NDArray[np.bool_],
    fraction: float,
    rng: np.random.Generator,
) -> RowArray:
    """Replace a fraction of the noise by a token nearby, as a sampler doubles words.

    Only tokens that are clean on this canvas are copied: others would leak hidden text.
    """
    length = clean_CL.shape[1]
    side_CL = 2 * rng.integers(2, size=clean_CL.shape) - 1
    distance_CL = rng.integers(1, MAX_REPEAT_DISTANCE + 1, size=clean_CL.shape)
    source_CL = np.arange(length) + side_CL * distance_CL
    is_inside_CL = (source_CL >= 0) & (source_CL < length)
    source_CL = source_CL.clip(0, length - 1)
    is_clean_CL = is_inside_CL & ~np.take_along_axis(is_noise_CL, source_CL, axis=1)
    is_repeat_CL = is_clean_CL & (rng.random(clean_CL.shape) < fraction)
    return np.where(is_repeat_CL, np.take_along_axis(clean_CL, source_CL, axis=1), noise_CL)
