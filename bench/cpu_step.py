"""One denoising step on the CPU: ours beside transformers, same weights, same canvas, one process.

    python bench/cpu_step.py [--rounds 9] [--threads N]

About 40M parameters, 16k vocabulary, canvas 256 after a 256-token prompt, float32. A *step* is the
forward pass with its soft embedding, and the sampler (draw, entropy, accept, renoise, stop); the
*forward* ends with the logits. Rounds alternate and ratios are taken within a round, so that a busy
machine disturbs both alike. The last line is JSON.
"""

import argparse
import json
import platform
import resource
import statistics
import time
from collections.abc import Callable, Mapping
from datetime import date
from typing import Any

import torch
from shapes import EXAMPLE
from transformers import DiffusionGemmaConfig, DiffusionGemmaForBlockDiffusion, DynamicCache

from dgemma.cache import KVCache, Pass, Room, Span
from dgemma.canvas import NO_PINS, Noise
from dgemma.config import config_to_json
from dgemma.denoise import Row, commit, start, step
from dgemma.model import Gemma
from dgemma.sampler import Sampler
from dgemma.weights.pack import pack
from dgemma.weights.random import random_model

PROMPT = 256
MAX_STEPS = 48


def reference_of(model: Gemma) -> DiffusionGemmaForBlockDiffusion:
    """The reference model on our very tensors."""
    config = DiffusionGemmaConfig(**config_to_json(model.config))
    reference = DiffusionGemmaForBlockDiffusion(config)
    for name, value in model.state_dict().items():
        for place in ("model.decoder.", "model.encoder.language_model."):
            if "self_conditioning" in name and "encoder" in place:
                continue
            owner, _, leaf = (place + name).rpartition(".")
            module = reference.get_submodule(owner)
            if leaf in module._parameters:
                module._parameters[leaf] = torch.nn.Parameter(value, requires_grad=False)
            else:
                module._buffers[leaf] = value
    reference.lm_head.weight = reference.model.decoder.embed_tokens.weight
    return reference.eval()


class Theirs:
    """The reference's own step, called as its `generate` calls it."""

    def __init__(self, reference: DiffusionGemmaForBlockDiffusion, prompt: torch.Tensor) -> None:
        self.model = reference
        self.cache = DynamicCache(config=reference.config.get_text_config())
        with torch.no_grad():
            reference.model.encoder(input_ids=prompt[None], past_key_values=self.cache)
        generation = type(reference.generation_config)(
            **reference.generation_config._get_default_generation_params()
        )
        self.sampler = reference._prepare_sampler(generation)
        self.processor = reference._prepare_logits_processor(generation)
        self.stopper = reference._prepare_diffusion_stopping_criteria(generation)
        self.positions = torch.arange(PROMPT, PROMPT + EXAMPLE.canvas_length)[None]
        self.masks = {"full_attention": None, "sliding_attention": None}
        self.prompt = prompt[None]

    @torch.no_grad()
    def forward(self, canvas: torch.Tensor, thought: torch.Tensor | None) -> torch.Tensor:
        return self.model(
            decoder_input_ids=canvas[None],
            self_conditioning_logits=thought,
            decoder_attention_mask=self.masks,
            past_key_values=self.cache,
            decoder_position_ids=self.positions,
        ).logits

    @torch.no_grad()
    def step(self, canvas: torch.Tensor, thought: torch.Tensor) -> None:
        self.model._denoising_step(
            decoder_forward=self.model.forward,
            current_canvas=canvas[None],
            argmax_canvas=canvas[None],
            input_ids=self.prompt,
            decoder_position_ids=self.positions,
            self_conditioning_logits=thought,
            mask_mapping=self.masks,
            past_key_values=self.cache,
            finished_denoising=torch.zeros(1, dtype=torch.bool),
            cur_step=MAX_STEPS // 2,
            sampler=self.sampler,
            logits_processor=self.processor,
            diffusion_stopping_criteria=self.stopper,
        )


class Ours:
    def __init__(self, model: Gemma, prompt: torch.Tensor) -> None:
        self.model = model
        cpu = torch.device("cpu")
        self.cache = KVCache(model.config, Room(tokens=PROMPT + 256), torch.float32, cpu)
        commit(model, self.cache, prompt, chunk=PROMPT)
        self.context = Pass([Span(self.cache, model.config.canvas_length, commit=False)])
        length, vocab = model.config.canvas_length, model.config.vocab_size
        noise = Noise(seed=1).block(0, MAX_STEPS, length, vocab, cpu)
        (self.row,) = step(
            model, self.context, [start(Sampler(max_steps=MAX_STEPS), noise, NO_PINS)]
        )

    @torch.inference_mode()
    def forward(self, canvas: torch.Tensor, thought: torch.Tensor | None) -> torch.Tensor:
        # Our steps hand probabilities on, where the reference takes the softmax in its forward.
        soft = None if thought is None else self.model.embed_soft(thought)
        return self.model.logits(self.model.denoise(canvas, soft, self.context))

    def step(self) -> list[Row]:
        return step(self.model, self.context, [self.row])


def timed(work: Callable[[], object], calls: int = 4) -> float:
    """Milliseconds per call of several in a row, as in a denoising loop; the first warms up."""
    work()
    begin = time.perf_counter()
    for _ in range(calls):
        work()
    return 1000 * (time.perf_counter() - begin) / calls


def in_turn(works: Mapping[str, Callable[[], object]], rounds: int) -> dict[str, list[float]]:
    """Times of each, in alternating rounds after two that warm up."""
    times: dict[str, list[float]] = {name: [] for name in works}
    for _ in range(rounds + 2):
        for name, work in works.items():
            times[name].append(timed(work))
    return {name: values[2:] for name, values in times.items()}


def speedup(times: Mapping[str, list[float]], part: str) -> float:
    """How many times faster ours is, by the median of the rounds."""
    pairs = zip(times[f"{part} theirs"], times[f"{part} ours"], strict=True)
    return statistics.median(theirs / ours for theirs, ours in pairs)


def peak_of(work: Callable[[], object]) -> float:
    """MiB that one call allocates at its peak, as torch's profiler sees it."""
    with torch.profiler.profile(profile_memory=True) as profile:
        work()
    events = sorted(
        (e for e in profile.profiler.kineto_results.events() if e.name() == "[memory]"),
        key=lambda event: event.start_ns(),
    )
    level = peak = 0
    for event in events:
        level += event.nbytes()
        peak = max(peak, level)
    return peak / 2**20


def report(facts: dict[str, Any]) -> None:
    """A few lines for people, and one of JSON last."""
    print(
        f"{facts['parameters'] / 1e6:.1f}M parameters, float32, {facts['threads']} threads, "
        f"{facts['date']}"
    )
    memory, ratio = facts["step_peak_mib"], facts["ratio"]
    for name, value in facts["median_ms"].items():
        extra = f"  peak {memory[name]:.0f} MiB" if name in memory else ""
        print(f"  {name:16} {value:8.1f} ms{extra}")
    print(f"  forward {ratio['forward']:.2f}x, whole step {ratio['step']:.2f}x faster")
    print(f"  largest logit difference {max(facts['logit_difference'].values()):.1e}")
    print(json.dumps(facts))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    model = random_model(EXAMPLE, seed=0, device=torch.device("cpu"), dtype=torch.float32)
    generator = torch.Generator().manual_seed(0)
    prompt = torch.randint(EXAMPLE.vocab_size, (PROMPT,), generator=generator)
    canvas = torch.randint(EXAMPLE.vocab_size, (EXAMPLE.canvas_length,), generator=generator)
    theirs = Theirs(reference_of(model), prompt)
    parameters = sum(p.numel() for p in model.parameters())
    ours = Ours(pack(model), prompt)
    thought = theirs.forward(canvas, None)
    probability = thought[0].softmax(-1)
    later = theirs.forward(canvas, thought)[0]
    agreement = {
        "first step": (thought[0] - ours.forward(canvas, None)).abs().max().item(),
        "later step": (later - ours.forward(canvas, probability)).abs().max().item(),
    }
    works = {
        "forward theirs": lambda: theirs.forward(canvas, thought),
        "forward ours": lambda: ours.forward(canvas, probability),
        "step theirs": lambda: theirs.step(canvas, thought),
        "step ours": ours.step,
    }
    times = in_turn(works, arguments.rounds)
    median = {name: statistics.median(values) for name, values in times.items()}
    ratio = {part: speedup(times, part) for part in ("forward", "step")}
    memory = {name: peak_of(works[name]) for name in ("step theirs", "step ours")}
    report(
        {
            "bench": "cpu_step",
            "date": str(date.today()),
            "cpu": platform.processor() or platform.machine(),
            "threads": arguments.threads,
            "parameters": parameters,
            "median_ms": median,
            "ratio": ratio,
            "logit_difference": agreement,
            "step_peak_mib": memory,
            "process_peak_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        }
    )


if __name__ == "__main__":
    main()
