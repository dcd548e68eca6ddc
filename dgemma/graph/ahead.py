"""Where the next commit's keys will lie, found while the device is still busy with the last one.

To look it up takes the host as long as several launches, layer by layer; between two tokens the
device would stand idle meanwhile.
"""

from dataclasses import dataclass
from weakref import ref

import numpy as np
from numpy.typing import NDArray

from dgemma.cache import KVCache

Numbers = NDArray[np.int64]  # six for each layer, and the position of the first token


@dataclass(frozen=True, slots=True)
class _Known:
    row: ref[KVCache]
    length: int
    moves: int
    numbers: Numbers

    def holds(self, cache: KVCache) -> bool:
        is_same = self.row() is cache and not cache.is_shared
        return is_same and (self.length, self.moves) == (cache.length, cache.moves)


class Ahead:
    """For commits of so many tokens."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.known: _Known | None = None

    def take(self, cache: KVCache) -> Numbers | None:
        """Make place for a commit; its numbers, or None if keys lie in more places than two."""
        if self.known is not None and self.known.holds(cache):
            return self.known.numbers
        cache.reserve(self.count)
        return self._look_up(cache)

    def prepare(self, cache: KVCache) -> None:
        """Look up what the next commit asks for, unless it has to move memory first."""
        self.known = None
        if cache.is_shared or not cache.has_room(self.count):
            return
        numbers = self._look_up(cache)
        if numbers is not None:
            self.known = _Known(ref(cache), cache.length, cache.moves, numbers)

    def _look_up(self, cache: KVCache) -> Numbers | None:
        places = cache.places(cache.length, self.count)
        if places is None:
            return None
        return np.array([*(n for row in places for n in row), cache.length], dtype=np.int64)
