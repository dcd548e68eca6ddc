"""What the host does in a training step, part by part, and whether the GPU waits for it.

    PYTHONPATH=. python bench/train_host.py [--compile kinds] [--workers 4] [--steps 40]

The loop is that of a run (`dgemma/train/loop.py`), on random texts.

On a GPU, with the built-in model's shape: milliseconds of the host in each part, which include
waiting where the GPU is so far behind that it takes no more work; milliseconds of a step; those in
which a kernel runs, from a profile of a few steps; the share of the time in which none does; and
operations for which the host waits until the GPU has done everything.

On a CPU, with as many layers and weights but narrow ones: milliseconds, and calls that reach
PyTorch's dispatcher, about as many as a GPU would be given launches. The two passes and the
backward are not compiled there, so theirs mean nothing. A captured step of the optimizer is left
out of the count: a GPU is given it as one piece.
"""

import argparse
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from train_step import COMPILE, NANO, mixture

from dgemma.train import objective as objectives
from dgemma.train.average import Average
from dgemma.train.feed import Feed
from dgemma.train.fresh import fresh_model
from dgemma.train.loop import RunSettings, Trainer
from dgemma.train.objective import Objective
from dgemma.train.optim import Masters, OptimSettings, Schedule
from dgemma.train.report import Meter
from dgemma.train.weighting import Weighting

WARM, PROFILED = 8, 4
NARROW = {
    "vocab_size": 8192,
    "hidden_size": 16,
    "intermediate_size": 16,
    "moe_intermediate_size": 8,
    "head_dim": 8,
    "global_head_dim": 8,
}
Parts = dict[str, tuple[Any, str]]
# Methods, or functions of a module, in the order of a step; those indented are inside the others.
PARTS: Parts = {
    "wait for the next batch, unpickle": (Feed, "look_ahead"),
    "  pin, copy, counts": (Feed, "_load"),
    "masks and turns": (objectives, "contexts"),
    "first pass": (Objective, "first_pass"),
    "second pass": (Objective, "losses"),  # of the one objective, see `run`
    "backward": (torch.Tensor, "backward"),
    "optimizer": (Masters, "step"),
    "  of it gradients": (Masters, "_take_gradients"),
    "running mean": (Average, "update"),
    "meter": (Meter, "add"),
}


class Watch:
    """Seconds and dispatcher calls of each part. All of it changes."""

    def __init__(self, parts: Parts) -> None:
        self.parts = parts
        self.seconds: Counter[str] = Counter()
        self.calls: Counter[str] = Counter()
        self.inside: list[str] = []

    def wrapped(self, label: str, work: Callable[..., Any]) -> Callable[..., Any]:
        def watched(*args: Any, **kwargs: Any) -> Any:
            self.inside.append(label)
            start = time.perf_counter()
            try:
                return work(*args, **kwargs)
            finally:
                self.seconds[label] += time.perf_counter() - start
                self.inside.pop()

        return watched

    @contextmanager
    def over_all(self) -> Iterator[None]:
        before = {label: getattr(*place) for label, place in self.parts.items()}
        for label, (owner, name) in self.parts.items():
            setattr(owner, name, self.wrapped(label, before[label]))
        try:
            yield
        finally:
            for label, (owner, name) in self.parts.items():
                setattr(owner, name, before[label])


class Calls(TorchDispatchMode):
    def __init__(self, watch: Watch) -> None:
        super().__init__()
        self.watch = watch

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for label in self.watch.inside:
            self.watch.calls[label] += 1
        return func(*args, **(kwargs or {}))


def left_out(work: Callable[[], Tensor]) -> Callable[[], Tensor]:
    """In place of a captured step, of which a CPU knows nothing."""
    norm = torch.zeros(())
    return lambda: norm.clone()


def trainer(args: argparse.Namespace, directory: Path) -> Trainer:
    on_gpu = args.device == "cuda"
    model = fresh_model(NANO if on_gpu else replace(NANO, **NARROW), 0, args.device)
    masters = Masters(
        model, OptimSettings(), torch.bfloat16, left_out if args.captured and not on_gpu else None
    )
    objective = Objective(model, Weighting(rollout=args.rollout), is_flex=on_gpu)
    if on_gpu:
        COMPILE[args.compile](objective)
    steps = 10**6
    settings = RunSettings(
        directory=directory, save_every=steps, report_every=1, workers=args.workers
    )
    average = Average(masters.weights, 0.999)
    return Trainer(objective, masters, mixture(args), Schedule(steps=steps), settings, average)


def wait(args: argparse.Namespace) -> None:
    if args.device == "cuda":
        torch.cuda.synchronize()


def run(one: Trainer, args: argparse.Namespace) -> None:
    """The loop without its reports, each of which would wait for the GPU."""
    one.run = replace(one.run, report_every=10**6)
    # A pass that is compiled whole hides the method of the class.
    watch = Watch(PARTS | {"second pass": (one.objective, "losses")})
    began = time.perf_counter()
    one.feed = Feed(one.mixture, 0, one._feeding())

    def step() -> None:
        assert one.feed is not None
        loaded = one.feed.take()
        losses, norm = one._move(loaded)
        one.meter.add(losses, norm, one._rows(loaded))
        one.step += 1

    for _ in range(WARM):
        step()
    wait(args)
    print(f"ready after {time.perf_counter() - began:.1f} s", flush=True)
    start, marks = time.perf_counter(), []
    with watch.over_all():
        for _ in range(args.steps):
            step()
            if args.device == "cuda":
                marks.append(torch.cuda.Event(enable_timing=True))
                marks[-1].record()
    host = time.perf_counter() - start
    wait(args)
    wall = 1e3 * (time.perf_counter() - start) / args.steps
    if args.device == "cpu":
        watch.calls.clear()
        with watch.over_all(), Calls(watch):
            step()
    table(watch, args)
    print(f"{'host':36} {1e3 * host / args.steps:9.2f}\n{'step':36} {wall:9.2f}")
    if args.device == "cuda":
        each = sorted(a.elapsed_time(b) for a, b in pairwise(marks))
        print(f"{'median and longest on the GPU':36} {each[len(each) // 2]:9.2f} {each[-1]:9.2f}")
        busy = busy_ms(step)
        print(f"{'kernels run':36} {busy:9.2f}\n{'idle':36} {100 * (1 - busy / wall):8.1f} %")
        print(f"optimizer captured: {one.masters.replay and one.masters.replay.is_captured}")
        waits(step)


def table(watch: Watch, args: argparse.Namespace) -> None:
    print(f"{'part':36} {'ms':>9} {'calls':>7}")
    for label in PARTS:
        calls = watch.calls[label] if args.device == "cpu" else ""
        print(f"{label:36} {1e3 * watch.seconds[label] / args.steps:9.2f} {calls:>7}", flush=True)


def busy_ms(step: Callable[[], None]) -> float:
    """Milliseconds of a step in which at least one kernel runs."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as watcher:
        for _ in range(PROFILED):
            step()
        torch.cuda.synchronize()
    spans = sorted(
        (event.time_range.start, event.time_range.end)
        for event in watcher.events()
        if event.device_type == torch.autograd.DeviceType.CUDA
    )
    print(f"{'kernels and copies':36} {len(spans) / PROFILED:9.0f}")
    busy, end = 0.0, 0.0
    for first, last in spans:
        busy += max(0.0, last - max(first, end))
        end = max(end, last)
    return busy / 1e3 / PROFILED


def waits(step: Callable[[], None]) -> None:
    """What makes the host wait until the GPU has done everything, in one step."""
    torch.cuda.set_sync_debug_mode("warn")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        step()
    torch.cuda.set_sync_debug_mode("default")
    places = Counter(
        f"{Path(w.filename).name}:{w.lineno}" for w in caught if "synchroniz" in str(w.message)
    )
    print(f"{'waits of the host for the GPU':36} {sum(places.values()):9d}  {dict(places)}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--compile", choices=COMPILE, default="kinds")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--sequences", type=int, default=64)
    parser.add_argument("--rows", type=int, default=2048)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--rollout", type=float, default=0.6)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--captured", action="store_true", help="on a CPU: leave its work out")
    args = parser.parse_args()
    if args.device == "cuda":
        torch.set_num_threads(1)
        print(torch.cuda.get_device_name(), torch.__version__)
    with tempfile.TemporaryDirectory() as directory:
        one = trainer(args, Path(directory))
        run(one, args)
        one.feed = None


if __name__ == "__main__":
    main()
