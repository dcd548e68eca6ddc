"""Runs: killed and taken up again, stopped for a reason, interrupted, fitted to a time."""

import json
import os
import re
import signal
import threading
from collections.abc import Iterator
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from dgemma.errors import CheckpointError, UsageError
from dgemma.train import loop
from dgemma.train.batches import DeviceBatch, Mixture
from dgemma.train.checkpoint import MetricsFile, Report, delete_run, load_state, saved_states
from dgemma.train.corruption import RowArray
from dgemma.train.loop import (
    TimeBudget,
    Trainer,
    TrainingInterrupted,
    TrainingStopped,
    interruptible,
    single_host_thread,
)
from dgemma.train.optim import Schedule
from tests.train.runs import run_options, trainer

MEASURED = ("step", "steps", "total", "denoise", "causal", "balance", "grad_norm", "lr_scale")


def measured(report: Report) -> tuple[Any, ...]:
    """All of a report but what a clock says."""
    return tuple(getattr(report, name) for name in MEASURED)


def run(one: Trainer) -> list[tuple[Any, ...]]:
    return [measured(report) for report in one.reports()]


def weights(one: Trainer) -> list[torch.Tensor]:
    return [weight.detach().clone() for weight in one.optimizer.weights]


def break_after(one: Trainer, step: int) -> None:
    """A kill: the process is gone in the middle of a step, with whatever was saved."""
    for report in one.reports():
        if report.step == step:
            break


# --- resuming


@pytest.mark.parametrize("settings", [{}, {"grad_accum_steps": 2}, {"workers": 1}])
def test_a_killed_run_goes_on_to_the_last_bit(settings: dict[str, Any], tmp_path: Path) -> None:
    through = trainer(tmp_path / "through", **settings)
    expected = run(through)
    assert len(expected) == 12
    break_after(trainer(tmp_path / "killed", **settings), step=8)
    again = trainer(tmp_path / "killed", **settings)
    assert again.resume() == 6
    assert run(again) == expected[6:]
    assert all(map(torch.equal, weights(again), weights(through)))
    # The file shows one course, without the steps that were taken twice.
    lines = MetricsFile(tmp_path / "killed").read()
    assert [tuple(line[name] for name in MEASURED) for line in lines] == expected


def test_a_run_that_was_killed_before_its_first_state_begins_its_file_anew(tmp_path: Path) -> None:
    break_after(trainer(tmp_path), step=4)
    again = trainer(tmp_path)
    assert again.resume() == 0
    run(again)
    assert [line["step"] for line in MetricsFile(tmp_path).read()] == list(range(1, 13))


def test_nothing_is_resumed_where_there_is_nothing(tmp_path: Path) -> None:
    assert trainer(tmp_path).resume() == 0


def test_a_finished_run_has_no_more_steps(tmp_path: Path) -> None:
    run(trainer(tmp_path))
    again = trainer(tmp_path)
    assert again.resume() == 12
    assert run(again) == []


def test_a_finished_run_can_be_made_longer(tmp_path: Path) -> None:
    run(trainer(tmp_path))
    longer = trainer(tmp_path, schedule=Schedule(steps=15, warmup=2))
    longer.resume()
    assert [report[0] for report in run(longer)] == [13, 14, 15]


def test_only_the_newest_states_are_kept(tmp_path: Path) -> None:
    run(trainer(tmp_path, keep=1))
    assert [step for step, _ in saved_states(tmp_path)] == [12]


def test_a_damaged_state_is_named(tmp_path: Path) -> None:
    run(trainer(tmp_path))
    path = saved_states(tmp_path)[-1][1]
    path.write_bytes(path.read_bytes()[:1000])
    with pytest.raises(CheckpointError, match=r"state-00000012.pt cannot be read"):
        trainer(tmp_path).resume()


def test_a_state_that_was_not_wholly_written_is_no_state(tmp_path: Path) -> None:
    (tmp_path / "state-00000006.part").write_bytes(b"half")
    assert saved_states(tmp_path) == [] and trainer(tmp_path).resume() == 0


def test_forgetting_leaves_finished_models_alone(tmp_path: Path) -> None:
    run(trainer(tmp_path))
    (tmp_path / "checkpoint").mkdir()
    delete_run(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint"]


# --- stopping for a reason


def poison(one: Trainer, step: int, value: float) -> None:
    """Spoil a weight right before a step, as a broken update would."""
    train_step = one.train_step

    def spoiled(batch: DeviceBatch) -> Any:
        if one.step == step:
            with torch.no_grad():
                one.optimizer.weights[3].fill_(value)
        return train_step(batch)

    one.train_step = spoiled  # type: ignore[method-assign]


def test_a_loss_that_is_no_number_stops_the_run_with_its_last_good_state(tmp_path: Path) -> None:
    one = trainer(tmp_path)
    poison(one, 8, float("nan"))
    good = re.escape(str(tmp_path / "state-00000006.pt")) + ", of which --export"
    with pytest.raises(TrainingStopped, match=f"after 9 steps: the loss is nan.*{good}"):
        run(one)
    assert [step for step, _ in saved_states(tmp_path)] == [6]
    again = trainer(tmp_path)
    assert again.resume() == 6 and all(w.isfinite().all() for w in weights(again))
    assert len(run(again)) == 6


def test_weights_that_the_last_step_broke_are_not_saved(tmp_path: Path) -> None:
    """The loss before a save is still good; an infinite rate is not."""
    one = trainer(tmp_path)
    scale = one.schedule.scale

    class Wild(Schedule):
        def scale(self, step: int) -> float:
            return float("inf") if step == 5 else scale(step)

    one.schedule = Wild(steps=12, warmup=2)
    with pytest.raises(TrainingStopped, match=r"after 6 steps: the last step made .* and .* more"):
        run(one)
    assert saved_states(tmp_path) == []


def test_without_a_state_the_reason_says_so(tmp_path: Path) -> None:
    one = trainer(tmp_path)
    poison(one, 1, float("inf"))
    with pytest.raises(TrainingStopped, match=r"no state was saved yet\. Start again with a lower"):
        run(one)


def test_a_loss_that_drifts_away_stops_the_run(tmp_path: Path) -> None:
    one = trainer(tmp_path, adam_lr=3.0, muon_lr=3.0, max_loss_rise=0.5)
    with pytest.raises(TrainingStopped, match=r"the loss rose to \d+\.\d+ from \d+\.\d+"):
        run(one)
    for _, path in saved_states(tmp_path):
        assert load_state(path)["best_loss"] < float("inf")


# --- interrupting


def test_an_interrupt_ends_the_step_and_saves(tmp_path: Path) -> None:
    expected = run(trainer(tmp_path / "through"))
    one = trainer(tmp_path / "run")
    seen = []
    with pytest.raises(
        TrainingInterrupted, match=r"after 4 steps; the state is saved in .*state-00000004.pt\."
    ):
        for report in one.reports():
            seen.append(measured(report))
            if report.step == 4:
                os.kill(os.getpid(), signal.SIGINT)
    again = trainer(tmp_path / "run")
    assert again.resume() == 4
    assert seen + run(again) == expected


def test_reports_are_the_same_however_a_run_was_cut(tmp_path: Path) -> None:
    """Means over several steps, some of them before the interrupt."""

    def make(name: str) -> Trainer:
        one = trainer(tmp_path / name)
        one.run = run_options(tmp_path / name, report_every=5, save_every=100)
        return one

    expected = run(make("through"))
    one = make("run")
    train_step, calls = one.train_step, []

    def interrupted(batch: DeviceBatch) -> Any:
        calls.append(1)
        if len(calls) == 3:
            os.kill(os.getpid(), signal.SIGTERM)
        return train_step(batch)

    one.train_step = interrupted  # type: ignore[method-assign]
    with pytest.raises(TrainingInterrupted, match="after 3 steps"):
        run(one)
    again = make("run")
    again.resume()
    assert run(again) == expected


@pytest.fixture
def as_in_a_terminal() -> Iterator[None]:
    """As in a terminal; a process that runs tests for another one may ignore the signal."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_a_second_signal_acts_at_once(as_in_a_terminal: None) -> None:
    before = signal.getsignal(signal.SIGINT)
    with interruptible() as is_interrupted, pytest.raises(KeyboardInterrupt):
        os.kill(os.getpid(), signal.SIGINT)
        assert is_interrupted.is_set()
        os.kill(os.getpid(), signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is before


def test_outside_the_main_thread_signals_are_left_alone() -> None:
    before, seen = signal.getsignal(signal.SIGINT), []

    def work() -> None:
        with interruptible():
            seen.append(signal.getsignal(signal.SIGINT) is before)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [True]


# --- sparing the host


def test_each_batch_is_made_once_and_fetched_before_the_weights_are_updated(tmp_path: Path) -> None:
    one = trainer(tmp_path)
    made, update = [], one.optimizer.step

    class RecordingMixture(Mixture):
        def batch(self, step: int) -> RowArray:
            made.append(step)
            return super().batch(step)

    def updating(scale: float) -> torch.Tensor:
        made.append("updated")
        return update(scale)

    shape = {field.name: getattr(one.mixture, field.name) for field in fields(Mixture)}
    one.mixture, one.optimizer.step = RecordingMixture(**shape), updating  # type: ignore[method-assign]
    run(one)
    expected: list[Any] = [0]
    for step in range(1, 12):
        expected += [step, "updated"]
    assert made == [*expected, "updated"]


def test_one_thread_is_enough_beside_a_gpu_and_all_are_given_back() -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        with single_host_thread(torch.device("cuda")):
            assert torch.get_num_threads() == 1
        assert torch.get_num_threads() == 2
        with single_host_thread(torch.device("cpu")):
            assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


# --- in parts


def test_parts_of_an_odd_number_of_sequences_are_refused(tmp_path: Path) -> None:
    with pytest.raises(
        UsageError,
        match=r"4 sequences in a batch, 4 micro-batches and 1 processes; the .* multiple of 8",
    ):
        trainer(tmp_path, grad_accum_steps=4)


# --- fitting to a time


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def paced(seconds: float, each: float, spent: float = 0.0, first: float = 20.0) -> tuple[int, int]:
    """The step at which the number of steps is known, and the number; the first step is slow."""
    clock, waits = Clock(), []
    budget = TimeBudget(seconds, spent, clock)
    for step in range(1, 10_000):
        clock.now += first if step == 1 else each
        if steps := budget.fit(step, lambda: waits.append(1)):
            assert len(waits) == 2
            return step, steps
    raise AssertionError("never fitted")


def test_the_steps_that_fit_into_a_time_are_counted_without_the_slow_first_one() -> None:
    step, steps = paced(seconds=1000.0, each=0.5)
    assert step == 91
    assert 20 + steps * 0.5 == pytest.approx(1000, abs=2)


def test_long_steps_are_counted_early() -> None:
    step, steps = paced(seconds=100.0, each=4.0)
    assert step <= 8
    assert 20 + (steps - 1) * 4.0 == pytest.approx(100, abs=4)


def test_time_spent_before_a_resume_counts() -> None:
    assert paced(seconds=1000.0, each=0.5, spent=400.0)[1] == pytest.approx(1160, abs=4)


def timed(directory: Path, monkeypatch: pytest.MonkeyPatch, steps: int) -> Trainer:
    """A run of 12 seconds by a clock that its own steps move, each by half a second."""
    clock = Clock()
    monkeypatch.setattr(loop, "TimeBudget", partial(TimeBudget, clock=clock))
    one = trainer(directory, seconds=12.0, schedule=Schedule(steps=steps, warmup=2))
    train_step = one.train_step

    def moving(batch: DeviceBatch) -> Any:
        clock.now += 0.5
        return train_step(batch)

    one.train_step = moving  # type: ignore[method-assign]
    return one


@pytest.mark.parametrize("steps", [4, 10**6])
def test_a_run_takes_its_time_and_keeps_its_steps_when_resumed(
    steps: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether the recipe's own number of steps is smaller or greater."""
    reports = run(timed(tmp_path, monkeypatch, steps))
    assert reports[-1][0] == reports[-1][1] == 24
    assert min(report[-1] for report in reports) > 0, "no rate below 0"
    saved_states(tmp_path)[-1][1].unlink()
    again = timed(tmp_path, monkeypatch, steps)
    assert again.resume() == 18
    assert again.schedule.steps == 24


def test_a_run_of_a_time_is_resumed_before_its_steps_are_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    break_after(timed(tmp_path, monkeypatch, 6), step=7)
    again = timed(tmp_path, monkeypatch, 6)
    assert again.resume() == 6
    assert run(again)[-1][0] > 6


# --- the file


def test_a_line_that_a_kill_cut_short_is_left_out(tmp_path: Path) -> None:
    metrics = MetricsFile(tmp_path)
    assert metrics.read() == []
    lines = [json.dumps({"step": step}) for step in (1, 2, 3)]
    metrics.path.write_text("\n".join(lines)[:-4], encoding="utf-8")
    assert metrics.read() == [{"step": 1}, {"step": 2}]
    metrics.drop_after(1)
    assert metrics.path.read_text() == '{"step": 1}\n'
