"""A wrong call in one sentence: what was given, what is allowed, what to do.

Typer's own words for a value change from version to version, and say what was given or what is
allowed, not both. Of numbers we say it ourselves, by the command's signature and the command line.
"""

import inspect
from collections.abc import Sequence
from typing import Any, get_args, get_type_hints

import typer

KINDS = {int: "a whole number", float: "a number"}


def explain(error: Any, arguments: Sequence[str]) -> str:
    """The sentence; none where the help was printed because nothing was asked."""
    told = _number(error, arguments) or " ".join(error.format_message().split()).rstrip(".")
    command = error.ctx.command_path if error.ctx else _command(arguments)
    return f"{told}; `{command} --help` lists what there is" if told else ""


def _command(arguments: Sequence[str]) -> str:
    named = next((argument for argument in arguments if not argument.startswith("-")), "")
    return f"dgemma {named}".rstrip()


def _number(error: Any, arguments: Sequence[str]) -> str:
    """What is wrong with a number; nothing if the error is of another kind."""
    if not isinstance(error, typer.BadParameter) or not error.ctx or not error.param:
        return ""
    command: Any = inspect.unwrap(error.ctx.command.callback)  # type: ignore[arg-type]
    hint, declared = get_args(get_type_hints(command, include_extras=True)[str(error.param.name)])
    kind = next((kind for kind in KINDS if kind in _leaves(hint)), None)
    if kind is None:
        return ""
    low, high = declared.min, declared.max
    for value in reversed(_given(error.param.opts, arguments)):
        number = _read(value, kind)
        if number is None or not _is_within(number, low, high):
            shown = repr(value) if number is None else value
            return f"{error.param.opts[0]} is {shown}; it must be {_allowed(kind, low, high)}"
    return ""


def _leaves(hint: Any) -> set[Any]:
    """The plain types of a hint: of `list[int] | None`, int and None's."""
    inner = get_args(hint)
    return set().union(*map(_leaves, inner)) if inner else {hint}


def _given(names: Sequence[str], arguments: Sequence[str]) -> list[str]:
    """All values of an option on the command line."""
    values = []
    for argument, following in zip(arguments, [*arguments[1:], ""], strict=True):
        name, equals, value = argument.partition("=")
        if name in names:
            values.append(value if equals else following)
    return values


def _read(value: str, kind: type) -> Any:
    try:
        return kind(value)
    except ValueError:
        return None


def _is_within(number: float, low: float | None, high: float | None) -> bool:
    return (low is None or number >= low) and (high is None or number <= high)


def _allowed(kind: type, low: float | None, high: float | None) -> str:
    if low is not None and high is not None:
        return f"{KINDS[kind]} from {low} to {high}"
    return KINDS[kind] if low is None else f"{KINDS[kind]}, {low} or more"
