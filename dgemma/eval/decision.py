"""Decisions from the numbers: fit matrix, decision rule, advice, and warnings about the run."""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import mean, median
from typing import Any, Literal

from dgemma.eval.bench import BenchRun
from dgemma.eval.measure import wilson
from dgemma.eval.numbers import (
    MIN_ATTEMPTS,
    Cell,
    Requests,
    cells,
    group_requests,
    quantile,
    resample,
    seconds_to_accepted,
)
from dgemma.eval.workload import AREAS

CLEAR = 0.9  # share of resamples in which one arm is faster, for a verdict
MIN_GAIN = 1.1  # ratio of seconds below which two arms are alike
NOISE_LIMIT = 1.25  # p95 / p50 of the probe
MIN_REQUESTS = 5  # below it, intervals are wide
MIN_VERDICT = 3  # requests of each side, for a verdict
NOT_MEASURED = "not measured"
DIFFUSION, AR = "diffusion", "ar"

Winner = Literal["diffusion", "ar", "either", "neither", "too few", "not measured"]


@dataclass(frozen=True, slots=True, kw_only=True)
class AreaComparison:
    """Diffusion beside AR in one area: seconds to an accepted answer, workloads weighted alike."""

    area: str
    diffusion_arm: str
    ar_arm: str
    diffusion_seconds: float | None
    ar_seconds: float | None
    diffusion_accepted: float | None
    ar_accepted: float | None
    probability: float | None  # that diffusion is faster
    winner: Winner
    num_requests: int

    @property
    def ratio(self) -> float | None:
        """Seconds of AR by those of diffusion; None where one of them has no accepted answer."""
        a, b = self.ar_seconds, self.diffusion_seconds
        if a is None or b is None or not (math.isfinite(a) and math.isfinite(b) and b):
            return None
        return a / b


def fit_matrix(run: BenchRun) -> list[AreaComparison]:
    """Compare the best diffusion arm with the best AR arm, in every area there is."""
    groups = group_requests([a for a in run.attempts if not a.refused])
    areas: dict[str, str] = run.facts["areas"]
    rows = []
    for area in AREAS:
        found = [r for r in groups if areas[r[0].workload] == area]
        sides = {mode: _best_arm(found, run.facts["arms"], mode) for mode in (DIFFUSION, AR)}
        rows.append(_compare(area, found, sides))
    return rows


def mode_of(arm: str) -> str:
    """Return the mode of an arm; endpoints and hybrid are on no side."""
    return arm.partition(":")[0]


def _best_arm(groups: Requests, arms: Sequence[str], mode: str) -> str:
    """Return the arm of a mode with the fewest seconds to an accepted answer."""
    found = [arm for arm in arms if mode_of(arm) == mode and _of(groups, arm)]
    best = min(
        found, key=lambda arm: (seconds_to_accepted(_of(groups, arm)), found.index(arm)), default=""
    )
    return best


def _of(groups: Requests, arm: str) -> Requests:
    return [request for request in groups if request[0].arm == arm]


def _compare(area: str, groups: Requests, sides: dict[str, str]) -> AreaComparison:
    ours, theirs = (_of(groups, sides[mode]) for mode in (DIFFUSION, AR))
    # Cases that only one side was run on say nothing about the other.
    cases = _cases(ours) & _cases(theirs)
    ours, theirs = ([r for r in side if r[0].key[:2] in cases] for side in (ours, theirs))
    probability: float | None = None
    winner: Winner = "not measured"
    if ours and theirs:
        probability = _probability(ours, theirs)
        is_enough = min(len(ours), len(theirs)) >= MIN_VERDICT
        winner = _winner(ours, theirs, probability) if is_enough else "too few"
    return AreaComparison(
        area=area,
        diffusion_arm=sides[DIFFUSION],
        ar_arm=sides[AR],
        diffusion_seconds=seconds_to_accepted(ours) if ours else None,
        ar_seconds=seconds_to_accepted(theirs) if theirs else None,
        diffusion_accepted=_accepted(ours),
        ar_accepted=_accepted(theirs),
        probability=probability,
        winner=winner,
        num_requests=min(len(ours), len(theirs)),
    )


def _cases(groups: Requests) -> set[tuple[Any, ...]]:
    return {request[0].key[:2] for request in groups}


def _accepted(groups: Requests) -> float | None:
    attempts = [a for request in groups for a in request]
    return sum(a.is_accepted for a in attempts) / len(attempts) if attempts else None


def _probability(ours: Requests, theirs: Requests) -> float:
    """Share of independent resamples in which the first side is faster; ties count half."""
    first, second = resample(ours, seconds_to_accepted, 1), resample(theirs, seconds_to_accepted, 2)
    pairs = zip(first, second, strict=True)
    points = [1.0 if a < b else 0.5 if a == b else 0.0 for a, b in pairs]
    return sum(points) / len(points)


def _winner(ours: Requests, theirs: Requests, probability: float) -> Winner:
    a, b = seconds_to_accepted(ours), seconds_to_accepted(theirs)
    if math.isinf(a) and math.isinf(b):
        return "neither"
    if probability >= CLEAR and b >= MIN_GAIN * a:
        return "diffusion"
    if probability <= 1 - CLEAR and a >= MIN_GAIN * b:
        return "ar"
    return "either"


def decision_rule(rows: Sequence[AreaComparison]) -> dict[str, Any]:
    """Return the rule as data: an area, the mode to use, and the evidence."""
    return {
        "measure": "seconds to an accepted answer",
        "rules": [
            {"area": row.area, "use": row.winner, "evidence": asdict(row)}
            for row in rows
            if row.winner in ("diffusion", "ar", "neither")
        ],
        "otherwise": "measure it: dgemma bench --workloads FILE",
    }


# --- advice


def advise(run: BenchRun) -> list[str]:
    """Answer in three sentences whether diffusion is worth it here, with the numbers."""
    rows = [row for row in fit_matrix(run) if row.winner != NOT_MEASURED]
    wins = {name: [r for r in rows if r.winner == name] for name in ("diffusion", "ar", "neither")}
    where = f"On {run.facts['device']} with {run.facts['model']}"
    if not rows:
        return [
            f"{where}, no area was measured with both modes.",
            "Without a diffusion arm and an AR arm on the same workloads there is nothing to say.",
            "Run `dgemma bench --arms diffusion,ar`.",
        ]
    first = (
        f"{where}, diffusion is worth it for {_listed(wins['diffusion'], faster=True)}."
        if wins["diffusion"]
        else f"{where}, diffusion is faster to an accepted answer in none of {len(rows)} areas."
    )
    second = (
        f"Use AR for {_listed(wins['ar'], faster=False)}."
        if wins["ar"]
        else "AR is clearly faster to an accepted answer in no area that was measured."
    )
    open_rows = [r for r in rows if r.winner == "either"]
    few = ", ".join(AREAS[row.area] for row in rows if row.winner == "too few")
    failed = ", ".join(AREAS[row.area] for row in wins["neither"])
    parts = [f"neither mode gave an accepted answer for {failed}"] if failed else []
    if open_rows:
        names = ", ".join(AREAS[row.area] for row in open_rows)
        parts.append(f"the difference is within the noise for {names}: more --rounds would tell")
    if few:
        parts.append(f"fewer than {MIN_VERDICT} requests decide nothing for {few}")
    if not parts:
        parts = [f"this rests on {sum(r.num_requests for r in rows)} requests per mode"]
    third = "; ".join(parts)
    return [first, second, f"{third[0].upper()}{third[1:]}."]


def _listed(rows: Sequence[AreaComparison], *, faster: bool) -> str:
    parts = []
    for row in rows:
        ours, theirs = row.diffusion_seconds, row.ar_seconds
        numbers = f"{_shown(ours)} against {_shown(theirs)}"
        if not faster:
            numbers = f"{_shown(theirs)} against {_shown(ours)}"
        parts.append(f"{AREAS[row.area]} ({numbers} to an accepted answer)")
    return ", ".join(parts)


def _shown(seconds: float | None) -> str:
    if seconds is None:
        return NOT_MEASURED
    return f"{seconds:.2g} s" if math.isfinite(seconds) else "never"


# --- presets

REFERENCE, MIN_FEWER = "preset=quality", 1.5


def preset_findings(run: BenchRun) -> list[str]:
    """Say of every preset if it takes fewer steps than quality at the same acceptance."""
    measured = [cell for cell in cells(run) if cell.steps_per_block]
    by_arm = {arm: {c.workload: c for c in measured if c.arm == arm} for arm in run.facts["arms"]}
    reference = next((found for arm, found in by_arm.items() if REFERENCE in arm), {})
    return [
        _finding(arm, [(reference[name], found[name]) for name in reference.keys() & found.keys()])
        for arm, found in by_arm.items()
        if "preset=" in arm and REFERENCE not in arm and reference.keys() & found.keys()
    ]


def _finding(arm: str, pairs: Sequence[tuple[Cell, Cell]]) -> str:
    """Compare two arms over the same workloads, each weighted alike."""
    before, after = (
        mean(c.steps_per_block or 0.0 for c in side) for side in zip(*pairs, strict=True)
    )
    counts = [[_hits(cell) for cell in side] for side in zip(*pairs, strict=True)]
    (hits, num), (their_hits, their_num) = (
        [sum(x) for x in zip(*side, strict=True)] for side in counts
    )
    old, new = hits / num, their_hits / their_num
    fewer = before / after
    is_alike = wilson(their_hits, their_num)[1] >= old
    verdict = "within the noise" if is_alike else "worse, beyond the noise"
    enough = "" if fewer >= MIN_FEWER else f", less than the {MIN_FEWER} wanted"
    return (
        f"{arm} takes {fewer:.2f} times fewer steps per block than quality{enough}; it accepts "
        f"{new:.0%} of {their_num} attempts, quality {old:.0%} of {num}: {verdict}."
    )


def _hits(cell: Cell) -> tuple[int, int]:
    share = 0.0 if cell.accepted is None else cell.accepted.value
    return round(share * cell.num_attempts), cell.num_attempts


# --- warnings


def noise_of(run: BenchRun) -> float | None:
    """Return p95 by p50 of a fixed amount of work that was timed before every attempt."""
    probes = [a.probe_seconds for a in run.attempts if a.probe_seconds > 0]
    high = quantile(probes, 0.95)
    return high / median(probes) if high is not None else None


def warnings_of(run: BenchRun) -> list[str]:
    """Name the common benchmarking mistakes that this run commits."""
    measured = cells(run)
    return [
        *_warnings_of_machine(run),
        *_warnings_of_setup(run, measured),
        *_warnings_of_cells(measured),
    ]


def _warnings_of_machine(run: BenchRun) -> list[str]:
    found, noise = [], noise_of(run)
    if noise is not None and noise > NOISE_LIMIT:
        found.append(
            f"The machine was busy: a fixed amount of work took {noise:.2f} times its median at "
            "p95, so differences below that mean little."
        )
    load, cores = run.facts.get("load_average"), run.facts.get("cores") or 1
    if load is not None and load > cores:
        found.append(
            f"Other programs competed for the cores when this run began (load {load:.1f} on "
            f"{cores}): seconds are longer than on a quiet machine, ratios are less affected."
        )
    return found


def _warnings_of_setup(run: BenchRun, measured: Sequence[Cell]) -> list[str]:
    facts, few = run.facts, [c for c in measured if 0 < c.num_requests < MIN_REQUESTS]
    areas = {facts["areas"][cell.workload] for cell in measured if cell.num_attempts}
    is_useless = not any(cell.accepted and cell.accepted.value for cell in measured)
    mistakes = {
        "There is no AR arm: speed without a baseline says nothing.": (
            AR not in {mode_of(arm) for arm in facts["arms"]}
        ),
        "Only chat prompts were run: edits, structure and code behave differently.": (
            areas <= {"chat", "short", "long"}
        ),
        "No answer was accepted: the latencies are of useless answers.": is_useless,
        f"{len(few)} of {len(measured)} cells have fewer than {MIN_REQUESTS} requests: their "
        "intervals are wide.": bool(few),
        f"p95 of fewer than {MIN_ATTEMPTS} attempts is the slowest one, or nearly.": any(
            0 < cell.num_attempts < MIN_ATTEMPTS for cell in measured
        ),
        "An AR arm is greedy, so its rounds repeat one answer per case: the interval of its "
        "acceptance is too narrow.": facts["rounds"] > 1
        and any(mode_of(arm) == AR and "temperature=" not in arm for arm in facts["arms"]),
        "Arms were warmed up with a few tokens alone: first requests may be slower.": (
            facts["warmed_up"] != "every workload"
        ),
        "The time limit ended the run: some workloads have few numbers, or none.": bool(
            facts.get("was_cut")
        ),
        "Arms with other weights ran one after another, not interleaved.": (
            _num_engines(facts["arms"]) > 1
        ),
    }
    return [text for text, is_made in mistakes.items() if is_made]


def _num_engines(arms: Sequence[str]) -> int:
    keys = ("model=", "quant=", "dtype=")
    parts = [[p for p in arm.partition(":")[2].split(",") if p.startswith(keys)] for arm in arms]
    return len({tuple(sorted(part)) for part in parts})


def _warnings_of_cells(measured: Sequence[Cell]) -> list[str]:
    found = [f"{cell.workload}, {cell.arm}: {flag}." for cell in measured for flag in cell.flags]
    for workload in dict.fromkeys(cell.workload for cell in measured):
        rates = {c.arm: c for c in measured if c.workload == workload and c.tokens_per_second}
        if len(rates) < 2:
            continue
        by_rate = max(rates, key=lambda arm: rates[arm].tokens_per_second or 0.0)
        by_time = min(rates, key=lambda arm: _accepted_seconds(rates[arm]))
        if by_rate != by_time and math.isfinite(_accepted_seconds(rates[by_time])):
            found.append(
                f"{workload}: {by_rate} has the most tokens per second, but {by_time} is first "
                "to an accepted answer; tokens per second would mislead."
            )
    return found


def _accepted_seconds(cell: Cell) -> float:
    return math.inf if cell.seconds_to_accepted is None else cell.seconds_to_accepted.value


# --- two runs


@dataclass(frozen=True, slots=True, kw_only=True)
class CellChange:
    """Seconds to an accepted answer of one workload and arm in two runs."""

    workload: str
    arm: str
    before: float
    after: float
    probability: float  # that the second run is faster

    @property
    def ratio(self) -> float | None:
        is_finite = math.isfinite(self.before) and math.isfinite(self.after)
        return self.after / self.before if is_finite and self.before else None


def compare_runs(before: BenchRun, after: BenchRun) -> list[CellChange]:
    """Compare what both runs have: same workload, same arm, same cases."""
    old, new = (group_requests([a for a in r.attempts if not a.refused]) for r in (before, after))
    found = []
    for workload in after.facts["workloads"]:
        for arm in after.facts["arms"]:
            sides = [
                [r for r in groups if (r[0].workload, r[0].arm) == (workload, arm)]
                for groups in (old, new)
            ]
            cases = _cases(sides[0]) & _cases(sides[1])
            first, second = ([r for r in side if r[0].key[:2] in cases] for side in sides)
            if not cases:
                continue
            found.append(
                CellChange(
                    workload=workload,
                    arm=arm,
                    before=seconds_to_accepted(first),
                    after=seconds_to_accepted(second),
                    probability=_probability(second, first),
                )
            )
    return found
