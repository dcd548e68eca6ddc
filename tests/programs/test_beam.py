"""Texts that the causal mode proposes for a hole: the most likely, candidates with canvases'."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise, product
from typing import Any

import pytest

from dgemma.engine import Engine, SamplingParams
from dgemma.engine.request import Program
from dgemma.engine.scoring import NextTokens, Prefill, Score
from dgemma.errors import UsageError
from dgemma.programs.infill import beam
from dgemma.programs.infill.beam import BeamConstraints, BeamSearch
from dgemma.programs.infill.healing import HealingVariant, Hole
from dgemma.programs.infill.infill import FillParams, fill
from dgemma.text.control_tokens import FILL_MARK
from dgemma.text.tokenizer import Tokenizer
from tests.constrain.small_engines import AFTER, BEFORE, HOLE, QUICK, knowing_engine, random_engine

PREFIX = [2, *range(40, 60)]


@pytest.fixture(autouse=True)
def all_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """To random models the tokens that are allowed here are as unlikely as any."""
    monkeypatch.setattr(beam, "READ_TOKENS", 1 << 20)


@dataclass(frozen=True, slots=True, kw_only=True)
class Among(BeamConstraints):
    """Texts of certain tokens; one of them may end a text."""

    tokens: range
    last: int = -1

    def allows(self, tokenizer: Tokenizer, token: int, index: int) -> bool:
        return token in self.tokens

    def is_ended_by(self, tokenizer: Tokenizer, token: int) -> bool:
        return token == self.last


def among(lengths: tuple[int, int], width: int, tokens: range, **more: Any) -> Among:
    """Constraints of a hole without text around it; `after` and `ids` are those of its variant."""
    variant = HealingVariant(holes=(Hole(after=more.pop("after", ())),), ids=more.pop("ids", ()))
    return Among(
        variant=variant,
        edge="",
        piece="",
        single_line=False,
        min_tokens=lengths[0],
        max_tokens=lengths[1],
        width=width,
        tokens=tokens,
        **more,
    )


def search(engine: Engine, constraints: BeamConstraints) -> Program[list[tuple[int, ...]]]:
    (prefix,) = yield [Prefill(PREFIX)]
    (texts,) = yield [BeamSearch(engine.tokenizer, prefix, constraints)]
    found: list[tuple[int, ...]] = texts
    return found


def scores(engine: Engine, texts: Sequence[Sequence[int]]) -> list[Score]:
    return engine.run(engine.score_program(PREFIX, texts))


@pytest.mark.parametrize("seed", range(3))
def test_a_search_wide_enough_finds_all_texts_in_their_order(seed: int) -> None:
    """Also that beams which part share nothing but their prefix: else the order would differ."""
    engine, tokens = random_engine(seed), range(70, 74)
    found = engine.run(search(engine, among((3, 3), 64, tokens)))
    every = list(product(tokens, repeat=3))
    totals = {ids: score.total for ids, score in zip(every, scores(engine, every), strict=True)}
    assert len(found) == len(every)
    in_order = [totals[ids] for ids in found]
    assert all(a > b - 1e-4 for a, b in pairwise(in_order))


@pytest.mark.parametrize("by_total", [False, True])
def test_of_texts_of_several_lengths_those_count_that_lead_to_what_follows(by_total: bool) -> None:
    engine, after, tokens = random_engine(2), 90, range(70, 73)
    found = engine.run(search(engine, among((1, 2), 12, tokens, after=(after,), by_total=by_total)))
    every = [ids for size in (1, 2) for ids in product(tokens, repeat=size)]
    scored = scores(engine, [(*ids, after) for ids in every])
    ranks = [score.total if by_total else score.mean for score in scored]
    rank = dict(zip(every, ranks, strict=True))
    assert len(found) == len(every)
    in_order = [rank[ids] for ids in found]
    assert all(a > b - 1e-4 for a, b in pairwise(in_order))


def test_others_share_the_passes_of_a_search() -> None:
    engine = random_engine(1)
    request = engine.submit(search(engine, among((4, 4), 2, range(70, 74))))
    other = engine.submit(engine.generation("x", SamplingParams(mode="ar", max_tokens=4, seed=1)))
    steps = []
    while not request.is_over:
        engine.step()
        steps.append(other.is_over)
    assert any(steps) and len(steps) < 10, "one waited for the other"
    assert len(request.result[0]) == 4


def test_a_narrow_search_is_the_greedy_mode() -> None:
    engine = random_engine(1)
    anything = range(engine.tokenizer.vocab_size)
    [found] = engine.run(search(engine, among((4, 4), 1, anything, ids=(61,))))

    def greedy() -> Program[tuple[int, ...]]:
        ids: tuple[int, ...] = (61,)
        for _ in range(4):
            (prefix,) = yield [Prefill([*PREFIX, *ids])]
            ((token,),) = yield [NextTokens(prefix, 1)]
            ids += (token,)
        return ids[1:]

    assert engine.run(greedy()) == found


def test_what_ends_a_text_has_nothing_after_it() -> None:
    engine, tokens = random_engine(0), range(70, 74)
    found = engine.run(search(engine, among((1, 3), 200, tokens, last=70)))
    # 70 is last or not there at all: 4, 3 * 4 and 9 * 4 texts.
    assert len(found) == 4 + 12 + 36 and not any(70 in ids[:-1] for ids in found)
    assert engine.run(search(engine, among((1, 3), 4, range(0)))) == []


@pytest.mark.parametrize("seed", range(3))
def test_proposals_compete_with_canvases(seed: int) -> None:
    engine = random_engine(seed)
    pieces = ["one two three", " four five"]
    base = {"lengths": (3,), "seed": seed, "sampler": QUICK, "num_candidates": 40}
    alone = fill(engine, pieces, FillParams(**base, num_proposals=0))  # type: ignore[arg-type]
    both = fill(engine, pieces, FillParams(**base, num_proposals=6))  # type: ignore[arg-type]
    assert {one.text for one in both.candidates} - {one.text for one in alone.candidates}
    assert both.candidates[0].score >= alone.candidates[0].score
    assert both.canvases == alone.canvases  # they cost none


def test_proposals_find_what_no_canvas_says() -> None:
    engine = knowing_engine()
    length = len(engine.tokenizer.encode(HOLE))
    for lengths in ((length,), None):
        options = FillParams(seed=0, lengths=lengths, sampler=QUICK, max_tokens=12)
        assert fill(engine, [BEFORE, AFTER], options).text == BEFORE + HOLE + AFTER


@pytest.mark.parametrize("lengths", [None, (5,)])
def test_proposals_for_a_line_hold_to_it(lengths: tuple[int, ...] | None) -> None:
    engine = random_engine(2)
    options = FillParams(
        seed=4, lengths=lengths, max_tokens=6, single_line=True, sampler=QUICK, num_candidates=20
    )
    inside = fill(engine, f"a = {FILL_MARK}\nb = 2\n", options)
    assert len(inside.candidates) > 4
    assert not any("\n" in one.holes[0].text for one in inside.candidates)
    own = fill(engine, f"a = 1\n{FILL_MARK}b = 2\n", options)
    assert all("\n" not in one.holes[0].text[:-1] for one in own.candidates)


def test_no_fewer_proposals_than_none() -> None:
    with pytest.raises(UsageError, match="proposals is -1; it must be 0 or more"):
        fill(random_engine(0), f"a{FILL_MARK}b", FillParams(num_proposals=-1))
