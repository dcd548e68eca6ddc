"""The course of a run: means over some steps, and the file that keeps them, a line each."""

import json
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dgemma.train.distributed import Group
from dgemma.train.objective import Losses
from dgemma.train.state import METRICS


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


@dataclass
class Meter:
    """What is not reported yet, on the device, so that no step waits for the host; all of it
    changes."""

    losses: list[Tensor] = field(default_factory=list)
    rows: int = 0
    began: float = field(default_factory=time.perf_counter)

    def add(self, losses: Losses, norm: Tensor, rows: int) -> None:
        self.losses.append(torch.stack([*(loss.detach() for loss in losses), norm.detach()]))
        self.rows += rows

    def read(self, group: Group) -> tuple[list[float], float]:
        """Means of the losses and the norm, of all processes together, and rows a second."""
        means = torch.stack(self.losses).mean(0)
        # Every process has its share of the losses, and the norm as a whole.
        means = torch.cat([group.sum(means[:-1]), means[-1:]])
        values = means.tolist()
        rate = self.rows / (time.perf_counter() - self.began)
        self.losses, self.rows, self.began = [], 0, time.perf_counter()
        return values, rate

    def state(self) -> dict[str, Any]:
        return {"losses": [losses.cpu() for losses in self.losses], "rows": self.rows}

    def restore(self, state: dict[str, Any], device: torch.device) -> None:
        self.losses = [losses.to(device) for losses in state["losses"]]
        self.rows = state["rows"]


class Metrics:
    """The lines of a run's file. A run that goes on from a state has no lines after that state."""

    def __init__(self, directory: Path) -> None:
        self.path = directory / METRICS

    def add(self, report: Report) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(asdict(report)) + "\n")

    def read(self) -> list[dict[str, Any]]:
        """All lines; the last may have been cut short by a kill, and is then left out."""
        if not self.path.exists():
            return []
        found = []
        for line in self.path.read_text(encoding="utf-8").splitlines():
            try:
                found.append(json.loads(line))
            except json.JSONDecodeError:
                continue
        return found

    def cut(self, step: int) -> None:
        """Drop the lines after a step."""
        kept = [line for line in self.read() if line["step"] <= step]
        if self.path.exists():
            text = "".join(json.dumps(line) + "\n" for line in kept)
            self.path.write_text(text, encoding="utf-8")
