"""`dgemma serve`: the HTTP server."""

import math
import os
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from dgemma.cli.app import app, load_engine, with_options
from dgemma.errors import DgemmaError, UsageError
from dgemma.options import option
from dgemma.server.limits import Limits, default_max_body
from dgemma.weights.hub import ModelOptions

if TYPE_CHECKING:
    import socket

    from dgemma.server.service import Settings

MIB = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class ListenOptions:
    """Listening address and access control."""

    host: str = option("127.0.0.1", "Address to listen on.")
    port: int = option(8080, "Port to listen on; 0 takes a free one.", min=0, max=65535)
    name: list[str] | None = option(None, "Name of the model in requests; the first one is listed.")
    api_key_file: Path | None = option(
        None, "File of API keys, one per line; also DGEMMA_API_KEYS."
    )
    allow_anonymous: bool = option(False, "Listen beyond this machine without keys.")
    allow_host: list[str] | None = option(None, "Accepted Host name; repeatable.")
    cors_origin: list[str] | None = option(None, "Allowed origin of web pages; repeatable.")
    max_body: float | None = option(
        None, "Largest request in MiB; 4 by default, 32 for a model with pictures."
    )

    def settings(self, model: ModelOptions, limits: Limits) -> "Settings":
        """Read the keys and check the address."""
        from dgemma.server.auth import check_listening, names_of, read_keys
        from dgemma.server.service import Settings

        keys = read_keys(self.api_key_file, os.environ)
        check_listening(self.host, keys, allow_anonymous=self.allow_anonymous)
        return Settings(
            names=tuple(self.name or [_name_of(model.model)]),
            limits=replace(limits, max_body=_max_body(self.max_body, model)),
            keys=keys,
            hosts=names_of(self.host, self.allow_host or ()),
            cors_origins=tuple(self.cors_origin or ()),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetOptions:
    """Replicas on this machine."""

    replicas: int | None = option(None, "Number of engines, each in its own process, by Ray.")
    max_replicas: int | None = option(None, "Most replicas; more are started under load.")
    gpus_per_replica: float | None = option(None, "GPUs per replica; default: 1 if available.")
    cpus_per_replica: int | None = option(None, "CPU threads per replica; default: an equal share.")


@app.command()
@with_options
def serve(model: ModelOptions, listen: ListenOptions, limits: Limits, fleet: FleetOptions) -> None:
    """Serve OpenAI, Anthropic and Ollama APIs and a web page."""
    require_extra()
    from dgemma.server.app import make_app
    from dgemma.server.lifecycle import bind, make_server

    settings = listen.settings(model, limits)
    listening = bind(listen.host, listen.port)  # before a long load
    url = _url(listening)
    banner = f"dgemma: {settings.names[0]} is at {url}/v1, its web page at {url}"
    if fleet.replicas is not None:
        from dgemma.scale.local import Fleet, local_options, serve_replicas

        size = local_options(
            fleet.replicas,
            fleet.max_replicas,
            fleet.gpus_per_replica,
            fleet.cpus_per_replica,
            model.device,
        )
        serve_replicas(Fleet(model, settings, size), listening, banner, _print_drain)
        return
    if fleet != FleetOptions():
        raise UsageError("--max-replicas and sizes of replicas need --replicas; give it too")
    from dgemma.device import bound_kernel_cache

    bound_kernel_cache(os.environ)
    engine = load_engine(model)
    server = make_server(make_app(engine, settings), _print_drain)
    print(banner, file=sys.stderr, flush=True)
    server.run(sockets=[listening])


def require_extra() -> None:
    from importlib.util import find_spec

    missing = [name for name in ("fastapi", "uvicorn", "prometheus_client") if not find_spec(name)]
    if missing:
        raise DgemmaError(f"{missing[0]} is not installed; pip install 'dgemma[serve]'")


def _max_body(mib: float | None, options: ModelOptions) -> int:
    if mib is None:
        return default_max_body(options.model, options.vision)
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
