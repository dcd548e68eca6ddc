"""How to cut a canvas's 8-bit products outside the experts, and its heads: tries what is listed.

    python bench/gpu_cuts.py cuts heads [--seconds 4] [--rows 256]

    cuts     products of so many rows by our kernel, beside the library's
    heads    norms, turns and slots of the heads, of either width

Lines as in `gpu_layer.py`; `first` is what is used now. What is found goes by hand into
`ops/kernels/cuts.py` and `ops/kernels/heads.py`, if whole layers run faster so:
`gpu_layer.py chain` tells.
"""

import argparse
import itertools
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from gpu_layer import RATES, SHAPES, copies, each, line, search, section
from gpu_measure import CANVAS, DEVICE, HALF, largest, micros, normal
from torch import Tensor

from dgemma.ops.dense import Weight, product
from dgemma.ops.fast import switched
from dgemma.ops.fp8 import quantize
from dgemma.ops.kernels import dense_8, heads
from dgemma.ops.kernels.cuts import DOWN, OUT, QKV, Cut
from dgemma.ops.kernels.launch import switch_early
from dgemma.ops.quantized import Quantized

CUTS = {"qkv": QKV, "qkv full": QKV, "o": OUT, "o full": OUT, "down": DOWN}


def cuts_section(seconds: float, rows: int) -> None:
    for name, used in CUTS.items():
        outputs, depth = SHAPES[name]
        size = 1.0 * outputs * depth
        given = copies(lambda s=(outputs, depth): quantize(normal(*s, scale=s[1] ** -0.5)), size)  # type: ignore[misc]
        x = quantize(normal(rows, depth))
        want = x.whole() @ given[0].whole().T
        what = f"{name} 8, {rows} rows"
        RATES[what] = size

        def library(weight: Quantized, x: Quantized = x) -> Tensor:
            with switched(True):
                return product(x, Weight(*weight), HALF)

        took = each(library, given)
        line(f"{what} library", "", took, size / took * 1e-3, largest(library(given[0]), want))

        def measure(
            form: Cut, given: list[Quantized] = given, x: Quantized = x, want: Tensor = want
        ) -> tuple[float, float]:
            found = dense_8.product(x, given[0], HALF, form)
            error = largest(found.sum(0) if found.dim() == 3 else found, want)
            return each(lambda w: dense_8.product(x, w, HALF, form), given), error

        search(what, cut_forms(used), measure, seconds)


def cut_forms(used: Cut) -> Iterator[Cut]:
    yield used
    parts = (1,) if used.parts == 1 else (2, 3, 4)
    shapes = [(128, 64, 4, 4), (128, 128, 4, 3), (128, 128, 8, 3), (256, 64, 4, 3), (64, 64, 4, 4)]
    shapes += [(256, 128, 8, 3), (128, 64, 4, 6), (256, 64, 8, 4)]
    for (rows, outputs, warps, stages), count in itertools.product(shapes, parts):
        form = Cut(rows=rows, outputs=outputs, parts=count, warps=warps, stages=stages)
        if form != used:
            yield form


def heads_section(seconds: float, rows: int) -> None:
    for width, keys, has_value in ((256, 8, True), (512, 2, False)):
        count = 16 + keys * (1 + has_value)
        qkv_TX, slots = normal(rows, count * width), normal(2, rows, keys, width)
        weights = {"q_weight": normal(width), "k_weight": normal(width), "has_value": has_value}
        shape = heads.Heads(queries=16, keys=keys, width=width, **weights)  # type: ignore[arg-type]
        angles_TP = torch.rand(rows, width // 2, device=DEVICE) * 6
        turns = angles_TP.cos(), angles_TP.sin()
        places = [0, 0, 0, slots[0].data_ptr(), slots[1].data_ptr(), rows]
        place_6 = torch.tensor(places, device=DEVICE)

        def work(form: heads.Cut, of: Any = (qkv_TX, shape, turns, place_6)) -> Tensor:
            return heads.heads(*of, 1e-6, form)

        want = work(heads.Cut(1, 1)).clone()
        what = f"heads {width}, {rows} rows"
        RATES[what] = 4.0 * qkv_TX.numel()

        def measure(form: heads.Cut, work: Any = work, want: Tensor = want) -> tuple[float, float]:
            return micros(lambda: work(form), 20), largest(work(form), want)

        search(what, head_forms(shape), measure, seconds)
        del slots


def head_forms(shape: heads.Heads) -> Iterator[heads.Cut]:
    used = heads.cut(shape)
    yield used
    for number, warps in itertools.product((8, 4, 2, 1), (1, 2, 4, 8)):
        form = heads.Cut(number, warps)
        if shape.keys % number == 0 and warps <= number * 2 and form != used:
            yield form


SECTIONS: dict[str, Callable[[float, int], None]] = {"cuts": cuts_section, "heads": heads_section}


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="+", choices=[*SECTIONS])
    parser.add_argument("--seconds", type=float, default=4.0, help="at most, for each line's forms")
    parser.add_argument("--rows", type=int, default=CANVAS)
    arguments = parser.parse_args()
    torch.manual_seed(0)
    switch_early(True)
    for name in arguments.names:
        section(name, partial(SECTIONS[name], arguments.seconds, arguments.rows))


if __name__ == "__main__":
    main()
