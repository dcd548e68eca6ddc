"""Make the data, train, package and compare within a time limit, on a machine with a GPU.

    python -m recipes.nano.timed_run --data out/run14 --out DIR --seconds 580 --train 970

Needs DATA of `recipes.nano.carry`. While tasks are written on the CPU and tales are sampled on the
GPU, two steps warm the compiler's cache. `--train` is the time of the whole training, which may
take several calls: each ends after `--seconds` with a saved state that the next one continues. DIR
gets the packaged weights (those of the state, if it is not the last call), metrics and a table.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from dgemma.train.checkpoint import METRICS, load_state, saved_states
from dgemma.weights.hub import NANO_DIRECTORY
from dgemma.weights.int_layout import Bits
from dgemma.weights.load import Checkpoint, load_model
from dgemma.weights.save import save_int8
from recipes.nano.compare import side_by_side
from recipes.nano.made import MADE_ELSEWHERE
from recipes.nano.ship import MAX_FILE_BYTES, MAX_HEADER_BYTES

BITS = Bits(experts=4, rest=6)
STOP = 25.0  # seconds of another call for saving the state and packaging
START = 12.0  # seconds until a training with a warm cache begins
MIN_COMPARED = 40.0  # seconds in which a comparison is worth beginning
RETURNED = "int8*"  # of the packaged files: the others do not change
TABLE, LOG = "table.md", "log.txt"
WARM_DATA = """
[[data]]
puzzle = "sudoku"
bank = "{data}/puzzles/sudoku.npz"
[[data]]
file = "{data}/tokens/code.npz"
on_policy = false
"""


@dataclass
class Session:
    """The processes of a run and its clock."""

    options: argparse.Namespace
    began: float = field(default_factory=time.monotonic)

    @property
    def left(self) -> float:
        return float(self.options.seconds) - (time.monotonic() - self.began)

    def say(self, line: str) -> None:
        text = f"[{time.monotonic() - self.began:5.0f} s] {line}"
        print(text, flush=True)
        with (self.options.out / LOG).open("a", encoding="utf-8") as file:
            file.write(text + "\n")

    def start(self, *command: str) -> subprocess.Popen[bytes]:
        """Start a module of this tree, whose output goes to the log."""
        log = (self.options.out / LOG).open("ab")
        return subprocess.Popen([sys.executable, "-m", *command], stdout=log, stderr=log)

    def wait(self, running: Mapping[str, subprocess.Popen[bytes]], seconds: float) -> list[str]:
        """Wait for processes, at most so long; returns those that failed or are not done."""
        deadline, bad = time.monotonic() + seconds, []
        for name, process in running.items():
            try:
                code = process.wait(max(0.1, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                code = None
            self.say(f"{name}: {'not done' if code is None else f'ended with {code}'}")
            bad += [name] * (code != 0)
        return bad


def compare(session: Session, model: Path, seconds: float) -> None:
    """Compare with held-out cases, as many parts as the time allows, and write the table."""
    options, result = session.options, session.options.work / "after.json"
    process = session.start(
        *("recipes.nano.compare", "--model", str(model), "--data", str(options.data)),
        *("--out", str(result), "--seconds", str(seconds)),
        *(("--limit", str(options.limit)) if options.limit else ()),
    )
    if session.wait({"comparison": process}, seconds):
        process.kill()
    if result.is_file():
        table = side_by_side({"after": result})
        (options.out / TABLE).write_text(table, encoding="utf-8")
        print(table, flush=True)


def sample_tales(session: Session) -> None:
    """Sample tales, make tasks of them and tokenize both."""
    options, tales = session.options, session.options.work / "tales.jsonl.xz"
    steps = (
        (
            *("recipes.nano.stories15m", "--weights", f"{options.data}/shared/train"),
            *("--count", str(options.tales), "--seed", "35", "--temperature", "0.85"),
            *("--opening", "1.3", "--min-p", "0.02", "--out", str(tales)),
        ),
        ("recipes.nano.tales", str(tales), "--out", str(options.work), "--rename"),
        ("recipes.nano.timed_run", "--tokenize", str(options.work), "--data", str(options.data)),
    )
    for step in steps:
        if session.wait({step[0]: session.start(*step)}, session.left):
            raise SystemExit(f"{step[0]} failed; see {LOG}")


def tokenize_tales(work: Path, data: Path) -> None:
    from dgemma.train.tokens import tokenize_file
    from recipes.nano.data import MAX_PAIR_TOKENS

    workers = max(1, (os.cpu_count() or 2) - 3)
    for name in ("tales", "tale_tasks"):
        path = work / "raw" / f"{name}.jsonl"
        made = tokenize_file(path, NANO_DIRECTORY, max_tokens=MAX_PAIR_TOKENS, workers=workers)
        made.store.save(data / "tokens" / f"{name}.npz")
        print(f"{name}: {len(made.store.tokens_N):,} tokens", flush=True)


def make_data(session: Session) -> None:
    """Make what the folder does not hold; meanwhile compile."""
    options = session.options
    texts = ("--texts", f"{options.data}/texts.json.xz", "--out", str(options.data))
    workers = str(max(1, (os.cpu_count() or 2) // 5))
    made = {
        name: session.start("recipes.nano.made", "--only", name, *texts, "--workers", workers)
        for name in MADE_ELSEWHERE
        if not (options.data / "tokens" / f"{name}.npz").is_file()
    }
    warm = {} if options.cold else {"warm": session.start(*warm_command(options))}
    if not (options.data / "tokens" / "tales.npz").is_file():
        sample_tales(session)
    if session.wait(made, session.left):
        raise SystemExit(f"a task could not be made; see {LOG}")
    session.wait(warm, 25)
    for process in warm.values():
        process.kill()


def warm_command(options: argparse.Namespace) -> tuple[str, ...]:
    """Write a recipe of the same shapes with carried data alone, and train two steps."""
    head = options.recipe.read_text(encoding="utf-8").partition("[[data]]")[0]
    path = options.work / "warm.toml"
    # A recipe's paths are relative to it, or begin with ./.
    data = f"./{os.path.relpath(options.data)}"
    path.write_text(head + WARM_DATA.format(data=data), encoding="utf-8")
    return (
        *("dgemma.train", str(path), "--steps", "2", "--workers", "2"),
        *("--out", str(options.work / "warm")),
    )


def train(session: Session) -> bool:
    """Train for the time that is left; returns True at the end of the schedule."""
    options = session.options
    seconds = options.train or session.left - STOP - START
    budget = ["--steps", str(options.steps)] if options.steps else ["--seconds", f"{seconds:.0f}"]
    session.say(f"training with {' '.join(budget)}")
    process = session.start(
        *("dgemma.train", str(options.recipe), "--out", str(options.work / "run"), *budget),
        *(f"--set={change}" for change in options.changes),
    )
    stop = threading.Event()
    watcher = threading.Thread(target=watch, args=(session, stop), daemon=True)
    watcher.start()
    session.wait({"training": process}, session.left - STOP)
    code = process.poll()
    if code is None:
        process.terminate()  # saves its state
        session.wait({"training": process}, STOP - 5)
    stop.set()
    watcher.join(30)
    if code:
        raise SystemExit(f"training failed; see {LOG}")
    return code == 0


def watch(session: Session, stop: threading.Event) -> None:
    """Package each state that is saved, so that a run that is cut returns something."""
    seen = 0
    while not stop.wait(5):
        states = saved_states(session.options.work / "run")
        if states and states[-1][0] > seen:
            seen = states[-1][0]
            try:
                package(session.options, session.options.work / "interim")
                session.say(f"packaged step {seen}")
            except Exception as error:
                session.say(f"step {seen} was not packaged: {error!r}")


def newest_weights(work: Path) -> dict[str, Tensor]:
    _, path = saved_states(work / "run")[-1]
    weights: dict[str, Tensor] = load_state(path)["optimizer"]["weights"]
    return weights


def package(options: argparse.Namespace, into: Path) -> None:
    """Write the newest weights, and copy them to what is returned."""
    base = load_model(NANO_DIRECTORY, dtype=torch.float32)
    base.model.load_state_dict(newest_weights(options.work), strict=False)
    save(base, into)
    for path in into.glob(RETURNED):
        shutil.copyfile(path, options.out / path.name)


def save(checkpoint: Checkpoint, into: Path) -> None:
    save_int8(
        checkpoint,
        into,
        bits=BITS,
        tokenizer_from=NANO_DIRECTORY,
        max_shard_bytes=MAX_FILE_BYTES - MAX_HEADER_BYTES,
        overwrite=True,
    )


def finish(session: Session, *, is_whole: bool) -> None:
    """Package, and compare at the end of the schedule."""
    options = session.options
    package(options, options.work / "after")
    session.say("packaged")
    metrics = options.work / "run" / METRICS
    if metrics.is_file():
        shutil.copyfile(metrics, options.out / METRICS)
    if is_whole and session.left > MIN_COMPARED:
        compare(session, options.work / "after", session.left - 5)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument(
        "--data", type=Path, default=Path("out/run14"), help="of recipes.nano.carry"
    )
    parser.add_argument("--recipe", type=Path, default=Path(__file__).parent / "run14.toml")
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT", "out/returned")))
    parser.add_argument("--work", type=Path, default=Path("out/timed_run"), help="stays there")
    parser.add_argument("--seconds", type=float, default=570, help="of this call")
    parser.add_argument(
        "--train", type=float, help="seconds of all training; default: what is left of this call"
    )
    parser.add_argument("--tales", type=int, default=73_728, help="tales to sample")
    parser.add_argument("--steps", type=int, help="of training, instead of the time that is left")
    parser.add_argument("--set", action="append", default=[], dest="changes", help="of the recipe")
    parser.add_argument("--limit", type=int, help="most cases of each part of the comparison")
    parser.add_argument("--cold", action="store_true", help="do not warm the compiler's cache")
    parser.add_argument("--tokenize", type=Path, help=argparse.SUPPRESS)  # a step of its own
    options = parser.parse_args(arguments)
    if options.tokenize is not None:
        tokenize_tales(options.tokenize, options.data)
        return
    for folder in (options.out, options.work):
        folder.mkdir(parents=True, exist_ok=True)
    session = Session(options)
    if not saved_states(options.work / "run"):
        make_data(session)
        session.say("the data is made")
    is_whole = train(session)
    finish(session, is_whole=is_whole)
    session.say("done" if is_whole else "to be continued")


if __name__ == "__main__":
    main()
