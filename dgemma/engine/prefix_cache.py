"""Prefix cache: KV caches of finished requests, reused by requests with the same prefix.

A committed key depends only on the tokens up to its position, so any common prefix can be reused,
as far as the sliding windows reach back (`KVCache.max_reusable`). In 16 bits a key's rounding also
depends on the prefill chunks: there a prefix is reused only up to a chunk boundary (`alignment`)
and only as far as it was computed as a prompt.

The ids of an entry identify everything its keys were computed from: soft tokens of a picture have
negative ids (`Picture.cache_ids`). A prefix never ends inside a picture.

A request that shares most of an entry, or all of it up to its last checkpoint, takes the entry and
appends to it; a request that shares only the beginning gets a copy. The cache evicts the least
recently used entry, and knows neither requests nor the model.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from dgemma.model.kv_cache import Capacity, KVCache

MAX_ENTRIES = 256  # each lookup compares with all entries
MIN_MOVED_FRACTION = 0.5  # a request that shares at least this fraction takes the entry


@dataclass(frozen=True, slots=True)
class Entry:
    """A cached sequence and the tokens it holds."""

    ids: NDArray[np.int64]
    cache: KVCache
    prefilled: int  # tokens that were computed as a prompt, in aligned chunks

    def common(self, ids: NDArray[np.int64]) -> int:
        """Length of the common prefix."""
        length = min(len(self.ids), len(ids))
        differs = self.ids[:length] != ids[:length]
        return int(differs.argmax()) if differs.any() else length

    def covers(self, other: "Entry") -> bool:
        """True if this entry serves every request that the other one serves."""
        length = len(other.ids)
        is_longer = self.common(other.ids) == length and self.prefilled >= other.prefilled
        return is_longer and self.cache.can_truncate(length)

    def reusable(self, ids: NDArray[np.int64], alignment: int) -> int:
        """Return the length of the longest reusable prefix of `ids`."""
        length = self.common(ids)
        if alignment > 1:
            length = min(length, self.prefilled)
        while length := _whole_images(ids, length // alignment * alignment):
            reusable = self.cache.max_reusable(length)
            if reusable == length and length % alignment == 0:
                return length
            length = min(reusable, length - length % alignment)
        return 0


def _whole_images(ids: NDArray[np.int64], length: int) -> int:
    """Shorten a prefix that ends inside a picture (negative ids) to before the picture."""
    while 0 < length < len(ids) and ids[length - 1] < 0 and ids[length] < 0:
        length -= 1
    return length


class PrefixStore:
    """Cached sequences within a memory limit."""

    def __init__(self, max_bytes: int, alignment: int = 1) -> None:
        self.max_bytes, self.alignment = max_bytes, alignment
        self.entries: list[Entry] = []  # least recently used first

    def __len__(self) -> int:
        return len(self.entries)

    @property
    def num_bytes(self) -> int:
        return sum(entry.cache.num_bytes for entry in self.entries)

    def clear(self) -> None:
        self.entries.clear()

    def resize(self, max_bytes: int) -> None:
        """Clear the cache and set its memory limit."""
        self.clear()
        self.max_bytes = max_bytes

    def take(self, ids: Sequence[int], capacity: Capacity) -> KVCache | None:
        """Return a sequence with the longest reusable prefix of a prompt, if any.

        The prompt's last token is excluded: a request needs its hidden state.
        """
        prompt_ids = np.asarray(ids[:-1], dtype=np.int64)
        usable = [entry.reusable(prompt_ids, self.alignment) for entry in self.entries]
        if not any(usable):
            return None
        # Among equals the shortest, which wastes least, then the most recently used.
        length, _, index = max((n, -len(self.entries[i].ids), i) for i, n in enumerate(usable))
        entry = self.entries.pop(index)
        is_follow_up = length + 1 >= max(entry.cache.checkpoints, default=len(entry.ids))
        if is_follow_up or length >= MIN_MOVED_FRACTION * len(entry.ids):
            entry.cache.truncate(length)
            entry.cache.set_capacity(capacity)
            return entry.cache
        self.entries.append(entry)
        return entry.cache.copy(length, capacity)

    def keep(self, ids: Sequence[int], cache: KVCache, prefilled: int | None = None) -> None:
        """Store a sequence that holds exactly `ids` and belongs to no task.

        `prefilled`: tokens computed as a prompt; None: all.
        """
        assert len(ids) == cache.length, f"{len(ids)} ids for a sequence of {cache.length} tokens"
        if self.max_bytes <= 0:
            return  # trimming would need a layer's keys twice
        if cache.shared_prefix is not None or cache.is_shared:
            cache = cache.copy(cache.length, replace(cache.capacity, tokens=cache.length))
        cache.trim()
        if cache.num_bytes <= self.max_bytes:
            count = len(ids) if prefilled is None else prefilled
            new = Entry(np.array(ids, dtype=np.int64), cache, count)
            self.entries[:] = [*(old for old in self.entries if not new.covers(old)), new]
        del self.entries[:-MAX_ENTRIES]
        while self.num_bytes > self.max_bytes:
            self.entries.pop(0)
