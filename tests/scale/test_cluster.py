"""The application of a Serve config on a Ray cluster of two nodes, one of which dies."""

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.taught import ANSWERS, LONG, SHORT

pytest.importorskip("ray")
ROOT = Path(__file__).resolve().parents[2]
SLOW = {"dgemma": {"pace": 12}}
pytestmark = pytest.mark.skipif(
    not os.environ.get("DGEMMA_TEST_REPLICAS"), reason="starts two nodes; use make replicas"
)


class Cluster:
    """The process of `tests.scale.cluster`."""

    def __init__(self, checkpoint: Path) -> None:
        command = [sys.executable, "-m", "tests.scale.cluster", str(checkpoint)]
        environment = {**os.environ, "DGEMMA_API_KEYS": ""}
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            cwd=ROOT,
            env=environment,
        )
        self.url = self.line("http://")

    def line(self, beginning: str) -> str:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith(beginning):
                return line.strip()
        raise AssertionError("the cluster ended")

    def go_on(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()


@pytest.fixture(scope="module")
def cluster(checkpoint: Path) -> Iterator[Cluster]:
    found = Cluster(checkpoint)
    with found.process:  # which closes its pipes and waits
        yield found
        if found.process.poll() is None:
            found.go_on()
            found.go_on()


def body_of(question: str, **fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": question}], **fields}


def test_streams_survive_the_death_of_a_node(cluster: Cluster) -> None:
    """Each replica has a node of its own, and streams: those of the dead node are continued."""
    url = cluster.url + "/v1/chat/completions"
    first = httpx.post(url, json=body_of(SHORT), timeout=100).json()
    assert first["choices"][0]["message"]["content"] == ANSWERS[SHORT]
    begun = threading.Semaphore(0)

    def stream(number: int) -> tuple[str, str, bool]:
        """The replica, the text, and True if it came to its end."""
        text, is_whole, waits = "", False, True
        body = {**body_of(LONG, stream=True), **SLOW}
        with httpx.stream("POST", url, json=body, timeout=300) as reply:
            for line in reply.iter_lines():
                if line == "data: [DONE]":
                    is_whole = True
                elif line.startswith("data: {"):
                    choices = json.loads(line[6:])["choices"]
                    text += "".join(c["delta"].get("content") or "" for c in choices)
                if text and waits:
                    waits = False
                    begun.release()
            return reply.headers["x-dgemma-replica"], text, is_whole

    with ThreadPoolExecutor(16) as pool:  # more than the preferred replica has for one opening
        streams = [pool.submit(stream, number) for number in range(16)]
        assert all(begun.acquire(timeout=100) for _ in range(12))
        cluster.go_on()
        answers = [future.result() for future in streams]
    cluster.line("removed")
    assert len({replica for replica, _, _ in answers}) == 2
    assert {(text, whole) for _, text, whole in answers} == {(ANSWERS[LONG], True)}
    page = httpx.get(cluster.url + "/metrics", timeout=60).text
    values = dict(line.rsplit(" ", 1) for line in page.splitlines() if not line.startswith("#"))
    assert float(values["dgemma_lost_requests_total"]) == 0
    assert float(values["dgemma_replays_total"]) >= 1
