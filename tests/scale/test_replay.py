"""Streams that are cut anywhere and continued by another replica, as their client sees them."""

import json
import random
from itertools import chain, zip_longest

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dgemma.scale.replay import Replay, ReplayDiffers
from dgemma.scale.replica import rank_replicas as rank

Event = tuple[str, bytes]  # kind, text


def committed(answer: int, block: int) -> bytes:
    fields = {"index": answer, "ids": [answer, block], "logprob": None, "steps": 3}
    return f": committed {json.dumps(fields)}".encode()


def answer_events(answer: int, blocks: int, *, drafts: bool) -> list[Event]:
    """A commit, its drafts and its text, for each block."""
    events: list[Event] = [
        ("promised", f'id: {answer}.1-00000000\ndata: {{"a":{answer}}}'.encode())
    ]
    for block in range(blocks):
        if drafts:
            events.append(("draft", f'data: {{"draft":"{answer}.{block}"}}'.encode()))
        events.append(("commit", committed(answer, block)))
        name = f"id: {answer}.{block + 2}-{block + 1:08x}\n"
        events.append(("promised", f'{name}data: {{"text":"{answer}.{block}"}}'.encode()))
    return events


def stream(answers: int, blocks: int, seed: int = 0, *, drafts: bool = True) -> list[Event]:
    """The answers' events, interleaved by chance as passes interleave them."""
    parts = [answer_events(answer, blocks, drafts=drafts) for answer in range(answers)]
    rng, merged = random.Random(seed), list[Event]()
    while any(parts):
        merged.append(rng.choice([part for part in parts if part]).pop(0))
    return [*merged, ("promised", b"id: -1.1-00000000\ndata: [DONE]"), ("end", b": ended")]


def joined(events: list[Event]) -> bytes:
    frames = (data if data.startswith(b":") else data + b"\n\n" for _, data in events)
    return b"".join(frame + b"\x1e" for frame in frames)


def promised_of(data: bytes) -> list[str]:
    lines = [line for line in data.decode().split("\n\n") if line]
    return sorted(line for line in lines if "draft" not in line)


WHOLE = promised_of(Replay().feed(joined(stream(2, 3))))


@given(
    cuts=st.lists(st.integers(0, len(joined(stream(2, 3)))), max_size=3),
    seeds=st.lists(st.integers(0, 99), min_size=4, max_size=4),
)
def test_a_stream_cut_at_any_bytes_is_whole_and_nothing_comes_twice(
    cuts: list[int], seeds: list[int]
) -> None:
    replay, seen = Replay(), b""
    for cut, seed in zip(cuts, seeds, strict=False):
        seen += replay.feed(joined(stream(2, 3, seed))[:cut])
        if replay.is_over:
            break
        replay.restart()
    if not replay.is_over:
        seen += replay.feed(joined(stream(2, 3, seeds[-1])))
    assert replay.is_over
    assert promised_of(seen) == WHOLE
    assert b"id:" not in seen and b"committed" not in seen


def test_commits_are_gathered_by_answer_and_once() -> None:
    replay = Replay()
    data = joined(stream(2, 3))
    replay.feed(data[: len(data) // 2])
    so_far = {index: len(known) for index, known in replay.committed.items()}
    assert sum(so_far.values()) > 1
    replay.restart()
    replay.feed(data)
    assert [fields["ids"] for fields in replay.committed[1]] == [[1, 0], [1, 1], [1, 2]]
    assert "index" not in replay.committed[0][0]


def test_a_replica_that_writes_another_text_is_noticed() -> None:
    replay = Replay()
    data = joined(stream(1, 2))
    replay.feed(data[: data.index(b"id: 0.3")])
    replay.restart()
    with pytest.raises(ReplayDiffers):
        replay.feed(data.replace(b"0.2-00000001", b"0.2-000000ff"))


def test_drafts_of_blocks_that_the_client_has_are_not_shown_again() -> None:
    replay = Replay()
    data = joined(stream(1, 3))
    replay.feed(data[: data.index(b"id: 0.4")])
    replay.restart()
    again = replay.feed(data)
    assert b"0.0" not in again and b"0.1" not in again
    assert b'"text":"0.2"' in again


def test_an_error_ends_a_stream_also_while_it_is_repeated() -> None:
    replay = Replay()
    data = joined(stream(1, 3))
    replay.feed(data[: data.index(b"id: 0.4")])
    replay.restart()
    error = b'data: {"error":{"message":"x"}}\n\n'
    assert replay.feed(b": ended\x1e" + error + b"\x1e") == error
    assert replay.is_over


# --- the choice of a replica


def test_a_conversation_keeps_its_replica_when_others_come_and_go() -> None:
    load = dict.fromkeys("abcd", 0)
    first = {f"talk {i}": rank(f"talk {i}", load)[0] for i in range(400)}
    counts = [list(first.values()).count(replica) for replica in load]
    assert min(counts) > 60
    without = {name: 0 for name in load if name != "b"}
    moved = [talk for talk in first if rank(talk, without)[0] != first[talk]]
    assert all(first[talk] == "b" for talk in moved)
    more = {**load, "e": 0}
    assert all(rank(talk, more)[0] in (first[talk], "e") for talk in first)


def test_a_busy_replica_comes_after_the_others() -> None:
    preferred, *others = rank("talk", {"a": 0, "b": 0, "c": 0})
    load = {preferred: 3, others[0]: 0, others[1]: 0}
    assert rank("talk", load, slack=3)[0] == preferred
    load[preferred] = 4
    assert rank("talk", load, slack=3) == [*others, preferred]
    assert rank("", {"a": 2, "b": 1})[0] == "b"
    assert rank("talk", {}) == []


def test_an_opening_that_is_no_unicode_has_a_replica_too() -> None:
    """Ray's router stops for all requests if the choice for one of them fails."""
    assert sorted(rank('["\ud800"]', {"a": 0, "b": 0})) == ["a", "b"]


def test_interleaving_helpers_make_whole_streams() -> None:
    """The tests above mean something only if different seeds give different orders."""
    orders = {joined(stream(2, 3, seed)) for seed in range(9)}
    assert len(orders) > 4
    pairs = zip_longest(*(answer_events(a, 3, drafts=True) for a in range(2)))
    assert {data for _, data in chain.from_iterable(pairs)} < {d for _, d in stream(2, 3)}
