"""Any interleaving of requests, cancels, failures and deadlines leaves every other answer alone.

The model is a tiny one in float32 whose answers do not depend on the last digit of a sum: what a
request writes must be the same in whatever company it runs.
"""

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any
from weakref import WeakSet

import pytest
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from dgemma.backends.reference import ReferenceBackend
from dgemma.diffusion.sampler import Sampler
from dgemma.engine import Done, Engine, SamplingParams
from dgemma.engine.prefix_cache import PrefixStore
from dgemma.engine.request import HostTask, Program, Request, Task
from dgemma.engine.scheduler import (
    MAX_HOST_SECONDS,
    MAX_HOST_TASKS,
    MAX_HOST_TASKS_PER_OWNER,
    MAX_PREFILLS_WITH_CANVASES,
    OVERCOMMIT,
    Scheduler,
)
from dgemma.engine.scoring import Prefill, Scoring
from dgemma.errors import DeadlineExceeded
from dgemma.model.kv_cache import Buffer, KVCache
from dgemma.programs.infill.infill import FillParams, fill_program
from dgemma.programs.infill.search import FillEffort
from dgemma.text.chat import Prompt
from tests.constrain.small_engines import QUICK, random_engine

ROWS, TOKENS, CHUNK = 3, 400, 16
EFFORTS: dict[str, FillEffort] = {"fill": "thorough", "fast fill": "fast"}
KINDS = ("diffusion", "ar", "long", "constrained", "score", "host", *EFFORTS)
OWNERS = ("a", "b")
BRIEF = Sampler(max_denoising_steps=5)  # random weights do not converge anyway
INJECTED = "injected"


def new_engine() -> Engine:
    """Make an engine with small limits, so that requests wait for rows, memory and chunks."""
    shared = random_engine(0)
    engine = Engine(
        shared.model,
        shared.tokenizer,
        shared.template,
        shared.generation_config,
        max_batch_size=ROWS,
    )
    engine.scheduler.max_tokens, engine.chunk = TOKENS, CHUNK
    return engine


def prompt_of(length: int, seed: int) -> Prompt:
    return Prompt(text="", ids=(2, *(40 + (seed * 7 + i * i) % 200 for i in range(length))))


def work(engine: Engine, kind: str, seed: int) -> Program[Any] | Task:
    """Return the task or program of a request."""
    if kind == "score":
        return engine.score_program(prompt_of(20, seed).ids, [(50, 51, 52 + seed), (60,)])
    if kind in EFFORTS:
        params = FillParams(
            seed=seed, sampler=QUICK, max_tokens=2, num_proposals=2, effort=EFFORTS[kind]
        )
        return fill_program(engine, "one two<|fill|> three", params)
    if kind == "host":
        return host_program(engine, seed)
    params = SamplingParams(
        mode="ar" if kind == "ar" else "diffusion",
        max_tokens=16,
        seed=seed,
        sampler=None if kind == "ar" else BRIEF,
        drafts=kind == "diffusion",
        constraint=constraint(engine) if kind == "constrained" else None,
    )
    return engine.generation(prompt_of(70 if kind == "long" else 5, seed), params)


def constraint(engine: Engine) -> Any:
    return engine.constraint(regex="[a-c]{3,9}(, [a-c]{2})*")


def host_program(engine: Engine, seed: int) -> Program[tuple[int, ...]]:
    (ids,) = yield [HostTask(engine.tokenizer.encode, f"some words {seed}")]
    yield []
    prompt = Prompt(text="", ids=(2, *ids))
    params = [
        SamplingParams(seed=seed, choice=choice, max_tokens=8, sampler=BRIEF) for choice in (0, 1)
    ]
    first, second = yield [engine.generation(prompt, one) for one in params]
    return (*first.ids, *second.ids)


def answer(result: Any) -> Any:
    """Return what must be the same whenever a request is run."""
    if isinstance(result, Done):
        return result.ids, result.steps, result.finish
    if isinstance(result, list):  # scores
        return [[round(p, 3) for p in score.logprobs] for score in result]
    return result if isinstance(result, tuple) else result.text


@cache
def expected(kind: str, seed: int) -> Any:
    """Return the answer of a request that has an engine to itself."""
    engine = new_engine()
    return answer(engine.run_all([work(engine, kind, seed)])[0])


class Caches:
    """All KV caches that exist."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.alive: WeakSet[KVCache] = WeakSet()
        whole = KVCache.__init__

        def counted(cache: KVCache, *args: Any, **more: Any) -> None:
            self.alive.add(cache)
            whole(cache, *args, **more)

        patch.setattr(KVCache, "__init__", counted)


@dataclass
class Submitted:
    kind: str
    seed: int
    request: Request[Any]
    events: list[Any]
    is_touched: bool = False  # cancelled, expired, or alone in a pass that failed


class EngineMachine(RuleBasedStateMachine):
    """An engine and what was submitted to it."""

    @initialize()
    def start(self) -> None:
        self.patch = pytest.MonkeyPatch()
        self.caches = Caches(self.patch)
        self.engine = new_engine()
        self.submitted: list[Submitted] = []

    @rule(kind=st.sampled_from(KINDS), seed=st.integers(0, 2), owner=st.sampled_from(OWNERS))
    def submit(self, kind: str, seed: int, owner: str) -> None:
        request = self.engine.submit(work(self.engine, kind, seed), owner=owner)
        self.submitted.append(Submitted(kind, seed, request, []))

    @rule(count=st.integers(1, 6))
    def step(self, count: int) -> None:
        for _ in range(count):
            self.engine._step_or_wait()
            self._collect()

    @precondition(lambda self: self.submitted)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        one = data.draw(st.sampled_from(self.submitted))
        request = one.request
        was_over, was_cancelled = request.is_over, request.is_cancelled
        end = (request.result, request.error)
        self.engine.cancel(request)
        self.engine.cancel(request)
        assert request.is_over and request.is_cancelled == (was_cancelled or not was_over)
        assert (request.result, request.error) == end
        one.is_touched |= not was_over

    @precondition(lambda self: any(not one.request.is_over for one in self.submitted))
    @rule(data=st.data())
    def expire(self, data: st.DataObject) -> None:
        live = [one for one in self.submitted if not one.request.is_over]
        one = data.draw(st.sampled_from(live))
        one.request.deadline, one.is_touched = time.monotonic() - 1, True
        if one.request.plain_task is not None:
            one.request.plain_task.progress.deadline = one.request.deadline
        for _ in range(2 * OVERCOMMIT):  # its task may have to wait for a pass
            self.engine._step_or_wait()
        self._collect()
        assert one.request.is_over
        if one.request.error is None:
            assert one.request.result.finish in ("budget", "stop", "length")
        else:
            assert isinstance(one.request.error, DeadlineExceeded)

    @rule()
    def fail_a_pass(self) -> None:
        """The next pass fails; where it had several tasks, none of them is lost."""
        num_passes = 0

        def fail_once(inputs: Sequence[Any]) -> Any:
            nonlocal num_passes
            num_passes += 1
            if num_passes == 1:
                raise RuntimeError(INJECTED)
            return ReferenceBackend.run(self.engine.backend, inputs)  # type: ignore[arg-type]

        self.engine.backend.run = fail_once  # type: ignore[method-assign]
        self.engine.step()
        del self.engine.backend.run
        self._collect()
        failed = [one for one in self.submitted if one.request.error is not None]
        new = [one for one in failed if not one.is_touched]
        assert len(new) <= 1 and (not new or num_passes == 1), "it was not alone in the pass"
        for one in new:
            assert str(one.request.error) == INJECTED
            one.is_touched = True

    @invariant()
    def nothing_is_lost_or_twice(self) -> None:
        if not hasattr(self, "submitted"):
            return
        scheduler = self.engine.scheduler
        live = [one.request for one in self.submitted if not one.request.is_over]
        assert scheduler.requests == live
        assert len(scheduler.admitted) <= OVERCOMMIT * ROWS
        assert Counter(map(id, scheduler.admitted)) == Counter(
            id(task) for request in live for task in request.running
        )
        assert sum(task.num_tokens for task in scheduler.admitted) <= TOKENS or (
            len(scheduler.admitted) == 1
        )
        for one in self.submitted:
            ends = [isinstance(event, Done) for event in one.events]
            assert not any(ends[:-1]), "an event after the end"
            assert not (one.request.is_over and (one.request.waiting or one.request.running))

    def teardown(self) -> None:
        if not hasattr(self, "submitted"):
            return
        for _ in range(2000):
            if not self.engine.scheduler.requests:
                break
            self.engine._step_or_wait()
            self._collect()
        self.nothing_is_lost_or_twice()
        for one in self.submitted:
            assert one.request.is_over
            if not one.is_touched:
                assert one.request.error is None
                assert answer(one.request.result) == expected(one.kind, one.seed), one.kind
            if isinstance(one.request.result, Done):
                assert one.events[-1:] == [one.request.result]
        assert not self.engine.scheduler.admitted
        self.engine.prefixes.clear()
        self.submitted.clear()
        self.patch.undo()
        assert not self.caches.alive, "a KV cache is left"

    def _collect(self) -> None:
        for one in self.submitted:
            one.events += one.request.events
            one.request.events.clear()


TestEngineMachine = EngineMachine.TestCase
TestEngineMachine.settings = settings(
    max_examples=80,
    stateful_step_count=30,
    deadline=None,
    database=None,
    phases=[Phase.explicit, Phase.generate],
)


# --- the k-th call fails


SCENE = (("diffusion", 0), ("ar", 1), ("long", 2), ("score", 0), ("fast fill", 1))
CALLS: dict[str, tuple[type, str]] = {
    "a KV cache": (KVCache, "__init__"),
    "a larger buffer": (Buffer, "resize"),
    "a pass": (ReferenceBackend, "run"),
    "a kept prefix": (PrefixStore, "keep"),
    "a reused prefix": (PrefixStore, "take"),
}


def fail_at(patch: pytest.MonkeyPatch, owner: type, name: str, number: int) -> Callable[[], int]:
    """Let the call with this number fail; returns a function that tells how many there were."""
    whole, calls = getattr(owner, name), 0

    def failing(*args: Any, **more: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == number:
            raise RuntimeError(INJECTED)
        return whole(*args, **more)

    patch.setattr(owner, name, failing)
    return lambda: calls


@pytest.mark.parametrize("what", CALLS)
def test_a_failure_at_any_call_touches_one_request_at_most(what: str) -> None:
    for kind, seed in SCENE:
        expected(kind, seed)
    with pytest.MonkeyPatch.context() as outer:
        caches = Caches(outer)
        number, has_failed = 0, True
        while has_failed:
            # All of the first calls, then fewer and fewer: later ones repeat what was before.
            number += 1 + number // 30
            engine = new_engine()
            with pytest.MonkeyPatch.context() as patch:
                num_calls = fail_at(patch, *CALLS[what], number)
                requests = [engine.submit(work(engine, *one)) for one in SCENE]
                while not all(request.is_over for request in requests):
                    engine._step_or_wait()
                has_failed = num_calls() >= number
            failed = [request for request in requests if request.error is not None]
            assert all(str(request.error) for request in failed)
            assert len(failed) <= (what != "a kept prefix"), "more than one has failed"
            for one, request in zip(SCENE, requests, strict=True):
                if request.error is None:
                    assert answer(request.result) == expected(*one), one
            assert not engine.scheduler.admitted and not engine.scheduler.requests
            (again,) = engine.run_all([work(engine, *SCENE[0])])
            assert answer(again) == expected(*SCENE[0]), "it no longer serves"
            engine.prefixes.clear()
            requests.clear()
            failed.clear()
            del request
            assert not caches.alive, "a KV cache is left"
        assert number > 1


# --- admission


def ready(owner: str, *tasks: Task | HostTask) -> Request[Any]:
    def program() -> Program[None]:
        yield list(tasks)

    request: Request[Any] = Request(program(), owner=owner)
    request.resume()
    return request


def prefills(count: int, length: int = 5) -> list[Prefill]:
    return [Prefill(range(40, 40 + length)) for _ in range(count)]


def test_rows_are_shared_by_owners_then_by_requests() -> None:
    scheduler = Scheduler(max_batch_size=4, max_tokens=10_000)
    greedy = [ready("a", *prefills(9)), ready("a", *prefills(9))]
    for request in greedy:
        scheduler.add(request)
    assert len(list(scheduler.admit())) == 4
    assert [len(request.running) for request in greedy] == [2, 2]
    late = ready("b", *prefills(9))
    scheduler.add(late)
    list(scheduler.admit())
    assert len(late.running) == 3, "beyond the rows of a pass, one fewer than the other owner"
    third = ready("a", *prefills(2))
    scheduler.add(third)
    list(scheduler.admit())
    assert len(third.running) == 1, "the others of its owner hold two rows each"
    assert len(scheduler.admitted) == OVERCOMMIT * scheduler.max_batch_size
    scheduler.remove(greedy[0])
    list(scheduler.admit())
    rows = Counter(request.owner for request in scheduler.admitted.values())
    assert rows == {"a": 3, "b": 3}, "there are no rows left over, and nobody holds two more"
    for task in scheduler.admitted:
        task.has_long_commit = False
    taken = Counter(scheduler.admitted[task].owner for task in scheduler.batch())
    assert taken == {"a": 2, "b": 2}


def test_every_admitted_task_has_its_turn() -> None:
    scheduler = Scheduler(max_batch_size=2, max_tokens=10_000)
    for owner in ("a", "b", "c"):
        scheduler.add(ready(owner, *prefills(2)))
    list(scheduler.admit())
    for task in list(scheduler.admitted)[1:]:
        task.has_long_commit = False
    passes = [scheduler.batch() for _ in range(6)]
    assert all(len(batch) <= 2 for batch in passes)
    counts = Counter(id(item) for batch in passes for item in batch)
    assert (
        len(counts) == len(scheduler.admitted) and max(counts.values()) - min(counts.values()) <= 1
    )
    chunks = [sum(task.has_long_commit for task in batch) for batch in passes]
    assert max(chunks) <= MAX_PREFILLS_WITH_CANVASES


def test_slow_constraints_share_the_time_of_a_pass_and_take_turns() -> None:
    scheduler = Scheduler(max_batch_size=8, max_tokens=10_000)
    scheduler.add(ready("a", *(SlowTask(0.4 * MAX_HOST_SECONDS) for _ in range(6))))
    scheduler.add(ready("b", SlowTask(0.0)))
    list(scheduler.admit())
    passes = [scheduler.batch() for _ in range(6)]
    owners = [Counter(scheduler.admitted[task].owner for task in batch) for batch in passes]
    assert owners == [{"a": 2, "b": 1}] * 6
    assert set(Counter(id(item) for batch in passes for item in batch).values()) == {2, 6}
    for task in scheduler.admitted:
        task.host_seconds = 5 * MAX_HOST_SECONDS  # type: ignore[misc]
    assert len(scheduler.batch()) == 1, "one is never too slow"


class SlowTask(Prefill):
    """A task whose constraint takes a stated time of each pass."""

    has_long_commit, host_seconds = False, 0.0

    def __init__(self, seconds: float) -> None:
        super().__init__(range(40, 45))
        self.host_seconds = seconds


def test_memory_counts_the_prefixes_of_tasks_that_wait() -> None:
    engine = random_engine(0)
    (prefix,) = engine.run_all([Prefill(range(40, 90))])
    scheduler = Scheduler(max_batch_size=1, max_tokens=100)
    holder = ready("a", Scoring(prefix, [(50, 51)]), Scoring(prefix, [(50, 52)]))
    scheduler.add(holder)
    assert len(list(scheduler.admit())) == 1
    scheduler.release(
        next(iter(scheduler.admitted))
    )  # the second still waits, and holds the prefix
    scheduler.max_batch_size = 4
    for length in (40, 30):
        scheduler.add(ready("b", *prefills(1, length)))
    started = [task.num_tokens for task in scheduler.admit()]
    assert started == [40, 2], "50 of 100 slots are held by the prefix"
    scheduler.remove(holder)
    assert [task.num_tokens for task in scheduler.admit()] == [30]


def test_a_task_that_is_too_large_runs_alone_and_is_not_overtaken_for_ever() -> None:
    scheduler = Scheduler(max_batch_size=4, max_tokens=20)
    for length in (10, 50, 5):
        scheduler.add(ready("", *prefills(1, length)))
    assert [task.num_tokens for task in scheduler.admit()] == [10]
    scheduler.release(next(iter(scheduler.admitted)))
    assert [task.num_tokens for task in scheduler.admit()] == [50]
    scheduler.release(next(iter(scheduler.admitted)))
    assert [task.num_tokens for task in scheduler.admit()] == [5]


def test_threads_are_shared_too_and_stay_counted_until_they_are_free() -> None:
    from concurrent.futures import Future

    scheduler = Scheduler(max_batch_size=4, max_tokens=20)

    def admit() -> list[HostTask]:
        started = []
        for task in scheduler.admit_host():
            task.future = Future()
            started.append(task)
        return started

    requests = [ready(owner, *(HostTask(int) for _ in range(2))) for owner in "aabc"]
    for request in requests:
        scheduler.add(request)
    first = admit()
    assert len(first) == MAX_HOST_TASKS
    held = Counter(owner for owner, _ in scheduler.host_tasks)
    assert max(held.values()) == MAX_HOST_TASKS_PER_OWNER
    scheduler.remove(requests[0])
    assert not admit(), "a thread that still works is not free"
    future = first[0].future
    assert future is not None
    future.set_result(None)
    assert len(admit()) == 1


# --- requests that end


def test_a_long_iterator_of_programs_is_taken_as_there_is_room() -> None:
    engine, made = new_engine(), []

    def programs() -> Iterator[Task]:
        for seed in range(40):
            made.append(seed)
            yield engine.generation(prompt_of(4, seed), SamplingParams(mode="ar", max_tokens=2))

    results = engine.as_completed(programs())
    next(results)
    assert len(made) <= OVERCOMMIT * ROWS
    assert len(list(results)) == 39 and len(made) == 40
    unfinished = engine.as_completed(programs())
    next(unfinished)
    unfinished.close()
    assert not engine.scheduler.requests


def test_an_error_keeps_its_traceback_as_text_and_no_tensors() -> None:
    engine = new_engine()
    task = engine.generation(prompt_of(4, 0), SamplingParams(max_tokens=4))

    def broken(*_: object) -> Any:
        big = Large()
        alive.add(big)
        raise ValueError("broken on purpose") from KeyError(str(big))

    class Large:
        """What a frame holds."""

    alive: WeakSet[Large] = WeakSet()
    task.process = broken  # type: ignore[method-assign]
    request = engine.submit(task)
    engine.step()
    assert isinstance(request.error, ValueError) and not alive
    assert "broken(" not in str(request.error)
    assert "in broken" in "".join(request.error.__notes__) and request.error.__traceback__ is None
    assert "KeyError" in "".join(request.error.__notes__)


def test_a_host_task_that_fails_ends_its_request_alone() -> None:
    engine = new_engine()

    def program() -> Program[None]:
        yield [HostTask(int, "x")]

    failing, other = engine.submit(program()), engine.submit(work(engine, "host", 0))
    while not (failing.is_over and other.is_over):
        engine._step_or_wait()
    assert isinstance(failing.error, ValueError) and other.error is None


def test_a_cancelled_request_gives_up_a_host_task_that_waits_for_a_thread() -> None:
    engine, is_free, calls = new_engine(), threading.Event(), list[int]()

    def program(number: int) -> Program[None]:
        yield [HostTask(is_free.wait, 30), HostTask(is_free.wait, 30)]
        yield [HostTask(calls.append, number)]

    requests = [engine.submit(program(n), owner=str(n)) for n in range(MAX_HOST_TASKS)]
    engine.step()
    waiting = engine.submit(program(9), owner="9")
    engine.step()
    assert not waiting.has_started
    for request in [*requests, waiting]:
        engine.cancel(request)
    late = engine.submit(work(engine, "host", 1))
    engine.step()
    assert not late.has_started, "all threads are busy still"
    is_free.set()
    while not late.is_over:
        engine._step_or_wait()
        time.sleep(0.001)
    assert late.error is None and not calls


def test_a_request_that_waits_for_threads_of_cancelled_ones_does_not_spin(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine, is_free = new_engine(), threading.Event()

    def program(function: Callable[..., Any], *arguments: Any) -> Program[None]:
        yield [HostTask(function, *arguments)]

    for _ in range(MAX_HOST_TASKS_PER_OWNER):
        request = engine.submit(program(is_free.wait, 30))
        engine.step()
        engine.cancel(request)
    late, steps = engine.submit(program(int)), list[None]()
    step = engine.step
    monkeypatch.setattr(engine, "step", lambda: (steps.append(None), step())[1])
    threading.Timer(0.2, is_free.set).start()
    while not late.is_over:
        engine._step_or_wait()
    assert late.error is None and len(steps) < 20


def test_a_prefix_that_no_task_shares_any_more_is_kept_as_it_is() -> None:
    engine = new_engine()
    (prefix,) = engine.run_all([Prefill(prompt_of(30, 1).ids)])

    def scores() -> Program[Any]:
        return (yield [Scoring(prefix, [(50, 51)])])

    engine.run(scores())
    engine.keep(prefix)
    assert engine.prefixes.entries[-1].cache is prefix.cache
    (again,) = engine.run_all([Prefill((*prompt_of(30, 1).ids, 77))])
    fork = again.fork(4)
    engine.keep(again)
    assert engine.prefixes.entries[-1].cache is not again.cache, "it is still read by the fork"
    del fork


def test_a_prefill_that_is_cancelled_leaves_what_it_has_computed() -> None:
    engine = new_engine()
    ids = prompt_of(70, 1).ids
    request = engine.submit(Prefill(ids))
    engine.step()
    engine.cancel(request)
    assert [len(entry.ids) for entry in engine.prefixes.entries] == [CHUNK]
    done = engine.generate(Prompt(text="", ids=ids), SamplingParams(mode="ar", max_tokens=2))
    assert done.reused_tokens == CHUNK
