"""The windows of an edit: what is in doubt on a canvas is opened, one span after the other.

A window sees the edited text before it and the old text behind it. What is opened is searched like
holes are (`engine.search`), in sizes around the old one; the old text is among the candidates.
"""

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dgemma.constrain.edits import Patch, is_cut, open_spans, runs, whole_characters, whole_words
from dgemma.constrain.holes import Rules, Span, around
from dgemma.constrain.seams import is_whole
from dgemma.diffusion.sampler import Sampler
from dgemma.engine.candidates import given
from dgemma.engine.doubt import preference, surprise
from dgemma.engine.events import Draft
from dgemma.engine.fill import closing_ids, end_id
from dgemma.engine.search import Search, Sheet, Sizes, Tuning
from dgemma.engine.trials import SharedPrefix

if TYPE_CHECKING:
    from dgemma.engine.engine import Engine

EVERYTHING = float("-inf")  # a threshold that opens all
SCORED_AFTER = 8  # tokens behind an opened span that count in a score
LOOK_AHEAD = 32  # tokens behind a window that its canvas shows, where it has place
REJOINED = 3  # tokens of the old text by which the causal mode has come back to it
FURTHER = 8  # tokens that it may write beyond the old text's
LONG = 12  # tokens of a span from which on its size is varied by shares too
NEAR = (-1, 1)  # tokens more or fewer than the old text had


@dataclass(frozen=True, slots=True)
class Segment:
    """A stretch of the text that has its own prompt."""

    header: tuple[int, ...]
    context: tuple[int, ...]  # of the text before it
    text: str
    start: int  # in the whole text
    is_last: bool


@dataclass(frozen=True, slots=True)
class Tokens:
    """The text of a segment in tokens."""

    ids: tuple[int, ...]
    places: Sequence[Span]  # the characters of each
    allowed: Sequence[bool]  # whether it may change


@dataclass(frozen=True, slots=True, kw_only=True)
class Manner:
    """How all windows of an edit are filled."""

    is_told: bool  # by an instruction; else the text is corrected
    seed: int
    sampler: Sampler
    drafts: bool  # whether to report a canvas after each step


class Windows:
    """A segment's canvases from left to right. `steps` and `canvases` count what they took."""

    def __init__(
        self, engine: "Engine", segment: Segment, tokens: Tokens, threshold: float, manner: Manner
    ) -> None:
        self.engine, self.segment, self.manner = engine, segment, manner
        self.ids, self.places, self.allowed = tokens.ids, tokens.places, tokens.allowed
        self.threshold = threshold  # doubt from which on a token is opened
        self.length = engine.model.config.canvas_length
        # A window leaves a part of its canvas to what follows it.
        self.window = self.length - min(LOOK_AHEAD, self.length // 4)
        self.written = list(segment.context)  # the tokens before the window, edited
        self.patches: list[Patch] = []
        self.next_open = 0  # where the span behind the present one begins
        self.steps = self.canvases = 0

    def run(self) -> Generator[Draft, None, None]:
        """Fill what is opened, one span after the other: each sees the edited text before it."""
        start = 0
        while start < len(self.ids):
            stop = self._window_end(start)
            spans = self._find(start, stop) if any(self.allowed[start:stop]) else []
            changed = False
            while spans and not changed:
                span = spans.pop(0)
                self.next_open = spans[0][0] if spans else stop
                changed = yield from self._edit(start, span)
                start = span[1]
            if not changed:  # else the rest of the window is looked at anew
                self.written += self.ids[start:stop]
                start = stop

    def _window_end(self, start: int) -> int:
        """Where a window that begins here ends: at a whole character."""
        stop = last = min(start + self.window, len(self.ids))
        while stop > start and is_cut(self.places, stop):
            stop -= 1
        if stop > start:
            return stop
        while is_cut(self.places, last):  # a character longer than a window
            last += 1
        return last

    def _edit(self, start: int, span: Span) -> Generator[Draft, None, bool]:
        """Decide what stands in a span, and whether it differs from what stood there."""
        a, b = span
        self.written += self.ids[start:a]
        old = self._text(span)
        new = yield from self._fill(span, old)
        self.written += self.ids[a:b] if new == old else self.engine.tokenizer.encode(new)
        self.patches.append(Patch(self.places[a][0], self.places[b - 1][1], new))
        return new != old

    def _find(self, start: int, stop: int) -> list[Span]:
        """What to open of a window, in tokens of the segment."""
        allowed = self.allowed[start:stop]
        if self.threshold == EVERYTHING:
            found = runs(allowed)
        else:
            doubted = open_spans(self._doubts(start, stop), self.threshold, allowed)
            ids = self.ids[start:stop]
            found = whole_words(self.engine.tokenizer, ids, doubted, allowed)
        moved = [(start + a, start + b) for a, b in found]
        return whole_characters(moved, self.places)

    def _doubts(self, start: int, stop: int) -> list[float]:
        canvas = self.ids[start : max(start + self.length, stop)]
        room = max(0, self.length - len(canvas))
        if self._reaches_end(start + len(canvas)):
            canvas += (*self._closing(), *[end_id(self.engine)] * room)[:room]
        shared = SharedPrefix(self.engine, (*self.segment.header, *self.written))
        try:
            if not self.manner.is_told:
                return preference(shared, canvas, stop - start)
            return surprise(shared, canvas, stop - start, self.manner.seed)
        finally:
            shared.close()

    def _fill(self, span: Span, old: str) -> Generator[Draft, None, str]:
        """What is to stand in an opened span; the old text, unless something likelier is found."""
        a, b = span
        last = min(a + self.length, len(self.ids))
        after = (b, max(b, last))
        sheet = Sheet(
            header=self.segment.header,
            before=tuple(self.written),
            edge="",
            pieces=(self._text(after),),
            piece_ids=(self.ids[slice(*after)],),
            closing=self._closing() if self._reaches_end(last) else (),
            heal=self._is_forced(a),
        )
        tuning = Tuning(
            rules=Rules(allow_empty=True),
            seed=self.manner.seed,
            sampler=self.manner.sampler,
            end=end_id(self.engine),
            drafts=self.manner.drafts,
            # What is itself in doubt tells nothing: a name not yet changed would keep this one.
            scored_after=max(1, min(SCORED_AFTER, self.next_open - b)),
        )
        search = Search(self.engine, sheet, tuning)
        proposed = self._propose(search, b - a)
        known = [old] if proposed is None else [old, proposed]
        sizes = self._sizes(b - a, None if proposed is None else len(self._encode(proposed)))
        found = yield from search.run(sizes, [given((text,), sizes.first) for text in known])
        self.steps += search.steps
        self.canvases += search.canvases
        return found[0].fills[0]

    def _propose(self, search: Search, size: int) -> str | None:
        """What the causal mode would write in an opened span, if it comes back to the old text."""
        if not self.manner.is_told:
            return None
        goal = search.seams.tight.gaps[0].after[:REJOINED]
        ids = search.shared.rejoin(goal, size + FURTHER) if goal else None
        data = b"" if ids is None else self.engine.tokenizer.decode_bytes(ids, skip_control=True)
        edge = search.seams.edge
        if ids is None or not data.startswith(edge) or not is_whole(data[len(edge) :]):
            return None
        return data[len(edge) :].decode()

    def _is_forced(self, token: int) -> bool:
        """Whether a selection begins here in the middle of what would be one token."""
        seam = self.ids[max(0, token - 1) : token + 1]
        data = self.engine.tokenizer.decode_bytes(seam)
        return len(seam) == 2 and is_whole(data) and tuple(self._encode(data.decode())) != seam

    def _encode(self, text: str) -> list[int]:
        return self.engine.tokenizer.encode(text)

    def _sizes(self, size: int, proposed: int | None) -> Sizes:
        near = {size + more for more in NEAR}
        if size > LONG:
            near |= set(around(size, 2 * size))
        if proposed is not None:
            near.add(proposed)
        if self.threshold == EVERYTHING:
            near.add(0)
        choices = tuple(sorted(one for one in near if one >= 0))
        return Sizes(first=(size,), choices=(choices,), limits=(size,), refine=False)

    def _text(self, span: Span) -> str:
        """The old text of some tokens that part no character, or end inside one of them."""
        a, b = span
        if a >= b:
            return ""
        return self.segment.text[self.places[a][0] : self.places[b - 1][1]]

    def _reaches_end(self, token: int) -> bool:
        return self.segment.is_last and token >= len(self.ids)

    def _closing(self) -> tuple[int, ...]:
        return closing_ids(self.engine, is_turn=self.manner.is_told)
