"""One client's heavy but legal requests do not delay another's: a neighbour's clock.

A wait that is too long is compared with that of a control right before, without heavy requests.
Where other programs take a part of the machine, a second counts as much of a second as was left.
"""

import json
import os
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dgemma.server.auth import Keys
from dgemma.server.limits import Limits
from dgemma.server.service import Settings
from tests.server.conftest import MODEL, Running, load, running, wait_for
from tests.taught import SHORT

GREEDY, MODEST = "greedy-key", "modest-key"
MAX_DELAY = 1.0  # seconds that a neighbour may wait longer than alone
WATCHED = 1.2  # seconds of a neighbour's requests while the heavy ones run
ROUNDS = 3  # of which the best counts
MACHINE = Path("/proc/stat")  # of Linux; elsewhere all of the machine counts as ours
MEGABYTES = 4_000_000  # bytes of a body, just below the limit
PROSE = ("The quick brown fox jumps over the lazy dog. It was 12 o'clock.\n" * 70_000)[:MEGABYTES]
CONTEXT = 100_000  # tokens: with those of the model most requests would be refused at once
LONG_END = "[a-z ]{1200}b"  # the shortest end of its texts is long
HOLE = "<|fill|>"
ASKED = [{"role": "user", "content": PROSE}]
WIDE = {
    "type": "object",
    "properties": {f"field {n}": {"type": ["string", "number", "null"]} for n in range(1000)},
}
# Routes that only look something up.
LIGHT = {"/api/show"}

HEAVY: dict[str, list[tuple[str, dict[str, Any]]]] = {
    "edit of 4 MB": [("/v1/dgemma/edit", {"text": PROSE, "instruction": "Fix it."})],
    "correction of 4 MB": [("/v1/dgemma/edit", {"text": PROSE})],
    "fill of 4 MB": [("/v1/dgemma/fill", {"text": PROSE + HOLE + " end."})],
    "infill of 4 MB": [("/infill", {"input_prefix": PROSE, "input_suffix": "end."})],
    "chat of 4 MB": [("/v1/chat/completions", {"messages": [{"role": "user", "content": PROSE}]})],
    "completion of 4 MB": [("/v1/completions", {"prompt": PROSE})],
    "4 MB of tokens": [("/v1/completions", {"prompt": [5] * (MEGABYTES // 3)})],
    "tokenizing 4 MB": [("/tokenize", {"content": PROSE, "with_pieces": True})],
    "apply of 4 MB": [
        (
            "/v1/apply/completions",
            {
                "messages": [
                    {
                        "role": "user",
                        "content": f"<|original_code|>\n{PROSE}<|/original_code|>\n"
                        "<|update_snippet|>\nx\n<|/update_snippet|>",
                    }
                ]
            },
        )
    ],
    "24 slow regexes": [
        (
            "/v1/chat/completions",
            {
                "messages": [{"role": "user", "content": SHORT}],
                "dgemma": {"regex": f"(?s:.*a.{{{200 + n}}}b.*)"},
            },
        )
        for n in range(24)
    ],
    "24 regexes with long ends": [
        (
            "/v1/chat/completions",
            {
                "messages": [{"role": "user", "content": SHORT}],
                "max_tokens": 2000,
                "dgemma": {"mode": mode, "regex": LONG_END},
            },
        )
        for mode in ("ar", "diffusion")
    ]
    * 12,
    "fim of 4 MB": [("/v1/fim/completions", {"prompt": PROSE, "suffix": "end."})],
    "next edit of 4 MB": [
        (
            "/v1/edit/completions",
            {
                "messages": [
                    {
                        "role": "user",
                        "content": f"<|current_file_content|>\n{PROSE}<|code_to_edit|>\nx\n"
                        "<|/code_to_edit|>\n<|/current_file_content|>",
                    }
                ]
            },
        )
    ],
    "detokenizing 4 MB": [("/detokenize", {"tokens": [5] * (MEGABYTES // 3)})],
    "messages of 4 MB": [("/v1/messages", {"model": MODEL, "max_tokens": 4, "messages": ASKED})],
    "counting 4 MB": [("/v1/messages/count_tokens", {"model": MODEL, "messages": ASKED})],
    "responses of 4 MB": [("/v1/responses", {"model": MODEL, "input": PROSE})],
    "Ollama's chat of 4 MB": [("/api/chat", {"model": MODEL, "messages": ASKED})],
    "Ollama's prompt of 4 MB": [("/api/generate", {"model": MODEL, "prompt": PROSE})],
    "empty Sudokus": [("/v1/dgemma/sudoku", {"puzzle": "0" * 81})] * 8,
    "many messages": [
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": "a"}, {"role": "assistant"}] * 200},
        )
    ]
    * 4,
    "a schema of 1,000 fields": [
        (
            "/v1/chat/completions",
            {
                "messages": [{"role": "user", "content": SHORT}],
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "wide", "schema": WIDE},
                },
            },
        )
    ]
    * 4,
    "200 holes": [("/v1/dgemma/fill", {"text": f"piece {HOLE} " * 200})],
    "long streams": [
        (
            "/v1/chat/completions",
            {
                "messages": [{"role": "user", "content": "what?"}],
                "stream": True,
                "dgemma": {
                    "max_denoising_steps": 512,
                    "confidence_threshold": 1e-9,
                    "drafts": True,
                },
            },
        )
    ]
    * 16,
}


@pytest.fixture(scope="module")
def server(checkpoint: Path) -> Iterator[Running]:
    keys = Keys.of([GREEDY, MODEST])
    settings = Settings(names=(MODEL,), limits=Limits(max_seconds=60), keys=keys)
    engine = load(checkpoint)
    engine.model.config = replace(engine.model.config, max_position_embeddings=CONTEXT)
    engine.constraint(regex=LONG_END)  # compiled before, so that 24 run together at once
    with running(engine, settings) as found:
        yield found


def connect(server: Running, path: str, body: object, key: str) -> socket.socket:
    """Send a request on its own connection."""
    host, port = server.url.removeprefix("http://").split(":")
    data = json.dumps(body).encode()
    head = (
        f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        f"Authorization: Bearer {key}\r\nContent-Length: {len(data)}\r\n\r\n"
    )
    line = socket.create_connection((host, int(port)), timeout=30)
    line.sendall(head.encode() + data)
    return line


def one_token(server: Running) -> float:
    """Return the seconds of a neighbour's request for one token."""
    messages = [{"role": "user", "content": SHORT}]
    body = {"messages": messages, "max_tokens": 1, "dgemma": {"mode": "ar"}}
    begun = time.monotonic()
    with connect(server, "/v1/chat/completions", body, MODEST) as line:
        assert line.recv(100).startswith(b"HTTP/1.1 200")
    return time.monotonic() - begun


def longest_wait(server: Running, seconds: float) -> float:
    """Return the longest that a neighbour waits for a token, or for /health, meanwhile."""
    waits, end = list[float](), time.monotonic() + seconds
    while time.monotonic() < end:
        waits.append(one_token(server))
        begun = time.monotonic()
        assert server.get("/health").status_code == 200
        waits.append(time.monotonic() - begun)
    return max(waits)


def busy_seconds() -> float:
    """Return the processor time that all programs but this one have had."""
    user, nice, system, _idle, _waiting, *rest = MACHINE.read_text().split()[1:9]
    ticks = sum(map(int, (user, nice, system, *rest)))
    return ticks / os.sysconf("SC_CLK_TCK") - time.process_time()


@contextmanager
def share_of_machine() -> Iterator[list[float]]:
    """Yield a list that gets the part of the processors that other programs left meanwhile."""
    found = list[float]()
    if not MACHINE.exists():
        found.append(1.0)
        yield found
        return
    began, busy = time.monotonic(), busy_seconds()
    yield found
    processors = (time.monotonic() - began) * (os.cpu_count() or 1)
    found.append(min(max(1 - (busy_seconds() - busy) / processors, 0.02), 1.0))


@contextmanager
def in_flight(server: Running, name: str) -> Iterator[None]:
    with ExitStack() as lines:
        for path, body in HEAVY[name]:
            lines.enter_context(connect(server, path, body, GREEDY))
        yield


@pytest.mark.parametrize("name", HEAVY)
def test_a_neighbour_hardly_waits(server: Running, name: str) -> None:
    """Beside heavy requests, and after their client has hung up."""
    worker, delays, alone = server.service.worker, list[float](), 0.0
    while len(delays) < ROUNDS:
        with share_of_machine() as share:
            with in_flight(server, name):
                beside = longest_wait(server, WATCHED)
            beside = max(beside, longest_wait(server, WATCHED / 4))
        delays.append((beside - alone) * share[0])
        if delays[-1] <= MAX_DELAY:
            return
        wait_for(lambda: worker.num_running + worker.num_waiting == 0, 60)
        alone = longest_wait(server, WATCHED)  # the control of the next round
    pytest.fail(f"a neighbour waited {min(delays):.1f} seconds longer than alone: {delays}")


def test_every_route_has_a_heavy_request(server: Running) -> None:
    paths: dict[str, Any] = server.server.config.app.openapi()["paths"]  # type: ignore[union-attr]
    posts = {path for path, methods in paths.items() if "post" in methods}
    heavy = {path for requests in HEAVY.values() for path, _ in requests}
    assert posts - heavy == LIGHT and len(HEAVY) >= 20
