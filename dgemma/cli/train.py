"""`dgemma train`: trains by a recipe, and evaluates before and after."""

import sys
import time
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dgemma.cli.app import app, with_options
from dgemma.errors import INTERRUPTED
from dgemma.options import option
from dgemma.train import TrainOptions

if TYPE_CHECKING:
    from collections.abc import Iterator

    from dgemma.train.build import TrainingJob
    from dgemma.train.checkpoint import Report
    from dgemma.train.command import TrainArgs

LINE_SECONDS = 60  # between lines of progress without a terminal


@dataclass(frozen=True, slots=True, kw_only=True)
class BeforeAfterOptions:
    """Evaluation before and after a run."""

    tasks: str | None = option(None, "Tasks to run before and after, or none.", "--eval")
    limit: int | None = option(None, "Maximum cases of each set of a task.")
    eval_heldout: Path | None = option(None, "Directory of held-out files (docs/evaluation.md).")
    eval_data: Path | None = option(None, "Directory of public sets (docs/evaluation.md).")


@app.command()
@with_options
def train(
    recipe: Annotated[
        Path, typer.Argument(help="A recipe: a TOML file, or one built in (sft, sudoku).")
    ],
    options: TrainOptions,
    measures: BeforeAfterOptions,
) -> None:
    """Train, fine-tune or adapt a model by a recipe.

    A run whose directory has saved states resumes exactly as if it had never stopped. Ctrl-C saves
    a state, and --export writes a model from it. Losses go to metrics.jsonl and
    loss.svg, replies to held-out questions before and after to samples.json; with matplotlib the
    tasks of --eval are plotted in eval.svg.
    """
    from dgemma.cli.before_after import BeforeAfter
    from dgemma.eval.data import Data
    from dgemma.train.command import TrainArgs

    args = TrainArgs(recipe=recipe, **asdict(options))
    loaded = args.load_recipe()
    data = Data.find(measures.eval_heldout, measures.eval_data)
    evaluation = BeforeAfter.plan(loaded, measures.tasks, measures.limit, data)
    if evaluation is not None:
        args.check_state(loaded)
        args.check_files(loaded)
        evaluation.before(args, loaded)
    job, lines = _run(args)
    for line in lines:
        print(line)
    if evaluation is not None:
        evaluation.after(job)
        print(evaluation.table())
        plot = evaluation.plot(job.environment.out)
        if plot is not None:
            print(f"evaluation: {plot}")


def _run(args: "TrainArgs") -> "tuple[TrainingJob, list[str]]":
    from dgemma.cli.before_after import Samples
    from dgemma.train.command import finish, opening_messages, prepare, reports
    from dgemma.train.loop import TrainingInterrupted

    with _progress() as (on_tokenized, on_report):
        job = prepare(args, on_tokenized)
        samples = Samples(job)
        for line in opening_messages(args, job):
            print(f"dgemma: {line}", file=sys.stderr)
        samples.before()
        try:
            for report in reports(args, job):
                on_report(report)
        except TrainingInterrupted as error:
            print(f"dgemma: {error}", file=sys.stderr)
            sys.exit(INTERRUPTED)
    lines = finish(job)
    samples.after()
    return job, [*lines, *samples.lines()]


class MinuteLines:
    """Prints a line of progress on stderr, at most one per minute."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self.clock = clock
        self.printed = self.began = clock()
        self.first_step: int | None = None

    def add(self, report: "Report") -> None:
        now = self.clock()
        if self.first_step is None:  # first step of this process, which may resume a run
            self.first_step, self.began = report.step, now
        if now - self.printed < LINE_SECONDS or report.step == report.steps:
            return
        self.printed = now
        done = report.step - self.first_step
        left = (now - self.began) / max(1, done) * (report.steps - report.step) / 60
        remaining = f"  about {left:.0f} min left" if done else ""
        print(
            f"dgemma: step {report.step} of {report.steps}  loss {report.denoise:.3f} + "
            f"{report.causal:.3f}  {report.rows_per_second:,.0f} rows/s{remaining}",
            file=sys.stderr,
            flush=True,
        )


@contextmanager
def _progress() -> "Iterator[tuple[Callable[[int, int], None], Callable[[Report], None]]]":
    """Show progress on stderr: bars on a terminal, else a line per minute."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
    from rich.progress import TimeRemainingColumn as Remaining

    columns: Any = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    console = Console(file=sys.stderr)
    with Progress(
        *columns, Remaining(), console=console, transient=True, disable=not console.is_terminal
    ) as bars:
        lines = bars.add_task("tokenizing", visible=False)
        steps = bars.add_task("training", visible=False)

        def on_tokenized(done: int, total: int) -> None:
            bars.update(lines, completed=done, total=total, visible=done < total)

        minutes = MinuteLines()

        def on_report(report: "Report") -> None:
            if not console.is_terminal:
                minutes.add(report)
            losses = f"loss {report.denoise:.3f} + {report.causal:.3f}"
            bars.update(
                steps,
                completed=report.step,
                total=report.steps,
                visible=True,
                description=f"{losses}  {report.rows_per_second:,.0f} rows/s",
            )

        yield on_tokenized, on_report
