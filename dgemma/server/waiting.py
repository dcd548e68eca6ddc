"""Who is next: each owner of a key in turn, and each owner's requests in their order."""

from collections import OrderedDict, deque
from typing import Generic, TypeVar

T = TypeVar("T")


class FairQueue(Generic[T]):
    """Waiting items of several owners. The limit is one owner's: nobody can crowd others out."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._lines: OrderedDict[str, deque[T]] = OrderedDict()  # the first owner is next

    def __len__(self) -> int:
        return sum(map(len, self._lines.values()))

    def has_room(self, owner: str, count: int = 1) -> bool:
        return len(self._lines.get(owner, ())) + count <= self.limit

    def push(self, owner: str, item: T) -> None:
        self._lines.setdefault(owner, deque()).append(item)

    def peek(self) -> T | None:
        """The item that is next."""
        return next((line[0] for line in self._lines.values()), None)

    def pop(self) -> T:
        """Take the next item; its owner goes to the back."""
        owner, line = next(iter(self._lines.items()))
        item = line.popleft()
        self._lines.move_to_end(owner)
        if not line:
            del self._lines[owner]
        return item

    def remove(self, owner: str, item: T) -> bool:
        """Take an item out of turn; whether it was there."""
        line = self._lines.get(owner, deque())
        if item not in line:
            return False
        line.remove(item)
        if not line:
            del self._lines[owner]
        return True

    def items(self) -> list[T]:
        return [item for line in self._lines.values() for item in line]
