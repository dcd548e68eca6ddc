"""Editing with real canvases: only what is opened changes, and warm starts are short."""

from dataclasses import replace

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from dgemma.engine import Draft, Engine, SamplingParams
from dgemma.errors import UsageError
from dgemma.programs.edit.edit import (
    EditParams,
    EditResult,
    edit,
    edit_program,
    rewrite,
    warm_canvas,
)
from dgemma.text.chat import Message
from tests.constrain.small_engines import (
    QUICK,
    REQUEST,
    RIGHT,
    WRONG,
    knowing_engine,
    random_engine,
)
from tests.taught import GENERATION
from tests.text.strategies import any_text

# A smaller example would cost more than it tells.
some = settings(
    max_examples=80, deadline=None, database=None, phases=[Phase.explicit, Phase.generate]
)
engines = st.builds(
    random_engine, st.integers(0, 2), st.sampled_from([6, 12]), st.sampled_from([160, 256])
)


@st.composite
def requests(draw: st.DrawFn) -> tuple[str, str | None, EditParams]:
    text = draw(any_text)[:20]
    places = sorted(draw(st.lists(st.integers(0, len(text)), max_size=4, unique=True)))
    spans = tuple(zip(places[::2], places[1::2], strict=False))
    options = EditParams(
        selection=draw(st.none() | st.just(spans)),
        strength=draw(st.none() | st.floats(0, 1)),
        passes=draw(st.none() | st.integers(1, 2)),
        seed=draw(st.integers(0, 99)),
        sampler=QUICK,
    )
    return text, draw(st.none() | st.just("Do it.")), options


def assert_local(edited: EditResult, selection: tuple[tuple[int, int], ...] | None) -> None:
    """Outside what was opened the old text stands, and nothing else."""
    rest = edited.text
    end = 0
    for start, stop in edited.opened:
        assert rest.startswith(edited.old[end:start])
        rest = rest[start - end :]
        # The next kept stretch says how long the new one is; changes are checked below.
        change = [c for c in edited.changed if start <= c.old_start and c.old_end <= stop]
        grown = sum(len(c.new) - len(c.old) for c in change)
        rest = rest[stop - start + grown :]
        end = stop
        if selection is not None:
            assert any(a <= start and stop <= b for a, b in selection)
    assert rest == edited.old[end:]
    back = edited.text
    for change in reversed(edited.changed):
        assert back[change.start : change.end] == change.new
        back = back[: change.start] + change.old + back[change.end :]
    assert back == edited.old
    edited.text.encode("utf-8")  # no half characters


# --- the promise


@some
@given(engines, requests())
def test_nothing_outside_what_is_opened_changes(
    engine: Engine, request: tuple[str, str | None, EditParams]
) -> None:
    text, instruction, options = request
    edited = edit(engine, text, instruction, options)
    spans = options.selection
    if spans is not None:  # touching spans are one
        spans = tuple((a, b) for a, b in spans if a < b)
    assert_local(edited, spans)
    assert not engine.scheduler.requests


def test_a_long_text_is_edited_in_windows() -> None:
    engine = random_engine(1, 12, 160)
    text = "".join(f"line {i} é中\n" for i in range(24))
    options = EditParams(seed=1, sampler=QUICK, strength=0.4)
    edited = edit(engine, text, "Change it.", options)
    assert_local(edited, None)
    assert len(edited.opened) > 3
    lines = edit(engine, text, "Change it.", EditParams(seed=1, sampler=QUICK, lines=(12, 13)))
    assert lines.text.split("\n")[:11] == text.split("\n")[:11]
    assert lines.text.endswith("".join(f"line {i} é中\n" for i in range(13, 24)))


def test_nothing_selected_is_nothing_done() -> None:
    edited = edit(random_engine(0), "some text", "Do it.", EditParams(selection=(), seed=1))
    assert (edited.text, edited.steps, edited.changed) == ("some text", 0, ())
    assert edit(random_engine(0), "", "Do it.", EditParams(seed=1)).text == ""


# --- what it does


@pytest.mark.parametrize("seed", range(3))
def test_what_is_wrong_is_found_and_corrected(seed: int) -> None:
    edited = edit(knowing_engine(), WRONG, REQUEST, EditParams(seed=seed))
    assert edited.text == RIGHT
    [change] = edited.changed
    assert (change.old, change.new) == ("a", "")
    assert edited.opened != ((0, len(WRONG)),)  # not all of it
    assert edited.diff("t") == "--- a/t\n+++ b/t\n@@ -1 +1 @@\n-{}\n{end}+{}\n{end}".format(
        WRONG, RIGHT, end="\\ No newline at end of file\n"
    )


@pytest.mark.parametrize("start", [3, 4])
def test_a_selected_word_is_opened_with_or_without_its_space(start: int) -> None:
    """A token may hold both; then the seam is healed."""
    engine = knowing_engine()
    chosen = EditParams(seed=1, selection=((start, 8),), strength=1)
    edited = edit(engine, WRONG, REQUEST, chosen)
    assert (edited.text, edited.opened) == (RIGHT, ((start, 8),))


def test_a_selection_without_doubts_is_opened_as_a_whole_unless_strength_is_given() -> None:
    engine, chosen = knowing_engine(), EditParams(seed=1, selection=((0, len(RIGHT)),))
    told = edit(engine, RIGHT, f"{REQUEST}\n\n{WRONG}", chosen)
    assert told.opened == ((0, len(RIGHT)),)
    held = edit(engine, RIGHT, f"{REQUEST}\n\n{WRONG}", replace(chosen, strength=0))
    assert held.opened != told.opened and held.text == RIGHT


def test_what_is_right_is_left_alone() -> None:
    edited = edit(knowing_engine(), RIGHT, f"{REQUEST}\n\n{WRONG}", EditParams(seed=1, strength=0))
    assert edited.text == RIGHT and not edited.changed and not edited.diff()


def test_strength_opens_more() -> None:
    def opened(strength: float) -> int:
        options = EditParams(seed=1, sampler=QUICK, strength=strength)
        edited = edit(knowing_engine(), WRONG, REQUEST, options)
        return sum(b - a for a, b in edited.opened)

    sizes = [opened(strength) for strength in (0.0, 0.5, 0.9, 1.0)]
    assert sizes == sorted(sizes) and 0 < sizes[0] < sizes[-1] == len(WRONG)


def test_drafts_are_reported() -> None:
    engine = random_engine(1)
    options = EditParams(seed=1, sampler=QUICK, strength=1, drafts=True)
    events = list(engine.follow(edit_program(engine, "some words", "Do it.", options)))
    assert isinstance(events[-1], EditResult) and len(events) > 1
    assert all(isinstance(event, Draft) for event in events[:-1])


# --- warm start


def test_an_old_version_with_a_few_words_changed_needs_fewer_steps() -> None:
    """On the built-in model: those that know their answers by heart find them in no time anyway."""
    engine = Engine.load("nano", device="cpu")
    chosen = SamplingParams(seed=1, max_tokens=64, canvas_length=64)  # the same canvas for both
    prompt = engine.plain_prompt("Once upon a time there was a little dog who lived in")
    from_noise = engine.generate(prompt, chosen)
    words = from_noise.text.split(" ")
    words[3:5] = ["purple", "seven"]
    from_old = rewrite(engine, prompt, " ".join(words), chosen)
    assert 2 * from_old.steps < from_noise.steps
    assert from_old.text != " ".join(words)


def test_an_old_version_is_noise_only_where_it_is_doubtful() -> None:
    engine, question = knowing_engine(), f"{REQUEST}\n\n{WRONG}"
    prompt = engine.prompt([Message(role="user", content=question)])
    canvas, old = engine.run(warm_canvas(engine, prompt, WRONG)), engine.tokenizer.encode(WRONG)
    held = [a == b for a, b in zip(canvas, old, strict=False) if a >= 0]
    assert all(held) and 0 < len(held) < len(old)
    assert canvas[-1] == GENERATION.stop_ids[0]
    assert rewrite(engine, question, WRONG, SamplingParams(seed=1)).text == RIGHT


def test_a_first_canvas_belongs_to_canvases() -> None:
    engine = random_engine(0)
    for mode in ("ar", "hybrid"):
        with pytest.raises(UsageError, match="an initial canvas"):
            rewrite(engine, "x", "old", SamplingParams(mode=mode))  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="a token is 9999"):
        engine.generate("x", SamplingParams(initial_canvas=(9999,)))


# --- refusals


@pytest.mark.parametrize(
    ("options", "phrase"),
    [
        (EditParams(strength=1.5), "strength is 1.5"),
        (EditParams(passes=0), "passes is 0"),
        (EditParams(lines=(1, 1), selection=()), "not both"),
        (EditParams(lines=(2, 9)), "not in a text of 1 lines"),
        (EditParams(selection=((0, 99),)), "is not one of a text"),
        (EditParams(seed=-1), "seed is -1"),
    ],
)
def test_wrong_options_are_refused(options: EditParams, phrase: str) -> None:
    with pytest.raises(UsageError, match=phrase):
        edit(random_engine(0), "text", "Do it.", options)


def test_an_instruction_needs_a_chat_form() -> None:
    engine = random_engine(0)
    plain = Engine(engine.model, engine.tokenizer, None, engine.generation_config)
    with pytest.raises(UsageError, match="no chat template"):
        edit(plain, "text", "Do it.")
    assert edit(plain, "text", None, EditParams(sampler=QUICK, seed=1)).old == "text"
