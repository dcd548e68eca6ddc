"""Experts by kernel: any routing, any shape, both forms of a tile, always the same bits."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from dgemma.ops.experts import experts_reference, gated
from dgemma.ops.fast import switched
from dgemma.ops.fp8 import fp8_choices, quantize, reads_8
from dgemma.ops.kernels import experts as kernels
from dgemma.ops.kernels.buckets import buckets
from dgemma.ops.kernels.tiles import TABLE, TABLE_8, Tile, tiles

TILE = Tile(rows=16, columns=16, depth=16)
FORMS = {
    "plain": TILE,
    "swapped": replace(TILE, swap=True),
    "deep": replace(TILE, depth=32),
    "engine": replace(TILE, tma=True, swap=True),
}


def normal(seed: int, *shape: int, scale: float = 1.0) -> Tensor:
    return scale * torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def case(tokens: int, dtype: torch.dtype, *, bias: float = 0.0) -> tuple[Tensor, ...]:
    """5 experts of 24 to 40 wide; with a bias all tokens choose the same two."""
    width, inner, count = (40, 24, 5) if dtype == torch.float32 else (48, 32, 5)
    scores = normal(1, tokens, count) + bias * torch.arange(count)
    share_TK, ids_TK = scores.softmax(-1).topk(2)
    gate_up = normal(2, count, 2 * inner, width, scale=width**-0.5)
    down = normal(3, count, width, inner, scale=inner**-0.5)
    x = normal(4, tokens, width)
    return x.to(dtype), ids_TK, share_TK, gate_up.to(dtype), down.to(dtype)


def by_tile(x: Tensor, ids: Tensor, share: Tensor, weights: list[Tensor], tile: Tile) -> Tensor:
    into = buckets(ids, len(weights[0]))
    hidden = kernels.gate_up(x, weights[0], into, ids.shape[1], tile)
    return kernels.combine(kernels.down(hidden, weights[1], into, tile), share)


@pytest.mark.parametrize(
    ("tokens", "bias", "form"),
    [(1, 0.0, "plain"), (7, 0.0, "deep"), (21, 9.0, "swapped"), (7, 0.0, "engine")],
)
def test_experts_agree_with_their_definition(tokens: int, bias: float, form: str) -> None:
    x, ids, share, *weights = case(tokens, torch.float32, bias=bias)
    want = experts_reference(x, ids, share, *weights)
    got = by_tile(x, ids, share, weights, FORMS[form])
    torch.testing.assert_close(got, want, atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize("form", ["plain", "engine"])
def test_half_precision_loses_no_more_than_its_rounding(form: str) -> None:
    x, ids, share, *weights = case(9, torch.float16)
    want = experts_reference(x.float(), ids, share, *(w.float() for w in weights))
    got = by_tile(x, ids, share, weights, FORMS[form])
    torch.testing.assert_close(got.float(), want, atol=3e-3, rtol=3e-3)


def test_buckets_hold_every_choice_once_in_order() -> None:
    ids = torch.tensor([[2, 0], [0, 1], [2, 1], [2, 0]])
    found = buckets(ids, 4)
    assert found.count_E.tolist() == [3, 2, 3, 0]
    rows = [row[:count] for row, count in zip(found.choice_ES.tolist(), [3, 2, 3, 0], strict=True)]
    assert rows == [[1, 2, 7], [3, 5], [0, 4, 6], []]


def test_more_choices_than_one_scan_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dgemma.ops.kernels.buckets.SCAN", 16)
    _, ids = normal(1, 37, 3).topk(2)
    found = buckets(ids, 3)
    for expert, count in enumerate(found.count_E.tolist()):
        want = (ids.flatten() == expert).nonzero()[:, 0].tolist()
        assert found.choice_ES[expert, :count].tolist() == want


def test_the_table_of_tiles_covers_every_number_of_rows() -> None:
    x, ids, _, *weights = case(3, torch.float32)
    for _, entry in TABLE:
        into = buckets(ids, 5)
        hidden = kernels.gate_up(x, weights[0], into, 2, entry.gate_up)
        want = torch.stack(
            [gated(x[c // 2] @ weights[0][e].T) for c, e in enumerate(ids.flatten().tolist())]
        )
        torch.testing.assert_close(hidden, want, atol=2e-6, rtol=1e-5)
    assert tiles(8, 128) == TABLE[0][1]
    assert tiles(2048, 128) == TABLE[1][1]
    assert tiles(1 << 20, 128, 8) == TABLE_8[-1][1]


def test_only_what_fits_is_taken() -> None:
    x, _, _, *weights = case(3, torch.float32)
    assert kernels.fits(x, *weights)
    assert not kernels.fits(x.half(), *weights)
    assert not kernels.fits(x, weights[0].transpose(1, 2), weights[1])


def test_rows_that_8_bits_can_hold_are_held() -> None:
    """Others are not looked at: the interpreter's rounding to 8 bits has no carry (3.9)."""
    numbers = (60 * normal(1, 4, 40)).to(torch.float8_e4m3fn).float()
    numbers[:, 7] = 448.0
    x = numbers * torch.tensor([2.0, 1.0, 2**-9, 2**5])[:, None]
    got, factor = kernels.quantize(x)
    want = quantize(x)
    assert torch.equal(got.float(), numbers)
    assert torch.equal(got.float(), want.numbers.float())
    assert torch.equal(factor, want.factor)
    assert not kernels.quantize(torch.zeros(1, 8))[0].float().any()


@pytest.mark.parametrize("form", ["plain", "swapped"])
def test_8_bit_products_are_exact_on_what_was_quantized(form: str) -> None:
    x, ids, _, up, down = case(7, torch.float32)
    x_8, up_8, down_8 = quantize(x), quantize(up), quantize(down)
    into = buckets(ids, len(up))
    scales = kernels.Scales(x_8.factor, up_8.factor, torch.float32)
    hidden = kernels.gate_up(x_8.numbers, up_8.numbers, into, 2, FORMS[form], scales)
    rows = [(c // 2, e) for c, e in enumerate(ids.flatten().tolist())]
    whole, heavy = x_8.whole(), up_8.whole()
    want = torch.stack([gated(whole[t] @ heavy[e].T) for t, e in rows])
    torch.testing.assert_close(hidden, want, atol=2e-6, rtol=1e-5)
    hidden_8 = quantize(want)
    scales = kernels.Scales(hidden_8.factor, down_8.factor, torch.float32)
    out = kernels.down(hidden_8.numbers, down_8.numbers, into, FORMS[form], scales)
    whole, heavy = hidden_8.whole(), down_8.whole()
    want = torch.stack([whole[c] @ heavy[e].T for c, (_, e) in enumerate(rows)])
    torch.testing.assert_close(out, want, atol=2e-6, rtol=1e-5)


def test_8_bit_experts_by_kernel_are_near_their_definition() -> None:
    x, ids, _, up, down = case(5, torch.float16)
    x, up_8, down_8 = x.float(), quantize(up), quantize(down)
    with torch.inference_mode():
        want = fp8_choices(x, ids, up_8, down_8)
        with switched(True):
            got = fp8_choices(x, ids, up_8, down_8)
    assert (got - want).abs().mean() < 0.2 * want.abs().mean()  # without a carry: see above


def test_8_bit_experts_take_rows_that_are_quantized_already() -> None:
    x, ids, _, up, down = case(5, torch.float16)
    x, up_8, down_8 = x.float(), quantize(up), quantize(down)
    with torch.inference_mode():
        assert not reads_8(x, up_8, down_8)
        with switched(True):
            assert reads_8(x, up_8, down_8)
            assert not reads_8(x[:4], up_8, down_8)  # so few stay as they are
            want = fp8_choices(x, ids, up_8, down_8)
            got = fp8_choices(quantize(x), ids, up_8, down_8, dtype=torch.float32)
    assert torch.equal(got, want)
