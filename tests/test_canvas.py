"""Noise belongs to a place in a request and to nothing else; pins stand where they are put."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dgemma.diffusion.canvas import (
    NO_PINS,
    WORD,
    BlockNoise,
    Noise,
    Pins,
    corrupt,
    initial_canvas,
    philox,
)
from dgemma.errors import UsageError
from tests.tiny import CPU

QUICK = settings(deadline=None, derandomize=True, database=None, max_examples=50)
HERE = {"seed": 7, "choice": 3, "retry": 5}


def block(
    block: int = 2, steps: int = 6, length: int = 10, vocab: int = 1000, **source: int
) -> BlockNoise:
    return Noise(**{**HERE, **source}).block(block, steps, length, vocab, CPU)


@settings(QUICK)
@given(
    seed=st.integers(0, 2**64 - 1),
    steps=st.integers(1, 12),
    length=st.integers(1, 20),
    number=st.integers(0, 2**20),
)
def test_a_shorter_or_quicker_block_has_the_first_of_the_same_numbers(
    seed: int, steps: int, length: int, number: int
) -> None:
    part = block(number, steps, length, seed=seed)
    whole = block(number, 12, 20, seed=seed)
    assert part.uniform_NL.shape == part.tokens_NL.shape == (steps + 1, length)
    assert torch.equal(part.uniform_NL, whole.uniform_NL[: steps + 1, :length])
    assert torch.equal(part.tokens_NL, whole.tokens_NL[: steps + 1, :length])


@pytest.mark.parametrize(
    "change",
    [
        {"seed": 8},
        {"seed": 7 + (1 << 32)},
        {"seed": 7 + (1 << 63)},
        {"choice": 4},
        {"choice": 3 + (1 << 15)},
        {"retry": 6},
        {"choice": 5, "retry": 3},
        {"block": 3},
        {"block": 2 + (1 << 20)},
    ],
    ids=str,
)
def test_another_place_has_other_numbers(change: dict[str, int]) -> None:
    here, there = block(), block(**change)
    assert not (here.uniform_NL == there.uniform_NL).any()
    assert (here.tokens_NL == there.tokens_NL).float().mean() < 0.1
    assert torch.equal(here.uniform_NL, block().uniform_NL)


def test_no_two_steps_or_positions_share_a_number() -> None:
    noise = block(steps=50, length=300)
    assert noise.uniform_NL.unique().numel() == 51 * 300
    for other in (noise.uniform_NL.roll(1, 0), noise.uniform_NL.roll(1, 1)):
        assert (
            torch.corrcoef(torch.stack([noise.uniform_NL.flatten(), other.flatten()]))[0, 1] < 0.03
        )


def test_uniform_numbers_are_uniform_in_the_unit_interval() -> None:
    uniform = block(steps=99, length=500).uniform_NL.flatten()
    assert uniform.dtype == torch.float64
    assert uniform.min() >= 0 and uniform.max() < 1
    counts = torch.histc(uniform, bins=20, min=0, max=1)
    expected = len(uniform) / 20
    # Pearson's statistic, below its 99.99% point for 19 degrees of freedom.
    assert ((counts - expected) ** 2 / expected).sum() < 50.8
    assert (uniform * 2**53 % 1 == 0).all(), "53 bits, all of them random"
    assert ((uniform * 2**53).long() & 1).double().mean().sub(0.5).abs() < 0.02


@pytest.mark.parametrize("vocab", [1, 2, 61, 262_144])
def test_noise_tokens_are_uniform_over_the_vocabulary(vocab: int) -> None:
    tokens = block(steps=99, length=500, vocab=vocab).tokens_NL.flatten()
    assert tokens.min() >= 0 and tokens.max() < vocab
    parts = min(vocab, 20)
    counts = torch.bincount(tokens * parts // vocab, minlength=parts)
    sizes = torch.bincount(torch.arange(vocab) * parts // vocab, minlength=parts)
    expected = len(tokens) * sizes / vocab
    assert ((counts - expected) ** 2 / expected).sum() < 50.8
    assert vocab > 61 or len(tokens.unique()) == vocab


def test_draws_and_noise_tokens_do_not_depend_on_each_other() -> None:
    noise = block(steps=99, length=500, vocab=1000)
    pair = torch.stack([noise.uniform_NL.flatten(), noise.tokens_NL.flatten().double()])
    assert torch.corrcoef(pair)[0, 1].abs() < 0.02


@pytest.mark.parametrize(
    ("source", "complaint"),
    [
        ({"seed": -1}, "seed is -1; it must be 0 to 18446744073709551615"),
        ({"seed": 1 << 64}, "seed is 18446744073709551616"),
        ({"choice": -1}, "choice is -1; it must be 0 to 65535"),
        ({"choice": 1 << 16}, "choice is 65536"),
        ({"retry": -1}, "retry is -1"),
        ({"retry": 1 << 16}, "retry is 65536; it must be 0 to 65535"),
    ],
    ids=str,
)
def test_a_source_out_of_range_is_refused(source: dict[str, int], complaint: str) -> None:
    with pytest.raises(UsageError, match=complaint):
        Noise(**source)


def test_the_ends_of_the_range_are_allowed() -> None:
    last = Noise(seed=2**64 - 1, choice=65535, retry=65535)
    assert (last.block(0, 1, 4, 10, CPU).uniform_NL < 1).all()


@pytest.mark.parametrize("seed", [0, 7, 2**32 - 1, 2**63 + 5, 2**64 - 1])
@pytest.mark.parametrize("number", [0, 3, 2**31 + 1])
def test_noise_made_on_the_host_is_what_a_device_would_make(seed: int, number: int) -> None:
    mine = Noise(seed=seed, choice=9, retry=65535).block(number, 5, 7, 262_144, CPU)
    nothing = torch.zeros(6, 7, dtype=torch.long)
    place = (nothing + torch.arange(7), nothing + torch.arange(6)[:, None])
    words = (*place, nothing + number, nothing + (9 << 16 | 65535))
    a, b, c, _ = philox(words, (seed & WORD, seed >> 32))
    assert torch.equal(mine.uniform_NL, ((a << 21) | (b >> 11)).double() * 2.0**-53)
    assert torch.equal(mine.tokens_NL, (c * 262_144) >> 32)


# --- the canvas


@st.composite
def pinned(draw: Any) -> tuple[int, Pins]:
    length = draw(st.integers(1, 20))
    positions = draw(st.lists(st.integers(0, length - 1), unique=True))
    tokens = draw(st.lists(st.integers(0, 99), min_size=len(positions), max_size=len(positions)))
    return length, Pins(tuple(positions), tuple(tokens))


@settings(QUICK)
@given(case=pinned())
def test_a_fresh_canvas_is_noise_with_its_pins_in_place(case: tuple[int, Pins]) -> None:
    length, pins = case
    noise_L = torch.arange(100, 100 + length)
    canvas = initial_canvas(noise_L, pins)
    expected = noise_L.tolist()
    for position, token in zip(pins.positions, pins.tokens, strict=True):
        expected[position] = token
    assert canvas.tokens_L.tolist() == expected
    assert set(canvas.pinned_L.nonzero().flatten().tolist()) == set(pins.positions)
    assert torch.equal(canvas.accepted_L, canvas.pinned_L)
    assert torch.equal(noise_L, torch.arange(100, 100 + length)), "the noise was written to"


def test_a_fresh_canvas_knows_nothing_yet() -> None:
    canvas = initial_canvas(torch.arange(5))
    assert canvas.length == 5 and canvas.num_steps == 0 and canvas.soft_LD is None
    assert not canvas.converged and canvas.stable_steps == 0
    assert (canvas.guess_L == -1).all() and canvas.entropy_L.isinf().all()
    assert not canvas.accepted_L.any()


@pytest.mark.parametrize(
    ("positions", "tokens"), [((1, 1), (5, 6)), ((1, 2), (5,)), ((1,), (5, 6)), ((), (5,))]
)
def test_pins_need_one_token_for_each_position(
    positions: tuple[int, ...], tokens: tuple[int, ...]
) -> None:
    with pytest.raises(UsageError, match="exactly one token per position, and each position once"):
        Pins(positions, tokens)


@pytest.mark.parametrize("position", [-1, 5, 99])
def test_a_pin_outside_the_canvas_is_refused(position: int) -> None:
    with pytest.raises(UsageError, match=rf"pins at \[{position}\] are outside a canvas of 5"):
        initial_canvas(torch.arange(5), Pins((2, position), (1, 1)))


def test_no_pins_are_no_pins() -> None:
    assert not initial_canvas(torch.arange(5), NO_PINS).pinned_L.any()


# --- the forward process


def test_tokens_turn_into_noise_as_often_as_the_level_says() -> None:
    tokens, noise = torch.zeros(40_000, dtype=torch.long), torch.ones(40_000, dtype=torch.long)
    uniform = torch.rand(40_000, generator=torch.Generator().manual_seed(0))
    for level in (0.0, 0.1, 0.5, 1.0):
        corrupted = corrupt(tokens, noise, uniform, torch.tensor(level))
        assert abs(corrupted.float().mean().item() - level) < 0.01
        assert level not in (0.0, 1.0) or corrupted.float().mean() == level


def test_each_token_has_its_own_level_and_noise() -> None:
    tokens, noise = torch.tensor([1, 2, 3, 4]), torch.tensor([11, 12, 13, 14])
    uniform, level = torch.tensor([0.3, 0.3, 0.0, 0.9]), torch.tensor([0.2, 0.4, 0.0, 0.95])
    assert corrupt(tokens, noise, uniform, level).tolist() == [1, 12, 3, 14]
