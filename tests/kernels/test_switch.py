"""Which kernels run: decided once for a device, by checks that are remembered."""

import json
import logging
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from dgemma.graph import steppers
from dgemma.graph.check import LONGEST, DeviceFault, Verdicts, _untried, check
from dgemma.graph.record import MAX_ENTRIES, OF, SOFT, UNCHECKED, facts, recall, remember, report
from dgemma.graph.steppers import Fast, judge
from dgemma.model import Gemma
from dgemma.ops import fast
from dgemma.ops.fast import FAMILIES, decide, decided, has_all, is_on, reason_against, switched
from dgemma.stack import Stack
from tests.kernels import small
from tests.kernels.small import CPU, SMALL

PASSED: Verdicts = dict.fromkeys(FAMILIES, "")


@pytest.fixture(autouse=True)
def apart(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No test sees what another decided or remembered, or what the user's machine did."""
    monkeypatch.setattr(fast, "_on", {})
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for name in ("DGEMMA_PLAIN", "TRITON_INTERPRET"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def pretended(monkeypatch: pytest.MonkeyPatch) -> None:
    """A CPU that says it runs kernels, as under the interpreter."""
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setattr("dgemma.ops.fast.has_triton", lambda: True)
    monkeypatch.setattr("dgemma.graph.record.has_triton", lambda: False)


@pytest.mark.usefixtures("pretended")
def test_kernels_are_for_devices_that_have_them_and_nobody_who_wants_gradients(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    x = torch.zeros(2, 2)
    with torch.inference_mode():
        assert not is_on(x)  # until decided
    with switched(True):
        assert not is_on(x)
        with torch.inference_mode():
            assert is_on(x)
            with switched(False):
                assert not is_on(x)
            assert is_on(x, "experts")
    monkeypatch.setenv("DGEMMA_PLAIN", "1")
    with torch.inference_mode(), switched(True):
        assert not is_on(x)
    monkeypatch.delenv("DGEMMA_PLAIN")
    monkeypatch.delenv("TRITON_INTERPRET")
    assert "NVIDIA" in (reason_against(CPU) or "")
    with torch.inference_mode(), switched(True):
        assert not is_on(x)


def test_a_decision_is_for_one_device_and_family(monkeypatch: pytest.MonkeyPatch) -> None:
    decide(CPU, ["experts"])
    with torch.inference_mode():
        assert is_on(torch.zeros(1), "experts")
        assert not is_on(torch.zeros(1), "attention")
        assert not is_on(torch.zeros(1, device="meta"), "experts")
        monkeypatch.setenv("DGEMMA_PLAIN", "1")  # too late: it is asked where it is decided
        assert is_on(torch.zeros(1), "experts")
    assert not has_all(CPU)
    decide(CPU, FAMILIES)
    assert has_all(CPU)


def test_kernels_are_for_the_gpu_that_a_launch_goes_to(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fast, "has_triton", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    assert reason_against(torch.device("cuda")) is None
    assert reason_against(torch.device("cuda", 0)) is None
    assert "CUDA_VISIBLE_DEVICES=1" in (reason_against(torch.device("cuda", 1)) or "")


def test_what_was_found_of_16_bits_says_nothing_of_32() -> None:
    """Another model on the same GPU; row statistics read either."""
    gpu = torch.device("cuda", 0)
    decide(gpu, FAMILIES)
    with torch.inference_mode():
        for dtype, families in ((torch.bfloat16, set(FAMILIES)), (torch.float32, {"row_stats"})):
            x = SimpleNamespace(device=gpu, dtype=dtype)
            assert {f for f in FAMILIES if is_on(x, f)} == families  # type: ignore[arg-type]


def test_verdicts_are_remembered_for_what_they_hold_for() -> None:
    of = facts(SMALL, torch.float32, CPU)
    assert recall(of) is None
    remember(of, PASSED)
    assert recall(of) == PASSED
    for other in (
        facts(replace(SMALL, sliding_window=7), torch.float32, CPU),
        facts(SMALL, torch.bfloat16, CPU),
        {**of, "torch": "0"},
        {**of, "form": "other"},
    ):
        assert recall(other) is None
    remember(of, {**PASSED, "experts": "no"})
    assert recall(of) == {**PASSED, "experts": "no"}
    for number in range(MAX_ENTRIES):
        remember({**of, "form": str(number)}, PASSED)
    assert recall(of) is None  # the oldest goes


def test_a_damaged_or_unwritable_record_means_another_check(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    of = facts(SMALL, torch.float32, CPU)
    remember(of, PASSED)
    (file,) = (tmp_path / "dgemma").iterdir()
    for text in ("{", "[1]", "{}", json.dumps([{"facts": of}])):
        file.write_text(text)
        assert recall(of) is None
    file.unlink()
    blocked = tmp_path / "file"
    blocked.write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(blocked))
    remember(of, PASSED)
    assert recall(of) is None


@pytest.mark.usefixtures("pretended")
def test_what_a_person_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    of = facts(SMALL, torch.float32, CPU)
    assert set(report(SMALL, torch.float32, CPU).values()) == {UNCHECKED}
    assert set(report(None, torch.float32, CPU).values()) == {UNCHECKED}
    remember({**of, "form": "a"}, PASSED)
    assert set(report(SMALL, torch.float32, CPU).values()) == {"kernel"}
    remember({**of, "form": "b"}, {**PASSED, "layer": "it is off"})
    told = report(SMALL, torch.float32, CPU)
    assert told["layer"] == "plain: it is off" and told["experts"] == "kernel"
    remember({**of, "form": "b", OF: SOFT}, {"row_stats": ""})
    assert report(SMALL, torch.float32, CPU) == told
    remember({**of, "form": "b", OF: SOFT}, {"row_stats": "far off"})
    told = report(SMALL, torch.float32, CPU)
    assert told["row_stats"] == "kernel; soft embeddings in 16 bits: far off"
    # A start that ended in the middle has not found out the rest.
    remember({**of, "form": "a"}, {"experts": ""})
    told = report(SMALL, torch.float32, CPU)
    assert (told["experts"], told["attention"]) == ("kernel", "kernel")  # by the other form
    remember({**of, "form": "b"}, {"experts": "it died"})
    told = report(SMALL, torch.float32, CPU)
    assert (told["experts"], told["attention"]) == ("plain: it died", UNCHECKED)
    monkeypatch.setenv("DGEMMA_PLAIN", "1")
    assert set(report(SMALL, torch.float32, CPU).values()) == {"plain: DGEMMA_PLAIN is set"}


@pytest.mark.usefixtures("pretended")
def test_a_family_that_fails_its_check_is_left_out_and_said_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    calls: list[Verdicts] = []

    def found(of: Gemma, stack: Stack, known: Verdicts) -> Verdicts:
        calls.append(known)
        return {**PASSED, "attention": "it is off by 3"}

    monkeypatch.setattr(steppers, "check", found)
    of = small.model()
    with caplog.at_level(logging.WARNING, logger="dgemma"):
        assert Fast.of(of) is None  # passes are captured with all families or not at all
    assert [record.getMessage() for record in caplog.records] == [
        "no kernels for attention: it is off by 3"
    ]
    assert decided(CPU) == {"experts", "layer", "row_stats"}
    assert of.runner is not None
    assert Fast.of(small.model()) is None
    assert len(calls) == 1  # remembered
    monkeypatch.setattr(steppers, "recall", lambda of: PASSED)
    assert Fast.of(small.model()) is not None
    assert has_all(CPU)


@pytest.mark.usefixtures("pretended")
def test_behind_a_check_that_took_the_device_down_the_next_start_goes_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fails(of: Gemma, stack: Stack, known: Verdicts) -> Verdicts:
        raise DeviceFault({"experts": "", "attention": "it died"}, "it died")

    monkeypatch.setattr(steppers, "check", fails)
    of = small.model()
    with pytest.raises(DeviceFault, match="start again"):
        Fast.of(of)
    monkeypatch.setattr(steppers, "check", lambda of, stack, known: {**PASSED, **known})
    assert judge(of, Stack(of)) == {**PASSED, "attention": "it died"}


def test_a_check_finds_out_what_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without kernels here: definitions stand in for them, right ones and wrong ones."""
    of = small.model()
    stack = Stack(of)
    known: Verdicts = dict.fromkeys(FAMILIES, "")
    monkeypatch.setattr("dgemma.graph.check.ByTable", lambda places, probe: wrong_attention)
    wrong_attention = lambda layer, qkv_TX, turns: qkv_TX[:, : layer.out.numbers_OI.shape[1]]  # noqa: E731
    del known["attention"]
    assert "it is off by" in check(of, stack, known)["attention"]

    def raises(*_: object) -> None:
        raise ValueError("no such shape\nand more")

    monkeypatch.setattr("dgemma.graph.check.ByTable", lambda places, probe: raises)
    raised = check(of, stack, known)["attention"]
    assert raised == "its check raised ValueError: no such shape"


def test_on_a_gpu_that_nobody_has_tried_the_longest_pass_is_tried_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gpu = torch.device("cuda", 0)
    for capability, length in (((8, 9), LONGEST), ((9, 0), 0), ((10, 0), LONGEST)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _, has=capability: has)
        assert _untried(gpu) == length
    assert _untried(CPU) == 0
