"""The scheduler: one queue, admission to KV memory, and the batch of the next pass.

Passes are shared fairly, first among owners (API keys or clients), then among an owner's requests.
The owner with the fewest admitted tasks is served next; ties go to the owner that has waited
longest, then to the oldest request. More tasks may be admitted than fit into a pass, so that a new
request need not wait for another one to finish: tasks then take turns.
"""

from collections import Counter
from collections.abc import Iterator
from itertools import count
from typing import Any

from dgemma.engine.request import HostTask, Request, Task

MAX_PREFILLS = 4  # prefill chunks in a pass...
MAX_PREFILLS_WITH_CANVASES = 1  # ...and in a pass with canvases or AR tokens
MAX_HOST_TASKS = 4  # threads for encoding and grammars...
MAX_HOST_TASKS_PER_OWNER = 2  # ...and the most of one owner
OVERCOMMIT = 2  # admitted tasks, relative to a full pass
MAX_HOST_SECONDS = 0.2  # constraint time of a pass, unless a single one exceeds it


class Scheduler:
    """Requests in order of arrival, and their admitted tasks."""

    def __init__(self, max_batch_size: int, max_tokens: int) -> None:
        self.max_batch_size, self.max_tokens = max_batch_size, max_tokens
        self.requests: list[Request[Any]] = []
        self.admitted: dict[Task, Request[Any]] = {}  # in order of admission
        self.num_passes = 0
        # With their owners; a cancelled request's stay until their thread is free.
        self.host_tasks: list[tuple[str, HostTask]] = []
        self._last_admitted: dict[str, int] = {}  # by owner: sequence number of the admission
        self._admissions = count(1)

    def set_limits(self, *, max_batch_size: int | None, max_tokens: int | None) -> None:
        """Set the tasks of a pass and the KV slots of all tasks; None: leave it."""
        if max_batch_size is not None:
            self.max_batch_size = max_batch_size
        if max_tokens is not None:
            self.max_tokens = max_tokens

    @property
    def num_running(self) -> int:
        """Number of requests with an admitted task."""
        return sum(request.has_started for request in self.requests)

    @property
    def num_waiting(self) -> int:
        return len(self.requests) - self.num_running

    def add(self, request: Request[Any]) -> None:
        self.requests.append(request)

    def remove(self, request: Request[Any]) -> None:
        """Remove a request and its tasks, and its owner after the owner's last request."""
        if request in self.requests:
            self.requests.remove(request)
        for task in [task for task, owner in self.admitted.items() if owner is request]:
            del self.admitted[task]
        if all(other.owner != request.owner for other in self.requests):
            self._last_admitted.pop(request.owner, None)

    def release(self, task: Task) -> None:
        """Remove a finished task."""
        self.admitted.pop(task).drop(task)

    # --- admission

    def admit(self) -> Iterator[Task]:
        """Yield tasks to start, fairest first, while the next one fits batch and memory.

        A task that does not fit blocks the queue, so that smaller tasks cannot starve it. A task
        that would run alone is admitted whatever its size.
        """
        num_tokens = self._num_tokens()
        while (request := self._next_request()) is not None:
            task = request.waiting[0]
            assert isinstance(task, Task)
            num_tokens += task.num_tokens
            if self.admitted and num_tokens > self.max_tokens:
                return
            self._start_first(request)
            self.admitted[task] = request
            yield task

    def admit_host(self) -> Iterator[HostTask]:
        """Yield host tasks to start."""
        self.host_tasks = [(owner, task) for owner, task in self.host_tasks if not task.is_done]
        running = Counter(owner for owner, _ in self.host_tasks)
        for request in sorted(self.requests, key=lambda r: self._last_admitted.get(r.owner, -1)):
            while request.waiting and isinstance(task := request.waiting[0], HostTask):
                is_full = running.total() >= MAX_HOST_TASKS
                if is_full or running[request.owner] >= MAX_HOST_TASKS_PER_OWNER:
                    break
                running[request.owner] += 1
                self.host_tasks.append((request.owner, task))
                self._start_first(request)
                yield task

    def _start_first(self, request: Request[Any]) -> None:
        """Start the first waiting task of a request, and put its owner last."""
        request.start_first()
        self._last_admitted[request.owner] = next(self._admissions)

    def _next_request(self) -> Request[Any] | None:
        """Return the request whose next task is to be admitted, if there is one."""
        counts = Counter(request.owner for request in self.admitted.values())
        waiting = [r for r in self.requests if r.waiting and isinstance(r.waiting[0], Task)]
        if not waiting or len(self.admitted) >= OVERCOMMIT * self.max_batch_size:
            return None

        def turn(request: Request[Any]) -> tuple[int, int, int]:
            last = self._last_admitted.get(request.owner, -1)
            return counts[request.owner], len(request.running), last

        if len(self.admitted) < self.max_batch_size:
            return min(waiting, key=turn)
        most: Counter[str] = Counter()  # by owner: tasks of its largest request
        for request in self.requests:
            most[request.owner] = max(most[request.owner], len(request.running))
        # Beyond a full pass, admit only for a request with fewer tasks than another one.
        poorer = [
            request
            for request in waiting
            if counts[request.owner] + 1 < max(counts.values())
            or len(request.running) + 1 < most[request.owner]
        ]
        return min(poorer, key=turn, default=None)

    def _num_tokens(self) -> int:
        """Count KV slots of all admitted tasks and of the prefixes held by programs."""
        tasks = [t for r in self.requests for t in (*r.running, *r.waiting) if isinstance(t, Task)]
        prefixes = {id(task.prefix): task.prefix for task in tasks if task.prefix is not None}
        shared = sum(len(prefix.ids) for prefix in prefixes.values())
        return shared + sum(task.num_tokens for task in self.admitted)

    # --- passes

    def batch(self) -> list[Task]:
        """Return the tasks of the next pass: at most `max_batch_size`, and few slow ones.

        Slow are long commits, and constraints, since all others wait for their host time.
        """
        self.num_passes += 1
        num_chunks = sum(task.has_long_commit for task in self.admitted)
        is_mixed = num_chunks < len(self.admitted)
        chunks_left = MAX_PREFILLS_WITH_CANVASES if is_mixed else MAX_PREFILLS
        counts: Counter[str] = Counter()
        by_request: Counter[int] = Counter()

        def turn(task: Task) -> tuple[int, int, int]:
            request = self.admitted[task]
            return counts[request.owner], by_request[id(request)], task.last_pass

        chosen: list[Task] = []
        seconds = 0.0
        waiting = list(self.admitted)
        while waiting and len(chosen) < self.max_batch_size:
            task = min(waiting, key=turn)
            waiting.remove(task)
            if task.has_long_commit:
                if chunks_left == 0:
                    continue
                chunks_left -= 1
            if task.host_seconds > 0:
                if seconds > 0 and seconds + task.host_seconds > MAX_HOST_SECONDS:
                    continue
                seconds += task.host_seconds
            request = self.admitted[task]
            counts[request.owner] += 1
            by_request[id(request)] += 1
            task.join(self.num_passes)
            chosen.append(task)
        return chosen
