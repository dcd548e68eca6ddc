"""transformers on our weights: milliseconds per denoising step, by the difference of two lengths.

Run by `bench/gpu_step.py --peer`. The peer's model is built without memory of its own and given the
very tensors of ours, so that both fit on one device. Its steps run inside its own `generate`, with
its own cache and, for the static one, its own compilation; stopping is off. Between the peer's
rounds ours takes as many steps.
"""

import contextlib
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from gpu_ours import DEVICE, Bench, wait
from shapes import EXAMPLE
from torch import nn

from dgemma.config import config_to_json
from dgemma.model import Gemma

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
    wait()
    return time.perf_counter() - begin


def their_ms(peer: Any, prompt_1T: torch.Tensor, cache: str) -> float:
    few, many = (generate_s(peer, prompt_1T, steps, cache) for steps in (FEW, MANY))
    return 1000 * (many - few) / (MANY - FEW)


def our_ms(bench: Bench) -> float:
    bench.row = bench.fresh()
    for _ in range(FEW):
        bench.step()
    wait()
    begin = time.perf_counter()
    for _ in range(MANY - FEW):
        bench.step()
    wait()
    return 1000 * (time.perf_counter() - begin) / (MANY - FEW)


def beside(bench: Bench, caches: Sequence[str], rounds: int = 5) -> dict[str, Any]:
    """Both, in turn, on the same weights behind a prompt of the same length."""
    import transformers

    peer = peer_of(bench.model)
    length = bench.cache.length
    prompt_1T = torch.randint(bench.vocab, (1, length), device=DEVICE)
    facts: dict[str, Any] = {"transformers": transformers.__version__, "prompt": length}
    for cache in caches:
        begin = time.perf_counter()
        their_ms(peer, prompt_1T, cache)
        warm = time.perf_counter() - begin
        our_ms(bench)
        pairs = [(their_ms(peer, prompt_1T, cache), our_ms(bench)) for _ in range(rounds)]
        ratios = [theirs / ours for theirs, ours in pairs]
        facts[cache] = {
            "their_warm_s": round(warm, 1),
            "their_ms": statistics.median(theirs for theirs, _ in pairs),
            "our_ms": statistics.median(ours for _, ours in pairs),
            "ratio": statistics.median(ratios),
            "ratio_min": min(ratios),
            "ratio_max": max(ratios),
        }
        print(cache, facts[cache], flush=True)
    return facts
