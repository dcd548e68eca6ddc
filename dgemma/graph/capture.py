"""Work that is captured when it is first wanted, and replayed from then on."""

from collections.abc import Callable, Sequence
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
        before = [tensor.cpu() if tensor.nbytes > LARGE else tensor.clone() for tensor in kept]
        stream = capture_stream(torch.cuda.current_device())
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(WARM_UPS):
                work()
        torch.cuda.current_stream().wait_stream(stream)
        torch.cuda.synchronize()
        for tensor, value in zip(kept, before, strict=True):
            tensor.copy_(value)
        del before
        torch.cuda.empty_cache()  # the capture brings memory of its own
        graph = torch.cuda.CUDAGraph()
        # Other threads, such as a server's, may go on.
        mode = "thread_local"
        capture = torch.cuda.graph(graph, pool=self.pool, stream=stream, capture_error_mode=mode)
        # A capture that cannot be ended would leave its stream the current one.
        with torch.cuda.stream(stream), capture:
            work()
        return graph
