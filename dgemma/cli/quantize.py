"""`dgemma quantize`: quantize a checkpoint into a released scheme."""

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dgemma.cli.app import AsJson, app
from dgemma.errors import UsageError

if TYPE_CHECKING:
    from dgemma.weights.quant_schemes import QuantScheme
    from dgemma.weights.quantize import Agreement, QuantizeResult


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
    from dataclasses import asdict

    return {
        "directory": str(out),
        "to": to,
        "source_bytes": result.source_bytes,
        "bytes": result.bytes,
        "losses": [asdict(loss) for loss in result.losses],
        "agreement": None if agreement is None else asdict(agreement),
    }
