"""Coming and going: requests are counted and named; a stopping server finishes what it has begun.

The first signal starts the drain: new requests get a 503, running ones end in peace. The second
signal quits at once.
"""

import re
import secrets
import time
from collections.abc import Callable
from types import FrameType

import uvicorn
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from dgemma.server.faults import ApiError
from dgemma.server.metrics import Metrics

ALWAYS_OPEN = frozenset({"/health", "/ready", "/metrics"})
REQUEST_ID = re.compile(r"[\w.-]{1,64}")


class Drain:
    """Whether the server is stopping, and what it still has to do."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.in_flight = 0
        self.began: float | None = None

    def begin(self) -> bool:
        """Take no more requests; False if that was so before."""
        if self.began is not None:
            return False
        self.began = time.monotonic()
        return True

    @property
    def is_over(self) -> bool:
        return self.began is not None and self.in_flight == 0

    @property
    def is_overdue(self) -> bool:
        return self.began is not None and time.monotonic() - self.began > self.seconds


class Gate:
    """Counts requests, gives each an id, and turns new ones away while the server drains."""

    def __init__(self, app: ASGIApp, drain: Drain, metrics: Metrics) -> None:
        self.app, self.drain, self.metrics = app, drain, metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        request_id = _request_id(dict(scope["headers"]).get(b"x-request-id", b""))
        scope.setdefault("state", {})["request_id"] = request_id
        status = 500

        async def send_named(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                named = (b"x-request-id", request_id.encode())
                message = {**message, "headers": [*message.get("headers", ()), named]}
            await send(message)

        self.drain.in_flight += 1
        try:
            await self._enter(scope, receive, send_named)
        finally:
            self.drain.in_flight -= 1
            self.metrics.requests.labels(_path(scope), status).inc()

    async def _enter(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self.drain.began is not None and scope["path"] not in ALWAYS_OPEN:
            error = ApiError(
                503, "the server is stopping; try again soon", code="draining", retry_after=5
            )
            await error.response()(scope, receive, send)
            return
        await self.app(scope, receive, send)


class Server(uvicorn.Server):
    """A server that drains on the first signal. What does not end in time is abandoned."""

    def __init__(
        self,
        config: uvicorn.Config,
        drain: Drain,
        abandon: Callable[[], None],
        on_drain: Callable[[int], None],
    ) -> None:
        super().__init__(config)
        self.drain, self.abandon, self.on_drain = drain, abandon, on_drain

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self.drain.begin():
            self.on_drain(self.drain.in_flight)
            return
        super().handle_exit(sig, frame)
        self.force_exit = True

    async def on_tick(self, counter: int) -> bool:
        if self.drain.is_overdue and not self.should_exit:
            self.abandon()
        self.should_exit = self.should_exit or self.drain.is_over or self.drain.is_overdue
        return await super().on_tick(counter)


def _request_id(given: bytes) -> str:
    text = given.decode("latin-1")
    return text if REQUEST_ID.fullmatch(text) and text.isascii() else f"req_{secrets.token_hex(12)}"


def _path(scope: Scope) -> str:
    """The route, not the path as it was asked for: those are without number."""
    route = scope.get("route")
    return "other" if route is None else str(route.path)
