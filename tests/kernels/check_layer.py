"""The small kernels of a layer beside their definitions."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from dgemma.ops import fused
from dgemma.ops.dense import gated
from dgemma.ops.fast import switched
from dgemma.ops.kernels import heads
from dgemma.ops.kernels import layer as kernels
from dgemma.ops.norm import rms_norm
from dgemma.ops.rope import rotate

EPS = 1e-6


def normal(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def both(work: object) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    assert callable(work)
    with torch.inference_mode():
        with switched(True):
            got = work()
        with switched(False):
            return got, work()


@pytest.mark.parametrize("width", [40, 64])
def test_norms_and_sums_agree(width: int) -> None:
    x, y, z = (normal(seed, 5, width) for seed in range(3))
    weights = [1 + 0.1 * normal(seed, width) for seed in range(10, 15)]
    out, share = normal(4, 15, width), normal(5, 5, 3).softmax(-1)
    joining = fused.JoinWeights(*weights[:4])
    closing = fused.CloseWeights(*weights[:3], torch.tensor([0.7]), weights[4])
    for work in (
        lambda: (rms_norm(x, weights[0], EPS), rms_norm(x, None, EPS)),
        lambda: fused.join(x, y, joining, EPS),
        lambda: fused.close(x, z, (out, share), closing, EPS),
        lambda: (gated(y),),
    ):
        got, want = both(work)
        assert len(got) == len(want)
        for a, b in zip(got, want, strict=True):
            torch.testing.assert_close(a, b, atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize("count", [1, 3])
def test_products_that_come_in_parts_are_added_up(count: int) -> None:
    x, parts = normal(0, 5, 40), normal(1, count, 5, 40)
    weights = [1 + 0.1 * normal(seed, 40) for seed in range(10, 15)]
    mixed = normal(4, 15, 40), normal(5, 5, 3).softmax(-1)
    closing = fused.CloseWeights(*weights[:3], torch.tensor([0.7]), weights[4])

    def work(given: Tensor) -> tuple[Tensor, ...]:
        joined = fused.join(x, given, fused.JoinWeights(*weights[:4]), EPS)
        return *joined, *fused.close(x, given, mixed, closing, EPS)

    want = work(parts.sum(0))
    for got in both(lambda: work(parts)):
        for a, b in zip(got, want, strict=True):
            torch.testing.assert_close(a, b, atol=4e-6, rtol=1e-5)


@pytest.mark.parametrize(("experts", "top_k"), [(4, 2), (5, 3), (128, 8), (1, 1)])
def test_routes_agree(experts: int, top_k: int) -> None:
    logits, scale = 2 * normal(1, 6, experts), 1 + 0.1 * normal(2, experts)
    (ids, share), (want_ids, want) = both(lambda: fused.route(logits, scale, top_k))
    assert ids.tolist() == want_ids.tolist()
    torch.testing.assert_close(share, want, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("has_value", [True, False])
@pytest.mark.parametrize("form", [None, heads.Cut(1, 1)])
def test_heads_are_normed_turned_and_written_to_their_slots(
    has_value: bool, form: heads.Cut | None
) -> None:
    queries, keys, width, length, slots = 8, 4, 16, 3, 9
    count = queries + keys * (1 + has_value)
    qkv = normal(1, length, count * width)
    buffers = normal(2, 2, slots, keys, width)
    before = buffers.clone()
    angles = normal(3, length, width // 2)
    turns = angles.cos(), angles.sin()
    shape = heads.Heads(
        queries=queries,
        keys=keys,
        width=width,
        q_weight=1 + 0.1 * normal(4, width),
        k_weight=1 + 0.1 * normal(5, width),
        has_value=has_value,
    )
    place = torch.tensor([0, 0, 0, buffers[0, 2].data_ptr(), buffers[1, 2].data_ptr(), 5])
    q = heads.heads(qkv, shape, turns, place, EPS, form)
    parts = qkv.view(length, count, width)
    k = parts[:, queries : queries + keys]
    v = parts[:, queries + keys :] if has_value else k
    want_q = rotate(rms_norm(parts[:, :queries], shape.q_weight, EPS), *turns)
    torch.testing.assert_close(q, want_q, atol=2e-6, rtol=1e-5)
    # Five keys from slot 2 on, of which the last three are the new ones.
    before[0, 4:7] = rotate(rms_norm(k, shape.k_weight, EPS), *turns)
    before[1, 4:7] = rms_norm(v, None, EPS)
    torch.testing.assert_close(buffers, before, atol=2e-6, rtol=1e-5)


def test_heads_are_taken_together_as_far_as_their_kinds_allow() -> None:
    one = torch.ones(1)
    norms = {"q_weight": one, "k_weight": one, "has_value": True}
    for queries, keys, want in ((16, 8, (8, 4)), (16, 2, (2, 1)), (4, 1, (1, 1)), (12, 4, (4, 2))):
        shape = heads.Heads(queries=queries, keys=keys, width=256, **norms)
        assert heads.cut(shape) == heads.Cut(*want)


@pytest.mark.parametrize("width", [40, 64])
def test_rows_written_in_8_bits_are_those_written_whole(width: int) -> None:
    """Most of them: the interpreter's rounding to 8 bits has no carry (3.9)."""
    x, y, z = (normal(seed, 5, width) for seed in range(3))
    weights = [1 + 0.1 * normal(seed, width) for seed in range(10, 15)]
    out, share = normal(4, 15, width), normal(5, 5, 3).softmax(-1)
    closing = (*weights[:3], torch.tensor([0.7]), weights[4])
    joining = tuple(weights[:4])
    # Rows and who reads them; the others stay whole.
    works: list[tuple[Callable[..., object], str, int]] = [
        (lambda **how: kernels.join(x, y, joining, EPS, **how), "eight", 1),
        (lambda **how: kernels.join(x, y, joining, EPS, **how), "experts_eight", 2),
        (lambda **how: kernels.close(x, z, (out, share), closing, EPS, **how), "eight", 1),
        (lambda **how: (x, kernels.gated(y, **how)), "eight", 1),
    ]
    for work, reader, place in works:
        wholes, found = list(work()), list(work(**{reader: True}))
        whole, (numbers, factor) = wholes.pop(place), found.pop(place)
        assert all(torch.equal(a, b) for a, b in zip(found, wholes, strict=True))
        greatest = whole.abs().amax(-1)
        torch.testing.assert_close(factor, greatest / 448, atol=0, rtol=1e-5)
        assert numbers.dtype == torch.float8_e4m3fn
        off = (numbers.float() * factor[:, None] - whole).abs()
        is_near = off <= whole.abs() / 15.9 + factor[:, None] * 2**-9
        assert is_near.float().mean() > 0.9
