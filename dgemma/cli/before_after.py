"""Evaluation before and after a training run, for `dgemma train`: tasks, table and plot."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from dgemma.config import WHOLE_MODES
from dgemma.weights.hub import ModelOptions

if TYPE_CHECKING:
    from dgemma.eval.data import Data
    from dgemma.eval.evaluate import EvalParams
    from dgemma.eval.measure import Measure
    from dgemma.train.build import TrainingJob
    from dgemma.train.command import TrainArgs
    from dgemma.train.recipe import Recipe

NO_TASKS = "none"
SAMPLES, NUM_SAMPLES, SAMPLE_TOKENS = "samples.json", 3, 128
BEFORE, AFTER, PLOT = "eval_before.json", "eval_after.json", "eval.svg"
HEADINGS = ("task", "measure", "diffusion before", "after", "ar before", "after")


@dataclass
class BeforeAfter:
    """Evaluates the model before and after training; `measures` fills."""

    params: "EvalParams"
    measures: "dict[str, Sequence[Measure]]" = field(default_factory=dict)

    @classmethod
    def plan(
        cls, recipe: "Recipe", tasks: str | None, limit: int | None, data: "Data"
    ) -> "BeforeAfter | None":
        """Plan the tasks of `--eval`, or else the recipe's; None if there are none."""
        names = ",".join(recipe.eval.tasks) if tasks is None else tasks
        if names in ("", NO_TASKS):
            return None
        from dgemma.eval.evaluate import EvalParams, parse_tasks

        return cls(
            EvalParams(
                data=data,
                tasks=parse_tasks(names),
                limit=recipe.eval.limit if limit is None else limit,
            )
        )

    def before(self, args: "TrainArgs", recipe: "Recipe") -> None:
        """Evaluate the checkpoint that training starts from; a new model is not evaluated."""
        name = recipe.model.checkpoint
        if name is None:
            return
        from dgemma.train.checkpoint import saved_states

        out = args.directory(recipe)
        saved = out / BEFORE
        if saved.exists() and saved_states(out) and not args.fresh:
            self.measures[BEFORE] = _read_measures(saved)  # resumed run
            return
        model = _unquantized(str(args.checkpoint(name)), args.device, args.dtype)
        self._evaluate(BEFORE, out, model)

    def after(self, job: "TrainingJob") -> None:
        """Evaluate the trained checkpoint or adapter."""
        self._evaluate(AFTER, job.environment.out, trained_model(job))

    def _evaluate(self, file: str, out: Path, model: ModelOptions) -> None:
        from dgemma.cli.app import load_engine
        from dgemma.eval.evaluate import evaluate

        engine = load_engine(model)
        report = evaluate(engine, model.model, self.params)
        self.measures[file] = report.measures
        out.mkdir(parents=True, exist_ok=True)
        text = json.dumps(report.to_json(), ensure_ascii=False, indent=1)
        (out / file).write_text(text + "\n", encoding="utf-8")

    def plot(self, out: Path) -> Path | None:
        """Plot the proportions among the measures; None without matplotlib or proportions."""
        files = {"before": BEFORE, "after": AFTER}
        reports = {label: out / file for label, file in files.items() if file in self.measures}
        return plot_proportions(reports, out / PLOT)

    def table(self) -> str:
        """Format all measures with their intervals, before and after."""
        from dgemma.eval.measure import rows

        cells: dict[tuple[str, str], dict[str, tuple[str, str]]] = {}
        for file in (BEFORE, AFTER):
            for task, name, diffusion, ar, *_ in rows(self.measures.get(file, ())):
                cells.setdefault((task, name), {})[file] = diffusion, ar
        lines = [HEADINGS]
        for (task, name), by_file in cells.items():
            (old, old_ar), (new, new_ar) = (by_file.get(f, ("", "")) for f in (BEFORE, AFTER))
            lines.append((task, name, old, new, old_ar, new_ar))
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        return "\n".join(
            "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
            for line in lines
        )


@dataclass
class Samples:
    """Replies to held-out questions before and after training, collected in `replies`."""

    job: "TrainingJob"
    replies: dict[str, list[dict[str, str]]] = field(default_factory=dict)

    def before(self) -> None:
        """Answer with the checkpoint that training starts from; a resumed run has its answers."""
        saved = self.job.environment.out / SAMPLES
        if self.job.trainer.step and saved.exists():
            self.replies = json.loads(saved.read_text(encoding="utf-8"))
        elif self.job.recipe.model.checkpoint is not None and not self.job.trainer.step:
            self._answer("before", self._base())

    def after(self) -> None:
        """Answer with the trained checkpoint or adapter."""
        self._answer("after", trained_model(self.job))

    def _base(self) -> ModelOptions:
        trained = trained_model(self.job)
        name = str(self.job.environment.checkpoint(str(self.job.recipe.model.checkpoint)))
        return _unquantized(name, trained.device, trained.dtype)

    def _answer(self, time: str, model: ModelOptions) -> None:
        prompts = self.job.heldout_prompts[:NUM_SAMPLES]
        if not prompts:
            return
        from dgemma.cli.app import load_engine
        from dgemma.engine.params import SamplingParams
        from dgemma.text.chat import Prompt

        engine = load_engine(model)
        self.replies[time] = [
            {"prompt": text}
            | {
                mode: engine.generate(
                    Prompt(text=text, ids=ids),
                    SamplingParams(mode=mode, seed=0, max_tokens=SAMPLE_TOKENS),
                ).text
                for mode in WHOLE_MODES
            }
            for ids in prompts
            for text in [engine.tokenizer.decode(ids)]
        ]
        saved = self.job.environment.out / SAMPLES
        saved.parent.mkdir(parents=True, exist_ok=True)
        text = json.dumps(self.replies, ensure_ascii=False, indent=1)
        saved.write_text(text + "\n", encoding="utf-8")

    def lines(self) -> list[str]:
        """Format the replies of each question, a line each."""
        lines = []
        for number, sample in enumerate(self.replies.get("after", ())):
            lines.append(f"held-out prompt {number + 1}: {sample['prompt']!r}")
            for mode in WHOLE_MODES:
                for time in (time for time in ("before", "after") if time in self.replies):
                    lines.append(f"  {mode}, {time}: {self.replies[time][number][mode]!r}")
        return lines


def trained_model(job: "TrainingJob") -> ModelOptions:
    """Return the saved checkpoint of a run, or its base with the adapter."""
    environment = job.environment
    out, device = environment.out, str(environment.device)
    dtype = str(environment.dtype).removeprefix("torch.")
    if job.adapter is None:
        return _unquantized(str(out / "checkpoint"), device, dtype)
    base = str(environment.checkpoint(str(job.recipe.model.checkpoint)))
    return _unquantized(base, device, dtype, out / "adapter")


def _unquantized(model: str, device: str, dtype: str, adapter: Path | None = None) -> ModelOptions:
    return ModelOptions(model=model, device=device, dtype=dtype, adapter=adapter, quant="none")


def _read_measures(path: Path) -> "list[Measure]":
    from dgemma.eval.measure import Measure

    report = json.loads(path.read_text(encoding="utf-8"))
    return [Measure(**measure) for measure in report["measures"]]


def plot_proportions(reports: Mapping[str, Path], path: Path) -> Path | None:
    """Plot the proportions of several reports with their intervals, a row for each.

    None without matplotlib, or if no report has a proportion.
    """
    by_label = {label: _proportions(file) for label, file in reports.items() if file.exists()}
    rows = list(dict.fromkeys(row for by_row in by_label.values() for row in by_row))
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return None
    if not rows:
        return None
    figure = Figure(figsize=(8, 1.5 + 0.35 * len(rows)), layout="constrained")
    axes = figure.subplots()
    for number, (label, by_row) in enumerate(by_label.items()):
        values, lows, highs = zip(*by_row.values(), strict=True) if by_row else ((), (), ())
        below = [value - low for value, low in zip(values, lows, strict=True)]
        above = [high - value for value, high in zip(values, highs, strict=True)]
        heights = [rows.index(row) + 0.2 * number for row in by_row]
        axes.errorbar(values, heights, xerr=[below, above], fmt="o", capsize=3, label=label)
    axes.set(xlabel="fraction of the cases, with 95 % intervals", xlim=(-0.02, 1.02))
    axes.set_yticks(range(len(rows)), rows)
    axes.invert_yaxis()
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path)
    return path


def _proportions(report: Path) -> dict[str, tuple[float, float, float]]:
    """Read value and interval by task, measure and mode."""
    from dgemma.eval.measure import SHARE

    return {
        f"{m.task}: {m.name} {m.mode}".rstrip(): (m.value, m.low or 0.0, m.high or 0.0)
        for m in _read_measures(report)
        if m.unit == SHARE and m.value is not None
    }
