"""In-process calls of the application, for batch files and for the front of several replicas.

A call carries what middleware would determine (owner, time of arrival) and what makes a repeated
request repeat its reply: seed, ids, and previously committed tokens. None of these can be set over
HTTP.
"""

import asyncio
import json
import logging
import secrets
import time
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from starlette.requests import Request
from starlette.types import ASGIApp, Message

from dgemma.server.auth import ANONYMOUS

logger = logging.getLogger("dgemma.server")
JSON_TYPE = (b"content-type", b"application/json")
OPENING_FIELDS = ("system", "instructions", "tools")  # before the first turn
TEXT_FIELDS = ("input", "prompt", "input_prefix", "text", "puzzle")
MAX_OPENING = 4096  # characters of a conversation...
MAX_TEXT = 1024  # ...and of a text, which an editor changes at its end
# Records of a resumable stream, in addition to the events of its format.
COMMITTED = ": committed "
ENDED = ": ended"  # after the last event, or before an error
RECORD_END = "\x1e"  # never part of JSON


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """An in-process request with owner, seed and ids preset."""

    path: str
    body: bytes = b""
    method: str = "POST"
    query: bytes = b""
    headers: tuple[tuple[bytes, bytes], ...] = (JSON_TYPE,)
    owner: str = ANONYMOUS
    request_id: str | None = None  # id in error replies
    seconds: float = 0.0  # seconds since the request arrived
    seed: int = field(default_factory=lambda: secrets.randbits(32))  # used if the body has no seed
    reply_id: str = field(default_factory=lambda: secrets.token_hex(12))
    created: int = field(default_factory=lambda: int(time.time()))
    is_resumable: bool = False  # stream named events and commit records
    # By answer: fields of `Committed`, for everything committed so far.
    committed: Mapping[int, tuple[Mapping[str, Any], ...]] = field(default_factory=dict)

    def scope(self) -> dict[str, Any]:
        arrived = time.monotonic() - self.seconds
        return {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": self.method,
            "path": self.path,
            "raw_path": self.path.encode(),
            "query_string": self.query,
            "headers": list(self.headers),
            "scheme": "http",
            "server": None,
            "client": None,
            "root_path": "",
            "state": {
                "owner": self.owner,
                "request_id": self.request_id,
                "arrived": arrived,
                "body_bytes": len(self.body),
                "call": self,
            },
        }


def call_of(request: Request) -> Call | None:
    """Return the call behind a request, or None if it came over a socket."""
    call: Call | None = request.scope["state"].get("call")
    return call


async def run_call(app: ASGIApp, call: Call) -> AsyncIterator[Message]:
    """Run a call; yields ASGI messages, the first with its route.

    Closing the iterator disconnects the client.
    """
    messages: asyncio.Queue[Message | None] = asyncio.Queue()
    gone = asyncio.Event()
    scope = call.scope()
    body = [{"type": "http.request", "body": call.body, "more_body": False}]

    async def receive() -> Message:
        if body:
            return body.pop()
        await gone.wait()
        return {"type": "http.disconnect"}

    async def send(message: Message) -> None:
        if message["type"] == "http.response.start" and "route" in scope:
            message = {**message, "route": scope["route"].path}
        await messages.put(message)

    async def run() -> None:
        try:
            await app(scope, receive, send)
        except Exception:  # the client already has an error reply
            logger.exception("a call failed")
        finally:
            messages.put_nowait(None)

    task = asyncio.create_task(run())
    try:
        while (message := await messages.get()) is not None:
            yield message
    finally:
        gone.set()
        task.cancel()


async def whole_reply(app: ASGIApp, call: Call) -> tuple[int, bytes]:
    """Run a call to its end; return status and body."""
    status, parts = 500, []
    async for message in run_call(app, call):
        if message["type"] == "http.response.start":
            status = message["status"]
        else:
            parts.append(message.get("body", b""))
    return status, b"".join(parts)


def opening(body: object) -> str:
    """Return the text that requests of one conversation start with; empty if unknown.

    A conversation keeps its system text, tools and first turn; a document its beginning.
    """
    if not isinstance(body, dict):
        return ""
    parts: list[Any] = [body[name] for name in OPENING_FIELDS if body.get(name)]
    messages = body.get("messages") or body.get("input")
    if isinstance(messages, list) and messages:
        first = messages[0]
        has_system = isinstance(first, dict) and first.get("role") in ("system", "developer")
        parts += messages[: 2 if has_system else 1]
    else:
        texts = (body.get(name) for name in TEXT_FIELDS)
        parts += [text[:MAX_TEXT] for text in texts if isinstance(text, str)]
    return json.dumps(parts, ensure_ascii=False)[:MAX_OPENING] if parts else ""
