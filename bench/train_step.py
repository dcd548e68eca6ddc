"""How fast a training step is, in rows a second and as a share of the GPU's arithmetic.

    PYTHONPATH=. python bench/train_step.py [--sequences 64] [--rows 2048] [--steps 20]

FLOP of a step, counted for what the objective needs and nothing else (no recomputation, no
optimizer, no padding of experts):

    rows            packed rows that belong to an example; clean and canvas rows are both counted:
                    the two streams of block diffusion
    6 * rows * (N_body + N_head)       forward and backward; N_body: active weights of the layers,
                                       N_head: the tied table, once
    2 * rows / 2 * (N_body + 2 N_head) the guess of every second sequence, forward only, head and
                                       soft embedding
    attention       12 * pairs * heads * head width, plus 4 * pairs of the guess / 2, where
                    pairs are those the mask lets see each other
"""

import argparse
import json
import os
import time
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from dgemma.config import FULL, SLIDING, ModelConfig
from dgemma.model import FeedForward, Gemma
from dgemma.train.context import Batch, dense_mask
from dgemma.train.fresh import fresh_model
from dgemma.train.mix import Ingredient, Mixture
from dgemma.train.objective import Counts, Objective
from dgemma.train.optim import Masters, OptimSettings
from dgemma.train.rows import EXAMPLE, Corruption, Example
from dgemma.train.speed import compiled
from dgemma.train.weighting import Weighting

PEAK = 989e12  # dense bf16 of an H100 or H200, by the data sheet

NANO = ModelConfig(
    vocab_size=8192,
    hidden_size=512,
    intermediate_size=384,
    moe_intermediate_size=160,
    num_experts=8,
    top_k_experts=2,
    num_attention_heads=8,
    num_key_value_heads=2,
    num_global_key_value_heads=2,
    head_dim=64,
    global_head_dim=64,
    layer_types=(SLIDING, SLIDING, SLIDING, FULL) * 2,
    sliding_window=256,
    canvas_length=128,
)


class PlainExperts(nn.Module):
    """The dense twin's stand-in for experts: one block of the width that is active."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        inner = config.top_k_experts * config.moe_intermediate_size
        self.block = FeedForward(config.hidden_size, inner)
        for weight in self.block.parameters():
            nn.init.normal_(weight, std=weight.shape[1] ** -0.5)

    def forward(self, x_TD: Tensor, ids_TK: Tensor, share_TK: Tensor) -> Tensor:
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
    lengths = {64: 1.0, 96: 1.0, 128: 2.0}
    return Mixture(
        ingredients=[Ingredient(source=RandomTexts(), weight=1.0, canvas_lengths=lengths)],
        corruption=Corruption(vocab_size=8192),
        sequences=args.sequences,
        rows=args.rows,
        seed=0,
    )


def flop(config: ModelConfig, batch: Batch) -> float:
    """Of one step, by the formula above."""
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


def measure(name: str, model: Gemma, args: argparse.Namespace) -> dict[str, object]:
    config = model.config
    objective = Objective(model, Weighting(), is_flex=args.device == "cuda")
    if args.device == "cuda":
        compiled(objective)
    masters = Masters(model, OptimSettings())
    source = mixture(args)
    batches = [torch.from_numpy(source.batch(step)) for step in range(4)]
    began = time.perf_counter()
    times: list[float] = []
    for step in range(args.steps + 6):
        rows = batches[step % len(batches)]
        start = time.perf_counter()
        losses = objective(Batch.of(rows, args.device), Counts.of(rows, args.device))
        losses.total.backward()
        masters.step(0.01)
        if args.device == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
        if step == 5:
            print(f"{name}: ready after {time.perf_counter() - began:.1f} s", flush=True)
    seconds = float(np.median(times[6:]))
    work = float(np.mean([flop(config, Batch.of(rows, args.device)) for rows in batches]))
    filled = float(np.mean([(rows[EXAMPLE] >= 0).float().mean() for rows in batches]))
    result = {
        "name": name,
        "ms": round(1e3 * seconds, 2),
        "rows_per_s": round(filled * args.sequences * args.rows / seconds),
        "tflop": round(work / 1e12, 2),
        "mfu": round(work / seconds / PEAK, 4),
        "filled": round(filled, 3),
        "loss": losses.total.item(),
        "peak_gib": round(torch.cuda.max_memory_allocated() / 2**30, 1)
        if args.device == "cuda"
        else None,
    }
    print(json.dumps(result), flush=True)
    return result


def profile(model: Gemma, args: argparse.Namespace) -> str:
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as watch

    objective = Objective(model, Weighting(), is_flex=True)
    compiled(objective)
    masters = Masters(model, OptimSettings())
    rows = torch.from_numpy(mixture(args).batch(0))
    for step in range(5):
        if step == 4:
            torch.cuda.synchronize()
            watcher = watch(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU])
            watcher.start()
        losses = objective(Batch.of(rows, "cuda"), Counts.of(rows, "cuda"))
        losses.total.backward()
        masters.step(0.01)
    torch.cuda.synchronize()
    watcher.stop()
    return watcher.key_averages().table(
        sort_by="self_cuda_time_total", row_limit=45, max_name_column_width=90
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sequences", type=int, default=64)
    parser.add_argument("--rows", type=int, default=2048)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--profile", action="store_true")
    args = parser.parse_args()
    dtype = torch.bfloat16 if args.device == "cuda" else torch.float32
    if args.device == "cuda":
        print(torch.cuda.get_device_name(), torch.__version__)
    print(__doc__)
    results = []
    for name in ("experts", "dense twin"):
        torch._dynamo.reset()
        model = fresh_model(NANO, 0, args.device)
        if name == "dense twin":
            for layer in model.layers:
                layer.experts = PlainExperts(NANO).to(args.device)
                layer.router.requires_grad_(False)
        model.to(dtype)
        results.append(measure(name, model, args))
        if args.profile and name == "experts":
            table = profile(model, args)
            Path(os.environ.get("OUT", ".")).joinpath("profile.txt").write_text(table)
            print(table[:6000])
    for result in results:
        print(result)


if __name__ == "__main__":
    main()
