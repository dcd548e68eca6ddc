"""The command line: parse, call, print. A command imports heavy modules inside its function.

`main` runs a command; errors become one sentence on stderr: what was given, what is allowed, what
to do. Typer's own message for a wrong number varies with its version and omits the value or the
range, so it is written here from the command's signature and the command line.
"""

import io
import os
import sys
from collections.abc import Sequence
from importlib import import_module
from itertools import takewhile
from typing import Any, get_args

import typer

from dgemma.cli.app import app, option_hints
from dgemma.errors import (
    FAILED,
    INTERRUPTED,
    WRONG_CALL,
    DgemmaError,
    UsageError,
    explain_bus_errors,
)

# Modules of the commands, in the order of `dgemma --help`; importing one registers its commands.
COMMANDS = (
    *("generate", "chat", "fill", "edit", "sudoku", "serve", "batch", "info", "fit"),
    *("bench", "eval", "train", "checkpoints"),
)
NUMBER_TYPES = {int: "a whole number", float: "a number"}
# Raised by typer for a wrong call: click's class or, depending on the version, a copy of it.
WrongCall: Any = typer.BadParameter.__mro__[1]

for _name in COMMANDS:
    import_module(f"dgemma.cli.{_name}")


def main() -> None:
    """Run the command line and exit with 0, or with a sentence on stderr and the right code."""
    _repair_streams()
    explain_bus_errors()
    try:
        code = app(prog_name="dgemma", standalone_mode=False)
        if code == INTERRUPTED:  # typer's exit code after Ctrl-C
            print("dgemma: interrupted", file=sys.stderr)
        sys.exit(code)
    except WrongCall as error:
        _fail(explain(error, sys.argv[1:]), WRONG_CALL)
    except DgemmaError as error:
        _fail(str(error), WRONG_CALL if isinstance(error, UsageError) else FAILED)
    except (KeyboardInterrupt, typer.Abort):
        _fail("interrupted", INTERRUPTED)
    except OSError as error:
        _fail(f"{error.strerror or error}; check the disk, the pipe or the file", FAILED)
    except Exception as error:
        # The last resort: a bug still ends in a sentence, and --debug shows the traceback.
        sentence = f"{type(error).__name__}: {error} (a bug; dgemma --debug COMMAND shows where)"
        _fail(sentence, FAILED)


def _repair_streams() -> None:
    """Replace streams that were closed before start; escape characters that they cannot encode."""
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
    """True if --debug comes before the command; after it, it may be part of a prompt."""
    options = takewhile(lambda argument: argument.startswith("-"), arguments)
    return "--debug" in options


# --- wrong calls


def explain(error: Any, arguments: Sequence[str]) -> str:
    """Return the sentence for a wrong call; empty if help was printed instead."""
    sentence = _number_error(error, arguments)
    sentence = sentence or " ".join(error.format_message().split()).rstrip(".")
    command = error.ctx.command_path if error.ctx else _command(arguments)
    return f"{sentence}; see `{command} --help`" if sentence else ""


def _command(arguments: Sequence[str]) -> str:
    name = next((argument for argument in arguments if not argument.startswith("-")), "")
    return f"dgemma {name}".rstrip()


def _number_error(error: Any, arguments: Sequence[str]) -> str:
    """Return the sentence for a wrong number; empty for any other error."""
    if not isinstance(error, typer.BadParameter) or not error.ctx or not error.param:
        return ""
    hint, option = get_args(option_hints(error.ctx.command.callback)[str(error.param.name)])
    number_type = next((kind for kind in NUMBER_TYPES if kind in _plain_types(hint)), None)
    if number_type is None:
        return ""
    low, high = option.min, option.max
    for value in reversed(_values(error.param.opts, arguments)):
        number = _parse(value, number_type)
        if number is None or not _is_within(number, low, high):
            shown = repr(value) if number is None else value
            allowed = _range(number_type, low, high)
            return f"{error.param.opts[0]} is {shown}; it must be {allowed}"
    return ""


def _plain_types(hint: Any) -> set[Any]:
    """Return the plain types of a hint: int and NoneType for `list[int] | None`."""
    inner = get_args(hint)
    return set().union(*map(_plain_types, inner)) if inner else {hint}


def _values(names: Sequence[str], arguments: Sequence[str]) -> list[str]:
    """Return all values of an option on the command line."""
    values = []
    for argument, following in zip(arguments, [*arguments[1:], ""], strict=True):
        name, equals, value = argument.partition("=")
        if name in names:
            values.append(value if equals else following)
    return values


def _parse(value: str, number_type: type) -> Any:
    try:
        return number_type(value)
    except ValueError:
        return None


def _is_within(number: float, low: float | None, high: float | None) -> bool:
    return (low is None or number >= low) and (high is None or number <= high)


def _range(number_type: type, low: float | None, high: float | None) -> str:
    name = NUMBER_TYPES[number_type]
    if low is not None and high is not None:
        return f"{name} from {low} to {high}"
    return name if low is None else f"{name}, {low} or more"
