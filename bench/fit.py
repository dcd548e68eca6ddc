"""How well `dgemma fit` predicts: its figures beside measured ones.

    python bench/fit.py [--threads 2] [--rounds 15]

Measured here, on a CPU, in float32: denoising steps, commits and single tokens of two models with
random weights, and the two rates that the prediction takes (a copy, a product as large as the
models' own); other work on the machine shows in both. Beside that, quoted and not measured again:
what bench/results and LOG.md say of one H200, and of these two cores when they were quiet.
"""

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import date

import torch
from shapes import EXAMPLE

from dgemma.cache import KVCache, Pass, Room, Span
from dgemma.canvas import NO_PINS, Noise
from dgemma.config import ModelConfig
from dgemma.denoise import commit, start, step
from dgemma.device import describe_device
from dgemma.model import Gemma
from dgemma.roofline.devices import BF16, DEVICES, FLOAT32, Device
from dgemma.roofline.predict import floor, pass_time
from dgemma.roofline.table import RELEASED, ops, passes
from dgemma.sampler import Sampler
from dgemma.weights.pack import pack
from dgemma.weights.random import random_model

CPU = torch.device("cpu")
PROMPT = 256
SMALL = replace(EXAMPLE, hidden_size=192, intermediate_size=192, moe_intermediate_size=192)
SMALL = replace(SMALL, layer_types=EXAMPLE.layer_types * 2, vocab_size=4096)


@dataclass(frozen=True, slots=True)
class Quoted:
    """A measured value with the file it stands in, and what is predicted for it."""

    what: str
    measured_ms: float
    predicted_ms: float
    source: str


def seconds(work: Callable[[], object], rounds: int) -> float:
    """Least time of one call, since other work only adds; the first two warm up."""
    times = []
    for _ in range(rounds + 2):
        begin = time.perf_counter()
        work()
        times.append(time.perf_counter() - begin)
    return min(times[2:])


def rates(threads: int, rounds: int) -> Device:
    """This machine's CPU as it is now."""
    a = torch.zeros(1 << 26)
    b = torch.empty_like(a)
    x, w = torch.randn(256, 768), torch.randn(3072, 768)
    copy = 2 * 4 * a.numel() / seconds(lambda: b.copy_(a), rounds) / 1e9
    product = 2 * 256 * 768 * 3072 / seconds(lambda: x @ w.T, rounds) / 1e12
    known = DEVICES["cpu"]
    name = f"this CPU, {threads} threads, rates measured now"
    return replace(known, name=name, bandwidth=copy, rates={32: product, 16: product, 8: product})


def measured(model: Gemma, rounds: int) -> dict[str, float]:
    """Milliseconds of a step, a commit and a token."""
    config, generator = model.config, torch.Generator().manual_seed(0)
    prompt = torch.randint(config.vocab_size, (PROMPT,), generator=generator)
    cache = KVCache(config, Room(tokens=PROMPT + 1024), torch.float32, CPU)
    commit(model, cache, prompt, chunk=PROMPT)
    context = Pass([Span(cache, config.canvas_length, commit=False)])
    noise = Noise(seed=1).block(0, 48, config.canvas_length, config.vocab_size, CPU)
    rows = step(model, context, [start(Sampler(max_steps=48), noise, NO_PINS)])

    def encode(length: int) -> None:
        with torch.inference_mode():
            run = Pass([Span(cache, length, commit=False)])
            hidden_TD = model.encode(prompt[:length], run)
            if length == 1:
                model.logits(hidden_TD).argmax(-1)

    works: dict[str, Callable[[], object]] = {
        "step": lambda: step(model, context, rows),
        "commit": lambda: encode(config.canvas_length),
        "token": lambda: encode(1),
    }
    return {name: 1e3 * seconds(work, rounds) for name, work in works.items()}


def compare(name: str, config: ModelConfig, device: Device, rounds: int) -> None:
    model = pack(random_model(config, seed=0))
    found = measured(model, rounds)
    for run in passes(config, PROMPT):
        for each in (DEVICES["cpu"], device):
            predicted = 1e3 * pass_time(config, run, FLOAT32, each)
            line(f"{name} {run.name}, rates {each.source}", predicted, found[run.name])


def line(what: str, predicted: float, got: float) -> None:
    print(f"  {what:70} {predicted:10.2f} {got:10.2f} {predicted / got:8.2f}")


def quiet() -> list[Quoted]:
    """What was measured on two cores with nothing else on them: the 40M example."""
    got = {"step": (86.0, "cpu_step"), "commit": (46.1, "batch"), "token": (6.9, "batch")}
    source = "2026-11-15-cpu.md"
    return [
        Quoted(
            f"40M example {run.name}, quiet ({got[run.name][1]}.py)",
            got[run.name][0],
            1e3 * pass_time(EXAMPLE, run, FLOAT32, DEVICES["cpu"]),
            source,
        )
        for run in passes(EXAMPLE, PROMPT)
    ]


def quotes() -> list[Quoted]:
    """What was measured on one H200, bf16, random weights of the released shapes."""
    device = DEVICES["h200"]
    step_run, _, token_run = passes(RELEASED, 512)
    whole = 1e3 * pass_time(RELEASED, step_run, BF16, device)
    token = 1e3 * pass_time(RELEASED, token_run, BF16, device)
    table = [op for op in ops(RELEASED, step_run) if op.kind == "experts"]
    experts = 1e3 * floor(table, BF16, device) / BF16.efficiency / RELEASED.num_hidden_layers
    plain = "2026-11-15-h200.md"
    return [
        Quoted("experts of one layer, our kernels", 0.390, experts, "LOG.md"),
        Quoted("experts of one layer, tiles found since", 0.368, experts, "LOG.md"),
        Quoted("step, plain PyTorch, one graph", 29.2, whole, plain),
        Quoted("step, plain PyTorch, eager (host-bound)", 74.9, whole, plain),
        Quoted("AR token, plain PyTorch, eager (host-bound)", 47.1, token, plain),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--rounds", type=int, default=15)
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    here = replace(rates(given.threads, given.rounds), source="measured now")
    print(f"# {date.today()} {describe_device(CPU)}, {given.threads} threads, float32")
    print(f"# now: copy {here.bandwidth:.1f} GB/s, product {1e3 * here.rates[32]:.0f} GFLOP/s")
    print(f"  {'ms':70} {'predicted':>10} {'measured':>10} {'ratio':>8}")
    compare("40M example", EXAMPLE, here, given.rounds)
    compare("small", SMALL, here, given.rounds)
    print("# quoted: two quiet cores, to whose token the time between kernels was set")
    for quote in quiet():
        line(quote.what, quote.predicted_ms, quote.measured_ms)
    print("# quoted: H200; predicted is a step made of kernels of our own, in one graph")
    for quote in quotes():
        line(f"{quote.what}, {quote.source}", quote.predicted_ms, quote.measured_ms)


if __name__ == "__main__":
    main()
