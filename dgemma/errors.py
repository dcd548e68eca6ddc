"""Errors meant for people. Each message says what was given, what is allowed, and what to do."""

import ctypes
import os
import signal
from typing import Any

FAILED, WRONG_CALL, INTERRUPTED = 1, 2, 130  # exit codes
MAX_SENTENCE = 2000  # characters
CUT_SHORT = (
    "a file of weights was cut short while it was read, or its disk failed; fetch it again, and "
    "replace weights by a rename, not in place"
)
_handlers: list[Any] = []  # referenced while the process may receive their signal


class DgemmaError(Exception):
    """The work failed for a reason the user can act on; exit code 1.

    A message may quote names from an untrusted file: unprintable characters are escaped, so that it
    stays one line and no control sequence reaches a terminal or a log.
    """

    def __init__(self, message: str) -> None:
        shown = "".join(
            char if char.isprintable() else char.encode("unicode_escape").decode()
            for char in message[: MAX_SENTENCE + 1]
        )
        super().__init__(shown if len(shown) <= MAX_SENTENCE else f"{shown[:MAX_SENTENCE]}...")


class UsageError(DgemmaError):
    """The call was wrong: an option, a path or a value; exit code 2."""


class ConfigError(DgemmaError):
    """A configuration file has unsupported content."""


class CheckpointError(DgemmaError):
    """A checkpoint is incomplete, damaged or misshapen."""


class PromptTooLong(UsageError):
    """Prompt and answer do not fit the context."""


class DeadlineExceeded(DgemmaError):
    """A request missed its deadline."""

    def __init__(self, seconds: float, *, has_started: bool) -> None:
        what = "was cut off" if has_started else "waited in the queue"
        super().__init__(f"the request {what} after {seconds:.1f} seconds: its time ran out")


def require(holds: bool, name: str, value: object, allowed: str) -> None:
    """Refuse a parameter whose value is not allowed."""
    if not holds:
        raise UsageError(f"{name} is {value}; it must be {allowed}")


def explain_bus_errors(descriptor: int = 2) -> None:
    """Report SIGBUS (truncated mapped file) as one sentence, by default on stderr.

    The system sends SIGBUS to the reading thread. A Python signal handler would never run, since
    the failing read is retried forever. This one runs at once, in that thread, which holds no lock.
    """
    if not hasattr(signal, "SIGBUS"):
        return

    def end(_signal: int) -> None:
        os.write(descriptor, f"dgemma: {CUT_SHORT}\n".encode())
        os._exit(1)

    _handlers.append(ctypes.CFUNCTYPE(None, ctypes.c_int)(end))
    ctypes.CDLL(None).signal(signal.SIGBUS, _handlers[-1])
