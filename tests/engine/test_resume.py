"""A reply that another engine began: continued from what it committed, to the same end."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from dgemma.engine import Committed, Done, Engine, SamplingParams, Text
from dgemma.errors import UsageError
from dgemma.text.chat import ChatTemplate
from dgemma.weights.load import random_model
from tests.taught import GENERATION, ask, taught_config
from tests.text.small import TEMPLATE, small_tokenizer

TOKENIZER = small_tokenizer()
OPEN, CLOSE, TURN = (
    TOKENIZER.control_ids[name] for name in ("<|channel>", "<channel|>", "<turn|>")
)
DIFFUSION = SamplingParams(seed=5, max_tokens=40, commits=True)
AR = replace(DIFFUSION, mode="ar", temperature=1.0, max_tokens=9)
KINDS = {
    "diffusion": DIFFUSION,
    "diffusion, cut": replace(DIFFUSION, max_tokens=19, canvas_length=5),
    "ar": AR,
    "ar, greedy": replace(AR, temperature=None),
    "hybrid": replace(DIFFUSION, mode="hybrid", temperature=1.0, max_tokens=20),
    "max blocks": replace(DIFFUSION, max_blocks=2, max_tokens=40),
    "a second choice": replace(DIFFUSION, choice=1),
}


def random_engine(dtype: torch.dtype = torch.float32) -> Engine:
    """An engine whose model was taught nothing: its replies depend on the noise."""
    generation = replace(GENERATION, max_denoising_steps=8, stop_ids=(TURN,))
    model = random_model(taught_config(), seed=3).to(dtype)
    return Engine(model, TOKENIZER, ChatTemplate(TEMPLATE, TOKENIZER), generation)


PROMPT = ask("anything")


def followed(engine: Engine, params: SamplingParams) -> list[Any]:
    return list(engine.stream(PROMPT, params))


def commits(events: list[Any]) -> list[Committed]:
    return [event for event in events if isinstance(event, Committed)]


def texts(events: list[Any]) -> list[Text]:
    return [event for event in events if isinstance(event, Text)]


def without_times(done: Done) -> Done:
    return replace(done, seconds=0.0, prefill_seconds=0.0, reused_tokens=0, logprobs=())


def logprobs_of(done: Done) -> list[float]:
    return list(done.logprobs)


@pytest.mark.parametrize("kind", KINDS)
def test_a_reply_continues_from_any_commit_in_an_engine_that_never_saw_it(kind: str) -> None:
    events = followed(random_engine(), KINDS[kind])
    made, end = commits(events), events[-1]
    assert len(made) > 1
    for count in range(1, len(made) + 1):
        params = replace(KINDS[kind], committed=tuple(made[:count]))
        again = followed(random_engine(), params)
        assert texts(again) == texts(events)
        assert [commit.ids for commit in commits(again)] == [commit.ids for commit in made]
        assert logprobs_of(again[-1]) == pytest.approx(logprobs_of(end), abs=1e-4)
        assert without_times(again[-1]) == without_times(end)


def test_a_hybrid_reply_continues_within_its_thought_and_after_it() -> None:
    """The thought is committed by hand: what a random model opens, it rarely closes."""
    tokens = [OPEN, 320, 330, CLOSE]
    thought = tuple(Committed(ids=(token,), logprob=-1.0) for token in tokens)
    params = replace(KINDS["hybrid"], committed=thought)
    events = followed(random_engine(), params)
    made = commits(events)
    assert [commit.logprob is None for commit in made[:5]] == [False] * 4 + [True]
    for count in (2, 4, 5):
        again = followed(random_engine(), replace(params, committed=tuple(made[:count])))
        assert commits(again)[:count] == made[:count]
    assert again[-1].ids == events[-1].ids


def test_commits_come_before_their_text_and_only_if_asked_for() -> None:
    engine = random_engine()
    kinds = [type(event) for event in followed(engine, DIFFUSION)]
    assert kinds[0] is Committed
    assert commits(followed(engine, replace(DIFFUSION, commits=False))) == []


def test_steps_and_retries_are_those_of_the_whole_reply() -> None:
    events = followed(random_engine(), DIFFUSION)
    made, done = commits(events), events[-1]
    assert sum(commit.steps for commit in made) == done.steps
    assert sum(commit.retries for commit in made) == done.retries


def test_a_reply_whose_end_is_committed_needs_no_pass() -> None:
    engine = random_engine()
    ended = (Committed(ids=(320, TURN, TURN), steps=2),)
    events = followed(engine, replace(DIFFUSION, committed=ended))
    assert events[-1].ids == (320,)
    assert (events[-1].finish, events[-1].steps) == ("stop", 2)
    assert engine.prefixes.num_bytes == 0


def test_in_16_bits_what_was_committed_stays_as_it_was() -> None:
    events = followed(random_engine(torch.bfloat16), DIFFUSION)
    made = commits(events)
    for count in range(1, len(made)):
        again = followed(
            random_engine(torch.bfloat16), replace(DIFFUSION, committed=tuple(made[:count]))
        )
        assert commits(again)[:count] == made[:count]
        assert again[-1].blocks == len(made)


def test_a_prefix_in_the_cache_serves_a_resumed_reply() -> None:
    engine = random_engine()
    events = followed(engine, DIFFUSION)
    made = commits(events)
    again = followed(engine, replace(DIFFUSION, committed=tuple(made[:2])))
    assert again[-1].reused_tokens == len(PROMPT.ids)  # the rest is the reply's
    assert again[-1].ids == events[-1].ids


def test_commits_that_cannot_be_of_this_reply_are_refused() -> None:
    engine = random_engine()
    ended = Committed(ids=(TURN,))
    with pytest.raises(UsageError, match="after the end"):
        engine.generate(PROMPT, replace(DIFFUSION, committed=(ended, ended)))
    with pytest.raises(UsageError, match="another mode"):
        engine.generate(PROMPT, replace(AR, committed=(Committed(ids=(320,)),)))
    with pytest.raises(UsageError, match="committed token"):
        outside = Committed(ids=(TOKENIZER.vocab_size,))
        engine.generate(PROMPT, replace(DIFFUSION, committed=(outside,)))
    with pytest.raises(UsageError, match="constrained text cannot be continued"):
        engine.generate(PROMPT, replace(DIFFUSION, committed=(ended,)), regex="a+")
