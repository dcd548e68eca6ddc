"""Pairs of prompt and reply, asked in the chat form in both modes: what several tasks share."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from dgemma.engine import Engine, Mode, Options
from dgemma.eval.answers import Question, ask
from dgemma.eval.data import Data
from dgemma.eval.measure import Case

MODES: tuple[Mode, ...] = ("diffusion", "ar")
SPARE = 16  # tokens a reply may take beyond the longest of the set


@dataclass(frozen=True, slots=True)
class Pair:
    prompt: str
    reply: str


@dataclass(frozen=True, slots=True)
class Answered:
    """One mode's answers to all pairs; an answer that does not fit the context is empty."""

    case: Case
    answers: list[str]
    note: str  # how many did not fit, where some did not
    steps: list[float]


def read_pairs(data: Data, name: str, limit: int | None) -> list[Pair]:
    return [Pair(record["prompt"], record["reply"]) for record in data.records(name, limit)]


def answer(engine: Engine, pairs: Sequence[Pair], task: str, seed: int) -> Iterator[Answered]:
    """Both modes' answers: diffusion with a seed for each pair, AR greedily."""
    longest = max((len(engine.tokenizer.encode(pair.reply)) for pair in pairs), default=0)
    for mode in MODES:
        questions = [
            Question(pair.prompt, Options(mode=mode, max_tokens=longest + SPARE, seed=seed + i))
            for i, pair in enumerate(pairs)
        ]
        done = ask(engine, questions, f"{task}, {mode}")
        missing = done.count(None)
        yield Answered(
            Case(task, mode),
            ["" if one is None else one.text for one in done],
            f"{missing} did not fit the context and count as wrong" if missing else "",
            [float(one.steps) for one in done if one is not None],
        )
