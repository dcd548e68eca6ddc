"""Whole passes and steps with every kernel in place, beside the model as it is defined."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from dgemma.cache import KVCache, Pass, Room, Span
from dgemma.canvas import Pins
from dgemma.denoise import commit, denoise
from dgemma.graph.check import check
from dgemma.graph.step import Shape, Stepper
from dgemma.graph.token import Committer, Teller
from dgemma.model import Gemma
from dgemma.ops.fast import FAMILIES, switched
from dgemma.ops.kernels import attention, cuts, dense_8, experts
from dgemma.ops.kernels.cuts import Cut
from dgemma.ops.kernels.tiles import Tile, Tiles
from dgemma.ops.quantized import Quantized
from dgemma.sampler import Sampler
from dgemma.stack import Stack
from dgemma.weights import fp8
from dgemma.weights.packed import FORMS, Form, shrink_model
from dgemma.weights.random import random_model
from tests.kernels import small
from tests.kernels.small import SMALL

pytestmark = pytest.mark.usefixtures("small_cuts")


def passes(of: Gemma) -> list[Tensor]:
    """A commit, one behind a shared past, and a commit merged with a canvas."""
    tokens = torch.arange(9)
    branch = (first := small.cache(of, 7)).branch(24)
    with torch.inference_mode():
        last = commit(of, branch, tokens[:2], chunk=8)
        merged = Pass([Span(branch, 3, commit=True), Span(branch, 4, commit=False)])
        entered = torch.cat([of.embed(tokens[:3]), of.enter(tokens[3:7], None)])
        return [last, of.stack(entered, merged), *(b.k_SMH[:7] for b in first.buffers)]


def test_passes_agree_with_the_model() -> None:
    of = small.model()
    want = passes(of)
    of.runner = Stack(of)
    with switched(True):
        got = passes(of)
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-4)


def test_chunks_longer_than_the_window_agree_with_the_model() -> None:
    """Several, behind a shared past: the buffers of sliding layers move on between them."""
    of = small.model()
    found = []
    for families in ((), {"attention"}):
        of.runner = Stack(of) if families else None
        with switched(families), torch.inference_mode():
            row = KVCache(SMALL, Room(tokens=64, span=16, slack=2), torch.float32, small.CPU)
            lasts = [commit(of, row, torch.arange(21), chunk=16)]
            branch = row.branch(40)
            lasts += [commit(of, branch, torch.arange(n), chunk=16) for n in (3, 16, 7)]
            entered = of.enter(torch.arange(4), None)
            found.append([*lasts, of.stack(entered, Pass([Span(branch, 4, commit=False)]))])
            assert branch.buffers[0].base > branch.origin + SMALL.sliding_window
    for got, want in zip(*found, strict=True):
        torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-4)


def test_passes_with_8_bit_products_are_near_the_model_s() -> None:
    """Near only: the interpreter's rounding to 8 bits has no carry, and few rows keep their 16."""
    of = shrink_model(small.model(sharpness=1.0), Form(dense="fp8"))
    want = passes(of)
    of.runner = Stack(of)
    with switched({"layer"}):  # attention has a test of its own
        got = passes(of)
    for a, b in zip(got, want, strict=True):
        assert (a - b).abs().mean() < 0.3 * b.abs().mean()


@pytest.mark.parametrize("form", [FORMS["fp8"], FORMS["nvfp4"]])
def test_a_canvas_has_its_smaller_products_cut_and_is_near_the_model_s(
    form: Form, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, plain_8, seen = dense_8.product, fp8.fp8_choices, set()

    def product(x: Quantized, weight: Quantized, dtype: torch.dtype, cut: Cut) -> Tensor:
        out = plain(x, weight, dtype, cut)
        seen.add((tuple(weight.numbers.shape), len(out) if out.dim() == 3 else 1))
        return out

    def fp8_choices(x: Tensor | Quantized, *rest: Any) -> Tensor:
        seen.add(("experts", isinstance(x, Quantized)))
        return plain_8(x, *rest)

    monkeypatch.setattr(dense_8, "product", product)
    for name, parts in (("QKV", 1), ("OUT", 3), ("DOWN", 2)):
        monkeypatch.setattr(cuts, name, Cut(rows=16, outputs=64, depth=16, parts=parts))
    tile = Tile(rows=16, columns=64, depth=64)
    monkeypatch.setattr(experts, "tiles", lambda *_: Tiles(tile, tile))
    # Widths that four bits can hold, and all products' depths multiples of 16.
    wide = {"hidden_size": 64, "moe_intermediate_size": 64, "intermediate_size": 32}
    of = shrink_model(random_model(replace(SMALL, **wide), seed=0), form)
    rows = small.cache(of, 7)
    want = of_canvas(of, rows)
    of.runner = Stack(of)
    monkeypatch.setattr(fp8, "fp8_choices", fp8_choices)
    with switched({"layer", "experts"}):  # attention's rows in 8 bits are compared below
        got = of_canvas(of, rows)
    assert (got - want).abs().mean() < 0.3 * want.abs().mean()
    products = {((128, 64), 1), ((160, 64), 1), ((64, 64), 2), ((64, 128), 3), ((64, 32), 2)}
    # 8-bit experts get their rows quantized by what normed them; 4-bit ones read 16 bits.
    assert seen == products | ({("experts", True)} if form.experts == "fp8" else set())


def test_attention_rounds_its_rows_for_an_8_bit_product_as_the_product_would(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One span and two; a single part, and several that are merged."""
    of = shrink_model(small.model(), Form(dense="fp8"))
    of.runner = Stack(of)
    plain, seen = attention.attention_8, []

    def attention_8(*given: Any) -> tuple[Tensor, Tensor]:
        seen.append(len(given[0]))
        return plain(*given)

    monkeypatch.setattr(attention, "attention_8", attention_8)
    with switched({"layer", "attention"}):
        got = passes(of)
        # Two rows alone are too few: their product reads what they are.
        assert seen == [7, 7, 3, 4, 3, 4]
        monkeypatch.setattr("dgemma.stack.reads_8", lambda *_: False)
        want = passes(of)
    assert len(seen) == 6
    for a, b in zip(got, want, strict=True):
        assert torch.equal(a, b)


def test_a_model_in_16_bits_has_no_use_for_cuts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dense_8, "product", None)
    of = small.model()
    rows = small.cache(of, 7)
    want = of_canvas(of, rows)
    of.runner = Stack(of)
    with switched({"layer", "experts"}):
        torch.testing.assert_close(of_canvas(of, rows), want, atol=1e-5, rtol=1e-4)


def of_canvas(of: Gemma, rows: KVCache) -> Tensor:
    """What the layers make of five positions behind a prompt."""
    with torch.inference_mode():
        return of.stack(of.enter(torch.arange(5), None), Pass([Span(rows, 5, commit=False)]))


def test_steps_on_fixed_memory_agree_with_steps() -> None:
    of, sampler = small.model(), Sampler(max_steps=2)
    rows = small.cache(of, 5)
    stepper = Stepper(of, Stack(of), Shape(4, 2, sampler.rule))
    mine = row = small.row(sampler, 0, Pins((1,), (5,)))
    for (want,) in denoise(of, [rows], [row]):
        with switched(True):
            after = stepper.step(mine, rows)
        assert after is not None
        mine, a, b = after, after.canvas, want.canvas
        assert torch.equal(a.tokens_L, b.tokens_L)
        assert torch.equal(a.guess_L, b.guess_L)
        torch.testing.assert_close(a.entropy_L, b.entropy_L, atol=1e-4, rtol=1e-4)
        if a.num_steps < 2:  # behind the last step nothing is conditioned any more
            assert a.soft_LD is not None
            assert b.soft_LD is not None
            torch.testing.assert_close(a.soft_LD, b.soft_LD, atol=3e-3, rtol=1e-3)


def test_tokens_on_fixed_memory_agree_with_tokens() -> None:
    of = small.model()
    rows, twin = small.cache(of, 7), small.cache(of, 7)
    teller = Teller(of, Stack(of))
    for token in (5, 6):
        with switched(True):
            got = teller.tell(token, rows)
        with torch.inference_mode():
            want = of.logits(commit(of, twin, torch.tensor([token]), chunk=8))[0]
        assert got is not None
        torch.testing.assert_close(got, want, atol=1e-4, rtol=1e-4)


def test_a_commit_that_is_filled_up_agrees_with_a_commit() -> None:
    """What fills it up is overwritten by what comes next."""
    of = small.model()
    rows, twin = small.cache(of, 7), small.cache(of, 7)
    committer, teller = Committer(of, Stack(of), 8), Teller(of, Stack(of))
    tokens = [5, 9, 2, 7, 11]
    with switched(True):
        assert committer.commit(tokens, rows)
        got = teller.tell(6, rows)
    with torch.inference_mode():
        want = of.logits(commit(of, twin, torch.tensor([*tokens, 6]), chunk=8))[0]
    assert got is not None
    assert rows.length == twin.length == 13
    torch.testing.assert_close(got, want, atol=1e-4, rtol=1e-4)
    (a,), (b,) = rows.read(1, 0, 13), twin.read(1, 0, 13)
    torch.testing.assert_close(a.k_SMH, b.k_SMH, atol=1e-4, rtol=1e-4)


def test_every_family_passes_its_check_and_a_wrong_kernel_does_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("dgemma.graph.check.SINGLES", 1)
    monkeypatch.setattr("dgemma.graph.check.STAT_ROWS", 2)
    of = small.model()
    stack = Stack(of)
    passed = dict.fromkeys(FAMILIES, "")
    assert check(of, stack) == passed
    monkeypatch.setattr(experts, "choices", lambda x_TD, *_: x_TD.repeat_interleave(2, 0))
    del passed["experts"]
    assert "it is off by" in check(of, stack, passed)["experts"]


def test_a_commit_and_a_first_step_in_one_pass_agree_with_one_after_the_other() -> None:
    of, sampler = small.model(), Sampler(max_steps=2)
    rows, twin = small.cache(of, 7), small.cache(of, 7)
    stepper = Stepper(of, Stack(of), Shape(4, 2, sampler.rule))
    block, row = [5, 9, 2, 7], small.row(sampler, 0, Pins((1,), (5,)))
    with switched(True):
        mine = stepper.first(block, row, rows)
        assert mine is not None
        mine = stepper.step(mine, rows)
    assert mine is not None
    commit(of, twin, torch.tensor(block), chunk=8)
    *_, (want,) = denoise(of, [twin], [row])
    assert torch.equal(mine.canvas.guess_L, want.canvas.guess_L)
    torch.testing.assert_close(mine.canvas.entropy_L, want.canvas.entropy_L, atol=1e-3, rtol=1e-3)
    assert rows.length == twin.length == 11
