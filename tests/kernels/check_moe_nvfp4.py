"""Experts in four bits by kernel, beside what their numbers stand for."""

import pytest
import torch
from torch import Tensor

from dgemma.backends.cuda.configs import MOE_4, MoeConfig
from dgemma.backends.cuda.kernels import moe_nvfp4 as kernels
from dgemma.backends.cuda.kernels.moe_sort import buckets
from dgemma.backends.cuda.moe import Fp4Moe, moe_kernels
from dgemma.model.moe import expert_outputs, gelu_and_mul
from dgemma.quant.fp4_experts import Fp4Experts, fp4_grouped, lay_stacked
from dgemma.quant.nvfp4_tiles import Laid

WIDTH, INNER, COUNT = 128, 64, 3
# More columns than there are, and deeper than an expert is wide.
FORMS = {
    "plain": MoeConfig(rows=16, columns=16, depth=64),
    "deep": MoeConfig(rows=16, columns=32, depth=128),
    "odd": MoeConfig(rows=16, columns=128, depth=256),
    "whole": MoeConfig(rows=16, columns=32, depth=64, whole=True),
    "whole odd": MoeConfig(rows=16, columns=128, depth=256, whole=True),
    "unrolled": MoeConfig(rows=16, columns=32, depth=64, whole=True, unroll=2),
    "unrolled odd": MoeConfig(rows=16, columns=64, depth=64, unroll=3),
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
        gelu_and_mul(x[c // ids.shape[1]] @ up.whole(e).T) @ down.whole(e).T
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
    for _, entry in MOE_4:
        hidden = kernels.gate_up_4(x, up, into, 2, entry.gate_up)
        got = kernels.down_4(hidden, down, into, entry.down)
        torch.testing.assert_close(got, want, atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize("tokens", [3, 9])
def test_the_module_s_kernels_compute_what_it_defines(tokens: int) -> None:
    """Choice by choice, and expert by expert."""
    up, down = weights()
    part = Fp4Experts(up, down)
    experts = moe_kernels(part, torch.float32)
    assert moe_kernels(part, torch.float16) is None  # weights are unpacked to bfloat16
    x, ids = normal(4, tokens, WIDTH), normal(1, tokens, COUNT).topk(2).indices
    assert isinstance(experts, Fp4Moe)
    assert not experts.accepts_fp8(x)
    want = expert_outputs(x, ids, fp4_grouped(up), fp4_grouped(down))
    for into in (None, buckets(ids, COUNT)):
        got = experts.outputs(x, ids, into, torch.float32)
        torch.testing.assert_close(got, want, atol=2e-6, rtol=1e-5)
