"""The GPU part of `quant.py gguf`: packed experts beside NVFP4, kernel by kernel, and streamed."""

import gc
import os
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from common import (
    Facts,
    build,
    gpu_memory,
    kernel_us,
    reset_memory,
    row_error,
    show,
    wait,
)
from torch import Tensor

from dgemma.backends.choose import choose_backend
from dgemma.backends.cuda.backend import CudaBackend
from dgemma.backends.cuda.streaming import StreamedExperts
from dgemma.config import ModelConfig
from dgemma.device import usable_memory
from dgemma.model.gemma import Gemma
from dgemma.model.kv_cache import KVCache
from dgemma.model.moe import gelu_and_mul
from dgemma.quant.gguf import BlockTensor, BlockWeight
from dgemma.quant.gguf_tiles import BLOCK_FORMATS, TiledBlocks, tile_blocks
from dgemma.weights.hub import ModelOptions
from dgemma.weights.inference import load_for_inference, plan_load

PARTS = ["resident", "nvfp4", "kernels", "streamed"]
CONTEXT = 4096
# Bytes that driver and torch may take together; None: all of the GPU. The process's share of the
# memory is bounded, so that everything is chosen as on a card of that size.
RESIDENT: tuple[float | None, ...] = (None, 21.5e9)
STREAMED: tuple[float | None, ...] = (16e9, 12e9)
DRIVER_BYTES = 0.9e9  # outside torch at least, once all kernels are loaded
STEPS = 16
COPIES = 2  # of a layer's weights, so that the L2 cache does not hold them
GATE_UP, DOWN = ("Q4_K", "Q5_K", "Q6_K", "Q8_0"), ("Q5_0", "Q5_1", "Q8_0")


def measure_gpu(path: Path, config: ModelConfig, only: Sequence[str]) -> Facts:
    parts: dict[str, Callable[[], Facts]] = {
        "resident": lambda: within(path, RESIDENT),
        "nvfp4": lambda: nvfp4(config),
        "kernels": lambda: kernels(config),
        "streamed": lambda: within(path, STREAMED),
    }
    facts: Facts = {"file_gb": path.stat().st_size / 1e9}
    for name in only:
        begin = time.perf_counter()
        facts[name] = attempt(name, parts[name])
        print(f"-- {name} took {time.perf_counter() - begin:.1f} s", flush=True)
    summary(facts)
    return facts


def attempt(name: str, work: Callable[[], Facts]) -> Facts:
    """Run a part; one that fails prints its traceback and leaves the others to run."""
    try:
        with torch.inference_mode():
            return work()
    except Exception as error:
        print(f"-- {name} FAILED", flush=True)
        traceback.print_exc()
        return {"failed": f"{type(error).__name__}: {error}"[:300]}
    finally:
        gc.collect()
        torch.cuda.empty_cache()


def summary(facts: Facts) -> None:
    """Print the ratio to NVFP4 where both were measured."""
    base = facts.get("nvfp4", {})
    for form, got in facts.get("resident", {}).items():
        for other, want in base.items():
            if (
                isinstance(got, dict)
                and isinstance(want, dict)
                and "step" in got
                and "step" in want
            ):
                ratio = got["step"]["ms"] / want["step"]["ms"]
                tokens = got["token"]["ms"] / want["token"]["ms"]
                print(f"{form} / {other}: step {ratio:.3f}, AR token {tokens:.3f}")


# --- whole models


def run(model: Gemma, name: str) -> Facts:
    """Time steps and tokens after a context of 4k, through the backend that is chosen."""
    from step import Requests

    device = model.embed_tokens.weight.device
    begin = time.perf_counter()
    torch.cuda.reset_peak_memory_stats(device)
    backend = choose_backend(model)
    wait(device)
    facts: Facts = {"backend": backend.name, "start_s": round(time.perf_counter() - begin, 1)}
    facts["start"] = gpu_memory(device)
    show(name, facts)
    torch.cuda.reset_peak_memory_stats(device)
    requests = Requests(backend, CONTEXT, 1)
    facts["step"] = requests.steps(STEPS).facts()
    facts["token"] = requests.tokens(STEPS).facts()
    facts["commit"] = requests.commits().facts()
    facts["running"] = gpu_memory(device)
    facts["memory"] = breakdown(backend, requests.caches)
    for key in ("step", "token", "commit", "running", "memory"):
        show(f"{name} {key}", facts[key])
    return facts


def breakdown(backend: object, caches: Sequence[KVCache]) -> Facts:
    """Return GB by use. What is not torch's own is the driver, and the kernels it has loaded."""
    if not isinstance(backend, CudaBackend):
        return {}
    model, device = backend.model, backend.device
    weights: dict[str, list[Tensor]] = {"experts": [], "tables": [], "dense": []}
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        part = "tables" if "embed_tokens" in name else "dense"
        weights["experts" if ".experts." in name else part].append(tensor)
    streamed = [part for part in model.modules() if isinstance(part, StreamedExperts)]
    buffers = [*(pool.buffers for pool in backend.pools.values()), backend.decoder.buffers]
    uses = {
        **{name: held(tensors) for name, tensors in weights.items()},
        "staging": 2 * streamed[0].staging.num_bytes if streamed else 0,
        "kv_cache": sum(cache.num_bytes for cache in caches),
        "logits": held(backend.passes._logits.values()),
        "canvases": held(t for b in buffers for t in vars(b).values() if isinstance(t, Tensor)),
    }
    uses["other_tensors"] = torch.cuda.memory_allocated(device) - sum(uses.values())
    # Captured passes keep their memory reserved and not allocated.
    reserved = torch.cuda.memory_reserved(device)
    uses["passes_and_cached"] = reserved - torch.cuda.memory_allocated(device)
    free, total = torch.cuda.mem_get_info(device)
    uses["outside_torch"] = total - free - reserved
    return {name: round(size / 1e9, 3) for name, size in uses.items()}


def held(tensors: Iterable[Tensor]) -> int:
    """Return the bytes of the device memory that tensors are views of, each once."""
    storages = [tensor.untyped_storage() for tensor in tensors if tensor.device.type == "cuda"]
    return sum({each.data_ptr(): each.nbytes() for each in storages}.values())


def within(path: Path, limits: Sequence[float | None]) -> Facts:
    """Load a file as on cards of some sizes, and measure it."""
    device = torch.device("cuda")
    reset_memory(device)
    outside = max(DRIVER_BYTES, gpu_memory(device)["outside_torch_gb"] * 1e9)
    found: Facts = {"copy_gb_s": show("host to device, GB/s", host_bandwidth())}
    for limit in limits:
        name = "gguf" if limit is None else f"within {limit / 1e9:g} GB"
        total = torch.cuda.get_device_properties(device).total_memory
        fraction = 1.0 if limit is None else (limit - outside) / total
        torch.cuda.set_per_process_memory_fraction(fraction)
        with new_selftest():
            found[name] = attempt(name, partial(whole, path, name))
        torch.cuda.set_per_process_memory_fraction(1.0)
    return found


@contextmanager
def new_selftest() -> Iterator[None]:
    """Forget results of the self-test, so that a first start's memory is measured."""
    before = os.environ.get("XDG_CACHE_HOME")
    with TemporaryDirectory() as place:
        os.environ["XDG_CACHE_HOME"] = place
        try:
            yield
        finally:
            del os.environ["XDG_CACHE_HOME"]
            if before is not None:
                os.environ["XDG_CACHE_HOME"] = before


def whole(path: Path, name: str) -> Facts:
    device, options = torch.device("cuda"), ModelOptions(device="cuda")
    reset_memory(device)
    choice = plan_load(path, options).choice
    print(f"{name}: {usable_memory(device) / 1e9:.1f} GB for torch, {choice.reason}", flush=True)
    begin = time.perf_counter()
    model = load_for_inference(path, options).model
    wait(device)
    facts: Facts = {"load_s": round(time.perf_counter() - begin, 1), **gpu_memory(device)}
    show(f"{name} load", facts)
    streamed = [part.num_bytes for part in model.modules() if isinstance(part, StreamedExperts)]
    layers = {"streamed_layers": len(streamed), "streamed_gb": round(sum(streamed) / 1e9, 2)}
    return {"quant": choice.quant, **layers, "load": facts, **run(model, name)}


def nvfp4(config: ModelConfig) -> Facts:
    """Measure NVFP4 with tables in 8 bits, as it is loaded, and in 16, as a GGUF file has them."""
    found: Facts = {}
    for bits in (16, 8):
        found[f"tables in {bits} bits"] = attempt("nvfp4", partial(_nvfp4, config, bits))
    return found


def _nvfp4(config: ModelConfig, bits: int) -> Facts:
    device = torch.device("cuda")
    reset_memory(device)
    model = build(config, "nvfp4", device=device, tables=(bits, bits))
    return run(model, f"nvfp4, tables in {bits} bits")


def host_bandwidth() -> float:
    """GB/s of copies of half a gigabyte from pinned memory."""
    host = torch.empty(1 << 29, dtype=torch.uint8, pin_memory=True)
    there = torch.empty_like(host, device="cuda")
    times = []
    for _ in range(4):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        there.copy_(host, non_blocking=True)
        torch.cuda.synchronize()
        times.append(time.perf_counter() - begin)
    return round(len(host) / min(times) / 1e9, 1)


# --- kernels


def random_tiles(name: str, experts: int, outputs: int, inputs: int) -> TiledBlocks:
    """Draw every bit of blocks but their scales, and repack them."""
    block = BLOCK_FORMATS[name]
    count = experts * outputs * inputs // block.num_weights
    packed = torch.randint(256, (count, block.num_bytes), dtype=torch.uint8, device="cuda")
    if name == "Q8_0":
        packed[:, 2:].masked_fill_(packed[:, 2:] == 128, 129)
    size = {"Q4_K": 1e-4, "Q5_K": 5e-5, "Q6_K": 1e-5, "Q8_0": 3e-4}.get(name, 1e-3)
    scales = (size * (0.5 + torch.rand(count, 2, device="cuda"))).half().view(torch.uint8)
    start = 208 if name == "Q6_K" else 0
    width = 2 if name in ("Q6_K", "Q4_0", "Q5_0", "Q8_0") else 4
    packed[:, start : start + width] = scales[:, :width]
    tensor = BlockTensor(packed.flatten(), block, (experts, outputs, inputs))
    return tile_blocks(BlockWeight((tensor,)), "cuda")


def kernels(config: ModelConfig) -> Facts:
    """Compare each kernel with dequantized weights, and time it: a canvas, and one token."""
    found: Facts = {}
    for part, names in (("gate_up", GATE_UP), ("down", DOWN)):
        for name in names:
            found[f"{part} {name}"] = attempt(
                f"{part} {name}", partial(_kernel, config, part, name)
            )
        found[f"{part} nvfp4"] = attempt(f"{part} nvfp4", partial(_kernel, config, part, "nvfp4"))
    return found


def _weights(config: ModelConfig, part: str, name: str) -> list[object]:
    from dgemma.quant.nvfp4 import quantize_tiled

    width, inner, experts = config.hidden_size, config.moe_intermediate_size, config.num_experts
    outputs, inputs = (2 * inner, width) if part == "gate_up" else (width, inner)
    if name != "nvfp4":
        return [random_tiles(name, experts, outputs, inputs) for _ in range(COPIES)]
    made = []
    for _ in range(COPIES):
        weight = torch.empty(experts, outputs, inputs, dtype=torch.bfloat16, device="cuda")
        made.append(quantize_tiled(weight.normal_(0, inputs**-0.5), 2 if part == "gate_up" else 1))
    return list(made)


def _kernel(config: ModelConfig, part: str, name: str) -> Facts:
    from dgemma.backends.cuda.configs import MOE_DECODE, moe_config
    from dgemma.backends.cuda.kernels import moe_decode, moe_packed
    from dgemma.backends.cuda.kernels.moe import sort_by_expert

    weights = _weights(config, part, name)
    is_gated, top_k, experts = part == "gate_up", config.top_k_experts, config.num_experts
    tokens = config.canvas_length
    ids = torch.rand(tokens, experts, device="cuda").topk(top_k).indices
    buckets = sort_by_expert(ids, experts)
    table = moe_config(ids.numel(), experts, 4)
    tuned = table.gate_up if is_gated else table.down
    rows = tokens if is_gated else tokens * top_k
    x = torch.randn(rows, weights[0].inputs, device="cuda", dtype=torch.bfloat16)  # type: ignore[attr-defined]

    def grouped(weight: object, config: object = tuned, *, ptx: bool = True) -> Tensor:
        if is_gated:
            return moe_packed.gate_up(x, weight, buckets, top_k, config, ptx=ptx)  # type: ignore[arg-type]
        return moe_packed.down(x, weight, buckets, config, ptx=ptx)  # type: ignore[arg-type]

    few = MOE_DECODE[4]
    one = x[:1] if is_gated else x[:top_k]

    def decode(weight: object) -> Tensor:
        if is_gated:
            return moe_decode.gate_up_packed(one, ids[:1], weight, few.gate_up)  # type: ignore[arg-type]
        return moe_decode.down_packed(one, ids[:1], weight, few.down)  # type: ignore[arg-type]

    want = _wanted(weights[0], x, ids, is_gated=is_gated)
    facts: Facts = {"error": row_error(grouped(weights[0])[: len(want)], want)}
    facts["error_token"] = row_error(decode(weights[0]), want[:top_k])
    if name != "nvfp4":
        facts["error_exact"] = row_error(grouped(weights[0], ptx=False)[: len(want)], want)
    variants = {"us": tuned}
    if name == "Q4_K":
        variants["us_scales_by_each"] = replace(tuned, share_scales=False)
        variants["us_one_step"] = replace(tuned, unroll=1)
    for label, variant in variants.items():
        works = [partial(grouped, weight, variant) for weight in weights]
        facts[label] = round(kernel_us(works), 1)
    facts["us_token"] = round(kernel_us([partial(decode, weight) for weight in weights]), 1)
    return show(f"kernel {part} {name}", facts)


def _wanted(weight: object, x: Tensor, ids: Tensor, *, is_gated: bool) -> Tensor:
    """Compute the first tokens' assignments with dequantized weights in float32."""
    top_k, rows = ids.shape[1], []
    for assignment, expert in enumerate(ids[:4].flatten().tolist()):
        row = x[assignment // top_k if is_gated else assignment].float()
        out = weight.dequantize(expert) @ row  # type: ignore[attr-defined]
        rows.append(gelu_and_mul(out) if is_gated else out)
    return torch.stack(rows)
