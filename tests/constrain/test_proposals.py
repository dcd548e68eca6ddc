"""What the causal mode proposes for a hole: the likeliest texts, and candidates beside canvases."""

from dataclasses import replace
from itertools import pairwise, product

import pytest

from dgemma.constrain.holes import MARK
from dgemma.engine import beam
from dgemma.engine.beam import Wanted, likeliest
from dgemma.engine.fill import FillOptions
from dgemma.engine.trials import SharedPrefix
from dgemma.errors import UsageError
from tests.constrain.small_engines import AFTER, BEFORE, HOLE, QUICK, knowing_engine, random_engine

PREFIX = [2, *range(40, 60)]


@pytest.fixture(autouse=True)
def far_looking(monkeypatch: pytest.MonkeyPatch) -> None:
    """Random models find the tokens asked for here as unlikely as any."""
    monkeypatch.setattr(beam, "READ", 1 << 20)


def never(token: int) -> bool:
    return False


def idle() -> None:
    """Nobody else has work between two tokens."""


def wanted(least: int, most: int, width: int, tokens: range, after: int | None = None) -> Wanted:
    return Wanted(
        least=least,
        most=most,
        width=width,
        after=after,
        allowed=lambda token, place: token in tokens,
        ends=never,
    )


@pytest.mark.parametrize("seed", range(3))
def test_a_search_wide_enough_finds_all_texts_in_their_order(seed: int) -> None:
    """Also that rows which part share nothing but their past: else the order would differ."""
    shared = SharedPrefix(random_engine(seed), PREFIX)
    tokens = range(70, 74)
    found = likeliest(shared.engine.backend, shared.behind(()), wanted(3, 3, 64, tokens), idle)
    every = list(product(tokens, repeat=3))
    totals = {ids: score.total for ids, score in zip(every, shared.score(every), strict=True)}
    assert len(found) == len(every)
    in_order = [totals[ids] for ids in found]
    assert all(a > b - 1e-4 for a, b in pairwise(in_order))


@pytest.mark.parametrize("by_total", [False, True])
def test_of_texts_of_several_lengths_those_count_that_lead_to_what_follows(by_total: bool) -> None:
    shared, after, tokens = SharedPrefix(random_engine(2), PREFIX), 90, range(70, 73)
    texts = replace(wanted(1, 2, 12, tokens, after), by_total=by_total)
    found = likeliest(shared.engine.backend, shared.behind(()), texts, idle)
    every = [ids for size in (1, 2) for ids in product(tokens, repeat=size)]
    scores = shared.score([(*ids, after) for ids in every])
    worths = [score.total if by_total else score.mean for score in scores]
    worth = dict(zip(every, worths, strict=True))
    assert len(found) == len(every)
    in_order = [worth[ids] for ids in found]
    assert all(a > b - 1e-4 for a, b in pairwise(in_order))


def test_others_have_their_turn_between_two_tokens() -> None:
    shared, turns = SharedPrefix(random_engine(1), PREFIX), list[str]()
    texts = wanted(4, 4, 2, range(70, 74))
    likeliest(shared.engine.backend, shared.behind(()), texts, lambda: turns.append("theirs"))
    assert len(turns) == 3


def test_a_narrow_search_is_the_greedy_mode() -> None:
    shared = SharedPrefix(random_engine(1), PREFIX)
    anything = range(shared.engine.tokenizer.vocab_size)
    [found] = likeliest(
        shared.engine.backend, shared.behind((61,)), wanted(4, 4, 1, anything), idle
    )
    ids: tuple[int, ...] = (61,)
    for _ in range(4):
        after = SharedPrefix(shared.engine, (*PREFIX, *ids))
        ids += (int(after.next_logits().argmax()),)
    assert ids[1:] == found


def test_what_ends_a_text_has_nothing_behind_it() -> None:
    shared, tokens = SharedPrefix(random_engine(0), PREFIX), range(70, 74)
    plain = wanted(1, 3, 200, tokens)
    ending = Wanted(
        least=1,
        most=3,
        width=200,
        after=None,
        allowed=plain.allowed,
        ends=lambda token: token == 70,
    )
    found = likeliest(shared.engine.backend, shared.behind(()), ending, idle)
    # 70 stands last or not at all: 4, 3 * 4 and 9 * 4 texts.
    assert len(found) == 4 + 12 + 36 and not any(70 in ids[:-1] for ids in found)
    impossible = wanted(1, 3, 4, range(0))
    assert likeliest(shared.engine.backend, shared.behind(()), impossible, idle) == []


@pytest.mark.parametrize("seed", range(3))
def test_proposals_compete_with_canvases(seed: int) -> None:
    engine = random_engine(seed)
    pieces = ["one two three", " four five"]
    base = {"lengths": (3,), "seed": seed, "sampler": QUICK, "candidates": 40}
    alone = engine.fill(pieces, FillOptions(**base, proposals=0))  # type: ignore[arg-type]
    both = engine.fill(pieces, FillOptions(**base, proposals=6))  # type: ignore[arg-type]
    assert {one.text for one in both.candidates} - {one.text for one in alone.candidates}
    assert both.candidates[0].score >= alone.candidates[0].score
    assert both.canvases == alone.canvases  # they cost none


def test_proposals_find_what_no_canvas_says() -> None:
    engine = knowing_engine()
    length = len(engine.tokenizer.encode(HOLE))
    for lengths in ((length,), None):
        options = FillOptions(seed=0, lengths=lengths, sampler=QUICK, max_tokens=12)
        assert engine.fill([BEFORE, AFTER], options).text == BEFORE + HOLE + AFTER


@pytest.mark.parametrize("lengths", [None, (5,)])
def test_proposals_for_a_line_hold_to_it(lengths: tuple[int, ...] | None) -> None:
    engine = random_engine(2)
    options = FillOptions(
        seed=4, lengths=lengths, max_tokens=6, single_line=True, sampler=QUICK, candidates=20
    )
    inside = engine.fill(f"a = {MARK}\nb = 2\n", options)
    assert len(inside.candidates) > 4
    assert not any("\n" in one.holes[0].text for one in inside.candidates)
    own = engine.fill(f"a = 1\n{MARK}b = 2\n", options)
    assert all("\n" not in one.holes[0].text[:-1] for one in own.candidates)


def test_no_fewer_proposals_than_none() -> None:
    with pytest.raises(UsageError, match="proposals is -1; it must be 0 or more"):
        random_engine(0).fill(f"a{MARK}b", FillOptions(proposals=-1))
