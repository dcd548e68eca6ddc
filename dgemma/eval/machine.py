"""Measurements of the machine during answers: noise, peak memory, energy, temperature.

Each is None if the platform does not provide it.
"""

import resource
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import torch

PROBE_SIZE = 384  # rows and columns of the products of a noise probe
PROBE_PRODUCTS = 12
CLEAR_REFS, STATUS = Path("/proc/self/clear_refs"), Path("/proc/self/status")
RAPL = Path("/sys/class/powercap/intel-rapl:0/energy_uj")
NVIDIA_SMI = "nvidia-smi --query-gpu=power.draw,temperature.gpu --format=csv,noheader,nounits"
SAMPLE_MILLISECONDS = 200


@dataclass(slots=True, kw_only=True)
class ResourceUse:
    """Resources of one attempt."""

    ram_bytes: int | None = None  # of this process, at most
    vram_bytes: int | None = None
    joules: float | None = None
    celsius: float | None = None


class Machine:
    """Reads the measurements of one device. Close it to stop the power sampler."""

    def __init__(self, device: torch.device, dtype: str) -> None:
        self.device, self.dtype = device, dtype
        generator = torch.Generator().manual_seed(0)
        self.matrix_DD = torch.rand(PROBE_SIZE, PROBE_SIZE, generator=generator).to(device)
        self.power = PowerSampler.start() if device.type == "cuda" else None

    def close(self) -> None:
        if self.power is not None:
            self.power.close()

    def probe(self) -> float:
        """Time a fixed amount of work, which varies only with other load on the machine."""
        self._wait()
        started = time.perf_counter()
        product_DD = self.matrix_DD
        for _ in range(PROBE_PRODUCTS):
            product_DD = (product_DD @ self.matrix_DD) / PROBE_SIZE
        self._wait()
        return time.perf_counter() - started

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    @contextmanager
    def measuring(self) -> Iterator[ResourceUse]:
        """Measure one attempt; the usage is complete when the block ends."""
        usage, is_cuda = ResourceUse(), self.device.type == "cuda"
        reset_peak_ram()
        if is_cuda:
            torch.cuda.reset_peak_memory_stats(self.device)
        joules, started = read_rapl(), time.monotonic()
        try:
            yield usage
        finally:
            usage.ram_bytes = peak_ram()
            if is_cuda:
                usage.vram_bytes = torch.cuda.max_memory_reserved(self.device)
            if self.power is not None:
                usage.joules, usage.celsius = self.power.between(started, time.monotonic())
            elif joules is not None and (after := read_rapl()) is not None and after >= joules:
                usage.joules = after - joules


def reset_peak_ram() -> None:
    """Start a new peak of this process; where that is not possible, peaks only grow."""
    with suppress(OSError):
        CLEAR_REFS.write_text("5", encoding="ascii")


def peak_ram() -> int | None:
    """Return the largest resident size since the last reset, in bytes."""
    try:
        lines = STATUS.read_text(encoding="ascii").splitlines()
        return next(int(line.split()[1]) << 10 for line in lines if line.startswith("VmHWM"))
    except (OSError, StopIteration, ValueError):
        unit = 1 if sys.platform == "darwin" else 1 << 10
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def read_rapl() -> float | None:
    """Return the joules that the processor package has used, if we may read its counter."""
    try:
        return int(RAPL.read_text(encoding="ascii")) / 1e6
    except (OSError, ValueError):
        return None


class PowerSampler:
    """Samples of `nvidia-smi`, which runs until it is closed."""

    def __init__(self, process: "subprocess.Popen[str]") -> None:
        self.process = process
        self.samples: list[tuple[float, float, float]] = []  # time, watts, degrees
        threading.Thread(target=self._read, daemon=True).start()

    @classmethod
    def start(cls) -> "PowerSampler | None":
        if shutil.which("nvidia-smi") is None:
            return None
        command = [*NVIDIA_SMI.split(), "-lms", str(SAMPLE_MILLISECONDS)]
        pipe, null = subprocess.PIPE, subprocess.DEVNULL
        return cls(subprocess.Popen(command, stdout=pipe, stderr=null, text=True))

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            try:
                watts, degrees = map(float, line.split(","))
            except ValueError:
                continue  # a field that this GPU does not report
            self.samples.append((time.monotonic(), watts, degrees))

    def between(self, start: float, end: float) -> tuple[float | None, float | None]:
        """Return joules and the highest temperature of a span of time."""
        found = [s for s in list(self.samples) if start <= s[0] <= end]
        if not found:
            return None, None
        watts = sum(sample[1] for sample in found) / len(found)
        return watts * (end - start), max(sample[2] for sample in found)

    def close(self) -> None:
        self.process.terminate()
        self.process.wait()
