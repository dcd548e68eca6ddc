"""The routes, and how a server is put together."""

import asyncio
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any

from fastapi import APIRouter, Depends, FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, StreamingResponse
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.types import Receive, Scope, Send

from dgemma import __version__
from dgemma.errors import UsageError
from dgemma.serve import replies
from dgemma.serve.asking import Asked, check_ids, read_chat, read_completion
from dgemma.serve.call import Call, while_there
from dgemma.serve.drain import Drain, Gate
from dgemma.serve.faults import ApiError, from_usage, from_validation
from dgemma.serve.limits import BodyLimit, Limits
from dgemma.serve.metrics import Metrics
from dgemma.serve.security import Guard, Keys
from dgemma.serve.shapes import ChatShape, Head, Shape, TextShape
from dgemma.serve.stream import Stream
from dgemma.serve.wire import (
    TEXT_PART,
    Body,
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    TokenizeBody,
)
from dgemma.serve.worker import Worker

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


def service_of(request: Request) -> Service:
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
STREAM = {"content": {"text/event-stream": {"schema": {"type": "string"}}}}
router = APIRouter(responses=ERRORS)


@router.post(
    "/v1/chat/completions",
    response_model=None,
    responses={200: {"model": replies.ChatCompletion, **STREAM}},
)
async def chat(request: Request, body: ChatBody, service: Served) -> Response:
    """Answer a conversation."""
    head = _head("chatcmpl", service, body)

    def shape(asked: Asked) -> Shape:
        return ChatShape(head, service.engine.tokenizer, one_call=asked.one_call)

    return await _answer(request, service, body, read_chat, shape)


@router.post(
    "/v1/completions",
    response_model=None,
    responses={200: {"model": replies.TextCompletion, **STREAM}},
)
async def completions(request: Request, body: CompletionBody, service: Served) -> Response:
    """Go on with a text."""
    head = _head("cmpl", service, body)

    def shape(asked: Asked) -> Shape:
        return TextShape(head, service.engine.tokenizer)

    return await _answer(request, service, body, read_completion, shape)


@router.get("/v1/models")
async def models(service: Served) -> replies.ModelList:
    """The model that is served."""
    return replies.ModelList(object="list", data=[service.card()])


@router.get("/v1/models/{name:path}")
async def model(name: str, service: Served) -> replies.ModelCard:
    """The model of that name."""
    service.check_model(name)
    return service.card()


@router.post("/tokenize")
async def tokenize(body: TokenizeBody, service: Served) -> replies.Tokens:
    """Text to token ids, in llama.cpp's shape."""
    tokens = await service.aside(_tokens, body)
    assert isinstance(tokens, replies.Tokens)
    return tokens


@router.post("/detokenize")
async def detokenize(body: DetokenizeBody, service: Served) -> replies.Content:
    """Token ids to text."""
    check_ids(service.engine, body.tokens)
    return replies.Content(content=service.engine.tokenizer.decode(body.tokens))


@router.get("/health")
async def health(service: Served) -> replies.Status:
    """Whether the engine works."""
    if not service.worker.is_healthy:
        raise ApiError(503, "the engine thread has failed; restart the server", code="failing")
    return _status("ok", service)


@router.get("/ready")
async def ready(service: Served) -> replies.Status:
    """Whether new requests are taken."""
    if service.drain.began is not None:
        raise ApiError(503, "the server is stopping", code="draining", retry_after=5)
    return _status("ready", service)


@router.get(
    "/metrics", response_class=Response, responses={200: {"content": {CONTENT_TYPE_LATEST: {}}}}
)
async def metrics(service: Served) -> Response:
    """Numbers for Prometheus."""
    return Response(service.metrics.page(), media_type=CONTENT_TYPE_LATEST)


async def _answer(
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


def _head(kind: str, service: Service, body: Body) -> Head:
    return Head(
        id=f"{kind}-{secrets.token_hex(12)}",
        created=int(time.time()),
        model=body.model or service.settings.names[0],
        ignored=tuple(body.ignored),
        choices_per_prompt=body.n,
    )


def _tokens(engine: "Engine", body: TokenizeBody) -> replies.Tokens:
    tokenizer = engine.tokenizer
    encode = tokenizer.encode_control if body.parse_special else tokenizer.encode
    ids = encode(body.content)
    if body.add_special:
        ids = [engine.model.config.bos_token_id, *ids]
    if not body.with_pieces:
        return replies.Tokens(tokens=ids)
    return replies.Tokens(tokens=[_piece(token, tokenizer.token_bytes(token)) for token in ids])


def _piece(token: int, data: bytes) -> replies.Piece:
    try:
        return replies.Piece(id=token, piece=data.decode())
    except UnicodeDecodeError:
        return replies.Piece(id=token, piece=list(data))


def _status(status: str, service: Service) -> replies.Status:
    worker = service.worker
    return replies.Status(status=status, running=len(worker.running), waiting=worker.num_waiting)


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


class App(FastAPI):
    """An application whose document lists what it really answers."""

    def openapi(self) -> dict[str, Any]:
        if not self.openapi_schema:
            document = super().openapi()
            for path in document["paths"].values():
                for operation in path.values():
                    operation["responses"].pop("422", None)  # a wrong body is a 400 here
            schemas = document["components"]["schemas"]
            schemas["TextPart"] = TEXT_PART
            for unused in ("HTTPValidationError", "ValidationError"):
                schemas.pop(unused, None)
        assert self.openapi_schema is not None
        return self.openapi_schema


def make_app(engine: "Engine", settings: Settings) -> App:
    """A server for this engine; its thread runs while the application does."""
    metrics, drain = Metrics(), Drain(settings.limits.drain_seconds)
    worker = Worker(engine, settings.limits, metrics)
    metrics.watch_device(engine)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        worker.start()
        yield
        worker.stop()

    # The page that shows the document loads scripts from elsewhere, so there is none.
    app = App(title="dgemma", version=__version__, lifespan=lifespan, docs_url=None, redoc_url=None)
    app.state.service = Service(
        engine=engine, worker=worker, metrics=metrics, drain=drain, settings=settings
    )
    app.include_router(router)
    _add_handlers(app)
    # The last one added is the first to see a request.
    app.add_middleware(BodyLimit, limits=settings.limits)
    app.add_middleware(Guard, keys=settings.keys, hosts=settings.hosts)
    app.add_middleware(Gate, drain=drain, metrics=metrics)
    if settings.cors_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=settings.cors_origins,
            allow_methods=["GET", "POST"],
            allow_headers=["authorization", "content-type"],
        )
    return app


def _add_handlers(app: FastAPI) -> None:
    """Every error in one shape."""
    Handler = Callable[[Request, Exception], Awaitable[Response]]

    def answer(make: Callable[[Any], ApiError]) -> Handler:
        async def handle(request: Request, error: Exception) -> Response:
            return make(error).response()

        return handle

    app.add_exception_handler(ApiError, answer(lambda error: error))
    app.add_exception_handler(UsageError, answer(from_usage))
    app.add_exception_handler(
        RequestValidationError, answer(lambda error: from_validation(error.errors()))
    )
    app.add_exception_handler(HTTPException, answer(_from_http))
    app.add_exception_handler(
        Exception, answer(lambda error: ApiError(500, "the server failed on this request"))
    )


def _from_http(error: HTTPException) -> ApiError:
    if error.status_code == 404:
        return ApiError(404, "there is no such path; /openapi.json lists those there are")
    return ApiError(error.status_code, str(error.detail))
