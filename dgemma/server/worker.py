"""The one thread that owns the engine: it lets requests in, steps, and hands out what they report.

Others talk to it through `submit` and `cancel`, which return at once. What a request reports goes
to its ticket's `deliver`, on this thread. A request leaves the engine before the pass that follows
its cancellation.
"""

import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from math import ceil
from typing import TYPE_CHECKING, Any

from dgemma.errors import UsageError
from dgemma.server.faults import ApiError, from_usage
from dgemma.server.guest import Errand, Guest
from dgemma.server.limits import Limits
from dgemma.server.metrics import Metrics
from dgemma.server.waiting import FairQueue

if TYPE_CHECKING:
    from dgemma.engine import Done, Draft, Engine, Retry, Text
    from dgemma.engine.job import Job
    from dgemma.engine.options import Plan

logger = logging.getLogger("dgemma.server")
SICK = 3  # passes that fail in a row before the server calls itself unhealthy


@dataclass(frozen=True, slots=True)
class Started:
    """The request has left the queue."""


@dataclass(frozen=True, slots=True)
class Finished:
    """The answer is complete."""

    done: "Done"
    logprobs: tuple[float, ...] | None  # of done.ids, where they were asked for
    result: Any = None  # what came of an errand


@dataclass(frozen=True, slots=True)
class Failed:
    """There will be no more of this answer."""

    error: ApiError


if TYPE_CHECKING:
    Item = Started | Text | Draft | Retry | Finished | Failed


@dataclass(eq=False, slots=True, kw_only=True)
class Ticket:
    """One answer on its way through the queue and the engine."""

    plan: "Plan | Errand"
    owner: str
    deliver: "Callable[[Item], None]"
    deadline: float  # on the clock of time.monotonic
    wants_logprobs: bool = False
    arrived: float = field(default_factory=time.monotonic)
    job: "Job | None" = None  # of a plan that runs
    guest: Guest | None = None  # of an errand that runs
    is_cancelled: bool = False
    has_text: bool = False


class Worker:
    """Runs an engine. `_lock` guards the queue and the flags; the rest is the thread's own."""

    def __init__(self, engine: "Engine", limits: Limits, metrics: Metrics) -> None:
        self.engine, self.limits, self.metrics = engine, limits, metrics
        engine.max_rows = limits.rows
        self.running: list[Ticket] = []
        self._queue: FairQueue[Ticket] = FairQueue(limits.queue)
        self._lock = threading.Condition()
        self._is_stopping = self._is_abandoned = False
        self._failures = 0  # passes in a row
        self._mean_seconds = 1.0  # of an answer, lately
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    @property
    def is_healthy(self) -> bool:
        return self._thread.is_alive() and self._failures < SICK

    @property
    def num_waiting(self) -> int:
        with self._lock:
            return len(self._queue)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """End the thread; what still runs is left unfinished."""
        with self._lock:
            self._is_stopping = True
            self._lock.notify()
        self._thread.join(timeout=10)

    def check_room(self, owner: str, count: int) -> None:
        """Refuse what the queue cannot hold."""
        with self._lock:
            has_room, waiting = self._queue.has_room(owner, count), len(self._queue)
        if not has_room:
            seconds = ceil(self._mean_seconds * waiting / self.limits.rows)
            raise ApiError(
                429,
                f"too many requests are waiting; a key may have {self.limits.queue} in the queue",
                code="queue_full",
                retry_after=min(max(seconds, 1), 60),
            )

    def submit(self, tickets: Sequence[Ticket]) -> None:
        """Queue the answers of one request, all of them or none."""
        owner = tickets[0].owner
        with self._lock:
            self.check_room(owner, len(tickets))
            for ticket in tickets:
                self._queue.push(owner, ticket)
            self._lock.notify()

    def cancel(self, tickets: Sequence[Ticket]) -> None:
        """Nobody waits for these any more."""
        with self._lock:
            for ticket in tickets:
                ticket.is_cancelled = True
            self._lock.notify()

    def abandon(self) -> None:
        """End all that waits and runs, now: the server has no more time."""
        with self._lock:
            self._is_abandoned = True
            self._lock.notify()

    def _run(self) -> None:
        while self._wait():
            try:
                self._drop()
                self._admit()
                self._step()
                self._report()
                self._visit()
            except Exception:
                # A bug here must not end the thread: whoever is affected is told, others go on.
                logger.exception("the engine thread failed")
                self._failures += 1
                for ticket in list(self.running):
                    self._end(ticket, Failed(ApiError(500, "the engine failed; try again")))
        for ticket in self.running:
            if ticket.guest is not None:
                ticket.guest.leave()  # its thread should not outlive this one

    def _wait(self) -> bool:
        """Sleep until there is something to do; False: the thread should end."""
        with self._lock:
            while not (self._queue or self.running or self._is_stopping):
                self._lock.wait()
            return not self._is_stopping

    def _drop(self) -> None:
        """Let go of who was cancelled, has waited too long, or can no longer be served."""
        now = time.monotonic()
        with self._lock:
            late = [t for t in self._queue.items() if self._is_lost(t) or t.deadline <= now]
            for ticket in late:
                self._queue.remove(ticket.owner, ticket)
        for ticket in late:
            self._let_go(ticket, f"the request waited {now - ticket.arrived:.1f} seconds in vain")
        overdue = [t for t in self.running if t.guest is not None and t.deadline <= now]
        for ticket in [t for t in self.running if self._is_lost(t) or t in overdue]:
            self._take_out(ticket)
            self._let_go(ticket, "the answer was cut off")

    def _is_lost(self, ticket: Ticket) -> bool:
        return ticket.is_cancelled or self._is_abandoned

    def _let_go(self, ticket: Ticket, what: str) -> None:
        if ticket.is_cancelled:
            self.metrics.cancelled.inc()
            return
        reason = "the server is stopping" if self._is_abandoned else "its time ran out"
        code = "draining" if self._is_abandoned else "timeout"
        error = ApiError(503, f"{what}: {reason}; try again", code=code, retry_after=5)
        self._deliver(ticket, Failed(error))

    def _admit(self) -> None:
        """Take from the queue while there are rows, and memory for what the next one may need."""
        while len(self.running) < self.limits.rows:
            with self._lock:
                ticket = self._queue.peek()
                if ticket is None or not self._fits(ticket):
                    break
                self._queue.pop()
            try:
                self._let_in(ticket)
            except Exception as error:  # a grammar that cannot be begun, say; nobody else's fault
                self._deliver(ticket, Failed(_told(error)))
                continue
            self.running.append(ticket)
            self._deliver(ticket, Started())
        self.metrics.queued.set(self.num_waiting)
        self.metrics.running.set(len(self.running))

    def _let_in(self, ticket: Ticket) -> None:
        plan = ticket.plan
        if isinstance(plan, Errand):
            ticket.guest = Guest(self.engine, plan, lambda event: self._deliver(ticket, event))
            return
        left = max(ticket.deadline - time.monotonic(), 1e-3)
        options = replace(plan.options, max_seconds=left)
        ticket.job = self.engine.submit(replace(plan, options=options))

    def _fits(self, ticket: Ticket) -> bool:
        taken = sum(other.plan.room for other in self.running)
        return not self.running or taken + ticket.plan.room <= self.limits.tokens

    def _step(self) -> None:
        if not self.running:
            return
        try:
            self.engine.step()
            self._failures = 0
        except Exception:
            logger.exception("a pass failed; its rows are tried one by one")
            self.metrics.failed_passes.inc()
            self._failures += 1
            self._step_apart()

    def _step_apart(self) -> None:
        """Step each row alone: a failed pass has committed nothing, so those that can, go on."""
        engine, kept = self.engine, []
        begun, fresh = list(engine.jobs), list(engine.waiting)
        engine.waiting.clear()
        for job in begun + fresh:
            engine.jobs = [job] if job in begun else []
            engine.waiting.extend([job] if job in fresh else [])
            try:
                if job in begun and not job.cache.is_consistent:
                    raise RuntimeError("the failed pass left this request's cache torn")
                engine.step()
                kept += engine.jobs
                self._failures = 0
            except Exception as error:
                job.error = error
            engine.waiting.clear()
        engine.jobs = kept

    def _report(self) -> None:
        """Hand out what the pass has brought."""
        from dgemma.engine import Done

        for ticket in list(self.running):
            job = ticket.job
            if job is None:
                continue
            while job.events:
                event = job.events.popleft()
                if isinstance(event, Done):
                    self._finish(ticket, event)
                else:
                    self._note_text(ticket, event)
                    self._deliver(ticket, event)
            if job.error is not None:
                logger.error("a request failed in the engine", exc_info=job.error)
                self._end(ticket, Failed(ApiError(500, "the engine failed on this request")))

    def _visit(self) -> None:
        """Let each errand go on from the pass it has waited for."""
        for ticket in [ticket for ticket in self.running if ticket.guest is not None]:
            guest = ticket.guest
            assert guest is not None
            guest.resume()
            if guest.outcome is not None:
                done, result = guest.outcome
                self._count(ticket, done)
                self._end(ticket, Finished(done, None, result))
            elif guest.is_over:
                self._end(ticket, Failed(_told(guest.error)))

    def _note_text(self, ticket: Ticket, event: "Item") -> None:
        from dgemma.engine import Text

        if not ticket.has_text and isinstance(event, Text):
            ticket.has_text = True
            self.metrics.first_block.observe(time.monotonic() - ticket.arrived)

    def _finish(self, ticket: Ticket, done: "Done") -> None:
        self._count(ticket, done)
        if done.finish == "fault":
            error = ApiError(500, f"the model failed on this request: {done.fault}", code="fault")
            self._end(ticket, Failed(error))
            return
        try:
            logprobs = self._logprobs(ticket, done) if ticket.wants_logprobs else None
        except Exception:
            logger.exception("log-probabilities failed")
            self._end(ticket, Failed(ApiError(500, "the log-probabilities could not be computed")))
            return
        self._end(ticket, Finished(done, logprobs))

    def _count(self, ticket: Ticket, done: "Done") -> None:
        self.metrics.count(done, time.monotonic() - ticket.arrived)
        self._mean_seconds += 0.1 * (done.seconds - self._mean_seconds)

    def _logprobs(self, ticket: Ticket, done: "Done") -> tuple[float, ...]:
        """Causal log-probabilities of the reply: known in AR, else a pass over prompt and reply."""
        from dgemma.engine.score import score

        if done.mode == "ar":
            return done.logprobs[: len(done.ids)]
        if not done.ids or isinstance(ticket.plan, Errand):
            return ()
        return score(self.engine.backend, ticket.plan.prompt.ids, [done.ids])[0].logprobs

    def _end(self, ticket: Ticket, last: Finished | Failed) -> None:
        self._take_out(ticket)
        self._deliver(ticket, last)

    def _take_out(self, ticket: Ticket) -> None:
        self.running.remove(ticket)
        if ticket.job is not None:
            self.engine.cancel(ticket.job)
        if ticket.guest is not None:
            ticket.guest.leave()
        self.metrics.prefix_bytes.set(self.engine.prefixes.num_bytes)
        self.metrics.prefixes.set(len(self.engine.prefixes))
        self.metrics.running.set(len(self.running))

    def _deliver(self, ticket: Ticket, item: "Item") -> None:
        try:
            ticket.deliver(item)
        except RuntimeError:  # its event loop is closed: nobody will read it
            ticket.is_cancelled = True


def _told(error: Exception | None) -> ApiError:
    """Why an errand failed, as its client may know it."""
    if isinstance(error, UsageError):
        return from_usage(error)
    logger.error("a request failed in the engine", exc_info=error)
    return ApiError(500, "the engine failed on this request")
