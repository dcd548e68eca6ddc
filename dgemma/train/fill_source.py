"""Texts asked for as `fill` asks an instruct model: shown with holes, then told whole.

The user's turn shows the text with a mark in the place of some lines, and the reply is the text
itself. Most of it is copied, which is soon learned; the lines are not. So the causal mode, too,
learns to write what stands between two sides: it has read the one behind the hole in the prompt.
Lines are opened anew at each draw, in tokens: no file could hold all the ways.

N tokens of a text.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from dgemma.constrain.holes import MARK, REQUEST
from dgemma.errors import UsageError
from dgemma.text.chat import ChatTemplate, Message
from dgemma.text.tokenizer import Tokenizer
from dgemma.train.lines import LineTokens, Span
from dgemma.train.rows import Example
from dgemma.train.store import Store

ONE = 0.4  # of the texts, those with one hole, as most are asked for
MOST_OPENED = 0.5  # of the lines of a text
TRIES = 64  # texts in a row without a line of code
TURN_ENDS = "<turn|>"


class FillSource:
    """Texts of a store that have lines of code."""

    def __init__(self, store: Store, tokenizer: Tokenizer, template: ChatTemplate) -> None:
        if len(store) == 0 or store.prompts_E.any():
            raise UsageError("a fill source needs plain texts, and some: no pairs, no chats")
        self.store, self.lines = store, LineTokens.of(tokenizer)
        # Between line breaks and after blanks the mark's tokens are always these.
        self.mark = np.array(tokenizer.encode(MARK))
        said = template.prompt([Message(role="user", content=f"{REQUEST}\n\n{MARK}")]).ids
        place = _find(said, self.mark.tolist())
        self.before, self.after = np.array(said[:place]), np.array(said[place + len(self.mark) :])
        self.controls = np.array([*tokenizer.control_ids.values()])
        self.end = tokenizer.control_ids[TURN_ENDS]
        # A template trims what it is told.
        self.trimmed_V = self.lines.breaks_V | self.lines.blank_V

    def draw(self, rng: np.random.Generator, count: int) -> list[Example]:
        return [self._one(rng) for _ in range(count)]

    def _one(self, rng: np.random.Generator) -> Example:
        for _ in range(TRIES):
            _, text_N = self.store[int(rng.integers(len(self.store)))]
            text_N = self._trim(text_N[~np.isin(text_N, self.controls)])
            lines = self.lines.spans(np.append(text_N, self.lines.breaks_V.argmax()))
            if lines:
                return self.example(text_N, opened(lines, rng))
        raise UsageError(f"{TRIES} texts in a row have no line of code; this is no source of any")

    def example(self, text_N: NDArray[np.integer], holes: Sequence[Span]) -> Example:
        """A text shown with these holes, and told."""
        starts, stops = [0, *(stop for _, stop in holes)], [*(a for a, _ in holes), len(text_N)]
        shown = [self.before]
        for number, (start, stop) in enumerate(zip(starts, stops, strict=True)):
            shown += [self.mark] if number else []
            shown.append(text_N[start:stop])
        return Example(np.concatenate([*shown, self.after]), np.append(text_N, self.end))

    def _trim(self, text_N: NDArray[np.integer]) -> NDArray[np.integer]:
        kept = np.flatnonzero(~self.trimmed_V[text_N])
        return text_N[kept[0] : kept[-1] + 1] if len(kept) else text_N[:0]


def opened(lines: Sequence[Span], rng: np.random.Generator) -> list[Span]:
    """One of the lines, or up to half of them, in their order."""
    most = 1 if rng.random() < ONE else max(1, int(MOST_OPENED * len(lines)))
    count = int(rng.integers(1, most, endpoint=True))
    return [lines[int(i)] for i in np.sort(rng.permutation(len(lines))[:count])]


def _find(ids: Sequence[int], part: Sequence[int]) -> int:
    for place in range(len(ids)):
        if list(ids[place : place + len(part)]) == list(part):
            return place
    raise UsageError(f"the template does not show {MARK} as it stands; it cannot ask for holes")
