"""The application, the options that commands share, and loading with progress."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from dgemma.engine import Engine

FAILED, WRONG_CALL, INTERRUPTED = 1, 2, 130  # exit codes
MIN_SHOWN_BYTES = 1 << 30  # smaller checkpoints load without a progress bar

Model = Annotated[
    str,
    typer.Option(
        "--model", "-m", help="A checkpoint directory, a GGUF file, a downloaded hub id, or nano."
    ),
]
Template = Annotated[
    str,
    typer.Option(
        "--template",
        help="Chat template of a GGUF file: auto (dgemma's for the released tokenizer) or file.",
    ),
]
Device = Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:N or mps.")]
Dtype = Annotated[str, typer.Option(help="auto, float32, bfloat16 or float16.")]
Quant = Annotated[
    str, typer.Option(help="Weights in memory: auto, none (16 or 32 bits), int8, fp8 or nvfp4.")
]
Adapter = Annotated[
    Path | None, typer.Option(help="A LoRA adapter to put on the model: a directory or file.")
]
HeldOut = Annotated[
    Path | None, typer.Option(help="Directory of held-out files (docs/evaluation.md).")
]
Shared = Annotated[
    Path | None, typer.Option("--data", help="Directory of public sets (docs/evaluation.md).")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout.")]

app = typer.Typer(
    name="dgemma",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


def _print_version(is_set: bool) -> None:
    if is_set:
        from dgemma import __version__

        print(f"dgemma {__version__}")
        raise typer.Exit


@app.callback()
def common(
    debug: Annotated[bool, typer.Option("--debug", help="Show tracebacks.")] = False,
    version: Annotated[
        bool,
        typer.Option("--version", callback=_print_version, is_eager=True, help="Show and exit."),
    ] = False,
) -> None:
    """DiffusionGemma on your own machine: a canvas of text is refined step by step."""


def load_engine(
    model: str,
    device: str,
    dtype: str,
    adapter: Path | None = None,
    quant: str = "auto",
    template: str = "auto",
) -> "Engine":
    """Load a checkpoint; a large one shows its progress on stderr if that is a terminal."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    from dgemma.engine import Engine

    columns = (TextColumn("loading"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    console = Console(file=sys.stderr)
    is_quiet = not console.is_terminal
    with Progress(*columns, console=console, transient=True, disable=is_quiet) as progress:
        task = progress.add_task("loading", visible=False)

        def on_tensor(done: int, total: int) -> None:
            progress.update(task, completed=done, total=total, visible=total > MIN_SHOWN_BYTES)

        return Engine.load(
            model,
            device=device,
            dtype=dtype,
            quant=quant,
            adapter=adapter,
            progress=on_tensor,
            template=template,  # type: ignore[arg-type]  # checked there
        )
