"""Windows of an edit: surprising tokens on a canvas are opened, one span after the other.

A window shows the edited text before it and the old text after it. An opened span is searched like
a hole (`infill.search`), in lengths around the old one; the old text is one of the candidates.

Tokens are opened by one of two scores (numbers: docs/fill-and-edit.md). With an instruction: causal
surprisal plus surprisal on a canvas that masks every second token. Without one: how much the canvas
prefers another token, corrected for its copy bias.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile
from math import log
from typing import TYPE_CHECKING

import torch

from dgemma.backends.base import CanvasQuery
from dgemma.diffusion.canvas import Noise
from dgemma.diffusion.sampler import Sampler
from dgemma.engine.params import Cost, SamplingParams
from dgemma.engine.request import Prefix, Program
from dgemma.engine.scoring import CanvasScoring, Prefill, Scoring
from dgemma.programs.edit.spans import (
    Patch,
    marked_spans,
    spans_above,
    splits_character,
    widen_to_characters,
    widen_to_words,
)
from dgemma.programs.infill.candidates import (
    Candidate,
    CandidateConfig,
    CandidatePool,
    InfillPrompt,
)
from dgemma.programs.infill.document import FillRules, Span, nearby_lengths
from dgemma.programs.infill.healing import is_utf8
from dgemma.programs.infill.infill import closing_ids, end_id
from dgemma.programs.infill.search import LengthGrid, Search
from dgemma.text.chat import Prompt

if TYPE_CHECKING:
    from dgemma.engine.engine import Engine

OPEN_ALL = float("-inf")  # a threshold that opens every token
SCORED_AFTER = 8  # scored tokens after an opened span
VISIBLE_AFTER = 32  # tokens shown after a window, if the canvas has room
REJOIN_TOKENS = 3  # old tokens that must match for the causal mode to rejoin the old text
MAX_EXTRA_TOKENS = 8  # tokens it may write beyond the old length
MIN_LONG_SPAN = 12  # from this length, lengths also vary by ratios
LENGTH_CHANGES = (-1, 1)  # tried changes of length, in tokens
CLEAN_FRACTION = 0.95  # fraction of tokens assumed to be right, for the copy bias
NUM_HALVES = 2  # canvases that together mask each token once


@dataclass(frozen=True, slots=True)
class EditSegment:
    """A stretch of the text with its own prompt."""

    header: tuple[int, ...]
    context: tuple[int, ...]  # tokens of the text before it
    text: str
    start: int  # in the whole text
    is_last: bool


@dataclass(frozen=True, slots=True)
class SegmentTokens:
    """The tokens of a segment."""

    ids: tuple[int, ...]
    characters: Sequence[Span]  # of each token
    allowed: Sequence[bool]  # True if it may change


@dataclass(frozen=True, slots=True, kw_only=True)
class EditConfig:
    """Settings of all windows of an edit."""

    has_instruction: bool  # False: replace words that the model doubts
    sampler: Sampler
    drafts: bool
    cost: Cost


class EditWindows:
    """The windows of a segment from left to right."""

    def __init__(
        self,
        engine: "Engine",
        segment: EditSegment,
        tokens: SegmentTokens,
        threshold: float,
        config: EditConfig,
    ) -> None:
        self.engine, self.segment, self.config = engine, segment, config
        self.ids, self.characters, self.allowed = tokens.ids, tokens.characters, tokens.allowed
        self.threshold = threshold  # score above which a token is opened
        self.length = engine.model.config.canvas_length
        self.window = self.length - min(VISIBLE_AFTER, self.length // 4)
        self.written = list(segment.context)  # the tokens before the window, edited
        self.patches: list[Patch] = []
        self.next_open = 0  # first token of the next opened span

    def run(self) -> Program[None]:
        """Fill the opened spans one after the other; each sees the edited text before it."""
        start = 0
        while start < len(self.ids):
            stop = self._window_end(start)
            is_open = any(self.allowed[start:stop])
            spans = (yield from self._find_spans(start, stop)) if is_open else []
            is_changed = False
            while spans and not is_changed:
                span = spans.pop(0)
                self.next_open = spans[0][0] if spans else stop
                is_changed = yield from self._edit_span(start, span)
                start = span[1]
            if not is_changed:  # else the rest of the window is scored again
                self.written += self.ids[start:stop]
                start = stop

    def _window_end(self, start: int) -> int:
        """Return the end of the window that starts here, between two characters."""
        stop = last = min(start + self.window, len(self.ids))
        while stop > start and splits_character(self.characters, stop):
            stop -= 1
        if stop > start:
            return stop
        while splits_character(self.characters, last):  # a character longer than a window
            last += 1
        return last

    def _edit_span(self, start: int, span: Span) -> Program[bool]:
        """Fill a span; True if it differs from the old text."""
        a, b = span
        self.written += self.ids[start:a]
        old = self._text(span)
        new = yield from self._fill(span, old)
        self.written += self.ids[a:b] if new == old else self.engine.tokenizer.encode(new)
        self.patches.append(Patch(self.characters[a][0], self.characters[b - 1][1], new))
        return new != old

    # --- which tokens to open

    def _find_spans(self, start: int, stop: int) -> Program[list[Span]]:
        """Return the spans of a window to open, in tokens of the segment."""
        allowed = self.allowed[start:stop]
        if self.threshold == OPEN_ALL:
            found = marked_spans(allowed)
        else:
            scores = yield from self._token_scores(start, stop)
            opened = spans_above(scores, self.threshold, allowed)
            ids = self.ids[start:stop]
            found = widen_to_words(self.engine.tokenizer, ids, opened, allowed)
        moved = [(start + a, start + b) for a, b in found]
        return widen_to_characters(moved, self.characters)

    def _token_scores(self, start: int, stop: int) -> Program[list[float]]:
        canvas = self.ids[start : max(start + self.length, stop)]
        num_left = max(0, self.length - len(canvas))
        if self._reaches_end(start + len(canvas)):
            padding = [end_id(self.engine)] * num_left
            canvas += (*self._closing(), *padding)[:num_left]
        (prefix,) = yield [Prefill((*self.segment.header, *self.written))]
        try:
            if self.config.has_instruction:
                return (yield from self._surprisal(prefix, canvas, stop - start))
            return (yield from self._preference(prefix, canvas, stop - start))
        finally:
            self.engine.keep(prefix)

    def _surprisal(
        self, prefix: Prefix, canvas: tuple[int, ...], count: int
    ) -> Program[list[float]]:
        """Surprisal in nats of the first `count` tokens of a canvas, summed over both modes."""
        halves = left_out_queries(
            canvas, count, self.config.cost.seed, self.engine.model.config.vocab_size
        )
        causal, left_out = yield [
            Scoring(prefix, [canvas[:count]]),
            CanvasScoring(prefix, halves),
        ]
        surprisal = [-logprob for logprob in causal[0].logprobs]
        for query, score in zip(halves, left_out, strict=True):
            for position, logprob in zip(query.positions, score.targets, strict=True):
                surprisal[position] -= logprob
        return surprisal

    def _preference(
        self, prefix: Prefix, canvas: tuple[int, ...], count: int
    ) -> Program[list[float]]:
        """Log-odds by which the canvas prefers another token, for its first `count` positions."""
        bias = copy_bias(self.engine.model.config.vocab_size)
        query = CanvasQuery(canvas, tuple(range(count)), canvas[:count], bias)
        ((score,),) = yield [CanvasScoring(prefix, [query])]
        return [best - own for best, own in zip(score.best, score.targets, strict=True)]

    # --- the text of a span

    def _fill(self, span: Span, old: str) -> Program[str]:
        """Return the text of an opened span: the old one, unless a better one is found."""
        pool = self._pool(span)
        return (yield from pool.run(self._search(pool, span[1] - span[0], old)))

    def _search(self, pool: CandidatePool, num_tokens: int, old: str) -> Program[str]:
        proposed = yield from self._propose(pool, num_tokens)
        length = None if proposed is None else len(self.engine.tokenizer.encode(proposed))
        grid = self._lengths(num_tokens, length)
        texts = [old] if proposed is None else [old, proposed]
        known = [Candidate(fills=(text,), lengths=grid.first) for text in texts]
        ranked = yield from Search(pool, grid).run(known)
        return ranked[0].fills[0]

    def _pool(self, span: Span) -> CandidatePool:
        a, b = span
        last = min(a + self.length, len(self.ids))
        after = (b, max(b, last))
        prompt = InfillPrompt(
            header=self.segment.header,
            before=tuple(self.written),
            edge="",
            pieces=(self._text(after),),
            piece_ids=(self.ids[slice(*after)],),
            closing=self._closing() if self._reaches_end(last) else (),
            heal=self._splits_token(a),
        )
        config = CandidateConfig(
            rules=FillRules(allow_empty=True),
            seed=self.config.cost.seed,
            sampler=self.config.sampler,
            end_id=end_id(self.engine),
            drafts=self.config.drafts,
            # Text still to be opened is not evidence: an unchanged name would preserve this one.
            scored_after=max(1, min(SCORED_AFTER, self.next_open - b)),
        )
        return CandidatePool(self.engine, prompt, config, self.config.cost)

    def _propose(self, pool: CandidatePool, num_tokens: int) -> Program[str | None]:
        """Return the causal mode's text for a span, if it rejoins the old text."""
        goal = pool.healing.none.holes[0].after[:REJOIN_TOKENS]
        if not self.config.has_instruction or not goal:
            return None
        ids = yield from self._write_until(pool.prefix, goal, num_tokens + MAX_EXTRA_TOKENS)
        if ids is None:
            return None
        data = self.engine.tokenizer.decode_bytes(ids, skip_control=True)
        edge = pool.healing.edge
        if not data.startswith(edge) or not is_utf8(data[len(edge) :]):
            return None
        return data[len(edge) :].decode()

    def _write_until(
        self, prefix: Prefix, after: Sequence[int], limit: int
    ) -> Program[list[int] | None]:
        """Continue the prefix in AR until `after` follows; return the tokens before it.

        If `after` contains the end of the text, the text must end there. None if `after` does not
        follow within `limit` tokens.
        """
        is_control = self.engine.tokenizer.is_control
        goal = tuple(takewhile(lambda token: not is_control(token), after))
        must_end = len(goal) < len(after)
        num_free = self.engine.model.config.max_position_embeddings - len(prefix.ids)
        max_tokens = min(limit + len(goal) + 2, num_free)
        if max_tokens < 1:
            return None
        stop_sequence = () if must_end else goal
        params = SamplingParams(
            mode="ar", max_tokens=max_tokens, seed=0, stop_sequence=stop_sequence
        )
        task = self.engine.generation(Prompt(text="", ids=prefix.ids), params, prefix=prefix)
        (done,) = yield [task]
        num_before = len(done.ids) - len(goal)
        is_rejoined = num_before >= 0 and done.ids[num_before:] == goal
        if not is_rejoined or (must_end and done.finish != "stop"):
            return None
        return list(done.ids[:num_before])

    def _splits_token(self, token: int) -> bool:
        """True if a selection starts inside what would be one token."""
        pair = self.ids[max(0, token - 1) : token + 1]
        tokenizer = self.engine.tokenizer
        data = tokenizer.decode_bytes(pair)
        return len(pair) == 2 and is_utf8(data) and tuple(tokenizer.encode(data.decode())) != pair

    def _lengths(self, length: int, proposed: int | None) -> LengthGrid:
        near = {length + more for more in LENGTH_CHANGES}
        if length > MIN_LONG_SPAN:
            near |= set(nearby_lengths(length, 2 * length))
        if proposed is not None:
            near.add(proposed)
        if self.threshold == OPEN_ALL:
            near.add(0)
        options = tuple(sorted(n for n in near if n >= 0))
        return LengthGrid(first=(length,), options=(options,), limits=(length,), refine=False)

    def _text(self, span: Span) -> str:
        """Return the old text of a range of tokens."""
        a, b = span
        if a >= b:
            return ""
        return self.segment.text[self.characters[a][0] : self.characters[b - 1][1]]

    def _reaches_end(self, token: int) -> bool:
        return self.segment.is_last and token >= len(self.ids)

    def _closing(self) -> tuple[int, ...]:
        return closing_ids(self.engine, is_turn=self.config.has_instruction)


def left_out_queries(
    canvas: Sequence[int], count: int, seed: int, vocab_size: int
) -> list[CanvasQuery]:
    """Return two canvases, each with every second of the first `count` tokens as noise."""
    cpu = torch.device("cpu")
    noise = Noise(seed=seed).block(0, 0, len(canvas), vocab_size, cpu).tokens_NL[0].tolist()
    queries = []
    for half in range(NUM_HALVES):
        positions = tuple(range(half, count, NUM_HALVES))
        tokens = list(canvas)
        for position in positions:
            tokens[position] = noise[position]
        targets = tuple(canvas[position] for position in positions)
        queries.append(CanvasQuery(tuple(tokens), positions, targets))
    return [query for query in queries if query.positions]


def copy_bias(vocab_size: int) -> float:
    """Nats added to the logit of a token by its presence on the canvas.

    A canvas model predicts p(clean | canvas), which includes the position's own token. If a
    fraction `a` of the tokens is clean, the prediction without that token lowers its logit by log(1
    + vocab_size * a / (1 - a)) (arXiv:2605.22765).
    """
    return log(1 + vocab_size * CLEAN_FRACTION / (1 - CLEAN_FRACTION))
