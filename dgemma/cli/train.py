"""`dgemma train`: a recipe in, a checkpoint or an adapter out, and what it changed."""

import sys
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dgemma.cli.app import INTERRUPTED, Device, Dtype, HeldOut, Shared, app

if TYPE_CHECKING:
    from collections.abc import Iterator

    from dgemma.train.build import Job
    from dgemma.train.command import Wanted
    from dgemma.train.report import Report


@app.command()
def train(
    recipe: Annotated[Path, typer.Argument(help="A recipe (TOML), such as recipes/sft.toml.")],
    out: Annotated[
        Path | None, typer.Option(help="Directory of the run; default: out/train/NAME.")
    ] = None,
    device: Device = "auto",
    dtype: Dtype = "auto",
    seconds: Annotated[
        float | None, typer.Option(help="Fit the schedule to this time instead of steps.")
    ] = None,
    steps: Annotated[int | None, typer.Option(help="Instead of the recipe's.")] = None,
    changes: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Change the recipe: optim.adam_lr=1e-4."),
    ] = None,
    fresh: Annotated[bool, typer.Option(help="Forget the run's saved states.")] = False,
    export: Annotated[
        bool, typer.Option(help="Write the weights of the newest saved state; train no further.")
    ] = False,
    workers: Annotated[int | None, typer.Option(help="Processes that make batches.")] = None,
    tasks: Annotated[
        str | None, typer.Option("--eval", help="Tasks to run before and after; none: no tasks.")
    ] = None,
    limit: Annotated[int | None, typer.Option(help="Most cases of each set of a task.")] = None,
    heldout: HeldOut = None,
    data: Shared = None,
) -> None:
    """Train, fine-tune or adapt a model by a recipe.

    A directory with saved states is gone on with, exactly as if the run had never stopped. Ctrl-C
    saves one, and --export makes a model of it. Losses go to metrics.jsonl. Where matplotlib is
    installed, loss.svg shows them, and eval.svg what tasks found before and after.
    """
    from dgemma.cli.before_after import Trial
    from dgemma.eval.data import Data
    from dgemma.train.command import Wanted

    wanted = Wanted(
        recipe=recipe,
        out=out,
        device=device,
        dtype=dtype,
        seconds=seconds,
        steps=steps,
        changes=tuple(changes or ()),
        is_fresh=fresh,
        is_export=export,
        workers=workers,
    )
    asked = wanted.read()
    trial = Trial.plan(asked, tasks, limit, Data.find(heldout, data))
    if trial is not None:
        wanted.check_state(asked)
        wanted.check_files(asked)
        trial.before(wanted, asked)
    job, lines = _run(wanted)
    for line in lines:
        print(line)
    if trial is not None:
        trial.after(job)
        print(trial.table())
        drawn = trial.picture(job.place.out)
        if drawn is not None:
            print(f"evaluation: {drawn}")


def _run(wanted: "Wanted") -> "tuple[Job, list[str]]":
    from dgemma.train.command import beginning, finish, prepare, reports
    from dgemma.train.loop import TrainingInterrupted

    with _progress() as (tokenizing, training):
        job = prepare(wanted, tokenizing)
        for line in beginning(wanted, job):
            print(f"dgemma: {line}", file=sys.stderr)
        try:
            for report in reports(wanted, job):
                training(report)
        except TrainingInterrupted as error:
            print(f"dgemma: {error}", file=sys.stderr)
            sys.exit(INTERRUPTED)
    return job, finish(job)


@contextmanager
def _progress() -> "Iterator[tuple[Callable[[int, int], None], Callable[[Report], None]]]":
    """Bars of what is done, on stderr; nothing where nobody watches."""
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

        def tokenizing(done: int, total: int) -> None:
            bars.update(lines, completed=done, total=total, visible=done < total)

        def training(report: "Report") -> None:
            said = f"loss {report.denoise:.3f} + {report.causal:.3f}"
            bars.update(
                steps,
                completed=report.step,
                total=report.steps,
                visible=True,
                description=f"{said}  {report.rows_per_second:,.0f} rows/s",
            )

        yield tokenizing, training
