"""Calls of the application without a socket: the server's replies, and streams that go on."""

import asyncio
import json
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest

from dgemma.scale.replay import Replay
from dgemma.server.app import App
from dgemma.server.call import Call, opening, run_call, whole_reply
from tests.server.conftest import MODEL
from tests.taught import ANSWERS, LONG, SHORT, THOUGHT


def call_for(question: str, **fields: Any) -> Call:
    body = {"messages": [{"role": "user", "content": question}], **fields}
    return Call(path="/v1/chat/completions", body=json.dumps(body).encode())


def run(work: Awaitable[Any]) -> Any:
    async def main() -> Any:
        return await asyncio.wait_for(work, 60)

    return asyncio.run(main())


async def pieces(app: App, call: Call) -> AsyncIterator[bytes]:
    async for message in run_call(app, call):
        if message["type"] == "http.response.body":
            yield message.get("body", b"")


def without_times(data: bytes) -> bytes:
    return re.sub(rb'"\w*(seconds|cache\w*tokens|input_tokens|_at|duration)":[\d.e-]+', b"", data)


async def collected(app: App, call: Call) -> bytes:
    return b"".join([piece async for piece in pieces(app, call)])


def test_a_call_is_answered_as_a_request_would_be(routes: App) -> None:
    status, data = run(whole_reply(routes, call_for(SHORT)))
    assert status == 200
    assert json.loads(data)["choices"][0]["message"]["content"] == ANSWERS[SHORT]
    status, data = run(whole_reply(routes, call_for(SHORT, nonsense=1)))
    assert status == 400
    assert "nonsense" in json.loads(data)["error"]["message"]


def test_a_call_repeats_its_ids_and_its_seed(routes: App) -> None:
    call = call_for(SHORT)
    first, again = (json.loads(run(whole_reply(routes, call))[1]) for _ in range(2))
    assert (first["id"], first["created"]) == (again["id"], again["created"])
    assert first["id"].endswith(call.reply_id)
    assert first["choices"][0]["dgemma"]["seed"] == again["choices"][0]["dgemma"]["seed"]
    given = json.loads(run(whole_reply(routes, call_for(SHORT, seed=7)))[1])
    assert given["choices"][0]["dgemma"]["seed"] == 7


STREAMS: dict[str, dict[str, Any]] = {
    "plain": {},
    "usage": {"stream_options": {"include_usage": True}},
    "two answers": {"n": 2},
    "drafts": {"dgemma": {"drafts": True}},
    "replaced text": {"diffusing": True},
    "ar": {"dgemma": {"mode": "ar"}},
    "paced": {"dgemma": {"pace": 100000}},
    "constrained": {"dgemma": {"regex": "[a-c]{40}"}},
}


def continued(routes: App, call: Call, events: list[bytes]) -> Iterator[bytes]:
    """Yield the stream as a client sees it that is cut after some events and continued."""
    for count in range(1, len(events), max(1, len(events) // 5)):
        replay = Replay()
        seen = replay.feed(b"\x1e".join([*events[:count], b""]))
        replay.restart()
        known = {index: tuple(given) for index, given in replay.committed.items()}
        seen += replay.feed(run(collected(routes, replace(call, committed=known))))
        assert replay.is_over
        yield seen


@pytest.mark.parametrize("kind", STREAMS)
@pytest.mark.parametrize("question", [LONG, THOUGHT])
def test_a_stream_goes_on_in_another_server(routes: App, kind: str, question: str) -> None:
    """Cut after each event, and continued from what was committed by then."""
    call = call_for(question, stream=True, seed=3, **STREAMS[kind])
    plain = run(collected(routes, call))
    marked = replace(call, is_resumable=True)
    events = run(collected(routes, marked)).split(b"\x1e")[:-1]
    assert without_times(Replay().feed(b"\x1e".join([*events, b""]))) == without_times(plain)
    for seen in continued(routes, marked, events):
        if kind == "replaced text":  # all before the last is replaced
            assert last_text(seen) == last_text(plain)
        else:
            assert promised(seen) == promised(plain)


def chunks_of(data: bytes) -> list[bytes]:
    return [line[6:] for line in without_times(data).split(b"\n\n") if line[:6] == b"data: "]


def promised(data: bytes) -> list[bytes]:
    """The chunks that a client keeps; passes may interleave two answers in another order."""
    return sorted(chunk for chunk in chunks_of(data) if b'"type":"draft"' not in chunk)


def last_text(data: bytes) -> tuple[bytes, bytes]:
    texts = [chunk for chunk in chunks_of(data) if b'"content":' in chunk]
    return texts[-1], chunks_of(data)[-1]


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("/v1/messages", {"messages": [{"role": "user", "content": LONG}], "max_tokens": 60}),
        ("/v1/responses", {"input": LONG}),
        ("/api/chat", {"messages": [{"role": "user", "content": LONG}], "model": MODEL}),
        ("/v1/completions", {"prompt": "one", "max_tokens": 40, "seed": 3}),
    ],
)
def test_streams_of_other_apis_go_on_too(routes: App, path: str, fields: dict[str, Any]) -> None:
    body = json.dumps({**fields, "stream": True}).encode()
    call = Call(path=path, body=body, seed=3, is_resumable=True)
    whole = run(collected(routes, call))
    plain = run(collected(routes, replace(call, is_resumable=False)))
    events = whole.split(b"\x1e")[:-1]
    for seen in continued(routes, call, events):
        assert without_times(seen) == without_times(plain)


def test_a_client_that_leaves_cancels_its_request(routes: App) -> None:
    async def leave() -> None:
        messages = run_call(routes, call_for(LONG, stream=True, dgemma={"mode": "ar"}))
        await anext(messages)
        await messages.aclose()  # type: ignore[attr-defined]
        worker = routes.state.service.worker
        while worker.num_running or worker.num_waiting:
            await asyncio.sleep(0.005)

    run(leave())


def test_requests_of_one_conversation_begin_alike() -> None:
    system = {"role": "system", "content": "You are kind."}
    first, reply = {"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}
    talk = opening({"messages": [system, first]})
    assert opening({"messages": [system, first, reply, {"role": "user", "content": "So?"}]}) == talk
    assert opening({"messages": [system, {"role": "user", "content": "Bye"}]}) != talk
    assert opening({"messages": [first]}) != opening({"messages": [first], "system": "x"})
    text = "def f():\n" * 200
    assert opening({"prompt": text + "a"}) == opening({"prompt": text + "b"})
    kinds: list[Callable[[], object]] = [dict, list, lambda: {"messages": []}, lambda: None]
    assert [opening(make()) for make in kinds] == ["", "", "", ""]
