"""The training loop: batches in, weights moved, the course of the run reported and kept.

A run can be killed at any time and goes on exactly where its last saved state stands. One that
meets a loss that is not a number, or that drifts away, stops and says where its last good state is.
"""

import gc
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dgemma.errors import DgemmaError, UsageError
from dgemma.train.average import Average
from dgemma.train.carry import Beside, Carry, carried_losses
from dgemma.train.distributed import check_shares
from dgemma.train.feed import Feed, Feeding, Loaded
from dgemma.train.interrupt import Interrupt
from dgemma.train.mix import Mixture
from dgemma.train.objective import Losses, Objective
from dgemma.train.optim import Masters, Schedule
from dgemma.train.pace import Pace
from dgemma.train.report import Meter, Metrics, Report
from dgemma.train.shards import are_finite, gathered
from dgemma.train.state import load_state, save_state, states


class TrainingStopped(DgemmaError):
    """The run cannot go on; the message says why and where its last good state is."""


class TrainingInterrupted(DgemmaError):
    """The run was asked to stop, and its state is saved."""


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


MEMORY = 20  # steps over which the loss is smoothed when it is watched for drift: batches differ


SETTLED = 5  # steps after which all code is compiled
UNCOUNTED = 400  # steps, at least, of a run that is given a time, until they are counted


@contextmanager
def sparing_host(device: torch.device) -> Iterator[None]:
    """Where a GPU does the work: one thread for what little is computed here.

    Many would spend their time waiting for one another, on the cores that feed the GPU.
    """
    threads = torch.get_num_threads()
    if device.type == "cuda":
        torch.set_num_threads(1)
    try:
        yield
    finally:
        if device.type == "cuda":
            torch.set_num_threads(threads)
            gc.unfreeze()


class Trainer:
    """A run. `step`, `schedule`, `best`, the clocks and what it holds of weights change."""

    def __init__(
        self,
        objective: Objective,
        masters: Masters,
        mixture: Mixture | Beside,
        schedule: Schedule,
        run: RunSettings,
        average: Average | None = None,
    ) -> None:
        check_shares(mixture.sequences, run.accumulate, objective.group)
        self.objective, self.masters, self.mixture = objective, masters, mixture
        self.schedule, self.run, self.average = schedule, run, average
        self.group, self.device = objective.group, next(objective.parameters()).device
        self.step, self.began = 0, time.perf_counter()
        self.smooth: float | None = None  # the loss, as it is watched for drift
        self.best = float("inf")  # the least that it was
        self.spent = 0.0  # seconds, before this process took the run up
        self.is_fitted = False  # whether the number of steps was found from a time
        self.meter, self.metrics = Meter(), Metrics(run.directory)
        self.feed: Feed | None = None  # while it runs
        self.carry = self._first_carry()

    def resume(self) -> int:
        """Go on from the newest saved state, if there is one; the steps already taken."""
        found = states(self.run.directory)
        if found:
            state = load_state(found[-1][1])
            self.masters.restore(state["masters"])
            if self.average is not None:
                if state["average"] is None:
                    raise UsageError("the run so far kept no mean of its weights; set average to 0")
                self.average.restore(state["average"])
            self.step, self.best = int(state["step"]), float(state["best"])
            self.spent, self.smooth = state["seconds"], state["smooth"]
            self.is_fitted = state["is_fitted"]
            self.meter.restore(state["meter"], self.device)
            if self.carry is not None:
                self.carry.restore(state["carry"])
            if self.is_fitted:
                self.schedule = replace(self.schedule, steps=int(state["steps"]))
        # Without a state, too: a run that was killed before its first one has left lines.
        if self.group.is_first:
            self.metrics.cut(self.step)
        return self.step

    def reports(self) -> Iterator[Report]:
        """Train to the end of the schedule."""
        pace = self._pace()
        if self.step >= self.schedule.steps:
            return
        self.meter.began = time.perf_counter()
        self.began = self.meter.began - self.spent
        try:
            with sparing_host(self.device), Interrupt() as interrupt:
                yield from self._steps(pace, interrupt)
        finally:
            self.feed = None  # ends its processes

    def _steps(self, pace: Pace | None, interrupt: Interrupt) -> Iterator[Report]:
        self.feed = Feed(self.mixture, self.step, self._feeding())
        settled = self.step + SETTLED
        while True:
            loaded = self.feed.take()
            losses, norm = self._move(loaded)
            self.meter.add(losses, norm, self._rows(loaded))
            self.step += 1
            is_last = self.step == self.schedule.steps
            is_saving = is_last or self.step % self.run.save_every == 0
            is_reporting = is_saving or self.step % self.run.report_every == 0
            if is_reporting:
                yield self._report()
            if is_saving:
                self.save()
            if is_last:
                return
            self._stop_if(interrupt, is_reporting=is_reporting)
            if pace is not None and self._fit(pace):
                pace = None
            if self.step == settled and self.device.type == "cuda":
                # The compiler leaves millions of objects, which need not be looked through again.
                gc.collect()
                gc.freeze()

    def save(self) -> Path:
        """Write the state of the run, once it is sure to be good."""
        self._check_weights()
        state: dict[str, Any] = {
            "masters": self.masters.state(),
            "average": None if self.average is None else self.average.weights,
            "best": self.best,
            "smooth": self.smooth,
            "steps": self.schedule.steps,
            "is_fitted": self.is_fitted,
            "seconds": time.perf_counter() - self.began,
            "meter": self.meter.state(),
            "carry": None if self.carry is None else self.carry.state(),
        }
        if self.group.size > 1:
            state = gathered(state, keep=self.group.is_first)
        return save_state(
            self.run.directory, self.step, state, keep=self.run.keep, is_writer=self.group.is_first
        )

    def _feeding(self) -> Feeding:
        run = self.run
        return Feeding(
            workers=run.workers, parts=run.accumulate, group=self.group, device=self.device
        )

    def _first_carry(self) -> Carry | None:
        if not isinstance(self.mixture, Beside):
            return None
        if self.group.size > 1 or self.run.accumulate > 1:
            raise UsageError(
                f"[batch] carried with {self.group.size} processes and {self.run.accumulate} parts "
                "of a batch: sequences are carried by one process that learns from all at once; "
                "leave carried out"
            )
        like = self.objective.model.embed_tokens.weight
        return Carry(self.mixture.first(), self.mixture.newcomers.sequences, like)

    def _rows(self, loaded: Loaded) -> int:
        """That belong to an example, of those that were just learned from."""
        if self.carry is None:
            return sum(loaded.real)
        return sum(loaded.real[: -self.carry.leaving]) + sum(self.carry.real)

    def _losses(self, loaded: Loaded) -> Iterator[Losses]:
        """Of each part of a batch."""
        if self.carry is not None:
            yield carried_losses(self.objective, loaded, self.carry, self.step)
            return
        depths = self.objective.weighting.depths
        for part in loaded.parts:
            yield self.objective(part, loaded.counts, depths[self.step % len(depths)])

    def _move(self, loaded: Loaded) -> tuple[Losses, Tensor]:
        """One step of the weights."""
        sums: list[Tensor] | None = None
        for losses in self._losses(loaded):
            # Sharded gradients are means over the processes; what is wanted is their sum.
            torch.autograd.backward(losses.total * self.group.size)
            own = [loss.detach() for loss in losses]
            sums = own if sums is None else [a + b for a, b in zip(sums, own, strict=True)]
        assert sums is not None
        # A GPU is now busy with the backward for a while. What follows is short work for it, and
        # would be done before the next batch is here.
        if self.feed is not None and self.step + 1 < self.schedule.steps:
            self.feed.look_ahead()
        norm = self.masters.step(self.schedule.scale(self.step))
        if self.average is not None:
            self.average.update(self.masters.weights, self.step)
        return Losses(*sums), norm

    def _pace(self) -> Pace | None:
        """What counts the steps, where the run is given a time and they are not counted yet."""
        if self.run.seconds is None or self.is_fitted:
            return None
        # The recipe's own number is no end then: counting may take longer.
        self.schedule = replace(self.schedule, steps=max(UNCOUNTED, self.schedule.steps))
        return Pace(self.run.seconds, self.spent)

    def _fit(self, pace: Pace) -> bool:
        """Where the run is given a time instead of a number of steps: whether they are counted."""
        wait = torch.cuda.synchronize if self.device.type == "cuda" else lambda: None
        steps = self.group.said_by_first(pace.steps(self.step, wait), self.device)
        if steps:
            self.schedule, self.is_fitted = replace(self.schedule, steps=steps), True
        return self.is_fitted

    def _stop_if(self, interrupt: Interrupt, *, is_reporting: bool) -> None:
        """Save and stop if asked to; several processes agree on it when they report."""
        if self.group.size > 1 and not is_reporting:
            return
        if self.group.any(interrupt.is_asked, self.device):
            path = self.save()
            raise TrainingInterrupted(
                f"interrupted after {self.step} steps; {path} holds the run, and the same command "
                "goes on from there (or, with --export, makes a model of it as it is)"
            )

    def _report(self) -> Report:
        taken = len(self.meter.losses)
        (total, denoise, causal, balance, norm), speed = self.meter.read(self.group)
        self._watch(total, norm, taken)
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
        if self.group.is_first:
            self.metrics.add(report)
        return report

    def _watch(self, total: float, norm: float, taken: int) -> None:
        """Stop if the mean loss of the steps just taken is no number or has drifted away."""
        if not np.isfinite([total, norm]).all():
            raise self._stopped(f"the loss is {total} and the gradient's norm {norm}")
        share = 1.0 if self.smooth is None else 1 - (1 - 1 / MEMORY) ** taken
        self.smooth = share * total + (1 - share) * (self.smooth or 0.0)
        if self.smooth > self.best + self.run.drift:
            raise self._stopped(f"the loss rose to {self.smooth:.3f} from {self.best:.3f}")
        self.best = min(self.best, self.smooth)

    def _check_weights(self) -> None:
        """The last step's loss was that of the weights before it; these may be broken."""
        is_good = are_finite(self.masters.weights)
        broken = self.group.sum((~is_good).float()).nonzero().flatten().tolist()
        if broken:
            names = ", ".join(self.masters.names[i] for i in broken[:3])
            more = f" and {len(broken) - 3} more" if len(broken) > 3 else ""
            raise self._stopped(f"the last step made {names}{more} infinite or no number")

    def _stopped(self, reason: str) -> TrainingStopped:
        found = states(self.run.directory)
        good = "no state was saved yet"
        if found:
            # The same command would go the same way again, and another rate is another run.
            good = f"the last good state is {found[-1][1]}, of which --export makes a model"
        return TrainingStopped(
            f"training stopped after {self.step} steps: {reason}; {good}. Begin anew with a lower "
            "learning rate (--fresh), or look at the data of these steps"
        )
