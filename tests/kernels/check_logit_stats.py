"""Row statistics by kernel: the numbers of the definition, and the same draws."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from dgemma.backends.cuda.kernels import logit_stats as kernels
from dgemma.backends.cuda.kernels import soft_embed_topk as sparse
from dgemma.backends.cuda.kernels.soft_embed_topk import Into
from dgemma.diffusion.logit_stats import Query, draw_misses, row_stats_reference

SHAPES = [(61, 30.0, 30.0), (2048, None, 8.0), (5000, 30.0, 3.0)]


def case(vocab: int, spread: float, rows: int = 8) -> tuple[Tensor, Query]:
    generator = torch.Generator().manual_seed(vocab)
    query = Query(
        temperature_T=torch.rand(rows, generator=generator) * 0.6 + 0.3,
        uniform_T=torch.rand(rows, generator=generator, dtype=torch.float64),
        held_T=torch.randint(vocab, (rows,), generator=generator),
    )
    return spread * torch.randn(rows, vocab, generator=generator), query


def ask(
    raw: Tensor, cap: float | None, query: Query, length: int | None = None
) -> tuple[kernels.Marks, kernels.Merged]:
    """Run both passes over canvases of `length` rows, all rows by default."""
    cold = query.draw_temperature_T
    heats = (query.temperature_T, torch.ones_like(query.temperature_T) if cold is None else cold)
    marks = kernels.row_marks(raw, cap, heats, length or len(raw))
    return marks, kernels.row_merge(raw, cap, (*heats, query.uniform_T, query.held_T), marks)


@pytest.mark.parametrize(("vocab", "cap", "spread"), SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_statistics_and_draws_are_those_of_the_definition(
    vocab: int, cap: float | None, spread: float, dtype: torch.dtype
) -> None:
    raw, query = case(vocab, spread)
    raw = raw.to(dtype)
    want = row_stats_reference(raw, cap, query)
    _, got = ask(raw, cap, query)
    assert torch.equal(got.draw_T, want.draw_T)
    assert torch.equal(got.top_T, want.top_T)
    for name in ("entropy_T", "top_p_T", "held_p_T"):
        torch.testing.assert_close(getattr(got, name), getattr(want, name), atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize(("vocab", "cap", "spread"), SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_draws_have_temperatures_of_their_own(
    vocab: int, cap: float | None, spread: float, dtype: torch.dtype
) -> None:
    """All in one call; nothing but the draw sees them, and zero takes the likeliest token."""
    raw, query = case(vocab, 0.1 * spread, rows=12)
    raw, cold_T = raw.to(dtype), torch.tensor([0.0, 0.5, 1.0, 1.7]).repeat(3)
    query = replace(query, draw_temperature_T=cold_T)
    want = row_stats_reference(raw, cap, replace(query, draw_temperature_T=cold_T.clamp(min=1e-7)))
    marks, got = ask(raw, cap, query)
    assert torch.equal(got.draw_T, want.draw_T)
    assert torch.equal(got.draw_T[::4], got.top_T[::4])
    plain_marks, plain = ask(raw, cap, replace(query, draw_temperature_T=None))
    assert torch.equal(got.draw_T[2::4], plain.draw_T[2::4])
    assert (got.draw_T != plain.draw_T).sum() > 2
    for name in set(kernels.Merged.__slots__) - {"draw_T"}:
        assert torch.equal(getattr(got, name), getattr(plain, name)), name
    for name in ("peak_TC", "sum_TC", "moment_TC", "flat_C"):
        assert torch.equal(getattr(marks, name), getattr(plain_marks, name)), name


def test_many_draws_follow_a_distribution_at_its_temperature() -> None:
    raw = torch.tensor([[2.0, 0.0, 1.0, -1.0]]).expand(48, 4).contiguous()
    numbers = (torch.arange(24, dtype=torch.float64) + 0.5) / 24
    query = Query(
        temperature_T=torch.full((48,), 0.8),
        uniform_T=numbers.repeat(2),
        held_T=torch.zeros(48, dtype=torch.long),
        draw_temperature_T=torch.tensor([0.5, 1.7]).repeat_interleave(24),
    )
    draw_T = ask(raw, None, query)[1].draw_T
    for temperature, part_T in zip((0.5, 1.7), draw_T.split(24), strict=True):
        want = 24 * (raw[0] / 0.8 / temperature).softmax(-1)
        assert (part_T.bincount(minlength=4) - want).abs().max() <= 1


def test_the_ends_of_the_uniform_numbers_draw_likely_tokens() -> None:
    raw = torch.full((2, 5000), -40.0)
    raw[:, 3000] = 5.0
    query = Query(
        temperature_T=torch.tensor([0.4, 0.8]),
        uniform_T=torch.tensor([0.0, 1 - 2**-53], dtype=torch.float64),
        held_T=torch.tensor([0, 3000]),
    )
    _, got = ask(raw, None, query)
    assert got.draw_T[1] == 3000
    assert 0 <= got.draw_T[0] <= 3000
    assert got.entropy_T.abs().max() < 1e-5


@pytest.mark.filterwarnings("ignore:All-NaN slice", "ignore:invalid value")
def test_rows_that_are_no_numbers_say_so_and_name_tokens_that_exist() -> None:
    raw, query = case(5000, 3.0, rows=3)
    raw[0] = float("nan")
    raw[1, 4000] = float("nan")
    _, got = ask(raw, 30.0, query)
    assert got.entropy_T.isnan().tolist() == [True, True, False]
    for token_T in (got.draw_T, got.top_T):
        assert ((token_T >= 0) & (token_T < 5000)).all()


def test_of_equal_peaks_the_first_is_taken() -> None:
    raw = torch.zeros(1, 5000)
    raw[0, [4100, 2500, 2600]] = 7.0
    query = Query(
        temperature_T=torch.ones(1),
        uniform_T=torch.zeros(1, dtype=torch.float64),
        held_T=torch.zeros(1, dtype=torch.long),
    )
    assert ask(raw, 30.0, query)[1].top_T.tolist() == [2500]


def test_draws_among_many_equal_tokens_are_right_to_a_part_of_a_token() -> None:
    vocab = 262_144
    raw, query = case(vocab, 0.5, rows=2)
    draw_T = ask(raw.half(), 30.0, query)[1].draw_T
    misses = draw_misses(raw.half(), 30.0, query, draw_T)
    assert misses.max() <= 1e-6  # of a mean interval of 4e-6
    # The measure sees a wrong draw, and that the definition's own is right.
    assert draw_misses(raw.half(), 30.0, query, (draw_T + 40) % vocab).min() > 1e-5
    exact = row_stats_reference(raw.half(), 30.0, query)
    assert draw_misses(raw.half(), 30.0, query, exact.draw_T).max() == 0


def test_many_draws_follow_the_distribution() -> None:
    raw = torch.tensor([[2.0, 0.0, 1.0, -1.0]]).expand(24, 4).contiguous()
    numbers = (torch.arange(24, dtype=torch.float64) + 0.5) / 24
    query = Query(
        temperature_T=torch.ones(24), uniform_T=numbers, held_T=torch.zeros(24, dtype=torch.long)
    )
    draws = ask(raw, None, query)[1].draw_T.bincount(minlength=4)
    assert (draws - 24 * raw[0].softmax(-1)).abs().max() <= 1


@pytest.mark.parametrize(("vocab", "cap", "spread"), SHAPES)
def test_probabilities_replace_the_logits(vocab: int, cap: float | None, spread: float) -> None:
    raw, query = case(vocab, spread)
    capped = raw if cap is None else cap * torch.tanh(raw / cap)
    want = (capped / query.temperature_T[:, None]).softmax(-1)
    _, merged = ask(raw, cap, query)
    got = kernels.probabilities_(raw, cap, query.temperature_T, merged)
    assert got.data_ptr() == raw.data_ptr()
    torch.testing.assert_close(got, want, atol=1e-6, rtol=1e-4)


def test_the_sparse_mean_is_the_dense_one_where_its_mass_says_so() -> None:
    raw, query = case(5000, 1.0)
    raw[:, :7] += 8.0
    raw[:4, :7] += 17.0  # the first rows are sharp, the others not quite
    marks, merged = ask(raw, 30.0, query)
    assert not marks.flat_C.item()
    ids, p, count, mass = sparse.survivors(raw, 30.0, query.temperature_T, marks, merged)
    table = torch.randn(5000, 24, generator=torch.Generator().manual_seed(1))
    into = Into(
        torch.empty(1, 8, 24),
        torch.zeros(1, 8, dtype=torch.long),
        torch.zeros(1, 8, dtype=torch.uint8),
        torch.zeros(1, dtype=torch.int32),
        1.0,
    )
    sparse.soft_mean(table, ids, p, count, into)
    mean = into.soft_ELD[0]
    dense = kernels.probabilities_(raw, 30.0, query.temperature_T, merged) @ table
    sure = mass >= kernels.MASS
    assert sure[:4].all() and not sure.all()
    torch.testing.assert_close(mean[sure], dense[sure], atol=2e-3, rtol=1e-3)
    assert (mean - dense)[~sure].abs().max() > 0.01


def test_likely_tokens_are_all_found_in_order_wherever_they_lie() -> None:
    """One row with a few, and one with some in every chunk."""
    vocab = 20 * kernels.CHUNK + 100
    raw, query = case(vocab, 0.1, rows=2)
    raw[0, [7, 9000, 9001, vocab - 1]] += 20.0
    raw[1, 50 :: kernels.CHUNK // 4] += 20.0
    marks, merged = ask(raw, None, query)
    found = sparse.likely(raw, None, query.temperature_T, marks, merged)
    ids, p, count, mass = sparse.survivors(raw, None, query.temperature_T, marks, merged, found)
    want = (raw.double() / query.temperature_T[:, None].double()).softmax(-1)
    for row in range(2):
        likely = (want[row] >= kernels.SPARE).nonzero()[:, 0]
        assert ids[row, : count[row]].tolist() == likely.tolist()
        torch.testing.assert_close(
            p[row, : count[row]].double(), want[row, likely], rtol=1e-4, atol=0
        )
        assert abs(mass[row] - want[row, likely].sum()) < 1e-4
    assert count.tolist() == [4, 81]
    assert found.suffice()


GROUP = sparse.AT_ONCE * kernels.CHUNK


@pytest.mark.parametrize("cap", [30.0, 0.5, None])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("spread", [2.0, 4.0, 5.0, 6.0, 8.0])
def test_counts_and_masses_are_those_of_the_definition(
    cap: float | None, dtype: torch.dtype, spread: float
) -> None:
    """Many numbers are equal, some of them neighbours; under a low cap all tokens are likely."""
    raw, query = case(2 * GROUP + 100, spread, rows=1)
    raw = raw.round(decimals=1).clamp(min=-15.0)
    raw[:, 9:13] = raw[:, -3:-2] = 4.5 * spread
    raw = raw.to(dtype)
    marks, merged = ask(raw, cap, query)
    marks.flat_C.zero_()  # nothing is spared here
    found = sparse.likely(raw, cap, query.temperature_T, marks, merged)
    logits = raw.double() if cap is None else cap * torch.tanh(raw.double() / cap)
    p = (logits / query.temperature_T[:, None].double()).softmax(-1)[0]
    likely = [part[part >= kernels.SPARE] for part in p.split(GROUP)]
    for count, mass, want in zip(found.count_TG[0], found.mass_TG[0], likely, strict=True):
        assert count == len(want)
        if count > kernels.SURVIVORS:
            assert marks.flat_C.item() and mass == 0
            break  # what comes after it may be left out
        torch.testing.assert_close(mass.double(), want.sum(), rtol=1e-4, atol=0)


def test_cases_hold_rows_with_few_and_with_many_likely_tokens() -> None:
    """So that the test above means something: masses of many, of a few equal ones, and none."""
    counts = []
    for spread in (2.0, 5.0, 8.0):
        raw, query = case(2 * GROUP + 100, spread, rows=1)
        marks, merged = ask(raw, 30.0, query)
        marks.flat_C.zero_()
        counts += sparse.likely(raw, 30.0, query.temperature_T, marks, merged).count_TG[0].tolist()
    assert max(counts) > kernels.SURVIVORS > sorted(counts)[len(counts) // 2] > 4


def test_a_search_that_found_too_many_together_spares_the_rest_its_own() -> None:
    """And says so itself, whoever else is left out."""
    raw, query = case(3 * GROUP, 0.1, rows=2)
    raw[:, 7] += 20.0
    raw[0, GROUP : GROUP + 200] += 15.0 - 0.02 * torch.arange(200)
    marks, merged = ask(raw, None, query)
    assert not marks.flat_C.item()
    for _ in range(2):  # asked again, it may say nothing, but nothing else
        found = sparse.likely(raw, None, query.temperature_T, marks, merged)
        assert marks.flat_C.item() and not found.suffice()
    marks, merged = ask(raw[1:], None, query.rows(slice(1, 2)))
    assert sparse.likely(raw[1:], None, query.temperature_T[1:], marks, merged).suffice()


@pytest.mark.parametrize("is_plain", [True, False])
def test_canvases_of_a_pass_are_flat_each_for_itself(is_plain: bool) -> None:
    """Seen from the marks, or by the search; the likely tokens of the others are found."""
    raw, query = case(3 * GROUP, 0.1, rows=5)
    query.temperature_T.fill_(0.85)
    raw[:, 7] += 20.0
    if is_plain:
        raw[3] = 0.0
    else:
        raw[3, GROUP : GROUP + 200] += 15.0 - 0.02 * torch.arange(200)
    marks, merged = ask(raw, None, query, length=2)
    assert marks.flat_C.tolist() == [0, int(is_plain), 0]
    found = sparse.likely(raw, None, query.temperature_T, marks, merged)
    assert marks.flat_C.tolist() == [0, 1, 0]
    for rows, want in ((slice(0, 2), True), (slice(2, 4), False), (slice(4, 5), True)):
        own = sparse.Likely(found.count_TG[rows], found.mass_TG[rows])
        assert bool(own.suffice()) == want
        assert own.count_TG.sum() >= own.count_TG.shape[0] * want
    again, _ = ask(raw[:2].contiguous(), None, query.rows(slice(0, 2)), length=2)
    assert again.flat_C.tolist() == [0]  # set anew each time


def test_a_row_with_mass_in_chunks_without_likely_tokens_is_flat() -> None:
    """Its tokens need not be looked at; where as much lies beside likely ones they have to be."""
    vocab = 4 * kernels.CHUNK
    for rest, want in ((1.9e-3, False), (2.1e-3, True)):
        p = torch.full((1, vocab), 1e-12, dtype=torch.float64)
        p[0, 5] = 1 - rest
        p[0, 2 * kernels.CHUNK :] = rest / (2 * kernels.CHUNK)
        raw, (_, query) = p.log().float(), case(vocab, 1.0, rows=1)
        query.temperature_T.fill_(1.0)
        marks, merged = ask(raw, None, query)
        assert bool(marks.flat_C.item()) == want
        assert bool(sparse.likely(raw, None, query.temperature_T, marks, merged).suffice()) != want


@pytest.mark.parametrize("is_plain", [True, False])
def test_one_row_with_too_many_likely_tokens_says_that_few_do_not_suffice(is_plain: bool) -> None:
    """Seen from the marks where they are far too many, else by the search."""
    vocab = 20 * kernels.CHUNK + 100
    raw, query = case(vocab, 0.1, rows=3)
    raw[:, 7] += 25.0
    query.temperature_T[2] = 0.5
    raw[2, ::20] += 25.0
    if not is_plain:  # ten in each chunk, less and less likely
        raw[2] = -40.0
        at = torch.arange(200)
        raw[2, at // 10 * kernels.CHUNK + at % 10] = 20.0 - 0.02 * at
    marks, merged = ask(raw, None, query)
    found = sparse.likely(raw, None, query.temperature_T, marks, merged)
    assert bool(marks.flat_C.item()) == is_plain
    assert bool(found.count_TG.any()) != is_plain
    assert not found.suffice()
    sharp = [
        part[:2].contiguous() for part in (raw, query.temperature_T, query.uniform_T, query.held_T)
    ]
    alone = Query(temperature_T=sharp[1], uniform_T=sharp[2], held_T=sharp[3])
    marks, merged = ask(sharp[0], None, alone)
    assert not marks.flat_C.item()  # it is set anew each time
    assert sparse.likely(sharp[0], None, alone.temperature_T, marks, merged).suffice()


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
                    held_T=torch.zeros(1, dtype=torch.long),
                )
                marks, _ = ask(raw, None, query)
                is_likely = p >= kernels.SPARE
                suffices = int(is_likely.sum()) <= 128 and p[is_likely].sum() >= kernels.MASS
                assert not (suffices and marks.flat_C.item()), (tokens, slope, rest)
                flat, rows = flat + int(marks.flat_C), rows + (not suffices)
    assert flat > 0.3 * rows
