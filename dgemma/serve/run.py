"""A server on a socket, until a signal ends it."""

import socket
from collections.abc import Callable
from typing import TYPE_CHECKING

import uvicorn

from dgemma.errors import DgemmaError, UsageError
from dgemma.serve.app import Service, Settings, make_app
from dgemma.serve.drain import Server

if TYPE_CHECKING:
    from dgemma.engine import Engine

LAST_SECONDS = 5  # for what is left when the drain's time is over
MAX_HEADERS = 32 << 10  # bytes


def bind(host: str, port: int) -> socket.socket:
    """Take the address before a long load; nobody is answered until the server runs."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        taken = socket.socket(found[0][0], socket.SOCK_STREAM)
    except (OSError, OverflowError) as error:
        raise UsageError(f"{host} port {port} is no address to listen on: {error}") from None
    taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        taken.bind(found[0][4])
    except (OSError, OverflowError) as error:
        taken.close()
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise DgemmaError(f"{host} port {port}: {reason}; choose another --port") from None
    return taken


def make_server(
    engine: "Engine", settings: Settings, on_drain: Callable[[int], None] = lambda count: None
) -> Server:
    """A server that is not running yet. `on_drain` is told how many requests are in flight."""
    app = make_app(engine, settings)
    config = uvicorn.Config(
        app,
        log_level="warning",
        access_log=False,
        server_header=False,
        h11_max_incomplete_event_size=MAX_HEADERS,
        timeout_graceful_shutdown=LAST_SECONDS,
    )
    service: Service = app.state.service
    return Server(config, service.drain, service.worker.abandon, on_drain)
