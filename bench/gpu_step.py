"""A denoising step of the released shapes on a GPU: plain, captured, and with our kernels.

    python bench/gpu_step.py [--layers 30] [--prompt 512] [--steps 24] [--profile] [--out FILE]

Random bf16 weights route evenly, so every expert is read: the worst case, valid for time per step
and not for steps per block. Ways are measured in turn, one process, the same weights. A step is
timed from its launch to the host's knowing its flags. The floor is the bytes that must be read over
the measured copy bandwidth. The last line is JSON.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from datetime import date
from pathlib import Path

import torch
from gpu_check import copy_bandwidth, largest
from shapes import shallow
from torch import Tensor

from dgemma.cache import KVCache, Pass, Room, Span
from dgemma.canvas import NO_PINS, Noise
from dgemma.config import ModelConfig
from dgemma.denoise import Row, commit, start, step
from dgemma.device import describe_device
from dgemma.graph.step import Shape, Stepper
from dgemma.graph.token import Teller
from dgemma.model import Gemma
from dgemma.ops.fast import switched
from dgemma.sampler import Sampler
from dgemma.stack import Stack
from dgemma.weights.fp8 import quantize_experts
from dgemma.weights.random import random_model

DEVICE = torch.device("cuda")
HALF = torch.bfloat16
MAX_STEPS = 48


def wall_ms(work: Callable[[], object], repeats: int, warm: int = 3) -> list[float]:
    times = []
    for _ in range(repeats + warm):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        work()
        torch.cuda.synchronize()
        times.append(1000 * (time.perf_counter() - begin))
    return times[warm:]


def spread(times: list[float]) -> dict[str, float]:
    return {"ms": statistics.median(times), "min": min(times), "max": max(times)}


def bytes_read(config: ModelConfig, model: Gemma) -> int:
    """Weights of one step: all of them, and the embedding twice (head and soft embedding)."""
    size = sum(weight.numel() * weight.element_size() for weight in model.state_dict().values())
    return size + 2 * config.vocab_size * config.hidden_size


class Bench:
    """A model, a committed prompt, and a canvas on it."""

    def __init__(self, model: Gemma, prompt: int) -> None:
        self.model, config = model, model.config
        self.length, self.vocab = config.canvas_length, config.vocab_size
        room = Room(tokens=prompt + 3 * self.length, span=512 + self.length)
        dtype = model.embed_tokens.weight.dtype
        self.cache = KVCache(config, room, dtype, DEVICE)
        generator = torch.Generator(DEVICE).manual_seed(5)
        tokens_T = torch.randint(self.vocab, (prompt,), device=DEVICE, generator=generator)
        commit(model, self.cache, tokens_T, chunk=512)

    def row(self, sampler: Sampler | None = None) -> Row:
        noise = Noise(seed=1).block(0, MAX_STEPS, self.length, self.vocab, DEVICE)
        return start(sampler or Sampler(max_steps=MAX_STEPS), noise, NO_PINS)

    def plain_ms(self, repeats: int) -> list[float]:
        context = Pass([Span(self.cache, self.length, commit=False)])
        with switched(False):
            (row,) = step(self.model, context, [self.row()])
            return wall_ms(lambda: step(self.model, context, [row]), repeats)

    def captured_ms(self, repeats: int) -> list[float]:
        """The plain step as one graph."""
        context = Pass([Span(self.cache, self.length, commit=False)])
        with switched(False):
            (row,) = step(self.model, context, [self.row()])
            step(self.model, context, [row])
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                step(self.model, context, [row])
            return wall_ms(graph.replay, repeats)

    def kernel_ms(self, stack: Stack, repeats: int) -> tuple[dict[str, object], Stepper]:
        """Steps of the engine's kind, flags and all; and the graph alone."""
        with switched(True):
            torch.cuda.synchronize()
            begin = time.perf_counter()
            row = self.row()
            stepper = Stepper(self.model, stack, Shape(self.length, MAX_STEPS, row.sampler.rule))
            row = self.forward(stepper, row)
            row = self.forward(stepper, row)
            torch.cuda.synchronize()
            ready = time.perf_counter() - begin
            times, sparse = [], 0
            for _ in range(min(repeats, MAX_STEPS - 3)):
                begin = time.perf_counter()
                row = self.forward(stepper, row)
                times.append(1000 * (time.perf_counter() - begin))
                sparse += stepper.memory.seen_2[1].item()
            graphs = {
                f"{name}_graph_ms": statistics.median(wall_ms(graph.replay, repeats))
                for name, graph in stepper.graphs.captured.items()
                if name != "step"
            }
            graphs["step_graph_ms"] = statistics.median(
                wall_ms(lambda: self._replay(stepper), repeats)
            )
        facts = {**spread(times), "ready_s": ready, "sparse_steps": sparse, **graphs}
        return facts, stepper

    def _replay(self, stepper: Stepper) -> None:
        stepper.memory.index_1.zero_()
        stepper.graphs.captured["step"].replay()

    def forward(self, stepper: Stepper, row: Row) -> Row:
        after = stepper.step(row, self.cache)
        assert after is not None
        return after

    def token_ms(self, stack: Stack, repeats: int) -> dict[str, float]:
        """A token of the autoregressive mode, with the choice of the next on the device."""
        teller, token = Teller(self.model, stack), 7

        def tell() -> int:
            logits_V = teller.tell(token, self.cache)
            assert logits_V is not None
            return int(logits_V.argmax())

        length = self.cache.length
        with switched(True):
            facts = spread(wall_ms(tell, repeats))
        self.cache.truncate(length)
        return facts

    def pass_ms(self, count: int, on: bool, repeats: int) -> list[float]:
        """A causal pass of so many tokens as Python runs it."""
        tokens_T = torch.randint(self.vocab, (count,), device=DEVICE)
        with switched(on):
            context = Pass([Span(self.cache, count, commit=True)])
            return wall_ms(lambda: self.model.encode(tokens_T, context), repeats)


def agreement(layers: int, prompt: int) -> dict[str, float]:
    """Logits of few layers: the plain path and the kernels against float32 on the same weights."""
    model = random_model(shallow(layers), seed=0, device=DEVICE, dtype=HALF)
    exact = random_model(shallow(layers), seed=0, device=DEVICE, dtype=torch.float32)
    exact.load_state_dict({name: w.float() for name, w in model.state_dict().items()})
    stack = Stack(model)
    found: dict[str, Tensor] = {}
    for name, (of, runner, on) in {
        "exact": (exact, None, False),
        "plain": (model, None, False),
        "kernels": (model, stack, True),
    }.items():
        of.runner = runner
        with switched(on):
            bench = Bench(of, prompt)
            context = Pass([Span(bench.cache, bench.length, commit=False)])
            tokens_L = bench.row().canvas.tokens_L
            soft_LD = of.embed(tokens_L.flip(0)) / 2
            found[name] = of.logits(of.denoise(tokens_L, soft_LD, context))
    top_L = found["exact"].argmax(-1)
    facts = {}
    for name in ("plain", "kernels"):
        facts[f"{name}_logit_error"] = largest(found[name], found["exact"])
        off = found[name] - found["exact"]
        facts[f"{name}_logit_rms"] = off.square().mean().sqrt().item()
        facts[f"{name}_top_1"] = (found[name].argmax(-1) == top_L).float().mean().item()
    return facts


def profile(stepper: Stepper, rows: int = 24) -> tuple[int, str]:
    """Kernels of one replay, and the greatest of them."""
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as watch

    stepper.memory.index_1.zero_()
    torch.cuda.synchronize()
    with watch(activities=[ProfilerActivity.CUDA]) as seen:
        stepper.graphs.captured["step"].replay()
        torch.cuda.synchronize()
    totals: dict[str, list[float]] = {}
    for event in seen.events():
        total = totals.setdefault(event.name[:60], [0, 0.0])
        total[0] += 1
        total[1] += event.device_time
    order = sorted(totals.items(), key=lambda item: -item[1][1])[:rows]
    lines = [f"{micros:9.0f} us {int(count):5} x {name}" for name, (count, micros) in order]
    return int(sum(count for count, _ in totals.values())), "\n".join(lines)


def coverage(bench: Bench) -> float:
    """Share of experts that some token of a canvas goes to, first layer."""
    entered = bench.model.enter(bench.row().canvas.tokens_L, None)
    ids_TK, _ = bench.model.layers[0].router(entered)
    return len(ids_TK.unique()) / bench.model.config.num_experts


def plain_facts(bench: Bench, repeats: int) -> dict[str, object]:
    return {
        "coverage": coverage(bench),
        "plain": spread(bench.plain_ms(8)),
        "plain_captured": spread(bench.captured_ms(repeats)),
        "plain_commit": spread(bench.pass_ms(256, False, 5)),
    }


def other_facts(bench: Bench, stack: Stack, repeats: int) -> dict[str, object]:
    """Causal passes as Python runs them, and the step with one thing after the other."""
    facts: dict[str, object] = {
        "token": bench.token_ms(stack, repeats),
        "kernel_commit": spread(bench.pass_ms(256, True, 8)),
        "kernel_pass_2048": spread(Bench(bench.model, 16).pass_ms(2048, True, 4)),
    }
    stack.overlap = False
    facts["kernels_without_overlap"], _ = bench.kernel_ms(stack, repeats)
    return facts


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=30)
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--quant", choices=["fp8"], help="experts in 8 bits; kernels only")
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--quick", action="store_true", help="kernels only")
    parser.add_argument("--out", type=Path)
    return parser.parse_args()


@torch.inference_mode()
def main() -> None:
    arguments = parse()
    arguments.quick |= arguments.quant is not None
    facts: dict[str, object] = {
        "bench": "gpu_step",
        "date": str(date.today()),
        "device": describe_device(DEVICE),
        "torch": torch.__version__,
        "layers": arguments.layers,
        "prompt": arguments.prompt,
        "quant": arguments.quant or "none",
    }
    copy = facts["copy_gb_s"] = copy_bandwidth()
    if not arguments.quick:
        facts["agreement"] = agreement(3, arguments.prompt)
        print(json.dumps(facts["agreement"]), flush=True)
        torch.cuda.empty_cache()
    model = random_model(shallow(arguments.layers), seed=0, device=DEVICE, dtype=HALF)
    bench = Bench(model, arguments.prompt)
    if not arguments.quick:
        facts |= plain_facts(bench, arguments.steps)
    if arguments.quant:
        quantize_experts(model)
        torch.cuda.empty_cache()
    stack = Stack(model)
    model.runner = stack
    facts["kernels"], stepper = bench.kernel_ms(stack, arguments.steps)
    print(json.dumps(facts["kernels"]), flush=True)
    if arguments.profile:
        facts["launches"], table = profile(stepper)
        print(table, flush=True)
    if arguments.quick:
        facts["token"] = bench.token_ms(stack, arguments.steps)
    else:
        facts |= other_facts(bench, stack, arguments.steps)
    size = bytes_read(model.config, model)
    facts["gbytes"], facts["floor_ms"] = size / 1e9, size / copy / 1e6
    facts["peak_gib"] = torch.cuda.max_memory_allocated(DEVICE) / 2**30
    # Beside transformers on shared weights: to come.
    for key, value in facts.items():
        print(f"{key:24} {value}")
    line = json.dumps(facts)
    if arguments.out is not None:
        arguments.out.write_text(line + "\n", encoding="utf-8")
    print(line)


if __name__ == "__main__":
    main()
