"""Batch files: answered once each, whatever breaks a run off."""

import asyncio
import json
import os
import socket
import subprocess
import sys
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from dgemma.errors import DgemmaError, UsageError
from dgemma.server.app import App
from dgemma.server.batch import (
    BatchLine,
    LineReply,
    engine_sender,
    finished_ids,
    read_batch,
    run_batch,
    url_sender,
)
from tests.server.conftest import Running
from tests.taught import ANSWERS, LONG, SHORT

CHAT = "/v1/chat/completions"


def request(name: str, question: str = SHORT, **fields: Any) -> dict[str, Any]:
    body = {"messages": [{"role": "user", "content": question}], **fields}
    return {"custom_id": name, "method": "POST", "url": CHAT, "body": body}


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def replies(path: Path) -> dict[str, dict[str, Any]]:
    rows = [json.loads(row) for row in path.read_text(encoding="utf-8").splitlines()]
    assert max(Counter(row["custom_id"] for row in rows).values()) == 1
    return {row["custom_id"]: row for row in rows}


def text_of(row: dict[str, Any]) -> str:
    content = row["response"]["body"]["choices"][0]["message"]["content"]
    assert isinstance(content, str)
    return content


def test_every_line_gets_the_server_s_reply(routes: App, tmp_path: Path) -> None:
    rows = [request("a"), request("b", LONG, seed=4), request("c", nonsense=1)]
    rows += [request("d", stream=True), {**request("e"), "url": "/nowhere"}]
    rows += [{**request("f"), "url": "/v1/responses", "body": {"input": SHORT}}]
    file, output = write(tmp_path / "in.jsonl", rows), tmp_path / "out.jsonl"
    counts = asyncio.run(run_batch(read_batch(file), output, engine_sender(routes), 4))
    found = replies(output)
    assert (counts.total, counts.done, counts.failed) == (6, 6, 3)
    assert (text_of(found["a"]), text_of(found["b"])) == (ANSWERS[SHORT], ANSWERS[LONG])
    seeds = [found[name]["response"]["body"]["choices"][0]["dgemma"]["seed"] for name in "ab"]
    assert seeds == [read_batch(file)[0].seed, 4]
    statuses = [found[name]["response"]["status_code"] for name in "abcdef"]
    assert statuses == [200, 200, 400, 400, 404, 200]
    assert "nonsense" in found["c"]["error"]["message"]
    assert found["a"]["error"] is None


def test_a_run_that_breaks_off_is_continued(routes: App, tmp_path: Path) -> None:
    rows = [request(f"line {i}", (SHORT, LONG)[i % 2], temperature=1.5) for i in range(20)]
    file, output = write(tmp_path / "in.jsonl", rows), tmp_path / "out.jsonl"
    send, num_sent = engine_sender(routes), 0

    async def breaking(line: BatchLine) -> LineReply:
        nonlocal num_sent
        num_sent += 1
        if num_sent % 7 == 0:
            raise DgemmaError("broken off")
        return await send(line)

    for _ in range(2):
        with pytest.raises(DgemmaError, match="broken off"):
            asyncio.run(run_batch(read_batch(file), output, breaking, 3))
        with output.open("ab") as torn:
            torn.write(b'{"id":"batch_req_1","custom_id":"li')
    counts = asyncio.run(run_batch(read_batch(file), output, send, 3))
    assert counts.skipped > 5
    whole = tmp_path / "whole.jsonl"
    asyncio.run(run_batch(read_batch(file), whole, send, 5))
    again, first = replies(output), replies(whole)
    assert {name: text_of(row) for name, row in again.items()} == {
        name: text_of(row) for name, row in first.items()
    }
    assert len(again) == 20


def test_a_full_disk_ends_the_run_and_leaves_whole_lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def send(line: BatchLine) -> LineReply:
        return 200, {"id": line.custom_id}

    write_some, sizes = os.write, list[int]()

    def short_write(descriptor: int, data: bytes) -> int:
        sizes.append(len(data))
        return write_some(descriptor, data if len(sizes) < 3 else data[:-5])

    lines = [BatchLine(custom_id=str(n), url=CHAT, body={}) for n in range(5)]
    output = tmp_path / "out.jsonl"
    with monkeypatch.context() as context:
        context.setattr(os, "write", short_write)
        with pytest.raises(DgemmaError, match=r"cannot be written .* same command continues"):
            asyncio.run(run_batch(lines, output, send, 1))
    assert output.read_bytes().endswith(b"\n") and len(replies(output)) == 2
    assert asyncio.run(run_batch(lines, output, send, 1)).skipped == 2


def test_a_running_server_answers_a_file(shared: Running, tmp_path: Path) -> None:
    file = write(tmp_path / "in.jsonl", [request("a"), request("b", nonsense=1)])
    output = tmp_path / "out.jsonl"
    counts = asyncio.run(run_batch(read_batch(file), output, url_sender(shared.url, None), 2))
    assert (counts.done, counts.failed) == (2, 1)
    assert text_of(replies(output)["a"]) == ANSWERS[SHORT]


def test_a_text_may_hold_any_character_that_json_allows_in_a_line(tmp_path: Path) -> None:
    """Among them those at which Python ends a line."""
    file, odd = tmp_path / "in.jsonl", "a\u2028b\x85c\u2029d\x1ce"
    rows = [request("a\u2028", odd), request("b", odd)]
    whole = "\r\n".join(json.dumps(row, ensure_ascii=False) for row in rows)
    file.write_text(whole.replace("\x1c", "\\u001c"), encoding="utf-8", newline="")
    assert [line.custom_id for line in read_batch(file)] == ["a\u2028", "b"]
    assert read_batch(file)[1].body["messages"][0]["content"] == odd


def test_ollama_s_routes_answer_in_one_piece_too(
    routes: App, shared: Running, tmp_path: Path
) -> None:
    """They stream unless they are told not to."""
    body = {"messages": [{"role": "user", "content": SHORT}]}
    file = write(tmp_path / "in.jsonl", [{"custom_id": "a", "url": "/api/chat", "body": body}])
    for send in (engine_sender(routes), url_sender(shared.url, None)):
        output = tmp_path / "out.jsonl"
        output.unlink(missing_ok=True)
        counts = asyncio.run(run_batch(read_batch(file), output, send, 1))
        assert counts.failed == 0
        assert replies(output)["a"]["response"]["body"]["message"]["content"] == ANSWERS[SHORT]


def test_a_reply_that_is_cut_short_is_asked_for_again(tmp_path: Path) -> None:
    """As a server that is killed leaves it."""
    whole = b'{"id": "x"}'
    lines = [BatchLine(custom_id="a", url=CHAT, body={})]
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def serve() -> None:
            for data in (whole[:4], b"", whole):
                line, _ = listening.accept()
                with line:
                    line.recv(1 << 16)
                    line.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 11\r\n\r\n" + data)

        thread = threading.Thread(target=serve)
        thread.start()
        url = f"http://127.0.0.1:{listening.getsockname()[1]}"
        output = tmp_path / "out.jsonl"
        counts = asyncio.run(run_batch(lines, output, url_sender(url, None), 1))
        thread.join()
    assert (counts.done, counts.failed) == (1, 0)
    assert replies(output)["a"]["response"]["body"] == {"id": "x"}


def test_a_server_that_stays_away_ends_the_run(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr("dgemma.server.batch.RETRY_SECONDS", 0.1)
    output = tmp_path / "out.jsonl"
    lines = [BatchLine(custom_id="a", url=CHAT, body={})]
    with pytest.raises(DgemmaError, match=r"cannot be reached.*same command continues"):
        asyncio.run(run_batch(lines, output, url_sender("http://127.0.0.1:9", None), 2))
    assert finished_ids(output) == set()


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ("{", "line 1 of in.jsonl is not JSON"),
        ("[]", "must have custom_id, method, url and body"),
        (json.dumps({**request("a"), "custom_id": ""}), "must have custom_id"),
        (json.dumps({**request("a"), "method": "GET"}), "must have the method POST"),
        (json.dumps({**request("a"), "more": 1}), "no other field"),
        (json.dumps({**request("a"), "url": "/v1/chat completions"}), "a url that is a path"),
        (json.dumps({**request("a"), "url": "/é"}), "a url that is a path"),
        (json.dumps({**request("a"), "url": "/\ud800"}), "half a surrogate pair"),
        (json.dumps({**request("a"), "url": "//host/path"}), "a url that is a path"),
        (json.dumps({**request("a"), "custom_id": "\ud800"}), "half a surrogate pair"),
        ('{"custom_id": "a", "custom_id": "b"}', "'custom_id' twice"),
        ('{"custom_id": "a", "url": "/", "body": {"temperature": NaN}}', "NaN is not a number"),
        ('{"custom_id": "a", "url": "/", "body": {"a": 1e999}}', "the number 1e999; use one below"),
        (json.dumps(request("a")) + "\n" + json.dumps(request("a")), "custom_id 'a' of another"),
        ("", "has no requests"),
    ],
)
def test_a_file_that_is_no_batch_is_refused(row: str, reason: str, tmp_path: Path) -> None:
    file = tmp_path / "in.jsonl"
    file.write_text(row, encoding="utf-8")
    with pytest.raises(UsageError, match=reason):
        read_batch(file)


def test_an_output_that_is_another_file_is_left_alone(tmp_path: Path) -> None:
    output = tmp_path / "notes.txt"
    output.write_text("my notes\nand more\n")
    with pytest.raises(UsageError, match="not a batch output file"):
        finished_ids(output)
    assert output.read_text() == "my notes\nand more\n"


def test_the_command_counts_and_fails_if_a_line_did(checkpoint: Path, tmp_path: Path) -> None:
    file = write(tmp_path / "in.jsonl", [request("a", model="any name"), request("b", x=1)])
    command = [sys.executable, "-c", "from dgemma.cli import main; main()", "batch", str(file)]
    command += ["-o", str(tmp_path / "out.jsonl"), "--model", str(checkpoint), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env={**os.environ})
    assert done.returncode == 1, done.stderr
    assert json.loads(done.stdout)["done"] == 2
    assert "1 requests were refused or failed" in done.stderr
