"""`dgemma info`: versions, device, model, weight format and backend."""

import json
import platform
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any

import typer

from dgemma.cli.app import AsJson, Device, Dtype, Model, Quant, app
from dgemma.errors import UsageError


@app.command()
def info(
    model: Model = "nano",
    device: Device = "auto",
    dtype: Dtype = "auto",
    quant: Quant = "auto",
    verify: Annotated[
        bool, typer.Option("--verify", help="Compare the weight files with their SHA-256.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Print versions, device, model, weight format and backend; reads a config, no weights."""
    if verify:
        checked = _verified(model)
    facts = {**_machine(device, dtype), **_model(model)}
    facts["weights"] = _weights(model, device, dtype, quant)
    facts["backend"] = _backend(model, device, dtype)
    if verify:
        facts["verified"] = checked
    if as_json:
        print(json.dumps(facts, ensure_ascii=False))
        return
    width = max(map(len, facts))
    for name, value in facts.items():
        print(f"{name.replace('_', ' '):{width}}  {value}")


def _verified(model: str) -> str:
    """Return which weight files have the SHA-256 that is recorded of them."""
    from dgemma.weights.files import listing, verify_digests
    from dgemma.weights.hub import find_checkpoint

    path = find_checkpoint(model)
    files = verify_digests(path) if path.is_dir() else {}
    if not files:
        return "nothing: no SHA-256 is recorded for these files"
    return f"{len(files)} files have the recorded SHA-256: {listing(files)}"


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
    }


def _backend(model: str, device: str, dtype: str) -> str:
    """Name the backend that would run here, and why not a faster one."""
    from dgemma.backends.choose import report
    from dgemma.device import choose_device, choose_dtype
    from dgemma.weights.hub import find_checkpoint
    from dgemma.weights.source import model_config

    where = choose_device(device)
    try:
        config = model_config(find_checkpoint(model))
    except UsageError:
        config = None
    return report(config, choose_dtype(dtype, where), where)


def _weights(model: str, device: str, dtype: str, quant: str) -> str:
    """Return the format a model would be loaded in with the reason, or the refusal."""
    from dgemma.weights.hub import find_checkpoint
    from dgemma.weights.inference import LoadOptions, plan_load

    try:
        options = LoadOptions(device=device, dtype=dtype, quant=quant)
        plan = plan_load(find_checkpoint(model), options)
    except UsageError as error:
        return f"refused: {error}"
    choice, dtype_name = plan.choice, str(plan.dtype).removeprefix("torch.")
    names = {"none": dtype_name, "stored": "packed as stored"}
    head = ", head in 8 bits" if choice.fp8_head else ""
    head = ", head and soft embeddings in 8 bits" if choice.fp8_soft_embed else head
    return f"{names.get(choice.quant, choice.quant)}{head} ({choice.reason})"


def _model(model: str) -> dict[str, Any]:
    from dgemma.weights.hub import find_checkpoint

    try:
        directory = find_checkpoint(model)
    except UsageError as error:
        if model != "nano":
            raise
        return {"model": f"none ({error})"}
    return {"model": model, **_config(directory), **_file(directory)}


def _file(path: Path) -> dict[str, Any]:
    """Return the types of a GGUF file, what was assumed of it, and its chat template."""
    from dgemma.weights.source import load_template, load_tokenizer, source_notes

    if path.is_dir():
        return {}
    types, *notes = source_notes(path, load_template(path, load_tokenizer(path)))
    return {"file": types, "notes": "; ".join(notes)}


def _config(directory: Path) -> dict[str, Any]:
    from dgemma.config import FULL
    from dgemma.weights.load import count_parameters, short_count
    from dgemma.weights.source import model_config

    config = model_config(directory)
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
