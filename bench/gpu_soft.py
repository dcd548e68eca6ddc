"""The soft embedding over the whole vocabulary in 16 and in 8 bits on a GPU: times and distances.

    python bench/gpu_soft.py [--cuts]

Random vectors with a common part, of the released sizes; scores that are flat, spread, or sure of
one token at most positions. `error` is the greatest relative distance of a position from the
definition in 8 bits, `rounding` that definition's from the exact mean, `length` the mean length of
what was found beside the definition's (the matrix unit adds up 8-bit products in few bits, and what
it cuts off makes vectors shorter), `direction` the distance of both once they have length 1. With
`--cuts` the product is cut in several ways, and torch's own grouped product is timed beside it.
What fails is printed, and the rest goes on. The last line is JSON.
"""

import argparse
import json
from collections.abc import Callable
from datetime import date
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from gpu_measure import CANVAS, CAP, DEVICE, HALF, VOCAB, WIDTH, micros
from torch import Tensor

from dgemma.device import describe_device
from dgemma.graph.reading import Reading, dense_mean_8, dense_mean_16, read_by_kernels
from dgemma.model import TokenTable
from dgemma.ops.fast import switched
from dgemma.ops.kernels import soft_8
from dgemma.ops.kernels.cuts import SOFT, Cut
from dgemma.ops.kernels.launch import switch_early
from dgemma.ops.kernels.sparse import Into
from dgemma.ops.row_stats import Query
from dgemma.ops.soft import soft_mean_reference
from dgemma.ops.soft_table import SoftTable
from dgemma.weights.head import Fp8HeadTable

KINDS = {"flat": 0.5, "spread": 3.0, "sure": 3.0}
SURE = 24.0  # what one token's score is above the others, where a position is sure
COMMON = 0.3  # of a vector's length, the same for all tokens
SHARES = (114 * 128, 86 * 128, 69 * 128, 43 * 128)  # 18, 24, 30 and 48 parts; ours: 36
CUTS = (
    SOFT,
    Cut(rows=256, outputs=128, depth=128, warps=8, stages=3),
    Cut(rows=128, outputs=256, depth=128, warps=8, stages=4),
    Cut(rows=256, outputs=128, depth=64, warps=8, stages=6),
    Cut(rows=128, outputs=128, depth=128, warps=4, stages=3),
    Cut(rows=128, outputs=128, depth=128, warps=8, stages=3),
)
Facts = dict[str, Any]


def drawn(seed: int, *size: int) -> Tensor:
    generator = torch.Generator(DEVICE).manual_seed(seed)
    return torch.randn(size, generator=generator, device=DEVICE)


def table_of() -> Fp8HeadTable:
    table = TokenTable(0, WIDTH)
    vectors_VD = drawn(1, VOCAB, WIDTH).add_(drawn(2, WIDTH), alpha=COMMON) * WIDTH**-0.5
    # Lengths differ, as those of a trained table do.
    vectors_VD *= (0.3 * drawn(3, VOCAB, 1)).exp_()
    table.weight = torch.nn.Parameter(vectors_VD.to(HALF), requires_grad=False)
    return Fp8HeadTable(table, soft=True)


def scores_of(kind: str) -> tuple[Tensor, Query]:
    raw_LV = drawn(4, CANVAS, VOCAB).mul_(KINDS[kind])
    at_L = torch.arange(CANVAS, device=DEVICE)
    if kind == "sure":  # all but a few positions, so that the whole vocabulary is asked for
        raw_LV[at_L[8:], at_L[8:] * 997] += SURE
    uniform_L = torch.full((CANVAS,), 0.5, dtype=torch.float64, device=DEVICE)
    heat_L = torch.linspace(0.4, 0.8, CANVAS, device=DEVICE)
    return raw_LV.to(HALF), Query(heat_T=heat_L, uniform_T=uniform_L, held_T=at_L)


def exactly(raw_LV: Tensor, query: Query) -> Tensor:
    return (CAP * torch.tanh(raw_LV.float() / CAP) / query.heat_T[:, None]).softmax(-1)


def far(got_LD: Tensor, want_LD: Tensor) -> float:
    off_L = (got_LD.float() - want_LD.float()).norm(dim=-1) / want_LD.float().norm(dim=-1)
    return float(off_L.max())


def mean_in_pieces(p_LV: Tensor, table_VD: Tensor) -> Tensor:
    """In float32, which the table has no room for at once."""
    pieces = zip(torch.split(p_LV, 8192, dim=1), torch.split(table_VD, 8192), strict=True)
    return torch.stack([p @ vectors.float() for p, vectors in pieces]).sum(0)


def tried(name: str, found: list[Facts], work: Callable[[], Facts]) -> None:
    facts: Facts = {"name": name}
    try:
        facts |= work()
    except Exception as error:
        facts["failed"] = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:160]}"
    told = [f"{k} {v:.4g}" if isinstance(v, float) else f"{k} {v}" for k, v in facts.items()]
    print("  ".join(told).removeprefix("name "), flush=True)
    found.append(facts)


def reading_of(kind: str) -> Reading:
    raw_LV, query = scores_of(kind)
    return read_by_kernels(raw_LV, CAP, query)


def errors(table: Fp8HeadTable, kind: str, share: int) -> Facts:
    """How far both ways are from their definitions, and these from the exact mean."""
    assert table.soft is not None
    soft = table.soft._replace(share=share)
    raw_LV, query = scores_of(kind)
    p_LV = exactly(raw_LV, query)
    exact_LD, want_LD = (
        mean_in_pieces(p_LV, table.weight),
        soft_mean_reference(p_LV, table.weight, soft).float(),
    )
    found = read_by_kernels(raw_LV, CAP, query)
    assert found.shares is not None
    got_LD = soft_8.mean(found.shares(soft), soft, table.weight)
    ratio_L = got_LD.float().norm(dim=-1) / want_LD.norm(dim=-1)
    again_LD = soft_8.mean(found.shares(soft), soft, table.weight)
    rounded_LV = found.dense()  # in the scores' place
    by_16_LD = rounded_LV @ table.weight
    from_p_LD = soft_8.mean(soft_8.shares_of(rounded_LV, soft), soft, table.weight)
    return {
        "error": far(got_LD, want_LD),
        "direction": far(F.normalize(got_LD.float()), F.normalize(want_LD)),
        "rounding": far(want_LD, exact_LD),
        "both": far(got_LD, exact_LD),
        "16_bits": far(by_16_LD, exact_LD),
        "of_p": far(from_p_LD, want_LD),
        "length": float(ratio_L.mean()),
        "same_again": torch.equal(got_LD, again_LD),
    }


def whole(table: Fp8HeadTable, found: list[Facts]) -> None:
    """All that a step does, either way."""
    reading = reading_of("flat")
    no_pins_L = torch.zeros(CANVAS, dtype=torch.bool, device=DEVICE)
    tokens_L = torch.zeros(CANVAS, dtype=torch.long, device=DEVICE)
    soft_LD = torch.empty(CANVAS, WIDTH, dtype=HALF, device=DEVICE)
    into = Into(soft_LD, tokens_L, no_pins_L, table.scale)
    tried("whole, 8 bits", found, timed(partial(dense_mean_8, table, reading, into)))
    # Last, since it writes over the scores; what they are then takes the same time.
    tried("whole, 16 bits", found, timed(partial(dense_mean_16, table, reading, into)))
    tried("  to probabilities", found, timed(reading.dense))
    p_LV = reading.dense()
    tried("  product", found, timed(lambda: p_LV @ table.weight))


def timed(work: Callable[[], object]) -> Callable[[], Facts]:
    return lambda: {"us": micros(work)}


def pieces(soft: SoftTable, weight_VD: Tensor, cuts: tuple[Cut, ...], found: list[Facts]) -> None:
    reading = reading_of("flat")
    assert reading.shares is not None
    shares = reading.shares(soft)
    name = f"{len(shares.factor_ST)} parts"
    tried(f"{name}: to 8 bits", found, timed(partial(reading.shares, soft)))
    for form in cuts:
        how = f"{form.rows}x{form.outputs}x{form.depth}, {form.warps} warps, {form.stages} stages"
        tried(f"{name}: {how}", found, partial(by_cut, shares, soft, weight_VD, form))


def by_cut(shares: soft_8.Shares, soft: SoftTable, weight_VD: Tensor, form: Cut) -> Facts:
    took = micros(lambda: soft_8.product(shares, soft, HALF, form))
    both = micros(lambda: soft_8.mean(shares, soft, weight_VD, form=form))
    work = 2 * CANVAS * VOCAB * WIDTH
    return {"us": took, "added_up": both - took, "tflop_s": work / took / 1e6}


def grouped(soft: SoftTable, found: list[Facts]) -> None:
    """torch's own product of such parts."""
    reading = reading_of("flat")
    assert reading.shares is not None
    shares = reading.shares(soft)
    parts = len(shares.factor_ST)
    ends_S = (torch.arange(parts, device=DEVICE, dtype=torch.int32) + 1) * soft.share
    ends_S.clamp_(max=VOCAB)
    ones = torch.ones(parts * WIDTH, device=DEVICE)

    def product() -> Tensor:
        return torch._scaled_grouped_mm(
            shares.numbers_TV,
            soft.numbers_DV.t(),
            shares.factor_ST.flatten(),
            ones,
            offs=ends_S,
            out_dtype=HALF,
            use_fast_accum=True,
        )

    def beside() -> Facts:
        off = far(product().float().sum(0), soft_8.product(shares, soft, HALF).float().sum(0))
        return {"us": micros(product), "beside_ours": off}

    tried(f"{parts} parts: grouped product of torch", found, beside)


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cuts", action="store_true")
    arguments = parser.parse_args()
    torch.backends.cuda.matmul.allow_tf32 = False  # what others are held against is exact
    print(f"# launches overlap: {switch_early(True)}")
    found: list[Facts] = []
    table = table_of()
    assert table.soft is not None
    own = table.soft
    with switched(True):
        for kind in KINDS:
            tried(f"{kind}: distances", found, partial(errors, table, kind, own.share))
        whole(table, found)
        pieces(own, table.weight, CUTS if arguments.cuts else (SOFT,), found)
        for share in SHARES if arguments.cuts else ():
            name = f"flat, {share} tokens a part: distances"
            tried(name, found, partial(errors, table, "flat", share))
            pieces(own._replace(share=share), table.weight, (SOFT,), found)
        if arguments.cuts:
            grouped(own, found)
    facts = {"bench": "gpu_soft", "date": str(date.today()), "device": describe_device(DEVICE)}
    print(json.dumps({**facts, "torch": torch.__version__, "results": found}))


if __name__ == "__main__":
    main()
