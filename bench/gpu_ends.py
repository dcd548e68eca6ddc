"""Both ends of a captured step on a GPU, kernels beside definitions: microseconds and errors.

    python bench/gpu_ends.py [--layers 2] [--vocabulary]

Random weights at the released shapes with few layers; each piece is captured and replayed, and
`definition` is what plain torch takes for the same, captured too. Flat: every token of a position
may come; sharp: five hold nearly all; mixed: all but one position are sharp; middle: few hold most,
but not enough, and some 600 others are likely, all over the vocabulary or side by side. With
`--vocabulary` only what reads the head's output is timed. The last line is JSON.
"""

import argparse
import json
from collections.abc import Callable
from datetime import date
from typing import Any

import torch
from gpu_measure import CANVAS, CAP, DEVICE, HALF, VOCAB, micros, normal
from shapes import shallow
from torch import Tensor

from dgemma.device import describe_device
from dgemma.graph.check_ends import ends_off
from dgemma.graph.entrance import Entrance
from dgemma.graph.memory import Memory, Shape
from dgemma.graph.moving import move, move_by_rule
from dgemma.graph.reading import Reading, dense_mean, read_by_kernels, sparse_mean
from dgemma.model import Gemma
from dgemma.ops.fast import switched
from dgemma.ops.kernels import row_stats, sparse
from dgemma.ops.kernels.launch import switch_early
from dgemma.ops.row_stats import Query
from dgemma.sampler import EntropyBound
from dgemma.stack import Stack
from dgemma.weights.head import Fp8HeadTable
from dgemma.weights.random import random_model

STEPS = 256  # more than a measurement takes
KINDS = ("flat", "mixed", "sharp", "middle", "middle, side by side")
TOGETHER = 4096  # tokens among which the middle's likely ones lie side by side
RULE = EntropyBound(settle_entropy=1e-9)


def show(name: str, work: Callable[[], object], plain: Callable[[], object] | None = None) -> Any:
    facts = {"us": round(micros(work), 1)}
    if plain is not None:
        with switched(False):
            facts["definition"] = round(micros(plain), 1)
    print(f"{name:28} {json.dumps(facts)}", flush=True)
    return facts


def tried(name: str, found: dict[str, Any], *works: Callable[[], object]) -> None:
    """What fails is printed, and does not end the run."""
    try:
        found[name] = show(name, *works)
    except Exception as error:
        print(f"{name:28} FAILED {type(error).__name__}: {str(error)[:200]}", flush=True)


def logits(kind: str) -> Tensor:
    if kind.startswith("middle"):
        return between(VOCAB if kind == "middle" else TOGETHER)
    raw_LV = normal(CANVAS, VOCAB, scale=2.0)
    if kind != "flat":
        raw_LV[int(kind == "mixed") :, :5] += 24.0
    return raw_LV


def between(room: int) -> Tensor:
    """Logits of positions of which few tokens hold 0.99, and many among the first the rest."""
    p_LV = torch.full((CANVAS, VOCAB), 1e-10, device=DEVICE)
    for few, p, within in ((600, 2e-5, room), (40, 0.988 / 40, VOCAB)):
        at_LS = torch.rand(CANVAS, within, device=DEVICE).topk(few).indices
        p_LV.scatter_(1, at_LS, p)
    capped_LV = p_LV.log_().mul_(heats()[:, None]).add_(10.0)
    return capped_LV.div_(CAP).atanh_().mul_(CAP).to(HALF)


def heats() -> Tensor:
    return torch.linspace(0.4, 0.8, CANVAS, device=DEVICE)


def query_of(memory: Memory) -> Query:
    uniform_L = torch.rand(CANVAS, dtype=torch.float64, device=DEVICE)
    return Query(heat_T=heats(), uniform_T=uniform_L, held_T=memory.tokens_L)


def read_out(kind: str, memory: Memory, found: dict[str, Any]) -> Reading:
    raw_LV, query = logits(kind), query_of(memory)
    heat_L, ask = query.heat_T, (query.heat_T, query.uniform_T, query.held_T)
    marks = row_stats.row_marks(raw_LV, CAP, heat_L)
    merged = row_stats.row_merge(raw_LV, CAP, ask, marks)
    given = (raw_LV, CAP, heat_L, marks, merged)
    is_flat = int(marks.flat_1)
    likely = sparse.likely(*given)
    most = int(likely.count_TG.sum(1).max())
    print(f"# {kind}: flat {bool(is_flat)}, few suffice {bool(likely.suffice())}, found {most}")
    fill = marks.flat_1.fill_
    tried(f"{kind} marks", found, lambda: row_stats.row_marks(raw_LV, CAP, heat_L))
    tried(f"{kind} merge", found, lambda: row_stats.row_merge(raw_LV, CAP, ask, marks))
    # A search that has found too many says so, and the next one would be spared.
    tried(f"{kind} likely, flag set", found, lambda: (fill(is_flat), sparse.likely(*given)))
    if kind == "flat":
        tried("flag set", found, lambda: fill(is_flat))
    tried(f"{kind} survivors", found, lambda: sparse.survivors(*given, likely))
    return read_by_kernels(raw_LV, CAP, query)


def round_off(model: Gemma, reading: Reading, found: dict[str, Any]) -> None:
    """What the soft embedding over the whole vocabulary makes of the head's output, either way."""
    table = Fp8HeadTable(model.embed_tokens, soft=True)
    assert table.soft is not None and reading.shares is not None
    soft, shares = table.soft, reading.shares
    tried("to 8 bits", found, lambda: shares(soft))
    # Last, since it writes over the scores.
    tried("to probabilities", found, reading.dense)


def soften(model: Gemma, memory: Memory, reading: Reading, found: dict[str, Any]) -> None:
    table = model.embed_tokens
    into = sparse.Into(memory.soft_LD, memory.tokens_L, memory.pinned_L, table.scale)
    tried("sparse soft embedding", found, lambda: sparse_mean(table, reading, into))
    tried("dense soft embedding", found, lambda: dense_mean(table, reading, into))


def enter(model: Gemma, memory: Memory, found: dict[str, Any]) -> None:
    with switched(False):
        found["check"] = ends_off(model, Stack(model)) or "pass"
    print(f"{'check':28} {found['check']}")
    entrance = Entrance(model)
    for name, way in (("enter", entrance.enter), ("enter behind", entrance.enter_behind)):
        tried(
            name,
            found,
            lambda way=way: way(memory, by_kernels=True),
            lambda way=way: way(memory, by_kernels=False),
        )


def moves(memory: Memory, reading: Reading, found: dict[str, Any]) -> None:
    tried("move", found, lambda: move(memory, reading, RULE))
    memory.index_1.zero_()
    tried("move by rule", found, lambda: move_by_rule(memory, reading, RULE))


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--vocabulary", action="store_true")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    model = random_model(shallow(arguments.layers), seed=0, device=DEVICE, dtype=HALF)
    print(f"# launches overlap: {switch_early(True)}")
    memory, found = Memory(model, Shape(CANVAS, STEPS, RULE)), dict[str, Any]()
    with switched(True):
        if not arguments.vocabulary:
            enter(model, memory, found)
        readings = {kind: read_out(kind, memory, found) for kind in KINDS}
        round_off(model, readings["flat"], found)
        if not arguments.vocabulary:
            soften(model, memory, readings["sharp"], found)
            moves(memory, readings["sharp"], found)
    facts = {"bench": "gpu_ends", "date": str(date.today()), "device": describe_device(DEVICE)}
    print(json.dumps({**facts, **found}))


if __name__ == "__main__":
    main()
