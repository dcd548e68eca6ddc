"""Whatever clients send and however they leave: the server serves on, and others notice nothing."""

import asyncio
import json
import random
import signal
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from dgemma.server.app import make_app
from dgemma.server.limits import Limits
from dgemma.server.service import Settings
from tests.server.conftest import MODEL, Running, fail_one, load, wait_for
from tests.server.test_scheduling import ENDLESS, Brake, hang_up_later
from tests.taught import ANSWERS, LONG, SHORT

USER = [{"role": "user", "content": SHORT}]
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
PICTURE = "data:image/png;base64,iVBORw0KGgo="
APPLY = "<|original_code|>\na\n<|/original_code|>\n<|update_snippet|>\nb\n<|/update_snippet|>"
# A good body of each route, to be spoiled.
GOOD: list[tuple[str, dict[str, Any]]] = [
    (
        "/v1/chat/completions",
        {
            "messages": USER,
            "max_tokens": 1,
            "stop": ["a"],
            "n": 1,
            "tools": [TOOL],
            "dgemma": {"mode": "ar", "max_seconds": 0.01},
        },
    ),
    (
        "/v1/chat/completions",
        {
            "messages": USER,
            "stream": True,
            "max_tokens": 1,
            "response_format": {"type": "json_schema", "json_schema": {"schema": {}}},
            "dgemma": {"drafts": True, "pace": 1e9, "max_seconds": 0.01},
        },
    ),
    (
        "/v1/chat/completions",
        {
            "messages": [
                {
                    "role": "user",
                    "content": [
                        {"type": "text", "text": SHORT},
                        {"type": "image_url", "image_url": {"url": PICTURE, "detail": "low"}},
                    ],
                }
            ],
            "dgemma": {"image_tokens": 70},
        },
    ),
    ("/v1/dgemma/sudoku", {"image": PICTURE, "pinned": True}),
    ("/v1/completions", {"prompt": [3, 4, 5], "max_tokens": 1, "dgemma": {"regex": "[a-c]"}}),
    ("/v1/fim/completions", {"prompt": "a", "suffix": "b", "max_tokens": 1, "stop": []}),
    ("/infill", {"input_prefix": "a", "input_suffix": "b", "n_predict": 0, "input_extra": []}),
    ("/v1/edit/completions", {"messages": USER, "temperature": 0.3}),
    ("/v1/dgemma/fill", {"text": ["a", "b"], "candidates": 1, "max_tokens": 1}),
    ("/v1/dgemma/edit", {"text": "abc", "selection": [[0, 1]], "strength": 0.5}),
    ("/v1/dgemma/sudoku", {"puzzle": "0" * 81, "restarts": 0}),
    ("/v1/apply/completions", {"messages": [{"role": "user", "content": APPLY}]}),
    (
        "/v1/messages",
        {
            "max_tokens": 1,
            "system": [{"type": "text", "text": "the", "cache_control": {"type": "ephemeral"}}],
            "messages": [
                {"role": "user", "content": [{"type": "text", "text": SHORT}]},
                {
                    "role": "assistant",
                    "content": [
                        {"type": "thinking", "thinking": "a", "signature": "b"},
                        {"type": "tool_use", "id": "c", "name": "f", "input": {"a": [1.5]}},
                    ],
                },
                {
                    "role": "user",
                    "content": [
                        {
                            "type": "tool_result",
                            "tool_use_id": "c",
                            "content": [{"type": "text", "text": "a"}],
                            "is_error": False,
                        }
                    ],
                },
            ],
            "tools": [{"name": "f", "description": "a", "input_schema": {"type": "object"}}],
            "tool_choice": {"type": "auto", "disable_parallel_tool_use": True},
            "thinking": {"type": "enabled", "budget_tokens": 9},
            "output_config": {"effort": "low"},
            "stop_sequences": ["a"],
        },
    ),
    (
        "/v1/messages/count_tokens",
        {"messages": USER, "output_config": {"format": {"type": "json_schema", "schema": {}}}},
    ),
    (
        "/v1/responses",
        {
            "input": [
                {"role": "user", "content": [{"type": "input_text", "text": SHORT}]},
                {"type": "reasoning", "summary": [{"type": "summary_text", "text": "a"}]},
                {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
                {"type": "function_call_output", "call_id": "c", "output": "a"},
            ],
            "instructions": "the",
            "max_output_tokens": 1,
            "tools": [{"type": "function", "name": "f", "parameters": {"a": [1.5]}}],
            "tool_choice": "none",
            "text": {"format": {"type": "text"}, "verbosity": "low"},
            "reasoning": {"effort": "low", "summary": "auto"},
            "include": ["reasoning.encrypted_content"],
        },
    ),
    (
        "/api/chat",
        {
            "stream": False,
            "messages": [
                *USER,
                {
                    "role": "assistant",
                    "content": "a",
                    "thinking": "b",
                    "tool_calls": [{"function": {"name": "f", "arguments": {"a": 1}}}],
                },
                {"role": "tool", "content": "a", "tool_name": "f"},
            ],
            "tools": [TOOL],
            "think": True,
            "options": {"num_predict": 1, "stop": ["a"], "seed": 1, "temperature": 0.5},
        },
    ),
    ("/api/generate", {"prompt": "a", "raw": True, "stream": True, "options": {"num_predict": 1}}),
    ("/api/generate", {"prompt": "a", "suffix": "b", "system": "", "format": "", "stream": False}),
    ("/api/show", {"model": MODEL, "verbose": True}),
    ("/tokenize", {"content": "the", "with_pieces": True}),
    ("/detokenize", {"tokens": [1, 2, 3]}),
]
ODD: list[Any] = [
    *(None, True, -1, 0, 1, 2**63, 10**30, 1e308, "", "x", "\ud800", "\0", [], {}, [[]], [None]),
    *([1, "x"], {"a": {"b": []}}, "auto", "required", {"type": "function"}, [{}], "<|turn>"),
]


DEEP: Any = 1
for _ in range(400):
    DEEP = {"a": [DEEP]}
BEYOND = "1e400"  # a legal number that no float holds
ODD += [DEEP, BEYOND]


def written(body: Any) -> bytes:
    """Write JSON; BEYOND is a number."""
    return json.dumps(body).replace(f'"{BEYOND}"', BEYOND).encode()


def with_odd_values(body: Any) -> Iterator[Any]:
    """Yield the body with each of its values, at any depth, replaced by each odd one."""
    yield from ODD
    if not isinstance(body, dict | list):
        return
    for place in list(body) if isinstance(body, dict) else range(len(body)):
        for odd in with_odd_values(body[place]):
            spoilt: Any = body.copy()
            spoilt[place] = odd
            yield spoilt


def spoil_json(body: Any, dice: random.Random) -> Any:
    """The same with one value, somewhere in it, replaced, dropped, or put under a wrong name."""
    if not isinstance(body, dict | list) or not body or dice.random() < 0.1:
        return dice.choice(ODD)
    places = list(body) if isinstance(body, dict) else list(range(len(body)))
    place = dice.choice(places)
    spoilt: Any = body.copy()
    if isinstance(spoilt, dict) and dice.random() < 0.1:
        spoilt[dice.choice(["modle", "x" * 300, "", "mode"])] = spoilt.pop(place)
    elif dice.random() < 0.1:
        spoilt.pop(place)
    else:
        spoilt[place] = spoil_json(body[place], dice)
    return spoilt


def spoil_bytes(data: bytes, dice: random.Random) -> bytes:
    """The same with bytes cut out and thrown in."""
    spoilt = bytearray(data)
    for _ in range(dice.randint(1, 4)):
        at = dice.randrange(len(spoilt))
        spoilt[at : at + dice.randint(0, 3)] = dice.randbytes(dice.randint(0, 3))
    return bytes(spoilt)


async def post(app: Any, path: str, data: bytes) -> int:
    """Ask without a socket; returns the status."""
    scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "root_path": "",
        "headers": [(b"host", b"x"), (b"content-type", b"application/json")],
        "client": ("127.0.0.1", 1),
        "server": ("127.0.0.1", 80),
    }
    statuses: list[int] = []
    messages = [{"type": "http.request", "body": data, "more_body": False}]

    async def receive() -> Any:
        if messages:
            return messages.pop()
        await asyncio.Event().wait()

    async def send(message: Any) -> None:
        if message["type"] == "http.response.start":
            statuses.append(message["status"])

    await app(scope, receive, send)
    assert len(statuses) == 1
    return statuses[0]


def test_ten_thousand_random_bodies_do_no_harm(checkpoint: Path, caplog: Any) -> None:
    """An answer or a sentence, never a 500; the deadlines of what turns out good are short."""
    engine = load(checkpoint)
    limits = Limits(max_batch_size=64, max_queue=1024, max_seconds=0.05)
    app = make_app(engine, Settings(names=(MODEL,), limits=limits))
    dice = random.Random(0)
    seen: dict[int, int] = {}

    async def ask(count: int) -> None:
        for _ in range(count):
            path, good = dice.choice(GOOD)
            if dice.random() < 0.3:
                data = json.dumps(spoil_json(good, dice)).encode()
            else:
                data = spoil_bytes(json.dumps(good).encode(), dice)
            status = await post(app, path, data)
            seen[status] = seen.get(status, 0) + 1

    async def main() -> None:
        async with app.router.lifespan_context(app):
            await asyncio.gather(*(ask(500) for _ in range(20)))
            assert await post(app, "/tokenize", b'{"content": "the"}') == 200

    asyncio.run(main())
    assert sum(seen.values()) == 10_000
    assert seen.keys() <= {200, 400, 404, 503}, seen
    assert seen[400] > 5_000 and seen[200] > 100
    assert not [record for record in caplog.records if record.levelname == "ERROR"]
    assert not engine.scheduler.requests


def test_any_value_of_a_body_may_be_odd(checkpoint: Path, caplog: Any) -> None:
    """Each value of a good body of each route, replaced by each odd one, is no server's error."""
    limits = Limits(max_batch_size=64, max_queue=1024, max_seconds=0.05)
    app = make_app(load(checkpoint), Settings(names=(MODEL,), limits=limits))
    bodies = [(path, written(odd)) for path, good in GOOD for odd in with_odd_values(good)]
    wrong: list[tuple[int, str, bytes]] = []

    async def ask(mine: list[tuple[str, bytes]]) -> None:
        for path, data in mine:
            status = await post(app, path, data)
            if status not in (200, 400, 404, 503):
                wrong.append((status, path, data))

    async def main() -> None:
        async with app.router.lifespan_context(app):
            await asyncio.gather(*(ask(bodies[start::20]) for start in range(20)))

    asyncio.run(main())
    assert not wrong, f"{len(wrong)} of {len(bodies)}, such as {wrong[0]}"
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


def kill(line: socket.socket) -> None:
    """Go without a word, as a killed process on a lost line does: the connection is reset."""
    line.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    line.close()


def test_a_client_killed_amid_its_stream_is_out_and_others_go_on(
    serve: Callable[..., Running],
) -> None:
    server = serve()
    worker, engine = server.service.worker, server.service.engine
    brake = Brake(engine)
    with ThreadPoolExecutor(1) as pool:
        stay = pool.submit(server.ask, LONG, seed=1, stream=True)
        wait_for(lambda: worker.num_running == 1)
        drafts = {**ENDLESS["dgemma"], "drafts": True}
        lines = [hang_up_later(server, messages=USER, stream=True, dgemma=drafts) for _ in range(3)]
        # While the pass is held: after the four nobody is let in any more.
        wait_for(lambda: worker.num_waiting == 3)
        brake.allow(4)
        wait_for(lambda: len(brake.rows) >= 4 and worker.num_running == 4)
        for line in lines:
            assert b"event-stream" in line.recv(200)
            kill(line)
        brake.off()
        assert stay.result(timeout=30).text.endswith("data: [DONE]\n\n")
    wait_for(lambda: not worker.num_running and not engine.scheduler.requests)
    assert server.service.metrics.cancelled._value.get() == 3
    assert server.ask(LONG, seed=1).json()["choices"][0]["message"]["content"] == ANSWERS[LONG]


def test_a_grammar_that_cannot_be_begun_is_its_own_requests_fault(
    serve: Callable[..., Running], monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    """What fails while a request is let in is told to its client, which does not wait for ever."""
    server = serve()
    fail_one(monkeypatch, "start", RuntimeError("the grammar is too deep"))
    assert server.ask(SHORT, seed=666).status_code == 500
    assert server.ask(SHORT, seed=666, stream=True).status_code == 500
    assert server.ask(SHORT, seed=1).json()["choices"][0]["message"]["content"] == ANSWERS[SHORT]
    assert "the grammar is too deep" in caplog.text


def test_a_signal_under_load_ends_every_request_clearly(serve: Callable[..., Running]) -> None:
    server = serve(limits={"max_batch_size": 4})
    statuses: list[int] = []
    begun = threading.Barrier(9)

    def client(number: int) -> None:
        begun.wait()
        for turn in range(100):
            question = (LONG, SHORT)[turn % 2]
            try:
                answer = server.ask(question, seed=number, stream=number % 2 == 1)
            except (httpx.ConnectError, httpx.RemoteProtocolError, httpx.ReadError):
                return  # the server is gone, or closed a connection that nothing was sent on
            statuses.append(answer.status_code)
            if answer.status_code == 503:
                assert answer.headers["retry-after"]
                assert answer.json()["error"]["code"] == "draining"
                return
            if number % 2 == 1:
                assert answer.text.endswith("data: [DONE]\n\n"), "begun is finished"
            else:
                content = answer.json()["choices"][0]["message"]["content"]
                assert content == ANSWERS[question]

    with ThreadPoolExecutor(8) as pool:
        clients = [pool.submit(client, number) for number in range(8)]
        begun.wait()
        wait_for(lambda: len(statuses) >= 8)
        server.server.handle_exit(signal.SIGTERM, None)
        for one in clients:
            one.result(timeout=60)
    assert set(statuses) <= {200, 503} and statuses.count(200) >= 8
    wait_for(lambda: server.server.should_exit)
    assert not server.service.engine.scheduler.requests
    assert not server.service.worker.num_running
