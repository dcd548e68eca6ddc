"""The head in 16 and in 8 bits on a GPU: its time, and how far 8 bits are from their definition.

    python bench/gpu_head.py [--rows 256 512]

Random vectors of the released sizes. Rows are quantized inside the time. A canvas is held against
`F.linear` of the multiplied-out numbers in float32, over the vocabulary's last tokens; `rounding`
is how far that definition is itself from the product that nothing rounds, so that the error of the
sums can be seen beside it. One row is not quantized. What fails is printed, and the rest goes on.
The last line is JSON.
"""

import argparse
import json
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from gpu_measure import CANVAS, CAP, DEVICE, HALF, VOCAB, WIDTH, micros
from torch import Tensor

from dgemma.model import TokenTable
from dgemma.ops.dense import Weight, head_logits, scores
from dgemma.ops.fast import switched
from dgemma.ops.fp8 import quantize
from dgemma.weights.head import Fp8HeadTable

LAST = 8192


def drawn(seed: int, *size: int) -> Tensor:
    generator = torch.Generator(DEVICE).manual_seed(seed)
    return torch.randn(size, generator=generator, device=DEVICE).to(HALF)


def far(got: Tensor, want: Tensor) -> float:
    return float((got.float() - want.float()).norm() / want.float().norm())


def tables() -> tuple[Weight, Weight]:
    table = TokenTable(0, WIDTH)
    table.weight = torch.nn.Parameter(drawn(1, VOCAB, WIDTH) * WIDTH**-0.5, requires_grad=False)
    return table.head, Fp8HeadTable(table).head


def canvas(weights: tuple[Weight, Weight], rows: int) -> list[dict[str, Any]]:
    """As a step has it: written to memory that does not move."""
    x_TD, out_TV = drawn(2, rows, WIDTH), torch.empty(rows, VOCAB, dtype=HALF, device=DEVICE)
    plain, eight = weights
    assert eight.factor_O is not None
    exact_TV = F.linear(x_TD.float(), plain.numbers_OI[-LAST:].float())
    last_VD = eight.numbers_OI[-LAST:].float() * eight.factor_O[-LAST:, None]
    want_TV = F.linear(quantize(x_TD).whole(), last_VD)
    work = 2 * rows * VOCAB * WIDTH
    return [
        timed("16 bits", rows, lambda: scores(x_TD, plain, out_TV), (exact_TV, exact_TV), work),
        timed("8 bits", rows, lambda: scores(x_TD, eight, out_TV), (want_TV, exact_TV), work),
        timed("  rows to 8 bits", rows, lambda: quantize(x_TD).numbers, None, work),
    ]


def token(weights: tuple[Weight, Weight]) -> list[dict[str, Any]]:
    """As a single token has it: capped, in float32."""
    x_1D, out_1V = drawn(3, 1, WIDTH), torch.empty(1, VOCAB, device=DEVICE)
    found = []
    for name, weight in zip(("16 bits", "8 bits"), weights, strict=True):
        last_VD = weight.numbers_OI[-LAST:].float()
        if weight.factor_O is not None:
            last_VD = last_VD * weight.factor_O[-LAST:, None]
        want_1V = torch.tanh(F.linear(x_1D.float(), last_VD) / CAP) * CAP
        found.append(
            timed(
                name,
                1,
                lambda weight=weight: head_logits(x_1D, weight, CAP, out_1V),  # type: ignore[misc]
                (want_1V, want_1V),
                2 * VOCAB * WIDTH,
            )
        )
    return found


def timed(
    name: str,
    rows: int,
    work: Callable[[], Tensor],
    wanted: tuple[Tensor, Tensor] | None,
    flop: float,
) -> dict[str, Any]:
    facts: dict[str, Any] = {"name": name, "rows": rows}
    try:
        if wanted is not None:
            got = work()[:, -LAST:]
            facts |= {"error": far(got, wanted[0]), "rounding": far(wanted[0], wanted[1])}
        facts["us"] = micros(work)
        facts["tflop_s"] = flop / facts["us"] / 1e6
    except Exception as error:
        facts["failed"] = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:160]}"
    print("  ".join(f"{k} {v:.3g}" if isinstance(v, float) else f"{v}" for k, v in facts.items()))
    return facts


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", nargs="+", type=int, default=[CANVAS, 2 * CANVAS])
    arguments = parser.parse_args()
    torch.backends.cuda.matmul.allow_tf32 = False  # what others are held against is exact
    weights = tables()
    with switched(True):
        found = [one for rows in arguments.rows for one in canvas(weights, rows)]
        found += token(weights)
    print(json.dumps({"bench": "gpu_head", "torch": torch.__version__, "results": found}))


if __name__ == "__main__":
    main()
