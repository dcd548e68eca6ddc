"""Files of a run: training checkpoints, metrics and their plot.

A checkpoint holds everything the next step depends on, and nothing else. Batches and noise are
functions of the seed and the step, so that is weights, optimizers, the number of steps, persistent
sequences, and metrics not yet reported. It is written under another name and renamed: complete or
absent.

    DIRECTORY/state-00001000.pt     to resume from, and .sha256 of it
    DIRECTORY/metrics.jsonl         one line a report
    DIRECTORY/heldout.jsonl         losses of held-out examples: at first and at each saved state
    DIRECTORY/recipe.json           the recipe the run was started with
    DIRECTORY/checkpoint/           the model, in the released layout; or adapter/
"""

import json
import os
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from torch import Tensor

from dgemma.config.strict_json import sync_directory
from dgemma.errors import CheckpointError, UsageError
from dgemma.train.distributed import ProcessGroup
from dgemma.train.objective import Losses
from dgemma.weights.files import file_digest
from dgemma.weights.safetensors_io import HashedFile, sync

METRICS, HELDOUT, RECIPE = "metrics.jsonl", "heldout.jsonl", "recipe.json"
LOCK = ".lock"
DIGEST, PARTIAL = ".sha256", ".part"  # suffixes of a state's SHA-256, and of what is being written
STATE_NAME = re.compile(r"state-(\d{8})\.pt")


def saved_states(directory: Path) -> list[tuple[int, Path]]:
    """List the saved states of a run by step, oldest first."""
    matches = [(STATE_NAME.fullmatch(path.name), path) for path in directory.glob("state-*.pt")]
    return sorted((int(match[1]), path) for match, path in matches if match)


def save_state(
    directory: Path, step: int, state: dict[str, Any], *, keep: int, is_writer: bool = True
) -> Path:
    """Write a state and delete all but the newest `keep`; only rank 0 writes."""
    path = directory / f"state-{step:08d}.pt"
    if not is_writer:
        return path
    directory.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(PARTIAL)
    with partial.open("wb") as file:
        hashed = HashedFile(file)
        torch.save({"step": step, **state}, hashed)  # type: ignore[arg-type]
        sync(file)
    # The digest first: a state under its final name always has a digest.
    digest = path.with_suffix(DIGEST).with_suffix(PARTIAL + DIGEST)
    with digest.open("wb") as file:
        file.write(hashed.hexdigest().encode())
        sync(file)
    digest.rename(path.with_suffix(DIGEST))
    partial.rename(path)
    sync_directory(directory)
    for _, old in saved_states(directory)[: -max(1, keep)]:
        old.unlink()
        old.with_suffix(DIGEST).unlink(missing_ok=True)
    return path


_locks: dict[Path, int] = {}  # open files of the runs of this process


def lock_run(directory: Path) -> None:
    """Lock a run's directory for this process; refuses a directory locked by another.

    The system releases the lock when the process ends, in any way.
    """
    directory.mkdir(parents=True, exist_ok=True)
    path = directory.resolve() / LOCK
    try:
        import fcntl
    except ImportError:  # Windows
        return
    if path in _locks:
        return
    handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        owner = os.read(handle, 20).decode("ascii", "replace").strip()
        os.close(handle)
        raise UsageError(
            f"{directory} is the run of another process ({owner or 'unknown'}), which is still "
            "training; wait for it, or choose another directory"
        ) from None
    os.truncate(handle, 0)
    os.write(handle, str(os.getpid()).encode())
    _locks[path] = handle


def delete_run(directory: Path) -> None:
    """Delete the states, metrics and recipe of a run; keeps a finished model."""
    states = [path for _, path in saved_states(directory)]
    states += [*directory.glob(f"state-*{DIGEST}"), *directory.glob(f"state-*{PARTIAL}")]
    for path in [*states, *(directory / name for name in (METRICS, HELDOUT, RECIPE))]:
        path.unlink(missing_ok=True)


def load_state(path: Path) -> dict[str, Any]:
    """Read a state after comparing its SHA-256, without executing anything in it."""
    digest = path.with_suffix(DIGEST)
    try:
        if digest.exists() and file_digest(path) != digest.read_text("utf-8").strip():
            raise ValueError("it does not have the SHA-256 it was written with")
        state = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except (OSError, RuntimeError, EOFError, ValueError, UnpicklingError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise CheckpointError(
            f"{path} cannot be read ({reason}); delete it to resume from the state before"
        ) from None
    assert isinstance(state, dict)
    return state


# --- metrics


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """Means over the steps since the last report."""

    step: int
    steps: int
    total: float
    denoise: float
    causal: float
    balance: float
    grad_norm: float
    lr_scale: float  # multiplies the peak learning rates
    rows_per_second: float
    seconds: float


@dataclass
class Meter:
    """Unreported losses, kept on the device so that no step synchronizes."""

    losses: list[Tensor] = field(default_factory=list)
    rows: int = 0
    began: float = field(default_factory=time.perf_counter)

    def add(self, losses: Losses, grad_norm: Tensor, rows: int) -> None:
        self.losses.append(torch.stack([*(loss.detach() for loss in losses), grad_norm.detach()]))
        self.rows += rows

    def read(self, group: ProcessGroup) -> tuple[list[float], float]:
        """Return mean losses and gradient norm over all processes, and rows per second."""
        means = torch.stack(self.losses).mean(0)
        # Every process has its part of the losses, and the norm of all.
        means = torch.cat([group.all_reduce(means[:-1]), means[-1:]])
        values = means.tolist()
        rows_per_second = self.rows / (time.perf_counter() - self.began)
        self.losses, self.rows, self.began = [], 0, time.perf_counter()
        return values, rows_per_second

    def state(self) -> dict[str, Any]:
        return {"losses": [losses.cpu() for losses in self.losses], "rows": self.rows}

    def restore(self, state: dict[str, Any], device: torch.device) -> None:
        self.losses = [losses.to(device) for losses in state["losses"]]
        self.rows = state["rows"]


class MetricsFile:
    """Metrics of a run, one line each. A resumed run drops lines after its state."""

    def __init__(self, directory: Path, name: str = METRICS) -> None:
        self.path = directory / name

    def add(self, metrics: Mapping[str, Any]) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(dict(metrics)) + "\n")

    def read(self) -> list[dict[str, Any]]:
        """Read all lines, except one that a kill cut short."""
        if not self.path.exists():
            return []
        reports = []
        for line in self.path.read_text(encoding="utf-8").splitlines():
            try:
                reports.append(json.loads(line))
            except json.JSONDecodeError:
                continue
        return reports

    def drop_after(self, step: int) -> None:
        reports = [report for report in self.read() if report["step"] <= step]
        if self.path.exists():
            text = "".join(json.dumps(report) + "\n" for report in reports)
            self.path.write_text(text, encoding="utf-8")


# --- plots

WIDTH, HEIGHT, MARGIN = 720, 360, 48  # of a plot, in pixels
COLOURS = ("#1f77b4", "#ff7f0e", "#1f77b4", "#ff7f0e")
PLOTTED = {"denoise": "canvases", "causal": "next token"}
BARS = "▁▂▃▄▅▆▇█"
Points = Sequence[tuple[float, float]]


def plot_losses(directory: Path) -> Path:
    """Plot the losses of a run, of training and held out, to its `loss.svg`."""
    curves = {}
    for name, kind in ((METRICS, ""), (HELDOUT, ", held out")):
        lines = MetricsFile(directory, name).read()
        for key, label in PLOTTED.items():
            curves[label + kind] = [(line["step"], line[key]) for line in lines]
    path = directory / "loss.svg"
    path.write_text(draw_svg(curves), encoding="utf-8")
    return path


def draw_svg(curves: Mapping[str, Points]) -> str:
    """Draw curves over steps, in nats a token; those of held-out losses are dashed, with dots."""
    points = [point for curve in curves.values() for point in curve]
    right = max((x for x, _ in points), default=1) or 1
    top = max((y for _, y in points), default=1) or 1
    across, up = (WIDTH - 2 * MARGIN) / right, (HEIGHT - 2 * MARGIN) / top
    shapes = [
        f'<path d="M{MARGIN} {MARGIN}V{HEIGHT - MARGIN}H{WIDTH - MARGIN}" stroke="#888"/>',
        _label(MARGIN, HEIGHT - 16, "step 0"),
        _label(WIDTH - MARGIN, HEIGHT - 16, f"{right:.0f}"),
        _label(8, MARGIN, f"{top:.2f}"),
        _label(8, HEIGHT - MARGIN, "0"),
    ]
    for number, (label, curve) in enumerate(curves.items()):
        placed = [(MARGIN + x * across, HEIGHT - MARGIN - y * up) for x, y in curve]
        if not placed:
            continue
        colour, is_heldout = COLOURS[number % len(COLOURS)], number >= len(PLOTTED)
        dashes = ' stroke-dasharray="6 4"' if is_heldout else ""
        line = " ".join(f"{x:.1f},{y:.1f}" for x, y in placed)
        shapes.append(f'<polyline points="{line}" stroke="{colour}"{dashes}/>')
        dots = placed if is_heldout else ()
        shapes += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colour}"/>' for x, y in dots]
        shapes.append(_label(WIDTH - 230, 20 + 16 * number, label, colour))
    size = f'width="{WIDTH}" height="{HEIGHT}" viewBox="0 0 {WIDTH} {HEIGHT}"'
    begin = f'<svg xmlns="http://www.w3.org/2000/svg" {size} fill="none" stroke-width="1.5">'
    background = '<rect width="100%" height="100%" fill="white"/>'
    return "\n".join([begin, background, *shapes, "</svg>\n"])


def _label(x: float, y: float, text: str, colour: str = "#444") -> str:
    font = 'font-family="sans-serif" font-size="12"'
    return f'<text x="{x}" y="{y}" fill="{colour}" {font}>{text}</text>'


def sparkline(values: Sequence[float]) -> str:
    """Draw values as bars of text, from their lowest to their highest."""
    low, high = min(values), max(values)
    scale = (len(BARS) - 1) / (high - low) if high > low else 0.0
    return "".join(BARS[round((value - low) * scale)] for value in values)


def heldout_summary(directory: Path) -> list[str]:
    """Summarize the held-out loss, and advise on the number of steps."""
    lines = MetricsFile(directory, HELDOUT).read()
    if len(lines) < 2:
        return []
    totals = [line["denoise"] + line["causal"] for line in lines]
    best = min(range(len(totals)), key=totals.__getitem__)
    last, step = lines[-1]["step"], lines[best]["step"]
    first_text, last_text = (
        f"{line['denoise']:.3f} + {line['causal']:.3f}" for line in (lines[0], lines[-1])
    )
    if best == len(totals) - 1:
        advice = f"it is lowest at the end: more steps may help (--steps {2 * last})"
    elif best == 0:
        advice = "it never fell: halve the rate (optim.adam_lr), or train on more examples"
    else:
        advice = f"it was lowest at step {step}: fewer steps may do as well (--steps {step})"
    return [
        f"held-out loss (canvases + next token): {first_text} before, {last_text} after  "
        f"{sparkline(totals)}",
        f"held-out loss: {advice}",
    ]
