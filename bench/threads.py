"""Compare dgemma's choice of CPU threads with fixed settings, on a quiet and on a busy machine.

    python bench/threads.py [--rounds 3] [--loads 0 8] [--settings dgemma server 1-passive ...]

Each setting has a process of its own, since OpenMP reads its environment once. All stay loaded and
take turns: one round asks each for the same answers (diffusion, AR, a Sudoku) of `nano`, while
`--loads` busy loops run beside it. `dgemma` is a command: a process that is started at each load,
after the loops have run for some seconds. `server` is one that was started before any load and
computes in a thread of its own. The ratio is a setting's median to that of the best fixed one.
Exits with 1 if that of `dgemma` or `server` is above `--limit` at any load. The last line is JSON.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dgemma.engine import Engine

OURS, SERVER = "dgemma", "server"
STORY = "Write a short story about a dog."
PUZZLE = "530070000600195000098000060800060003400803001700020006060000280000419005000080079"
OPENMP = ("OMP_NUM_THREADS", "OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")
DEFAULT_SPIN = "300000"  # libgomp's own; set, so that importing dgemma leaves it
BUSY = "while True: pass"
SETTLE = 12  # seconds until a load shows in the ten-second pressure


def fixed_settings() -> dict[str, dict[str, str]]:
    """Return the environments to compare with: one thread or all, each way of waiting."""
    settings: dict[str, dict[str, str]] = {OURS: {}, SERVER: {"DGEMMA_BENCH_THREAD": "1"}}
    for count in sorted({1, os.cpu_count() or 1}):
        threads = {"OMP_NUM_THREADS": str(count)}
        settings[f"{count}-default"] = {**threads, "GOMP_SPINCOUNT": DEFAULT_SPIN}
        settings[f"{count}-short"] = {**threads, "GOMP_SPINCOUNT": "1000"}
        settings[f"{count}-passive"] = {**threads, "OMP_WAIT_POLICY": "passive"}
    return settings


def answer_requests() -> None:
    """Child: answer each line on stdin with the seconds of the work."""
    from dgemma.engine import Engine

    engine = Engine.load("nano", device="cpu")  # in the main thread, as `dgemma serve` does
    if "DGEMMA_BENCH_THREAD" not in os.environ:
        answer(engine)
        return
    thread = threading.Thread(target=answer, args=(engine,))
    thread.start()
    thread.join()


def answer(engine: "Engine") -> None:
    from dgemma.engine import SamplingParams
    from dgemma.programs.sudoku.solve import SudokuParams, solve

    for _ in iter(sys.stdin.readline, ""):
        times = {}
        for name, params in (
            ("diffusion", SamplingParams(seed=1, max_tokens=48)),
            ("ar", SamplingParams(mode="ar", max_tokens=24)),
        ):
            engine.prefixes.clear()
            begin = time.perf_counter()
            engine.generate(STORY, params)
            times[name] = time.perf_counter() - begin
        begin = time.perf_counter()
        solve(engine, [PUZZLE], SudokuParams(seed=1))
        times["sudoku"] = time.perf_counter() - begin
        print(json.dumps(times), flush=True)


class Worker:
    """A process with one setting."""

    def __init__(self, setting: dict[str, str]) -> None:
        kept = {k: v for k, v in os.environ.items() if k not in OPENMP}
        call = [sys.executable, __file__, "--child"]
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(
            call, env={**kept, **setting}, stdin=pipe, stdout=pipe, text=True
        )

    def ask(self) -> dict[str, float]:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        print("go", file=self.process.stdin, flush=True)
        line = self.process.stdout.readline()
        return dict(json.loads(line))

    def close(self) -> None:
        self.process.kill()
        self.process.wait()


@contextmanager
def load(count: int) -> Iterator[None]:
    """Keep so many processes busy."""
    busy = [subprocess.Popen([sys.executable, "-c", BUSY]) for _ in range(count)]
    try:
        yield
    finally:
        for process in busy:
            process.kill()
            process.wait()


@contextmanager
def started(setting: dict[str, str], is_wanted: bool) -> Iterator[dict[str, Worker]]:
    """Start dgemma's own process once the load can be seen."""
    if not is_wanted:
        yield {}
        return
    time.sleep(SETTLE)
    worker = Worker(setting)
    try:
        worker.ask()  # loads, and warms up
        yield {OURS: worker}
    finally:
        worker.close()


def measure(workers: dict[str, Worker], rounds: int) -> dict[str, dict[str, float]]:
    """Return the median seconds of each setting by work; the settings take turns."""
    times: dict[str, list[dict[str, float]]] = {name: [] for name in workers}
    for number in range(rounds):
        order = list(workers)
        for name in order[number % len(order) :] + order[: number % len(order)]:
            times[name].append(workers[name].ask())
    return {
        name: {work: statistics.median(r[work] for r in rows) for work in rows[0]}
        for name, rows in times.items()
    }


def report(count: int, medians: dict[str, dict[str, float]]) -> float:
    """Print a table; return the worse ratio of ours to the total of the best fixed setting."""
    totals = {name: sum(times.values()) for name, times in medians.items()}
    ours = [name for name in totals if name in (OURS, SERVER)]
    best = min((name for name in totals if name not in ours), key=totals.__getitem__)
    print(f"load {count}: seconds, and the ratio to {best}")
    for name, times in medians.items():
        parts = "  ".join(f"{work} {seconds:6.2f}" for work, seconds in times.items())
        ratio = totals[name] / totals[best]
        print(f"  {name:12} {parts}  all {totals[name]:7.2f}  {ratio:5.2f}", flush=True)
    return max((totals[name] for name in ours), default=0.0) / totals[best]


def main() -> None:
    settings = fixed_settings()
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--loads", type=int, nargs="+", default=[0, 8])
    parser.add_argument("--settings", nargs="+", default=list(settings))
    parser.add_argument("--extra", nargs="*", default=[], help="NAME=VALUE,NAME=VALUE")
    parser.add_argument("--limit", type=float, default=1.15)
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.child:
        answer_requests()
        return
    for text in given.extra:
        settings[text] = dict(pair.split("=") for pair in text.split(","))
    names = [name for name in (*given.settings, *given.extra) if name != OURS]
    workers = {name: Worker(settings[name]) for name in names}
    results: dict[str, Any] = {"bench": "threads", "cpus": os.cpu_count(), "loads": {}}
    try:
        for worker in workers.values():
            worker.ask()  # loads, and warms up
        for count in given.loads:
            begin = os.getloadavg()[0]
            with load(count), started(settings[OURS], OURS in given.settings) as ours:
                medians = measure({**ours, **workers}, given.rounds)
            ratio = report(count, medians)
            results["loads"][count] = {"medians": medians, "ratio": ratio, "load_before": begin}
    finally:
        for worker in workers.values():
            worker.close()
    print(json.dumps(results))
    worst = max(entry["ratio"] for entry in results["loads"].values())
    sys.exit(1 if worst > given.limit else 0)


if __name__ == "__main__":
    main()
