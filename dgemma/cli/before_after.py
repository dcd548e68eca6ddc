"""Tasks of `dgemma eval` before a training run and after it, side by side."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dgemma.eval.data import Data
    from dgemma.eval.evaluate import Settings
    from dgemma.eval.measure import Measure
    from dgemma.train.build import Job
    from dgemma.train.command import Wanted
    from dgemma.train.recipe import Recipe

NO_TASKS = "none"
BEFORE, AFTER, PICTURE = "eval_before.json", "eval_after.json", "eval.svg"
HEADINGS = ("task", "measure", "diffusion before", "after", "ar before", "after")


@dataclass
class Trial:
    """What is measured. `found` fills with what came of it, before and after."""

    settings: "Settings"
    found: "dict[str, Sequence[Measure]]" = field(default_factory=dict)

    @classmethod
    def plan(
        cls, recipe: "Recipe", tasks: str | None, limit: int | None, data: "Data"
    ) -> "Trial | None":
        """The tasks asked for, or else the recipe's; None if there are none. Checked at once."""
        names = ",".join(recipe.eval.tasks) if tasks is None else tasks
        if names in ("", NO_TASKS):
            return None
        from dgemma.eval.evaluate import Settings, parse_tasks

        return cls(
            Settings(
                data=data,
                tasks=parse_tasks(names),
                limit=recipe.eval.limit if limit is None else limit,
            )
        )

    def before(self, wanted: "Wanted", recipe: "Recipe") -> None:
        """Measure what training begins with; a new model can nothing, and is not asked."""
        name = recipe.model.checkpoint
        if name is None:
            return
        from dgemma.train.state import states

        out = wanted.directory(recipe)
        kept = out / BEFORE
        if kept.exists() and states(out) and not wanted.is_fresh:
            self.found[BEFORE] = _read(kept)  # the run was begun before
            return
        model = str(wanted.place_of(name))
        self._measure(BEFORE, out, (model, wanted.device, wanted.dtype, None))

    def after(self, job: "Job") -> None:
        """Measure what was saved."""
        out, dtype = job.place.out, str(job.place.dtype).removeprefix("torch.")
        device = str(job.place.device)
        if job.adapter is None:
            given: tuple[Any, ...] = (str(out / "checkpoint"), device, dtype, None)
        else:
            base = str(job.place.checkpoint(str(job.recipe.model.checkpoint)))
            given = (base, device, dtype, out / "adapter")
        self._measure(AFTER, out, given)

    def _measure(self, name: str, out: Path, given: tuple[Any, ...]) -> None:
        from dgemma.cli.loading import load_engine
        from dgemma.eval.evaluate import evaluate

        model, device, dtype, adapter = given
        engine = load_engine(model, device, dtype, adapter, "none")  # nothing rounded, either time
        report = evaluate(engine, model, self.settings)
        self.found[name] = report.measures
        out.mkdir(parents=True, exist_ok=True)
        text = json.dumps(report.to_json(), ensure_ascii=False, indent=1)
        (out / name).write_text(text + "\n", encoding="utf-8")

    def picture(self, out: Path) -> Path | None:
        """The shares among the measures, before and after; None where none can be drawn."""
        from dgemma.train.plot import plot_shares

        names = {"before": BEFORE, "after": AFTER}
        reports = {label: out / name for label, name in names.items() if name in self.found}
        return plot_shares(reports, out / PICTURE)

    def table(self) -> str:
        """All measures with their intervals, before and after."""
        from dgemma.eval.report import rows

        cells: dict[tuple[str, str], dict[str, tuple[str, str]]] = {}
        for when in (BEFORE, AFTER):
            for task, name, diffusion, ar, *_ in rows(self.found.get(when, ())):
                cells.setdefault((task, name), {})[when] = diffusion, ar
        lines = [HEADINGS]
        for (task, name), by_time in cells.items():
            (old, old_ar), (new, new_ar) = (by_time.get(w, ("", "")) for w in (BEFORE, AFTER))
            lines.append((task, name, old, new, old_ar, new_ar))
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        return "\n".join(
            "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
            for line in lines
        )


def _read(path: Path) -> "list[Measure]":
    from dgemma.eval.measure import Measure

    raw = json.loads(path.read_text(encoding="utf-8"))
    return [Measure(**one) for one in raw["measures"]]
