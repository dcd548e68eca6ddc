"""`dgemma serve`: the engine behind HTTP."""

import math
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dgemma.cli.app import Adapter, Device, Dtype, Model, Quant, app
from dgemma.errors import DgemmaError, UsageError

if TYPE_CHECKING:
    import socket

MIB = 1 << 20


@app.command()
def serve(
    model: Model = "nano",
    device: Device = "auto",
    dtype: Dtype = "auto",
    quant: Quant = "auto",
    adapter: Adapter = None,
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
        list[str] | None, typer.Option(help="An origin whose web pages may ask.")
    ] = None,
    max_rows: Annotated[int, typer.Option(help="Most requests in one pass.")] = 8,
    max_queue: Annotated[int, typer.Option(help="Most waiting requests of a key.")] = 64,
    max_context: Annotated[
        int, typer.Option(help="Most tokens of all running requests together.")
    ] = 1 << 18,
    max_body: Annotated[float, typer.Option(help="Largest request in MiB.")] = 4,
    max_seconds: Annotated[float, typer.Option(help="Deadline of a request.")] = 600,
    drain_seconds: Annotated[
        float, typer.Option(help="How long running requests may go on after a signal.")
    ] = 120,
) -> None:
    """Serve the model over HTTP, in OpenAI's shapes."""
    _require_extra()
    from dgemma.cli.loading import load_engine
    from dgemma.server.limits import Limits
    from dgemma.server.run import bind, bound_kernels, make_server
    from dgemma.server.security import check_listening, names_of, read_keys
    from dgemma.server.service import Settings

    keys = read_keys(api_key_file, os.environ)
    check_listening(host, keys, allow_anonymous=allow_anonymous)
    settings = Settings(
        names=tuple(name or [_name_of(model)]),
        limits=Limits(
            rows=max_rows,
            queue=max_queue,
            tokens=max_context,
            body_bytes=_bytes(max_body),
            seconds=max_seconds,
            drain_seconds=drain_seconds,
        ),
        keys=keys,
        hosts=names_of(host, allow_host or ()),
        cors_origins=tuple(cors_origin or ()),
    )
    bound_kernels(os.environ)
    taken = bind(host, port)  # before a long load
    server = make_server(load_engine(model, device, dtype, adapter, quant), settings, _tell_drain)
    where = _address(taken)
    told = f"dgemma: {settings.names[0]} is at {where}/v1, its web page at {where}"
    print(told, file=sys.stderr, flush=True)
    server.run(sockets=[taken])


def _require_extra() -> None:
    from importlib.util import find_spec

    missing = [name for name in ("fastapi", "uvicorn", "prometheus_client") if not find_spec(name)]
    if missing:
        raise DgemmaError(f"{missing[0]} is not installed; pip install 'dgemma[serve]'")


def _bytes(mib: float) -> int:
    if not math.isfinite(mib):
        raise UsageError(f"--max-body is {mib}; it must be a number above 0")
    return int(mib * MIB)


def _name_of(model: str) -> str:
    """A directory goes by its own name: where it lies is nobody's business."""
    path = Path(model)
    return path.resolve().name if path.is_dir() else model


def _address(taken: "socket.socket") -> str:
    host, port = taken.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _tell_drain(count: int) -> None:
    requests = "1 request" if count == 1 else f"{count} requests"
    what = f"finishing {requests}; again to stop at once" if count else "stopping"
    print(f"dgemma: {what}", file=sys.stderr, flush=True)
