"""Read and write text files byte for byte: no newline is translated, nothing is replaced."""

import errno
import os
import shutil
import sys
from pathlib import Path
from tempfile import mkstemp

from dgemma.config.strict_json import sync_directory
from dgemma.errors import DgemmaError, UsageError

STDIN = "-"
# Errors of replacing a writable file: no write access to the directory, a mount point,
# other hard links, or an owner that cannot be set.
CANNOT_REPLACE = (errno.EACCES, errno.EPERM, errno.EROFS, errno.EBUSY, errno.EXDEV, errno.EMLINK)


def read_text(argument: str) -> str:
    """Read a file, or stdin for `-`."""
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
    """Refuse a file that cannot be written, before any work."""
    if argument != STDIN and not os.access(argument, os.W_OK):
        raise UsageError(f"{argument} may not be written; change its mode, or print the result")


def write_text(argument: str, text: str, read: str) -> None:
    """Write the file, or stdout for `-`.

    The file stays unchanged if writing fails, or if it no longer holds `read`, the text that the
    result was made from: another program has changed it meanwhile.
    """
    if argument == STDIN:
        print_text(text)
        return
    path = Path(argument).resolve()  # the target of a link, not the link
    data, old = text.encode("utf-8"), read.encode("utf-8")
    try:
        _replace(path, data, old)
    except OSError as error:
        if error.errno not in CANNOT_REPLACE:  # for example a full disk
            raise _write_error(argument, error) from None
        _overwrite(path, data, old, argument)


def _check_unchanged(path: Path, old: bytes) -> None:
    try:
        found = path.read_bytes()
    except FileNotFoundError:
        raise DgemmaError(f"{path} was removed meanwhile; the result is not written") from None
    if found != old:
        raise DgemmaError(
            f"{path} was changed while the result was made; it stays as it is now: run the "
            "command again"
        )


def _replace(path: Path, data: bytes, old_data: bytes) -> None:
    """Replace the file atomically by a new one with its owner and mode."""
    _check_unchanged(path, old_data)
    old = path.stat()
    if old.st_nlink > 1:
        raise OSError(errno.EMLINK, "its other names would keep the old text")
    handle, name = mkstemp(prefix=".dgemma-", dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            new = os.fstat(handle)
            if (new.st_uid, new.st_gid) != (old.st_uid, old.st_gid):
                os.chown(name, old.st_uid, old.st_gid)
            shutil.copystat(path, name)  # after chown, which clears mode bits
            os.utime(name)
            os.fsync(handle)
        _check_unchanged(path, old_data)  # as late as possible
        os.replace(name, path)
        sync_directory(path.parent)
    finally:
        Path(name).unlink(missing_ok=True)  # present only after an error


def _overwrite(path: Path, data: bytes, old: bytes, argument: str) -> None:
    """Write into the file itself, and restore the old text on failure."""
    _check_unchanged(path, old)
    try:
        path.write_bytes(data)
    except (OSError, KeyboardInterrupt) as error:
        path.write_bytes(old)
        if isinstance(error, KeyboardInterrupt):
            raise
        raise _write_error(argument, error) from None


def _write_error(argument: str, error: OSError) -> DgemmaError:
    return DgemmaError(f"{argument} could not be written: {error.strerror}; it is as it was")


def print_text(text: str) -> None:
    sys.stdout.flush()
    sys.stdout.buffer.write(text.encode("utf-8"))
    sys.stdout.buffer.flush()
