"""Batched generation for tasks, with progress; prompts beyond the context get no reply."""

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from dgemma.config import WHOLE_MODES
from dgemma.engine import Done, Engine, SamplingParams
from dgemma.engine.generation import Generation
from dgemma.errors import PromptTooLong
from dgemma.eval.data import Data
from dgemma.eval.measure import Case
from dgemma.text.chat import Prompt

SPARE_TOKENS = 16  # tokens allowed beyond the longest expected reply


def set_batch_size(engine: Engine, batch_size: int) -> None:
    """Set the batch size and drop the prefix cache: cases share few prompt tokens."""
    engine.set_limits(max_batch_size=batch_size, prefix_bytes=0)


@dataclass(frozen=True, slots=True)
class EvalPrompt:
    """A prompt with its parameters. A string is a user message."""

    prompt: str | Prompt
    params: SamplingParams


def generate_all(engine: Engine, prompts: Sequence[EvalPrompt], label: str) -> list[Done | None]:
    """Return the replies in order; None for a prompt that does not fit the model's context."""
    tasks = [_generation(engine, prompt) for prompt in prompts]
    fitting = [index for index, task in enumerate(tasks) if task is not None]
    replies: list[Done | None] = [None] * len(tasks)
    running: Iterator[tuple[int, Done]] = engine.as_completed([t for t in tasks if t is not None])
    for count, (number, done) in enumerate(running, start=1):
        replies[fitting[number]] = done
        show_progress(label, count, len(fitting))
    return replies


def _generation(engine: Engine, prompt: EvalPrompt) -> Generation | None:
    try:
        return engine.generation(prompt.prompt, prompt.params)
    except PromptTooLong:
        return None


def show_progress(label: str, done: int, total: int) -> None:
    """Print a counter on stderr that overwrites itself; nothing without a terminal."""
    if sys.stderr.isatty():
        end = "\n" if done >= total else ""
        print(f"\r  {label}: {done}/{total} ", end=end, file=sys.stderr, flush=True)


class PromptReply(NamedTuple):
    """A user message and the expected reply."""

    prompt: str
    reply: str


@dataclass(frozen=True, slots=True)
class ModeReplies:
    """Replies of one mode to all prompts; a reply that does not fit the context is empty."""

    case: Case
    texts: list[str]
    steps: list[float]
    note: str  # number of prompts that did not fit, if any


def read_pairs(data: Data, name: str, limit: int | None) -> list[PromptReply]:
    return [PromptReply(record["prompt"], record["reply"]) for record in data.records(name, limit)]


def replies_by_mode(
    engine: Engine, pairs: Sequence[PromptReply], task: str, seed: int
) -> Iterator[ModeReplies]:
    """Reply to all prompts in both modes: diffusion with a seed for each, AR greedily."""
    longest = max((len(engine.tokenizer.encode(pair.reply)) for pair in pairs), default=0)
    max_tokens = longest + SPARE_TOKENS
    for mode in WHOLE_MODES:
        prompts = [
            EvalPrompt(
                pair.prompt, SamplingParams(mode=mode, max_tokens=max_tokens, seed=seed + number)
            )
            for number, pair in enumerate(pairs)
        ]
        replies = generate_all(engine, prompts, f"{task}, {mode}")
        num_missing = replies.count(None)
        yield ModeReplies(
            Case(task, mode),
            ["" if done is None else done.text for done in replies],
            [float(done.steps) for done in replies if done is not None],
            f"{num_missing} did not fit the context and count as wrong" if num_missing else "",
        )
