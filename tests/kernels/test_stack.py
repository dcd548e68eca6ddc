"""The joined stack and the step on fixed memory, without kernels: the wiring, and nothing else."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any
from weakref import ref

import pytest
import torch
from torch import Tensor

from dgemma.cache import KVCache, Pass, Room, Span
from dgemma.canvas import NO_PINS, Pins
from dgemma.denoise import Row, commit, denoise, step
from dgemma.graph.step import Shape, Stepper
from dgemma.graph.steppers import MAX_STEPPERS, Fast
from dgemma.graph.token import Teller
from dgemma.model import Gemma
from dgemma.ops.fp8 import LARGEST, quantize
from dgemma.ops.linear import can_pack
from dgemma.sampler import Apart, Confidence, EntropyBound, Rule, Sampler
from dgemma.stack import ByContext, Places, Stack, can_fuse
from dgemma.weights.fp8 import Fp8Experts
from dgemma.weights.pack import pack
from dgemma.weights.packed import Form, shrink_model
from tests.kernels import small
from tests.kernels.small import CPU, SMALL


def test_the_joined_stack_is_the_model() -> None:
    of = small.model()
    rows = small.cache(of, 11)
    context = Pass([Span(rows, 5, commit=True), Span(rows, 4, commit=False)])
    x_TD = torch.randn(9, SMALL.hidden_size, generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        want = of.stack(x_TD, context)
        of.runner = Stack(of)
        torch.testing.assert_close(of.stack(x_TD, context), want, atol=2e-6, rtol=1e-5)


def test_joined_weights_are_stored_once_and_keep_their_names() -> None:
    of = small.model()
    before = {name: weight.clone() for name, weight in of.state_dict().items()}
    stack = Stack(of)
    after = of.state_dict()
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    first = stack.layers[0]
    assert first.attention.q_proj.weight.data_ptr() == first.qkv.numbers_OI.data_ptr()
    assert len(first.qkv.numbers_OI) == 64 + 32 + 32
    assert len(stack.layers[1].qkv.numbers_OI) == 128 + 32  # a full layer has no values of its own


def test_weights_that_lie_joined_stay_where_they_are() -> None:
    of = small.model()
    Stack(of)
    places = {name: weight.data_ptr() for name, weight in of.named_parameters()}
    joined = Stack(of).layers[0].dense.numbers_OI
    assert places == {name: weight.data_ptr() for name, weight in of.named_parameters()}
    both = [of.layers[0].mlp.gate_proj.weight, of.layers[0].mlp.up_proj.weight]
    assert torch.equal(joined, torch.cat(both))


def test_what_a_layer_made_is_gone_when_the_next_begins() -> None:
    of = small.model()
    stack, made = Stack(of), []

    def watched(choices: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def choose(*given: Any) -> Tensor:
            out_AD = choices(*given)
            made.append(ref(out_AD))
            return out_AD

        return choose

    stack.layers = [replace(layer, choices=watched(layer.choices)) for layer in stack.layers]
    context = Pass([Span(small.cache(of, 11), 5, commit=True)])
    by_context = ByContext(context, stack.eps)

    def attend(*given: Any) -> Tensor:
        assert not any(out() is not None for out in made)
        return by_context(*given)

    x_TD = torch.randn(5, SMALL.hidden_size, generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        stack.run(x_TD, of.turns(context.positions_T), attend)
    assert len(made) == len(stack.layers)


def test_a_runner_leaves_training_and_other_contexts_alone() -> None:
    of = small.model().requires_grad_(True)
    of.runner = Stack(of)
    rows = KVCache(SMALL, Room(tokens=16), torch.float32, CPU)
    out = of.encode(torch.arange(4), Pass([Span(rows, 4, commit=True)]))
    out.sum().backward()
    assert of.layers[0].self_attn.k_proj.weight.grad is not None


def test_packed_weights_cannot_be_joined() -> None:
    assert can_fuse(small.model())
    if can_pack(torch.empty(1)):
        assert not can_fuse(pack(small.model()))


def test_places_name_the_memory_of_every_key() -> None:
    of = small.model()
    rows = small.cache(of, 11)
    context = Pass([Span(rows, 4, commit=False)])
    found = Places.of(context)
    assert found is not None
    assert found.table_IX6.shape == (1, 2, 6)
    sliding, full = found.table_IX6[0].tolist()
    assert sliding[2] == full[2] == 0
    assert (sliding[5], full[5]) == (5 + 4, 11 + 4)  # the window less one, and all; the canvas
    base = rows.buffers[0].base
    assert sliding[3] == rows.buffers[0].k_SMH[11 - 5 - base].data_ptr()
    assert full[4] == rows.buffers[1].v_SMH.data_ptr()


def test_a_past_is_one_place_more_and_a_past_of_a_past_is_too_many() -> None:
    of = small.model()
    branch = small.cache(of, 7).branch(16)
    commit(of, branch, torch.arange(3), chunk=8)
    found = Places.of(Pass([Span(branch, 4, commit=False)]))
    assert found is not None
    assert found.table_IX6[0, 1, [2, 5]].tolist() == [7, 3 + 4]
    twig = branch.branch(16)
    assert Places.of(Pass([Span(twig, 4, commit=False)])) is None


@pytest.mark.parametrize(
    "rule", [EntropyBound(), EntropyBound(bound=3.0), Apart(bound=3.0), Confidence()]
)
def test_steps_on_fixed_memory_are_the_steps(rule: Rule) -> None:
    """Blocks with and without pins, one behind the other, each committed."""
    of, sampler = small.model(sharpness=12.0), Sampler(max_steps=6, rule=rule)
    rows = small.cache(of, 9)
    stepper = Stepper(of, Stack(of), Shape(4, 8, rule))
    taken = []
    for block, pins in enumerate((NO_PINS, Pins((0, 2), (7, 9)), NO_PINS)):
        mine = row = small.row(sampler, block, pins)
        assert stepper.takes(row)
        for (want,) in denoise(of, [rows], [row]):
            after = stepper.step(mine, rows)
            assert after is not None
            mine = after
            assert_same(mine, want)
        assert mine.is_done
        taken.append(mine.canvas.num_steps)
        commit(of, rows, mine.canvas.guess_L, chunk=8)
    assert len(taken) == 3


def assert_same(mine: Row, want: Row) -> None:
    for name in ("tokens_L", "guess_L", "kept_L", "pinned_L", "settled", "steady_steps"):
        assert torch.equal(getattr(mine.canvas, name), getattr(want.canvas, name)), name
    assert mine.canvas.num_steps == want.canvas.num_steps
    torch.testing.assert_close(mine.canvas.entropy_L, want.canvas.entropy_L)
    if not mine.is_done:
        torch.testing.assert_close(mine.canvas.soft_LD, want.canvas.soft_LD)


def test_a_row_may_leave_the_fixed_memory_and_come_back() -> None:
    """Another row takes its place in between, and plain steps are taken too."""
    of, sampler = small.model(), Sampler(max_steps=6)
    caches = [small.cache(of, 9), small.cache(of, 6)]
    stepper = Stepper(of, Stack(of), Shape(4, 6, sampler.rule))
    want = mine = small.row(sampler, 0)
    other = small.row(sampler, 1)
    context = Pass([Span(caches[0], 4, commit=False)])
    for number in range(5):
        (want,) = step(of, context, [want])
        if number == 2:
            (mine,) = step(of, context, [mine])
        else:
            after = stepper.step(mine, caches[0])
            assert after is not None
            # What is handed out must not be overwritten, but for the soft embedding.
            assert after.canvas.soft_LD is not None
            mine = replace(
                after, canvas=replace(after.canvas, soft_LD=after.canvas.soft_LD.clone())
            )
        if number == 1:
            stepper.step(other, caches[1])
        assert_same(mine, want)


def test_a_row_whose_memory_has_moved_is_loaded_again() -> None:
    of, sampler = small.model(), Sampler(max_steps=6)
    rows = small.cache(of, 9)
    stepper = Stepper(of, Stack(of), Shape(4, 6, sampler.rule))
    first = stepper.step(small.row(sampler, 0), rows)
    assert first is not None
    before = stepper.context
    second = stepper.step(first, rows)
    assert second is not None
    assert stepper.context is before
    layout = rows.layout
    rows.reserve(200)
    assert rows.layout != layout
    assert stepper.step(second, rows) is not None
    assert stepper.context is not before


def test_what_does_not_fit_is_not_taken() -> None:
    of, sampler = small.model(), Sampler(max_steps=4)
    stepper = Stepper(of, Stack(of), Shape(4, 4, sampler.rule))
    row = small.row(sampler, 0)
    assert stepper.takes(row)
    assert not stepper.takes(replace(row, sampler=Sampler(max_steps=5)))
    assert not stepper.takes(replace(row, sampler=Sampler(max_steps=4, rule=Confidence())))

    class Walker:
        def walk(self, canvas: object, stats: object, look: object) -> object:
            return canvas

    assert not stepper.takes(replace(row, walker=Walker()))  # type: ignore[arg-type]


def test_the_model_is_the_same_with_a_runner_that_declines() -> None:
    of: Gemma = small.model()
    rows = small.cache(of, 5)
    context = Pass([Span(rows, 4, commit=False)])
    with torch.inference_mode():
        want = of.denoise(torch.arange(4), None, context)
        of.runner = lambda x_TD, context, turns: None
        assert torch.equal(of.denoise(torch.arange(4), None, context), want)


def test_tokens_on_fixed_memory_are_the_tokens() -> None:
    of = small.model()
    rows, twin = small.cache(of, 9), small.cache(of, 9)
    teller = Teller(of, Stack(of))
    for token in range(12):  # past the window
        got = teller.tell(token, rows)
        with torch.inference_mode():
            want = of.logits(commit(of, twin, torch.tensor([token]), chunk=8))[0]
        assert got is not None
        torch.testing.assert_close(got, want)
    assert rows.length == twin.length == 21


def test_captures_are_found_by_what_they_are_for_and_forgotten_in_turn() -> None:
    of = small.model()
    assert Fast.of(of) is None  # no GPU
    assert of.runner is None
    fast, rows = Fast(of), small.cache(of, 5)
    rules = [EntropyBound(bound=1.0 + number) for number in range(1 + MAX_STEPPERS)]
    for steps, rule in enumerate(rules, start=3):
        sampler = Sampler(max_steps=steps, rule=rule)
        row = small.row(sampler, 0)
        after = fast.step(row, rows)
        assert after is not None
        assert after.canvas.num_steps == 1
        again = fast.step(after, rows)
        assert again is not None
        assert again.canvas.num_steps == 2
    assert [shape.rule for shape in fast.steppers] == rules[1:]
    assert fast.step(small.row(Sampler(max_steps=9, rule=rules[1]), 0), rows) is not None
    assert [shape.rule for shape in fast.steppers] == [*rules[2:], rules[1]]
    assert fast.tell(3, rows) is not None


def test_8_bit_floats_keep_each_row_s_greatest_and_lose_a_sixteenth_at_most() -> None:
    x = (
        torch.randn(6, 40, generator=torch.Generator().manual_seed(1))
        * torch.logspace(-3, 3, 6)[:, None]
    )
    x[5] = 0.0
    found = quantize(x)
    assert (found.numbers.float().abs().amax(-1)[:5] == LARGEST).all()
    off = (found.whole() - x).abs()
    assert (off <= x.abs() / 16 + found.factor[:, None] * 2**-10).all()


def test_8_bit_experts_change_the_model_a_little_and_run_in_the_joined_stack() -> None:
    of = small.model(sharpness=1.0)
    rows = small.cache(of, 9)
    context = Pass([Span(rows, 4, commit=False)])
    with torch.inference_mode():
        exact = of.denoise(torch.arange(4), None, context)
        shrink_model(of, Form(experts="fp8"))
        plain = of.denoise(torch.arange(4), None, context)
        assert isinstance(of.layers[0].experts, Fp8Experts)
        assert can_fuse(of)
        of.runner = Stack(of)
        joined = of.denoise(torch.arange(4), None, context)
    torch.testing.assert_close(joined, plain, atol=2e-3, rtol=2e-3)
    off = (plain - exact).square().mean().sqrt() / exact.square().mean().sqrt()
    assert 1e-4 < off < 0.1
