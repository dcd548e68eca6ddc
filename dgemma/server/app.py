"""The routes, and how a server is put together."""

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

from fastapi import APIRouter, FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware

from dgemma import __version__
from dgemma.errors import UsageError
from dgemma.server import replies
from dgemma.server.asking import Asked, check_ids, read_chat, read_completion
from dgemma.server.drain import Drain, Gate
from dgemma.server.faults import ApiError, from_usage, from_validation
from dgemma.server.fill_routes import router as fill_router
from dgemma.server.limits import BodyLimit
from dgemma.server.metrics import Metrics
from dgemma.server.page_routes import router as page_router
from dgemma.server.security import Guard
from dgemma.server.service import ERRORS, Served, Service, Settings, answer, head, whole_or_stream
from dgemma.server.shapes import ChatShape, Shape, TextShape
from dgemma.server.wire import (
    TEXT_PART,
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    TokenizeBody,
)
from dgemma.server.worker import Worker

if TYPE_CHECKING:
    from dgemma.engine import Engine

router = APIRouter(responses=ERRORS)


@router.post("/v1/chat/completions", **whole_or_stream(replies.ChatCompletion))
async def chat(request: Request, body: ChatBody, service: Served) -> Response:
    """Answer a conversation."""
    start = head("chatcmpl", service, body)

    def shape(asked: Asked) -> Shape:
        return ChatShape(start, service.engine.tokenizer, one_call=asked.one_call)

    return await answer(request, service, body, read_chat, shape)


@router.post("/v1/completions", **whole_or_stream(replies.TextCompletion))
async def completions(request: Request, body: CompletionBody, service: Served) -> Response:
    """Go on with a text."""
    start = head("cmpl", service, body)

    def shape(asked: Asked) -> Shape:
        return TextShape(start, service.engine.tokenizer)

    return await answer(request, service, body, read_completion, shape)


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
    for part in (router, fill_router, page_router):
        app.include_router(part)
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
    if error.status_code == 405:
        allowed = (error.headers or {}).get("Allow", "another method")
        return ApiError(405, f"this path does not take that method; use {allowed}")
    return ApiError(error.status_code, str(error.detail))
