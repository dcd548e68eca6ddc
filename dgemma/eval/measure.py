"""One number of a report with its 95 % interval, and where such intervals come from."""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass

Z = 1.959963984540054  # 95 % of a normal distribution lie within so many standard deviations
SHARE = "share"  # shown in per cent
SKIPPED = "skipped"
TEXT = "text"  # the unit of a sample, whose note is the text itself


@dataclass(frozen=True, slots=True, kw_only=True)
class Measure:
    """A measured value. None: there is none, and the note says why."""

    task: str
    name: str
    mode: str = ""  # diffusion, ar, or nothing where no mode is at work
    value: float | None = None
    low: float | None = None
    high: float | None = None
    count: int = 0  # how many cases it rests on
    unit: str = ""
    note: str = ""


def wilson(hits: int, count: int) -> tuple[float, float]:
    """Wilson's interval of a proportion; it stays within 0 and 1 and is honest near them."""
    if count == 0:
        return 0.0, 1.0
    share, spread = hits / count, Z * Z / count
    middle = (share + spread / 2) / (1 + spread)
    half = Z * math.sqrt(share * (1 - share) / count + spread / (4 * count)) / (1 + spread)
    return max(0.0, middle - half), min(1.0, middle + half)


def ratio(parts: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """The sum of the firsts over the sum of the seconds, and its standard error.

    With seconds of 1 that is a mean; with losses and token counts, a mean loss a token.
    """
    over, under = sum(a for a, _ in parts), sum(b for _, b in parts)
    value, count = over / under, len(parts)
    squares = sum((a - value * b) ** 2 for a, b in parts)
    return value, math.sqrt(squares * count / max(1, count - 1)) / under


@dataclass(frozen=True, slots=True)
class Estimate:
    """A value, its interval, and how many cases they rest on."""

    value: float
    low: float
    high: float
    count: int

    @classmethod
    def around(cls, value: float, error: float, count: int) -> "Estimate":
        return cls(value, value - Z * error, value + Z * error, count)

    def within(self) -> "Estimate":
        """The interval as far as a share can lie."""
        return Estimate(self.value, max(0.0, self.low), min(1.0, self.high), self.count)

    def exp(self) -> "Estimate":
        value, low, high = map(math.exp, (self.value, self.low, self.high))
        return Estimate(value, low, high, self.count)


@dataclass(frozen=True, slots=True)
class Case:
    """What the measures of one task in one mode have in common."""

    task: str
    mode: str = ""
    prefix: str = ""  # of the names

    def share(self, name: str, outcomes: Sequence[bool], note: str = "") -> Measure:
        """The share of cases in which something holds."""
        if not outcomes:
            return self.nothing(name, note)
        value, count = sum(outcomes) / len(outcomes), len(outcomes)
        estimate = Estimate(value, *wilson(sum(outcomes), count), count)
        return self.estimate(name, estimate, SHARE, note)

    def mean(self, name: str, values: Sequence[float], unit: str, note: str = "") -> Measure:
        return self.rate(name, [(value, 1.0) for value in values], unit, note)

    def rate(
        self, name: str, parts: Sequence[tuple[float, float]], unit: str, note: str = ""
    ) -> Measure:
        """A ratio of sums, as a mean loss a token; the interval is over the parts."""
        if not any(under for _, under in parts):
            return self.nothing(name, note)
        estimate = Estimate.around(*ratio(parts), len(parts))
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
