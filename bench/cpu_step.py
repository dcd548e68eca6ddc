"""One denoising step on the CPU: ours and transformers, same weights, same canvas, one process.

    python bench/cpu_step.py [--rounds 9] [--threads N]

About 40M parameters, 16k vocabulary, canvas 256 after a 256-token prompt, float32. A *step* is the
forward pass with its soft embedding, and the sampler (draw, entropy, accept, renoise, stop); the
*forward* ends with the logits. Rounds alternate and ratios are taken within a round, so that a busy
machine disturbs both alike. The last line is JSON.
"""

import argparse
import resource
import statistics
import time
from collections.abc import Callable, Mapping
from functools import partial

import torch
from _step_peer import transformers_model
from common import EXAMPLE, MAX_STEPS, Facts, finish, head, in_turn, new_state
from torch import Tensor
from transformers import DynamicCache

from dgemma.backends.base import ForwardInput, prefill
from dgemma.backends.choose import choose_backend
from dgemma.backends.cpu import pack
from dgemma.model.forward_batch import ForwardBatch, Segment
from dgemma.model.gemma import Gemma
from dgemma.model.kv_cache import Capacity, KVCache
from dgemma.weights.load import random_model

PROMPT = 256
CALLS = 4  # in a row, as in a denoising loop


class Theirs:
    """The reference's own step, called as its `generate` calls it."""

    def __init__(self, model: Gemma, prompt_T: Tensor) -> None:
        self.model = reference = transformers_model(model)
        self.cache = DynamicCache(config=reference.config.get_text_config())
        with torch.no_grad():
            reference.model.encoder(input_ids=prompt_T[None], past_key_values=self.cache)
        generation = type(reference.generation_config)(
            **reference.generation_config._get_default_generation_params()
        )
        self.sampler = reference._prepare_sampler(generation)
        self.processor = reference._prepare_logits_processor(generation)
        self.stopper = reference._prepare_diffusion_stopping_criteria(generation)
        self.positions = torch.arange(PROMPT, PROMPT + EXAMPLE.canvas_length)[None]
        self.masks = {"full_attention": None, "sliding_attention": None}
        self.prompt_1T = prompt_T[None]

    @torch.no_grad()
    def forward(self, canvas_L: Tensor, logits_1LV: Tensor | None) -> Tensor:
        found: Tensor = self.model(
            decoder_input_ids=canvas_L[None],
            self_conditioning_logits=logits_1LV,
            decoder_attention_mask=self.masks,
            past_key_values=self.cache,
            decoder_position_ids=self.positions,
        ).logits
        return found

    @torch.no_grad()
    def step(self, canvas_L: Tensor, logits_1LV: Tensor) -> None:
        self.model._denoising_step(
            decoder_forward=self.model.forward,
            current_canvas=canvas_L[None],
            argmax_canvas=canvas_L[None],
            input_ids=self.prompt_1T,
            decoder_position_ids=self.positions,
            self_conditioning_logits=logits_1LV,
            mask_mapping=self.masks,
            past_key_values=self.cache,
            finished_denoising=torch.zeros(1, dtype=torch.bool),
            cur_step=MAX_STEPS // 2,
            sampler=self.sampler,
            logits_processor=self.processor,
            diffusion_stopping_criteria=self.stopper,
        )


class Ours:
    """A step through the backend, as the engine runs it."""

    def __init__(self, model: Gemma, prompt_T: Tensor) -> None:
        self.model, self.backend = model, choose_backend(model)
        capacity, cpu = Capacity(tokens=PROMPT + EXAMPLE.canvas_length), torch.device("cpu")
        self.cache = KVCache(model.config, capacity, torch.float32, cpu)
        prefill(self.backend, self.cache, prompt_T, PROMPT)
        (first,) = self.backend.run([ForwardInput(cache=self.cache, state=new_state(model))])
        self.state = first.state

    @torch.inference_mode()
    def forward(self, canvas_L: Tensor, p_LV: Tensor | None) -> Tensor:
        # Our steps pass probabilities on, where the reference takes the softmax in its forward.
        soft_LD = None if p_LV is None else self.model.soft_embed(p_LV)
        batch = ForwardBatch([Segment(self.cache, len(canvas_L), commit=False)])
        return self.model.logits(self.model.denoise(canvas_L, soft_LD, batch))

    def step(self) -> object:
        return self.backend.run([ForwardInput(cache=self.cache, state=self.state)])


def ms_per_call(work: Callable[[], object]) -> float:
    """Milliseconds per call of several in a row; one more before them warms up."""
    work()
    begin = time.perf_counter()
    for _ in range(CALLS):
        work()
    return 1000 * (time.perf_counter() - begin) / CALLS


def speedup(times: Mapping[str, list[float]], part: str) -> float:
    """Times faster ours is, by the median of the rounds."""
    pairs = zip(times[f"{part} theirs"], times[f"{part} ours"], strict=True)
    return statistics.median(theirs / ours for theirs, ours in pairs)


def peak_mib(work: Callable[[], object]) -> float:
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


def report(facts: Facts) -> None:
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
    finish(facts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    model = random_model(EXAMPLE, seed=0, device=torch.device("cpu"), dtype=torch.float32)
    generator = torch.Generator().manual_seed(0)
    prompt_T = torch.randint(EXAMPLE.vocab_size, (PROMPT,), generator=generator)
    canvas_L = torch.randint(EXAMPLE.vocab_size, (EXAMPLE.canvas_length,), generator=generator)
    theirs = Theirs(model, prompt_T)
    parameters = sum(p.numel() for p in model.parameters())
    ours = Ours(pack(model), prompt_T)
    logits_1LV = theirs.forward(canvas_L, None)
    p_LV = logits_1LV[0].softmax(-1)
    later_LV = theirs.forward(canvas_L, logits_1LV)[0]
    difference = {
        "first step": (logits_1LV[0] - ours.forward(canvas_L, None)).abs().max().item(),
        "later step": (later_LV - ours.forward(canvas_L, p_LV)).abs().max().item(),
    }
    works: dict[str, Callable[[], object]] = {
        "forward theirs": lambda: theirs.forward(canvas_L, logits_1LV),
        "forward ours": lambda: ours.forward(canvas_L, p_LV),
        "step theirs": lambda: theirs.step(canvas_L, logits_1LV),
        "step ours": ours.step,
    }
    timed = {name: partial(ms_per_call, work) for name, work in works.items()}
    times = in_turn(timed, arguments.rounds, warm=2)
    report(
        {
            **head("cpu_step"),
            "parameters": parameters,
            "median_ms": {name: statistics.median(values) for name, values in times.items()},
            "ratio": {part: speedup(times, part) for part in ("forward", "step")},
            "logit_difference": difference,
            "step_peak_mib": {n: peak_mib(works[n]) for n in ("step theirs", "step ours")},
            "process_peak_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        }
    )


if __name__ == "__main__":
    main()
