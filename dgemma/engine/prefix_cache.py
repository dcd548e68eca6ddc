"""KV caches of finished requests, kept for requests that begin with the same tokens.

A committed key depends on the tokens up to its own, so any common prefix can be reused, as far as
the sliding windows reach back (`KVCache.max_reusable`). In 16 bits it also depends, in its last
digits, on the chunks in which it was computed: there a prefix is reused only up to a boundary at
which a fresh prompt would be cut too (`alignment`), and only as far as it was computed as a prompt.

The ids of an entry must stand for all that its keys were made from: where embeddings do not come
from the token table, as those of an image, the caller puts ids that name them.

A request that shares most of an entry, or all up to its last checkpoint, takes it out and goes on
with it; one that shares only its beginning gets a copy. The store knows neither requests nor the
model, and evicts the least recently used.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from dgemma.model.kv_cache import Capacity, KVCache

MAX_ENTRIES = 256  # a request looks at each of them
MOVED_SHARE = 0.5  # of an entry's tokens: a request that shares so many takes the entry itself


@dataclass(frozen=True, slots=True)
class Entry:
    """An idle sequence and the tokens it holds."""

    ids: NDArray[np.int64]
    cache: KVCache
    prefilled: int  # tokens that were computed as a prompt, in aligned chunks

    def common(self, ids: NDArray[np.int64]) -> int:
        """Length of the common prefix."""
        length = min(len(self.ids), len(ids))
        differs = self.ids[:length] != ids[:length]
        return int(differs.argmax()) if differs.any() else length

    def covers(self, other: "Entry") -> bool:
        """True if this entry can serve every request that the other can."""
        length = len(other.ids)
        is_longer = self.common(other.ids) == length and self.prefilled >= other.prefilled
        return is_longer and self.cache.can_truncate(length)

    def reusable(self, ids: NDArray[np.int64], alignment: int) -> int:
        """The longest prefix of `ids` that can be reused."""
        length = self.common(ids)
        if alignment == 1:
            return self.cache.max_reusable(length)
        length = min(length, self.prefilled)
        while length := length // alignment * alignment:
            found = self.cache.max_reusable(length)
            if found == length:
                return length
            length = found
        return 0


class PrefixStore:
    """Idle sequences within a bound of memory."""

    def __init__(self, max_bytes: int, alignment: int = 1) -> None:
        self.max_bytes, self.alignment = max_bytes, alignment
        self.entries: list[Entry] = []  # the one used longest ago comes first

    def __len__(self) -> int:
        return len(self.entries)

    @property
    def num_bytes(self) -> int:
        return sum(entry.cache.num_bytes for entry in self.entries)

    def clear(self) -> None:
        self.entries.clear()

    def take(
        self, ids: Sequence[int], room: Capacity, *, leave: int = 1
    ) -> tuple[KVCache, int] | None:
        """A row that holds the longest usable beginning of a prompt, and how long that is.

        The last `leave` tokens are not looked for: a request needs their hidden states.
        """
        wanted = np.asarray(ids, dtype=np.int64)[: max(0, len(ids) - leave)]
        usable = [entry.reusable(wanted, self.alignment) for entry in self.entries]
        if not any(usable):
            return None
        # Of equals the shortest, which has least to lose, and of those the one used last.
        length, _, index = max((n, -len(self.entries[i].ids), i) for i, n in enumerate(usable))
        entry = self.entries.pop(index)
        goes_on = length + leave >= max(entry.cache.checkpoints, default=len(entry.ids))
        if goes_on or length >= MOVED_SHARE * len(entry.ids):
            entry.cache.truncate(length)
            entry.cache.capacity = room
            return entry.cache, length
        self.entries.append(entry)
        return entry.cache.copy(length, room), length

    def keep(self, ids: Sequence[int], cache: KVCache, prefilled: int | None = None) -> None:
        """Store a sequence that holds exactly `ids` and that nobody will change any more.

        `prefilled`: tokens that were computed as a prompt; None: all of them.
        """
        assert len(ids) == cache.length, f"{len(ids)} ids for a row of {cache.length} tokens"
        if self.max_bytes <= 0:
            return  # not even trimmed, for which a layer's keys would be there twice
        if cache.shared_prefix is not None or cache.is_shared:
            cache = cache.copy(cache.length, replace(cache.capacity, tokens=cache.length))
        cache.trim()
        if cache.num_bytes <= self.max_bytes:
            count = len(ids) if prefilled is None else prefilled
            new = Entry(np.array(ids, dtype=np.int64), cache, count)
            self.entries = [entry for entry in self.entries if not new.covers(entry)]
            self.entries.append(new)
        del self.entries[:-MAX_ENTRIES]
        while self.num_bytes > self.max_bytes:
            self.entries.pop(0)
