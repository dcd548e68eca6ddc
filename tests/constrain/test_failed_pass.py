"""A pass that fails after its constraints were applied changes no answer when it is run again."""

from collections.abc import Sequence
from typing import Any

import pytest

from dgemma.backends.reference import ReferenceBackend
from dgemma.engine import Engine, SamplingParams
from dgemma.engine.generation import Generation
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


def tasks(engine: Engine) -> list[Generation]:
    guide = engine.constraint(schema=SCHEMA)
    params = [
        SamplingParams(constraint=guide, max_tokens=60, seed=1),
        SamplingParams(max_tokens=40, seed=2),
        SamplingParams(constraint=guide, max_tokens=60, seed=3),
        SamplingParams(constraint=guide, max_tokens=60, seed=4, mode="ar"),
    ]
    return [engine.generation(random_prompt(seed), one) for seed, one in enumerate(params)]


def answers_alone(engine: Engine) -> list[tuple[int, ...]]:
    """Answer one after the other: sums of a larger batch are rounded differently."""
    ids = []
    for task in tasks(engine):
        engine.prefixes.clear()
        ids.append(engine.run_all([task])[0].ids)
    engine.prefixes.clear()
    return ids


@pytest.mark.parametrize("seed", range(4))
def test_a_pass_that_fails_late_and_is_run_again_changes_no_answer(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = random_engine(seed)
    expected = answers_alone(engine)
    passes = 0
    whole = ReferenceBackend._outputs

    def fails_for_several(self: ReferenceBackend, inputs: Sequence[Any], *rest: Any) -> Any:
        """A pass of several tasks fails, after their constraints were applied."""
        nonlocal passes
        passes += 1
        if len(inputs) > 1:
            raise RuntimeError("out of memory")
        return whole(self, inputs, *rest)

    monkeypatch.setattr(ReferenceBackend, "_outputs", fails_for_several)
    assert [done.ids for done in engine.run_all(tasks(engine))] == expected
    assert passes > 3 and engine.num_failed_passes > 0
    assert engine.num_consecutive_failures == 0
