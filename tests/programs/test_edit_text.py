"""The pure parts of edit: what to open, tokens and characters, patches, diffs, old versions."""

import shutil
import subprocess
import tempfile
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dgemma.engine.canvas_policy import resume_index
from dgemma.errors import UsageError
from dgemma.programs.edit.edit import text_stretches
from dgemma.programs.edit.spans import (
    Patch,
    allowed_tokens,
    apply_patches,
    changes_of,
    compose_patches,
    encode_split,
    is_within_word,
    line_span,
    marked_spans,
    merge_spans,
    shift_spans,
    spans_above,
    splits_character,
    token_characters,
    unified_diff,
    widen_to_characters,
    widen_to_words,
)
from tests.text.small import small_tokenizer
from tests.text.strategies import any_text, many, some

TOKENIZER = small_tokenizer()


def patches(text: str, news: st.SearchStrategy[str] = any_text) -> st.SearchStrategy[list[Patch]]:
    """Patches of a text, in order and without overlap."""

    def build(places: list[int], news: list[str]) -> list[Patch]:
        pairs = zip(sorted(places)[::2], sorted(places)[1::2], strict=False)
        return [Patch(a, b, new) for (a, b), new in zip(pairs, news, strict=False)]

    places = st.lists(st.integers(0, len(text)), max_size=6, unique=True)
    return st.builds(build, places, st.lists(news, min_size=3, max_size=3))


# --- what to open


@many
@given(st.lists(st.tuples(st.floats(0, 9), st.booleans()), max_size=30), st.floats(0, 9))
def test_opened_tokens_are_allowed_and_disagree(
    tokens: list[tuple[float, bool]], threshold: float
) -> None:
    spans = spans_above([v for v, _ in tokens], threshold, [a for _, a in tokens])
    opened = {place for a, b in spans for place in range(a, b)}
    assert opened == {i for i, (v, a) in enumerate(tokens) if v > threshold and a}
    assert all(b < c for (_, b), (c, _) in pairwise(spans))


def test_a_doubted_token_opens_its_whole_word() -> None:
    ids = TOKENIZER.encode("see thoughtful, ok")
    texts = [TOKENIZER.decode([token]) for token in ids]
    first = texts.index("thought")
    [(start, stop)] = widen_to_words(TOKENIZER, ids, [(first, first + 1)])
    assert "".join(texts[start:stop]) == "thoughtful"
    only = [place <= first + 1 for place in range(len(ids))]
    assert widen_to_words(TOKENIZER, ids, [(first, first + 1)], only) == [(first, first + 2)]


@many
@given(any_text, st.data())
def test_widened_words_are_near_what_was_open_and_allowed(text: str, data: st.DataObject) -> None:
    ids = TOKENIZER.encode(text)
    texts = [TOKENIZER.decode([token], skip_control=True) for token in ids]
    flags = st.lists(st.booleans(), min_size=len(ids), max_size=len(ids))
    marked, allowed = data.draw(flags), data.draw(flags)
    opened = [a and b for a, b in zip(marked, allowed, strict=True)]
    found = widen_to_words(TOKENIZER, ids, marked_spans(opened), allowed)
    inside = {place for a, b in found for place in range(a, b)}
    assert {place for place, is_open in enumerate(opened) if is_open} <= inside
    assert all(allowed[place] for place in inside)
    for place in inside - {place for place, is_open in enumerate(opened) if is_open}:
        before = place > 0 and is_within_word(texts[place - 1], texts[place])
        after = place + 1 < len(ids) and is_within_word(texts[place], texts[place + 1])
        assert before or after


# --- tokens and characters


@many
@given(any_text, st.data())
def test_no_token_lies_across_the_edge_of_a_selection(text: str, data: st.DataObject) -> None:
    places = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6)))
    spans = list(zip(places[::2], places[1::2], strict=False))
    ids = encode_split(TOKENIZER, text, spans)
    assert TOKENIZER.decode_bytes(ids) == text.encode()
    ends = {0, *(end for _, end in token_characters(TOKENIZER, ids))}
    assert {edge for span in spans for edge in span} <= ends
    is_allowed = allowed_tokens(token_characters(TOKENIZER, ids), spans)
    chosen = b"".join(
        TOKENIZER.token_bytes(token) for token, here in zip(ids, is_allowed, strict=True) if here
    )
    assert chosen == "".join(text[a:b] for a, b in spans).encode()


@many
@given(any_text)
def test_every_token_names_the_characters_it_has_bytes_of(text: str) -> None:
    ids = TOKENIZER.encode(text)
    places = token_characters(TOKENIZER, ids)
    assert not ids or (places[0][0], places[-1][1]) == (0, len(text))
    begin = 0
    for token, (start, end) in zip(ids, places, strict=True):
        data = TOKENIZER.token_bytes(token)
        before = len(text[:start].encode())
        assert before <= begin and begin + len(data) <= len(text[:end].encode())
        assert begin < len(text[: start + 1].encode())
        begin += len(data)


@many
@given(any_text, st.data())
def test_widened_spans_part_no_character(text: str, data: st.DataObject) -> None:
    places = token_characters(TOKENIZER, TOKENIZER.encode(text))
    marked = data.draw(st.lists(st.booleans(), min_size=len(places), max_size=len(places)))
    spans = widen_to_characters(marked_spans(marked), places)
    inside = {i for a, b in spans for i in range(a, b)}
    assert {i for i, is_marked in enumerate(marked) if is_marked} <= inside
    assert not any(splits_character(places, edge) for span in spans for edge in span)


@many
@given(any_text, st.data())
def test_allowed_tokens_lie_within_the_selection(text: str, data: st.DataObject) -> None:
    first = data.draw(st.integers(0, len(text)))
    selection = [(first, data.draw(st.integers(first, len(text))))]
    places = token_characters(TOKENIZER, TOKENIZER.encode(text))
    for (a, b), is_allowed in zip(places, allowed_tokens(places, selection), strict=True):
        assert is_allowed == (selection[0][0] <= a and b <= selection[0][1])
    assert all(allowed_tokens(places, None))


def test_lines_are_counted_from_one_and_keep_their_ends() -> None:
    text = "a\nbb\r\nc"
    assert [line_span(text, i, i) for i in (1, 2, 3)] == [(0, 2), (2, 6), (6, 7)]
    assert line_span(text, 1, 2) == (0, 6) and line_span("a\n", 1, 1) == (0, 2)
    for wrong in ((0, 1), (2, 1), (1, 4)):
        with pytest.raises(UsageError, match="not in a text of 3 lines"):
            line_span(text, *wrong)


# --- patches


@many
@given(any_text, st.data())
def test_two_patches_are_composed_to_one(text: str, data: st.DataObject) -> None:
    first = data.draw(patches(text))
    middle = apply_patches(text, first)
    second = data.draw(patches(middle))
    both = compose_patches(first, second, text)
    assert apply_patches(text, both) == apply_patches(middle, second)
    # Nothing is touched that neither touched.
    spans = [(p.start, p.end) for p in both]
    assert all(any(a <= p.start and p.end <= b for a, b in spans) for p in first)
    assert all(b < c for (_, b), (c, _) in pairwise(spans))


@many
@given(any_text, st.data())
def test_a_selection_follows_what_changes_inside_it(text: str, data: st.DataObject) -> None:
    places = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=4, unique=True)))
    spans = merge_spans(list(zip(places[::2], places[1::2], strict=False)))
    made = [Patch(a, b, data.draw(any_text)) for a, b in spans]
    text = apply_patches(text, made)
    assert [text[a:b] for a, b in shift_spans(spans, made)] == [patch.new for patch in made]


@many
@given(any_text, st.data())
def test_changes_say_what_is_new_and_where(text: str, data: st.DataObject) -> None:
    made = data.draw(patches(text))
    new = apply_patches(text, made)
    found = changes_of(text, made)
    for change in found:
        assert new[change.start : change.end] == change.new
        assert text[change.old_start : change.old_end] == change.old
        assert change.old[:1] != change.new[:1] or not change.old
    back = [Patch(c.start, c.end, c.old) for c in found]
    assert apply_patches(new, back) == text


# --- diffs


@pytest.mark.skipif(shutil.which("patch") is None, reason="needs the patch command")
@some
@given(
    st.lists(st.sampled_from("abc"), max_size=9),
    st.lists(st.sampled_from("abcd"), max_size=9),
    st.booleans(),
)
def test_a_diff_is_applied_by_patch(old: list[str], new: list[str], ends: bool) -> None:
    before = "\n".join(old) + "\n" * (ends and bool(old))
    after = "\n".join(new)
    written = unified_diff(before, after, changes_of(before, [Patch(0, len(before), after)]))
    assert (written == "") == (before == after)
    if not written or not before or not after:  # to and from nothing means to create and delete
        return
    assert patched(before, written) == after


@pytest.mark.skipif(shutil.which("patch") is None, reason="needs the patch command")
@some
@given(st.lists(st.sampled_from(["a", "b", "cc", ""]), max_size=40), st.booleans(), st.data())
def test_a_diff_of_several_changes_is_applied_by_patch(
    lines: list[str], ends: bool, data: st.DataObject
) -> None:
    text = "\n".join(lines) + "\n" * ends
    made = data.draw(patches(text, st.sampled_from(["", "a", "x\n", "\n", "b\nc", "\n\n"])))
    new = apply_patches(text, made)
    written = unified_diff(text, new, changes_of(text, made))
    assert (written == "") == (text == new)
    if written and text and new:
        assert patched(text, written) == new


def patched(text: str, diff: str) -> str:
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "text"
        path.write_text(text, encoding="utf-8", newline="")
        subprocess.run(["patch", "-s", str(path)], input=diff.encode(), check=True)
        return path.read_text(encoding="utf-8")


# --- windows and old versions


@some
@given(any_text, st.integers(4, 20))
def test_segments_are_the_text(text: str, count: int) -> None:
    stretches = list(text_stretches(TOKENIZER, text, count))
    assert "".join(part for _, part in stretches) == text and all(part for _, part in stretches)
    assert all(text.startswith(part, start) for start, part in stretches)


def test_an_old_version_goes_on_where_the_new_one_is() -> None:
    old = list(range(100, 130))
    assert resume_index(old, []) == 0
    assert resume_index(old, old[:10]) == 10
    assert resume_index(old, [*old[:4], 7, 7, 7, *old[4:10]]) == 10  # three more
    assert resume_index(old, [*old[:4], *old[6:12]]) == 12  # two fewer
    assert resume_index(old, [*old[:8], 7, 7]) == 10
    assert resume_index(old, [1, 2, 3]) == 3
