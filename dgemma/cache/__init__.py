"""Keys and values of what has been committed, one `KVCache` per row, and what a pass sees of them.

A row keeps what it has been given; a `Pass` lays the new tokens of several rows end to end.
"""

from dgemma.cache.passes import Pass, Span
from dgemma.cache.row import KVCache, Room

__all__ = ["KVCache", "Pass", "Room", "Span"]
