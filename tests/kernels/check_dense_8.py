"""8-bit products of a canvas by kernel: exact on what was quantized, whole and in parts."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from dgemma.ops.dense import FEW, Weight, product
from dgemma.ops.fast import switched
from dgemma.ops.fp8 import quantize
from dgemma.ops.kernels import dense_8
from dgemma.ops.kernels.cuts import DOWN, MOST, OUT, QKV, Cut

SMALL = Cut(rows=16, outputs=16, depth=16)


def normal(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(
    ("rows", "outputs", "depth", "form"),
    [
        (5, 24, 48, SMALL),  # outputs and rows beyond the last
        (18, 40, 80, replace(SMALL, parts=2)),  # five steps in parts of three
        (18, 16, 80, replace(SMALL, parts=3)),
        (3, 20, 48, replace(SMALL, depth=32)),  # a step beyond the depth
        (5, 70, 272, QKV),
        (5, 70, 272, OUT),
        (5, 70, 272, DOWN),
    ],
)
def test_products_are_exact_on_what_was_quantized(
    rows: int, outputs: int, depth: int, form: Cut
) -> None:
    weight, x = quantize(normal(1, outputs, depth)), quantize(normal(2, rows, depth))
    got = dense_8.product(x, weight, torch.float32, form)
    if form.parts > 1:
        assert got.shape == (form.parts, rows, outputs)
        assert got.flatten(1).any(1).all()  # each has a share of the depth
        got = got.sum(0)
    torch.testing.assert_close(got, x.whole() @ weight.whole().T, atol=5e-5, rtol=1e-5)


def test_a_product_takes_a_cut_for_8_bit_weights_and_some_rows_only() -> None:
    eight, plain = Weight(*quantize(normal(1, 16, 32))), Weight(normal(1, 16, 32))
    odd, cut = Weight(*quantize(normal(1, 16, 24))), replace(SMALL, parts=2)

    def parts(rows: int, weight: Weight, form: Cut | None = cut) -> int:
        found = product(normal(2, rows, weight.numbers_OI.shape[1]), weight, torch.float32, form)
        return len(found) if found.dim() == 3 else 0

    with torch.inference_mode(), switched(True):
        assert (parts(FEW + 1, eight), parts(MOST, eight)) == (2, 2)
        assert (parts(FEW, eight), parts(MOST + 1, eight)) == (0, 0)
        assert (parts(5, plain), parts(5, odd), parts(5, eight, None)) == (0, 0, 0)
        x = quantize(normal(2, 5, 32))
        got = product(x, eight, torch.float32, cut).sum(0)
    with torch.inference_mode():
        assert parts(5, eight) == 0  # kernels are off
        want = product(x, eight, torch.float32, cut)
    torch.testing.assert_close(got, want, atol=2e-5, rtol=1e-5)
