"""The front of all replicas: address, keys, limits, health, metrics, and replay.

It loads no model, and reads only the opening of a prompt. It gives every request a seed and ids,
with which another replica can repeat it: if a replica dies, its replies are requested again and its
streams continue where they stopped.
"""

import asyncio
import json
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, TypeVar

from prometheus_client import CONTENT_TYPE_LATEST, Gauge, generate_latest
from prometheus_client import Counter as Count
from prometheus_client.core import Metric
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from dgemma.scale.replay import Replay, ReplayDiffers
from dgemma.scale.replica import MetricFamily, ReplicaRequest, ReplicaStats, ReplyHead, families
from dgemma.server.app import add_error_handlers, add_middleware
from dgemma.server.call import Call, opening
from dgemma.server.errors import MESSAGES_PATH, OLLAMA_PATH, ApiError
from dgemma.server.format import STILL_WORKING
from dgemma.server.lifecycle import Drain
from dgemma.server.metrics import Metrics
from dgemma.server.service import MAX_INLINE_BYTES, Settings, while_connected
from dgemma.server.stream import HEARTBEAT

if TYPE_CHECKING:
    from ray.serve.handle import DeploymentHandle

T = TypeVar("T")
METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS")
SECRET_HEADERS = frozenset({b"authorization", b"x-api-key", b"cookie"})  # not passed on
OWN_HEADERS = frozenset({b"content-length", b"transfer-encoding", b"x-request-id"})
MAX_ATTEMPTS = 12  # attempts per request
BACKOFF_SECONDS = 0.05  # before the second attempt, doubled with each up to...
MAX_BACKOFF_SECONDS = 2.0
POLL_SECONDS = 2.0  # between polls of all replicas
POLL_TIMEOUT = 5.0
LATE_SECONDS = 5.0  # grace after a request's deadline
MAX_SILENT = 16  # unresponsive replicas with separate metrics
LATE = ApiError(503, "no replica answered in time; try again", code="timeout", retry_after=5)
ABANDONED = ApiError(503, "the server is stopping; try again", code="draining", retry_after=5)


@dataclass(slots=True)
class FleetMetrics:
    """Metrics summed over all replicas, including past ones."""

    _by_replica: dict[str, list[MetricFamily]] = field(default_factory=dict)
    # Counters of replicas that did not answer lately and may come back...
    _silent: dict[str, list[MetricFamily]] = field(default_factory=dict)
    # ...and the sum of those silent for longest.
    _retired: dict[str, MetricFamily] = field(default_factory=dict)

    def take(self, stats: list[ReplicaStats]) -> None:
        present = {replica.replica: replica.metrics for replica in stats}
        for name in self._by_replica.keys() - present.keys():
            self._silent[name] = [
                family for family in self._by_replica[name] if family[1] != "gauge"
            ]
        for name in present:
            self._silent.pop(name, None)
        while len(self._silent) > MAX_SILENT:
            oldest = self._silent.pop(next(iter(self._silent)))
            self._retired = sum_families([*self._retired.values(), *oldest])
        self._by_replica = present

    def collect(self, own: list[MetricFamily]) -> list[Metric]:
        """Return families for Prometheus, with the front's own."""
        known = [*self._by_replica.values(), *self._silent.values()]
        fleet = [family for families in known for family in families]
        metrics = []
        for name, kind, note, samples in sum_families(
            [*self._retired.values(), *own, *fleet]
        ).values():
            metric = Metric(name, note, kind)
            for sample, labels, value in samples:
                metric.add_sample(sample, dict(labels), value)
            metrics.append(metric)
        return metrics


def sum_families(families: list[MetricFamily]) -> dict[str, MetricFamily]:
    """Sum samples of the same name and labels."""
    sums: dict[str, Counter[Any]] = {}
    heads: dict[str, MetricFamily] = {}
    for family in families:
        heads.setdefault(family[0], family)
        values = sums.setdefault(family[0], Counter())
        for sample, labels, value in family[3]:
            values[sample, labels] += value  # type: ignore[assignment]  # a Counter of floats
    return {
        name: (*heads[name][:3], [(*key, value) for key, value in values.items()])
        for name, values in sums.items()
    }


class Front:
    """Relays requests to replicas through a Ray handle."""

    def __init__(self, handle: "DeploymentHandle[Any]", settings: Settings) -> None:
        self.handle, self.settings = handle, settings
        self.asks = handle.options(stream=True, method_name="ask")
        self.drain, self.metrics = Drain(settings.limits.drain_seconds), Metrics()
        registry = self.metrics.registry
        self.replays = Count("dgemma_replays", "Requests asked for again", registry=registry)
        self.lost = Count("dgemma_lost_requests", "Requests given up", registry=registry)
        self.num_replicas = Gauge("dgemma_replicas", "Replicas that serve", registry=registry)
        self.fleet = FleetMetrics()
        self.stats: list[ReplicaStats] = []
        self.in_flight: Counter[str] = Counter()  # requests, by owner
        self.relays: set[Relay] = set()

    # --- the fleet's state

    @asynccontextmanager
    async def lifespan(self, app: Starlette) -> AsyncIterator[None]:
        polling = asyncio.create_task(self._poll_always())
        yield
        polling.cancel()

    async def _poll_always(self) -> None:
        while True:
            await self.poll()
            await asyncio.sleep(POLL_SECONDS)

    async def poll(self) -> None:
        """Ask all replicas for their state; late ones are not counted."""
        try:
            # results_async would lose all answers if one is late.
            found = await asyncio.to_thread(
                self.handle.broadcast("stats").results,
                timeout_s=POLL_TIMEOUT,
                return_exceptions=True,
            )
        except Exception:  # there is no replica, or Ray stops
            found = []
        self.stats = [stats for stats in found if isinstance(stats, ReplicaStats)]
        self.num_replicas.set(sum(not stats.fault for stats in self.stats))
        self.fleet.take(self.stats)

    async def health(self, request: Request) -> Response:
        return self._status("ok")

    async def ready(self, request: Request) -> Response:
        if self.drain.began is not None:
            raise ApiError(503, "the server is stopping", code="draining", retry_after=5)
        return self._status("ready")

    def _status(self, status: str) -> Response:
        healthy = [stats for stats in self.stats if not stats.fault]
        if not healthy:
            raise ApiError(503, "no replica is ready; wait for one", code="failing", retry_after=5)
        return JSONResponse(
            {
                "status": status,
                "running": sum(stats.running for stats in healthy),
                "waiting": sum(stats.waiting for stats in healthy),
                "replicas": len(healthy),
            }
        )

    async def metrics_page(self, request: Request) -> Response:
        await self.poll()
        metrics = self.fleet.collect(families(self.metrics.registry))
        page = generate_latest(SimpleNamespace(collect=lambda: metrics))
        return Response(page, media_type=CONTENT_TYPE_LATEST)

    # --- requests

    async def relay(self, request: Request) -> Response:
        """Answer by a replica."""
        owner = request.state.owner
        body = await request.body()
        relay = Relay(self, await self._ask(request, body), request.state.arrived)
        if request.method == "POST":
            self._check_room(owner)
        self.in_flight[owner] += 1  # no await between check and count
        self.relays.add(relay)
        relay.on_close = lambda: self._end(owner, relay)
        try:
            head, data = await while_connected(request, relay.begin())
        except BaseException:
            relay.close()
            raise
        if head.route is not None:
            request.scope["route"] = SimpleNamespace(path=head.route)  # for the count by route
        reply = RelayedStream(relay) if data is None else Response(data)
        if data is not None:
            relay.close()
        reply.status_code = head.status
        reply.raw_headers = [
            *(header for header in head.headers if header[0].lower() not in OWN_HEADERS),
            *(() if data is None else ((b"content-length", str(len(data)).encode()),)),
            (b"x-dgemma-replica", head.replica.encode()),
        ]
        return reply

    def abandon(self) -> None:
        """End all running requests now: the server has no time left."""
        for relay in self.relays:
            relay.abandon()

    def _end(self, owner: str, relay: "Relay") -> None:
        self.relays.discard(relay)
        self.in_flight -= Counter({owner: 1})  # Counter subtraction drops zeros

    def _check_room(self, owner: str) -> None:
        """Refuse requests beyond an owner's share of replicas and queue."""
        limits, count = self.settings.limits, max(len(self.stats), 1)
        most = limits.max_queue + limits.max_batch_size * count
        if self.in_flight[owner] >= most:
            sentence = f"too many requests are waiting; a key may have {most} at a time"
            raise ApiError(429, sentence, code="queue_full", retry_after=1)

    async def _ask(self, request: Request, body: bytes) -> ReplicaRequest:
        find = asyncio.to_thread(_opening, body) if len(body) > MAX_INLINE_BYTES else None
        scope = request.scope
        headers = ((name, value) for name, value in scope["headers"] if name not in SECRET_HEADERS)
        call = Call(
            path=scope["path"],
            method=scope["method"],
            query=scope["query_string"],
            headers=tuple(headers),
            body=body,
            owner=request.state.owner,
            request_id=request.state.request_id,
            is_resumable=True,
        )
        return ReplicaRequest(call=call, opening=_opening(body) if find is None else await find)


def _opening(body: bytes) -> str:
    try:
        return opening(json.loads(body)) if body else ""
    except (ValueError, RecursionError):
        return ""  # the replica reports the error


class Relay:
    """One request, repeated while its replicas die."""

    def __init__(self, front: Front, ask: ReplicaRequest, arrived: float) -> None:
        self.front, self.ask, self.arrived = front, ask, arrived
        self.replay = Replay()
        self.pieces: Any = None  # body of the current reply
        self.num_attempts = 0
        self.is_abandoned = False
        self.on_close: Callable[[], None] = lambda: None

    async def begin(self) -> tuple[ReplyHead, bytes | None]:
        """Return the head of the reply, and its whole body unless it is a stream."""
        while True:
            try:
                head = await self._head()
                if head.is_stream:
                    return head, None
                return head, b"".join([piece async for piece in self._pieces()])
            except Exception as error:
                await self._again(error)

    async def lines(self) -> AsyncIterator[bytes | str]:
        """Yield the events of a stream; nothing is sent twice."""
        try:
            while True:
                try:
                    async for piece in self._pieces():
                        if data := self.replay.feed(piece):
                            yield data
                    if self.replay.is_over:
                        return
                    error: Exception = RuntimeError("a replica ended its stream early")
                except ReplayDiffers as differs:
                    raise ApiError(500, f"the request could not be continued: {differs}") from None
                except Exception as failure:
                    error = failure
                async for comment in _with_heartbeat(self._resume(error)):
                    if not self.ask.call.path.startswith(OLLAMA_PATH):  # its streams have none
                        yield comment
        except ApiError as refusal:
            self.front.lost.inc()
            yield self._error_line(refusal)
        finally:
            self.close()

    def close(self) -> None:
        """Tell the replica that the client is gone."""
        if self.pieces is not None:
            with suppress(Exception):
                self.pieces.cancel()
        on_close, self.on_close = self.on_close, lambda: None
        on_close()

    def abandon(self) -> None:
        self.is_abandoned = True
        with suppress(Exception):
            self.pieces.cancel()

    def _error_line(self, error: ApiError) -> str:
        path = self.ask.call.path
        body = json.dumps(error.body_for(path))
        if path.startswith(OLLAMA_PATH):
            return f"{body}\n"
        name = "event: error\n" if path.startswith(MESSAGES_PATH) else ""
        return f"{name}data: {body}\n\n"

    async def _head(self) -> ReplyHead:
        seconds = time.monotonic() - self.arrived
        committed = {index: tuple(given) for index, given in self.replay.committed.items()}
        call = replace(self.ask.call, seconds=seconds, committed=committed)
        self.pieces = self.front.asks.remote(replace(self.ask, call=call))
        try:
            head = await self._next()
        except StopAsyncIteration:
            raise RuntimeError("a replica ended without a reply") from None
        assert isinstance(head, ReplyHead)
        return head

    async def _pieces(self) -> AsyncIterator[bytes]:
        """Yield the body of the current reply."""
        with suppress(StopAsyncIteration):
            while True:
                yield await self._next()

    async def _next(self) -> Any:
        """Wait for the replica, or for one to exist, but not long past the deadline."""
        try:
            async with asyncio.timeout(max(self._seconds_left, 0) + LATE_SECONDS) as limit:
                return await anext(self.pieces)
        except TimeoutError:
            if limit.expired():
                raise LATE from None
            raise

    @property
    def _seconds_left(self) -> float:
        return self.front.settings.limits.max_seconds - (time.monotonic() - self.arrived)

    async def _resume(self, error: Exception) -> None:
        """Request the same stream from another replica."""
        while True:
            await self._again(error)
            self.replay.restart()
            try:
                head = await self._head()
                if head.status == 200:
                    return
                error = RuntimeError(f"a replica answered {head.status}")
            except Exception as failure:
                error = failure

    async def _again(self, error: Exception) -> None:
        """Wait before the next attempt, or give up."""
        if self.is_abandoned:
            raise ABANDONED from None
        if isinstance(error, ApiError) or not is_death(error):
            raise error
        self.num_attempts += 1
        left = self._seconds_left
        if self.num_attempts >= MAX_ATTEMPTS or left <= 0:
            self.front.lost.inc()
            sentence = "no replica could answer; try again"
            raise ApiError(503, sentence, code="unavailable", retry_after=5) from None
        self.front.replays.inc()
        wait = min(BACKOFF_SECONDS * 2.0**self.num_attempts, MAX_BACKOFF_SECONDS, left)
        await asyncio.sleep(wait)


def is_death(error: Exception) -> bool:
    """True if a call failed because its replica died."""
    from ray.exceptions import RayActorError, RaySystemError, RayTaskError

    if isinstance(error, RayTaskError):  # the replica's own exception
        return False
    return isinstance(error, RayActorError | RaySystemError | RuntimeError | OSError)


class RelayedStream(StreamingResponse):
    """A relayed stream. Its replica is notified when it ends, even before the first line."""

    def __init__(self, relay: Relay) -> None:
        super().__init__(relay.lines(), media_type="text/event-stream")
        self.relay = relay

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self.relay.close()


async def _with_heartbeat(work: Awaitable[None]) -> AsyncIterator[str]:
    """Await work; yields comments that keep the connection alive."""
    task = asyncio.ensure_future(work)
    try:
        while not (await asyncio.wait({task}, timeout=HEARTBEAT))[0]:
            yield STILL_WORKING
        task.result()
    finally:
        task.cancel()


def make_front(handle: "DeploymentHandle[Any]", settings: Settings) -> Starlette:
    """Return the application that clients see."""
    front = Front(handle, settings)
    app = Starlette(
        routes=[
            Route("/health", front.health),
            Route("/ready", front.ready),
            Route("/metrics", front.metrics_page),
            Route("/{path:path}", front.relay, methods=list(METHODS)),
        ],
        lifespan=front.lifespan,
    )
    app.state.service = front
    add_error_handlers(app)
    add_middleware(app, settings, front.drain, front.metrics)
    return app
