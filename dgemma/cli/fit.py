"""`dgemma fit`: predict time and memory of a model on a device from its config alone."""

import json
import math
import os
import time
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dgemma.cli.app import GGUF_TYPES, AsJson, app
from dgemma.errors import UsageError

if TYPE_CHECKING:
    import torch

    from dgemma.config import ModelConfig
    from dgemma.roofline import Device, Prediction
    from dgemma.weights.gguf_memory import GGUFWeights

RELEASED_NAME, DEFAULT_GGUF = "released", "Q4_K_M"
# Hub repositories of the released model, in any format: OWNER/diffusiongemma-26B-A4B-it...
RELEASED_HUB_NAME = "/diffusiongemma-26b-a4b-it"
THIS_MACHINE, ALL = "auto", "all"
BACKENDS = {"cpu": "cpu", "cuda": "cuda", "mps": "reference"}
APPLE_GPU_FRACTION = 0.75  # fraction of memory that the GPU may use
COPY_BYTES, GEMM_SIZE, TRIALS = 1 << 28, 2048, 5  # for timings on an unknown machine
NOTHING_RUNS = """
No form of this model has a predicted speed here. The built-in nano takes under 1 GB: dgemma chat.
A smaller GGUF file may fit, by its type: --gguf Q4_0."""
SPEEDS = (
    "step_ms",
    "step_floor_ms",
    "commit_ms",
    "ar_token_ms",
    "break_even_steps",
    "tokens_per_second",
)
COLUMNS = "weights  step ms  floor  AR ms  even at  tok/s  memory GB  context"


@app.command()
def fit(
    name: Annotated[
        str | None, typer.Argument(metavar="MODEL", help="The same as --model.")
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(
            "--model",
            "-m",
            help="released (the 26B model, also by its hub id; nothing is downloaded), a "
            "directory, a GGUF file, or nano. Default: released.",
        ),
    ] = None,
    device: Annotated[
        str, typer.Option(help="auto (this machine), one of the known devices, or all.")
    ] = ALL,
    context: Annotated[int, typer.Option(help="Tokens before the canvas.")] = 1024,
    gguf: Annotated[
        str | None,
        typer.Option(
            help=f"A GGUF type: {', '.join(GGUF_TYPES)}. Default: Q4_K_M of the released model, "
            "and of a GGUF file its own types."
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Predict step time, AR token time, break-even steps and memory. Nothing here is measured.

    Needs a config only, neither weights nor the device. `even at` is the number of steps per block
    at which diffusion is as fast as AR; `tok/s` is at 16 steps per block, commit included. Where a
    GGUF file does not fit, layers are streamed from host memory. Of a machine that is not among
    the known devices, `--device auto` times copies and a GEMM first.
    """
    from dgemma.roofline import FORMATS, predict
    from dgemma.weights.gguf_memory import predict_gguf

    if name and model and name != model:
        raise UsageError(f"the model is {name!r} and --model is {model!r}; give one of them")
    model = name or model or RELEASED_NAME
    config, devices = _config(model), _devices(device)
    file = _gguf_weights(model, config, gguf)
    predictions = {
        name: [predict(config, context, fmt, known) for fmt in FORMATS]
        for name, known in devices.items()
    }
    for name, known in devices.items():
        predictions[name] += [predict_gguf(config, context, file, known)] if file else []
    if as_json:
        print(json.dumps(_report(model, config, context, predictions), ensure_ascii=False))
        return
    _print(model, config, context, predictions)


def _is_released(model: str) -> bool:
    return model == RELEASED_NAME or (
        RELEASED_HUB_NAME in model.lower() and not os.path.exists(model)
    )


def _config(model: str) -> "ModelConfig":
    from dgemma.config import RELEASED
    from dgemma.weights.hub import find_checkpoint
    from dgemma.weights.source import model_config

    return RELEASED if _is_released(model) else model_config(find_checkpoint(model))


def _gguf_weights(model: str, config: "ModelConfig", file_type: str | None) -> "GGUFWeights | None":
    """Describe a GGUF file by its header, or one that the model could be written as."""
    from dgemma.weights.gguf_checkpoint import is_gguf, open_gguf
    from dgemma.weights.gguf_memory import blocks_of_type, gguf_weights
    from dgemma.weights.hub import find_checkpoint

    path = None if _is_released(model) else find_checkpoint(model)
    if path is not None and is_gguf(path):
        if file_type is not None:
            raise UsageError(f"{model} has types of its own; leave out --gguf {file_type}")
        return gguf_weights("GGUF", config, open_gguf(path).tensors.blocks)
    file_type = file_type or (None if path else DEFAULT_GGUF)
    if file_type is None:
        return None
    return gguf_weights(file_type, config, blocks_of_type(config, file_type))


def _devices(name: str) -> "dict[str, Device]":
    from dgemma.roofline import DEVICES

    if name == THIS_MACHINE:
        return {THIS_MACHINE: _this_machine()}
    if name != ALL and name not in DEVICES:
        known = ", ".join((THIS_MACHINE, ALL, *DEVICES))
        raise UsageError(f"device {name!r} is not known; use one of {known}")
    return dict(DEVICES) if name == ALL else {name: DEVICES[name]}


def _this_machine() -> "Device":
    """Return the device that a model would be loaded on, with this machine's memory.

    A GPU of a known name has the known rates; of any other device they are timed.
    """
    from dataclasses import replace

    import torch

    from dgemma.device import choose_device, describe_device
    from dgemma.roofline import DEVICES

    is_apple_gpu = torch.backends.mps.is_available()
    device = choose_device("mps" if is_apple_gpu else THIS_MACHINE)
    name = _apple_chip() if is_apple_gpu else describe_device(device)
    if device.type == "cuda":
        memory = torch.cuda.get_device_properties(device).total_memory / 1e9
    else:
        memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 1e9
        memory *= APPLE_GPU_FRACTION if is_apple_gpu else 1
    if device.type != "cpu":
        for known in DEVICES.values():
            if known.name.partition(" (")[0].removeprefix("NVIDIA ") in name:
                return replace(known, name=name, memory=memory)
    return _timed(device, name, memory)


def _apple_chip() -> str:
    import subprocess

    call = ["sysctl", "-n", "machdep.cpu.brand_string"]
    return subprocess.run(call, capture_output=True, text=True, check=False).stdout.strip()


def _timed(device: "torch.device", name: str, memory: float) -> "Device":
    """Time a copy and GEMMs in 16 and 32 bits on a device; about a second."""
    from dataclasses import replace

    import torch

    from dgemma.roofline import DEVICES, H200

    source, target = torch.zeros(2, COPY_BYTES, dtype=torch.uint8, device=device)
    bandwidth = 2 * COPY_BYTES / _best_seconds(partial(target.copy_, source)) / 1e9
    rates = {}
    for bits, dtype in ((16, torch.bfloat16), (32, torch.float32)):
        matrix = torch.zeros(GEMM_SIZE, GEMM_SIZE, dtype=dtype, device=device)
        seconds = _best_seconds(partial(torch.mm, matrix, matrix))
        rates[bits] = 2 * GEMM_SIZE**3 / seconds / 1e12
    like = DEVICES["cpu"] if device.type == "cpu" else H200
    timed = replace(like, name=name, bandwidth=bandwidth, rates=rates, memory=memory)
    return replace(
        timed, source="timed just now", backend=BACKENDS[device.type], link=_link(target)
    )


def _link(target: "torch.Tensor") -> float:
    """Time copies from pinned memory; 0 where the memory is the host's."""
    import torch

    if target.device.type != "cuda":
        return 0.0
    pinned = torch.empty(target.shape, dtype=target.dtype, pin_memory=True)
    return target.nbytes / _best_seconds(partial(target.copy_, pinned)) / 1e9


def _best_seconds(work: "Callable[[], torch.Tensor]") -> float:
    best = math.inf
    for _ in range(TRIALS):
        begin = time.perf_counter()
        work().flatten()[-1].item()  # synchronizes
        best = min(best, time.perf_counter() - begin)
    return best


def _print(
    model: str, config: "ModelConfig", context: int, predictions: dict[str, list["Prediction"]]
) -> None:
    print(f"predicted, not measured: {model}, context {context}, canvas {config.canvas_length}")
    for name, cost in _costs(config, context).items():
        print(
            f"{name:7} step {cost['step_gflop']:.0f} GFLOP, {cost['step_gb']:.2f} GB of weights"
            f" and {cost['step_moved_gb']:.2f} GB of activations;"
            f" AR token {cost['token_gflop']:.2f} GFLOP, {cost['token_gb']:.2f} GB"
        )
    for name, rows in predictions.items():
        known = rows[0].device
        link = f", {known.link:.0f} GB/s from host memory" if known.link else ""
        print(f"\n{name}: {known.name}, {known.bandwidth:.0f} GB/s, {known.memory:.0f} GB{link}")
        print(f"  {COLUMNS}")
        for row in rows:
            print(f"  {_line(row)}")
    if THIS_MACHINE in predictions and not any(row.runs for row in predictions[THIS_MACHINE]):
        print(NOTHING_RUNS)


def _line(row: "Prediction") -> str:
    size = f"{row.memory.total / 1e9:10.1f}"
    if not row.runs:
        reason = row.obstacle or "does not fit"
        return f"{row.format.name:7} {'-':>8} {'-':>6} {'-':>6} {'-':>8} {'-':>6} {size}  {reason}"
    return (
        f"{row.format.name:7} {1e3 * row.step:8.1f} {1e3 * row.step_floor:6.1f}"
        f" {1e3 * row.token:6.1f} {row.break_even:8.1f} {row.per_second[1]:6.0f}"
        f" {size}  up to {row.max_context} tokens{_streaming(row)}"
    )


def _streaming(row: "Prediction") -> str:
    if not row.streamed_layers:
        return ""
    return f"; {row.streamed_layers} layers streamed, {row.streamed_bytes / 1e9:.1f} GB a step"


def _costs(config: "ModelConfig", context: int) -> dict[str, dict[str, float]]:
    """Return operations and bytes of a step and a token, in each format."""
    from dgemma.roofline import FORMATS, cost, passes

    step, _, token = passes(config, context)
    costs = {}
    for fmt in FORMATS:
        of_step, of_token = cost(config, step, fmt), cost(config, token, fmt)
        costs[fmt.name] = {
            "step_gflop": of_step.flop / 1e9,
            "step_gb": of_step.weight_bytes / 1e9,
            "step_moved_gb": of_step.activation_bytes / 1e9,
            "token_gflop": of_token.flop / 1e9,
            "token_gb": of_token.weight_bytes / 1e9,
        }
    return costs


def _report(
    model: str, config: "ModelConfig", context: int, predictions: dict[str, list["Prediction"]]
) -> dict[str, Any]:
    rows = [_row(name, row) for name, on_device in predictions.items() for row in on_device]
    costs = _costs(config, context)
    return {"kind": "predicted", "model": model, "context": context, "costs": costs, "rows": rows}


def _speeds(row: "Prediction") -> dict[str, Any]:
    """Return predicted speeds of a format on its device."""
    from dgemma.roofline import STEPS_PER_BLOCK

    rates = dict(zip(map(str, STEPS_PER_BLOCK), row.per_second, strict=True))
    times = (row.step, row.step_floor, row.commit, row.token)
    milliseconds = [1e3 * seconds for seconds in times]
    return dict(zip(SPEEDS, (*milliseconds, row.break_even, rates), strict=True))


def _row(name: str, row: "Prediction") -> dict[str, Any]:
    return {
        "kind": "predicted",
        "device": name,
        "device_name": row.device.name,
        "rates_from": row.device.source,
        "weights": row.format.name,
        "efficiency": round(row.format.efficiency * row.device.efficiency, 3),
        **(_speeds(row) if row.runs else dict.fromkeys(SPEEDS)),
        "obstacle": row.obstacle or ("" if row.fits else "does not fit"),
        "weights_gb": row.memory.weights / 1e9,
        "cache_gb": row.memory.cache / 1e9,
        "memory_gb": row.memory.total / 1e9,
        "streamed_layers": row.streamed_layers,
        "streamed_gb": row.streamed_bytes / 1e9,
        "device_gb": row.device.memory,
        "fits": row.fits,
        "longest_context": row.max_context,
    }
