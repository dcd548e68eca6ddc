"""`dgemma download`: the only command that uses the network by itself."""

from pathlib import Path
from typing import Annotated

import typer

from dgemma.cli.app import app

RELEASED = "google/diffusiongemma-26B-A4B-it"


@app.command()
def download(
    repo: Annotated[str, typer.Argument(help="A hub id, owner/name.")] = RELEASED,
    revision: Annotated[str | None, typer.Option(help="A branch, tag or commit.")] = None,
    to: Annotated[Path | None, typer.Option(help="A directory; default: the hub cache.")] = None,
) -> None:
    """Fetch a checkpoint's files from the Hugging Face hub."""
    from dgemma.weights.hub import download as fetch

    print(fetch(repo, revision, to))
