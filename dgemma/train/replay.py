"""Work that is the same every time, given to a GPU as one piece: captured once, then replayed.

An optimizer's step is hundreds of short launches. Begun one by one they take the host longer than
the GPU, which then has nothing to do.
"""

import warnings
from collections.abc import Callable

import torch
from torch import Tensor

Work = Callable[[], Tensor]
Capture = Callable[[Work], Work]  # from work to what does it again, on the same memory
PLAIN = 3  # times that the work is done plainly, while memory is laid out and libraries set up


class Replay:
    """Does the work, a few times plainly, then as it was captured. `taken` and `again` change.

    The work must read and write the same memory every time, and decide nothing on the host.
    """

    def __init__(self, work: Work, capture: Capture) -> None:
        self.work, self.capture = work, capture
        self.taken = 0
        self.again: Work | None = None

    @property
    def is_captured(self) -> bool:
        return self.again not in (None, self.work)

    def __call__(self) -> Tensor:
        self.taken += 1
        if self.taken <= PLAIN:
            return self.work()
        if self.again is None:
            self.again = self._captured()
        return self.again()

    def _captured(self) -> Work:
        try:
            return self.capture(self.work)
        except RuntimeError as error:
            reason = str(error).splitlines()[0]
            warnings.warn(
                f"a step of the optimizer could not be captured ({reason}); it is taken launch by "
                "launch, and somewhat slower",
                stacklevel=2,
            )
            return self.work


def cuda_graph(work: Work) -> Work:
    """Capture work on the GPU. Nothing is computed yet; what it returns is a copy each time."""
    torch.cuda.synchronize()
    graph, before = torch.cuda.CUDAGraph(), torch.cuda.current_stream()
    try:
        # Other threads, such as those that fetch data, may go on.
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            out = work()
    finally:
        # A capture that fails does not leave its own stream.
        torch.cuda.set_stream(before)

    def again() -> Tensor:
        graph.replay()
        return out.clone()

    return again
