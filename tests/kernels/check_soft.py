"""Soft embeddings in 8 bits by kernel, beside their definition."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from triton import language as tl
from triton.runtime import interpreter

from dgemma.graph.check import DeviceFault
from dgemma.graph.check_soft import soft_off
from dgemma.graph.memory import Shape
from dgemma.graph.reading import dense_mean, dense_mean_8, read_by_kernels
from dgemma.graph.step import Stepper
from dgemma.graph.steppers import judge_soft
from dgemma.model import Gemma, TokenTable
from dgemma.ops.fast import switched
from dgemma.ops.fp8 import E4M3
from dgemma.ops.kernels import soft_8
from dgemma.ops.kernels.cuts import Cut
from dgemma.ops.kernels.sparse import Into
from dgemma.ops.row_stats import Query
from dgemma.ops.soft import soft_mean, soft_mean_reference
from dgemma.ops.soft_table import NEAR, SoftTable
from dgemma.sampler import EntropyBound
from dgemma.stack import Stack
from dgemma.weights.head import Fp8HeadTable, shrink_head
from tests.kernels import small

SMALL = Cut(rows=16, outputs=16, depth=16)


@pytest.fixture(autouse=True)
def rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter's rounding to 8 bits has no carry (3.9); torch's does as a GPU does."""
    usual = interpreter._convert_float

    def convert(given: Any, source: Any, target: Any, mode: Any) -> Any:
        if (source, target) != (tl.float32, tl.float8e4nv):
            return usual(given, source, target, mode)
        numbers = torch.from_numpy(np.ascontiguousarray(given)).clamp(-448, 448).to(E4M3)
        return numbers.view(torch.uint8).numpy()

    monkeypatch.setattr(interpreter, "_convert_float", convert)


def normal(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def table_of(vocab: int, width: int) -> Fp8HeadTable:
    """Vectors of lengths that differ."""
    table = TokenTable(0, width)
    weight_VD = normal(1, vocab, width) * normal(2, vocab, 1).exp()
    table.weight = torch.nn.Parameter(weight_VD, requires_grad=False)
    return Fp8HeadTable(table, soft=True)


def soft_of(table: Fp8HeadTable, share: int) -> SoftTable:
    assert table.soft is not None
    return table.soft._replace(share=share)


def scores_of(vocab: int, rows: int = 6) -> tuple[Tensor, Query]:
    """From nearly even to nearly decided."""
    raw_LV = normal(3, rows, vocab) * torch.linspace(0.1, 30.0, rows)[:, None]
    query = Query(
        heat_T=torch.linspace(0.4, 0.8, rows),
        uniform_T=torch.full((rows,), 0.5, dtype=torch.float64),
        held_T=torch.arange(rows),
    )
    return raw_LV, query


def probabilities(raw_LV: Tensor, cap: float | None, query: Query) -> Tensor:
    logits_LV = raw_LV if cap is None else cap * torch.tanh(raw_LV / cap)
    return (logits_LV / query.heat_T[:, None]).softmax(-1)


@pytest.mark.parametrize(
    ("rows", "vocab", "width", "share", "form"),
    [
        (5, 48, 24, 48, SMALL),  # one part; positions and width beyond the last
        (18, 80, 40, 48, SMALL),  # two parts, the second of them shorter
        (18, 80, 16, 32, SMALL),
        (3, 48, 20, 32, replace(SMALL, depth=32)),  # a step beyond the vocabulary
    ],
)
def test_products_of_parts_are_exact_on_what_was_rounded(
    rows: int, vocab: int, width: int, share: int, form: Cut
) -> None:
    soft, (raw_LV, query) = soft_of(table_of(vocab, width), share), scores_of(vocab, rows)
    found = soft_8.shares_of(probabilities(raw_LV, None, query), soft)
    got_STD = soft_8.product(found, soft, torch.float32, form)
    pieces = zip(
        torch.split(found.numbers_TV.float(), share, 1),
        torch.split(soft.numbers_DV.float(), share, 1),
        found.factor_ST,
        strict=True,
    )
    want_STD = torch.stack([(p @ vectors.T) * factor[:, None] for p, vectors, factor in pieces])
    torch.testing.assert_close(got_STD, want_STD, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("cap", [30.0, None])
@pytest.mark.parametrize("share", [1152, 2304, 3456])
def test_means_are_the_definition_s(cap: float | None, share: int) -> None:
    # Chunks and parts begin and end inside each other, and the last of both are short ones.
    vocab = 2 * NEAR + 560
    table, (raw_LV, query) = table_of(vocab, 24), scores_of(vocab)
    soft = soft_of(table, share)
    want_TD = soft_mean_reference(probabilities(raw_LV, cap, query), table.weight, soft)
    reading = read_by_kernels(raw_LV.clone(), cap, query)
    assert reading.shares is not None
    got_TD = soft_8.mean(reading.shares(soft), soft, table.weight)
    p_TV = reading.dense()
    from_p_TD = soft_8.mean(soft_8.shares_of(p_TV, soft), soft, table.weight)
    exact_TD = p_TV @ table.weight
    for found_TD in (got_TD, from_p_TD):
        # A last bit of a probability may round to another of the few 8-bit numbers.
        assert far(found_TD, want_TD) < 0.004
    assert 0.002 < far(want_TD, exact_TD) < 0.05


def far(got_TD: Tensor, want_TD: Tensor) -> float:
    """Of the row that is furthest off."""
    return float(((got_TD - want_TD).norm(dim=-1) / want_TD.norm(dim=-1)).max())


def test_small_probabilities_count_where_no_great_one_stands_beside_them() -> None:
    """Even with the likeliest token: it is not rounded with them."""
    vocab = 3 * NEAR
    soft = soft_of(table_of(vocab, 24), NEAR + NEAR // 2)
    p_TV = torch.full((1, vocab), 1e-9)
    p_TV[0, 7] = 1 - vocab * 1e-9
    for by in (soft_8.shares_of, shares_by_logits):
        rest_V = by(p_TV, soft).numbers_TV[0].float() / soft.beside_V
        assert rest_V[7] == 0
        assert (rest_V[:7] - 1).abs().max() < 1 / 15.9
    # And now there is one, in the second part and the third chunk, which the first does not touch.
    p_TV[0, 2 * NEAR] = 2e-3
    for by in (soft_8.shares_of, shares_by_logits):
        first_V, second_V = by(p_TV, soft).numbers_TV[0].float().split(soft.share)
        assert first_V.count_nonzero() == soft.share - 1
        assert second_V.count_nonzero() == 1
    # In the second chunk, which reaches into both parts: the second loses its small ones as well.
    p_TV[0, 2 * NEAR], p_TV[0, 2 * NEAR - 1 - NEAR // 2] = 1e-9, 2e-3
    for by in (soft_8.shares_of, shares_by_logits):
        assert by(p_TV, soft).numbers_TV[0].float().count_nonzero() == 1


def shares_by_logits(p_TV: Tensor, soft: SoftTable) -> soft_8.Shares:
    rows = len(p_TV)
    query = Query(
        heat_T=torch.ones(rows),
        uniform_T=torch.zeros(rows, dtype=torch.float64),
        held_T=torch.zeros(rows, dtype=torch.long),
    )
    reading = read_by_kernels(p_TV.log(), None, query)
    assert reading.shares is not None
    return reading.shares(soft)


@pytest.mark.parametrize("cap", [30.0, None])
def test_what_is_rounded_is_known_to_be_no_greater_than_what_it_is_rounded_beside(
    cap: float | None,
) -> None:
    """The greatest of each part that is its chunks' greatest is the greatest 8-bit number."""
    vocab = 4 * NEAR + 48
    soft, (raw_LV, query) = soft_of(table_of(vocab, 24), NEAR + 128), scores_of(vocab)
    soft = soft._replace(beside_V=torch.full((vocab,), 448.0))
    p_LV = probabilities(raw_LV, cap, query)
    rest_LV = p_LV.scatter(-1, p_LV.argmax(-1, keepdim=True), 0.0)
    reading = read_by_kernels(raw_LV.clone(), cap, query)
    assert reading.shares is not None
    for found in (reading.shares(soft), soft_8.shares_of(p_LV, soft)):
        for part, numbers_LW in enumerate(found.numbers_TV.float().split(soft.share, 1)):
            begin, end = part * soft.share, min((part + 1) * soft.share, vocab)
            near = slice(begin // NEAR * NEAR, -(-end // NEAR) * NEAR)
            greatest_L = rest_LV[:, near].amax(-1)
            torch.testing.assert_close(
                found.factor_ST[part] / soft.unit_1, greatest_L, rtol=1e-4, atol=0
            )
            want_LW = 448 * rest_LV[:, begin:end] / greatest_L[:, None]
            torch.testing.assert_close(numbers_LW, want_LW, rtol=1 / 15.9, atol=2**-10 * 1.01)


def test_a_position_that_is_sure_is_told_of_its_token_as_it_is() -> None:
    table = table_of(96, 24)
    p_TV = torch.full((2, 96), 1e-7)
    p_TV[:, 95] = 1 - 95e-7
    with torch.inference_mode(), switched(True):
        got_TD = soft_mean(p_TV, table.weight, soft_of(table, 128))
    assert far(got_TD, table.weight[[95, 95]]) < 1e-4
    assert far(table.head_8[[95]].float() * table.head_factor[95], table.weight[[95]]) > 0.01


def test_pinned_positions_are_told_of_their_own_tokens() -> None:
    table, (raw_LV, query) = table_of(96, 24), scores_of(96)
    own_L, pinned_L = torch.arange(6) + 3, torch.arange(6) % 2 == 1
    reading = read_by_kernels(raw_LV.clone(), None, query)
    soft_LD = torch.empty(6, 24)
    dense_mean(table, reading, Into(soft_LD, own_L, pinned_L, 2.5))
    want_LD = soft_mean_reference(
        probabilities(raw_LV, None, query), table.weight, soft_of(table, 128)
    )
    assert torch.equal(soft_LD[pinned_L], 2.5 * table.weight[own_L][pinned_L])
    assert far(soft_LD[~pinned_L], 2.5 * want_LD[~pinned_L]) < 0.004


def shrunk() -> Gemma:
    return shrink_head(small.model(sharpness=1.0), soft=True)


@torch.inference_mode()
def test_steps_take_them_where_a_table_has_them() -> None:
    of = shrunk()
    stepper = Stepper(of, Stack(of), Shape(4, 1, EntropyBound()))
    raw_LV, query = scores_of(96, rows=4)
    reading = read_by_kernels(raw_LV.clone(), None, query)
    with switched(True):
        stepper._dense(reading)
    first_LD = stepper.memory.soft_LD.clone()
    table = of.embed_tokens
    assert isinstance(table, Fp8HeadTable)
    want_LD = torch.empty_like(first_LD)
    dense_mean_8(table, reading, Into(want_LD, query.held_T, query.held_T < 0, table.scale))
    assert torch.equal(first_LD, want_LD)
    table.forget_soft()
    with switched(True):
        stepper._dense(reading)
    exact_LD = probabilities(raw_LV, None, query) @ table.weight * table.scale
    assert far(stepper.memory.soft_LD, exact_LD) < 1e-4 < far(first_LD, exact_LD)


@torch.inference_mode()
def test_they_are_checked_before_they_are_used(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    of = shrunk()
    assert soft_off(of) == ""
    assert soft_off(small.model()) == ""  # in 16 bits there is nothing to check
    assert judge_soft(of) == ""
    assert of.embed_tokens.soft is not None
    product = soft_8.product
    monkeypatch.setattr(soft_8, "product", lambda *given: product(*given) * 1.5)
    assert judge_soft(of) == ""  # what is known is not asked for again
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "other"))
    assert judge_soft(of).startswith("wrong: those made of scores, by 0.")
    assert of.embed_tokens.soft is None


@torch.inference_mode()
def test_a_check_that_raises_lets_them_go(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))

    def fails(*given: object) -> Tensor:
        raise RuntimeError("out of shared memory\nand more")

    monkeypatch.setattr(soft_8, "product", fails)
    of = shrunk()
    assert judge_soft(of) == "their check raised RuntimeError: out of shared memory"
    assert of.embed_tokens.soft is None


@torch.inference_mode()
def test_behind_a_check_that_took_the_device_down_the_next_start_goes_on(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    of = shrunk()

    def dies(*given: object) -> Tensor:
        """Afterwards no number can be had, as of a device that does not answer."""
        gone_VD = of.embed_tokens.weight.to("meta")
        of.embed_tokens.weight = torch.nn.Parameter(gone_VD, requires_grad=False)
        raise RuntimeError("an illegal address")

    with monkeypatch.context() as patched:
        patched.setattr(soft_8, "product", dies)
        with pytest.raises(DeviceFault, match=r"an illegal address.*start again"):
            judge_soft(of)
    of = shrunk()
    assert judge_soft(of) == "their check raised RuntimeError: an illegal address"
    assert of.embed_tokens.soft is None
