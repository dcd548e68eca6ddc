"""transformers' model in a process of its own, asked by line for its milliseconds a denoising step.

    python bench/gpu_peer.py [--caches dynamic static] [--prompt 512] [--layers 30] [--uneven]
                             [--shapes released|example|tiny] [--device auto]

Its weights are drawn as ours are for the same shapes, so that routing is the same. Its steps run
inside its own `generate`, with its own cache and, for the static one, its own compilation; stopping
is off. A step's time is the difference of two lengths. Once every cache kind is warm it writes a
line of JSON with what it is; then it answers each line that names a kind with `{"ms": ...}`, until
there are no more lines. Whatever others write to standard output goes to standard error instead.

`bench/gpu_step.py --peer` asks it in turn with ours (`bench/gpu_beside.py`). A process of its own:
in ours, its compiled static cache ended in a launch failure beside our captures.
"""

import argparse
import contextlib
import json
import os
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, TextIO

import torch
from gpu_ours import built, prompt_of
from shapes import EXAMPLE, SHAPES, shape
from torch import Tensor, nn

from dgemma.config import config_to_json
from dgemma.device import choose_device
from dgemma.model import Gemma

CACHES = ("dynamic", "static")
FEW, MANY = 4, 20  # steps; what is not a step is in both
NO_PAD = -1  # no token of a canvas is one that is not counted
WARM = 2  # rounds: a captured pass is compiled, then recorded, then repeated


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
    unknown = peer.load_state_dict(weights, strict=False, assign=True).unexpected_keys
    assert not unknown, f"transformers has no such weights: {unknown[:4]}"
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


class Peer:
    """Their model behind a prompt, timed by cache kind."""

    def __init__(self, model: Gemma, prompt: int) -> None:
        self.model, self.device = peer_of(model), model.embed_tokens.weight.device
        self.length = model.config.canvas_length
        self.prompt_1T = prompt_of(model.config.vocab_size, prompt, self.device)[None]

    def seconds(self, steps: int, cache: str) -> float:
        """For one canvas of so many steps, the prompt included."""
        options = {} if cache == "dynamic" else {"cache_implementation": cache}
        begin = time.perf_counter()
        out = self.model.generate(
            input_ids=self.prompt_1T,
            attention_mask=torch.ones_like(self.prompt_1T),
            max_new_tokens=self.length,
            max_denoising_steps=steps,
            confidence_threshold=1e-12,
            pad_token_id=NO_PAD,
            **options,
        )
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        found = time.perf_counter() - begin
        tokens = (out.sequences[0, self.prompt_1T.shape[1] :] != NO_PAD).sum()  # as it counts them
        taken = round((tokens / out.tokens_per_forward[0]).item())
        assert taken == steps, f"it took {taken} steps, and {steps} were asked for"
        return found

    def ms(self, cache: str) -> float:
        few, many = (self.seconds(steps, cache) for steps in (FEW, MANY))
        return 1000 * (many - few) / (MANY - FEW)

    def warm_s(self, cache: str) -> float:
        begin = time.perf_counter()
        for _ in range(WARM):
            self.ms(cache)
        return round(time.perf_counter() - begin, 1)

    def experts_hit(self) -> float | None:
        """Share of all layers' experts that a step reads; none where it cannot be told."""
        found: list[Tensor] = []

        def note(_module: nn.Module, _given: Any, out: Sequence[Tensor]) -> None:
            found.extend(each for each in out if not each.is_floating_point())

        layers = self.model.model.decoder.layers
        hooks = [layer.router.register_forward_hook(note) for layer in layers]
        self.seconds(1, "dynamic")
        for hook in hooks:
            hook.remove()
        count = self.model.config.text_config.num_experts
        return sum(ids.unique().numel() for ids in found) / (count * len(found)) if found else None

    def facts(self) -> dict[str, Any]:
        import transformers

        text = self.model.config.text_config
        return {
            "transformers": transformers.__version__,
            "torch": torch.__version__,
            "attention": getattr(text, "_attn_implementation", None),
            "experts": getattr(text, "_experts_implementation", None),
            "experts_hit": self.experts_hit(),
            "prompt": self.prompt_1T.shape[1],
        }


def own_output() -> TextIO:
    """What standard output was; from here on its number leads to standard error."""
    found = os.fdopen(os.dup(1), "w", encoding="utf-8")
    sys.stdout.flush()
    os.dup2(2, 1)
    return found


def parse(given: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--caches", nargs="+", choices=CACHES, default=list(CACHES))
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--shapes", choices=list(SHAPES), default="released")
    parser.add_argument("--layers", type=int, help="fewer of them")
    parser.add_argument("--uneven", action="store_true", help="routing as weights are drawn")
    parser.add_argument("--device", default="auto")
    return parser.parse_args(given)


@torch.inference_mode()
def main(given: Sequence[str] | None = None) -> None:
    arguments, output = parse(given), own_output()
    config = shape(arguments.shapes, arguments.layers)
    device = choose_device(arguments.device)
    peer = Peer(built(config, "none", even=not arguments.uneven, device=device), arguments.prompt)
    facts = peer.facts()
    facts["warm_s"] = {cache: peer.warm_s(cache) for cache in arguments.caches}
    print(json.dumps(facts), file=output, flush=True)
    for line in sys.stdin:
        cache = line.strip()
        if cache not in arguments.caches:
            raise SystemExit(f"not a warm cache: {cache!r}; there are {arguments.caches}")
        print(json.dumps({"ms": peer.ms(cache)}), file=output, flush=True)


if __name__ == "__main__":
    main()
