"""Run workloads on arms (`dgemma bench`): interleaved, warmed up, resumable.

Every line of runs.jsonl is one attempt, written when it ends; a second run with the same directory
skips finished attempts. Arms with the same weights take turns per request, in rotating order, so
that changes of the machine affect all of them; arms with other weights run one after another.
"""

import json
import os
import platform
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from datetime import date
from itertools import groupby, product
from pathlib import Path
from typing import Any

import torch

from dgemma import __version__
from dgemma.device import describe_device
from dgemma.diffusion.canvas import Noise
from dgemma.engine import Engine
from dgemma.errors import UsageError, require
from dgemma.eval.arms import Arm, ArmSpec, EndpointArm, EngineArm
from dgemma.eval.attempts import Attempt, Clock, make_attempt
from dgemma.eval.machine import Machine
from dgemma.eval.workload import BenchCase, Workload

RUNS, FACTS = "runs.jsonl", "facts.json"
SEEDS_PER_ROUND = 100
WARM_UP_TOKENS = 8
# Facts that a continued run must share with the first one.
SAME = ("dgemma", "model", "arms", "workloads", "seed", "attempts", "device", "dtype")


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchParams:
    """Parameters of a run."""

    workloads: tuple[Workload, ...]
    arms: tuple[ArmSpec, ...]
    rounds: int  # requests per case and arm, with different noise
    attempts: int  # attempts per request, until one is accepted
    seed: int = 0
    seconds: float | None = None  # start no request after so many seconds
    warm_up: bool = True  # every workload once before; else a few tokens per arm
    out: Path | None = None

    def __post_init__(self) -> None:
        require(self.rounds >= 1, "rounds", self.rounds, "1 or more")
        require(1 <= self.attempts <= SEEDS_PER_ROUND, "attempts", self.attempts, "1 to 100")
        require(self.seconds is None or self.seconds > 0, "seconds", self.seconds, "above 0")
        Noise(seed=self.seed)
        names = [arm.text for arm in self.arms]
        twice = [name for name in names if names.count(name) > 1]
        if twice or not names:
            raise UsageError(f"arms: {twice[0] if twice else 'none'}; give each arm once")


@dataclass(frozen=True, slots=True)
class BenchRun:
    """All data of a report."""

    facts: dict[str, Any]
    attempts: list[Attempt]


@dataclass(slots=True)
class EngineSource:
    """Loads the engine of a group of arms, and holds one at a time."""

    load: Callable[[ArmSpec], Engine]
    seconds: dict[str, float] = field(default_factory=dict)  # of loading, by arm

    def arms(self, group: Sequence[ArmSpec]) -> list[Arm]:
        if group[0].is_endpoint:
            return [EndpointArm(spec) for spec in group]
        started = time.perf_counter()
        engine = self.load(group[0])
        taken = round(time.perf_counter() - started, 3)
        self.seconds.update((spec.text, taken) for spec in group)
        return [EngineArm(spec, engine) for spec in group]


class RunLog:
    """The attempts so far, in memory and in runs.jsonl."""

    def __init__(self, directory: Path | None, facts: dict[str, Any]) -> None:
        self.facts, self.attempts = facts, list[Attempt]()
        self.path = None if directory is None else directory / RUNS
        if directory is None:
            return
        directory.mkdir(parents=True, exist_ok=True)
        if (directory / FACTS).exists():
            known = read_run(directory)
            check_same(known.facts, facts, directory)
            self.attempts = known.attempts
        self.save_facts()

    def save_facts(self) -> None:
        if self.path is not None:
            text = json.dumps(self.facts, ensure_ascii=False, indent=1)
            (self.path.parent / FACTS).write_text(text + "\n", encoding="utf-8")

    def add(self, attempt: Attempt) -> None:
        self.attempts.append(attempt)
        if self.path is not None:
            with self.path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(attempt.to_json(), ensure_ascii=False) + "\n")

    def of_request(self, workload: str, case: int, arm: str, round_: int) -> list[Attempt]:
        key = (workload, case, arm, round_)
        return [attempt for attempt in self.attempts if attempt.key[:4] == key]


def read_run(directory: Path) -> BenchRun:
    """Read the directory of a run; drops a partial last line."""
    try:
        facts = json.loads((directory / FACTS).read_text(encoding="utf-8"))
        path = directory / RUNS
        lines = path.read_text(encoding="utf-8").split("\n") if path.exists() else []
    except (OSError, ValueError) as error:
        raise UsageError(f"{directory} holds no run of dgemma bench: {error}") from None
    attempts = [Attempt.from_json(json.loads(line)) for line in lines[:-1]]
    if lines and lines[-1]:  # interrupted while it was written
        (directory / RUNS).write_text("".join(f"{x}\n" for x in lines[:-1]), encoding="utf-8")
    return BenchRun(facts, attempts)


def check_same(old: dict[str, Any], new: dict[str, Any], directory: Path) -> None:
    """Refuse to mix two runs in one directory."""
    for name in SAME:
        if old.get(name) != new.get(name):
            raise UsageError(
                f"{directory} holds a run with {name} {old.get(name)}, not {new.get(name)}; give "
                "another --out, or the same options to continue it"
            )


# --- the run


def run_bench(
    source: EngineSource,
    model: str,
    machine: Machine,
    params: BenchParams,
    clock: Clock = time.perf_counter,
) -> BenchRun:
    """Run all arms on all workloads; returns the attempts, those of an earlier run included."""
    log = RunLog(params.out, _facts(model, machine, params))
    started, was_cut = clock(), False
    groups = [list(group) for _, group in groupby(params.arms, lambda arm: _group(arm))]
    for number, group in enumerate(groups):
        requests = list(_requests(params, group))
        if all(_is_complete(log, params, request) for request in requests):
            continue
        arms = {arm.spec.text: arm for arm in source.arms(group)}
        log.facts["load_seconds"] = source.seconds
        _warm_up(list(arms.values()), params)
        log.facts.setdefault("break_even", _break_even(list(arms.values())))
        # Each group gets an equal share of what is left.
        left = None
        if params.seconds is not None:
            left = clock() + (params.seconds - (clock() - started)) / (len(groups) - number)
        for done, request in enumerate(requests):
            _show(group, request, done, len(requests))
            if left is not None and clock() > left:
                was_cut = True
                break
            _run_request(arms[request[3]], request, log, params, (machine, clock))
    log.facts["was_cut"] = was_cut
    log.facts["seconds"] = round(clock() - started, 1)
    log.save_facts()
    if sys.stderr.isatty():
        print(file=sys.stderr)
    return BenchRun(log.facts, log.attempts)


def _break_even(arms: Sequence[Arm]) -> dict[str, Any] | None:
    """Return what mode auto knows of this machine, if an arm has it."""
    engines = [arm.engine for arm in arms if isinstance(arm, EngineArm)]
    costs = next((engine.break_even for engine in engines if engine.break_even), None)
    return None if costs is None else asdict(costs)


RunStep = tuple[Workload, int, int, str]  # workload, case, round, arm


def _group(arm: ArmSpec) -> tuple[object, ...]:
    return (arm.text,) if arm.is_endpoint else arm.weights


def _requests(params: BenchParams, group: Sequence[ArmSpec]) -> Iterator[RunStep]:
    """Yield requests by round, first one case of every workload, with rotating arms."""
    turn, most = 0, max(len(workload.cases) for workload in params.workloads)
    for round_, case in product(range(params.rounds), range(most)):
        for workload in (w for w in params.workloads if case < len(w.cases)):
            for shift in range(len(group)):
                arm = group[(turn + shift) % len(group)]
                yield workload, case, round_, arm.text
            turn += 1


def _is_complete(log: RunLog, params: BenchParams, request: RunStep) -> bool:
    workload, case, round_, arm = request
    known = log.of_request(workload.name, case, arm, round_)
    return len(known) >= params.attempts or any(a.is_accepted or a.refused for a in known)


def _run_request(
    arm: Arm, request: RunStep, log: RunLog, params: BenchParams, tools: tuple[Machine, Clock]
) -> None:
    """Make the attempts that a request still lacks, until one is accepted."""
    workload, case, round_, name = request
    while not _is_complete(log, params, request):
        number = len(log.of_request(workload.name, case, name, round_))
        first = Attempt(
            workload=workload.name,
            case=case,
            arm=name,
            round=round_,
            attempt=number,
            seed=params.seed + SEEDS_PER_ROUND * round_ + number,
        )
        log.add(make_attempt(arm, workload, workload.cases[case], first, tools))


def _warm_up(arms: Sequence[Arm], params: BenchParams) -> None:
    """Answer before anything is timed: kernels compile, graphs are captured, memory is mapped."""
    brief = Workload(
        name="warm-up",
        title="warm-up",
        area="short",
        max_tokens=WARM_UP_TOKENS,
        cases=(BenchCase(prompt="Hello!", checks=()),),
    )
    for arm in arms:
        for workload in params.workloads if params.warm_up else (brief,):
            try:
                for _ in arm.answer(workload, workload.cases[0], params.seed, retry=False):
                    pass
            except Exception:
                continue  # the same request is recorded with its error


def _show(group: Sequence[ArmSpec], request: RunStep, done: int, total: int) -> None:
    """Print progress on one line of stderr; nothing without a terminal."""
    if sys.stderr.isatty():
        workload, _, _, arm = request
        line = f"  {done + 1}/{total}  {workload.name}, {arm}"
        print(f"\r{line[:78]:78}", end="", file=sys.stderr, flush=True)


def _facts(model: str, machine: Machine, params: BenchParams) -> dict[str, Any]:
    return {
        "dgemma": __version__,
        "date": str(date.today()),
        "model": model,
        "device": describe_device(machine.device),
        "machine": f"{platform.system()} {platform.machine()}",
        "torch": torch.__version__,
        "dtype": machine.dtype,
        "arms": [arm.text for arm in params.arms],
        "workloads": [workload.name for workload in params.workloads],
        "titles": {workload.name: workload.title for workload in params.workloads},
        "areas": {workload.name: workload.area for workload in params.workloads},
        "rounds": params.rounds,
        "attempts": params.attempts,
        "seed": params.seed,
        "seconds_limit": params.seconds,
        "load_average": os.getloadavg()[0] if hasattr(os, "getloadavg") else None,
        "cores": os.cpu_count(),
        "warmed_up": "every workload" if params.warm_up else f"{WARM_UP_TOKENS} tokens",
    }
