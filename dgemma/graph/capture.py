"""Work that is captured when it is first wanted, and replayed from then on."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

WARM_UPS = 2  # runs before a capture, in which kernels are compiled and libraries set up
LARGE = 32 << 20  # bytes that are set aside on the host while a capture is made

Pool = Any  # a handle of torch's: memory that captures share, of which never two run at once


def new_pool(device: torch.device) -> Pool | None:
    return torch.cuda.graph_pool_handle() if device.type == "cuda" else None


_streams: dict[int, torch.cuda.Stream] = {}  # by device


def capture_stream(device: int) -> torch.cuda.Stream:
    """Where all work is tried and captured.

    One for all: libraries keep memory for each stream they have seen, 32 MiB on an H200. Of no
    high priority: kernels that are launched early would then wait in the places of those that run
    beside them, on streams of their own, and that others wait for.
    """
    if device not in _streams:
        _streams[device] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    return _streams[device]


class Graphs:
    """Captures by name. The work must read and write the same memory every time."""

    def __init__(self, pool: Pool | None = None) -> None:
        self.pool = pool
        self.captured: dict[str, torch.cuda.CUDAGraph] = {}

    def again(self, name: str) -> bool:
        """Replay what is captured; False, and nothing done, if it is not. Costs the host least."""
        graph = self.captured.get(name)
        if graph is not None:
            graph.replay()
        return graph is not None

    def run(self, name: str, work: Callable[[], None], kept: Sequence[Tensor]) -> None:
        """Do the work; `kept` is what it changes, and what a warm-up has to leave as it was."""
        if all(tensor.device.type == "cpu" for tensor in kept):
            work()
            return
        if name not in self.captured:
            self.captured[name] = self._capture(work, kept)
        self.captured[name].replay()

    def _capture(self, work: Callable[[], None], kept: Sequence[Tensor]) -> torch.cuda.CUDAGraph:
        torch.cuda.empty_cache()  # what was launched piece by piece has left memory behind
        before = [tensor.cpu() if tensor.nbytes > LARGE else tensor.clone() for tensor in kept]
        pool = torch.cuda.graph_pool_handle() if self.pool is None else self.pool
        stream = capture_stream(torch.cuda.current_device())
        with _warmed(pool, stream, work):
            for tensor, value in zip(kept, before, strict=True):
                tensor.copy_(value)
            del before
            torch.cuda.empty_cache()
            graph = torch.cuda.CUDAGraph()
            # Other threads, such as a server's, may go on.
            mode = "thread_local"
            capture = torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode=mode)
            # A capture that cannot be ended would leave its stream the current one.
            with torch.cuda.stream(stream), capture:
                work()
        return graph


@contextmanager
def _warmed(pool: Pool, stream: torch.cuda.Stream, work: Callable[[], None]) -> Iterator[None]:
    """Do work a few times before it is captured.

    It is done in the captures' own memory, which the capture then finds there: else as much again
    would be needed. A pool that no graph uses yet lasts until this ends.
    """
    device = stream.device_index
    stream.wait_stream(torch.cuda.current_stream())
    torch._C._cuda_beginAllocateCurrentThreadToPool(device, pool)
    try:
        try:
            with torch.cuda.stream(stream):
                for _ in range(WARM_UPS):
                    work()
        finally:
            torch._C._cuda_endAllocateToPool(device, pool)
        torch.cuda.current_stream().wait_stream(stream)
        torch.cuda.synchronize()
        yield
    finally:
        torch._C._cuda_releasePool(device, pool)
