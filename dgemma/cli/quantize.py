"""`dgemma quantize`: a checkpoint in fewer bits, in a released layout."""

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dgemma.cli.app import AsJson, app
from dgemma.errors import UsageError

if TYPE_CHECKING:
    from dgemma.weights.agreement import Agreement
    from dgemma.weights.layouts import Scheme
    from dgemma.weights.quantize import Written


@app.command()
def quantize(
    source: Annotated[str, typer.Argument(help="A checkpoint directory, a hub id, or nano.")],
    out: Annotated[Path, typer.Argument(metavar="DIRECTORY", help="Where to write it.")],
    to: Annotated[str, typer.Option(help="fp8 (layers) or nvfp4 (experts in 4 bits).")] = "fp8",
    as_json: AsJson = False,
) -> None:
    """Write a checkpoint in 8 or 4 bits, in the layouts of RedHatAI's and NVIDIA's releases.

    Tensor by tensor: the model is never in memory as a whole. Prints what each layer's weights
    lost, and for models below 300M parameters how far the answers moved. Head, embedding, router
    and norms stay in bfloat16. On a GPU with 8-bit floats it is run as it is; elsewhere loading it
    gives 16- or 32-bit weights again.
    """
    from dgemma.weights.layouts import SCHEMES

    if to not in SCHEMES:
        raise UsageError(f"--to {to!r} is not known; use {' or '.join(SCHEMES)}")
    from dgemma.config import load_config
    from dgemma.weights.agreement import compare, is_small
    from dgemma.weights.download import find_checkpoint

    directory = find_checkpoint(source)
    written = _write(directory, out, SCHEMES[to])
    moved = compare(directory, out) if is_small(load_config(directory)) else None
    if as_json:
        print(json.dumps(_report(out, to, written, moved)))
        return
    for loss in written.losses:
        print(f"layer {loss.layer:3}  {loss.part:10} relative error {loss.relative:.5f}")
    print(f"{written.source_bytes / 1e9:.3f} GB became {written.bytes / 1e9:.3f} GB in {out}")
    print(_sentence(moved))


def _write(source: Path, out: Path, scheme: "Scheme") -> "Written":
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    from dgemma.weights.quantize import quantize_checkpoint

    console = Console(file=sys.stderr)
    columns = (TextColumn("tensors"), BarColumn(), MofNCompleteColumn())
    with Progress(
        *columns, console=console, transient=True, disable=not console.is_terminal
    ) as progress:
        task = progress.add_task("tensors")

        def on_tensor(done: int, total: int) -> None:
            progress.update(task, completed=done, total=total)

        return quantize_checkpoint(source, out, scheme, on_tensor=on_tensor)


def _sentence(moved: "Agreement | None") -> str:
    if moved is None:
        return "agreement with the source: not measured, the model is too large to load twice"
    return (
        f"agreement with the source over {moved.positions} positions of random prompts: same top "
        f"token {100 * moved.top_1:.1f} %, KL {moved.kl:.2e} nats in the mean, "
        f"{moved.worst_kl:.2e} at worst"
    )


def _report(out: Path, to: str, written: "Written", moved: "Agreement | None") -> dict[str, Any]:
    from dataclasses import asdict

    return {
        "directory": str(out),
        "to": to,
        "source_bytes": written.source_bytes,
        "bytes": written.bytes,
        "losses": [asdict(loss) for loss in written.losses],
        "agreement": None if moved is None else asdict(moved),
    }
