"""Cost of a denoising step and of a commit as the context grows, on a tiny model.

    python bench/scaling.py [--longest 262144] [--repeats 5]

The cache is filled with random keys, since only its size matters here. Sliding layers hold their
window whatever the context, so their column stays flat; full layers grow with it. Rows are the
fastest of several runs. The last line is JSON.
"""

import argparse
import json
import time
from collections.abc import Callable
from datetime import date

import torch

from dgemma.cache import KVCache, Pass, Room, Span
from dgemma.config import FULL, SLIDING, ModelConfig
from dgemma.model import Gemma
from dgemma.weights.pack import pack
from dgemma.weights.random import random_model

CANVAS = 256
CONFIG = ModelConfig(
    vocab_size=1024,
    hidden_size=128,
    intermediate_size=128,
    moe_intermediate_size=64,
    num_experts=8,
    top_k_experts=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    num_global_key_value_heads=1,
    head_dim=32,
    global_head_dim=64,
    layer_types=(SLIDING, SLIDING, SLIDING, SLIDING, SLIDING, FULL),
    sliding_window=1024,
    max_position_embeddings=262_144,
    canvas_length=CANVAS,
    dtype="float32",
)


def filled_cache(context: int) -> KVCache:
    """A cache that looks as if `context` tokens had been committed."""
    room = Room(tokens=context + 2 * CANVAS)
    cache = KVCache(CONFIG, room, torch.float32, torch.device("cpu"))
    for layer, buffer in enumerate(cache.buffers):
        buffer.k_SMH.normal_(std=0.3)
        buffer.v_SMH.normal_()
        window = CONFIG.attention(layer).window
        if window is not None:
            buffer.base = max(0, context - (window - 1) - room.slack)
    cache.length = context
    return cache


def fastest(work: Callable[[], object], repeats: int) -> float:
    times = []
    for _ in range(repeats + 1):
        begin = time.perf_counter()
        work()
        times.append(1000 * (time.perf_counter() - begin))
    return min(times[1:])


@torch.inference_mode()
def measure(model: Gemma, context: int, repeats: int) -> dict[str, float]:
    cache = filled_cache(context)
    tokens = torch.randint(CONFIG.vocab_size, (CANVAS,))
    denoise = Pass([Span(cache, CANVAS, commit=False)])
    commit = Pass([Span(cache, CANVAS, commit=True)])
    queries = {
        layer: torch.randn(CANVAS, CONFIG.num_attention_heads, CONFIG.attention(layer).head_dim)
        for layer in (0, len(CONFIG.layer_types) - 1)
    }

    def attend(layer: int) -> torch.Tensor:
        keys = queries[layer][:, : CONFIG.attention(layer).num_kv_heads]
        return denoise.attend(layer, queries[layer], keys, keys)

    sizes = [2 * b.k_SMH.numel() * b.k_SMH.element_size() / 2**20 for b in cache.buffers]
    return {
        "context": context,
        "step_ms": fastest(lambda: model.denoise(tokens, None, denoise), repeats),
        "commit_ms": fastest(lambda: model.encode(tokens, commit), repeats),
        "sliding_attention_ms": fastest(lambda: attend(0), repeats),
        "full_attention_ms": fastest(lambda: attend(len(CONFIG.layer_types) - 1), repeats),
        "sliding_cache_mib": sizes[0],
        "full_cache_mib": sizes[-1],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--longest", type=int, default=262_144)
    parser.add_argument("--repeats", type=int, default=5)
    arguments = parser.parse_args()
    torch.manual_seed(0)
    model = pack(random_model(CONFIG, seed=0))
    contexts = [1024 << n for n in range(9) if 1024 << n <= arguments.longest]
    # The answer's canvas needs its own room at the very end of the context.
    contexts = [min(context, CONFIG.max_position_embeddings - CANVAS) for context in contexts]
    rows = []
    heading = "context  step ms  commit ms  sliding attn ms  full attn ms  sliding MiB  full MiB"
    print(f"canvas {CANVAS}, 5 sliding + 1 full layer, window 1024, per-layer attention and cache")
    print(heading)
    for context in contexts:
        row = measure(model, context, arguments.repeats)
        rows.append(row)
        values = list(row.values())
        print(
            f"{values[0]:7}  {values[1]:7.1f}  {values[2]:9.1f}  {values[3]:15.2f}  "
            f"{values[4]:12.2f}  {values[5]:11.2f}  {values[6]:8.1f}"
        )
    print(json.dumps({"bench": "scaling", "date": str(date.today()), "rows": rows}))


if __name__ == "__main__":
    main()
