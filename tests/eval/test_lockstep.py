"""The batched path gives the engine's tokens, steps and texts, whatever the batch."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from dgemma.canvas import NO_PINS, Pins
from dgemma.config import GenerationConfig
from dgemma.engine import Done, Engine, Options
from dgemma.eval import lockstep
from dgemma.eval.lockstep import Outcome, greedy, settle, text_of
from dgemma.eval.sudoku import How, solve
from dgemma.eval.tasks.sudoku import solve_together
from dgemma.sampler import Confidence
from dgemma.text.chat import Prompt
from dgemma.weights.random import random_model
from tests.eval.conftest import CHATS
from tests.taught import CANVAS, taught_config
from tests.text.small import small_tokenizer
from tests.tiny import ours, shake, twin

WHOLE = Pins(tuple(range(CANVAS)), tuple(range(40, 40 + CANVAS)))  # settles at once
PINS = (NO_PINS, Pins((2, 7), (60, 1)), WHOLE, Pins((0,), (50,)))
SOLUTION = "534678912672195348198342567859761423426853791713924856961537284287419635345286179"


@pytest.fixture(scope="module")
def lively() -> Engine:
    """Random weights that say different things. Wilder ones turn a last bit into other words."""
    config = replace(taught_config(), family="diffusion_gemma")
    reference = twin(config)
    shake(reference, 5, 0.15)
    generation = GenerationConfig(stop_ids=(1, 16), max_new_tokens=CANVAS, max_denoising_steps=8)
    return Engine(ours(config, reference).double(), small_tokenizer(), None, generation)


def prompts(count: int) -> list[Prompt]:
    """Of two lengths, one beyond the sliding window."""
    generator = torch.Generator().manual_seed(0)
    lengths = [9 if i % 3 else 40 for i in range(count)]
    drawn = [torch.randint(30, 300, (n,), generator=generator).tolist() for n in lengths]
    return [Prompt(text="", ids=tuple(ids)) for ids in drawn]


def both(
    engine: Engine, options: Sequence[Options], given: Sequence[Prompt]
) -> tuple[list[Done], list[Outcome]]:
    done = engine.generate_all(given, options)
    plans = [engine.plan(p, o) for p, o in zip(given, options, strict=True)]
    if options[0].mode == "ar":
        return done, greedy(engine.model, plans, engine.stop_ids)
    return done, settle(engine.model, plans)


@pytest.mark.parametrize("rule", [None, Confidence(threshold=0.3, edit=0.4, drop=0.1)])
def test_canvases_are_the_engines(
    lively: Engine, rule: Confidence | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(lockstep.CANVAS_POSITIONS, "cpu", 3 * CANVAS)  # three rows a batch
    sampler = lively.sampler if rule is None else replace(lively.sampler, rule=rule)
    given = prompts(8)
    options = [
        Options(
            seed=i,
            retries=0,
            max_tokens=CANVAS,
            sampler=sampler,
            pins=PINS[i % 4],
        )
        for i in range(len(given))
    ]
    done, outcomes = both(lively, options, given)
    assert [o.steps for o in outcomes] == [d.steps for d in done]
    assert [not o.is_settled for o in outcomes] == [d.unsettled_blocks > 0 for d in done]
    texts = [
        text_of(lively.plan(p, o), outcome, lively.tokenizer, lively.stop_ids)
        for p, o, outcome in zip(given, options, outcomes, strict=True)
    ]
    assert texts == [d.text for d in done]
    assert len(set(texts)) == 7, "all but two, which are all pins, should differ"
    assert len({o.steps for o in outcomes}) > 1, "and take different times"


def test_greedy_replies_are_the_engines(
    lively: Engine, knowing: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(lockstep.AR_ROWS, "cpu", 2)
    given = prompts(5)
    options = [Options(mode="ar", max_tokens=12 + i, seed=0) for i in range(len(given))]
    done, outcomes = both(lively, options, given)
    assert [o.ids for o in outcomes] == [d.ids for d in done]
    assert [o.steps for o in outcomes] == [d.steps for d in done]
    asked = [knowing.plan(q).prompt for q in CHATS]
    done, outcomes = both(knowing, [replace(options[0], max_tokens=30)] * len(asked), asked)
    assert [o.is_settled for o in outcomes] == [d.finish == "stop" for d in done] == [True] * 3
    assert [o.ids for o in outcomes] == [d.ids for d in done]


def test_no_plans_are_no_outcomes(lively: Engine) -> None:
    assert settle(lively.model, []) == greedy(lively.model, [], lively.stop_ids) == []


@pytest.mark.parametrize(
    "how",
    [
        How(pinned=True, restarts=2),
        How(pinned=False, restarts=1, seed=3),
        How(mode="ar", pinned=False),
    ],
    ids=str,
)
def test_puzzles_together_come_out_as_by_the_engine(how: How) -> None:
    config = replace(taught_config(), canvas_length=192, max_position_embeddings=1024)
    generation = GenerationConfig(stop_ids=(1, 16), max_new_tokens=192, max_denoising_steps=2)
    engine = Engine(random_model(config, seed=0), small_tokenizer(), None, generation)
    puzzles = ["0" + SOLUTION[1:], SOLUTION[:80] + "0"]
    fast = solve_together(engine, puzzles, how)
    slow = solve(
        engine,
        puzzles,
        mode=how.mode,
        pinned=how.pinned,
        restarts=how.restarts,
        seed=how.seed,
    )
    assert [replace(one, seconds=0.0) for one in fast] == [
        replace(one, seconds=0.0) for one in slow
    ]
