"""Requests, clients and servers of `replicas.py`; run as a script, a server whose size changes.

The requests are of eight kinds: chat whole and streamed, AR, completions, /v1/messages,
/v1/responses, fills, JSON by schema.
"""

import asyncio
import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx

Body = dict[str, Any]
ROOT = Path(__file__).resolve().parents[1]
COMMAND = [sys.executable, "-c", "from dgemma.cli import main; main()"]
EXACT = ["--device", "cpu", "--dtype", "float32", "--quant", "none"]
NAMED = ["--name", "bench"]
MARK = "DGEMMA_BENCH_FLEET"  # in the environment of every process of a fleet
WORDS = "dog ball bird cat sea boat sun moon rain road house tree friend song snow lamp".split()
QUESTIONS = ["What is a canvas?", "How is this text written?", "Write a haiku."]
KINDS = ("chat", "chat stream", "ar stream", "text stream", "messages", "responses", "fill", "json")
ENDS = ("data: [DONE]", '"type":"message_stop"', '"type":"response.')
SCHEMA = {
    "type": "object",
    "properties": {"animal": {"enum": ["dog", "cat", "bird"]}, "old": {"type": "boolean"}},
    "required": ["animal", "old"],
    "additionalProperties": False,
}
START_SECONDS = 300


# --- requests


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """One of the distinct requests."""

    number: int
    path: str
    body: Body

    @property
    def is_stream(self) -> bool:
        return bool(self.body.get("stream"))


@dataclass(slots=True, kw_only=True)
class Got:
    """An answer as its client saw it."""

    number: int
    status: int = 0
    text: str = ""
    is_whole: bool = False
    silence: float = 0.0
    tokens: int = 0
    replica: str = ""
    began: float = 0.0
    trouble: str = ""


def ask_of(number: int, tokens: int) -> Ask:
    """Return a request of the kinds in turn; a half of them sample at a temperature."""
    rng, kind = random.Random(number), KINDS[number % len(KINDS)]
    words = " ".join(rng.choice(WORDS) for _ in range(rng.randint(1, 6)))
    content = rng.choice([*QUESTIONS, f"Tell me a story about {words}."])
    messages = [{"role": "user", "content": content}]
    length = rng.choice([tokens // 4, tokens // 2, tokens])
    body: Body = {"seed": number, "max_tokens": length, "stream": kind.endswith("stream")}
    match kind:
        case "messages" | "responses":  # without a seed: greedy
            body = {"stream": True, "temperature": 0, "dgemma": {"mode": "ar"}}
            if kind == "messages":
                body |= {"model": "bench", "messages": messages, "max_tokens": length}
                return Ask(number=number, path="/v1/messages", body=body)
            body |= {"model": "bench", "input": content, "max_output_tokens": length}
            return Ask(number=number, path="/v1/responses", body=body)
        case "text stream":
            return Ask(number=number, path="/v1/completions", body={**body, "prompt": content})
        case "fill":
            body = {"seed": number, "n_predict": 12}
            body |= {"input_prefix": f"The {words} ", "input_suffix": " in the garden."}
            return Ask(number=number, path="/infill", body=body)
        case "json":
            body |= {"response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA}}}
            body["response_format"]["json_schema"]["name"] = "animal"
        case "ar stream":
            body |= {"dgemma": {"mode": "ar"}, "temperature": 0.8}
    if kind.startswith("chat") and number % 2:
        body["temperature"] = 0.8
    return Ask(number=number, path="/v1/chat/completions", body={**body, "messages": messages})


def text_of(event: Body) -> str:
    """Return the text of a reply or of an event of a stream."""
    match event:
        case {"choices": list(choices)}:
            parts = [
                c.get("message") or c.get("delta") or {"content": c.get("text")} for c in choices
            ]
            return "".join(part.get("content") or "" for part in parts)
        case {"type": "content_block_delta", "delta": {"text": str(text)}}:
            return text
        case {"type": "response.output_text.delta", "delta": str(text)}:
            return text
        case {"content": str(text)}:
            return text
    return ""


# --- clients


class Load:
    """Clients of one server, and what they got."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.gots: list[Got] = []
        self.first_seen: dict[str, float] = {}  # replicas
        self.num_begun = 0  # requests
        self.is_over = False

    async def run(
        self, asks: Sequence[Ask], clients: int, event: Callable[[], Awaitable[None]] | None = None
    ) -> float:
        """Work off the requests while `event` happens; return the seconds they took."""
        waiting, began = list(reversed(asks)), time.perf_counter()
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
        async with httpx.AsyncClient(base_url=self.url, timeout=600, limits=limits) as client:

            async def work() -> None:
                while waiting and not self.is_over:
                    self.gots.append(await self.one(client, waiting.pop()))

            happening = None if event is None else asyncio.ensure_future(event())
            await asyncio.gather(*(work() for _ in range(clients)))
            seconds = time.perf_counter() - began
            if happening is not None:
                await happening
        return seconds

    async def has_answers(self, count: int) -> None:
        """Wait for so many answers."""
        while len(self.gots) < count:
            await asyncio.sleep(0.05)

    async def one(self, client: httpx.AsyncClient, ask: Ask) -> Got:
        self.num_begun += 1
        got = Got(number=ask.number, began=time.monotonic())
        try:
            async with client.stream("POST", ask.path, json=ask.body) as reply:
                got.status, got.replica = (
                    reply.status_code,
                    reply.headers.get("x-dgemma-replica", ""),
                )
                if got.status == 200:
                    self.first_seen.setdefault(got.replica, time.monotonic())
                if ask.is_stream and got.status == 200:
                    await self._read(reply, got)
                else:
                    body = json.loads(await reply.aread())
                    got.text, got.is_whole = text_of(body), got.status == 200
                    got.tokens = (body.get("usage") or {}).get("completion_tokens", 0)
                    got.trouble = "" if got.is_whole else str(body)[:90]
        except (httpx.HTTPError, ValueError) as error:
            got.trouble = f"{type(error).__name__}: {error}"
        return got

    async def _read(self, reply: httpx.Response, got: Got) -> None:
        last = 0.0
        async for line in reply.aiter_lines():
            if not line.startswith("data:"):
                continue
            now = time.monotonic()
            got.silence = max(got.silence, now - last if last else 0.0)
            last = now
            if '"error":{' in line:
                got.trouble = line[:200]
            elif line.startswith(ENDS[0]):
                got.is_whole = True
            else:
                event = json.loads(line[5:])
                got.text += text_of(event)
                kind = event.get("type")
                got.is_whole |= kind in (
                    "message_stop",
                    "response.completed",
                    "response.incomplete",
                )


# --- servers


@dataclass(frozen=True, slots=True)
class Fleet:
    """A server in a process of its own, with the processes of its Ray."""

    process: "subprocess.Popen[str]"
    url: str
    mark: str

    @property
    def replicas(self) -> list[int]:
        found = []
        for path in Path("/proc").glob("[0-9]*"):
            try:
                is_replica = b"ServeReplica" in path.joinpath("cmdline").read_bytes()
                if is_replica and self.mark.encode() in path.joinpath("environ").read_bytes():
                    found.append(int(path.name))
            except OSError:  # it ended meanwhile
                continue
        return found

    def metric(self, name: str) -> float:
        page = httpx.get(f"{self.url}/metrics", timeout=60).text
        found = re.search(rf"^{name} ([\d.e+]+)$", page, re.MULTILINE)
        return float(found[1]) if found else 0.0

    async def has_replicas(self, count: int, seconds: float = START_SECONDS) -> bool:
        """Wait until so many replicas serve and no other is left."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            serving = await asyncio.to_thread(self.metric, "dgemma_replicas")
            if serving == count == len(self.replicas):
                return True
            await asyncio.sleep(0.2)
        return False

    def kill(self, count: int = 1) -> None:
        for pid in random.sample(found := self.replicas, min(count, len(found))):
            os.kill(pid, signal.SIGKILL)


@contextmanager
def serving(command: Sequence[str]) -> Iterator[Fleet]:
    """Run a server on a free port, one thread per engine, until the block ends."""
    mark = f"{MARK}={os.getpid()}-{time.monotonic_ns()}"
    name, value = mark.split("=")
    environment = {**os.environ, name: value, "DGEMMA_API_KEYS": "", "PYTHONPATH": str(ROOT)}
    environment |= {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive"}
    with tempfile.NamedTemporaryFile("w+") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, env=environment, text=True)
        try:
            url, end = "", time.monotonic() + START_SECONDS
            while not url:
                if process.poll() is not None or time.monotonic() > end:
                    sys.exit(f"the server did not start: {Path(log.name).read_text()}")
                found = re.search(r"http://127.0.0.1:\d+(?=/v1)", Path(log.name).read_text())
                url = found[0] if found else ""
                time.sleep(0.1)
            while True:
                with httpx.Client() as client:
                    try:
                        if client.get(f"{url}/ready", timeout=10).status_code == 200:
                            break
                    except httpx.TransportError:
                        pass
                time.sleep(0.2)
            yield Fleet(process, url, mark)
        finally:
            process.terminate()
            try:
                process.wait(90)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def replicas_command(model: str, replicas: int) -> list[str]:
    options = ["--model", str(model), "--replicas", str(replicas), "--cpus-per-replica", "1"]
    return [*COMMAND, "serve", "--port", "0", *options, *EXACT, *NAMED, "--max-queue", "1024"]


def scaling_command(model: str, first: int, most: int) -> list[str]:
    """A server whose size changes: down to one replica on SIGUSR1, or by its load."""
    return [sys.executable, __file__, json.dumps([str(model), first, most])]


def serve_scaling(model: str, first: int, most: int) -> None:
    from dgemma.scale.local import Fleet as Replicas
    from dgemma.scale.local import serve_replicas
    from dgemma.scale.replica import ReplicaOptions
    from dgemma.server.lifecycle import bind
    from dgemma.server.limits import Limits
    from dgemma.server.service import Settings
    from dgemma.weights.hub import ModelOptions

    options = ReplicaOptions(
        replicas=first, max_replicas=most, upscale_seconds=2.0, downscale_seconds=4.0
    )
    arguments = ModelOptions(model=model, device="cpu", dtype="float32", quant="none")
    fleet = Replicas(arguments, Settings(names=("bench",), limits=Limits(max_queue=1024)), options)
    one = replace(options, replicas=1, max_replicas=None)

    def shrink(*_: object) -> None:
        threading.Thread(target=fleet.update, args=[one], daemon=True).start()

    signal.signal(signal.SIGUSR1, shrink)
    listening = bind("127.0.0.1", 0)
    banner = f"at http://127.0.0.1:{listening.getsockname()[1]}/v1"
    serve_replicas(fleet, listening, banner, lambda count: None)


if __name__ == "__main__":
    serve_scaling(*json.loads(sys.argv[1]))
