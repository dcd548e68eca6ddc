"""Packing, corruption and mixtures: targets, noise and batches."""

from collections import Counter
from dataclasses import dataclass, replace

import numpy as np
import pytest
from numpy.typing import NDArray

from dgemma.errors import UsageError
from dgemma.train import packing
from dgemma.train.corruption import (
    EOS_ID,
    MAX_REPEAT_DISTANCE,
    NONE,
    CanvasText,
    Corruption,
    LineTokens,
    RowArray,
    canvas_lines,
)
from dgemma.train.packing import (
    Example,
    PackingLayout,
    RowCounts,
    count_real_rows,
    pack_example,
    split_text,
)
from dgemma.train.sources import Source, StoreSource
from dgemma.train.tokens import TokenStore
from tests.train.runs import RandomTexts, component, mixture

CLEAN = Corruption(vocab_size=100, min_level=0.0, max_level=0.0, hole_fraction=0.0)
NOISE = Corruption(vocab_size=100, min_level=1.0, max_level=1.0, hole_fraction=0.0)


def rng(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


def ids(*tokens: int) -> RowArray:
    return np.array(tokens, np.int32)


def test_rows_with_targets_are_counted_by_canvases_and_texts_and_real_rows() -> None:
    rows = mixture().batch(3)
    columns = list(
        zip(*(rows[field].ravel().tolist() for field in range(len(packing.FIELDS))), strict=True)
    )
    targets = [column for column in columns if column[packing.TARGET] > NONE]
    canvas = sum(column[packing.CANVAS] > NONE for column in targets)
    real = sum(column[packing.EXAMPLE] > NONE for column in columns)
    assert (
        RowCounts.of(rows) == (canvas, len(targets) - canvas) and sum(count_real_rows(rows)) == real
    )
    assert 0 < canvas < len(targets) < real < len(columns)


PAIR = Example(ids(2, 11, 12), ids(21, 22, 23, 24, 25, 16))


def pack(example: Example = PAIR, corruption: Corruption = CLEAN, **layout: int | bool) -> RowArray:
    made = pack_example(
        example, PackingLayout(**{"canvas_length": 4, "max_rows": 64, **layout}), corruption, rng()
    )
    assert made is not None
    return made


# --- one example


def test_clean_rows_target_the_next_token_and_canvas_rows_their_own() -> None:
    rows = pack()
    clean, canvas = rows[:, rows[packing.CANVAS] == NONE], rows[:, rows[packing.CANVAS] > NONE]
    assert clean[packing.TOKEN].tolist() == [2, 11, 12, 21, 22, 23, 24, 25, 16]
    assert clean[packing.TARGET].tolist() == [11, 12, 21, 22, 23, 24, 25, 16, NONE]
    assert clean[packing.POSITION].tolist() == list(range(9))
    # The last canvas is filled up with the token that ends texts, and has it as target.
    assert canvas[packing.TARGET].tolist() == [21, 22, 23, 24, 25, 16, 1, 1]
    assert canvas[packing.TOKEN].tolist() == canvas[packing.TARGET].tolist()
    assert canvas[packing.POSITION].tolist() == [3, 4, 5, 6, 7, 8, 9, 10]
    assert canvas[packing.CANVAS].tolist() == [0] * 4 + [1] * 4
    assert canvas[packing.START].tolist() == [3] * 4 + [7] * 4


def test_a_prompt_may_have_no_targets() -> None:
    rows = pack(train_on_prompt=False)
    targets = rows[packing.TARGET, rows[packing.CANVAS] == NONE]
    assert targets.tolist() == [NONE, NONE, 21, 22, 23, 24, 25, 16, NONE]


def test_copies_are_noised_independently_and_have_one_clean_text() -> None:
    rows = pack(corruption=NOISE, copies=3)
    assert (rows[packing.CANVAS] == NONE).sum() == 9
    assert sorted(Counter(rows[packing.CANVAS]).items()) == [(NONE, 9), *((i, 4) for i in range(6))]
    copies = [rows[:, (rows[packing.CANVAS] == i)] for i in (0, 2, 4)]
    assert all((copy[packing.TARGET] == [21, 22, 23, 24]).all() for copy in copies)
    assert len({tuple(copy[packing.TOKEN]) for copy in copies}) == 3


def test_what_has_no_room_is_cut_to_whole_canvases_without_an_end() -> None:
    rows = pack(max_rows=3 + 8)
    assert (rows[packing.CANVAS] > NONE).sum() == 4
    assert rows[packing.TOKEN, rows[packing.CANVAS] == NONE].tolist() == [2, 11, 12, 21, 22, 23, 24]
    assert pack_example(PAIR, PackingLayout(canvas_length=4, max_rows=10), CLEAN, rng()) is None


def test_plain_text_is_cut_anywhere_and_filled_up_only_if_it_is_over() -> None:
    over, piece = ids(2, *range(30, 48), 1), ids(2, *range(30, 49))
    starts = set()
    for seed in range(40):
        for text in (over, piece):
            made = pack_example(
                Example(ids(), text), PackingLayout(canvas_length=4, max_rows=64), CLEAN, rng(seed)
            )
            assert made is not None
            canvas = made[:, made[packing.CANVAS] > NONE]
            starts.add(int(canvas[packing.POSITION, 0]))
            assert (1 in canvas[packing.TARGET]) == (text is over)
            clean = made[packing.TOKEN, made[packing.CANVAS] == NONE]
            assert clean.tolist() == text[: len(clean)].tolist()
            # What the canvases hold is what stands at their places.
            within = canvas[packing.POSITION] < len(text)
            assert (canvas[packing.TARGET, within] == text[canvas[packing.POSITION, within]]).all()
    assert starts == {1, 2, 3, 4}


def test_levels_are_spread_evenly_over_canvases() -> None:
    text = ids(*[50] * 400)
    made = pack(
        Example(ids(2), text),
        Corruption(vocab_size=1000, hole_fraction=0.0),
        canvas_length=100,
        max_rows=99999,
        copies=60,
    )
    canvas = made[:, made[packing.CANVAS] > NONE]
    is_noise = (canvas[packing.TOKEN] != canvas[packing.TARGET]).reshape(-1, 100).mean(1)
    assert len(is_noise) == 240
    counts, _ = np.histogram(is_noise, bins=4, range=(0, 1))
    assert (abs(counts - 60) < 25).all()
    assert not canvas[packing.PINNED].any()


def test_noise_is_uniform_over_the_vocabulary() -> None:
    made = pack(
        Example(ids(2), ids(*[50] * 400)), NOISE, canvas_length=100, max_rows=99999, copies=25
    )
    drawn = made[packing.TOKEN, made[packing.CANVAS] > NONE]
    counts = np.bincount(drawn, minlength=100)
    assert counts.min() > 50 and counts.max() < 170  # 100 each


def test_holes_are_spans_and_everything_else_is_pinned() -> None:
    corruption = Corruption(vocab_size=1000, hole_fraction=1.0, min_level=1.0, max_level=1.0)
    made = pack(
        Example(ids(2), ids(*[50] * 400)), corruption, canvas_length=100, max_rows=99999, copies=20
    )
    canvas = made[:, made[packing.CANVAS] > NONE].reshape(len(made), -1, 100)
    at_start = 0
    for one in canvas.swapaxes(0, 1):
        given = one[packing.PINNED] > 0
        assert (one[packing.TOKEN, given] == 50).all() and (
            one[packing.TOKEN, ~given] != 50
        ).mean() > 0.9
        assert (one[packing.TARGET, given] == NONE).all() and (
            one[packing.TARGET, ~given] == 50
        ).all()
        edges = np.diff(np.concatenate([[0], ~given, [0]]).astype(int))
        assert 1 <= (edges == 1).sum() <= 3
        at_start += not given[0]
    assert 20 < at_start < 60  # of 80: half of them, and some by chance


def test_holes_lie_in_the_text_and_not_behind_it() -> None:
    corruption = Corruption(vocab_size=1000, hole_fraction=1.0)
    example = Example(ids(2), ids(*[50] * 110))
    made = pack(example, corruption, canvas_length=100, max_rows=99999, copies=40)
    given = made[packing.PINNED, made[packing.CANVAS] > NONE].reshape(40, 200) > 0
    assert given[:, 110:].all() and not given[:, :100].all(1).any()
    assert not given[:, 100:110].all(1).any()  # the last canvas has holes too


def flags(*tokens: int) -> NDArray[np.bool_]:
    found = np.zeros(1000, bool)
    found[list(tokens)] = True
    return found


LINES = LineTokens(
    breaks_V=flags(7, 8), blank_V=flags(51), quotes_V=flags(9), skipped_V=flags(60)
)  # tokens of a language of lines


@pytest.mark.parametrize("fraction", [0.0, 1.0])
def test_holes_may_be_lines(fraction: float) -> None:
    corruption = Corruption(
        vocab_size=1000, hole_fraction=1.0, line_hole_fraction=fraction, lines=LINES
    )
    line, other = [51, 52, 53, 54, 55, 56], [51, 60, 61, 62, 63, 64]
    example = Example(ids(2), ids(*[*line, 7, *line, 8] * 6, *other, 7, *line, 7))
    made = pack(example, corruption, canvas_length=98, max_rows=99999, copies=90)
    given = made[packing.PINNED, made[packing.CANVAS] > NONE].reshape(90, 14, 7) > 0
    is_open = ~given[..., 1:6]
    whole = is_open.all(-1) | given.all(-1)
    # Neither what indents a line nor what breaks it.
    assert (whole & given[..., 0] & given[..., 6]).all() == (fraction == 1.0)
    if fraction:
        assert not is_open[:, 12].any()
        assert set(is_open[:, :, 0].sum(1)) == set(range(1, 10))  # of 13
        assert 45 <= is_open[:, 0, 0].sum() <= 80  # half of the canvases begin with one, and more


def test_a_canvas_without_a_line_of_code_has_no_holes() -> None:
    corruption = Corruption(
        vocab_size=1000, hole_fraction=1.0, line_hole_fraction=1.0, lines=LINES, hole_loss_weight=5
    )
    line, text = [51, *[52] * 8, 7], [51, *[61] * 8, 7]
    # What stands in quotes is no code, also where they opened on a canvas before.
    reply = ids(*line * 4, 9, 7, *[70] * 8, *text * 7, 9, 7, *[70] * 8)
    made = pack(Example(ids(2), reply), corruption, canvas_length=40, max_rows=99999, copies=20)
    is_canvas = made[packing.CANVAS] > NONE
    pinned, weight = (
        made[f, is_canvas].reshape(20, 4, 40) for f in (packing.PINNED, packing.WEIGHT)
    )
    has_hole = (pinned > 0).any(-1)
    assert has_hole[:, 0].all() and not has_hole[:, 1:].any()
    assert (weight == np.where(has_hole, 5, 1)[..., None]).all()
    assert (made[packing.TARGET, is_canvas].reshape(20, 4, 40)[:, 1:] > NONE).all()


def test_a_line_that_began_before_its_canvas_is_opened_from_there() -> None:
    reply = CanvasText(
        np.zeros((2, 10), np.int32), np.array([10, 10]), [(-3, 4), (6, 12), (15, 20)]
    )
    assert canvas_lines(reply, 0) == [(0, 4)]
    assert canvas_lines(reply, 1) == [(0, 2), (5, 10)]


def test_half_of_the_texts_are_cut_where_a_line_begins() -> None:
    """So a canvas begins that is targets for a line."""
    text = ids(*[51, *range(52, 60), 7] * 20)
    layout = PackingLayout(canvas_length=100, max_rows=99999)
    lines = LINES.spans(text)
    splits = [split_text(text, layout, lines, rng(seed)) for seed in range(600)]
    assert all([*cut.prompt, *cut.reply] == [*text] for cut in splits)
    begun = [cut for cut in splits if cut.reply[0] == 52]
    assert len(begun) == pytest.approx(330, abs=40)  # half of all, and a tenth of the others
    assert {len(cut.prompt) for cut in begun} == set(range(1, 200, 10))
    plain = [split_text(text, layout, [], rng(seed)) for seed in range(600)]
    assert all(1 <= len(cut.prompt) <= 100 for cut in plain)
    assert sum(cut.reply[0] == 52 for cut in plain) == pytest.approx(60, abs=25)
    alone = split_text(ids(50, 50, 50), layout, [], rng())
    assert len(alone.prompt) in (1, 2)


def test_without_copies_the_clean_rows_stand_alone() -> None:
    both = pack(PAIR, CLEAN, canvas_length=4, max_rows=99, copies=1)
    alone = pack(PAIR, CLEAN, canvas_length=4, max_rows=99, copies=0)
    assert (alone == both[:, both[packing.CANVAS] == NONE]).all() and alone.shape[1] == 9


@pytest.mark.parametrize("other", [1, 3])
def test_a_source_and_its_canvases_with_holes_may_count_for_more(other: int) -> None:
    corruption = Corruption(
        vocab_size=1000, hole_fraction=0.5, canvas_loss_weight=other, hole_loss_weight=4
    )
    example = Example(ids(2), ids(*[50] * 100))
    made = pack(example, corruption, canvas_length=50, max_rows=99999, copies=20)
    is_canvas, has_target = made[packing.CANVAS] > NONE, made[packing.TARGET] > NONE
    weight = made[packing.WEIGHT, is_canvas].reshape(40, 50)
    has_hole = (made[packing.PINNED, is_canvas].reshape(40, 50) > 0).any(1)
    assert 0 < has_hole.sum() < 40
    assert (weight == other * np.where(has_hole, 4, 1)[:, None]).all()
    assert (made[packing.WEIGHT, ~is_canvas] == 1).all()
    targets = made[packing.WEIGHT][is_canvas & has_target]
    assert RowCounts.of(made).canvas == targets.sum() > len(targets)


def test_a_text_that_ends_with_its_end_token_is_complete() -> None:
    """Others may be a piece of a longer one: what does not fill a canvas is left out."""
    corruption, canvases = replace(CLEAN, eos_id=7), {}
    for end in (7, EOS_ID):
        made = pack(Example(ids(), ids(2, *[50] * 8, end)), corruption, max_rows=99)
        canvases[end] = made[packing.TARGET][made[packing.CANVAS] > NONE].tolist()
    whole, piece = canvases[7], canvases[EOS_ID]
    assert len(whole) == len(piece) + 4 and set(piece) == {50}
    assert whole[whole.index(7) :] == [7] * whole.count(7), "and pads the rest"


@pytest.mark.parametrize("fraction", [1.0, 0.25])
def test_a_fraction_of_the_padding_has_a_target(fraction: float) -> None:
    corruption = Corruption(vocab_size=1000, hole_fraction=0.0, padding_loss_fraction=fraction)
    example = Example(ids(2), ids(*[50] * 150))
    made = pack(example, corruption, canvas_length=100, max_rows=99999, copies=40)
    target = made[packing.TARGET, made[packing.CANVAS] > NONE].reshape(40, 200)
    assert (target[:, :150] == 50).all()
    assert set(np.unique(target[:, 150:])) <= {EOS_ID, NONE}
    assert (target[:, 150:] == EOS_ID).mean() == pytest.approx(fraction, abs=0.03)


def test_a_fraction_of_the_noise_repeats_a_clean_token_nearby() -> None:
    text = np.arange(100, 200)  # each token once: an echo is known by where its like stands
    copies = 200
    for fraction in (0.0, 0.5, 1.0):
        corruption = Corruption(
            vocab_size=1_000_000, hole_fraction=0.0, repeat_noise_fraction=fraction
        )
        example = Example(ids(2), ids(*text))
        made = pack(example, corruption, canvas_length=100, max_rows=99_999, copies=copies)
        token = made[packing.TOKEN, made[packing.CANVAS] > NONE].reshape(copies, 100)
        is_noise = token != text
        away = np.where((token >= 100) & (token < 200), token - text, 100)
        is_echo = is_noise & (np.abs(away) <= MAX_REPEAT_DISTANCE)
        where, place = np.nonzero(is_echo)
        # What is repeated is to be seen, but for noise that happens to look like an echo.
        assert is_noise[where, place + away[is_echo]].sum() <= 2
        light = is_noise.mean(1) < 0.1  # elsewhere there is often nothing near it to repeat
        assert is_echo[light].sum() / is_noise[light].sum() == pytest.approx(fraction, abs=0.12)


def test_ordered_canvases_are_clean_on_the_left_and_noise_on_the_right() -> None:
    text, copies = np.arange(100, 200), 400
    corruption = Corruption(vocab_size=1_000_000, hole_fraction=0.0, ordered_fraction=1.0)
    example = Example(ids(2), ids(*text))
    made = pack(example, corruption, canvas_length=100, max_rows=99_999, copies=copies)
    canvases = made[:, made[packing.CANVAS] > NONE]
    is_noise = (canvases[packing.TOKEN] != canvases[packing.TARGET]).reshape(copies, 100)
    assert not canvases[packing.PINNED].any()
    by_position = is_noise.mean(0)
    assert by_position[:3].mean() < 0.2 and by_position[-3:].mean() > 0.9
    halves = is_noise.reshape(copies, 2, 50).mean(2)
    assert (halves[:, 0] <= halves[:, 1]).mean() > 0.97


def test_a_fraction_of_the_examples_has_causal_targets() -> None:
    made = component(RandomTexts(), causal_fraction=0.25)
    batch = mixture(components=[made], sequences=64).batch(0).reshape(len(packing.FIELDS), -1)
    targets = []
    for number in range(batch[packing.EXAMPLE].max() + 1):
        rows = batch[:, batch[packing.EXAMPLE] == number]
        *clean, last = (rows[packing.TARGET, rows[packing.CANVAS] == NONE] > NONE).tolist()
        assert len(set(clean)) == 1 and not last
        assert (rows[packing.TARGET, rows[packing.CANVAS] > NONE] > NONE).any()
        targets.append(clean[0])
    assert np.mean(targets) == pytest.approx(0.25, abs=0.08)


def test_a_source_may_keep_its_canvases_from_being_rolled_out() -> None:
    for on_policy in (True, False):
        corruption = Corruption(vocab_size=100, on_policy=on_policy)
        batch = mixture(components=[component(RandomTexts(), corruption=corruption)]).batch(0)
        keys = batch[packing.RNG_KEY][batch[packing.CANVAS] > NONE]
        assert (keys >= 0).all() if on_policy else (keys == NONE).all()


@pytest.mark.parametrize("length", [1, 2, 3])
def test_the_shortest_canvases_may_have_holes_too(length: int) -> None:
    corruption = Corruption(vocab_size=100, hole_fraction=1.0)
    rows = pack(corruption=corruption, canvas_length=length, copies=5)
    assert (rows[packing.CANVAS] > NONE).sum() == 5 * -(-6 // length) * length


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
    assert {batch.shape for batch in batches} == {(len(packing.FIELDS), 8, 256)}
    assert np.mean([(batch[packing.EXAMPLE] > NONE).mean() for batch in batches]) > 0.9


@dataclass(frozen=True)
class Marked:
    """Texts that all consist of one token."""

    token: int
    length: int

    def draw(self, rng: np.random.Generator, count: int) -> list[Example]:
        return [Example(ids(self.token), ids(*[self.token] * self.length)) for _ in range(count)]


def test_sources_get_rows_by_their_weights() -> None:
    weights = {10: 5.0, 11: 3.0, 12: 1.0, 13: 1.0}
    lengths = {10: 8, 11: 40, 12: 8, 13: 16}
    components = [
        component(Marked(token, lengths[token]), weight=weight, copies=1 + token % 2)
        for token, weight in weights.items()
    ]
    mix = mixture(components=components, sequences=8, rows=512)
    on_device: Counter[int] = Counter()
    for step in range(25):
        batch = mix.batch(step)
        on_device.update(batch[packing.TARGET, batch[packing.CANVAS] == NONE].tolist())
    # Clean rows of each source are a known fraction of its rows.
    clean = {t: (1 + n) / (1 + n + n * (1 + t % 2)) for t, n in lengths.items()}
    rows = {t: on_device[t] / clean[t] * (1 + lengths[t]) / lengths[t] for t in weights}
    for token, weight in weights.items():
        fraction = rows[token] / sum(rows.values())
        assert fraction == pytest.approx(weight / 10, abs=0.03), f"source {token}"


def test_every_kind_of_example_meets_both_kinds_of_sequences() -> None:
    """Every second sequence is self-conditioned."""
    components = [component(Marked(token, 8)) for token in (10, 11)]
    mix = mixture(components=components, sequences=4, rows=128)
    counts = np.zeros((2, 2))
    for step in range(20):
        batch = mix.batch(step)
        for kind, token in enumerate((10, 11)):
            is_kind = (batch[packing.TARGET] == token) & (batch[packing.EXAMPLE] > NONE)
            counts[kind] += is_kind[::2].sum(), is_kind[1::2].sum()
    assert (abs(counts / counts.sum(1, keepdims=True) - 0.5) < 0.1).all()


def test_canvas_lengths_have_their_frequencies() -> None:
    marked = component(Marked(10, 8), canvas_lengths={8: 3.0, 4: 1.0})
    mix = mixture(components=[marked], sequences=4, rows=256)
    counts: Counter[int] = Counter()
    for step in range(20):
        batch = mix.batch(step)
        for sequence in batch.swapaxes(0, 1):
            for number in set(sequence[packing.EXAMPLE]) - {NONE}:
                own = sequence[:, sequence[packing.EXAMPLE] == number]
                counts[int((own[packing.CANVAS] == 0).sum())] += 1
    assert counts[8] / counts.total() == pytest.approx(0.75, abs=0.07)


# --- what cannot be mixed


def test_a_weight_of_nothing_is_refused() -> None:
    with pytest.raises(UsageError, match="a weight above 0"):
        mixture(components=[component(RandomTexts(), weight=0.0)])


@pytest.mark.parametrize("source", [Marked(10, 8), RandomTexts(has_prompt=False, lengths=(2, 4))])
def test_examples_that_give_no_canvas_are_named_and_not_sought_for_ever(source: Source) -> None:
    with pytest.raises(UsageError, match="not one canvas could be made of 32 examples"):
        mixture(components=[component(source)], rows=8).batch(0)


def test_a_useless_source_leaves_the_batch_to_the_others() -> None:
    good = component(Marked(10, 8))
    useless = component(RandomTexts(has_prompt=False, lengths=(2, 3)), weight=9.0)
    batch = mixture(components=[good, useless]).batch(0)
    assert (batch[packing.EXAMPLE] > NONE).mean() > 0.7


def test_an_empty_store_is_refused() -> None:
    with pytest.raises(UsageError, match="no examples"):
        StoreSource(TokenStore.build([], vocab_size=10))


def test_a_store_is_drawn_from_evenly() -> None:
    store = TokenStore.build([([2], [token]) for token in range(3, 9)], vocab_size=10)
    drawn = StoreSource(store).draw(rng(), 6000)
    counts = Counter(int(example.reply[0]) for example in drawn)
    assert set(counts) == set(range(3, 9)) and min(counts.values()) > 850


def test_a_component_may_have_its_own_fraction_of_holes() -> None:
    for fraction, expected in ((0.0, 0.0), (1.0, 1.0)):
        corruption = Corruption(vocab_size=100, hole_fraction=fraction)
        batch = mixture(components=[component(Marked(10, 8), corruption=corruption)]).batch(0)
        canvases = batch[packing.PINNED][batch[packing.CANVAS] > NONE].reshape(-1, 8)
        # A canvas may be one hole, but hardly all of them.
        assert (canvases.any(1).mean() > 0.5) == bool(expected)
