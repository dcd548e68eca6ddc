"""What the scripts for a GPU share: released sizes, random tensors, times, errors, bandwidth."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from shapes import RELEASED
from torch import Tensor

DEVICE = torch.device("cuda")
HALF = torch.bfloat16
WIDTH, INNER = RELEASED.hidden_size, RELEASED.moe_intermediate_size
NUM_EXPERTS, TOP_K = RELEASED.num_experts, RELEASED.top_k_experts
VOCAB, CANVAS, CAP = RELEASED.vocab_size, RELEASED.canvas_length, 30.0


@dataclass(frozen=True, slots=True)
class Result:
    name: str
    error: float
    plain: float
    passed: bool
    micros: float
    plain_micros: float
    gbytes: float  # 10^9, least traffic

    def line(self, copy: float) -> str:
        rate, verdict = self.gbytes / self.micros * 1e6, "pass" if self.passed else "FAIL"
        return (
            f"{self.name:30} {self.error:9.2e} {self.plain:9.2e} {verdict:4}"
            f" {self.micros:9.1f} {self.plain_micros:9.1f} {rate:7.0f} {100 * rate / copy:5.1f} %"
        )


def micros(work: Callable[[], object], repeats: int = 10) -> float:
    """Time of one call inside a captured graph of several, best of five replays."""
    return micros_of([work], repeats)


def micros_of(works: Sequence[Callable[[], object]], repeats: int) -> float:
    """The same for calls in turn, such as with weights of their own: no cache then flatters."""
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        for work in works:
            work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(repeats):
            for work in works:
                work()
    best = float("inf")
    for _ in range(6):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        best = min(best, 1000 * begin.elapsed_time(end) / (repeats * len(works)))
    return best


def eager_micros(work: Callable[[], object], repeats: int = 5) -> float:
    """Time of one call as Python makes it, for what cannot be captured."""
    work()
    torch.cuda.synchronize()
    begin = time.perf_counter()
    for _ in range(repeats):
        work()
    torch.cuda.synchronize()
    return 1e6 * (time.perf_counter() - begin) / repeats


def copy_bandwidth() -> float:
    """GB/s of reading and writing 4 GiB, by the faster of two ways."""
    a = torch.zeros(1 << 30, dtype=torch.float32, device=DEVICE)
    b = torch.empty_like(a)
    took = min(micros(lambda: b.copy_(a), 3), micros(lambda: torch.neg(a, out=b), 3))
    return 8 * a.numel() / 1e3 / took


def largest(got: Tensor, want: Tensor) -> float:
    """Greatest difference, in units of the root mean square of what is wanted."""
    want = want.float()
    return ((got.float() - want).abs().max() / want.square().mean().sqrt()).item()


def normal(*shape: int, scale: float = 1.0, dtype: torch.dtype = HALF) -> Tensor:
    return torch.empty(shape, dtype=dtype, device=DEVICE).normal_(0, scale)
