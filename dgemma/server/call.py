"""One HTTP request's answers, on the event loop's side of the queue."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any, TypeVar

from fastapi import Request

from dgemma.server.asking import Asked
from dgemma.server.faults import CLIENT_GONE, ApiError
from dgemma.server.worker import Failed, Finished, Ticket, Worker

if TYPE_CHECKING:
    from dgemma.server.worker import Item

T = TypeVar("T")
MAX_BACKLOG = 256  # events a client may fall behind before drafts are left out


class Call:
    """Answers to one request: submitted when made, cancelled when closed before their end."""

    def __init__(self, worker: Worker, asked: Asked, owner: str) -> None:
        self.asked, self.worker = asked, worker
        self._loop = asyncio.get_running_loop()
        self._items: asyncio.Queue[tuple[int, Item]] = asyncio.Queue()
        self._open = set(range(len(asked.plans)))
        most = worker.limits.seconds
        deadline = time.monotonic() + min(asked.max_seconds or most, most)
        self.tickets = [
            Ticket(
                plan=plan,
                owner=owner,
                deliver=self._deliver(index),
                deadline=deadline,
                wants_logprobs=asked.wants_logprobs,
            )
            for index, plan in enumerate(asked.plans)
        ]
        worker.submit(self.tickets)

    def _deliver(self, index: int) -> "Callable[[Item], None]":
        from dgemma.engine import Draft

        def deliver(item: "Item") -> None:
            if isinstance(item, Draft) and self._items.qsize() > MAX_BACKLOG:
                return  # nothing in it is promised, and the client is too slow for it
            self._loop.call_soon_threadsafe(self._items.put_nowait, (index, item))

        return deliver

    @property
    def is_over(self) -> bool:
        return not self._open

    async def begin(self) -> None:
        """Wait until an answer has left the queue; raises if it was refused there."""
        _, item = await self._items.get()
        if isinstance(item, Failed):
            raise item.error

    async def get(self) -> "tuple[int, Item]":
        """What happens next, and to which answer."""
        index, item = await self._items.get()
        if isinstance(item, Finished | Failed):
            self._open.discard(index)
        return index, item

    async def finish(self) -> list[Finished]:
        """All answers, complete; raises if one failed."""
        ended: dict[int, Finished] = {}
        while not self.is_over:
            index, item = await self.get()
            if isinstance(item, Failed):
                raise item.error
            if isinstance(item, Finished):
                ended[index] = item
        return [ended[index] for index in sorted(ended)]

    def close(self) -> None:
        """Cancel what has not ended."""
        if self._open:
            self.worker.cancel([self.tickets[index] for index in self._open])
            self._open.clear()


async def while_there(request: Request, work: Awaitable[T]) -> T:
    """Do the work unless the client leaves before it is done."""
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_gone(request.receive))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ApiError(CLIENT_GONE, "the client left")
        return task.result()
    finally:
        for waiting in (task, gone):
            waiting.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


async def _gone(receive: Callable[[], Awaitable[Any]]) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
