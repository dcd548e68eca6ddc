"""Charts of the bench report as inline SVG, drawn from numbers alone.

Colours come from the page's CSS variables, so that a chart follows its light or dark scheme.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape

WIDTH, ROW, LEFT, RIGHT = 760, 26, 190, 70
PALETTE = 6  # colours of arms in the page's CSS
MAP_COLUMNS = 64  # positions in a row of the map
CELL = 11


@dataclass(frozen=True, slots=True)
class Dots:
    """A row of a distribution: values, and an arm's number for its colour."""

    label: str
    values: Sequence[float]
    colour: int


@dataclass(frozen=True, slots=True)
class Point:
    """A point of a scatter plot, with an interval on the vertical axis."""

    label: str
    x: float
    y: float
    low: float
    high: float
    colour: int


def log_axis(values: Sequence[float]) -> tuple[float, float]:
    """Return the exponents of an axis that holds all positive values."""
    found = [value for value in values if value > 0 and math.isfinite(value)]
    if not found:
        return -1.0, 1.0
    low, high = math.log10(min(found)), math.log10(max(found))
    return low - 0.08, max(high, low + 0.3) + 0.08


def distributions(rows: Sequence[Dots]) -> str:
    """Draw every value of each row on one logarithmic axis, with the median as a line."""
    low, high = log_axis([value for row in rows for value in row.values])
    height = ROW * len(rows) + 34

    def x_of(value: float) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * (math.log10(value) - low) / (high - low)

    parts = [_ticks(low, high, height, x_of)]
    for number, row in enumerate(rows):
        y = ROW * number + ROW / 2 + 4
        parts.append(
            f'<text x="{LEFT - 10}" y="{y + 4:.0f}" class="end">{escape(row.label)}</text>'
        )
        values = sorted(value for value in row.values if value > 0)
        for value in values:
            parts.append(
                f'<circle cx="{x_of(value):.1f}" cy="{y:.1f}" r="4" class="a{row.colour}"/>'
            )
        if values:
            middle = values[(len(values) - 1) // 2]
            x = x_of(middle)
            parts.append(
                f'<path d="M{x:.1f} {y - 9:.1f}v18" class="l{row.colour}"/>'
                f'<text x="{WIDTH - RIGHT + 8}" y="{y + 4:.0f}">{seconds(middle)}</text>'
            )
    return _svg(height, "".join(parts), "Seconds of every attempt")


def _ticks(low: float, high: float, height: float, x_of: "object") -> str:
    parts = []
    for exponent in range(math.floor(low), math.ceil(high) + 1):
        for factor in (1, 2, 5):
            value = factor * 10.0**exponent
            if low <= math.log10(value) <= high:
                x = x_of(value)  # type: ignore[operator]
                parts.append(
                    f'<path d="M{x:.1f} 4V{height - 24:.0f}" class="grid"/>'
                    f'<text x="{x:.1f}" y="{height - 8:.0f}" class="mid">{seconds(value)}</text>'
                )
    return "".join(parts)


def pareto(points: Sequence[Point], write: Callable[[float], str]) -> str:
    """Draw acceptance against a cost; arms that no other beats in both are joined."""
    height, top = 300, 16
    low, high = log_axis([point.x for point in points])
    left, bottom = 56, 40

    def x_of(value: float) -> float:
        return left + (WIDTH - left - 150) * (math.log10(max(value, 1e-9)) - low) / (high - low)

    def y_of(share: float) -> float:
        return height - bottom - (height - bottom - top) * share

    parts = [
        f'<path d="M{left} {y_of(share):.1f}H{WIDTH - 150}" class="grid"/>'
        f'<text x="{left - 8}" y="{y_of(share) + 4:.1f}" class="end">{share:.0%}</text>'
        for share in (0, 0.25, 0.5, 0.75, 1)
    ]
    for exponent in range(math.floor(low), math.ceil(high) + 1):
        for factor in (1, 2, 5):
            value = factor * 10.0**exponent
            if low <= math.log10(value) <= high:
                parts.append(
                    f'<text x="{x_of(value):.1f}" y="{height - 14}" class="mid">'
                    f"{write(value)}</text>"
                )
    front = pareto_front(points)
    line = " ".join(f"{x_of(p.x):.1f},{y_of(p.y):.1f}" for p in front)
    parts.append(f'<polyline points="{line}" class="front"/>')
    for point in points:
        x = x_of(point.x)
        parts.append(
            f'<path d="M{x:.1f} {y_of(point.low):.1f}V{y_of(point.high):.1f}" '
            f'class="l{point.colour}"/>'
            f'<circle cx="{x:.1f}" cy="{y_of(point.y):.1f}" r="6" class="a{point.colour}"/>'
            f'<text x="{x + 10:.1f}" y="{y_of(point.y) - 8:.1f}">{escape(point.label)}</text>'
        )
    return _svg(height, "".join(parts), "Acceptance against cost")


def pareto_front(points: Sequence[Point]) -> list[Point]:
    """Return the points that no other beats in both cost and acceptance, cheapest first."""
    front: list[Point] = []
    for point in sorted(points, key=lambda p: (p.x, -p.y)):
        if not front or point.y > front[-1].y:
            front.append(point)
    return front


def convergence_map(converged_at: Sequence[int]) -> str:
    """Draw the last step that changed each position of a canvas, in reading order."""
    if not converged_at:
        return ""
    most = max(converged_at)
    rows = math.ceil(len(converged_at) / MAP_COLUMNS)
    height, parts = rows * CELL + 30, []
    for position, step in enumerate(converged_at):
        x, y = CELL * (position % MAP_COLUMNS), CELL * (position // MAP_COLUMNS)
        share = (step - 1) / max(1, most - 1)
        parts.append(
            f'<rect x="{x}" y="{y}" width="{CELL - 1}" height="{CELL - 1}" class="heat" '
            f'style="--h:{share:.3f}"><title>position {position}: step {step}</title></rect>'
        )
    for number in range(11):
        parts.append(
            f'<rect x="{60 + 14 * number}" y="{height - 16}" width="14" height="10" class="heat" '
            f'style="--h:{number / 10}"/>'
        )
    parts.append(f'<text x="0" y="{height - 7}">step 1</text>')
    parts.append(f'<text x="222" y="{height - 7}">step {most}</text>')
    return _svg(height, "".join(parts), "Last step that changed each position")


def seconds(value: float | None) -> str:
    """Write seconds with the unit a person would use."""
    if value is None:
        return "–"
    if math.isinf(value):
        return "never"
    if value < 1:
        return f"{1000 * value:.3g} ms"
    return f"{value:.3g} s" if value < 100 else f"{value:.0f} s"


def _svg(height: float, body: str, label: str) -> str:
    return (
        f'<svg viewBox="0 0 {WIDTH} {height:.0f}" role="img" aria-label="{escape(label)}">'
        f"{body}</svg>"
    )
