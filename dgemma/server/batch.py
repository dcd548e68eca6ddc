"""Batch files in OpenAI's format: one request per line in, one reply per line out, in any order.

Every line has a seed, its own or one derived from its `custom_id`. So the same command continues an
interrupted run: lines with a reply are skipped, and the others get the replies they would have got.
An invalid line gets an error reply; only an unreadable file ends a run.
"""

import asyncio
import hashlib
import http.client
import json
import os
import re
import time
import urllib.error
import urllib.request
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dgemma.errors import DgemmaError, UsageError
from dgemma.server.call import Call, opening, whole_reply
from dgemma.server.errors import OLLAMA_PATH, ApiError
from dgemma.server.service import read_json

if TYPE_CHECKING:
    from dgemma.server.app import App

# Routes with a seed in the body; for others it is passed next to the body, to an engine only.
SEEDED_PATHS = ("/v1/chat/", "/v1/completions", "/v1/dgemma/", "/v1/fim/", "/infill")
RETRIED = frozenset({408, 429, 502, 503, 504})
RETRY_SECONDS = 300.0  # how long a server may be unreachable or busy before the run ends
MAX_WAIT_SECONDS = 15.0
REPLY_SECONDS = 3600.0
URL_PATH = re.compile(r"/(?!/)[!-~]*")  # what a request line may hold

LineReply = tuple[int, dict[str, Any]]  # status and body


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchLine:
    """One request of the file."""

    custom_id: str
    url: str
    body: dict[str, Any]

    @property
    def seed(self) -> int:
        """Seed of a line without one: the same in every run."""
        return int.from_bytes(hashlib.blake2b(self.custom_id.encode(), digest_size=4).digest())

    @property
    def seeded_body(self) -> bytes:
        body = self.body
        if body.get("seed") is None and self.url.startswith(SEEDED_PATHS):
            body = {**body, "seed": self.seed}
        if self.url.startswith(OLLAMA_PATH):  # streams by default
            body = {"stream": False, **body}
        return json.dumps(body).encode()

    def result(self, reply: LineReply) -> bytes:
        """Write the line of the output file."""
        status, body = reply
        name = hashlib.blake2b(self.custom_id.encode(), digest_size=12).hexdigest()
        response = {"status_code": status, "request_id": str(body.get("id", "")), "body": body}
        failed = body.get("error") if status >= 400 else None
        line = {
            "id": f"batch_req_{name}",
            "custom_id": self.custom_id,
            "response": response,
            "error": failed,
        }
        return json.dumps(line, ensure_ascii=False, separators=(",", ":")).encode() + b"\n"


Sender = Callable[[BatchLine], Awaitable[LineReply]]


@dataclass(slots=True)
class BatchCounts:
    """The state of a run."""

    total: int
    skipped: int = 0  # lines that already had a reply
    done: int = 0
    failed: int = 0
    tokens: int = 0


# --- files


def read_batch(path: Path) -> list[BatchLine]:
    """Read a file of requests; a line that cannot be one is named."""
    try:
        # Not splitlines: JSON strings may contain other characters that it splits at.
        rows = path.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"the batch file {path} cannot be read: {error}") from None
    lines: dict[str, BatchLine] = {}
    for number, row in enumerate(rows, 1):
        if row.strip():
            line = _read_line(row, f"line {number} of {path.name}")
            if line.custom_id in lines:
                raise UsageError(
                    f"line {number} of {path.name} has the custom_id {line.custom_id[:60]!r} of "
                    "another line; give each its own"
                )
            lines[line.custom_id] = line
    if not lines:
        raise UsageError(f"{path.name} has no requests; write one JSON object a line")
    return list(lines.values())


def _read_line(row: str, where: str) -> BatchLine:
    try:
        raw = read_json(row.encode())
    except ApiError as error:
        raise UsageError(f"{where} {error.message.removeprefix('the body ')}") from None
    match raw:
        case {"custom_id": str(name), "url": str(url), "body": dict(body), **more} if name:
            method = more.pop("method", "POST")
            if method != "POST" or more or not URL_PATH.fullmatch(url):
                raise UsageError(
                    f"{where} must have the method POST, a url that is a path, and no other field"
                )
            return BatchLine(custom_id=name, url=url, body=body)
    raise UsageError(f"{where} must have custom_id, method, url and body")


def finished_ids(path: Path) -> set[str]:
    """Return the ids of lines with a reply; removes a partial last line of a killed run."""
    if not path.exists():
        return set()
    ids, end = set(), 0
    with path.open("rb+") as file:
        for row in file:
            try:
                name = json.loads(row)["custom_id"] if row.endswith(b"\n") else None
            except (ValueError, KeyError, TypeError):
                raise UsageError(
                    f"{path} is not a batch output file; choose another file, or move it away"
                ) from None
            if name is None:
                break
            ids.add(name)
            end += len(row)
        file.truncate(end)
    return ids


# --- a run


async def run_batch(
    lines: Sequence[BatchLine],
    output: Path,
    send: Sender,
    num_parallel: int,
    on_reply: Callable[[BatchCounts], None] = lambda counts: None,
) -> BatchCounts:
    """Answer all lines without a reply, and append each reply when it is done."""
    known = finished_ids(output)
    # Sort lines by their beginning, so that prompts share prefixes in the cache.
    waiting = sorted(
        (line for line in lines if line.custom_id not in known),
        key=lambda line: opening(line.body),
        reverse=True,
    )
    counts = BatchCounts(total=len(lines), skipped=len(lines) - len(waiting))
    descriptor = os.open(output, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)

    async def work() -> None:
        while waiting:
            line = waiting.pop()
            reply = (400, _refusal(line)) if line.body.get("stream") else await send(line)
            write_line(descriptor, line.result(reply))
            counts.done += 1
            counts.failed += reply[0] >= 400
            usage = reply[1].get("usage") or {}
            counts.tokens += usage.get("completion_tokens") or usage.get("output_tokens") or 0
            on_reply(counts)

    try:
        async with asyncio.TaskGroup() as group:
            for _ in range(min(num_parallel, len(waiting))):
                group.create_task(work())
    except* DgemmaError as errors:
        raise errors.exceptions[0] from None
    finally:
        os.close(descriptor)
    return counts


def write_line(descriptor: int, line: bytes) -> None:
    """Append a line in one write; a partial write is removed, and the run ends."""
    end = os.lseek(descriptor, 0, os.SEEK_END)
    try:
        if (written := os.write(descriptor, line)) == len(line):
            return
        reason = f"{written} of {len(line)} bytes were written"
    except OSError as error:
        reason = str(error.strerror)
    os.ftruncate(descriptor, end)
    raise DgemmaError(
        f"the output cannot be written ({reason}); make room, and the same command continues"
    )


def _refusal(line: BatchLine) -> dict[str, Any]:
    sentence = "a batch has no streams; leave out stream"
    return ApiError(400, sentence, param="stream").body_for(line.url)


def engine_sender(app: "App") -> Sender:
    """Answer lines with an engine in this process."""

    async def send(line: BatchLine) -> LineReply:
        call = Call(path=line.url, body=line.seeded_body, seed=line.seed)
        status, data = await whole_reply(app, call)
        return status, json.loads(data)

    return send


def url_sender(url: str, key: str | None) -> Sender:
    """Answer lines through a running server, waiting while it is busy or unreachable."""

    def post(line: BatchLine) -> tuple[int, bytes, float]:
        headers = {"content-type": "application/json"}
        headers |= {} if key is None else {"authorization": f"Bearer {key}"}
        request = urllib.request.Request(url.rstrip("/") + line.url, line.seeded_body, headers)
        try:
            with urllib.request.urlopen(request, timeout=REPLY_SECONDS) as reply:
                return reply.status, reply.read(), 0.0
        except urllib.error.HTTPError as error:
            wait = error.headers.get("retry-after", "")
            return error.code, error.read(), float(wait) if wait.isdigit() else 1.0

    async def send(line: BatchLine) -> LineReply:
        started, wait = time.monotonic(), 0.25
        while True:
            try:
                status, data, retry_after = await asyncio.to_thread(post, line)
                if status not in RETRIED:
                    return status, _object(data)
                reason = f"answers {status}"
            except (OSError, ValueError, http.client.HTTPException) as error:
                reason, retry_after = f"cannot be reached: {error}", 0.0
            if time.monotonic() - started > RETRY_SECONDS:
                raise DgemmaError(
                    f"the server {url} {reason}; the same command continues where this one ended"
                )
            wait = min(2 * wait, MAX_WAIT_SECONDS)
            await asyncio.sleep(max(wait, retry_after))

    return send


def _object(data: bytes) -> dict[str, Any]:
    try:
        found = json.loads(data)
    except ValueError:
        found = None
    if isinstance(found, dict):
        return found
    return {"error": {"message": data[:500].decode("utf-8", "replace")}}
