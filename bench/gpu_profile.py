"""The kernels of one piece of work on a GPU: how many, and which take the time."""

from collections.abc import Callable

import torch


def profile(work: Callable[[], object], rows: int = 26) -> tuple[int, str]:
    """Launches, and the greatest kernels by name."""
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as watch

    work()
    torch.cuda.synchronize()
    with watch(activities=[ProfilerActivity.CUDA]) as seen:
        work()
        torch.cuda.synchronize()
    totals: dict[str, list[float]] = {}
    for event in seen.events():
        total = totals.setdefault(event.name[:60], [0, 0.0])
        total[0] += 1
        total[1] += event.device_time
    order = sorted(totals.items(), key=lambda item: -item[1][1])[:rows]
    lines = [f"{micros:9.0f} us {int(count):5} x {name}" for name, (count, micros) in order]
    return int(sum(count for count, _ in totals.values())), "\n".join(lines)
