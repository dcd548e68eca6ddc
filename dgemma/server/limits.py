"""How much a server takes on: in one request, at once, and in its queue."""

import asyncio
from collections.abc import MutableMapping
from dataclasses import dataclass
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from dgemma.errors import UsageError
from dgemma.server.faults import ApiError

# Of one request; wire.py holds them.
MAX_MESSAGES = 1024
MAX_TOOLS = 128
MAX_STOPS = 64
MAX_STOP_LENGTH = 256  # characters
MAX_CHOICES = 8
MAX_PROMPTS = 16
MAX_CONSTRAINT = 1 << 16  # characters of a schema, or of whatever else a text is held to
MAX_LABELS = 256  # texts to choose from
MAX_STEPS = 512  # per canvas; noise is made for all of them at once

# By which the operator chooses; a refusal names them.
OPTIONS = {
    "rows": "--max-rows",
    "queue": "--max-queue",
    "tokens": "--max-context",
    "body_bytes": "--max-body",
    "seconds": "--max-seconds",
    "drain_seconds": "--drain-seconds",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What the operator may choose."""

    rows: int = 8  # requests in one pass
    queue: int = 64  # waiting requests of one key
    tokens: int = 1 << 18  # prompts and answers of all running requests together
    body_bytes: int = 4 << 20
    body_seconds: float = 30.0  # for a body to arrive
    seconds: float = 600.0  # a request's deadline, from its arrival, and the most it may ask for
    drain_seconds: float = 120.0  # for running requests to finish when the server stops

    def __post_init__(self) -> None:
        for name in self.__slots__:
            if not getattr(self, name) > 0:  # nor may it be NaN
                option = f" ({OPTIONS[name]})" if name in OPTIONS else ""
                given = f"the limit of {name}{option} is {getattr(self, name)}"
                raise UsageError(f"{given}; it must be above 0")


class BodyLimit:
    """Reads no more of a body than is allowed, and waits no longer for it."""

    def __init__(self, app: ASGIApp, limits: Limits) -> None:
        self.app, self.limits = app, limits

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        try:
            body = await self._read(scope, receive)
        except ApiError as error:
            await error.response()(scope, receive, send)
            return
        await self.app(scope, _replay(body, receive), send)

    async def _read(self, scope: Scope, receive: Receive) -> bytearray:
        self._check(_declared(scope))
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
        most = self.limits.body_bytes
        if size > most:
            raise ApiError(413, f"the body is over {most} bytes; send a shorter conversation")


def _declared(scope: Scope) -> int:
    value = dict(scope["headers"]).get(b"content-length", b"0")
    return int(value[:19]) if value.isdigit() else 0


def _replay(body: bytearray, receive: Receive) -> Receive:
    """Hand out a body that was read already; afterwards, what the client does next."""
    whole: list[MutableMapping[str, Any]] = [
        {"type": "http.request", "body": bytes(body), "more_body": False}
    ]

    async def replay() -> Message:
        return whole.pop() if whole else await receive()

    return replay
