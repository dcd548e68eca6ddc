"""Fields of dataclasses that are options of the command line: each default once, with its help."""

from dataclasses import field
from typing import Any


def option(default: Any, help: str, *flags: str, **settings: Any) -> Any:
    """Return a field that `cli.app.with_options` makes an option of.

    flags: instead of `--name`. settings: keywords of `typer.Option`, such as min.
    """
    return field(default=default, metadata={"help": help, "flags": flags, "settings": settings})
