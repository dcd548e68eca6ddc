"""The step loop: advance all requests together, one forward pass at a time.

The caller that follows one request drives the others too. Requests join and leave between passes.
An error ends only the request that caused it; a failed pass is repeated task by task. This module
does not know text.
"""

import logging
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from math import inf
from traceback import format_exception
from typing import Any, TypedDict, TypeVar, cast

import torch

from dgemma.backends.base import ForwardInput
from dgemma.backends.choose import choose_backend
from dgemma.cpu_threads import spin_control
from dgemma.device import empty_cache, usable_memory
from dgemma.engine.image_features import ImageFeatures
from dgemma.engine.prefix_cache import PrefixStore
from dgemma.engine.request import Prefix, Program, Request, Task
from dgemma.engine.scheduler import MAX_HOST_TASKS, OVERCOMMIT, Scheduler
from dgemma.errors import DeadlineExceeded, DgemmaError
from dgemma.model.gemma import Gemma
from dgemma.model.kv_cache import SEGMENT, Capacity, KVCache

MAX_BATCH_SIZE = 16  # tasks in one pass
MAX_TOKENS = 1 << 24  # KV slots of all running tasks; a library is limited by memory only
# Chunk by the GPU's memory in bytes. In 16 bits a reused prefix is cut to a multiple of it, so
# that small chunks reuse more and large ones prefill faster.
GPU_CHUNKS = ((20e9, 1024), (0, SEGMENT))
CPU_CHUNK_16 = 128
PREFIX_BYTES = 2 << 30  # default prefix-cache size, bytes
PREFIX_FRACTION = 0.05  # cap, as a fraction of GPU memory

T = TypeVar("T")
ScheduledTask = tuple[Task, list[ForwardInput]]
logger = logging.getLogger("dgemma")


class CoreArgs(TypedDict, total=False):
    """Keyword arguments of `EngineCore`."""

    images: ImageFeatures | None  # None: the checkpoint has no image tower
    max_batch_size: int  # tasks in one pass
    prefix_bytes: int | None  # of the prefix cache; None: by the device


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineHooks:
    """Functions that an engine calls for the thread that steps it."""

    on_host_task_done: Callable[[], None] = lambda: None  # called in the host task's thread
    # A request needs costs of both modes that are not measured; None: measure them at once.
    on_missing_costs: Callable[[], None] | None = None


class EngineCore:
    """Runs tasks. Holds the scheduler, the prefix cache and the failure counters."""

    def __init__(
        self,
        model: Gemma,
        *,
        images: ImageFeatures | None = None,
        max_batch_size: int = MAX_BATCH_SIZE,
        prefix_bytes: int | None = None,
    ) -> None:
        weight = model.embed_tokens.weight
        self.model, self.device, self.dtype = model, weight.device, weight.dtype
        self.backend = choose_backend(model)
        self.scheduler = Scheduler(min(max_batch_size, self.backend.max_batch_size), MAX_TOKENS)
        self.chunk = prefill_chunk(self.device, self.dtype)
        empty_cache(self.device)  # release what loading and the self-test allocated
        max_bytes = prefix_capacity(self.device) if prefix_bytes is None else prefix_bytes
        # In 16 bits, reuse only prefixes that end where a fresh prompt is cut: equal answers.
        self.prefixes = PrefixStore(max_bytes, 1 if self.dtype == torch.float32 else self.chunk)
        self.images = images
        self.num_failed_passes = 0
        self.num_consecutive_failures = 0
        self.hooks = EngineHooks()
        self._host = ThreadPoolExecutor(MAX_HOST_TASKS, thread_name_prefix="host")

    @property
    def max_batch_size(self) -> int:
        return self.scheduler.max_batch_size

    def set_limits(
        self,
        *,
        max_batch_size: int | None = None,
        max_tokens: int | None = None,
        prefix_bytes: int | None = None,
    ) -> None:
        """Set the batch size, the KV slots of all tasks, and the size of the prefix cache."""
        if max_batch_size is not None:
            max_batch_size = min(max_batch_size, self.backend.max_batch_size)
        self.scheduler.set_limits(max_batch_size=max_batch_size, max_tokens=max_tokens)
        if prefix_bytes is not None:
            self.prefixes.resize(prefix_bytes)

    def set_hooks(self, hooks: EngineHooks) -> None:
        """Set what the thread that steps the engine is told."""
        self.hooks = hooks

    # --- KV caches of tasks

    def open_cache(self, ids: Sequence[int], num_tokens: int) -> KVCache:
        """Return a KV cache of `num_tokens` slots, with the longest cached prefix of `ids`.

        `ids` identify what the keys are computed from (`Prompt.cache_ids`).
        """
        segment = self.chunk + self.model.config.canvas_length
        capacity = Capacity(tokens=num_tokens, segment=segment)
        cached = self.prefixes.take(ids, capacity)
        return cached or KVCache(self.model.config, capacity, self.dtype, self.device)

    def keep(self, prefix: Prefix) -> None:
        """Hand a program's prefix to the prefix cache."""
        cache = prefix.cache
        if not prefix.forks:
            cache.end_sharing()
        with _logged("a shared prefix could not be kept"):
            if cache.is_consistent and cache.length == len(prefix.ids) - 1:
                self.prefixes.keep(prefix.cache_ids[:-1], cache)

    # --- requests

    def submit(
        self, program: Program[Any] | Task, *, owner: str = "", deadline: float = inf
    ) -> Request[Any]:
        """Queue a program or a task; its events collect in the returned request."""
        request: Request[Any] = Request(program, owner=owner, deadline=deadline)
        self.add(request)
        return request

    def add(self, request: Request[Any]) -> None:
        """Queue a request and run its program up to its first tasks."""
        self.scheduler.add(request)
        self._resume(request)

    def cancel(self, request: Request[Any]) -> None:
        """Remove a request; its committed tokens go to the prefix cache."""
        request.cancel()
        self._remove(request)

    def fail_all(self, error: Exception) -> None:
        """End all requests after a step that failed outside of a pass."""
        self.num_consecutive_failures += 1
        for request in list(self.scheduler.requests):
            with _logged("the clean-up of a failed request failed"):
                self._fail(request, error)

    def run(self, program: Program[T]) -> T:
        """Run a program to its end together with all other requests; return its result."""
        return self.run_all([program])[0]

    def run_all(self, programs: "Iterable[Program[T] | Task]") -> list[T]:
        """Run several programs together; the first error ends all of them."""
        results = dict(self.as_completed(programs))
        return [results[index] for index in sorted(results)]

    def as_completed(
        self, programs: "Iterable[Program[T] | Task]"
    ) -> Generator[tuple[int, T], None, None]:
        """Run several programs together; yield the index and result of each as it finishes.

        No more are queued than the scheduler could admit, so `programs` may be a long iterator.
        """
        queue = enumerate(programs)
        running: dict[int, Request[Any]] = {}
        try:
            while True:
                num_free = OVERCOMMIT * self.max_batch_size - len(running)
                for index, program in islice(queue, max(num_free, 0)):
                    running[index] = self.submit(program)
                if not running:
                    return
                if not any(request.is_over for request in running.values()):
                    self._step_or_wait()
                for index in [i for i, request in running.items() if request.is_over]:
                    request = running.pop(index)
                    request.raise_error()
                    yield index, cast(T, request.result)
        finally:
            for request in running.values():
                self.cancel(request)

    def follow(self, program: Program[Any] | Task) -> Generator[Any, None, None]:
        """Run a program and yield its events; closing the iterator cancels it.

        The events of a generation end with `Done`, those of a program with its result.
        """
        request = self.submit(program)
        try:
            while not request.is_over:
                self._step_or_wait()
                while request.events:
                    yield request.events.popleft()
            yield from request.events
            request.raise_error()
            if request.plain_task is None:
                yield request.result
        finally:
            self.cancel(request)

    # --- passes

    def step(self) -> bool:
        """Run one pass: advance admitted tasks, drop finished ones, admit waiting ones.

        Returns False if all requests wait for host tasks.
        """
        self._expire()
        for host_task in self.scheduler.admit_host():
            host_task.start(self._host, self.hooks.on_host_task_done)
        for task in self.scheduler.admit():
            self._start(task)
        batch = self.scheduler.batch()
        self._run_pass(batch)
        has_moved = bool(batch)
        for request in list(self.scheduler.requests):
            request.drop_done()
            if request.is_ready:
                self._resume(request)
                has_moved = True
        return has_moved

    def _step_or_wait(self) -> None:
        """Run a pass, or wait for a host task if there is nothing to run."""
        if self.step():
            return
        # Include cancelled requests: a host task may wait for their threads.
        futures = [task.future for _, task in self.scheduler.host_tasks]
        deadlines = [request.deadline for request in self.scheduler.requests]
        left = min(deadlines, default=inf) - time.monotonic()
        timeout = None if left == inf else max(left, 0)
        wait([f for f in futures if f is not None], timeout, return_when=FIRST_COMPLETED)

    def _expire(self) -> None:
        """Fail requests past their deadline; a running generation ends itself with its draft."""
        now = time.monotonic()
        for request in [r for r in self.scheduler.requests if r.deadline <= now]:
            if request.plain_task is None or not request.running:
                waited = now - request.arrived
                self._fail(request, DeadlineExceeded(waited, has_started=request.has_started))

    def _start(self, task: Task) -> None:
        request = self.scheduler.admitted[task]
        is_plain = request.plain_task is task  # a program ends as a whole
        with self._failing(request):
            task.start(self, request.deadline if is_plain else inf)
            if task.is_done:  # for example a cached prefix, or a grammar with no text that fits
                self._end_task(task)

    def _run_pass(self, batch: Sequence[Task]) -> None:
        """Run tasks together; if the pass fails, one by one, to isolate the failure."""
        inputs = [(task, self._inputs(task)) for task in batch]
        # A failing task ends its request, and with it tasks already collected.
        tasks = [scheduled for scheduled in inputs if scheduled[0] in self.scheduler.admitted]
        if not tasks:
            return
        error = self._try_pass(tasks)
        if error is None:
            return
        self.num_failed_passes += 1
        self.num_consecutive_failures += 1
        if len(tasks) == 1:
            self._fail(self.scheduler.admitted[tasks[0][0]], error)
            return
        logger.error("a pass failed; its tasks are run one by one", exc_info=error)
        del error
        empty_cache(self.device)
        for scheduled in tasks:
            request = self.scheduler.admitted.get(scheduled[0])
            if request is not None and (error := self._try_pass([scheduled])) is not None:
                self._fail(request, error)

    def _inputs(self, task: Task) -> list[ForwardInput]:
        if (request := self.scheduler.admitted.get(task)) is not None:  # else it has failed
            with self._failing(request):
                return task.inputs()
        return []

    def _try_pass(self, tasks: Sequence[ScheduledTask]) -> Exception | None:
        """Run a pass and distribute its outputs; return the error if it failed.

        A failed pass has committed nothing.
        """
        inputs = [given for _, inputs in tasks for given in inputs]
        if self.device.type == "cpu":
            spin_control().update()
        try:
            if not all(given.cache.is_consistent for given in inputs):
                raise RuntimeError("a failed pass left this request's KV cache inconsistent")
            outputs = self.backend.run(inputs)
        except Exception as error:
            return without_frames(error)
        self.num_consecutive_failures = 0
        for task, inputs in tasks:
            task_outputs, outputs = outputs[: len(inputs)], outputs[len(inputs) :]
            request = self.scheduler.admitted.get(task)
            if request is not None:  # else it failed in this pass
                with self._failing(request):
                    task.process(inputs, task_outputs)
                    request.collect(task)
                    if task.is_done:
                        self._end_task(task)
        return None

    # --- ends

    @contextmanager
    def _failing(self, request: Request[Any]) -> Iterator[None]:
        """End the request that raised an error inside this context."""
        try:
            yield
        except Exception as error:
            self._fail(request, error)

    def _end_task(self, task: Task) -> None:
        self.scheduler.admitted[task].collect(task)
        self.scheduler.release(task)
        self._close(task)

    def _close(self, task: Task) -> None:
        """Release a task's memory. An error here fails no request."""
        with _logged("the KV cache of a finished task could not be kept"):
            task.close(self)

    def _resume(self, request: Request[Any]) -> None:
        with self._failing(request):
            request.resume()
            if request.is_over:
                self._remove(request)

    def _fail(self, request: Request[Any], error: Exception) -> None:
        if not request.is_over:
            request.fail(without_frames(error))
        self._remove(request)

    def _remove(self, request: Request[Any]) -> None:
        """Remove a request and its tasks; idempotent."""
        running = request.release()
        self.scheduler.remove(request)
        for task in running:
            self._close(task)
        with _logged("a program failed while it was closed"):
            request.close()


def without_frames(error: Exception) -> Exception:
    """Replace an error's traceback by a note: its frames would keep a pass's tensors alive."""
    if error.__traceback__ is not None and not isinstance(error, DgemmaError):
        error.add_note("".join(format_exception(error)))
    error.__traceback__ = error.__cause__ = error.__context__ = None
    return error


@contextmanager
def _logged(message: str) -> Iterator[None]:
    """Log an error without failing a request."""
    try:
        yield
    except Exception as error:
        logger.error(message, exc_info=without_frames(error))


def prefix_capacity(device: torch.device) -> int:
    """Default size of the prefix cache in bytes."""
    if device.type != "cuda":
        return PREFIX_BYTES
    return min(PREFIX_BYTES, int(PREFIX_FRACTION * usable_memory(device)))


def prefill_chunk(device: torch.device, dtype: torch.dtype) -> int:
    """Prompt tokens committed per pass; prompts are always cut at multiples of it."""
    if device.type != "cuda":
        return SEGMENT if dtype == torch.float32 else CPU_CHUNK_16
    memory = usable_memory(device)
    return next(chunk for least, chunk in GPU_CHUNKS if memory >= least)
