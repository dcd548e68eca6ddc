"""Editing in place: which tokens to open, how far around them, and what changed in the end.

Pure, as holes.py is: numbers and strings in, spans and strings out. An edited text is joined from
the given text's own characters outside the opened spans, so nothing there can change.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher, unified_diff
from itertools import pairwise

from dgemma.constrain.holes import Holed, Span, head
from dgemma.constrain.seams import is_word
from dgemma.errors import UsageError
from dgemma.text.tokenizer import Tokenizer

LONGEST_WORD = 8  # tokens: scripts without spaces would make a word of a whole sentence
NO_NEWLINE = "\\ No newline at end of file\n"


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """A stretch of the old text and what stands there now; places in characters."""

    start: int  # in the new text
    end: int
    old_start: int
    old_end: int
    old: str
    new: str


# --- what to open


def open_spans(
    disagreement: Sequence[float], threshold: float, allowed: Sequence[bool]
) -> list[Span]:
    """Spans of tokens that disagree by more than the threshold, where allowed."""
    both = zip(disagreement, allowed, strict=True)
    return runs([value > threshold and is_allowed for value, is_allowed in both])


def runs(marked: Sequence[bool]) -> list[Span]:
    """Spans of neighbours that are marked."""
    spans: list[Span] = []
    for place, is_marked in enumerate(marked):
        if not is_marked:
            continue
        if spans and spans[-1][1] == place:
            spans[-1] = (spans[-1][0], place + 1)
        else:
            spans.append((place, place + 1))
    return spans


def allowed_tokens(places: Sequence[Span], selection: Sequence[Span] | None) -> list[bool]:
    """Which tokens, given by their characters, lie within the selection; all without one."""
    if selection is None:
        return [True] * len(places)
    return [any(a <= start and end <= b for a, b in selection) for start, end in places]


def whole_words(
    tokenizer: Tokenizer,
    ids: Sequence[int],
    spans: Sequence[Span],
    allowed: Sequence[bool] | None = None,
) -> list[Span]:
    """The spans of tokens widened to the ends of the words that they are parts of, where allowed.

    What disagrees with a word is often seen at its first token only: the others follow from it.
    """
    texts = [tokenizer.decode([token], skip_control=True) for token in ids]
    goes_on = [False, *(is_inside(a, b) for a, b in pairwise(texts)), False][: len(ids) + 1]
    if allowed is not None:
        both = zip([False, *allowed], [*allowed, False], goes_on, strict=True)
        goes_on = [all(three) for three in both]
    opened = [False] * len(ids)
    for start, stop in spans:
        first, last = max(0, start - LONGEST_WORD), min(len(ids), stop + LONGEST_WORD)
        while start > first and goes_on[start]:
            start -= 1
        while stop < last and goes_on[stop]:
            stop += 1
        opened[start:stop] = [True] * (stop - start)
    return runs(opened)


def is_inside(before: str, after: str) -> bool:
    """Whether the seam between two tokens lies within a word."""
    return is_word(before[-1:]) and is_word(after[:1])


# --- tokens and characters


def encode_apart(tokenizer: Tokenizer, text: str, spans: Sequence[Span]) -> list[int]:
    """A text in tokens, none of which lies across the edge of a span."""
    edges = sorted({0, len(text), *(edge for span in spans for edge in span)})
    return [token for a, b in pairwise(edges) for token in tokenizer.encode(text[a:b])]


def character_places(tokenizer: Tokenizer, ids: Sequence[int]) -> list[Span]:
    """The characters that each token has bytes of; tokens of one character name it all."""
    places, count = [], 0
    for token in ids:
        data = tokenizer.token_bytes(token)
        start = count - (data[0] & 0xC0 == 0x80)  # it begins inside a character
        # Every character has one byte that does not continue another.
        count += sum(byte & 0xC0 != 0x80 for byte in data)
        places.append((start, count))
    return places


def is_cut(places: Sequence[Span], token: int) -> bool:
    """Whether a cut before this token would part a character."""
    return 0 < token < len(places) and places[token][0] < places[token - 1][1]


def whole_characters(spans: Sequence[Span], places: Sequence[Span]) -> list[Span]:
    """The spans of tokens widened so that none parts a character."""
    opened = [False] * len(places)
    for start, stop in spans:
        while is_cut(places, start):
            start -= 1
        while is_cut(places, stop):
            stop += 1
        opened[start:stop] = [True] * (stop - start)
    return runs(opened)


def line_spans(text: str, first: int, last: int) -> Span:
    """The characters of lines `first` to `last`, counted from one, line ends included."""
    ends = [place + 1 for place, character in enumerate(text) if character == "\n"]
    starts = [0, *ends]
    stops = [*ends, len(text)]
    if starts[-1] == len(text) and len(starts) > 1:  # the text ends with a line end
        starts, stops = starts[:-1], stops[:-1]
    if not 1 <= first <= last <= len(starts):
        raise UsageError(f"lines {first}:{last} are not in a text of {len(starts)} lines")
    return starts[first - 1], stops[last - 1]


# --- patches: spans of a text and what is to stand there, in order, apart from each other


@dataclass(frozen=True, slots=True)
class Patch:
    """What is to stand in place of a span of characters."""

    start: int
    end: int
    new: str


def apply(text: str, patches: Sequence[Patch]) -> str:
    """The text with its patches; all else is the text's own characters."""
    if not patches:
        return text
    holed = Holed.cut(text, [(patch.start, patch.end) for patch in patches])
    return holed.join([patch.new for patch in patches])


def compose(first: Sequence[Patch], second: Sequence[Patch], text: str) -> list[Patch]:
    """One list of patches of `text` that does what the first and then the second do."""
    middle = apply(text, first)
    moved = _moved(first)
    spans = sorted([*((a, b) for a, b in moved), *((p.start, p.end) for p in second)])
    composed, shift = [], 0
    for start, end in joined(spans):
        inside = [p for p in second if start <= p.start and p.end <= end]
        local = [Patch(p.start - start, p.end - start, p.new) for p in inside]
        own = [p for p, (a, b) in zip(first, moved, strict=True) if start <= a and b <= end]
        grown = sum(len(p.new) - (p.end - p.start) for p in own)
        composed.append(Patch(start - shift, end - shift - grown, apply(middle[start:end], local)))
        shift += grown
    return composed


def _moved(patches: Sequence[Patch]) -> list[Span]:
    """Where each patch's new text stands in the patched text."""
    spans, shift = [], 0
    for patch in patches:
        start = patch.start + shift
        spans.append((start, start + len(patch.new)))
        shift += len(patch.new) - (patch.end - patch.start)
    return spans


def joined(spans: Sequence[Span]) -> list[Span]:
    """Spans that touch or overlap as one."""
    joined: list[Span] = []
    for start, end in spans:
        if joined and start <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(end, joined[-1][1]))
        else:
            joined.append((start, end))
    return joined


def clip(spans: Sequence[Span], start: int, length: int) -> list[Span]:
    """The parts of spans within a stretch of a text, counted from its beginning."""
    inside = [(max(a - start, 0), min(b - start, length)) for a, b in spans]
    return [(a, b) for a, b in inside if a < b]


def shift(spans: Sequence[Span], patches: Sequence[Patch]) -> list[Span]:
    """Where spans stand after patches that each lie inside one of them."""

    def grown(end: int) -> int:
        return sum(len(p.new) - (p.end - p.start) for p in patches if p.end <= end)

    def before(start: int) -> int:
        return sum(
            len(p.new) - (p.end - p.start) for p in patches if p.end <= start and p.start < start
        )

    return [(start + before(start), end + grown(end)) for start, end in spans]


# --- what changed


def changes(text: str, patches: Sequence[Patch]) -> list[Change]:
    """What patches changed, each stretch cut down to where old and new really differ."""
    found = []
    for patch, (start, end) in zip(patches, _moved(patches), strict=True):
        old, new = text[patch.start : patch.end], patch.new
        if old == new:
            continue
        front = common(old, new)
        back = common(old[front:][::-1], new[front:][::-1])
        found.append(
            Change(
                start=start + front,
                end=end - back,
                old_start=patch.start + front,
                old_end=patch.end - back,
                old=old[front : len(old) - back],
                new=new[front : len(new) - back],
            )
        )
    return found


def common(a: str, b: str) -> int:
    """How many characters both begin with."""
    return next(
        (i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b))
    )


def diff(old: str, new: str, name: str = "text") -> str:
    """A unified diff that `patch` can apply; empty where nothing changed."""
    lines = unified_diff(as_lines(old), as_lines(new), f"a/{name}", f"b/{name}")
    return "".join(line if line.endswith("\n") else f"{line}\n{NO_NEWLINE}" for line in lines)


def as_lines(text: str) -> list[str]:
    """Lines with their ends. Only a line feed ends one: the diff is for tools that think so."""
    parts = text.split("\n")
    return [f"{part}\n" for part in parts[:-1]] + ([parts[-1]] if parts[-1] else [])


# --- windows


def segments(tokenizer: Tokenizer, text: str, count: int) -> list[str]:
    """A text in stretches of at most `count` tokens, cut at line ends where they are near."""
    parts = []
    while text:
        part = head(tokenizer, text, count)
        if not part:
            raise UsageError(
                f"a character takes more than {count} tokens; the context is too small"
            )
        parts.append(part)
        text = text[len(part) :]
    return parts


# --- old versions


def next_place(old: Sequence[int], written: Sequence[int]) -> int:
    """Where an old version goes on after what was written, which need not be as long.

    The last tokens that both have in common tell; without any, the count of tokens does.
    """
    if not written:
        return 0
    blocks = SequenceMatcher(None, old, written, autojunk=False).get_matching_blocks()
    common = [block for block in blocks if block.size]
    if not common:
        return len(written)
    last = common[-1]
    return last.a + last.size + len(written) - (last.b + last.size)
