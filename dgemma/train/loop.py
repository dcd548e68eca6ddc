"""The training loop: batches in, weights moved, the course of the run reported and kept.

A run can be killed at any time and goes on exactly where its last saved state stands. One that
meets a loss that is not a number, or that drifts away, stops and says where its last good state is.
"""

import json
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from dgemma.errors import DgemmaError
from dgemma.train.average import Average
from dgemma.train.context import Batch
from dgemma.train.mix import Mixture
from dgemma.train.objective import Counts, Losses, Objective
from dgemma.train.optim import Masters, Schedule
from dgemma.train.rows import EXAMPLE, Ints
from dgemma.train.state import load_state, save_state, states


class TrainingStopped(DgemmaError):
    """The run cannot go on; the message says why and where its last good state is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSettings:
    directory: Path
    save_every: int = 1000
    report_every: int = 20
    keep: int = 2
    workers: int = 0  # processes that make batches
    accumulate: int = 1  # parts a batch is worked through in
    seconds: float | None = None  # length of the run, as the schedule is fitted to it
    drift: float = 1.5  # how far, in nats, the loss may rise above its best before the run stops


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """Means over the steps since the last one."""

    step: int
    steps: int
    total: float
    denoise: float
    causal: float
    balance: float
    norm: float
    rate: float  # share of the peak learning rates
    rows_per_second: float
    seconds: float


class Batches(Dataset[Ints]):
    """Made in other processes, which hand them over through pipes: shared memory is often small."""

    def __init__(self, mixture: Mixture) -> None:
        self.mixture = mixture

    def __getitem__(self, step: int) -> Ints:
        return self.mixture.batch(step)


def as_it_is(rows: Ints) -> Ints:
    return rows


@dataclass
class Meter:
    """Sums on the device, so that no step waits for the host; `losses` and `began` change."""

    losses: list[Tensor] = field(default_factory=list)
    rows: int = 0
    began: float = field(default_factory=time.perf_counter)

    def add(self, losses: Losses, norm: Tensor, rows: int) -> None:
        self.losses.append(torch.stack([*(loss.detach() for loss in losses), norm]))
        self.rows += rows

    def read(self) -> tuple[list[float], float]:
        means = torch.stack(self.losses).mean(0).tolist()
        rate = self.rows / (time.perf_counter() - self.began)
        self.losses, self.rows, self.began = [], 0, time.perf_counter()
        return means, rate


class Trainer:
    """A run. `step`, `schedule`, `best` and what it holds of weights change."""

    def __init__(
        self,
        objective: Objective,
        masters: Masters,
        mixture: Mixture,
        schedule: Schedule,
        run: RunSettings,
        average: Average | None = None,
    ) -> None:
        self.objective, self.masters, self.mixture = objective, masters, mixture
        self.schedule, self.run, self.average = schedule, run, average
        self.device = next(objective.parameters()).device
        self.step, self.best, self.began = 0, float("inf"), time.perf_counter()

    def resume(self) -> int:
        """Go on from the newest saved state, if there is one; the steps already taken."""
        found = states(self.run.directory)
        if found:
            state = load_state(found[-1][1])
            self.masters.restore(state["masters"])
            if self.average is not None:
                self.average.restore(state["average"])
            self.step, self.best = int(state["step"]), float(state["best"])
            self.schedule = replace(self.schedule, steps=int(state["steps"]))
        return self.step

    def reports(self) -> Iterator[Report]:
        """Train to the end of the schedule."""
        meter, self.began = Meter(), time.perf_counter()
        for rows in self._batches():
            losses, norm = self._move(rows)
            meter.add(losses, norm, int((rows[EXAMPLE] >= 0).sum()))
            self.step += 1
            is_last = self.step == self.schedule.steps
            is_saving = is_last or self.step % self.run.save_every == 0
            if is_saving or self.step % self.run.report_every == 0:
                yield self._report(meter)
            if is_saving:
                self.save()
            if is_last:
                return
            self._fit_schedule()

    def save(self) -> Path:
        state: dict[str, Any] = {
            "masters": self.masters.state(),
            "average": None if self.average is None else self.average.weights,
            "best": self.best,
            "steps": self.schedule.steps,
        }
        return save_state(self.run.directory, self.step, state, self.run.keep)

    def _batches(self) -> Iterator[Tensor]:
        loader: Any = DataLoader(
            Batches(self.mixture),
            # The last step may not be known yet.
            sampler=range(self.step, 1 << 40),
            batch_size=None,
            collate_fn=as_it_is,  # type: ignore[arg-type]
            num_workers=self.run.workers,
            prefetch_factor=4 if self.run.workers else None,
        )
        for rows in loader:
            made = torch.from_numpy(rows)
            yield made.pin_memory() if self.device.type == "cuda" else made

    def _move(self, rows: Tensor) -> tuple[Losses, Tensor]:
        """One step of the weights."""
        counts = Counts.of(rows, self.device)
        sums: list[Tensor] | None = None
        for part in rows.chunk(self.run.accumulate, dim=1):
            losses = self.objective(Batch.of(part, self.device), counts)
            losses.total.backward()
            own = [loss.detach() for loss in losses]
            sums = own if sums is None else [a + b for a, b in zip(sums, own, strict=True)]
        assert sums is not None
        norm = self.masters.step(self.schedule.scale(self.step))
        if self.average is not None:
            self.average.update(self.masters.weights)
        return Losses(*sums), norm

    def _fit_schedule(self) -> None:
        """Where the run is given a time instead of a number of steps: count them once.

        The first steps compile and warm up, so the speed is that of later ones.
        """
        if self.run.seconds is None or self.step not in (FIT_FROM, FIT_AT):
            return
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        now = time.perf_counter()
        if self.step == FIT_FROM:
            self._fit_began = now
            return
        each = (now - self._fit_began) / (FIT_AT - FIT_FROM)
        left = self.run.seconds - (now - self.began)
        self.schedule = replace(self.schedule, steps=self.step + max(1, int(left / each)))

    def _report(self, meter: Meter) -> Report:
        (total, denoise, causal, balance, norm), speed = meter.read()
        if not np.isfinite([total, norm]).all():
            raise self._stopped(f"the loss is {total} and the gradient's norm {norm}")
        if total > self.best + self.run.drift:
            raise self._stopped(f"the loss rose to {total:.3f} from {self.best:.3f}")
        self.best = min(self.best, total)
        report = Report(
            step=self.step,
            steps=self.schedule.steps,
            total=total,
            denoise=denoise,
            causal=causal,
            balance=balance,
            norm=norm,
            rate=self.schedule.scale(self.step - 1),
            rows_per_second=speed,
            seconds=time.perf_counter() - self.began,
        )
        self.run.directory.mkdir(parents=True, exist_ok=True)
        with (self.run.directory / "metrics.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps(asdict(report)) + "\n")
        return report

    def _stopped(self, reason: str) -> TrainingStopped:
        found = states(self.run.directory)
        good = f"the last good state is {found[-1][1]}" if found else "no state was saved yet"
        return TrainingStopped(
            f"training stopped after {self.step} steps: {reason}; {good}. Lower the learning rate "
            "or look at the data of these steps"
        )


FIT_FROM, FIT_AT = 30, 90  # steps between which the speed is measured

Progress = Callable[[Report], None]
