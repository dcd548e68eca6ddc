"""Reading of untrusted files: regular files only, of a bounded size; JSON without surprises.

JSON may nest so deep and no deeper, gives no key twice and holds no NaN: other readers of the same
file would disagree on what it says.
"""

import json
import os
import stat
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

from dgemma.errors import CheckpointError

MAX_JSON_BYTES = 16 << 20  # of a config or an index; the released index has 0.1 MiB
MAX_DEPTH = 64  # levels of a config; the released one has 4
KINDS = {
    stat.S_IFIFO: "a FIFO",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFSOCK: "a socket",
    stat.S_IFDIR: "a directory",
}


def open_regular(path: Path) -> BinaryIO:
    """Open a file for reading; refuses a FIFO, a device or a directory without waiting for it."""
    try:
        # Without O_NONBLOCK, opening a FIFO that nobody writes to would wait for ever.
        handle = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0))
    except FileNotFoundError:
        raise CheckpointError(f"{path} does not exist; a checkpoint needs one") from None
    except (OSError, ValueError) as error:  # a name with a null character
        reason = getattr(error, "strerror", None) or error
        raise CheckpointError(f"cannot read {path}: {reason}") from None
    kind = stat.S_IFMT(os.fstat(handle).st_mode)
    if kind != stat.S_IFREG:
        os.close(handle)
        name = KINDS.get(kind, "no regular file")
        raise CheckpointError(f"{path} is {name}; a checkpoint consists of regular files")
    return os.fdopen(handle, "rb")


def read_regular(path: Path, max_bytes: int = MAX_JSON_BYTES) -> bytes:
    """Read a regular file whole, unless it is larger than `max_bytes`."""
    with open_regular(path) as file:
        data = file.read(max_bytes + 1)
    if len(data) > max_bytes:
        raise CheckpointError(
            f"{path} is larger than {max_bytes:,} bytes, the most that this build reads of such a "
            "file; it is damaged or of something else"
        )
    return data


def sync_directory(directory: Path) -> None:
    """Make renames and removals in a directory durable, where the system can."""
    try:
        handle = os.open(directory, os.O_RDONLY | getattr(os, "O_DIRECTORY", 0))
    except OSError:  # no directories as files: Windows
        return
    try:
        os.fsync(handle)
    except OSError:
        pass  # a file system without it
    finally:
        os.close(handle)


def read_json(path: Path) -> dict[str, Any]:
    """Read a file that holds one JSON object."""
    raw = parse_json(read_regular(path), str(path))
    _check_depth(raw, str(path))
    return raw


def parse_json(data: bytes, source: str) -> dict[str, Any]:
    """Parse one JSON object; refuses a key that is given twice, and NaN and infinity."""

    def refuse(name: str) -> NoReturn:
        raise CheckpointError(f"{source} holds {name}, which is no JSON number")

    try:
        raw = json.loads(
            data.decode("utf-8"),
            object_pairs_hook=_unique(source),
            parse_constant=refuse,
        )
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{source} is not valid JSON: {error}; fetch it again") from None
    if not isinstance(raw, dict):
        raise CheckpointError(f"{source} must hold a JSON object, not {type(raw).__name__}")
    return raw


def _unique(source: str) -> Callable[[list[tuple[str, Any]]], dict[str, Any]]:
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        raw = dict(pairs)
        if len(raw) < len(pairs):
            ((twice, _),) = Counter(key for key, _ in pairs).most_common(1)
            raise CheckpointError(f"{source} lists {twice[:80]!r} more than once; fetch it again")
        return raw

    return unique


def _check_depth(raw: object, source: str) -> None:
    level: list[object] = [raw]
    for _ in range(MAX_DEPTH):
        nested = [value for value in level if isinstance(value, dict | list)]
        if not nested:
            return
        level = [
            inner
            for value in nested
            for inner in (value.values() if isinstance(value, dict) else value)
        ]
    raise CheckpointError(f"{source} nests deeper than {MAX_DEPTH} levels; it is not a config")
