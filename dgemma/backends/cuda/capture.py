"""CUDA graphs by key: a pass runs eagerly the first time and is captured the second time.

The first run compiles kernels and sets libraries up, and its result counts, so that nothing is run
for nothing and no buffer has to be restored. A shape that never comes again is never captured.
"""

import logging
from collections.abc import Callable, Hashable
from threading import get_ident
from typing import Any

import torch

Pool = Any  # torch's handle of memory that captures share, of which never two run at once

logger = logging.getLogger("dgemma")

_streams: dict[int, torch.cuda.Stream] = {}  # by device


def capture_stream(device: int) -> torch.cuda.Stream:
    """One stream for all captures, since libraries keep 32 MiB for each stream they have seen.

    Default priority: with PDL, high-priority kernels would occupy SMs needed by the side stream
    they depend on.
    """
    if device not in _streams:
        _streams[device] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    return _streams[device]


class Graphs:
    """Captured passes of one device. A pass must read and write the same memory every time."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.pool: Pool | None = torch.cuda.graph_pool_handle() if device.type == "cuda" else None
        self.captured: dict[Hashable, torch.cuda.CUDAGraph | None] = {}
        # Keys and the threads that ran them eagerly: library handles are set up thread by thread.
        self.seen: set[tuple[Hashable, int]] = set()

    def run(self, key: Hashable, work: Callable[[], None]) -> None:
        """Run a pass: replay it if it is captured; capture it if it has run before."""
        has_run = (key, get_ident()) in self.seen
        if has_run and key not in self.captured and self.pool is not None:
            self.captured[key] = self._try_capture(work)
        graph = self.captured.get(key)
        if graph is None:
            work()
            self.seen.add((key, get_ident()))
        else:
            graph.replay()

    def _try_capture(self, work: Callable[[], None]) -> torch.cuda.CUDAGraph | None:
        """Capture a pass; None, and a warning, where it cannot be: it runs eagerly from then on."""
        try:
            return self._capture(work)
        except RuntimeError as error:
            reason = str(error).partition("\n")[0]
            logger.warning("a pass is not captured, and slower for it: %s", reason)
            if not any(self.captured.values()):
                self._renew_pool()
            return None

    def is_captured(self, key: Hashable) -> bool:
        return self.captured.get(key) is not None

    def clear(self) -> None:
        """Drop all captures; memory that no graph uses any more cannot be captured into again."""
        self.captured.clear()
        self.seen.clear()
        self._renew_pool()

    def _renew_pool(self) -> None:
        if self.pool is not None:
            self.pool = torch.cuda.graph_pool_handle()

    def _capture(self, work: Callable[[], None]) -> torch.cuda.CUDAGraph:
        torch.cuda.synchronize(self.device)
        torch.cuda.empty_cache()  # eager runs have left memory that the capture needs
        graph = torch.cuda.CUDAGraph()
        stream = capture_stream(torch.cuda.current_device())
        # Other threads, such as a server's, may go on.
        mode = "thread_local"
        capture = torch.cuda.graph(graph, pool=self.pool, stream=stream, capture_error_mode=mode)
        # A capture that cannot be ended would leave its stream the current one.
        with torch.cuda.stream(stream), capture:
            work()
        return graph
