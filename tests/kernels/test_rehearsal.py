"""Kernels compiled beforehand: what the rehearsal does, and what becomes of a start without it."""

from pathlib import Path

import pytest
import torch

from dgemma.graph import steppers
from dgemma.graph.check import DeviceFault
from dgemma.graph.record import recall, report
from tests.kernels import small
from tests.kernels.small import CPU, SMALL
from tests.kernels.test_interpreted import HERE, needs_triton, path_with_root, run

OF = {"device": "a GPU"}


@needs_triton
def test_a_start_is_rehearsed_on_a_gpu_that_is_not_here() -> None:
    file = str(HERE / "compile_rehearsal.py")
    options = ["-p", "no:cacheprovider", "-o", "python_files=compile_rehearsal.py"]
    out = run(
        *("-m", "pytest", *options, file),
        TRITON_INTERPRET="0",
        TRITON_DEFAULT_FP_FUSION="1",
        PYTHONPATH=path_with_root(),
    )
    assert " passed" in out
    assert "skipped" not in out


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[tuple[int, ...]]:
    """Sizes of the prompts of each rehearsal, all of which fail."""
    found: list[tuple[int, ...]] = []

    def fails(model: object, stack: object, prompts: tuple[int, ...]) -> int:
        found.append(prompts)
        raise TypeError("another Triton")

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(steppers, "rehearse", fails)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    return found


def test_a_rehearsal_that_fails_is_not_tried_again(calls: list[tuple[int, ...]]) -> None:
    model = small.model()
    for _ in range(2):
        steppers._compile_beforehand(model, steppers.Stack(model), OF)
    assert calls == [steppers.PROMPTS]
    assert recall(OF) is None  # nothing is known of the kernels
    assert set(report(SMALL, torch.float32, CPU).values()) != {"kernel"}
    steppers._compile_beforehand(model, steppers.Stack(model), {**OF, "form": "another"})
    assert len(calls) == 2


def test_a_device_that_died_in_it_is_told_apart(
    monkeypatch: pytest.MonkeyPatch, calls: list[tuple[int, ...]]
) -> None:
    def dead(device: torch.device) -> None:
        raise RuntimeError("an illegal address\nmore")

    monkeypatch.setattr(torch.cuda, "synchronize", dead)
    model = small.model()
    with pytest.raises(DeviceFault, match=r"an illegal address.*start again") as raised:
        steppers._compile_beforehand(model, steppers.Stack(model), OF)
    assert raised.value.verdicts == {}  # no family is to blame
    steppers._compile_beforehand(model, steppers.Stack(model), OF)
    assert len(calls) == 1
