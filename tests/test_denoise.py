"""The loop of one block: pins hold, canvases ignore each other, taught models converge."""

from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor

from dgemma.backends.reference import commit
from dgemma.config import ModelConfig
from dgemma.diffusion.canvas import NO_PINS, Noise, Pins
from dgemma.diffusion.denoise import CanvasState, start
from dgemma.diffusion.logit_stats import Query, position_stats
from dgemma.diffusion.reference_step import LOGIT_ELEMENTS, denoise, logit_stats
from dgemma.diffusion.rules import Confidence, SpacedEntropyBound
from dgemma.diffusion.sampler import EntropyBound, Sampler
from dgemma.model.gemma import Gemma
from dgemma.model.kv_cache import Capacity, KVCache
from dgemma.weights.load import random_model
from tests.taught import ANSWERS, CANVAS, LONG, SHORT, answer_ids, ask, taught_model
from tests.tiny import CPU, TINY, configs

QUICK = settings(
    deadline=None, derandomize=True, database=None, phases=(Phase.explicit, Phase.generate)
)
MODEL = random_model(TINY, seed=3)
SAMPLERS = [
    Sampler(rule=EntropyBound(entropy_bound=0.5), max_denoising_steps=5),
    Sampler(rule=EntropyBound(entropy_bound=20.0, confidence_threshold=9.0), max_denoising_steps=7),
    Sampler(rule=Confidence(threshold=0.3), max_denoising_steps=4),
    Sampler(rule=Confidence(), max_denoising_steps=12),
]


def prefilled(model: Gemma, prompt: list[int]) -> KVCache:
    cache = KVCache(model.config, Capacity(tokens=len(prompt) + 32), torch.float32, CPU)
    if prompt:
        commit(model, cache, torch.tensor(prompt), chunk=16)
    return cache


def new_state(
    config: ModelConfig,
    sampler: Sampler,
    pins: Pins = NO_PINS,
    *,
    seed: int = 0,
    block: int = 0,
    length: int | None = None,
) -> CanvasState:
    length = length or config.canvas_length
    noise = Noise(seed=seed).block(
        block, sampler.max_denoising_steps, length, config.vocab_size, CPU
    )
    return start(sampler, noise, pins)


def run(model: Gemma, prompt: list[int], state: CanvasState) -> list[CanvasState]:
    """The state after each step, alone."""
    return [state for (state,) in denoise(model, [prefilled(model, prompt)], [state])]


@dataclass
class Spy:
    """A model that tells what entered it."""

    model: Gemma
    tokens: list[Tensor] = field(default_factory=list)
    softs: list[Tensor | None] = field(default_factory=list)

    def __enter__(self) -> "Spy":
        embed_canvas = self.model.embed_canvas

        def watched(tokens_T: Tensor, soft_TD: Tensor | None) -> Tensor:
            self.tokens.append(tokens_T.clone())
            self.softs.append(None if soft_TD is None else soft_TD.clone())
            return embed_canvas(tokens_T, soft_TD)

        self.model.embed_canvas = watched  # type: ignore[method-assign]
        return self

    def __exit__(self, *_: object) -> None:
        del self.model.embed_canvas


# --- pins


@st.composite
def pinned_cases(draw: Any) -> dict[str, Any]:
    config = draw(configs())
    length = draw(st.integers(1, config.canvas_length))
    positions = draw(st.lists(st.integers(0, length - 1), unique=True, min_size=1))
    token = st.integers(0, config.vocab_size - 1)
    tokens = draw(st.lists(token, min_size=len(positions), max_size=len(positions)))
    return {
        "config": config,
        "length": length,
        "pins": Pins(tuple(positions), tuple(tokens)),
        "sampler": draw(st.sampled_from(SAMPLERS)),
        "prompt": draw(st.lists(token, max_size=20)),
        "seed": draw(st.integers(0, 99)),
    }


@settings(QUICK, max_examples=60)
@given(case=pinned_cases())
def test_pins_hold_in_every_place_of_every_step(case: dict[str, Any]) -> None:
    model, pins = random_model(case["config"], case["seed"]), case["pins"]
    state = new_state(
        case["config"], case["sampler"], pins, seed=case["seed"], length=case["length"]
    )
    where, what = torch.tensor(pins.positions), torch.tensor(pins.tokens)
    with Spy(model) as spy:
        steps = run(model, case["prompt"], state)
    assert len(spy.tokens) == len(steps)
    for entered in spy.tokens:
        assert torch.equal(entered[where], what), "the model saw something else"
    own = model.embed(what)
    assert spy.softs[0] is None, "nothing is known before the first step"
    for soft in spy.softs[1:]:
        assert soft is not None
        assert torch.equal(soft[where], own), "a pin is conditioned on its own token"
    for step in steps:
        canvas = step.canvas
        assert torch.equal(canvas.tokens_L[where], what)
        assert torch.equal(canvas.guess_L[where], what), "what is committed is what was pinned"
        assert canvas.accepted_L[where].all() and (canvas.entropy_L[where] == 0).all()
        assert canvas.pinned_L.nonzero().flatten().tolist() == sorted(pins.positions)


def test_open_positions_are_conditioned_on_what_the_step_thought() -> None:
    """And not, say, on their token, as the pins are."""
    pins = Pins((0, 3), (5, 6))
    with Spy(MODEL) as spy:
        steps = run(MODEL, [1, 2, 3], new_state(TINY, SAMPLERS[0], pins))
    assert spy.softs[1] is not None
    free = [1, 2, 4, 5, 6, 7]
    own = MODEL.embed(steps[0].canvas.tokens_L)
    assert ((spy.softs[1][free] - own[free]).abs().amax(-1) > 0.1).all()
    assert torch.equal(spy.softs[1], steps[0].canvas.soft_LD)


@pytest.mark.parametrize("sampler", SAMPLERS, ids=lambda s: type(s.rule).__name__)
def test_a_canvas_of_pins_alone_converges_after_one_step(sampler: Sampler) -> None:
    pins = Pins(tuple(range(8)), tuple(range(20, 28)))
    steps = run(MODEL, [1, 2], new_state(TINY, sampler, pins))
    assert len(steps) == 1
    assert steps[0].canvas.converged and steps[0].canvas.guess_L.tolist() == list(range(20, 28))


@pytest.mark.parametrize(
    "rule", [EntropyBound(), SpacedEntropyBound(), Confidence()], ids=lambda r: type(r).__name__
)
def test_a_pin_against_the_answer_stands_and_the_rest_converges_around_it(rule: Any) -> None:
    model, expected = taught_model(), answer_ids(SHORT)
    expected[2] = (expected[2] + 40) % model.config.vocab_size
    state = new_state(model.config, Sampler(rule=rule), Pins((2,), (expected[2],)), seed=1)
    last = run(model, list(ask(SHORT).ids), state)[-1].canvas
    assert last.converged and last.num_steps < 20
    assert last.guess_L.tolist() == expected


def test_a_pinned_answer_is_completed_around_its_pins() -> None:
    model, ids = taught_model(), answer_ids(SHORT)
    pins = Pins((0, 5, 8), (ids[0], ids[5], ids[8]))
    last = run(model, list(ask(SHORT).ids), new_state(model.config, Sampler(), pins))[-1].canvas
    assert last.converged and last.guess_L.tolist() == ids


# --- canvases in company


@dataclass(frozen=True)
class Member:
    """One canvas of a batch: its prompt, canvas, sampler and seed."""

    prompt: list[int]
    length: int
    sampler: Sampler
    seed: int
    pins: Pins = NO_PINS

    def new_state(self, config: ModelConfig) -> CanvasState:
        return new_state(config, self.sampler, self.pins, seed=self.seed, length=self.length)


@st.composite
def members(draw: Any) -> Member:
    length = draw(st.integers(1, TINY.canvas_length))
    pins = draw(st.sampled_from([NO_PINS, Pins((0,), (7,))]))
    prompt = draw(st.lists(st.integers(0, 60), min_size=1, max_size=30))
    return Member(prompt, length, draw(st.sampled_from(SAMPLERS)), draw(st.integers(0, 999)), pins)


@settings(QUICK, max_examples=30)
@given(batch=st.lists(members(), min_size=2, max_size=4))
def test_a_row_moves_the_same_alone_and_in_company(batch: list[Member]) -> None:
    """Whatever the others' lengths, canvases and samplers, and however soon they are done."""
    caches = [prefilled(MODEL, member.prompt) for member in batch]
    together = list(denoise(MODEL, caches, [member.new_state(TINY) for member in batch]))
    for index, member in enumerate(batch):
        alone = run(MODEL, member.prompt, member.new_state(TINY))
        # A done one is the same object in all later steps: it left the pass.
        path = [states[index] for states in together]
        assert all(state is path[len(alone) - 1] for state in path[len(alone) :])
        for mine, theirs in zip(alone, path, strict=False):
            assert torch.equal(mine.canvas.tokens_L, theirs.canvas.tokens_L)
            assert torch.equal(mine.canvas.guess_L, theirs.canvas.guess_L)
            assert mine.canvas.num_steps == theirs.canvas.num_steps
            assert mine.canvas.converged == theirs.canvas.converged
    for cache, member in zip(caches, batch, strict=True):
        assert cache.length == len(member.prompt), "a step wrote to the cache"


def test_noise_follows_the_seed_and_the_block_and_not_the_slot() -> None:
    states = [new_state(TINY, SAMPLERS[0], seed=seed) for seed in (4, 5, 4)]
    caches = [prefilled(MODEL, [1, 2]) for _ in states]
    *_, last = denoise(MODEL, caches, states)
    guesses = [state.canvas.guess_L.tolist() for state in last]
    assert guesses[0] == guesses[2]
    assert guesses[0] != guesses[1]
    other = run(MODEL, [1, 2], new_state(TINY, SAMPLERS[0], seed=4, block=1))[-1]
    assert other.canvas.guess_L.tolist() != guesses[0]


@settings(QUICK, max_examples=30)
@given(member=members())
def test_a_row_takes_at_least_one_step_and_never_more_than_allowed(member: Member) -> None:
    steps = run(MODEL, member.prompt, member.new_state(TINY))
    counts = [state.canvas.num_steps for state in steps]
    assert counts == list(range(1, len(steps) + 1))
    assert 1 <= len(steps) <= member.sampler.max_denoising_steps
    assert all(not state.is_done for state in steps[:-1]) and steps[-1].is_done
    assert len(steps) == member.sampler.max_denoising_steps or steps[-1].canvas.converged


def test_every_step_uses_its_own_temperature_and_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    sampler = Sampler(rule=EntropyBound(entropy_bound=1e-6), max_denoising_steps=5)
    state, queries = new_state(TINY, sampler, seed=9), []

    def watched(raw_TV: Tensor, softcap: float | None, query: Query) -> Any:
        queries.append(query)
        return position_stats(raw_TV, softcap, query)

    monkeypatch.setattr("dgemma.diffusion.reference_step.position_stats", watched)
    for number, after in enumerate(run(MODEL, [1, 2], state), start=1):
        query, temperature = (
            queries[number - 1],
            sampler.temperature_at(sampler.max_denoising_steps - number + 1),
        )
        assert torch.equal(query.uniform_T, state.noise.uniform_NL[number])
        assert query.temperature_T.tolist() == pytest.approx([temperature] * 8)
        renoised = ~after.canvas.accepted_L
        assert renoised.any()
        expected = state.noise.tokens_NL[number][renoised]
        assert torch.equal(after.canvas.tokens_L[renoised], expected)


def test_the_temperature_reaches_the_entropy() -> None:
    """The first step of a hot sampler leaves more open than that of a cool one."""
    mild = Sampler(max_denoising_steps=1, t_max=0.5, t_min=0.5)
    hot = replace(mild, t_max=5.0)
    entropies = [
        run(MODEL, [1, 2], new_state(TINY, sampler))[0].canvas.entropy_L.mean()
        for sampler in (mild, hot)
    ]
    assert entropies[1] > entropies[0] + 0.1


# --- taught models


@pytest.mark.parametrize("question", ANSWERS)
@pytest.mark.parametrize("seed", [1, 2])
def test_a_taught_model_converges_on_the_taught_text(question: str, seed: int) -> None:
    model, expected = taught_model(), answer_ids(question)
    cache = prefilled(model, list(ask(question).ids))
    for block in range(len(expected) // CANVAS):
        state = new_state(model.config, Sampler(), seed=seed, block=block)
        *_, (last,) = denoise(model, [cache], [state])
        assert last.canvas.converged and last.canvas.num_steps < 48
        assert last.canvas.guess_L.tolist() == expected[block * CANVAS : (block + 1) * CANVAS]
        commit(model, cache, last.canvas.guess_L, chunk=5)


def test_the_confidence_rule_gives_the_taught_text_too() -> None:
    model, sampler = taught_model(), Sampler(rule=Confidence())
    steps = run(model, list(ask(SHORT).ids), new_state(model.config, sampler, seed=1))
    assert steps[-1].canvas.converged and steps[-1].canvas.guess_L.tolist() == answer_ids(SHORT)


def test_a_canvas_shorter_than_the_models_own_works() -> None:
    """It was not taught so, but the beginning of the answer is clear enough."""
    model, prompt = taught_model(), list(ask(LONG).ids)
    for length in (1, 9):
        last = run(model, prompt, new_state(model.config, Sampler(), length=length))[-1].canvas
        assert last.length == len(last.guess_L) == length
        assert ((last.guess_L >= 0) & (last.guess_L < model.config.vocab_size)).all()


# --- the vocabulary-sized work


def test_reading_out_in_pieces_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    hidden = torch.randn(10, TINY.hidden_size, generator=torch.Generator().manual_seed(0))
    query = Query(
        temperature_T=torch.linspace(0.4, 0.8, 10),
        uniform_T=torch.linspace(0, 0.99, 10).double(),
        current_T=torch.arange(10),
    )
    whole, whole_soft = logit_stats(MODEL, hidden, query)
    monkeypatch.setitem(LOGIT_ELEMENTS, "cpu", 3 * TINY.vocab_size)
    pieces, pieces_soft = logit_stats(MODEL, hidden, query)
    torch.testing.assert_close(whole_soft, pieces_soft)
    for name in whole.__slots__:
        torch.testing.assert_close(getattr(whole, name), getattr(pieces, name))


def test_committing_in_chunks_gives_the_last_hidden_state() -> None:
    prompt = torch.arange(1, 24)
    caches = [KVCache(TINY, Capacity(tokens=32), torch.float32, CPU) for _ in range(2)]
    whole = commit(MODEL, caches[0], prompt, chunk=99)
    pieces = commit(MODEL, caches[1], prompt, chunk=4)
    assert whole.shape == (1, TINY.hidden_size)
    torch.testing.assert_close(whole, pieces, atol=1e-4, rtol=0)
    assert caches[0].length == caches[1].length == 23
