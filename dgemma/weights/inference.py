"""Load a checkpoint for inference, in the best format for file, device and memory.

`auto` keeps the stored format if there are GEMMs for it. An unsupported format is refused before
loading, with an alternative. Order matters: adapters attach to plain modules, and packing comes
last.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import NamedTuple, TypedDict

import torch

from dgemma.backends.cpu import can_pack, int8_linear, pack, pack_int8, packed_linear
from dgemma.backends.cuda.device import unsupported_reason
from dgemma.config import ModelConfig
from dgemma.device import choose_device, choose_dtype, usable_memory
from dgemma.errors import UsageError
from dgemma.model.moe import Linear, linear
from dgemma.quant import quantize_int8
from dgemma.quant.fp8 import has_e4m3
from dgemma.quant.head import can_transpose, quantize_head
from dgemma.roofline import (
    BF16,
    FLOAT32,
    FOUR_BIT,
    FP8,
    WeightFormat,
    memory,
)
from dgemma.weights.files import INT8_INDEX, OnProgress
from dgemma.weights.gguf_checkpoint import is_gguf, open_gguf
from dgemma.weights.gguf_memory import (
    MAX_DEQUANTIZED_BYTES,
    WITHOUT_DRIVER,
    plan_gguf,
    tiled_bytes,
)
from dgemma.weights.gguf_vision import find_tower, open_tower, tower_bytes, with_tower
from dgemma.weights.hub import ModelOptions
from dgemma.weights.layer_formats import STORED_FORMATS, Quant, check_widths, layer_format
from dgemma.weights.load import Checkpoint, Streamed, count_parameters, load_model
from dgemma.weights.lora import Adapter, attach, merge
from dgemma.weights.quant_schemes import SchemeName, read_scheme
from dgemma.weights.source import model_config

QUANT_OPTIONS = ("auto", "none", "int8", "fp8", "nvfp4")
MIN_CONTEXT = 4096  # context that must fit in memory with the weights
MIN_FREE_BYTES = 4e9  # kept free for longer contexts before extra fp8 tables are made
# Minimum speedup of 8-bit GEMMs over float32. At nano's widths they are 2.0 times as fast, and a
# whole step 1.5 times.
MIN_SPEEDUP = 1.2
MAX_TIMED_OUTPUTS = 512
TIMED_ROUNDS = 3


class LoadArgs(TypedDict, total=False):
    """Options of loading as keyword arguments."""

    device: str
    dtype: str
    quant: str
    template: str
    vision: str


@dataclass(frozen=True, slots=True)
class QuantChoice:
    """The format to load, and the reason."""

    quant: Quant
    reason: str
    fp8_head: bool = False  # add an fp8 LM head to the token table
    fp8_soft_embed: bool = False  # and a transposed fp8 table for soft embeddings
    streamed: frozenset[int] = frozenset()  # layers whose experts stay in host memory


@dataclass(frozen=True, slots=True)
class LoadPlan:
    """The resolved options on this machine."""

    device: torch.device
    dtype: torch.dtype
    choice: QuantChoice


class Timing(NamedTuple):
    """Seconds of the same GEMMs in int8 and unquantized."""

    int8: float
    plain: float

    @property
    def ratio(self) -> float:
        return self.plain / self.int8


def load_for_inference(
    directory: Path,
    options: ModelOptions,
    adapter: Adapter | None = None,
    on_tensor: OnProgress | None = None,
) -> Checkpoint:
    """Load a checkpoint for inference only: the model cannot be trained or saved."""
    plan = plan_load(directory, options, adapted=adapter is not None)
    choice, device, dtype = plan.choice, plan.device, plan.dtype
    is_int8 = choice.quant == "int8"
    quant = "none" if is_int8 and adapter is not None else choice.quant
    form = Streamed(quant, choice.streamed)
    path = find_tower(directory, options.vision)
    tower = None if path is None else open_tower(path, model_config(directory))
    checkpoint = load_model(directory, device=device, dtype=dtype, quant=form, on_tensor=on_tensor)
    model = checkpoint.model
    if choice.fp8_head:
        quantize_head(model, soft=choice.fp8_soft_embed)
    if adapter is not None:
        # Fused kernels need plain linears: on a GPU an adapter is merged.
        (merge if device.type == "cuda" else attach)(model, adapter)
        if is_int8:
            pack_int8(model)
    if quant == "none" and not is_int8:
        pack(model)
    return checkpoint if tower is None else with_tower(checkpoint, tower)


def plan_load(directory: Path, options: ModelOptions, *, adapted: bool = False) -> LoadPlan:
    """Choose device, dtype and format; refuses unsupported ones."""
    device = choose_device(options.device)
    dtype, is_free = choose_dtype(options.dtype, device), options.dtype == "auto"
    tower = find_tower(directory, options.vision)
    reserved = 0 if tower is None else tower_bytes(tower)
    choice = choose_quant(
        options.quant, directory, device, dtype, exact=not is_free, reserved=reserved
    )
    if adapted and choice.quant not in ("none", "int8"):
        if options.quant != "auto":
            raise UsageError(
                f"an adapter cannot be put on weights in {choice.quant}; merge it first with "
                f"`dgemma export MODEL DIRECTORY --adapter ADAPTER`, and load that with --quant "
                f"{choice.quant}"
            )
        choice = choose_quant("none", directory, device, dtype)
    # Between int8 GEMMs float32 activations are exact and faster.
    return LoadPlan(device, torch.float32 if choice.quant == "int8" and is_free else dtype, choice)


def choose_quant(
    name: str,
    directory: Path,
    device: torch.device,
    dtype: torch.dtype,
    *,
    exact: bool = False,
    reserved: float = 0.0,
) -> QuantChoice:
    """Choose the format to load; `exact`: a dtype was requested, so `auto` does not quantize.

    `reserved`: bytes that a GGUF model's image tower will take.
    """
    if name not in QUANT_OPTIONS:
        raise UsageError(f"quant {name!r} is not known; use {', '.join(QUANT_OPTIONS)}")
    config, scheme = model_config(directory), read_scheme(directory)
    stored: SchemeName | None = None if scheme is None else scheme.name
    if name == "auto" and is_gguf(directory):
        choice = _auto_gguf(config, directory, device, dtype, reserved)
    elif name == "auto":
        is_int8 = stored is None and (directory / INT8_INDEX).is_file()
        choice = _auto(config, stored, device, dtype, is_int8=is_int8 and not exact)
    else:
        quant: Quant = name  # type: ignore[assignment]  # one of the names above
        check_widths(layer_format(quant, stored), config)
        _check_device(quant, device)
        choice = QuantChoice(quant, "asked for")
        if quant == "nvfp4" and not has_e4m3(device):
            reason = "asked for; the GPU has no fp8, so the rest is in 16 bits"
            choice = QuantChoice("nvfp4_bf16", reason)
    if device.type != "cuda":
        return choice
    if choice.quant not in ("gguf", "gguf_fp8"):
        _check_memory(config, choice.quant, stored, dtype, _free(device))
    # Only if quantization was requested: a quantized file keeps a 16-bit head.
    is_requested = choice.quant in ("fp8", "nvfp4") and stored is None and has_e4m3(device)
    has_kernels = is_requested and unsupported_reason(device, dtype) is None
    tables = num_fp8_tables(config, choice.quant, device) if has_kernels else 0
    return replace(choice, fp8_head=tables > 0, fp8_soft_embed=tables > 1)


def _auto(
    config: ModelConfig,
    stored: SchemeName | None,
    device: torch.device,
    dtype: torch.dtype,
    *,
    is_int8: bool,
) -> QuantChoice:
    if stored is not None:
        reason = _packed_obstacle(config, stored, device)
        if reason is None:
            return QuantChoice("stored", f"stored as {stored}")
        return QuantChoice("none", f"stored as {stored}, dequantized: {reason}")
    if device.type != "cpu" or not is_int8:
        return QuantChoice("none", "nothing is rounded unasked")
    return _auto_cpu(config, dtype)


def _auto_gguf(
    config: ModelConfig,
    directory: Path,
    device: torch.device,
    dtype: torch.dtype,
    reserved: float,
) -> QuantChoice:
    """Choose the format of blocks: on a CPU mapped unless small, on a GPU repacked."""
    if device.type == "cuda":
        reason = unsupported_reason(device, dtype)
        sizes = tiled_bytes(config, open_gguf(directory).tensors.blocks)
        if reason is None and dtype != torch.bfloat16:
            reason = f"kernels of blocks take bfloat16, not {_short(dtype)}"
        if reason is None and sizes is not None:
            free = _free(device) - reserved
            return gguf_choice(config, sizes, free, has_fp8=has_e4m3(device))
        reason = reason or "an expert's type or width has no kernels"
        return QuantChoice("none", f"GGUF, dequantized: {reason}")
    size = count_parameters(config).total * dtype.itemsize
    if device.type != "cpu" or size <= MAX_DEQUANTIZED_BYTES:
        what = "no kernels for blocks here" if device.type != "cpu" else "small enough"
        return QuantChoice("none", f"GGUF, dequantized to {_gb(size)}: {what}")
    return QuantChoice("stored", "GGUF blocks, memory-mapped: experts are dequantized in use")


def gguf_choice(
    config: ModelConfig, sizes: Sequence[int], free: float, *, has_fp8: bool
) -> QuantChoice:
    """Choose the format of a GGUF file on a GPU; `sizes`: bytes of each layer's experts."""
    plan = plan_gguf(config, sizes, free, has_fp8=has_fp8, context=_context(config))
    if plan.total > free:
        raise UsageError(
            f"the model needs {_gb(plan.total)} on the GPU with the experts of all layers in host "
            f"memory, and {_gb(free)} are free; use --device cpu, or close what uses the GPU"
        )
    if not plan.streamed:
        rest = "16 bits" if plan.quant == "gguf" else "fp8"
        return QuantChoice(plan.quant, f"GGUF blocks, repacked; the rest in {rest}")
    reason = (
        f"GGUF blocks, repacked; the experts of {len(plan.streamed)} of {len(sizes)} layers are "
        f"streamed from host memory, since {_gb(plan.whole)} are needed and {_gb(free)} free"
    )
    return QuantChoice(plan.quant, reason, streamed=plan.streamed)


def _auto_cpu(config: ModelConfig, dtype: torch.dtype) -> QuantChoice:
    """Choose int8 if it is clearly faster.

    The CPU's instructions decide and a timing confirms, so that load does not change answers.
    """
    timing = time_int8(config, dtype)
    is_faster = timing.ratio >= 1
    change = f"{timing.ratio:.1f} times as fast" if is_faster else f"slower ({timing.ratio:.1f}x)"
    speedup = f"8-bit products are {change} {'as' if is_faster else 'than'} {_short(dtype)} here"
    if dtype != torch.float32:
        return QuantChoice("none", f"{speedup}, not enough to justify the rounding")
    if not torch.cpu._is_vnni_supported():
        return QuantChoice("none", f"{speedup}, and the CPU has no instructions for them")
    return QuantChoice("int8" if timing.ratio >= MIN_SPEEDUP else "none", speedup)


def _packed_obstacle(config: ModelConfig, stored: SchemeName, device: torch.device) -> str | None:
    """Return why packed weights cannot run on a device, or None."""
    if STORED_FORMATS[stored].experts == "fp8" and not has_e4m3(device):
        return "the GPU has no fp8 arithmetic"
    try:
        check_widths(STORED_FORMATS[stored], config)
    except UsageError as error:
        return str(error)
    return unsupported_reason(device)


def _check_device(quant: Quant, device: torch.device) -> None:
    if device.type != "cuda":
        return  # the reference backend runs every format, slowly
    if quant == "int8":
        raise UsageError("--quant int8 is for CPUs; on a GPU use fp8 or nvfp4")
    if quant == "fp8" and not has_e4m3(device):
        major, minor = torch.cuda.get_device_capability(device)
        raise UsageError(
            "--quant fp8 needs a GPU with fp8 arithmetic (capability 8.9: Ada, Hopper or later), "
            f"and this one has {major}.{minor}; use --quant nvfp4, whose other weights stay in 16 "
            "bits there, or --quant none"
        )


# --- memory


def needed_bytes(
    config: ModelConfig, quant: Quant, stored: SchemeName | None, dtype: torch.dtype
) -> float:
    """Return the memory of weights, a short context's KV cache and logits in a format."""
    fmt = _weight_format(quant, stored, dtype)
    return memory(config, _context(config), fmt, WITHOUT_DRIVER).total


def num_fp8_tables(config: ModelConfig, quant: Quant, device: torch.device) -> int:
    """Return how many fp8 copies of the token table fit: LM head, then soft embeddings.

    By total memory, since other processes must not change the answers.
    """
    left = (
        usable_memory(device) - needed_bytes(config, quant, None, torch.bfloat16) - MIN_FREE_BYTES
    )
    table = config.vocab_size * config.hidden_size
    has_soft_embed = config.can_denoise and can_transpose(config.vocab_size)
    return max(0, min(2 if has_soft_embed else 1, int(left // table)))


def _check_memory(
    config: ModelConfig, quant: Quant, stored: SchemeName | None, dtype: torch.dtype, free: float
) -> None:
    need = needed_bytes(config, quant, stored, dtype)
    if need <= free:
        return
    name = _short(dtype) if quant == "none" else stored or quant
    smaller: dict[str, Quant] = {"fp8": "fp8", "nvfp4": "nvfp4"}
    if stored is not None:
        smaller = {"auto": "stored", stored: stored}
    sizes = {opt: needed_bytes(config, other, stored, dtype) for opt, other in smaller.items()}
    advice = [
        f"--quant {option} needs {_gb(size)}{'' if size <= free else ', too much as well'}"
        for option, size in sizes.items()
        if size < need
    ]
    advice = advice or ["--device cpu may have the room, or a larger GPU"]
    raise UsageError(
        f"the model needs {_gb(need)} in {name} with a context of {_context(config)} tokens, and "
        f"{_gb(free)} of the GPU's memory are free; {'; '.join(advice)}"
    )


def _weight_format(quant: Quant, stored: SchemeName | None, dtype: torch.dtype) -> WeightFormat:
    if quant == "nvfp4_bf16":
        return replace(FOUR_BIT, dense=16)
    if quant in ("fp8", "nvfp4"):
        return FP8 if quant == "fp8" else FOUR_BIT
    if quant == "stored" and stored is not None:
        packed = FP8 if stored == "fp8" else FOUR_BIT
        return replace(packed, dense=8 if STORED_FORMATS[stored].dense == "fp8" else 16)
    return FLOAT32 if dtype == torch.float32 else BF16


def _context(config: ModelConfig) -> int:
    return min(MIN_CONTEXT, config.max_position_embeddings)


def _free(device: torch.device) -> float:
    """Return the memory that torch can allocate on a device, including its cache."""
    free, _ = torch.cuda.mem_get_info(device)
    allocated = torch.cuda.memory_allocated(device)
    cached = torch.cuda.memory_reserved(device) - allocated
    return min(float(free + cached), usable_memory(device) - allocated)


# --- time


def time_int8(config: ModelConfig, dtype: torch.dtype) -> Timing:
    """Time GEMMs of a canvas with the model's widths, both ways, in at most 0.1 s."""
    rows, width, inner = config.canvas_length, config.hidden_size, config.moe_intermediate_size
    per_expert = max(1, rows * config.top_k_experts // config.num_experts)
    shapes = (
        (rows, width, min(width, MAX_TIMED_OUTPUTS)),
        (rows, config.intermediate_size, min(width, MAX_TIMED_OUTPUTS)),
        (per_expert, width, min(2 * inner, MAX_TIMED_OUTPUTS)),
        (per_expert, inner, min(width, MAX_TIMED_OUTPUTS)),
    )
    return _timed(shapes, dtype, torch.get_num_threads())


@cache
def _timed(shapes: tuple[tuple[int, int, int], ...], dtype: torch.dtype, threads: int) -> Timing:
    int8 = plain = 0.0
    with torch.inference_mode():
        for rows, inputs, outputs in shapes:
            weight_OI, x_TI = _waves(outputs, inputs), _waves(rows, inputs)
            int8 += _seconds(int8_linear(quantize_int8(weight_OI)), x_TI)
            plain += _seconds(_plain(weight_OI.to(dtype)), x_TI.to(dtype))
    return Timing(int8, plain)


def _plain(weight_OI: torch.Tensor) -> Linear:
    return packed_linear(weight_OI) if can_pack(weight_OI) else linear(weight_OI)


def _waves(rows: int, columns: int) -> torch.Tensor:
    """Return deterministic values between -1 and 1."""
    return torch.arange(rows * columns, dtype=torch.float32).sin_().view(rows, columns)


def _seconds(gemm: Linear, x: torch.Tensor) -> float:
    """Return the fastest of a few rounds, since disturbances only add time."""
    times = []
    for _ in range(TIMED_ROUNDS + 1):
        begin = time.perf_counter()
        gemm(x)
        times.append(time.perf_counter() - begin)
    return min(times[1:])


def _gb(size: float) -> str:
    return f"{size / 1e9:.1f} GB"


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
