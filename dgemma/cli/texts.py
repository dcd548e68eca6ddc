"""Text files that come and go byte for byte: no newline is translated, nothing is replaced."""

import sys
from pathlib import Path

from dgemma.errors import UsageError

STDIN = "-"


def read_text(argument: str) -> str:
    """The text of a file, or of stdin for `-`."""
    if argument == STDIN:
        data = sys.stdin.buffer.read()
    else:
        path = Path(argument)
        if not path.is_file():
            raise UsageError(f"no file {argument}; give a text file, or - for stdin")
        data = path.read_bytes()
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        name = "stdin" if argument == STDIN else argument
        raise UsageError(
            f"{name} is not UTF-8 text: {error.reason} at byte {error.start}"
        ) from None


def write_text(argument: str, text: str) -> None:
    """Back to the file; to stdout for `-`."""
    if argument == STDIN:
        print_text(text)
    else:
        Path(argument).write_bytes(text.encode("utf-8"))


def print_text(text: str) -> None:
    sys.stdout.flush()
    sys.stdout.buffer.write(text.encode("utf-8"))
    sys.stdout.buffer.flush()
