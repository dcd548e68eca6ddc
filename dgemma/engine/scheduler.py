"""The only queue: decides which tasks get memory, and which of them run in the next pass.

Passes are shared evenly, first among owners (API keys, or clients), then among an owner's requests.
The owner with the fewest admitted tasks is served next; among equals, the one who has waited
longest, then the request that came first. More tasks may be admitted than a pass takes, so that a
new request never waits for another one to end: passes then take tasks in turn.
"""

from collections import Counter
from collections.abc import Iterator
from itertools import count
from typing import Any

from dgemma.engine.request import HostTask, Request, Task

MAX_PREFILLS = 4  # chunks of prompts in one pass...
MAX_PREFILLS_WITH_CANVASES = 1  # ...and in one that canvases or AR tokens wait for
MAX_HOST_TASKS = 4  # threads for encoding and grammars...
MAX_HOST_TASKS_PER_OWNER = 2  # ...of which one owner may hold so many
OVERCOMMIT = 2  # tasks admitted per task of a full pass, at most
MAX_HOST_SECONDS = 0.2  # of a pass for its constraints, unless a single one takes longer


class Scheduler:
    """Requests in order of arrival, and the tasks of theirs that were admitted."""

    def __init__(self, max_batch_size: int, max_tokens: int) -> None:
        self.max_batch_size, self.max_tokens = max_batch_size, max_tokens
        self.requests: list[Request[Any]] = []
        self.admitted: dict[Task, Request[Any]] = {}  # in order of admission
        self.num_passes = 0
        # With their owners; those of a cancelled request too, until their thread is free.
        self.host_tasks: list[tuple[str, HostTask]] = []
        self._last_admitted: dict[str, int] = {}  # owner: number of the admission
        self._admissions = count(1)

    @property
    def num_running(self) -> int:
        """Requests of which a task was admitted."""
        return sum(request.has_started for request in self.requests)

    @property
    def num_waiting(self) -> int:
        return len(self.requests) - self.num_running

    def add(self, request: Request[Any]) -> None:
        self.requests.append(request)

    def remove(self, request: Request[Any]) -> None:
        """Forget a request and its tasks, and its owner's turn if it was the owner's last one."""
        if request in self.requests:
            self.requests.remove(request)
        for task in [task for task, owner in self.admitted.items() if owner is request]:
            del self.admitted[task]
        if all(other.owner != request.owner for other in self.requests):
            self._last_admitted.pop(request.owner, None)

    def release(self, task: Task) -> None:
        """Forget a task that is done."""
        self.admitted.pop(task).running.remove(task)

    # --- admission

    def admit(self) -> Iterator[Task]:
        """Yield tasks to start, fairest first, while the next one fits the batch and memory.

        A task that does not fit is waited for, so that small ones cannot keep it out for ever; if
        nothing else runs it is admitted whatever its size.
        """
        num_tokens = self._num_tokens()
        while (request := self._next_request()) is not None:
            task = request.waiting[0]
            assert isinstance(task, Task)
            num_tokens += task.num_tokens
            if self.admitted and num_tokens > self.max_tokens:
                return
            request.running.append(task)
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
                request.on_host.append(task)
                self._start_first(request)
                yield task

    def _start_first(self, request: Request[Any]) -> None:
        """Take the first waiting task of a request out of the queue."""
        request.waiting.popleft()
        request.has_started = True
        self._last_admitted[request.owner] = next(self._admissions)

    def _next_request(self) -> Request[Any] | None:
        """Return the request whose next task should be admitted, if one can be."""
        counts = Counter(request.owner for request in self.admitted.values())
        waiting = [r for r in self.requests if r.waiting and isinstance(r.waiting[0], Task)]
        if not waiting or len(self.admitted) >= OVERCOMMIT * self.max_batch_size:
            return None

        def turn(request: Request[Any]) -> tuple[int, int, int]:
            last = self._last_admitted.get(request.owner, -1)
            return counts[request.owner], len(request.running), last

        if len(self.admitted) < self.max_batch_size:
            return min(waiting, key=turn)
        most: Counter[str] = Counter()  # tasks of each owner's largest request
        for request in self.requests:
            most[request.owner] = max(most[request.owner], len(request.running))
        # More than a pass has: only for a request that would still hold fewer than another.
        poorer = [
            request
            for request in waiting
            if counts[request.owner] + 1 < max(counts.values())
            or len(request.running) + 1 < most[request.owner]
        ]
        return min(poorer, key=turn, default=None)

    def _num_tokens(self) -> int:
        """Count KV cache slots of all admitted tasks and of the prefixes that programs hold."""
        tasks = [t for r in self.requests for t in (*r.running, *r.waiting) if isinstance(t, Task)]
        prefixes = {id(task.prefix): task.prefix for task in tasks if task.prefix is not None}
        shared = sum(len(prefix.ids) for prefix in prefixes.values())
        return shared + sum(task.num_tokens for task in self.admitted)

    # --- passes

    def batch(self) -> list[Task]:
        """Return the tasks of the next pass: at most `max_batch_size`, and few slow ones.

        Slow are long commits, and constraints: their time on the host is that of all.
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
            task.last_pass = self.num_passes
            chosen.append(task)
        return chosen
