"""Run tasks on a checkpoint and report their measures (`dgemma eval`).

A task is a function `(engine, data, limit, seed) -> measures`. JSON is written after every task, so
that an interrupted run keeps its results.
"""

import json
import sys
import time
import traceback
from collections.abc import Callable
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
from dgemma.eval.answers import set_batch_size
from dgemma.eval.assistant import ASSISTANT_TASKS
from dgemma.eval.data import Data, MissingData
from dgemma.eval.infill import humaneval_infill, infill
from dgemma.eval.likelihood import blimp, cross_entropy
from dgemma.eval.measure import Case, Measure, as_json, markdown
from dgemma.eval.replies import fix, json_calls, sudoku
from dgemma.eval.stories import samples, stories

EvalTask = Callable[[Engine, Data, int | None, int], list[Measure]]
TASKS: dict[str, EvalTask] = {
    "sudoku": sudoku,
    "cross_entropy": cross_entropy,
    "blimp": blimp,
    "humaneval_infill": humaneval_infill,
    "infill": infill,
    "json_calls": json_calls,
    "fix": fix,
    **ASSISTANT_TASKS,
    "stories": stories,
    "samples": samples,
}
BATCH_SIZES = {"cuda": 64, "mps": 16, "cpu": 8}


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalParams:
    """Parameters of an evaluation. None means the default of each task."""

    data: Data
    tasks: tuple[str, ...] = tuple(TASKS)
    limit: int | None = None  # cases of each set
    seed: int = 0
    batch_size: int | None = None  # requests in one pass
    out: Path | None = None  # JSON, written after every task
    markdown: Path | None = None

    def __post_init__(self) -> None:
        unknown = [name for name in self.tasks if name not in TASKS]
        if unknown or not self.tasks:
            names = ", ".join(unknown) or "nothing"
            raise UsageError(f"tasks: {names} is not known; use {', '.join(TASKS)}")
        if self.limit is not None and self.limit < 1:
            raise UsageError(f"limit is {self.limit}; it must be 1 or more")
        if self.batch_size is not None and self.batch_size < 1:
            raise UsageError(f"batch size is {self.batch_size}; it must be 1 or more")
        Noise(seed=self.seed)  # refuses what is not a seed


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalReport:
    """Measures of all tasks, with model, device and versions."""

    facts: dict[str, Any]
    measures: list[Measure]
    seconds: dict[str, float]  # by task
    failed: dict[str, str]  # tasks that failed, with the error

    @property
    def fault(self) -> str:
        """The error of the run as a whole, or nothing."""
        if self.failed:
            return f"{', '.join(self.failed)} failed"
        if all(not measure.count for measure in self.measures):
            return (
                "nothing was measured; name directories with the sets by --heldout and --data "
                "(docs/evaluation.md tells how to get them)"
            )
        return ""

    @property
    def heading(self) -> str:
        """One line with model, device and seed."""
        facts = self.facts
        limit = "" if facts["limit"] is None else f", at most {facts['limit']} cases a set"
        return (
            f"{facts['model']}, {facts['dtype']}, {facts['device']}, seed {facts['seed']}{limit}; "
            "95 % intervals in brackets"
        )

    def to_json(self) -> dict[str, Any]:
        return {
            **self.facts,
            "seconds": self.seconds,
            "failed": self.failed,
            "measures": as_json(self.measures),
        }


def parse_tasks(names: str) -> tuple[str, ...]:
    """Read a list with commas; `all` or nothing is every task."""
    chosen = tuple(name.strip() for name in names.split(",") if name.strip())
    return tuple(TASKS) if chosen in ((), ("all",)) else chosen


def evaluate(engine: Engine, model: str, params: EvalParams) -> EvalReport:
    """Run the tasks in turn; one that lacks data is skipped, one that fails stops no other."""
    set_batch_size(engine, params.batch_size or BATCH_SIZES[engine.device.type])
    report = EvalReport(facts=_facts(engine, model, params), measures=[], seconds={}, failed={})
    for name in params.tasks:
        started = time.perf_counter()
        report.measures.extend(_run(engine, name, params, report.failed))
        report.seconds[name] = round(time.perf_counter() - started, 2)
        _log(f"{name}: {report.seconds[name]:.1f} s")
        _write(report, params)
    return report


def _run(engine: Engine, name: str, params: EvalParams, failed: dict[str, str]) -> list[Measure]:
    try:
        return TASKS[name](engine, params.data, params.limit, params.seed)
    except MissingData as reason:
        return [Case(name).skipped(str(reason))]
    except Exception as error:
        # A long run keeps the other tasks' numbers; the failure is reported, and the exit code 1.
        _log(traceback.format_exc())
        failed[name] = str(error) if isinstance(error, DgemmaError) else repr(error)
        return [Case(name).nothing("failed", failed[name])]


def _log(message: str) -> None:
    if sys.stderr.isatty():
        print(message, file=sys.stderr, flush=True)


def _facts(engine: Engine, model: str, params: EvalParams) -> dict[str, Any]:
    return {
        "model": model,
        "date": str(date.today()),
        "dgemma": __version__,
        "torch": torch.__version__,
        "device": describe_device(engine.device),
        "dtype": str(engine.dtype).removeprefix("torch."),
        "seed": params.seed,
        "limit": params.limit,
        "batch_size": engine.max_batch_size,
    }


def _write(report: EvalReport, params: EvalParams) -> None:
    if params.out is not None:
        params.out.parent.mkdir(parents=True, exist_ok=True)
        text = json.dumps(report.to_json(), ensure_ascii=False, indent=1)
        params.out.write_text(text + "\n", encoding="utf-8")
    if params.markdown is not None:
        params.markdown.parent.mkdir(parents=True, exist_ok=True)
        params.markdown.write_text(markdown(report.measures), encoding="utf-8")
