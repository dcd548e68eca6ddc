"""Measured values with 95 % intervals, and reports of them: a table, Markdown, JSON.

A table shows diffusion and AR in two columns of one row.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

Z = 1.959963984540054  # standard deviations that hold 95 % of a normal distribution
SHARE = "share"  # shown in per cent
SKIPPED = "skipped"
TEXT = "text"  # the unit of a sample, whose note is the text itself
HEADINGS = ("task", "measure", "diffusion", "ar", "cases", "unit", "note")


@dataclass(frozen=True, slots=True, kw_only=True)
class Measure:
    """A measured value. None: there is none, and the note says why."""

    task: str
    name: str
    mode: str = ""  # diffusion, ar, or empty if it belongs to neither
    value: float | None = None
    low: float | None = None
    high: float | None = None
    count: int = 0  # cases
    unit: str = ""
    note: str = ""


def wilson(hits: int, count: int) -> tuple[float, float]:
    """Return Wilson's interval of a proportion, which stays within 0 and 1."""
    if count == 0:
        return 0.0, 1.0
    p, z = hits / count, Z * Z / count
    middle = (p + z / 2) / (1 + z)
    half = Z * math.sqrt(p * (1 - p) / count + z / (4 * count)) / (1 + z)
    return max(0.0, middle - half), min(1.0, middle + half)


def ratio(pairs: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Return sum of numerators / sum of denominators, and its standard error.

    With denominators of 1 that is a mean; with losses and token counts, the loss per token.
    """
    total = sum(b for _, b in pairs)
    value, count = sum(a for a, _ in pairs) / total, len(pairs)
    squares = sum((a - value * b) ** 2 for a, b in pairs)
    return value, math.sqrt(squares * count / max(1, count - 1)) / total


@dataclass(frozen=True, slots=True)
class Estimate:
    """A value, its interval, and the number of cases."""

    value: float
    low: float
    high: float
    count: int

    @classmethod
    def around(cls, value: float, error: float, count: int) -> "Estimate":
        return cls(value, value - Z * error, value + Z * error, count)

    def within(self) -> "Estimate":
        """Clip the interval to 0 and 1."""
        return Estimate(self.value, max(0.0, self.low), min(1.0, self.high), self.count)

    def exp(self) -> "Estimate":
        value, low, high = map(math.exp, (self.value, self.low, self.high))
        return Estimate(value, low, high, self.count)


@dataclass(frozen=True, slots=True)
class Case:
    """Makes the measures of one task in one mode."""

    task: str
    mode: str = ""
    prefix: str = ""  # of the names

    def share(self, name: str, outcomes: Sequence[bool], note: str = "") -> Measure:
        """Measure the share of cases that are true."""
        if not outcomes:
            return self.nothing(name, note)
        value, count = sum(outcomes) / len(outcomes), len(outcomes)
        estimate = Estimate(value, *wilson(sum(outcomes), count), count)
        return self.estimate(name, estimate, SHARE, note)

    def mean(self, name: str, values: Sequence[float], unit: str, note: str = "") -> Measure:
        return self.rate(name, [(value, 1.0) for value in values], unit, note)

    def rate(
        self, name: str, pairs: Sequence[tuple[float, float]], unit: str, note: str = ""
    ) -> Measure:
        """Measure a ratio of sums, such as the loss per token; the interval is over the pairs."""
        if not any(denominator for _, denominator in pairs):
            return self.nothing(name, note)
        estimate = Estimate.around(*ratio(pairs), len(pairs))
        return self.estimate(name, estimate.within() if unit == SHARE else estimate, unit, note)

    def estimate(self, name: str, estimate: Estimate, unit: str, note: str = "") -> Measure:
        return Measure(
            task=self.task,
            name=self.prefix + name,
            mode=self.mode,
            **asdict(estimate),
            unit=unit,
            note=note,
        )

    def nothing(self, name: str, note: str) -> Measure:
        name = self.prefix + name
        return Measure(task=self.task, name=name, mode=self.mode, note=note or "no case")

    def skipped(self, reason: str) -> Measure:
        return self.nothing(SKIPPED, reason)

    def text(self, name: str, text: str) -> Measure:
        name = self.prefix + name
        return Measure(task=self.task, name=name, mode=self.mode, count=1, unit=TEXT, note=text)


# --- reports


def table(measures: Sequence[Measure]) -> str:
    """Return aligned columns, followed by the samples."""
    lines = [HEADINGS, *rows(measures)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    padded = (
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in lines
    )
    samples = (f"\n--- {m.task}: {m.name}\n{m.note}" for m in measures if m.unit == TEXT)
    return "\n".join([*padded, *samples])


def markdown(measures: Sequence[Measure]) -> str:
    """Return a Markdown table; samples are fenced blocks."""
    lines = [HEADINGS, ("---",) * len(HEADINGS), *rows(measures)]
    text = "\n".join("| " + " | ".join(_escape(cell) for cell in line) + " |" for line in lines)
    samples = (f"\n**{m.name}**\n\n{_fenced(m.note)}" for m in measures if m.unit == TEXT)
    return "\n".join([text, *samples]) + "\n"


def as_json(measures: Sequence[Measure]) -> list[dict[str, Any]]:
    return [asdict(measure) for measure in measures]


def rows(measures: Iterable[Measure]) -> list[tuple[str, ...]]:
    """Return a row for each task and name, in order, with both modes."""
    lines: dict[tuple[str, str], dict[str, Measure]] = {}
    for measure in measures:
        if measure.unit != TEXT:
            lines.setdefault((measure.task, measure.name), {})[measure.mode] = measure
    return [_row(task, name, modes) for (task, name), modes in lines.items()]


def _row(task: str, name: str, modes: dict[str, Measure]) -> tuple[str, ...]:
    # A measure of no mode is in the first column.
    cells = [modes.get("diffusion", modes.get("")), modes.get("ar")]
    counts = dict.fromkeys(str(m.count) for m in cells if m is not None and m.count)
    units = dict.fromkeys(m.unit for m in modes.values() if m.unit)
    notes = dict.fromkeys(
        f"{m.mode}: {m.note}" if len(modes) > 1 else m.note for m in modes.values() if m.note
    )
    values = ["" if m is None else format_value(m) for m in cells]
    return (task, name, *values, "/".join(counts), "/".join(units), "; ".join(notes))


def format_value(measure: Measure) -> str:
    """Return a value with its interval; shares in per cent."""
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
