"""A pass that fails after its constraints were applied changes no answer when it is run again."""

from collections.abc import Callable
from typing import Any

import pytest

from dgemma.backends.reference import ReferenceBackend
from dgemma.engine import Done, Engine, Options
from dgemma.engine.job import Job
from tests.constrain.random_engine import random_engine, random_prompt

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}


def answers(engine: Engine, step: Callable[[], None]) -> list[tuple[int, ...]]:
    guide = engine.guide(schema=SCHEMA)
    options = [
        Options(guide=guide, max_tokens=60, seed=1),
        Options(max_tokens=40, seed=2),
        Options(guide=guide, max_tokens=60, seed=3),
        Options(guide=guide, max_tokens=60, seed=4, mode="ar"),
    ]
    prompts = [random_prompt(seed) for seed in range(len(options))]
    jobs: list[Job] = [
        engine.submit(engine.plan(prompt, option))
        for prompt, option in zip(prompts, options, strict=True)
    ]
    while not all(job.is_over for job in jobs):
        step()
    assert all(job.error is None for job in jobs)
    return [event.ids for job in jobs for event in job.events if isinstance(event, Done)]


@pytest.mark.parametrize("seed", range(4))
def test_a_pass_that_fails_late_and_is_run_again_changes_no_answer(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = random_engine(seed)
    want = answers(engine, engine.step)
    passes = 0
    whole = ReferenceBackend._outputs

    def fails_twice_in_three(self: ReferenceBackend, *given: Any) -> Any:
        nonlocal passes
        passes += 1
        if passes % 3:
            raise RuntimeError("out of memory")
        return whole(self, *given)

    def step() -> None:
        for _ in range(2):
            with pytest.raises(RuntimeError, match="out of memory"):
                engine.step()
        engine.step()

    monkeypatch.setattr(ReferenceBackend, "_outputs", fails_twice_in_three)
    assert answers(engine, step) == want
    assert passes > 3
