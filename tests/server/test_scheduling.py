"""Who runs, who waits, who leaves: the queue, cancelling, deadlines, faults, and the way out."""

import json
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from dgemma.backends.base import ForwardInput, ForwardOutput
from dgemma.engine import Engine
from dgemma.engine.request import Request, Task
from dgemma.server.auth import Keys
from tests.server.conftest import Running, fail_one, is_cancelling, wait_for
from tests.taught import ANSWERS, LONG, SHORT

Serve = Callable[..., Running]
# A canvas that never converges: 512 steps.
ENDLESS = {"dgemma": {"max_denoising_steps": 512, "confidence_threshold": 1e-9}}


class Brake:
    """Lets an engine's passes through one by one, and counts the tasks of each."""

    def __init__(self, engine: Engine) -> None:
        self.rows: list[int] = []
        self.is_holding = False  # a pass: whoever comes now waits
        self._passes = threading.Semaphore(0)
        self._is_off = False
        self._seconds = 0.0
        run_pass = engine._run_pass

        def braked(batch: Sequence[Task]) -> None:
            if not batch:
                return
            while not self._is_off and not self._passes.acquire(timeout=0.05):
                self.is_holding = True
            self.is_holding = False
            self.rows.append(len(batch))
            time.sleep(self._seconds)
            run_pass(batch)

        engine._run_pass = braked  # type: ignore[method-assign]

    def allow(self, passes: int = 1) -> None:
        self._passes.release(passes)

    def off(self, seconds: float = 0.0) -> None:
        """Let all passes through, each after a pause of so many seconds."""
        self._seconds = seconds
        self._is_off = True


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(8) as pool:
        yield pool


def ask(server: Running, pool: ThreadPoolExecutor, question: str, **fields: Any) -> "Future[Any]":
    return pool.submit(server.ask, question, **fields)


def text(answer: "Future[Any]") -> str:
    content: str = answer.result(timeout=30).json()["choices"][0]["message"]["content"]
    return content


def test_a_full_queue_says_when_to_come_back(serve: Serve, pool: ThreadPoolExecutor) -> None:
    server = serve(limits={"max_batch_size": 1, "max_queue": 1})
    brake, worker = Brake(server.service.engine), server.service.worker
    running = ask(server, pool, LONG, seed=1)
    wait_for(lambda: worker.num_running == 1)
    waiting = ask(server, pool, SHORT, seed=1)
    wait_for(lambda: worker.num_waiting == 1)
    refused = server.ask(SHORT)
    assert refused.status_code == 429
    assert 1 <= int(refused.headers["retry-after"]) <= 60
    assert refused.json()["error"]["code"] == "queue_full"
    assert server.ask(SHORT, stream=True).status_code == 429, "refused before the stream begins"
    assert server.get("/health").json() == {"status": "ok", "running": 1, "waiting": 1}
    brake.off()
    assert text(running) == ANSWERS[LONG]
    assert text(waiting) == ANSWERS[SHORT]
    assert max(brake.rows) == 1, "the bound on rows holds"


def test_several_answers_need_as_many_places(serve: Serve) -> None:
    server = serve(limits={"max_batch_size": 1, "max_queue": 2})
    assert server.ask(SHORT, n=3).status_code == 400, "it could never be served"
    assert len(server.ask(SHORT, n=2, seed=1).json()["choices"]) == 2


def test_a_key_cannot_crowd_out_another(serve: Serve, pool: ThreadPoolExecutor) -> None:
    keys = ["greedy-key", "modest-key"]
    server = serve(limits={"max_batch_size": 1, "max_queue": 4}, keys=Keys.of(keys))
    engine, worker = server.service.engine, server.service.worker
    brake = Brake(engine)
    braked = engine._run_pass
    ran: dict[Request[Any], None] = {}  # in their order, which clients may hear of in another

    def recorded(batch: Sequence[Task]) -> None:
        ran.update(dict.fromkeys(engine.scheduler.admitted[task] for task in batch))
        braked(batch)

    engine._run_pass = recorded  # type: ignore[method-assign]

    def post(key: str) -> None:
        body = {"messages": [{"role": "user", "content": SHORT}], "max_tokens": 1}
        headers = {"authorization": f"Bearer {key}"}
        server.post("/v1/chat/completions", body, headers=headers)

    jobs = [pool.submit(post, "greedy-key")]
    wait_for(lambda: worker.num_running == 1)
    for count in range(1, 5):
        jobs.append(pool.submit(post, "greedy-key"))
        wait_for(lambda count=count: worker.num_waiting == count)  # type: ignore[misc]
    jobs.append(pool.submit(post, "modest-key"))
    wait_for(lambda: worker.num_waiting == 5)
    brake.off()
    for job in jobs:
        job.result(timeout=30)
    owners = [request.owner for request in ran]
    (modest,) = [place for place, owner in enumerate(owners) if owners.count(owner) == 1]
    assert len(owners) == 6 and modest <= 2, "it is served after the one that ran, and one more"


def hang_up_later(server: Running, key: str = "", **body: Any) -> socket.socket:
    """Ask on a plain socket; closing it is leaving."""
    host, port = server.url.removeprefix("http://").split(":")
    data = json.dumps(body).encode()
    head = "POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    head += f"Authorization: Bearer {key}\r\n" if key else ""
    line = socket.create_connection((host, int(port)))
    line.sendall(f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data)
    return line


@pytest.mark.parametrize("stream", [False, True])
def test_who_leaves_is_out_of_the_engine_before_the_next_pass(
    serve: Serve, pool: ThreadPoolExecutor, stream: bool
) -> None:
    server = serve()
    worker, engine = server.service.worker, server.service.engine
    brake = Brake(engine)
    stay = ask(server, pool, LONG, seed=1)
    wait_for(lambda: brake.is_holding and worker.num_running == 1)
    messages = [{"role": "user", "content": "what?"}]
    line = hang_up_later(server, messages=messages, stream=stream, **ENDLESS)
    wait_for(lambda: worker.num_waiting == 1)
    brake.allow(3)
    wait_for(lambda: brake.is_holding and brake.rows == [1, 2, 2])
    if stream:
        assert b"text/event-stream" in line.recv(4000)
    line.close()
    wait_for(lambda: is_cancelling(worker))
    brake.off()
    assert text(stay) == ANSWERS[LONG]
    # The pass that the brake was holding may still have it; none after that.
    assert len(brake.rows) > 5
    assert set(brake.rows[4:]) == {1}
    assert server.service.metrics.cancelled._value.get() == 1
    assert not engine.scheduler.requests and not worker.num_running


def test_who_leaves_the_queue_never_runs(serve: Serve, pool: ThreadPoolExecutor) -> None:
    server = serve(limits={"max_batch_size": 1})
    brake, worker = Brake(server.service.engine), server.service.worker
    running = ask(server, pool, SHORT, seed=1)
    wait_for(lambda: worker.num_running == 1)
    line = hang_up_later(server, messages=[{"role": "user", "content": LONG}])
    wait_for(lambda: worker.num_waiting == 1)
    line.close()
    wait_for(lambda: is_cancelling(worker))
    brake.off()
    assert text(running) == ANSWERS[SHORT]
    wait_for(lambda: worker.num_waiting == 0)
    assert server.service.metrics.cancelled._value.get() == 1
    assert server.service.metrics.finished.labels("diffusion", "stop")._value.get() == 1


def test_a_deadline_cuts_an_answer_and_says_so(serve: Serve) -> None:
    server = serve()
    Brake(server.service.engine).off(seconds=0.05)  # 512 steps: 25 s at least
    begun = time.monotonic()
    asked = {**ENDLESS["dgemma"], "max_seconds": 1.0}
    choice = server.ask("what?", dgemma=asked, max_tokens=200).json()["choices"][0]
    assert time.monotonic() - begun < 10
    assert choice["finish_reason"] == "length"
    assert choice["dgemma"]["finish"] == "budget"
    assert choice["dgemma"]["remaining_entropy"] >= 0
    strict = serve(limits={"max_seconds": 2.0})
    Brake(strict.service.engine).off(seconds=0.05)
    slow = {"dgemma": {**ENDLESS["dgemma"], "max_seconds": 100.0}}
    choice = strict.ask("what?", **slow).json()["choices"][0]
    assert choice["dgemma"]["finish"] == "budget", "nobody may ask for more than the server gives"


def test_who_waits_past_its_deadline_is_told(serve: Serve, pool: ThreadPoolExecutor) -> None:
    server = serve(limits={"max_batch_size": 1})
    brake, worker = Brake(server.service.engine), server.service.worker
    running = ask(server, pool, SHORT, seed=1)
    wait_for(lambda: worker.num_running == 1)
    late = [
        ask(server, pool, SHORT, stream=stream, dgemma={"max_seconds": 0.1})
        for stream in (False, True)
    ]
    wait_for(lambda: worker.num_waiting == 2)
    time.sleep(0.15)
    brake.off()
    for answer in late:
        response = answer.result(timeout=30)
        assert response.status_code == 503
        assert response.headers["retry-after"]
        assert response.json()["error"]["code"] == "timeout"
    assert text(running) == ANSWERS[SHORT]


def test_memory_bounds_who_runs_together(serve: Serve, pool: ThreadPoolExecutor) -> None:
    server = serve(limits={"max_context": 150})
    brake, worker = Brake(server.service.engine), server.service.worker
    answers = [ask(server, pool, LONG, seed=seed) for seed in range(4)]
    wait_for(lambda: worker.num_running + worker.num_waiting == 4)
    brake.off()
    assert [text(answer) for answer in answers] == [ANSWERS[LONG]] * 4
    assert max(brake.rows) == 2, "each may take 67 tokens"


def test_a_row_that_breaks_a_pass_takes_nobody_with_it(
    serve: Serve, pool: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    server = serve()
    backend = server.service.engine.backend
    real, poison = backend.run, server.service.engine.tokenizer.encode("Ж")[0]

    def run(inputs: Sequence[ForwardInput]) -> list[ForwardOutput]:
        if any(poison in given.tokens for given in inputs):
            raise RuntimeError("no memory for this pass")
        return real(inputs)

    monkeypatch.setattr(backend, "run", run)
    brake = Brake(server.service.engine)
    good = [ask(server, pool, question, seed=1) for question in (LONG, SHORT)]
    wait_for(lambda: server.service.worker.num_running >= 1)
    brake.allow(1)
    bad = [ask(server, pool, "Ж", stream=stream) for stream in (False, True)]
    wait_for(lambda: server.service.worker.num_running + server.service.worker.num_waiting >= 3)
    brake.off()
    assert [text(answer) for answer in good] == [ANSWERS[LONG], ANSWERS[SHORT]]
    whole, stream = (answer.result(timeout=30) for answer in bad)
    assert whole.status_code == 500
    assert whole.json()["error"]["message"] == "the engine failed on this request"
    assert stream.status_code == 500, "it has not begun"
    assert stream.json()["error"]["type"] == "server_error"
    assert server.get("/health").status_code == 200
    assert server.ask(LONG, seed=1).json()["choices"][0]["message"]["content"] == ANSWERS[LONG]
    assert server.service.metrics.failed_passes._value.get() >= 1
    assert "no memory for this pass" in caplog.text


def test_an_error_in_one_row_is_its_own(
    serve: Serve, pool: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    fail_one(monkeypatch, "process", ValueError("a bug"))
    server = serve()
    answers = [ask(server, pool, LONG, seed=seed) for seed in (1, 666, 2)]
    assert [answer.result(timeout=30).status_code for answer in answers] == [200, 500, 200]
    assert "a bug" in caplog.text and "a bug" not in answers[1].result().text


def test_a_server_that_cannot_go_on_says_so(
    serve: Serve, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    server = serve()

    def broken() -> bool:
        raise RuntimeError("the device is gone")

    monkeypatch.setattr(server.service.engine, "step", broken)
    for _ in range(3):
        assert server.ask(SHORT).status_code == 500
    assert server.get("/health").status_code == 503
    assert "the device is gone" in caplog.text


def is_gone(server: Running) -> bool:
    try:
        server.get("/health")
    except httpx.ConnectError:
        return True
    except (httpx.ReadError, httpx.RemoteProtocolError):
        return False  # it was closing and took the connection no more
    return False


def test_a_signal_lets_running_requests_finish(serve: Serve, pool: ThreadPoolExecutor) -> None:
    server = serve(limits={"max_batch_size": 1})
    brake, worker = Brake(server.service.engine), server.service.worker
    running = ask(server, pool, LONG, seed=1, stream=True)
    wait_for(lambda: worker.num_running == 1)
    waiting = ask(server, pool, SHORT, seed=1)
    wait_for(lambda: worker.num_waiting == 1)
    server.server.handle_exit(signal.SIGTERM, None)
    refused = server.ask(SHORT)
    assert refused.status_code == 503
    assert refused.headers["retry-after"]
    assert refused.json()["error"]["code"] == "draining"
    assert server.get("/ready").status_code == 503
    assert server.get("/health").status_code == 200
    assert not server.server.should_exit
    brake.off()
    assert running.result(timeout=30).text.endswith("data: [DONE]\n\n")
    assert text(waiting) == ANSWERS[SHORT]
    wait_for(lambda: server.server.should_exit)
    wait_for(lambda: is_gone(server))


def test_a_second_signal_quits_at_once(serve: Serve, pool: ThreadPoolExecutor) -> None:
    server = serve()
    brake = Brake(server.service.engine)
    brake.allow(2)
    running = ask(server, pool, "what?", stream=True, **ENDLESS)
    wait_for(lambda: brake.is_holding and len(brake.rows) == 2)
    server.server.handle_exit(signal.SIGTERM, None)
    wait_for(lambda: server.get("/ready").status_code == 503)
    begun = time.monotonic()
    server.server.handle_exit(signal.SIGTERM, None)
    with pytest.raises(httpx.RemoteProtocolError):
        running.result(timeout=30)
    assert time.monotonic() - begun < 5
    brake.off()


def test_a_drain_ends_the_pacing_of_text(serve: Serve, pool: ThreadPoolExecutor) -> None:
    server = serve()
    running = ask(server, pool, LONG, seed=1, stream=True, dgemma={"pace": 0.5})
    wait_for(lambda: bool(server.service.metrics.tokens._value.get()))
    begun = time.monotonic()
    server.server.handle_exit(signal.SIGTERM, None)
    assert running.result(timeout=30).text.endswith("data: [DONE]\n\n")
    assert time.monotonic() - begun < 10, "the text would take a minute and a half"


def test_a_drain_does_not_wait_for_ever(serve: Serve, pool: ThreadPoolExecutor) -> None:
    server = serve(limits={"drain_seconds": 0.3, "max_batch_size": 1})
    brake, worker = Brake(server.service.engine), server.service.worker
    brake.allow(20)
    running = ask(server, pool, "what?", **ENDLESS, stream=True)
    wait_for(lambda: worker.num_running == 1)
    waiting = ask(server, pool, SHORT)
    wait_for(lambda: worker.num_waiting == 1)
    server.server.handle_exit(signal.SIGTERM, None)
    wait_for(lambda: server.server.should_exit)
    brake.off(seconds=0.05)  # 512 steps: longer than the drain
    assert waiting.result(timeout=30).status_code == 503
    assert '"code":"draining"' in running.result(timeout=30).text


def test_metrics_count_what_was_done(serve: Serve) -> None:
    server = serve()
    for _ in range(2):
        server.ask(LONG, seed=1)
    server.ask(LONG, nothing=1)
    server.get("/absent/1")
    page = server.get("/metrics").text
    lines = dict(line.rsplit(" ", 1) for line in page.splitlines() if not line.startswith("#"))
    tokens = len(server.service.engine.tokenizer.encode(ANSWERS[LONG]))
    assert float(lines["dgemma_committed_tokens_total"]) == 2 * tokens
    assert float(lines['dgemma_requests_total{path="/v1/chat/completions",status="200"}']) == 2
    assert float(lines['dgemma_requests_total{path="/v1/chat/completions",status="400"}']) == 1
    assert float(lines['dgemma_requests_total{path="other",status="404"}']) == 1
    assert float(lines['dgemma_answers_total{finish="stop",mode="diffusion"}']) == 2
    assert float(lines["dgemma_cache_hits_total"]) == 1
    assert float(lines["dgemma_reused_tokens_total"]) > 10
    assert float(lines["dgemma_time_to_first_block_seconds_count"]) == 2
    assert float(lines["dgemma_steps_per_block_count"]) == 2
    assert float(lines["dgemma_queue_length"]) == 0
    assert float(lines["dgemma_prefix_bytes"]) > 0
    assert float(lines["process_resident_memory_bytes"]) > 1e6
