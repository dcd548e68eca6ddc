"""Text deltas: whole characters only, and never a piece of a stop string."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dgemma.errors import UsageError
from dgemma.text.detokenizer import Detokenizer, StopStrings
from dgemma.text.tokenizer import Tokenizer
from tests.text.small import small_tokenizer
from tests.text.strategies import cut, quick

letters = st.text("abc", max_size=12)
stops = st.lists(st.text("abc", min_size=1, max_size=4), max_size=3)


def byte_ids(data: bytes) -> list[int]:
    first = small_tokenizer()._backend.token_to_id("<0x00>")
    return [first + byte for byte in data]


def up_to_the_earliest(text: str, strings: list[str]) -> tuple[str, str | None]:
    found = [(text.find(stop), len(stop), stop) for stop in strings if stop in text]
    return (text[: min(found)[0]], min(found)[2]) if found else (text, None)


@quick
@given(pieces=st.lists(letters), strings=stops)
def test_stop_strings_cut_alike_in_any_pieces(pieces: list[str], strings: list[str]) -> None:
    filtered = StopStrings(strings)
    deltas = [filtered.feed(piece) for piece in pieces]
    deltas.append(filtered.finish())
    expected, stop = up_to_the_earliest("".join(pieces), strings)
    assert ("".join(deltas), filtered.stopped_by) == (expected, stop)


@quick
@given(text=letters, strings=stops)
def test_text_is_held_back_no_longer_than_needed(text: str, strings: list[str]) -> None:
    filtered = StopStrings(strings)
    given_out = ""
    for position, letter in enumerate(text, start=1):
        given_out += filtered.feed(letter)
        if filtered.stopped_by is not None:
            return
        held = text[len(given_out) : position]
        assert not held or any(stop.startswith(held) for stop in strings)


@pytest.mark.parametrize(
    ("strings", "pieces", "expected", "stop"),
    [
        (["END"], ["one E", "N", "D two"], "one ", "END"),
        (["END"], ["one E", "N", "X two"], "one ENX two", None),
        (["END"], ["one EN"], "one EN", None),
        (["END"], ["END"], "", "END"),
        (["ab", "abc"], ["xabc"], "x", "ab"),
        (["abcd", "bc"], ["xabc", "d"], "x", "abcd"),
        (["abcd", "bc"], ["xabc", "e"], "xa", "bc"),
        (["abcd", "bc"], ["xabc"], "xa", "bc"),
        (["aab"], ["aaa", "ab!"], "aa", "aab"),
        (["\n\n"], ["a\n", "\nb"], "a", "\n\n"),
        ([], ["a", "b"], "ab", None),
    ],
)
def test_the_earliest_stop_string_cuts(
    strings: list[str], pieces: list[str], expected: str, stop: str | None
) -> None:
    filtered = StopStrings(strings)
    text = "".join([*map(filtered.feed, pieces), filtered.finish()])
    assert (text, filtered.stopped_by) == (expected, stop)
    assert filtered.feed("more") == "" or stop is None


def test_an_empty_stop_string_is_refused() -> None:
    with pytest.raises(UsageError, match="empty"):
        StopStrings(["a", ""])


@quick
@given(data=st.binary(max_size=24), seed=st.integers(0, 999))
def test_any_bytes_stream_as_they_decode(small: Tokenizer, data: bytes, seed: int) -> None:
    stream = Detokenizer(small)
    deltas = [stream.feed(block) for block in cut(byte_ids(data), seed)]
    assert "".join(deltas) + stream.finish() == small.decode(byte_ids(data))


@quick
@given(data=st.data(), seed=st.integers(0, 999))
def test_any_ids_stream_as_they_decode(
    tokenizer: Tokenizer, data: st.DataObject, seed: int
) -> None:
    ids = data.draw(st.lists(st.integers(0, min(tokenizer.vocab_size, 600) - 1), max_size=30))
    stream = Detokenizer(tokenizer)
    deltas = [stream.feed(block) for block in cut(ids, seed)]
    assert "".join(deltas) + stream.finish() == tokenizer.decode(ids)


def test_an_incomplete_character_waits_and_ends_as_one_replacement(small: Tokenizer) -> None:
    stream = Detokenizer(small)
    assert stream.feed(byte_ids(b"a\xf0\x9f")) == "a"
    assert stream.feed(byte_ids(b"\x98")) == ""
    assert stream.finish() == "\ufffd"


def test_a_character_goes_on_in_the_next_block(small: Tokenizer) -> None:
    stream = Detokenizer(small)
    assert stream.feed(byte_ids("é".encode()[:1])) == ""
    assert stream.feed(byte_ids("é".encode()[1:])) == "é"


@quick
@given(seed=st.integers(0, 999))
def test_a_stop_string_across_blocks_and_inside_characters_cuts(
    tokenizer: Tokenizer, seed: int
) -> None:
    stream, filtered = Detokenizer(tokenizer), StopStrings(["終わり", "###"])
    blocks = cut(tokenizer.encode("Ω 終わ 終わり rest ###"), seed)
    deltas = [filtered.feed(stream.feed(block)) for block in blocks]
    assert "".join(deltas) + filtered.feed(stream.finish()) + filtered.finish() == "Ω 終わ "
    assert filtered.stopped_by == "終わり"
