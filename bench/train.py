"""Training: rows per second of a step, the host's share of it, and what a recipe's sources weigh.

    PYTHONPATH=. python bench/train.py step [--model nano wide] [--twin experts dense]
        [--compile layer_types whole_pass] [--sequences 64] [--rows 2048] [--steps 20] [--profile]
    PYTHONPATH=. python bench/train.py host [--compile layer_types] [--workers 4] [--steps 40]
    PYTHONPATH=. python bench/train.py sources recipes/nano/nano.toml [--sequences 16]

step     nano, the built-in model's first shape, so small that norms and gathers weigh as much as
         GEMMs; and wide, twice its width. Each with its experts and as a dense twin, whose MLP has
         the width that is active. Seconds until ready are those of compiling, less where
         TORCHINDUCTOR_CACHE_DIR names a directory that has seen it. FLOP are on_device for what the
         objective needs (no recomputation, no optimizer, no padding of experts):
             rows             packed rows that belong to an example, clean and canvas rows alike
             6 * rows * (N_body + N_head)        forward and backward; N_body: active weights of the
                                                 layers, N_head: the tied table, once
             2 * rows / 2 * (N_body + 2 N_head)  the self-conditioning pass of every second
                                                 sequence: forward, LM head and soft embedding
             attention        12 * pairs * heads * head width, plus 4 * pairs / 2 of that pass;
                              pairs are those the mask lets see each other
host     The loop of a run (`dgemma/train/loop.py`) on random texts. On a GPU: milliseconds of the
         host in each part, which include waiting for a full launch queue; of a step; of kernels,
         from a profile of a few steps; the fraction of time without a kernel; and operations that
         make the host wait for the device. On a CPU, with narrow weights: milliseconds, and calls
         that reach PyTorch's dispatcher, about as many as a GPU's launches; passes are not compiled
         there, so theirs mean nothing, and a captured optimizer step is left out (`--captured`).
sources  Fraction of each source of a recipe: of the rows, of the denoising loss, of that in
         canvases with holes, of the causal loss. A weight in a recipe is of the rows alone. Needs
         the recipe's data.
"""

import argparse
import json
import os
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import pairwise, product
from pathlib import Path
from typing import Any, get_args

import numpy as np
import torch
from common import finish, head, wait
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from dgemma.config import ModelConfig, load_config_file
from dgemma.model.gemma import FeedForward, Gemma
from dgemma.train import objective as objective_module
from dgemma.train.batches import MixedBatches, Mixture, MixtureComponent, Prefetcher
from dgemma.train.build import initialize, open_recipe
from dgemma.train.checkpoint import Meter
from dgemma.train.corruption import NONE, Corruption, RowArray
from dgemma.train.layers import CompileMode
from dgemma.train.loop import RunOptions, Trainer
from dgemma.train.masks import dense_mask
from dgemma.train.objective import LossCounts, LossSettings, Objective, to_device
from dgemma.train.optim import MixedPrecisionOptimizer, OptimSettings, Schedule
from dgemma.train.packing import (
    CANVAS,
    EXAMPLE,
    PINNED,
    TARGET,
    WEIGHT,
    Batch,
    Example,
    RowCounts,
    count_real_rows,
)
from dgemma.train.recipe import DataSource, Recipe, RunSettings

# --- step

WARM = 6  # steps before the clock
PEAK = 989e12  # dense bf16 of an H100 or H200, by the data sheet

# The text model of nano's first run.
NANO = replace(
    load_config_file(Path(__file__).parents[1] / "recipes" / "nano" / "config.json"),
    vision=None,
    media_ids={},
)
WIDE = replace(
    NANO,
    hidden_size=1024,
    intermediate_size=1536,
    moe_intermediate_size=512,
    num_experts=16,
    num_attention_heads=16,
    num_key_value_heads=4,
    num_global_key_value_heads=4,
)
MODELS = {"nano": NANO, "wide": WIDE}
TWINS = ("experts", "dense")
COMPILE_MODES = get_args(CompileMode)


class PlainExperts(nn.Module):
    """A dense MLP of the active width, in place of the experts."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        inner = config.top_k_experts * config.moe_intermediate_size
        self.block = FeedForward(config.hidden_size, inner)
        for weight in self.block.parameters():
            nn.init.normal_(weight, std=weight.shape[1] ** -0.5)

    def forward(self, x_TD: Tensor, ids_TK: Tensor, topk_weights_TK: Tensor) -> Tensor:
        return self.block(x_TD)


class RandomTexts:
    """Pairs of the lengths the built-in model is trained on."""

    def draw(self, rng: np.random.Generator, count: int) -> list[Example]:
        sizes = rng.integers(20, 300, size=(count, 2))
        return [
            Example(*(rng.integers(300, 8192, size=n, dtype=np.int32) for n in pair))
            for pair in sizes
        ]


def mixture(args: argparse.Namespace) -> Mixture:
    texts = MixtureComponent(
        source=RandomTexts(),
        weight=1.0,
        canvas_lengths={64: 1.0, 96: 1.0, 128: 2.0},
        corruption=Corruption(vocab_size=8192),
    )
    return Mixture(
        components=[texts],
        sequences=args.sequences,
        rows=args.rows,
        seed=0,
    )


def flop(config: ModelConfig, batch: Batch) -> float:
    """FLOP of one step, by the formula above."""
    width, head = config.hidden_size, config.vocab_size * config.hidden_size
    body, attention = 0.0, 0.0
    pairs = {window: dense_pairs(batch, window) for window in (None, config.sliding_window)}
    for layer in range(config.num_hidden_layers):
        shape = config.attention(layer)
        heads = config.num_attention_heads * shape.head_dim
        keys = shape.num_kv_heads * shape.head_dim * (2 if shape.has_value else 1)
        inner = config.intermediate_size + config.top_k_experts * config.moe_intermediate_size
        body += width * (2 * heads + keys + 3 * inner + config.num_experts)
        attention += (12 + 4 / 2) * pairs[shape.window] * heads
    body += 3 * width * config.intermediate_size  # self-conditioning
    rows = float((batch.example >= 0).sum())
    return 6 * rows * (body + head) + rows * (body + 2 * head) + attention


def dense_pairs(batch: Batch, window: int | None) -> float:
    total = 0.0
    for one in range(len(batch.token)):
        part = Batch(*[getattr(batch, name)[one : one + 1] for name in Batch.__slots__])
        is_real = (part.example >= 0)[:, None, :, None]
        total += float((dense_mask(part, window) & is_real).sum())
    return total


Step = Callable[[Tensor], Tensor]


def make_step(model: Gemma, how: CompileMode, args: argparse.Namespace) -> Step:
    """Return a whole step: from the rows of a batch to its loss, with the weights updated."""
    device = torch.device(args.device)
    objective = Objective(
        model, LossSettings(rollout_fraction=args.rollout), is_flex=args.device == "cuda"
    )
    if args.device == "cuda":
        objective.compile_passes(how)
    optimizer = MixedPrecisionOptimizer(model, OptimSettings())

    def step(rows: Tensor) -> Tensor:
        counts = LossCounts.of(RowCounts.of(rows.numpy()), device)
        losses = objective(Batch.of(to_device(rows, device), device), counts)
        losses.total.backward()
        optimizer.step(0.01)
        return losses.total.detach()

    return step


def measure_step(
    name: str, model: Gemma, step: Step, args: argparse.Namespace
) -> dict[str, object]:
    source = mixture(args)
    batches = [torch.from_numpy(source.batch(number)) for number in range(4)]
    began = time.perf_counter()
    start = began
    for number in range(args.steps + WARM):
        if number == WARM:
            wait(torch.device(args.device))
            start = time.perf_counter()
            print(f"{name}: ready after {start - began:.1f} s", flush=True)
        loss = step(batches[number % len(batches)])
    wait(torch.device(args.device))
    # As in a run, where the host is steps ahead of the device.
    seconds = (time.perf_counter() - start) / args.steps
    of_batch = [flop(model.config, Batch.of(rows, args.device)) for rows in batches]
    work = float(np.mean(of_batch))
    filled = float(np.mean([(rows[EXAMPLE] >= 0).float().mean() for rows in batches]))
    result = {
        "name": name,
        "ready_s": round(start - began, 1),
        "ms": round(1e3 * seconds, 2),
        "rows_per_s": round(filled * args.sequences * args.rows / seconds),
        "tflop": round(work / 1e12, 2),
        "mfu": round(work / seconds / PEAK, 4),
        "filled": round(filled, 3),
        "loss": loss.item(),
        "peak_gib": round(torch.cuda.max_memory_allocated() / 2**30, 1)
        if args.device == "cuda"
        else None,
    }
    print(json.dumps(result), flush=True)
    return result


def profile_table(step: Step, args: argparse.Namespace) -> str:
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as watch

    rows = torch.from_numpy(mixture(args).batch(0))
    torch.cuda.synchronize()
    watcher = watch(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU])
    watcher.start()
    step(rows)
    torch.cuda.synchronize()
    watcher.stop()
    return watcher.key_averages().table(
        sort_by="self_cuda_time_total", row_limit=45, max_name_column_width=90
    )


def make(config: ModelConfig, twin: str, device: str) -> Gemma:
    model = initialize(config, 0, device)
    if twin == "dense":
        for layer in model.layers:
            layer.experts = PlainExperts(config).to(device)
            layer.router.requires_grad_(False)
    return model.to(torch.bfloat16 if device == "cuda" else torch.float32)


def case(model: str, twin: str, how: CompileMode, args: argparse.Namespace) -> dict[str, object]:
    torch._dynamo.reset()
    if args.device == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    made = make(MODELS[model], twin, args.device)
    step = make_step(made, how, args)
    result = measure_step(f"{model} {twin} {how}", made, step, args)
    if args.profile:
        text = profile_table(step, args)
        Path(os.environ.get("OUT", ".")).joinpath("profile.txt").write_text(text)
        print(text[:6000])
    return result


# --- host

HOST_WARM, PROFILED = 8, 4
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
    "wait for the next batch, unpickle": (Prefetcher, "prefetch"),
    "  pin, copy, counts": (Prefetcher, "_load"),
    "masks and cos_sin": (objective_module, "make_contexts"),
    "self-conditioning pass": (Objective, "self_cond_pass"),
    "loss pass": (Objective, "losses"),  # of the one objective, see `run_host`
    "backward": (torch.autograd, "backward"),
    "optimizer": (MixedPrecisionOptimizer, "step"),
    "  of it gradients": (MixedPrecisionOptimizer, "_collect_gradients"),
    "meter": (Meter, "add"),
}


class Watch:
    """Seconds and dispatcher calls of each part."""

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
    """Stand in for a captured optimizer step, which a CPU does not have."""
    norm = torch.zeros(())
    return lambda: norm.clone()


def trainer(args: argparse.Namespace, directory: Path) -> Trainer:
    on_gpu = args.device == "cuda"
    model = initialize(NANO if on_gpu else replace(NANO, **NARROW), 0, args.device)
    optimizer = MixedPrecisionOptimizer(
        model, OptimSettings(), torch.bfloat16, left_out if args.captured and not on_gpu else None
    )
    objective = Objective(model, LossSettings(rollout_fraction=args.rollout), is_flex=on_gpu)
    if on_gpu:
        objective.compile_passes(args.compile)
    steps = 10**6
    settings = RunSettings(save_every=steps, report_every=1, workers=args.workers)
    run = RunOptions(directory=directory, settings=settings)
    return Trainer(objective, optimizer, mixture(args), Schedule(steps=steps), run)


def run_host(one: Trainer, args: argparse.Namespace) -> None:
    """Run the loop without its reports, each of which would wait for the GPU."""
    one.run = replace(one.run, settings=replace(one.run.settings, report_every=10**6))
    # Set on the instance, where compiled passes are.
    watch = Watch(PARTS | {"loss pass": (one.objective, "losses")})
    began = time.perf_counter()
    one.prefetcher = Prefetcher(one.mixture, 0, one.loader_config())

    def step() -> None:
        assert one.prefetcher is not None
        one.train_step(one.prefetcher.take())

    for _ in range(HOST_WARM):
        step()
    wait(torch.device(args.device))
    print(f"ready after {time.perf_counter() - began:.1f} s", flush=True)
    start, marks = time.perf_counter(), []
    with watch.over_all():
        for _ in range(args.steps):
            step()
            if args.device == "cuda":
                marks.append(torch.cuda.Event(enable_timing=True))
                marks[-1].record()
    host = time.perf_counter() - start
    wait(torch.device(args.device))
    wall = 1e3 * (time.perf_counter() - start) / args.steps
    if args.device == "cpu":
        watch.calls.clear()
        with watch.over_all(), Calls(watch):
            step()
    print_parts(watch, args)
    print(f"{'host':36} {1e3 * host / args.steps:9.2f}\n{'step':36} {wall:9.2f}")
    if args.device == "cuda":
        each = sorted(a.elapsed_time(b) for a, b in pairwise(marks))
        print(f"{'median and longest on the GPU':36} {each[len(each) // 2]:9.2f} {each[-1]:9.2f}")
        busy = busy_ms(step)
        print(f"{'kernels run':36} {busy:9.2f}\n{'idle':36} {100 * (1 - busy / wall):8.1f} %")
        print(
            f"optimizer captured: {one.optimizer.captured and one.optimizer.captured.is_captured}"
        )
        waits(step)


def print_parts(watch: Watch, args: argparse.Namespace) -> None:
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
    """Count operations of one step that make the host wait for the device."""
    torch.cuda.set_sync_debug_mode("warn")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        step()
    torch.cuda.set_sync_debug_mode("default")
    lines = Counter(
        f"{Path(w.filename).name}:{w.lineno}" for w in caught if "synchroniz" in str(w.message)
    )
    print(f"{'waits of the host for the GPU':36} {sum(lines.values()):9d}  {dict(lines)}")


# --- sources


@dataclass(frozen=True, slots=True)
class Targets:
    """Targets of a source per row."""

    canvas: float
    holes: float  # of these, in canvases with holes
    clean: float

    @classmethod
    def of(cls, rows: RowArray) -> "Targets":
        counts = RowCounts.of(rows)
        real = sum(count_real_rows(rows))
        return cls(counts.canvas / real, in_holes(rows) / real, counts.clean / real)


def in_holes(rows: RowArray) -> int:
    """Weight of the targets in canvases that have pinned tokens."""
    is_canvas = rows[CANVAS] > NONE
    sequence, _ = np.nonzero(is_canvas)
    fields = rows[EXAMPLE][is_canvas], rows[CANVAS][is_canvas]
    _, which = np.unique(np.stack([sequence, *fields]), axis=1, return_inverse=True)
    has_pin = np.zeros(len(which), bool)
    has_pin[which[rows[PINNED][is_canvas] > 0]] = True
    has_target = rows[TARGET][is_canvas] > NONE
    return int(rows[WEIGHT][is_canvas][has_target & has_pin[which]].sum())


@dataclass(frozen=True, slots=True)
class SourceGroup:
    """Sources that divide some of the sequences by their weights."""

    mixture: Mixture
    sources: Sequence[DataSource]
    sequences: int


def names_of(sources: Sequence[DataSource]) -> list[str]:
    return [
        source.puzzle or Path(source.file or "").stem + (" as infill" if source.as_infill else "")
        for source in sources
    ]


def groups_of(recipe: Recipe, mixture: Mixture | MixedBatches) -> list[SourceGroup]:
    if isinstance(mixture, Mixture):
        return [SourceGroup(mixture, recipe.data, mixture.sequences)]
    on_policy, others = ([d for d in recipe.data if d.on_policy is x] for x in (True, False))
    return [
        SourceGroup(mixture.new_sequences, on_policy, mixture.num_persistent),
        SourceGroup(mixture.fresh, others, mixture.fresh.sequences),
    ]


def print_sources(groups: Sequence[SourceGroup], sequences: int) -> None:
    targets, weights, names = [], [], list[str]()
    for group in groups:
        whole = sum(source.weight for source in group.sources)
        names += names_of(group.sources)
        for source, component in zip(group.sources, group.mixture.components, strict=True):
            alone = replace(group.mixture, components=[component], sequences=sequences)
            targets.append(Targets.of(alone.batch(0)))
            weights.append(group.sequences * source.weight / whole)
    rows = np.array(weights)
    counts = rows[:, None] * np.array([(one.canvas, one.holes, one.clean) for one in targets])
    canvas, _, clean = counts.sum(0)
    percents = 100 * np.column_stack([rows / rows.sum(), counts / (canvas, canvas, clean)])
    print(f"{'% of':16} {'rows':>7} {'denoise':>8} {'in holes':>9} {'causal':>7}")
    for name, line in zip(names, percents, strict=True):
        print(f"{name:16} {line[0]:7.1f} {line[1]:8.1f} {line[2]:9.1f} {line[3]:7.1f}")


# --- commands


def step_command(args: argparse.Namespace) -> None:
    results = []
    for model, twin, how in product(args.model, args.twin, args.compile):
        results.append(case(model, twin, how, args))
        args.profile = False  # of the first alone
    finish({**head("train step", torch.device(args.device)), "results": results})


def host_command(args: argparse.Namespace) -> None:
    if args.device == "cuda":
        torch.set_num_threads(1)
    args.compile = args.compile[0]
    with tempfile.TemporaryDirectory() as directory:
        one = trainer(args, Path(directory))
        run_host(one, args)
        one.prefetcher = None


def sources_command(args: argparse.Namespace) -> None:
    with open_recipe(args.recipe) as (recipe, _, mixture):
        print_sources(groups_of(recipe, mixture), args.sequences)


def main(given: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    commands = parser.add_subparsers(required=True)
    step, host = commands.add_parser("step"), commands.add_parser("host")
    step.set_defaults(run=step_command, steps=20)
    host.set_defaults(run=host_command, steps=40)
    for one in (step, host):
        one.add_argument("--compile", nargs="+", choices=COMPILE_MODES, default=["layer_types"])
        one.add_argument("--sequences", type=int, default=64)
        one.add_argument("--rows", type=int, default=2048)
        one.add_argument("--steps", type=int)
        one.add_argument("--rollout", type=float, default=0.0 if one is step else 0.6)
        one.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    step.add_argument("--model", nargs="+", choices=MODELS, default=["nano"])
    step.add_argument("--twin", nargs="+", choices=TWINS, default=list(TWINS))
    step.add_argument("--profile", action="store_true", help="of the first")
    host.add_argument("--workers", type=int, default=1)
    host.add_argument(
        "--captured", action="store_true", help="on a CPU: destroy_distributed its work out"
    )
    sources = commands.add_parser("sources")
    sources.set_defaults(run=sources_command)
    sources.add_argument("recipe", type=Path)
    sources.add_argument("--sequences", type=int, default=16, help="packed rows of each source")
    args = parser.parse_args(given)
    args.run(args)


if __name__ == "__main__":
    main()
