"""A denoising step, a commit and a prefill at the released shapes, on any device, random weights.

    python bench/step.py [--device auto] [--layers 30] [--prompt 512] [--steps 20] [--out FILE]

Random weights route evenly, so every expert is read: the worst case for memory, valid for time per
step and not for steps per block. Times are medians of whole steps with the device drained after
each. The last line is JSON.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from datetime import date
from pathlib import Path

import torch
from shapes import shallow

from dgemma.cache import KVCache, Pass, Room, Span
from dgemma.canvas import NO_PINS, Noise
from dgemma.denoise import commit, start, step
from dgemma.device import choose_device, choose_dtype, describe_device
from dgemma.model import Gemma
from dgemma.sampler import Sampler
from dgemma.weights.random import random_model


def drain(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def median_ms(work: Callable[[], object], repeats: int, device: torch.device) -> float:
    times = []
    for _ in range(repeats + 2):
        drain(device)
        begin = time.perf_counter()
        work()
        drain(device)
        times.append(1000 * (time.perf_counter() - begin))
    return statistics.median(times[2:])


def expert_coverage(model: Gemma, hidden_TD: torch.Tensor) -> float:
    """Share of experts that at least one token of the canvas goes to, in the first layer."""
    ids_TK, _ = model.layers[0].router(hidden_TD)
    return len(ids_TK.unique()) / model.config.num_experts


@torch.inference_mode()
def measure(model: Gemma, prompt: int, repeats: int) -> dict[str, float]:
    config, weight = model.config, model.embed_tokens.weight
    device, length = weight.device, config.canvas_length
    room = Room(tokens=prompt + 2 * length, span=max(512, length))
    tokens = torch.randint(config.vocab_size, (prompt,), device=device)

    def prefill() -> KVCache:
        cache = KVCache(config, room, weight.dtype, device)
        commit(model, cache, tokens, chunk=512)
        return cache

    cache = prefill()
    noise = Noise(seed=1).block(0, 48, length, config.vocab_size, device)
    context = Pass([Span(cache, length, commit=False)])
    (row,) = step(model, context, [start(Sampler(), noise, NO_PINS)])
    writing = Pass([Span(cache, length, commit=True)])
    embedded = model.enter(row.canvas.tokens_L, row.canvas.soft_LD)
    return {
        "step_ms": median_ms(lambda: step(model, context, [row]), repeats, device),
        "forward_ms": median_ms(lambda: model.stack(embedded, context), repeats, device),
        "commit_ms": median_ms(lambda: model.encode(row.canvas.tokens_L, writing), repeats, device),
        "prefill_ms": median_ms(prefill, max(3, repeats // 4), device),
        "expert_coverage": expert_coverage(model, embedded),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--layers", type=int, default=30)
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    device = choose_device(arguments.device)
    dtype = choose_dtype(arguments.dtype, device)
    model = random_model(shallow(arguments.layers), seed=0, device=device, dtype=dtype)
    size = sum(p.numel() * p.element_size() for p in model.parameters())
    facts = {
        "bench": "step",
        "date": str(date.today()),
        "device": describe_device(device),
        "torch": torch.__version__,
        "dtype": str(dtype).removeprefix("torch."),
        "layers": arguments.layers,
        "prompt": arguments.prompt,
        "weights_gb": size / 1e9,
        **measure(model, arguments.prompt, arguments.steps),
    }
    if device.type == "cuda":
        facts["peak_gib"] = torch.cuda.max_memory_allocated(device) / 2**30
    for key, value in facts.items():
        print(f"{key:16} {value:.3f}" if isinstance(value, float) else f"{key:16} {value}")
    line = json.dumps(facts)
    if arguments.out is not None:
        arguments.out.write_text(line + "\n", encoding="utf-8")
    print(line)


if __name__ == "__main__":
    main()
