"""Throughput of batches of 1, 4, 8 and 16 requests, diffusion and AR, on the same weights.

    python bench/batch.py [--device auto] [--released] [--prompt 256] [--repeats 5] [--out FILE]

Without `--released` a 40M model serves as an example for a CPU; with it the released shapes do, on
random weights. Time per pass is measured; tokens per second of diffusion follow from it for a
stated number of steps per block, since random weights say nothing about that: B blocks of committed
tokens per (steps passes + one commit). AR commits B tokens a pass. The last line is JSON.
"""

import argparse
import json
import statistics
import time
from datetime import date
from pathlib import Path

import torch
from shapes import EXAMPLE, RELEASED

from dgemma.cache import KVCache, Room
from dgemma.canvas import NO_PINS, Noise
from dgemma.denoise import commit, start
from dgemma.device import choose_device, choose_dtype, describe_device
from dgemma.engine.batch import Work, run
from dgemma.model import Gemma
from dgemma.sampler import Sampler
from dgemma.weights.pack import pack
from dgemma.weights.random import random_model

BATCHES = (1, 4, 8, 16)
STEPS_PER_BLOCK = (8, 16, 32)


def drain(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def make_caches(model: Gemma, batch: int, prompt: int) -> list[KVCache]:
    weight, config = model.embed_tokens.weight, model.config
    room = Room(tokens=prompt + 3 * config.canvas_length, span=2 * config.canvas_length)
    caches = []
    for row in range(batch):
        cache = KVCache(config, room, weight.dtype, weight.device)
        generator = torch.Generator().manual_seed(row)
        tokens = torch.randint(config.vocab_size, (prompt,), generator=generator)
        commit(model, cache, tokens.to(weight.device), chunk=256)
        caches.append(cache)
    return caches


def diffusion_works(model: Gemma, caches: list[KVCache]) -> list[Work]:
    config, device = model.config, caches[0].device
    works = []
    for row, cache in enumerate(caches):
        noise = Noise(seed=row).block(0, 48, config.canvas_length, config.vocab_size, device)
        works.append(Work(cache, row=start(Sampler(), noise, NO_PINS)))
    outcomes = run(model, works)  # the first step has no self-conditioning; time a later one
    return [Work(w.cache, row=o.row) for w, o in zip(works, outcomes, strict=True)]


def median_ms(model: Gemma, works: list[Work], repeats: int) -> float:
    """Milliseconds of one pass. Commits are taken back after each, so that all are alike."""
    device, lengths, times = works[0].cache.device, [w.cache.length for w in works], []
    for _ in range(repeats + 2):
        drain(device)
        begin = time.perf_counter()
        run(model, works)
        drain(device)
        times.append(1000 * (time.perf_counter() - begin))
        for work, length in zip(works, lengths, strict=True):
            work.cache.truncate(length)
    return statistics.median(times[2:])


def measure(model: Gemma, batch: int, prompt: int, repeats: int) -> dict[str, float]:
    caches = make_caches(model, batch, prompt)
    length = model.config.canvas_length
    stepping = median_ms(model, diffusion_works(model, caches), repeats)
    block = tuple(range(3, 3 + length))
    committing = median_ms(model, [Work(c, tokens=block) for c in caches], repeats)
    ar = median_ms(model, [Work(c, tokens=(5,), wants_logits=True) for c in caches], repeats)
    row = {"batch": batch, "step_ms": stepping, "commit_ms": committing, "ar_ms": ar}
    for steps in STEPS_PER_BLOCK:
        row[f"diffusion_{steps}"] = 1000 * batch * length / (steps * stepping + committing)
    return {**row, "ar": 1000 * batch / ar}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--released", action="store_true")
    parser.add_argument("--prompt", type=int, default=256)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    device = choose_device(arguments.device)
    dtype = choose_dtype(arguments.dtype, device)
    config = RELEASED if arguments.released else EXAMPLE
    model = pack(random_model(config, seed=0, device=device, dtype=dtype))
    name = "released shapes" if arguments.released else "40M example"
    print(f"{name}, {str(dtype).removeprefix('torch.')}, {describe_device(device)}, {date.today()}")
    heading = "".join(f"  tok/s at {steps:2} steps" for steps in STEPS_PER_BLOCK)
    print(f"batch  step ms  commit ms  AR ms{heading}  AR tok/s")
    rows = []
    for batch in BATCHES:
        row = measure(model, batch, arguments.prompt, arguments.repeats)
        rows.append(row)
        rates = "".join(f"  {row[f'diffusion_{steps}']:17.1f}" for steps in STEPS_PER_BLOCK)
        print(
            f"{batch:5}  {row['step_ms']:7.1f}  {row['commit_ms']:9.1f}  {row['ar_ms']:5.1f}{rates}"
            f"  {row['ar']:8.1f}",
            flush=True,
        )
    facts = {
        "bench": "batch",
        "date": str(date.today()),
        "model": name,
        "device": describe_device(device),
        "dtype": str(dtype).removeprefix("torch."),
        "prompt": arguments.prompt,
        "rows": rows,
    }
    if arguments.out is not None:
        arguments.out.write_text(json.dumps(facts) + "\n", encoding="utf-8")
    print(json.dumps(facts))


if __name__ == "__main__":
    main()
