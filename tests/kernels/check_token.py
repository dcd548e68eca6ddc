"""Ways of a single token: each gives what the layers give without it."""

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from dgemma.denoise import commit
from dgemma.graph.token import Teller
from dgemma.ops.experts import gated
from dgemma.ops.fast import switched
from dgemma.ops.fp8 import quantize
from dgemma.ops.kernels import attention, attention_1, mlp_1, router
from dgemma.ops.kernels.enter import Table
from dgemma.ops.kernels.enter_1 import enter
from dgemma.ops.kernels.heads import Heads, heads
from dgemma.ops.kernels.mlp_1 import Cut
from dgemma.ops.kernels.ways import NAMES, Ways, trying
from dgemma.ops.norm import rms_norm
from dgemma.ops.rope import turns
from dgemma.stack import Stack
from dgemma.weights.nvfp4 import lay_stacked
from dgemma.weights.packed import FORMS, shrink_model
from dgemma.weights.random import random_model
from tests.kernels import small
from tests.kernels.small import SMALL

NONE = Ways(**dict.fromkeys(NAMES, False))


def normal(seed: int, *shape: int, scale: float = 1.0) -> Tensor:
    return scale * torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.fixture
def small_cut(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    form = attention.Cut(queries=16, keys=16, warps=4, stages=2, parts=2)
    monkeypatch.setattr(attention, "cut", lambda *_: form)
    yield


@pytest.mark.parametrize(
    ("bits", "rows", "wide"), [(16, 1, 80), (16, 2, 48), (8, 2, 80), (4, 1, 128)]
)
def test_the_dense_part_beside_the_experts_is_both(bits: int, rows: int, wide: int) -> None:
    width, inner = (128, 64) if bits == 4 else (72, 40)
    dense = (normal(1, 2 * wide, width, scale=0.1), normal(2, width, wide, scale=0.1))
    experts = (normal(3, 4, 2 * inner, width, scale=0.1), normal(4, 4, width, inner, scale=0.1))
    x, y, ids = normal(5, rows, width), normal(6, rows, width), normal(7, rows, 4).topk(2).indices
    if bits == 16:
        given = [(weight, None) for weight in (*dense, *experts)]
    else:
        packed = [quantize(weight) for weight in (*dense, *experts)]
        dense, given = tuple(one.whole() for one in packed[:2]), packed
        experts = tuple(one.whole() for one in packed[2:])
    if bits == 4:
        laid = lay_stacked(experts[0], 2), lay_stacked(experts[1], 1)
        experts = tuple(torch.stack([one.whole(e) for e in range(4)]) for one in laid)
        given = [*given[:2], *laid]
    cut = Cut(columns=16, depth=64, down_columns=16)
    parts, got = mlp_1.both((x, y), ids, tuple(given[:2]), tuple(given[2:]), cut)
    assert len(parts) == (wide // inner if wide % inner == 0 else 1)
    want = gated(x @ dense[0].T) @ dense[1].T
    torch.testing.assert_close(parts.sum(0), want, atol=5e-6, rtol=1e-4)
    flat = enumerate(ids.flatten().tolist())
    want = torch.stack([gated(y[c // 2] @ experts[0][e].T) @ experts[1][e].T for c, e in flat])
    torch.testing.assert_close(got, want, atol=5e-6, rtol=1e-4)


@pytest.mark.parametrize("num_experts", [8, 6])
def test_ranks_choose_the_same_experts_in_the_same_order(num_experts: int) -> None:
    scale = 1 + 0.1 * normal(1, num_experts)
    found = []
    for seed in range(4):
        logits = normal(seed, 1, 1, num_experts)
        logits[0, 0, 2] = logits[0, 0, 4] if seed else float("nan")
        for ranks in (False, True):
            with trying(ranks=ranks):
                found.append(router.choose(router.Parts(logits), scale, 3))
        (ids, share, _), (ranked, shares, _) = found[-2:]
        assert torch.equal(ids, ranked)
        torch.testing.assert_close(shares, share)


def test_a_token_enters_in_one_launch_as_it_does_in_many() -> None:
    table_VD, weight_D = normal(1, 20, 40), 1 + 0.1 * normal(2, 40)
    token, start, pairs = torch.tensor([7]), torch.tensor([300]), normal(3, 150).abs()
    x, normed, cos, sin = enter(token, start, Table(table_VD, 3.0), (weight_D, 1e-6), pairs)
    assert torch.equal(x, 3.0 * table_VD[7:8])
    torch.testing.assert_close(normed, rms_norm(x, weight_D, 1e-6))
    for got, want in zip((cos, sin), turns(start, pairs), strict=True):
        torch.testing.assert_close(got[None], want, atol=1e-5, rtol=1e-5)


@pytest.mark.usefixtures("small_cut")
@pytest.mark.parametrize("on", [(), ("ahead", "ranks"), ("joint",), ("heads",), NAMES])
def test_every_way_leads_to_the_model_s_logits(on: tuple[str, ...]) -> None:
    of = small.model()
    rows, twin = small.cache(of, 7), small.cache(of, 7)
    teller = Teller(of, Stack(of))
    with switched(True), trying(replace(NONE, **dict.fromkeys(on, True))):
        got = teller.tell(5, rows)
    with torch.inference_mode():
        want = of.logits(commit(of, twin, torch.tensor([5]), chunk=8))[0]
    assert got is not None
    torch.testing.assert_close(got, want, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(("past", "own", "window", "has_value"), [
    (0, 1, 0, True),
    (0, 40, 12, True),
    (21, 9, 12, False),
    (33, 1, 0, False),
    (5, 30, 0, True),
])  # fmt: skip
def test_heads_and_attention_as_one_are_one_after_the_other(
    past: int, own: int, window: int, has_value: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    form = attention.Cut(queries=16, keys=16, warps=4, stages=2, parts=3)
    monkeypatch.setattr(attention, "cut", lambda *_: form)
    norms = {"q_weight": 1 + normal(1, 16, scale=0.1), "k_weight": 1 + normal(2, 16, scale=0.1)}
    shape = Heads(queries=4, keys=2, width=16, has_value=has_value, **norms)
    qkv = normal(3, 1, (4 + 2 * (1 + has_value)) * 16)
    turned = turns(torch.tensor([past + own - 1]), normal(4, 8).abs())
    found = []
    for as_one in (False, True):
        buffers = [normal(5 + i, n + 1, 2, 16) for i, n in enumerate((past, past, own, own))]
        at = [buffer.data_ptr() for buffer in buffers]
        place = torch.tensor([at[0], at[1], past, at[2], at[3], own])
        if as_one:
            got = attention_1.attention(qkv, shape, turned, place, (1e-6, window))
        else:
            q = heads(qkv, shape, turned, place, 1e-6)
            got = attention.attention(q, place, 2, window, form)
        found.append([got, *buffers])
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, atol=4e-6, rtol=1e-5)


@pytest.mark.usefixtures("small_cut")
@pytest.mark.parametrize("quant", ["fp8", "nvfp4"])
def test_fewer_bits_go_the_same_ways(quant: str) -> None:
    wide = {"hidden_size": 64, "moe_intermediate_size": 64, "intermediate_size": 192}
    of = shrink_model(random_model(replace(SMALL, **wide), seed=0), FORMS[quant])
    found = []
    for joint in (False, True):
        row = small.cache(of, 7)
        with switched(True), trying(joint=joint):
            got = Teller(of, Stack(of)).tell(5, row)
        assert got is not None
        found.append(got)
    torch.testing.assert_close(*found, atol=1e-4, rtol=1e-4)
