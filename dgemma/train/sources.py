"""Sources of training examples: token stores, infill prompts made from plain texts, puzzles.

N tokens of a text, E examples.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from dgemma.errors import UsageError
from dgemma.programs.infill.document import REQUEST
from dgemma.text.chat import ChatTemplate, Message
from dgemma.text.control_tokens import FILL_MARK, TURN_END
from dgemma.text.tokenizer import Tokenizer
from dgemma.train.corruption import LineTokens, TokenSpan
from dgemma.train.packing import Example, PackingLayout
from dgemma.train.sudoku import SudokuBank, SudokuSource
from dgemma.train.tokens import TokenStore

SINGLE_HOLE_FRACTION = 0.4  # of the infill prompts: those with one hole, the usual request
MAX_OPEN_LINES = 0.5  # fraction of a text's lines
MAX_ATTEMPTS = 64  # texts in a row without a code line


class Source(Protocol):
    def draw(
        self, rng: np.random.Generator, count: int
    ) -> Sequence[tuple[NDArray[np.integer], NDArray[np.integer]]]:
        """Draw prompts and replies."""


class StoreSource:
    """Examples of a token store, drawn uniformly and with replacement."""

    def __init__(self, store: TokenStore) -> None:
        if len(store) == 0:
            raise UsageError("a token store has no examples; were they all too long?")
        self.store = store

    def draw(self, rng: np.random.Generator, count: int) -> list[Example]:
        return [Example(*self.store[int(i)]) for i in rng.integers(len(self.store), size=count)]

    def prompts(self) -> Iterator[tuple[int, ...]]:
        """Yield the prompts of chats; plain text has none."""
        for index in range(len(self.store)):
            prompt = self.store[index][0]
            if len(prompt):
                yield tuple(map(int, prompt))

    def length_warnings(self, layout: PackingLayout) -> list[str]:
        """Count the pairs that do not fit a sequence, even with the shortest canvas."""
        store = self.store
        reply_E = np.diff(store.starts_E) - store.prompts_E
        canvases_E = (layout.max_rows - store.prompts_E) // layout.rows_per_canvas
        is_pair_E = store.prompts_E > 0  # plain text may be cut anywhere
        unused_E = is_pair_E & (canvases_E < 1)
        cut_E = is_pair_E & ~unused_E & (canvases_E * layout.canvas_length < reply_E)
        rows = f"{layout.max_rows} rows, which a text shares with its canvases; raise [batch] rows"
        return [
            f"{count} of {len(store)} {what} {rows}"
            for count, what in (
                (int(unused_E.sum()), "examples are not used: prompt and canvas do not fit into"),
                (int(cut_E.sum()), "replies are learned without their ends, which do not fit into"),
            )
            if count
        ]


class InfillSource:
    """Infill prompts: a document with holes in its code lines, and the whole text as reply.

    The prompts that `fill` sends to an instruct model. Most of the reply is copied, which is
    learned quickly; the opened lines are not. The causal mode thus learns to infill, since the
    prompt contains the text after the hole. Lines are opened anew at each draw.
    """

    def __init__(self, store: TokenStore, tokenizer: Tokenizer, template: ChatTemplate) -> None:
        if len(store) == 0 or store.prompts_E.any():
            raise UsageError("an infill source needs plain texts, and some: no pairs, no chats")
        self.store, self.lines = store, LineTokens.of(tokenizer)
        # Between line breaks and after whitespace the mark's tokens are always these.
        self.mark = np.array(tokenizer.encode(FILL_MARK))
        prompt = template.prompt([Message(role="user", content=f"{REQUEST}\n\n{FILL_MARK}")]).ids
        start = _find_sequence(prompt, self.mark.tolist())
        self.before = np.array(prompt[:start])
        self.after = np.array(prompt[start + len(self.mark) :])
        self.controls = np.array([*tokenizer.control_ids.values()])
        self.turn_end = tokenizer.control_ids[TURN_END]
        # A template strips a message's content.
        self.stripped_V = self.lines.breaks_V | self.lines.blank_V

    def draw(self, rng: np.random.Generator, count: int) -> list[Example]:
        return [self._draw_one(rng) for _ in range(count)]

    def _draw_one(self, rng: np.random.Generator) -> Example:
        for _ in range(MAX_ATTEMPTS):
            _, text_N = self.store[int(rng.integers(len(self.store)))]
            text_N = self._strip(text_N[~np.isin(text_N, self.controls)])
            lines = self.lines.spans(np.append(text_N, self.lines.breaks_V.argmax()))
            if lines:
                return self.example(text_N, choose_holes(lines, rng))
        raise UsageError(
            f"{MAX_ATTEMPTS} texts in a row have no line of code; as_infill needs texts with code"
        )

    def example(self, text_N: NDArray[np.integer], holes: Sequence[TokenSpan]) -> Example:
        """Make the prompt that shows a text with these holes, and the text as reply."""
        starts = [0, *(stop for _, stop in holes)]
        stops = [*(start for start, _ in holes), len(text_N)]
        prompt = [self.before]
        for number, (start, stop) in enumerate(zip(starts, stops, strict=True)):
            prompt += [self.mark] if number else []
            prompt.append(text_N[start:stop])
        reply = np.append(text_N, self.turn_end)
        return Example(np.concatenate([*prompt, self.after]), reply)

    def _strip(self, text_N: NDArray[np.integer]) -> NDArray[np.integer]:
        solid = np.flatnonzero(~self.stripped_V[text_N])
        return text_N[solid[0] : solid[-1] + 1] if len(solid) else text_N[:0]


def choose_holes(lines: Sequence[TokenSpan], rng: np.random.Generator) -> list[TokenSpan]:
    """Choose one line, or up to half of the lines, in order."""
    is_single = rng.random() < SINGLE_HOLE_FRACTION
    max_count = 1 if is_single else max(1, int(MAX_OPEN_LINES * len(lines)))
    count = int(rng.integers(1, max_count, endpoint=True))
    return [lines[int(i)] for i in np.sort(rng.permutation(len(lines))[:count])]


def _find_sequence(ids: Sequence[int], needle: Sequence[int]) -> int:
    for start in range(len(ids)):
        if list(ids[start : start + len(needle)]) == list(needle):
            return start
    raise UsageError(
        f"the chat template changes {FILL_MARK} in a message; infill prompts cannot be made with it"
    )


def puzzle_source(bank: Path, tokenizer_dir: Path) -> Source:
    """Open a bank of Sudoku."""
    tokenizer = Tokenizer.load(tokenizer_dir)
    template = ChatTemplate.load(tokenizer_dir, tokenizer)
    return SudokuSource(SudokuBank.load(bank), tokenizer, template)
