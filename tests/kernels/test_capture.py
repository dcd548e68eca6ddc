"""In whose memory work is tried before it is captured; what torch is asked for, without a GPU."""

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dgemma.graph import capture

POOL = (0, 7)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What torch was asked for, in order; a stream that is a name."""
    told: list[str] = []
    names = {"begin": "_cuda_beginAllocateCurrentThreadToPool", "end": "_cuda_endAllocateToPool"}
    for name, call in {**names, "release": "_cuda_releasePool"}.items():

        def note(device: int, pool: tuple[int, int], name: str = name) -> None:
            assert (device, pool) == (3, POOL)
            told.append(name)

        monkeypatch.setattr(torch._C, call, note, raising=False)
    stream = SimpleNamespace(wait_stream=lambda other: None)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: stream)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: told.append("wait"))
    monkeypatch.setattr(torch.cuda, "stream", nullcontext)
    return told


def warmed(work: Any) -> Any:
    stream: Any = SimpleNamespace(device_index=3, wait_stream=lambda other: None)
    return capture._warmed(POOL, stream, work)


def test_a_pool_is_drawn_from_while_work_is_tried_and_lasts_until_it_is_captured(
    calls: list[str],
) -> None:
    with warmed(lambda: calls.append("work")):
        calls.append("capture")
    assert calls == ["begin", *["work"] * capture.WARM_UPS, "end", "wait", "capture", "release"]


def test_a_pool_is_left_alone_when_work_or_its_capture_fails(calls: list[str]) -> None:
    def fails() -> None:
        raise RuntimeError("no memory")

    with pytest.raises(RuntimeError, match="no memory"), warmed(fails):
        pytest.fail("it is not captured")
    assert calls == ["begin", "end", "release"]
    calls.clear()
    with pytest.raises(RuntimeError, match="no memory"), warmed(lambda: None):
        fails()
    assert calls == ["begin", "end", "wait", "release"]
