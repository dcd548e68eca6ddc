"""Verified drafts: the tokens of AR, fewer passes, caches that stay in step."""

import random
from dataclasses import replace

import pytest
import torch

from dgemma.config import LongReply
from dgemma.engine import Committed, Done, Draft, Engine, SamplingParams
from dgemma.engine.speculation import (
    MAX_NGRAM,
    SpeculativeParams,
    prompt_lookup,
    speculative,
    speculative_task,
)
from dgemma.errors import UsageError
from dgemma.text.chat import ChatTemplate
from dgemma.weights.load import random_model
from tests.taught import GENERATION, taught_config
from tests.text.small import TEMPLATE, small_tokenizer

PROMPTS = (
    "Rename the variable x to total.\n\ndef f(a):\n    x = 0\n    for b in a:\n        x += b\n"
    "    return x",
    "Write a short story about a dog.",
)


@pytest.fixture(scope="module")
def nano() -> Engine:
    return Engine.load("nano", device="cpu", dtype="float32")


@pytest.mark.parametrize("prompt", PROMPTS)
@pytest.mark.parametrize("drafter", ["ngram", "canvas"])
def test_strict_drafts_give_greedy_ar_in_fewer_passes(
    nano: Engine, prompt: str, drafter: str
) -> None:
    params = SamplingParams(mode="ar", max_tokens=40, seed=3)
    plain = nano.generate(prompt, params)
    speculation = SpeculativeParams(drafter=drafter)  # type: ignore[arg-type]
    done = speculative(nano, prompt, params, speculation)
    assert done.ids == plain.ids and done.finish == plain.finish and done.text == plain.text
    assert done.steps < plain.steps
    assert done.logprobs == pytest.approx(plain.logprobs, abs=2e-3)
    if drafter == "ngram" and prompt.startswith("Rename"):
        assert done.steps < plain.steps / 2


@pytest.mark.parametrize("drafter", ["ngram", "canvas"])
def test_strict_drafts_give_what_ar_draws_with_the_seed(nano: Engine, drafter: str) -> None:
    params = SamplingParams(mode="ar", max_tokens=60, seed=7, temperature=0.8)
    plain = nano.generate(PROMPTS[1], params)
    speculation = SpeculativeParams(drafter=drafter)  # type: ignore[arg-type]
    done = speculative(nano, PROMPTS[1], params, speculation)
    assert done.ids == plain.ids and done.finish == plain.finish and done.text == plain.text
    assert done.logprobs == pytest.approx(plain.logprobs, abs=2e-3)
    assert done.steps < plain.steps
    other = speculative(nano, PROMPTS[1], replace(params, seed=8), speculation)
    assert other.ids != done.ids


def test_a_canvas_is_stepped_in_the_pass_that_verifies(nano: Engine) -> None:
    """Each pass after the second verifies a draft, and all but the last step a canvas."""
    params = SamplingParams(mode="ar", max_tokens=30, temperature=0.8, seed=7)
    before = nano.scheduler.num_passes
    task = speculative_task(nano, PROMPTS[1], params, SpeculativeParams(drafter="canvas"))
    done: Done = nano.run_all([task])[0]
    assert nano.scheduler.num_passes - before == done.steps
    assert done.steps - 2 <= task.draft.num_canvases < done.steps < done.tokens
    assert done.blocks == 0, "no canvas is part of the reply"


def test_several_drafted_replies_share_passes_with_others(nano: Engine) -> None:
    params = SamplingParams(mode="ar", max_tokens=24)
    plain = nano.generate_all(PROMPTS, [params, params])
    tasks = [speculative_task(nano, prompt, params) for prompt in PROMPTS]
    results = nano.run_all([*tasks, nano.generation("Hello!", params)])
    assert [done.ids for done in results[:2]] == [done.ids for done in plain]
    assert results[2].ids == nano.generate("Hello!", params).ids


def test_every_limit_and_stop_cuts_where_ar_is_cut(nano: Engine) -> None:
    for limit in range(1, 8):
        params = SamplingParams(mode="ar", max_tokens=limit)
        for drafter in ("ngram", "canvas"):
            speculation = SpeculativeParams(drafter=drafter)  # type: ignore[arg-type]
            done = speculative(nano, PROMPTS[0], params, speculation)
            assert done.ids == nano.generate(PROMPTS[0], params).ids
    text = nano.generate(PROMPTS[0], SamplingParams(mode="ar", max_tokens=40)).text
    for end in range(6, len(text), 6):
        params = SamplingParams(mode="ar", max_tokens=40, stop=(text[end - 6 : end],))
        plain, plain_kept = nano.generate(PROMPTS[0], params), nano.prefixes.entries[-1].ids
        done, kept = speculative(nano, PROMPTS[0], params), nano.prefixes.entries[-1].ids
        assert (done.text, done.finish) == (plain.text, plain.finish)
        assert done.finish == "stop_string"
        assert kept.tolist() == plain_kept.tolist(), "for a request that continues the reply"


def test_a_sliding_window_is_truncated_with_the_draft() -> None:
    """A window of 12 tokens, drafts of 8 that a random model mostly refuses."""
    config = replace(taught_config(), max_position_embeddings=512, sliding_window=12)
    model, tokenizer = random_model(config, seed=7), small_tokenizer()
    engine = Engine(model, tokenizer, ChatTemplate(TEMPLATE, tokenizer), GENERATION)
    params = SamplingParams(mode="ar", max_tokens=90)
    plain = engine.generate("the cat sat on the mat", params)
    assert plain.tokens > 40
    for drafter in ("ngram", "canvas"):
        speculation = SpeculativeParams(drafter=drafter, num_speculative_tokens=8)  # type: ignore[arg-type]
        done = speculative(engine, "the cat sat on the mat", params, speculation)
        assert done.ids == plain.ids


def test_the_loose_rule_keeps_more_of_a_draft(nano: Engine) -> None:
    params = SamplingParams(mode="ar", max_tokens=48, seed=1)
    passes = [
        speculative(
            nano, PROMPTS[1], params, SpeculativeParams(drafter="canvas", accept=rule)
        ).tokens_per_step
        for rule in ("strict", "loose")
    ]
    assert passes[0] < passes[1]


LONG = LongReply(
    canvas_length=8,
    num_speculative_tokens=3,
    entropy_bound=1.0,
    t_max=0.8,
    t_min=0.8,
    max_denoising_steps=1,
)


@pytest.fixture(scope="module")
def verified() -> Engine:
    """Return nano with long replies that the causal mode verifies."""
    engine = Engine.load("nano", device="cpu", dtype="float32")
    engine.generation_config = replace(engine.generation_config, long_reply=LONG)
    return engine


def test_a_long_reply_of_diffusion_is_what_ar_draws(verified: Engine) -> None:
    params = SamplingParams(seed=7, max_tokens=100)
    done = verified.generate(PROMPTS[1], params)
    plain = verified.generate(PROMPTS[1], replace(params, mode="ar", temperature=LONG.t_max))
    assert (done.mode, done.ids, done.finish) == ("diffusion", plain.ids, plain.finish)
    assert done.steps < plain.steps
    events = list(verified.stream(PROMPTS[1], replace(params, drafts=True)))
    drafts = [event for event in events if isinstance(event, Draft)]
    assert len(drafts) > done.steps / 2 and {len(one.guess) for one in drafts[2:]} <= set(range(9))
    hotter = verified.generate(PROMPTS[1], replace(params, temperature=1.5))
    ar = verified.generate(PROMPTS[1], replace(params, mode="ar", temperature=1.5))
    assert hotter.ids == ar.ids != done.ids


def test_a_reply_that_ends_in_its_first_canvas_is_not_verified(verified: Engine) -> None:
    done = verified.generate("Change cat to dog.\n\nThe cat sat.", SamplingParams(seed=1))
    assert done.blocks == 1 and not done.logprobs


def test_a_verified_reply_goes_on_from_what_was_committed(verified: Engine) -> None:
    """Another engine continues it, at any token, with the same text."""
    params = SamplingParams(seed=7, max_tokens=60, commits=True)
    events = list(verified.stream(PROMPTS[1], params))
    commits = tuple(event for event in events if isinstance(event, Committed))
    done = events[-1]
    assert isinstance(done, Done) and len(commits) == done.tokens
    for count in (1, 2, 7, len(commits) - 1):
        resumed = verified.generate(PROMPTS[1], replace(params, committed=commits[:count]))
        assert (resumed.ids, resumed.finish) == (done.ids, done.finish)


def test_what_sets_its_canvases_is_not_verified(verified: Engine) -> None:
    """A sampler, a canvas length, a constraint and other modes keep their own canvases."""
    for params in (
        SamplingParams(seed=7, max_tokens=40, sampler=verified.sampler),
        SamplingParams(seed=7, max_tokens=40, canvas_length=32),
    ):
        done = verified.generate(PROMPTS[1], params)
        assert done.blocks >= 1 and not done.logprobs
    done = verified.generate(PROMPTS[1], SamplingParams(seed=7, max_tokens=40), regex="[a-z ]{30}")
    assert not done.logprobs
    assert verified.generation(PROMPTS[1], SamplingParams(mode="hybrid")).policy.long is None


def test_the_last_occurrence_is_continued() -> None:
    assert prompt_lookup([1, 2, 3, 9, 1, 2, 3, 8, 7, 1, 2, 3], 2) == (8, 7)
    assert prompt_lookup([5, 1, 2, 6, 2], 3) == (6, 2)
    assert prompt_lookup([1, 2, 3], 3) == () == prompt_lookup([1, 1], 0) == prompt_lookup([1], 4)


def plain_lookup(ids: list[int], count: int) -> tuple[int, ...]:
    """Compare the last n tokens with all earlier ones, the longest n first."""
    for size in range(min(MAX_NGRAM, len(ids) - 1), 0, -1):
        for start in range(len(ids) - size - 1, -1, -1):
            if ids[start : start + size] == ids[-size:]:
                return tuple(ids[start + size : start + size + count])
    return ()


def test_one_scan_finds_what_a_search_for_each_length_finds() -> None:
    choose = random.Random(1)
    for length in range(40):
        for vocab in (1, 2, 3, 9):
            ids = [choose.randrange(vocab) for _ in range(length)]
            for count in (0, 1, 5):
                assert prompt_lookup(ids, count) == plain_lookup(ids, count), ids


def test_what_cannot_be_verified_is_refused(nano: Engine) -> None:
    loose = SpeculativeParams(drafter="canvas", accept="loose")
    with pytest.raises(UsageError, match="loose verification is greedy; leave out the temp"):
        speculative(nano, "a", SamplingParams(temperature=0.5), loose)
    with pytest.raises(UsageError, match="use ngram, canvas or assistant"):
        SpeculativeParams(drafter="mind")  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="draft tokens is 300"):
        replace(SpeculativeParams(), num_speculative_tokens=300)
    with pytest.raises(UsageError, match="1 to 128"):
        speculative(
            nano, "a", None, SpeculativeParams(drafter="canvas", num_speculative_tokens=200)
        )
    assert torch.is_inference_mode_enabled() is False
