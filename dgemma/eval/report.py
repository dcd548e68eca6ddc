"""Measures as a table, as markdown, and as JSON; diffusion beside AR wherever both exist."""

from collections.abc import Iterable, Sequence
from dataclasses import asdict
from typing import Any

from dgemma.eval.measure import SHARE, TEXT, Measure

HEADINGS = ("task", "measure", "diffusion", "ar", "cases", "unit", "note")
MODES = ("diffusion", "ar")


def table(measures: Sequence[Measure]) -> str:
    """Aligned columns, and the samples behind them."""
    lines = [HEADINGS, *rows(measures)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    padded = (
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in lines
    )
    samples = (f"\n--- {m.task}: {m.name}\n{m.note}" for m in measures if m.unit == TEXT)
    return "\n".join([*padded, *samples])


def markdown(measures: Sequence[Measure]) -> str:
    """The same as a markdown table; samples as quoted blocks."""
    lines = [HEADINGS, ("---",) * len(HEADINGS), *rows(measures)]
    text = "\n".join("| " + " | ".join(_escape(cell) for cell in line) + " |" for line in lines)
    samples = (f"\n**{m.name}**\n\n{_fenced(m.note)}" for m in measures if m.unit == TEXT)
    return "\n".join([text, *samples]) + "\n"


def as_json(measures: Sequence[Measure]) -> list[dict[str, Any]]:
    return [asdict(measure) for measure in measures]


def rows(measures: Iterable[Measure]) -> list[tuple[str, ...]]:
    """One line for each task and name, in order, with both modes' values side by side."""
    lines: dict[tuple[str, str], dict[str, Measure]] = {}
    for measure in measures:
        if measure.unit != TEXT:
            lines.setdefault((measure.task, measure.name), {})[measure.mode] = measure
    return [_row(task, name, modes) for (task, name), modes in lines.items()]


def _row(task: str, name: str, modes: dict[str, Measure]) -> tuple[str, ...]:
    # What belongs to no mode stands in the first column.
    cells = [modes.get("diffusion", modes.get("")), modes.get("ar")]
    counts = dict.fromkeys(str(m.count) for m in cells if m is not None and m.count)
    units = dict.fromkeys(m.unit for m in modes.values() if m.unit)
    notes = dict.fromkeys(
        f"{m.mode}: {m.note}" if len(modes) > 1 else m.note for m in modes.values() if m.note
    )
    values = ["" if m is None else shown(m) for m in cells]
    return (task, name, *values, "/".join(counts), "/".join(units), "; ".join(notes))


def shown(measure: Measure) -> str:
    """A value with its interval; shares in per cent."""
    if measure.value is None:
        return "-"
    scale, digits, sign = (100, 1, " %") if measure.unit == SHARE else (1, 3, "")
    value = f"{scale * measure.value:.{digits}f}"
    if measure.low is None or measure.high is None:
        return value + sign
    low, high = (f"{scale * x:.{digits}f}" for x in (measure.low, measure.high))
    return f"{value}{sign} [{low}, {high}]"


def _escape(cell: str) -> str:
    return cell.replace("|", "\\|").replace("\n", " ")


def _fenced(text: str) -> str:
    fence = "```"
    while fence in text:
        fence += "`"
    return f"{fence}text\n{text}\n{fence}"
