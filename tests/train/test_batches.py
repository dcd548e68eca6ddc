"""Examples as rows, and rows as batches: what is asked, what is noised, what is mixed."""

from collections import Counter
from dataclasses import dataclass

import numpy as np
import pytest
from numpy.typing import NDArray

from dgemma.errors import UsageError
from dgemma.train.lines import LineTokens
from dgemma.train.mix import Source, StoreSource
from dgemma.train.rows import (
    CANVAS,
    ECHO_REACH,
    EXAMPLE,
    FIELDS,
    LOT,
    NOTHING,
    PINNED,
    POSITION,
    START,
    TARGET,
    TOKEN,
    WEIGHT,
    Corruption,
    Example,
    Ints,
    Layout,
    Reply,
    Tally,
    cut_text,
    lay_out,
    lines_of,
    real_rows,
)
from dgemma.train.store import Store
from tests.train.runs import RandomTexts, ingredient, mixture

CLEAN = Corruption(vocab_size=100, lowest=0.0, highest=0.0, hole_share=0.0)
NOISE = Corruption(vocab_size=100, lowest=1.0, highest=1.0, hole_share=0.0)


def rng(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


def ids(*tokens: int) -> Ints:
    return np.array(tokens, np.int32)


def test_a_tally_counts_what_is_asked_of_canvases_of_texts_and_what_is_real() -> None:
    rows = mixture().batch(3)
    columns = list(
        zip(*(rows[field].ravel().tolist() for field in range(len(FIELDS))), strict=True)
    )
    asked = [column for column in columns if column[TARGET] > NOTHING]
    canvas = sum(column[CANVAS] > NOTHING for column in asked)
    real = sum(column[EXAMPLE] > NOTHING for column in columns)
    assert Tally.of(rows) == (canvas, len(asked) - canvas) and sum(real_rows(rows)) == real
    assert 0 < canvas < len(asked) < real < len(columns)


PAIR = Example(ids(2, 11, 12), ids(21, 22, 23, 24, 25, 16))


def laid(example: Example = PAIR, corruption: Corruption = CLEAN, **layout: int | bool) -> Ints:
    made = lay_out(
        example, Layout(**{"canvas_length": 4, "max_rows": 64, **layout}), corruption, rng()
    )
    assert made is not None
    return made


# --- one example


def test_clean_rows_are_asked_for_the_next_token_and_canvas_rows_for_their_own() -> None:
    rows = laid()
    clean, canvas = rows[:, rows[CANVAS] == NOTHING], rows[:, rows[CANVAS] > NOTHING]
    assert clean[TOKEN].tolist() == [2, 11, 12, 21, 22, 23, 24, 25, 16]
    assert clean[TARGET].tolist() == [11, 12, 21, 22, 23, 24, 25, 16, NOTHING]
    assert clean[POSITION].tolist() == list(range(9))
    # The last canvas is filled up with the token that ends texts, and asked for it.
    assert canvas[TARGET].tolist() == [21, 22, 23, 24, 25, 16, 1, 1]
    assert canvas[TOKEN].tolist() == canvas[TARGET].tolist()
    assert canvas[POSITION].tolist() == [3, 4, 5, 6, 7, 8, 9, 10]
    assert canvas[CANVAS].tolist() == [0] * 4 + [1] * 4
    assert canvas[START].tolist() == [3] * 4 + [7] * 4


def test_a_prompt_need_not_be_learned() -> None:
    rows = laid(learn_prompt=False)
    asked = rows[TARGET, rows[CANVAS] == NOTHING]
    assert asked.tolist() == [NOTHING, NOTHING, 21, 22, 23, 24, 25, 16, NOTHING]


def test_copies_are_noised_apart_and_share_the_clean_text() -> None:
    rows = laid(corruption=NOISE, copies=3)
    assert (rows[CANVAS] == NOTHING).sum() == 9
    assert sorted(Counter(rows[CANVAS]).items()) == [(NOTHING, 9), *((i, 4) for i in range(6))]
    copies = [rows[:, (rows[CANVAS] == i)] for i in (0, 2, 4)]
    assert all((copy[TARGET] == [21, 22, 23, 24]).all() for copy in copies)
    assert len({tuple(copy[TOKEN]) for copy in copies}) == 3


def test_what_has_no_room_is_cut_to_whole_canvases_without_an_end() -> None:
    rows = laid(max_rows=3 + 8)
    assert (rows[CANVAS] > NOTHING).sum() == 4
    assert rows[TOKEN, rows[CANVAS] == NOTHING].tolist() == [2, 11, 12, 21, 22, 23, 24]
    assert lay_out(PAIR, Layout(canvas_length=4, max_rows=10), CLEAN, rng()) is None


def test_plain_text_is_cut_anywhere_and_filled_up_only_if_it_is_over() -> None:
    over, piece = ids(2, *range(30, 48), 1), ids(2, *range(30, 49))
    starts = set()
    for seed in range(40):
        for text in (over, piece):
            made = lay_out(
                Example(ids(), text), Layout(canvas_length=4, max_rows=64), CLEAN, rng(seed)
            )
            assert made is not None
            canvas = made[:, made[CANVAS] > NOTHING]
            starts.add(int(canvas[POSITION, 0]))
            assert (1 in canvas[TARGET]) == (text is over)
            clean = made[TOKEN, made[CANVAS] == NOTHING]
            assert clean.tolist() == text[: len(clean)].tolist()
            # What the canvases hold is what stands at their places.
            within = canvas[POSITION] < len(text)
            assert (canvas[TARGET, within] == text[canvas[POSITION, within]]).all()
    assert starts == {1, 2, 3, 4}


def test_levels_are_spread_evenly_over_canvases() -> None:
    text = ids(*[50] * 400)
    made = laid(
        Example(ids(2), text),
        Corruption(vocab_size=1000, hole_share=0.0),
        canvas_length=100,
        max_rows=99999,
        copies=60,
    )
    canvas = made[:, made[CANVAS] > NOTHING]
    is_noise = (canvas[TOKEN] != canvas[TARGET]).reshape(-1, 100).mean(1)
    assert len(is_noise) == 240
    counts, _ = np.histogram(is_noise, bins=4, range=(0, 1))
    assert (abs(counts - 60) < 25).all()
    assert not canvas[PINNED].any()


def test_noise_is_uniform_over_the_vocabulary() -> None:
    made = laid(
        Example(ids(2), ids(*[50] * 400)), NOISE, canvas_length=100, max_rows=99999, copies=25
    )
    drawn = made[TOKEN, made[CANVAS] > NOTHING]
    counts = np.bincount(drawn, minlength=100)
    assert counts.min() > 50 and counts.max() < 170  # 100 each


def test_holes_are_spans_and_everything_else_is_given() -> None:
    corruption = Corruption(vocab_size=1000, hole_share=1.0, lowest=1.0, highest=1.0)
    made = laid(
        Example(ids(2), ids(*[50] * 400)), corruption, canvas_length=100, max_rows=99999, copies=20
    )
    canvas = made[:, made[CANVAS] > NOTHING].reshape(len(made), -1, 100)
    at_start = 0
    for one in canvas.swapaxes(0, 1):
        given = one[PINNED] > 0
        assert (one[TOKEN, given] == 50).all() and (one[TOKEN, ~given] != 50).mean() > 0.9
        assert (one[TARGET, given] == NOTHING).all() and (one[TARGET, ~given] == 50).all()
        edges = np.diff(np.concatenate([[0], ~given, [0]]).astype(int))
        assert 1 <= (edges == 1).sum() <= 3
        at_start += not given[0]
    assert 20 < at_start < 60  # of 80: half of them, and some by chance


def test_holes_lie_in_the_text_and_not_behind_it() -> None:
    corruption = Corruption(vocab_size=1000, hole_share=1.0)
    example = Example(ids(2), ids(*[50] * 110))
    made = laid(example, corruption, canvas_length=100, max_rows=99999, copies=40)
    given = made[PINNED, made[CANVAS] > NOTHING].reshape(40, 200) > 0
    assert given[:, 110:].all() and not given[:, :100].all(1).any()
    assert not given[:, 100:110].all(1).any()  # the last canvas has holes too


def flags(*tokens: int) -> NDArray[np.bool_]:
    found = np.zeros(1000, bool)
    found[list(tokens)] = True
    return found


LINES = LineTokens(
    breaks_V=flags(7, 8), blank_V=flags(51), quotes_V=flags(9), other_V=flags(60)
)  # tokens of a language of lines


@pytest.mark.parametrize("share", [0.0, 1.0])
def test_holes_may_be_lines(share: float) -> None:
    corruption = Corruption(vocab_size=1000, hole_share=1.0, line_share=share, lines=LINES)
    line, other = [51, 52, 53, 54, 55, 56], [51, 60, 61, 62, 63, 64]
    example = Example(ids(2), ids(*[*line, 7, *line, 8] * 6, *other, 7, *line, 7))
    made = laid(example, corruption, canvas_length=98, max_rows=99999, copies=90)
    given = made[PINNED, made[CANVAS] > NOTHING].reshape(90, 14, 7) > 0
    is_open = ~given[..., 1:6]
    whole = is_open.all(-1) | given.all(-1)
    # Neither what indents a line nor what breaks it.
    assert (whole & given[..., 0] & given[..., 6]).all() == (share == 1.0)
    if share:
        assert not is_open[:, 12].any()
        assert set(is_open[:, :, 0].sum(1)) == set(range(1, 10))  # of 13
        assert 45 <= is_open[:, 0, 0].sum() <= 80  # half of the canvases begin with one, and more


def test_a_canvas_without_a_line_of_code_has_no_holes() -> None:
    corruption = Corruption(
        vocab_size=1000, hole_share=1.0, line_share=1.0, lines=LINES, hole_weight=5
    )
    line, text = [51, *[52] * 8, 7], [51, *[61] * 8, 7]
    # What stands in quotes is no code, also where they opened on a canvas before.
    reply = ids(*line * 4, 9, 7, *[70] * 8, *text * 7, 9, 7, *[70] * 8)
    made = laid(Example(ids(2), reply), corruption, canvas_length=40, max_rows=99999, copies=20)
    is_canvas = made[CANVAS] > NOTHING
    pinned, weight = (made[f, is_canvas].reshape(20, 4, 40) for f in (PINNED, WEIGHT))
    has_hole = (pinned > 0).any(-1)
    assert has_hole[:, 0].all() and not has_hole[:, 1:].any()
    assert (weight == np.where(has_hole, 5, 1)[..., None]).all()
    assert (made[TARGET, is_canvas].reshape(20, 4, 40)[:, 1:] > NOTHING).all()


def test_a_line_that_began_before_its_canvas_is_opened_from_there() -> None:
    reply = Reply(np.zeros((2, 10), np.int32), np.array([10, 10]), [(-3, 4), (6, 12), (15, 20)])
    assert lines_of(reply, 0) == [(0, 4)]
    assert lines_of(reply, 1) == [(0, 2), (5, 10)]


def test_half_of_the_texts_are_cut_where_a_line_begins() -> None:
    """So a canvas begins that is asked for a line."""
    text = ids(*[51, *range(52, 60), 7] * 20)
    layout = Layout(canvas_length=100, max_rows=99999)
    lines = LINES.spans(text)
    cuts = [cut_text(text, layout, lines, rng(seed)) for seed in range(600)]
    assert all([*cut.prompt, *cut.reply] == [*text] for cut in cuts)
    begun = [cut for cut in cuts if cut.reply[0] == 52]
    assert len(begun) == pytest.approx(330, abs=40)  # half of all, and a tenth of the others
    assert {len(cut.prompt) for cut in begun} == set(range(1, 200, 10))
    plain = [cut_text(text, layout, [], rng(seed)) for seed in range(600)]
    assert all(1 <= len(cut.prompt) <= 100 for cut in plain)
    assert sum(cut.reply[0] == 52 for cut in plain) == pytest.approx(60, abs=25)
    alone = cut_text(ids(50, 50, 50), layout, [], rng())
    assert len(alone.prompt) in (1, 2)


def test_without_copies_the_clean_rows_stand_alone() -> None:
    both = laid(PAIR, CLEAN, canvas_length=4, max_rows=99, copies=1)
    alone = laid(PAIR, CLEAN, canvas_length=4, max_rows=99, copies=0)
    assert (alone == both[:, both[CANVAS] == NOTHING]).all() and alone.shape[1] == 9


@pytest.mark.parametrize("other", [1, 3])
def test_a_source_and_its_canvases_with_holes_may_count_for_more(other: int) -> None:
    corruption = Corruption(vocab_size=1000, hole_share=0.5, canvas_weight=other, hole_weight=4)
    example = Example(ids(2), ids(*[50] * 100))
    made = laid(example, corruption, canvas_length=50, max_rows=99999, copies=20)
    is_canvas, is_asked = made[CANVAS] > NOTHING, made[TARGET] > NOTHING
    weight = made[WEIGHT, is_canvas].reshape(40, 50)
    has_hole = (made[PINNED, is_canvas].reshape(40, 50) > 0).any(1)
    assert 0 < has_hole.sum() < 40
    assert (weight == other * np.where(has_hole, 4, 1)[:, None]).all()
    assert (made[WEIGHT, ~is_canvas] == 1).all()
    asked = made[WEIGHT][is_canvas & is_asked]
    assert Tally.of(made).canvas == asked.sum() > len(asked)


@pytest.mark.parametrize("share", [1.0, 0.25])
def test_a_share_of_what_fills_the_last_canvas_is_asked_for(share: float) -> None:
    corruption = Corruption(vocab_size=1000, hole_share=0.0, fill_share=share)
    example = Example(ids(2), ids(*[50] * 150))
    made = laid(example, corruption, canvas_length=100, max_rows=99999, copies=40)
    target = made[TARGET, made[CANVAS] > NOTHING].reshape(40, 200)
    assert (target[:, :150] == 50).all()
    assert set(np.unique(target[:, 150:])) <= {corruption.fill, NOTHING}
    assert (target[:, 150:] == corruption.fill).mean() == pytest.approx(share, abs=0.03)


def test_a_share_of_the_noise_repeats_a_token_that_stands_near_it() -> None:
    text = np.arange(100, 200)  # each token once: an echo is known by where its like stands
    copies = 200
    for share in (0.0, 0.5, 1.0):
        corruption = Corruption(vocab_size=1_000_000, hole_share=0.0, echo_share=share)
        example = Example(ids(2), ids(*text))
        made = laid(example, corruption, canvas_length=100, max_rows=99_999, copies=copies)
        token = made[TOKEN, made[CANVAS] > NOTHING].reshape(copies, 100)
        is_noise = token != text
        away = np.where((token >= 100) & (token < 200), token - text, 100)
        is_echo = is_noise & (np.abs(away) <= ECHO_REACH)
        where, place = np.nonzero(is_echo)
        # What is repeated is to be seen, but for noise that happens to look like an echo.
        assert is_noise[where, place + away[is_echo]].sum() <= 2
        light = is_noise.mean(1) < 0.1  # elsewhere there is often nothing near it to repeat
        assert is_echo[light].sum() / is_noise[light].sum() == pytest.approx(share, abs=0.12)


def test_a_share_of_the_examples_is_asked_for_causally() -> None:
    made = ingredient(RandomTexts(), causal_share=0.25)
    batch = mixture(ingredients=[made], sequences=64).batch(0).reshape(len(FIELDS), -1)
    asked = []
    for number in range(batch[EXAMPLE].max() + 1):
        rows = batch[:, batch[EXAMPLE] == number]
        *clean, last = (rows[TARGET, rows[CANVAS] == NOTHING] > NOTHING).tolist()
        assert len(set(clean)) == 1 and not last
        assert (rows[TARGET, rows[CANVAS] > NOTHING] > NOTHING).any()
        asked.append(clean[0])
    assert np.mean(asked) == pytest.approx(0.25, abs=0.08)


def test_a_source_may_keep_its_canvases_from_being_rolled_out() -> None:
    for rolls in (True, False):
        corruption = Corruption(vocab_size=100, rolls=rolls)
        batch = mixture(ingredients=[ingredient(RandomTexts(), corruption=corruption)]).batch(0)
        lots = batch[LOT][batch[CANVAS] > NOTHING]
        assert (lots >= 0).all() if rolls else (lots == NOTHING).all()


@pytest.mark.parametrize("length", [1, 2, 3])
def test_the_shortest_canvases_may_have_holes_too(length: int) -> None:
    corruption = Corruption(vocab_size=100, hole_share=1.0)
    rows = laid(corruption=corruption, canvas_length=length, copies=5)
    assert (rows[CANVAS] > NOTHING).sum() == 5 * -(-6 // length) * length


# --- batches


def test_a_batch_is_a_function_of_seed_and_step() -> None:
    first, same, other = mixture(), mixture(), mixture(seed=1)
    assert np.array_equal(first.batch(5), same.batch(5))
    again = first.batch(5)
    for step in (0, 4, 6):
        assert not np.array_equal(first.batch(step), again)
    assert not np.array_equal(other.batch(5), again)
    assert np.array_equal(first.batch(5), again)  # nothing is kept between batches


def test_batches_are_well_filled_and_of_one_shape() -> None:
    mix = mixture(sequences=8, rows=256)
    batches = [mix.batch(step) for step in range(5)]
    assert {batch.shape for batch in batches} == {(len(FIELDS), 8, 256)}
    assert np.mean([(batch[EXAMPLE] > NOTHING).mean() for batch in batches]) > 0.9


@dataclass(frozen=True)
class Marked:
    """Texts that all consist of one token."""

    token: int
    length: int

    def draw(self, rng: np.random.Generator, count: int) -> list[Example]:
        return [Example(ids(self.token), ids(*[self.token] * self.length)) for _ in range(count)]


def test_sources_have_their_shares_of_the_rows() -> None:
    weights = {10: 5.0, 11: 3.0, 12: 1.0, 13: 1.0}
    lengths = {10: 8, 11: 40, 12: 8, 13: 16}
    ingredients = [
        ingredient(Marked(token, lengths[token]), weight=weight, copies=1 + token % 2)
        for token, weight in weights.items()
    ]
    mix = mixture(ingredients=ingredients, sequences=8, rows=512)
    counted: Counter[int] = Counter()
    for step in range(25):
        batch = mix.batch(step)
        counted.update(batch[TARGET, batch[CANVAS] == NOTHING].tolist())
    # Clean rows of each source are a known share of its rows.
    clean = {t: (1 + n) / (1 + n + n * (1 + t % 2)) for t, n in lengths.items()}
    rows = {t: counted[t] / clean[t] * (1 + lengths[t]) / lengths[t] for t in weights}
    for token, weight in weights.items():
        share = rows[token] / sum(rows.values())
        assert share == pytest.approx(weight / 10, abs=0.03), f"source {token}"


def test_every_kind_of_example_meets_both_kinds_of_sequences() -> None:
    """Every second sequence is conditioned on a guess."""
    ingredients = [ingredient(Marked(token, 8)) for token in (10, 11)]
    mix = mixture(ingredients=ingredients, sequences=4, rows=128)
    counts = np.zeros((2, 2))
    for step in range(20):
        batch = mix.batch(step)
        for kind, token in enumerate((10, 11)):
            is_kind = (batch[TARGET] == token) & (batch[EXAMPLE] > NOTHING)
            counts[kind] += is_kind[::2].sum(), is_kind[1::2].sum()
    assert (abs(counts / counts.sum(1, keepdims=True) - 0.5) < 0.1).all()


def test_canvas_lengths_have_their_frequencies() -> None:
    marked = ingredient(Marked(10, 8), canvas_lengths={8: 3.0, 4: 1.0})
    mix = mixture(ingredients=[marked], sequences=4, rows=256)
    counts: Counter[int] = Counter()
    for step in range(20):
        batch = mix.batch(step)
        for sequence in batch.swapaxes(0, 1):
            for number in set(sequence[EXAMPLE]) - {NOTHING}:
                own = sequence[:, sequence[EXAMPLE] == number]
                counts[int((own[CANVAS] == 0).sum())] += 1
    assert counts[8] / counts.total() == pytest.approx(0.75, abs=0.07)


# --- what cannot be mixed


def test_a_weight_of_nothing_is_refused() -> None:
    with pytest.raises(UsageError, match="a weight above 0"):
        mixture(ingredients=[ingredient(RandomTexts(), weight=0.0)])


@pytest.mark.parametrize("source", [Marked(10, 8), RandomTexts(has_prompt=False, lengths=(2, 4))])
def test_examples_that_give_no_canvas_are_named_and_not_sought_for_ever(source: Source) -> None:
    with pytest.raises(UsageError, match="not one canvas could be made of 32 examples"):
        mixture(ingredients=[ingredient(source)], rows=8).batch(0)


def test_a_useless_source_leaves_the_batch_to_the_others() -> None:
    good = ingredient(Marked(10, 8))
    useless = ingredient(RandomTexts(has_prompt=False, lengths=(2, 3)), weight=9.0)
    batch = mixture(ingredients=[good, useless]).batch(0)
    assert (batch[EXAMPLE] > NOTHING).mean() > 0.7


def test_an_empty_store_is_refused() -> None:
    with pytest.raises(UsageError, match="no examples"):
        StoreSource(Store.build([], vocab_size=10))


def test_a_store_is_drawn_from_evenly() -> None:
    store = Store.build([([2], [token]) for token in range(3, 9)], vocab_size=10)
    drawn = StoreSource(store).draw(rng(), 6000)
    counts = Counter(int(example.reply[0]) for example in drawn)
    assert set(counts) == set(range(3, 9)) and min(counts.values()) > 850


def test_an_ingredient_may_have_its_own_share_of_holes() -> None:
    for share, expected in ((0.0, 0.0), (1.0, 1.0)):
        corruption = Corruption(vocab_size=100, hole_share=share)
        batch = mixture(ingredients=[ingredient(Marked(10, 8), corruption=corruption)]).batch(0)
        canvases = batch[PINNED][batch[CANVAS] > NOTHING].reshape(-1, 8)
        # A canvas may be one hole, but hardly all of them.
        assert (canvases.any(1).mean() > 0.5) == bool(expected)
