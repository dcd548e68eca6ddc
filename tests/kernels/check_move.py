"""The end of a step by kernel: the canvas, the flags and the soft embedding of the definition."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from dgemma.canvas import Pins
from dgemma.denoise import Row, denoise
from dgemma.graph.check_ends import ends_off
from dgemma.graph.memory import MOVED, Memory, Shape
from dgemma.graph.moving import move_by_kernel, move_by_rule
from dgemma.graph.reading import Reading
from dgemma.graph.step import Stepper
from dgemma.model import TokenTable
from dgemma.ops.fast import switched
from dgemma.ops.kernels import move as kernel
from dgemma.ops.kernels import sparse
from dgemma.ops.kernels.sparse import Into, Likely
from dgemma.ops.row_stats import RowStats
from dgemma.sampler import Confidence, EntropyBound, Rule, Sampler
from dgemma.stack import Stack
from tests.kernels import small

STEPS = 3
CHANGED = (*MOVED, "index_1", "seen_2")


def drawn(seed: int, length: int, rule: EntropyBound) -> tuple[Memory, Reading]:
    """A canvas in the middle of its steps, and what the next one says of it.

    Entropies are multiples of a power of two, so that every sum is exact. Some are equal.
    """
    of = torch.Generator().manual_seed(seed)

    def integers(most: int, *size: int) -> Tensor:
        return torch.randint(most, size or (length,), generator=of)

    memory = Memory(small.model(), Shape(length, STEPS, rule))
    pinned = (0, 1, 3, 10)[seed % 4]  # of ten
    memory.pinned_L.copy_(integers(10) < pinned)
    memory.noise_NL.copy_(integers(96, STEPS + 3, length))
    memory.tokens_L.copy_(integers(96))
    memory.guess_L.copy_(integers(96))
    memory.steady_steps.fill_(seed % 3)
    memory.index_1.fill_(seed % STEPS)
    top_L = memory.guess_L.clone()
    if seed % 2:
        top_L[integers(length, 1)] += 1
    unit = 2.0 ** -(6 + seed % 9)
    entropy_L = integers(2 + seed % 30).float() * unit
    stats = RowStats(
        draw_T=integers(96),
        top_T=top_L,
        entropy_T=entropy_L,
        top_p_T=torch.ones(length),
        held_p_T=torch.ones(length),
    )
    likely = Likely(integers(1 + seed % 50, length, 5).int(), torch.full((length, 5), 0.2))
    if seed % 5 == 0:
        likely.mass_TG[integers(length, 1), 2] -= 0.003
    return memory, Reading(stats, lambda: entropy_L, likely)


def both(
    memory: Memory, reading: Reading, rule: EntropyBound
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """What either makes of it, from the same beginning."""
    names = [*CHANGED, "pinned_L", "noise_NL"]
    before = {name: getattr(memory, name).clone() for name in names}
    made = []
    for way in (move_by_kernel, move_by_rule):
        for name, value in before.items():
            getattr(memory, name).copy_(value)
        way(memory, reading, rule)
        made.append({name: getattr(memory, name).clone() for name in names})
    return made[0], made[1]


def test_the_kernel_moves_a_canvas_as_the_rule_does() -> None:
    seen = {"settled": set[bool](), "sparse": set[bool](), "kept": set[int]()}
    for seed in range(80):
        length = (1, 4, 9, 32, 50)[seed % 5]
        unit = 2.0 ** -(6 + seed % 9)
        rule = EntropyBound(
            bound=unit * (1 + 7 * (seed % 11)),  # sums hit it exactly
            settle_entropy=unit * (1 + seed % 7),
            settle_steps=seed % 4,
        )
        memory, reading = drawn(seed, length, rule)
        got, want = both(memory, reading, rule)
        for name, value in want.items():
            assert torch.equal(got[name], value), (seed, name)
        seen["settled"].add(bool(want["settled"]))
        seen["sparse"].add(bool(want["seen_2"][1]))
        seen["kept"].add(int(want["kept_L"].sum()))
    assert seen["settled"] == seen["sparse"] == {True, False}
    assert len(seen["kept"]) > 10


def test_entropies_as_they_come_are_added_up_alike() -> None:
    rule = EntropyBound()
    for seed in range(12):
        memory, reading = drawn(seed, 64, rule)
        of = torch.Generator().manual_seed(seed)
        nats_L = torch.randn(64, generator=of).mul(3).sub(6).exp()
        reading = replace(reading, stats=replace(reading.stats, entropy_T=nats_L))
        got, want = both(memory, reading, rule)
        for name, value in want.items():
            assert torch.equal(got[name], value), (seed, name)
        assert bool(memory.pinned_L.all()) or 0 < int(want["kept_L"].sum()) < 64


@pytest.mark.parametrize("at", [0, 5])
def test_a_position_that_is_no_number_is_never_decided_nor_settled(at: int) -> None:
    rule = EntropyBound(settle_steps=0)
    memory, reading = drawn(4, 9, rule)
    memory.pinned_L.zero_()
    reading.stats.entropy_T.zero_()
    reading.stats.entropy_T[at] = float("nan")
    got, want = both(memory, reading, rule)
    assert not got["settled"] and not got["kept_L"][at] and int(got["kept_L"].sum()) == 8
    for name in set(want) - {"entropy_L"}:
        assert torch.equal(got[name], want[name]), name


def test_of_equal_entropies_the_first_position_is_decided() -> None:
    rule = EntropyBound(bound=0.5)
    memory, reading = drawn(0, 50, rule)
    reading.stats.entropy_T.fill_(0.5)
    for made in both(memory, reading, rule):
        assert made["kept_L"].nonzero().flatten().tolist() == [0, 1]


def test_longer_canvases_are_compared_a_part_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel, "PAIRS", 128)
    rule = EntropyBound(bound=0.05)
    memory, reading = drawn(6, 50, rule)
    got, want = both(memory, reading, rule)
    assert all(torch.equal(got[name], value) for name, value in want.items())


def test_the_soft_embedding_is_scaled_and_a_pinned_position_is_told_its_own_token() -> None:
    of = torch.Generator().manual_seed(0)
    table = TokenTable(96, 300).half()
    table.weight.data.copy_(torch.randn(96, 300, generator=of))
    tokens_L = torch.tensor([7, 9, 11])
    pinned_L = torch.tensor([False, True, False])
    p_LV = torch.zeros(3, 96)
    p_LV[:, [3, 50]] = torch.tensor([0.75, 0.25])
    mean_LD = p_LV.half() @ table.weight
    want = torch.where(pinned_L[:, None], table(tokens_L), mean_LD * table.scale)
    ids = torch.tensor([3, 50]).int().expand(3, 2).contiguous()
    p = torch.tensor([0.75, 0.25]).expand(3, 2).contiguous()
    for way in ("sparse", "dense"):
        soft_LD = torch.zeros(3, 300, dtype=torch.float16)
        into = Into(soft_LD, tokens_L, pinned_L, table.scale)
        with torch.inference_mode():
            if way == "sparse":
                sparse.soft_mean(table.weight, ids, p, torch.full((3,), 2).int(), into)
            else:
                sparse.pin_mean(table.weight, mean_LD, into)
        torch.testing.assert_close(soft_LD, want, atol=0.02, rtol=2e-3)
        assert torch.equal(soft_LD[1], want[1])


@pytest.mark.usefixtures("small_cuts")
@pytest.mark.parametrize("rule", [Confidence(), EntropyBound(bound=3.0)])
def test_what_the_kernel_does_not_know_and_what_few_tokens_do_not_hold(
    rule: Rule, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another rule, and a canvas that is too long; positions that take the whole vocabulary."""
    monkeypatch.setattr(kernel, "LONGEST", 3)
    monkeypatch.setattr(sparse, "SURVIVORS", -1)
    of, sampler = small.model(), Sampler(max_steps=2, rule=rule)
    rows = small.cache(of, 5)
    stepper = Stepper(of, Stack(of), Shape(4, 2, rule))
    mine: Row | None = small.row(sampler, 0, Pins((1,), (5,)))
    assert mine is not None
    for number, (want,) in enumerate(denoise(of, [rows], [mine])):
        with switched(True):
            mine = stepper.step(mine, rows)
        assert mine is not None
        assert torch.equal(mine.canvas.tokens_L, want.canvas.tokens_L)
        assert torch.equal(mine.canvas.kept_L, want.canvas.kept_L)
        if number == 0:  # behind the last nothing is conditioned
            assert mine.canvas.soft_LD is not None and want.canvas.soft_LD is not None
            torch.testing.assert_close(
                mine.canvas.soft_LD, want.canvas.soft_LD, atol=1e-4, rtol=1e-4
            )
    assert not stepper.memory.seen_2[1]


def test_the_ends_of_a_step_pass_their_check_and_wrong_ones_do_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    of = small.model()
    stack = Stack(of)
    with torch.inference_mode():
        assert ends_off(of, stack) == ""
        monkeypatch.setattr("dgemma.ops.kernels.move.SURVIVORS", -1)
        assert ends_off(of, stack) == "wrong: how a canvas moves (seen_2)"
        monkeypatch.setattr("dgemma.ops.kernels.enter.add_and_norm", lambda x, *_: x)
        assert "how a canvas enters" in ends_off(of, stack)
    joined = of.self_conditioning
    assert joined is not None
    gate, up = joined.gate_proj.weight, joined.up_proj.weight
    assert up.data_ptr() == gate.data_ptr() + gate.nbytes  # joined once, whoever asks again
