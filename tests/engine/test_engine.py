"""Requests on a real, tiny checkpoint: events in order, exact cuts, refusals before any work."""

import shutil
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest

from dgemma.config import LongReply
from dgemma.diffusion.canvas import Pins
from dgemma.diffusion.rules import Confidence, SpacedEntropyBound
from dgemma.diffusion.sampler import EntropyBound, Sampler
from dgemma.engine import Done, Draft, Engine, SamplingParams, Text
from dgemma.engine.canvas_policy import LENGTH_MULTIPLE, MIN_END_FRACTION
from dgemma.errors import CheckpointError, DgemmaError, PromptTooLong, UsageError
from dgemma.text.chat import Message, Prompt
from dgemma.weights.load import Checkpoint, random_model
from dgemma.weights.save import save_checkpoint
from tests.taught import (
    ANSWERS,
    CANVAS,
    GENERATION,
    LONG,
    SHORT,
    THOUGHT,
    answer_ids,
    ask,
    taught_config,
    untaught_engine,
)
from tests.text.small import small_tokenizer

SEEDED = SamplingParams(seed=1)
TEXTS = {SHORT: ANSWERS[SHORT], LONG: ANSWERS[LONG], THOUGHT: "yes"}
LONG_IDS = answer_ids(LONG)[: answer_ids(LONG).index(GENERATION.stop_ids[1])]


@pytest.fixture(scope="session")
def engine(checkpoint: Path) -> Engine:
    return Engine.load(checkpoint, device="cpu", dtype="float32")


@pytest.fixture(scope="session")
def wild() -> Engine:
    """An engine whose model was taught nothing: its answers depend on the noise."""
    return untaught_engine()


def answer(events: list[Any]) -> str:
    return "".join(e.text for e in events if isinstance(e, Text) and not e.is_thought)


# --- events


@pytest.mark.parametrize("question", ANSWERS)
def test_a_checkpoint_from_disk_gives_its_taught_answers(engine: Engine, question: str) -> None:
    done = engine.generate(question, SEEDED)
    assert done.text == TEXTS[question]
    assert done.finish == "stop"
    assert done.unconverged_blocks == 0


@pytest.mark.parametrize("question", ANSWERS)
@pytest.mark.parametrize("drafts", [True, False])
def test_events_come_in_order_and_end_with_done(
    engine: Engine, question: str, drafts: bool
) -> None:
    events = list(engine.stream(question, SamplingParams(seed=1, drafts=drafts)))
    done = events[-1]
    assert isinstance(done, Done)
    assert all(isinstance(event, Draft | Text) for event in events[:-1])
    assert answer(events) == done.text == TEXTS[question]
    assert all(event.text for event in events if isinstance(event, Text))
    seen = [event for event in events if isinstance(event, Draft)]
    assert len(seen) == (done.steps if drafts else 0)
    # Each block: its steps one by one, then its text; only then the next block.
    turns = [kind for kind, _ in groupby(type(event) for event in events)]
    assert turns == ([Draft, Text] * done.blocks if drafts else [Text]) + [Done]
    for block, group in groupby(seen, key=lambda draft: draft.block):
        steps = [draft.step for draft in group]
        assert steps == list(range(1, len(steps) + 1)), f"block {block}"
    assert [block for block, _ in groupby(seen, key=lambda draft: draft.block)] == list(
        range(done.blocks if drafts else 0)
    )


def test_a_draft_describes_the_whole_canvas(engine: Engine) -> None:
    events = list(engine.stream(SHORT, SamplingParams(seed=1, drafts=True)))
    for draft in events:
        if not isinstance(draft, Draft):
            continue
        for name in ("ids", "tokens", "guess", "guess_tokens", "entropy", "accepted", "pinned"):
            assert len(getattr(draft, name)) == CANVAS, name
        assert not any(draft.pinned) and any(draft.accepted)
        assert all(nats >= 0 for nats in draft.entropy)
        for token, text in zip(draft.guess, draft.guess_tokens, strict=True):
            assert text == engine.tokenizer.decode([token], skip_control=True)
    last = [event for event in events if isinstance(event, Draft)][-1]
    assert list(last.guess) == answer_ids(SHORT)
    assert "".join(last.guess_tokens) == ANSWERS[SHORT]


def test_a_thought_is_told_apart_from_the_answer(engine: Engine) -> None:
    events = list(engine.stream(THOUGHT, SEEDED))
    assert [event for event in events if isinstance(event, Text)] == [
        Text(text="hm", is_thought=True),
        Text(text="yes"),
    ]
    done = events[-1]
    assert isinstance(done, Done)
    assert (done.reply.thought, done.reply.answer, done.text) == ("hm", "yes", "yes")


def test_no_text_holds_half_a_character(engine: Engine) -> None:
    """The bytes of one character lie in two blocks."""
    face = engine.tokenizer.encode("\U0001f600")
    assert LONG_IDS[CANVAS - 2 : CANVAS + 2] == face
    texts = [e.text for e in engine.stream(LONG, SEEDED) if isinstance(e, Text)]
    assert len(texts) == 3
    assert not any("\ufffd" in text for text in texts)
    assert texts[1].startswith("\U0001f600")


def test_done_tells_what_the_request_took(engine: Engine) -> None:
    done = engine.generate(LONG, SEEDED)
    assert done.prompt_tokens == len(ask(LONG).ids)
    assert done.tokens == len(LONG_IDS)
    assert done.blocks == 3 and done.steps >= 6
    assert done.tokens_per_step == pytest.approx(done.tokens / done.steps)
    assert 0 <= done.prefill_seconds <= done.seconds
    assert done.seed == 1


def test_a_canvas_out_of_steps_is_reported_as_unconverged(wild: Engine) -> None:
    done = wild.generate("x", SamplingParams(seed=1, max_tokens=2 * CANVAS))
    assert done.unconverged_blocks == done.blocks >= 1


def test_closing_a_stream_cancels_the_request(engine: Engine) -> None:
    stream = engine.stream(LONG, SamplingParams(seed=1, drafts=True))
    assert isinstance(stream, Iterator)
    assert isinstance(next(stream), Draft)
    stream.close()  # type: ignore[attr-defined]
    assert list(stream) == []
    never_begun = engine.stream(LONG, SEEDED)
    never_begun.close()  # type: ignore[attr-defined]
    assert engine.generate(LONG, SEEDED).text == ANSWERS[LONG]


def test_streams_side_by_side_do_not_disturb_each_other(engine: Engine) -> None:
    questions = [LONG, SHORT, THOUGHT]
    streams = [
        engine.stream(question, SamplingParams(seed=2, drafts=True)) for question in questions
    ]
    events: list[list[Any]] = [[] for _ in streams]
    while any(not seen or not isinstance(seen[-1], Done) for seen in events):
        for stream, seen in zip(streams, events, strict=True):
            seen += [event for event in [next(stream, None)] if event is not None]
    for question, seen in zip(questions, events, strict=True):
        assert answer(seen) == TEXTS[question]
        alone = engine.generate(question, SamplingParams(seed=2))
        assert (seen[-1].steps, seen[-1].tokens) == (alone.steps, alone.tokens)


# --- seeds


def guesses(engine: Engine, seed: int | None, **options: Any) -> tuple[list[Any], int]:
    events = list(engine.stream("x", SamplingParams(seed=seed, drafts=True, **options)))
    drafts = [(event.ids, event.guess) for event in events if isinstance(event, Draft)]
    return drafts, events[-1].seed  # type: ignore[union-attr]


def test_the_same_seed_gives_the_same_canvases_and_another_does_not(wild: Engine) -> None:
    assert guesses(wild, 7) == guesses(wild, 7)
    assert guesses(wild, 7)[0] != guesses(wild, 8)[0]


def test_a_drawn_seed_is_reported_and_can_be_used_again(wild: Engine) -> None:
    drafts, seed = guesses(wild, None)
    assert guesses(wild, seed) == (drafts, seed)
    assert guesses(wild, None)[1] != seed


# --- where an answer ends


@pytest.mark.parametrize("limit", [1, 5, 15, 16, 17, 31, 32, 33, len(LONG_IDS) - 1])
def test_max_tokens_cuts_exactly(engine: Engine, limit: int) -> None:
    done = engine.generate(LONG, SamplingParams(seed=1, max_tokens=limit))
    assert done.tokens == limit and done.finish == "length"
    assert done.text == engine.tokenizer.decode(LONG_IDS[:limit])
    assert done.blocks == -(-limit // CANVAS)


@pytest.mark.parametrize("limit", [len(LONG_IDS) + 1, 3 * CANVAS, 5 * CANVAS])
def test_a_limit_beyond_the_answer_does_not_matter(engine: Engine, limit: int) -> None:
    done = engine.generate(LONG, SamplingParams(seed=1, max_tokens=limit))
    assert (done.text, done.finish) == (ANSWERS[LONG], "stop")


def test_an_answer_ends_before_the_first_stop_id(engine: Engine) -> None:
    done = engine.generate(SHORT, SEEDED)
    assert done.tokens == answer_ids(SHORT).index(GENERATION.stop_ids[1])
    assert not done.reply.stray_tokens and "<turn|>" not in done.text


@pytest.mark.parametrize(
    ("stop", "text"),
    [
        (("two",), "one, "),
        (("one",), ""),
        ((".",), "one, two"),
        (("two.", ", "), "one"),
        (("nothing like it",), None),
        ((), None),
    ],
)
def test_a_stop_string_ends_the_answer_before_itself(
    engine: Engine, stop: tuple[str, ...], text: str | None
) -> None:
    events = list(engine.stream(SHORT, SamplingParams(seed=1, stop=stop)))
    done = events[-1]
    assert isinstance(done, Done)
    assert answer(events) == done.text == (ANSWERS[SHORT] if text is None else text)
    assert done.finish == ("stop" if text is None else "stop_string")


@pytest.mark.parametrize("stop", ["two", "one", ", t"])
def test_what_follows_a_stop_string_is_no_part_of_the_reply(engine: Engine, stop: str) -> None:
    """Neither its text nor its tokens, though the whole canvas was computed."""
    done = engine.generate(SHORT, SamplingParams(seed=1, stop=(stop,)))
    through = ANSWERS[SHORT][: ANSWERS[SHORT].index(stop) + len(stop)]
    assert done.tokens == len(engine.tokenizer.encode(through))


@pytest.mark.parametrize("stop", ["the\U0001f600, then", "second STOP", "cond STOP and"])
def test_a_stop_string_is_found_across_blocks(engine: Engine, stop: str) -> None:
    start, end = ANSWERS[LONG].index(stop), ANSWERS[LONG].index(stop) + len(stop)
    before = engine.tokenizer.encode(ANSWERS[LONG][:start])
    through = engine.tokenizer.encode(ANSWERS[LONG][:end])
    assert len(before) // CANVAS < (len(through) - 1) // CANVAS, "it lies within one block"
    events = list(engine.stream(LONG, SamplingParams(seed=1, stop=(stop,))))
    done = events[-1]
    assert isinstance(done, Done)
    assert answer(events) == done.text == ANSWERS[LONG][:start]
    assert done.finish == "stop_string"
    assert done.blocks == -(-len(through) // CANVAS), "it went on behind the stop string"


def test_a_stop_string_that_waited_for_a_longer_one_still_ends_the_answer(engine: Engine) -> None:
    """`7!?` may begin at the 7 until the answer is over; then the `!` is what stopped it."""
    done = engine.generate(LONG, SamplingParams(seed=1, stop=("7!?", "!")))
    assert (done.text, done.finish) == (ANSWERS[LONG][:-1], "stop_string")


def test_a_thought_may_speak_of_a_stop_string(engine: Engine) -> None:
    done = engine.generate(THOUGHT, SamplingParams(seed=1, stop=("hm",)))
    assert (done.reply.thought, done.text, done.finish) == ("hm", "yes", "stop")


# --- options


def test_an_option_that_is_none_is_as_the_checkpoint_says(engine: Engine) -> None:
    given = SamplingParams(
        seed=1,
        max_tokens=GENERATION.max_new_tokens,
        sampler=engine.sampler,
        canvas_length=CANVAS,
    )
    default, explicit = (engine.generate(LONG, options) for options in (SEEDED, given))
    assert (default.text, default.steps) == (explicit.text, explicit.steps)
    assert engine.sampler == Sampler() and engine.generation_config == GENERATION


def test_the_limit_of_the_checkpoint_holds_unless_another_is_given(wild: Engine) -> None:
    assert wild.generation_config.max_new_tokens == 3 * CANVAS
    assert wild.generate("x", SEEDED).tokens <= 3 * CANVAS
    assert wild.generate("x", SEEDED).blocks == 3


@pytest.mark.parametrize("length", [1, 5, CANVAS])
def test_a_shorter_canvas_can_be_chosen(engine: Engine, length: int) -> None:
    options = SamplingParams(seed=1, canvas_length=length, max_tokens=7, drafts=True)
    events = list(engine.stream(LONG, options))
    drafts = [event for event in events if isinstance(event, Draft)]
    assert {len(draft.ids) for draft in drafts} == {length}
    assert events[-1].blocks <= -(-7 // length)  # type: ignore[union-attr]


def lengths(engine: Engine, options: SamplingParams) -> list[int]:
    """The length of each canvas."""
    events = engine.stream("x", replace(options, drafts=True))
    seen = {event.block: len(event.ids) for event in events if isinstance(event, Draft)}
    return [length for _, length in sorted(seen.items())]


def in_short_canvases(length: int) -> LongReply:
    return LongReply(
        canvas_length=length,
        entropy_bound=4.0,
        t_max=0.9,
        t_min=0.3,
        max_denoising_steps=5,
        reach=3,
    )


def short_sampler(engine: Engine, params: SamplingParams) -> Sampler:
    policy = engine.generation("x", params).policy
    assert policy.long is not None
    return policy.long.sampler


@pytest.fixture(scope="session")
def shrinking(wild: Engine) -> Engine:
    """The same model, which says that long replies have canvases of half its length."""
    long = in_short_canvases(CANVAS // 2)
    model = random_model(replace(taught_config(), long_reply=long), seed=3)
    return Engine(model, wild.tokenizer, wild.template, wild.generation_config)


@pytest.mark.parametrize(
    ("limit", "expected"),
    [
        (1, [8]),
        (CANVAS - 8, [8]),
        (CANVAS, [8, 8]),
        (CANVAS + 1, [8, 8, 8]),
        (2 * CANVAS, [8, 8, 8, 8]),
    ],
)
def test_canvases_of_a_long_reply_are_as_short_as_the_model_was_trained_for(
    shrinking: Engine, wild: Engine, limit: int, expected: list[int]
) -> None:
    assert (CANVAS, LENGTH_MULTIPLE) == (16, 8)
    options = SamplingParams(seed=3, max_tokens=limit, drafts=True)
    first = next(event for event in shrinking.stream("x", options) if isinstance(event, Draft))
    assert len(first.ids) == CANVAS, "a whole one tells whether the reply is long"
    assert lengths(shrinking, options) == expected
    assert set(lengths(wild, options)) == {CANVAS}, "the model does not say so"
    assert shrinking.generate("x", options).tokens == wild.generate("x", options).tokens == limit


def test_a_long_reply_moves_as_its_model_says_unless_the_request_does(shrinking: Engine) -> None:
    options = SamplingParams(seed=2, max_tokens=CANVAS, drafts=True)
    free = short_sampler(shrinking, options)
    assert free.rule == SpacedEntropyBound(entropy_bound=4.0, reach=3) and free != shrinking.sampler
    assert (free.t_max, free.t_min, free.max_denoising_steps) == (0.9, 0.3, 5)

    def most_steps(options: SamplingParams) -> int:
        """Of a canvas that is not the first to be tried; noise does not converge."""
        events = [e for e in shrinking.stream("x", options) if isinstance(e, Draft)]
        return max(event.step for event in events if len(event.ids) < CANVAS)

    assert most_steps(options) == 5
    own = replace(options, sampler=Sampler(max_denoising_steps=7))
    assert short_sampler(shrinking, own) == own.sampler
    assert most_steps(own) == 7
    cold = replace(options, temperature=0.5)
    changed = replace(free, temperature=0.5)
    assert short_sampler(shrinking, cold) == changed, "a temperature changes draws alone"
    policy = shrinking.generation("x", cold).policy
    assert policy.next_canvas(1, 1).sampler == replace(shrinking.sampler, temperature=0.5)
    with pytest.raises(UsageError, match=r"temperature is -1; it must be 0 or more"):
        shrinking.generation("x", replace(options, temperature=-1))


def test_what_is_left_of_a_long_reply_is_rather_one_canvas_than_a_remnant(wild: Engine) -> None:
    model = random_model(replace(taught_config(), long_reply=in_short_canvases(6)), seed=3)
    engine = Engine(model, wild.tokenizer, wild.template, wild.generation_config)
    assert lengths(engine, SamplingParams(seed=2, max_tokens=14)) == [6, 8]
    assert lengths(engine, SamplingParams(seed=2, max_tokens=15)) == [6, 6, 4], (
        "no more than there is room for"
    )


@pytest.mark.parametrize(
    ("limit", "expected"),
    [(1, [16]), (CANVAS, [16]), (CANVAS + 1, [16, 8]), (CANVAS + 9, [16, 8, 8])],
)
def test_a_reply_that_seems_to_end_in_its_first_canvas_has_it_whole(
    shrinking: Engine, limit: int, expected: list[int]
) -> None:
    options = SamplingParams(seed=2, max_tokens=limit, drafts=True)
    first = next(event for event in shrinking.stream("x", options) if isinstance(event, Draft))
    # Tokens that are seen in the first step and do not stay, so that the reply goes on.
    stays = shrinking.generate(
        "x", replace(options, max_tokens=3 * CANVAS, canvas_length=CANVAS)
    ).ids
    seen = Counter(token for token in first.guess if token not in stays)
    ends = [token for token, count in seen.items() if count == 1]

    def ending_with(*stop_ids: int) -> Engine:
        generation = replace(shrinking.generation_config, stop_ids=stop_ids)
        return Engine(shrinking.model, shrinking.tokenizer, shrinking.template, generation)

    assert round(MIN_END_FRACTION * CANVAS) == 2
    assert lengths(ending_with(*ends[:2]), options) == expected
    assert lengths(ending_with(ends[0]), options)[0] < CANVAS, "one alone is not enough"


@pytest.mark.parametrize("options", [{"canvas_length": CANVAS}, {"initial_canvas": (5, -1, 5)}])
def test_a_canvas_that_the_request_chose_does_not_shrink(
    shrinking: Engine, options: dict[str, Any]
) -> None:
    assert (
        lengths(shrinking, SamplingParams(seed=2, max_tokens=CANVAS + 3, **options)) == [CANVAS] * 2
    )


def test_a_canvas_that_is_held_to_a_grammar_does_not_shrink(shrinking: Engine) -> None:
    guide = shrinking.constraint(regex="[a-z]{3,5}")
    assert lengths(shrinking, SamplingParams(seed=2, max_tokens=7, constraint=guide)) == [CANVAS]


@pytest.mark.parametrize(
    "rule", [EntropyBound(entropy_bound=0.5), SpacedEntropyBound(entropy_bound=4.0), Confidence()]
)
def test_a_sampler_of_ones_own_can_be_chosen(engine: Engine, rule: Any) -> None:
    done = engine.generate(
        SHORT, SamplingParams(seed=1, sampler=Sampler(rule=rule, max_denoising_steps=20))
    )
    assert done.text == ANSWERS[SHORT] and done.steps <= 20
    once = SamplingParams(seed=1, sampler=Sampler(max_denoising_steps=1), max_tokens=CANVAS)
    assert engine.generate(LONG, once).steps == 1


def test_pinned_tokens_stand_in_the_answer(engine: Engine) -> None:
    ids = engine.tokenizer.encode("ONE")
    pins = Pins(tuple(range(len(ids))), tuple(ids))
    events = list(engine.stream(SHORT, SamplingParams(seed=1, pins=pins, drafts=True)))
    for draft in (event for event in events if isinstance(event, Draft)):
        assert draft.pinned == (True,) * len(ids) + (False,) * (CANVAS - len(ids))
        assert draft.ids[: len(ids)] == draft.guess[: len(ids)] == tuple(ids)
    assert answer(events).startswith("ONE")
    assert answer(events) == "ONE, two."


def test_pins_belong_to_the_first_canvas_alone(engine: Engine) -> None:
    pins = Pins((1,), tuple(engine.tokenizer.encode("Z")))
    events = list(engine.stream(LONG, SamplingParams(seed=1, pins=pins, drafts=True)))
    assert answer(events).startswith("0Z23456789abc")
    drafts = [event for event in events if isinstance(event, Draft)]
    assert {draft.block for draft in drafts} == {0, 1, 2}
    assert all(any(draft.pinned) == (draft.block == 0) for draft in drafts)


# --- refusals

MANY = Prompt(text="", ids=tuple(range(2, 250)))


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"max_tokens": 0}, "max tokens is 0; it must be above 0"),
        ({"max_tokens": -4}, "max tokens is -4"),
        ({"canvas_length": 0}, "canvas length is 0"),
        ({"canvas_length": 17}, "canvas length is 17"),
        ({"seed": -1}, "seed is -1"),
        ({"seed": 1 << 64}, "seed is 18446744073709551616"),
        ({"stop": ("a", "")}, "stop string is empty"),
        ({"pins": Pins((16,), (5,))}, "pin.*16"),
        ({"pins": Pins((-1,), (5,))}, "pin.*-1"),
        ({"pins": Pins((0,), (403,))}, "pin.*403"),
        ({"pins": Pins((0,), (-1,))}, "pin.*-1"),
        ({"pins": Pins((8,), (5,)), "canvas_length": 8}, "pin.*8"),
        ({"max_tokens": 300}, "the prompt has .* tokens and the answer may take 304"),
    ],
    ids=str,
)
def test_what_cannot_be_done_is_refused_by_the_call_itself(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], complaint: str
) -> None:
    """Not by the first event, and not after a prefill."""
    monkeypatch.setattr(engine.model, "stack", lambda *_: pytest.fail("the model was run"))
    with pytest.raises(UsageError, match=complaint):
        engine.stream(SHORT, SamplingParams(**{"seed": 1, **options}))


def test_a_prompt_that_is_too_long_is_refused_before_any_work(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine.model, "stack", lambda *_: pytest.fail("the model was run"))
    with pytest.raises(PromptTooLong, match=r"248 tokens and the answer may take 16.*holds 256"):
        engine.stream(MANY, SamplingParams(max_tokens=9))
    with pytest.raises(PromptTooLong, match="lower max tokens"):
        engine.generate("long " * 300)


def test_a_prompt_that_just_fits_is_answered(engine: Engine) -> None:
    fits = Prompt(text="", ids=tuple(range(2, 242)))
    done = engine.generate(fits, SamplingParams(seed=1, max_tokens=CANVAS))
    assert done.prompt_tokens == 240 and done.blocks == 1


def test_an_empty_prompt_is_refused(engine: Engine) -> None:
    with pytest.raises(UsageError, match="the prompt is empty"):
        engine.stream(Prompt(text="", ids=()), SEEDED)


def test_half_a_surrogate_pair_is_refused(engine: Engine) -> None:
    with pytest.raises(UsageError, match="surrogate"):
        engine.stream("hi \ud800", SEEDED)


# --- prompts


def test_a_string_is_a_users_message(engine: Engine) -> None:
    prompt = engine.prompt([Message(role="user", content=SHORT)])
    assert prompt == ask(SHORT)
    assert engine.generate(prompt, SEEDED).text == engine.generate(SHORT, SEEDED).text


def test_plain_text_gets_no_turns(engine: Engine) -> None:
    prompt = engine.plain_prompt("abc <|turn>")
    assert prompt.ids == (2, *engine.tokenizer.encode("abc <|turn>"))
    assert not any(map(engine.tokenizer.is_control, prompt.ids[1:]))
    assert engine.generate(prompt, SamplingParams(seed=1, max_tokens=4)).prompt_tokens == len(
        prompt.ids
    )


def test_a_checkpoint_without_template_takes_plain_text(checkpoint: Path, tmp_path: Path) -> None:
    bare = shutil.copytree(checkpoint, tmp_path / "bare")
    (bare / "chat_template.jinja").unlink()
    engine = Engine.load(bare, device="cpu", dtype="float32")
    assert engine.template is None
    done = engine.generate("abc", SamplingParams(seed=1, max_tokens=4))
    assert done.prompt_tokens == len(engine.plain_prompt("abc").ids)
    with pytest.raises(UsageError, match="no chat template"):
        engine.prompt([Message(role="user", content="hi")])


# --- checkpoints


def test_a_checkpoint_without_denoiser_is_refused_for_diffusion(
    checkpoint: Path, tmp_path: Path
) -> None:
    model = random_model(replace(taught_config(), family="gemma4"), seed=1)
    save_checkpoint(Checkpoint(model=model), tmp_path, tokenizer_from=checkpoint)
    engine = Engine.load(tmp_path, device="cpu", dtype="float32")
    with pytest.raises(UsageError, match=r"this checkpoint has no denoiser.*(AR|ar)"):
        engine.stream("hi", SEEDED)


def test_a_tokenizer_larger_than_its_model_is_refused() -> None:
    model = random_model(replace(taught_config(), vocab_size=300), seed=1)
    with pytest.raises(CheckpointError, match="knows 403 tokens, the model 300"):
        Engine(model, small_tokenizer(), None, GENERATION)


@pytest.mark.parametrize("missing", ["config.json", "tokenizer.json", "model.safetensors"])
def test_a_checkpoint_without_one_of_its_files_is_refused_by_name(
    checkpoint: Path, tmp_path: Path, missing: str
) -> None:
    part = shutil.copytree(checkpoint, tmp_path / "part")
    (part / missing).unlink()
    with pytest.raises(CheckpointError, match=missing):
        Engine.load(part, device="cpu")


def test_loading_reports_its_progress(checkpoint: Path) -> None:
    seen: list[tuple[int, int]] = []
    Engine.load(checkpoint, device="cpu", progress=lambda done, total: seen.append((done, total)))
    assert seen and seen[-1][0] == seen[-1][1]
    assert seen == sorted(seen)


@pytest.mark.parametrize(
    ("where", "complaint"),
    [
        ({"device": "cuda:7"}, "cuda:7"),
        ({"device": "toaster"}, "'toaster' is not known; use auto, cpu, cuda, cuda:N or mps"),
        ({"device": "meta"}, "'meta' is not supported"),
        ({"dtype": "int3"}, "'int3' is not known; use auto, float32, bfloat16, float16"),
    ],
    ids=str,
)
def test_a_device_or_type_that_is_not_there_is_refused(
    checkpoint: Path, where: dict[str, str], complaint: str
) -> None:
    with pytest.raises(DgemmaError, match=complaint):
        Engine.load(checkpoint, **{"device": "cpu", **where})
