"""How to cut the kernels' work: tries what is named, each part for some seconds.

    python bench/gpu_sweep.py canvas fp8 [--seconds 30]

What is found goes by hand into `ops/kernels/tiles.py`. Attention has its own: gpu_attention.py.
"""

import argparse
import itertools
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from gpu_check import (
    CANVAS,
    HALF,
    INNER,
    NUM_EXPERTS,
    TOP_K,
    WIDTH,
    expert_weights,
    micros,
    normal,
    routing,
)
from torch import Tensor

from dgemma.ops.fp8 import quantize
from dgemma.ops.kernels import experts
from dgemma.ops.kernels.tiles import Tile
from dgemma.weights.fp8 import quantize_stacked


@dataclass(frozen=True, slots=True)
class Search:
    """Something that can be cut in many ways."""

    work: Callable[[Any], object]
    candidates: Callable[[], Iterator[Any]]
    gbytes: float


def fp8_searches() -> dict[str, Search]:
    """A canvas's products in 8 bits."""
    up, down = (quantize_stacked(weight) for weight in expert_weights())
    ids_TK, _ = routing(CANVAS, "even")
    into = experts.buckets(ids_TK, NUM_EXPERTS)
    x, hidden = quantize(normal(CANVAS, WIDTH)), quantize(normal(CANVAS * TOP_K, INNER))
    for_up = experts.Scales(x.factor, up.factor, HALF)
    for_down = experts.Scales(hidden.factor, down.factor, HALF)
    return {
        "gate_up fp8": Search(
            lambda tile: experts.gate_up(x.numbers, up.numbers, into, TOP_K, tile, for_up),
            lambda: fp8_tiles((64, 128, 32)),
            1e-9 * up.numbers.numel(),
        ),
        "down fp8": Search(
            lambda tile: experts.down(hidden.numbers, down.numbers, into, tile, for_down),
            lambda: fp8_tiles((64, 128)),
            1e-9 * down.numbers.numel(),
        ),
    }


def fp8_tiles(columns: tuple[int, ...]) -> Iterator[Tile]:
    for width, depth, stages, swap in itertools.product(
        columns, (128, 256, 64), (4, 3, 2, 6), (True, False)
    ):
        if not (swap and width < 64):
            yield Tile(rows=32, columns=width, depth=depth, stages=stages, swap=swap, tma=True)


def expert_searches(tokens: int) -> dict[str, Search]:
    weights = expert_weights()
    ids_TK, _ = routing(tokens, "even")
    x_TD, into = normal(tokens, WIDTH), experts.buckets(ids_TK, NUM_EXPERTS)
    hidden_AI = normal(tokens * TOP_K, INNER)
    hit = len(ids_TK.unique())
    print(f"# {tokens} tokens: most rows of an expert {into.count_E.max().item()}, {hit} experts")

    def search(name: str, weight: Tensor, work: Callable[[Any], object]) -> Search:
        size = 2e-9 * weight[0].numel() * hit
        return Search(work, lambda: expert_tiles(name, tokens), size)

    up, down = weights
    return {
        f"gate_up {tokens}": search(
            "gate_up", up, lambda tile: experts.gate_up(x_TD, up, into, TOP_K, tile)
        ),
        f"down {tokens}": search(
            "down", down, lambda tile: experts.down(hidden_AI, down, into, tile)
        ),
    }


def expert_tiles(name: str, tokens: int) -> Iterator[Tile]:
    """The likeliest first."""
    columns = {
        1: {"gate_up": (32, 16, 64), "down": (32, 64, 16)},
        256: {"gate_up": (64, 32), "down": (64, 128)},
        4096: {"gate_up": (64, 128), "down": (128, 256)},
    }[tokens][name]
    rows = {1: (16,), 256: (32, 16), 4096: (128, 64)}[tokens]
    depths = {1: (128, 256, 64), 256: (128, 64), 4096: (64,)}[tokens]
    warps = (4, 8) if tokens > 1 else (4, 2)
    forms = ((True, True), (False, True), (False, False))
    for row, width, depth, warp, stages in itertools.product(
        rows, columns, depths, warps, (4, 3, 2)
    ):
        for swap, tma in forms:
            if not (swap and width < 64):
                yield Tile(
                    rows=row,
                    columns=width,
                    depth=depth,
                    warps=warp,
                    stages=stages,
                    swap=swap,
                    tma=tma,
                )


SEARCHES: dict[str, Callable[[], dict[str, Search]]] = {
    "canvas": lambda: expert_searches(CANVAS),
    "fp8": fp8_searches,
    "one": lambda: expert_searches(1),
    "many": lambda: expert_searches(4096),
}


def sweep(names: list[str], seconds: float) -> None:
    """The best cuts found in so many seconds for each."""
    for name in names:
        for what, search in SEARCHES[name]().items():
            found, end = [], time.monotonic() + seconds
            for form in search.candidates():
                if time.monotonic() > end:
                    break
                try:
                    took = micros(lambda search=search, form=form: search.work(form), 4)  # type: ignore[misc]
                except Exception:  # too much shared memory, or a shape it cannot compile
                    continue
                found.append((took, form))
            for took, form in sorted(found, key=lambda pair: pair[0])[:8]:
                rate = search.gbytes / took * 1e6
                print(f"sweep {what:20} {took:8.1f} us {rate:6.0f} GB/s {form}", flush=True)
            print(f"# {what}: {len(found)} tried", flush=True)
        torch.cuda.empty_cache()


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="+", choices=list(SEARCHES))
    parser.add_argument("--seconds", type=float, default=30.0)
    arguments = parser.parse_args()
    torch.manual_seed(0)
    sweep(arguments.names, arguments.seconds)


if __name__ == "__main__":
    main()
