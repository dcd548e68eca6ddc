"""`dgemma fit`: predict time and memory of a model on a device from its config alone."""

import json
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dgemma.cli.app import AsJson, app
from dgemma.errors import UsageError

if TYPE_CHECKING:
    from dgemma.config import ModelConfig
    from dgemma.roofline import Prediction

RELEASED_NAME = "released"
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
    model: Annotated[
        str,
        typer.Option(
            "--model", "-m", help="released (the 26B model), a directory, a GGUF file, or nano."
        ),
    ] = RELEASED_NAME,
    device: Annotated[str, typer.Option(help="One of the known devices, or all.")] = "all",
    context: Annotated[int, typer.Option(help="Tokens before the canvas.")] = 1024,
    as_json: AsJson = False,
) -> None:
    """Predict step time, AR token time, break-even steps and memory. Nothing here is measured.

    Needs a config only, neither weights nor the device. `even at` is the number of steps per block
    at which diffusion is as fast as AR; `tok/s` is at 16 steps per block, commit included.
    """
    from dgemma.roofline import DEVICES, FORMATS, predict

    if device != "all" and device not in DEVICES:
        raise UsageError(f"device {device!r} is not known; use all or {', '.join(DEVICES)}")
    config = _config(model)
    devices = DEVICES if device == "all" else {device: DEVICES[device]}
    predictions = {
        name: [predict(config, context, fmt, known) for fmt in FORMATS]
        for name, known in devices.items()
    }
    if as_json:
        print(json.dumps(_report(model, config, context, predictions), ensure_ascii=False))
        return
    _print(model, config, context, predictions)


def _config(model: str) -> "ModelConfig":
    from dgemma.roofline import RELEASED
    from dgemma.weights.hub import find_checkpoint
    from dgemma.weights.source import model_config

    return RELEASED if model == RELEASED_NAME else model_config(find_checkpoint(model))


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
        print(f"\n{name}: {known.name}, {known.bandwidth:.0f} GB/s, {known.memory:.0f} GB")
        print(f"  {COLUMNS}")
        for row in rows:
            print(f"  {_line(row)}")


def _line(row: "Prediction") -> str:
    size = f"{row.memory.total / 1e9:10.1f}"
    if not row.runs:
        reason = row.obstacle or "does not fit"
        return f"{row.format.name:7} {'-':>8} {'-':>6} {'-':>6} {'-':>8} {'-':>6} {size}  {reason}"
    return (
        f"{row.format.name:7} {1e3 * row.step:8.1f} {1e3 * row.step_floor:6.1f}"
        f" {1e3 * row.token:6.1f} {row.break_even:8.1f} {row.per_second[1]:6.0f}"
        f" {size}  up to {row.max_context} tokens"
    )


def _costs(config: "ModelConfig", context: int) -> dict[str, dict[str, float]]:
    """Return what a step and a token compute and move, in each format."""
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
    """Return the predicted speeds of a format that runs on its device."""
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
        "device_gb": row.device.memory,
        "fits": row.fits,
        "longest_context": row.max_context,
    }
