"""The constraint of a command line: a schema, regex, grammar or choices, read and checked."""

import json
from pathlib import Path
from typing import TYPE_CHECKING

from dgemma.errors import DgemmaError, UsageError

if TYPE_CHECKING:
    from dgemma.constrain.grammar import Constraint
    from dgemma.engine import Done


def read_options(
    schema: str | None, regex: str | None, grammar: Path | None, choices: str | None
) -> "Constraint":
    """What the options say, checked before a model is loaded; empty where none is given."""
    from dgemma.constrain.grammar import read_constraint

    constraint: Constraint = {}
    if schema is not None:
        constraint["schema"] = _read_schema(schema)
    if regex is not None:
        constraint["regex"] = regex
    if grammar is not None:
        constraint["grammar"] = _read_file(grammar, "the grammar")
    if choices is not None:
        constraint["choices"] = [choice.strip() for choice in choices.split(",")]
    if len(constraint) > 1:
        names = " and ".join(f"--{name}" for name in constraint)
        raise UsageError(f"{names} are given together; a text is held to one of them")
    if constraint:
        read_constraint(constraint)
    return constraint


def check_done(done: "Done") -> None:
    """Fail where a text that was to be held to a grammar has no end."""
    if done.fault and not done.ids:
        raise DgemmaError(f"no text: {done.fault}; raise --max-tokens or loosen the constraint")


def _read_schema(given: str) -> str:
    """A schema itself, or the file that holds it."""
    if given.lstrip().startswith(("{", "true", "false")):
        return given
    text = _read_file(Path(given), "the schema")
    try:
        json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{given} is not JSON: {error}") from None
    return text


def _read_file(path: Path, what: str) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise UsageError(f"{what} {path} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise UsageError(f"{what} {path} is not UTF-8 text") from None
