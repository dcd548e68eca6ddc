"""One replica: an engine behind the routes, and its messages. Does not import Ray."""

import hashlib
import os
from collections.abc import AsyncIterator
from dataclasses import asdict, dataclass
from typing import Any

from dgemma.errors import DgemmaError, UsageError, explain_bus_errors
from dgemma.server.call import Call, run_call
from dgemma.server.service import Settings
from dgemma.weights.hub import ModelOptions

# How much busier the preferred replica may be than the least busy one: a batch, within
# which no request waits.
SLACK = 8
FAULTS = "DGEMMA_REPLICA_FAULTS"  # file to which a replica writes why it ended
STREAM_TYPES = (b"text/event-stream", b"application/x-ndjson")
Sample = tuple[str, tuple[tuple[str, str], ...], float]  # name, labels, value
MetricFamily = tuple[str, str, str, list[Sample]]  # name, type, documentation, samples


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaOptions:
    """Number and size of replicas, by the names of the command's options."""

    replicas: int = 2
    max_replicas: int | None = None  # above `replicas`: autoscaling
    cpus: float = 1.0  # per replica; its threads, unless OMP_NUM_THREADS is set
    gpus: float = 0.0
    upscale_seconds: float = 10.0  # of load before a replica is added
    downscale_seconds: float = 300.0  # without it before one is removed

    def __post_init__(self) -> None:
        if self.replicas < 1:
            raise UsageError(f"--replicas is {self.replicas}; it must be 1 or more")
        if self.max_replicas is not None and self.max_replicas < self.replicas:
            raise UsageError(
                f"--max-replicas is {self.max_replicas}; it must be at least --replicas, "
                f"{self.replicas}"
            )

    @property
    def most(self) -> int:
        return self.max_replicas or self.replicas


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaRequest:
    """A call, and the key by which its replica is chosen."""

    call: Call
    opening: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplyHead:
    """The head of a reply: status, headers, and the replica that writes it."""

    status: int
    headers: tuple[tuple[bytes, bytes], ...]
    replica: str
    route: str | None

    @property
    def is_stream(self) -> bool:
        types = (value for name, value in self.headers if name.lower() == b"content-type")
        return any(kind.startswith(STREAM_TYPES) for kind in types)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaStats:
    """The state of a replica."""

    replica: str
    pid: int
    fault: str
    running: int
    waiting: int
    metrics: list[MetricFamily]


def rank_replicas(opening: str, load: dict[str, int], slack: int = SLACK) -> list[str]:
    """Order replicas by rendezvous hashing of a prompt's opening; busy ones come last.

    Adding or losing a replica moves only the conversations it takes over or had. A request without
    an opening goes to the least busy replica.
    """
    if not opening:
        return sorted(load, key=lambda replica: load[replica])

    def weight(replica: str) -> bytes:
        named = f"{opening}|{replica}".encode("utf-8", "surrogatepass")
        return hashlib.blake2b(named, digest_size=8).digest()

    limit = min(load.values(), default=0) + slack
    return sorted(load, key=lambda replica: (load[replica] <= limit, weight(replica)), reverse=True)


class Model:
    """One engine. Its routes have no middleware: the front checks keys and limits."""

    def __init__(
        self, arguments: ModelOptions, settings: Settings, *, is_on_loopback: bool = False
    ) -> None:
        faults = _open_faults()
        explain_bus_errors(faults)
        if is_on_loopback:
            bind_to_loopback()
        from dgemma.device import bound_kernel_cache
        from dgemma.engine import Engine
        from dgemma.server.app import make_routes

        bound_kernel_cache(os.environ)
        try:
            engine = Engine.load(**asdict(arguments))
        except DgemmaError as error:
            os.write(faults, f"dgemma: {error}\n".encode())
            raise
        self.app = make_routes(engine, settings)
        self.service = self.app.state.service
        self.service.worker.start()
        self.name = _replica_name()

    async def ask(self, ask: ReplicaRequest) -> AsyncIterator[ReplyHead | bytes]:
        """Answer a call: the head, then the body in pieces. Ray closes it if its client leaves."""
        async for message in run_call(self.app, ask.call):
            if message["type"] == "http.response.start":
                yield ReplyHead(
                    status=message["status"],
                    headers=tuple(message.get("headers", ())),
                    replica=self.name,
                    route=message.get("route"),
                )
            elif body := message.get("body", b""):
                yield body

    async def stats(self) -> ReplicaStats:
        worker, registry = self.service.worker, self.service.metrics.registry
        return ReplicaStats(
            replica=self.name,
            pid=os.getpid(),
            fault=worker.fault,
            running=worker.num_running,
            waiting=worker.num_waiting,
            metrics=[f for f in families(registry) if not f[0].startswith("process_")],
        )

    def check_health(self) -> None:
        """Fail if the engine cannot serve any more, so that Ray replaces this replica."""
        if self.service.worker.fault:
            raise RuntimeError(self.service.worker.fault)


def families(registry: Any) -> list[MetricFamily]:
    """Return the metrics of a registry in a form that can be sent and summed."""
    return [
        (
            metric.name,
            metric.type,
            metric.documentation,
            [
                (sample.name, tuple(sorted(sample.labels.items())), sample.value)
                for sample in metric.samples
                if not sample.name.endswith("_created")  # times cannot be summed
            ],
        )
        for metric in registry.collect()
    ]


def bind_to_loopback() -> None:
    """Bind this replica's gRPC port to loopback: Ray binds it to all interfaces.

    There is no setting for it. A Ray with another name for this function fails here, which is
    better than an open port.
    """
    from ray.serve._private import replica

    bind = replica.add_port_to_grpc_server
    replica.add_port_to_grpc_server = lambda server, address: bind(
        server, address.replace("[::]", "127.0.0.1")
    )


def _open_faults() -> int:
    path = os.environ.get(FAULTS)
    return 2 if path is None else os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)


def _replica_name() -> str:
    from ray import serve

    return str(serve.get_replica_context().replica_id.unique_id)
