"""Which form of a model's weights to run, by what the checkpoint, the device and the memory allow.

`auto` takes the checkpoint's own form where there are products for it. What was asked for and
cannot be is refused before anything is loaded, with what to do instead.
"""

import time
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import torch

from dgemma.backends.cpu.int8_linear import int8_linear
from dgemma.backends.cpu.packed_linear import Linear, can_pack, linear, packed_linear
from dgemma.backends.cuda.support import unsupported_reason
from dgemma.config import ModelConfig, load_config
from dgemma.errors import UsageError
from dgemma.quant.fp8 import has_e4m3
from dgemma.quant.int8 import quantize
from dgemma.quant.soft_table import can_turn
from dgemma.roofline.devices import BF16, DEVICES, FLOAT32, FOUR_BIT, FP8, Format
from dgemma.roofline.predict import memory
from dgemma.weights.files import INT8_INDEX
from dgemma.weights.layouts import SchemeName, read_scheme
from dgemma.weights.packed import OWN, Quant, check_widths, form_of

NAMES = ("auto", "none", "int8", "fp8", "nvfp4")
CONTEXT = 4096  # tokens that must fit beside the weights
SPARE = 4e9  # bytes that must be left for longer ones before a table is stored again
# The driver's share of the memory is gone already where it is asked how much is free.
NO_DRIVER = replace(DEVICES["h200"], runtime=0.0)
# How much faster than float32 8-bit products must be. They measure twice as fast at nano's widths,
# and a whole step is then 1.5 times as fast.
WORTH = 1.2
MOST = 512  # outputs of a product that is timed
ROUNDS = 3


@dataclass(frozen=True, slots=True)
class Choice:
    """The form to load, and why."""

    quant: Quant
    why: str
    head_8: bool = False  # the head in 8 bits, beside the token table
    soft_8: bool = False  # and soft embeddings, by a third table


@dataclass(frozen=True, slots=True)
class Timing:
    """Seconds of the same products, in whole numbers and as they are."""

    int8: float
    plain: float

    @property
    def ratio(self) -> float:
        return self.plain / self.int8


def choose_quant(
    name: str, directory: Path, device: torch.device, dtype: torch.dtype, *, exact: bool = False
) -> Choice:
    """What to load a checkpoint as; `exact`: a number type was asked for, so do not round."""
    if name not in NAMES:
        raise UsageError(f"quant {name!r} is not known; use {', '.join(NAMES)}")
    config, scheme = load_config(directory), read_scheme(directory)
    stored: SchemeName | None = None if scheme is None else scheme.name
    if name == "auto":
        is_int8 = stored is None and (directory / INT8_INDEX).is_file()
        found = _auto(config, stored, device, dtype, is_int8=is_int8 and not exact)
    else:
        quant: Quant = name  # type: ignore[assignment]  # one of the names above
        check_widths(form_of(quant, stored), config)
        _check_device(quant, device)
        found = Choice(quant, "asked for")
        if quant == "nvfp4" and not has_e4m3(device):
            found = Choice("nvfp4_bf16", "asked for; the GPU has no fp8, so the rest is in 16 bits")
    if device.type != "cuda":
        return found
    _check_memory(config, found.quant, stored, dtype, _free(device))
    # Where rounding was asked for, and not where a file is rounded already and leaves the head out.
    is_asked = found.quant in ("fp8", "nvfp4") and stored is None and has_e4m3(device)
    has_kernels = is_asked and unsupported_reason(device, dtype) is None
    tables = tables_8(config, found.quant, device) if has_kernels else 0
    return replace(found, head_8=tables > 0, soft_8=tables > 1)


def _auto(
    config: ModelConfig,
    stored: SchemeName | None,
    device: torch.device,
    dtype: torch.dtype,
    *,
    is_int8: bool,
) -> Choice:
    if stored is not None:
        reason = _against_packed(config, stored, device)
        if reason is None:
            return Choice("own", f"stored as {stored}")
        return Choice("none", f"stored as {stored}, multiplied out: {reason}")
    if device.type != "cpu" or not is_int8:
        return Choice("none", "nothing is rounded unasked")
    return _auto_cpu(config, dtype)


def _auto_cpu(config: ModelConfig, dtype: torch.dtype) -> Choice:
    """Whole numbers, where they are clearly faster: a busy moment must not change the answers.

    So instructions decide first, and a timing only confirms what they promise.
    """
    timing = time_int8(config, dtype)
    said = f"8-bit products are {timing.ratio:.1f} times as fast as {_short(dtype)} here"
    if dtype != torch.float32:
        return Choice("none", f"{said}, too little to round for")
    if not torch.cpu._is_vnni_supported():
        return Choice("none", f"{said}, and the CPU has no instructions for them")
    return Choice("int8" if timing.ratio >= WORTH else "none", said)


def _against_packed(config: ModelConfig, stored: SchemeName, device: torch.device) -> str | None:
    """Why packed weights cannot be multiplied on a device as they are."""
    if OWN[stored].experts == "fp8" and not has_e4m3(device):
        return "the GPU has no fp8 arithmetic"
    try:
        check_widths(OWN[stored], config)
    except UsageError as error:
        return str(error)
    return unsupported_reason(device)


def _check_device(quant: Quant, device: torch.device) -> None:
    if device.type != "cuda":
        return  # in 8- and 4-bit floats by definition: slow, and the same numbers
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


def needed(
    config: ModelConfig, quant: Quant, stored: SchemeName | None, dtype: torch.dtype
) -> float:
    """Bytes of the weights in a form, with the cache of a short context and a step's logits."""
    return _bytes(config, _format(quant, stored, dtype))


def tables_8(config: ModelConfig, quant: Quant, device: torch.device) -> int:
    """How often the token table may lie on a GPU in 8 bits too: for the head, and for means.

    By all the memory there is: what others use of it at the moment must not change the answers.
    """
    left = _total(device) - needed(config, quant, None, torch.bfloat16) - SPARE
    table = config.vocab_size * config.hidden_size
    has_means = config.can_denoise and can_turn(config.vocab_size)
    return max(0, min(2 if has_means else 1, int(left // table)))


def _check_memory(
    config: ModelConfig, quant: Quant, stored: SchemeName | None, dtype: torch.dtype, free: float
) -> None:
    need = needed(config, quant, stored, dtype)
    if need <= free:
        return
    what = _short(dtype) if quant == "none" else stored or quant
    forms: dict[str, Quant] = {"fp8": "fp8", "nvfp4": "nvfp4"}
    if stored is not None:
        forms = {"auto": "own", stored: stored}
    sizes = {name: needed(config, form, stored, dtype) for name, form in forms.items()}
    ways = [
        f"--quant {name} needs {_gb(size)}{'' if size <= free else ', too much as well'}"
        for name, size in sizes.items()
        if size < need
    ]
    ways = ways or ["--device cpu may have the room, or a larger GPU"]
    raise UsageError(
        f"the model needs {_gb(need)} in {what} with a context of {_context(config)} tokens, and "
        f"{_gb(free)} of the GPU's memory are free; {'; '.join(ways)}"
    )


def _format(quant: Quant, stored: SchemeName | None, dtype: torch.dtype) -> Format:
    if quant == "nvfp4_bf16":
        return replace(FOUR_BIT, dense=16)
    if quant in ("fp8", "nvfp4"):
        return FP8 if quant == "fp8" else FOUR_BIT
    if quant == "own" and stored is not None:
        packed = FP8 if stored == "fp8" else FOUR_BIT
        return replace(packed, dense=8 if OWN[stored].dense == "fp8" else 16)
    return FLOAT32 if dtype == torch.float32 else BF16


def _bytes(config: ModelConfig, kind: Format) -> float:
    return memory(config, _context(config), kind, NO_DRIVER).total


def _total(device: torch.device) -> float:
    return float(torch.cuda.get_device_properties(device).total_memory)


def _context(config: ModelConfig) -> int:
    return min(CONTEXT, config.max_position_embeddings)


def _free(device: torch.device) -> float:
    """Bytes a device has left, those included that torch holds and does not use."""
    free, _ = torch.cuda.mem_get_info(device)
    held = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return float(free + held)


# --- time


def time_int8(config: ModelConfig, dtype: torch.dtype) -> Timing:
    """Time a canvas's products of the model's widths, both ways; a tenth of a second or less."""
    rows, width, inner = config.canvas_length, config.hidden_size, config.moe_intermediate_size
    choices = max(1, rows * config.top_k_experts // config.num_experts)
    shapes = (
        (rows, width, min(width, MOST)),
        (rows, config.intermediate_size, min(width, MOST)),
        (choices, width, min(2 * inner, MOST)),
        (choices, inner, min(width, MOST)),
    )
    return _timed(shapes, dtype, torch.get_num_threads())


@cache
def _timed(shapes: tuple[tuple[int, int, int], ...], dtype: torch.dtype, threads: int) -> Timing:
    int8 = plain = 0.0
    with torch.inference_mode():
        for rows, inputs, outputs in shapes:
            weight_OI, x_TI = _waves(outputs, inputs), _waves(rows, inputs)
            int8 += _seconds(int8_linear(quantize(weight_OI)), x_TI)
            plain += _seconds(_plain(weight_OI.to(dtype)), x_TI.to(dtype))
    return Timing(int8, plain)


def _plain(weight_OI: torch.Tensor) -> Linear:
    return packed_linear(weight_OI) if can_pack(weight_OI) else linear(weight_OI)


def _waves(rows: int, columns: int) -> torch.Tensor:
    """Numbers between -1 and 1; which does not matter."""
    return torch.arange(rows * columns, dtype=torch.float32).sin_().view(rows, columns)


def _seconds(product: Linear, x: torch.Tensor) -> float:
    """The best of a few rounds: what disturbs only adds."""
    times = []
    for _ in range(ROUNDS + 1):
        begin = time.perf_counter()
        product(x)
        times.append(time.perf_counter() - begin)
    return min(times[1:])


def _gb(size: float) -> str:
    return f"{size / 1e9:.1f} GB"


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
