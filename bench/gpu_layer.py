"""A layer outside its experts and attention, on a GPU: which cuts are best, and what they give.

    python bench/gpu_layer.py router vector dense [--seconds 2]
    python bench/gpu_layer.py chain [--layers 6]

    router   both launches, for a canvas and a prefill chunk, beside cuBLAS and the choice alone
    vector   products of one row (and of two and four), 16-bit and 8-bit, beside cuBLAS
    dense    8-bit products of a canvas beside 16-bit ones, and the kernels that write 8 bits
    chain    whole layers as one graph: one token and a canvas; dense part in 16 and 8 bits; with
             and without early launches and the side stream. The outputs must be the same bits.

Weights are read from several copies in turn, so that the cache does not flatter. Errors are in
units of the root mean square of what float32 gives on the same numbers; `first` is what is used
now. What fails is printed, and the rest goes on.
"""

import argparse
import itertools
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from gpu_measure import (
    CANVAS,
    DEVICE,
    HALF,
    NUM_EXPERTS,
    TOP_K,
    VOCAB,
    WIDTH,
    largest,
    micros,
    normal,
)
from shapes import RELEASED, shallow
from torch import Tensor

from dgemma.cache import KVCache, Pass, Room, Span
from dgemma.ops.dense import Weight, product
from dgemma.ops.experts import gated
from dgemma.ops.fast import switched
from dgemma.ops.fp8 import quantize
from dgemma.ops.fused import CloseWeights, JoinWeights, route
from dgemma.ops.kernels import layer, router, vector
from dgemma.ops.kernels.launch import launching
from dgemma.ops.quantized import Quantized
from dgemma.stack import ByTable, Places, Stack
from dgemma.weights.packed import Form, shrink_model
from dgemma.weights.random import random_model

INNER = RELEASED.intermediate_size
BEYOND_CACHE = 400e6  # bytes of weights that are gone through in turn
# Outputs and depth; the gated one counts pairs.
SHAPES = {
    "qkv": (8192, WIDTH),
    "qkv full": (9216, WIDTH),
    "o": (WIDTH, 4096),
    "o full": (WIDTH, 8192),
    "gate_up": (INNER, WIDTH),
    "down": (WIDTH, INNER),
}
Work = Callable[[Any], object]


def line(what: str, how: object, took: float, rate: float, error: float) -> None:
    print(f"{what:22} {took:8.2f} us {rate:7.0f} GB/s  err {error:.1e}  {how}", flush=True)


def copies(make: Callable[[], Any], size: float) -> list[Any]:
    return [make() for _ in range(max(2, min(24, round(BEYOND_CACHE / size))))]


def each(work: Work, given: list[Any], repeats: int = 2) -> float:
    """Microseconds of one call, over all copies in turn."""
    return micros(lambda: [work(one) for one in given], repeats) / len(given)


def attempt(what: str, how: object, work: Callable[[], tuple[float, float, float]]) -> None:
    try:
        line(what, how, *work())
    except Exception as error:
        print(f"{what:22} FAILED {how}: {type(error).__name__}: {str(error)[:300]}", flush=True)


def search(
    what: str, forms: Iterator[Any], measure: Callable[[Any], tuple[float, float]], seconds: float
) -> None:
    """The best forms found in so many seconds; the first, which is in use, always shown."""
    found, failed, end = [], [], time.monotonic() + seconds
    for number, form in enumerate(forms):
        if number and time.monotonic() > end:
            break
        try:
            found.append((*measure(form), number, form))
        except Exception as error:
            failed.append(f"{form}: {type(error).__name__}: {str(error)[:160]}")
    ranked = sorted(found, key=lambda one: one[0])
    for took, error, number, form in ranked:
        if number == 0 or (took, error, number, form) in ranked[:3]:
            mark = "first " if number == 0 else ""
            line(what, f"{mark}{form}", took, RATES[what] / took * 1e-3, error)
    print(f"# {what}: {len(found)} tried, {len(failed)} failed {failed[:2]}", flush=True)


RATES: dict[str, float] = {}  # bytes of a call


# --- router


def router_section(seconds: float) -> None:
    for rows in (CANVAS, 2048):
        x_TD = normal(rows, WIDTH)
        given = [normal(NUM_EXPERTS, WIDTH, scale=WIDTH**-0.5) for _ in range(8)]
        scale_E = 1 + normal(NUM_EXPERTS, scale=0.1)
        logits_TE = x_TD.float() @ given[0].float().T
        with switched(False):
            _, want = route(logits_TE, scale_E.float(), TOP_K)
        what = f"router {rows}"
        RATES[what] = 2.0 * (x_TD.numel() + given[0].numel())
        took = each(lambda w, x=x_TD: F.linear(x, w), given)
        line(f"{what} cuBLAS alone", "", took, RATES[what] / took * 1e-3, 0.0)

        def choose(weight: Tensor, form: router.Cut, x: Tensor = x_TD, s: Tensor = scale_E) -> Any:
            parts = router.parts(x, weight, form)
            return router.choose(parts, s, TOP_K, form.choosers)

        def measure(
            form: router.Cut, given: list[Tensor] = given, want: Tensor = want
        ) -> tuple[float, float]:
            ids, share, into = choose(given[0], form)
            assert int(into.count_E.sum()) == ids.numel(), "buckets are wrong"
            return each(lambda w: choose(w, form), given), largest(share, want)

        search(what, router_forms(rows), measure, 4 * seconds)
        found = router.parts(x_TD, given[0])
        first = micros(lambda x=x_TD, w=given[0]: router.parts(x, w))  # type: ignore[misc]
        second = micros(lambda p=found, s=scale_E: router.choose(p, s, TOP_K))  # type: ignore[misc]
        print(f"# {what}: parts {first:.2f} us, choice {second:.2f} us", flush=True)


def router_forms(rows: int) -> Iterator[router.Cut]:
    yield router.cut(rows, NUM_EXPERTS, WIDTH)
    if rows > CANVAS:
        for share, rows_, depth in itertools.product((512, 256, 1408, 2816), (64, 128), (64, 128)):
            yield router.Cut(rows=rows_, share=share, depth=depth, stages=3)
        return
    for size, share, depth, choosers in (
        ((64, 128), 128, 128, 1),
        ((64, 128), 256, 64, 1),
        ((64, 128), 128, 64, 2),
        ((64, 128), 128, 64, 4),
        ((64, 64), 256, 128, 1),
        ((32, 128), 256, 128, 1),
        ((32, 64), 256, 128, 1),
        ((64, 128), 256, 128, 2),
        ((128, 128), 128, 64, 1),
        ((32, 128), 128, 128, 1),
        ((64, 64), 512, 128, 1),
        ((16, 128), 512, 128, 1),
    ):
        yield router.Cut(rows=size[0], columns=size[1], share=share, depth=depth, choosers=choosers)


# --- one row


def stored(outputs: int, depth: int, *, eight: bool) -> Weight:
    weight_OI = normal(outputs, depth, scale=depth**-0.5)
    return Weight(*quantize(weight_OI)) if eight else Weight(weight_OI)


def whole(weight: Weight) -> Tensor:
    if weight.factor_O is None:
        return weight.numbers_OI.float()
    return Quantized(weight.numbers_OI, weight.factor_O).whole()


def vector_section(seconds: float) -> None:
    for (name, (outputs, depth)), eight in itertools.product(SHAPES.items(), (False, True)):
        is_gated = name == "gate_up"
        lines = 2 * outputs if is_gated else outputs
        size = (1.0 if eight else 2.0) * lines * depth
        what = f"{name}{' 8' if eight else ''}"
        RATES[what] = size
        given = copies(lambda s=(lines, depth), e=eight: stored(*s, eight=e), size)  # type: ignore[misc]
        x_1D = normal(1, depth)
        want = x_1D.float() @ whole(given[0]).T
        want = gated(want) if is_gated else want
        if not eight:

            def plain(weight: Weight, x: Tensor = x_1D, g: bool = is_gated) -> Tensor:
                found = F.linear(x, weight.numbers_OI)
                return layer.gated(found) if g else found  # type: ignore[return-value]

            took = each(plain, given)
            line(f"{what} cuBLAS", "", took, size / took * 1e-3, largest(plain(given[0]), want))
        work = vector.gated_product if is_gated else vector.product

        def measure(
            form: vector.Cut,
            given: list[Weight] = given,
            x: Tensor = x_1D,
            want: Tensor = want,
            work: Any = work,
        ) -> tuple[float, float]:
            error = largest(work(x, *given[0], form), want)
            return each(lambda w: work(x, *w, form), given), error

        search(what, vector_forms(outputs, depth, is_gated), measure, seconds)
        if name == "o" and not eight:
            few(given, depth)
        del given
        torch.cuda.empty_cache()
    head(seconds)


def few(given: list[Weight], depth: int) -> None:
    """From how many rows on cuBLAS is better."""
    for rows in (2, 4, 8):
        x_TD = normal(rows, depth)
        ours = each(lambda w, x=x_TD: vector.product(x, *w), given)
        plain = each(lambda w, x=x_TD: F.linear(x, w.numbers_OI), given)
        print(f"# o, {rows} rows: ours {ours:.2f} us, cuBLAS {plain:.2f} us", flush=True)


def head(seconds: float) -> None:
    weight_VD, x_1D = normal(VOCAB, WIDTH, scale=WIDTH**-0.5), normal(1, WIDTH, scale=8.0)
    out_1V = torch.empty(1, VOCAB, device=DEVICE)
    RATES["head"] = 2.0 * weight_VD.numel()
    raw = torch.cat([x_1D.float() @ part.float().T for part in weight_VD.chunk(16)], 1)
    want = torch.tanh(raw / 30) * 30

    def plain() -> Tensor:
        return out_1V.copy_(torch.tanh(F.linear(x_1D, weight_VD).float() / 30) * 30)

    took = micros(plain, 2)
    line("head cuBLAS", "", took, RATES["head"] / took * 1e-3, largest(plain(), want))

    def measure(form: vector.Cut) -> tuple[float, float]:
        error = largest(vector.scores(x_1D, weight_VD, 30.0, out_1V, form), want)
        return micros(lambda: vector.scores(x_1D, weight_VD, 30.0, out_1V, form), 2), error

    search("head", vector_forms(VOCAB, WIDTH, False), measure, 2 * seconds)


def vector_forms(outputs: int, depth: int, is_gated: bool) -> Iterator[vector.Cut]:
    """The likeliest first."""
    used = vector.cut(outputs, depth, is_gated=is_gated)
    yield used
    forms = [(4, 1024, 4), (2, 2048, 4), (2, 1024, 4), (2, 4096, 4), (4, 512, 2), (8, 512, 4)]
    forms += [(1, 4096, 4), (4, 2048, 8), (8, 1024, 8), (4, 4096, 8), (16, 256, 4), (8, 256, 2)]
    forms += [(2, 1024, 2), (1, 1024, 2), (16, 512, 8)]
    for lines, chunk, warps in forms:
        form = vector.Cut(lines // 2 or 1 if is_gated else lines, chunk, warps)
        if form != used:
            yield form


# --- 8 bits


def dense_section(_: float) -> None:
    for name, eight in itertools.product(SHAPES, (False, True)):
        how = "8 bits" if eight else "16 bits"
        attempt(f"{name} {CANVAS} rows", how, lambda n=name, e=eight: dense(n, e))  # type: ignore[misc]
        torch.cuda.empty_cache()
    written()


def dense(name: str, eight: bool) -> tuple[float, float, float]:
    """Time, rate and error of a canvas's product."""
    outputs, depth = SHAPES[name]
    outputs *= 2 if name == "gate_up" else 1
    x_TD = normal(CANVAS, depth)
    rows = quantize(x_TD) if eight else x_TD
    size = (1.0 if eight else 2.0) * outputs * depth
    given = copies(lambda: stored(outputs, depth, eight=eight), size)
    exact = rows.whole() if isinstance(rows, Quantized) else rows.float()
    with switched(True):
        took = each(lambda weight: product(rows, weight, HALF), given)
        error = largest(product(rows, given[0], HALF), exact @ whole(given[0]).T)
    return took, size / took * 1e-3, error


def written() -> None:
    """Kernels that write rows in 8 bits, beside the same that do not."""
    x, y, z = (normal(CANVAS, WIDTH) for _ in range(3))
    ones = [1 + normal(WIDTH, scale=0.1) for _ in range(4)]
    wide, out_AD = normal(CANVAS, 2 * INNER), normal(CANVAS * TOP_K, WIDTH)
    share_TK = torch.rand(CANVAS, TOP_K, device=DEVICE)
    closing = CloseWeights(*ones[:3], torch.ones(1, dtype=HALF, device=DEVICE), ones[3])
    works: dict[str, Callable[..., Any]] = {
        "join": lambda **how: layer.join(x, y, JoinWeights(*ones), 1e-6, **how)[1],
        "close": lambda **how: layer.close(x, z, (out_AD, share_TK), closing, 1e-6, **how)[1],
        "gated": lambda **how: layer.gated(wide, **how),
    }
    for name, work in works.items():

        def measured(work: Callable[..., Any] = work) -> tuple[float, float, float]:
            got, want = Quantized(*work(eight=True)).whole(), quantize(work()).whole()
            return micros(lambda: work(eight=True)), 0.0, largest(got, want)

        print(f"# {name}: {micros(work):.2f} us in 16 bits")
        attempt(name, "8 bits; within a rounding step", measured)


# --- whole layers


def chain_section(layers: int) -> None:
    config = shallow(layers)
    model = random_model(config, seed=0, device=DEVICE, dtype=HALF)
    for dense in ("16", "8"):
        if dense == "8":
            shrink_model(model, Form(dense="fp8"))
        stack = Stack(model)
        for rows in (1, CANVAS):
            try:
                chain(stack, model, rows, dense)
            except Exception as error:
                print(f"chain {dense} bits {rows} rows FAILED: {type(error).__name__}: {error}")


def chain(stack: Stack, model: Any, rows: int, dense: str) -> None:
    row = KVCache(model.config, Room(tokens=1024 + rows, span=1024), HALF, DEVICE)
    with switched(True):
        prompt = Pass([Span(row, 1024, commit=True)])
        model.encode(torch.arange(1024, device=DEVICE), prompt)
        prompt.close()
        context = Pass([Span(row, rows, commit=rows == 1)])
        places, turns = Places.of(context), model.turns(context.positions_T)
        assert places is not None
        x_TD, wanted = normal(rows, WIDTH), None
        for overlap, early in itertools.product((True, False), (False, True)):
            stack.overlap = overlap
            what = f"chain {dense} bits {rows} rows: side {overlap}, early {early}"
            try:
                with launching(early=early) as is_early:
                    attend = ByTable(places, stack)
                    took = micros(lambda a=attend: stack.run(x_TD, turns, a), 1)  # type: ignore[misc]
                    found = stack.run(x_TD, turns, attend).clone()
            except Exception as error:
                print(f"{what} FAILED: {type(error).__name__}: {str(error)[:300]}", flush=True)
                continue
            wanted = found if wanted is None else wanted
            same = f"same {torch.equal(found, wanted)} (off {largest(found, wanted):.1e})"
            note = "" if is_early == early else " (not here)"
            print(f"{what}{note} {took / len(stack.layers):8.1f} us a layer, {same}", flush=True)
    torch.cuda.empty_cache()


SECTIONS: dict[str, Callable[[float], None]] = {
    "router": router_section,
    "vector": vector_section,
    "dense": dense_section,
}


def section(name: str, work: Callable[[], None]) -> None:
    """What fails is printed, and does not end the run."""
    begin = time.monotonic()
    try:
        work()
    except Exception as error:
        print(f"BROKEN {name}: {type(error).__name__}: {str(error)[:1000]}", flush=True)
    print(f"# {name}: {time.monotonic() - begin:.0f} s", flush=True)
    torch.cuda.empty_cache()


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="+", choices=[*SECTIONS, "chain"])
    parser.add_argument("--seconds", type=float, default=2.0)
    parser.add_argument("--layers", type=int, default=6)
    arguments = parser.parse_args()
    torch.manual_seed(0)
    for name in arguments.names:
        if name == "chain":
            section(name, lambda: chain_section(arguments.layers))
        else:
            section(name, partial(SECTIONS[name], arguments.seconds))


if __name__ == "__main__":
    main()
