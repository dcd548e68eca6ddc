"""Logit statistics by kernel: the values of the definition, and the same draws."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from dgemma.backends.cuda.kernels import logit_stats as kernels
from dgemma.backends.cuda.kernels import soft_embed_topk as topk
from dgemma.backends.cuda.kernels.soft_embed_topk import SoftEmbedOut
from dgemma.diffusion.logit_stats import Query, draw_misses, position_stats_reference

SHAPES = [(61, 30.0, 30.0), (2048, None, 8.0), (5000, 30.0, 3.0)]


def case(vocab: int, spread: float, rows: int = 8) -> tuple[Tensor, Query]:
    generator = torch.Generator().manual_seed(vocab)
    query = Query(
        temperature_T=torch.rand(rows, generator=generator) * 0.6 + 0.3,
        uniform_T=torch.rand(rows, generator=generator, dtype=torch.float64),
        current_T=torch.randint(vocab, (rows,), generator=generator),
    )
    return spread * torch.randn(rows, vocab, generator=generator), query


def stats_of(
    raw: Tensor, cap: float | None, query: Query, length: int | None = None
) -> kernels.LogitStats:
    """Run both passes over canvases of `length` rows, all rows by default."""
    draw_T = query.draw_temperature_T
    token_query = kernels.TokenQuery(
        temperature_T=query.temperature_T,
        draw_temperature_T=torch.ones_like(query.temperature_T) if draw_T is None else draw_T,
        uniform_T=query.uniform_T,
        current_T=query.current_T,
    )
    return kernels.logit_stats(raw, cap, token_query, length or len(raw))


@pytest.mark.parametrize(("vocab", "cap", "spread"), SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_statistics_and_draws_are_those_of_the_definition(
    vocab: int, cap: float | None, spread: float, dtype: torch.dtype
) -> None:
    raw, query = case(vocab, spread)
    raw = raw.to(dtype)
    want = position_stats_reference(raw, cap, query)
    got = stats_of(raw, cap, query).merged
    assert torch.equal(got.draw_T, want.draw_T)
    assert torch.equal(got.top_T, want.top_T)
    for name in ("entropy_T", "top_p_T", "current_p_T"):
        torch.testing.assert_close(getattr(got, name), getattr(want, name), atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize(("vocab", "cap", "spread"), SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_draws_have_temperatures_of_their_own(
    vocab: int, cap: float | None, spread: float, dtype: torch.dtype
) -> None:
    """All in one call; nothing but the draw sees them, and zero takes the most likely token."""
    raw, query = case(vocab, 0.1 * spread, rows=12)
    raw, cold_T = raw.to(dtype), torch.tensor([0.0, 0.5, 1.0, 1.7]).repeat(3)
    query = replace(query, draw_temperature_T=cold_T)
    want = position_stats_reference(
        raw, cap, replace(query, draw_temperature_T=cold_T.clamp(min=1e-7))
    )
    stats = stats_of(raw, cap, query)
    got = stats.merged
    assert torch.equal(got.draw_T, want.draw_T)
    assert torch.equal(got.draw_T[::4], got.top_T[::4])
    plain_stats = stats_of(raw, cap, replace(query, draw_temperature_T=None))
    plain = plain_stats.merged
    assert torch.equal(got.draw_T[2::4], plain.draw_T[2::4])
    assert (got.draw_T != plain.draw_T).sum() > 2
    for name in set(kernels.MergedStats.__slots__) - {"draw_T"}:
        assert torch.equal(getattr(got, name), getattr(plain, name)), name
    for name in ("peak_TC", "sum_TC", "moment_TC", "flat_C"):
        assert torch.equal(getattr(stats.chunks, name), getattr(plain_stats.chunks, name)), name


def test_many_draws_follow_a_distribution_at_its_temperature() -> None:
    raw = torch.tensor([[2.0, 0.0, 1.0, -1.0]]).expand(48, 4).contiguous()
    numbers = (torch.arange(24, dtype=torch.float64) + 0.5) / 24
    query = Query(
        temperature_T=torch.full((48,), 0.8),
        uniform_T=numbers.repeat(2),
        current_T=torch.zeros(48, dtype=torch.long),
        draw_temperature_T=torch.tensor([0.5, 1.7]).repeat_interleave(24),
    )
    draw_T = stats_of(raw, None, query).merged.draw_T
    for temperature, part_T in zip((0.5, 1.7), draw_T.split(24), strict=True):
        want = 24 * (raw[0] / 0.8 / temperature).softmax(-1)
        assert (part_T.bincount(minlength=4) - want).abs().max() <= 1


def test_the_ends_of_the_uniform_numbers_draw_likely_tokens() -> None:
    raw = torch.full((2, 5000), -40.0)
    raw[:, 3000] = 5.0
    query = Query(
        temperature_T=torch.tensor([0.4, 0.8]),
        uniform_T=torch.tensor([0.0, 1 - 2**-53], dtype=torch.float64),
        current_T=torch.tensor([0, 3000]),
    )
    got = stats_of(raw, None, query).merged
    assert got.draw_T[1] == 3000
    assert 0 <= got.draw_T[0] <= 3000
    assert got.entropy_T.abs().max() < 1e-5


@pytest.mark.filterwarnings("ignore:All-NaN slice", "ignore:invalid value")
def test_rows_that_are_no_numbers_say_so_and_name_tokens_that_exist() -> None:
    raw, query = case(5000, 3.0, rows=3)
    raw[0] = float("nan")
    raw[1, 4000] = float("nan")
    got = stats_of(raw, 30.0, query).merged
    assert got.entropy_T.isnan().tolist() == [True, True, False]
    for token_T in (got.draw_T, got.top_T):
        assert ((token_T >= 0) & (token_T < 5000)).all()


def test_of_equal_peaks_the_first_is_taken() -> None:
    raw = torch.zeros(1, 5000)
    raw[0, [4100, 2500, 2600]] = 7.0
    query = Query(
        temperature_T=torch.ones(1),
        uniform_T=torch.zeros(1, dtype=torch.float64),
        current_T=torch.zeros(1, dtype=torch.long),
    )
    assert stats_of(raw, 30.0, query).merged.top_T.tolist() == [2500]


def test_draws_among_many_equal_tokens_are_right_to_a_part_of_a_token() -> None:
    vocab = 262_144
    raw, query = case(vocab, 0.5, rows=2)
    draw_T = stats_of(raw.half(), 30.0, query).merged.draw_T
    misses = draw_misses(raw.half(), 30.0, query, draw_T)
    assert misses.max() <= 1e-6  # of a mean interval of 4e-6
    # The measure sees a wrong draw, and that the definition's own is right.
    assert draw_misses(raw.half(), 30.0, query, (draw_T + 40) % vocab).min() > 1e-5
    exact = position_stats_reference(raw.half(), 30.0, query)
    assert draw_misses(raw.half(), 30.0, query, exact.draw_T).max() == 0


def test_many_draws_follow_the_distribution() -> None:
    raw = torch.tensor([[2.0, 0.0, 1.0, -1.0]]).expand(24, 4).contiguous()
    numbers = (torch.arange(24, dtype=torch.float64) + 0.5) / 24
    query = Query(
        temperature_T=torch.ones(24), uniform_T=numbers, current_T=torch.zeros(24, dtype=torch.long)
    )
    draws = stats_of(raw, None, query).merged.draw_T.bincount(minlength=4)
    assert (draws - 24 * raw[0].softmax(-1)).abs().max() <= 1


@pytest.mark.parametrize(("vocab", "cap", "spread"), SHAPES)
def test_probabilities_replace_the_logits(vocab: int, cap: float | None, spread: float) -> None:
    raw, query = case(vocab, spread)
    capped = raw if cap is None else cap * torch.tanh(raw / cap)
    want = (capped / query.temperature_T[:, None]).softmax(-1)
    stats = stats_of(raw, cap, query)
    got = kernels.probabilities_(stats)
    assert got.data_ptr() == raw.data_ptr()
    torch.testing.assert_close(got, want, atol=1e-6, rtol=1e-4)


def test_the_sparse_mean_is_the_dense_one_where_its_mass_says_so() -> None:
    raw, query = case(5000, 1.0)
    raw[:, :7] += 8.0
    raw[:4, :7] += 17.0  # the first rows are sharp, the others not quite
    stats = stats_of(raw, 30.0, query)
    assert not stats.chunks.flat_C.item()
    ids, p, count, mass = topk.gather_candidates(stats, topk.count_candidates(stats))
    table = torch.randn(5000, 24, generator=torch.Generator().manual_seed(1))
    out = SoftEmbedOut(
        torch.empty(1, 8, 24),
        torch.zeros(1, 8, dtype=torch.long),
        torch.zeros(1, 8, dtype=torch.uint8),
        torch.zeros(1, dtype=torch.int32),
        1.0,
    )
    topk.mean_of_candidates(table, ids, p, count, out)
    mean = out.soft_ELD[0]
    dense = kernels.probabilities_(stats) @ table
    sure = mass >= kernels.MIN_MASS
    assert sure[:4].all() and not sure.all()
    torch.testing.assert_close(mean[sure], dense[sure], atol=2e-3, rtol=1e-3)
    assert (mean - dense)[~sure].abs().max() > 0.01


def test_all_candidates_are_found_in_order() -> None:
    """One row with a few, and one with some in every chunk."""
    vocab = 20 * kernels.CHUNK + 100
    raw, query = case(vocab, 0.1, rows=2)
    raw[0, [7, 9000, 9001, vocab - 1]] += 20.0
    raw[1, 50 :: kernels.CHUNK // 4] += 20.0
    stats = stats_of(raw, None, query)
    found = topk.count_candidates(stats)
    ids, p, count, mass = topk.gather_candidates(stats, found)
    want = (raw.double() / query.temperature_T[:, None].double()).softmax(-1)
    for row in range(2):
        candidates = (want[row] >= kernels.MIN_PROB).nonzero()[:, 0]
        assert ids[row, : count[row]].tolist() == candidates.tolist()
        torch.testing.assert_close(
            p[row, : count[row]].double(), want[row, candidates], rtol=1e-4, atol=0
        )
        assert abs(mass[row] - want[row, candidates].sum()) < 1e-4
    assert count.tolist() == [4, 81]
    assert found.covers_mass()


GROUP = topk.CHUNKS_PER_PROGRAM * kernels.CHUNK


@pytest.mark.parametrize("cap", [30.0, 0.5, None])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("spread", [2.0, 4.0, 5.0, 6.0, 8.0])
def test_counts_and_masses_are_those_of_the_definition(
    cap: float | None, dtype: torch.dtype, spread: float
) -> None:
    """Many logits are equal, some of them adjacent; under a low cap all tokens are candidates."""
    raw, query = case(2 * GROUP + 100, spread, rows=1)
    raw = raw.round(decimals=1).clamp(min=-15.0)
    raw[:, 9:13] = raw[:, -3:-2] = 4.5 * spread
    raw = raw.to(dtype)
    stats = stats_of(raw, cap, query)
    stats.chunks.flat_C.zero_()  # nothing is spared here
    found = topk.count_candidates(stats)
    logits = raw.double() if cap is None else cap * torch.tanh(raw.double() / cap)
    p = (logits / query.temperature_T[:, None].double()).softmax(-1)[0]
    candidates = [part[part >= kernels.MIN_PROB] for part in p.split(GROUP)]
    for count, mass, want in zip(found.count_TG[0], found.mass_TG[0], candidates, strict=True):
        assert count == len(want)
        if count > kernels.MAX_CANDIDATES:
            assert stats.chunks.flat_C.item() and mass == 0
            break  # what comes after it may be left out
        torch.testing.assert_close(mass.double(), want.sum(), rtol=1e-4, atol=0)


def test_cases_hold_rows_with_few_and_with_many_candidates() -> None:
    """So that the test above means something: masses of many, of a few equal ones, and none."""
    counts = []
    for spread in (2.0, 5.0, 8.0):
        raw, query = case(2 * GROUP + 100, spread, rows=1)
        stats = stats_of(raw, 30.0, query)
        stats.chunks.flat_C.zero_()
        counts += topk.count_candidates(stats).count_TG[0].tolist()
    assert max(counts) > kernels.MAX_CANDIDATES > sorted(counts)[len(counts) // 2] > 4


def test_a_search_that_finds_too_many_skips_the_rest() -> None:
    """And sets the flag itself, whichever group is skipped."""
    raw, query = case(3 * GROUP, 0.1, rows=2)
    raw[:, 7] += 20.0
    raw[0, GROUP : GROUP + 200] += 15.0 - 0.02 * torch.arange(200)
    stats = stats_of(raw, None, query)
    assert not stats.chunks.flat_C.item()
    for _ in range(2):  # asked again, it may say nothing, but nothing else
        found = topk.count_candidates(stats)
        assert stats.chunks.flat_C.item() and not found.covers_mass()
    stats = stats_of(raw[1:], None, query.at(slice(1, 2)))
    assert topk.count_candidates(stats).covers_mass()


@pytest.mark.parametrize("is_plain", [True, False])
def test_canvases_of_a_pass_are_flat_each_for_itself(is_plain: bool) -> None:
    """Seen from the chunk statistics, or by the search; the candidates of the others are found."""
    raw, query = case(3 * GROUP, 0.1, rows=5)
    query.temperature_T.fill_(0.85)
    raw[:, 7] += 20.0
    if is_plain:
        raw[3] = 0.0
    else:
        raw[3, GROUP : GROUP + 200] += 15.0 - 0.02 * torch.arange(200)
    stats = stats_of(raw, None, query, length=2)
    assert stats.chunks.flat_C.tolist() == [0, int(is_plain), 0]
    found = topk.count_candidates(stats)
    assert stats.chunks.flat_C.tolist() == [0, 1, 0]
    for rows, want in ((slice(0, 2), True), (slice(2, 4), False), (slice(4, 5), True)):
        own = topk.Candidates(found.count_TG[rows], found.mass_TG[rows])
        assert bool(own.covers_mass()) == want
        assert own.count_TG.sum() >= own.count_TG.shape[0] * want
    again = stats_of(raw[:2].contiguous(), None, query.at(slice(0, 2)), length=2)
    assert again.chunks.flat_C.tolist() == [0]  # set anew each time


def test_a_row_with_mass_in_chunks_without_candidates_is_flat() -> None:
    """Its tokens are not read; with as much mass in chunks that have candidates they are."""
    vocab = 4 * kernels.CHUNK
    for rest, want in ((1.9e-3, False), (2.1e-3, True)):
        p = torch.full((1, vocab), 1e-12, dtype=torch.float64)
        p[0, 5] = 1 - rest
        p[0, 2 * kernels.CHUNK :] = rest / (2 * kernels.CHUNK)
        raw, (_, query) = p.log().float(), case(vocab, 1.0, rows=1)
        query.temperature_T.fill_(1.0)
        stats = stats_of(raw, None, query)
        assert bool(stats.chunks.flat_C.item()) == want
        assert bool(topk.count_candidates(stats).covers_mass()) != want


@pytest.mark.parametrize("is_plain", [True, False])
def test_one_row_with_too_many_candidates_needs_the_dense_mean(is_plain: bool) -> None:
    """Seen from the chunk statistics where they are far too many, else by the search."""
    vocab = 20 * kernels.CHUNK + 100
    raw, query = case(vocab, 0.1, rows=3)
    raw[:, 7] += 25.0
    query.temperature_T[2] = 0.5
    raw[2, ::20] += 25.0
    if not is_plain:  # ten in each chunk, less and less likely
        raw[2] = -40.0
        at = torch.arange(200)
        raw[2, at // 10 * kernels.CHUNK + at % 10] = 20.0 - 0.02 * at
    stats = stats_of(raw, None, query)
    found = topk.count_candidates(stats)
    assert bool(stats.chunks.flat_C.item()) == is_plain
    assert bool(found.count_TG.any()) != is_plain
    assert not found.covers_mass()
    sharp = [
        part[:2].contiguous()
        for part in (raw, query.temperature_T, query.uniform_T, query.current_T)
    ]
    alone = Query(temperature_T=sharp[1], uniform_T=sharp[2], current_T=sharp[3])
    stats = stats_of(sharp[0], None, alone)
    assert not stats.chunks.flat_C.item()  # it is set anew each time
    assert topk.count_candidates(stats).covers_mass()


def test_no_row_that_few_tokens_hold_is_ever_called_flat() -> None:
    """Distributions of every kind, as near to the limits as they get."""
    vocab, flat, rows = 3 * kernels.CHUNK, 0, 0
    of = torch.Generator().manual_seed(0)
    for tokens in (1, 100, 128, 129, 160, 1000):
        for slope in (0.0, 0.02, 1.0):
            for rest in (0.0, 1.9e-3, 3e-3, 0.1):
                p = torch.full((vocab,), rest / (vocab - tokens), dtype=torch.float64)
                head = (-slope * torch.arange(tokens, dtype=torch.float64)).exp()
                p[torch.randperm(vocab, generator=of)[:tokens]] = (1 - rest) * head / head.sum()
                raw = p.log().clamp(min=-60).float()[None]
                query = Query(
                    temperature_T=torch.ones(1),
                    uniform_T=torch.zeros(1, dtype=torch.float64),
                    current_T=torch.zeros(1, dtype=torch.long),
                )
                stats = stats_of(raw, None, query)
                is_candidate = p >= kernels.MIN_PROB
                covers = (
                    int(is_candidate.sum()) <= 128 and p[is_candidate].sum() >= kernels.MIN_MASS
                )
                assert not (covers and stats.chunks.flat_C.item()), (tokens, slope, rest)
                flat, rows = flat + int(stats.chunks.flat_C), rows + (not covers)
    assert flat > 0.3 * rows
