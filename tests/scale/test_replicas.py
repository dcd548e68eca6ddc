"""`dgemma serve --replicas 2` as a process: one Ray for all tests, real sockets, real kills.

Every run of the suite has the core of them; `make replicas` adds those that wait for replacements.
"""

import io
import json
import os
import re
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from dgemma.errors import UsageError
from dgemma.scale.local import (
    local_options,
    num_gpus,
    report_faults,
    short_directory,
    wait_for_slow_node,
)
from tests.taught import ANSWERS, LONG, SHORT

pytest.importorskip("ray")
ROOT = Path(__file__).resolve().parents[2]
COMMAND = [sys.executable, "-c", "from dgemma.cli import main; main()", "serve"]
KEY = "a-key-of-this-test"
LISTENING, ESTABLISHED = "0A", "01"
REPLICA = "ServeReplica"
START_SECONDS = 400.0  # on a machine that is busy with other tests; 15 on a quiet one
waits_long = pytest.mark.skipif(
    not os.environ.get("DGEMMA_TEST_REPLICAS"), reason="waits for replacements; use make replicas"
)
SLOW = {"dgemma": {"pace": 12}}  # characters a second: a stream that can be killed in the middle


@dataclass(frozen=True)
class Served:
    """A running command."""

    process: subprocess.Popen[str]
    url: str
    log: Path

    @property
    def weights(self) -> Path:
        return self.log.parent / "mine" / "model.safetensors"

    def post(self, path: str, body: dict[str, Any], **more: Any) -> httpx.Response:
        headers = {"authorization": f"Bearer {KEY}"}
        return httpx.post(self.url + path, json=body, headers=headers, timeout=100, **more)

    def get(self, path: str, **headers: str) -> httpx.Response:
        headers = {"authorization": f"Bearer {KEY}", **headers}
        return httpx.get(self.url + path, headers=headers, timeout=100)

    def ask(self, question: str, **fields: Any) -> httpx.Response:
        messages = [{"role": "user", "content": question}]
        return self.post("/v1/chat/completions", {"messages": messages, **fields})

    def stream(
        self, question: str, on_text: Callable[[str], None] = lambda text: None, **fields: Any
    ) -> tuple[str, bool]:
        """Return the text of a stream, and whether it came to its end."""
        text, is_whole = "", False
        body = {"messages": [{"role": "user", "content": question}], "stream": True, **fields}
        headers = {"authorization": f"Bearer {KEY}"}
        url = self.url + "/v1/chat/completions"
        with httpx.stream("POST", url, json=body, headers=headers, timeout=100) as reply:
            for line in reply.iter_lines():
                assert not line.startswith(("id:", ": committed"))
                if line == "data: [DONE]":
                    is_whole = True
                elif line.startswith("data:"):
                    chunk = json.loads(line[5:])
                    assert "error" not in chunk, chunk
                    for choice in chunk["choices"]:
                        text += choice["delta"].get("content") or ""
                    on_text(text)
        return text, is_whole

    @property
    def processes(self) -> dict[int, str]:
        """Command lines of the server and all its descendants."""
        found: dict[int, str] = {self.process.pid: "the server"}
        parents: dict[int, int] = {}
        for path in Path("/proc").glob("[0-9]*"):
            try:
                fields = path.joinpath("stat").read_text().rpartition(")")[2].split()
                parents[int(path.name)] = int(fields[1])
            except (OSError, IndexError):
                continue
        is_new = True
        while is_new:
            children = {p for p, parent in parents.items() if parent in found and p not in found}
            is_new = bool(children)
            for pid in children:
                try:
                    line = Path(f"/proc/{pid}/cmdline").read_bytes()
                except OSError:
                    line = b""
                found[pid] = line.replace(b"\0", b" ").decode("utf-8", "replace").strip()
        return found

    @property
    def replicas(self) -> list[int]:
        return [pid for pid, line in self.processes.items() if REPLICA in line]

    def wait_for_replicas(self, count: int = 2) -> None:
        def has_replicas() -> bool:
            try:
                return self.get("/health").json().get("replicas") == count
            except httpx.TransportError:  # it does not listen yet
                return False

        wait_for(has_replicas)


def wait_for(holds: Callable[[], bool], seconds: float = 200.0) -> None:
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.1)


def kill(pids: list[int]) -> None:
    for pid in pids:
        os.kill(pid, signal.SIGKILL)


@pytest.fixture(scope="module")
def served(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    log = tmp_path_factory.mktemp("served") / "log"
    mine = log.parent / "mine"  # which a test damages
    shutil.copytree(checkpoint, mine)
    command = [*COMMAND, "--model", str(mine), "--name"]
    command += ["taught", "--port", "0", "--replicas", "2", "--cpus-per-replica", "1"]
    command += ["--dtype", "float32", "--quant", "none", "--device", "cpu", "--max-queue", "8"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "DGEMMA_API_KEYS": KEY}
    environment |= {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive"}
    with log.open("w") as output:
        process = subprocess.Popen(
            command, stderr=output, stdout=output, env=environment, text=True, cwd=log.parent
        )

    def url() -> str:
        found = re.search(r"http://127.0.0.1:\d+(?=/v1)", log.read_text())
        assert found or process.poll() is None, log.read_text()
        return found[0] if found else ""

    try:
        wait_for(lambda: bool(url()), START_SECONDS)
        served = Served(process, url(), log)
        served.wait_for_replicas()
        yield served
    finally:
        if process.poll() is None:
            process.terminate()
            process.wait(60)


def test_every_route_answers_through_the_front(served: Served) -> None:
    assert served.ask(SHORT).json()["choices"][0]["message"]["content"] == ANSWERS[SHORT]
    assert served.stream(LONG) == (ANSWERS[LONG], True)
    assert served.get("/v1/models").json()["data"][0]["id"] == "taught"
    assert served.post("/tokenize", {"content": "one"}).json()["tokens"]
    assert "/v1/chat/completions" in served.get("/openapi.json").json()["paths"]
    page = served.get("/")
    assert page.headers["content-security-policy"]
    assert served.get("/", **{"if-none-match": page.headers["etag"]}).status_code == 304
    reply = served.ask(SHORT, nonsense=1)
    assert reply.status_code == 400
    assert len(reply.headers.get_list("x-request-id")) == 1
    assert served.get("/nowhere").status_code == 404


def test_keys_and_host_names_are_checked_by_the_front(served: Served) -> None:
    assert httpx.get(served.url + "/v1/models", timeout=30).status_code == 401
    assert served.get("/v1/models", host="example.com").status_code == 403
    assert httpx.get(served.url + "/ready", timeout=30).json()["replicas"] == 2


def test_seeds_agree_on_every_replica(served: Served) -> None:
    """Different openings go to different replicas; the same seed gives the same choices."""
    replies = [served.ask(SHORT, seed=5) for _ in range(2)]
    replies += [served.ask(f"{SHORT}{i}", seed=5, max_tokens=8) for i in range(8)]
    assert len({reply.headers["x-dgemma-replica"] for reply in replies}) == 2
    texts = [reply.json()["choices"][0]["message"] for reply in replies[:2]]
    assert texts[0] == texts[1]


def test_later_turns_find_their_prompt_in_the_cache(served: Served) -> None:
    messages = [{"role": "system", "content": "say " * 9}, {"role": "user", "content": SHORT}]
    homes, cached = set(), 0
    for _ in range(3):
        body = {"messages": messages, "max_tokens": 8}
        reply = served.post("/v1/chat/completions", body)
        homes.add(reply.headers["x-dgemma-replica"])
        cached = reply.json()["usage"]["prompt_tokens_details"]["cached_tokens"]
        answer = reply.json()["choices"][0]["message"]["content"]
        messages += [{"role": "assistant", "content": answer}, {"role": "user", "content": "on"}]
    assert len(homes) == 1
    assert cached > 0


def test_one_key_cannot_take_more_than_its_share(served: Served) -> None:
    def status(index: int) -> int:
        # None may end before the last has begun, however busy the machine is.
        body = {"messages": [{"role": "user", "content": LONG}], "stream": True}
        body |= {"dgemma": {"pace": 2}}
        headers = {"authorization": f"Bearer {KEY}"}
        url = served.url + "/v1/chat/completions"
        with httpx.stream("POST", url, json=body, headers=headers, timeout=100) as reply:
            if reply.status_code == 429:
                reply.read()
                assert reply.headers["retry-after"]
                return 429
            barrier.wait(60)
            return reply.status_code

    most = 8 + 8 * 2  # of the queue, and in the passes of two replicas
    barrier = threading.Barrier(most + 1)
    with ThreadPoolExecutor(most + 4) as pool:
        running = [pool.submit(status, index) for index in range(most)]
        wait_for(lambda: barrier.n_waiting == most)
        refused = [pool.submit(status, index) for index in range(4)]
        assert [future.result(60) for future in refused] == [429] * 4
        barrier.wait(60)
        assert [future.result(60) for future in running] == [200] * most
    wait_for(lambda: served.get("/health").json()["running"] == 0)  # they were cancelled


@waits_long
def test_a_stream_survives_the_death_of_every_replica(served: Served) -> None:
    killed: list[int] = []

    def kill_once(text: str) -> None:
        if len(text) > 10 and not killed:
            killed.extend(served.replicas)
            kill(killed)

    assert served.stream(LONG, kill_once, **SLOW) == (ANSWERS[LONG], True)
    assert len(killed) == 2
    served.wait_for_replicas()
    assert set(served.replicas).isdisjoint(killed)
    replays = re.search(r"dgemma_replays_total (\d+)", served.get("/metrics").text)
    assert replays is not None
    assert int(replays[1]) >= 1


def test_no_request_is_lost_when_a_replica_is_killed(served: Served) -> None:
    served.wait_for_replicas()
    victim = served.replicas[0]

    def one(index: int) -> bool:
        if index == 10:
            kill([victim])
        question = (SHORT, LONG)[index % 2]
        if index % 4 < 2:
            return served.stream(question, seed=index) == (ANSWERS[question], True)
        reply = served.ask(question, seed=index)
        return bool(reply.json()["choices"][0]["message"]["content"] == ANSWERS[question])

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(one, range(40)))
    served.wait_for_replicas()


@waits_long
def test_a_rolling_update_cuts_no_stream(served: Served) -> None:
    served.wait_for_replicas()
    old = set(served.replicas)
    with ThreadPoolExecutor(3) as pool:
        streams = [pool.submit(served.stream, LONG, **SLOW) for _ in range(3)]
        served.process.send_signal(signal.SIGHUP)
        assert [stream.result() for stream in streams] == [(ANSWERS[LONG], True)] * 3
    wait_for(lambda: len(served.replicas) == 2 and old.isdisjoint(served.replicas))
    served.wait_for_replicas()
    assert served.ask(SHORT).status_code == 200


@waits_long
def test_metrics_are_summed_over_replicas_also_those_that_are_gone(served: Served) -> None:
    page = served.get("/metrics").text
    values = dict(line.rsplit(" ", 1) for line in page.splitlines() if not line.startswith("#"))
    assert float(values["dgemma_replicas"]) == 2
    assert float(values["dgemma_lost_requests_total"]) == 0
    asked = 'dgemma_requests_total{path="/v1/chat/completions",status="200"}'
    assert float(values[asked]) > 40
    before = float(values["dgemma_committed_tokens_total"])
    assert before > 0
    victims = served.replicas
    kill(victims)
    wait_for(lambda: len(set(served.replicas) - set(victims)) == 2)
    served.wait_for_replicas()
    again = re.search(r"dgemma_committed_tokens_total ([\d.e+]+)", served.get("/metrics").text)
    assert again is not None
    assert float(again[1]) >= before


@waits_long
def test_a_replica_that_hangs_hides_no_other_and_is_counted_once(served: Served) -> None:
    def number(name: str) -> float:
        found = re.search(rf"^{name} ([\d.e+]+)$", served.get("/metrics").text, re.MULTILINE)
        return float(found[1]) if found else 0.0

    served.wait_for_replicas()
    before = number("dgemma_committed_tokens_total")
    victim = served.replicas[0]
    os.kill(victim, signal.SIGSTOP)
    try:
        served.wait_for_replicas(1)
        assert served.get("/ready").status_code == 200
        assert number("dgemma_committed_tokens_total") == before
    finally:
        os.kill(victim, signal.SIGCONT)
    served.wait_for_replicas()
    assert number("dgemma_committed_tokens_total") == before


@waits_long
def test_weights_that_are_cut_short_are_told_and_served_again_once_they_are_back(
    served: Served,
) -> None:
    """The replicas die when they read them, and cannot be started; the request waits."""
    served.wait_for_replicas()
    whole = served.weights.read_bytes()
    os.truncate(served.weights, 4096)
    with ThreadPoolExecutor(1) as pool:
        stream = pool.submit(served.stream, LONG)
        wait_for(lambda: "a file of weights was cut short" in served.log.read_text())
        wait_for(lambda: "is cut short: " in served.log.read_text())
        renewed = served.weights.with_suffix(".new")
        renewed.write_bytes(whole)
        renewed.rename(served.weights)
        assert stream.result() == (ANSWERS[LONG], True)
    served.wait_for_replicas()


def sockets(pid: int) -> list[tuple[str, str, str]]:
    """State, local and remote address of the TCP sockets of a process."""
    inodes = set()
    for link in Path(f"/proc/{pid}/fd").glob("*"):
        try:
            found = re.match(r"socket:\[(\d+)\]", os.readlink(link))
        except OSError:
            continue
        if found:
            inodes.add(found[1])
    rows = []
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[9] in inodes:
                rows.append((fields[3], fields[1], fields[2]))
    return rows


def is_loopback(address: str) -> bool:
    host = address.rpartition(":")[0]
    as_ipv4 = host[24:] if host.startswith("0000000000000000FFFF0000") else host
    return as_ipv4.endswith("7F") if len(as_ipv4) == 8 else host == "0" * 24 + "01000000"


@pytest.mark.skipif(not Path("/proc/net/tcp").exists(), reason="reads Linux's tables of sockets")
def test_nothing_listens_or_connects_beyond_this_machine(served: Served) -> None:
    served.wait_for_replicas()
    served.ask(SHORT)
    processes = served.processes
    names = " ".join(processes.values())
    assert all(name in names for name in ("gcs_server", "raylet", "ServeController", REPLICA))
    seen = 0
    for pid, line in processes.items():
        for state, local, remote in sockets(pid):
            seen += 1
            if state == LISTENING:
                assert is_loopback(local), f"{line} listens on {local}"
            elif state == ESTABLISHED:
                assert is_loopback(remote), f"{line} is connected to {remote}"
    assert seen > 10


def test_the_secret_of_the_private_ray_is_nobody_else_s(served: Served) -> None:
    environment = Path(f"/proc/{served.replicas[0]}/environ").read_bytes().split(b"\0")
    values = dict(pair.split(b"=", 1) for pair in environment if b"=" in pair)
    token = Path(values[b"RAY_AUTH_TOKEN_PATH"].decode())
    assert stat.S_IMODE(token.stat().st_mode) == 0o600
    assert stat.S_IMODE(token.parent.stat().st_mode) == 0o700
    assert len(token.read_text()) == 64
    assert values[b"RAY_USAGE_STATS_ENABLED"] == b"0"


def test_a_signal_drains_and_leaves_nothing_behind(served: Served) -> None:
    """The last test: it ends the server."""
    served.wait_for_replicas()
    processes = [pid for pid in served.processes if pid != served.process.pid]
    environment = Path(f"/proc/{served.replicas[0]}/environ").read_bytes().split(b"\0")
    values = dict(pair.split(b"=", 1) for pair in environment if b"=" in pair)
    directory = Path(values[b"RAY_AUTH_TOKEN_PATH"].decode()).parent
    has_begun = threading.Event()
    with ThreadPoolExecutor(1) as pool:
        begin = lambda text: has_begun.set() if text else None  # noqa: E731
        stream = pool.submit(served.stream, LONG, begin, **SLOW)
        assert has_begun.wait(60)
        served.process.send_signal(signal.SIGTERM)
        wait_for(lambda: served.get("/ready").status_code == 503)
        assert served.ask(SHORT).status_code == 503
        assert stream.result() == (ANSWERS[LONG], True)
    assert served.process.wait(60) == 0
    wait_for(lambda: not any(Path(f"/proc/{pid}").exists() for pid in processes))
    assert not directory.exists()
    log = served.log.read_text()
    assert "Traceback" not in log
    assert "finishing 1 request" in log


def test_the_last_words_of_replicas_are_printed_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, stderr = tmp_path / "faults", io.StringIO()  # capsys loses what comes while it reads
    monkeypatch.setattr("sys.stderr", stderr)
    path.touch()
    thread = threading.Thread(target=report_faults, args=[path, 0.001])
    thread.start()
    with path.open("a") as file:
        for line in ("dgemma: one\n", "dgemma: one\n", "dgemma: two\n"):
            file.write(line)
            file.flush()
    wait_for(lambda: "two" in stderr.getvalue(), 60)
    path.unlink()
    thread.join(10)
    assert not thread.is_alive()
    assert [line.split()[1] for line in stderr.getvalue().splitlines()] == ["one", "two"]


def test_replicas_get_a_card_each_or_a_share_of_the_cores(monkeypatch: Any) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    assert num_gpus(os.environ) == 2
    assert local_options(2, None, None, None, "auto").gpus == 1
    assert local_options(4, None, 0.5, None, "cuda").gpus == 0.5
    assert local_options(2, None, None, 3, "cpu").cpus == 3
    for arguments in [(3, None, None), (1, 3, None)]:
        with pytest.raises(UsageError, match="2 GPUs are seen"):
            local_options(*arguments, None, "auto")
    with pytest.raises(UsageError, match="CUDA_VISIBLE_DEVICES"):
        local_options(2, None, None, None, "cuda:1")
    with pytest.raises(UsageError, match="--max-replicas"):
        local_options(2, 1, None, None, "cpu")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert local_options(2, None, None, None, "auto").gpus == 0


def test_a_node_that_registers_late_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    from ray._private import services

    tries = iter([RuntimeError("not yet"), RuntimeError("not yet"), {"node_id": "a"}])

    def get_node(address: str, node: str) -> Any:
        found = next(tries)
        if isinstance(found, Exception):
            raise found
        return found

    monkeypatch.setattr(services, "get_node", get_node)
    with wait_for_slow_node():
        assert services.get_node("address", "a") == {"node_id": "a"}
    assert services.get_node is get_node, "a second start would wrap it again"


def test_ray_s_sockets_fit_into_long_temporary_directories(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", "/var/folders/ab/0123456789abcdef0123456789/T")
    name = f"{short_directory()}/dgemma-12345678/ray/session_2026-11-18_21-11-37_300409_2123456"
    assert len(f"{name}/sockets/plasma_store") <= 103
    monkeypatch.setattr(tempfile, "tempdir", "/scratch")
    assert short_directory() == "/scratch"
