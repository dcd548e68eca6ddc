"""Whatever a model writes, a finished text is in its language, and a streamed one on its way there.

The models are random: nothing they want has to do with what they may. Judges are jsonschema and re.
"""

import math
import re
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from dgemma.constrain.constrained_canvas import ConstrainedCanvas
from dgemma.constrain.matcher import Completion, Constraint
from dgemma.constrain.shortest_completion import CompletionSearch
from dgemma.diffusion.canvas import NO_PINS, Pins, initial_canvas
from dgemma.diffusion.logit_stats import PositionStats
from dgemma.diffusion.reference_step import self_conditioned
from dgemma.diffusion.sampler import StepView
from dgemma.engine import Done, Draft, Engine, Mode, Retry, SamplingParams, Text
from dgemma.errors import UsageError
from dgemma.text.chat import ChatTemplate, Message, Prompt
from dgemma.text.tokenizer import Tokenizer
from tests.constrain.languages import Language, languages, schema_language, schemas
from tests.constrain.random_engine import (
    CLOSE,
    EOS,
    OPEN,
    RESPONSE,
    TOKENIZER,
    TURN,
    random_engine,
    random_prompt,
)
from tests.text.small import TEMPLATE, make_backend

FORM = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["red", "green"]}, "minItems": 1},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
# To shrink an example would take many runs of a model.
some = settings(max_examples=25, deadline=None, database=None, phases=[Phase.generate])
few = settings(some, max_examples=12)
many = settings(some, max_examples=80)


@dataclass(frozen=True)
class Request:
    """A random model, prompt and constraint."""

    engine: Engine
    prompt: Prompt
    language: Language
    options: SamplingParams

    @property
    def guide(self) -> Constraint:
        assert self.options.constraint is not None
        return self.options.constraint

    def shortest_fits(self) -> bool:
        shortest = self.guide.shortest
        needed = self.prompt.in_thought + len(shortest.tokens if shortest else ())
        return shortest is not None and needed <= (self.options.max_tokens or 0)


@st.composite
def requests(draw: Any, kinds: st.SearchStrategy[Language] | None = None) -> Request:
    engine = random_engine(draw(st.integers(0, 8)), draw(st.sampled_from([4, 16, 33])))
    language = draw(languages() if kinds is None else kinds)
    mode: Mode = draw(st.sampled_from(["diffusion", "diffusion", "ar", "hybrid"]))
    seed = draw(st.integers(0, 1000))
    options = SamplingParams(
        mode=mode,
        constraint=engine.constraint(**language.constraint),
        max_tokens=draw(st.sampled_from([1, 3, 8, 16, 40])),
        seed=seed,
        retries=draw(st.sampled_from([0, 0, 1])),
        temperature=draw(st.sampled_from([0.0, 1.0])) if mode == "ar" else None,
        max_steps=draw(st.sampled_from([None, None, 2, 9])),
    )
    in_thought = draw(st.sampled_from([False, False, True]))
    return Request(engine, random_prompt(seed, in_thought=in_thought), language, options)


def run(request: Request) -> tuple[Done, list[str]]:
    texts = []
    for event in request.engine.stream(request.prompt, request.options):
        if isinstance(event, Text) and not event.is_thought:
            texts.append(event.text)
        elif isinstance(event, Done):
            return event, texts
    raise AssertionError("no end")


@many
@given(requests())
def test_a_finished_text_is_in_its_language_and_one_that_cannot_finish_is_none(
    request: Request,
) -> None:
    done, texts = run(request)
    assert done.tokens <= (request.options.max_tokens or 0)
    if request.shortest_fits():
        assert done.finish != "budget" or request.options.max_steps
        assert (done.finish == "length") <= (done.forced_from is not None), "it is said where"
        assert (done.finish == "stop") <= (done.forced_from is None)
        assert request.language.holds(done.text), done.text
        assert "".join(texts) == done.text
    else:
        assert done.finish == "length" and "shortest" in done.fault
        assert done.text == "" and done.ids == () and texts == []


@some
@given(requests())
def test_what_is_streamed_can_always_be_completed(request: Request) -> None:
    _, texts = run(request)
    for count in range(1, len(texts) + 1):
        matcher = request.guide.matcher()
        ids = TOKENIZER.encode("".join(texts[:count]))
        assert matcher.consume(ids) == len(ids)
        assert matcher.complete(200) is not None


@few
@given(st.lists(requests(), min_size=2, max_size=4), st.integers(0, 2), st.sampled_from([4, 16]))
def test_a_request_gives_the_same_text_alone_or_in_a_batch(
    requests: list[Request], seed: int, canvas: int
) -> None:
    engine = random_engine(3 * seed, canvas)  # calm ones: others double any rounding each step
    prompts = [request.prompt for request in requests]
    options = [request.options for request in requests]
    together = engine.generate_all(prompts, options)
    alone = [engine.generate(*pair) for pair in zip(prompts, options, strict=True)]
    assert [done.ids for done in together] == [done.ids for done in alone]


@some
@given(requests(schemas().map(schema_language)), st.data())
def test_pins_and_a_schema_hold_together_or_the_request_fails(request: Request, data: Any) -> None:
    plain = SamplingParams(constraint=request.guide, max_tokens=40, seed=3, retries=0)
    first = request.engine.generate(request.prompt.__class__(text="", ids=(300,)), plain)
    ids = [*first.ids, TURN][: request.engine.model.config.canvas_length]
    places = sorted(data.draw(st.sets(st.integers(0, len(ids) - 1), min_size=1)))
    tokens = [ids[place] for place in places]
    if data.draw(st.booleans()):  # nothing says that there is a way through these
        tokens[-1] = data.draw(st.integers(0, TOKENIZER.vocab_size - 1))
    pins = Pins(tuple(places), tuple(tokens))
    options = SamplingParams(constraint=request.guide, max_tokens=40, seed=4, retries=0, pins=pins)
    done = request.engine.generate(request.prompt.__class__(text="", ids=(300,)), options)
    if done.fault:
        assert done.finish in ("fault", "length")
        assert done.text == "" and done.ids == ()
        return
    assert request.language.holds(done.text)
    ends = (EOS, TURN, RESPONSE)
    for place, token in zip(places, tokens, strict=True):
        is_held = place < len(done.ids) and done.ids[place] == token
        assert is_held or (token in ends and place >= len(done.ids))


def test_pinned_parts_of_a_form_are_kept_and_the_holes_filled() -> None:
    engine = random_engine(1, 40)
    skeleton = TOKENIZER.encode('{"name":"???","age":??,"tags":["red"]}')
    hole = TOKENIZER.encode("?")[0]
    kept = [(place, token) for place, token in enumerate(skeleton) if token != hole]
    pins = Pins(tuple(p for p, _ in kept), tuple(t for _, t in kept))
    guide = engine.constraint(schema=FORM)
    done = engine.generate(
        random_prompt(1), SamplingParams(constraint=guide, pins=pins, seed=1, max_tokens=40)
    )
    assert schema_language(FORM).holds(done.text)
    assert len(done.ids) == len(skeleton)
    assert all(done.ids[place] == token for place, token in kept)


@pytest.mark.parametrize("seed", range(6))
def test_pins_are_held_behind_a_thought(seed: int) -> None:
    engine = random_engine(seed)
    prompt = engine.prompt([Message(role="user", content="the")], thinking=True)
    pins = Pins((3, 5), tuple(TOKENIZER.encode("xy")))
    options = SamplingParams(seed=seed, max_tokens=48, retries=0, pins=pins)
    done = engine.generate(prompt, options, regex="[a-z]{8,}")
    text = done.ids[done.ids.index(CLOSE) + 1 :]
    assert not done.fault and re.fullmatch("[a-z]{8,}", done.text)
    assert (text[3], text[5]) == pins.tokens


def test_pins_that_no_time_was_left_for_are_not_broken() -> None:
    pins = Pins((3,), tuple(TOKENIZER.encode("x")))
    options = SamplingParams(seed=1, max_seconds=1e-9, pins=pins)
    done = random_engine(1).generate(random_prompt(1), options, regex="[a-z]{8}")
    assert done.finish == "budget"
    assert done.text[3:4] == "x" or (done.text == "" and "pinned" in done.fault)


def test_impossible_pins_end_with_a_clear_error() -> None:
    engine = random_engine(1)
    pins = Pins((0,), tuple(TOKENIZER.encode("x")))
    done = engine.generate(random_prompt(1), SamplingParams(pins=pins, seed=1), schema=FORM)
    assert (done.finish, done.text) == ("fault", "")
    assert "pinned" in done.fault


@pytest.mark.parametrize("mode", ["diffusion", "ar", "hybrid"])
@pytest.mark.parametrize("seed", range(6))
def test_a_thought_is_free_and_the_text_behind_it_is_held(mode: Mode, seed: int) -> None:
    engine = random_engine(seed)
    prompt = engine.prompt([Message(role="user", content="the")], thinking=True)
    options = SamplingParams(mode=mode, seed=seed, max_tokens=48, retries=0)
    done = engine.generate(prompt, options, schema=FORM)
    assert not done.fault
    assert schema_language(FORM).holds(done.text)
    assert not done.reply.stray_tokens and not done.reply.broken_calls
    if mode == "diffusion":
        assert done.ids[0] == OPEN
    if done.ids[0] == OPEN:
        assert list(done.ids).count(CLOSE) == 1


def test_a_text_goes_over_several_blocks_and_its_parts_come_as_they_are_sure() -> None:
    engine = random_engine(2, 4)
    guide = engine.constraint(regex="[a-z]{20}-[0-9]{10}")
    events = list(
        engine.stream(random_prompt(2), SamplingParams(constraint=guide, seed=1, max_tokens=40))
    )
    done = events[-1]
    assert isinstance(done, Done) and done.blocks > 1
    assert sum(isinstance(event, Text) for event in events) == done.blocks


def test_forced_tokens_cost_no_steps() -> None:
    engine = random_engine(4, 33)
    fixed = "the call: {} thought"
    done = engine.generate(random_prompt(4), SamplingParams(seed=1, retries=0), choices=[fixed])
    assert (done.text, done.steps) == (fixed, 1)
    free = engine.generate(random_prompt(4), SamplingParams(seed=1, retries=0))
    assert free.steps / free.blocks > 1
    form = engine.generate(random_prompt(4), SamplingParams(seed=1, max_tokens=60), schema=FORM)
    assert form.tokens > 2 * form.steps > 0


def test_a_canvas_beyond_the_frontier_is_refined_and_not_held() -> None:
    engine = random_engine(5, 33)
    options = SamplingParams(seed=1, drafts=True, max_tokens=60, retries=0)
    events = engine.stream(random_prompt(5), options, schema=FORM)
    drafts = [event for event in events if isinstance(event, Draft)]
    for draft in drafts[:-1]:
        assert list(draft.pinned) == sorted(draft.pinned, reverse=True)  # the frontier is one
    assert all(drafts[-1].pinned)
    assert sum(drafts[0].pinned) < sum(drafts[1].pinned)
    assert any(sum(draft.accepted) > sum(draft.pinned) for draft in drafts)


def test_a_stop_where_the_text_cannot_have_ended_is_noise_again() -> None:
    engine = random_engine(0)
    frontier = ConstrainedCanvas(engine.constraint(regex="[xz]{10}y"))
    frontier.start(30)
    frontier.begin_block(NO_PINS, 10)
    ends_L, half_L = torch.full((16,), EOS), torch.full((16,), 0.5)
    noise_L = torch.arange(300, 316)
    stats = PositionStats(
        draw_T=ends_L, top_T=ends_L, entropy_T=half_L, top_p_T=half_L, current_p_T=half_L
    )
    canvas = replace(initial_canvas(ends_L), num_steps=1)
    look = torch.zeros(1, TOKENIZER.vocab_size).expand
    canvas = frontier.apply(canvas, StepView(stats, noise_L, lambda places: look(len(places), -1)))
    assert frontier.state.block == () and not canvas.pinned_L.any()
    assert canvas.tokens_L.tolist() == [*range(300, 311), *[EOS] * 5]
    assert not canvas.accepted_L[:11].any()
    soft_LD = torch.ones(16, engine.model.config.hidden_size)
    canvas = self_conditioned(engine.model, canvas, soft_LD)
    assert canvas.soft_LD is not None and canvas.reopened_L is None
    assert canvas.soft_LD[:, 0].tolist() == [0.0] * 11 + [1.0] * 5


def test_where_no_more_ends_can_be_found_the_known_one_is_taken() -> None:
    frontier = ConstrainedCanvas(random_engine(0).constraint(regex="[ab]{3,}c"))
    frontier.start(30)
    logits_V = torch.zeros(TOKENIZER.vocab_size)
    logits_V[TOKENIZER.encode("a")] = 9.0
    text = [
        frontier.next_token(logits_V, lambda masked_V: int(masked_V.argmax())) for _ in range(5)
    ]
    frontier.matcher.search_exhausted = True  # as at llguidance's limits
    while not frontier.state.is_complete:
        text.append(frontier.next_token(logits_V, lambda masked_V: int(masked_V.argmax())))
    assert TOKENIZER.decode(text) == "aaaaac"


def test_a_canvas_that_goes_wrong_is_done_again_from_where_it_began() -> None:
    engine = random_engine(1, 64)
    options = SamplingParams(seed=1, max_tokens=200, retries=1)
    events = list(engine.stream(random_prompt(1), options, regex="(ab){40}[xyz]{9}"))
    done = events[-1]
    assert [event.reason for event in events if isinstance(event, Retry)][:1] == ["repetition"]
    assert isinstance(done, Done) and not done.fault
    assert re.fullmatch("(ab){40}[xyz]{9}", done.text)


def test_weights_that_are_not_numbers_give_no_text() -> None:
    engine = random_engine(7, 12)  # nobody else's
    weight = engine.model.norm.weight
    before = weight.clone()
    with torch.no_grad():
        weight.fill_(torch.nan)
    try:
        for mode in ("diffusion", "ar"):
            options = SamplingParams(mode=mode, seed=1, retries=0)
            done = engine.generate(random_prompt(7), options, schema=FORM)
            assert (done.finish, done.fault, done.text) == ("fault", "not a number", "")
    finally:
        weight.copy_(before)


@pytest.mark.parametrize("mode", ["diffusion", "ar"])
def test_a_budget_of_steps_still_ends_in_a_text_of_the_language(mode: Mode) -> None:
    engine = random_engine(3)
    options = SamplingParams(mode=mode, seed=1, max_steps=1, max_tokens=48)
    done = engine.generate(random_prompt(3), options, schema=FORM)
    assert (done.finish, done.steps) == ("budget", 1)
    assert schema_language(FORM).holds(done.text)


ENDLESS = {
    "itself": {"$ref": "#"},
    "an object in itself": {
        "type": "object",
        "properties": {"a": {"$ref": "#"}},
        "required": ["a"],
    },
    "an array in itself": {"type": "array", "items": {"$ref": "#"}, "minItems": 1},
    "a long string": {"type": "string", "minLength": 100_000},
    "many items": {"type": "array", "items": {"type": "integer"}, "minItems": 100_000},
}


@pytest.mark.parametrize("mode", ["diffusion", "ar"])
@pytest.mark.parametrize("name", ENDLESS)
def test_what_has_no_end_ends_with_an_error_and_without_a_pass(name: str, mode: Mode) -> None:
    engine = random_engine(0)
    try:
        done = engine.generate(
            random_prompt(0), SamplingParams(mode=mode, seed=1), schema=ENDLESS[name]
        )
    except UsageError as error:
        assert "no text fits" in str(error)
        return
    assert (done.finish, done.text, done.steps) == ("length", "", 0)
    assert done.fault


def test_a_stop_string_is_refused_with_a_constraint() -> None:
    with pytest.raises(UsageError, match="stop string"):
        random_engine(0).generate("the", SamplingParams(stop=("x",)), schema=FORM)


def test_a_guide_is_given_once_and_to_its_own_engine() -> None:
    engine = random_engine(0)
    options = SamplingParams(constraint=engine.constraint(schema=FORM), seed=1, max_tokens=60)
    with pytest.raises(UsageError, match="given twice"):
        engine.generate("the", options, regex="a")
    assert schema_language(FORM).holds(engine.generate("the", options, regex=None).text)
    tokenizer = Tokenizer(make_backend())
    template = ChatTemplate(TEMPLATE, tokenizer)
    other = Engine(engine.model, tokenizer, template, engine.generation_config)
    with pytest.raises(UsageError, match="another engine"):
        other.generate("the", options)


def test_the_shortest_end_is_looked_for_before_a_longer_known_one_is_taken() -> None:
    frontier = ConstrainedCanvas(random_engine(0).constraint(regex="x{30}|xx[a-z]*"))
    frontier.start(8)
    assert frontier.state.completion is not None
    assert len(frontier.state.completion.tokens) == 2
    frontier.consume([TOKENIZER.encode("x")[0]] * 2)
    longer = Completion((1,) * 7, (1,) * 7, 0)
    frontier.state = replace(frontier.state, block=(1, 1), completion=longer)
    assert not frontier._must_close()
    assert frontier.state.completion is not None
    assert frontier.state.completion.tokens == ()


@pytest.mark.parametrize("mode", ["diffusion", "ar"])
def test_the_step_loop_searches_briefly_and_begins_without_a_search(
    mode: Mode, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, searches = random_engine(0), list[bool]()
    constraint = engine.constraint(regex="[a-c]{7,30}(, [a-c]{2})*!")
    run = CompletionSearch.run

    def counted(self: Any, *args: Any, is_brief: bool = False, **more: Any) -> Any:
        searches.append(is_brief)
        return run(self, *args, is_brief=is_brief, **more)

    monkeypatch.setattr(CompletionSearch, "run", counted)
    params = SamplingParams(mode=mode, max_tokens=20, seed=1, constraint=constraint)
    task = engine.generation(random_prompt(0), params)
    task.start(engine, math.inf)
    assert not searches, "all other requests would wait for it"
    task.close(engine)
    assert not engine.generate(random_prompt(0), params).fault
    assert searches and all(searches)


def test_one_request_that_fails_leaves_the_others_alone() -> None:
    engine = random_engine(6)
    guide = engine.constraint(schema=FORM)
    pins = Pins((0,), tuple(TOKENIZER.encode("x")))
    options = [SamplingParams(constraint=guide, seed=1, pins=p) for p in (NO_PINS, pins, NO_PINS)]
    dones = engine.generate_all([random_prompt(6)] * 3, options)
    assert [bool(done.fault) for done in dones] == [False, True, False]
    assert dones[0].text == dones[2].text


@pytest.mark.parametrize("mode", ["diffusion", "ar"])
def test_a_text_that_the_limit_ended_says_where_the_models_own_words_end(mode: Mode) -> None:
    """A random model hardly ever ends a string by itself, so the limit does."""
    engine = random_engine(1)
    story = {"type": "string"}
    params = SamplingParams(mode=mode, seed=1, max_tokens=12, retries=0)
    answers = [engine.generate(random_prompt(i), params, schema=story) for i in range(6)]
    ended = [done for done in answers if done.finish == "length"]
    assert ended
    for done in ended:
        assert done.forced_from is not None
        assert done.text[done.forced_from :] == '"'
        assert done.fault == ""
    free = engine.generate(random_prompt(1), params, choices=["yes"])
    assert (free.finish, free.forced_from) == ("stop", None), "the grammar alone wrote this"
