"""Shared parts of `bench/paths.py`: the engine on random weights, timed runs, the report.

Imports from inside the package are here, in `common.py` and in `_paths_image.py`; those of the
server, which may not be installed, are inside functions.
"""

import argparse
import gc
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from datetime import date
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import torch
from common import (
    NEVER,
    build,
    gpu_memory,
    pack_for_cpu,
    plain_tokenizer,
    reset_memory,
    resident_mib,
    shape,
    wait,
)

from dgemma import Done, Engine, FillParams, Pins, Sampler, SamplingParams
from dgemma.config import GenerationConfig
from dgemma.device import choose_device, choose_dtype, describe_device
from dgemma.eval.answers import EvalPrompt
from dgemma.text.chat import Prompt
from dgemma.text.tokenizer import Tokenizer

__all__ = [
    "Bench",
    "Done",
    "EvalPrompt",
    "FillParams",
    "Pins",
    "Report",
    "Run",
    "SamplingParams",
    "done_of",
    "median",
]
WARM_RUNS = 2
FIRST_PLAIN = 256  # ids below are single bytes


class Interval(NamedTuple):
    """Start and end of one `Engine.step`, on the clock of time.perf_counter."""

    start: float
    end: float

    @property
    def ms(self) -> float:
        return 1000 * (self.end - self.start)


@dataclass(slots=True)
class Run:
    """Requests that ran together."""

    dones: list[Done]
    passes: list[Interval]
    submitted: list[float]
    seconds: float

    @property
    def tokens(self) -> int:
        return sum(done.tokens for done in self.dones)

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.seconds

    @property
    def ms_per_step(self) -> float:
        """Milliseconds a step of a single request, without its prefill."""
        (done,) = self.dones
        return 1000 * (done.seconds - done.prefill_seconds) / max(1, done.steps)

    @property
    def pass_ms(self) -> float:
        """Mean milliseconds of a pass while every request is past its prefill and none is done.

        Commits of blocks are in it, as they are in `ms_per_step`.
        """
        pairs = list(zip(self.submitted, self.dones, strict=True))
        begin = max(start + done.prefill_seconds for start, done in pairs)
        end = min(start + done.seconds for start, done in pairs)
        full = [one.ms for one in self.passes if begin <= one.start < end]
        return statistics.mean(full or [one.ms for one in self.passes])


class Bench:
    """One engine and the requests it is measured with; every prompt is a new one."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.arguments = arguments
        self.device = choose_device(arguments.device)
        self.dtype = choose_dtype("float32" if arguments.tiny else arguments.dtype, self.device)
        self.count = 0
        begin = time.perf_counter()
        config = shape("tiny" if arguments.tiny else "released", arguments.layers)
        tables = (arguments.head, arguments.soft)
        where = {"device": self.device, "dtype": self.dtype}
        model = build(config, arguments.quant, tables=tables, **where)
        if arguments.quant == "none":
            pack_for_cpu(model)
        self.wait()
        reset_memory(self.device)
        self.load_seconds, begin = time.perf_counter() - begin, time.perf_counter()
        self.engine = self._engine(model)
        self.wait()
        self.start_seconds = time.perf_counter() - begin
        self.vocab = model.config.vocab_size
        self.canvas_length = model.config.canvas_length

    def _engine(self, model: Any) -> Engine:
        """Make the engine; the stop id is one token of the vocabulary, which grammars need."""
        vocab, folder = model.config.vocab_size, self.arguments.tokenizer
        tokenizer = plain_tokenizer(vocab) if folder is None else Tokenizer.load(folder)
        generation = GenerationConfig(stop_ids=(vocab - 1,), max_new_tokens=1024)
        return Engine(model, tokenizer, None, generation)

    def wait(self) -> None:
        wait(self.device)

    def prompt(self, length: int) -> Prompt:
        self.count += 1
        generator = torch.Generator().manual_seed(self.count)
        ids = torch.randint(FIRST_PLAIN, self.vocab - 1, (length,), generator=generator)
        return Prompt(text="", ids=tuple(ids.tolist()))

    def sampler(self, steps: int) -> Sampler:
        """Make a sampler that takes all its steps: no canvas converges."""
        return Sampler(rule=NEVER, max_denoising_steps=steps)

    def diffusion(self, steps: int, **changes: Any) -> SamplingParams:
        return replace(SamplingParams(seed=1, sampler=self.sampler(steps), retries=0), **changes)

    def run(self, requests: Sequence[EvalPrompt]) -> Run:
        """Submit requests together and step the engine until all are done."""
        engine, times, submitted, passes = self.engine, [], [], []
        self.wait()
        begin = time.perf_counter()
        try:
            for request in requests:
                task = engine.generation(request.prompt, request.params)
                times.append(time.perf_counter())
                submitted.append(engine.submit(task))
            while not all(request.is_over for request in submitted):
                passes.append(self.step())
            seconds = time.perf_counter() - begin
        finally:
            for request in submitted:
                engine.cancel(request)
        dones = [done_of(request) for request in submitted]
        self.forget()
        return Run(dones, passes, times, seconds)

    def step(self) -> Interval:
        """Time one pass by the host's clock: the device is not drained, as in a server."""
        begin = time.perf_counter()
        self.engine.step()
        return Interval(begin, time.perf_counter())

    def forget(self) -> None:
        """Empty the prefix cache: no request begins where another ended."""
        self.engine.prefixes.clear()

    def memory_mib(self) -> float:
        """Memory in use: allocated on a GPU, resident on a CPU."""
        self.forget()
        gc.collect()
        self.wait()
        if self.device.type == "cuda":
            return torch.cuda.memory_allocated(self.device) / 2**20
        return resident_mib()

    def peak_memory(self) -> str:
        """Peaks since the weights were made, for a note; empty on a CPU."""
        return ", ".join(f"{name} {value}" for name, value in gpu_memory(self.device).items())

    @cached_property
    def single(self) -> Run:
        """The plain request that all others are compared with."""
        runs = self.arguments.runs
        return self.repeat(lambda: [self.plain()], runs, lambda run: run.ms_per_step)

    @cached_property
    def ar_single(self) -> Run:
        for _ in range(WARM_RUNS):
            self.run([self.ar(8)])
        return self.run([self.ar(self.arguments.ar_tokens)])

    def plain(self, **changes: Any) -> EvalPrompt:
        work = self.arguments
        params = self.diffusion(work.steps, max_tokens=work.tokens)
        return EvalPrompt(self.prompt(work.prompt), replace(params, **changes))

    def ar(self, tokens: int, **changes: Any) -> EvalPrompt:
        params = SamplingParams(mode="ar", seed=1, max_tokens=tokens)
        return EvalPrompt(self.prompt(self.arguments.prompt), replace(params, **changes))

    def repeat(
        self,
        make: Callable[[], Sequence[EvalPrompt]],
        runs: int,
        ms: Callable[[Run], float],
    ) -> Run:
        """Run new requests several times; returns the median run.

        Two runs warm up: the first one of a shape is eager, the second is captured.
        """
        for _ in range(WARM_RUNS):
            self.run(make())
        timed = sorted((self.run(make()) for _ in range(runs)), key=ms)
        return timed[(len(timed) - 1) // 2]

    def header(self) -> list[str]:
        work = self.arguments
        where = "a plain vocabulary" if work.tokenizer is None else str(work.tokenizer)
        config = self.engine.model.config
        weights = {"none": str(self.dtype).removeprefix("torch.")}.get(work.quant, work.quant)
        shape = "tiny model" if work.tiny else "released shapes"
        return [
            f"# Cost of each kind of request, {weights}",
            "",
            f"{describe_device(self.device)}, torch {torch.__version__}, {date.today()}. Random"
            f" weights ({weights}), {shape}, {config.num_hidden_layers} layers, tokenizer: {where}."
            f" Prompt {work.prompt} tokens, {work.tokens} out, {work.steps} steps a canvas, seeds"
            " fixed; tokens/s count committed tokens over wall time, prefill included.",
            "",
        ]


def done_of(request: Any) -> Done:
    """Return the result of a request that is over, or raise its error."""
    request.raise_error()
    result: Done = request.result
    return result


def median(values: Sequence[float]) -> float:
    return statistics.median(values)


@dataclass(slots=True)
class Report:
    """Markdown that is printed as it grows, and kept in a file if one is named."""

    out: Path | None
    lines: list[str] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)  # of each part
    extras: list[str] = field(default_factory=list)

    def write(self, *lines: str) -> None:
        self.lines += lines
        print(*lines, sep="\n", flush=True)
        if self.out is not None:
            self.out.write_text("\n".join(self.lines) + "\n", encoding="utf-8")

    def table(self, title: str, columns: Sequence[str]) -> None:
        self.write("", f"## {title}", "", self._line(columns))
        self.write(self._line(["---"] * len(columns)))

    def row(self, *cells: object) -> None:
        self.write(self._line([f"{c:,.2f}" if isinstance(c, float) else str(c) for c in cells]))

    def extra(self, text: str) -> None:
        """Keep a note until the table is closed."""
        self.extras.append(text)

    def close_table(self) -> None:
        for text in self.extras:
            self.note(text)
        self.extras.clear()

    def note(self, text: str) -> None:
        self.write("", text)

    def check(self, name: str, is_right: bool, text: str) -> None:
        """Note a result that decides the exit status."""
        self.note(f"{name}: {text}: {'passed' if is_right else 'FAILED'}")
        if not is_right:
            self.failures.append(name)

    @staticmethod
    def _line(cells: Sequence[str]) -> str:
        return f"| {' | '.join(cells)} |"
