"""Both ends of a captured step on a GPU, kernels beside definitions: microseconds and errors.

    python bench/gpu_ends.py [--layers 2]

Random weights at the released shapes with few layers; each piece is captured and replayed, and
`definition` is what plain torch takes for the same, captured too. Flat: every token of a position
may come; sharp: five hold nearly all; mixed: all but one position are sharp. The last line is JSON.
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
from dgemma.weights.random import random_model

STEPS = 256  # more than a measurement takes
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
    raw_LV = normal(CANVAS, VOCAB, scale=2.0)
    if kind != "flat":
        raw_LV[int(kind == "mixed") :, :5] += 24.0
    return raw_LV


def query_of(memory: Memory) -> Query:
    uniform_L = torch.rand(CANVAS, dtype=torch.float64, device=DEVICE)
    heat_L = torch.linspace(0.4, 0.8, CANVAS, device=DEVICE)
    return Query(heat_T=heat_L, uniform_T=uniform_L, held_T=memory.tokens_L)


def read_out(kind: str, memory: Memory, found: dict[str, Any]) -> Reading:
    raw_LV, query = logits(kind), query_of(memory)
    heat_L, ask = query.heat_T, (query.heat_T, query.uniform_T, query.held_T)
    marks = row_stats.row_marks(raw_LV, CAP, heat_L)
    merged = row_stats.row_merge(raw_LV, CAP, ask, marks)
    given = (raw_LV, CAP, heat_L, marks, merged)
    likely = sparse.likely(*given)
    print(f"# {kind}: flat {bool(marks.flat_1)}, few suffice {bool(likely.suffice())}")
    tried(f"{kind} marks", found, lambda: row_stats.row_marks(raw_LV, CAP, heat_L))
    tried(f"{kind} merge", found, lambda: row_stats.row_merge(raw_LV, CAP, ask, marks))
    tried(f"{kind} likely", found, lambda: sparse.likely(*given))
    tried(f"{kind} survivors", found, lambda: sparse.survivors(*given, likely))
    return read_by_kernels(raw_LV, CAP, query)


def soften(model: Gemma, memory: Memory, reading: Reading, found: dict[str, Any]) -> None:
    table = model.embed_tokens
    into = sparse.Into(memory.soft_LD, memory.tokens_L, memory.pinned_L, table.scale)
    tried("sparse soft embedding", found, lambda: sparse_mean(table, reading, into))
    tried("dense soft embedding", found, lambda: dense_mean(table, reading, into))


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=2)
    torch.manual_seed(0)
    model = random_model(shallow(parser.parse_args().layers), seed=0, device=DEVICE, dtype=HALF)
    print(f"# launches overlap: {switch_early(True)}")
    memory, entrance = Memory(model, Shape(CANVAS, STEPS, RULE)), Entrance(model)
    found: dict[str, Any] = {"check": ends_off(model, Stack(model)) or "pass"}
    print(f"{'check':28} {found['check']}")
    with switched(True):
        for name, way in (("enter", entrance.enter), ("enter behind", entrance.enter_behind)):
            tried(
                name,
                found,
                lambda way=way: way(memory, by_kernels=True),
                lambda way=way: way(memory, by_kernels=False),
            )
        for kind in ("flat", "mixed", "sharp"):
            reading = read_out(kind, memory, found)
        soften(model, memory, reading, found)
        tried("move", found, lambda: move(memory, reading, RULE))
        memory.index_1.zero_()
        tried("move by rule", found, lambda: move_by_rule(memory, reading, RULE))
    facts = {"bench": "gpu_ends", "date": str(date.today()), "device": describe_device(DEVICE)}
    print(json.dumps({**facts, **found}))


if __name__ == "__main__":
    main()
