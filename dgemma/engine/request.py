"""Requests: a program, its unfinished tasks, its events and its result.

A *task* is work that runs in passes: a generated reply, a prefill, a scoring. A *program* is a
generator that yields tasks (and events) and receives the tasks' results. A plain generation is the
program of one task. The step loop advances programs; programs never step the engine. So all
requests share passes, and each can be cancelled between two passes.
"""

import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Executor, Future
from dataclasses import dataclass, field, replace
from math import inf
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar
from weakref import WeakSet

from dgemma.backends.base import ForwardInput, ForwardOutput, ImageRows
from dgemma.engine.events import Draft, Event
from dgemma.engine.image_features import chunk_end
from dgemma.engine.params import ReplyLimits, SamplingParams
from dgemma.model.kv_cache import KVCache
from dgemma.text.chat import Prompt

if TYPE_CHECKING:
    from dgemma.engine.core import EngineCore

T = TypeVar("T")
MIN_HOST_CHARACTERS = 1 << 15  # encoding so many takes about ten milliseconds


@dataclass(frozen=True, slots=True, eq=False)
class Prefix:
    """Tokens that several tasks continue from, and a KV cache of all but the last token.

    Each task commits the last token itself, which gives it the hidden state for its first token.
    """

    ids: tuple[int, ...]
    cache: KVCache
    cache_ids: tuple[int, ...]  # the same, with ids that identify soft tokens of pictures
    forks: "WeakSet[KVCache]" = field(default_factory=WeakSet)  # forks still in use

    def fork(self, num_tokens: int) -> KVCache:
        """Start a sequence with slots for the last token and `num_tokens` more."""
        fork = self.cache.fork(num_tokens + 1)
        self.forks.add(fork)
        return fork

    def clone(self, fork: KVCache) -> KVCache:
        """Copy a fork, so that it can be continued in two ways."""
        twin = fork.clone()
        self.forks.add(twin)
        return twin


DraftMap = Callable[[Draft], Draft]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplySpec:
    """A checked request for one reply."""

    prompt: Prompt
    params: SamplingParams
    limits: ReplyLimits
    prefix: Prefix | None = None  # holds the beginning of the prompt
    map_draft: DraftMap | None = None  # maps drafts before they are reported


class Opened(NamedTuple):
    """The KV cache that a sequence commits to, and the engine that steps it."""

    cache: KVCache
    engine: "EngineCore"


class TokenSequence:
    """A prompt and the tokens after it, committed to a KV cache from left to right."""

    def __init__(self, prompt: Prompt) -> None:
        self.prompt, self.ids, self.num_prompt = prompt, list(prompt.ids), len(prompt.ids)
        self.num_committed = 0
        self.num_prefill = 0  # tokens present before the first pass
        self._opened: Opened | None = None  # set between `open` and `close`

    def open(self, cache: KVCache, engine: "EngineCore") -> None:
        """Commit to this cache from now on; it may already hold a prefix of the tokens."""
        self._opened = Opened(cache, engine)
        self.num_committed, self.num_prefill = cache.length, len(self.ids)

    @property
    def cache(self) -> KVCache:
        assert self._opened is not None, "a sequence has a cache from open to close"
        return self._opened.cache

    @property
    def engine(self) -> "EngineCore":
        assert self._opened is not None, "a sequence has an engine from open to close"
        return self._opened.engine

    @property
    def cache_ids(self) -> tuple[int, ...]:
        """Return ids that identify what each key is computed from."""
        return (*self.prompt.cache_ids, *self.written)

    @property
    def written(self) -> list[int]:
        """Tokens after the prompt, committed or not."""
        return self.ids[self.num_prompt :]

    @property
    def is_prefilled(self) -> bool:
        return self.num_committed >= self.num_prefill

    @property
    def has_long_commit(self) -> bool:
        """True if the rest of the prompt needs more than one pass."""
        return len(self.ids) > self._next_end()

    def _next_end(self) -> int:
        """Return the index up to which the next pass commits: a chunk multiple, in prompts."""
        if self.is_prefilled:
            return len(self.ids)
        return min(
            chunk_end(self.num_committed, self.engine.chunk, self.prompt.images), len(self.ids)
        )

    def next_tokens(self) -> tuple[int, ...]:
        """Return the tokens to commit in the next pass."""
        return tuple(self.ids[self.num_committed : self._next_end()])

    def next_images(self) -> tuple[ImageRows, ...]:
        """Return the pictures among those tokens; uncached ones go through the tower."""
        begin, images = self.num_committed, self.prompt.images
        if begin >= self.num_prompt or not images:
            return ()
        features = self.engine.images
        assert features is not None, "a prompt with pictures is made by an engine with a tower"
        return features.rows(images, begin, self._next_end())

    def commit(self, count: int) -> None:
        """Advance by committed tokens; checkpoint the prompt at a reusable length.

        That is its end or, in 16 bits, the last chunk boundary before it.
        """
        was_prefilled, prefixes = self.is_prefilled, self.engine.prefixes
        alignment = prefixes.alignment
        self.num_committed += count
        num_left = self.num_prefill - self.num_committed
        if alignment == 1:
            is_last = num_left == 0
        else:
            is_last = self.num_committed % alignment == 0 and 0 < num_left <= alignment
        if not was_prefilled and is_last and prefixes.max_bytes > 0:
            self.cache.checkpoint()

    def accept(self, count: int) -> None:
        """Count accepted draft tokens as committed, and remove the others from the KV cache.

        The last chosen token is not in the cache yet, and one that ends the reply is not part of
        the sequence.
        """
        self.num_committed = min(self.num_committed + count, len(self.ids))
        if self.cache.length > self.num_committed:
            self.cache.truncate(self.num_committed)

    def reopen_last(self) -> None:
        """Uncommit the last token, so that the next pass returns its hidden state."""
        self.cache.truncate(len(self.ids) - 1)
        self.num_committed = self.cache.length

    def close(self, *, keep: bool) -> None:
        """Release the cache; with `keep`, to the prefix cache."""
        opened, self._opened = self._opened, None
        if opened is None:
            return
        cache, engine = opened
        # An interrupted pass may have left it inconsistent.
        if keep and cache.is_consistent and cache.length == self.num_committed:
            num_prompt = min(self.num_prompt, cache.length)
            engine.prefixes.keep(self.cache_ids[: cache.length], cache, num_prompt)


class Task(ABC):
    """Work of one request that runs in passes. It is done when it has a result."""

    def __init__(self, num_tokens: int, prefix: Prefix | None = None) -> None:
        self.num_tokens = num_tokens  # upper bound on its KV slots, without the prefix
        self.prefix = prefix
        self.last_pass = -1  # number of its last pass
        self.events: list[Event] = []  # events not yet collected
        self.result: Any = None

    @property
    def is_done(self) -> bool:
        return self.result is not None

    def join(self, number: int) -> None:
        """Note that it is in the pass of this number."""
        self.last_pass = number

    def finish(self, result: Any) -> None:
        """End with a result."""
        self.result = result

    @property
    def has_long_commit(self) -> bool:
        """True while its next input is a long commit, such as a prefill chunk."""
        return False

    @property
    def host_seconds(self) -> float:
        """Host time that its constraint took in the last pass."""
        return 0.0

    @abstractmethod
    def start(self, engine: "EngineCore", deadline: float) -> None:
        """Allocate KV caches. Called once, before the first pass.

        `deadline`: on the clock of time.monotonic, for tasks that can end themselves.
        """

    @abstractmethod
    def inputs(self) -> list[ForwardInput]:
        """Return the inputs of the next pass; the same ones again if a pass failed."""

    @abstractmethod
    def process(self, inputs: Sequence[ForwardInput], outputs: Sequence[ForwardOutput]) -> None:
        """Process the outputs of a pass."""

    @abstractmethod
    def close(self, engine: "EngineCore") -> None:
        """Release KV caches, in any state."""


class HostTask:
    """A function that runs in a thread, in parallel with passes: encoding, compiling grammars."""

    def __init__(self, function: Callable[..., Any], *arguments: Any) -> None:
        self.function, self.arguments = function, arguments
        self.future: Future[Any] | None = None

    def start(self, pool: Executor, on_done: Callable[[], None]) -> None:
        """Run the function in a thread of the pool; `on_done` is called there."""
        self.future = pool.submit(self.function, *self.arguments)
        self.future.add_done_callback(lambda _: on_done())

    def cancel(self) -> None:
        """Cancel the function unless it runs already."""
        if self.future is not None:
            self.future.cancel()

    @property
    def is_done(self) -> bool:
        return self.future is not None and self.future.done()

    @property
    def result(self) -> Any:
        """Return the function's result, or raise its error."""
        assert self.future is not None
        return self.future.result(timeout=0)


PASS: tuple[()] = ()  # a program yields it to let a pass run in between
Program = Generator["Sequence[Task | HostTask] | Event", list[Any], T]


class Request(Generic[T]):
    """One submission. `events` fills as the engine steps; `result` or `error` ends it."""

    def __init__(
        self, program: "Program[T] | Task", *, owner: str = "", deadline: float = inf
    ) -> None:
        # A plain task reports all events; tasks of a program report drafts only.
        self.plain_task = program if isinstance(program, Task) else None
        self.program: Program[Any] = _single(program) if isinstance(program, Task) else program
        self.owner, self.deadline = owner, deadline  # deadline: on the clock of time.monotonic
        self.arrived = time.monotonic()
        self.waiting: deque[Task | HostTask] = deque()
        self.running: list[Task] = []
        self.host_tasks: list[HostTask] = []
        self.events: deque[Event] = deque()
        self.result: T | None = None
        self.error: Exception | None = None
        self.has_started = self.is_over = self.is_cancelled = False
        # Tasks the program waits for; None before its first yield.
        self._tasks: Sequence[Task | HostTask] | None = None
        self._shown = (0, 0)  # number of canvases shown, and the last one's step

    @property
    def is_ready(self) -> bool:
        """True if all tasks that the program waits for are done."""
        return not (self.is_over or self.waiting or self.running or self.host_tasks)

    def raise_error(self) -> None:
        if self.error is not None:
            raise self.error

    def fail(self, error: Exception) -> None:
        """End with an error."""
        self.is_over, self.error = True, error

    def cancel(self) -> None:
        """End without a result, unless it is over."""
        if not self.is_over:
            self.is_over = self.is_cancelled = True

    def start_first(self) -> None:
        """Move the first waiting task to those that run."""
        task = self.waiting.popleft()
        self.has_started = True
        if isinstance(task, Task):
            self.running.append(task)
        else:
            self.host_tasks.append(task)

    def drop(self, task: Task) -> None:
        """Remove a task that has ended."""
        self.running.remove(task)

    def drop_done(self) -> None:
        """Remove host tasks that are done."""
        self.host_tasks = [task for task in self.host_tasks if not task.is_done]

    def release(self) -> list[Task]:
        """Cancel host tasks that have not begun; return the running tasks, to be closed."""
        for host_task in self.host_tasks:
            host_task.cancel()
        running, self.running, self.host_tasks = self.running, [], []
        return running

    def resume(self) -> None:
        """Run the program up to its next tasks, or to its end."""
        results = None if self._tasks is None else [task.result for task in self._tasks]
        self._tasks = None
        try:
            while True:
                step = self.program.send(results)  # type: ignore[arg-type]
                if isinstance(step, Sequence):
                    self._tasks = step
                    self.waiting.extend(step)
                    return
                # A draft yielded by the program counts as a new canvas.
                own = self._numbered(step, is_new=True) if isinstance(step, Draft) else step
                self.events.append(own)
                results = None
        except StopIteration as stop:
            self.result, self.is_over = stop.value, True

    def close(self) -> None:
        """Close the program and drop its tasks; idempotent."""
        self.waiting.clear()
        self._tasks = None
        self.program.close()

    def collect(self, task: Task) -> None:
        """Collect the events of a task after a pass."""
        for event in task.events:
            if task is self.plain_task:
                self.events.append(event)
            elif isinstance(event, Draft):
                self.events.append(self._numbered(event))
        task.events.clear()

    def _numbered(self, draft: Draft, *, is_new: bool = False) -> Draft:
        """Number the canvases of a program in the order they are shown."""
        count, last_step = self._shown
        count += is_new or count == 0 or draft.step <= last_step
        self._shown = count, draft.step
        return replace(draft, block=count - 1)


def in_thread_if_long(
    num_characters: int, function: Callable[..., T], *arguments: Any
) -> "Program[T]":
    """Call a function on text: directly if the text is short, else in a host thread."""
    if num_characters < MIN_HOST_CHARACTERS:
        return function(*arguments)
    return (yield from in_thread(function, *arguments))


def in_thread(function: Callable[..., T], *arguments: Any) -> "Program[T]":
    """Call a function in a host thread."""
    (result,) = yield [HostTask(function, *arguments)]
    return result  # type: ignore[no-any-return]


def _single(task: Task) -> "Program[Any]":
    (result,) = yield [task]
    return result
