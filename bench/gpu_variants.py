"""A captured step in several ways, in turn on one model: which of them is faster, and the same.

    python bench/gpu_variants.py [NAME ...] [--quant fp8] [--context 512 2048] [--rounds 5]
                                 [--steps 12] [--layers 30]

    soft-16           dense soft embeddings by the token table itself, not in 8 bits
    early-attention   attention of canvases launched early too, and the sum of its parts
    merge-apart       attention's parts merged in 16 bits, and rounded to 8 by another kernel
    registers-free    registers of the short kernels left to the compiler
    before=FOLDER     all that `gpu_links.py` compares as it was; or parts=, choose=, join=, close=
    QxK-wW-sS-pP      attention of narrow heads cut so: queries, keys, warps, stages, parts

Random weights that use every expert, as in `gpu_step.py`; flat logits, so that each step makes a
dense soft embedding. Milliseconds of a step, the median over all rounds, and the same of each
round. `same`: whether the tokens after a few steps are those of the step as it is. What fails is
printed, and the rest goes on. The last line is JSON.
"""

import argparse
import json
import re
import statistics
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from copy import copy
from dataclasses import replace
from datetime import date
from functools import partial
from pathlib import Path
from typing import Any

import torch
from gpu_links import loaded
from gpu_ours import DEVICE, Bench, built, wall
from shapes import shallow

from dgemma import stack
from dgemma.device import describe_device
from dgemma.graph import step as steps
from dgemma.graph.reading import dense_mean_16
from dgemma.graph.steppers import Fast
from dgemma.ops.kernels import attention, layer, merge_8, router
from dgemma.ops.kernels.launch import early

AS_IS = "as it is"
ALIKE = 3  # steps after which tokens are compared
CUTS = ("64x32-w4-s2-p4", "64x64-w4-s2-p2", "128x32-w8-s3-p4")
Way = Callable[[], AbstractContextManager[None]]


@contextmanager
def put(module: Any, name: str, value: Any) -> Iterator[None]:
    """Another function in a module's, while passes are captured."""
    usual = getattr(module, name)
    setattr(module, name, value)
    try:
        yield
    finally:
        setattr(module, name, usual)


def narrow(text: str) -> Way:
    """Attention of narrow heads, for canvases alone, cut as the text says."""
    found = re.fullmatch(r"(\d+)x(\d+)-w(\d+)-s(\d+)-p(\d+)", text)
    if found is None:
        raise SystemExit(f"no way is called {text}; see --help")
    queries, keys, warps, stages, parts = map(int, found.groups())
    usual = attention.cut

    def cut(count: int, kv_heads: int, width: int) -> attention.Cut:
        form = usual(count, kv_heads, width)
        if width > 256 or count <= 16:
            return form
        form = replace(form, queries=queries, keys=keys, warps=warps)
        return replace(form, stages=stages, parts=parts)

    return partial(put, attention, "cut", cut)


@contextmanager
def all_of(ways: list[Way]) -> Iterator[None]:
    with ExitStack() as entered:
        for way in ways:
            entered.enter_context(way())
        yield


def earlier(what: str, folder: Path) -> Way:
    """Short kernels as an earlier revision has them."""
    owners = {"parts": router, "choose": router, "join": layer, "close": layer}
    names = list(owners) if what == "before" else [what]
    ways: list[Way] = [way_of("merge-apart")] if what == "before" else []
    for name in names:
        was = loaded(folder, owners[name].__name__.rpartition(".")[2])
        ways.append(partial(put, owners[name], name, getattr(was, name)))
    return partial(all_of, ways)


def way_of(name: str) -> Way:
    what, _, folder = name.partition("=")
    if what in ("before", "parts", "choose", "join", "close") and folder:
        return earlier(what, Path(folder))
    told = (layer, router, merge_8)
    ways: dict[str, Way] = {
        AS_IS: nullcontext,
        "soft-16": partial(put, steps, "dense_mean", dense_mean_16),
        "registers-free": partial(all_of, [partial(put, of, "REGISTERS", None) for of in told]),
        "merge-apart": partial(put, stack, "reads_8", lambda *_: False),
        "early-attention": partial(put, attention, "_early", lambda length: early()),
    }
    return ways[name] if name in ways else narrow(name)


class Variant:
    """A step captured one way, and its times."""

    def __init__(self, name: str, bench: Bench) -> None:
        self.name, self.bench = name, copy(bench)
        self.rounds: list[float] = []
        self.bench.fast = Fast(bench.model, bench.fast.stack)
        self.bench.row = self.bench.fresh()
        with way_of(name)():
            for _ in range(ALIKE):
                self.bench.step()
        self.tokens_L = self.bench.row.canvas.tokens_L.clone()

    def run(self, count: int) -> None:
        self.rounds.append(wall(self.bench.step, count, warm=2).ms)

    def facts(self, as_it_is: "Variant") -> dict[str, Any]:
        return {
            "ms": round(statistics.median(self.rounds), 3),
            "rounds": [round(ms, 3) for ms in self.rounds],
            "same": torch.equal(self.tokens_L, as_it_is.tokens_L),
        }


def variants_of(names: list[str], bench: Bench) -> list[Variant]:
    found = []
    for name in names:
        try:
            found.append(Variant(name, bench))
        except Exception as error:
            print(f"{name:20} FAILED {type(error).__name__}: {str(error)[:300]}", flush=True)
    return found


def compared(names: list[str], bench: Bench, arguments: argparse.Namespace) -> dict[str, Any]:
    """In turn, so that a busy moment disturbs all alike."""
    variants = variants_of([AS_IS, *names], bench)
    for _ in range(arguments.rounds):
        for variant in variants:
            variant.run(arguments.steps)
    found = {variant.name: variant.facts(variants[0]) for variant in variants}
    for name, facts in found.items():
        print(f"{bench.cache.length:6} {name:20} {json.dumps(facts)}", flush=True)
    return found


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", default=["soft-16", "early-attention", *CUTS])
    parser.add_argument("--quant", choices=["fp8", "nvfp4"], default="fp8")
    parser.add_argument("--context", nargs="+", type=int, default=[512, 2048])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--layers", type=int, default=30)
    arguments = parser.parse_args()
    for name in arguments.names:
        way_of(name)
    model = built(shallow(arguments.layers), arguments.quant)
    fast = Fast.of(model)
    if fast is None:
        raise SystemExit("not all kernels passed their check here")
    facts: dict[str, Any] = {
        "bench": "gpu_variants",
        "date": str(date.today()),
        "device": describe_device(DEVICE),
        "quant": arguments.quant,
        "soft_bits": 16 if model.embed_tokens.soft is None else 8,
    }
    for context in arguments.context:
        bench = Bench(model, fast, context)
        facts[str(context)] = compared(arguments.names, bench, arguments)
        torch.cuda.empty_cache()
    print(json.dumps(facts))


if __name__ == "__main__":
    main()
