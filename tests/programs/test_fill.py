"""Filling with real canvases: nothing outside the holes changes, no hole stays empty."""

from dataclasses import replace

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from dgemma.engine import Done, Draft, Engine, SamplingParams
from dgemma.engine.params import Cost
from dgemma.engine.scoring import Score
from dgemma.errors import PromptTooLong, UsageError
from dgemma.programs.infill.candidates import (
    Candidate,
    CandidateConfig,
    CandidatePool,
    InfillPrompt,
    with_score,
)
from dgemma.programs.infill.document import FillRules, InfillDocument, unmatched_brackets
from dgemma.programs.infill.infill import (
    EFFORTS,
    FAST_LENGTHS,
    FAST_STEPS,
    FillParams,
    FillResult,
    fill,
    fill_program,
)
from dgemma.programs.infill.search import NUM_DRAWS, FillEffort
from dgemma.text.control_tokens import FILL_MARK
from tests.constrain.small_engines import (
    AFTER,
    BEFORE,
    HOLE,
    QUICK,
    REQUEST,
    WRONG,
    knowing_engine,
    random_engine,
)
from tests.text.strategies import any_text

# A smaller example would cost more than it tells.
MODES = ["diffusion", "ar"]
UNSHRUNK = [Phase.explicit, Phase.generate]
some = settings(max_examples=120, deadline=None, database=None, phases=UNSHRUNK)
few = settings(max_examples=30, deadline=None, database=None, phases=UNSHRUNK)
pieces = st.lists(any_text, min_size=2, max_size=4).map(tuple)
engines = st.builds(
    random_engine, st.integers(0, 2), st.sampled_from([4, 12]), st.sampled_from([160, 256])
)
options = st.builds(
    FillParams,
    max_tokens=st.none() | st.integers(1, 9),
    stop=st.sampled_from([(), ("e",), ("zz", "\n")]),
    single_line=st.booleans(),
    num_candidates=st.integers(1, 2),
    effort=st.sampled_from(EFFORTS),
    num_proposals=st.sampled_from([0, 3]),
    prompt_style=st.sampled_from(["base", "instruct", "both"]),
    seed=st.integers(0, 1 << 60),
    sampler=st.just(QUICK),
)


def assert_kept(holed: InfillDocument, filled: FillResult) -> None:
    """Everything outside the holes is as given, in every candidate, and the holes are in place."""
    for one in filled.candidates:
        end = 0
        for piece, hole in zip(holed.pieces, one.holes, strict=False):
            assert one.text[end : hole.start] == piece
            assert one.text[hole.start : hole.end] == hole.text
            end = hole.end
        assert one.text[end:] == holed.pieces[-1]
        assert len(one.holes) == holed.num_holes
        one.text.encode("utf-8")  # no half characters


# --- the promise


@some
@given(engines, pieces, options)
def test_nothing_outside_holes_changes_and_none_stays_empty(
    engine: Engine, texts: tuple[str, ...], chosen: FillParams
) -> None:
    holed = InfillDocument(texts)
    filled = fill(engine, holed, chosen)
    assert_kept(holed, filled)
    for one in filled.candidates:
        for hole in one.holes:
            assert hole.text and not any(stop in hole.text for stop in chosen.stop)
            if chosen.single_line:
                assert "\n" not in hole.text[:-1]
    assert not engine.scheduler.requests


@few
@given(engines, pieces, st.data())
def test_known_lengths_keep_the_promise_too(
    engine: Engine, texts: tuple[str, ...], data: st.DataObject
) -> None:
    holed = InfillDocument(texts)
    # Some of them longer than a canvas.
    lengths = tuple(data.draw(st.integers(1, 20)) for _ in range(holed.num_holes))
    seed, effort = data.draw(st.integers(0, 99)), data.draw(st.sampled_from(EFFORTS))
    chosen = FillParams(lengths=lengths, seed=seed, sampler=QUICK, effort=effort)
    filled = fill(engine, holed, chosen)
    assert_kept(holed, filled)
    assert all(hole.text for hole in filled.holes)


@few
@given(engines, pieces, st.data())
def test_other_requests_in_the_same_passes_change_nothing(
    engine: Engine, texts: tuple[str, ...], data: st.DataObject
) -> None:
    seed, effort = data.draw(st.integers(0, 99)), data.draw(st.sampled_from(EFFORTS))
    chosen = FillParams(seed=seed, sampler=QUICK, max_tokens=4, effort=effort)
    alone = fill(engine, texts, chosen)
    # All drawn before any is let in: a draw may end the example, and the engine is shared.
    plans = [
        engine.generation(data.draw(any_text)[:8], SamplingParams(mode=mode, seed=number))  # type: ignore[arg-type]
        for number, mode in enumerate(data.draw(st.lists(st.sampled_from(MODES), max_size=3)))
    ]
    jobs = [engine.submit(plan) for plan in plans]
    try:
        together = fill(engine, texts, chosen)
    finally:
        for job in jobs:
            engine.cancel(job)
    assert_kept(InfillDocument(texts), together)
    assert together.text == alone.text and not engine.scheduler.requests


@pytest.mark.parametrize(
    "text",
    [
        FILL_MARK,
        FILL_MARK * 3,
        f"{FILL_MARK}a",
        f"a{FILL_MARK}",
        f"line\r\n{FILL_MARK}\r\n\tend\r\n",
        f"▁ ▁{FILL_MARK}▁",
        f"<|turn>{FILL_MARK}<turn|><eos>",
        f"half a 👩‍👩‍👧{FILL_MARK}👧",
        f"\ufeff{FILL_MARK}\x00",
        f"go{FILL_MARK}ing",
    ],
    ids=repr,
)
@pytest.mark.parametrize("effort", EFFORTS)
@pytest.mark.parametrize("form", ["base", "instruct", "both"])
def test_odd_texts_keep_the_promise(text: str, form: str, effort: FillEffort) -> None:
    chosen = FillParams(seed=1, sampler=QUICK, prompt_style=form, max_tokens=8, effort=effort)  # type: ignore[arg-type]
    filled = fill(random_engine(1), text, chosen)
    assert_kept(InfillDocument.parse(text), filled)
    assert all(hole.text for hole in filled.holes)


def test_a_long_text_is_filled_within_a_window() -> None:
    engine = random_engine(1, 12, 160)
    text = "a line of text\n" * 300 + f"x = {FILL_MARK}\n" + "more of it\n" * 300
    for form in ("base", "instruct", "both"):
        filled = fill(
            engine, text, FillParams(seed=1, sampler=QUICK, prompt_style=form, max_tokens=4)
        )  # type: ignore[arg-type]
        assert_kept(InfillDocument.parse(text), filled)


@pytest.mark.parametrize("effort", EFFORTS)
def test_holes_far_apart_are_filled_from_left_to_right(effort: FillEffort) -> None:
    engine = random_engine(1)
    text = FILL_MARK.join(f"part {i}: {'some words ' * 6}" for i in range(4))
    chosen = FillParams(seed=1, sampler=QUICK, max_tokens=4, num_candidates=2, effort=effort)
    assert_kept(InfillDocument.parse(text), fill(engine, text, chosen))


@pytest.mark.parametrize("effort", EFFORTS)
def test_empty_holes_need_permission(effort: FillEffort) -> None:
    chosen = FillParams(seed=1, sampler=QUICK, stop=("",), effort=effort)
    with pytest.raises(UsageError, match="stop string is empty"):
        fill(random_engine(0), FILL_MARK, chosen)
    everything = tuple(
        random_engine(0).tokenizer.decode([token]) for token in range(24, 24 + 256 + 110)
    )
    stops = tuple(text for text in everything if text)
    chosen = FillParams(seed=1, sampler=QUICK, max_tokens=2, stop=stops, effort=effort)
    allowed = replace(chosen, allow_empty=True)
    assert fill(random_engine(0), f"a{FILL_MARK}b", allowed).text == "ab"
    with pytest.raises(UsageError, match="allow no text in a hole"):
        fill(random_engine(0), f"a{FILL_MARK}b", chosen)


# --- what it says


def test_a_known_text_is_found_with_its_length() -> None:
    engine = knowing_engine()
    length = len(engine.tokenizer.encode(HOLE))
    filled = fill(engine, [BEFORE, AFTER], FillParams(seed=3, lengths=(length,)))
    assert filled.text == BEFORE + HOLE + AFTER
    [hole] = filled.holes
    assert (hole.text, hole.start, hole.end) == (HOLE, len(BEFORE), len(BEFORE + HOLE))
    assert hole.converged and hole.score > -0.5 and hole.tokens == length
    assert filled.canvases == NUM_DRAWS and filled.prompt_style == "both"


@pytest.mark.parametrize("seed", range(3))
def test_a_known_text_is_found_without_its_length(seed: int) -> None:
    filled = fill(knowing_engine(), [BEFORE, AFTER], FillParams(seed=seed, num_candidates=3))
    assert filled.text == BEFORE + HOLE + AFTER
    scores = [one.score for one in filled.candidates]
    assert scores == sorted(scores, reverse=True)
    assert len({one.text for one in filled.candidates}) == len(scores) > 1


@pytest.mark.parametrize("seed", range(3))
def test_a_fast_fill_finds_a_known_text_in_one_batch(seed: int) -> None:
    engine = knowing_engine()
    limit = len(engine.tokenizer.encode(HOLE))
    chosen = FillParams(seed=seed, max_tokens=limit, num_candidates=3, effort="fast")
    filled = fill(engine, [BEFORE, AFTER], chosen)
    assert filled.text == BEFORE + HOLE + AFTER
    assert filled.canvases <= FAST_LENGTHS and filled.steps <= filled.canvases * FAST_STEPS
    assert filled.prompt_style == "base"  # there are no proposals that could be asked for otherwise
    scores = [one.score for one in filled.candidates]
    assert scores == sorted(scores, reverse=True) and len(scores) == 3
    thorough = fill(engine, [BEFORE, AFTER], replace(chosen, effort="thorough"))
    assert filled.steps < thorough.steps and filled.text == thorough.text
    assert filled.candidates == fill(engine, [BEFORE, AFTER], chosen).candidates


@pytest.mark.parametrize("candidates", [1, 5])
def test_a_fast_fill_of_few_lengths_has_other_noise_for_its_candidates(candidates: int) -> None:
    chosen = FillParams(
        seed=1,
        sampler=QUICK,
        max_tokens=2,
        num_candidates=candidates,
        effort="fast",
        prompt_style="instruct",
    )
    filled = fill(random_engine(1), f"one {FILL_MARK}, two", chosen)
    assert filled.prompt_style == "instruct" and len(filled.candidates) <= candidates
    assert filled.canvases >= candidates


def test_a_fast_fill_gives_each_hole_a_batch() -> None:
    engine, text = random_engine(1), f"a {FILL_MARK} b {FILL_MARK} c"
    one, two = (
        fill(engine, some, FillParams(seed=1, sampler=QUICK, effort="fast"))
        for some in (text.replace(f" b {FILL_MARK}", ""), text)
    )
    assert_kept(InfillDocument.parse(text), two)
    assert one.canvases < two.canvases and len(two.holes) == 2


@pytest.mark.parametrize("seed", range(3))
def test_of_any_length_a_text_counts_by_the_likelihood_of_the_whole(seed: int) -> None:
    """A sum, not a mean: the scores differ by as much as the texts with all that stands there."""
    engine, pieces = random_engine(seed), ("one two three", " four five")
    chosen = FillParams(seed=seed, sampler=QUICK, num_candidates=12, num_proposals=6)
    filled = fill(engine, pieces, chosen)
    bos, end = engine.model.config.bos_token_id, engine.tokenizer.control_ids["<eos>"]
    texts = [[*engine.tokenizer.encode(one.text), end] for one in filled.candidates]
    wholes = [whole.total for whole in engine.run(engine.score_program([bos], texts))]
    assert len({len(ids) for ids in texts}) > 1
    # What stands before the hole is the same in all of them.
    before = [whole - one.score for whole, one in zip(wholes, filled.candidates, strict=True)]
    assert before == pytest.approx([before[0]] * len(before), abs=1e-3)


def test_a_repetition_has_the_better_mean_and_the_lower_sum() -> None:
    tokenizer, after = random_engine(0).tokenizer, " b"
    behind = [-1.0] * len(tokenizer.encode(after))
    scores = []
    for text, rest in ((" a", []), (" a a a a", [-0.25, -0.25, -0.25])):
        ids = tokenizer.encode(text + after)
        logprobs = (-2.0, *rest, *behind)
        assert len(ids) == len(logprobs)
        one = Candidate(fills=(text,), lengths=(1 + len(rest),), converged=True, is_sound=True)
        read, lengths = Score(ids=tuple(ids), logprobs=logprobs), [0, len(text), len(after)]
        scores.append(
            [with_score(one, read, lengths, tokenizer, by_total=b).score for b in (False, True)]
        )
    (mean, total), (mean_again, total_again) = scores
    assert mean_again > mean and total_again < total


def test_two_holes_are_filled_together() -> None:
    first, second = "  y", "ret"
    text = BEFORE + (HOLE + AFTER).replace(first, FILL_MARK, 1).replace(second, FILL_MARK)
    lengths = tuple(len(knowing_engine().tokenizer.encode(one)) for one in (first, second))
    filled = fill(knowing_engine(), text, FillParams(seed=1, lengths=lengths))
    assert filled.text == BEFORE + HOLE + AFTER and filled.canvases == NUM_DRAWS


@pytest.mark.parametrize("effort", EFFORTS)
def test_a_single_line_and_a_stop_string_end_a_hole(effort: FillEffort) -> None:
    engine = knowing_engine()
    line = fill(engine, [BEFORE, ""], FillParams(seed=1, single_line=True, effort=effort))
    assert line.text.count("\n") == 1
    stopped = fill(engine, [BEFORE, AFTER], FillParams(seed=1, stop=("=",), effort=effort))
    assert "=" not in stopped.holes[0].text


def test_the_same_seed_gives_the_same_text_alone_and_beside_others() -> None:
    engine, chosen = knowing_engine(), FillParams(seed=5, max_tokens=6)
    text, question = f"def f{FILL_MARK} y\n", f"{REQUEST}\n\n{WRONG}"
    alone, answer = fill(engine, text, chosen), engine.generate(question, SamplingParams(seed=4))
    job = engine.submit(engine.generation(question, SamplingParams(seed=4)))
    together = fill(engine, text, chosen)
    while not job.is_over:
        engine.step()
    assert together.text == alone.text
    assert [event.text for event in job.events if isinstance(event, Done)] == [answer.text]


@pytest.mark.parametrize("effort", EFFORTS)
def test_drafts_are_reported_and_closing_the_stream_cancels(effort: FillEffort) -> None:
    engine = random_engine(1)
    chosen = FillParams(seed=5, sampler=QUICK, drafts=True, effort=effort)
    events = list(engine.follow(fill_program(engine, f"a{FILL_MARK}b", chosen)))
    assert isinstance(events[-1], FillResult) and all(isinstance(e, Draft) for e in events[:-1])
    assert len(events) > 2
    # What is shown last is the canvas that won, or a text that no canvas wrote.
    left = "".join(events[-2].guess_tokens)
    assert events[-1].holes[0].text.strip() in left
    stream = engine.follow(fill_program(engine, f"a{FILL_MARK}b", chosen))
    next(stream)
    stream.close()
    assert not engine.scheduler.requests


def test_balanced_brackets_are_preferred() -> None:
    """Of five texts for a hole the one comes first that leaves no bracket without a partner."""
    engine, before, after = knowing_engine(), "f(x[0]", " + y\n"
    encode, bos = engine.tokenizer.encode, engine.model.config.bos_token_id
    prompt = InfillPrompt(
        header=(bos,),
        before=tuple(encode(before)),
        edge=before,
        pieces=(after,),
        piece_ids=(tuple(encode(after)),),
        open_brackets=(unmatched_brackets(before), unmatched_brackets(after)),
    )
    config = CandidateConfig(rules=FillRules(), seed=1, sampler=QUICK, end_id=1)
    pool = CandidatePool(engine, prompt, config, Cost(seed=1))
    texts = ["))", "", "(", ")", "]"]
    engine.run(pool.run(pool.add([Candidate(fills=(t,), lengths=(1,)) for t in texts])))
    assert [pool.candidates[(t,)].num_unmatched for t in texts] == [1, 1, 2, 0, 2]
    assert pool.ranked[0].fills == (")",)


# --- refusals


@pytest.mark.parametrize(
    ("chosen", "phrase"),
    [
        (FillParams(max_tokens=0), "max_tokens is 0"),
        (FillParams(num_candidates=0), "candidates is 0"),
        (FillParams(lengths=(0,)), "each must be 1 or more"),
        (FillParams(lengths=(2, 3)), "2 lengths are given for 1 holes"),
        (FillParams(prompt_style="other"), "style 'other' is not known"),  # type: ignore[arg-type]
        (FillParams(effort="slow"), "effort 'slow' is not known; use fast or thorough"),  # type: ignore[arg-type]
        (FillParams(seed=-1), "seed is -1"),
    ],
)
def test_wrong_options_are_refused(chosen: FillParams, phrase: str) -> None:
    with pytest.raises(UsageError, match=phrase):
        fill(random_engine(0), FILL_MARK, chosen)


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("canvas", [4, 6])
def test_a_text_longer_than_the_context_leaves_room_for_scores(seed: int, canvas: int) -> None:
    text = "word " * 120 + FILL_MARK + " after this come more words of text"
    done = fill(random_engine(seed, canvas, 160), text, FillParams(lengths=(canvas,)))
    before, after = text.split(FILL_MARK)
    assert done.text.startswith(before) and done.text.endswith(after)


def test_holes_too_long_for_the_context_are_refused() -> None:
    with pytest.raises(PromptTooLong, match="leave no room"):
        fill(random_engine(0), FILL_MARK, FillParams(max_tokens=1000))
