"""Work that takes several requests of the engine, beside everybody else's: fills, edits, puzzles.

Such work is a generator that calls `engine.step()` wherever it needs a pass. Here it has a thread
of its own, which is handed the engine between two passes and hands it back when it wants the next
one: one thread runs at a time, never two. So its canvases share passes with all other requests, and
it can be left at any pass.
"""

import threading
from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

if TYPE_CHECKING:
    from dgemma.engine import Done, Draft, Engine, Text

    Course = Generator[Draft | Text, None, tuple[Done, Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Errand:
    """What a guest is to do. It reports on its way, and returns how it ended and what came."""

    run: "Callable[[Engine], Course]"
    room: int  # tokens it may keep in caches at once, about


class Left(Exception):
    """Nobody waits for this work any more."""


class Guest:
    """An errand on its way. All methods are for the thread that owns the engine."""

    def __init__(
        self, engine: "Engine", errand: Errand, report: "Callable[[Draft | Text], None]"
    ) -> None:
        self.outcome: tuple[Done, Any] | None = None
        self.error: Exception | None = None
        self.is_over = False
        self._errand, self._report = errand, report
        self._engine = cast("Engine", Lent(engine, self._pause))
        self._is_left = False
        self._go, self._back = threading.Semaphore(0), threading.Semaphore(0)
        self._thread = threading.Thread(target=self._run, name="guest", daemon=True)
        self._thread.start()

    def resume(self) -> None:
        """Let it work until it wants a pass or is over."""
        if not self.is_over:
            self._go.release()
            self._back.acquire()

    def leave(self) -> None:
        """End it where it stands; it takes its requests out of the engine."""
        self._is_left = True
        self.resume()

    def _run(self) -> None:
        self._go.acquire()
        try:
            if not self._is_left:
                self._work()
        except Left:
            pass
        except Exception as error:
            self.error = error
        finally:
            self.is_over = True
            self._back.release()

    def _work(self) -> None:
        course = self._errand.run(self._engine)
        while self.outcome is None:
            try:
                self._report(next(course))
            except StopIteration as end:
                self.outcome = end.value

    def _pause(self) -> None:
        self._back.release()
        self._go.acquire()
        if self._is_left:
            raise Left


class Lent:
    """The engine as a guest sees it: a step is asked for, and taken with everybody's."""

    def __init__(self, engine: "Engine", pause: Callable[[], None]) -> None:
        self._engine, self._pause = engine, pause

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def step(self) -> None:
        self._pause()
