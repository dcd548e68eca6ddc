"""transformers on our weights: milliseconds per denoising step, by the difference of two lengths.

    python bench/gpu_peer.py [--layers 30] [--prompt 512] [--cache dynamic static] [--rounds 3]

The peer's model is built without memory of its own and given the very tensors of ours, so that both
fit on one device. Its steps run inside its own `generate`, with its own cache and, for the static
one, its own compilation; stopping is off. Between the peer's rounds ours takes as many steps. The
last line is JSON.
"""

import argparse
import contextlib
import json
import statistics
import time
from collections.abc import Iterator
from dataclasses import replace
from datetime import date
from typing import Any

import torch
from gpu_step import DEVICE, HALF, MAX_STEPS, Bench
from shapes import EXAMPLE, shallow
from torch import nn

from dgemma.config import config_to_json
from dgemma.graph.step import Shape, Stepper
from dgemma.model import Gemma
from dgemma.ops.fast import switched
from dgemma.stack import Stack
from dgemma.weights.random import random_model

FEW, MANY = 4, 20


@contextlib.contextmanager
def without_memory() -> Iterator[None]:
    """Parameters made inside have a shape and nothing else; buffers are real."""
    register = nn.Module.register_parameter

    def empty(self: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        register(self, name, parameter)
        if parameter is not None:
            self._parameters[name] = nn.Parameter(parameter.to("meta"), requires_grad=False)

    nn.Module.register_parameter = empty  # type: ignore[method-assign]
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]


def peer_of(model: Gemma) -> Any:
    """Their model on our tensors; what it has beyond ours (vision) is small, and zero."""
    from transformers import DiffusionGemmaConfig, DiffusionGemmaForBlockDiffusion

    raw = config_to_json(replace(model.config, vision=EXAMPLE.vision))
    with without_memory():
        peer = DiffusionGemmaForBlockDiffusion(DiffusionGemmaConfig(**raw))
    weights = {f"model.decoder.{name}": w for name, w in model.state_dict().items()}
    for name in [name for name in weights if name.endswith("layer_scalar")]:
        weights[name.replace(".decoder.", ".encoder.language_model.")] = weights[name]
    peer.load_state_dict(weights, strict=False, assign=True)
    peer.tie_weights()
    dtype, device = model.embed_tokens.weight.dtype, model.embed_tokens.weight.device
    for module in peer.modules():
        for name, parameter in module.named_parameters(recurse=False):
            if parameter.device.type == "meta":
                zeros = torch.zeros(parameter.shape, dtype=dtype, device=device)
                setattr(module, name, nn.Parameter(zeros, requires_grad=False))
        for name, buffer in module.named_buffers(recurse=False):
            module._buffers[name] = buffer.to(device)
    return peer.eval().requires_grad_(False)


def generate_s(peer: Any, prompt_1T: torch.Tensor, steps: int, cache: str) -> float:
    """Seconds for one canvas of so many steps."""
    options = {} if cache == "dynamic" else {"cache_implementation": "static"}
    begin = time.perf_counter()
    peer.generate(
        input_ids=prompt_1T,
        attention_mask=torch.ones_like(prompt_1T),
        max_new_tokens=peer.config.canvas_length,
        max_denoising_steps=steps,
        confidence_threshold=1e-12,
        **options,
    )
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - begin


def their_ms(peer: Any, prompt_1T: torch.Tensor, cache: str) -> float:
    few, many = (generate_s(peer, prompt_1T, steps, cache) for steps in (FEW, MANY))
    return 1000 * (many - few) / (MANY - FEW)


def our_ms(bench: Bench, stepper: Stepper) -> float:
    row = bench.row()
    with switched(True):
        for _ in range(FEW):
            row = bench.forward(stepper, row)
        begin = time.perf_counter()
        for _ in range(MANY - FEW):
            row = bench.forward(stepper, row)
        return 1000 * (time.perf_counter() - begin) / (MANY - FEW)


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=30)
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--cache", nargs="+", choices=["dynamic", "static"], default=["dynamic"])
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    import transformers

    model = random_model(shallow(arguments.layers), seed=0, device=DEVICE, dtype=HALF)
    model.runner = stack = Stack(model)  # joins weights: before the peer takes them
    bench = Bench(model, arguments.prompt)
    stepper = Stepper(model, stack, Shape(bench.length, MAX_STEPS, bench.row().sampler.rule))
    peer = peer_of(model)
    generator = torch.Generator(DEVICE).manual_seed(5)
    prompt_1T = torch.randint(
        bench.vocab, (1, arguments.prompt), device=DEVICE, generator=generator
    )
    facts: dict[str, object] = {
        "bench": "gpu_peer",
        "date": str(date.today()),
        "transformers": transformers.__version__,
        "prompt": arguments.prompt,
    }
    for cache in arguments.cache:
        begin = time.perf_counter()
        their_ms(peer, prompt_1T, cache)
        our_ms(bench, stepper)
        warm = time.perf_counter() - begin
        pairs = [
            (their_ms(peer, prompt_1T, cache), our_ms(bench, stepper))
            for _ in range(arguments.rounds)
        ]
        ratios = [theirs / ours for theirs, ours in pairs]
        facts[cache] = {
            "warm_s": warm,
            "their_ms": statistics.median(theirs for theirs, _ in pairs),
            "our_ms": statistics.median(ours for _, ours in pairs),
            "ratio": statistics.median(ratios),
            "ratio_min": min(ratios),
            "ratio_max": max(ratios),
        }
        print(cache, facts[cache], flush=True)
    print(json.dumps(facts))


if __name__ == "__main__":
    main()
