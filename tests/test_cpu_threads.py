"""Spinning follows the load of the machine, in this process's own libgomp."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from dgemma import SHORT_SPINNING
from dgemma.cpu_threads import LONG_SECONDS, LoadMeter, SpinControl, may_choose, num_cores

LINE = "some avg10={:.2f} avg60=0.00 avg300=0.00 total={:d}\nfull avg10=0.00 total=0\n"
# Two threads of work that is nothing but waiting: parallel loops over little, one after another.
SPIN_SECONDS = """
import os, threading, time
import torch
from dgemma.cpu_threads import openmp_library, SpinControl

def cost():
    begin = time.process_time()
    for _ in range(300):
        x.add_(1)
        time.sleep(0.0002)  # the next loop is late: whoever spins spins in vain
    return time.process_time() - begin

x, control = torch.zeros(1 << 16), SpinControl(openmp_library())
cost()
costs = []
for _ in range(3):
    for spins in (True, False):
        control.set_spinning(spins)
        costs.append(cost())
control.set_spinning(True)
other = []
def elsewhere():
    cost()  # a pool of its own
    other.append(cost())
for end in (False, True):
    if end:
        control.end_pool()
    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
print(sum(costs[::2]), sum(costs[1::2]), *other, threading.active_count())
"""


class Clock:
    """The time, and a pressure file, set by a test."""

    def __init__(self, file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.file, self.now = file, 100.0
        monkeypatch.setattr("dgemma.cpu_threads.PRESSURE", file)
        monkeypatch.setattr("dgemma.cpu_threads.time.monotonic", lambda: self.now)

    def pass_seconds(self, seconds: float, average: float, waited: float) -> None:
        self.now += seconds
        self.file.write_text(LINE.format(100 * average, round(waited * 1e6)), "ascii")


def test_the_load_is_the_share_of_the_last_half_second(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, meter = Clock(tmp_path / "cpu", monkeypatch), LoadMeter()
    clock.pass_seconds(0, 0.4, 1000.0)
    assert meter.is_busy() is True  # the first look takes the system's average
    clock.pass_seconds(0.3, 0.4, 1000.0)
    assert meter.is_busy() is None
    clock.pass_seconds(0.3, 0.4, 1000.01)
    assert meter.is_busy() is False  # quiet now, whatever the average of ten seconds says
    clock.pass_seconds(0.6, 0.0, 1000.5)
    assert meter.is_busy() is True
    clock.pass_seconds(10 * LONG_SECONDS, 0.0, 1090.0)
    assert meter.is_busy() is False  # busy for most of a long pause, but not at its end


def test_without_pressure_the_load_average_decides(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock(tmp_path / "none", monkeypatch)
    meter = LoadMeter()
    for load, is_busy in ((0.0, False), (1e3, True)):
        clock.now += 1
        monkeypatch.setattr("os.getloadavg", lambda load=load: (load, load, load))
        assert meter.is_busy() is is_busy


def test_a_users_choice_is_left_alone() -> None:
    assert may_choose({}) and may_choose({**SHORT_SPINNING, "KMP_BLOCKTIME": "0"})
    assert not may_choose({"OMP_WAIT_POLICY": "active"})
    assert not may_choose({**SHORT_SPINNING, "GOMP_SPINCOUNT": "7"})
    SpinControl(None).update()
    SpinControl(None).end_pool()


@pytest.mark.skipif(sys.platform != "linux" or num_cores() < 2, reason="libgomp, and two cores")
def test_an_idle_pool_turns_spinning_off_and_its_end_on_again() -> None:
    """By CPU time. Whoever has no core cannot spin, so a busy machine gets three attempts."""
    for _ in range(3):
        spinning, asleep, two_pools, one_pool, threads = spin_seconds()
        assert threads == 1
        if asleep < spinning / 2 and two_pools < one_pool / 2:
            return
    raise AssertionError((spinning, asleep, two_pools, one_pool))


def spin_seconds() -> tuple[float, ...]:
    """Run SPIN_SECONDS with two threads or more: 20,000 rounds for each wait, or none."""
    names = ("OMP_", "GOMP_", "KMP_")
    plain = {k: v for k, v in os.environ.items() if not k.startswith(names)}
    call = [sys.executable, "-c", "import dgemma\n" + SPIN_SECONDS]
    environment = {**plain, "OMP_NUM_THREADS": str(num_cores()), "GOMP_SPINCOUNT": "20000"}
    environment["OMP_WAIT_POLICY"] = "passive"
    done = subprocess.run(call, env=environment, capture_output=True, text=True, check=True)
    return tuple(map(float, done.stdout.split()))
