"""The course of a run, and what it changed, as pictures, where matplotlib is installed."""

import json
from collections.abc import Mapping
from pathlib import Path

from dgemma.train.report import Metrics

HOW_TO = "install matplotlib for a plot of the losses: pip install 'dgemma[train]'"
LINES = {"denoise": "canvases", "causal": "next token"}


def plot_losses(directory: Path) -> Path | None:
    """Draw the losses of a run's metrics to `loss.svg` beside them; None without matplotlib."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return None
    lines = Metrics(directory).read()
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.subplots()
    steps = [line["step"] for line in lines]
    for name, label in LINES.items():
        axes.plot(steps, [line[name] for line in lines], label=label)
    axes.set(xlabel="step", ylabel="cross-entropy, nats a token")
    axes.grid(alpha=0.3)
    axes.legend()
    path = directory / "loss.svg"
    figure.savefig(path)
    return path


def plot_shares(reports: Mapping[str, Path], path: Path) -> Path | None:
    """Draw the shares of several reports of `dgemma eval`, with their intervals, a row for each.

    None without matplotlib, or where no report has a share.
    """
    found = {label: _shares(report) for label, report in reports.items() if report.exists()}
    rows = list(dict.fromkeys(row for shares in found.values() for row in shares))
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return None
    if not rows:
        return None
    figure = Figure(figsize=(8, 1.5 + 0.35 * len(rows)), layout="constrained")
    axes = figure.subplots()
    for number, (label, shares) in enumerate(found.items()):
        values, lows, highs = zip(*shares.values(), strict=True) if shares else ((), (), ())
        below = [value - low for value, low in zip(values, lows, strict=True)]
        above = [high - value for value, high in zip(values, highs, strict=True)]
        places = [rows.index(row) + 0.2 * number for row in shares]
        axes.errorbar(values, places, xerr=[below, above], fmt="o", capsize=3, label=label)
    axes.set(xlabel="share of the cases, with 95 % intervals", xlim=(-0.02, 1.02))
    axes.set_yticks(range(len(rows)), rows)
    axes.invert_yaxis()
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path)
    return path


def _shares(report: Path) -> dict[str, tuple[float, float, float]]:
    """Value and interval by task, measure and mode."""
    measures = json.loads(report.read_text(encoding="utf-8"))["measures"]
    return {
        f"{one['task']}: {one['name']} {one['mode']}".rstrip(): (
            one["value"],
            one["low"],
            one["high"],
        )
        for one in measures
        if one["unit"] == "share" and one["value"] is not None
    }
