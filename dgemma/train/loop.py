"""The training loop: steps, reports, saved states, and stopping.

A run can be killed at any time and resumes exactly from its last saved state. One whose loss is NaN
or drifts away stops and names its last good state.
"""

import gc
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dgemma.cpu_threads import spin_control
from dgemma.errors import DgemmaError, UsageError
from dgemma.train.batches import DeviceBatch, LoaderConfig, MixedBatches, Mixture, Prefetcher
from dgemma.train.checkpoint import (
    HELDOUT,
    Meter,
    MetricsFile,
    Report,
    load_state,
    save_state,
    saved_states,
)
from dgemma.train.distributed import all_finite, check_batch_split, gather_to_cpu
from dgemma.train.objective import LossCounts, Losses, Objective
from dgemma.train.onpolicy import PersistentCanvases, restart_noise
from dgemma.train.optim import MixedPrecisionOptimizer, Schedule
from dgemma.train.recipe import RunSettings

HELDOUT_BATCHES = 4  # the same batches and noise at each measurement
LOSS_SMOOTHING_STEPS = 20  # smoothing for the drift test
COMPILE_STEPS = 5  # steps after which all code is compiled
MIN_UNFITTED_STEPS = 400  # of a run with a time budget, until its number of steps is known
SIGNALS = (signal.SIGINT, signal.SIGTERM)
# Steps before a time budget's clock starts and while it runs; fewer if they take long, since the
# number of steps should be known while most of the time is left.
WARMUP_STEPS, TIMED_STEPS, MIN_TIMED_STEPS = 30, 60, 2
WARMUP_FRACTION, TIMED_FRACTION = 0.05, 0.1


class TrainingStopped(DgemmaError):
    """The run cannot continue; the message gives the reason and the last good state."""


class TrainingInterrupted(DgemmaError):
    """The run was interrupted, and its state is saved."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOptions:
    directory: Path
    settings: RunSettings = field(default_factory=RunSettings)
    grad_accum_steps: int = 1
    seconds: float | None = None  # time budget to fit the number of steps to
    heldout: Mixture | None = None  # held-out examples


class TimeBudget:
    """Fits the number of steps to a time budget, once."""

    def __init__(
        self, seconds: float, spent: float, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        """`spent`: seconds that the run has taken before now."""
        self.seconds, self.clock = seconds, clock
        self.began = clock() - spent
        self.first: tuple[int, float] | None = None
        self.mark: tuple[int, float] | None = None

    def fit(self, step: int, synchronize: Callable[[], None]) -> int:
        """Return the steps of the whole run, once they are known; 0 before. Called after each step.

        `synchronize` waits for the device.
        """
        if self.first is None:
            self.first = step, self.clock()
        elif self.mark is None:
            if self._is_due(step, self.first, WARMUP_STEPS, WARMUP_FRACTION):
                synchronize()
                self.mark = step, self.clock()
        elif self._is_due(step, self.mark, TIMED_STEPS, TIMED_FRACTION):
            synchronize()
            seconds_per_step = (self.clock() - self.mark[1]) / (step - self.mark[0])
            left = self.seconds - (self.clock() - self.began)
            return step + max(1, int(left / seconds_per_step))
        return 0

    def _is_due(self, step: int, since: tuple[int, float], steps: int, fraction: float) -> bool:
        count, elapsed = step - since[0], self.clock() - since[1]
        is_slow = count >= MIN_TIMED_STEPS and elapsed > fraction * self.seconds
        return count >= steps or is_slow


@contextmanager
def interruptible() -> Iterator[threading.Event]:
    """While open, the first Ctrl-C or SIGTERM only sets the event; a second acts as usual."""
    is_interrupted, handlers = threading.Event(), dict[int, Any]()

    def restore() -> None:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        handlers.clear()

    def note(number: int, frame: FrameType | None) -> None:
        is_interrupted.set()
        restore()

    # Python allows handlers only in the main thread.
    if threading.current_thread() is threading.main_thread():
        handlers.update({number: signal.signal(number, note) for number in SIGNALS})
    try:
        yield is_interrupted
    finally:
        restore()


@contextmanager
def single_host_thread(device: torch.device) -> Iterator[None]:
    """Use one CPU thread while a GPU trains.

    More would mostly wait, on the cores that feed the GPU.
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


def persistent_losses(
    objective: Objective, batch: DeviceBatch, persistent: PersistentCanvases, step: int
) -> Losses:
    """Compute the losses of new and persistent sequences, and advance the latter.

    The last sequences of `batch` first replace the oldest persistent ones.
    """
    (rows,), num_fresh = batch.micro_batches, len(batch.real_rows) - persistent.num_evicted
    fresh, new = rows.split(num_fresh)
    persistent.replace_oldest(new, batch.real_rows[num_fresh:])
    whole = fresh.concat(persistent.batch)
    losses, hidden_TD = objective.with_persistent(
        whole, persistent.self_cond_TD, LossCounts.on_device(whole)
    )
    number = torch.full((), step, device=hidden_TD.device)
    with torch.no_grad():
        stats = objective.read(persistent.batch, hidden_TD, number, 1.0)
        noise_T = restart_noise(persistent.batch, objective.model.config.vocab_size, number)
        persistent.advance(stats, noise_T)
    return losses


@dataclass(frozen=True, slots=True, kw_only=True)
class RunState:
    """Counters of a run, part of a saved state."""

    step: int = 0
    smooth_loss: float | None = None
    best_loss: float = float("inf")  # lowest smoothed loss
    is_fitted: bool = False  # whether the number of steps was fitted to a time budget
    seconds: float = 0.0  # seconds of training when the state was saved


class Trainer:
    """A run: state, schedule, clock, weights and persistent sequences."""

    def __init__(
        self,
        objective: Objective,
        optimizer: MixedPrecisionOptimizer,
        mixture: Mixture | MixedBatches,
        schedule: Schedule,
        run: RunOptions,
    ) -> None:
        check_batch_split(mixture.sequences, run.grad_accum_steps, objective.group)
        self.objective, self.optimizer, self.mixture = objective, optimizer, mixture
        self.schedule, self.run = schedule, run
        self.group, self.device = objective.group, next(objective.parameters()).device
        self.state, self.began = RunState(), time.perf_counter()
        self.meter, self.metrics = Meter(), MetricsFile(run.directory)
        self.heldout_metrics = MetricsFile(run.directory, HELDOUT)
        self.prefetcher: Prefetcher | None = None  # while the run is going
        self.persistent = self._initial_persistent()

    @property
    def step(self) -> int:
        return self.state.step

    def resume(self) -> int:
        """Load the newest saved state, if any; return the steps already taken."""
        states = saved_states(self.run.directory)
        if states:
            state = load_state(states[-1][1])
            self.optimizer.restore(state["optimizer"])
            self.state = RunState(**{one.name: state[one.name] for one in fields(RunState)})
            self.meter.restore(state["meter"], self.device)
            if self.persistent is not None:
                self.persistent.restore(state["persistent"])
            if self.state.is_fitted:
                self.schedule = replace(self.schedule, steps=int(state["steps"]))
        # Without a state, too: a run that was killed before its first one has left lines.
        if self.group.is_main:
            self.metrics.drop_after(self.step)
            self.heldout_metrics.drop_after(self.step)
        return self.step

    def reports(self) -> Iterator[Report]:
        """Train to the end of the schedule."""
        budget = self._time_budget()
        if self.step >= self.schedule.steps:
            return
        self.meter.began = time.perf_counter()
        self.began = self.meter.began - self.state.seconds
        try:
            with single_host_thread(self.device), interruptible() as is_interrupted:
                yield from self._run_steps(budget, is_interrupted)
        finally:
            self.prefetcher = None  # ends its worker processes

    def _run_steps(
        self, budget: TimeBudget | None, is_interrupted: threading.Event
    ) -> Iterator[Report]:
        self.prefetcher = Prefetcher(self.mixture, self.step, self.loader_config())
        compiled_at = self.step + COMPILE_STEPS
        if self.step == 0:
            self.measure_heldout()
        while True:
            if self.device.type == "cpu":
                spin_control().update()
            self.train_step(self.prefetcher.take())
            is_last = self.step == self.schedule.steps
            is_saving = is_last or self.step % self.run.settings.save_every == 0
            is_reporting = is_saving or self.step % self.run.settings.report_every == 0
            if is_reporting:
                yield self._report()
            if is_saving:
                self.measure_heldout()
                self.save()
            if is_last:
                return
            self._stop_if(is_interrupted, is_reporting=is_reporting)
            if budget is not None and self._fit_steps(budget):
                budget = None
            if self.step == compiled_at and self.device.type == "cuda":
                # The compiler leaves millions of objects, which need not be looked through again.
                gc.collect()
                gc.freeze()

    def save(self) -> Path:
        """Write the state of the run, after a check that the weights are finite."""
        self._check_weights()
        state: dict[str, Any] = {
            **asdict(replace(self.state, seconds=time.perf_counter() - self.began)),
            "optimizer": self.optimizer.state(),
            "steps": self.schedule.steps,
            "meter": self.meter.state(),
            "persistent": None if self.persistent is None else self.persistent.state(),
        }
        if self.group.size > 1:
            state = gather_to_cpu(state, keep=self.group.is_main)
        directory, keep = self.run.directory, self.run.settings.keep
        return save_state(directory, self.step, state, keep=keep, is_writer=self.group.is_main)

    @torch.no_grad()
    def measure_heldout(self) -> None:
        """Compute the losses of held-out examples, and add them to their file."""
        if self.run.heldout is None:
            return
        began = time.perf_counter()
        batches = Prefetcher(self.run.heldout, 0, replace(self.loader_config(), workers=0))
        sums = torch.zeros(len(Losses._fields), device=self.device)
        for _ in range(HELDOUT_BATCHES):
            batch = batches.take()
            for micro_batch in batch.micro_batches:
                sums += torch.stack([*self.objective(micro_batch, batch.counts)])
        means = (self.group.all_reduce(sums) / HELDOUT_BATCHES).tolist()
        if self.group.is_main:
            self.heldout_metrics.add({"step": self.step, "denoise": means[1], "causal": means[2]})
        self.meter.began += time.perf_counter() - began  # not training time

    def loader_config(self) -> LoaderConfig:
        return LoaderConfig(
            workers=self.run.settings.workers,
            grad_accum_steps=self.run.grad_accum_steps,
            group=self.group,
            device=self.device,
        )

    def _initial_persistent(self) -> PersistentCanvases | None:
        if not isinstance(self.mixture, MixedBatches):
            return None
        if self.group.size > 1 or self.run.grad_accum_steps > 1:
            raise UsageError(
                f"[batch] persistent_sequences with {self.group.size} processes and "
                f"{self.run.grad_accum_steps} micro-batches: persistent sequences need one process "
                "and whole batches; leave persistent_sequences out"
            )
        like = self.objective.model.embed_tokens.weight
        num_evicted = self.mixture.new_sequences.sequences
        return PersistentCanvases(self.mixture.initial(), num_evicted, like)

    def train_step(self, batch: DeviceBatch) -> None:
        """Update the weights once, and add the losses to the meter."""
        sums: list[Tensor] | None = None
        for losses in self._losses(batch):
            # Sharded gradients are means over processes; the sum is needed.
            torch.autograd.backward(losses.total * self.group.size)
            detached = [loss.detach() for loss in losses]
            sums = (
                detached if sums is None else [a + b for a, b in zip(sums, detached, strict=True)]
            )
        assert sums is not None
        # A GPU is busy with the backward for a while now. The optimizer step is short, and would be
        # done before the next batch is copied.
        if self.prefetcher is not None and self.step + 1 < self.schedule.steps:
            self.prefetcher.prefetch()
        grad_norm = self.optimizer.step(self.schedule.scale(self.step))
        self.meter.add(Losses(*sums), grad_norm, self._num_rows(batch))
        self.state = replace(self.state, step=self.step + 1)

    def _losses(self, batch: DeviceBatch) -> Iterator[Losses]:
        """Compute the losses of each micro-batch."""
        if self.persistent is not None:
            yield persistent_losses(self.objective, batch, self.persistent, self.step)
            return
        depth = self.objective.settings.rollout_steps(self.step)
        for micro_batch in batch.micro_batches:
            yield self.objective(micro_batch, batch.counts, depth)

    def _num_rows(self, batch: DeviceBatch) -> int:
        """Count the rows of examples that were trained on."""
        if self.persistent is None:
            return sum(batch.real_rows)
        num_fresh = len(batch.real_rows) - self.persistent.num_evicted
        return sum(batch.real_rows[:num_fresh]) + sum(self.persistent.real_rows)

    def _time_budget(self) -> TimeBudget | None:
        """Start the clock of a run with a time budget whose steps are not fitted yet."""
        if self.run.seconds is None or self.state.is_fitted:
            return None
        # The recipe's number of steps is not the end then: fitting may take longer.
        self.schedule = replace(self.schedule, steps=max(MIN_UNFITTED_STEPS, self.schedule.steps))
        return TimeBudget(self.run.seconds, self.state.seconds)

    def _fit_steps(self, budget: TimeBudget) -> bool:
        """Fit the number of steps, if enough of them were timed; returns whether it is fitted."""
        synchronize = torch.cuda.synchronize if self.device.type == "cuda" else lambda: None
        steps = self.group.broadcast(budget.fit(self.step, synchronize), self.device)
        if steps:
            self.schedule = replace(self.schedule, steps=steps)
            self.state = replace(self.state, is_fitted=True)
        return self.state.is_fitted

    def _stop_if(self, is_interrupted: threading.Event, *, is_reporting: bool) -> None:
        """Save and stop if interrupted; processes agree on it when they report."""
        if self.group.size > 1 and not is_reporting:
            return
        if self.group.any(is_interrupted.is_set(), self.device):
            path = self.save()
            raise TrainingInterrupted(
                f"interrupted after {self.step} steps; the state is saved in {path}. The same "
                "command resumes the run; with --export it writes the model as it is"
            )

    def _report(self) -> Report:
        num_steps = len(self.meter.losses)
        (total, denoise, causal, balance, norm), rows_per_second = self.meter.read(self.group)
        self._check_loss(total, norm, num_steps)
        report = Report(
            step=self.step,
            steps=self.schedule.steps,
            total=total,
            denoise=denoise,
            causal=causal,
            balance=balance,
            grad_norm=norm,
            lr_scale=self.schedule.scale(self.step - 1),
            rows_per_second=rows_per_second,
            seconds=time.perf_counter() - self.began,
        )
        if self.group.is_main:
            self.metrics.add(asdict(report))
        return report

    def _check_loss(self, total: float, norm: float, num_steps: int) -> None:
        """Stop if the mean loss of the last steps is not finite or has drifted away."""
        if not np.isfinite([total, norm]).all():
            raise self._stopped(f"the loss is {total} and the gradient's norm {norm}")
        before, best = self.state.smooth_loss, self.state.best_loss
        weight = 1.0 if before is None else 1 - (1 - 1 / LOSS_SMOOTHING_STEPS) ** num_steps
        smooth = weight * total + (1 - weight) * (before or 0.0)
        self.state = replace(self.state, smooth_loss=smooth, best_loss=min(best, smooth))
        if smooth > best + self.run.settings.max_loss_rise:
            raise self._stopped(f"the loss rose to {smooth:.3f} from {best:.3f}")

    def _check_weights(self) -> None:
        """Stop if the last step produced non-finite weights, which its loss does not show."""
        is_finite = all_finite(self.optimizer.weights)
        broken = self.group.all_reduce((~is_finite).float()).nonzero().flatten().tolist()
        if broken:
            names = ", ".join(self.optimizer.names[i] for i in broken[:3])
            more = f" and {len(broken) - 3} more" if len(broken) > 3 else ""
            raise self._stopped(f"the last step made {names}{more} infinite or NaN")

    def _stopped(self, reason: str) -> TrainingStopped:
        states = saved_states(self.run.directory)
        last_good = "no state was saved yet"
        if states:
            # The same command would go the same way again, and another rate is another run.
            last_good = f"the last good state is {states[-1][1]}, of which --export makes a model"
        return TrainingStopped(
            f"training stopped after {self.step} steps: {reason}; {last_good}. Start again with a "
            "lower learning rate (--fresh), or look at the data of these steps"
        )
