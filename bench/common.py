"""Shared parts of the benchmarks: random models of known shapes, timing, errors, the report.

T tokens, V vocabulary.
"""

import gc
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import date
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dgemma.backends.cpu import pack
from dgemma.config import FULL, SLIDING, ModelConfig, VisionConfig
from dgemma.config import RELEASED as RELEASED
from dgemma.device import describe_device
from dgemma.diffusion.canvas import NO_PINS, Noise
from dgemma.diffusion.denoise import CanvasState, start
from dgemma.diffusion.sampler import EntropyBound, Sampler
from dgemma.model.gemma import Gemma, Layer
from dgemma.model.kv_cache import Capacity, KVCache
from dgemma.quant.head import quantize_head
from dgemma.text.tokenizer import Tokenizer
from dgemma.weights.layer_formats import (
    LAYER_FORMATS,
    Quant,
    quantize_layer,
    quantize_outside_layers,
)
from dgemma.weights.load import random_model

Facts = dict[str, Any]
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"  # kernels run on the CPU, slowly

# --- shapes

EXAMPLE = ModelConfig(
    vocab_size=16_384,
    hidden_size=384,
    intermediate_size=384,
    moe_intermediate_size=384,
    num_experts=16,
    top_k_experts=2,
    num_attention_heads=8,
    num_key_value_heads=4,
    num_global_key_value_heads=2,
    head_dim=64,
    global_head_dim=128,
    layer_types=(SLIDING, SLIDING, SLIDING, FULL),
    sliding_window=1024,
    dtype="float32",
    vision=VisionConfig(
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=8,
        patch_size=4,
        position_embedding_size=64,
    ),
)
TINY = replace(
    EXAMPLE,
    vocab_size=512,
    hidden_size=64,
    intermediate_size=32,
    moe_intermediate_size=64,
    num_experts=4,
    head_dim=16,
    global_head_dim=32,
    sliding_window=24,
    canvas_length=16,
)
SHAPES = {"released": RELEASED, "example": EXAMPLE, "tiny": TINY}


def shape(name: str, layers: int | None = None) -> ModelConfig:
    """Return one of `SHAPES`, with fewer layers if asked; the last layer stays a full one."""
    config = SHAPES[name]
    kinds = config.layer_types
    return replace(config, layer_types=(*kinds[: (layers or len(kinds)) - 1], FULL))


@dataclass(frozen=True, slots=True)
class Sizes:
    """Shapes, device and dtype of kernel benchmarks: released on a GPU, tiny in the interpreter."""

    config: ModelConfig
    device: torch.device
    dtype: torch.dtype

    @classmethod
    def choose(cls, *, tiny: bool) -> "Sizes":
        if tiny:
            if not INTERPRETED:
                raise SystemExit("--tiny needs TRITON_INTERPRET=1: the kernels run on the CPU then")
            # Its conversion to fp8 truncates; the tests make it round.
            sys.path.append(str(Path(__file__).resolve().parents[1]))
            import_module("tests.kernels.conftest")
            return cls(TINY, torch.device("cpu"), torch.float32)
        if not torch.cuda.is_available():
            raise SystemExit("this needs a GPU; TRITON_INTERPRET=1 and --tiny try it on a CPU")
        return cls(RELEASED, torch.device("cuda"), torch.bfloat16)

    def normal(self, *size: int, scale: float = 1.0, dtype: torch.dtype | None = None) -> Tensor:
        return torch.empty(size, dtype=dtype or self.dtype, device=self.device).normal_(0, scale)

    def weight(self, *size: int) -> Tensor:
        """Draw a matrix, or a stack of them, that keeps the size of what it multiplies."""
        return self.normal(*size, scale=size[-1] ** -0.5)

    @property
    def gemms(self) -> dict[str, tuple[int, int]]:
        """Outputs and inputs of the merged GEMMs outside the experts."""
        config, width = self.config, self.config.hidden_size
        found = {}
        for name, layer in (("", 0), (" full", len(config.layer_types) - 1)):
            kind = config.attention(layer)
            heads = config.num_attention_heads * kind.head_dim
            keys = kind.num_kv_heads * kind.head_dim * (1 + kind.has_value)
            found |= {f"qkv{name}": (heads + keys, width), f"out{name}": (width, heads)}
        inner = config.intermediate_size
        return found | {"gate_up": (2 * inner, width), "down": (width, inner)}


# --- models

NEVER = EntropyBound(stability_threshold=1 << 30)  # no canvas converges
MAX_STEPS = 48
ATTENTION_SCALE = 0.1  # of the norm after attention, for even routing


def build(
    config: ModelConfig,
    quant: Quant = "none",
    *,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.bfloat16,
    tables: tuple[int, int] = (8, 8),
    even: bool = True,
) -> Gemma:
    """Build a model of random weights, each layer quantized as soon as it exists.

    `tables`: bits of the LM head and of the soft embeddings, for fp8 and nvfp4. Attention over
    random weights gives all tokens nearly the same output, and deep routers then send most of them
    to few experts; `even` keeps that output small, so that every expert of every layer is read.
    """
    form = LAYER_FORMATS[quant]

    def change(layer: Layer) -> None:
        if even:
            layer.post_attention_layernorm.weight.mul_(ATTENTION_SCALE)
        quantize_layer(layer, form)

    model = random_model(config, 0, device=device, dtype=dtype, on_layer=change)
    quantize_outside_layers(model, form)
    head, soft = tables
    if head == 8 and quant in ("fp8", "nvfp4"):
        quantize_head(model, soft=soft == 8)
    return model


def pack_for_cpu(model: Gemma) -> Gemma:
    """Pack plain weights on a CPU as the engine does, unless Triton's interpreter runs them."""
    return model if INTERPRETED else pack(model)


def filled_cache(model: Gemma, context: int, more: int) -> KVCache:
    """Make a cache that holds `context` tokens of random keys, with capacity for `more`."""
    weight, config = model.embed_tokens.weight, model.config
    capacity = Capacity(tokens=context + more, segment=max(512, more))
    cache = KVCache(config, capacity, weight.dtype, weight.device)
    for layer, buffer in enumerate(cache.buffers):
        buffer.k_SMH.normal_(std=0.3)
        buffer.v_SMH.normal_()
        window = config.attention(layer).window
        if window is not None:
            buffer.base = max(0, context - (window - 1) - capacity.slack)
    cache.length = context
    return cache


def new_state(
    model: Gemma, *, seed: int = 1, temperatures: tuple[float, float] | None = None
) -> CanvasState:
    """Start a canvas that takes `MAX_STEPS`; `temperatures` of the first and the last of them."""
    config, device = model.config, model.embed_tokens.weight.device
    noise = Noise(seed=seed).block(0, MAX_STEPS, config.canvas_length, config.vocab_size, device)
    sampler = Sampler(rule=NEVER, max_denoising_steps=MAX_STEPS)
    if temperatures is not None:
        first, last = temperatures
        sampler = replace(sampler, t_max=first, t_min=last)
    return start(sampler, noise, NO_PINS)


def plain_tokenizer(size: int) -> Tokenizer:
    """Make a vocabulary of a size: every byte, and pieces without meaning; no control tokens."""
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


def random_tokens(vocab: int, count: int, device: torch.device | str, seed: int = 5) -> Tensor:
    generator = torch.Generator(device).manual_seed(seed)
    return torch.randint(vocab, (count,), device=device, generator=generator)


# --- timing


@dataclass(frozen=True, slots=True)
class Times:
    """Median, least and greatest of several calls, in milliseconds."""

    ms: float
    least: float
    most: float

    @classmethod
    def of(cls, times: Sequence[float]) -> "Times":
        return cls(statistics.median(times), min(times), max(times))

    def facts(self) -> dict[str, float]:
        return {name: round(value, 4) for name, value in asdict(self).items()}


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def wall(
    work: Callable[[], object], repeats: int, device: torch.device | None = None, warm: int = 2
) -> Times:
    """Time each call alone, as the host sees it; the first `warm` calls do not count."""
    device, times = device or torch.device("cpu"), []
    for _ in range(repeats + warm):
        wait(device)
        begin = time.perf_counter()
        work()
        wait(device)
        times.append(1000 * (time.perf_counter() - begin))
    return Times.of(times[warm:])


def in_turn(
    works: Mapping[str, Callable[[], float]], rounds: int, warm: int = 1
) -> dict[str, list[float]]:
    """Measure each work once per round, so that a busy machine disturbs all alike."""
    times: dict[str, list[float]] = {name: [] for name in works}
    for _ in range(rounds + warm):
        for name, work in works.items():
            times[name].append(work())
    return {name: values[warm:] for name, values in times.items()}


def kernel_us(works: Sequence[Callable[[], object]], repeats: int = 10) -> float:
    """Microseconds of one call on a GPU: all works in turn in a CUDA graph, best of five replays.

    Works that read copies of a weight keep it out of the L2 cache. Without a GPU, by the clock.
    """
    if not torch.cuda.is_available():
        return 1000 * wall(lambda: [work() for work in works], 1, warm=1).ms / len(works)
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        for work in works:
            work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(repeats):
            for work in works:
                work()
    best = float("inf")
    for _ in range(6):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        best = min(best, 1000 * begin.elapsed_time(end) / (repeats * len(works)))
    return best


def copy_bandwidth(device: torch.device) -> float:
    """GB/s of reading and writing 4 GiB (on a CPU, 64 MiB), by the faster of two ways."""
    numbers = 1 << (30 if device.type == "cuda" else 24)
    a = torch.zeros(numbers, dtype=torch.float32, device=device)
    b = torch.empty_like(a)
    took = min(kernel_us([work], 3) for work in (lambda: b.copy_(a), lambda: torch.neg(a, out=b)))
    return 8 * numbers / 1e3 / took


def top_kernels(work: Callable[[], object], rows: int = 26) -> tuple[int, str]:
    """Count the kernel launches of one call, and list those that take the most time."""
    from torch.profiler import ProfilerActivity, profile

    work()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        work()
        torch.cuda.synchronize()
    totals: dict[str, list[float]] = {}
    for event in seen.events():
        total = totals.setdefault(event.name[:60], [0, 0.0])
        total[0] += 1
        total[1] += event.device_time
    order = sorted(totals.items(), key=lambda item: -item[1][1])[:rows]
    lines = [f"{micros:9.0f} us {int(count):5} x {name}" for name, (count, micros) in order]
    return int(sum(count for count, _ in totals.values())), "\n".join(lines)


# --- errors


def max_error(got: Tensor, want: Tensor) -> float:
    """Greatest difference, in units of the root mean square of what is wanted."""
    want = want.float()
    return ((got.float() - want).abs().max() / want.square().mean().sqrt()).item()


def row_error(got: Tensor, want: Tensor) -> float:
    """Greatest relative error of a row, by its norm."""
    got, want = got.float(), want.float()
    return float(((got - want).norm(dim=-1) / want.norm(dim=-1)).max())


# --- memory


def resident_mib() -> float:
    """Resident memory of this process."""
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith("VmRSS:"))


def gpu_memory(device: torch.device) -> Facts:
    """Peaks since the last reset, and memory in use outside torch, in GB; empty on a CPU."""
    if device.type != "cuda":
        return {}
    free, total = torch.cuda.mem_get_info(device)
    reserved = torch.cuda.memory_reserved(device)
    return {
        "peak_allocated_gb": round(torch.cuda.max_memory_allocated(device) / 1e9, 2),
        "peak_reserved_gb": round(torch.cuda.max_memory_reserved(device) / 1e9, 2),
        "outside_torch_gb": round((total - free - reserved) / 1e9, 2),
    }


def reset_memory(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)


# --- report


def cpu_name() -> str:
    path = Path("/proc/cpuinfo")
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    names = [line.partition(": ")[2] for line in lines if line.startswith("model name")]
    return f"{names[0] if names else platform.machine()}, {os.cpu_count()} CPUs"


def head(bench: str, device: torch.device | None = None) -> Facts:
    """Facts that open every report."""
    where = {} if device is None else {"device": describe_device(device)}
    on_cpu = device is None or device.type == "cpu"
    return {
        "bench": bench,
        "date": str(date.today()),
        **({"cpu": cpu_name(), "threads": torch.get_num_threads()} if on_cpu else {}),
        **where,
        "torch": torch.__version__,
    }


def show(name: str, facts: Any) -> Any:
    """Print one line of a report; returns its facts."""
    print(f"{name:28} {json.dumps(facts)}", flush=True)
    return facts


def finish(facts: Facts, out: Path | None = None) -> None:
    """Print the report as one line of JSON, the last one, and keep it in a file if asked."""
    line = json.dumps(facts)
    if out is not None:
        out.write_text(line + "\n", encoding="utf-8")
    print(line)


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
