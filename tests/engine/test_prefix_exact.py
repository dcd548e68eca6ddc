"""Reuse of a prefix does not change an answer, in 16 bits either."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from dgemma.engine import Engine, SamplingParams, core
from dgemma.text.chat import Prompt

CHUNK = 8


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch, checkpoint: Path) -> Engine:
    monkeypatch.setattr(core, "CPU_CHUNK_16", CHUNK)
    return Engine.load(checkpoint, device="cpu", dtype="bfloat16", quant="none")


def prompts() -> list[Prompt]:
    """Prompts that share beginnings of all lengths, and go on from replies."""
    ids = torch.randint(8, 250, (40,), generator=torch.Generator().manual_seed(0)).tolist()
    return [Prompt(text="", ids=tuple(ids[:n])) for n in (5, 8, 9, 17, 24, 25, 33, 40)]


def answers(engine: Engine, mode: str, forget: Callable[[], None]) -> list[tuple[int, ...]]:
    found = []
    for prompt in prompts():
        options = SamplingParams(seed=3, max_tokens=24, mode="ar" if mode == "ar" else "diffusion")
        done = engine.generate(prompt, options)
        found.append(done.ids)
        forget()
        # A second turn, which begins with the first one's reply.
        again = Prompt(text="", ids=(*prompt.ids, *done.ids[:7], 9))
        found.append(engine.generate(again, options).ids)
        forget()
    return found


@pytest.mark.parametrize("mode", ["diffusion", "ar"])
def test_answers_are_the_same_with_and_without_reuse(engine: Engine, mode: str) -> None:
    fresh = answers(engine, mode, engine.prefixes.clear)
    assert answers(engine, mode, lambda: None) == fresh


def test_prefixes_are_reused_at_boundaries_alone(engine: Engine) -> None:
    *_, long = prompts()
    options = SamplingParams(seed=3, max_tokens=8)
    assert engine.generate(long, options).reused_tokens == 0
    assert engine.generate(long, options).reused_tokens == 32
    shorter = Prompt(text="", ids=long.ids[:33])
    assert engine.generate(shorter, options).reused_tokens in (0, 32)


def test_float32_reuses_every_token(checkpoint: Path) -> None:
    engine = Engine.load(checkpoint, device="cpu", dtype="float32", quant="none")
    *_, long = prompts()
    engine.generate(long, SamplingParams(seed=3, max_tokens=8))
    assert engine.generate(long, SamplingParams(seed=3, max_tokens=8)).reused_tokens == 39
