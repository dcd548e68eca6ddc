"""Spans, patches and diffs of an edit: pure functions of numbers and strings.

An edited text is joined from the original characters outside the opened spans, so nothing there can
change.
"""

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from itertools import pairwise

from dgemma.errors import UsageError
from dgemma.programs.infill.document import InfillDocument, Span
from dgemma.programs.infill.healing import is_word
from dgemma.text.tokenizer import Tokenizer

MAX_WORD_TOKENS = 8  # scripts without spaces would make a word of a whole sentence
CONTEXT_LINES = 3  # around a hunk of a diff
NO_NEWLINE = "\\ No newline at end of file\n"


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """A changed stretch of a text, in characters."""

    start: int  # in the new text
    end: int
    old_start: int
    old_end: int
    old: str
    new: str


# --- spans of tokens


def spans_above(values: Sequence[float], threshold: float, allowed: Sequence[bool]) -> list[Span]:
    """Return spans of tokens with values above the threshold, where allowed."""
    both = zip(values, allowed, strict=True)
    return marked_spans([value > threshold and is_allowed for value, is_allowed in both])


def marked_spans(marked: Sequence[bool]) -> list[Span]:
    """Return spans of consecutive marked tokens."""
    spans: list[Span] = []
    for index, is_marked in enumerate(marked):
        if not is_marked:
            continue
        if spans and spans[-1][1] == index:
            spans[-1] = (spans[-1][0], index + 1)
        else:
            spans.append((index, index + 1))
    return spans


def allowed_tokens(characters: Sequence[Span], selection: Sequence[Span] | None) -> list[bool]:
    """Mark tokens within a span of the selection; without a selection, all.

    Spans are sorted and do not overlap.
    """
    if selection is None:
        return [True] * len(characters)
    starts = [a for a, _ in selection]
    allowed = []
    for start, end in characters:
        index = bisect_right(starts, start) - 1  # the last span that starts before it
        allowed.append(index >= 0 and end <= selection[index][1])
    return allowed


def widen_to_words(
    tokenizer: Tokenizer,
    ids: Sequence[int],
    spans: Sequence[Span],
    allowed: Sequence[bool] | None = None,
) -> list[Span]:
    """Widen spans of tokens to whole words, where allowed.

    Often only the first token of a wrong word is surprising.
    """
    texts = [tokenizer.decode([token], skip_control=True) for token in ids]
    goes_on = [False, *(is_within_word(a, b) for a, b in pairwise(texts)), False][: len(ids) + 1]
    if allowed is not None:
        both = zip([False, *allowed], [*allowed, False], goes_on, strict=True)
        goes_on = [all(three) for three in both]
    opened = [False] * len(ids)
    for start, stop in spans:
        first, last = max(0, start - MAX_WORD_TOKENS), min(len(ids), stop + MAX_WORD_TOKENS)
        while start > first and goes_on[start]:
            start -= 1
        while stop < last and goes_on[stop]:
            stop += 1
        opened[start:stop] = [True] * (stop - start)
    return marked_spans(opened)


def is_within_word(before: str, after: str) -> bool:
    """True if the boundary between two tokens is inside a word."""
    return is_word(before[-1:]) and is_word(after[:1])


# --- tokens and characters


def encode_split(tokenizer: Tokenizer, text: str, spans: Sequence[Span]) -> list[int]:
    """Encode a text so that no token crosses the edge of a span."""
    edges = sorted({0, len(text), *(edge for span in spans for edge in span)})
    return [token for a, b in pairwise(edges) for token in tokenizer.encode(text[a:b])]


def token_characters(tokenizer: Tokenizer, ids: Sequence[int]) -> list[Span]:
    """Return the characters to which each token contributes bytes."""
    spans, count = [], 0
    for token in ids:
        data = tokenizer.token_bytes(token)
        start = count - (data[0] & 0xC0 == 0x80)  # it starts inside a character
        # Every character has one byte that does not continue another.
        count += sum(byte & 0xC0 != 0x80 for byte in data)
        spans.append((start, count))
    return spans


def splits_character(characters: Sequence[Span], token: int) -> bool:
    """True if a cut before this token would split a character."""
    return 0 < token < len(characters) and characters[token][0] < characters[token - 1][1]


def widen_to_characters(spans: Sequence[Span], characters: Sequence[Span]) -> list[Span]:
    """Widen spans of tokens so that none splits a character."""
    opened = [False] * len(characters)
    for start, stop in spans:
        while splits_character(characters, start):
            start -= 1
        while splits_character(characters, stop):
            stop += 1
        opened[start:stop] = [True] * (stop - start)
    return marked_spans(opened)


def line_span(text: str, first: int, last: int) -> Span:
    """Return the characters of lines `first` to `last`, counted from one, line ends included."""
    ends = [index + 1 for index, character in enumerate(text) if character == "\n"]
    starts = [0, *ends]
    stops = [*ends, len(text)]
    if starts[-1] == len(text) and len(starts) > 1:  # the text ends with a line end
        starts, stops = starts[:-1], stops[:-1]
    if not 1 <= first <= last <= len(starts):
        raise UsageError(f"lines {first}:{last} are not in a text of {len(starts)} lines")
    return starts[first - 1], stops[last - 1]


# --- patches, in order and without overlap


@dataclass(frozen=True, slots=True)
class Patch:
    """A replacement of a span of characters."""

    start: int
    end: int
    new: str


def apply_patches(text: str, patches: Sequence[Patch]) -> str:
    """Return the patched text; everything else is copied from the text."""
    if not patches:
        return text
    document = InfillDocument.cut(text, [(patch.start, patch.end) for patch in patches])
    return document.join([patch.new for patch in patches])


def compose_patches(first: Sequence[Patch], second: Sequence[Patch], text: str) -> list[Patch]:
    """Return patches of `text` equivalent to applying both lists in turn."""
    middle = apply_patches(text, first)
    moved = _new_spans(first)
    spans = sorted([*((a, b) for a, b in moved), *((p.start, p.end) for p in second)])
    composed, shift = [], 0
    for start, end in merge_spans(spans):
        inside = [p for p in second if start <= p.start and p.end <= end]
        local = [Patch(p.start - start, p.end - start, p.new) for p in inside]
        covered = [p for p, (a, b) in zip(first, moved, strict=True) if start <= a and b <= end]
        grown = sum(len(p.new) - (p.end - p.start) for p in covered)
        new = apply_patches(middle[start:end], local)
        composed.append(Patch(start - shift, end - shift - grown, new))
        shift += grown
    return composed


def _new_spans(patches: Sequence[Patch]) -> list[Span]:
    """Return the span of each patch's new text in the patched text."""
    spans, shift = [], 0
    for patch in patches:
        start = patch.start + shift
        spans.append((start, start + len(patch.new)))
        shift += len(patch.new) - (patch.end - patch.start)
    return spans


def merge_spans(spans: Sequence[Span]) -> list[Span]:
    """Merge spans that touch or overlap."""
    merged: list[Span] = []
    for start, end in spans:
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((start, end))
    return merged


def clip_spans(spans: Sequence[Span], start: int, length: int) -> list[Span]:
    """Return the parts of spans within a stretch of a text, relative to its start."""
    inside = [(max(a - start, 0), min(b - start, length)) for a, b in spans]
    return [(a, b) for a, b in inside if a < b]


def shift_spans(spans: Sequence[Span], patches: Sequence[Patch]) -> list[Span]:
    """Return spans after patches that each lie within one span."""

    def grown(end: int) -> int:
        return sum(len(p.new) - (p.end - p.start) for p in patches if p.end <= end)

    def before(start: int) -> int:
        return sum(
            len(p.new) - (p.end - p.start) for p in patches if p.end <= start and p.start < start
        )

    return [(start + before(start), end + grown(end)) for start, end in spans]


# --- changes and diffs


def changes_of(text: str, patches: Sequence[Patch]) -> list[Change]:
    """Return what patches changed, trimmed to where old and new differ."""
    changes = []
    for patch, (start, end) in zip(patches, _new_spans(patches), strict=True):
        old, new = text[patch.start : patch.end], patch.new
        if old == new:
            continue
        front = common_prefix(old, new)
        back = common_prefix(old[front:][::-1], new[front:][::-1])
        changes.append(
            Change(
                start=start + front,
                end=end - back,
                old_start=patch.start + front,
                old_end=patch.end - back,
                old=old[front : len(old) - back],
                new=new[front : len(new) - back],
            )
        )
    return changes


def common_prefix(a: str, b: str) -> int:
    """Count the characters that both start with."""
    return next(
        (i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b))
    )


def unified_diff(old: str, new: str, changes: Sequence[Change], name: str = "text") -> str:
    """Return a diff that `patch` can apply, empty if nothing changed.

    Compares only the lines of known changes, in linear time.
    """
    if not changes:
        return ""
    old_lines, new_lines = _lines(old), _lines(new)
    parts = [f"--- a/{name}\n", f"+++ b/{name}\n"]
    for hunk in _hunks(list(_line_changes(old_lines, new_lines, changes))):
        parts += _hunk_lines(old_lines, new_lines, hunk)
    return "".join(line if line.endswith("\n") else f"{line}\n{NO_NEWLINE}" for line in parts)


def _line_changes(
    old: Sequence[str], new: Sequence[str], changes: Sequence[Change]
) -> Iterator[tuple[Span, Span]]:
    """Yield spans of old and new lines that differ, found by `changes`."""
    # The character after a change is included: a line end may have been added or removed.
    old_spans = _line_spans(old, [(c.old_start, c.old_end + 1) for c in changes])
    new_spans = _line_spans(new, [(c.start, c.end + 1) for c in changes])
    for (a, b), (c, d) in _merge_pairs(old_spans, new_spans):
        matcher = SequenceMatcher(None, old[a:b], new[c:d], autojunk=False)
        for tag, i, j, k, m in matcher.get_opcodes():
            if tag != "equal":
                yield (a + i, a + j), (c + k, c + m)


def _hunks(changed: Sequence[tuple[Span, Span]]) -> list[list[tuple[Span, Span]]]:
    """Group changes whose context lines touch."""
    hunks: list[list[tuple[Span, Span]]] = []
    for pair in changed:
        if hunks and pair[0][0] - hunks[-1][-1][0][1] <= 2 * CONTEXT_LINES:
            hunks[-1].append(pair)
        else:
            hunks.append([pair])
    return hunks


def _hunk_lines(
    old: Sequence[str], new: Sequence[str], hunk: Sequence[tuple[Span, Span]]
) -> list[str]:
    """Write a hunk with its context, which is the same in both texts."""
    (first, _), (new_first, _) = hunk[0]
    (_, last), (_, new_last) = hunk[-1]
    before, after = min(CONTEXT_LINES, first), min(CONTEXT_LINES, len(old) - last)
    ranges = _range(first - before, last + after), _range(new_first - before, new_last + after)
    lines, position = [f"@@ -{ranges[0]} +{ranges[1]} @@\n"], first - before
    for (a, b), (c, d) in hunk:
        lines += [" " + line for line in old[position:a]]
        lines += ["-" + line for line in old[a:b]]
        lines += ["+" + line for line in new[c:d]]
        position = b
    return lines + [" " + line for line in old[position : last + after]]


def _line_spans(lines: Sequence[str], spans: Sequence[Span]) -> list[Span]:
    """Return the lines of spans of characters."""
    line_spans, index, start = [], 0, 0
    for begin, end in spans:
        while index < len(lines) and _is_before(lines[index], begin - start):
            start += len(lines[index])
            index += 1
        stop, position = index, start
        while stop < len(lines) and position < end:
            position += len(lines[stop])
            stop += 1
        line_spans.append((index, stop))
    return line_spans


def _is_before(line: str, begin: int) -> bool:
    """True if a line ends before a position; one without a line end extends to the text's end."""
    return len(line) <= begin and line.endswith("\n")


def _merge_pairs(old: Sequence[Span], new: Sequence[Span]) -> list[tuple[Span, Span]]:
    """Merge pairs of line spans that share a line."""
    merged: list[tuple[Span, Span]] = []
    for (a, b), (c, d) in zip(old, new, strict=True):
        if merged and (a < merged[-1][0][1] or c < merged[-1][1][1]):
            (first, last), (new_first, new_last) = merged.pop()
            a, b, c, d = first, max(b, last), new_first, max(d, new_last)
        merged.append(((a, b), (c, d)))
    return merged


def _range(start: int, stop: int) -> str:
    """Write a range of lines as unified diffs do."""
    length = stop - start
    if length == 1:
        return str(start + 1)
    return f"{start + 1 if length else start},{length}"


def _lines(text: str) -> list[str]:
    """Split at line feeds only, as tools that read diffs do."""
    parts = text.split("\n")
    return [f"{part}\n" for part in parts[:-1]] + ([parts[-1]] if parts[-1] else [])
