"""`dgemma serve` as a process: it listens, answers, drains on a signal, and refuses wrong calls."""

import os
import re
import resource
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import httpx
import openai
import pytest

from dgemma.cli import main
from tests.server.conftest import wait_for
from tests.taught import ANSWERS, LONG

COMMAND = [sys.executable, "-c", "from dgemma.cli import main; main()", "serve"]


@contextmanager
def serving(
    *options: str, num_files: int | None = None
) -> Iterator[tuple[subprocess.Popen[str], str]]:
    def limit_files() -> None:
        if num_files is not None:
            resource.setrlimit(resource.RLIMIT_NOFILE, (num_files, num_files))

    process = subprocess.Popen(
        [*COMMAND, "--port", "0", *options],
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "DGEMMA_API_KEYS": ""},
        preexec_fn=limit_files,
    )
    assert process.stderr is not None
    try:
        line = process.stderr.readline()
        found = re.search(r"http://[\d.]+:\d+", line)
        assert found, line
        url = found[0]
        wait_for(lambda: answers(url))
        yield process, url
    finally:
        process.kill()
        process.wait()
        process.stderr.close()


def answers(url: str) -> bool:
    try:
        return httpx.get(f"{url}/ready", timeout=30).status_code == 200
    except httpx.ConnectError:
        return False


def test_a_served_directory_answers_and_drains_on_a_signal(checkpoint: Path) -> None:
    with serving("-m", str(checkpoint), "--device", "cpu", "--dtype", "float32") as (process, url):
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
        (model,) = client.models.list()
        assert model.id == checkpoint.name, "by its name, not by where it lies"
        slow = client.chat.completions.create(
            model=model.id,
            messages=[{"role": "user", "content": LONG}],
            seed=1,
            stream=True,
            extra_body={"dgemma": {"pace": 40}},
        )
        pieces = [next(slow).choices[0].delta.content or ""]
        process.send_signal(signal.SIGTERM)
        wait_for(lambda: httpx.get(f"{url}/ready", timeout=30).status_code == 503)
        refused = httpx.post(f"{url}/v1/chat/completions", json={}, timeout=30)
        assert refused.status_code == 503 and refused.headers["retry-after"]
        pieces += [chunk.choices[0].delta.content or "" for chunk in slow]
        assert "".join(pieces) == ANSWERS[LONG]
        assert process.wait(timeout=30) == 0
        assert process.stderr is not None
        assert "finishing" in process.stderr.read()


def test_a_server_whose_weights_are_cut_short_ends_in_a_sentence(
    checkpoint: Path, tmp_path: Path
) -> None:
    """The system ends a thread that reads mapped bytes which are gone."""
    mine = tmp_path / "mine"
    shutil.copytree(checkpoint, mine)
    with serving("--model", str(mine), "--device", "cpu", "--dtype", "float32") as (process, url):
        os.truncate(mine / "model.safetensors", 4096)
        body = {"messages": [{"role": "user", "content": LONG}]}
        with pytest.raises(httpx.RemoteProtocolError):
            httpx.post(f"{url}/v1/chat/completions", json=body, timeout=60)
        assert process.wait(timeout=30) == 1
        assert process.stderr is not None
        assert process.stderr.read().startswith("dgemma: a file of weights was cut short")


def test_half_sent_heads_neither_stop_a_server_nor_fill_its_log(checkpoint: Path) -> None:
    """300 of them where 256 files may be open."""
    options = ("-m", str(checkpoint), "--device", "cpu", "--dtype", "float32")
    with serving(*options, num_files=256) as (process, url):
        host, port = url.removeprefix("http://").split(":")
        with ExitStack() as stack:
            for _ in range(300):
                line = stack.enter_context(socket.create_connection((host, int(port)), timeout=10))
                line.sendall(b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\n")
            for _ in range(5):
                assert httpx.get(f"{url}/health", timeout=10).status_code == 200
        assert httpx.get(f"{url}/health", timeout=10).status_code == 200
        for garbage in (b"\0\1\2", b"GET\r\n\r\n", b"GET / HTTP/9\r\n\r\n"):
            with socket.create_connection((host, int(port)), timeout=10) as line:
                line.sendall(garbage)
                line.settimeout(1)
                assert b"200" not in line.recv(100)
        process.send_signal(signal.SIGTERM)
        assert process.stderr is not None
        log = process.stderr.read()
        assert process.wait(timeout=30) == 0
        assert log == "dgemma: stopping\n"


def test_wrong_calls_are_refused_before_anything_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("DGEMMA_API_KEYS", raising=False)

    def call(*options: str) -> tuple[object, str]:
        monkeypatch.setattr(sys, "argv", ["dgemma", "serve", *options])
        with pytest.raises(SystemExit) as ended:
            main()
        return ended.value.code, capsys.readouterr().err

    code, told = call("--host", "0.0.0.0")
    assert code == 2 and "a key is needed" in told
    code, told = call("--max-batch-size", "0")
    assert code == 2 and "(--max-batch-size) is 0" in told
    code, told = call("--max-seconds", "nan")
    assert code == 2 and "(--max-seconds) is nan" in told
    code, told = call("--api-key-file", str(tmp_path / "absent"))
    assert code == 2 and "cannot be read" in told
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        code, told = call("--port", str(taken.getsockname()[1]))
    assert code == 1 and "in use" in told and len(told.splitlines()) == 1
    code, told = call("--port", "99999")
    assert code == 2 and "65535" in told
