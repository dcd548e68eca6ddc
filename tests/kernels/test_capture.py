"""Passes run eagerly first, are captured second, then replayed; torch is faked, without a GPU."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import cache
from threading import Thread, get_ident
from typing import Any

import pytest
import torch

from dgemma.backends.cuda import graphs as graphs_module
from dgemma.backends.cuda.graphs import Graphs

POOL, GPU = (0, 7), torch.device("cuda", 1)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Calls of torch, in order; a stream is a name."""
    said: list[str] = []

    class Graph:
        def replay(self) -> None:
            said.append("replay")

    @contextmanager
    def graph(of: Graph, *, pool: Any, stream: Any, capture_error_mode: str) -> Iterator[None]:
        assert (pool, stream, capture_error_mode) == (POOL, "stream", "thread_local")
        said.append("begin")
        try:
            yield
        finally:
            said.append("end")

    own = cache(graphs_module.capture_stream.__wrapped__)
    monkeypatch.setattr(graphs_module, "capture_stream", own)
    fakes = {
        "graph_pool_handle": lambda: POOL,
        "CUDAGraph": Graph,
        "graph": graph,
        "synchronize": lambda device: said.append("wait"),
        "empty_cache": lambda: said.append("empty"),
        "current_device": lambda: 1,
        "Stream": lambda device: "stream",
        "stream": lambda stream: nullcontext(),
    }
    for name, fake in fakes.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    return said


CAPTURED = ["wait", "empty", "begin", "work", "end", "replay"]


def test_a_pass_runs_eagerly_first_is_captured_second_and_then_replayed(calls: list[str]) -> None:
    graphs = Graphs(GPU)

    def work() -> None:
        calls.append("work")

    for want in (["work"], CAPTURED, ["replay"], ["replay"]):
        calls.clear()
        graphs.run(("step", 1, 0), work)
        assert calls == want


def test_each_key_has_a_graph_of_its_own(calls: list[str]) -> None:
    graphs = Graphs(GPU)
    for key in ("a", "b", "a"):
        graphs.run(key, lambda: calls.append("work"))
    assert calls == ["work", "work", *CAPTURED]
    assert set(graphs.captured) == {"a"}
    assert {key for key, _ in graphs.seen} == {"a", "b"}


def test_all_captures_share_one_stream(calls: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    for stream in (torch.cuda.Stream, None):
        monkeypatch.setattr(torch.cuda, "Stream", stream)
        graphs = Graphs(GPU)
        for _ in range(2):
            graphs.run("a", lambda: None)
        assert graphs.captured["a"] is not None


def test_what_was_captured_is_forgotten_with_its_buffers(calls: list[str]) -> None:
    graphs = Graphs(GPU)
    for _ in range(3):
        graphs.run("a", lambda: calls.append("work"))
    graphs.clear()
    calls.clear()
    graphs.run("a", lambda: calls.append("work"))
    assert calls == ["work"]


def test_a_pass_that_fails_has_not_run(calls: list[str]) -> None:
    graphs = Graphs(GPU)

    def fails() -> None:
        raise RuntimeError("no memory")

    with pytest.raises(RuntimeError, match="no memory"):
        graphs.run("a", fails)
    graphs.run("a", lambda: calls.append("work"))
    assert calls == ["work"]


def test_a_pass_that_cannot_be_captured_runs_eagerly_from_then_on(
    calls: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    """It is said once, and not tried again."""
    graphs = Graphs(GPU)

    def work() -> None:
        if calls[-1:] == ["begin"]:
            raise RuntimeError("operation not permitted\nand more")
        calls.append("work")

    graphs.run("a", work)
    calls.clear()
    with caplog.at_level(logging.WARNING, logger="dgemma"):
        for _ in range(2):
            graphs.run("a", work)
    assert calls == ["wait", "empty", "begin", "end", "work", "work"]
    (record,) = caplog.records
    assert record.getMessage().endswith(": operation not permitted")


def test_nothing_is_captured_on_a_cpu(calls: list[str]) -> None:
    graphs = Graphs(torch.device("cpu"))
    for _ in range(3):
        graphs.run("a", lambda: calls.append("work"))
    assert calls == ["work"] * 3
    assert not graphs.captured


def test_a_thread_captures_only_what_it_has_run_itself(calls: list[str]) -> None:
    """Library handles are set up thread by thread, which a capture does not allow."""
    graphs = Graphs(GPU)

    def run() -> None:
        graphs.run("a", lambda: calls.append("work"))

    run()
    other = Thread(target=run)
    other.start()
    other.join()
    assert calls == ["work", "work"]
    run()
    assert calls == ["work", "work", *CAPTURED]


def test_captures_after_all_were_dropped_have_memory_of_their_own(
    calls: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pools = iter([(0, 1), (0, 2), (0, 3)])
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: next(pools))
    monkeypatch.setattr(torch.cuda, "graph", lambda *_, **__: nullcontext())
    graphs = Graphs(GPU)
    assert graphs.pool == (0, 1)
    graphs.clear()
    assert graphs.pool == (0, 2)

    def fails() -> None:
        raise RuntimeError("out of memory")

    graphs.seen.add(("a", get_ident()))
    with pytest.raises(RuntimeError, match="out of memory"):
        graphs.run("a", fails)  # not captured, then run eagerly
    assert not graphs.is_captured("a")
    assert graphs.pool == (0, 3)
