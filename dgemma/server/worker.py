"""The thread that owns the engine: it steps, and passes events to the event loop.

The event loop calls `submit`, `cancel` and `abandon`, which return immediately. The queue is the
engine's scheduler; this module holds only requests that arrived since the last pass. An error in
the engine, in clean-up or in delivery fails the request it belongs to and never ends this thread;
if the thread ends nevertheless, all waiting requests fail at once.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from math import ceil, inf
from typing import TYPE_CHECKING, Any, TypeAlias

from dgemma.server.errors import ApiError
from dgemma.server.limits import Limits
from dgemma.server.metrics import Metrics

if TYPE_CHECKING:
    from dgemma.engine import Committed, Draft, Engine, Retry, Text
    from dgemma.engine.request import Request as EngineRequest

    # None: the request left the queue. The request itself: it ended, with a result or an error.
    Item: TypeAlias = Text | Committed | Draft | Retry | EngineRequest[Any] | None
    Deliver: TypeAlias = Callable[[Item], None]  # called in the engine's thread

logger = logging.getLogger("dgemma.server")
MAX_FAILURES = 3  # consecutive failed passes before the server is unhealthy
MAX_RETRY_AFTER = 60  # seconds
THREAD_ENDED = "the engine thread has ended; restart the server"


class Worker:
    """Runs an engine. `_lock` guards the live requests, which both threads use."""

    def __init__(self, engine: "Engine", limits: Limits, metrics: Metrics) -> None:
        from dgemma.engine.core import EngineHooks

        self.engine, self.limits, self.metrics = engine, limits, metrics
        engine.set_limits(max_batch_size=limits.max_batch_size, max_tokens=limits.max_context)
        # Mode auto needs both modes timed, which takes seconds: done when idle.
        self._needs_costs = threading.Event()
        self._live: dict[EngineRequest[Any], Deliver] = {}
        # Those whose start, and whose first text, is not yet reported.
        self._unreported: set[EngineRequest[Any]] = set()
        self._without_text: set[EngineRequest[Any]] = set()
        # Work for the thread from the event loop; `_woken` wakes it.
        self._inbox: deque[Callable[[], None]] = deque()
        self._woken, self._lock = threading.Event(), threading.RLock()
        self._is_stopping, self._is_abandoned = threading.Event(), threading.Event()
        self._has_ended = threading.Event()
        hooks = EngineHooks(
            on_host_task_done=self._woken.set, on_missing_costs=self._needs_costs.set
        )
        engine.set_hooks(hooks)
        self._step_started: float | None = None
        self._mean_seconds = 1.0  # moving average of an answer
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    # --- called by the event loop

    @property
    def fault(self) -> str:
        """Reason why the engine cannot serve, or an empty string."""
        if self._has_ended.is_set():
            return THREAD_ENDED
        started, most = self._step_started, self.limits.max_pass_seconds
        if started is not None and time.monotonic() - started > most:
            return f"a pass has taken over {most:g} seconds; restart the server"
        if self.engine.num_consecutive_failures >= MAX_FAILURES:
            return f"the last {MAX_FAILURES} passes failed; restart the server"
        return ""

    @property
    def num_running(self) -> int:
        with self._lock:
            return sum(request.has_started for request in self._live)

    @property
    def num_waiting(self) -> int:
        with self._lock:
            return sum(not request.has_started for request in self._live)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """End the thread and abandon running requests."""
        self._is_stopping.set()
        self._woken.set()
        self._thread.join(timeout=10)

    def check_room(self, owner: str, count: int) -> None:
        """Refuse requests beyond the queue limit, and all requests once the thread has ended."""
        if self._has_ended.is_set():
            raise ApiError(500, THREAD_ENDED)
        with self._lock:
            waiting = [request.owner for request in self._live if not request.has_started]
        most = self.limits.max_queue
        if waiting.count(owner) + count > most:
            seconds = ceil(self._mean_seconds * len(waiting) / self.limits.max_batch_size)
            retry_after = min(max(seconds, 1), MAX_RETRY_AFTER)
            sentence = f"too many requests are waiting; a key may have {most} in the queue"
            raise ApiError(429, sentence, code="queue_full", retry_after=retry_after)

    def submit(self, requests: "dict[EngineRequest[Any], Deliver]") -> None:
        """Queue the answers of one HTTP request, all or none."""
        with self._lock:
            self.check_room(next(iter(requests)).owner, len(requests))
            self._live.update(requests)
            self._unreported.update(requests)
            self._without_text.update(requests)
        self._inbox.extend(partial(self._guard, request, self.engine.add) for request in requests)
        self._woken.set()

    def cancel(self, requests: "Sequence[EngineRequest[Any]]") -> None:
        """Cancel requests."""
        self._inbox.extend(partial(self._cancel, request) for request in requests)
        self._woken.set()

    def abandon(self) -> None:
        """End all waiting and running requests now: the server has no time left."""
        self._is_abandoned.set()
        self._woken.set()

    # --- the thread

    def _run(self) -> None:
        try:
            while self._wait():
                self._receive()
                self._step()
                self._report()
                if self._needs_costs.is_set() and not self.num_running + self.num_waiting:
                    self._measure()
        except BaseException:
            logger.exception("the engine thread ended")
        finally:
            with self._lock:
                self._has_ended.set()
                live = list(self._live)
            for request in live:
                self._fail(request, ApiError(500, THREAD_ENDED))

    def _measure(self) -> None:
        """Time both modes for mode auto; arriving requests wait for some seconds."""
        self._needs_costs.clear()  # even if it fails: the next request asks again
        try:
            self.engine.measure_break_even()
        except Exception:
            logger.exception("mode auto could not be timed; it remains diffusion")

    def _wait(self) -> bool:
        """Sleep until there is work; False: end the thread."""
        with self._lock:
            deadline = min((request.deadline for request in self._live), default=inf)
        # The engine ends requests past their deadline.
        self._woken.wait(None if deadline == inf else max(deadline - time.monotonic(), 0))
        self._woken.clear()
        return not self._is_stopping.is_set()

    def _receive(self) -> None:
        """Pass new and cancelled requests to the engine."""
        while self._inbox:
            self._inbox.popleft()()
        with self._lock:
            abandoned = list(self._live) if self._is_abandoned.is_set() else []
        for request in abandoned:
            stopping = "the server is stopping; try again"
            self._fail(request, ApiError(503, stopping, code="draining", retry_after=5))

    def _cancel(self, request: "EngineRequest[Any]") -> None:
        if self._forget(request) is not None:
            self.metrics.cancelled.inc()
        self._guard(request, self.engine.cancel)

    def _step(self) -> None:
        failed = self.engine.num_failed_passes
        self._step_started = time.monotonic()
        try:
            if self.engine.step():
                self._woken.set()
        except Exception:  # a bug in the engine: any request may be affected
            logger.exception("a step of the engine failed")
            self.engine.fail_all(ApiError(500, "the engine failed; try again"))
        finally:
            self._step_started = None
        self.metrics.failed_passes.inc(self.engine.num_failed_passes - failed)

    def _report(self) -> None:
        """Deliver the events of the last pass."""
        with self._lock:
            live = list(self._live)
        for request in live:
            self._guard(request, self._report_request)
        scheduler, prefixes = self.engine.scheduler, self.engine.prefixes
        self.metrics.queued.set(scheduler.num_waiting)
        self.metrics.running.set(scheduler.num_running)
        self.metrics.prefix_bytes.set(prefixes.num_bytes)
        self.metrics.prefixes.set(len(prefixes))

    def _report_request(self, request: "EngineRequest[Any]") -> None:
        from dgemma.engine import Done, Text

        deliver = self._live[request]
        is_new = (request.has_started or request.is_over) and request in self._unreported
        if is_new and request.error is None:  # else the status tells the error
            self._unreported.discard(request)
            deliver(None)
        while request.events:
            event = request.events.popleft()
            if isinstance(event, Text) and request in self._without_text:
                self._without_text.discard(request)
                self.metrics.first_block.observe(time.monotonic() - request.arrived)
            if not isinstance(event, Done):  # Done is the result
                deliver(event)
        if request.is_over and not request.is_cancelled:
            self._finish(request)

    def _finish(self, request: "EngineRequest[Any]") -> None:
        from dgemma.engine import Done

        result = request.result
        if request.error is None and isinstance(result, Done):
            self.metrics.count(result, time.monotonic() - request.arrived)
            self._mean_seconds += 0.1 * (result.seconds - self._mean_seconds)
        self._end(request)

    def _guard(
        self, request: "EngineRequest[Any]", action: "Callable[[EngineRequest[Any]], None]"
    ) -> None:
        """Run a function for a request; an error fails only that request."""
        try:
            action(request)
        except Exception:
            logger.exception("a request failed between two passes")
            self._fail(request, ApiError(500, "the engine failed on this request"))

    def _fail(self, request: "EngineRequest[Any]", error: ApiError) -> None:
        """End a request with an error, in any state."""
        request.fail(error)
        try:
            try:
                self._end(request)
            finally:
                self.engine.cancel(request)
        except Exception:
            logger.exception("the clean-up of a failed request failed")

    def _end(self, request: "EngineRequest[Any]") -> None:
        """Report the end of a request and remove it."""
        deliver = self._forget(request)
        if deliver is not None:
            deliver(request)

    def _forget(self, request: "EngineRequest[Any]") -> "Deliver | None":
        with self._lock:
            self._unreported.discard(request)
            self._without_text.discard(request)
            return self._live.pop(request, None)
