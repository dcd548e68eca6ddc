"""`dgemma export`: a checkpoint in the released layout, for other programs."""

from pathlib import Path
from typing import Annotated

import typer

from dgemma.cli.app import app
from dgemma.errors import UsageError

DTYPES = ("auto", "float32", "bfloat16", "float16")


@app.command()
def export(
    model: Annotated[str, typer.Argument(help="A checkpoint directory, a hub id, or nano.")],
    to: Annotated[Path, typer.Argument(metavar="DIRECTORY", help="Where to write it.")],
    dtype: Annotated[
        str, typer.Option(help="auto (as stored; 8 bits: float32), float32, bfloat16 or float16.")
    ] = "auto",
    adapter: Annotated[
        Path | None, typer.Option(help="A LoRA adapter to merge into the weights.")
    ] = None,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace a checkpoint that is there.")
    ] = False,
) -> None:
    """Write a checkpoint in the released layout, which transformers and others read."""
    if dtype not in DTYPES:
        raise UsageError(f"dtype {dtype!r} is not known; use {', '.join(DTYPES)}")
    import torch

    from dgemma.weights.download import find_checkpoint
    from dgemma.weights.export import export as write

    source = find_checkpoint(model)
    if to.exists() and to.samefile(source):
        raise UsageError(f"{to} is the model itself; choose another directory")
    kind = None if dtype == "auto" else getattr(torch, dtype)
    write(source, to, dtype=kind, adapter=adapter, overwrite=overwrite)
    print(to)
