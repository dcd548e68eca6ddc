"""Documents with holes: pieces of text, canvas layouts, candidate lengths, fill rules.

Pure functions of strings, ids and positions. A filled text is joined from the given pieces, never
from decoded tokens, so nothing outside a hole can change.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from dgemma.diffusion.canvas import Pins
from dgemma.errors import UsageError
from dgemma.programs.infill.healing import Hole, is_word
from dgemma.text.control_tokens import FILL_MARK
from dgemma.text.detokenizer import StopStrings
from dgemma.text.tokenizer import Tokenizer, refuse_surrogates

REQUEST = "Complete the document."  # the user turn of an instruct model, before the document
MIN_OVERLAP = 12  # characters of the following text that count as a repetition
LINE_ENDS = ("\n", "\r")
CHARACTERS_PER_TOKEN = 32  # more than real text has; bounds what is encoded
Span = tuple[int, int]


@dataclass(frozen=True, slots=True)
class InfillDocument:
    """A text with holes: one more piece than holes."""

    pieces: tuple[str, ...]

    def __post_init__(self) -> None:
        if len(self.pieces) < 2:
            raise UsageError(
                f"the text has no hole; write {FILL_MARK} where something is to be filled"
            )
        for piece in self.pieces:
            refuse_surrogates(piece)

    @classmethod
    def parse(cls, text: str, mark: str = FILL_MARK) -> "InfillDocument":
        """Split a text at its marks."""
        return cls(tuple(text.split(mark)))

    @classmethod
    def cut(cls, text: str, spans: Sequence[Span]) -> "InfillDocument":
        """Cut spans of characters out of a text; an empty span is a hole between two characters.

        Spans are sorted and do not overlap.
        """
        check_spans(spans, len(text))
        starts = [0, *(stop for _, stop in spans)]
        stops = [*(start for start, _ in spans), len(text)]
        return cls(tuple(text[a:b] for a, b in zip(starts, stops, strict=True)))

    @property
    def num_holes(self) -> int:
        return len(self.pieces) - 1

    def join(self, fills: Sequence[str]) -> str:
        """Return the text with its holes filled."""
        both = zip(self.pieces, [*fills, ""], strict=True)
        return "".join(piece + fill for piece, fill in both)

    def spans(self, fills: Sequence[str]) -> list[Span]:
        """Return the character span of each fill in the joined text."""
        spans, end = [], 0
        for piece, fill in zip(self.pieces, fills, strict=False):
            start = end + len(piece)
            end = start + len(fill)
            spans.append((start, end))
        return spans


def check_spans(spans: Sequence[Span], length: int) -> None:
    """Refuse spans that are out of order, overlap or reach outside the text."""
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
class CanvasLayout:
    """Holes of given sizes on a canvas, and the pins around them."""

    length: int
    holes: tuple[Span, ...]  # positions
    pins: Pins


def lay_out(holes: Sequence[Hole], sizes: Sequence[int], length: int, end_id: int) -> CanvasLayout:
    """Place holes and the text after each on a canvas of `length` positions.

    Where the text ends within the canvas, `end_id` fills the rest, as in training.
    """
    spans: list[Span] = []
    pinned: dict[int, int] = {}
    position = 0
    for hole, size in zip(holes, sizes, strict=True):
        spans.append((position, position + size))
        position += size
        pinned.update(enumerate(hole.after, start=position))
        position += len(hole.after)
    if spans[-1][1] > length:
        raise UsageError(f"holes of {list(sizes)} tokens do not fit a canvas of {length}")
    pinned.update({index: end_id for index in range(position, length)})
    visible = {index: token for index, token in pinned.items() if index < length}
    return CanvasLayout(length, tuple(spans), Pins(tuple(visible), tuple(visible.values())))


def num_positions(holes: Sequence[Hole], sizes: Sequence[int]) -> int:
    """Count positions from the first hole to the end of the last."""
    return sum(sizes) + sum(len(hole.after) for hole in holes[:-1])


# --- lengths


def doubling_lengths(limit: int) -> list[int]:
    """Return powers of two, and the limit if it is well above the last one."""
    lengths = [1]
    while lengths[-1] * 2 <= limit:
        lengths.append(lengths[-1] * 2)
    return lengths if limit < 1.5 * lengths[-1] else [*lengths, limit]


def geometric_lengths(limit: int, count: int) -> list[int]:
    """Return up to `count` lengths from 1 to the limit in a geometric series."""
    if limit <= count:
        return list(range(1, limit + 1))
    factor = limit ** (1 / (count - 1))
    return sorted({round(factor**i) for i in range(count)})


def nearby_lengths(best: int, limit: int) -> list[int]:
    """Return lengths within a quarter of the best, and 1.5 times the best; its double first."""
    ratios = (0.75, 0.875, 1.125, 1.25, 1.5)
    near = {max(1, round(best * ratio)) for ratio in ratios} | {best - 1, best + 1}
    return sorted(length for length in near if 1 <= length <= limit and length != best)


def vary_one_hole(first: Sequence[int], options: Sequence[Sequence[int]]) -> list[tuple[int, ...]]:
    """Return the first lengths, then those with one hole at another of its lengths."""
    varied = {tuple(first): None}  # a set in order
    for hole, lengths in enumerate(options):
        for length in lengths:
            varied[(*first[:hole], length, *first[hole + 1 :])] = None
    return list(varied)


def group_holes(between: Sequence[int], lengths: Sequence[int], capacity: int) -> list[range]:
    """Group consecutive holes that fit a canvas together, as many as possible.

    `between` counts the tokens between each hole and the next. A hole that does not fit a canvas
    gets its own group.
    """
    groups: list[range] = []
    first, used = 0, lengths[0]
    for hole in range(1, len(lengths)):
        used += between[hole - 1] + lengths[hole]
        if used > capacity:
            groups.append(range(first, hole))
            first, used = hole, lengths[hole]
    return [*groups, range(first, len(lengths))]


# --- rules for the text of a hole


@dataclass(frozen=True, slots=True, kw_only=True)
class FillRules:
    """Rules for the text of a hole."""

    stop: tuple[str, ...] = ()  # the fill ends before these
    single_line: bool = False
    allow_empty: bool = False


def trim_fill(text: str, before: str, after: str, rules: FillRules) -> str:
    """Trim a hole's text by the rules, given the text around it."""
    text = cut_at_stop(text, rules.stop)
    if rules.single_line:
        text = first_line(text, before, after)
    return without_overlap(text, after)


def cut_at_stop(text: str, stop: Sequence[str]) -> str:
    stops = StopStrings(stop)
    return stops.feed(text) + stops.finish()


def first_line(text: str, before: str, after: str) -> str:
    """Cut at the first line end; keep it if the hole is a whole line."""
    ends = [index for mark in LINE_ENDS if (index := text.find(mark)) >= 0]
    if not ends:
        return text
    end = min(ends)
    if is_own_line(before, after):
        return text[: end + (2 if text[end : end + 2] == "\r\n" else 1)]
    return text[:end]


def is_own_line(before: str, after: str) -> bool:
    """True if a hole starts at the start of a line and another line starts right after it."""
    starts = not before or before.endswith(LINE_ENDS)
    return starts and bool(after) and not after.startswith(LINE_ENDS)


def without_overlap(text: str, after: str) -> str:
    """Cut the end of a fill that repeats the following text, unless it is a coincidence."""
    longest = min(len(text) - 1, len(after))  # at least one character stays
    for size in range(longest, MIN_OVERLAP - 1, -1):
        if text.endswith(after[:size]) and any(map(is_word, after[:size])):
            return text[:-size]
    return text


# --- brackets

BRACKETS = {"(": ")", "[": "]", "{": "}"}
NO_BRACKET = re.compile(r"[^()\[\]{}]+")


def unmatched_brackets(text: str) -> str:
    """Return the unmatched brackets of a text, in order.

    Brackets in strings and comments count too: they are the same for all fills of a hole.
    """
    left: list[str] = []
    for bracket in NO_BRACKET.sub("", text):
        if left and BRACKETS.get(left[-1]) == bracket:
            left.pop()
        else:
            left.append(bracket)
    return "".join(left)


# --- context around a hole


def last_tokens(tokenizer: Tokenizer, text: str, count: int) -> str:
    """Return at most the last `count` tokens of a text, from the start of a line if one is near.

    Near: within the first half of the result.
    """
    if count <= 0:
        return ""
    text = text[-CHARACTERS_PER_TOKEN * count :]
    ids = tokenizer.encode(text)
    if len(ids) <= count:
        return text
    end = tokenizer.decode_bytes(ids[len(ids) - count :]).decode("utf-8", "ignore")
    line_end = end.find("\n", 0, len(end) // 2)
    return end[line_end + 1 :]


def first_tokens(tokenizer: Tokenizer, text: str, count: int) -> str:
    """Return at most the first `count` tokens of a text, up to the end of a line if one is near."""
    if count <= 0:
        return ""
    text = text[: CHARACTERS_PER_TOKEN * count]
    ids = tokenizer.encode(text)
    if len(ids) <= count:
        return text
    start = tokenizer.decode_bytes(ids[:count]).decode("utf-8", "ignore")
    line_end = start.rfind("\n", len(start) // 2)
    return start[: line_end + 1] if line_end >= 0 else start
