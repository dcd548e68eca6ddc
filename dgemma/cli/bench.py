"""`dgemma bench`: diffusion beside AR and other arms on the same workloads."""

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dgemma.cli.app import AsJson, app, load_engine, with_options
from dgemma.errors import UsageError
from dgemma.options import option
from dgemma.weights.hub import ModelOptions

if TYPE_CHECKING:
    from dgemma.engine import Engine
    from dgemma.eval.arms import ArmSpec
    from dgemma.eval.bench import BenchParams, BenchRun

QUICK_SECONDS = 70.0  # for requests, so that the whole run fits into two minutes
DEFAULT_ARMS = ("diffusion", "ar")

bench_app = typer.Typer(invoke_without_command=True, no_args_is_help=False)
app.add_typer(bench_app, name="bench")


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchOptions:
    """Options of `dgemma bench`."""

    workloads: str = option("all", "Names, TOML files or directories with commas between; all.")
    arms: list[str] | None = option(
        None,
        "An arm, may be repeated: diffusion, ar, hybrid, auto, with settings as in "
        "diffusion:steps=16,bound=0.5, ar:model=DIR, or endpoint:url=http://HOST/v1.",
        "--arm",
    )
    sweep: list[str] | None = option(
        None,
        "Values of a key of diffusion, such as steps=8,16,32; may be repeated: each combination is "
        "an arm.",
    )
    rounds: int = option(5, "Requests per case and arm.")
    attempts: int = option(3, "Attempts per request, until one is accepted.")
    seed: int = option(0, "Seed of the first round.")
    seconds: float | None = option(None, "Start no request after this many seconds.")
    quick: bool = option(False, "Seven workloads in under two minutes with nano.")
    out: Path | None = option(
        None, "Directory for the report and the raw runs; a started run continues."
    )
    is_advice: bool = option(False, "Print only three sentences with their numbers.", "--advise")

    def _arms(self) -> list[str]:
        """Return the arms as given, and those of a sweep."""
        from dgemma.eval.arms import swept_arms

        given = self.arms or ([] if self.sweep else list(DEFAULT_ARMS))
        return list(dict.fromkeys([*given, *swept_arms(self.sweep or [])]))

    def params(self) -> "BenchParams":
        """Read the arms and the workloads."""
        from dgemma.eval.arms import parse_arm
        from dgemma.eval.bench import BenchParams
        from dgemma.eval.workload import find_workloads

        given = "" if self.workloads == "all" else self.workloads
        names = [name.strip() for name in given.split(",") if name.strip()]
        return BenchParams(
            workloads=tuple(find_workloads(names, quick=self.quick)),
            arms=_ordered([parse_arm(arm) for arm in self._arms()]),
            rounds=self.rounds,
            attempts=1 if self.quick else self.attempts,
            seed=self.seed,
            seconds=self.seconds or (QUICK_SECONDS if self.quick else None),
            warm_up=not self.quick,
            out=self.out,
        )


@bench_app.callback()
@with_options
def bench(
    context: typer.Context, model: ModelOptions, options: BenchOptions, as_json: AsJson = False
) -> None:
    """Answer if block diffusion is worth it here: seconds to an accepted answer, by workload.

    Every workload has an executable acceptance check; every arm gets the same requests. Code
    that a model writes is run in a process with limits, which is not a security boundary.
    docs/bench.md tells what is measured and how to add a workload.
    """
    if context.invoked_subcommand is not None:
        return
    run = _run(options.params(), model)
    _print(run, options.out, is_advice=options.is_advice, as_json=as_json)


def _ordered(arms: "Sequence[ArmSpec]") -> "tuple[ArmSpec, ...]":
    """Group arms by their weights, in order of first appearance."""
    order = {key: n for n, key in reversed(list(enumerate(arm.weights for arm in arms)))}
    return tuple(sorted(arms, key=lambda arm: (arm.is_endpoint, order[arm.weights])))


def _run(params: "BenchParams", options: ModelOptions) -> "BenchRun":
    from dgemma.device import choose_device, choose_dtype
    from dgemma.eval.arms import MODEL_KEYS
    from dgemma.eval.bench import EngineSource, run_bench
    from dgemma.eval.machine import Machine

    def load(spec: "ArmSpec") -> "Engine":
        given = {name: spec.settings[name] for name in MODEL_KEYS if name in spec.settings}
        adapter = None if "model" in given else options.adapter
        return load_engine(replace(options, adapter=adapter, **given))

    chosen = choose_device(options.device)
    name = str(choose_dtype(options.dtype, chosen)).removeprefix("torch.")
    machine = Machine(chosen, name)
    try:
        return run_bench(EngineSource(load), options.model, machine, params)
    finally:
        machine.close()


def _print(run: "BenchRun", out: Path | None, *, is_advice: bool, as_json: bool) -> None:
    """Print the report, and write it to the files asked for."""
    from dgemma.eval.decision import advise, fit_matrix, warnings_of
    from dgemma.eval.report import MATRIX_HEADINGS, facts_line, matrix_rows, report_json

    if out is not None:
        _write(run, out)
    if as_json:
        print(json.dumps(report_json(run), ensure_ascii=False))
        return
    if not is_advice:
        rows = [list(MATRIX_HEADINGS), *matrix_rows(fit_matrix(run))]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        print(facts_line(run), end="\n\n")
        for row in rows:
            cells = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
            print("  ".join(cells).rstrip())
        print()
        for warning in warnings_of(run):
            print(f"warning: {warning}")
        print()
    for sentence in advise(run):
        print(sentence)
    if out is not None:
        print(f"\nreport: {out / 'report.html'}", file=sys.stderr)


def _write(run: "BenchRun", out: Path) -> None:
    from dgemma.eval.report import html_report, markdown_report, report_json

    out.mkdir(parents=True, exist_ok=True)
    (out / "report.html").write_text(html_report(run), encoding="utf-8")
    (out / "report.md").write_text(markdown_report(run), encoding="utf-8")
    text = json.dumps(report_json(run), ensure_ascii=False, indent=1)
    (out / "report.json").write_text(text + "\n", encoding="utf-8")


@bench_app.command()
def report(directory: Annotated[Path, typer.Argument(help="Directory of an earlier run.")]) -> None:
    """Write the report of a run again, from its raw lines."""
    from dgemma.eval.bench import read_run

    _print(read_run(directory), directory, is_advice=False, as_json=False)


@bench_app.command("break-even")
@with_options
def break_even(
    options: ModelOptions,
    rounds: Annotated[int, typer.Option(min=1, help="Replies of each length and mode.")] = 3,
    again: Annotated[
        bool, typer.Option("--again", help="Measure what mode auto knows anew.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Print the seconds of diffusion, AR and auto by length, and what mode auto knows of them."""
    from dgemma.eval.break_even import HEADING, break_even_json, summary, text_row, time_lengths

    engine = load_engine(options)
    costs = engine.break_even
    if costs is None or again:
        costs = engine.measure_break_even()
    if as_json:
        print(json.dumps(break_even_json(costs, list(time_lengths(engine, rounds)))))
        return
    print(f"{costs.describe()}\n{HEADING}", flush=True)
    times = []
    for row in time_lengths(engine, rounds):
        times.append(row)
        print(text_row(row), flush=True)
    found = summary(times)
    print(
        f"{found['within_goal']} of {found['measured']} within 1.2 times the better mode; worst "
        f"{found['worst']:.2f} at {found['worst_at']}"
    )


@bench_app.command()
def compare(
    before: Annotated[Path, typer.Argument(help="Directory of a run.")],
    after: Annotated[Path, typer.Argument(help="Directory of a later one.")],
    as_json: AsJson = False,
) -> None:
    """Compare two runs: seconds to an accepted answer, for all that both have."""
    from dgemma.eval.bench import read_run
    from dgemma.eval.charts import seconds
    from dgemma.eval.decision import compare_runs

    changes = compare_runs(read_run(before), read_run(after))
    if not changes:
        raise UsageError(f"{before} and {after} have no workload and arm in common")
    if as_json:
        rows = [
            {
                "workload": change.workload,
                "arm": change.arm,
                "ratio": change.ratio,
                "probability": change.probability,
            }
            for change in changes
        ]
        print(json.dumps(rows, ensure_ascii=False))
        return
    for change in changes:
        ratio = "–" if change.ratio is None else f"{change.ratio:.2f}"
        print(
            f"{change.workload:18}  {change.arm:24}  {seconds(change.before):>8} -> "
            f"{seconds(change.after):>8}  x{ratio}, faster with {change.probability:.0%}"
        )


@bench_app.command()
def rate(
    directory: Annotated[Path, typer.Argument(help="Directory of a run.")],
    ratings: Annotated[
        Path | None, typer.Option(help="Count what the page saved, instead of writing it.")
    ] = None,
) -> None:
    """Write a blind A/B page for the run's answers, or count its ratings."""
    from dgemma.eval.bench import read_run
    from dgemma.eval.rating import rating_page, read_ratings

    run = read_run(directory)
    if ratings is None:
        page = directory / "rate.html"
        page.write_text(rating_page(run), encoding="utf-8")
        print(f"Open {page}, rate, save ratings.json, and give it back by --ratings.")
        return
    for found in read_ratings(run, ratings):
        low, high = found.interval
        print(
            f"{found.arm} was preferred to {found.other} in {found.wins} of "
            f"{found.wins + found.losses} pairs (95 %: {low:.0%} to {high:.0%}), {found.ties} ties"
        )
