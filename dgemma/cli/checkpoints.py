"""`dgemma export`, `quantize` and `download`: checkpoints written or fetched, not run."""

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dgemma.cli.app import GGUF_TYPES, AsJson, app, with_options
from dgemma.errors import UsageError
from dgemma.options import option

if TYPE_CHECKING:
    from dgemma.weights.files import OnProgress
    from dgemma.weights.quant_schemes import QuantScheme
    from dgemma.weights.quantize import Agreement, QuantizeResult

DTYPES = ("auto", "float32", "bfloat16", "float16")
RELEASED_ID = "google/diffusiongemma-26B-A4B-it"


@contextmanager
def _tensor_progress() -> "Iterator[OnProgress]":
    """Show a bar on stderr, if that is a terminal, while tensors are written."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    console = Console(file=sys.stderr)
    columns = (TextColumn("tensors"), BarColumn(), MofNCompleteColumn())
    is_quiet = not console.is_terminal
    with Progress(*columns, console=console, transient=True, disable=is_quiet) as progress:
        task = progress.add_task("tensors")

        def on_tensor(done: int, total: int) -> None:
            progress.update(task, completed=done, total=total)

        yield on_tensor


# --- export


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportOptions:
    """Options of `dgemma export`."""

    gguf: str | None = option(None, f"Write a GGUF file of this type: {', '.join(GGUF_TYPES)}.")
    dtype: str = option("auto", "auto (as stored; 8 bits: float32), float32, bfloat16 or float16.")
    adapter: Path | None = option(None, "A LoRA adapter to merge into the weights.")
    overwrite: bool = option(False, "Overwrite an existing checkpoint.")


@app.command()
@with_options
def export(
    model: Annotated[
        str, typer.Argument(help="A checkpoint directory, a GGUF file, a hub id, or nano.")
    ],
    to: Annotated[
        Path, typer.Argument(metavar="DESTINATION", help="A directory, or FILE.gguf with --gguf.")
    ],
    options: ExportOptions,
) -> None:
    """Write a checkpoint in the released layout, which transformers and others read.

    With --gguf: one file for llama.cpp and related programs, with types mixed by llama.cpp's rules.
    """
    if options.gguf is not None or to.suffix.lower() == ".gguf":
        _export_gguf(model, to, options)
        return
    dtype = options.dtype
    if dtype not in DTYPES:
        raise UsageError(f"dtype {dtype!r} is not known; use {', '.join(DTYPES)}")
    import torch

    from dgemma.weights.hub import find_checkpoint
    from dgemma.weights.save import export as write_released

    source = find_checkpoint(model)
    if to.exists() and to.samefile(source):
        raise UsageError(f"{to} is the model itself; choose another directory")
    torch_dtype = None if dtype == "auto" else getattr(torch, dtype)
    write_released(
        source, to, dtype=torch_dtype, adapter=options.adapter, overwrite=options.overwrite
    )
    print(to)


def _export_gguf(model: str, to: Path, options: ExportOptions) -> None:
    kind, types = options.gguf, ", ".join(GGUF_TYPES)
    if kind is None:
        raise UsageError(f"{to} is a GGUF file; say its type with --gguf: {types}")
    if kind not in GGUF_TYPES:
        raise UsageError(f"--gguf {kind} is not known; use {types}")
    if to.suffix.lower() != ".gguf":
        raise UsageError(f"{to} should end in .gguf, since --gguf writes one file")
    if options.dtype != "auto":
        raise UsageError(
            f"--dtype {options.dtype} is for the released layout; --gguf {kind} says the type"
        )
    if to.exists() and not options.overwrite:
        raise UsageError(f"{to} exists; overwrite it (--overwrite) or choose another name")
    from dgemma.weights.gguf_write import export_gguf
    from dgemma.weights.hub import find_checkpoint

    source = find_checkpoint(model)
    if to.exists() and to.samefile(source):
        raise UsageError(f"{to} is the model itself; choose another name")
    with _tensor_progress() as on_tensor:
        export_gguf(source, to, kind, adapter=options.adapter, on_tensor=on_tensor)
    print(to)


# --- quantize


@app.command()
def quantize(
    source: Annotated[str, typer.Argument(help="A checkpoint directory, a hub id, or nano.")],
    out: Annotated[Path, typer.Argument(metavar="DIRECTORY", help="Where to write it.")],
    to: Annotated[str, typer.Option(help="fp8 (layers) or nvfp4 (experts in 4 bits).")] = "fp8",
    as_json: AsJson = False,
) -> None:
    """Write a checkpoint in 8 or 4 bits, in the layouts of RedHatAI's and NVIDIA's releases.

    Tensor by tensor: the model is never in memory as a whole. Prints the relative error of each
    layer's weights, and for models below 300M parameters how far the outputs moved. Head,
    embedding, router and norms stay in bfloat16. A GPU with fp8 runs the result as it is; elsewhere
    loading dequantizes it to 16 or 32 bits.
    """
    from dgemma.weights.quant_schemes import SCHEMES

    if to not in SCHEMES:
        raise UsageError(f"--to {to!r} is not known; use {' or '.join(SCHEMES)}")
    from dgemma.weights.hub import find_checkpoint
    from dgemma.weights.quantize import compare, is_small
    from dgemma.weights.source import model_config

    directory = find_checkpoint(source)
    result = _quantize(directory, out, SCHEMES[to])
    agreement = compare(directory, out) if is_small(model_config(directory)) else None
    if as_json:
        print(json.dumps(_report(out, to, result, agreement)))
        return
    for loss in result.losses:
        print(f"layer {loss.layer:3}  {loss.part:10} relative error {loss.relative:.5f}")
    print(f"{result.source_bytes / 1e9:.3f} GB became {result.bytes / 1e9:.3f} GB in {out}")
    print(_sentence(agreement))


def _quantize(source: Path, out: Path, scheme: "QuantScheme") -> "QuantizeResult":
    from dgemma.weights.quantize import quantize_checkpoint

    with _tensor_progress() as on_tensor:
        return quantize_checkpoint(source, out, scheme, on_tensor=on_tensor)


def _sentence(agreement: "Agreement | None") -> str:
    if agreement is None:
        return "agreement with the source: not measured, the model is too large to load twice"
    return (
        f"agreement with the source over {agreement.positions} positions of random prompts: same "
        f"top token {100 * agreement.top_1:.1f} %, KL {agreement.kl:.2e} nats in the mean, "
        f"{agreement.worst_kl:.2e} at worst"
    )


def _report(
    out: Path, to: str, result: "QuantizeResult", agreement: "Agreement | None"
) -> dict[str, Any]:
    return {
        "directory": str(out),
        "to": to,
        "source_bytes": result.source_bytes,
        "bytes": result.bytes,
        "losses": [asdict(loss) for loss in result.losses],
        "agreement": None if agreement is None else asdict(agreement),
    }


# --- download


@app.command()
def download(
    repo: Annotated[str, typer.Argument(help="A hub id, owner/name.")] = RELEASED_ID,
    revision: Annotated[str | None, typer.Option(help="A branch, tag or commit.")] = None,
    to: Annotated[Path | None, typer.Option(help="A directory; default: the hub cache.")] = None,
) -> None:
    """Fetch a checkpoint's files from the Hugging Face hub."""
    from dgemma.weights.hub import download as fetch

    print(fetch(repo, revision, to))
