"""`dgemma info`: versions, device, model, chosen fast paths."""

import json
import platform
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dgemma.cli.app import AsJson, Device, Dtype, Model, Quant, app
from dgemma.errors import UsageError

if TYPE_CHECKING:
    import torch


@app.command()
def info(
    model: Model = "nano",
    device: Device = "auto",
    dtype: Dtype = "auto",
    quant: Quant = "auto",
    as_json: AsJson = False,
) -> None:
    """Tell what would run, and where. Needs a checkpoint's config only, not its weights."""
    facts = {**_machine(device, dtype), **_model(model)}
    facts["weights"] = _weights(model, device, dtype, quant)
    facts["backend"] = _backend(model, device, dtype)
    if as_json:
        print(json.dumps(facts, ensure_ascii=False))
        return
    width = max(map(len, facts))
    for name, value in facts.items():
        print(f"{name.replace('_', ' '):{width}}  {_shown(value)}")


def _shown(value: Any) -> str:
    """On one line; what is true of all is said once."""
    if not isinstance(value, dict):
        return str(value)
    ways = set(value.values())
    return ways.pop() if len(ways) == 1 else ", ".join(f"{k}: {v}" for k, v in value.items())


def _machine(device: str, dtype: str) -> dict[str, Any]:
    import torch

    from dgemma import __version__
    from dgemma.device import choose_device, choose_dtype, describe_device

    where = choose_device(device)
    return {
        "dgemma": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "tokenizers": version("tokenizers"),
        "device": describe_device(where),
        "dtype": str(choose_dtype(dtype, where)).removeprefix("torch."),
        "fast_paths": _fast_paths(where, choose_dtype(dtype, where)),
    }


def _fast_paths(where: "torch.device", dtype: "torch.dtype") -> dict[str, str]:
    """Which of the two ways each op takes here."""
    import torch

    from dgemma.backends.cpu.packed_linear import can_pack

    is_cpu = where.type == "cpu"
    is_packed = is_cpu and can_pack(torch.empty(1, 1, dtype=dtype))
    is_grouped = where.type == "cuda" and dtype == torch.bfloat16
    return {
        "attention": "segments merged in place" if is_cpu else "segments joined",
        "linear": "packed by oneDNN" if is_packed else "plain",
        "mean": "products for open positions" if is_packed else "products",
        "experts": "one grouped product" if is_grouped else "one product per expert",
        "row_stats": "in place",
    }


def _backend(model: str, device: str, dtype: str) -> str:
    """Name the backend that would run here, and why not a faster one."""
    from dgemma.backends.cuda.selftest_cache import report
    from dgemma.config import load_config
    from dgemma.device import choose_device, choose_dtype
    from dgemma.weights.download import find_checkpoint

    where = choose_device(device)
    try:
        config = load_config(find_checkpoint(model))
    except UsageError:
        config = None
    return report(config, choose_dtype(dtype, where), where)


def _weights(model: str, device: str, dtype: str, quant: str) -> str:
    """The form a model would be loaded in, and why; or why it would not be."""
    from dgemma.weights.download import find_checkpoint
    from dgemma.weights.served import Wanted, decide

    try:
        wanted = Wanted(device=device, dtype=dtype, quant=quant)
        decided = decide(find_checkpoint(model), wanted)
    except UsageError as error:
        return f"refused: {error}"
    kind = str(decided.dtype).removeprefix("torch.")
    form = {"none": kind, "own": "packed as stored"}.get(decided.choice.quant, decided.choice.quant)
    head = ", head in 8 bits" if decided.choice.head_8 else ""
    head = ", head and soft embeddings in 8 bits" if decided.choice.soft_8 else head
    return f"{form}{head} ({decided.choice.why})"


def _model(model: str) -> dict[str, Any]:
    from dgemma.weights.download import find_checkpoint

    try:
        directory = find_checkpoint(model)
    except UsageError as error:
        if model != "nano":
            raise
        return {"model": f"none ({error})"}
    return {"model": model, **_config(directory)}


def _config(directory: Path) -> dict[str, Any]:
    from dgemma.config import FULL, load_config
    from dgemma.weights.random import count_parameters, short_count

    config = load_config(directory)
    count = count_parameters(config)
    return {
        "family": config.family,
        "parameters": count.total,
        "active_parameters": count.active,
        "size": f"{short_count(count.total)}, {short_count(count.active)} active",
        "layers": config.num_hidden_layers,
        "full_layers": config.layer_types.count(FULL),
        "experts": f"{config.top_k_experts} of {config.num_experts}",
        "vocabulary": config.vocab_size,
        "context": config.max_position_embeddings,
        "canvas": config.canvas_length if config.can_denoise else 0,
    }
