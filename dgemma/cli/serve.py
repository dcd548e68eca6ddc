"""`dgemma serve`: the HTTP server."""

import math
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dgemma.cli.app import app, load_engine, with_options
from dgemma.errors import DgemmaError, UsageError
from dgemma.server.limits import Limits, default_max_body
from dgemma.weights.hub import ModelOptions

if TYPE_CHECKING:
    import socket

MIB = 1 << 20


@app.command()
@with_options
def serve(
    *,
    options: ModelOptions,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[
        int, typer.Option(min=0, max=65535, help="Port to listen on; 0 takes a free one.")
    ] = 8080,
    name: Annotated[
        list[str] | None, typer.Option(help="A name to serve the model by; the first is listed.")
    ] = None,
    api_key_file: Annotated[
        Path | None, typer.Option(help="API keys, one a line; DGEMMA_API_KEYS works too.")
    ] = None,
    allow_anonymous: Annotated[
        bool, typer.Option("--allow-anonymous", help="Listen beyond this machine without keys.")
    ] = False,
    allow_host: Annotated[
        list[str] | None, typer.Option(help="A name clients may call the server by.")
    ] = None,
    cors_origin: Annotated[
        list[str] | None, typer.Option(help="An origin whose web pages may send requests.")
    ] = None,
    limits: Limits,
    max_body: Annotated[
        float | None,
        typer.Option(help="Largest request in MiB; 4 by default, 32 for a model with pictures."),
    ] = None,
    replicas: Annotated[
        int | None, typer.Option(help="Engines to serve with, each a process of its own, by Ray.")
    ] = None,
    max_replicas: Annotated[
        int | None, typer.Option(help="Most replicas; they are added under load.")
    ] = None,
    gpus_per_replica: Annotated[
        float | None, typer.Option(help="GPUs of each replica; 1 where there is one.")
    ] = None,
    cpus_per_replica: Annotated[
        int | None, typer.Option(help="Threads of each replica; an equal share by default.")
    ] = None,
) -> None:
    """Serve OpenAI, Anthropic and Ollama APIs and a web page."""
    require_extra()
    from dgemma.server.app import make_app
    from dgemma.server.auth import check_listening, names_of, read_keys
    from dgemma.server.lifecycle import bind, make_server
    from dgemma.server.service import Settings

    keys = read_keys(api_key_file, os.environ)
    check_listening(host, keys, allow_anonymous=allow_anonymous)
    settings = Settings(
        names=tuple(name or [_name_of(options.model)]),
        limits=replace(limits, max_body=_max_body(max_body, options.model)),
        keys=keys,
        hosts=names_of(host, allow_host or ()),
        cors_origins=tuple(cors_origin or ()),
    )
    listening = bind(host, port)  # before a long load
    url = _url(listening)
    banner = f"dgemma: {settings.names[0]} is at {url}/v1, its web page at {url}"
    if replicas is not None:
        from dgemma.scale.local import Fleet, local_options, serve_replicas

        size = local_options(
            replicas, max_replicas, gpus_per_replica, cpus_per_replica, options.device
        )
        serve_replicas(Fleet(options, settings, size), listening, banner, _print_drain)
        return
    if any(option is not None for option in (max_replicas, gpus_per_replica, cpus_per_replica)):
        raise UsageError("--max-replicas and sizes of replicas need --replicas; give it too")
    from dgemma.device import bound_kernel_cache

    bound_kernel_cache(os.environ)
    engine = load_engine(options)
    server = make_server(make_app(engine, settings), _print_drain)
    print(banner, file=sys.stderr, flush=True)
    server.run(sockets=[listening])


def require_extra() -> None:
    from importlib.util import find_spec

    missing = [name for name in ("fastapi", "uvicorn", "prometheus_client") if not find_spec(name)]
    if missing:
        raise DgemmaError(f"{missing[0]} is not installed; pip install 'dgemma[serve]'")


def _max_body(mib: float | None, model: str) -> int:
    if mib is None:
        return default_max_body(model)
    if not 0 < mib < math.inf:
        raise UsageError(f"--max-body is {mib}; it must be a number above 0")
    return int(mib * MIB)


def _name_of(model: str) -> str:
    """Return the public name of a model; hides the directory path."""
    path = Path(model)
    return path.resolve().name if path.is_dir() else model


def _url(listening: "socket.socket") -> str:
    host, port = listening.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _print_drain(count: int) -> None:
    requests = "1 request" if count == 1 else f"{count} requests"
    what = f"finishing {requests}; again to stop at once" if count else "stopping"
    print(f"dgemma: {what}", file=sys.stderr, flush=True)
