"""Bytes that are hardly HTTP, over a socket: a status below 500 or a closed line, and no delay."""

import json
import random
import socket
from pathlib import Path

import pytest

from tests.server.conftest import Running, wait_for
from tests.taught import SHORT

ROUNDS = 200
SHORTLY = 0.05  # seconds: what is not whole gets no reply, until the server ends it
BODY = {"messages": [{"role": "user", "content": SHORT}], "max_tokens": 1}
PIECES = [
    *(b"GET ", b"POST ", b"/v1/chat/completions", b" HTTP/1.1\r\n", b"\r\n", b"\r\n\r\n"),
    *(b"Content-Length: ", b"-1", b"99999999999999999999", b"Transfer-Encoding: chunked\r\n"),
    *(b"Content-Type: application/json\r\n", b"Expect: 100-continue\r\n", b"\x00", b"\xff\xfe"),
    *(b"Upgrade: websocket\r\n", b"%00%ff/../", b"A" * 9000, b"ffffffffffffffff\r\n"),
    *(b"Authorization: Bearer \xc3\xa9\r\n", b'{"a":' * 50, b"\t ", b"GET", b"0\r\n\r\n"),
]


def whole(body: bytes) -> bytes:
    head = "POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
    head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    return head.encode() + body


def mutated(rng: random.Random) -> bytes:
    """Change a whole request in a few places: pieces put in, cut out, repeated, bits turned."""
    data = bytearray(whole(json.dumps(BODY).encode()))
    for _ in range(rng.randint(1, 5)):
        at = rng.randrange(len(data) + 1)
        kind = rng.random()
        if kind < 0.5:
            data[at:at] = rng.choice(PIECES)
        elif kind < 0.7:
            del data[at : at + rng.randint(1, 40)]
        elif kind < 0.85:
            data[at:at] = data[at : at + rng.randint(1, 60)]
        elif at < len(data):
            data[at] ^= 1 << rng.randrange(8)
    return bytes(data)


def send(server: Running, data: bytes, seconds: float) -> bytes:
    """Send bytes; return the first line of the reply, or nothing if none comes in this time."""
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=30) as line:
        try:
            line.sendall(data)
            line.settimeout(seconds)
            return line.recv(200).partition(b"\r\n")[0]
        except (ConnectionResetError, BrokenPipeError, TimeoutError):
            return b""


@pytest.mark.parametrize("seed", range(2))
def test_hardly_http_is_refused_and_nothing_stays_open(shared: Running, seed: int) -> None:
    rng = random.Random(seed)
    descriptors = Path("/proc/self/fd")
    before = len(list(descriptors.iterdir())) if descriptors.is_dir() else 0
    for _ in range(ROUNDS):
        data = mutated(rng)
        reply = send(shared, data, SHORTLY)
        assert reply == b"" or int(reply.split()[1]) < 500, (reply, data)
    assert send(shared, whole(json.dumps(BODY).encode()), 60).startswith(b"HTTP/1.1 200")
    if descriptors.is_dir():
        wait_for(lambda: len(list(descriptors.iterdir())) <= before + 10)
