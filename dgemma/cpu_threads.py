"""Waiting of the CPU threads of a pass for each other: by spinning, or asleep on a busy machine.

`dgemma/__init__.py` says why, and sets what OpenMP reads once, before torch is loaded.
"""

import ctypes
import os
import re
import time
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from threading import Event, Thread

import torch

from dgemma import SHORT_SPINNING, WAITING

PRESSURE = Path("/proc/pressure/cpu")
MAX_PRESSURE = 0.15  # share of the time in which some task waited for a core
LOOK_SECONDS = 0.5  # between two looks at the load
LONG_SECONDS = 10.0  # after so long without a look, the system's own average is newer
OMP_PAUSE_SOFT = 1


class SpinControl:
    """Keeps the CPU threads of a pass from spinning while other programs want the cores.

    libgomp reads its settings once, but it does not spin while the process has more OpenMP threads
    than cores. So a pool of idle threads, held by a thread of its own, turns spinning off, and its
    end turns it on again. Nothing that is computed depends on it.
    """

    def __init__(self, library: ctypes.CDLL | None) -> None:
        self._library = library
        self._load = LoadMeter()
        self._release: Event | None = None  # of the idle pool, while it is held
        self._holder: Thread | None = None

    @property
    def spins(self) -> bool:
        return self._release is None

    def update(self) -> None:
        """Follow the load of the machine; cheap enough to be called before each pass."""
        if self._library is None or torch.get_num_threads() == 1:
            return
        is_busy = self._load.is_busy()
        if is_busy is not None and is_busy == self.spins:
            self.set_spinning(not is_busy)

    def set_spinning(self, spins: bool) -> None:
        if spins and self._release is not None and self._holder is not None:
            self._release.set()
            self._holder.join()
            self._release = self._holder = None
        elif not spins and self._release is None:
            self._release, started = Event(), Event()
            given = (self._release, started)
            self._holder = Thread(target=self._hold, args=given, name="idle-pool", daemon=True)
            self._holder.start()
            started.wait()

    def _hold(self, release: Event, started: Event) -> None:
        assert self._library is not None
        # `free(NULL)` in each thread: nothing. The pool lasts as long as the thread that made it.
        nothing = ctypes.cast(ctypes.CDLL(None).free, ctypes.c_void_p)
        self._library.GOMP_parallel(nothing, None, num_cores() + 1, 0)
        started.set()
        release.wait()

    def end_pool(self) -> None:
        """End the pool of this thread: otherwise a pool made by another thread waits forever.

        After a load in the main thread, a server that computes in another one would have more
        threads than cores, and never spin.
        """
        if self._library is not None:
            self._library.omp_pause_resource_all(OMP_PAUSE_SOFT)


class LoadMeter:
    """Tells if other programs compete for the cores: by Linux's pressure, or the load average."""

    def __init__(self) -> None:
        self._looked, self._waited = -LONG_SECONDS, 0.0

    def is_busy(self) -> bool | None:
        """Return None if it is too early to say."""
        now = time.monotonic()
        elapsed = now - self._looked
        if elapsed < LOOK_SECONDS:
            return None
        self._looked = now
        found = read_pressure()
        if found is None:
            has_average = hasattr(os, "getloadavg")  # not on Windows
            return has_average and os.getloadavg()[0] > num_cores()
        average, waited = found
        share = (waited - self._waited) / elapsed if elapsed < LONG_SECONDS else average
        self._waited = waited
        return share > MAX_PRESSURE


def read_pressure() -> tuple[float, float] | None:
    """Share of the last ten seconds in which some task waited for a core, and seconds in all."""
    try:
        text = PRESSURE.read_text(encoding="ascii")
    except (OSError, ValueError):
        return None
    found = re.search(r"some avg10=([\d.]+) .*?total=(\d+)", text)
    return found and (float(found[1]) / 100, int(found[2]) / 1e6)


def num_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@cache
def spin_control() -> SpinControl:
    """Return the control of this process; without libgomp, or if a user chose, it does nothing."""
    return SpinControl(openmp_library() if may_choose(os.environ) else None)


def may_choose(environment: Mapping[str, str]) -> bool:
    """True if nobody but dgemma has said how threads wait."""
    chosen = {name: environment[name] for name in WAITING if name in environment}
    return all({"KMP_BLOCKTIME": "0", **SHORT_SPINNING}.get(k) == v for k, v in chosen.items())


def openmp_library() -> ctypes.CDLL | None:
    """Return the libgomp that torch has loaded, if it has one with what is needed."""
    try:
        maps = Path("/proc/self/maps").read_text(encoding="utf-8")
        paths = set(re.findall(r"(/\S*libgomp\S*)$", maps, flags=re.MULTILINE))
        path = max(paths, key=lambda path: "torch" in path, default="")
        library = ctypes.CDLL(path) if path else None
    except (OSError, ValueError):
        return None
    needed = ("GOMP_parallel", "omp_pause_resource_all")
    return library if all(hasattr(library, name) for name in needed) else None
