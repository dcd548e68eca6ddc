"""How a canvas moves: hand-worked cases, the reference's own classes, and properties."""

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers.models.diffusion_gemma.generation_diffusion_gemma import (
    EntropyBoundSampler,
    EntropyBoundSamplerConfig,
    LinearTemperatureScheduleLogitsProcessor,
    StableAndConfidentStoppingCriteria,
)

from dgemma.cli.app import load_rule
from dgemma.config import GenerationConfig, load_generation_config
from dgemma.diffusion.canvas import Canvas, Pins, initial_canvas
from dgemma.diffusion.logit_stats import PositionStats
from dgemma.diffusion.rules import Confidence, SpacedEntropyBound
from dgemma.diffusion.sampler import (
    Decision,
    EntropyBound,
    Sampler,
    accept_mask,
    advance,
    released_sampler,
)
from dgemma.engine import Engine, SamplingParams
from dgemma.errors import UsageError
from examples.own_rule import FixedCount
from tests.constrain.small_engines import random_engine
from tests.tiny import GENERATION

RELEASED = Path(__file__).resolve().parents[2] / "shared" / "checkpoint"
QUICK = settings(deadline=None, derandomize=True, database=None)
VOCAB = 9
NAN, INF = float("nan"), float("inf")


def stats(
    top: list[int],
    entropy: list[float] | None = None,
    top_p: list[float] | None = None,
    held_p: list[float] | None = None,
    draw: list[int] | None = None,
) -> PositionStats:
    """What a step might have seen; positions are sure of their tokens unless said otherwise."""
    length = len(top)
    return PositionStats(
        draw_T=torch.tensor(draw or top),
        top_T=torch.tensor(top),
        entropy_T=torch.tensor(entropy or [0.0] * length),
        top_p_T=torch.tensor(top_p or [1.0] * length),
        current_p_T=torch.tensor(held_p or [1.0] * length),
    )


# --- the entropy bound


@pytest.mark.parametrize(
    ("entropy", "bound", "kept"),
    [
        # The most certain is always accepted, however unsure.
        ([5.0, 4.0, 6.0], 0.1, [False, True, False]),
        ([3.0], 0.1, [True]),
        # What those before it leave open must fit: 0 | 0.04 | 0.04 + 0.05 | 0.04 + 0.05 + 0.06.
        ([0.05, 9.0, 0.04, 0.06], 0.1, [True, False, True, True]),
        ([0.05, 9.0, 0.04, 0.06], 0.15, [True, True, True, True]),
        ([0.05, 9.0, 0.04, 0.06], 0.08, [True, False, True, False]),
        # The bound itself still fits.
        ([0.5, 0.5, 0.5], 0.5, [True, True, False]),
        ([0.0, 0.0, 0.0, 7.0], 0.1, [True, True, True, True]),
        # Pins come as infinitely unsure, and are never kept by the rule.
        ([INF, 0.0, INF], 0.1, [False, True, False]),
        ([INF, INF], 0.1, [False, False]),
    ],
)
def test_the_most_certain_positions_are_kept_while_they_fit_the_bound(
    entropy: list[float], bound: float, kept: list[bool]
) -> None:
    assert accept_mask(torch.tensor(entropy), bound).tolist() == kept


@settings(QUICK, max_examples=100)
@given(
    length=st.integers(1, 32),
    spread=st.sampled_from([0.0, 0.5, 3.0, 20.0]),
    bound=st.sampled_from([0.01, 0.1, 1.0, 30.0]),
    seed=st.integers(0, 9999),
)
def test_the_kept_positions_are_those_of_the_reference(
    length: int, spread: float, bound: float, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = spread * torch.randn(1, length, VOCAB, generator=generator)
    logits *= torch.rand(length, 1, generator=generator) * 3
    peer = EntropyBoundSampler(EntropyBoundSamplerConfig(bound), length, VOCAB, 48)
    current, drawn = torch.zeros(1, length).long(), torch.ones(1, length).long()
    # Its sort leaves equal entropies in any order on a CPU, in that of positions on a GPU.
    with patch.object(torch, "sort", partial(torch.sort, stable=True)):
        accepted = peer.accept_canvas(current, drawn, logits, cur_step=7)[0]
    entropy = torch.distributions.Categorical(logits=logits[0]).entropy()
    kept = accept_mask(entropy, bound)
    assert torch.equal(kept, peer.accepted_token_mask[0])
    assert torch.equal(torch.where(kept, drawn[0], current[0]), accepted)
    assert entropy[kept].min() == entropy.min()


@pytest.mark.parametrize("length", [8, 17, 32, 256])
def test_of_equal_entropies_the_first_positions_are_kept(length: int) -> None:
    entropy = torch.full((length,), 0.5)
    entropy[length // 2] = 0.25
    kept = accept_mask(entropy, 1.0)
    assert kept.nonzero().flatten().tolist() == [0, 1, length // 2]


def test_a_step_holds_what_is_kept_and_renoises_the_rest() -> None:
    canvas = initial_canvas(torch.tensor([50, 51, 52]))
    seen = stats(top=[1, 2, 3], draw=[4, 5, 6], entropy=[0.3, 0.01, 2.0])
    moved = advance(canvas, seen, torch.tensor([70, 71, 72]), EntropyBound(entropy_bound=0.1))
    assert moved.accepted_L.tolist() == [True, True, False]
    assert moved.tokens_L.tolist() == [4, 5, 72], "kept positions take the draw, not the top"
    assert moved.guess_L.tolist() == [1, 2, 3], "the guess is the top everywhere"
    assert moved.entropy_L.tolist() == pytest.approx([0.3, 0.01, 2.0])
    assert moved.num_steps == 1 and not moved.converged
    assert canvas.num_steps == 0 and canvas.tokens_L.tolist() == [50, 51, 52]


def test_a_kept_position_is_decided_anew_in_the_next_step() -> None:
    canvas = initial_canvas(torch.tensor([50, 51]))
    rule = EntropyBound(entropy_bound=0.1)
    moved = advance(canvas, stats([1, 2], entropy=[0.0, 5.0]), torch.tensor([70, 71]), rule)
    again = advance(moved, stats([3, 4], entropy=[5.0, 0.0]), torch.tensor([80, 81]), rule)
    assert moved.tokens_L.tolist() == [1, 2]
    assert again.tokens_L.tolist() == [3, 4]
    third = advance(again, stats([3, 4], entropy=[5.0, 4.0]), torch.tensor([90, 91]), rule)
    assert third.tokens_L.tolist() == [90, 4]


# --- converging


def peer_verdicts(steps: list[tuple[list[int], float]], threshold: int) -> list[bool]:
    """What the reference says after each step, given each step's top tokens and logit spread."""
    peer = StableAndConfidentStoppingCriteria(threshold, confidence_threshold=0.005)
    return [
        bool(peer(argmax_canvas=torch.tensor([top]), logits=spread * one_hot(top)[None])[0])
        for top, spread in steps
    ]


def one_hot(top: list[int]) -> Tensor:
    return torch.nn.functional.one_hot(torch.tensor(top), VOCAB).float()


@settings(QUICK, max_examples=150)
@given(
    threshold=st.integers(0, 3),
    tops=st.lists(
        st.tuples(st.sampled_from([[1, 2], [1, 3], [4, 2]]), st.sampled_from([1.0, 20.0, 20.0])),
        min_size=1,
        max_size=10,
    ),
)
def test_a_canvas_converges_when_the_reference_stops(
    threshold: int, tops: list[tuple[list[int], float]]
) -> None:
    rule = EntropyBound(stability_threshold=threshold)
    canvas = initial_canvas(torch.tensor([0, 0]))
    verdicts = []
    for top, spread in tops:
        logits = spread * one_hot(top)
        entropy = torch.distributions.Categorical(logits=logits).entropy().tolist()
        canvas = advance(canvas, stats(top, entropy), torch.tensor([0, 0]), rule)
        verdicts.append(bool(canvas.converged))
    assert verdicts == peer_verdicts(tops, threshold)


@pytest.mark.parametrize(
    ("threshold", "converged_at"), [(0, [True] * 4), (1, [False, True, True, True])]
)
def test_a_sure_and_steady_canvas_converges_as_early_as_allowed(
    threshold: int, converged_at: list[bool]
) -> None:
    canvas, verdicts = initial_canvas(torch.tensor([0, 0])), []
    for _ in range(4):
        rule = EntropyBound(stability_threshold=threshold)
        canvas = advance(canvas, stats([1, 2]), torch.tensor([0, 0]), rule)
        verdicts.append(bool(canvas.converged))
    assert verdicts == converged_at


@pytest.mark.parametrize(("mean", "converges"), [(0.0049, True), (0.005, False), (0.1, False)])
def test_the_mean_entropy_must_be_strictly_below_the_bound(mean: float, converges: bool) -> None:
    rule = EntropyBound(confidence_threshold=0.005, stability_threshold=0)
    # One position unsure, the other not at all: it is the mean that counts.
    canvas = initial_canvas(torch.tensor([0, 0]))
    canvas = advance(canvas, stats([1, 2], [0.0, 2 * mean]), torch.tensor([0, 0]), rule)
    assert bool(canvas.converged) == converges


# --- temperature


@settings(QUICK, max_examples=50)
@given(
    max_steps=st.integers(1, 64),
    low=st.floats(0.05, 1.0),
    more=st.floats(0.01, 2.0),
    step=st.integers(0, 63),
)
def test_the_temperature_of_a_step_is_that_of_the_reference(
    max_steps: int, low: float, more: float, step: int
) -> None:
    steps_left = max_steps - step % max_steps
    sampler = Sampler(max_denoising_steps=max_steps, t_max=low + more, t_min=low)
    peer = LinearTemperatureScheduleLogitsProcessor(low, low + more, max_steps)
    scores = peer(torch.zeros(1, 1).long(), torch.ones(1, 1).double(), cur_step=steps_left)
    assert 1 / sampler.temperature_at(steps_left) == pytest.approx(scores.item())


def test_the_first_step_is_hottest_and_the_last_not_quite_at_the_end() -> None:
    sampler = Sampler(max_denoising_steps=4, t_max=0.8, t_min=0.4)
    assert [round(sampler.temperature_at(left), 6) for left in (4, 3, 2, 1)] == [0.8, 0.7, 0.6, 0.5]


# --- pins


PINS = Pins((1, 3), (7, 8))
RULES = [EntropyBound(entropy_bound=0.1), SpacedEntropyBound(entropy_bound=9.0), Confidence()]


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: type(rule).__name__)
def test_pins_keep_their_token_whatever_the_step_says(rule: Any) -> None:
    canvas = initial_canvas(torch.tensor([50, 51, 52, 53]), PINS)
    for entropy in ([9.0, 0.0, 9.0, 0.0], [0.0, 9.0, 0.0, 9.0]):
        seen = stats([1, 2, 3, 4], entropy, top_p=[0.95, 0.99, 0.95, 0.99], held_p=[0.0] * 4)
        canvas = advance(canvas, seen, torch.tensor([70, 71, 72, 73]), rule)
        assert canvas.tokens_L[1] == 7 and canvas.tokens_L[3] == 8
        assert canvas.guess_L[1] == 7 and canvas.guess_L[3] == 8
        assert canvas.accepted_L[1] and canvas.accepted_L[3]
        assert canvas.entropy_L[1] == 0 and canvas.entropy_L[3] == 0


def test_pins_use_up_none_of_the_bound() -> None:
    """The pins are unsure here; both open positions fit the bound without them."""
    canvas = initial_canvas(torch.tensor([50, 51, 52, 53]), PINS)
    seen = stats([1, 2, 3, 4], [0.2, 0.05, 0.06, 0.04])
    moved = advance(canvas, seen, torch.tensor([70, 71, 72, 73]), EntropyBound(entropy_bound=0.07))
    assert moved.tokens_L.tolist() == [1, 7, 3, 8]


def test_the_most_certain_open_position_moves_even_if_pins_are_surer() -> None:
    canvas = initial_canvas(torch.tensor([50, 51, 52, 53]), PINS)
    seen = stats([1, 2, 3, 4], [6.0, 0.0, 5.0, 0.0])
    moved = advance(canvas, seen, torch.tensor([70, 71, 72, 73]), EntropyBound(entropy_bound=0.1))
    assert moved.tokens_L.tolist() == [70, 7, 3, 8]


@pytest.mark.parametrize(("open_entropy", "converges"), [(0.001, True), (0.006, False)])
def test_the_test_for_converging_looks_past_the_pins(open_entropy: float, converges: bool) -> None:
    """Unsure pins do not delay it, sure ones do not hasten it, and their top may change."""
    rule = EntropyBound(confidence_threshold=0.005, stability_threshold=1)
    for pin_entropy in (0.0, 9.0):
        canvas = initial_canvas(torch.tensor([50, 51, 52, 53]), PINS)
        for pinned_top in (2, 3):
            seen = stats(
                [1, pinned_top, 3, pinned_top],
                [open_entropy, pin_entropy, open_entropy, pin_entropy],
            )
            canvas = advance(canvas, seen, torch.zeros(4).long(), rule)
        assert bool(canvas.converged) == converges


@pytest.mark.parametrize("rule", [*RULES, EntropyBound(stability_threshold=3)])
def test_a_canvas_of_pins_alone_converges_at_once(rule: Any) -> None:
    canvas = initial_canvas(torch.tensor([50, 51]), Pins((0, 1), (7, 8)))
    seen = stats([1, 2], [9.0, 9.0], top_p=[0.1, 0.1], held_p=[0.0, 0.0])
    moved = advance(canvas, seen, torch.tensor([70, 71]), rule)
    assert moved.converged and moved.guess_L.tolist() == [7, 8]


# --- apart


@pytest.mark.parametrize(
    ("draw", "entropy", "reach", "kept"),
    [
        # Sure ones stand side by side, doubtful ones do not, the most certain of them is decided.
        ([1, 2, 3], [0.0, 0.1, 0.05], 2, [True, True, True]),
        ([1, 2, 3], [0.4, 0.3, 0.5], 2, [False, True, False]),
        ([1, 2, 3], [0.3, 0.4, 0.5], 1, [True, False, False]),
        ([1, 2, 3], [0.3, 0.5, 0.4], 1, [True, False, True]),
        ([1, 2, 3], [0.3, 0.5, 0.4], 2, [True, False, False]),
        # A sure neighbour does no harm, unless it is the same.
        ([1, 2, 3], [0.0, 0.5, 0.0], 2, [True, True, True]),
        ([1, 1, 3], [0.0, 0.5, 0.0], 2, [True, False, True]),
        ([1, 2, 1], [0.0, 0.1, 0.5], 2, [True, True, False]),
        ([1, 2, 1], [0.0, 0.1, 0.5], 1, [True, True, True]),
        ([1, 1, 1], [0.0, 0.1, 0.0], 2, [True, True, True]),
        # Of equals the first.
        ([1, 2, 3], [0.5, 0.5, 0.5], 1, [True, False, False]),
    ],
)
def test_what_is_in_doubt_is_decided_apart(
    draw: list[int], entropy: list[float], reach: int, kept: list[bool]
) -> None:
    canvas, noise = initial_canvas(torch.tensor([50, 51, 52])), torch.tensor([70, 71, 72])
    seen = stats(top=[4, 5, 6], draw=draw, entropy=entropy)
    moved = advance(
        canvas, seen, noise, SpacedEntropyBound(entropy_bound=9.0, min_entropy=0.1, reach=reach)
    )
    assert moved.accepted_L.tolist() == kept
    assert moved.tokens_L.tolist() == torch.where(torch.tensor(kept), seen.draw_T, noise).tolist()
    assert moved.guess_L.tolist() == [4, 5, 6]


@settings(QUICK, max_examples=100)
@given(
    cells=st.lists(
        st.tuples(
            st.integers(0, 3),
            st.sampled_from([0.0, 0.05, 0.1, 0.2, 0.2, 0.7, 3.0]),
            st.sampled_from([False, False, True]),
        ),
        min_size=1,
        max_size=9,
    ),
    bound=st.sampled_from([0.1, 1.0, 30.0]),
    reach=st.integers(1, 4),
)
def test_the_rule_apart_takes_from_the_entropy_rule_what_is_near_a_surer_one(
    cells: list[tuple[int, float, bool]], bound: float, reach: int
) -> None:
    draw, entropy, pinned = (list(column) for column in zip(*cells, strict=True))
    pins = Pins(
        tuple(i for i, is_pinned in enumerate(pinned) if is_pinned),
        tuple(9 for is_pinned in pinned if is_pinned),
    )
    canvas = initial_canvas(torch.full((len(draw),), 50), pins)
    seen = stats(top=draw, entropy=entropy)
    loose = EntropyBound(entropy_bound=bound).decide(canvas, seen)
    rule = SpacedEntropyBound(entropy_bound=bound, reach=reach)
    decided = rule.decide(canvas, seen)
    for i, was_kept in enumerate(loose.accepted_L.tolist()):
        late = entropy[i] > rule.min_entropy and any(
            loose.accepted_L[j]
            and (entropy[j], j) < (entropy[i], i)
            and (entropy[j] > rule.min_entropy or draw[j] == draw[i])
            for j in range(max(0, i - reach), min(len(draw), i + reach + 1))
        )
        assert bool(decided.accepted_L[i]) == (was_kept and not late)
    assert bool(decided.accepted_L.any()) == bool(loose.accepted_L.any()), "every step moves"
    assert bool(decided.converged) == bool(loose.converged)


# --- the confidence rule


@st.composite
def held_cases(draw: Any) -> tuple[Canvas, PositionStats]:
    """A canvas in the middle of its way, and any step's view of it."""
    length = draw(st.integers(1, 8))

    def some(strategy: Any) -> list[Any]:
        return draw(st.lists(strategy, min_size=length, max_size=length))

    canvas = initial_canvas(torch.tensor(some(st.integers(0, 4))))
    pinned = torch.tensor(some(st.sampled_from([False, False, True])))
    kept = torch.tensor(some(st.booleans())) | pinned
    canvas = replace(canvas, pinned_L=pinned, accepted_L=kept, guess_L=canvas.tokens_L, num_steps=1)
    probabilities = st.sampled_from([0.05, 0.2, 0.5, 0.8, 0.95])
    seen = stats(
        some(st.integers(0, 4)),
        top_p=some(probabilities),
        held_p=some(probabilities),
        entropy=some(st.floats(0, 2)),
    )
    return canvas, seen


@settings(QUICK, max_examples=300)
@given(case=held_cases())
def test_the_confidence_rule_keeps_its_promises(case: tuple[Canvas, PositionStats]) -> None:
    canvas, seen = case
    rule = Confidence(threshold=0.9, edit=0.9, drop=0.3)
    noise = torch.full_like(canvas.tokens_L, 99)
    moved = advance(canvas, seen, noise, rule)
    was_open, is_changed = False, False
    for i in range(canvas.length):
        before, after = int(canvas.tokens_L[i]), int(moved.tokens_L[i])
        top, top_p, held_p = int(seen.top_T[i]), float(seen.top_p_T[i]), float(seen.current_p_T[i])
        if canvas.pinned_L[i]:
            assert after == before and moved.accepted_L[i]
        elif not canvas.accepted_L[i]:
            was_open = True
            assert after == (top if moved.accepted_L[i] else 99)
            assert moved.accepted_L[i] or top_p <= 0.9
        elif top != before and top_p > 0.9:
            is_changed = True
            assert after == top and moved.accepted_L[i]
        elif held_p < 0.3:
            is_changed = True
            assert after == 99 and not moved.accepted_L[i]
        else:
            assert after == before and moved.accepted_L[i], "a held token moved"
    opened = [i for i in range(canvas.length) if not canvas.accepted_L[i]]
    if opened:
        most_certain = max(opened, key=lambda i: float(seen.top_p_T[i]))
        assert moved.accepted_L[most_certain], "a step must decide something"
    assert bool(moved.converged) == (not was_open and not is_changed)
    assert torch.equal(moved.guess_L[moved.accepted_L], moved.tokens_L[moved.accepted_L])


def test_the_confidence_rule_ends_when_the_model_is_steady() -> None:
    """However unsure, each step decides one more, and one last look converges."""
    canvas = initial_canvas(torch.zeros(5).long())
    steps = 0
    while not canvas.converged:
        # Any order, and never confident.
        top_p = [0.5 + (i * 3 % 5) / 100 for i in range(5)]
        seen = stats([1, 2, 3, 4, 5], top_p=top_p, held_p=[0.5] * 5)
        canvas = advance(canvas, seen, torch.zeros(5).long(), Confidence())
        steps += 1
        assert int(canvas.accepted_L.sum()) == min(steps, 5)
    assert steps == 6 and canvas.guess_L.tolist() == [1, 2, 3, 4, 5]


# --- changes


@pytest.mark.parametrize(
    ("make", "changes", "complaint"),
    [
        (EntropyBound, {"entropy_bound": 0.0}, "entropy bound is 0.0; it must be above 0"),
        (EntropyBound, {"entropy_bound": -1.0}, "entropy bound is -1.0"),
        (EntropyBound, {"entropy_bound": NAN}, "entropy bound is nan"),
        (
            EntropyBound,
            {"confidence_threshold": 0.0},
            "confidence threshold is 0.0; it must be above 0",
        ),
        (EntropyBound, {"confidence_threshold": NAN}, "confidence threshold is nan"),
        (
            EntropyBound,
            {"stability_threshold": -1},
            "stability threshold is -1; it must be 0 or more",
        ),
        (SpacedEntropyBound, {"entropy_bound": 0.0}, "entropy bound is 0.0; it must be above 0"),
        (SpacedEntropyBound, {"min_entropy": -0.1}, "min entropy is -0.1; it must be 0 or more"),
        (SpacedEntropyBound, {"reach": 0}, "reach is 0; it must be 1 or more"),
        (Confidence, {"threshold": 1.1}, "confidence threshold is 1.1; it must be from 0 to 1"),
        (Confidence, {"edit": -0.1}, "confidence edit is -0.1"),
        (Confidence, {"drop": NAN}, "confidence drop is nan"),
        (Sampler, {"max_denoising_steps": 0}, "max denoising steps is 0; it must be 1 or more"),
        (Sampler, {"max_denoising_steps": -5}, "max denoising steps is -5"),
        (Sampler, {"t_min": 0.0}, "t_min is 0.0; it must be above 0"),
        (Sampler, {"t_min": NAN}, "t_min is nan"),
        (Sampler, {"t_max": 0.3}, "t_max is 0.3; it must be t_min or more"),
        (Sampler, {"t_max": NAN}, "t_max is nan"),
    ],
)
def test_a_parameter_out_of_range_is_refused_with_what_is_allowed(
    make: Any, changes: dict[str, Any], complaint: str
) -> None:
    with pytest.raises(UsageError, match=complaint):
        make(**changes)


def test_the_defaults_are_the_released_ones() -> None:
    assert released_sampler(GenerationConfig()) == Sampler()


def test_every_parameter_of_a_generation_config_reaches_the_sampler() -> None:
    assert released_sampler(GENERATION) == Sampler(
        rule=EntropyBound(entropy_bound=0.7, confidence_threshold=0.2, stability_threshold=3),
        max_denoising_steps=9,
        t_max=2.0,
        t_min=1.0,
    )


def test_the_released_generation_config_gives_the_default_sampler() -> None:
    if not (RELEASED / "generation_config.json").is_file():
        pytest.skip("the released config files do not lie beside this checkout")
    assert released_sampler(load_generation_config(RELEASED)) == Sampler(
        rule=EntropyBound(entropy_bound=0.1, confidence_threshold=0.005, stability_threshold=1),
        max_denoising_steps=48,
        t_max=0.8,
        t_min=0.4,
    )


# --- rules of one's own


def decided(**changes: object) -> Decision:
    flags_L, ids_L = torch.zeros(8, dtype=torch.bool), torch.zeros(8, dtype=torch.long)
    decision = Decision(
        accepted_L=flags_L, tokens_L=ids_L, guess_L=ids_L, converged=torch.tensor(True)
    )
    return replace(decision, **changes)  # type: ignore[arg-type]  # wrong on purpose


class Wrong:
    """Returns what a test asks for."""

    answer: object = None

    def decide(self, canvas: Canvas, stats: PositionStats) -> object:
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


class NeedsCount:
    def __init__(self, count: int) -> None:
        self.count = count


@pytest.mark.parametrize(
    ("answer", "phrase"),
    [
        (None, "Wrong.decide returned a NoneType; it must be a Decision"),
        (
            decided(accepted_L=torch.ones(7, dtype=torch.bool)),
            "accepted_L as torch.bool of shape [7]",
        ),
        (decided(tokens_L=torch.ones(8)), "tokens_L as torch.float32 of shape [8]; it must be"),
        (decided(converged=True), "returned converged as True"),
        (IndexError("too far"), "fails on a canvas of 8 tokens: IndexError: too far"),
    ],
)
def test_a_wrong_rule_gets_a_sentence(
    answer: object, phrase: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Wrong, "answer", answer)
    with pytest.raises(UsageError) as caught:
        load_rule("tests.test_sampler:Wrong")
    assert phrase in str(caught.value)


@pytest.mark.parametrize(
    ("name", "phrase"),
    [
        ("entropie", "use entropy, confidence or MODULE:CLASS"),
        ("no_such_module:Rule", "no_such_module cannot be imported"),
        ("tests.test_sampler:Missing", "module tests.test_sampler has no Missing"),
        ("tests.test_sampler:NeedsCount", "cannot be made without arguments"),
        ("tests.test_sampler:decided", "it must be an object with decide"),
    ],
)
def test_a_name_that_is_no_rule_gets_a_sentence(name: str, phrase: str) -> None:
    with pytest.raises(UsageError) as caught:
        load_rule(name)
    assert phrase in str(caught.value)
    with pytest.raises(UsageError, match="it must be an object with decide"):
        Sampler(rule=EntropyBound)  # type: ignore[arg-type]  # the class, not an object


def test_the_example_of_a_rule_takes_a_fixed_number_of_steps() -> None:
    assert load_rule("entropy") is None and load_rule(None) is None
    assert isinstance(load_rule("confidence"), Confidence)
    rule = load_rule("examples.own_rule:FixedCount")
    assert rule == FixedCount(8)
    base = random_engine(1)
    parts = (base.model, base.tokenizer, base.template, base.generation_config)
    engine = Engine(*parts, rule=rule)
    done = engine.generate("Hello.", SamplingParams(seed=1, max_tokens=24, retries=0))
    assert done.steps == done.blocks * -(-engine.model.config.canvas_length // 8)
