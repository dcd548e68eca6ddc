"""The path of one HTTP request: parse, submit, follow events, format.

A small body is parsed on the event loop. A large body, or one with a grammar, is parsed by a host
task of the engine's scheduler, with fairness and a deadline like all other work.
"""

import asyncio
import json
import re
import secrets
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import partial
from math import inf, isfinite
from typing import TYPE_CHECKING, Annotated, Any, NoReturn, TypeVar

from fastapi import APIRouter, Depends, Request, Response
from fastapi.responses import JSONResponse, StreamingResponse
from fastapi.routing import APIRoute
from pydantic import BaseModel
from starlette.types import Receive, Scope, Send

from dgemma.config import MODES
from dgemma.server.auth import Keys
from dgemma.server.call import Call, call_of
from dgemma.server.errors import CLIENT_GONE, OLLAMA_PATH, ApiError, from_engine
from dgemma.server.format import Envelope, Format
from dgemma.server.lifecycle import Drain
from dgemma.server.limits import Limits
from dgemma.server.metrics import Metrics
from dgemma.server.schemas import Body, ErrorReply, Modalities, ModelCard
from dgemma.server.stream import Stream
from dgemma.server.worker import Worker

if TYPE_CHECKING:
    from dgemma.engine import Done, Engine
    from dgemma.engine.request import Program, Task
    from dgemma.engine.request import Request as EngineRequest
    from dgemma.server.worker import Item

    Tasks = Sequence[Program[Any] | Task]

T = TypeVar("T")
MAX_INLINE_BYTES = 1 << 14  # largest body parsed on the event loop
GRACE_SECONDS = 2.0  # time after a deadline for the engine to return the answer so far
MAX_BACKLOG = 256  # events a client may lag behind before drafts are dropped
SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")  # JSON escape of a surrogate
STREAM_HEADERS = {"cache-control": "no-cache", "x-accel-buffering": "no"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Settings of a server."""

    names: tuple[str, ...]  # names of the model; the first one is listed
    limits: Limits = field(default_factory=Limits)
    keys: Keys = field(default_factory=Keys)
    hosts: frozenset[str] = frozenset()  # accepted Host names; empty: all
    cors_origins: tuple[str, ...] = ()


class Submission:
    """The engine requests of one HTTP request, seen from the event loop.

    Submitted on construction, cancelled if closed before their end. Enforces deadlines, since an
    engine in a hung pass cannot.
    """

    def __init__(self, worker: Worker, tasks: "Tasks", owner: str, deadline: float) -> None:
        from dgemma.engine.request import Request

        self.worker, self.tasks, self.owner, self.deadline = worker, tasks, owner, deadline
        self._loop = asyncio.get_running_loop()
        self._items: asyncio.Queue[tuple[int, Item]] = asyncio.Queue()
        self.requests = [Request(task, owner=owner, deadline=deadline) for task in tasks]
        self._open: set[EngineRequest[Any]] = set(self.requests)
        worker.submit({r: partial(self._put, index) for index, r in enumerate(self.requests)})

    def _put(self, index: int, item: "Item") -> None:
        """Receive an item from the engine's thread."""
        from dgemma.engine import Draft

        if isinstance(item, Draft) and self._items.qsize() > MAX_BACKLOG:
            return  # a draft is not final, and the client is too slow for it
        with suppress(RuntimeError):  # the event loop is closed
            self._loop.call_soon_threadsafe(self._items.put_nowait, (index, item))

    @property
    def is_over(self) -> bool:
        return not self._open

    async def next(self, timeout: float = inf) -> "tuple[int, Item] | None":
        """Return the next item and the index of its request; None after `timeout` seconds."""
        left = self.deadline + GRACE_SECONDS - time.monotonic()
        try:
            async with asyncio.timeout(min(timeout, max(left, 0))):
                index, item = await self._items.get()
        except TimeoutError:
            if timeout < left:
                return None
            late = "the engine did not answer in time; try again"
            raise ApiError(503, late, code="timeout", retry_after=5) from None
        if item is self.requests[index]:
            self._open.discard(item)
            _raise_error(item)
        return index, item

    async def results(self) -> list[Any]:
        """Return all results; raises if a request failed. Closes the submission."""
        try:
            while not self.is_over:
                await self.next()
        finally:
            self.close()
        return [request.result for request in self.requests]

    def close(self) -> None:
        """Cancel unfinished requests."""
        if self._open:
            self.worker.cancel(list(self._open))
            self._open.clear()


def _raise_error(request: "EngineRequest[Any]") -> None:
    """Raise a request's error in the version for clients."""
    from dgemma.engine import Done

    if request.error is not None:
        raise from_engine(request.error)
    if isinstance(request.result, Done) and request.result.finish == "fault":
        sentence = f"the model failed on this request: {request.result.fault}"
        raise ApiError(500, sentence, code="fault")


@dataclass(frozen=True, slots=True, kw_only=True)
class Service:
    """Everything that the routes need."""

    engine: "Engine"
    worker: Worker
    metrics: Metrics
    drain: Drain
    settings: Settings
    created: int = field(default_factory=lambda: int(time.time()))

    def abandon(self) -> None:
        self.worker.abandon()

    def deadline(self, request: Request, seconds: float | None = None) -> float:
        """Return a request's deadline, counted from its arrival."""
        arrived: float = request.state.arrived
        most = self.settings.limits.max_seconds
        return arrived + min(seconds or most, most)

    async def run(self, program: "Program[T]", owner: str, deadline: float) -> T:
        """Run a program in its owner's fair turn; cancelling the coroutine cancels it."""
        (result,) = await Submission(self.worker, [program], owner, deadline).results()
        found: T = result
        return found

    async def run_in_thread(
        self, request: Request, deadline: float, function: Callable[..., T], *arguments: Any
    ) -> T:
        """Call a function in a host thread; cancelled if the client disconnects."""
        from dgemma.engine.request import in_thread

        program = in_thread(function, *arguments)
        return await while_connected(request, self.run(program, request.state.owner, deadline))

    async def with_logprobs(self, submission: Submission, index: int, done: "Done") -> "Done":
        """Add causal log-probabilities: known in AR, else from a pass over prompt and reply."""
        from dgemma.engine.generation import Generation

        task = submission.tasks[index]
        if done.mode == "ar" or not done.ids or not isinstance(task, Generation):
            return replace(done, logprobs=done.logprobs[: len(done.ids)])
        program = self.engine.score_program(task.prompt, [done.ids])
        deadline = max(submission.deadline, time.monotonic() + GRACE_SECONDS)
        (score,) = await self.run(program, submission.owner, deadline)
        return replace(done, logprobs=score.logprobs)

    def check_model(self, name: str | None) -> None:
        names = self.settings.names
        if name is not None and name not in names:
            raise ApiError(
                404,
                f"the model {name[:100]!r} is not served here; use {names[0]!r} or leave it out",
                code="model_not_found",
                param="model",
            )

    def envelope(self, request: Request, prefix: str, body: Body) -> Envelope:
        call = call_of(request)
        return Envelope(
            id=prefix + (secrets.token_hex(12) if call is None else call.reply_id),
            created=int(time.time()) if call is None else call.created,
            model=body.model or self.settings.names[0],
            ignored=tuple(body.ignored),
            answers_per_prompt=body.n,
        )

    def card(self) -> ModelCard:
        config = self.engine.model.config
        return ModelCard(
            id=self.settings.names[0],
            object="model",
            type="model",
            created=self.created,
            created_at=iso_time(self.created),
            display_name=self.settings.names[0],
            owned_by="dgemma",
            context_length=config.max_position_embeddings,
            canvas_length=config.canvas_length,
            modes=list(MODES) if config.can_denoise else ["ar"],
            modalities=Modalities(vision=self.engine.images is not None),
        )


def iso_time(seconds: float) -> str:
    """Write a time in ISO format, as other APIs do."""
    return datetime.fromtimestamp(seconds, UTC).isoformat().replace("+00:00", "Z")


async def service_of(request: Request) -> Service:
    """Return the service. A coroutine: FastAPI calls plain functions in a thread."""
    service = request.app.state.service
    assert isinstance(service, Service)
    return service


ServiceDep = Annotated[Service, Depends(service_of)]


# --- routes


class StrictRequest(Request):
    """A request whose JSON is parsed strictly, and off the event loop if it is long."""

    async def json(self) -> Any:
        body = await self.body()
        if len(body) <= MAX_INLINE_BYTES:
            return read_json(body)
        service = await service_of(self)
        return await service.run_in_thread(self, service.deadline(self), read_json, body)


def read_json(data: bytes) -> Any:
    """Parse JSON; refuses duplicate keys, infinite numbers, and surrogates.

    Replies could not represent the last two.
    """

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        fields = dict(pairs)
        if len(fields) < len(pairs):
            ((name, _),) = Counter(name for name, _ in pairs).most_common(1)
            raise ApiError(400, f"the body has the key {name[:60]!r} twice; give it once")
        return fields

    def refuse(number: str) -> NoReturn:
        raise ApiError(400, f"the body is not JSON: {number} is not a number there")

    def finite(number: str) -> float:
        if not isfinite(value := float(number)):
            raise ApiError(400, f"the body has the number {number[:60]}; use one below 1.8e308")
        return value

    try:
        found = json.loads(
            data.decode("utf-8-sig"),
            object_pairs_hook=unique,
            parse_constant=refuse,
            parse_float=finite,
        )
        if SURROGATE.search(data):  # paired or not
            json.dumps(found, ensure_ascii=False).encode()
        return found
    except UnicodeEncodeError as error:
        code = f"U+{ord(error.object[error.start]):04X}"
        sentence = f"the body holds half a surrogate pair, {code}; send whole Unicode characters"
        raise ApiError(400, sentence) from None
    except (ValueError, RecursionError) as error:
        raise ApiError(400, f"the body is not JSON: {error}") from None


class StrictRoute(APIRoute):
    """A route that reads its body with StrictRequest."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def handle_strictly(request: Request) -> Response:
            return await handle(StrictRequest(_as_json(request.scope), request.receive))

        return handle_strictly


def _as_json(scope: Scope) -> Scope:
    """Treat a body of Ollama's routes as JSON: its clients and curl -d do not set the type.

    A page of another origin that sends it without a preflight is refused by its Origin header.
    """
    if not scope["path"].startswith(OLLAMA_PATH):
        return scope
    others = [header for header in scope["headers"] if header[0] != b"content-type"]
    return {**scope, "headers": [*others, (b"content-type", b"application/json")]}


REASONS = {
    400: "The request is wrong; the sentence says how",
    401: "The API key is missing or not known",
    403: "The Host or Origin header is not one of this server's",
    404: "There is no such model or path",
    408: "The body did not arrive in time",
    413: "The body is too large",
    429: "The queue is full; see Retry-After",
    500: "The engine failed",
    503: "The server is stopping, or the request waited too long; see Retry-After",
}
# Tools disagree on whether a schema describes the stream or one event, so there is none.
EVENTS = {"description": "What happens as it happens; docs/serve.md has the format"}
EVENT_STREAM = "text/event-stream"


def make_router(error: type[BaseModel] = ErrorReply, **more: Any) -> APIRouter:
    """Return a router for the routes of one resource, with its error format."""
    errors: dict[int | str, dict[str, Any]] = {
        status: {"model": error, "description": reason} for status, reason in REASONS.items()
    }
    return APIRouter(responses=errors, route_class=StrictRoute, **more)


def whole_or_stream(reply: type[BaseModel], media_type: str = EVENT_STREAM) -> dict[str, Any]:
    """Describe a route's answers: one reply, or a stream if the body asks for it."""
    stream = {"content": {media_type: {"schema": EVENTS}}}
    return {"response_model": None, "responses": {200: {"model": reply, **stream}}}


async def answer(
    request: Request,
    service: Service,
    body: Body,
    parse: "Callable[[Engine, Any], Tasks]",
    format: Format,
) -> Response:
    """Answer a request: at its end or, for a stream, when it starts."""
    service.check_model(body.model)
    deadline = service.deadline(request, body.dgemma.max_seconds)
    service.worker.check_room(request.state.owner, 1)  # before reading the prompt, which is costly
    call = call_of(request)
    if call is not None and body.sampling.seed is None:
        body = body.model_copy(update={"seed": call.seed})
    is_long = request.state.body_bytes > MAX_INLINE_BYTES
    if body.has_constraint or body.has_images or is_long:
        tasks = await service.run_in_thread(request, deadline, parse, service.engine, body)
    else:
        tasks = parse(service.engine, body)
    count, most = len(tasks), service.settings.limits.max_queue
    if count > most:
        raise ApiError(400, f"the request asks for {count} answers; at most {most} can wait")
    if call is not None and call.is_resumable and body.stream:
        tasks = [_resumable(service.engine, n, task, call) for n, task in enumerate(tasks)]
    submission = Submission(service.worker, tasks, request.state.owner, deadline)
    headers = {"x-dgemma-ignored": ", ".join(body.ignored)} if body.ignored else {}
    try:
        if body.stream:
            # Errors before the stream starts still have a status.
            await while_connected(request, submission.next())
            return EventStream(Stream(submission, format, body, service, call), headers)
        answers = await while_connected(request, _finish(service, submission, body))
    except BaseException:
        submission.close()
        raise
    return JSONResponse(format.full(answers), headers=headers)


def _resumable(engine: "Engine", index: int, task: Any, call: Call) -> Any:
    """Return a generation that reports commits and continues committed tokens.

    Constrained text is written again from the start.
    """
    from dgemma.engine import Committed
    from dgemma.engine.generation import Generation

    if not isinstance(task, Generation) or task.params.constraint is not None:
        return task
    raw = call.committed.get(index, ())
    committed = tuple(Committed(**{**fields, "ids": tuple(fields["ids"])}) for fields in raw)
    params = replace(task.params, commits=True, committed=committed)
    return engine.generation(task.prompt, params, fit=True)


async def _finish(service: Service, submission: Submission, body: Body) -> "list[Done]":
    answers: list[Done] = await submission.results()
    if not body.wants_logprobs:
        return answers
    return [
        await service.with_logprobs(submission, index, done) for index, done in enumerate(answers)
    ]


async def while_connected(request: Request, work: Awaitable[T]) -> T:
    """Await work; cancel it if the client disconnects."""
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_disconnect(request.receive))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ApiError(CLIENT_GONE, "the client left")
        return task.result()
    finally:
        for waiting in (task, gone):
            waiting.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


async def _disconnect(receive: Callable[[], Awaitable[Any]]) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream(StreamingResponse):
    """A stream of events. Its requests are cancelled when it ends, even before the first line."""

    def __init__(self, stream: Stream, headers: dict[str, str]) -> None:
        media_type, headers = stream.format.media_type, {**STREAM_HEADERS, **headers}
        super().__init__(stream.lines(), media_type=media_type, headers=headers)
        self.submission = stream.submission

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self.submission.close()
