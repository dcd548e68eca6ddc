"""Write the table of recipe keys in docs/training.md from the recipe's fields and their comments.

python docs/make_training.py [--check]
"""

import inspect
import re
from dataclasses import MISSING, Field, fields, is_dataclass
from pathlib import Path
from types import UnionType
from typing import Any, Literal, get_args, get_origin, get_type_hints

from generated import save, with_tables

from dgemma.train.recipe import Recipe

PAGE = Path(__file__).parent / "training.md"
LISTED = {"data": "[[data]]"}  # tables that may be repeated


def comments(table: type) -> dict[str, str]:
    """Read the comment of each field: on its line, or on the lines above it."""
    found, above = {}, list[str]()
    tables = [kind for kind in reversed(table.__mro__) if is_dataclass(kind)]
    for line in "\n".join(map(inspect.getsource, tables)).splitlines():
        text = line.strip()
        if text.startswith("#"):
            above.append(text.removeprefix("# "))
            continue
        if match := re.match(r"(\w+): ", text):
            _, _, beside = text.partition("  # ")
            found[match[1]] = " ".join([*above, beside] if beside else above)
        above = []
    return found


def default(field: Field[Any]) -> str:
    if field.default is MISSING and field.default_factory is MISSING:
        return "required"
    value = field.default if field.default is not MISSING else field.default_factory()  # type: ignore[misc]
    if value is None:
        return ""
    return f"`{toml(value)}`"


def toml(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{key} = {toml(item)}" for key, item in value.items()) + " }"
    if isinstance(value, tuple):
        return f"[{', '.join(map(toml, value))}]"
    return f'"{value}"' if isinstance(value, str) else str(value)


def choices(hint: Any) -> str:
    """List the values of a key that has only a few."""
    options = (
        get_args(hint) if get_origin(hint) is UnionType or type(None) in get_args(hint) else [hint]
    )
    literal = next((kind for kind in options if get_origin(kind) is Literal), None)
    return "" if literal is None else f" ({', '.join(f'`{toml(x)}`' for x in get_args(literal))})"


def table_of(hint: Any) -> type | None:
    """Return the dataclass of a table, or of the tables in a list of them."""
    options = get_args(hint) if get_origin(hint) in (UnionType, tuple) else (hint,)
    return next((kind for kind in options if is_dataclass(kind)), None)  # type: ignore[return-value]


def rows() -> list[str]:
    lines = ["| key | default | meaning |", "|---|---|---|"]
    hints, notes = get_type_hints(Recipe), comments(Recipe)
    for field in fields(Recipe):
        table = table_of(hints[field.name])
        if table is None:
            lines.append(f"| `{field.name}` | {default(field)} | {notes[field.name]} |")
            continue
        heading, inner = LISTED.get(field.name, f"[{field.name}]"), comments(table)
        types = get_type_hints(table)
        for key in fields(table):
            meaning = (inner[key.name] + choices(types[key.name])).replace("|", r"\|")
            lines.append(f"| `{heading} {key.name}` | {default(key)} | {meaning} |")
    return lines


if __name__ == "__main__":
    save(PAGE, with_tables(PAGE.read_text(encoding="utf-8"), {"recipe keys": rows()}))
