"""Several replicas under load: kills, updates, scaling, drains, seeds, cached turns, batch, speed.

    python bench/replicas.py CASE... [--model out/tiny] [--requests 320] [--clients 32]

Cases: kill update shrink autoscale drain (a mixed load, while that happens to `dgemma serve
--replicas 2`), replace (kills without a load), seeds, turns, batch (a file of `--lines`, `dgemma
batch` killed ten times) and throughput (2 replicas of one thread against 1, in alternating rounds;
wants two quiet cores).

The load (`_replicas_load.py`) is of eight kinds of requests. Every answer is compared with the one
that a single engine without Ray gives to the same request alone, in float32. Lost: no whole answer
came. Wrong: it differs. A silence is the longest time between two events of a stream. Prints one
table; fails if something is lost or wrong. `python -m examples.tiny_model DIRECTORY` makes a model
that answers in milliseconds.
"""

import argparse
import asyncio
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

import httpx
from _replicas_load import (
    COMMAND,
    EXACT,
    KINDS,
    NAMED,
    ROOT,
    WORDS,
    Ask,
    Got,
    Load,
    ask_of,
    replicas_command,
    scaling_command,
    serving,
    text_of,
)


@dataclass(slots=True)
class Row:
    """A row of the table."""

    case: str
    requests: int
    lost: int
    wrong: int
    result: str


@dataclass(slots=True)
class Bench:
    """State that all cases share."""

    options: argparse.Namespace
    rows: list[Row] = field(default_factory=list)
    asks: list[Ask] = field(default_factory=list)
    expected: dict[int, str] = field(default_factory=dict)

    def prepare(self) -> None:
        """Let a single engine without Ray answer every distinct request alone."""
        self.asks = [ask_of(number, self.options.tokens) for number in range(self.options.distinct)]
        with serving(
            [*COMMAND, "serve", "--port", "0", "--model", self.options.model, *EXACT, *NAMED]
        ) as one:
            load = Load(one.url)
            asyncio.run(load.run(self.asks, 1))
        failed = [got for got in load.gots if not got.is_whole]
        if failed:
            sys.exit(f"a request fails alone: {failed[0]}")
        self.expected = {got.number: got.text for got in load.gots}

    def draw(self, count: int) -> list[Ask]:
        asks = [self.asks[number % len(self.asks)] for number in range(count)]
        random.Random(count).shuffle(asks)
        return asks

    def add(self, case: str, gots: Sequence[Got], result: str) -> None:
        lost = [got for got in gots if not got.is_whole]
        wrong = [g for g in gots if g.is_whole and g.text != self.expected[g.number]]
        for got in [*lost[:3], *wrong[:3]]:
            kind = KINDS[got.number % len(KINDS)]
            print(f"  {case}: {kind} {got.number}: {got.status} {got.trouble} {got.text!r:.90}")
        self.show(Row(case, len(gots), len(lost), len(wrong), result))

    def show(self, row: Row) -> None:
        self.rows.append(row)
        print(f"  {row}", flush=True)


def silence(gots: Sequence[Got]) -> str:
    return f"longest silence {max(got.silence for got in gots):.1f} s"


def kill(bench: Bench) -> None:
    """A replica is killed every few seconds, without waiting for its replacement."""
    options, times = bench.options, list[float]()
    with serving(replicas_command(options.model, 2)) as fleet:
        load = Load(fleet.url)

        async def kills() -> None:
            while len(times) < options.kills:
                await asyncio.sleep(options.every)
                if len(load.gots) >= options.requests:
                    return
                if fleet.replicas:
                    fleet.kill()
                    times.append(time.monotonic())

        seconds = asyncio.run(load.run(bench.draw(options.requests), options.clients, kills))
        seen = sorted(load.first_seen.values())
        waits = [min((t - at for t in seen if t > at), default=0.0) for at in times]
        waits = [wait for wait in waits if wait]
        asyncio.run(fleet.has_replicas(2))
        fleet.kill()
        began = time.monotonic()
        asyncio.run(fleet.has_replicas(2))
        alone = time.monotonic() - began
        replays = fleet.metric("dgemma_replays_total")
    under = f"{median(waits):.1f} s under load" if waits else "none under load"
    result = f"{len(times)} kills in {seconds:.0f} s, {replays:.0f} replays, {silence(load.gots)}, "
    bench.add("kill -9", load.gots, f"{result}replacement {under}, {alone:.1f} s without")


def replace(bench: Bench) -> None:
    """A replica is killed while nothing is asked, again and again: the parts of a replacement."""
    rounds = list[tuple[float, float, float]]()
    with serving(replicas_command(bench.options.model, 2)) as fleet:
        for _ in range(bench.options.rounds):
            asyncio.run(fleet.has_replicas(2))
            time.sleep(3)  # the controller is between two checks, wherever
            old, began = set(fleet.replicas), uptime()
            os.kill(min(old), signal.SIGKILL)
            while not (new := set(fleet.replicas) - old):
                time.sleep(0.02)
            named, pid = uptime() - began, new.pop()
            asyncio.run(fleet.has_replicas(2))
            stat = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            user, system, started = (int(stat[n]) / os.sysconf("SC_CLK_TCK") for n in (11, 12, 19))
            rounds.append((started - began, named, uptime() - began))
            print(f"  {rounds[-1]}, {user + system:.1f} s of processor time", flush=True)
    parts = zip(("a process", "a replica", "serves"), zip(*rounds, strict=True), strict=True)
    times = (f"{name} after {min(part):.1f} to {max(part):.1f} s" for name, part in parts)
    bench.show(Row("replacement", 0, 0, 0, ", ".join(times)))


def uptime() -> float:
    return float(Path("/proc/uptime").read_text().split()[0])


def update(bench: Bench) -> None:
    """All replicas are replaced one by one, again and again while the load lasts."""
    options, rounds = bench.options, list[float]()
    with serving(replicas_command(options.model, 2)) as fleet:
        load = Load(fleet.url)

        async def updates() -> None:
            while len(load.gots) < options.requests // 2:
                old, began = set(fleet.replicas), time.monotonic()
                fleet.process.send_signal(signal.SIGHUP)
                while not old.isdisjoint(fleet.replicas) or len(fleet.replicas) < 2:
                    await asyncio.sleep(0.2)
                rounds.append(time.monotonic() - began)

        asyncio.run(load.run(bench.draw(options.requests), options.clients, updates))
    took = f"{len(rounds)} updates of 2 replicas, {median(rounds):.0f} s each"
    bench.add("rolling update", load.gots, f"{took}, {silence(load.gots)}")


def shrink(bench: Bench) -> None:
    """Two replicas become one under load."""
    options = bench.options
    with serving(scaling_command(options.model, 2, 2)) as fleet:
        load, took = Load(fleet.url), list[float]()

        async def down() -> None:
            await load.has_answers(options.requests // 4)
            began = time.monotonic()
            fleet.process.send_signal(signal.SIGUSR1)
            await fleet.has_replicas(1)
            took.append(time.monotonic() - began)

        asyncio.run(load.run(bench.draw(options.requests), options.clients, down))
    bench.add("2 replicas to 1", load.gots, f"after {took[0]:.0f} s, {silence(load.gots)}")


def autoscale(bench: Bench) -> None:
    """Load adds a replica; a lighter one removes it again."""
    options, sizes = bench.options, list[int]()
    with serving(scaling_command(options.model, 1, 2)) as fleet:
        load = Load(fleet.url)

        async def both() -> None:
            stopping = asyncio.create_task(watch())
            await load.run(bench.draw(options.requests), options.clients)
            end = time.monotonic() + 90
            while sizes[-1] != 1 and time.monotonic() < end:
                await load.run(bench.draw(4), 1)
            stopping.cancel()

        async def watch() -> None:
            while True:
                size = len(fleet.replicas)
                if not sizes or sizes[-1] != size:
                    sizes.append(size)
                await asyncio.sleep(0.2)

        asyncio.run(both())
    path = " to ".join(map(str, sizes))
    bench.add("autoscaling", load.gots, f"{path} replicas, {silence(load.gots)}")


def drain(bench: Bench) -> None:
    """SIGTERM under load: what runs is finished, the rest is refused."""
    options, at = bench.options, list[float]()
    with serving(replicas_command(options.model, 2)) as fleet:
        load = Load(fleet.url)

        async def stop() -> None:
            await load.has_answers(options.requests // 4)
            fleet.process.terminate()
            at.append(time.monotonic())

        asyncio.run(load.run(bench.draw(options.requests), options.clients, stop))
        code = fleet.process.wait(120)
    refused = [g for g in load.gots if not g.is_whole and (g.status == 503 or g.began >= at[0])]
    kept = [got for got in load.gots if got not in refused]
    running = sum(got.began < at[0] for got in kept) - options.requests // 4
    result = f"about {running} ran and were finished, {len(refused)} refused with 503, "
    bench.add("drain", kept, f"{result}exit code {code}, {silence(kept)}")


def seeds(bench: Bench) -> None:
    """The same seeds on either replica, after restarts, and replayed."""
    options, by = bench.options, defaultdict[int, set[str]](set)
    asks = [ask for ask in bench.asks if "seed" in ask.body]
    phases, gots = Counter[str](), list[Got]()
    with serving(replicas_command(options.model, 2)) as fleet:

        def run(phase: str, count: int, event: Callable[[], Awaitable[None]] | None = None) -> None:
            load, drawn = Load(fleet.url), (asks * (count // len(asks) + 1))[:count]
            random.Random(count).shuffle(drawn)
            asyncio.run(load.run(drawn, options.clients, event))
            gots.extend(load.gots)
            phases[phase] += len(load.gots)
            for got in load.gots:
                by[got.number].add(got.replica)

        async def kills() -> None:
            for _ in range(4):
                await asyncio.sleep(options.every)
                fleet.kill()

        part = options.seeds // 3 + 1
        run("two replicas", part)
        fleet.kill(2)
        run("restarted", part)
        run("while killed", part, kills)
        replays = fleet.metric("dgemma_replays_total")
    several = sum(len(replicas) > 1 for replicas in by.values())
    parts = ", ".join(f"{count} {phase}" for phase, count in phases.items())
    result = f"{parts}; {several} of {len(by)} requests on several replicas, {replays:.0f} replays"
    bench.add("same seeds", gots, result)


def turns(bench: Bench) -> None:
    """Conversations at once: cached tokens of the prompts after each first turn."""
    options, homes = bench.options, defaultdict[int, set[str]](set)
    total, cached, failed = 0, 0, 0

    async def talk(client: httpx.AsyncClient, number: int) -> None:
        nonlocal total, cached, failed
        rng = random.Random(number)
        system = f"You are {number}. " + " ".join(rng.choice(WORDS) for _ in range(120))
        messages = [{"role": "system", "content": system}]
        for turn in range(options.turns):
            messages.append({"role": "user", "content": f"Say {rng.choice(WORDS)}."})
            body = {"messages": messages, "seed": turn, "max_tokens": 8, "dgemma": {"mode": "ar"}}
            reply = await client.post("/v1/chat/completions", json=body)
            failed += reply.status_code != 200
            usage = reply.json()["usage"]
            if turn:
                total += usage["prompt_tokens"]
                cached += usage["prompt_tokens_details"]["cached_tokens"]
            homes[number].add(reply.headers["x-dgemma-replica"])
            messages.append(reply.json()["choices"][0]["message"])
            await asyncio.sleep(rng.random())  # a person reads

    async def talks(url: str) -> None:
        async with httpx.AsyncClient(base_url=url, timeout=300) as client:
            await asyncio.gather(*(talk(client, number) for number in range(options.talks)))

    with serving(replicas_command(options.model, 2)) as fleet:
        began = time.perf_counter()
        asyncio.run(talks(fleet.url))
        seconds = time.perf_counter() - began
    kept = sum(len(replicas) == 1 for replicas in homes.values())
    result = f"{cached / total:.1%} of {total} prompt tokens of later turns cached, "
    result += f"{kept} of {len(homes)} conversations on one replica, {seconds:.1f} s"
    bench.show(Row("prefix routing", options.talks * options.turns, failed, 0, result))


def batch(bench: Bench) -> None:
    """A batch file, killed ten times, against the same file in one run."""
    options, environment = bench.options, {**os.environ, "PYTHONPATH": str(ROOT)}
    environment |= {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive"}
    with tempfile.TemporaryDirectory() as folder:
        source, whole, killed = (Path(folder) / f"{name}.jsonl" for name in ("in", "one", "ten"))
        with source.open("w") as file:
            for number in range(options.lines):
                ask = ask_of(number, options.tokens)
                body = {k: v for k, v in ask.body.items() if k not in ("seed", "stream")}
                line = {"custom_id": f"line-{number}", "url": ask.path, "body": body}
                file.write(json.dumps({**line, "method": "POST"}) + "\n")
        command = [*COMMAND, "batch", str(source), "--model", options.model, *EXACT, "-o"]
        subprocess.run([*command, str(whole)], env=environment, check=True, stderr=sys.stderr)
        for number in range(10):
            goal = (number + 1) * options.lines // 11
            process = subprocess.Popen([*command, str(killed)], env=environment)
            while process.poll() is None and num_lines(killed) < goal:
                time.sleep(0.002)
            process.kill()
            process.wait()
        subprocess.run([*command, str(killed)], env=environment, check=True, stderr=sys.stderr)
        first, second = (replies(path) for path in (whole, killed))
    counts = Counter(name for name, _ in second)
    lost = sum(f"line-{number}" not in counts for number in range(options.lines))
    twice = sum(count - 1 for count in counts.values())
    texts = dict(first)
    wrong = sum(texts[name] != text for name, text in second)
    result = f"killed 10 times; {len(counts)} lines, {twice} of them twice"
    bench.show(Row("batch", options.lines, lost, wrong + twice, result))


def num_lines(path: Path) -> int:
    return path.read_bytes().count(b"\n") if path.exists() else 0


def replies(path: Path) -> list[tuple[str, str]]:
    """Return names and texts of a batch's output; ids, times and costs differ between runs."""
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    found = []
    for row in rows:
        body = row["response"]["body"]
        parts = body.get("content") if isinstance(body.get("content"), list) else None
        parts = body["output"] if parts is None and "output" in body else parts
        text = (
            text_of(body)
            if parts is None
            else json.dumps([p.get("text", p.get("content")) for p in parts])
        )
        found.append((row["custom_id"], f"{row['response']['status_code']} {text}"))
    return found


def throughput(bench: Bench) -> None:
    """Committed tokens per second of 2 replicas of one thread, 1, and an engine without Ray.

    Each server runs alone, in alternating rounds: one that is idle still takes a few percent of
    two cores.
    """
    options, speeds = bench.options, defaultdict[str, list[float]](list)
    asks, single = [], [*COMMAND, "serve", "--port", "0", "--model", options.model, *EXACT, *NAMED]
    for number in range(options.clients * 4):  # the last ones run alone: few in many
        content = f"Tell me a story about a {WORDS[number % len(WORDS)]} and {number}."
        body = {"messages": [{"role": "user", "content": content}], "seed": number}
        body |= {"max_tokens": options.tokens}
        asks.append(Ask(number=number, path="/v1/chat/completions", body=body))
    commands = {
        "one engine": [*single, "--max-queue", "1024"],
        "1 replica": replicas_command(options.model, 1),
        "2 replicas": replicas_command(options.model, 2),
    }
    failed = 0
    for name, command in list(commands.items()) * options.rounds:
        with serving(command) as fleet:
            asyncio.run(Load(fleet.url).run(asks[: options.clients], options.clients))  # warms up
            load = Load(fleet.url)
            seconds = asyncio.run(load.run(asks, options.clients))
        failed += sum(not got.is_whole for got in load.gots)
        speeds[name].append(sum(got.tokens for got in load.gots) / seconds)
    ratios = [b / a for a, b in zip(speeds["1 replica"], speeds["2 replicas"], strict=True)]
    means = ", ".join(f"{name} {median(values):.0f}" for name, values in speeds.items())
    result = f"{median(ratios):.2f}x ({min(ratios):.2f} to {max(ratios):.2f}); tokens/s: {means}"
    bench.show(
        Row(
            "throughput, 2 replicas to 1",
            options.rounds * len(asks) * len(commands),
            failed,
            0,
            f"{result}; load {os.getloadavg()[0]:.1f}",
        )
    )


CASES: dict[str, Callable[[Bench], None]] = {
    "kill": kill,
    "replace": replace,
    "update": update,
    "shrink": shrink,
    "autoscale": autoscale,
    "drain": drain,
    "seeds": seeds,
    "turns": turns,
    "batch": batch,
    "throughput": throughput,
}
COMPARED = {"kill", "update", "shrink", "autoscale", "drain", "seeds"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("cases", nargs="+", choices=CASES, metavar="CASE")
    parser.add_argument("--model", default="out/tiny", help="a folder, or nano")
    parser.add_argument("--requests", type=int, default=320, help="of a load")
    parser.add_argument("--clients", type=int, default=32)
    parser.add_argument("--distinct", type=int, default=48, help="different requests")
    parser.add_argument("--tokens", type=int, default=64, help="longest answer")
    parser.add_argument("--kills", type=int, default=12, help="most of them")
    parser.add_argument("--every", type=float, default=4.0, help="seconds between kills")
    parser.add_argument("--seeds", type=int, default=504, help="answers compared by `seeds`")
    parser.add_argument("--talks", type=int, default=16, help="conversations of `turns`")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--lines", type=int, default=1000, help="of `batch`")
    parser.add_argument("--rounds", type=int, default=5, help="of `throughput`")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # ends the servers, too
    bench = Bench(parser.parse_args())
    if COMPARED & set(bench.options.cases):
        bench.prepare()
    for case in bench.options.cases:
        CASES[case](bench)
    print(f"\n{bench.options.model}, {date_and_load()}\n")
    print("| case | requests | lost | wrong | result |\n|---|---:|---:|---:|---|")
    for row in bench.rows:
        print(f"| {row.case} | {row.requests} | {row.lost} | {row.wrong} | {row.result} |")
    if any(row.lost or row.wrong for row in bench.rows):
        sys.exit(1)


def date_and_load() -> str:
    return f"{time.strftime('%Y-%m-%d')}, {os.cpu_count()} CPUs, load {os.getloadavg()[1]:.1f}"


if __name__ == "__main__":
    main()
