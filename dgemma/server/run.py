"""A server on a socket, until a signal ends it."""

import socket
from collections.abc import Callable, MutableMapping
from typing import TYPE_CHECKING

import uvicorn

from dgemma.errors import DgemmaError, UsageError
from dgemma.server.app import make_app
from dgemma.server.drain import Server
from dgemma.server.service import Service, Settings

if TYPE_CHECKING:
    from dgemma.engine import Engine

LAST_SECONDS = 5  # for what is left when the drain's time is over
MAX_HEADERS = 32 << 10  # bytes
KERNELS = 128  # of different shapes


def bound_kernels(environment: MutableMapping[str, str]) -> None:
    """Keep fewer kernels of the CPU's matrix library than the 1024 it keeps by itself.

    It compiles one for each shape, and a server meets many: they come to half a GiB and save
    nothing. Works before the library's first use.
    """
    for name in ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY"):
        environment.setdefault(name, str(KERNELS))


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
