"""Soft embeddings over the whole vocabulary by kernel, in fp8 and in 16 bits."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from dgemma.backends.cuda import passes
from dgemma.backends.cuda.configs import GemmConfig
from dgemma.backends.cuda.kernels import soft_embed_fp8 as kernels
from dgemma.backends.cuda.kernels.logit_stats import LogitStats, TokenQuery, logit_stats
from dgemma.backends.cuda.kernels.soft_embed_topk import SoftEmbedOut, count_candidates
from dgemma.model.gemma import TokenTable
from dgemma.quant.head import CHUNK, Fp8HeadTable, SoftTable, soft_embed_reference

SMALL = GemmConfig(rows=16, outputs=16, depth=16)


def normal(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def table_of(vocab: int, width: int, *, soft: bool = True) -> Fp8HeadTable:
    """Vectors of lengths that differ."""
    table = TokenTable(0, width)
    weight_VD = normal(1, vocab, width) * normal(2, vocab, 1).exp()
    table.weight = torch.nn.Parameter(weight_VD, requires_grad=False)
    return Fp8HeadTable(table, soft=soft)


def soft_of(table: Fp8HeadTable, split: int) -> SoftTable:
    assert table.soft is not None
    return table.soft._replace(split=split)


def logits_of(vocab: int, rows: int = 6) -> tuple[Tensor, Tensor]:
    """Draw logits from nearly even to nearly decided, and temperatures."""
    raw_TV = normal(3, rows, vocab) * torch.linspace(0.1, 30.0, rows)[:, None]
    return raw_TV, torch.linspace(0.4, 0.8, rows)


def probabilities(raw_TV: Tensor, cap: float | None, temperature_T: Tensor) -> Tensor:
    logits_TV = raw_TV if cap is None else cap * torch.tanh(raw_TV / cap)
    return (logits_TV / temperature_T[:, None]).softmax(-1)


def stats_of(raw_TV: Tensor, cap: float | None, temperature_T: Tensor) -> LogitStats:
    """Return what the statistics leave of one canvas; its logits stay."""
    rows = len(raw_TV)
    query = TokenQuery(
        temperature_T=temperature_T,
        draw_temperature_T=torch.ones(rows),
        uniform_T=torch.full((rows,), 0.5, dtype=torch.float64),
        current_T=torch.zeros(rows, dtype=torch.long),
    )
    return logit_stats(raw_TV.clone(), cap, query, rows)


def quantized(p_TV: Tensor, soft: SoftTable) -> kernels.QuantizedProbs:
    return kernels.quantize_probs(stats_of(p_TV.log(), None, torch.ones(len(p_TV))), soft)


def out_of(rows: int, width: int, scale: float = 1.0) -> SoftEmbedOut:
    """Room for one canvas without pins."""
    return SoftEmbedOut(
        torch.empty(1, rows, width),
        torch.zeros(1, rows, dtype=torch.long),
        torch.zeros(1, rows, dtype=torch.uint8),
        torch.zeros(1, dtype=torch.int32),
        scale,
    )


def mean_of(found: kernels.QuantizedProbs, soft: SoftTable, weight_VD: Tensor) -> Tensor:
    out = out_of(len(found.top_T), weight_VD.shape[1])
    kernels.mean(found, soft, weight_VD, out)
    return out.soft_ELD[0]


@pytest.mark.parametrize(
    ("rows", "vocab", "width", "split", "config"),
    [
        (5, 48, 24, 48, SMALL),  # one part; positions and width beyond the last
        (18, 80, 40, 48, SMALL),  # two parts, the second of them shorter
        (18, 80, 16, 32, SMALL),
        (3, 48, 20, 32, replace(SMALL, depth=32)),  # a step beyond the vocabulary
    ],
)
def test_sums_of_splits_are_exact_on_quantized_values(
    rows: int, vocab: int, width: int, split: int, config: GemmConfig
) -> None:
    soft = soft_of(table_of(vocab, width), split)
    raw_TV, temperature_T = logits_of(vocab, rows)
    found = kernels.quantize_probs(stats_of(raw_TV, None, temperature_T), soft)
    got_STD = kernels.split_sums(found, soft, torch.float32, config)
    pieces = zip(
        torch.split(found.values_TV.float(), split, 1),
        torch.split(soft.values_DV.float(), split, 1),
        found.scale_ST,
        strict=True,
    )
    want_STD = torch.stack([(p @ vectors.T) * scale[:, None] for p, vectors, scale in pieces])
    torch.testing.assert_close(got_STD, want_STD, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("cap", [30.0, None])
@pytest.mark.parametrize("split", [1152, 2304, 3456])
def test_means_are_the_definition_s(cap: float | None, split: int) -> None:
    # Chunks and parts begin and end inside each other, and the last of both are short ones.
    vocab = 2 * CHUNK + 560
    table, (raw_TV, temperature_T) = table_of(vocab, 24), logits_of(vocab)
    soft, p_TV = soft_of(table, split), probabilities(raw_TV, cap, temperature_T)
    want_TD = soft_embed_reference(p_TV, table.weight, soft)
    got_TD = mean_of(
        kernels.quantize_probs(stats_of(raw_TV, cap, temperature_T), soft), soft, table.weight
    )
    # A last bit of a probability may round to another of the few 8-bit numbers.
    assert far(got_TD, want_TD) < 0.004
    assert 0.002 < far(want_TD, p_TV @ table.weight) < 0.05


def far(got_TD: Tensor, want_TD: Tensor) -> float:
    """Of the row that is furthest off."""
    return float(((got_TD - want_TD).norm(dim=-1) / want_TD.norm(dim=-1)).max())


def test_small_probabilities_count_where_no_large_one_is_near() -> None:
    """Even with the most likely token: it is not rounded with them."""
    vocab = 3 * CHUNK
    soft = soft_of(table_of(vocab, 24), CHUNK + CHUNK // 2)
    p_TV = torch.full((1, vocab), 1e-9)
    p_TV[0, 7] = 1 - vocab * 1e-9
    rest_V = quantized(p_TV, soft).values_TV[0].float() / soft.rel_scale_V
    assert rest_V[7] == 0
    assert (rest_V[:7] - 1).abs().max() < 1 / 15.9
    # And now there is one, in the second part and the third chunk, which the first does not touch.
    p_TV[0, 2 * CHUNK] = 2e-3
    first_V, second_V = quantized(p_TV, soft).values_TV[0].float().split(soft.split)
    assert first_V.count_nonzero() == soft.split - 1
    assert second_V.count_nonzero() == 1
    # In the second chunk, which reaches out both parts: the second loses its small ones as well.
    p_TV[0, 2 * CHUNK], p_TV[0, 2 * CHUNK - 1 - CHUNK // 2] = 1e-9, 2e-3
    assert quantized(p_TV, soft).values_TV[0].float().count_nonzero() == 1


@pytest.mark.parametrize("cap", [30.0, None])
def test_no_quantized_value_exceeds_the_largest_of_its_chunks(
    cap: float | None,
) -> None:
    """The largest of a split that is its chunks' largest is FP8_MAX."""
    vocab = 4 * CHUNK + 48
    soft, (raw_TV, temperature_T) = soft_of(table_of(vocab, 24), CHUNK + 128), logits_of(vocab)
    soft = soft._replace(rel_scale_V=torch.full((vocab,), 448.0))
    p_TV = probabilities(raw_TV, cap, temperature_T)
    rest_TV = p_TV.scatter(-1, p_TV.argmax(-1, keepdim=True), 0.0)
    found = kernels.quantize_probs(stats_of(raw_TV, cap, temperature_T), soft)
    for part, values_TW in enumerate(found.values_TV.float().split(soft.split, 1)):
        begin, end = part * soft.split, min((part + 1) * soft.split, vocab)
        near = slice(begin // CHUNK * CHUNK, -(-end // CHUNK) * CHUNK)
        greatest_T = rest_TV[:, near].amax(-1)
        unit_T = found.scale_ST[part] / soft.unit_scale_1
        torch.testing.assert_close(unit_T, greatest_T, rtol=1e-4, atol=0)
        want_TW = 448 * rest_TV[:, begin:end] / greatest_T[:, None]
        torch.testing.assert_close(values_TW, want_TW, rtol=1 / 15.9, atol=2**-10 * 1.01)


def test_the_likeliest_token_is_not_quantized() -> None:
    table = table_of(96, 24)
    p_TV = torch.full((2, 96), 1e-7)
    p_TV[:, 95] = 1 - 95e-7
    soft = soft_of(table, 128)
    got_TD = mean_of(quantized(p_TV, soft), soft, table.weight)
    assert far(got_TD, table.weight[[95, 95]]) < 1e-4
    assert far(table.head_values[[95]].float() * table.head_scale[95], table.weight[[95]]) > 0.01


@pytest.mark.parametrize("has_soft", [True, False])
def test_pinned_positions_have_their_own_tokens_and_reopened_ones_nothing(has_soft: bool) -> None:
    """In fp8 where the table has it so, else in the table's own type."""
    table, (raw_TV, temperature_T) = table_of(96, 24, soft=has_soft), logits_of(96)
    out = out_of(6, 24, scale=2.5)
    out.tokens_EL[0] = torch.arange(6) + 3
    out.pinned_EL[0] = torch.tensor([0, 1, 0, 1, 2, 0])
    p_TV = probabilities(raw_TV, 30.0, temperature_T)
    with torch.inference_mode():
        passes.soft_embed_dense(table, stats_of(raw_TV, 30.0, temperature_T), out)
        want_TD = table.soft_embed(p_TV) * (2.5 / table.scale)
    soft_TD, pinned_T = out.soft_ELD[0], out.pinned_EL[0]
    assert torch.equal(soft_TD[pinned_T == 1], 2.5 * table.weight[[4, 6]])
    assert not soft_TD[4].any()
    off = far(soft_TD[pinned_T == 0], want_TD[pinned_T == 0])
    assert off < (0.004 if has_soft else 1e-4)
    exact_TD = 2.5 * p_TV @ table.weight
    assert (far(want_TD, exact_TD) > 0.002) == has_soft


def test_the_sparse_mean_is_the_dense_one_where_candidates_cover_the_mass() -> None:
    """Of two canvases in one call."""
    table, (raw_TV, temperature_T) = table_of(96, 24), logits_of(96)
    stats = stats_of(raw_TV, 30.0, temperature_T)
    candidates = count_candidates(stats)
    assert candidates.covers_mass()
    out = replace(
        out_of(6, 24),
        soft_ELD=torch.empty(2, 3, 24),
        tokens_EL=torch.zeros(2, 3, dtype=torch.long),
        pinned_EL=torch.zeros(2, 3, dtype=torch.uint8),
        entry_I=torch.tensor([1, 0], dtype=torch.int32),
    )
    passes.soft_embed_sparse(table, passes.StepStats(stats, candidates), out)
    want_TD = probabilities(raw_TV, 30.0, temperature_T) @ table.weight
    assert far(out.soft_ELD.flip(0).flatten(0, 1), want_TD) < 0.004
