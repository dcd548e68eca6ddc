"""Faults, hostile clients and hung passes: nothing hangs, and nobody else is affected."""

import json
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from typing import Any

import httpx
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from dgemma.backends.reference import ReferenceBackend
from dgemma.constrain import shortest_completion
from dgemma.engine.generation import Generation
from dgemma.server import service as service_module
from dgemma.server import stream
from dgemma.server.auth import Keys, names_of
from tests.server.conftest import Running, is_cancelling, wait_for
from tests.server.test_scheduling import ENDLESS, Brake, ask, hang_up_later, pool, text
from tests.taught import ANSWERS, LONG, SHORT

Serve = Callable[..., Running]
USER = [{"role": "user", "content": SHORT}]
__all__ = ["pool"]  # a fixture


def content(response: httpx.Response) -> str:
    answer: str = response.json()["choices"][0]["message"]["content"]
    return answer


# --- the engine's thread


def test_clean_up_that_fails_touches_nobody(
    serve: Serve, pool: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    server = serve()
    close = Generation.close

    def fail(self: Generation, engine: Any) -> None:
        close(self, engine)
        raise MemoryError("while a prefix is kept")

    monkeypatch.setattr(Generation, "close", fail)
    answers = [ask(server, pool, LONG, seed=seed) for seed in range(4)]
    assert [text(answer) for answer in answers] == [ANSWERS[LONG]] * 4
    assert server.get("/ready").status_code == server.get("/health").status_code == 200
    assert "while a prefix is kept" in caplog.text


@pytest.mark.parametrize("method", ["add", "cancel"])
def test_a_request_that_fails_between_passes_fails_alone(
    serve: Serve, pool: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    server = serve()
    engine, worker = server.service.engine, server.service.worker
    brake = Brake(engine)
    stay = ask(server, pool, LONG, seed=1)
    wait_for(lambda: brake.is_holding)
    with monkeypatch.context() as patch:
        patch.setattr(engine, method, lambda request: 1 / 0)
        if method == "add":
            other = ask(server, pool, SHORT, stream=True)
        else:
            line = hang_up_later(server, messages=USER, **ENDLESS)
            wait_for(lambda: worker.num_waiting == 1)
            line.close()
            wait_for(lambda: is_cancelling(worker))
        brake.off()
        assert text(stay) == ANSWERS[LONG]
        if method == "add":
            assert other.result(timeout=30).status_code == 500
    assert content(server.ask(SHORT, seed=1)) == ANSWERS[SHORT]
    assert server.get("/ready").status_code == 200 and not worker.num_running


def test_a_request_may_be_ended_twice(serve: Serve) -> None:
    server = serve()
    worker = server.service.worker
    ended: list[Any] = []
    finish = worker._finish

    def finish_and_remember(request: Any) -> None:
        ended.append(request)
        finish(request)

    worker._finish = finish_and_remember  # type: ignore[method-assign]
    assert content(server.ask(SHORT, seed=1)) == ANSWERS[SHORT]
    worker.cancel(ended * 2)
    assert content(server.ask(SHORT, seed=1)) == ANSWERS[SHORT]
    assert server.service.metrics.cancelled._value.get() == 0


class FailAt(TorchDispatchMode):
    """Lets the k-th operation of the engine's thread fail as an allocation does."""

    def __init__(self) -> None:
        super().__init__()
        self.count, self.fails_at = 0, sys.maxsize

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None):  # type: ignore[no-untyped-def]
        self.count += 1
        if self.count == self.fails_at:
            raise torch.OutOfMemoryError("no memory for this operation")
        return function(*args, **(kwargs or {}))


def test_whichever_allocation_fails_no_other_answer_changes(
    serve: Serve, pool: ThreadPoolExecutor, caplog: Any
) -> None:
    """From the first operation to the last, in even strides: in passes, clean-up, prefix cache."""
    server = serve()
    engine = server.service.engine
    mode, step = FailAt(), engine.step

    def failing() -> bool:
        with mode:
            return step()

    engine.step = failing  # type: ignore[method-assign]
    assert content(server.ask(LONG, seed=1)) == ANSWERS[LONG]
    statuses = set()
    for fails_at in range(1, 2 * mode.count, max(1, mode.count // 5)):
        mode.count, mode.fails_at = 0, fails_at
        answers = [ask(server, pool, LONG, seed=seed) for seed in (1, 2)]
        for answer in [one.result(timeout=30) for one in answers]:
            statuses.add(answer.status_code)
            assert answer.status_code == 500 or content(answer) == ANSWERS[LONG]
        assert server.get("/ready").status_code == 200
    assert statuses <= {200, 500} and 200 in statuses
    assert content(server.ask(SHORT, seed=1)) == ANSWERS[SHORT]
    assert "no memory for this operation" in caplog.text


def test_a_dead_thread_is_told_at_once(serve: Serve, pool: ThreadPoolExecutor, caplog: Any) -> None:
    server = serve(limits={"max_batch_size": 1})
    brake, worker = Brake(server.service.engine), server.service.worker
    waiting = [ask(server, pool, LONG, stream=stream) for stream in (False, False, True)]
    wait_for(lambda: brake.is_holding and worker.num_running + worker.num_waiting == 3)
    run_pass = server.service.engine._run_pass

    def die(batch: Any) -> None:
        run_pass(batch)
        raise SystemExit("the thread is gone")

    server.service.engine._run_pass = die  # type: ignore[method-assign]
    begun = time.monotonic()
    brake.off()
    answers = [answer.result(timeout=30) for answer in waiting]
    for answer in answers:  # the stream may be the one that has begun
        assert answer.status_code == 500 or '"server_error"' in answer.text, answer.text
    assert server.ask(SHORT).status_code == 500
    assert time.monotonic() - begun < 10
    for path in ("/health", "/ready"):
        assert server.get(path).status_code == 503
        assert "thread has ended" in server.get(path).json()["error"]["message"]
    assert "the thread is gone" in caplog.text


def test_a_hung_pass_is_reported_and_deadlines_hold(
    serve: Serve, pool: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service_module, "GRACE_SECONDS", 0.2)
    server = serve(limits={"max_pass_seconds": 0.3})
    brake = Brake(server.service.engine)
    patient = ask(server, pool, LONG, seed=1)
    late = [
        ask(server, pool, SHORT, stream=stream, dgemma={"max_seconds": 0.1})
        for stream in (False, True)
    ]
    for answer in late:  # while the pass hangs
        response = answer.result(timeout=10)
        assert response.status_code == 503
        assert response.json()["error"]["code"] == "timeout"
    wait_for(lambda: server.get("/health").status_code == 503)
    assert server.get("/ready").status_code == 503
    assert "a pass has taken over 0.3 seconds" in server.get("/health").text
    brake.off()
    assert text(patient) == ANSWERS[LONG]
    assert server.get("/health").status_code == 200


# --- reading requests


def test_a_prompt_is_refused_by_its_length_before_it_is_encoded(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = serve()
    tokenizer = server.service.engine.tokenizer
    assert tokenizer.max_token_length >= max(len(name) for name in tokenizer.control_ids)

    def encode(*_: Any, **__: Any) -> Any:
        raise AssertionError("it was encoded")

    for name in ("encode", "encode_control", "decode"):
        monkeypatch.setattr(tokenizer, name, encode)
    long = "x" * 100_000
    update = f"<|original_code|>{long}<|/original_code|><|update_snippet|>y<|/update_snippet|>"
    for path, body in (
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": long}]}),
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": [{"type": "text", "text": long}]}]},
        ),
        ("/v1/completions", {"prompt": long}),
        ("/v1/completions", {"prompt": [5] * 100_000}),
        ("/v1/fim/completions", {"prompt": long}),
        ("/v1/apply/completions", {"messages": [{"role": "user", "content": update}]}),
    ):
        response = server.post(path, body)
        assert response.status_code == 400, response.text
        assert response.json()["error"]["code"] == "context_length_exceeded"


def test_grammars_of_one_key_do_not_keep_another_waiting(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    """24 that take for ever, then a hang-up: two of them run, and the others never begin."""
    server = serve(keys=Keys.of(["greedy-key", "modest-key"]))
    engine, worker = server.service.engine, server.service.worker
    begun: list[str] = []
    released = threading.Event()
    compile_constraint = engine.constraint

    def slow(**constraint: Any) -> Any:
        if constraint["regex"].startswith("slow"):
            begun.append(constraint["regex"])
            released.wait(30)
        return compile_constraint(**constraint)

    monkeypatch.setattr(engine, "constraint", slow)

    def post(regex: str, key: str) -> httpx.Response:
        headers = {"authorization": f"Bearer {key}"}
        body = {"messages": USER, "max_tokens": 8, "dgemma": {"regex": regex}}
        return server.post("/v1/chat/completions", body, headers=headers)

    try:
        with ExitStack() as lines:
            for number in range(24):
                body = {"messages": USER, "dgemma": {"regex": f"slow{number}"}}
                line = hang_up_later(server, key="greedy-key", **body)
                lines.enter_context(line)
            wait_for(lambda: len(begun) == 2 and worker.num_waiting == 22)
            assert post("ab", "modest-key").status_code == 200
        wait_for(lambda: worker.num_waiting == worker.num_running == 0)
        assert post("ab", "modest-key").status_code == 200
        with hang_up_later(server, key="greedy-key", messages=USER, dgemma={"regex": "slow!"}):
            wait_for(lambda: worker.num_waiting == 1)
            assert post("cd", "modest-key").status_code == 200
            assert len(begun) == 2, "threads that compile for a client who left count as its own"
    finally:
        released.set()


def test_the_search_for_a_text_that_fits_has_a_time_limit(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shortest_completion, "MAX_SECONDS", 0.0)
    server = serve()
    begun = time.monotonic()
    refused = server.ask(SHORT, dgemma={"regex": "(?s:.*a.{200}b.*)"})
    assert refused.status_code == 400 and time.monotonic() - begun < 30
    error = refused.json()["error"]
    assert error["param"] == "dgemma.regex"
    assert "texts of up to 2048 bytes are searched, for at most 0 seconds" in error["message"]


# --- connections


def address(server: Running) -> tuple[str, int]:
    host, port = server.url.removeprefix("http://").split(":")
    return host, int(port)


def reply(line: socket.socket) -> bytes:
    """Read a reply of /health, which may come in parts."""
    data = b""
    while b"}" not in data and (more := line.recv(4000)):
        data += more
    return data


def is_closed(line: socket.socket) -> bool:
    line.settimeout(0.01)
    try:
        return line.recv(4000) == b""
    except TimeoutError:
        return False
    except ConnectionError:
        return True


def test_a_head_must_arrive_in_time(serve: Serve) -> None:
    server = serve(limits={"header_seconds": 1.0})
    half = b"GET /health HTTP/1.1\r\nHost: x\r\n"
    with ExitStack() as stack:
        lines = [stack.enter_context(socket.create_connection(address(server))) for _ in range(3)]
        lines[1].sendall(half)
        lines[2].sendall(half)
        time.sleep(0.2)
        lines[2].sendall(b"\r\n")
        assert b"200 OK" in reply(lines[2])
        lines[2].sendall(half + b"\r\n")  # the next request of the same connection
        assert b"200 OK" in reply(lines[2])
        with suppress(OSError):
            for byte in b"X-Byte":  # a byte now and then does not help
                time.sleep(0.05)
                lines[1].sendall(bytes([byte]))
        wait_for(lambda: is_closed(lines[0]) and is_closed(lines[1]))
    wait_for(lambda: not server.server.server_state.connections)


def test_connections_are_capped_and_silent_ones_make_way(serve: Serve) -> None:
    server = serve(limits={"max_connections": 4})
    brake = Brake(server.service.engine)
    with ExitStack() as stack:
        silent = [stack.enter_context(socket.create_connection(address(server))) for _ in range(4)]
        assert server.get("/health").status_code == 200
        wait_for(lambda: is_closed(silent[0]))
        busy = [stack.enter_context(hang_up_later(server, messages=USER)) for _ in range(4)]
        wait_for(lambda: len(server.service.worker._live) == 4)
        with pytest.raises(httpx.HTTPStatusError, match="503"):
            server.get("/health").raise_for_status()
        brake.off()
        assert all(b"200 OK" in line.recv(4000) for line in busy)
    wait_for(lambda: not server.server.server_state.connections)
    assert server.get("/health").status_code == 200


def test_a_client_that_reads_nothing_is_cut_off(serve: Serve) -> None:
    server = serve(limits={"stall_seconds": 0.2})
    brake = Brake(server.service.engine)
    with hang_up_later(server, messages=USER, stream=True) as line:
        wait_for(lambda: len(server.server.server_state.connections) == 1)
        (connection,) = server.server.server_state.connections
        connection.loop.call_soon_threadsafe(connection.pause_writing)  # as when buffers are full
        wait_for(lambda: is_closed(line))
    brake.off()
    wait_for(lambda: not server.service.worker._live)
    assert server.get("/health").status_code == 200


# --- passes that fail


def test_a_failed_pass_does_not_change_constrained_answers(
    serve: Serve, pool: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = serve()
    whole, failed = ReferenceBackend._outputs, list[int]()
    forms: list[dict[str, Any]] = [
        {"regex": "(ab|cd){1,9}!"},
        {"regex": "[a-z]{12} [0-9]{12}"},
        {"choices": ["yes, indeed", "no, never"]},
    ]

    def answers() -> list[str]:
        """Ask for all of them, and hold the first one's first pass until the others can join it."""
        engine = server.service.engine
        brake = Brake(engine)
        asked = [ask(server, pool, LONG, seed=1, max_tokens=48, dgemma=form) for form in forms]
        wait_for(lambda: brake.is_holding and len(server.service.worker._live) == len(forms))
        wait_for(lambda: all(task.is_done for _, task in engine.scheduler.host_tasks))
        brake.off()
        return [text(answer) for answer in asked]

    alone = [content(server.ask(LONG, seed=1, max_tokens=48, dgemma=form)) for form in forms]

    def fails_for_several(self: ReferenceBackend, inputs: Sequence[Any], *rest: Any) -> Any:
        """A pass of several tasks fails, after their constraints were applied."""
        if len(inputs) > 1:
            failed.append(len(inputs))
            raise RuntimeError("no memory for this pass")
        return whole(self, inputs, *rest)

    monkeypatch.setattr(ReferenceBackend, "_outputs", fails_for_several)
    assert answers() == alone
    assert failed


# --- the web


def test_keys_that_are_given_twice_are_refused(shared: Running) -> None:
    headers = {"content-type": "application/json"}
    pad = json.dumps("x" * (1 << 15))
    for body, name in (
        (b'{"messages": [], "messages": [{"role": "user", "content": "short"}]}', "messages"),
        (b'{"messages": [{"role": "user", "content": "a", "content": "b"}]}', "content"),
        (b'{"messages": [], "user": %s, "user": 1}' % pad.encode(), "user"),
    ):
        response = httpx.post(f"{shared.url}/v1/chat/completions", content=body, headers=headers)
        assert response.status_code == 400
        assert f"the key {name!r} twice" in response.json()["error"]["message"]
    for number in ("NaN", "Infinity", "-Infinity"):
        body = f'{{"messages": [], "metadata": {number}}}'.encode()
        response = httpx.post(f"{shared.url}/v1/chat/completions", content=body, headers=headers)
        assert response.status_code == 400 and number in response.json()["error"]["message"]


def test_a_long_body_that_is_no_json_is_a_sentence(shared: Running) -> None:
    headers = {"content-type": "application/json"}
    response = httpx.post(f"{shared.url}/tokenize", content=b"[" * 100_000, headers=headers)
    assert response.status_code == 400
    assert "the body is not JSON" in response.json()["error"]["message"]


@pytest.mark.parametrize("kind", [None, "text/plain", "application/x-www-form-urlencoded"])
def test_a_body_must_say_that_it_is_json(shared: Running, kind: str | None) -> None:
    headers = {} if kind is None else {"content-type": kind}
    content = json.dumps({"messages": USER}).encode()
    response = httpx.post(f"{shared.url}/v1/chat/completions", content=content, headers=headers)
    assert response.status_code == 400
    assert "application/json" in response.json()["error"]["message"]


def test_pages_of_other_origins_are_refused(shared: Running, serve: Serve) -> None:
    host = shared.url.removeprefix("http://")
    body = {"messages": USER, "seed": 1}

    def status(server: Running, origin: str) -> int:
        path = "/v1/chat/completions"
        return server.post(path, body, headers={"origin": origin}).status_code

    assert status(shared, shared.url) == status(shared, f"https://{host}") == 200
    for origin in (
        "https://evil.example",
        "null",
        "http://127.0.0.1",
        f"{shared.url}.evil.example",
    ):
        assert status(shared, origin) == 403
    named = serve(cors_origins=("https://page.example",))
    assert status(named, "https://page.example") == 200
    assert (
        status(named, "https://page.example.evil") == status(named, "https://a.page.example") == 403
    )


@pytest.mark.parametrize(
    "host", ["evil-localhost", "xlocalhost", "a.mine.local", "localhost.evil", "127.0.0.1.evil", ""]
)
def test_a_host_is_compared_as_a_whole(serve: Serve, host: str) -> None:
    server = serve(hosts=names_of("127.0.0.1", ["mine.local"]))
    for suffix in ("", ":80"):
        assert server.get("/v1/models", headers={"host": host + suffix}).status_code == 403
    assert server.get("/v1/models", headers={"host": "mine.local:80"}).status_code == 200


def test_a_pace_ends_with_the_deadline_and_is_never_silent(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stream, "HEARTBEAT", 0.2)
    monkeypatch.setattr(stream, "MAX_PAUSE", 0.1)
    server = serve()
    begun = time.monotonic()
    slow = {"pace": 0.01, "max_seconds": 1.0}
    answer = server.ask(LONG, seed=1, stream=True, dgemma=slow, logprobs=True).text
    assert 0.9 < time.monotonic() - begun < 10, "at this pace it would take an hour"
    assert answer.endswith("data: [DONE]\n\n") and answer.count(": still at work\n\n") >= 3
    chunks = [json.loads(line[6:]) for line in answer.split("\n\n") if line.startswith("data: {")]
    deltas = [chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks]
    assert "".join(deltas) == ANSWERS[LONG]
    assert len(chunks[-1]["choices"][0]["logprobs"]["content"]) > 10


def test_a_schema_beyond_the_limits_is_refused_in_a_sentence(shared: Running) -> None:
    schemas: Iterator[tuple[Any, str]] = iter(
        [
            ({"type": "string", "minLength": 5000}, "texts of up to 2048 bytes are searched"),
            ({"enum": ["x" * 70_000]}, "at most 65536"),
            (nested(300), "deeper than 200 levels"),
        ]
    )
    for schema, sentence in schemas:
        form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
        refused = shared.ask(SHORT, response_format=form)
        assert refused.status_code == 400
        assert sentence in refused.json()["error"]["message"]


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(depth):
        schema = {"type": "array", "items": schema}
    return schema


def test_a_token_id_equal_to_the_vocabulary_size_is_refused(shared: Running) -> None:
    size = shared.service.engine.tokenizer.vocab_size
    for path, field in (("/v1/completions", "prompt"), ("/detokenize", "tokens")):
        more = {"max_tokens": 1} if field == "prompt" else {}
        for token, status in ((size, 400), (-1, 400), (size - 1, 200)):
            assert shared.post(path, {field: [5, token], **more}).status_code == status
