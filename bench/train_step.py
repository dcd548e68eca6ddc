"""How fast a training step is, in rows a second and as a share of the GPU's arithmetic.

    PYTHONPATH=. python bench/train_step.py [--model nano wide] [--twin experts dense]
        [--compile kinds whole] [--sequences 64] [--rows 2048] [--steps 20]

Models: nano, the built-in one's shape, so small that norms and gathers weigh as much as products;
and wide, twice its width, for what larger models can expect. Each with its experts and as a dense
twin, whose block has the width that is active. Seconds until ready are those of compiling, less
where TORCHINDUCTOR_CACHE_DIR names a directory that has seen it.

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
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from dgemma.config import FULL, SLIDING, ModelConfig
from dgemma.model import FeedForward, Gemma
from dgemma.train.context import Batch, dense_mask
from dgemma.train.fresh import fresh_model
from dgemma.train.mix import Ingredient, Mixture
from dgemma.train.objective import Counts, Objective, to_device
from dgemma.train.optim import Masters, OptimSettings
from dgemma.train.rows import EXAMPLE, Corruption, Example, Tally
from dgemma.train.speed import compiled, compiled_by_kind
from dgemma.train.weighting import Weighting

WARM = 6
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
COMPILE = {"kinds": compiled_by_kind, "whole": compiled}


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
    texts = Ingredient(
        source=RandomTexts(),
        weight=1.0,
        canvas_lengths={64: 1.0, 96: 1.0, 128: 2.0},
        corruption=Corruption(vocab_size=8192),
    )
    return Mixture(
        ingredients=[texts],
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


def wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


Step = Callable[[Tensor], Tensor]


def stepper(model: Gemma, how: str, args: argparse.Namespace) -> Step:
    """From the rows of a batch to its loss, when the weights have moved."""
    device = torch.device(args.device)
    objective = Objective(model, Weighting(rollout=args.rollout), is_flex=args.device == "cuda")
    if args.device == "cuda":
        COMPILE[how](objective)
    masters = Masters(model, OptimSettings())

    def step(rows: Tensor) -> Tensor:
        counts = Counts.of(Tally.of(rows.numpy()), device)
        losses = objective(Batch.of(to_device(rows, device), device), counts)
        losses.total.backward()
        masters.step(0.01)
        return losses.total.detach()

    return step


def measure(name: str, model: Gemma, step: Step, args: argparse.Namespace) -> dict[str, object]:
    source = mixture(args)
    batches = [torch.from_numpy(source.batch(number)) for number in range(4)]
    began = time.perf_counter()
    start = began
    for number in range(args.steps + WARM):
        if number == WARM:
            wait(args.device)
            start = time.perf_counter()
            print(f"{name}: ready after {start - began:.1f} s", flush=True)
        loss = step(batches[number % len(batches)])
    wait(args.device)
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


def profile(step: Step, args: argparse.Namespace) -> str:
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
    model = fresh_model(config, 0, device)
    if twin == "dense":
        for layer in model.layers:
            layer.experts = PlainExperts(config).to(device)
            layer.router.requires_grad_(False)
    return model.to(torch.bfloat16 if device == "cuda" else torch.float32)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", nargs="+", choices=MODELS, default=["nano"])
    parser.add_argument("--twin", nargs="+", choices=TWINS, default=list(TWINS))
    parser.add_argument("--compile", nargs="+", choices=COMPILE, default=["kinds"])
    parser.add_argument("--rollout", type=float, default=0.0)
    parser.add_argument("--sequences", type=int, default=64)
    parser.add_argument("--rows", type=int, default=2048)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--profile", action="store_true", help="of the first")
    args = parser.parse_args()
    if args.device == "cuda":
        print(torch.cuda.get_device_name(), torch.__version__)
    print(__doc__)
    results = []
    for model, twin, how in product(args.model, args.twin, args.compile):
        results.append(case(model, twin, how, args))
        if args.profile and len(results) == 1:
            args.profile = False
    for result in results:
        print(result)


def case(model: str, twin: str, how: str, args: argparse.Namespace) -> dict[str, object]:
    torch._dynamo.reset()
    if args.device == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    made = make(MODELS[model], twin, args.device)
    step = stepper(made, how, args)
    result = measure(f"{model} {twin} {how}", made, step, args)
    if args.profile:
        table = profile(step, args)
        Path(os.environ.get("OUT", ".")).joinpath("profile.txt").write_text(table)
        print(table[:6000])
    return result


if __name__ == "__main__":
    main()
