"""What the host does between captured passes, in microseconds and launches; needs no GPU.

    python bench/host.py [--steps 16] [--tokens 1024] [--json FILE]
    python bench/host.py --start [--quant none|fp8|nvfp4]     # on a GPU: the parts of a start
    python bench/host.py --start --cold [--one-by-one]        # with all kernels compiled anew

An engine with captured passes answers a prompt, but the passes themselves are left out: what
remains is all that a GPU waits for. A launch is an operation that would start work on a device;
those inside a captured pass are not counted. Sums are of one answer.
"""

import argparse
import json
import os
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from gpu_workload import NEVER, parse, plain_tokenizer
from shapes import RELEASED, TINY
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import dgemma.engine.batch
from dgemma.canvas import Noise
from dgemma.config import GenerationConfig, ModelConfig
from dgemma.engine.engine import Engine
from dgemma.engine.events import Done
from dgemma.engine.options import Options
from dgemma.engine.reader import Reader
from dgemma.graph.step import Stepper
from dgemma.graph.steppers import Fast
from dgemma.model import Gemma
from dgemma.sampler import EntropyBound, Sampler
from dgemma.text.chat import Prompt
from dgemma.text.tokenizer import Tokenizer
from dgemma.weights.random import random_model

CPU = torch.device("cpu")
VOCAB, CANVAS, PROMPT = 262_144, 256, 1024
MADE = ("empty", "empty_like", "new_empty", "empty_strided", "detach", "lift_fresh")


class Launches(TorchDispatchMode):
    """Counts operations that are neither views nor mere allocations."""

    def __init__(self) -> None:
        super().__init__()
        self.count, self.is_on = 0, True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        returned = func._schema.returns
        is_view = any(r.alias_info is not None and not r.alias_info.is_write for r in returned)
        is_made = func.overloadpacket.__name__ in MADE
        self.count += self.is_on and not is_view and not is_made
        return func(*args, **(kwargs or {}))


class Outside:
    """Time that is not spent in passes."""

    def __init__(self) -> None:
        self.inside = 0.0
        self.launches: Launches | None = None

    def now(self) -> float:
        return time.perf_counter() - self.inside

    @contextmanager
    def away(self) -> Iterator[None]:
        begin = time.perf_counter()
        if self.launches is not None:
            self.launches.is_on = False
        yield
        if self.launches is not None:
            self.launches.is_on = True
        self.inside += time.perf_counter() - begin

    def wrap(self, work: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*given: Any, **named: Any) -> Any:
            with self.away():
                return work(*given, **named)

        return wrapped


def leave_out(outside: Outside) -> None:
    """Let captured steps give random guesses at once, and time none of the other passes."""
    generator = torch.Generator().manual_seed(0)

    def run(stepper: Stepper, name: str, _: Callable[[], None]) -> None:
        with outside.away():
            if name in ("step", "first"):
                stepper.memory.guess_L.random_(CANVAS, VOCAB, generator=generator)
                stepper.memory.entropy_L.fill_(1.0)

    Stepper._run = run  # type: ignore[method-assign]
    Gemma.encode = outside.wrap(Gemma.encode)  # type: ignore[method-assign]
    together = dgemma.engine.batch._run_together
    dgemma.engine.batch._run_together = outside.wrap(together)


def config_of(vocab: int) -> ModelConfig:
    """Next to no arithmetic in the released number of layers."""
    layers = RELEASED.layer_types
    return replace(
        TINY, vocab_size=vocab, canvas_length=CANVAS, layer_types=layers, sliding_window=1024
    )


def engine_of(tokenizer: Tokenizer) -> Engine:
    generation = GenerationConfig(stop_ids=(VOCAB,), max_new_tokens=4096)
    engine = Engine(random_model(config_of(VOCAB), 0), tokenizer, None, generation)
    engine.fast = Fast(engine.model)
    engine.chunk = 4096
    return engine


def answer(engine: Engine, options: Options, seed: int, outside: Outside) -> dict[str, list[float]]:
    """Seconds of every pass of one answer, by its kind."""
    ids = torch.randint(256, VOCAB, (PROMPT,), generator=torch.Generator().manual_seed(seed))
    plan = engine.plan(Prompt(text="", ids=tuple(ids.tolist())), options)
    times: dict[str, list[float]] = defaultdict(list)
    begin = outside.now()
    job = engine.submit(plan)
    while not job.is_over:
        kind = "step"
        if not job.committed:
            kind = "prompt"
        elif job.row is None:
            kind = "block begins"
        blocks, start = job.blocks, outside.now()
        engine.step()
        taken = outside.now() - start
        kind = kind if job.blocks == blocks else "block ends"
        times["last" if job.is_over else kind].append(taken)
    times["answer"].append(outside.now() - begin)
    assert [event.finish for event in job.events if isinstance(event, Done)] == ["length"]
    engine.prefixes.clear()
    return times


def passes(tokenizer: Tokenizer, arguments: argparse.Namespace) -> dict[str, float]:
    """Medians of each kind of pass, and launches of an answer, three answers in all."""
    outside = Outside()
    leave_out(outside)
    engine = engine_of(tokenizer)
    sampler = Sampler(rule=EntropyBound(settle_steps=NEVER), max_steps=arguments.steps)
    options = Options(seed=1, sampler=sampler, retries=0, max_tokens=arguments.tokens)
    answer(engine, options, 0, outside)
    gathered: dict[str, list[float]] = defaultdict(list)
    for seed in range(1, 4):
        for kind, times in answer(engine, options, seed, outside).items():
            gathered[kind] += times
    found = {f"{kind}, us": 1e6 * statistics.median(times) for kind, times in gathered.items()}
    with Launches() as launches:
        outside.launches = launches
        answer(engine, options, 4, outside)
    return {**found, "launches of an answer": launches.count}


def median_us(work: Callable[[], object], times: int = 30) -> float:
    taken = []
    for _ in range(times):
        begin = time.perf_counter()
        work()
        taken.append(time.perf_counter() - begin)
    return 1e6 * statistics.median(taken)


def noise(steps: int) -> dict[str, float]:
    def work() -> Tensor:
        return Noise(seed=7).block(1, steps, CANVAS, VOCAB, CPU).uniform_NL

    with Launches() as launches:
        work()
    name = f"noise of {steps} steps"
    return {f"{name}, us": median_us(work), f"{name}, launches": launches.count}


def text(tokenizer: Tokenizer) -> dict[str, float]:
    generator, found = torch.Generator().manual_seed(1), {}
    ids = torch.randint(256, VOCAB, (CANVAS,), generator=generator).tolist()
    for name, stop in (("text", ()), ("text, stop strings", ("\n\nUser:", "###"))):

        def work(stop: tuple[str, ...] = stop) -> object:
            return Reader(tokenizer, stop, in_thought=False).feed(ids)

        found[f"{name}, us a token"] = median_us(work) / CANVAS
    return found


# --- the start, on a GPU


class Timer:
    """Seconds by name, of work that is waited for."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self.compiled: list[float] = []

    def of(self, name: str, work: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*given: Any, **named: Any) -> Any:
            torch.cuda.synchronize()
            begin = time.perf_counter()
            result = work(*given, **named)
            torch.cuda.synchronize()
            self.seconds[name] += time.perf_counter() - begin
            return result

        return timed

    def watch_compiler(self) -> None:
        """Count kernels that are compiled, where this Triton tells."""
        try:
            from triton import knobs
        except ImportError:
            return

        def heard(**told: Any) -> None:
            if not told.get("cache_hit"):
                self.compiled.append(getattr(told.get("times"), "total", 0) / 1e6)

        knobs.compilation.listener = heard


@contextmanager
def empty_caches() -> Iterator[None]:
    """Nothing is found of earlier starts, for the rest of this process."""
    with tempfile.TemporaryDirectory() as folder:
        os.environ |= {"TRITON_CACHE_DIR": f"{folder}/triton", "XDG_CACHE_HOME": folder}
        yield


def start(quant: str, *, one_by_one: bool) -> dict[str, float]:
    """Seconds of the parts of an engine's start, and of its first answers.

    A warm start, unless the folders TRITON_CACHE_DIR and XDG_CACHE_HOME are empty. Compiling is the
    sum over all threads.
    """
    import gpu_workload

    from dgemma.graph import capture, check, steppers

    timer = Timer()
    timer.watch_compiler()
    arguments = parse(["--quant", quant])
    device = torch.device("cuda")
    model = timer.of("model", gpu_workload.model_of)(arguments, device, torch.bfloat16)
    steppers.Stack = timer.of("join weights", steppers.Stack)  # type: ignore[misc,assignment]
    for name in ("_layers_off", "_statistics_off"):
        setattr(check, name, timer.of(f"check{name.removesuffix('_off')}", getattr(check, name)))
    make = capture.Graphs._capture
    capture.Graphs._capture = timer.of("captures", make)  # type: ignore[method-assign]
    rehearse = (lambda *_: 0) if one_by_one else steppers.rehearse
    steppers.rehearse = timer.of("compiled beforehand", rehearse)  # type: ignore[assignment]
    engine = timer.of("engine, all", gpu_workload.engine_of)(model, arguments)
    compiled = len(timer.compiled)
    work = gpu_workload.Workload(engine, arguments)
    for number in range(4):
        timer.of(f"answer {number}", work.diffusion)()
    found = {f"{name}, s": seconds for name, seconds in timer.seconds.items()}
    found |= {"kernels compiled": compiled, "and by answers": len(timer.compiled) - compiled}
    return {**found, "compiling, s": sum(timer.compiled)}


def main(given: Sequence[str] | None = None) -> dict[str, float]:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--start", action="store_true")
    parser.add_argument("--cold", action="store_true")
    parser.add_argument("--one-by-one", action="store_true")
    parser.add_argument("--quant", choices=["none", "fp8", "nvfp4"], default="none")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args(given)
    if arguments.start:
        with empty_caches() if arguments.cold else nullcontext():
            found = start(arguments.quant, one_by_one=arguments.one_by_one)
    else:
        os.environ.setdefault("OMP_NUM_THREADS", "1")
        tokenizer = plain_tokenizer(VOCAB)
        found = {**noise(arguments.steps), **noise(48), **text(tokenizer)}
        found |= passes(tokenizer, arguments)
    for name, value in found.items():
        print(f"{name:32} {value:12.2f}")
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(found) + "\n", encoding="utf-8")
    return found


if __name__ == "__main__":
    main()
