"""What both command lines share: from options to a run that is ready, and what is left at its end.

dgemma train RECIPE             with a progress bar
python -m dgemma.train RECIPE   where only PyTorch is installed, and under torchrun
"""

import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from dgemma.device import choose_device, choose_dtype
from dgemma.errors import DgemmaError, UsageError
from dgemma.train.build import Job, Place, beside, build, find_beside
from dgemma.train.distributed import join
from dgemma.train.plot import HOW_TO, plot_losses
from dgemma.train.recipe import Recipe, load_recipe, reread_recipe
from dgemma.train.report import Report
from dgemma.train.state import RECIPE, forget, states
from dgemma.train.tokens import Progress

# Parts of a recipe that may change in the middle of a run.
FREE = ("name", "run", "schedule", "eval")


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """What was asked for. None: as the recipe says."""

    recipe: Path
    out: Path | None = None
    device: str = "auto"
    dtype: str = "auto"
    seconds: float | None = None
    steps: int | None = None
    changes: tuple[str, ...] = ()  # of the recipe, as key=value
    is_fresh: bool = False
    is_export: bool = False  # the weights as they are saved, without a step more
    workers: int | None = None

    def __post_init__(self) -> None:
        if self.steps is not None and self.steps < 1:
            raise UsageError(f"steps is {self.steps}; it must be 1 or more")
        if self.seconds is not None and not 0 < self.seconds < math.inf:
            raise UsageError(f"seconds is {self.seconds}; it must be above 0")
        if self.steps is not None and self.seconds is not None:
            raise UsageError(
                f"steps is {self.steps} and seconds {self.seconds}; give one of them, since a time "
                "is turned into steps"
            )
        if self.is_export and self.is_fresh:
            raise UsageError("--export and --fresh: what is forgotten cannot be written; give one")
        if self.workers is not None and self.workers < 0:
            raise UsageError(f"workers is {self.workers}; it must be 0 or more")

    def read(self) -> Recipe:
        steps = () if self.steps is None else (f"schedule.steps={self.steps}",)
        return load_recipe(self.recipe, (*self.changes, *steps))

    def directory(self, recipe: Recipe) -> Path:
        """Of the run."""
        return Path("out/train") / recipe.name if self.out is None else self.out

    def check_state(self, recipe: Recipe) -> None:
        """Refuse to write the weights of a run that has saved none."""
        if self.is_export and not states(self.directory(recipe)):
            raise UsageError(
                f"{self.directory(recipe)} holds no saved state to write the weights of; name the "
                "directory of a run that was interrupted, or train without --export"
            )

    def check_files(self, recipe: Recipe) -> None:
        """Refuse data that is not there, before anything that takes long is begun."""
        for data in recipe.data:
            path = beside(self.recipe, str(data.file or data.bank))
            if not path.is_file():
                where = "a recipe's paths are relative to it, or begin with ./"
                how = "python -m recipes.puzzle_bank makes one" if data.bank else where
                raise UsageError(f"no file {path}; {how}")

    def place_of(self, checkpoint: str) -> Path:
        """The directory of a recipe's checkpoint."""
        return find_beside(self.recipe, checkpoint)


def prepare(wanted: Wanted, progress: Progress | None = None) -> Job:
    """Build the run and take it up where its newest state stands."""
    recipe = wanted.read()
    wanted.check_state(recipe)
    group, device = join(choose_device(wanted.device))
    place = Place(
        recipe=wanted.recipe,
        out=wanted.directory(recipe),
        device=device,
        dtype=choose_dtype(wanted.dtype, device),
        group=group,
        seconds=wanted.seconds,
        workers=wanted.workers,
        progress=progress,
    )
    if group.is_first and not wanted.is_fresh:
        note_recipe(place.out, recipe)
    group.wait(device)
    job = build(recipe, place)
    if group.is_first and wanted.is_fresh:
        # Only now: what the new run is made of is there, and the old one is not lost for nothing.
        forget(place.out)
        note_recipe(place.out, recipe)
    group.wait(device)
    job.trainer.resume()
    return job


def note_recipe(directory: Path, recipe: Recipe) -> None:
    """Keep the recipe beside the run; refuse to go on with another than it was begun with."""
    path = directory / RECIPE
    if states(directory) and path.exists():
        changed = sorted(_differing(asdict(reread_recipe(path)), asdict(recipe)))
        if changed:
            raise UsageError(
                f"{directory} holds a run of another recipe ({', '.join(changed)} differ); choose "
                "another directory, or begin anew there with --fresh"
            )
    directory.mkdir(parents=True, exist_ok=True)
    path.write_text(recipe.to_json(), encoding="utf-8")


def _differing(old: dict[str, Any], new: dict[str, Any], place: str = "") -> Iterator[str]:
    for key in old.keys() | new.keys():
        a, b = old.get(key), new.get(key)
        if isinstance(a, dict) and isinstance(b, dict):
            yield from () if key in FREE and not place else _differing(a, b, f"{place}{key}.")
        elif a != b and not (key in FREE and not place):
            yield place + key


def beginning(wanted: Wanted, job: Job) -> list[str]:
    """What to say before the first step."""
    trainer, lines = job.trainer, [*job.notes]
    if wanted.is_export:
        lines.append(f"weights of step {trainer.step} of {trainer.schedule.steps}")
    elif trainer.step:
        lines.append(
            f"going on from step {trainer.step} of {trainer.schedule.steps} in {job.place.out}; "
            "--fresh begins anew"
        )
    return lines


def reports(wanted: Wanted, job: Job) -> Iterator[Report]:
    """Train, unless only what is saved was asked for."""
    if wanted.is_export:
        return
    try:
        yield from job.trainer.reports()
    except DgemmaError:
        # Of a run that went wrong the picture is wanted most.
        if job.place.group.is_first:
            plot_losses(job.place.out)
        raise


def finish(job: Job) -> list[str]:
    """Save what was trained, and say where everything is. All processes take part."""
    saved = job.save()
    if not job.place.group.is_first:
        return []
    kind = "checkpoint" if job.adapter is None else "adapter"
    plot = plot_losses(job.place.out)
    return [f"{kind}: {saved}", HOW_TO if plot is None else f"losses: {plot}"]


def line(report: Report) -> str:
    """A report for a log."""
    return (
        f"step {report.step}/{report.steps}  loss {report.total:.4f}  "
        f"denoise {report.denoise:.4f}  causal {report.causal:.4f}  "
        f"balance {report.balance:.3f}  norm {report.norm:.2f}  rate {report.rate:.3f}  "
        f"{report.rows_per_second:,.0f} rows/s  {report.seconds:.0f} s"
    )
