"""Work that is captured when it is first wanted, and replayed from then on."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

WARM_UPS = 2  # runs before a capture, in which kernels are compiled and libraries set up

Pool = Any  # a handle of torch's: memory that captures share, of which never two run at once


def new_pool(device: torch.device) -> Pool | None:
    return torch.cuda.graph_pool_handle() if device.type == "cuda" else None


class Graphs:
    """Captures by name. The work must read and write the same memory every time."""

    def __init__(self, pool: Pool | None = None, *, urgent: bool = False) -> None:
        """`urgent`: what runs beside the work, on streams of its own, gives way to it."""
        self.pool, self.priority = pool, -1 if urgent else 0
        self.captured: dict[str, torch.cuda.CUDAGraph] = {}

    def run(self, name: str, work: Callable[[], None], kept: Sequence[Tensor]) -> None:
        """Do the work; `kept` is what it changes, and what a warm-up has to leave as it was."""
        if all(tensor.device.type == "cpu" for tensor in kept):
            work()
            return
        if name not in self.captured:
            self.captured[name] = self._capture(work, kept)
        self.captured[name].replay()

    def _capture(self, work: Callable[[], None], kept: Sequence[Tensor]) -> torch.cuda.CUDAGraph:
        before = [tensor.clone() for tensor in kept]
        side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(WARM_UPS):
                work()
        torch.cuda.current_stream().wait_stream(side)
        torch.cuda.synchronize()
        for tensor, value in zip(kept, before, strict=True):
            tensor.copy_(value)
        del before
        torch.cuda.empty_cache()  # the capture brings memory of its own
        graph = torch.cuda.CUDAGraph()
        first = torch.cuda.Stream(priority=self.priority)  # type: ignore[no-untyped-call]
        # Other threads, such as a server's, may go on.
        mode = "thread_local"
        with torch.cuda.graph(graph, pool=self.pool, stream=first, capture_error_mode=mode):
            work()
        return graph
