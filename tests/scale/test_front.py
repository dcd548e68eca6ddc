"""The front over replicas of this process, without Ray: late, full and silent ones."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.applications import Starlette

from dgemma.scale.front import MAX_SILENT, FleetMetrics, make_front
from dgemma.scale.replica import MetricFamily, Model, ReplicaRequest, ReplicaStats
from dgemma.server.app import make_routes
from dgemma.server.limits import Limits
from dgemma.server.service import MAX_INLINE_BYTES, Settings
from tests.server.conftest import MODEL, load
from tests.taught import ANSWERS, LONG, SHORT

pytest.importorskip("ray")
PATH = "/v1/chat/completions"


class Pieces:
    """A reply as Ray's handle gives it; it hangs after so many of its pieces."""

    def __init__(self, pieces: AsyncIterator[Any], hangs_after: int) -> None:
        self.pieces, self.left, self.is_cancelled = pieces, hangs_after, asyncio.Event()

    async def __anext__(self) -> Any:
        if self.left <= 0:
            await self.is_cancelled.wait()
        self.left -= 1
        return await anext(self.pieces)

    def cancel(self) -> None:
        self.is_cancelled.set()


class Handle:
    """Ray's handle of one replica in this process."""

    def __init__(self, model: Model, hangs_after: int) -> None:
        self.model, self.hangs_after = model, hangs_after

    def options(self, **options: Any) -> "Handle":
        return self

    def remote(self, ask: ReplicaRequest) -> Pieces:
        return Pieces(self.model.ask(ask), self.hangs_after)


@pytest.fixture(scope="module")
def model(checkpoint: Path) -> Iterator[Model]:
    model = object.__new__(Model)
    model.app = make_routes(load(checkpoint), Settings(names=(MODEL,)))
    model.service, model.name = model.app.state.service, "here"
    model.service.worker.start()
    yield model
    model.service.worker.stop()


def front(model: Model, hangs_after: int = 1 << 30, **limits: Any) -> Starlette:
    handle: Any = Handle(model, hangs_after)
    return make_front(handle, Settings(names=(MODEL,), limits=Limits(**limits)))


async def ask(app: Starlette, question: str, path: str = PATH, **fields: Any) -> httpx.Response:
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    body = {"messages": [{"role": "user", "content": question}], **fields}
    async with httpx.AsyncClient(transport=transport, base_url="http://front") as client:
        return await client.post(path, json=body)


def test_a_reply_is_relayed_as_it_is(model: Model) -> None:
    reply = asyncio.run(ask(front(model), SHORT))
    assert reply.json()["choices"][0]["message"]["content"] == ANSWERS[SHORT]
    assert reply.headers["x-dgemma-replica"] == "here"


def test_a_refusal_has_the_id_of_its_request(model: Model) -> None:
    reply = asyncio.run(ask(front(model), SHORT, "/v1/messages"))
    assert reply.status_code == 400 and "max_tokens is missing" in reply.text
    assert reply.json()["request_id"] == reply.headers["x-request-id"]


def test_a_replica_that_hangs_holds_nobody_past_a_deadline(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor does a fleet without any: its handle waits for one."""
    monkeypatch.setattr("dgemma.scale.front.LATE_SECONDS", 0.1)
    reply = asyncio.run(ask(front(model, 0, max_seconds=0.1), SHORT))
    assert (reply.status_code, reply.json()["error"]["code"]) == (503, "timeout")
    assert reply.headers["retry-after"]
    body = asyncio.run(ask(front(model, 1, max_seconds=0.1), SHORT))
    assert body.status_code == 503
    stream = asyncio.run(ask(front(model, 2, max_seconds=0.1), LONG, stream=True))
    assert stream.status_code == 200
    assert "no replica answered in time" in stream.text and "[DONE]" not in stream.text


def test_a_key_takes_no_more_by_sending_its_requests_at_once(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Large bodies are looked into by a thread, and others come meanwhile."""
    monkeypatch.setattr("dgemma.scale.front.LATE_SECONDS", 0.1)
    app = front(model, 0, max_seconds=0.5, max_queue=1, max_batch_size=1)

    async def many() -> list[int]:
        asks = [ask(app, "the " * MAX_INLINE_BYTES) for _ in range(8)]
        return [reply.status_code for reply in await asyncio.gather(*asks)]

    statuses = asyncio.run(many())
    assert sorted(statuses) == [429] * 6 + [503] * 2
    assert not app.state.service.in_flight and not app.state.service.relays


# --- metrics


def stats(name: str, count: float) -> ReplicaStats:
    families: list[MetricFamily] = [
        ("asked", "counter", "", [("asked_total", (), count)]),
        ("running", "gauge", "", [("running", (), 1.0)]),
    ]
    return ReplicaStats(replica=name, pid=1, fault="", running=1, waiting=0, metrics=families)


def values(fleet: FleetMetrics) -> dict[str, float]:
    return {s.name: s.value for metric in fleet.collect([]) for s in metric.samples}


def test_a_replica_that_was_silent_for_a_while_is_counted_once() -> None:
    fleet = FleetMetrics()
    fleet.take([stats("a", 5), stats("b", 7)])
    fleet.take([stats("b", 8)])
    assert values(fleet) == {"asked_total": 13, "running": 1}
    fleet.take([stats("a", 6), stats("b", 8)])
    assert values(fleet) == {"asked_total": 14, "running": 2}


def test_the_numbers_of_many_replicas_that_are_gone_are_kept_in_sum() -> None:
    fleet = FleetMetrics()
    for number in range(2 * MAX_SILENT + 1):
        fleet.take([stats(str(number), 1)])
    assert values(fleet) == {"asked_total": 2 * MAX_SILENT + 1, "running": 1}
    assert len(fleet._silent) == MAX_SILENT
