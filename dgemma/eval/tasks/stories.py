"""Stories written to fixed prompts: how likely a story model finds them, and how varied they are.

Low perplexity alone is no merit (a dull story is likely), so distinct-2 stands beside it: the share
of different ones among all pairs of neighbouring words. Doubled words ("the frog frog") are those
of such pairs that are twice the same: what a canvas does that decides both in one step.
"""

import math
import re
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise

import torch

from dgemma.engine import Engine, Mode, Options
from dgemma.eval.answers import Question, ask
from dgemma.eval.data import Data, MissingData
from dgemma.eval.measure import SHARE, Case, Estimate, Measure, ratio
from dgemma.eval.stories15m import TOKENIZER, WEIGHTS, StoryModel, StoryTokenizer, likelihood
from dgemma.eval.tasks.replies import MODES

TASK = "stories"
COUNT = 100
MAX_TOKENS = 200
AR_TEMPERATURE = 0.8  # greedy AR would be likelier and duller than anything drawn
WHO = "cat dog bird boy girl rabbit bear frog mouse duck fox king fish lion baby".split()
WHAT = "ball tree boat cake hat kite garden river house box star flower car book moon spoon".split()


def stories(engine: Engine, data: Data, limit: int | None, seed: int) -> list[Measure]:
    """Perplexity under stories15M and distinct-2, diffusion and AR, and their ratio."""
    judge = Judge(data, engine.device)
    count = limit or COUNT
    losses: dict[Mode, list[tuple[float, float]]] = {}
    measures: list[Measure] = []
    for mode in MODES:
        texts = write(engine, mode, count, seed)
        losses[mode] = judge.losses(texts)
        case, note = (
            Case(TASK, mode),
            f"temperature {AR_TEMPERATURE}" if mode == "ar" else "the model's sampler",
        )
        measures += [
            perplexity(case, losses[mode], note),
            distinct(case, texts),
            doubled(case, texts),
            case.share("not empty", [bool(text.strip()) for text in texts]),
        ]
    return [*measures, _ratio(losses["diffusion"], losses["ar"])]


def prompt(number: int) -> str:
    """The prompt of a seed; all pairs come before one comes again."""
    first, second = WHO[number % len(WHO)], WHAT[number % len(WHAT)]
    return f"Write a short story about a {first} and a {second}."


def write(engine: Engine, mode: Mode, count: int, seed: int) -> list[str]:
    """Stories with seeds `seed`, `seed + 1`, ..."""
    temperature = AR_TEMPERATURE if mode == "ar" else None
    questions = [
        Question(
            prompt(i),
            Options(mode=mode, temperature=temperature, seed=seed + i, max_tokens=MAX_TOKENS),
        )
        for i in range(count)
    ]
    done = [one.text for one in ask(engine, questions, f"{TASK}, {mode}") if one is not None]
    if len(done) < count:
        raise MissingData(f"the model's context does not hold a prompt and {MAX_TOKENS} tokens")
    return done


class Judge:
    """The story model."""

    def __init__(self, data: Data, device: torch.device) -> None:
        directory, pieces = data.training(WEIGHTS).parent, data.training(TOKENIZER)
        self.model = StoryModel.load(directory, device, torch.float32)
        self.tokenizer = StoryTokenizer.load(pieces)

    def losses(self, texts: Sequence[str]) -> list[tuple[float, float]]:
        """Nats and tokens of each text that has any."""
        told = [text.strip() for text in texts if text.strip()]
        return [(nats, float(n)) for nats, n in likelihood(self.model, self.tokenizer, told)]


def perplexity(case: Case, losses: Sequence[tuple[float, float]], note: str) -> Measure:
    if not losses:
        return case.nothing("perplexity", note)
    estimate = Estimate.around(*ratio(losses), len(losses)).exp()
    return case.estimate("perplexity", estimate, "perplexity", note)


def _ratio(diffusion: Sequence[tuple[float, float]], ar: Sequence[tuple[float, float]]) -> Measure:
    """How many times AR's perplexity diffusion's is."""
    case, name = Case(TASK), "perplexity, diffusion / AR"
    if not diffusion or not ar:
        return case.nothing(name, "a mode wrote nothing")
    (first, first_error), (second, second_error) = ratio(diffusion), ratio(ar)
    error = math.hypot(first_error, second_error)
    estimate = Estimate.around(first - second, error, min(len(diffusion), len(ar))).exp()
    return case.estimate(name, estimate, "times")


def doubled(case: Case, texts: Sequence[str]) -> Measure:
    """How often a word is the one before it, but for marks between them."""
    told = [re.findall(r"[a-z']+", text.lower()) for text in texts]
    return case.share("doubled words", [a == b for words in told for a, b in pairwise(words)])


def distinct(case: Case, texts: Sequence[str]) -> Measure:
    """Distinct-2 of all texts together; the interval is a jackknife's over texts.

    A bootstrap would take texts twice, and so count too few distinct pairs.
    """
    pairs = [list(pairwise(text.lower().split())) for text in texts]
    total, count = sum(map(len, pairs)), len(texts)
    if not total:
        return case.nothing("distinct-2", "no words")
    spread = Counter(pair for own in pairs for pair in set(own))  # in how many texts
    without = [
        (len(spread) - sum(spread[pair] == 1 for pair in set(own))) / max(1, total - len(own))
        for own in pairs
    ]
    mean = sum(without) / count
    error = math.sqrt((count - 1) / count * sum((value - mean) ** 2 for value in without))
    estimate = Estimate.around(len(spread) / total, error, count)
    return case.estimate("distinct-2", estimate.within(), SHARE)
