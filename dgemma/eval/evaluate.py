"""Runs tasks on a checkpoint and reports: the work of `dgemma eval`, and a module of its own.

    python -m dgemma.eval.evaluate --model DIR [--heldout DIR] [--data DIR] [--tasks a,b]
        [--limit N] [--seed N] [--rows N] [--device cuda] [--out FILE.json] [--markdown FILE.md]

The table goes to stdout, the seconds of each task and what went wrong to stderr. JSON is written
after every task, so that a run that is cut short keeps what it had.
"""

import argparse
import json
import sys
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

import torch

from dgemma import __version__
from dgemma.device import describe_device
from dgemma.diffusion.canvas import Noise
from dgemma.engine import Engine
from dgemma.errors import DgemmaError, UsageError
from dgemma.eval.answers import tune
from dgemma.eval.data import Data, MissingData
from dgemma.eval.measure import Case, Measure
from dgemma.eval.report import as_json, markdown, table
from dgemma.eval.tasks import TASKS

ROWS = {"cuda": 64, "mps": 16, "cpu": 8}


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What is evaluated. None: as each task says."""

    data: Data
    tasks: tuple[str, ...] = tuple(TASKS)
    limit: int | None = None  # cases of each set
    seed: int = 0
    rows: int | None = None  # requests in one pass
    out: Path | None = None  # JSON, written after every task
    markdown: Path | None = None
    is_loud: bool = False  # speaks on stderr even where nobody watches, as for a log

    def __post_init__(self) -> None:
        unknown = [name for name in self.tasks if name not in TASKS]
        if unknown or not self.tasks:
            given = ", ".join(unknown) or "nothing"
            raise UsageError(f"tasks: {given} is not known; use {', '.join(TASKS)}")
        if self.limit is not None and self.limit < 1:
            raise UsageError(f"limit is {self.limit}; it must be 1 or more")
        if self.rows is not None and self.rows < 1:
            raise UsageError(f"rows is {self.rows}; it must be 1 or more")
        Noise(seed=self.seed)  # refuses what is no seed


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What came of it, and under which circumstances."""

    facts: dict[str, Any]
    measures: list[Measure]
    seconds: dict[str, float]  # of each task
    failed: dict[str, str]  # tasks that went wrong, and how

    @property
    def fault(self) -> str:
        """What is wrong with it as a whole, if anything."""
        if self.failed:
            return f"{', '.join(self.failed)} failed"
        if all(not measure.count for measure in self.measures):
            return (
                "nothing was measured; name directories with the sets by --heldout and --data "
                "(docs/evaluation.md tells how to get them)"
            )
        return ""

    def to_json(self) -> dict[str, Any]:
        return {
            **self.facts,
            "seconds": self.seconds,
            "failed": self.failed,
            "measures": as_json(self.measures),
        }


def parse_tasks(names: str) -> tuple[str, ...]:
    """A list with commas; `all` or nothing is every task."""
    chosen = tuple(name.strip() for name in names.split(",") if name.strip())
    return tuple(TASKS) if chosen in ((), ("all",)) else chosen


def evaluate(engine: Engine, model: str, settings: Settings) -> Report:
    """Run the tasks in turn; one that lacks data is skipped, one that fails stops no other."""
    tune(engine, settings.rows or ROWS[engine.device.type])
    report = Report(facts=_facts(engine, model, settings), measures=[], seconds={}, failed={})
    for name in settings.tasks:
        begun = time.perf_counter()
        report.measures.extend(_run(engine, name, settings, report.failed))
        report.seconds[name] = round(time.perf_counter() - begun, 2)
        _say(f"{name}: {report.seconds[name]:.1f} s", settings)
        _write(report, settings)
    return report


def _run(engine: Engine, name: str, settings: Settings, failed: dict[str, str]) -> list[Measure]:
    try:
        return TASKS[name](engine, settings.data, settings.limit, settings.seed)
    except MissingData as reason:
        return [Case(name).skipped(str(reason))]
    except Exception as error:
        # A long run keeps the other tasks' numbers; the failure is reported, and the exit code 1.
        _say(traceback.format_exc(), settings)
        failed[name] = str(error) if isinstance(error, DgemmaError) else repr(error)
        return [Case(name).nothing("failed", failed[name])]


def _say(message: str, settings: Settings) -> None:
    if settings.is_loud or sys.stderr.isatty():
        print(message, file=sys.stderr, flush=True)


def _facts(engine: Engine, model: str, settings: Settings) -> dict[str, Any]:
    return {
        "model": model,
        "date": str(date.today()),
        "dgemma": __version__,
        "torch": torch.__version__,
        "device": describe_device(engine.device),
        "dtype": str(engine.dtype).removeprefix("torch."),
        "seed": settings.seed,
        "limit": settings.limit,
        "rows": engine.max_rows,
    }


def _write(report: Report, settings: Settings) -> None:
    if settings.out is not None:
        settings.out.parent.mkdir(parents=True, exist_ok=True)
        text = json.dumps(report.to_json(), ensure_ascii=False, indent=1)
        settings.out.write_text(text + "\n", encoding="utf-8")
    if settings.markdown is not None:
        settings.markdown.parent.mkdir(parents=True, exist_ok=True)
        settings.markdown.write_text(markdown(report.measures), encoding="utf-8")


def heading(report: Report) -> str:
    """One line that says what was measured, and where."""
    facts = report.facts
    limit = "" if facts["limit"] is None else f", at most {facts['limit']} cases a set"
    return (
        f"{facts['model']}, {facts['dtype']}, {facts['device']}, seed {facts['seed']}{limit}; "
        "95 % intervals in brackets"
    )


def _read(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default="nano")
    parser.add_argument("--adapter", type=Path)
    parser.add_argument("--heldout", type=Path)
    parser.add_argument("--data", type=Path)
    parser.add_argument("--tasks", default="all", help=", ".join(TASKS))
    parser.add_argument("--limit", type=int)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rows", type=int)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--markdown", type=Path)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="auto")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    given = _read(arguments)
    try:
        settings = Settings(
            data=Data.find(given.heldout, given.data),
            tasks=parse_tasks(given.tasks),
            limit=given.limit,
            seed=given.seed,
            rows=given.rows,
            out=given.out,
            markdown=given.markdown,
            is_loud=True,
        )
        engine = Engine.load(
            given.model, device=given.device, dtype=given.dtype, adapter=given.adapter
        )
    except DgemmaError as error:
        print(f"dgemma: {error}", file=sys.stderr)
        return 2 if isinstance(error, UsageError) else 1
    report = evaluate(engine, given.model, settings)
    print(heading(report))
    print(table(report.measures))
    if report.fault:
        print(f"dgemma: {report.fault}", file=sys.stderr)
    return 1 if report.fault else 0


if __name__ == "__main__":
    sys.exit(main())
