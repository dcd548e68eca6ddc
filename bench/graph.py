"""Whether a whole denoising step can be captured as one CUDA graph, and what that brings.

    python bench/graph.py [--prompt 512]

Released shapes, random weights, one canvas on a GPU: the step as Python runs it beside a replay of
its capture, with the same result. The last line is JSON.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from datetime import date

import torch
from shapes import RELEASED

from dgemma.cache import KVCache, Pass, Room, Span
from dgemma.canvas import NO_PINS, Noise
from dgemma.denoise import commit, start, step
from dgemma.device import choose_device, describe_device
from dgemma.sampler import Sampler
from dgemma.weights.random import random_model

LENGTH, VOCAB = RELEASED.canvas_length, RELEASED.vocab_size


def median_ms(work: Callable[[], object], repeats: int = 12) -> float:
    times = []
    for _ in range(repeats + 3):
        begin = time.perf_counter()
        work()
        torch.cuda.synchronize()
        times.append(1000 * (time.perf_counter() - begin))
    return statistics.median(times[3:])


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--prompt", type=int, default=512)
    prompt = parser.parse_args().prompt
    device = choose_device("cuda")
    model = random_model(RELEASED, seed=0, device=device, dtype=torch.bfloat16)
    room = Room(tokens=prompt + 2 * LENGTH, span=512 + LENGTH)
    cache = KVCache(RELEASED, room, torch.bfloat16, device)
    commit(model, cache, torch.randint(VOCAB, (prompt,), device=device), chunk=512)
    noise = Noise(seed=1).block(0, 48, LENGTH, VOCAB, device)
    context = Pass([Span(cache, LENGTH, commit=False)])
    (row,) = step(model, context, [start(Sampler(), noise, NO_PINS)])
    eager = median_ms(lambda: step(model, context, [row]))
    graph = torch.cuda.CUDAGraph()
    begin = time.perf_counter()
    with torch.cuda.graph(graph):
        (captured,) = step(model, context, [row])
    torch.cuda.synchronize()
    capture = 1000 * (time.perf_counter() - begin)
    graph.replay()
    (expected,) = step(model, context, [row])
    facts = {
        "bench": "graph",
        "date": str(date.today()),
        "device": describe_device(device),
        "torch": torch.__version__,
        "prompt": prompt,
        "eager_ms": eager,
        "capture_ms": capture,
        "replay_ms": median_ms(graph.replay),
        "is_same": torch.equal(captured.canvas.tokens_L, expected.canvas.tokens_L),
    }
    for key, value in facts.items():
        print(f"{key:12} {value:.2f}" if isinstance(value, float) else f"{key:12} {value}")
    print(json.dumps(facts))


if __name__ == "__main__":
    main()
