"""Training commands: parse options, build or resume a run, report, save.

`dgemma train RECIPE` shows a progress bar; `python -m dgemma.train RECIPE` needs no terminal
libraries and runs under torchrun.
"""

import json
import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from dgemma.device import choose_device, choose_dtype
from dgemma.errors import DgemmaError, UsageError
from dgemma.train import TrainOptions
from dgemma.train.build import (
    RunEnvironment,
    TrainingJob,
    build,
)
from dgemma.train.checkpoint import (
    RECIPE,
    Report,
    delete_run,
    heldout_summary,
    lock_run,
    plot_losses,
    saved_states,
)
from dgemma.train.distributed import init_distributed
from dgemma.train.recipe import (
    Recipe,
    find_recipe,
    load_recipe,
    recipe_checkpoint,
    recipe_path,
    reread_recipe,
)
from dgemma.weights.files import OnProgress

# Tables and keys of a recipe that may change when a run resumes.
RESUMABLE_CHANGES = ("name", "run", "schedule", "eval")


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainArgs(TrainOptions):
    """A recipe and the options of its run."""

    recipe: Path  # a TOML file, or the bare name of a built-in recipe

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
        if self.export and self.fresh:
            raise UsageError(
                "--export and --fresh: --fresh deletes the saved states that --export writes; "
                "give one of them"
            )
        if self.workers is not None and self.workers < 0:
            raise UsageError(f"workers is {self.workers}; it must be 0 or more")
        # After the numbers: a wrong option is refused even if the recipe does not exist.
        object.__setattr__(self, "recipe", find_recipe(self.recipe))

    def load_recipe(self) -> Recipe:
        given = [] if self.steps is None else [f"schedule.steps={self.steps}"]
        if self.data is not None:
            given.append(f"data.0.file={_own_path(self.data)}")
        if self.heldout is not None:
            given += ["data.0.heldout_fraction=0.0", f"data.0.heldout={_own_path(self.heldout)}"]
        recipe = load_recipe(self.recipe, (*(self.changes or ()), *given))
        if self.data is not None and len(recipe.data) > 1:
            raise UsageError(
                f"--data {self.data} for a recipe with {len(recipe.data)} [[data]]; name the one "
                f"it replaces: --set data.0.file={self.data}"
            )
        return recipe

    def directory(self, recipe: Recipe) -> Path:
        """Return the run's directory."""
        return Path("out/train") / recipe.name if self.out is None else self.out

    def check_state(self, recipe: Recipe) -> None:
        """Refuse --export for a run without a saved state."""
        if self.export and not saved_states(self.directory(recipe)):
            raise UsageError(
                f"{self.directory(recipe)} holds no saved state to write the weights of; name the "
                "directory of a run that was interrupted, or train without --export"
            )

    def check_files(self, recipe: Recipe) -> None:
        """Refuse missing data before anything slow."""
        for data in recipe.data:
            names = [str(data.file or data.bank), *([data.heldout] if data.heldout else [])]
            paths = [recipe_path(self.recipe, name) for name in names]
            for path in (path for path in paths if not path.is_file()):
                where = "a recipe's paths are relative to it, or begin with ./"
                how = "python -m recipes.nano.bank makes one" if data.bank else where
                raise UsageError(f"no file {path}; {how}")

    def checkpoint(self, name: str) -> Path:
        """Find the directory of a recipe's checkpoint."""
        return recipe_checkpoint(self.recipe, name)


def _own_path(path: Path) -> str:
    """Write a path of the working directory as a recipe's string."""
    return json.dumps(str(path) if path.is_absolute() else f"./{path}", ensure_ascii=False)


def prepare(args: TrainArgs, progress: OnProgress | None = None) -> TrainingJob:
    """Build the run and load its newest saved state."""
    recipe = args.load_recipe()
    args.check_state(recipe)
    group, device = init_distributed(choose_device(args.device))
    environment = RunEnvironment(
        recipe=args.recipe,
        out=args.directory(recipe),
        device=device,
        dtype=choose_dtype(args.dtype, device),
        group=group,
        seconds=args.seconds,
        workers=args.workers,
        progress=progress,
    )
    if group.is_main:
        lock_run(environment.out)
    if group.is_main and not args.fresh:
        record_recipe(environment.out, recipe)
    group.barrier(device)
    job = build(recipe, environment)
    if group.is_main and args.fresh:
        # Delete the old run only after the new one could be built.
        delete_run(environment.out)
        record_recipe(environment.out, recipe)
    group.barrier(device)
    job.trainer.resume()
    return job


def record_recipe(directory: Path, recipe: Recipe) -> None:
    """Write the recipe to the run's directory; refuse to resume a run of another recipe."""
    path = directory / RECIPE
    if saved_states(directory) and path.exists():
        changed = sorted(_differing_keys(asdict(reread_recipe(path)), asdict(recipe)))
        if changed:
            raise UsageError(
                f"{directory} holds a run of another recipe ({', '.join(changed)} differ); choose "
                "another directory, or start over there with --fresh"
            )
    directory.mkdir(parents=True, exist_ok=True)
    path.write_text(recipe.to_json(), encoding="utf-8")


def _differing_keys(old: dict[str, Any], new: dict[str, Any], prefix: str = "") -> Iterator[str]:
    for key in old.keys() | new.keys():
        if key in RESUMABLE_CHANGES and not prefix:
            continue
        a, b = old.get(key), new.get(key)
        if isinstance(a, dict) and isinstance(b, dict):
            yield from _differing_keys(a, b, f"{prefix}{key}.")
        elif a != b:
            yield prefix + key


def opening_messages(args: TrainArgs, job: TrainingJob) -> list[str]:
    """Return warnings about the data, and the step that the run resumes from."""
    trainer, lines = job.trainer, [*job.warnings]
    if args.export:
        lines.append(f"weights of step {trainer.step} of {trainer.schedule.steps}")
    elif trainer.step:
        lines.append(
            f"resuming from step {trainer.step} of {trainer.schedule.steps} in "
            f"{job.environment.out}; --fresh starts over"
        )
    return lines


def reports(args: TrainArgs, job: TrainingJob) -> Iterator[Report]:
    """Train, unless only an export was requested."""
    if args.export:
        return
    try:
        yield from job.trainer.reports()
    except DgemmaError:
        # Plot failed runs too.
        if job.environment.group.is_main:
            plot_losses(job.environment.out)
        raise


def finish(job: TrainingJob) -> list[str]:
    """Save the trained weights and report their path. All processes take part."""
    saved = job.save()
    if not job.environment.group.is_main:
        return []
    kind = "checkpoint" if job.adapter is None else "adapter"
    out = job.environment.out
    return [f"{kind}: {saved}", f"losses: {plot_losses(out)}", *heldout_summary(out)]


def log_line(report: Report) -> str:
    return (
        f"step {report.step}/{report.steps}  loss {report.total:.4f}  "
        f"denoise {report.denoise:.4f}  causal {report.causal:.4f}  "
        f"balance {report.balance:.3f}  grad norm {report.grad_norm:.2f}  "
        f"lr {report.lr_scale:.3f}  {report.rows_per_second:,.0f} rows/s  {report.seconds:.0f} s"
    )
