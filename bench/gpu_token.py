"""A token of the AR mode on a GPU: which ways and cuts make it faster, tried one after the other.

    python bench/gpu_token.py [--quant none] [--seconds 40] [--layers 30] [--only WAY ...]
                              [--profile]

The released shapes, random weights, random keys before the token. `graph` is the captured pass on
the device, alone; `wall` is from the host's asking to its knowing the next token. `a layer` is
the graph without the head. Errors are against the plain path on the same weights, in units of the
logits' root mean square. The first line has every way of `ops/kernels/ways.py` off; what makes the
graph shorter (or the wall, for what the host does) is kept, and the rest is tried on top of it.
What fails is printed, and the rest goes on. Nothing new is begun after so many seconds.
"""

import argparse
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from gpu_measure import DEVICE, HALF, VOCAB, WIDTH, largest, micros, normal
from gpu_ours import Times, built, wall
from gpu_profile import profile
from shapes import shallow
from torch import Tensor

from dgemma.cache import KVCache, Room
from dgemma.denoise import commit
from dgemma.graph.token import Teller
from dgemma.model import Gemma
from dgemma.ops.fast import switched
from dgemma.ops.kernels import attention, mlp_1, vector
from dgemma.ops.kernels.launch import switch_early
from dgemma.ops.kernels.ways import NAMES, Ways, trying
from dgemma.stack import Stack

CONTEXTS = (512, 2048)
TOKEN, REPLAYS, TOKENS = 7, 16, 12
GAIN = 0.998  # of the time, at most: what is kept is faster by more than the noise
HOST = ("lookahead",)  # ways that the captured pass does not show
ORDER = (
    *("lookahead", "entrance", "ahead", "ranks", "attention", "joint"),
    *("heads", "fetch", "dense", "keys"),
)
NONE = Ways(**dict.fromkeys(NAMES, False))
BITS = {"none": 16, "fp8": 8, "nvfp4": 4}


@dataclass(frozen=True)
class Trial:
    """Ways, and what replaces a default for it."""

    ways: Ways
    patches: tuple[Callable[[], Any], ...] = ()


@dataclass(frozen=True)
class Found:
    graph: tuple[float, ...]  # milliseconds, by context
    wall: tuple[float, ...]
    error: float

    @property
    def score(self) -> float:
        return sum(self.graph)


class Bench:
    def __init__(self, model: Gemma) -> None:
        self.model, self.stack = model, Stack(model)
        self.rows = [self._row(context) for context in CONTEXTS]
        self.wanted = [self._plain(row) for row in self.rows]
        weight_VD, x_1D = model.embed_tokens.weight, normal(1, WIDTH)
        out_1V = torch.empty(1, VOCAB, device=DEVICE)
        self.head = micros(lambda: vector.scores(x_1D, weight_VD, 30.0, out_1V), 2) / 1000

    def _row(self, context: int) -> KVCache:
        room = Room(tokens=context + 64, span=context)
        row = KVCache(self.model.config, room, HALF, DEVICE)
        row.reserve(context)
        for buffer in row.buffers:
            buffer.k_SMH.normal_(0, 0.3)
            buffer.v_SMH.normal_()
        row.length = context
        return row

    def _plain(self, row: KVCache) -> Tensor:
        length = row.length
        with switched(False):
            token = torch.tensor([TOKEN], device=DEVICE)
            logits_V = self.model.logits(commit(self.model, row, token, chunk=8))[0].clone()
        row.truncate(length)
        return logits_V

    def measure(self, trial: Trial) -> Found:
        with ExitStack() as opened:
            opened.enter_context(switched(True))
            opened.enter_context(trying(trial.ways))
            for one in trial.patches:
                opened.enter_context(one())
            teller = Teller(self.model, self.stack)
            pairs = list(zip(self.rows, self.wanted, strict=True))
            errors = [self._error(teller, row, want) for row, want in pairs]
            graphs = [self._graph(teller, row) for row in self.rows]
            walls = [self._wall(teller, row).ms for row in self.rows]
        return Found(tuple(graphs), tuple(walls), max(errors))

    def _told(self, teller: Teller, row: KVCache) -> Tensor:
        logits_V = teller.tell(TOKEN, row)
        assert logits_V is not None, "the token was refused"
        row.truncate(row.length - 1)
        return logits_V

    def _error(self, teller: Teller, row: KVCache, want_V: Tensor) -> float:
        return largest(self._told(teller, row), want_V)

    def _graph(self, teller: Teller, row: KVCache) -> float:
        """Milliseconds of the captured pass: the median."""
        self._told(teller, row)
        graph, times = teller.graphs.captured["commit"], []
        for _ in range(REPLAYS):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            graph.replay()
            end.record()
            end.synchronize()
            times.append(begin.elapsed_time(end))
        return statistics.median(times)

    def _wall(self, teller: Teller, row: KVCache) -> Times:
        state, length = {"token": TOKEN}, row.length

        def tell() -> None:
            logits_V = teller.tell(state["token"], row)
            assert logits_V is not None, "the token was refused"
            state["token"] = int(logits_V.argmax())

        found = wall(tell, TOKENS, warm=3)
        row.truncate(length)
        return found

    def show(self, name: str, found: Found, note: str = "") -> None:
        layers = len(self.stack.layers)
        each = "/".join(f"{1000 * (ms - self.head) / layers:.1f}" for ms in found.graph)
        graph = "/".join(f"{ms:.3f}" for ms in found.graph)
        walls = "/".join(f"{ms:.3f}" for ms in found.wall)
        times = f"{each:>11} us a layer  graph {graph}  wall {walls} ms"
        print(f"{times}  err {found.error:.1e}  {name} {note}", flush=True)

    def attempt(self, name: str, trial: Trial) -> Found | None:
        try:
            return self.measure(trial)
        except Exception as error:
            print(f"FAILED {name}: {type(error).__name__}: {str(error)[:300]}", flush=True)
            return None


# --- cuts


@contextmanager
def entry(cut: mlp_1.Cut, bits: int) -> Iterator[None]:
    with patch.dict(mlp_1.TABLE, {bits: cut}):
        yield


def mlp_cuts(bits: int) -> Iterator[tuple[str, Callable[[], Any]]]:
    used = mlp_1.TABLE[bits]
    wide = {16: 1, 8: 2, 4: 2}[bits]
    for change in (
        {"down_columns": 4 * wide},
        {"down_columns": 4 * wide, "down_warps": 2},
        {"columns": 2 * wide},
        {"columns": 4 * wide, "warps": 4, "depth": 512},
        {"columns": 2 * wide, "depth": 512},
    ):
        cut = replace(used, **change)
        if cut != used:
            yield f"mlp {change}", partial(entry, cut, bits)


def attention_cuts() -> Iterator[tuple[str, Callable[[], Any]]]:
    """For one token: heads of 256 and of 512 apart."""
    for width, keys, share, change in (
        (512, 32, 33, {}),
        (512, 32, 33, {"half": True}),
        (512, 64, 33, {"stages": 2}),
        (512, 16, 66, {}),
        (256, 64, 16, {"stages": 2}),
        (256, 64, 8, {"stages": 2}),
        (256, 32, 16, {"half": True}),
        (256, 32, 32, {}),
    ):
        given = {"keys": keys, "parts": share, **change}
        yield f"attention {width}: {given}", partial(attention_cut, width, given)


@contextmanager
def attention_cut(width: int, given: dict[str, Any]) -> Iterator[None]:
    before = attention.cut

    def cut(queries: int, kv_heads: int, head: int) -> attention.Cut:
        found = before(queries, kv_heads, head)
        return found if queries > 16 or head != width else replace(found, **given)

    with patch.object(attention, "cut", cut):
        yield


def vector_cuts() -> Iterator[tuple[str, Callable[[], Any]]]:
    """The product before the heads and the one behind attention."""
    for outputs, depth, form in (
        (8192, 2816, vector.Cut(2, 4096)),
        (8192, 2816, vector.Cut(4, 4096, 8)),
        (8192, 2816, vector.Cut(2, 1024)),
        (2816, 4096, vector.Cut(4, 4096, 8)),
        (2816, 4096, vector.Cut(1, 4096, 2)),
        (2816, 4096, vector.Cut(4, 2048)),
    ):
        name = f"product {outputs} of {depth}: {form}"
        yield name, partial(vector_cut, (outputs, depth), form)


@contextmanager
def vector_cut(size: tuple[int, int], form: vector.Cut) -> Iterator[None]:
    before = vector.cut

    def cut(outputs: int, depth: int, *, is_gated: bool) -> vector.Cut:
        is_meant = (outputs, depth) == size and not is_gated
        return form if is_meant else before(outputs, depth, is_gated=is_gated)

    with patch.object(vector, "cut", cut):
        yield


# --- the search


def better(found: Found, best: Found, way: str) -> bool:
    if way in HOST:
        return sum(found.wall) < 1.01 * sum(best.wall)  # the wall is noisy
    return found.score < GAIN * best.score


def try_ways(bench: Bench, names: list[str], end: float) -> tuple[Trial, Found | None]:
    kept = Trial(NONE)
    best = bench.attempt("every way off", kept)
    if best is not None:
        bench.show("every way off", best)
    for way in names:
        if time.monotonic() > end:
            print("# no time for", way)
            continue
        trial = Trial(replace(kept.ways, **{way: True}))
        found = bench.attempt(way, trial)
        if found is None:
            continue
        is_better = best is None or better(found, best, way)
        bench.show(f"+ {way}", found, "kept" if is_better else "")
        if is_better:
            kept, best = trial, found
    return kept, best


def try_cuts(bench: Bench, kept: Trial, best: Found | None, end: float, bits: int) -> Trial:
    cuts = [*(mlp_cuts(bits) if kept.ways.joint else ()), *attention_cuts(), *vector_cuts()]
    for name, make in cuts:
        if best is None or time.monotonic() > end:
            print("# no time for", name)
            continue
        trial = replace(kept, patches=(*kept.patches, make))
        found = bench.attempt(name, trial)
        if found is None:
            continue
        is_better = better(found, best, name)
        bench.show(name, found, "kept" if is_better else "")
        if is_better:
            kept, best = trial, found
    return kept


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quant", choices=list(BITS), default="none")
    parser.add_argument("--seconds", type=float, default=40)
    parser.add_argument("--layers", type=int, default=30)
    parser.add_argument("--only", nargs="+", choices=ORDER, default=list(ORDER))
    parser.add_argument("--profile", action="store_true", help="the kernels of what was kept")
    return parser.parse_args()


@torch.inference_mode()
def main() -> None:
    arguments = parse()
    began = time.monotonic()
    bench = Bench(built(shallow(arguments.layers), arguments.quant))
    is_early = switch_early(True)
    print(f"# {arguments.quant}: ready after {time.monotonic() - began:.1f} s, early {is_early}")
    print(f"# head {1000 * bench.head:.0f} us; before the token: {CONTEXTS}", flush=True)
    end = time.monotonic() + arguments.seconds
    kept, best = try_ways(bench, arguments.only, end)
    now = bench.attempt("as set", Trial(Ways()))
    if now is not None:
        bench.show("as set now", now)
    kept = try_cuts(bench, kept, best, end, BITS[arguments.quant])
    if (last := bench.attempt("all that was kept", kept)) is not None:
        bench.show("all that was kept", last)
    print(f"# kept {kept.ways}; {time.monotonic() - began:.1f} s", flush=True)
    if arguments.profile:
        with switched(True), trying(kept.ways):
            teller = Teller(bench.model, bench.stack)
            count, table = profile(lambda: bench._told(teller, bench.rows[-1]))
        print(f"{count} launches\n{table}")


if __name__ == "__main__":
    main()
