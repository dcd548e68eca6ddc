"""Mode auto: plans from known costs, the switch of a reply, measuring and keeping the costs."""

from dataclasses import replace
from pathlib import Path
from threading import Event
from typing import Any

import numpy as np
import pytest

from dgemma.diffusion.canvas import Pins
from dgemma.diffusion.rules import Confidence
from dgemma.engine import Done, Draft, Engine, SamplingParams
from dgemma.engine.auto import GOAL, AutoSwitch, BreakEven, CanvasCost, lengths, load_break_even
from dgemma.engine.core import EngineHooks
from dgemma.errors import UsageError
from dgemma.weights.load import random_model
from tests.taught import CANVAS, LONG, SHORT, taught_config, untaught_engine

LONGEST = 512


def costs(
    step: float, steps: float, *, length: int = 256, prompt: float = 2.5, first: float = 0.5
) -> BreakEven:
    """Costs in units of an AR token; `step`: of a canvas, `first`: its first one, more or less."""
    return BreakEven(
        prompt_seconds=prompt,
        token_seconds=1.0,
        canvas_seconds=first,
        canvas=CanvasCost(length=length, steps=steps, step_seconds=step),
        is_restarted=False,
        constrained_seconds=20.0,
    )


FAST_CANVAS = costs(2.9, 24)  # like the released shapes on a GPU
SLOW_CANVAS = costs(60.0, 20)  # like a large canvas on a CPU
EVEN = costs(3.0, 14, length=64, prompt=2.0, first=2.5)  # like nano on a CPU
TABLES = (FAST_CANVAS, SLOW_CANVAS, EVEN)


def ratios(table: BreakEven, limit: int, num_first: int | None) -> "np.ndarray[Any, Any]":
    num_N = lengths(limit)
    return table.auto(num_N, num_first) / table.better(num_N)


def test_costs_of_known_steps_are_added_up() -> None:
    table = costs(3.0, 14, length=64, prompt=2.0, first=2.5)
    one, two, full, more = (np.array([n]) for n in (1.0, 2.0, 64.0, 128.0))
    assert table.ar(one)[0] == 2.0 and table.ar(two)[0] == 3.0
    assert table.diffusion(one)[0] == table.diffusion(full)[0] == 2.0 + 2.5 + 13 * 3.0
    assert table.diffusion(more)[0] == 2.0 + 2.5 + 27 * 3.0
    restarted = replace(table, is_restarted=True)
    assert restarted.diffusion(full)[0] == 2.0 + 2.5 + 14 * 3.0
    assert table.auto(two, 2)[0] == 3.0, "no canvas is tried"
    assert table.auto(np.array([3.0]), 2)[0] == 4.0 + 3.0, "one is tried in vain"
    assert table.auto(np.array([66.0]), 2)[0] == 3.0 + 14 * 3.0, "one goes on"
    assert table.auto(two, 0)[0] == 2.0 + 2.5 + 2.0, "one is tried with the prompt"


@pytest.mark.parametrize("table", TABLES)
def test_the_break_even_is_the_shortest_reply_that_diffusion_writes_faster(
    table: BreakEven,
) -> None:
    num_N = lengths(1024)
    is_faster_N = table.diffusion(num_N) < table.ar(num_N)
    if table.tokens is None:
        assert not is_faster_N.any()
    else:
        assert is_faster_N[table.tokens - 1] and not is_faster_N[: table.tokens - 1].any()


@pytest.mark.parametrize("table", TABLES)
@pytest.mark.parametrize("limit", [1, 3, 40, LONGEST])
def test_a_plan_states_its_worst_ratio_and_no_other_plan_is_nearer_to_the_goal(
    table: BreakEven, limit: int
) -> None:
    plan = table.plan(limit)
    assert plan.worst == pytest.approx(ratios(table, limit, plan.num_first).max())
    for other in (None, 0, 1, 5, 20):
        assert max(plan.worst, GOAL) <= max(ratios(table, limit, other).max(), GOAL) + 1e-9


def test_every_length_is_within_the_goal_where_a_canvas_hides_in_the_prompt() -> None:
    long_prompt = costs(2.9, 24, prompt=10.0)
    assert long_prompt.plan(LONGEST).worst <= GOAL
    assert SLOW_CANVAS.plan(LONGEST).worst == 1.0, "AR is always faster"
    for table in (FAST_CANVAS, costs(1.5, 24), costs(2.0, 40)):
        assert table.plan(LONGEST).worst <= GOAL, "a step is a small part of a canvas"
    for table in TABLES:
        assert table.plan(3).worst == 1.0, "a short limit is written in AR"


def test_no_length_costs_much_more_under_a_large_limit() -> None:
    for table in TABLES:
        num_first = table.plan(LONGEST).num_first
        ratio_N = ratios(table, LONGEST, num_first)
        assert ratio_N[2] <= GOAL, "three tokens"
        assert ratio_N[99:].max() <= GOAL and ratio_N.max() <= 1.25


def test_a_text_held_to_a_grammar_is_diffused_if_its_shortest_is_long_enough() -> None:
    assert not EVEN.diffuses_constrained(3, 200), "one of a few words"
    assert EVEN.diffuses_constrained(30, 200), "an object of several fields"
    assert not EVEN.diffuses_constrained(30, 15), "the limit is shorter"


# --- replies


@pytest.fixture(scope="module")
def wild() -> Engine:
    """An engine whose model was taught nothing, with known costs: a canvas is tried at once."""
    return untaught_engine()


AUTO = SamplingParams(mode="auto", seed=1, max_tokens=3 * CANVAS, retries=0)


def ends_after(num: int) -> AutoSwitch:
    return AutoSwitch(costs(1.5, 3, length=CANVAS), try_at=num)


def reply(engine: Engine, switch: AutoSwitch) -> tuple[Done, AutoSwitch | None]:
    """Answer in mode auto; returns the switch after the reply, too."""
    task = engine.generation("x", AUTO)
    task.auto = switch
    done: Done = engine.run_all([task])[0]
    return done, task.auto


def test_a_reply_begins_in_ar_and_switches_to_canvases_for_good(wild: Engine) -> None:
    wild.break_even = EVEN
    done, _ = reply(wild, ends_after(5))
    greedy = wild.generate("x", SamplingParams(mode="ar", max_tokens=5))
    assert done.ids[:5] == greedy.ids and len(done.logprobs) == 5
    assert done.tokens == 3 * CANVAS and done.blocks == 3 and done.mode == "auto"
    assert done.steps == 5 + 3 * 4
    drafts = [
        len(event.ids)
        for event in wild.stream("x", replace(AUTO, drafts=True, max_tokens=20))
        if hasattr(event, "guess")
    ]
    assert set(drafts) <= {8, 16}, "canvases are no longer than what may be written"


def test_a_first_step_that_predicts_an_end_leaves_the_reply_in_ar(wild: Engine) -> None:
    wild.break_even = EVEN
    done, switch = reply(wild, AutoSwitch(costs(100.0, 3, length=CANVAS), try_at=5))
    greedy = wild.generate("x", SamplingParams(mode="ar", max_tokens=3 * CANVAS))
    assert done.ids == greedy.ids and done.blocks == 0
    assert done.steps > greedy.steps, "the first step of a canvas was tried"
    assert (
        switch is not None
        and switch.try_at is not None
        and switch.try_at > 5
        and not switch.has_switched
    )


def test_what_needs_a_canvas_gets_one_and_a_short_limit_none(wild: Engine) -> None:
    wild.break_even = EVEN
    pinned = wild.generate("x", replace(AUTO, pins=Pins((0,), (300,)), max_tokens=CANVAS))
    assert pinned.ids[0] == 300 and not pinned.logprobs
    short = wild.generate("x", replace(AUTO, max_tokens=3))
    assert len(short.logprobs) == short.tokens == 3
    choice = wild.generate("x", AUTO, choices=["the", "call"])
    assert choice.text in ("the", "call") and choice.blocks == 0
    held = wild.generate("x", AUTO, regex="[0-9]{30}")
    assert held.text.isdecimal() and len(held.text) == 30
    assert held.blocks > 0 and not held.logprobs


def test_a_reply_is_continued_by_another_engine(wild: Engine) -> None:
    wild.break_even = costs(1.5, 3, length=CANVAS)
    params = replace(AUTO, commits=True)
    events = list(wild.stream("x", params))
    whole = events[-1]
    committed = tuple(event for event in events if hasattr(event, "logprob"))
    for count in (1, len(committed) - 1):
        rest = wild.generate("x", replace(AUTO, committed=committed[:count]))
        known = [token for commit in committed[:count] for token in commit.ids]
        assert list(rest.ids[: len(known)]) == known[: rest.tokens]
    assert isinstance(whole, Done)


def test_costs_are_measured_once_and_kept(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    engine = Engine.load(checkpoint, device="cpu", dtype="float32")
    assert engine.break_even is None
    for question in (SHORT, LONG):
        done = engine.generate(question, SamplingParams(mode="auto", seed=1))
        assert done.mode == "auto" and done.tokens > 0
    found = engine.break_even
    assert found is not None and found.token_seconds > 0 and found.canvas.length == CANVAS
    assert found.canvas.steps >= 1 and found.constrained_seconds > 0
    again = Engine.load(checkpoint, device="cpu", dtype="float32")
    assert again.break_even == found
    assert Engine.load(checkpoint, device="cpu", dtype="bfloat16").break_even is None
    quick = Engine.load(checkpoint, device="cpu", dtype="float32", rule=Confidence())
    quick.measure_break_even()
    assert quick.break_even is not None and load_break_even(again.identity or {}) == found
    assert Engine.load(checkpoint, device="cpu", dtype="float32", preset="fast").identity is None
    (file,) = (tmp_path / "dgemma").glob("break-even.json")
    assert again.identity is not None and load_break_even(again.identity) == found
    file.write_text(file.read_text().replace("constrained_seconds", "held_seconds"))
    assert load_break_even(again.identity) is None, "a key of an older version"
    file.write_text("[]")
    assert load_break_even(again.identity) is None


def test_a_served_engine_is_not_measured_by_the_thread_that_asks(wild: Engine) -> None:
    engine = Engine(wild.model, wild.tokenizer, wild.template, wild.generation_config)
    needs_costs = Event()
    engine.set_hooks(EngineHooks(on_missing_costs=needs_costs.set))
    engine.generation("x", replace(AUTO, mode="diffusion"))
    assert not needs_costs.is_set(), "no request has needed it"
    assert engine.generation("x", AUTO).params.mode == "diffusion"
    assert engine.break_even is None and needs_costs.is_set()
    engine.measure_break_even()
    assert engine.break_even is not None
    assert engine.generation("x", AUTO).params.mode == "auto"


def test_an_ar_checkpoint_is_written_in_ar(wild: Engine) -> None:
    config = replace(taught_config(), family="gemma4")
    model = random_model(config, seed=3)
    engine = Engine(model, wild.tokenizer, wild.template, wild.generation_config)
    assert engine.generate("x", replace(AUTO, max_tokens=4)).mode == "ar"
    shown = list(engine.stream("x", replace(AUTO, max_tokens=4, drafts=True)))
    assert not any(isinstance(event, Draft) for event in shown)
    with pytest.raises(UsageError, match="AR mode has no canvas"):
        engine.generate("x", replace(AUTO, canvas_length=4))
