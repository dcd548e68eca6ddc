"""What was looked up ahead is what would be found, or is not used."""

import pytest
import torch

from dgemma.cache import KVCache, Room
from dgemma.errors import UsageError
from dgemma.graph.ahead import Ahead
from tests.kernels.small import CPU, SMALL


def row(length: int = 3) -> KVCache:
    made = KVCache(SMALL, Room(tokens=12, span=4, slack=2), torch.float32, CPU)
    made.reserve(length)
    made.length = length
    return made


def found(cache: KVCache) -> list[int]:
    places = cache.places(cache.length, 1)
    assert places is not None
    return [*(n for one in places for n in one), cache.length]


def test_tokens_one_after_the_other_find_their_places_also_where_memory_moves() -> None:
    cache, ahead, moved, known = row(), Ahead(1), set(), 0
    for _ in range(30):
        known += ahead.known is not None
        numbers = ahead.take(cache)
        assert numbers is not None
        assert numbers.tolist() == found(cache)
        assert cache.has_room(1)
        moved.add(cache.moves)
        cache.length += 1
        ahead.prepare(cache)
    assert len(moved) > 3  # windows slid, and full layers grew
    assert known > 15


def test_what_was_looked_up_is_dropped_when_the_row_is_another_or_cut_back() -> None:
    ahead, cache, other = Ahead(1), row(5), row(5)
    ahead.prepare(cache)
    taken = ahead.take(other)
    assert taken is not None
    assert taken.tolist() == found(other) != found(cache)
    cache.truncate(4)
    cache.length = 5
    cache.trim()
    taken = ahead.take(cache)
    assert taken is not None
    assert taken.tolist() == found(cache)


def test_a_row_that_is_shared_is_refused_as_ever() -> None:
    ahead, cache = Ahead(1), row(5)
    ahead.prepare(cache)
    cache.branch(4)
    with pytest.raises(UsageError):
        ahead.take(cache)
