"""Experts in four bits by kernel, beside what their numbers stand for."""

import pytest
import torch
from torch import Tensor

from dgemma.ops.experts import gated
from dgemma.ops.fast import switched
from dgemma.ops.kernels import experts_4 as kernels
from dgemma.ops.kernels.buckets import buckets
from dgemma.ops.kernels.tiles import TABLE_4, Tile
from dgemma.ops.nvfp4_order import Laid
from dgemma.weights.nvfp4 import Fp4Experts, lay_stacked

WIDTH, INNER, COUNT = 128, 64, 3
# More columns than there are, and deeper than an expert is wide.
FORMS = {
    "plain": Tile(rows=16, columns=16, depth=64),
    "deep": Tile(rows=16, columns=32, depth=128),
    "odd": Tile(rows=16, columns=128, depth=256),
    "whole": Tile(rows=16, columns=32, depth=64, whole=True),
    "whole odd": Tile(rows=16, columns=128, depth=256, whole=True),
    "unrolled": Tile(rows=16, columns=32, depth=64, whole=True, unroll=2),
    "unrolled odd": Tile(rows=16, columns=64, depth=64, unroll=3),
}


def normal(seed: int, *shape: int, scale: float = 1.0) -> Tensor:
    return scale * torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def weights() -> tuple[Laid, Laid]:
    up = normal(2, COUNT, 2 * INNER, WIDTH, scale=WIDTH**-0.5)
    up[1, :7] *= 1e-3  # scales that are small beside others
    up[2, 3, :16] = 0.0
    return lay_stacked(up, 2), lay_stacked(normal(3, COUNT, WIDTH, INNER, scale=INNER**-0.5), 1)


def wanted(x: Tensor, ids: Tensor, up: Laid, down: Laid) -> Tensor:
    rows = [
        gated(x[c // ids.shape[1]] @ up.whole(e).T) @ down.whole(e).T
        for c, e in enumerate(ids.flatten().tolist())
    ]
    return torch.stack(rows)


@pytest.mark.parametrize(
    ("tokens", "form"),
    [
        (1, "plain"),
        (7, "deep"),
        (25, "plain"),
        (5, "odd"),
        (7, "whole"),
        (5, "whole odd"),
        (7, "unrolled"),
        (5, "unrolled odd"),
    ],
)
def test_products_with_four_bits_are_those_with_what_they_stand_for(tokens: int, form: str) -> None:
    up, down = weights()
    x, ids = normal(4, tokens, WIDTH), normal(1, tokens, COUNT).topk(2).indices
    into = buckets(ids, COUNT)
    hidden = kernels.gate_up_4(x, up, into, 2, FORMS[form])
    got = kernels.down_4(hidden, down, into, FORMS[form])
    torch.testing.assert_close(got, wanted(x, ids, up, down), atol=2e-6, rtol=1e-5)


def test_every_tile_of_the_table_gives_the_same() -> None:
    up, down = weights()
    x, ids = normal(4, 3, WIDTH), normal(1, 3, COUNT).topk(2).indices
    want, into = wanted(x, ids, up, down), buckets(ids, COUNT)
    for _, entry in TABLE_4:
        hidden = kernels.gate_up_4(x, up, into, 2, entry.gate_up)
        got = kernels.down_4(hidden, down, into, entry.down)
        torch.testing.assert_close(got, want, atol=2e-6, rtol=1e-5)


def test_the_module_takes_the_kernels_where_they_are_on() -> None:
    up, down = weights()
    part = Fp4Experts(up, down)
    x, ids = normal(4, 9, WIDTH), normal(1, 9, COUNT).topk(2).indices
    with torch.inference_mode():
        plain = part.choices(x, ids)
        with switched(True):
            fast = part.choices(x, ids)
    torch.testing.assert_close(fast, plain, atol=2e-6, rtol=1e-5)
    assert not torch.equal(fast, plain)  # another order of additions: another path
