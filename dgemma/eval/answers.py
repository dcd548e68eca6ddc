"""Many requests at once: prompts to replies, with progress, whatever does not fit left out."""

import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from dgemma.engine import Done, Engine, Event, Options
from dgemma.engine.options import Plan
from dgemma.errors import PromptTooLong
from dgemma.text.chat import Prompt


def tune(engine: Engine, rows: int) -> None:
    """Many rows a pass, and nothing remembered: no two cases begin alike for long."""
    engine.max_rows = rows
    engine.prefixes.clear()
    engine.prefixes.max_bytes = 0


@dataclass(frozen=True, slots=True)
class Question:
    """A request. A string is a user's message."""

    prompt: str | Prompt
    options: Options


def ask(engine: Engine, questions: Sequence[Question], label: str) -> list[Done | None]:
    """The replies in order; None for a request that does not fit the model's context."""
    plans = [_plan(engine, question) for question in questions]
    jobs = [None if plan is None else engine.submit(plan) for plan in plans]
    real = [job for job in jobs if job is not None]
    try:
        while running := sum(not job.is_over for job in real):
            engine.step()
            show(label, len(real) - running, len(real))
    finally:
        for job in real:
            engine.cancel(job)
    for job in real:
        if job.error is not None:
            raise job.error
    return [None if job is None else _done(job.events) for job in jobs]


def _plan(engine: Engine, question: Question) -> Plan | None:
    try:
        return engine.plan(question.prompt, question.options)
    except PromptTooLong:
        return None


def _done(events: Iterable[Event]) -> Done:
    return next(event for event in events if isinstance(event, Done))


def show(label: str, done: int, total: int) -> None:
    """A counter on stderr that overwrites itself; nothing where nobody watches."""
    if sys.stderr.isatty():
        end = "\n" if done >= total else ""
        print(f"\r  {label}: {done}/{total} ", end=end, file=sys.stderr, flush=True)
