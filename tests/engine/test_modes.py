"""AR and hybrid modes, scores, the guard and budgets, on tiny real models."""

import math
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from transformers import Gemma4ForCausalLM
from transformers.models.gemma4 import Gemma4TextConfig

from dgemma.backends.reference import commit
from dgemma.config import GenerationConfig, ModelConfig, config_to_json
from dgemma.diffusion.canvas import NO_PINS, Noise
from dgemma.diffusion.denoise import start
from dgemma.diffusion.reference_step import denoise
from dgemma.engine import Done, Draft, Engine, Retry, SamplingParams
from dgemma.engine.canvas_policy import has_loop, output_fault
from dgemma.engine.scoring import Score
from dgemma.errors import UsageError
from dgemma.model.gemma import Gemma
from dgemma.model.kv_cache import Capacity, KVCache
from dgemma.text.chat import Prompt
from examples.memorize import memorize
from tests.text.small import small_tokenizer
from tests.tiny import CPU, TINY, ours, shake, twin

TOKENIZER = small_tokenizer()
CONFIG = replace(TINY, vocab_size=TOKENIZER.vocab_size, canvas_length=8)
OPEN, CLOSE, TURN = (
    TOKENIZER.control_ids[name] for name in ("<|channel>", "<channel|>", "<turn|>")
)


def score(engine: Engine, ids: Sequence[int], texts: Sequence[Sequence[int]]) -> list[Score]:
    return engine.run(engine.score_program(ids, texts))


def random_engine(seed: int, config: ModelConfig = CONFIG) -> Engine:
    reference = twin(replace(config, family="diffusion_gemma"))
    shake(reference, seed)
    return engine_of(ours(config, reference))


def engine_of(model: Gemma) -> Engine:
    generation = GenerationConfig(stop_ids=(TURN,), max_new_tokens=24, max_denoising_steps=12)
    return Engine(model, TOKENIZER, None, generation)


def prompt(length: int, seed: int) -> Prompt:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(300, CONFIG.vocab_size, (length,), generator=generator)
    return Prompt(text="", ids=tuple(ids.tolist()))


@pytest.mark.parametrize("seed", range(8))
def test_greedy_ar_mode_gives_the_tokens_of_the_autoregressive_sibling(seed: int) -> None:
    engine = random_engine(seed)
    text = config_to_json(replace(CONFIG, family="gemma4"))["text_config"]
    sibling = Gemma4ForCausalLM(Gemma4TextConfig(**text)).eval()
    weights = engine.model.state_dict()
    theirs = sibling.state_dict()
    for name in theirs:
        source = name.removeprefix("model.").replace("lm_head", "embed_tokens")
        theirs[name].copy_(weights[source])
    request = prompt(length=5 + 4 * seed, seed=seed)
    with torch.no_grad():
        output = sibling.generate(
            torch.tensor([request.ids]), do_sample=False, max_new_tokens=20, eos_token_id=TURN
        )
    expected = [token for token in output[0, len(request.ids) :].tolist() if token != TURN]
    done = engine.generate(request, SamplingParams(mode="ar", max_tokens=20))
    assert list(done.ids) == expected


def test_ar_log_probabilities_are_those_of_scoring_the_text() -> None:
    engine = random_engine(3)
    request = prompt(20, seed=3)
    done = engine.generate(
        request, SamplingParams(mode="ar", max_tokens=12, temperature=1.0, seed=5)
    )
    (scored,) = score(engine, request.ids, [done.ids])
    assert done.logprobs == pytest.approx(scored.logprobs, abs=1e-4)
    assert len(done.logprobs) == done.tokens


@pytest.mark.parametrize("chunk", [512, 12])
def test_scores_of_several_texts_equal_those_of_each_alone(
    chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = random_engine(4)
    request = prompt(30, seed=1)
    texts = [prompt(length, seed=length).ids for length in (1, 2, 9, 17, 5, 6, 13)]
    with monkeypatch.context() as small:
        small.setattr("dgemma.engine.scoring.MAX_TOKENS_PER_PASS", chunk)
        together = score(engine, request.ids, texts)
    for text, scored in zip(texts, together, strict=True):
        (alone,) = score(engine, request.ids, [text])
        assert scored.logprobs == pytest.approx(alone.logprobs, abs=1e-5)
        assert scored.total == pytest.approx(sum(scored.logprobs))


def test_choices_are_ranked_by_likelihood() -> None:
    engine = random_engine(5)
    ranked = engine.rank(prompt(8, seed=1), ["the call", "thought", "a"])
    totals = [scored.total for _, scored in ranked]
    assert totals == sorted(totals, reverse=True)
    with pytest.raises(UsageError, match="at least one token"):
        engine.rank(prompt(8, seed=1), ["", "a"])


def test_sampled_ar_mode_repeats_with_its_seed_and_varies_without() -> None:
    engine = random_engine(6)
    options = [
        SamplingParams(mode="ar", temperature=1.0, seed=seed, max_tokens=16) for seed in (1, 1, 2)
    ]
    first, again, other = (engine.generate(prompt(9, seed=0), option).ids for option in options)
    assert first == again
    assert first != other


def test_hybrid_mode_equals_ar_then_diffusion_done_by_hand() -> None:
    """A taught model thinks in AR until the channel closes, then one canvas is denoised."""
    model = ours(CONFIG, twin(CONFIG))
    request = prompt(6, seed=2)
    thought = torch.tensor([OPEN, *TOKENIZER.encode("thought"), CLOSE])
    answer = torch.tensor([*TOKENIZER.encode("the call"), TURN])
    question = torch.tensor(request.ids)
    pairs = [
        (question, _filled(torch.cat([thought, answer]))),
        (torch.cat([question, thought]), _filled(answer)),
    ]
    for _ in memorize(model, pairs, steps=260):
        pass
    engine = engine_of(model)
    done = engine.generate(request, SamplingParams(mode="hybrid", seed=4, max_tokens=24))
    ar = engine.generate(request, SamplingParams(mode="ar", max_tokens=len(thought)))
    assert list(ar.ids) == thought.tolist(), "the model was taught this thought"
    by_hand = _denoise_after([*request.ids, *ar.ids], engine, seed=4)
    assert list(done.ids) == [*ar.ids, *by_hand]
    assert done.reply.thought or done.reply.answer


def _filled(tokens: torch.Tensor) -> torch.Tensor:
    return torch.cat([tokens, tokens.new_full((-len(tokens) % CONFIG.canvas_length,), TURN)])


def _denoise_after(ids: list[int], engine: Engine, seed: int) -> list[int]:
    cache = KVCache(CONFIG, Capacity(tokens=len(ids) + 64), torch.float32, CPU)
    commit(engine.model, cache, torch.tensor(ids), chunk=5)
    answer: list[int] = []
    for block in range(3):
        noise = Noise(seed=seed).block(
            block, engine.sampler.max_denoising_steps, CONFIG.canvas_length, CONFIG.vocab_size, CPU
        )
        *_, (row,) = denoise(engine.model, [cache], [start(engine.sampler, noise, NO_PINS)])
        guess = row.canvas.guess_L.tolist()
        if TURN in guess:
            return [*answer, *guess[: guess.index(TURN)]]
        answer += guess
        commit(engine.model, cache, row.canvas.guess_L, chunk=5)
    raise AssertionError("the taught answer ends with a stop")


def test_a_checkpoint_without_a_denoiser_runs_in_ar_mode_alone() -> None:
    config = replace(CONFIG, family="gemma4")
    model = Gemma(config)
    weights = ours(CONFIG, twin(CONFIG)).state_dict()
    model.load_state_dict({name: weights[name] for name in model.state_dict()})
    engine = engine_of(model.requires_grad_(False))
    assert engine.generate(prompt(5, 0), SamplingParams(mode="ar", max_tokens=4)).steps >= 1
    for mode in ("diffusion", "hybrid"):
        with pytest.raises(UsageError, match=f"mode {mode} is not possible"):
            engine.generate(prompt(5, 0), SamplingParams(mode=mode))


def test_the_guard_names_what_went_wrong() -> None:
    calm = [0.1] * 80
    assert output_fault([1, 5, 6], calm, {1}, is_first=True) == "empty"
    assert output_fault([1, 5, 6], calm, {1}, is_first=False) == ""
    assert output_fault([5, 6], [0.1, math.nan], {1}, is_first=False) == "not a number"
    assert output_fault([7] * 60, calm, {1}, is_first=False) == "repetition"
    assert output_fault([7, 8, 9] * 20, calm, {1}, is_first=False) == "repetition"
    assert output_fault(list(range(10, 70)), calm, {1}, is_first=False) == ""
    assert output_fault([5, *([1] * 59)], calm, {1}, is_first=True) == "", (
        "fill behind a stop is no loop"
    )
    assert not has_loop([7] * 20), "a short run is not a loop"


def test_a_canvas_that_went_wrong_is_done_again_a_bounded_number_of_times() -> None:
    """Weights that are not numbers make every canvas wrong: all retries are used, and reported."""
    engine = random_engine(7)
    engine.model.norm.weight.data.fill_(math.nan)
    events = list(engine.stream(prompt(4, 0), SamplingParams(seed=1, retries=2, max_tokens=8)))
    retries = [event for event in events if isinstance(event, Retry)]
    assert [event.retry for event in retries] == [1, 2]
    assert {event.reason for event in retries} == {"not a number"}
    assert isinstance(events[-1], Done)
    assert events[-1].retries == 2
    assert events[-1].finish == "fault"
    assert events[-1].fault == "not a number"
    assert events[-1].text == ""
    ar = engine.generate(prompt(4, 0), SamplingParams(mode="ar", max_tokens=8))
    assert (ar.finish, ar.fault) == ("fault", "not a number")
    calm = list(engine.stream(prompt(4, 0), SamplingParams(seed=1, retries=0, max_tokens=8)))
    assert not any(isinstance(event, Retry) for event in calm)


def test_a_retry_uses_other_noise() -> None:
    engine = random_engine(8)
    engine.model.norm.weight.data.fill_(math.nan)
    drafts = [
        event.ids
        for event in engine.stream(
            prompt(4, 0), SamplingParams(seed=1, retries=1, drafts=True, max_tokens=8)
        )
        if isinstance(event, Draft) and event.step == 1
    ]
    assert len(drafts) == 2
    assert drafts[0] != drafts[1]


@pytest.mark.parametrize("limit", [1, 3])
def test_a_step_budget_returns_the_partly_refined_canvas(limit: int) -> None:
    engine = random_engine(9)
    done = engine.generate(prompt(6, 0), SamplingParams(seed=2, max_steps=limit, retries=0))
    assert done.finish == "budget"
    assert done.steps == limit
    assert done.remaining_entropy > 0
    assert done.tokens > 0


def test_a_time_budget_ends_a_request() -> None:
    engine = random_engine(10)
    done = engine.generate(prompt(6, 0), SamplingParams(seed=2, max_seconds=1e-9, retries=0))
    assert done.finish == "budget"
