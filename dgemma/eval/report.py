"""The report of a bench run: one self-contained HTML page, a Markdown summary, one JSON object.

Every cell is a measurement or says that there is none.
"""

import json
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from html import escape
from importlib.resources import files
from statistics import median
from typing import Any

import numpy as np

from dgemma.engine.auto import BreakEven
from dgemma.eval.bench import BenchRun
from dgemma.eval.break_even import LENGTHS
from dgemma.eval.charts import PALETTE, Dots, Point, convergence_map, distributions, pareto, seconds
from dgemma.eval.decision import (
    NOT_MEASURED,
    AreaComparison,
    advise,
    decision_rule,
    fit_matrix,
    noise_of,
    preset_findings,
    warnings_of,
)
from dgemma.eval.measure import Estimate, wilson
from dgemma.eval.numbers import Cell, cells
from dgemma.eval.workload import AREAS

WINNERS = {
    "diffusion": "diffusion",
    "ar": "AR",
    "either": "no clear difference",
    "neither": "neither was accepted",
    "too few": "too few requests",
    NOT_MEASURED: NOT_MEASURED,
}
HEADINGS = {
    "arm": "",
    "to an accepted answer": "seconds of all attempts by accepted answers, 95 % interval",
    "p50": "seconds end to end, median of attempts",
    "p95": "seconds end to end",
    "usable": "seconds to the first promised text, median",
    "accepted": "share of attempts, 95 % interval",
    "retries": "attempts after the first, per request",
    "longest gap": "seconds without a visible change, median",
    "burst": "most characters that change at once, median",
    "taken back": "share of shown words that were replaced later",
    "tokens/s": "committed, recounted from the text",
    "tokens/pass": "of all passes after the prompt's",
    "steps/block": "",
    "distinct-2": "share of distinct word pairs",
    "RAM": "peak of the process, GiB",
    "VRAM": "peak reserved, GiB",
    "energy": "joules per attempt",
}
MAX_MAPS = 6


def report_json(run: BenchRun) -> dict[str, Any]:
    """Return everything that the report says, for programs; infinite seconds are null."""
    matrix = fit_matrix(run)
    report = {
        "facts": run.facts,
        "noise": noise_of(run),
        "advice": advise(run),
        "fit_matrix": [asdict(row) for row in matrix],
        "decision_rule": decision_rule(matrix),
        "presets": preset_findings(run),
        "cells": [asdict(cell) for cell in cells(run)],
        "warnings": warnings_of(run),
    }
    finite: dict[str, Any] = _finite(report)
    return finite


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _finite(inner) for key, inner in value.items()}
    return [_finite(inner) for inner in value] if isinstance(value, list | tuple) else value


# --- tables


def facts_line(run: BenchRun) -> str:
    facts, noise = run.facts, noise_of(run)
    spread = NOT_MEASURED if noise is None else f"p95 {noise:.2f} times the median"
    return (
        f"{facts['model']} in {facts['dtype']} on {facts['device']}, {facts['date']}, dgemma "
        f"{facts['dgemma']}, seed {facts['seed']}, {facts['rounds']} rounds, at most "
        f"{facts['attempts']} attempts; noise of the machine: {spread}"
    )


def matrix_rows(rows: Sequence[AreaComparison]) -> list[list[str]]:
    """Return the fit matrix as text, a row for every area."""
    return [
        [
            AREAS[row.area],
            WINNERS[row.winner],
            _side(row.diffusion_seconds, row.diffusion_accepted),
            _side(row.ar_seconds, row.ar_accepted),
            NOT_MEASURED if row.ratio is None else f"{row.ratio:.2f}",
            NOT_MEASURED if row.probability is None else f"{row.probability:.0%}",
            str(row.num_requests) if row.num_requests else NOT_MEASURED,
        ]
        for row in rows
    ]


MATRIX_HEADINGS = (
    "area",
    "faster to an accepted answer",
    "diffusion",
    "AR",
    "AR / diffusion",
    "diffusion faster",
    "requests",
)


def _side(value: float | None, accepted: float | None) -> str:
    if value is None or accepted is None:
        return NOT_MEASURED
    return f"{seconds(value)}, {accepted:.0%} accepted"


def number_row(cell: Cell) -> list[str]:
    """Return the numbers of a cell as text, in the order of HEADINGS."""
    if cell.refused:
        return [cell.arm, f"not possible: {cell.refused}", *[""] * (len(HEADINGS) - 2)]
    return [
        cell.arm,
        _estimate(cell.seconds_to_accepted),
        _estimate(cell.seconds_p50),
        _text(cell.seconds_p95, seconds),
        _text(cell.usable_p50, seconds),
        _share(cell.accepted),
        f"{cell.retries_per_request:.2f}",
        _text(cell.gap_p50, seconds),
        _text(cell.burst_p50, "{:.0f}".format),
        _text(cell.taken_back, "{:.0%}".format),
        _text(cell.tokens_per_second, "{:.1f}".format),
        _text(cell.tokens_per_pass, "{:.2f}".format),
        _text(cell.steps_per_block, "{:.1f}".format),
        _text(cell.distinct_2, "{:.2f}".format),
        _text(cell.ram_bytes, _gib),
        _text(cell.vram_bytes, _gib),
        _text(cell.joules, "{:.1f}".format),
    ]


def _gib(num_bytes: float) -> str:
    return f"{num_bytes / 2**30:.2f}"


def _text(value: Any, write: Any) -> str:
    return "–" if value is None else str(write(value))


def _estimate(value: Estimate | None) -> str:
    if value is None:
        return "–"
    if math.isinf(value.value):
        return "never"
    return f"{seconds(value.value)} [{seconds(value.low)}, {seconds(value.high)}]"


def _share(value: Estimate | None) -> str:
    return "–" if value is None else f"{value.value:.0%} [{value.low:.0%}, {value.high:.0%}]"


# --- Markdown


def markdown_report(run: BenchRun) -> str:
    """Return the summary: advice, fit matrix, numbers, warnings."""
    parts = ["# dgemma bench", facts_line(run) + ".", " ".join(advise(run))]
    parts += ["## Fit matrix", _markdown_table(MATRIX_HEADINGS, matrix_rows(fit_matrix(run)))]
    if rows := break_even_rows(run):
        parts += ["## Break-even", _markdown_table(BREAK_EVEN_HEADINGS, rows)]
    parts.append("## Numbers")
    measured = cells(run)
    for name in run.facts["workloads"]:
        rows = [number_row(cell) for cell in measured if cell.workload == name]
        parts.append(f"### {run.facts['titles'][name]} (`{name}`)")
        parts.append(_markdown_table(tuple(HEADINGS), rows) if rows else f"{NOT_MEASURED}.")
    if findings := preset_findings(run):
        parts += ["## Presets", "\n".join(f"- {finding}" for finding in findings)]
    warnings = warnings_of(run)
    if warnings:
        parts += ["## Warnings", "\n".join(f"- {warning}" for warning in warnings)]
    return "\n\n".join(parts) + "\n"


def _markdown_table(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [headings, ["---"] * len(headings), *rows]
    return "\n".join(
        "| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in line) + " |"
        for line in lines
    )


# --- HTML


def html_report(run: BenchRun) -> str:
    """Return the whole page; it loads nothing."""
    style = (files("dgemma.eval") / "report.css").read_text(encoding="utf-8")
    matrix, measured = fit_matrix(run), cells(run)
    sentences = "".join(f"<p>{escape(sentence)}</p>" for sentence in advise(run))
    body = [
        f'<header><h1>Is block diffusion worth it here?</h1><div class="lead">{sentences}</div>'
        f'<p class="facts">{escape(facts_line(run))}</p></header>',
        _warnings(warnings_of(run)),
        _section("Fit matrix", _matrix(matrix), MATRIX_NOTE),
        _section("Acceptance against time", _pareto(run, measured), PARETO_NOTE),
        _section("Acceptance against steps", _steps(run, measured), STEPS_NOTE),
        _section("Break-even", _break_even(run), BREAK_EVEN_NOTE),
        _section("Every attempt", _distributions(run), "A dot is an attempt, a bar the median."),
        _section("When each position converged", _convergence(run), CONVERGENCE_NOTE),
        _section("Failure map", _failures(run, measured), FAILURE_NOTE),
        _section("All numbers", _numbers(run, measured), ""),
        _section("Decision rule", _rule(matrix), "The same in report.json, for programs."),
    ]
    return (
        '<!doctype html><html lang="en"><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<title>dgemma bench: {escape(str(run.facts['model']))}</title><style>{style}</style>"
        f"<main>{''.join(body)}</main></html>\n"
    )


MATRIX_NOTE = (
    "Seconds to an accepted answer: the seconds of all attempts, failed ones too, by the number of "
    "accepted answers. The last columns: how many times faster diffusion is, and in how many of "
    "1,000 bootstrap resamples it is the faster one. Of several arms of a mode, the best is shown."
)
PARETO_NOTE = (
    "A point is an arm over all workloads that every arm was run on: its acceptance with a 95 % "
    "interval, and the mean over workloads of its median seconds. Arms on the line are beaten by "
    "no other in both."
)
STEPS_NOTE = (
    "The same against steps per block, for arms with canvases. What is left of a preset and no "
    "lower would be a better one: --sweep steps=8,16,32 adds such arms."
)
BREAK_EVEN_NOTE = (
    "Seconds of a reply by its length, from the passes that mode auto has timed on this machine; "
    "diffusion is taken to need as many steps as a story's canvases."
)
CONVERGENCE_NOTE = (
    "The first canvas of one answer: a square is a position in reading order, its colour the last "
    "step that changed what would be written there."
)
FAILURE_NOTE = "Share of accepted attempts, and the check that refused most of the others."


def _section(title: str, body: str, note: str) -> str:
    if not body:
        return ""
    shown = f'<p class="note">{escape(note)}</p>' if note else ""
    return f"<section><h2>{escape(title)}</h2>{shown}{body}</section>"


def _warnings(found: Sequence[str]) -> str:
    if not found:
        return ""
    items = "".join(f"<li>{escape(text)}</li>" for text in found)
    return f'<section class="warn"><h2>Before you believe this</h2><ul>{items}</ul></section>'


def _table(headings: Sequence[str], rows: Iterable[str], titles: Sequence[str] = ()) -> str:
    names = "".join(
        f'<th title="{escape(title)}">{escape(name)}</th>'
        for name, title in zip(headings, titles or headings, strict=True)
    )
    body = "".join(rows)
    return f'<div class="wide"><table><thead><tr>{names}</tr></thead>{body}</table></div>'


def _row(values: Sequence[str], css: str = "") -> str:
    first, *rest = (escape(value) for value in values)
    cells_ = "".join(f"<td>{value}</td>" for value in rest)
    return f'<tr class="{css}"><th scope="row">{first}</th>{cells_}</tr>'


def _matrix(rows: Sequence[AreaComparison]) -> str:
    shown = (
        _row(values, f"win-{row.winner.replace(' ', '-')}")
        for row, values in zip(rows, matrix_rows(rows), strict=True)
    )
    return _table(MATRIX_HEADINGS, shown)


def _colour(run: BenchRun, arm: str) -> int:
    number: int = run.facts["arms"].index(arm)
    return number % PALETTE


def _pareto(run: BenchRun, measured: Sequence[Cell]) -> str:
    def median_seconds(cell: Cell) -> float | None:
        return cell.seconds_p50.value if cell.seconds_p50 else None

    return pareto_of(run, measured, median_seconds, seconds)


def _steps(run: BenchRun, measured: Sequence[Cell]) -> str:
    """Draw acceptance against passes for arms with canvases: the sampler lab."""
    sentences = "".join(f"<p>{escape(sentence)}</p>" for sentence in preset_findings(run))
    with_canvases = [cell for cell in measured if cell.steps_per_block is not None]
    if len({cell.arm for cell in with_canvases}) < 2:
        return ""
    drawn = pareto_of(run, with_canvases, lambda cell: cell.steps_per_block, "{:g}".format)
    return drawn + sentences


def pareto_of(
    run: BenchRun,
    measured: Sequence[Cell],
    cost_of: Callable[[Cell], float | None],
    write: Callable[[float], str],
) -> str:
    """Draw a point for each arm, over the workloads that all of them were run on."""
    by_arm = {
        arm: {c.workload: c for c in measured if c.arm == arm and c.num_attempts and cost_of(c)}
        for arm in run.facts["arms"]
    }
    by_arm = {arm: found for arm, found in by_arm.items() if found}
    shared = set.intersection(*map(set, by_arm.values())) if by_arm else set()
    points = []
    for arm, found in by_arm.items():
        chosen = [found[workload] for workload in sorted(shared)]
        if not chosen:
            continue
        num = sum(cell.num_attempts for cell in chosen)
        hits = round(sum(c.accepted.value * c.num_attempts for c in chosen if c.accepted))
        x = sum(cost_of(cell) or 0.0 for cell in chosen) / len(chosen)
        points.append(Point(arm, x, hits / num, *wilson(hits, num), _colour(run, arm)))
    return pareto(points, write) if points else ""


def break_even_rows(run: BenchRun) -> list[list[str]]:
    """Return seconds of both modes and auto by length; empty if they were not timed."""
    if not run.facts.get("break_even"):
        return []
    costs = BreakEven.from_json(run.facts["break_even"])
    plan, rows = costs.plan(LENGTHS[-1]), []
    for length in LENGTHS:
        num_N = np.array([float(length)])
        columns = costs.diffusion(num_N), costs.ar(num_N), costs.auto(num_N, plan.num_first)
        rows.append([str(length), *(seconds(float(column[0])) for column in columns)])
    return rows


BREAK_EVEN_HEADINGS = ("tokens", "diffusion", "AR", "auto, under a large limit")


def _break_even(run: BenchRun) -> str:
    rows = break_even_rows(run)
    if not rows:
        return ""
    sentence = BreakEven.from_json(run.facts["break_even"]).describe()
    table = _table(BREAK_EVEN_HEADINGS, [_row(row) for row in rows])
    return f"<p>{escape(sentence)}.</p>{table}"


def _distributions(run: BenchRun) -> str:
    parts = []
    for name in run.facts["workloads"]:
        rows = []
        for arm in run.facts["arms"]:
            found = [a for a in run.attempts if (a.workload, a.arm) == (name, arm)]
            times = [a.seconds for a in found if not (a.refused or a.error)]
            if times:
                rows.append(Dots(arm, times, _colour(run, arm)))
        if rows:
            parts.append(f"<h3>{escape(run.facts['titles'][name])}</h3>{distributions(rows)}")
    return "".join(parts)


def _convergence(run: BenchRun) -> str:
    """Draw the attempt of each workload whose number of steps is the median."""
    parts: list[str] = []
    for name in run.facts["workloads"]:
        found = [a for a in run.attempts if a.workload == name and a.converged_at]
        if not found or len(parts) >= MAX_MAPS:
            continue
        middle = median(max(a.converged_at) for a in found)
        attempt = min(found, key=lambda a: abs(max(a.converged_at) - middle))
        title = f"{run.facts['titles'][name]}: {attempt.arm}, seed {attempt.seed}"
        parts.append(f"<h3>{escape(title)}</h3>{convergence_map(attempt.converged_at)}")
    return "".join(parts)


def _failures(run: BenchRun, measured: Sequence[Cell]) -> str:
    arms, by_key = run.facts["arms"], {(c.workload, c.arm): c for c in measured}
    rows = []
    for name in run.facts["workloads"]:
        shown = "".join(_failure_cell(by_key.get((name, arm))) for arm in arms)
        title = escape(run.facts["titles"][name])
        rows.append(f'<tr><th scope="row">{title}</th>{shown}</tr>')
    return _table(["workload", *arms], rows)


def _failure_cell(cell: Cell | None) -> str:
    if cell is None:
        return f'<td class="none">{NOT_MEASURED}</td>'
    if cell.refused or cell.accepted is None:
        return f'<td class="none" title="{escape(cell.refused)}">not possible</td>'
    worst = max(cell.reasons, key=lambda name: cell.reasons[name], default="")
    share = cell.accepted.value
    detail = escape("; ".join([*cell.failures, *cell.flags]))
    reason = f"<small>{escape(worst)}</small>" if worst else ""
    return f'<td class="share" style="--s:{share:.3f}" title="{detail}">{share:.0%}{reason}</td>'


def _numbers(run: BenchRun, measured: Sequence[Cell]) -> str:
    parts = []
    for name in run.facts["workloads"]:
        rows = [_row(number_row(cell)) for cell in measured if cell.workload == name]
        title = escape(run.facts["titles"][name])
        table = _table(tuple(HEADINGS), rows, tuple(HEADINGS.values())) if rows else ""
        parts.append(f"<h3>{title}</h3>{table or f'<p>{NOT_MEASURED}</p>'}")
    return "".join(parts)


def _rule(matrix: Sequence[AreaComparison]) -> str:
    text = json.dumps(_finite(decision_rule(matrix)), indent=1, ensure_ascii=False)
    return f"<details><summary>as JSON</summary><pre>{escape(text)}</pre></details>"
