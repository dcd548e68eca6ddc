"""`dgemma info`: versions, device, model, weight format and backend."""

import json
import platform
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any

import typer

from dgemma.cli.app import AsJson, app, with_options
from dgemma.errors import UsageError
from dgemma.weights.hub import ModelOptions


@app.command()
@with_options
def info(
    options: ModelOptions,
    verify: Annotated[
        bool, typer.Option("--verify", help="Compare the weight files with their SHA-256.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Print versions, device, model, weight format and backend; reads a config, no weights."""
    if verify:
        checked = _verified(options.model)
    facts = {**_machine(options), **_model(options)}
    facts["weights"], facts["backend"] = _weights(options), _backend(options)
    facts["break_even"] = _break_even(options)
    if verify:
        facts["verified"] = checked
    if as_json:
        print(json.dumps(facts, ensure_ascii=False))
        return
    width = max(map(len, facts))
    for name, value in facts.items():
        print(f"{name.replace('_', ' '):{width}}  {value}")


def _verified(model: str) -> str:
    """Compare the weight files with their recorded SHA-256."""
    from dgemma.weights.files import listing, verify_digests
    from dgemma.weights.hub import find_checkpoint

    path = find_checkpoint(model)
    files = verify_digests(path) if path.is_dir() else {}
    if not files:
        return "nothing: no SHA-256 is recorded for these files"
    return f"{len(files)} files have the recorded SHA-256: {listing(files)}"


def _machine(options: ModelOptions) -> dict[str, Any]:
    import torch

    from dgemma import __version__
    from dgemma.device import choose_device, choose_dtype, describe_device

    where = choose_device(options.device)
    return {
        "dgemma": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "tokenizers": version("tokenizers"),
        "device": describe_device(where),
        "dtype": str(choose_dtype(options.dtype, where)).removeprefix("torch."),
    }


def _backend(options: ModelOptions) -> str:
    """Name the backend that would be used, and why not a faster one."""
    from dgemma.backends.choose import report
    from dgemma.device import choose_device, choose_dtype
    from dgemma.weights.hub import find_checkpoint
    from dgemma.weights.source import model_config

    where = choose_device(options.device)
    try:
        config = model_config(find_checkpoint(options.model))
    except UsageError:
        config = None
    return report(config, choose_dtype(options.dtype, where), where)


def _break_even(options: ModelOptions) -> str:
    """Describe the measured cost of both modes, if there is one."""
    from dgemma.engine.auto import identity, load_break_even
    from dgemma.weights.hub import find_checkpoint

    try:
        path = find_checkpoint(options.model)
    except UsageError as error:
        return f"not measured: {error}"
    costs = load_break_even(identity(path, options))
    return "not measured: dgemma bench break-even" if costs is None else costs.describe()


def _weights(options: ModelOptions) -> str:
    """Return the format a model would be loaded in with the reason, or the refusal."""
    from dgemma.weights.hub import find_checkpoint
    from dgemma.weights.inference import plan_load

    try:
        path = find_checkpoint(options.model)
        plan = plan_load(path, options, adapted=options.adapter is not None)
    except UsageError as error:
        return f"refused: {error}"
    choice, dtype_name = plan.choice, str(plan.dtype).removeprefix("torch.")
    names = {"none": dtype_name, "stored": "packed as stored"}
    head = ", head in 8 bits" if choice.fp8_head else ""
    head = ", head and soft embeddings in 8 bits" if choice.fp8_soft_embed else head
    return f"{names.get(choice.quant, choice.quant)}{head} ({choice.reason})"


def _model(options: ModelOptions) -> dict[str, Any]:
    from dgemma.weights.hub import find_checkpoint

    try:
        path = find_checkpoint(options.model)
    except UsageError as error:
        if options.model != "nano":
            raise
        return {"model": f"none ({error})"}
    return {"model": options.model, **_config(path), **_file(path, options)}


def _file(path: Path, options: ModelOptions) -> dict[str, Any]:
    """Return the types of a GGUF file, what was assumed of it, its template and image tower."""
    from dgemma.weights.gguf_vision import find_tower
    from dgemma.weights.source import (
        check_template_choice,
        load_template,
        load_tokenizer,
        source_notes,
    )

    check_template_choice(path, options.template)
    if path.is_dir():
        return {}
    template = load_template(path, load_tokenizer(path), options.template)
    types, *notes = source_notes(path, template)
    tower = find_tower(path, options.vision)
    return {"file": types, "notes": "; ".join(notes), "image_tower": str(tower or "none")}


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
