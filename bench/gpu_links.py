"""The short kernels between a canvas's products, one by one, beside their earlier selves.

    python bench/gpu_links.py [--before FOLDER] [--repeats 20]

    merge    attention's parts as one row in 8 bits: at once, and merged first, then rounded
    choose   the router's scores in parts, experts, their shares and lists
    join     the stream behind attention, in 8 bits
    close    the stream behind a layer, in 8 bits

`--before`: a folder with `layer.py` and `router.py` of an earlier revision (`git show
REVISION:dgemma/ops/kernels/layer.py`); without it, the same code with the registers left to the
compiler stands beside (`join` is twice the same then). What is read comes from memory, as in a
step: the cache is filled with other things in between. Microseconds of the kernels alone, the
median, by the profiler; `same`: whether all bits are. `gpu_variants.py` takes both in a step:
`before=FOLDER`. The last line is JSON.
"""

import argparse
import importlib.util
import json
import statistics
import sys
from collections.abc import Callable
from datetime import date
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from gpu_measure import CANVAS, DEVICE, NUM_EXPERTS, TOP_K, WIDTH, normal
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from dgemma.device import describe_device
from dgemma.ops.fused import CloseWeights, JoinWeights
from dgemma.ops.kernels import attention, cuts, experts, layer, merge_8, router

EVICTED = 1 << 28  # bytes that are written in between: several times the cache
OURS = ("_merge", "_quantize", "_parts", "_choose", "_join", "_close")
HEADS = 16
Work = Callable[[], Any]


def loaded(folder: Path, name: str) -> ModuleType:
    """A module of kernels as a file has it, beside the one that is in use."""
    path = folder / f"{name}.py"
    if not path.exists():
        raise SystemExit(f"{path} is not there; write it with git show, see --help")
    spec = importlib.util.spec_from_file_location(f"before_{name}", path)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def took(work: Work, repeats: int) -> float:
    """Microseconds of our kernels in a call, with nothing of it in the cache."""
    evict = torch.empty(EVICTED, dtype=torch.int8, device=DEVICE)
    work()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        for number in range(repeats):
            evict.fill_(number)
            work()
        torch.cuda.synchronize()
    times: dict[str, list[float]] = {}
    for event in seen.events():
        if event.name in OURS:
            times.setdefault(event.name, []).append(event.device_time)
    return sum(statistics.median(found) for found in times.values())


def flat(found: Any) -> list[Tensor]:
    if isinstance(found, Tensor):
        return [found.view(torch.uint8)]
    return [] if found is None else [one for part in found for one in flat(part)]


def merges(width: int) -> tuple[Work, Work]:
    kv_heads = 8 if width == 256 else 2
    form = attention.cut(CANVAS * HEADS // kv_heads, kv_heads, width)
    out_PLNH = normal(form.parts, CANVAS, HEADS, width, dtype=torch.float16)
    log_PLN = normal(form.parts, CANVAS, HEADS, dtype=torch.float32)

    def apart() -> tuple[Tensor, Tensor]:
        out_LNH = torch.empty(CANVAS, HEADS, width, dtype=torch.bfloat16, device=DEVICE)
        attention.merge(out_PLNH, log_PLN, out_LNH)
        return experts.quantize(out_LNH.flatten(1))

    return apart, lambda: merge_8.merge(out_PLNH, log_PLN, torch.bfloat16)


def choosing(of: Any) -> Work:
    x_TD, weight_ED = normal(CANVAS, WIDTH), normal(NUM_EXPERTS, WIDTH, scale=WIDTH**-0.5)
    scale_E = 1 + normal(NUM_EXPERTS, scale=0.1)

    def work() -> tuple[Tensor, Tensor, Tensor]:
        found = of.parts(x_TD, weight_ED)  # which also sets the counts to zero
        ids_TK, share_TK, into = of.choose(found, scale_E, TOP_K)
        return ids_TK, share_TK, into.count_E

    return work


def joining(of: Any) -> Work:
    x_TD = normal(CANVAS, WIDTH)
    parts_STD = normal(cuts.OUT.parts, CANVAS, WIDTH, dtype=torch.float32)
    weights = JoinWeights(*(1 + normal(WIDTH, scale=0.1) for _ in range(4)))
    return lambda: of.join(x_TD, parts_STD, weights, 1e-6, eight=True, experts_eight=True)


def closing(of: Any) -> Work:
    x_TD, out_AD = normal(CANVAS, WIDTH), normal(CANVAS * TOP_K, WIDTH)
    parts_STD = normal(cuts.DOWN.parts, CANVAS, WIDTH, dtype=torch.float32)
    share_TK = torch.rand(CANVAS, TOP_K, device=DEVICE)
    ones = [1 + normal(WIDTH, scale=0.1) for _ in range(4)]
    weights = CloseWeights(*ones[:3], normal(1), ones[3])
    return lambda: of.close(x_TD, parts_STD, (out_AD, share_TK), weights, 1e-6, eight=True)


def compared(before: Path | None) -> dict[str, tuple[Work, Work]]:
    """Each piece of work as it was and as it is, on the same numbers."""
    pairs = {"merge 256": merges(256), "merge 512": merges(512)}
    for name, make, now in (
        ("choose", choosing, router),
        ("join", joining, layer),
        ("close", closing, layer),
    ):
        name_of_file = now.__name__.rpartition(".")[2]
        was = left_alone(now) if before is None else loaded(before, name_of_file)
        pairs[name] = seeded(make, was), seeded(make, now)
    return pairs


def seeded(make: Callable[[Any], Work], of: Any) -> Work:
    torch.manual_seed(0)
    return make(of)


def left_alone(now: ModuleType) -> SimpleNamespace:
    """A module of kernels with the registers left to the compiler."""

    def wrapped(work: Callable[..., Any]) -> Callable[..., Any]:
        def call(*given: Any, **how: Any) -> Any:
            with patch.object(now, "REGISTERS", None):
                return work(*given, **how)

        return call

    names = ("parts", "choose") if now is router else ("join", "close")
    return SimpleNamespace(**{name: wrapped(getattr(now, name)) for name in names})


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--before", type=Path)
    parser.add_argument("--repeats", type=int, default=20)
    arguments = parser.parse_args()
    facts: dict[str, Any] = {"bench": "gpu_links", "date": str(date.today())}
    facts["device"] = describe_device(DEVICE)
    for name, (was, now) in compared(arguments.before).items():
        same = all(torch.equal(a, b) for a, b in zip(flat(was()), flat(now()), strict=True))
        found = [round(took(work, arguments.repeats), 2) for work in (was, now, was, now)]
        facts[name] = {"before": found[::2], "now": found[1::2], "same": same}
        print(f"{name:12} {json.dumps(facts[name])}", flush=True)
    print(json.dumps(facts))


if __name__ == "__main__":
    main()
