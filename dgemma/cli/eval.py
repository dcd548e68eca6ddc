"""`dgemma eval`: measure a checkpoint by diffusion and by AR mode of the same weights."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from dgemma.cli.app import PRESETS, RULES, AsJson, app, load_engine, load_rule, with_options
from dgemma.errors import DgemmaError
from dgemma.options import option
from dgemma.weights.hub import ModelOptions

if TYPE_CHECKING:
    from dgemma.eval.evaluate import EvalParams


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalOptions:
    """Options of `dgemma eval`."""

    tasks: str = option("all", "Comma-separated tasks, or all.")
    heldout: Path | None = option(None, "Directory of held-out files (docs/evaluation.md).")
    data: Path | None = option(None, "Directory of public datasets (docs/evaluation.md).")
    limit: int | None = option(None, "Most cases of each set.")
    seed: int = option(0, "Same seed, same answers.")
    rule: str | None = option(None, RULES)
    preset: str | None = option(None, PRESETS)
    batch_size: int | None = option(None, "Requests in one pass.")
    out: Path | None = option(None, "Write JSON here after each task.")
    markdown: Path | None = option(None, "Write a markdown table here.")

    def params(self) -> "EvalParams":
        """Return the parameters with the data directories found."""
        from dgemma.eval.data import Data
        from dgemma.eval.evaluate import EvalParams, parse_tasks

        return EvalParams(
            data=Data.find(self.heldout, self.data),
            tasks=parse_tasks(self.tasks),
            limit=self.limit,
            seed=self.seed,
            batch_size=self.batch_size,
            out=self.out,
            markdown=self.markdown,
        )


@app.command("eval")
@with_options
def evaluate(model: ModelOptions, options: EvalOptions, as_json: AsJson = False) -> None:
    """Measure a checkpoint on held-out tasks, with 95 % intervals.

    Tasks: sudoku, cross_entropy, blimp, humaneval_infill, infill, json_calls, fix, questions,
    citations, rewrites, extraction, tools, talk, stories, samples. humaneval_infill runs the code
    that the model writes, in a process with limits, which is not a security boundary. The stories
    of samples need no files; tasks that do are skipped without them, and docs/evaluation.md tells
    how to get them.
    """
    from dgemma.eval.evaluate import evaluate as run
    from dgemma.eval.measure import table

    params = options.params()
    own_rule = load_rule(options.rule)  # before a long load
    engine = load_engine(model, options.preset, own_rule)
    report = run(engine, model.model, params)
    if as_json:
        print(json.dumps(report.to_json(), ensure_ascii=False))
    else:
        print(report.heading)
        print(table(report.measures))
    if report.fault:
        raise DgemmaError(report.fault)
