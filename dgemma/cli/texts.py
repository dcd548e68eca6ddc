"""Text files that come and go byte for byte: no newline is translated, nothing is replaced."""

import os
import sys
from pathlib import Path

from dgemma.errors import DgemmaError, UsageError

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


def check_writable(argument: str) -> None:
    """Refuse a file that the result could not be written to, before any work."""
    if argument != STDIN and not os.access(argument, os.W_OK):
        raise UsageError(f"{argument} may not be written; change its mode, or print the result")


def write_text(argument: str, text: str) -> None:
    """Back to the file; to stdout for `-`. A file that cannot be written whole stays as it was."""
    if argument == STDIN:
        print_text(text)
        return
    path = Path(argument)
    old = path.read_bytes()
    try:
        path.write_bytes(text.encode("utf-8"))
    except (OSError, KeyboardInterrupt) as error:  # a full disk, say
        path.write_bytes(old)
        if isinstance(error, KeyboardInterrupt):
            raise
        raise DgemmaError(
            f"{argument} could not be written: {error.strerror}; it is as it was"
        ) from None


def print_text(text: str) -> None:
    sys.stdout.flush()
    sys.stdout.buffer.write(text.encode("utf-8"))
    sys.stdout.buffer.flush()
