"""Each op against its definition: fast paths agree with their references, on any shape."""

import math
import os
import subprocess
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from dgemma.backends.cpu import (
    SOFT_EMBED_ERROR,
    MergedAttention,
    MergedFeedForward,
    can_pack,
    gelu_and_mul_cpu,
    merged_module,
    pack,
    packed_linear,
    replace_modules,
    soft_embed,
    soft_embed_reference,
)
from dgemma.config import AttentionShape
from dgemma.diffusion.canvas import WORD, Noise, philox, philox_numpy
from dgemma.diffusion.logit_stats import Query, position_stats, position_stats_reference
from dgemma.model.attention import KVSegment, attention, attention_reference, can_merge
from dgemma.model.forward_batch import ForwardBatch, Segment
from dgemma.model.gemma import Gemma
from dgemma.model.kv_cache import Capacity, KVCache
from dgemma.model.moe import (
    gelu_and_mul,
    grouped_linear,
    linear,
    moe_forward,
    moe_reference,
    per_expert,
)
from dgemma.model.norm_rope import apply_rope, cos_sin, inverse_frequencies, rms_norm
from dgemma.weights.load import random_model
from tests.tiny import CPU, TINY

ROOT = Path(__file__).resolve().parents[1]
QUICK = settings(deadline=None, derandomize=True, database=None)
needs_packing = pytest.mark.skipif(
    not can_pack(torch.empty(1)), reason="this build of torch has no packed products"
)


def normal(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


# --- attention


@st.composite
def attention_cases(draw: Any) -> tuple[Tensor, list[KVSegment]]:
    """Queries, and segments of any lengths, each with or without a mask."""
    length, kv_heads, groups = (draw(st.integers(1, n)) for n in (9, 3, 4))
    width, seed = draw(st.sampled_from([2, 8, 16, 20])), draw(st.integers(0, 999))
    q = normal(seed, length, kv_heads * groups, width)
    segments = []
    for index, keys in enumerate(draw(st.lists(st.integers(1, 40), min_size=1, max_size=4))):
        k, v = normal(seed + 2 * index + 1, 2, keys, kv_heads, width)
        mask = normal(seed + 2 * index + 2, length, keys) > 0 if draw(st.booleans()) else None
        segments.append(KVSegment(k, v, mask))
    last = segments[-1]
    if last.mask_LS is not None:
        last.mask_LS[:, -1] = True  # as in a pass: each query sees at least itself
    return q, segments


@settings(QUICK, max_examples=150)
@given(case=attention_cases())
def test_attention_is_one_softmax_over_all_segments(case: tuple[Tensor, list[KVSegment]]) -> None:
    q, segments = case
    torch.testing.assert_close(
        attention(q, segments), attention_reference(q, segments), atol=2e-5, rtol=1e-5
    )


def test_the_reference_of_attention_is_what_it_says() -> None:
    """Two query heads share a key head; the second query sees the first key alone."""
    q = torch.tensor([[[1.0, 0.0], [0.0, 2.0]], [[3.0, 1.0], [1.0, 1.0]]])
    k = torch.tensor([[[1.0, 1.0]], [[0.5, -1.0]]])
    v = torch.tensor([[[1.0, 10.0]], [[2.0, 20.0]]])
    mask = torch.tensor([[True, True], [True, False]])
    share = 1 / (1 + math.exp(0.5 - 1.0)), 1 / (1 + math.exp(-2.0 - 2.0))
    expected = torch.tensor([[s + 2 * (1 - s), 10 * s + 20 * (1 - s)] for s in share])
    for compute in (attention, attention_reference):
        out = compute(q, [KVSegment(k, v, mask)])
        torch.testing.assert_close(out[0], expected)
        torch.testing.assert_close(out[1], torch.tensor([[1.0, 10.0], [1.0, 10.0]]))


def test_segments_are_merged_unless_an_earlier_one_has_a_mask() -> None:
    q, (k, v) = normal(0, 4, 2, 8), normal(1, 2, 6, 1, 8)
    mask = torch.ones(4, 6, dtype=torch.bool)
    plain, masked = KVSegment(k, v), KVSegment(k, v, mask)
    assert can_merge(q, [plain, plain]) and can_merge(q, [plain, masked])
    assert not can_merge(q, [masked, plain])
    whole = KVSegment(torch.cat([k, 2 * k]), torch.cat([v, 3 * v]))
    with mock.patch("dgemma.model.attention.attention_reference", side_effect=AssertionError):
        merged = attention(q, [plain, KVSegment(2 * k, 3 * v)])
    torch.testing.assert_close(merged, attention(q, [whole]), atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("scale", [1.0, 30.0])
def test_merging_survives_scores_of_very_different_size(scale: float) -> None:
    q, near, far = normal(0, 5, 4, 8), normal(1, 2, 7, 2, 8), normal(2, 2, 9, 2, 8)
    segments = [KVSegment(near[0] * scale, near[1]), KVSegment(far[0] / scale, far[1])]
    out, expected = attention(q, segments), attention_reference(q, segments)
    torch.testing.assert_close(out, expected, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("parts", [1, 2])
def test_attention_in_bfloat16_stays_near_its_reference(parts: int) -> None:
    q = normal(0, 6, 4, 16).bfloat16()
    segments = [KVSegment(*normal(i + 1, 2, 20, 2, 16).bfloat16()) for i in range(parts)]
    out = attention(q, segments)
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out, attention_reference(q, segments), atol=0.03, rtol=0.03)


# --- experts


@settings(QUICK, max_examples=60)
@given(
    tokens=st.integers(1, 9),
    count=st.integers(1, 12),
    top_k=st.integers(1, 4),
    packed=st.booleans(),
    seed=st.integers(0, 999),
)
def test_experts_agree_with_one_token_and_one_expert_at_a_time(
    tokens: int, count: int, top_k: int, packed: bool, seed: int
) -> None:
    """Often there are more experts than assignments, so that some have no token at all."""
    width, inner, top_k = 12, 5, min(top_k, count)
    x, share = normal(seed, tokens, width), normal(seed + 1, tokens, top_k).softmax(-1)
    ids = normal(seed + 2, tokens, count).topk(top_k).indices
    gate_up, down = normal(seed + 3, count, 2 * inner, width), normal(seed + 4, count, width, inner)
    products = grouped_linear(gate_up), grouped_linear(down)
    if packed and can_pack(x):
        products = tuple(per_expert([packed_linear(w) for w in ws]) for ws in (gate_up, down))
    torch.testing.assert_close(
        moe_forward(x, ids, share, *products),
        moe_reference(x, ids, share, gate_up, down),
        atol=1e-5,
        rtol=1e-4,
    )


@pytest.mark.parametrize("inner", [1, 7, 32, 40])
def test_the_gate_by_a_sigmoid_is_that_by_a_tanh(inner: int) -> None:
    gate_up = normal(0, 33, 2 * inner) * torch.logspace(-3, 2, 33)[:, None]
    have = gelu_and_mul_cpu(gate_up)
    torch.testing.assert_close(have, gelu_and_mul(gate_up.double()).float(), atol=1e-6, rtol=1e-6)
    rows = torch.cat([gelu_and_mul_cpu(row[None]) for row in gate_up])
    assert torch.equal(have, rows), "a row depends on those beside it"
    far = torch.tensor([[1e4, 1e20, -1e4, -1e20, 0.0] + 5 * [1.0]])
    assert gelu_and_mul_cpu(far).tolist() == [[1e4, far[0, 1].item(), 0, 0, 0]]
    half = gate_up.bfloat16()
    assert torch.equal(gelu_and_mul_cpu(half), gelu_and_mul_cpu(half.float()))


def test_the_experts_are_weighted_gated_products() -> None:
    x, gate, up, down = 2.0, 0.5, 3.0, 7.0
    hidden = torch.nn.functional.gelu(torch.tensor(x * gate), approximate="tanh") * x * up
    given = torch.tensor([[x]]), torch.tensor([[1, 0]]), torch.tensor([[0.25, 0.75]])
    gate_up = torch.tensor([[[0.0], [0.0]], [[gate], [up]]])
    downs = torch.tensor([[[1.0]], [[down]]])
    expected = (0.25 * hidden * down).view(1, 1)
    products = grouped_linear(gate_up), grouped_linear(downs)
    torch.testing.assert_close(moe_forward(*given, *products), expected)
    torch.testing.assert_close(moe_reference(*given, gate_up, downs), expected)


def test_experts_without_tokens_are_not_run() -> None:
    def untouched(x: Tensor) -> Tensor:
        raise AssertionError("this expert has no tokens")

    gate_up = per_expert([untouched, linear(normal(1, 6, 4)), untouched])
    down = per_expert([untouched, linear(normal(2, 4, 3)), untouched])
    out = moe_forward(normal(0, 3, 4), torch.full((3, 1), 1), torch.ones(3, 1), gate_up, down)
    assert out.shape == (3, 4)


# --- row statistics


def ask(rows: int, vocab: int, seed: int, temperature: float | None = None) -> Query:
    generator = torch.Generator().manual_seed(seed)
    temperature_T = torch.rand(rows, generator=generator) * 1.8 + 0.2
    return Query(
        temperature_T=temperature_T if temperature is None else torch.full((rows,), temperature),
        uniform_T=torch.rand(rows, generator=generator, dtype=torch.float64),
        current_T=torch.randint(vocab, (rows,), generator=generator),
    )


def check_stats(raw_TV: Tensor, softcap: float | None, query: Query) -> None:
    """Our statistics are the definition's, up to rounding and to ties."""
    theirs = position_stats_reference(raw_TV, softcap, query)
    stats, p_TV = position_stats(raw_TV.clone(), softcap, query)
    exact_TV = distribution(raw_TV, softcap, query.temperature_T)
    torch.testing.assert_close(stats.entropy_T, theirs.entropy_T, atol=2e-5, rtol=0)
    torch.testing.assert_close(stats.top_p_T, theirs.top_p_T, atol=1e-6, rtol=3e-5)
    torch.testing.assert_close(stats.current_p_T, theirs.current_p_T, atol=1e-6, rtol=3e-5)
    torch.testing.assert_close(p_TV.double(), exact_TV, atol=1e-6, rtol=5e-5)
    # What is divided by is a float32 sum; the narrower a CPU's vectors, the longer its chains.
    torch.testing.assert_close(
        p_TV.double().sum(-1), torch.ones(len(p_TV)).double(), atol=6e-5, rtol=0
    )
    assert (stats.entropy_T >= 0).all() and (stats.top_p_T <= 1).all()
    top = exact_TV.gather(-1, stats.top_T[:, None])[:, 0]
    assert (top >= exact_TV.amax(-1) * (1 - 2e-5)).all(), "a top token is not the most likely"
    check_draws(exact_TV, query.uniform_T, stats.draw_T)
    assert (p_TV.gather(-1, stats.draw_T[:, None]) > 0).all(), "an impossible token was drawn"


def check_draws(p_TV: Tensor, uniform_T: Tensor, draw_T: Tensor) -> None:
    """Each draw's interval of the running sum holds its uniform number, within 1e-6."""
    cdf_TV = p_TV.cumsum(-1)
    above_T = cdf_TV.gather(-1, draw_T[:, None])[:, 0]
    below_T = above_T - p_TV.gather(-1, draw_T[:, None])[:, 0]
    assert (below_T - 1e-6 <= uniform_T).all() and (uniform_T <= above_T + 1e-6).all()


def distribution(raw_TV: Tensor, softcap: float | None, temperature_T: Tensor) -> Tensor:
    logits_TV = raw_TV.double()
    if softcap is not None:
        logits_TV = softcap * torch.tanh(logits_TV / softcap)
    return (logits_TV / temperature_T[:, None].double()).softmax(-1)


@settings(QUICK, max_examples=150)
@given(
    vocab=st.sampled_from([1, 2, 7, 61, 127, 128, 129, 200, 384, 1000, 1024]),
    rows=st.integers(1, 12),
    scale=st.sampled_from([0.0, 0.1, 1.0, 5.0, 30.0, 300.0]),
    softcap=st.sampled_from([None, 5.0, 30.0]),
    seed=st.integers(0, 9999),
)
def test_row_statistics_are_those_of_the_definition(
    vocab: int, rows: int, scale: float, softcap: float | None, seed: int
) -> None:
    raw_TV = normal(seed, rows, vocab) * scale
    check_stats(raw_TV, softcap, ask(rows, vocab, seed))
    check_stats(raw_TV.bfloat16(), softcap, ask(rows, vocab, seed + 1))


EXTREMES = {
    "all equal": torch.full((4, 1000), 3.5),
    "all equal and huge": torch.full((4, 1000), 1e4),
    "one huge": torch.zeros(4, 1000).index_fill(1, torch.tensor([777]), 1e4),
    "one tiny": torch.zeros(4, 1000).index_fill(1, torch.tensor([777]), -1e4),
    "plus or minus 1e4": 1e4 * normal(0, 4, 1000).sign(),
    "around 1e4": 1e4 + normal(1, 4, 1000),
    "around -1e4": -1e4 + normal(2, 4, 1000),
}


@pytest.mark.parametrize("name", EXTREMES)
@pytest.mark.parametrize("softcap", [None, 30.0])
@pytest.mark.parametrize("temperature", [0.01, 0.4, 1.0, 50.0])
def test_row_statistics_survive_extreme_logits(
    name: str, softcap: float | None, temperature: float
) -> None:
    check_stats(EXTREMES[name], softcap, ask(4, 1000, seed=3, temperature=temperature))


@pytest.mark.parametrize("softcap", [None, 30.0])
def test_row_statistics_are_as_exact_over_the_released_vocabulary(softcap: float | None) -> None:
    """A plain float32 softmax over so many tokens is off by more than our tolerance."""
    vocab = 262_144
    check_stats(5 * normal(0, 4, vocab), softcap, ask(4, vocab, seed=5, temperature=1.0))


def test_rows_do_not_depend_on_the_group_they_are_taken_in() -> None:
    raw_TV, query = normal(0, 50, 200), ask(50, 200, seed=1)
    stats, p_TV = position_stats(raw_TV.clone(), 30.0, query)
    with mock.patch("dgemma.diffusion.logit_stats.SCRATCH_ELEMENTS", 3 * 200 + 1):
        in_groups, p_again_TV = position_stats(raw_TV.clone(), 30.0, query)
    torch.testing.assert_close(p_TV, p_again_TV)
    for name in stats.__slots__:
        torch.testing.assert_close(getattr(stats, name), getattr(in_groups, name))


def test_the_head_output_is_consumed_and_not_copied() -> None:
    raw_TV = normal(0, 3, 200)
    _, p_TV = position_stats(raw_TV, 30.0, ask(3, 200, seed=0))
    assert p_TV.data_ptr() == raw_TV.data_ptr()


@pytest.mark.parametrize("spread", [20.0, 60.0])
def test_no_uniform_number_draws_an_impossible_token(spread: float) -> None:
    """The edges between chunks are where rounding could; some chunks hold nothing at all."""
    rows, vocab = 2000, 1000
    raw_TV = spread * normal(0, rows, vocab)
    query = ask(rows, vocab, seed=0, temperature=1.0)
    _, p_TV = position_stats(raw_TV.clone(), None, query)
    sums_TC = p_TV.view(rows, -1, 8).sum(-1)
    assert (p_TV == 0).any() and (spread < 60 or (sums_TC[:, 0] == 0).any())
    edges_T = sums_TC.double().cumsum(-1)[:, 50]
    last = 1 - 2.0**-53
    for uniform_T in (edges_T.clamp(max=last), 0 * edges_T, 0 * edges_T + last):
        stats, _ = position_stats(raw_TV.clone(), None, replace(query, uniform_T=uniform_T))
        assert (p_TV.gather(-1, stats.draw_T[:, None]) > 0).all()


@pytest.mark.parametrize("vocab", [7, 256])
def test_the_draw_is_the_exact_inverse_of_the_running_sum(vocab: int) -> None:
    """Evenly spaced uniform numbers draw each token as often as its probability says."""
    count = 20_000
    raw_V = 2 * normal(vocab, vocab)
    uniform_T = (torch.arange(count).double() + 0.5) / count
    query = replace(ask(count, vocab, seed=0, temperature=0.7), uniform_T=uniform_T)
    stats, _ = position_stats(raw_V.repeat(count, 1), 30.0, query)
    p_V = distribution(raw_V[None], 30.0, torch.tensor([0.7]))[0]
    assert (stats.draw_T.diff() >= 0).all()
    drawn_V = torch.bincount(stats.draw_T, minlength=vocab)
    assert ((drawn_V - count * p_V).abs() <= 1 + 1e-6 * count).all()


def test_draws_have_a_temperature_of_their_own() -> None:
    """It changes the draws alone; at 0 they are the most likely tokens, at 1 nothing changes."""
    rows, vocab = 512, 96
    raw_TV = normal(3, 1, vocab).expand(rows, vocab) * 4
    plain = ask(rows, vocab, seed=1, temperature=0.7)
    plain = replace(plain, uniform_T=torch.arange(rows, dtype=torch.float64) / rows)
    expected, p_TV = position_stats(raw_TV.clone(), 30.0, plain)
    for temperature in (0.0, 0.5, 1.0, 2.0):
        query = replace(plain, draw_temperature_T=torch.full((rows,), temperature))
        found, again_TV = position_stats(raw_TV.clone(), 30.0, query)
        assert torch.equal(again_TV, p_TV)
        for name in ("top_T", "entropy_T", "top_p_T", "current_p_T"):
            assert torch.equal(getattr(found, name), getattr(expected, name))
        if temperature == 0:
            assert torch.equal(found.draw_T, expected.top_T)
            continue
        # With uniform numbers evenly spaced, tokens come as often as they are likely.
        hot_V = (p_TV[0].double().log() / temperature).softmax(-1)
        frequency_V = torch.bincount(found.draw_T, minlength=vocab) / rows
        assert (frequency_V - hot_V).abs().max() <= 2 / rows
        reference = position_stats_reference(raw_TV, 30.0, query).draw_T
        assert (found.draw_T == reference).double().mean() > 0.99
    assert torch.equal(
        position_stats(raw_TV.clone(), 30.0, replace(plain, draw_temperature_T=torch.ones(rows)))[
            0
        ].draw_T,
        expected.draw_T,
    )


def test_draws_from_the_noise_of_a_request_follow_the_distribution() -> None:
    """Pearson's statistic of 20,000 draws stays below its 99.99% point for 6 degrees."""
    vocab, steps, length = 7, 199, 100
    raw_V = normal(1, vocab)
    uniform_T = Noise(seed=11).block(0, steps, length, vocab, CPU).uniform_NL.flatten()
    query = replace(ask(len(uniform_T), vocab, seed=0, temperature=1.0), uniform_T=uniform_T)
    stats, _ = position_stats(raw_V.repeat(len(uniform_T), 1), None, query)
    expected_V = len(uniform_T) * distribution(raw_V[None], None, torch.ones(1))[0]
    drawn_V = torch.bincount(stats.draw_T, minlength=vocab)
    assert ((drawn_V - expected_V) ** 2 / expected_V).sum() < 27.9


# --- products


@needs_packing
@settings(QUICK, max_examples=40)
@given(
    rows=st.integers(1, 300),
    inputs=st.sampled_from([1, 3, 16, 33, 96]),
    outputs=st.sampled_from([1, 5, 16, 61, 128]),
    seed=st.integers(0, 999),
)
def test_a_packed_weight_gives_the_plain_product(
    rows: int, inputs: int, outputs: int, seed: int
) -> None:
    x, weight = normal(seed, rows, inputs), normal(seed + 1, outputs, inputs)
    torch.testing.assert_close(packed_linear(weight)(x), linear(weight)(x), atol=1e-4, rtol=1e-5)
    torch.testing.assert_close(
        packed_linear(weight.T)(x @ weight.T), x @ weight.T @ weight, atol=1e-2, rtol=1e-4
    )


# --- soft embeddings


def distributions(seed: int, rows: int, vocab: int) -> Tensor:
    """From flat to sharp."""
    sharp_T1 = torch.logspace(-1, 2.5, rows)[:, None]
    return (normal(seed, rows, vocab) * sharp_T1).softmax(-1)


@settings(QUICK, max_examples=30)
@given(
    rows=st.integers(1, 40),
    vocab=st.integers(2, 300),
    width=st.integers(1, 24),
    half=st.booleans(),
    seed=st.integers(0, 99),
)
def test_a_mean_is_within_what_it_may_lose_of_its_definition(
    rows: int, vocab: int, width: int, half: bool, seed: int
) -> None:
    dtype = torch.bfloat16 if half else torch.float32
    weight, p = normal(seed, vocab, width).to(dtype), distributions(seed + 1, rows, vocab)
    error = SOFT_EMBED_ERROR[dtype]
    found, expected = (
        soft_embed(p, weight, linear(weight.T), error),
        soft_embed_reference(p, weight),
    )
    # Twice what is left out, which any vector may have had; and the rounding of sum and result.
    bound = (2 * error + 4 * torch.finfo(dtype).eps) * weight.abs().max()
    assert found.dtype == dtype
    assert (found.double() - expected).abs().max() <= bound


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_only_positions_that_are_not_sure_need_the_product(dtype: torch.dtype) -> None:
    weight, lost = normal(0, 4, 3).to(dtype), SOFT_EMBED_ERROR[dtype]
    sure, almost = 1 - lost / 2, 1 - 4 * lost
    p = torch.tensor([[0.5, 0.5, 0, 0], [1 - sure, 0, sure, 0], [almost, 1 - almost, 0, 0]])
    seen: list[Tensor] = []

    def product(rows: Tensor) -> Tensor:
        seen.append(rows)
        return rows @ weight

    found = soft_embed(p, weight, product, lost)
    assert len(seen) == 1 and torch.equal(seen[0], p[[0, 2]].to(dtype))
    assert torch.equal(found[1], weight[2] * torch.tensor(sure).to(dtype))
    assert torch.equal(soft_embed(p[1:2], weight, product, lost), found[1:2]) and len(seen) == 1
    assert soft_embed(torch.full((1, 4), math.nan), weight, product, lost).isnan().all()


@needs_packing
def test_a_mean_does_not_depend_on_the_positions_beside_it() -> None:
    weight, p = normal(0, 500, 64), distributions(1, 90, 500)
    product = packed_linear(weight.T)
    whole = soft_embed(p, weight, product, 1e-3)
    for begin, end in ((0, 1), (3, 40), (17, 90), (60, 61), (0, 80)):
        assert torch.equal(soft_embed(p[begin:end], weight, product, 1e-3), whole[begin:end])


def canvas_logits(model: Gemma) -> Tensor:
    """Logits of a canvas after a prompt, in its second step."""
    dtype = model.embed_tokens.weight.dtype
    cache = KVCache(model.config, Capacity(tokens=64), dtype, CPU)
    prompt, canvas = torch.arange(5, 25), torch.arange(30, 38)
    with torch.inference_mode():
        writing = ForwardBatch([Segment(cache, len(prompt), commit=True)])
        model.encode(prompt, writing)
        writing.close()
        reading = ForwardBatch([Segment(cache, len(canvas), commit=False)])
        first = model.logits(model.denoise(canvas, None, reading))
        soft = model.soft_embed(first.softmax(-1))
        return model.logits(model.denoise(canvas, soft, reading))


@needs_packing
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 0.15)], ids=str
)
def test_a_packed_model_gives_the_same_logits(dtype: torch.dtype, tolerance: float) -> None:
    if not can_pack(torch.empty(1, dtype=dtype)):
        pytest.skip("this CPU has no packed products of that type")
    plain = canvas_logits(random_model(TINY, 7, dtype=dtype))
    model = pack(random_model(TINY, 7, dtype=dtype))
    assert not any(type(module) is torch.nn.Linear for module in model.modules())
    for layer in model.layers:
        assert isinstance(layer.self_attn, MergedAttention)
        assert isinstance(layer.mlp, MergedFeedForward)
    torch.testing.assert_close(canvas_logits(model), plain, atol=tolerance, rtol=0)
    assert plain.std() > 0.5, "logits this small would agree whatever happens"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_merged_linears_give_what_separate_ones_do(dtype: torch.dtype) -> None:
    plain, model = (random_model(TINY, 7, dtype=dtype) for _ in range(2))
    replace_modules(model, partial(merged_module, make=linear))
    assert isinstance(model.layers[0].self_attn, MergedAttention)
    separate, together = canvas_logits(plain), canvas_logits(model)
    torch.testing.assert_close(together, separate, atol=1e-5, rtol=0)
    assert dtype == torch.float32 or torch.equal(together, separate), "roundings are the same"


def test_a_model_whose_weights_cannot_be_packed_stays_as_it_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = random_model(TINY, 7, dtype=torch.float16)
    before = [type(module) for module in model.modules()]
    assert [type(module) for module in pack(model).modules()] == before
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    model = random_model(TINY, 7)
    assert [type(module) for module in pack(model).modules()] == before


def test_bfloat16_is_not_packed_on_a_cpu_without_its_kernels() -> None:
    """As on most laptops: packing would fail there."""
    program = """
import torch
from dgemma.backends.cpu import can_pack
has_kernels = torch.ops.mkldnn._is_mkldnn_bf16_supported()
print(has_kernels, can_pack(torch.empty(1).bfloat16()))
"""
    limited = {**os.environ, "ONEDNN_MAX_CPU_ISA": "AVX2"}
    run = subprocess.run(
        [sys.executable, "-c", program],
        cwd=ROOT,
        env=limited,
        capture_output=True,
        text=True,
        check=True,
    )
    has_kernels, packs_bfloat16 = run.stdout.split()
    if has_kernels == "True":
        pytest.skip("this build of torch cannot be told to do without them")
    assert packs_bfloat16 == "False"


# --- norm, rotation, random numbers


def test_the_norm_scales_to_unit_mean_square() -> None:
    x, weight = 5 * normal(0, 3, 16), 1 + normal(1, 16)
    expected = x / (x.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt()
    torch.testing.assert_close(rms_norm(x, None, 1e-6), expected)
    torch.testing.assert_close(rms_norm(x, weight, 1e-6), expected * weight)
    low = rms_norm(x.bfloat16(), weight.bfloat16(), 1e-6)
    assert low.dtype == torch.bfloat16
    torch.testing.assert_close(low.float(), expected * weight, atol=0.03, rtol=0.02)
    assert (rms_norm(torch.zeros(2, 4), None, 1e-6) == 0).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_norm_that_infers_is_the_same_and_leaves_its_input_alone(
    dtype: torch.dtype,
) -> None:
    x, weight = normal(9, 3, 5, 64).to(dtype), normal(10, 64).to(dtype)
    before = x.clone()
    for scale in (None, weight):
        with torch.inference_mode():
            got = rms_norm(x, scale, 1e-6)
        torch.testing.assert_close(got, rms_norm(x, scale, 1e-6))
    assert torch.equal(x, before)


@settings(QUICK, max_examples=60)
@given(
    head_dim=st.sampled_from([2, 4, 8, 16]),
    theta=st.sampled_from([1e4, 1e6]),
    fraction=st.sampled_from([0.25, 0.5, 1.0]),
    start=st.integers(0, 5000),
)
def test_rope_rotates_pairs_as_complex_numbers(
    head_dim: int, theta: float, fraction: float, start: int
) -> None:
    x = normal(head_dim, 5, 3, head_dim)
    positions = torch.arange(start, start + 5)
    half = head_dim // 2
    exponents = torch.arange(half).double() * 2 / head_dim
    speed = torch.where(torch.arange(half) < int(fraction * half), theta**-exponents, 0.0)
    # Angles of thousands of radians are rounded in float32, here as in the reference model.
    angles = (positions.float()[:, None] * speed.float()).double()
    pairs = torch.complex(x[..., :half].double(), x[..., half:].double())
    turned = pairs * torch.polar(torch.ones_like(angles), angles)[:, None]
    expected = torch.cat([turned.real, turned.imag], dim=-1).float()
    shape = AttentionShape(
        num_kv_heads=1,
        head_dim=head_dim,
        window=None,
        rope_theta=theta,
        rotary_fraction=fraction,
        has_value=True,
    )
    ours = apply_rope(x, *cos_sin(positions, inverse_frequencies(shape, positions.device)))
    torch.testing.assert_close(ours, expected, atol=2e-3 if start > 100 else 1e-5, rtol=1e-4)
    torch.testing.assert_close(ours.norm(dim=-1), x.norm(dim=-1))


def test_a_rotation_that_infers_is_the_same_and_leaves_its_input_alone() -> None:
    x, cos, sin = normal(1, 7, 5, 64), normal(2, 7, 32), normal(3, 7, 32)
    heads, before = x[:, :3], x.clone()  # part of a row, as of queries, keys and values in one
    with torch.inference_mode():
        got = apply_rope(heads, cos, sin)
    torch.testing.assert_close(got, apply_rope(heads, cos, sin))
    assert torch.equal(x, before)


KNOWN_ANSWERS = [
    ("00000000 00000000 00000000 00000000", "00000000 00000000"),
    ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff"),
    ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0"),
]
ANSWERS = [
    "6627e8d5 e169c58d bc57ac4c 9b00dbd8",
    "408f276d 41c83b0e a20bc7c6 6d5451fd",
    "d16cfe09 94fdcceb 5001e420 24126ea1",
]


@pytest.mark.parametrize(
    ("counter", "key", "answer"),
    [(*question, answer) for question, answer in zip(KNOWN_ANSWERS, ANSWERS, strict=True)],
)
def test_philox_gives_the_published_answers(counter: str, key: str, answer: str) -> None:
    words = [int(word, 16) for word in counter.split()]
    low, high = (int(word, 16) for word in key.split())
    a, b, c, d = (torch.tensor([word]) for word in words)
    given = philox((a, b, c, d), (low, high))
    assert " ".join(f"{int(word):08x}" for word in given) == answer


def test_philox_on_the_host_gives_the_same_words() -> None:
    """Also while a word varies along one axis alone."""
    host = [
        np.arange(4)[:, None],
        np.arange(3)[None] + 2**31,
        np.full((1, 1), WORD),
        np.ones((1, 1)),
    ]
    a, b, c, d = (word.astype(np.uint64) for word in host)
    whole = [torch.from_numpy(word.astype(np.int64)).expand(4, 3) for word in host]
    for key in ((0, 0), (WORD, WORD), (5, 1 << 31)):
        want = philox((whole[0], whole[1], whole[2], whole[3]), key)
        for mine, word in zip(philox_numpy((a, b, c, d), key), want, strict=True):
            assert np.array_equal(mine.astype(np.int64), word.numpy())


def test_philox_takes_many_counters_at_once() -> None:
    zero = torch.zeros(4, 3, dtype=torch.long)
    rows, columns = zero + torch.arange(4)[:, None], zero + torch.arange(3)
    whole = philox((rows, columns, zero, zero), (5, 6))
    one = philox((rows[2:3, 1:2], columns[2:3, 1:2], zero[:1, :1], zero[:1, :1]), (5, 6))
    for word, single in zip(whole, one, strict=True):
        assert word[2, 1] == single[0, 0]
        assert len(set(word.flatten().tolist())) == 12
