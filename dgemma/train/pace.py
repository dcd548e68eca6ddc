"""How many steps fit into a given time: measured once, when the run is warm."""

import time
from collections.abc import Callable

# Steps before the clock starts and while it runs; fewer where they take long, since the count
# should stand while most of the time is still ahead.
WARM, TIMED, LEAST = 30, 60, 2
WARM_SHARE, TIMED_SHARE = 0.05, 0.1


class Pace:
    """Counts steps until the speed is known. `first` and `mark` change."""

    def __init__(
        self, seconds: float, spent: float, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        """`spent`: seconds that the run has taken before now."""
        self.seconds, self.clock = seconds, clock
        self.began = clock() - spent
        self.first: tuple[int, float] | None = None
        self.mark: tuple[int, float] | None = None

    def steps(self, step: int, wait: Callable[[], None]) -> int:
        """After a step: how many the run will have in all, once that is known; else 0.

        `wait` returns when the device has done all it was given.
        """
        if self.first is None:
            self.first = step, self.clock()
        elif self.mark is None:
            if self._is_time(step, self.first, WARM, WARM_SHARE):
                wait()
                self.mark = step, self.clock()
        elif self._is_time(step, self.mark, TIMED, TIMED_SHARE):
            wait()
            each = (self.clock() - self.mark[1]) / (step - self.mark[0])
            left = self.seconds - (self.clock() - self.began)
            return step + max(1, int(left / each))
        return 0

    def _is_time(self, step: int, since: tuple[int, float], steps: int, share: float) -> bool:
        taken, elapsed = step - since[0], self.clock() - since[1]
        return taken >= steps or (taken >= LEAST and elapsed > share * self.seconds)
