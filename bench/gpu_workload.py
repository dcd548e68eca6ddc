"""The public workload through the engine itself: one user, 1024 random tokens in, 1024 out.

    python bench/gpu_workload.py [--quant none|fp8|nvfp4] [--runs 5] [--long 8192] [--out FILE]

Random weights of the released shapes, a fixed number of steps a canvas, nothing stops or settles:
what is timed is the engine from the prompt to the last token, prefill included. Committed tokens
per second are the median of the runs; the first run, which captures, is told apart. Then the same
weights in autoregressive mode, and a long prompt alone. The last line is JSON.
"""

import argparse
import cProfile
import json
import pstats
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import date
from pathlib import Path

import torch
from gpu_ours import COMMON
from shapes import SHAPES, shape

from dgemma.cache import KVCache, Room
from dgemma.config import GenerationConfig
from dgemma.denoise import commit
from dgemma.device import choose_device, choose_dtype, describe_device
from dgemma.engine.engine import Engine
from dgemma.engine.events import Done, Text
from dgemma.engine.options import Options
from dgemma.model import Gemma, Layer
from dgemma.ops.fast import FAMILIES, decided
from dgemma.sampler import EntropyBound, Sampler
from dgemma.text.chat import Prompt
from dgemma.text.tokenizer import Tokenizer
from dgemma.weights.head import shrink_head
from dgemma.weights.packed import FORMS, shrink
from dgemma.weights.random import random_model

NEVER = 1 << 30  # steps that a guess would have to stay the same


def plain_tokenizer(size: int) -> Tokenizer:
    """A vocabulary of that size: every byte, and names of no meaning. No control tokens."""
    from tokenizers import Tokenizer as Backend
    from tokenizers import decoders, normalizers
    from tokenizers.models import BPE

    pieces = [*(f"<0x{byte:02X}>" for byte in range(256)), "▁", "<unk>"]
    pieces += [f"t{number}" for number in range(size - len(pieces))]
    vocabulary = {piece: index for index, piece in enumerate(pieces)}
    backend = Backend(BPE(vocabulary, [], unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    backend.normalizer = normalizers.Replace(" ", "▁")
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    return Tokenizer(backend)


def model_of(arguments: argparse.Namespace, device: torch.device, dtype: torch.dtype) -> Gemma:
    """Each layer is made small as soon as it stands: the whole is never there in 16 bits."""
    form = FORMS[arguments.quant]
    if arguments.plain_dense:
        form = replace(form, dense="plain")
    config = shape(arguments.shapes, arguments.layers)

    def change(layer: Layer) -> None:
        layer.post_attention_layernorm.weight.mul_(COMMON)  # every expert is used
        shrink(layer, form)

    model = random_model(config, 0, device=device, dtype=dtype, on_layer=change)
    if arguments.head == 16 or arguments.quant == "none":
        return model
    return shrink_head(model, soft=arguments.soft == 8)


def engine_of(model: Gemma, arguments: argparse.Namespace) -> Engine:
    vocab = model.config.vocab_size
    # A stop id that no token has.
    generation = GenerationConfig(stop_ids=(vocab,), max_new_tokens=arguments.tokens)
    more = {} if arguments.prefix_bytes is None else {"prefix_bytes": arguments.prefix_bytes}
    engine = Engine(model, plain_tokenizer(vocab), None, generation, **more)
    engine.chunk = arguments.chunk or engine.chunk
    if arguments.uncaptured:
        engine.fast = None
    return engine


@dataclass(frozen=True, slots=True)
class Timed:
    """One request: seconds from its start."""

    seconds: float
    first: float  # to the first promised text
    tokens: int
    steps: int


class Workload:
    """An engine and its requests; each has a prompt of its own, and nothing is reused."""

    def __init__(self, engine: Engine, arguments: argparse.Namespace) -> None:
        self.engine, self.prompt_length, self.tokens = engine, arguments.prompt, arguments.tokens
        rule = EntropyBound(settle_steps=NEVER)
        self.sampler = Sampler(rule=rule, max_steps=arguments.steps)
        self.ar_tokens = arguments.ar_tokens
        self.count = 0

    def prompt(self, length: int) -> Prompt:
        self.count += 1
        generator = torch.Generator().manual_seed(self.count)
        vocab = self.engine.model.config.vocab_size
        ids = torch.randint(256, vocab, (length,), generator=generator)
        return Prompt(text="", ids=tuple(ids.tolist()))

    def diffusion(self) -> Timed:
        sampler, tokens = self.sampler, self.tokens
        return self._time(Options(seed=1, sampler=sampler, retries=0, max_tokens=tokens))

    def ar(self) -> Timed:
        return self._time(Options(mode="ar", seed=1, max_tokens=self.ar_tokens))

    def _time(self, options: Options) -> Timed:
        prompt, first, done = self.prompt(self.prompt_length), 0.0, None
        begin = time.perf_counter()
        for event in self.engine.stream(prompt, options):
            if isinstance(event, Text) and not first:
                first = time.perf_counter() - begin
            done = event
        seconds = time.perf_counter() - begin
        self.engine.prefixes.clear()
        assert isinstance(done, Done) and done.finish == "length", done
        return Timed(seconds, first, done.tokens, done.steps)

    def prefill(self, length: int) -> float:
        """Seconds of a long prompt alone, into an empty cache."""
        engine, model = self.engine, self.engine.model
        tokens_T = torch.tensor(self.prompt(length).ids, device=engine.device)
        room = Room(tokens=length, span=engine.chunk)
        cache = KVCache(model.config, room, engine.dtype, engine.device)
        wait(engine.device)
        begin = time.perf_counter()
        commit(model, cache, tokens_T, engine.chunk)
        wait(engine.device)
        return time.perf_counter() - begin


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def rate(runs: Sequence[Timed]) -> float:
    return statistics.median(run.tokens / run.seconds for run in runs)


def diffusion_facts(work: Workload, runs: int) -> dict[str, object]:
    first = work.diffusion()
    held = held_facts(work.engine.device, "first run")
    timed = [work.diffusion() for _ in range(runs)]
    rates = [run.tokens / run.seconds for run in timed]
    return {
        "tokens_per_s": rate(timed),
        "tokens_per_s_runs": rates,
        "seconds": statistics.median(run.seconds for run in timed),
        "first_canvas_s": statistics.median(run.first for run in timed),
        "ms_per_step": 1000 * statistics.median(run.seconds / run.steps for run in timed),
        "tokens": timed[-1].tokens,
        "steps": timed[-1].steps,
        "first_run_s": first.seconds,
        **held,
    }


def ar_facts(work: Workload, runs: int) -> dict[str, object]:
    work.ar()
    timed = [work.ar() for _ in range(runs)]
    between = [(run.seconds - run.first) / (run.tokens - 1) for run in timed]
    return {
        "ar_tokens_per_s": rate(timed),
        "ar_ms_per_token": 1000 * statistics.median(between),
        "ar_first_token_s": statistics.median(run.first for run in timed),
    }


def prefill_facts(work: Workload, length: int, runs: int) -> dict[str, object]:
    times = [work.prefill(length) for _ in range(1 + runs)][1:]
    return {f"prefill_{length}_ms": 1000 * statistics.median(times)}


def memory_facts(device: torch.device) -> dict[str, object]:
    """Since the weights stood; `used` counts all there is on the device, its context included."""
    if device.type != "cuda":
        return {}
    free, total = torch.cuda.mem_get_info(device)
    used, reserved = total - free, torch.cuda.memory_reserved(device)
    peak = torch.cuda.max_memory_reserved(device)
    return {
        "peak_allocated_gb": torch.cuda.max_memory_allocated(device) / 1e9,
        "peak_reserved_gb": peak / 1e9,
        "peak_used_gb": (used - reserved + peak) / 1e9,
        "used_gb": used / 1e9,
        "beside_torch_gb": (used - reserved) / 1e9,
        "allocated_gb": torch.cuda.memory_allocated(device) / 1e9,
        "reserved_gb": reserved / 1e9,
        "pools_gb": pools(),
    }


def held_facts(device: torch.device, when: str) -> dict[str, object]:
    """Memory that tensors have and that torch holds, now; the most it held until now."""
    if device.type != "cuda":
        return {}
    held = (torch.cuda.memory_allocated, torch.cuda.memory_reserved, torch.cuda.max_memory_reserved)
    return {f"{when}: allocated, reserved, most_gb": [of(device) / 1e9 for of in held]}


def pools() -> dict[str, tuple[float, float]]:
    """Reserved and in use, of the ordinary memory and of that which captures share, by stream.

    Ordinary memory is (0, 0). Streams do not share what they leave free.
    """
    found: dict[str, list[int]] = {}
    streams: dict[int, int] = {0: 0}  # numbered as they come
    for segment in torch.cuda.memory_snapshot():
        stream = streams.setdefault(segment["stream"], len(streams))
        name = f"{segment['segment_pool_id']} {segment['segment_type']} stream {stream}"
        held = found.setdefault(name, [0, 0])
        held[0] += segment["total_size"]
        held[1] += segment["active_size"]
    return {name: (held / 1e9, used / 1e9) for name, (held, used) in sorted(found.items())}


def build(arguments: argparse.Namespace) -> tuple[Engine, dict[str, object]]:
    device = choose_device(arguments.device)
    dtype = choose_dtype(arguments.dtype, device)
    model = model_of(arguments, device, dtype)
    built = held_facts(device, "built")
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
    wait(device)
    begin = time.perf_counter()
    engine = engine_of(model, arguments)
    facts: dict[str, object] = {
        "bench": "gpu_workload",
        "date": str(date.today()),
        "device": describe_device(device),
        "torch": torch.__version__,
        "dtype": str(dtype).removeprefix("torch."),
        "quant": arguments.quant,
        "head_bits": 8 if model.embed_tokens.head.is_8 else 16,
        "soft_bits": 16 if model.embed_tokens.soft is None else 8,
        "layers": model.config.num_hidden_layers,
        "prompt": arguments.prompt,
        "steps_per_canvas": arguments.steps,
        "chunk": engine.chunk,
        "kernels": {name: name in decided(engine.device) for name in FAMILIES},
        "captured": engine.fast is not None,
        "engine_s": time.perf_counter() - begin,
        **built,
        **held_facts(device, "ready"),
    }
    return engine, facts


def profile(work: Workload) -> None:
    """Where the host's time goes in one answer, and in a prompt alone."""
    for name, job in (("answer", work.diffusion), ("prompt", lambda: work.prefill(1024))):
        print(f"--- {name}")
        watch = cProfile.Profile()
        watch.runcall(job)
        pstats.Stats(watch).sort_stats("tottime").print_stats(25)


def parse(given: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shapes", choices=list(SHAPES), default="released")
    parser.add_argument("--layers", type=int, help="fewer of them")
    parser.add_argument("--quant", choices=["none", "fp8", "nvfp4"], default="none")
    parser.add_argument("--head", type=int, choices=[8, 16], default=8, help="for fewer bits alone")
    parser.add_argument("--soft", type=int, choices=[8, 16], default=8, help="with 8-bit heads")
    parser.add_argument("--plain-dense", action="store_true", help="experts alone in fewer bits")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--prompt", type=int, default=1024)
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--ar-tokens", type=int, default=256)
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--long", type=int, default=8192, help="tokens of the prompt alone")
    parser.add_argument("--chunk", type=int, help="tokens of a prompt that a pass takes")
    parser.add_argument("--prefix-bytes", type=int, help="memory for finished requests; 0: none")
    parser.add_argument("--uncaptured", action="store_true", help="every pass by Python")
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--out", type=Path)
    return parser.parse_args(given)


def main(given: Sequence[str] | None = None) -> dict[str, object]:
    arguments = parse(given)
    engine, facts = build(arguments)
    work = Workload(engine, arguments)
    facts |= diffusion_facts(work, arguments.runs)
    print(f"{facts['tokens_per_s']:.1f} tokens/s", flush=True)
    facts |= memory_facts(engine.device)  # of the workload: before longer prompts
    facts |= ar_facts(work, min(2, arguments.runs))
    facts |= prefill_facts(work, arguments.long, min(3, arguments.runs))
    if arguments.profile:
        profile(work)
    for key, value in facts.items():
        print(f"{key:24} {value}")
    line = json.dumps(facts)
    if arguments.out is not None:
        arguments.out.write_text(line + "\n", encoding="utf-8")
    print(line)
    return facts


if __name__ == "__main__":
    main()
