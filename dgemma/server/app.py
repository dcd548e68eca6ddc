"""The application: middleware, error replies, and general routes.

The web page is a few files, read at start, under a strict content security policy: no inline script
or style, nothing from other origins, no frames. Paths of requests are never opened as files.
"""

import hashlib
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from importlib import resources
from typing import TYPE_CHECKING, Any

from fastapi import APIRouter, FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from prometheus_client import CONTENT_TYPE_LATEST
from pydantic import BaseModel
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware

from dgemma import __version__
from dgemma.errors import UsageError
from dgemma.server import (
    chat_api,
    completions_api,
    edit_api,
    infill_api,
    messages_api,
    ollama_api,
    responses_api,
    sudoku_api,
)
from dgemma.server.auth import Guard
from dgemma.server.body_params import check_ids
from dgemma.server.errors import ApiError, from_usage, from_validation
from dgemma.server.lifecycle import BodyLimit, Drain, Gate
from dgemma.server.metrics import Metrics
from dgemma.server.schemas import STRICT, ModelCard, ModelList, TokenList
from dgemma.server.service import Service, ServiceDep, Settings, make_router
from dgemma.server.worker import Worker

if TYPE_CHECKING:
    from dgemma.engine import Engine

PIECES = 4096  # tokens written as JSON at a time; other threads run in between
# Modules with the routes of one API each, in the order of the OpenAPI schema and docs/serve.md.
RESOURCES = (
    *(chat_api, messages_api, responses_api, completions_api),
    *(infill_api, edit_api, sudoku_api, ollama_api),
)
router = make_router()


class Content(BaseModel):
    content: str


class Status(BaseModel):
    status: str
    running: int
    waiting: int


class TokenizeBody(BaseModel):
    """`POST /tokenize`, as llama.cpp has it."""

    model_config = STRICT

    content: str
    add_special: bool = False
    parse_special: bool = True
    with_pieces: bool = False


class DetokenizeBody(BaseModel):
    """`POST /detokenize`, as llama.cpp has it."""

    model_config = STRICT

    tokens: list[int]


@router.get("/v1/models")
async def models(service: ServiceDep) -> ModelList:
    """List the model that is served."""
    card = service.card()
    ids = {"first_id": card.id, "last_id": card.id}
    return ModelList(object="list", data=[card], **ids, has_more=False)


@router.get("/v1/models/{name:path}")
async def model(name: str, service: ServiceDep) -> ModelCard:
    """Describe the model of that name."""
    service.check_model(name)
    return service.card()


@router.post("/tokenize", response_model=TokenList)
async def tokenize(request: Request, body: TokenizeBody, service: ServiceDep) -> Response:
    """Encode text, in llama.cpp's format."""
    deadline = service.deadline(request)
    data = await service.run_in_thread(request, deadline, _token_list, service.engine, body)
    return Response(data, media_type="application/json")


@router.post("/detokenize")
async def detokenize(request: Request, body: DetokenizeBody, service: ServiceDep) -> Content:
    """Decode token ids."""
    check_ids(service.engine, body.tokens)
    decode, deadline = service.engine.tokenizer.decode, service.deadline(request)
    return Content(content=await service.run_in_thread(request, deadline, decode, body.tokens))


@router.get("/health")
async def health(service: ServiceDep) -> Status:
    """Report whether the engine works."""
    return _status("ok", service)


@router.get("/ready")
async def ready(service: ServiceDep) -> Status:
    """Report whether new requests are accepted."""
    if service.drain.began is not None:
        raise ApiError(503, "the server is stopping", code="draining", retry_after=5)
    return _status("ready", service)


@router.get(
    "/metrics", response_class=Response, responses={200: {"content": {CONTENT_TYPE_LATEST: {}}}}
)
async def metrics(service: ServiceDep) -> Response:
    """Numbers for Prometheus."""
    return Response(service.metrics.page(), media_type=CONTENT_TYPE_LATEST)


def _token_list(engine: "Engine", body: TokenizeBody) -> bytes:
    """Encode a text and write its tokens as JSON."""
    tokenizer = engine.tokenizer
    encode = tokenizer.encode_control if body.parse_special else tokenizer.encode
    ids = encode(body.content)
    if body.add_special:
        ids = [engine.model.config.bos_token_id, *ids]
    parts = []
    for start in range(0, len(ids), PIECES):
        part: list[Any] = ids[start : start + PIECES]
        if body.with_pieces:
            part = [{"id": token, "piece": _piece(tokenizer.token_bytes(token))} for token in part]
        parts.append(json.dumps(part, separators=(",", ":"))[1:-1])
    return f'{{"tokens":[{",".join(parts)}]}}'.encode()


def _piece(data: bytes) -> str | list[int]:
    try:
        return data.decode()
    except UnicodeDecodeError:
        return list(data)


def _status(status: str, service: Service) -> Status:
    worker = service.worker
    if worker.fault:
        raise ApiError(503, worker.fault, code="failing")
    return Status(status=status, running=worker.num_running, waiting=worker.num_waiting)


# --- the web page

POLICY = "; ".join(
    [
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self'",
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        "require-trusted-types-for 'script'",
    ]
)
PAGE_HEADERS = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "permissions-policy": "camera=(), microphone=(), geolocation=()",
    "cache-control": "no-cache",  # revalidated each time, answered by 304
}
MEDIA_TYPES = {
    "html": "text/html; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "svg": "image/svg+xml",
}


def _read_page() -> dict[str, bytes]:
    files = resources.files("dgemma.server").joinpath("page").iterdir()
    names = [file for file in files if file.name.split(".")[-1] in MEDIA_TYPES]
    return {file.name: file.read_bytes() for file in names}


PAGE_FILES = _read_page()
page_router = APIRouter(include_in_schema=False)


@page_router.get("/")
async def page(request: Request) -> Response:
    return _page_file(request, "index.html")


@page_router.get("/page/{name}")
async def page_file(request: Request, name: str) -> Response:
    if name not in PAGE_FILES:
        raise ApiError(404, "the page has no such file")
    return _page_file(request, name)


def _page_file(request: Request, name: str) -> Response:
    data = PAGE_FILES[name]
    headers = {**PAGE_HEADERS, "etag": f'"{hashlib.sha256(data).hexdigest()[:32]}"'}
    if request.headers.get("if-none-match") == headers["etag"]:
        return Response(status_code=304, headers=headers)
    return Response(data, headers=headers, media_type=MEDIA_TYPES[name.split(".")[-1]])


# --- the application


class App(FastAPI):
    """An application whose OpenAPI document lists exactly its real answers."""

    def openapi(self) -> dict[str, Any]:
        if not self.openapi_schema:
            document = super().openapi()
            for path in document["paths"].values():
                for operation in path.values():
                    operation["responses"].pop("422", None)  # a wrong body is a 400 here
            schemas = document["components"]["schemas"]
            schemas["TextPart"] = chat_api.TEXT_PART
            schemas["ImagePart"] = chat_api.IMAGE_PART
            schemas["VideoPart"] = chat_api.VIDEO_PART
            for unused in ("HTTPValidationError", "ValidationError"):
                schemas.pop(unused, None)
        assert self.openapi_schema is not None
        return self.openapi_schema


def make_app(engine: "Engine", settings: Settings) -> App:
    """Return an application for this engine; its worker thread runs while the application does."""
    app = make_routes(engine, settings)
    service = app.state.service
    add_middleware(app, settings, service.drain, service.metrics)
    return app


def make_routes(engine: "Engine", settings: Settings) -> App:
    """Return the application without middleware, which trusts its callers (`server.call`)."""
    metrics, drain = Metrics(), Drain(settings.limits.drain_seconds)
    worker = Worker(engine, settings.limits, metrics)
    metrics.watch_device(engine)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        worker.start()
        yield
        worker.stop()

    # No documentation page: it would load scripts from another origin.
    app = App(title="dgemma", version=__version__, lifespan=lifespan, docs_url=None, redoc_url=None)
    app.state.service = Service(
        engine=engine, worker=worker, metrics=metrics, drain=drain, settings=settings
    )
    for routes in (router, page_router, *(resource.router for resource in RESOURCES)):
        app.include_router(routes)
    add_error_handlers(app)
    return app


def add_middleware(app: Starlette, settings: Settings, drain: Drain, metrics: Metrics) -> None:
    """Add all middleware. The last one added is the first to see a request."""
    app.add_middleware(BodyLimit, limits=settings.limits)
    app.add_middleware(
        Guard, keys=settings.keys, hosts=settings.hosts, origins=settings.cors_origins
    )
    app.add_middleware(Gate, drain=drain, metrics=metrics)
    if settings.cors_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=settings.cors_origins,
            allow_methods=["GET", "POST"],
            allow_headers=[
                "authorization",
                "content-type",
                "x-api-key",
                "anthropic-version",
                "anthropic-beta",
            ],
        )


def add_error_handlers(app: Starlette) -> None:
    """Answer every error in the format of its route."""
    to_api_error: dict[type[Exception], Callable[[Any], ApiError]] = {
        ApiError: lambda error: error,
        UsageError: from_usage,
        RequestValidationError: lambda error: from_validation(error.errors()),
        HTTPException: _from_http,
        Exception: lambda error: ApiError(500, "the server failed on this request"),
    }

    async def handle(request: Request, error: Exception) -> Response:
        kind = next(kind for kind in to_api_error if isinstance(error, kind))
        return to_api_error[kind](error).response(request.scope)

    for kind in to_api_error:
        app.add_exception_handler(kind, handle)


def _from_http(error: HTTPException) -> ApiError:
    if isinstance(error.__cause__, ApiError):  # raised while the body was read
        return error.__cause__
    if error.status_code == 404:
        return ApiError(404, "there is no such path; see /openapi.json")
    if error.status_code == 405:
        allowed = (error.headers or {}).get("Allow", "another method")
        return ApiError(405, f"this path does not take that method; use {allowed}")
    return ApiError(error.status_code, str(error.detail))
