"""The pure parts of fill: documents, healing, canvases, lengths, and the rules for a hole."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dgemma.errors import UsageError
from dgemma.programs.infill.document import (
    FillRules,
    InfillDocument,
    doubling_lengths,
    first_line,
    first_tokens,
    geometric_lengths,
    group_holes,
    last_tokens,
    lay_out,
    nearby_lengths,
    num_positions,
    trim_fill,
    vary_one_hole,
    without_overlap,
)
from dgemma.programs.infill.healing import Hole, complete_words, find_healing, strip_required
from dgemma.text.control_tokens import FILL_MARK
from tests.text.small import small_tokenizer
from tests.text.strategies import any_text, many, some

TOKENIZER = small_tokenizer()
pieces = st.lists(any_text, min_size=2, max_size=5).map(tuple)
sizes = st.lists(st.integers(1, 6), min_size=1, max_size=4)


@st.composite
def cut_texts(draw: st.DrawFn) -> tuple[str, list[tuple[int, int]]]:
    text = draw(any_text)
    count = 2 * draw(st.integers(1, 4))
    places = sorted(draw(st.lists(st.integers(0, len(text)), min_size=count, max_size=count)))
    return text, list(zip(places[::2], places[1::2], strict=True))


# --- texts with holes


@many
@given(pieces, st.data())
def test_a_filled_text_is_its_pieces_and_its_fills(
    texts: tuple[str, ...], data: st.DataObject
) -> None:
    document = InfillDocument(texts)
    fills = [data.draw(any_text) for _ in range(document.num_holes)]
    text, end = document.join(fills), 0
    for (start, stop), fill, piece in zip(document.spans(fills), fills, texts, strict=False):
        assert text[end:start] == piece and text[start:stop] == fill
        end = stop
    assert text[end:] == texts[-1]


@many
@given(pieces)
def test_marks_are_where_holes_are(texts: tuple[str, ...]) -> None:
    if not any(FILL_MARK in piece for piece in texts):
        assert InfillDocument.parse(FILL_MARK.join(texts)) == InfillDocument(texts)


@many
@given(cut_texts())
def test_cut_spans_put_back_give_the_text(cut: tuple[str, list[tuple[int, int]]]) -> None:
    text, spans = cut
    assert InfillDocument.cut(text, spans).join([text[a:b] for a, b in spans]) == text


@pytest.mark.parametrize("spans", [[(2, 1)], [(0, 9)], [(0, 2), (1, 3)], [(-1, 2)]])
def test_spans_that_are_none_are_refused(spans: list[tuple[int, int]]) -> None:
    with pytest.raises(UsageError, match="is not one of a text of 5 characters"):
        InfillDocument.cut("abcde", spans)


def test_texts_without_holes_or_with_half_characters_are_refused() -> None:
    with pytest.raises(UsageError, match="no hole"):
        InfillDocument.parse("nothing to do")
    with pytest.raises(UsageError, match="surrogate"):
        InfillDocument.parse(f"a{FILL_MARK}\ud83d")


# --- canvases


@many
@given(sizes, st.data())
def test_a_canvas_holds_holes_and_the_text_between_them(
    own: list[int], data: st.DataObject
) -> None:
    holes = [Hole(after=tuple(data.draw(st.lists(st.integers(100, 110), max_size=5)))) for _ in own]
    length = num_positions(holes, own) + data.draw(st.integers(0, 9))
    layout = lay_out(holes, own, length, end_id=7)
    canvas: list[int | None] = [None] * length
    for position, token in zip(layout.pins.positions, layout.pins.tokens, strict=True):
        canvas[position] = token
    wanted: list[int | None] = []
    for hole, size in zip(holes, own, strict=True):
        wanted += [*[None] * size, *hole.after]
    assert canvas == (wanted + [7] * length)[:length]
    assert [b - a for a, b in layout.holes] == own
    assert all(canvas[i] is None for a, b in layout.holes for i in range(a, b))


def test_holes_that_do_not_fit_are_refused() -> None:
    with pytest.raises(UsageError, match="do not fit a canvas of 4"):
        lay_out([Hole(after=())], [5], 4, end_id=7)


@many
@given(sizes, st.integers(1, 20), st.data())
def test_groups_take_all_holes_in_order_and_fit(
    own: list[int], room: int, data: st.DataObject
) -> None:
    between = [data.draw(st.integers(0, 8)) for _ in own[1:]]
    groups = group_holes(between, own, room)
    assert [hole for one in groups for hole in one] == list(range(len(own)))
    for one in groups:
        taken = sum(own[i] for i in one) + sum(between[i] for i in one[:-1])
        assert taken <= room or len(one) == 1
    for one, following in pairwise(groups):
        more = range(one.start, following.start + 1)
        assert sum(own[i] for i in more) + sum(between[i] for i in more[:-1]) > room


# --- lengths


@many
@given(st.integers(1, 500))
def test_grids_reach_the_limit_without_a_long_gap(limit: int) -> None:
    found = doubling_lengths(limit)
    assert (
        found[0] == 1 and found == sorted(set(found)) and found[-1] <= limit < 1.5 * found[-1] + 1
    )
    assert all(b <= 2 * a for a, b in pairwise(found))


@many
@given(st.integers(1, 300), st.integers(2, 16))
def test_one_batch_of_lengths_reaches_the_limit_evenly(limit: int, count: int) -> None:
    found, factor = geometric_lengths(limit, count), limit ** (1 / (count - 1))
    assert found == sorted(set(found)) and len(found) <= count
    assert found[0] == 1 and found[-1] == limit
    assert len(found) == limit or all(b <= factor * (a + 0.5) + 0.501 for a, b in pairwise(found))


@many
@given(st.integers(1, 200), st.integers(1, 300))
def test_lengths_around_the_best_are_near_it_and_allowed(best: int, limit: int) -> None:
    found = nearby_lengths(best, limit)
    assert best not in found and all(1 <= size <= limit for size in found)
    assert all(0.7 * best - 1 <= size <= 1.5 * best + 1 for size in found)
    assert best >= limit or best + 1 in found


def test_lengths_vary_one_hole_at_a_time() -> None:
    assert vary_one_hole((4, 8), [(2, 4), (8, 9)]) == [(4, 8), (2, 8), (4, 9)]


# --- healing


@some
@given(any_text, pieces)
def test_healing_gives_back_what_it_takes(before: str, texts: tuple[str, ...]) -> None:
    ids = TOKENIZER.encode(before)
    tokens = [tuple(TOKENIZER.encode(piece)) for piece in texts]
    healing = find_healing(TOKENIZER, ids, tokens)
    kept = TOKENIZER.decode_bytes(healing.shared)
    assert kept + healing.edge == before.encode()
    words = list(complete_words(TOKENIZER, healing, range(TOKENIZER.vocab_size)))
    for variant in (healing.none, healing.spaces, *healing.others, *words):
        written = TOKENIZER.decode_bytes(variant.ids, skip_control=True)
        whole = kept + written.removesuffix(variant.written)
        for hole in variant.holes:
            whole += (
                hole.required_prefix
                + b"|"
                + hole.required_suffix
                + TOKENIZER.decode_bytes(hole.after)
            )
        assert whole == before.encode() + b"|" + b"|".join(p.encode() for p in texts)


def test_a_lone_space_is_given_to_the_canvas() -> None:
    healing = find_healing(TOKENIZER, TOKENIZER.encode("it is "), [(5,)])
    assert (healing.edge, healing.spaces.ids, healing.spaces.holes[0].required_prefix) == (
        b" ",
        (),
        b" ",
    )
    indented = find_healing(TOKENIZER, TOKENIZER.encode("x:\n    "), [(5,)])
    assert indented.spaces == indented.none and indented.spaces.holes[0].required_prefix == b""


def test_an_open_word_is_completed_by_tokens_that_begin_with_it() -> None:
    healing = find_healing(TOKENIZER, TOKENIZER.encode("and tho"), [()])
    assert healing.edge == b"tho"
    found = list(complete_words(TOKENIZER, healing, range(TOKENIZER.vocab_size)))
    assert {one.written for one in found} == {b"u", b"ught"}


def test_bytes_that_do_not_agree_with_the_text_are_no_fill() -> None:
    hole = Hole(after=(), required_prefix=b" ", required_suffix=b"ing")
    assert strip_required(b" going", hole) == b"go" and strip_required(b" ing", hole) == b""
    assert strip_required(b"going", hole) is None and strip_required(b" gone", hole) is None
    assert (
        strip_required(b" in", Hole(after=(), required_prefix=b" i", required_suffix=b"in")) is None
    )


# --- what a hole may hold


@many
@given(any_text, any_text, any_text, st.booleans())
def test_a_trimmed_fill_is_the_beginning_of_what_was_said(
    text: str, before: str, after: str, single: bool
) -> None:
    trimmed = trim_fill(text, before, after, FillRules(single_line=single, stop=("the",)))
    assert text.startswith(trimmed) and "the" not in trimmed
    if single:
        body = trimmed.removesuffix("\n").removesuffix("\r")
        assert "\n" not in body and "\r" not in body


@pytest.mark.parametrize(
    ("text", "before", "after", "wanted"),
    [
        ("x = 1\ny = 2", "a\n", "", "x = 1"),  # the text ends there: no line to keep apart
        ("x = 1\ny = 2", "a\n", "b", "x = 1\n"),  # a line of its own
        ("x = 1\r\ny = 2", "a\n", "b", "x = 1\r\n"),
        ("x = 1\ny = 2", "a\n", "\nb", "x = 1"),
        ("x = 1\ny = 2", "a = ", "b", "x = 1"),  # the rest of a line
        ("x = 1", "a\n", "b", "x = 1"),
        ("\n", "a = ", "b", ""),
    ],
)
def test_a_line_keeps_its_end_only_where_it_is_one(
    text: str, before: str, after: str, wanted: str
) -> None:
    assert first_line(text, before, after) == wanted


def test_what_is_repeated_of_the_text_after_is_cut() -> None:
    after = "    return total\n"
    assert without_overlap("total = 0\n    return total\n", after) == "total = 0\n"
    assert without_overlap("f(x)", ")") == "f(x)"  # too little to be no coincidence
    assert without_overlap(after, after) == after  # something has to stay
    assert without_overlap(" " * 40, " " * 30) == " " * 40


# --- windows


@some
@given(any_text, st.integers(0, 30))
def test_windows_are_ends_of_the_text_and_short_enough(text: str, count: int) -> None:
    last, first = last_tokens(TOKENIZER, text, count), first_tokens(TOKENIZER, text, count)
    assert text.endswith(last) and text.startswith(first)
    if len(TOKENIZER.encode(text)) <= count:
        assert last == first == text


def test_windows_are_cut_at_lines_where_one_is_near() -> None:
    text = "\n".join(["abc def"] * 20)
    assert last_tokens(TOKENIZER, text, 30).startswith("abc") and first_tokens(
        TOKENIZER, text, 30
    ).endswith("\n")
