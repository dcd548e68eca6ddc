"""The pure parts of edit: what to open, tokens and characters, patches, diffs, old versions."""

import shutil
import subprocess
import tempfile
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dgemma.constrain.edits import (
    Patch,
    allowed_tokens,
    apply,
    changes,
    character_places,
    compose,
    diff,
    encode_apart,
    is_cut,
    is_inside,
    joined,
    line_spans,
    next_place,
    open_spans,
    runs,
    segments,
    shift,
    whole_characters,
    whole_words,
)
from dgemma.errors import UsageError
from tests.text.small import small_tokenizer
from tests.text.strategies import any_text

TOKENIZER = small_tokenizer()
many = settings(max_examples=500, deadline=None, database=None)
some = settings(max_examples=100, deadline=None, database=None)


def patches(text: str) -> st.SearchStrategy[list[Patch]]:
    """Patches of a text, in order and apart."""

    def build(places: list[int], news: list[str]) -> list[Patch]:
        pairs = zip(sorted(places)[::2], sorted(places)[1::2], strict=False)
        return [Patch(a, b, new) for (a, b), new in zip(pairs, news, strict=False)]

    places = st.lists(st.integers(0, len(text)), max_size=6, unique=True)
    return st.builds(build, places, st.lists(any_text, min_size=3, max_size=3))


# --- what to open


@many
@given(st.lists(st.tuples(st.floats(0, 9), st.booleans()), max_size=30), st.floats(0, 9))
def test_opened_tokens_are_allowed_and_disagree(
    tokens: list[tuple[float, bool]], threshold: float
) -> None:
    spans = open_spans([v for v, _ in tokens], threshold, [a for _, a in tokens])
    opened = {place for a, b in spans for place in range(a, b)}
    assert opened == {i for i, (v, a) in enumerate(tokens) if v > threshold and a}
    assert all(b < c for (_, b), (c, _) in pairwise(spans))


def test_a_doubted_token_opens_its_whole_word() -> None:
    ids = TOKENIZER.encode("see thoughtful, ok")
    texts = [TOKENIZER.decode([token]) for token in ids]
    first = texts.index("thought")
    [(start, stop)] = whole_words(TOKENIZER, ids, [(first, first + 1)])
    assert "".join(texts[start:stop]) == "thoughtful"
    only = [place <= first + 1 for place in range(len(ids))]
    assert whole_words(TOKENIZER, ids, [(first, first + 1)], only) == [(first, first + 2)]


@many
@given(any_text, st.data())
def test_widened_words_are_near_what_was_open_and_allowed(text: str, data: st.DataObject) -> None:
    ids = TOKENIZER.encode(text)
    texts = [TOKENIZER.decode([token], skip_control=True) for token in ids]
    flags = st.lists(st.booleans(), min_size=len(ids), max_size=len(ids))
    marked, allowed = data.draw(flags), data.draw(flags)
    opened = [a and b for a, b in zip(marked, allowed, strict=True)]
    found = whole_words(TOKENIZER, ids, runs(opened), allowed)
    inside = {place for a, b in found for place in range(a, b)}
    assert {place for place, is_open in enumerate(opened) if is_open} <= inside
    assert all(allowed[place] for place in inside)
    for place in inside - {place for place, is_open in enumerate(opened) if is_open}:
        before = place > 0 and is_inside(texts[place - 1], texts[place])
        after = place + 1 < len(ids) and is_inside(texts[place], texts[place + 1])
        assert before or after


# --- tokens and characters


@many
@given(any_text, st.data())
def test_no_token_lies_across_the_edge_of_a_selection(text: str, data: st.DataObject) -> None:
    places = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6)))
    spans = list(zip(places[::2], places[1::2], strict=False))
    ids = encode_apart(TOKENIZER, text, spans)
    assert TOKENIZER.decode_bytes(ids) == text.encode()
    ends = {0, *(end for _, end in character_places(TOKENIZER, ids))}
    assert {edge for span in spans for edge in span} <= ends
    is_allowed = allowed_tokens(character_places(TOKENIZER, ids), spans)
    chosen = b"".join(
        TOKENIZER.token_bytes(token) for token, here in zip(ids, is_allowed, strict=True) if here
    )
    assert chosen == "".join(text[a:b] for a, b in spans).encode()


@many
@given(any_text)
def test_every_token_names_the_characters_it_has_bytes_of(text: str) -> None:
    ids = TOKENIZER.encode(text)
    places = character_places(TOKENIZER, ids)
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
    places = character_places(TOKENIZER, TOKENIZER.encode(text))
    marked = data.draw(st.lists(st.booleans(), min_size=len(places), max_size=len(places)))
    spans = whole_characters(runs(marked), places)
    inside = {i for a, b in spans for i in range(a, b)}
    assert {i for i, is_marked in enumerate(marked) if is_marked} <= inside
    assert not any(is_cut(places, edge) for span in spans for edge in span)


@many
@given(any_text, st.data())
def test_allowed_tokens_lie_within_the_selection(text: str, data: st.DataObject) -> None:
    first = data.draw(st.integers(0, len(text)))
    selection = [(first, data.draw(st.integers(first, len(text))))]
    places = character_places(TOKENIZER, TOKENIZER.encode(text))
    for (a, b), is_allowed in zip(places, allowed_tokens(places, selection), strict=True):
        assert is_allowed == (selection[0][0] <= a and b <= selection[0][1])
    assert all(allowed_tokens(places, None))


def test_lines_are_counted_from_one_and_keep_their_ends() -> None:
    text = "a\nbb\r\nc"
    assert [line_spans(text, i, i) for i in (1, 2, 3)] == [(0, 2), (2, 6), (6, 7)]
    assert line_spans(text, 1, 2) == (0, 6) and line_spans("a\n", 1, 1) == (0, 2)
    for wrong in ((0, 1), (2, 1), (1, 4)):
        with pytest.raises(UsageError, match="not in a text of 3 lines"):
            line_spans(text, *wrong)


# --- patches


@many
@given(any_text, st.data())
def test_two_patches_are_composed_to_one(text: str, data: st.DataObject) -> None:
    first = data.draw(patches(text))
    middle = apply(text, first)
    second = data.draw(patches(middle))
    both = compose(first, second, text)
    assert apply(text, both) == apply(middle, second)
    # Nothing is touched that neither touched.
    spans = [(p.start, p.end) for p in both]
    assert all(any(a <= p.start and p.end <= b for a, b in spans) for p in first)
    assert all(b < c for (_, b), (c, _) in pairwise(spans))


@many
@given(any_text, st.data())
def test_a_selection_follows_what_changes_inside_it(text: str, data: st.DataObject) -> None:
    places = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=4, unique=True)))
    spans = joined(list(zip(places[::2], places[1::2], strict=False)))
    made = [Patch(a, b, data.draw(any_text)) for a, b in spans]
    text = apply(text, made)
    assert [text[a:b] for a, b in shift(spans, made)] == [patch.new for patch in made]


@many
@given(any_text, st.data())
def test_changes_say_what_is_new_and_where(text: str, data: st.DataObject) -> None:
    made = data.draw(patches(text))
    new = apply(text, made)
    found = changes(text, made)
    for change in found:
        assert new[change.start : change.end] == change.new
        assert text[change.old_start : change.old_end] == change.old
        assert change.old[:1] != change.new[:1] or not change.old
    back = [Patch(c.start, c.end, c.old) for c in found]
    assert apply(new, back) == text


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
    written = diff(before, after)
    assert (written == "") == (before == after)
    if not written or not before or not after:  # to and from nothing means to create and delete
        return
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "text"
        path.write_text(before, encoding="utf-8", newline="")
        subprocess.run(["patch", "-s", str(path)], input=written.encode(), check=True)
        assert path.read_text(encoding="utf-8") == after


# --- windows and old versions


@some
@given(any_text, st.integers(4, 20))
def test_segments_are_the_text(text: str, count: int) -> None:
    parts = segments(TOKENIZER, text, count)
    assert "".join(parts) == text and all(parts)


def test_an_old_version_goes_on_where_the_new_one_is() -> None:
    old = list(range(100, 130))
    assert next_place(old, []) == 0
    assert next_place(old, old[:10]) == 10
    assert next_place(old, [*old[:4], 7, 7, 7, *old[4:10]]) == 10  # three more
    assert next_place(old, [*old[:4], *old[6:12]]) == 12  # two fewer
    assert next_place(old, [*old[:8], 7, 7]) == 10
    assert next_place(old, [1, 2, 3]) == 3
