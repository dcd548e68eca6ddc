"""Ctrl-C and its like during a run: a wish at first, so that no step is cut in two."""

import signal
import threading
from types import FrameType, TracebackType
from typing import Any

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Interrupt:
    """While open, the first signal only sets `is_asked`; a second one acts as it always does."""

    def __init__(self) -> None:
        self.is_asked = False
        self.before: dict[int, Any] = {}

    def __enter__(self) -> "Interrupt":
        # Elsewhere Python allows no handlers, and the main thread's own do their work.
        if threading.current_thread() is threading.main_thread():
            self.before = {number: signal.signal(number, self._ask) for number in SIGNALS}
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._restore()

    def _ask(self, number: int, frame: FrameType | None) -> None:
        self.is_asked = True
        self._restore()

    def _restore(self) -> None:
        for number, handler in self.before.items():
            signal.signal(number, handler)
        self.before = {}


def leave_to_parent(worker: int) -> None:
    """In a process that makes batches: Ctrl-C is the trainer's matter, which ends its helpers."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
