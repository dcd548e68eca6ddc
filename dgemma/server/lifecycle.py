"""The HTTP server on its socket, from start to drain.

Requests are counted and get ids; connections have time limits and a cap. The first signal starts
the drain: new requests get a 503, running ones finish. The second signal quits at once.
"""

import asyncio
import re
import resource
import secrets
import socket
import time
from collections.abc import Callable, MutableMapping
from types import FrameType
from typing import Any, ClassVar

import uvicorn
from starlette.applications import Starlette
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from dgemma.errors import DgemmaError, UsageError
from dgemma.server.errors import ApiError
from dgemma.server.limits import Limits
from dgemma.server.metrics import Metrics

ALWAYS_OPEN = frozenset({"/health", "/ready", "/metrics"})
REQUEST_ID = re.compile(r"[\w.-]{1,64}")
GRACEFUL_SECONDS = 5  # for requests that outlive the drain
MAX_HEADERS = 32 << 10  # bytes
ACCEPT_BATCH = 32  # connections accepted at a time, before the first of them is counted
RESERVED_DESCRIPTORS = 64 + 2 * ACCEPT_BATCH  # not for connections
BACKLOG = 1024  # connections that wait in the kernel


class Drain:
    """The state of a stopping server: start time, and requests in flight."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.in_flight = 0
        self.began: float | None = None

    def begin(self) -> bool:
        """Start the drain; False if it had started."""
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
    """Middleware that counts requests, names each, and rejects them with 503 while draining."""

    def __init__(self, app: ASGIApp, drain: Drain, metrics: Metrics) -> None:
        self.app, self.drain, self.metrics = app, drain, metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        request_id = _request_id(dict(scope["headers"]).get(b"x-request-id", b""))
        scope.setdefault("state", {})["request_id"] = request_id
        status = 500

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                header = (b"x-request-id", request_id.encode())
                message = {**message, "headers": [*message.get("headers", ()), header]}
            await send(message)

        self.drain.in_flight += 1
        try:
            await self._enter(scope, receive, send_with_id)
        finally:
            self.drain.in_flight -= 1
            self.metrics.requests.labels(_route(scope), status).inc()

    async def _enter(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self.drain.began is not None and scope["path"] not in ALWAYS_OPEN:
            error = ApiError(
                503, "the server is stopping; try again soon", code="draining", retry_after=5
            )
            await error.response(scope)(scope, receive, send)
            return
        await self.app(scope, receive, send)


class BodyLimit:
    """Middleware that limits the size of a body and the time it may take to arrive.

    Stores the size in the request's state, since large bodies are not parsed on the event loop, and
    the arrival time from which deadlines count.
    """

    def __init__(self, app: ASGIApp, limits: Limits) -> None:
        self.app, self.limits = app, limits

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        try:
            body = await self._read(scope, receive)
        except ApiError as error:
            await error.response(scope)(scope, receive, send)
            return
        scope.setdefault("state", {}).update(body_bytes=len(body), arrived=time.monotonic())
        await self.app(scope, _replay(body, receive), send)

    async def _read(self, scope: Scope, receive: Receive) -> bytearray:
        self._check(_declared_length(scope))
        body = bytearray()
        try:
            async with asyncio.timeout(self.limits.body_seconds):
                while (message := await receive())["type"] == "http.request":
                    body += message.get("body", b"")
                    self._check(len(body))
                    if not message.get("more_body", False):
                        return body
        except TimeoutError:
            seconds = self.limits.body_seconds
            raise ApiError(408, f"the body did not arrive within {seconds:g} seconds") from None
        raise ApiError(400, "the client left before its body was complete")

    def _check(self, size: int) -> None:
        most = self.limits.max_body
        if size > most:
            raise ApiError(413, f"the body is over {most} bytes; send a shorter conversation")


def _declared_length(scope: Scope) -> int:
    value = dict(scope["headers"]).get(b"content-length", b"0")
    return int(value[:19]) if value.isdigit() else 0


def _replay(body: bytearray, receive: Receive) -> Receive:
    """Return a receive function that replays a body that has been read."""
    whole: list[MutableMapping[str, Any]] = [
        {"type": "http.request", "body": bytes(body), "more_body": False}
    ]

    async def replay() -> Message:
        return whole.pop() if whole else await receive()

    return replay


class Server(uvicorn.Server):
    """A server that drains on the first signal. Requests that outlive the drain are abandoned."""

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

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        # asyncio accepts as many connections in a row as its backlog: a full backlog would
        # exhaust file descriptors before the cap applies. The kernel's backlog may be longer.
        await super().startup(sockets)
        for listening in sockets or ():
            listening.listen(BACKLOG)

    async def on_tick(self, counter: int) -> bool:
        if self.drain.is_overdue and not self.should_exit:
            self.abandon()
        self.should_exit = self.should_exit or self.drain.is_over or self.drain.is_overdue
        return await super().on_tick(counter)


class BoundedProtocol(H11Protocol):
    """HTTP with a cap on connections and time limits on request heads and stalled clients.

    Beyond the cap, the connection that has been idle longest is closed, so that silent clients
    cannot keep others out. If all others are busy, uvicorn answers with a 503.
    """

    limits: ClassVar[Limits]
    max_connections: ClassVar[int]
    # Connections without a request head, or idle between requests, oldest first, with timers.
    headless: "ClassVar[dict[BoundedProtocol, asyncio.TimerHandle]]"
    stall_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        if len(self.connections) > self.max_connections and self.headless:
            oldest = next(iter(self.headless))
            oldest._stop_awaiting()
            oldest.transport.close()
            self.connections.discard(oldest)
        self._await_head()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self.cycle is not None and not self.cycle.response_complete:
            self._stop_awaiting()
        elif not self.transport.is_closing():
            self._await_head()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.timeout_keep_alive_task is not None:
            self.headless[self] = self.timeout_keep_alive_task

    def pause_writing(self) -> None:
        super().pause_writing()
        self.stall_timer = self.loop.call_later(self.limits.stall_seconds, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        if self.stall_timer is not None:
            self.stall_timer.cancel()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_awaiting()
        if self.stall_timer is not None:
            self.stall_timer.cancel()
        super().connection_lost(exc)

    def _await_head(self) -> None:
        timer = self.headless.get(self)
        if timer is None or timer.cancelled():
            self.headless[self] = self.loop.call_later(
                self.limits.header_seconds, self.transport.close
            )

    def _stop_awaiting(self) -> None:
        timer = self.headless.pop(self, None)
        if timer is not None:
            timer.cancel()


def max_connections() -> int:
    """Return the number of connections that the file descriptor limit allows."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return 1 << 20
    return max(soft - RESERVED_DESCRIPTORS, 1)


def bind(host: str, port: int) -> socket.socket:
    """Bind the address before a long load; connections are refused until the server runs."""
    try:
        addresses = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        bound = socket.socket(addresses[0][0], socket.SOCK_STREAM)
    except (OSError, OverflowError) as error:
        raise UsageError(f"cannot listen on {host}:{port}: {error}") from None
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        bound.bind(addresses[0][4])
    except (OSError, OverflowError) as error:
        bound.close()
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise DgemmaError(f"{host} port {port}: {reason}; choose another --port") from None
    return bound


def make_server(app: Starlette, on_drain: Callable[[int], None] = lambda count: None) -> Server:
    """Return a server that is not yet running; `on_drain` gets the number of requests in flight."""
    service, limits = app.state.service, app.state.service.settings.limits
    connections = min(limits.max_connections, max_connections())
    bounds = {"limits": limits, "max_connections": connections, "headless": {}}
    config = uvicorn.Config(
        app,
        http=type("LimitedProtocol", (BoundedProtocol,), bounds),
        limit_concurrency=connections + 1,
        ws="none",
        loop="asyncio",  # even if uvloop is installed, as with Ray
        log_level="error",  # any client can cause warnings
        access_log=False,
        backlog=ACCEPT_BATCH,
        server_header=False,
        h11_max_incomplete_event_size=MAX_HEADERS,
        timeout_graceful_shutdown=GRACEFUL_SECONDS,
    )
    return Server(config, service.drain, service.abandon, on_drain)


def _request_id(given: bytes) -> str:
    text = given.decode("latin-1")
    return text if REQUEST_ID.fullmatch(text) and text.isascii() else f"req_{secrets.token_hex(12)}"


def _route(scope: Scope) -> str:
    """Return the route instead of the path, of which there are arbitrarily many."""
    route = scope.get("route")
    return "other" if route is None else str(route.path)
