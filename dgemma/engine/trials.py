"""Several canvases tried behind one prefix, and texts scored behind it: what fill and edit use.

The prefix is encoded once and shared. Canvases go through the engine like any other request, so
that they run together with each other and with whatever else it serves.

D width, V vocabulary.
"""

from collections.abc import Generator, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from dgemma.backends.base import prefill
from dgemma.constrain.holes import Layout
from dgemma.diffusion.canvas import Canvas
from dgemma.diffusion.sampler import Sampler
from dgemma.engine.events import Done, Draft
from dgemma.engine.guard import NOT_A_NUMBER
from dgemma.engine.job import Job
from dgemma.engine.options import Options, Plan
from dgemma.engine.score import Encoded, Score, score_after
from dgemma.errors import DgemmaError
from dgemma.model.kv_cache import Capacity, KVCache
from dgemma.text.chat import Prompt

if TYPE_CHECKING:
    from dgemma.engine.engine import Engine


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """A canvas to be denoised behind the prefix and some tokens more."""

    layout: Layout
    ids: tuple[int, ...] = ()  # committed behind the shared prefix
    canvas: tuple[int, ...] = ()  # what open positions hold at first, instead of noise
    seed: int = 0
    choice: int = 0
    sampler: Sampler | None = None
    drafts: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Tried:
    """What came of a trial."""

    trial: Trial
    holes: tuple[tuple[int, ...], ...]  # the tokens in each
    steps: int
    settled: bool


class SharedPrefix:
    """A prefix in the cache that many canvases and scores go on from. Close it when done."""

    def __init__(self, engine: "Engine", ids: Sequence[int]) -> None:
        self.engine, self.ids = engine, tuple(ids)
        span = engine.chunk + engine.model.config.canvas_length
        room = Capacity(tokens=len(self.ids), segment=span)
        found = engine.prefixes.take(self.ids, room)
        self.cache = (
            KVCache(engine.model.config, room, engine.dtype, engine.device)
            if found is None
            else found[0]
        )
        rest = torch.tensor(self.ids[self.cache.length :], device=engine.device)
        self.last_1D = prefill(engine.backend, self.cache, rest, engine.chunk)
        self.cache.checkpoint()

    def close(self) -> None:
        """Remember the prefix for the next request that begins with it."""
        if self.cache.is_consistent and self.cache.length == len(self.ids):
            self.engine.prefixes.keep(self.ids, self.cache)

    def run(self, trials: Sequence[Trial]) -> Generator[Draft, None, list[Tried]]:
        """Denoise all canvases together; yields the drafts that trials ask for."""
        plans = [self._plan(trial) for trial in trials]  # all, before any of them runs
        jobs = [self.engine.submit(plan, past=self.cache) for plan in plans]
        for seen in first_canvases(self.engine, jobs):
            yield from seen
        return [_tried(trial, job) for trial, job in zip(trials, jobs, strict=True)]

    def go_on(self, ids: Sequence[int], blocks: int, seed: int, sampler: Sampler) -> list[int]:
        """Text that goes on from the prefix and `ids`: so many canvases, or up to its end."""
        engine = self.engine
        length = engine.model.config.canvas_length
        options = Options(max_tokens=blocks * length, seed=seed, sampler=sampler, retries=0)
        prompt = Prompt(text="", ids=(*self.ids, *ids))
        job = engine.submit(engine.plan(prompt, options), past=self.cache)
        try:
            while not job.is_over:
                engine.step()
        finally:
            engine.cancel(job)
        if job.error is not None:
            raise job.error
        written, is_control = job.reader.ids, engine.tokenizer.is_control
        return written[: next((i for i, t in enumerate(written) if is_control(t)), len(written))]

    def rejoin(self, after: Sequence[int], limit: int) -> list[int] | None:
        """What the causal mode writes from the prefix until it comes to `after`, without that.

        Where that holds the end of the text, it has to end there. None where it does not come to
        it within `limit` tokens.
        """
        engine = self.engine
        goal = list(takewhile(lambda token: not engine.tokenizer.is_control(token), after))
        must_end = len(goal) < len(after)
        # A request needs a token that is not encoded yet.
        first = int(self.next_logits().argmax())
        if engine.tokenizer.is_control(first):
            return [] if must_end and not goal else None
        room = engine.model.config.max_position_embeddings - len(self.ids) - 1
        limit = min(limit + len(goal) + 1, room)
        if limit < 1:
            return None
        options = Options(mode="ar", max_tokens=limit, seed=0)
        prompt = Prompt(text="", ids=(*self.ids, first))
        job = engine.submit(engine.plan(prompt, options), past=self.cache)

        def is_there() -> bool:
            written = [first, *job.reader.ids]
            return written[len(written) - len(goal) :] == goal

        try:
            while not job.is_over and (must_end or not is_there()):
                engine.step()
        finally:
            engine.cancel(job)
        if job.error is not None:
            raise job.error
        has_ended = any(isinstance(e, Done) and e.finish == "stop" for e in job.events)
        written = [first, *job.reader.ids]
        came = is_there() and (has_ended or not must_end)
        return written[: len(written) - len(goal)] if came else None

    def behind(self, ids: Sequence[int]) -> Encoded:
        """The prefix with tokens more behind it; what goes on from there leaves it as it is."""
        if not ids:
            return Encoded(self.cache, self.last_1D)
        cache = self.cache.fork(len(ids))
        tokens_T = torch.tensor(ids, device=self.engine.device)
        return Encoded(cache, prefill(self.engine.backend, cache, tokens_T, self.engine.chunk))

    def score(self, texts: Sequence[Sequence[int]]) -> list[Score]:
        """Causal log-probabilities of tokens behind the prefix."""
        return score_after(self.engine.backend, Encoded(self.cache, self.last_1D), texts)

    def next_logits(self) -> Tensor:
        """Causal logits of the token behind the prefix."""
        with torch.inference_mode():
            return self.engine.model.logits(self.last_1D)[0]

    def _plan(self, trial: Trial) -> Plan:
        layout = trial.layout
        options = Options(
            max_tokens=layout.length,
            canvas_length=layout.length,
            pins=layout.pins,
            canvas=trial.canvas,
            seed=trial.seed,
            choice=trial.choice,
            sampler=trial.sampler,
            drafts=trial.drafts,
            retries=0,
        )
        return self.engine.plan(Prompt(text="", ids=self.ids + trial.ids), options)


def first_canvases(engine: "Engine", jobs: Sequence[Job]) -> Generator[list[Draft], None, None]:
    """Let requests run until the first canvas of each has come to its end, and no further.

    Yields after each pass what they report of it.
    """
    running = list(jobs)
    try:
        while running:
            engine.step()
            yield [draft for job in running for draft in drafts(job)]
            for job in [job for job in running if job.last is not None or job.is_over]:
                engine.cancel(job)
                running.remove(job)
    finally:
        for job in running:
            engine.cancel(job)


def drafts(job: Job) -> list[Draft]:
    """The drafts that a job reports; whatever else it reports is not for us."""
    found = [event for event in job.events if isinstance(event, Draft)]
    job.events.clear()
    return found


def _tried(trial: Trial, job: Job) -> Tried:
    canvas = last_canvas(job)
    guess = canvas.guess_L.tolist()
    return Tried(
        trial=trial,
        holes=tuple(tuple(guess[start:stop]) for start, stop in trial.layout.holes),
        steps=job.steps,
        settled=bool(canvas.settled),
    )


def last_canvas(job: Job) -> Canvas:
    """The canvas that a request came to, or what kept it from one."""
    if job.error is not None:
        raise job.error
    if job.last is None or job.fault == NOT_A_NUMBER:
        raise DgemmaError("the model's output is not a number; the checkpoint or dtype is at fault")
    return job.last


def with_steps(sampler: Sampler, steps: int) -> Sampler:
    return replace(sampler, max_denoising_steps=min(steps, sampler.max_denoising_steps))
