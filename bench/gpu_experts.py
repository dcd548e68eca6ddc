"""How to cut the experts' products, in 16, 8 and 4 bits: tries what is listed, on a GPU.

    python bench/gpu_experts.py check canvas4 one [--seconds 12] [--top 5]

`check` holds both ways to unpack four bits against each other, bit for bit, and every path against
float32 arithmetic. Each other part prints its best cuts: microseconds, GB/s of weights, TFLOP/s,
and the greatest difference from float32 in units of the root mean square. What is found goes by
hand into `ops/kernels/tiles.py` and `ops/kernels/experts_1.py`. Kernels are compiled beforehand by
several processes (`--helpers`); one that fails is named and passed over. One token is timed over
all experts in turn, so that no cache holds the weights.
"""

import argparse
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import expert_forms
import torch
from expert_forms import cuts, listed
from gpu_measure import (
    CANVAS,
    DEVICE,
    HALF,
    INNER,
    NUM_EXPERTS,
    TOP_K,
    WIDTH,
    largest,
    micros_of,
    normal,
)
from torch import Tensor

from dgemma.ops.experts import gated
from dgemma.ops.fast import switched
from dgemma.ops.fp4 import fp4_choices
from dgemma.ops.fp8 import fp8_choices, quantize
from dgemma.ops.kernels import experts, experts_1, experts_4
from dgemma.ops.kernels.buckets import buckets
from dgemma.ops.kernels.experts_1 import Cut
from dgemma.ops.kernels.tiles import TABLE_4, Tile
from dgemma.ops.nvfp4_order import Laid
from dgemma.ops.quantized import Quantized
from dgemma.weights.fp8 import quantize_stacked
from dgemma.weights.nvfp4 import lay_stacked

MANY = 4096


@dataclass(frozen=True, slots=True)
class Search:
    """Something that can be cut in many ways: `works` are the same on several weights."""

    works: Sequence[Callable[[Any], Tensor]]
    forms: Sequence[Any]
    want: Callable[[], Tensor]  # of the first work, in float32
    gbytes: float
    teraflop: float


@dataclass(frozen=True, slots=True)
class Weights:
    """One layer's experts, three times."""

    plain: tuple[Tensor, Tensor]
    eight: tuple[Quantized, Quantized]
    four: tuple[Laid, Laid]
    is_hollow: bool = False

    @classmethod
    def make(cls) -> "Weights":
        up = normal(NUM_EXPERTS, 2 * INNER, WIDTH, scale=WIDTH**-0.5)
        down = normal(NUM_EXPERTS, WIDTH, INNER, scale=INNER**-0.5)
        eight = quantize_stacked(up), quantize_stacked(down)
        return cls((up, down), eight, (lay_stacked(up, 2), lay_stacked(down, 1)))

    def whole(self, bits: int, part: int, expert: int) -> Tensor:
        if bits == 4:
            return self.four[part].whole(expert)
        if bits == 8:
            return Quantized(*(tensor[expert] for tensor in self.eight[part])).whole()
        return self.plain[part][expert].float()


def wanted(weights: Weights, bits: int, part: int, x: Tensor, ids_TK: Tensor) -> Tensor:
    """Every choice's product in float32: `x` are rows of tokens (part 0) or of choices (part 1)."""
    flat_A = ids_TK.flatten()
    out = torch.empty(len(flat_A), (INNER, WIDTH)[part], device=DEVICE)
    for expert in flat_A.unique().tolist():
        choice = (flat_A == expert).nonzero()[:, 0]
        rows = x[choice // TOP_K if part == 0 else choice].float()
        rows = rows @ weights.whole(bits, part, expert).T
        out[choice] = gated(rows) if part == 0 else rows
    return out


def routed(tokens: int) -> Tensor:
    return normal(tokens, NUM_EXPERTS, dtype=torch.float32).topk(TOP_K).indices


def sizes(bits: int, part: int, ids_TK: Tensor) -> tuple[float, float]:
    """GB of the weights that are hit, and TFLOP."""
    numbers = (2 * INNER * WIDTH, INNER * WIDTH)[part]
    per_weight = {16: 2.0, 8: 1.0, 4: 0.5625}[bits]
    hit = len(ids_TK.unique())
    return 1e-9 * numbers * per_weight * hit, 2e-12 * numbers * ids_TK.numel()


# --- many rows


def by_expert(
    weights: Weights, bits: int, tokens: int, forms: Sequence[Sequence[Tile]], sets: int = 1
) -> Iterator[tuple[str, Search]]:
    """`sets`: as many copies of the weights are read in turn, as by the layers of a model."""
    ids_TK = routed(tokens)
    into = buckets(ids_TK, NUM_EXPERTS)
    inputs = normal(tokens, WIDTH), normal(tokens * TOP_K, INNER)
    rows_8 = [quantize(x) for x in inputs] if bits == 8 else []
    seen = [x.whole() for x in rows_8] if bits == 8 else list(inputs)

    def multiply(part: int, weight: Any) -> Callable[[Tile], Tensor]:
        x, scales = inputs[part], None
        if bits == 8:
            x, scales = rows_8[part].numbers, experts.Scales(rows_8[part].factor, weight[1], HALF)
            weight = weight[0]
        if part == 0 and bits == 4:
            return lambda tile: experts_4.gate_up_4(x, weight, into, TOP_K, tile)
        if part == 0:
            return lambda tile: experts.gate_up(x, weight, into, TOP_K, tile, scales)
        if bits == 4:
            return lambda tile: experts_4.down_4(x, weight, into, tile)
        return lambda tile: experts.down(x, weight, into, tile, scales)

    for part, name in enumerate(("gate_up", "down")):
        stored = {16: weights.plain, 8: weights.eight, 4: weights.four}[bits][part]
        copies = [stored, *(_copy(stored) for _ in range(sets - 1))]
        want = lambda part=part: wanted(weights, bits, part, seen[part], ids_TK)  # noqa: E731
        works = [multiply(part, copy) for copy in copies]
        search = Search(works, forms[part], want, *sizes(bits, part, ids_TK))
        yield f"{name} {bits} bits x{tokens}", search


def _copy(stored: Any) -> Any:
    if isinstance(stored, Tensor):
        return stored.clone()
    return type(stored)(*(_copy(each) if isinstance(each, Tensor) else each for each in stored))


# --- one token


def by_choice(weights: Weights, bits: int) -> Iterator[tuple[str, Search]]:
    """Sixteen tokens, one after another, that together use every expert once."""
    turns = NUM_EXPERTS // TOP_K
    ids = torch.randperm(NUM_EXPERTS, device=DEVICE).view(turns, 1, TOP_K)
    x_TD, hidden_AI = normal(1, WIDTH), normal(TOP_K, INNER)
    plain = weights.plain if bits == 16 else tuple(weight.numbers for weight in weights.eight)
    factors = [None, None] if bits == 16 else [weight.factor for weight in weights.eight]

    def up(own: Tensor) -> Callable[[Cut], Tensor]:
        if bits == 4:
            return lambda form: experts_1.gate_up_4(x_TD, own, weights.four[0], form)
        return lambda form: experts_1.gate_up(x_TD, own, plain[0], form, factors[0])

    def down(own: Tensor) -> Callable[[Cut], Tensor]:
        if bits == 4:
            return lambda form: experts_1.down_4(hidden_AI, own, weights.four[1], form)
        return lambda form: experts_1.down(hidden_AI, own, plain[1], form, factors[1])

    for part, (name, work, x) in enumerate((("gate_up", up, x_TD), ("down", down, hidden_AI))):
        want = lambda part=part, x=x: wanted(weights, bits, part, x, ids[0])  # noqa: E731
        forms = list(cuts(bits, part))
        search = Search([work(own) for own in ids], forms, want, *sizes(bits, part, ids[0]))
        yield f"{name} {bits} bits x1", search


# --- both ways, bit for bit


def check(weights: Weights) -> None:
    """Prints what must be right before times mean anything."""
    for tokens in (1, 4, CANVAS, 1024):
        x_TD, ids_TK = normal(tokens, WIDTH), routed(tokens)
        hidden = wanted(weights, 4, 0, x_TD, ids_TK)
        exact = wanted(weights, 4, 1, hidden, ids_TK)
        with switched(True):
            got = fp4_choices(x_TD, ids_TK, *weights.four)
            again = fp4_choices(x_TD, ids_TK, *weights.four)
            eight = fp8_choices(x_TD, ids_TK, *weights.eight)
        exact_8 = wanted(weights, 8, 1, wanted(weights, 8, 0, x_TD, ids_TK), ids_TK)
        exact_16 = wanted(weights, 16, 1, wanted(weights, 16, 0, x_TD, ids_TK), ids_TK)
        plain = experts.choices(x_TD, ids_TK, *weights.plain)
        loss = largest(exact, exact_16)
        print(
            f"check x{tokens:<5} 4 bits {largest(got, exact):.1e} (loss {loss:.1e})"
            f" 8 bits {largest(eight, exact_8):.1e} 16 bits {largest(plain, exact_16):.1e}"
            f" same twice: {torch.equal(got, again)}",
            flush=True,
        )
    x_TD, ids_TK = normal(CANVAS, WIDTH), routed(CANVAS)
    into, tile = buckets(ids_TK, NUM_EXPERTS), TABLE_4[0][1]
    pair = [
        experts_4.gate_up_4(x_TD, weights.four[0], into, TOP_K, tile.gate_up, fast=fast)
        for fast in (True, False)
    ]
    downs = [
        experts_4.down_4(pair[1], weights.four[1], into, tile.down, fast=fast)
        for fast in (True, False)
    ]
    one, own = x_TD[:1], ids_TK[:1]
    form = experts_1.TABLE[4]
    ones = [
        experts_1.gate_up_4(one, own, weights.four[0], form.gate_up, fast=fast)
        for fast in (True, False)
    ]
    same = [torch.equal(*both) for both in (pair, downs, ones)]
    print(
        f"check unpacking, both ways bit for bit: gate_up {same[0]}, down {same[1]}, one {same[2]}"
    )


def show(form: Any) -> str:
    if isinstance(form, Cut):
        text = f"{form.columns},{form.depth},{form.warps}"
    else:
        text = f"{form.rows},{form.columns},{form.depth},{form.warps},{form.stages}"
        text += " s" * form.swap + " t" * form.tma + " w" * form.whole
        text += f" u{form.unroll}" * (form.unroll > 1)
    return text + (f" r{form.registers}" if form.registers else "")


def sweep(name: str, search: Search, seconds: float, top: int) -> None:
    found, failed, end, want = [], [], time.monotonic() + seconds, search.want()
    for form in search.forms:
        if time.monotonic() > end:
            break
        try:
            error = largest(search.works[0](form), want)
            works = [lambda work=work, form=form: work(form) for work in search.works]  # type: ignore[misc]
            found.append((micros_of(works, 4 if len(works) == 1 else 1), error, form))
        except Exception as problem:  # too much shared memory, or a shape it cannot compile
            failed.append(f"{show(form)}: {type(problem).__name__} {str(problem)[:60]!r}")
    print(f"# {name}: {len(found)} of {len(search.forms)} tried, {len(failed)} failed", flush=True)
    for took, error, form in sorted(found, key=lambda entry: entry[0])[:top]:
        gbs, tfs = search.gbytes / took * 1e6, search.teraflop / took * 1e6
        print(f"{name:22} {took:8.1f} us {gbs:6.0f} GB/s {tfs:5.0f} TF/s {error:.1e}  {show(form)}")
    for line in failed[:3]:
        print(f"#   failed {line}", flush=True)


Part = Callable[[Weights], Iterator[tuple[str, Search]]]


def _one(weights: Weights) -> Iterator[tuple[str, Search]]:
    for bits in (16, 8, 4):
        yield from by_choice(weights, bits)


def _part(bits: int, tokens: int, name: str, sets: int = 1) -> Part:
    forms = [listed(getattr(expert_forms, f"{part}_{name}")) for part in ("UP", "DOWN")]
    return lambda weights: by_expert(weights, bits, tokens, forms, 1 if weights.is_hollow else sets)


PARTS: dict[str, Part] = {
    "deep16": _part(16, CANVAS, "DEEP", 24),
    "deep8": _part(8, CANVAS, "DEEP_8", 30),
    "deep4": _part(4, CANVAS, "DEEP_4", 30),
    "pair4": _part(4, 2 * CANVAS, "PAIR_4", 30),
    "canvas4": _part(4, CANVAS, "4"),
    "one": _one,
    "canvas8": _part(8, CANVAS, "8"),
    "many": _part(16, MANY, "MANY"),
    "many8": _part(8, MANY, "MANY_8"),
    "many4": _part(4, MANY, "MANY_4"),
}


def compile_share(names: Sequence[str], index: int, count: int) -> None:
    """Compile every so many of the forms, and run none: the results are kept on disk."""
    from triton.runtime.jit import JITFunction

    run: Any = JITFunction.run

    def only_compile(self: Any, *args: Any, warmup: bool = False, **kwargs: Any) -> Any:
        return run(self, *args, warmup=True, **kwargs)

    weights = _hollow()
    forms = [
        (search.works[0], form)
        for name in names
        for _, search in PARTS[name](weights)
        for form in search.forms
    ]
    JITFunction.run = only_compile  # type: ignore[method-assign]
    for work, form in forms[index::count]:
        try:
            work(form)
        except Exception:  # the one who measures will meet it again, and say so
            continue


def _hollow() -> Weights:
    """The shapes of weights; what is in them does not matter."""

    def laid(outputs: int, inputs: int, parts: int) -> Laid:
        from dgemma.ops.nvfp4_order import empty

        return empty(NUM_EXPERTS, outputs, inputs, parts, DEVICE)

    shapes = (NUM_EXPERTS, 2 * INNER, WIDTH), (NUM_EXPERTS, WIDTH, INNER)
    plain = [torch.empty(shape, dtype=HALF, device=DEVICE) for shape in shapes]
    eight = [
        Quantized(
            torch.empty(shape, dtype=torch.float8_e4m3fn, device=DEVICE),
            torch.empty(shape[:2], device=DEVICE),
        )
        for shape in shapes
    ]
    four = laid(2 * INNER, WIDTH, 2), laid(WIDTH, INNER, 1)
    return Weights((plain[0], plain[1]), (eight[0], eight[1]), four, is_hollow=True)


def helpers(names: Sequence[str], count: int) -> list[subprocess.Popen[bytes]]:
    command = [sys.executable, __file__, *names, "--share"]
    return [
        subprocess.Popen(
            [*command, str(index), str(count)],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        for index in range(count)
    ]


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="+", choices=["check", *PARTS])
    parser.add_argument("--seconds", type=float, default=12.0, help="for each product of a part")
    parser.add_argument("--top", type=int, default=5)
    parser.add_argument("--helpers", type=int, default=12)
    parser.add_argument("--share", type=int, nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    names = [name for name in arguments.names if name in PARTS]
    torch.manual_seed(0)
    torch.backends.cuda.matmul.allow_tf32 = False
    if arguments.share:
        compile_share(names, *arguments.share)
        return
    begin = time.monotonic()
    busy = helpers(names, arguments.helpers if names else 0)
    weights = Weights.make()
    print(f"# weights made in {time.monotonic() - begin:.1f} s", flush=True)
    if "check" in arguments.names:
        try:
            check(weights)
        except Exception as error:
            print(f"BROKEN check: {type(error).__name__}: {str(error)[:1500]}", flush=True)
    for process in busy:
        try:
            process.wait(timeout=max(1.0, begin + 45 - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
    print(f"# compiled by {time.monotonic() - begin:.1f} s", flush=True)
    for name in names:
        try:
            for what, search in PARTS[name](weights):
                sweep(what, search, arguments.seconds, arguments.top)
        except Exception as error:
            print(f"BROKEN {name}: {type(error).__name__}: {str(error)[:1500]}", flush=True)
        torch.cuda.empty_cache()
    print(f"# done after {time.monotonic() - begin:.1f} s", flush=True)


if __name__ == "__main__":
    main()
