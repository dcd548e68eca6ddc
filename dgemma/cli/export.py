"""`dgemma export`: write a checkpoint for other programs: the released layout, or GGUF."""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from dgemma.cli.app import GGUF_TYPES, app, with_options
from dgemma.errors import UsageError
from dgemma.options import option

DTYPES = ("auto", "float32", "bfloat16", "float16")


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
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    from dgemma.weights.gguf_write import export_gguf
    from dgemma.weights.hub import find_checkpoint

    source = find_checkpoint(model)
    if to.exists() and to.samefile(source):
        raise UsageError(f"{to} is the model itself; choose another name")
    console = Console(file=sys.stderr)
    columns = (TextColumn("tensors"), BarColumn(), MofNCompleteColumn())
    is_quiet = not console.is_terminal
    with Progress(*columns, console=console, transient=True, disable=is_quiet) as progress:
        task = progress.add_task("tensors")

        def on_tensor(done: int, total: int) -> None:
            progress.update(task, completed=done, total=total)

        export_gguf(source, to, kind, adapter=options.adapter, on_tensor=on_tensor)
    print(to)
