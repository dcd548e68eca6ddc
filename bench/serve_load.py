"""Many clients at once on a server of this machine: nothing lost, nothing crossed, no leak.

    python bench/serve_load.py [MODEL] [--clients 64] [--requests 400] [--modes diffusion,ar]
    python bench/serve_load.py [MODEL] --clients 1,2,4,8,16,32,64 [--seconds 10]
    python bench/serve_load.py [MODEL] --modes mixed --requests 1500 --faults --no-serial

Requests differ in length, in their seeds, in whether they are streamed; some clients cancel after
their first text, some hang up at once. Every answer that comes to its end must be the one the same
request gets alone. The same load goes in alternating rounds to a server that takes `--rows`
requests into a pass and to one that takes them one at a time. Memory of the first is read after
every round.

With `--faults` a quarter of the clients send what no client should: half a header, bytes that are
no HTTP, a body cut short, a key twice, an unknown field, another type, a prompt beyond the
context, a costly expression. Each must be refused or ended, and the others still get the answer
they get alone.

With several numbers of clients there is a sweep as well: committed tokens per second of both modes
for each number, of the clock and of the server's processor time, and where autoregression
overtakes diffusion. All is loopback; the load is made in
this process, the servers are others. Fails if an answer is lost or wrong, or if memory grows by
more than 5 % from the first half to the second. The last line is JSON.

`python -m examples.tiny_model DIRECTORY` makes a model that answers in milliseconds.
"""

import argparse
import asyncio
import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path
from typing import Any

ROUNDS = (4, 10)  # fewest and most; in each there are enough requests for every client
TOLERANCE = 0.05
WORDS = "what is a canvas noise words settle write haiku left right blank page".split()
QUESTIONS = ["What is a canvas?", "How is this text written?", "Write a haiku."]
COMMAND = [sys.executable, "-c", "from dgemma.cli import main; main()", "serve", "--port", "0"]
CHAT = {"messages": [{"role": "user", "content": "What is a canvas?"}], "max_tokens": 4}
FAULTS: dict[str, tuple[bytes, tuple[int, ...]]] = {  # a body and the statuses that are right
    "cut short": (b'{"messages": [', (400,)),
    "key twice": (b'{"max_tokens": 1, "max_tokens": 2}', (400,)),
    "unknown field": (json.dumps({**CHAT, "no_such_field": 1}).encode(), (400, 422)),
    "wrong type": (json.dumps({**CHAT, "messages": 7}).encode(), (400, 422)),
    "too long": (
        json.dumps({**CHAT, "messages": [{"role": "user", "content": "x " * 300_000}]}).encode(),
        (400, 413),
    ),
    "costly": (
        json.dumps({**CHAT, "dgemma": {"regex": "(?s:.*a.{400}b.*)"}}).encode(),
        (200, 400, 408, 503, 504),
    ),
    "half a header": (b"", (0,)),
    "no http": (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", (0, 400)),
}
JSON_HEAD = "POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """A request, and what its client does: stay, cancel after its first text, or hang up."""

    number: int  # which of the distinct requests
    body: dict[str, Any]
    fate: str = "stay"  # or one of FAULTS


@dataclass(frozen=True, slots=True, kw_only=True)
class Got:
    """Answer to one client."""

    ask: Ask
    status: int
    text: str
    tokens: int
    seconds: float


@dataclass(slots=True)
class Tally:
    """Outcome of a load."""

    gots: list[Got] = field(default_factory=list)
    seconds: float = 0.0
    wrong: list[str] = field(default_factory=list)

    def add(self, gots: Sequence[Got], seconds: float, expected: Sequence[str]) -> None:
        self.gots += gots
        self.seconds += seconds
        for got in gots:
            if got.ask.fate in FAULTS and got.status not in FAULTS[got.ask.fate][1]:
                self.wrong.append(f"{got.ask.fate}: {got.status} {got.text!r:.80}")
            if got.ask.fate == "stay" and (got.status, got.text) != (200, expected[got.ask.number]):
                self.wrong.append(f"request {got.ask.number}: {got.status} {got.text!r:.80}")

    @property
    def stayed(self) -> list[Got]:
        return [got for got in self.gots if got.ask.fate == "stay"]

    def facts(self) -> dict[str, float]:
        waits = sorted(got.seconds for got in self.stayed)
        parts = {f"p{p}": waits[min(len(waits) - 1, len(waits) * p // 100)] for p in (50, 95, 99)}
        tokens = sum(got.tokens for got in self.stayed)
        rates = {
            "requests_s": len(self.stayed) / self.seconds,
            "tokens_s": tokens / self.seconds,
        }
        return {key: round(value, 4) for key, value in {**rates, **parts}.items()}


def distinct(count: int, mode: str, rng: random.Random) -> list[dict[str, Any]]:
    """Bodies of different lengths, heats and forms of reply."""
    bodies, chosen = [], mode
    for number in range(count):
        mode = ("diffusion", "ar")[number % 2] if chosen == "mixed" else chosen
        known = rng.random() < 0.5  # to a tiny model, which settles on it; nano settles anyway
        words = " ".join(rng.choice(WORDS) for _ in range(0 if known else rng.randint(1, 12)))
        content = f"{words} {rng.choice(QUESTIONS)}".strip()
        body: dict[str, Any] = {
            "messages": [{"role": "user", "content": content}],
            "seed": number,
            "max_tokens": rng.choice([4, 16, 48, 96]),
            "stream": rng.random() < 0.5,
            "dgemma": {"mode": mode},
        }
        if mode == "diffusion":
            body["dgemma"] |= {"max_denoising_steps": rng.choice([6, 12, 24]), "retries": 0}
        if rng.random() < 0.5:
            body["temperature"] = 0.8
        bodies.append(body)
    return bodies


def load_of(
    bodies: Sequence[dict[str, Any]], count: int, rng: random.Random, faults: bool = False
) -> list[Ask]:
    """Requests in a random order: one in eight is cancelled, one in sixteen hung up on."""
    asks = []
    for _ in range(count):
        number, draw = rng.randrange(len(bodies)), rng.random()
        if faults and rng.random() < 0.25:
            asks.append(Ask(number=number, body={"stream": False}, fate=rng.choice([*FAULTS])))
            continue
        fate = "hang up" if draw < 1 / 16 else "cancel" if draw < 3 / 16 else "stay"
        body = {**bodies[number], "stream": True} if fate == "cancel" else bodies[number]
        asks.append(Ask(number=number, body=body, fate=fate))
    return asks


async def post(port: int, ask: Ask) -> Got:
    """Ask on a connection of its own, and read the answer, or leave."""
    begun = time.perf_counter()
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 20)
    data = FAULTS[ask.fate][0] if ask.fate in FAULTS else json.dumps(ask.body).encode()
    head = f"{JSON_HEAD}Content-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
    writer.write(
        data if ask.fate == "no http" else head.encode()[: 60 if not data else None] + data
    )
    await writer.drain()
    raw = b""
    if ask.fate in ("hang up", "half a header"):
        await asyncio.sleep(0.01)
        writer.transport.abort()
        return Got(ask=ask, status=0, text="", tokens=0, seconds=0.0)
    try:
        while piece := await reader.read(1 << 16):
            raw += piece
            if ask.fate == "cancel" and b'"content":"' in raw.partition(b'"content":""')[2]:
                break
    finally:
        writer.transport.abort()
    status, text, tokens = read_reply(raw, is_stream=ask.body["stream"])
    seconds = time.perf_counter() - begun
    return Got(ask=ask, status=status, text=text, tokens=tokens, seconds=seconds)


def read_reply(raw: bytes, *, is_stream: bool) -> tuple[int, str, int]:
    """Status, text and number of tokens of a reply as it came over the line."""
    head, _, body = raw.partition(b"\r\n\r\n")
    status = int(head.split()[1]) if head else 0
    if b"chunked" in head.lower():
        body = b"".join(re.split(rb"(?:\A|\r\n)[0-9a-f]+\r\n", body))
    if status != 200:
        return status, body.decode(errors="replace"), 0
    if not is_stream:
        reply = json.loads(body)
        text = reply["choices"][0]["message"]["content"] or ""
        return status, text, reply["usage"]["completion_tokens"]
    events = [line[6:] for line in body.decode(errors="replace").split("\n\n") if line]
    chunks = [json.loads(event) for event in events if event.startswith("{") and event[-1] == "}"]
    choices = [chunk["choices"][0] for chunk in chunks if "choices" in chunk]
    text = "".join(choice["delta"].get("content") or "" for choice in choices)
    if "[DONE]" not in body.decode(errors="replace"):
        return 0, text, 0  # cut off, or an error on the way
    took = choices[-1]["dgemma"]
    return status, text, round(took["tokens_per_step"] * took["steps"])


async def run_load(port: int, asks: Sequence[Ask], clients: int) -> tuple[list[Got], float]:
    """Let so many clients work off a list; returns what they got and how long it took."""
    waiting, gots = list(reversed(asks)), []

    async def client() -> None:
        while waiting:
            gots.append(await post(port, waiting.pop()))

    begun = time.perf_counter()
    await asyncio.gather(*(client() for _ in range(clients)))
    return gots, time.perf_counter() - begun


@dataclass(frozen=True, slots=True)
class Served:
    """A server that runs in a process of its own."""

    process: "subprocess.Popen[str]"
    port: int

    def run(self, asks: Sequence[Ask], clients: int) -> tuple[list[Got], float]:
        return asyncio.run(run_load(self.port, asks, clients))

    @property
    def cpu(self) -> float:
        """Seconds of processor time so far: what a busy machine does not change."""
        stat = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(stat[11]) + int(stat[12])) / os.sysconf("SC_CLK_TCK")

    @property
    def mib(self) -> float:
        for line in Path(f"/proc/{self.process.pid}/status").read_text().splitlines():
            if line.startswith("VmRSS:"):
                return int(line.split()[1]) / 1024
        raise RuntimeError("this system does not tell resident memory in /proc")


@contextmanager
def serving(model: str, rows: int) -> Iterator[Served]:
    options = ["--model", model, "--device", "cpu", "--dtype", "float32"]
    options += ["--max-batch-size", str(rows)]
    environment = {**os.environ, "DGEMMA_API_KEYS": ""}
    process = subprocess.Popen(
        [*COMMAND, *options, "--max-queue", "1024"],
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
    )
    assert process.stderr is not None
    try:
        line = process.stderr.readline()
        found = re.search(r"http://127.0.0.1:(\d+)", line)
        if found is None:
            sys.exit(line + process.stderr.read())
        wait_for(int(found[1]))
        yield Served(process, int(found[1]))
        process.send_signal(signal.SIGTERM)
        if process.wait(timeout=60) != 0:
            sys.exit("the server did not end in peace")
    finally:
        process.kill()
        process.wait()


def wait_for(port: int) -> None:
    """The port is taken before the server listens on it."""
    for _ in range(600):
        try:
            socket.create_connection(("127.0.0.1", port)).close()
            return
        except ConnectionRefusedError:
            time.sleep(0.1)
    sys.exit("the server does not listen")


def alone(server: Served, bodies: Sequence[dict[str, Any]]) -> list[str]:
    """The answers to distinct requests, one at a time."""
    asks = [Ask(number=number, body=body) for number, body in enumerate(bodies)]
    gots, _ = server.run(asks, clients=1)
    failed = [got for got in gots if got.status != 200]
    if failed:
        sys.exit(f"a request fails alone: {failed[0]}")
    return [got.text for got in sorted(gots, key=lambda got: got.ask.number)]


def run_mode(mode: str, options: argparse.Namespace, clients: int) -> dict[str, Any]:
    """The load in one mode, in alternating rounds on both servers."""
    rng = random.Random(0)
    bodies = distinct(options.distinct, mode, rng)
    many, single, levels = Tally(), Tally(), []
    with ExitStack() as stack:
        together = stack.enter_context(serving(options.model, options.rows))
        one_by_one = stack.enter_context(serving(options.model, 1))
        expected = alone(together, bodies)
        if alone(one_by_one, bodies) != expected:
            sys.exit("two servers differ on the same seeds")
        rounds = min(max(options.requests // (2 * clients), ROUNDS[0]), ROUNDS[1])
        for _ in range(rounds):
            asks = load_of(bodies, options.requests // rounds, rng, options.faults)
            many.add(*together.run(asks, clients), expected)
            levels.append(round(together.mib, 1))
            if options.serial:
                single.add(*one_by_one.run(asks, clients), expected)
    growth = max(levels[rounds // 2 :]) / max(levels[: rounds // 2]) - 1
    names = ("stay", "cancel", "hang up", *(FAULTS if options.faults else ()))
    fates = {fate: sum(got.ask.fate == fate for got in many.gots) for fate in names}
    print(f"{mode}: {len(many.gots)} requests, {clients} clients, {fates}; rows {options.rows}")
    print(f"  memory {levels} MiB; second half against first {growth:+.1%}")
    facts: dict[str, Any] = {"together": many.facts(), "wrong": many.wrong + single.wrong}
    print_row(f"up to {options.rows} at once", facts["together"])
    if options.serial:
        facts["one by one"] = single.facts()
        print_row("one at a time", facts["one by one"])
        ratio = facts["together"]["tokens_s"] / facts["one by one"]["tokens_s"]
        facts["ratio"] = round(ratio, 2)
        print(f"  {ratio:.2f}x the throughput; p95 {_ratio_p95(facts):.2f}x")
    for wrong in facts["wrong"][:5]:
        print(f"  WRONG {wrong}")
    return {**facts, "fates": fates, "mib": levels, "growth": growth}


def _ratio_p95(facts: dict[str, Any]) -> float:
    return float(facts["together"]["p95"] / facts["one by one"]["p95"])


def print_row(name: str, facts: dict[str, float]) -> None:
    print(
        f"  {name:16} {facts['tokens_s']:8.1f} tokens/s {facts['requests_s']:7.2f} requests/s   "
        f"p50 {facts['p50']:6.2f} s  p95 {facts['p95']:6.2f} s  p99 {facts['p99']:6.2f} s",
        flush=True,
    )


def sweep(options: argparse.Namespace, counts: Sequence[int]) -> list[dict[str, float]]:
    """Throughput of both modes at each number of clients; a pass takes all of them."""
    rows = []
    bodies = {mode: distinct(options.distinct, mode, random.Random(0)) for mode in options.modes}
    with serving(options.model, max(counts)) as server:
        for mode in options.modes:
            alone(server, bodies[mode])  # prompts are in the cache from here on, for both modes
        for clients in counts:
            row: dict[str, float] = {"clients": clients}
            for mode in options.modes:
                wall, cpu = _speed(server, bodies[mode], clients, options.seconds)
                row |= {mode: round(wall, 1), f"{mode} cpu": round(cpu, 1)}
            rows.append(row)
            print("  ".join(f"{key} {value:8}" for key, value in row.items()), flush=True)
    return rows


def _speed(
    server: Served, bodies: Sequence[dict[str, Any]], clients: int, seconds: float
) -> tuple[float, float]:
    """Committed tokens per second, of the clock and of the server's processor time."""
    tokens, spent, number, before = 0, 0.0, 0, server.cpu
    while spent < seconds:
        size = max(clients, 8)
        numbers = [(number + i) % len(bodies) for i in range(size)]
        gots, took = server.run([Ask(number=n, body=bodies[n]) for n in numbers], clients)
        tokens, spent, number = tokens + sum(g.tokens for g in gots), spent + took, number + size
    return tokens / spent, tokens / (server.cpu - before)


def crossing(rows: Sequence[dict[str, float]]) -> str:
    """Number of clients at which AR overtakes, by processor time."""
    pairs = [(row["clients"], row.get("ar cpu", 0), row.get("diffusion cpu", 0)) for row in rows]
    over = [int(clients) for clients, ar, diffusion in pairs if ar > diffusion]
    if not over:
        return "AR does not overtake diffusion up to here"
    return f"AR gives more tokens per second of processor time from {min(over)} clients on"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", nargs="?", default="nano")
    parser.add_argument("--clients", default="64", help="a number, or several with commas")
    parser.add_argument("--requests", type=int, default=2000, help="of the load, in each mode")
    parser.add_argument("--distinct", type=int, default=32, help="different requests")
    parser.add_argument("--rows", type=int, default=8, help="requests in a pass, as dgemma serve")
    parser.add_argument("--modes", default="diffusion,ar", type=lambda text: text.split(","))
    parser.add_argument("--seconds", type=float, default=10, help="of each point of a sweep")
    parser.add_argument("--faults", action="store_true", help="a quarter of the clients misbehave")
    parser.add_argument("--no-serial", dest="serial", action="store_false")
    parser.add_argument("--no-load", dest="load", action="store_false", help="the sweep alone")
    options = parser.parse_args()
    counts = [int(part) for part in options.clients.split(",")]
    facts: dict[str, Any] = {"bench": "serve_load", "date": str(date.today())}
    if options.load:
        facts |= {mode: run_mode(mode, options, max(counts)) for mode in options.modes}
    if len(counts) > 1:
        print(f"committed tokens per second, up to {max(counts)} rows in a pass")
        facts["sweep"] = sweep(options, counts)
        print(crossing(facts["sweep"]))
    print(json.dumps(facts))
    loads = [facts[mode] for mode in options.modes if mode in facts]
    if any(load["wrong"] or load["growth"] > TOLERANCE for load in loads):
        sys.exit(1)


if __name__ == "__main__":
    main()
