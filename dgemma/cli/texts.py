"""Text files that come and go byte for byte: no newline is translated, nothing is replaced."""

import errno
import os
import shutil
import sys
from pathlib import Path
from tempfile import mkstemp

from dgemma.errors import DgemmaError, UsageError

STDIN = "-"
# Why a file that may be written may have no new one put in its place: a directory that is not ours,
# a file that is mounted by itself, one with further names, an owner that we cannot give away to.
NO_PLACE = (errno.EACCES, errno.EPERM, errno.EROFS, errno.EBUSY, errno.EXDEV, errno.EMLINK)


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
    path = Path(argument).resolve()  # what a link leads to, not the link
    data = text.encode("utf-8")
    try:
        _replace(path, data)
    except OSError as error:
        if error.errno not in NO_PLACE:  # a full disk, say
            raise _refusal(argument, error) from None
        _overwrite(path, data, argument)


def _replace(path: Path, data: bytes) -> None:
    """Put a new file in the old one's place, all at once: nobody ever sees half a text."""
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
            shutil.copystat(path, name)  # after chown, which takes bits away
            os.utime(name)
            os.fsync(handle)
        os.replace(name, path)
    finally:
        Path(name).unlink(missing_ok=True)  # there only if something went wrong


def _overwrite(path: Path, data: bytes, argument: str) -> None:
    """Write into the file itself, and put the old text back if that goes wrong."""
    old = path.read_bytes()
    try:
        path.write_bytes(data)
    except (OSError, KeyboardInterrupt) as error:
        path.write_bytes(old)
        if isinstance(error, KeyboardInterrupt):
            raise
        raise _refusal(argument, error) from None


def _refusal(argument: str, error: OSError) -> DgemmaError:
    return DgemmaError(f"{argument} could not be written: {error.strerror}; it is as it was")


def print_text(text: str) -> None:
    sys.stdout.flush()
    sys.stdout.buffer.write(text.encode("utf-8"))
    sys.stdout.buffer.flush()
