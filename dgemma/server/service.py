"""What the routes work with: the engine's worker, the settings, and how a request is answered."""

import asyncio
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any

from fastapi import Depends, Request, Response
from fastapi.responses import JSONResponse, StreamingResponse
from pydantic import BaseModel
from starlette.types import Receive, Scope, Send

from dgemma.server import replies
from dgemma.server.asking import Asked
from dgemma.server.call import Call, while_there
from dgemma.server.drain import Drain
from dgemma.server.faults import ApiError
from dgemma.server.limits import Limits
from dgemma.server.metrics import Metrics
from dgemma.server.security import Keys
from dgemma.server.shapes import Head, Shape
from dgemma.server.stream import Stream
from dgemma.server.wire import Body
from dgemma.server.worker import Worker

if TYPE_CHECKING:
    from dgemma.engine import Engine

ENCODERS = 2  # prompts that are read at once, beside the event loop
SSE_HEADERS = {"cache-control": "no-cache", "x-accel-buffering": "no"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """How an operator wants a server."""

    names: tuple[str, ...]  # of the model, the first as it is listed
    limits: Limits = field(default_factory=Limits)
    keys: Keys = field(default_factory=Keys)
    hosts: frozenset[str] = frozenset()  # names the server answers to; none: to all
    cors_origins: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Service:
    """What the routes work with."""

    engine: "Engine"
    worker: Worker
    metrics: Metrics
    drain: Drain
    settings: Settings
    encoders: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(ENCODERS))
    created: int = field(default_factory=lambda: int(time.time()))

    async def aside(self, work: Callable[..., Any], *arguments: Any) -> Any:
        """Do work that takes a while without holding up the event loop."""
        async with self.encoders:
            return await asyncio.to_thread(work, self.engine, *arguments)

    def check_model(self, name: str | None) -> None:
        names = self.settings.names
        if name is not None and name not in names:
            raise ApiError(
                404,
                f"the model {name[:100]!r} is not served here; use {names[0]!r} or leave it out",
                code="model_not_found",
                param="model",
            )

    def check_count(self, count: int) -> None:
        most = self.settings.limits.queue
        if count > most:
            raise ApiError(400, f"the request asks for {count} answers; at most {most} can wait")

    def card(self) -> replies.ModelCard:
        config = self.engine.model.config
        return replies.ModelCard(
            id=self.settings.names[0],
            object="model",
            created=self.created,
            owned_by="dgemma",
            context_length=config.max_position_embeddings,
            canvas_length=config.canvas_length,
            modes=["diffusion", "ar", "hybrid"] if config.can_denoise else ["ar"],
        )


async def service_of(request: Request) -> Service:
    """Not a plain function: those are called in a thread of their own, for each request."""
    service = request.app.state.service
    assert isinstance(service, Service)
    return service


Served = Annotated[Service, Depends(service_of)]
REASONS = {
    400: "The request is wrong; the sentence says how",
    401: "The API key is missing or not known",
    403: "The server does not go by the name it was called by",
    404: "There is no such model or path",
    408: "The body did not arrive in time",
    413: "The body is too large",
    429: "The queue is full; see Retry-After",
    500: "The engine failed",
    503: "The server is stopping, or the request waited too long; see Retry-After",
}
ERRORS: dict[int | str, dict[str, Any]] = {
    status: {"model": replies.ErrorReply, "description": reason}
    for status, reason in REASONS.items()
}
# Tools differ in whether a schema means the whole stream or each event of it, so it says neither.
EVENTS = {"description": "Server-sent events, ended by [DONE]; docs/serve.md has their form"}
STREAM = {"content": {"text/event-stream": {"schema": EVENTS}}}


def whole_or_stream(reply: type[BaseModel]) -> dict[str, Any]:
    """What a route says of its answers: one reply, or events, as the body asks."""
    return {"response_model": None, "responses": {200: {"model": reply, **STREAM}}}


async def answer(
    request: Request,
    service: Service,
    body: Body,
    read: Callable[..., Asked],
    shape_of: Callable[[Asked], Shape],
) -> Response:
    """Queue a request; answer when it is done, or, for a stream, when it begins."""
    service.check_model(body.model)
    owner = request.state.owner
    service.worker.check_room(owner, 1)  # before the work of reading the prompt
    asked = await service.aside(read, body)
    service.check_count(len(asked.plans))
    call, shape = Call(service.worker, asked, owner), shape_of(asked)
    headers = {"x-dgemma-ignored": ", ".join(body.ignored)} if body.ignored else {}
    try:
        await while_there(request, call.begin())
        if body.stream:
            return Live(call, Stream(call, shape, body, service.engine), headers)
        ended = await while_there(request, call.finish())
    except BaseException:
        call.close()
        raise
    return JSONResponse(shape.whole(ended), headers=headers)


def head(kind: str, service: Service, body: Body) -> Head:
    return Head(
        id=f"{kind}-{secrets.token_hex(12)}",
        created=int(time.time()),
        model=body.model or service.settings.names[0],
        ignored=tuple(body.ignored),
        choices_per_prompt=body.n,
    )


class Live(StreamingResponse):
    """A stream of events. Its answers are cancelled when it ends, even before its first line."""

    def __init__(self, call: Call, stream: Stream, headers: dict[str, str]) -> None:
        super().__init__(
            stream.lines(), media_type="text/event-stream", headers={**SSE_HEADERS, **headers}
        )
        self.call = call

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self.call.close()
