"""Texts with holes: the pieces around them, the seams, the canvas, and what a canvas said.

Everything here is pure: strings, ids and positions. The promise that nothing outside a hole changes
is kept by construction: a filled text is joined from the given pieces themselves, never from what
their tokens decode to.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from dgemma.constrain.seams import Gap, is_word
from dgemma.diffusion.canvas import Pins
from dgemma.errors import UsageError
from dgemma.text.stream import StopStrings
from dgemma.text.tokenizer import Tokenizer, refuse_surrogates

MARK = "<|fill|>"  # in files; plain text that the reader splits on, never a token
REQUEST = "Complete the document."  # what an instruct model is told before one with marks
SHORTEST_OVERLAP = 12  # characters of the text behind a hole that are not repeated by chance
BREAKS = ("\n", "\r")
Span = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Holed:
    """A text with holes in it: one piece more than there are holes."""

    pieces: tuple[str, ...]

    def __post_init__(self) -> None:
        if len(self.pieces) < 2:
            raise UsageError(f"the text has no hole; write {MARK} where something is to be filled")
        for piece in self.pieces:
            refuse_surrogates(piece)

    @classmethod
    def read(cls, text: str, mark: str = MARK) -> "Holed":
        """Split a text at its marks."""
        return cls(tuple(text.split(mark)))

    @classmethod
    def cut(cls, text: str, spans: Sequence[Span]) -> "Holed":
        """Take spans of characters out of a text; an empty span is a hole between two characters.

        Spans are given in order and do not overlap.
        """
        check_spans(spans, len(text))
        starts = [0, *(stop for _, stop in spans)]
        stops = [*(start for start, _ in spans), len(text)]
        return cls(tuple(text[a:b] for a, b in zip(starts, stops, strict=True)))

    @property
    def count(self) -> int:
        return len(self.pieces) - 1

    def join(self, fills: Sequence[str]) -> str:
        """The text with its holes filled."""
        both = zip(self.pieces, [*fills, ""], strict=True)
        return "".join(piece + fill for piece, fill in both)

    def places(self, fills: Sequence[str]) -> list[Span]:
        """Where each fill stands in the joined text, in characters."""
        places, end = [], 0
        for piece, fill in zip(self.pieces, fills, strict=False):
            start = end + len(piece)
            end = start + len(fill)
            places.append((start, end))
        return places


def check_spans(spans: Sequence[Span], length: int) -> None:
    """Refuse spans that are out of order, overlap or lie outside the text."""
    end = 0
    for start, stop in spans:
        if not end <= start <= stop <= length:
            raise UsageError(
                f"the span {start}:{stop} is not one of a text of {length} characters; give spans "
                "in order, without overlap"
            )
        end = stop


# --- canvases


@dataclass(frozen=True, slots=True)
class Layout:
    """How holes of given sizes lie on a canvas."""

    length: int
    holes: tuple[Span, ...]  # positions
    pins: Pins


def lay_out(gaps: Sequence[Gap], sizes: Sequence[int], length: int, end: int) -> Layout:
    """Holes and what is known around them on a canvas of up to `length` positions.

    Where the text ends within the canvas, `end` fills it up, as in training.
    """
    holes: list[Span] = []
    pinned: dict[int, int] = {}
    place = 0
    for gap, size in zip(gaps, sizes, strict=True):
        holes.append((place, place + size))
        place += size
        pinned.update(enumerate(gap.after, start=place))
        place += len(gap.after)
    if holes[-1][1] > length:
        raise UsageError(f"holes of {list(sizes)} tokens do not fit a canvas of {length}")
    pinned.update({position: end for position in range(place, length)})
    kept = {position: token for position, token in pinned.items() if position < length}
    return Layout(length, tuple(holes), Pins(tuple(kept), tuple(kept.values())))


def needed(gaps: Sequence[Gap], sizes: Sequence[int]) -> int:
    """Positions from the first hole to the end of the last."""
    return sum(sizes) + sum(len(gap.after) for gap in gaps[:-1])


# --- lengths


def grid(limit: int) -> list[int]:
    """Lengths to try first: powers of two, and the limit where it is well above the last."""
    sizes = [1]
    while sizes[-1] * 2 <= limit:
        sizes.append(sizes[-1] * 2)
    return sizes if limit < 1.5 * sizes[-1] else [*sizes, limit]


def spread(limit: int, count: int) -> list[int]:
    """Lengths to try in one batch of canvases: from 1 to the limit, `count` of them or fewer.

    All of them if they are so few; else each is longer than the one before by the same factor.
    """
    if limit <= count:
        return list(range(1, limit + 1))
    factor = limit ** (1 / (count - 1))
    return sorted({round(factor**i) for i in range(count)})


def around(best: int, limit: int) -> list[int]:
    """Lengths to try next: within a quarter, and half as much again, since the grid doubles."""
    shares = (0.75, 0.875, 1.125, 1.25, 1.5)
    near = {max(1, round(best * share)) for share in shares} | {best - 1, best + 1}
    return sorted(size for size in near if 1 <= size <= limit and size != best)


# --- what a canvas said


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """What the text of a hole may be."""

    stop: tuple[str, ...] = ()  # it ends before these
    single_line: bool = False
    allow_empty: bool = False


def shape(text: str, before: str, after: str, rules: Rules) -> str:
    """A hole's text as its rules want it, given what stands around the hole."""
    text = cut_at_stop(text, rules.stop)
    if rules.single_line:
        text = first_line(text, before, after)
    return without_overlap(text, after)


def cut_at_stop(text: str, stop: Sequence[str]) -> str:
    stops = StopStrings(stop)
    return stops.feed(text) + stops.finish()


def first_line(text: str, before: str, after: str) -> str:
    """Up to the first line break; with it where the hole stands for a line of its own."""
    ends = [place for mark in BREAKS if (place := text.find(mark)) >= 0]
    if not ends:
        return text
    end = min(ends)
    if is_own_line(before, after):
        return text[: end + (2 if text[end : end + 2] == "\r\n" else 1)]
    return text[:end]


def is_own_line(before: str, after: str) -> bool:
    """Whether a hole begins with a line, and behind it another line begins at once."""
    begins = not before or before.endswith(BREAKS)
    return begins and bool(after) and not after.startswith(BREAKS)


def without_overlap(text: str, after: str) -> str:
    """Cut what the end of a fill repeats of the text behind it, if that is no small coincidence."""
    longest = min(len(text) - 1, len(after))  # at least one character stays
    for size in range(longest, SHORTEST_OVERLAP - 1, -1):
        if text.endswith(after[:size]) and any(map(is_word, after[:size])):
            return text[:-size]
    return text


def is_allowed(text: str, rules: Rules) -> bool:
    return bool(text) or rules.allow_empty


# --- windows


def tail(tokenizer: Tokenizer, text: str, count: int) -> str:
    """The end of a text: at most `count` tokens of it, from the beginning of a line if one is near.

    Near: within the first half of what would be kept.
    """
    if count <= 0:
        return ""
    text = text[-characters(count) :]
    ids = tokenizer.encode(text)
    if len(ids) <= count:
        return text
    kept = _without_broken(tokenizer.decode_bytes(ids[len(ids) - count :]))
    line = kept.find("\n", 0, len(kept) // 2)
    return kept[line + 1 :]


def head(tokenizer: Tokenizer, text: str, count: int) -> str:
    """The beginning of a text: at most `count` tokens, to the end of a line if one is near."""
    if count <= 0:
        return ""
    text = text[: characters(count)]
    ids = tokenizer.encode(text)
    if len(ids) <= count:
        return text
    kept = _without_broken(tokenizer.decode_bytes(ids[:count]))
    line = kept.rfind("\n", len(kept) // 2)
    return kept[: line + 1] if line >= 0 else kept


def characters(count: int) -> int:
    """More characters than `count` tokens of any real text hold; a bound on what is encoded."""
    return 32 * count


def _without_broken(data: bytes) -> str:
    """The text of bytes that may begin and end inside a character."""
    return data.decode("utf-8", "ignore")


# --- which holes share a canvas


def group(between: Sequence[int], sizes: Sequence[int], room: int) -> list[range]:
    """Neighbouring holes that fit a canvas of `room` positions together, as many as go, in order.

    `between` counts the tokens between each hole and the next. A hole always gets a group, even one
    that does not fit.
    """
    groups: list[range] = []
    first, taken = 0, sizes[0]
    for hole in range(1, len(sizes)):
        taken += between[hole - 1] + sizes[hole]
        if taken > room:
            groups.append(range(first, hole))
            first, taken = hole, sizes[hole]
    return [*groups, range(first, len(sizes))]


def sweep(first: Sequence[int], choices: Sequence[Sequence[int]]) -> list[tuple[int, ...]]:
    """Sizes of all holes to try: the first ones, and each hole's choices with the others so."""
    found = {tuple(first): None}
    for hole, sizes in enumerate(choices):
        for size in sizes:
            found[(*first[:hole], size, *first[hole + 1 :])] = None
    return list(found)
