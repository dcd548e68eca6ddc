"""The application and its shared options, and how errors reach a person: one sentence."""

import io
import os
import sys
from itertools import takewhile
from pathlib import Path
from typing import Annotated, Any

import typer

from dgemma.cli.refusals import explain
from dgemma.errors import DgemmaError, UsageError

FAILED, WRONG_CALL, INTERRUPTED = 1, 2, 130
# What typer raises for a wrong call: click's class, or by version its own copy of it.
BadCall: Any = typer.BadParameter.__mro__[1]

Model = Annotated[
    str, typer.Option("--model", "-m", help="A checkpoint directory, a downloaded hub id, or nano.")
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


def _print_version(wanted: bool) -> None:
    if wanted:
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
    """DiffusionGemma on your own machine: text that settles all at once instead of being typed."""


def run() -> None:
    """Run the command line; errors become one sentence on stderr and the right exit code."""
    _mend_streams()
    try:
        code = app(prog_name="dgemma", standalone_mode=False)
        if code == INTERRUPTED:  # what typer makes of Ctrl-C
            print("dgemma: interrupted", file=sys.stderr)
        sys.exit(code)
    except BadCall as error:
        _fail(explain(error, sys.argv[1:]), WRONG_CALL)
    except DgemmaError as error:
        _fail(str(error), WRONG_CALL if isinstance(error, UsageError) else FAILED)
    except (KeyboardInterrupt, typer.Abort):
        _fail("interrupted", INTERRUPTED)
    except OSError as error:
        _fail(f"{error.strerror or error}; check the disk, the pipe or the file", FAILED)
    except Exception as error:
        # The outermost edge: a bug still ends in a sentence, and --debug shows where it was.
        sentence = f"{type(error).__name__}: {error} (a bug; dgemma --debug COMMAND shows where)"
        _fail(sentence, FAILED)


def _mend_streams() -> None:
    """Streams that were closed before the start are empty ones; no answer is lost to a code page.

    What stdout or stderr cannot encode is spelled in escapes.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115
        elif mode == "w" and isinstance(stream, io.TextIOWrapper) and stream.errors == "strict":
            stream.reconfigure(errors="backslashreplace")


def _fail(sentence: str, code: int) -> None:
    if _wants_traceback(sys.argv[1:]):
        raise  # the error that is being handled
    if sentence:
        print(f"dgemma: {sentence}", file=sys.stderr)
    sys.exit(code)


def _wants_traceback(arguments: list[str]) -> bool:
    """Whether --debug stands before the command, where it is an option and not a prompt."""
    options = takewhile(lambda argument: argument.startswith("-"), arguments)
    return "--debug" in options
