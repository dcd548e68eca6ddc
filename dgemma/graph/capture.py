"""Work that is captured when it is first wanted, and replayed from then on."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

WARM_UPS = 2  # runs before a capture, in which kernels are compiled and libraries set up


class Graphs:
    """Captures by name. The work must read and write the same memory every time."""

    def __init__(self) -> None:
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
        graph = torch.cuda.CUDAGraph()
        # Other threads, such as a server's, may go on.
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            work()
        return graph
