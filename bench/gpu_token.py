"""A token of the AR mode on a GPU: how long it takes, and which cuts make it faster.

    python bench/gpu_token.py [--quant none] [--seconds 40] [--layers 30] [--profile]

The released shapes, random weights, random keys before the token. `graph` is the captured pass on
the device, alone; `wall` is from the host's asking to its knowing the next token. `a layer` is
the graph without the head. The first line is the code as it stands. A cut that makes the graph
shorter is kept, and the rest is tried on top of it. What fails is printed, and the rest goes on.
Nothing new is begun after so many seconds.

`err` is by how much logits are off from the plain path's, relative, on a model of two layers, one
of each kind, with the same cuts: many random layers make any rounding as large as the logits
themselves. The median over a few tokens, since a router that is almost undecided may choose
otherwise for rounding alone. Usual is about 1e-2 in bfloat16, and up to 1e-1 in fewer bits, where
the plain path quantizes the row too; a line with several times what the first one has is wrong.
"""

import argparse
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from gpu_measure import CAP, HALF, micros
from gpu_ours import DEVICE, Times, built, wall
from gpu_profile import profile
from shapes import shallow
from torch import Tensor

from dgemma.cache import KVCache, Room
from dgemma.denoise import commit
from dgemma.graph.token import Teller
from dgemma.model import Gemma
from dgemma.ops.fast import switched
from dgemma.ops.kernels import attention, vector
from dgemma.ops.kernels.launch import switch_early
from dgemma.stack import Stack

CONTEXTS = (512, 2048)
TOKEN, REPLAYS, TOKENS = 7, 16, 12
CHECKED = (7, 1009, 2003, 3001, 4001)  # tokens; any
GAIN = 0.998  # of the time, at most: what is kept is faster by more than the noise

Change = Callable[[], AbstractContextManager[None]]  # replaces a default for a while


@dataclass(frozen=True)
class Found:
    graph: tuple[float, ...]  # milliseconds, by context
    wall: tuple[float, ...]
    error: float

    @property
    def score(self) -> float:
        return sum(self.graph)


def filled(model: Gemma, context: int) -> KVCache:
    """A row with so many random keys."""
    row = KVCache(model.config, Room(tokens=context + 64, span=context), HALF, DEVICE)
    row.reserve(context)
    for buffer in row.buffers:
        buffer.k_SMH.normal_(0, 0.3)
        buffer.v_SMH.normal_()
    row.length = context
    return row


def told(teller: Teller, row: KVCache, token: int = TOKEN) -> Tensor:
    """The logits behind a token, until the next; the row forgets it."""
    logits_V = teller.tell(token, row)
    assert logits_V is not None, "the token was refused"
    row.truncate(row.length - 1)
    return logits_V


def off(got: Tensor, want: Tensor) -> float:
    return float((got - want).norm() / want.norm())


class Check:
    """A model of few layers beside its definition."""

    def __init__(self, model: Gemma) -> None:
        self.model, self.stack = model, Stack(model)
        self.rows = [filled(model, context) for context in CONTEXTS]
        self.wanted = [[self._plain(row, token) for token in CHECKED] for row in self.rows]

    def _plain(self, row: KVCache, token: int) -> Tensor:
        length = row.length
        with switched(False):
            token_1 = torch.tensor([token], device=DEVICE)
            logits_V = self.model.logits(commit(self.model, row, token_1, chunk=8))[0].clone()
        row.truncate(length)
        return logits_V

    def error(self) -> float:
        """Of the worse context."""
        teller = Teller(self.model, self.stack)
        found = []
        for row, wants in zip(self.rows, self.wanted, strict=True):
            pairs = zip(CHECKED, wants, strict=True)
            found.append([off(told(teller, row, token), want) for token, want in pairs])
        return max(statistics.median(offs) for offs in found)


class Bench:
    def __init__(self, model: Gemma, check: Check) -> None:
        self.model, self.stack, self.check = model, Stack(model), check
        self.rows = [filled(model, context) for context in CONTEXTS]
        weight_VD = model.embed_tokens.weight
        x_1D, out_1V = weight_VD[:1].clone(), torch.empty(1, len(weight_VD), device=DEVICE)
        self.head = micros(lambda: vector.scores(x_1D, (weight_VD, None), CAP, out_1V), 2) / 1000

    def measure(self, changes: tuple[Change, ...]) -> Found:
        with ExitStack() as opened:
            opened.enter_context(switched(True))
            for change in changes:
                opened.enter_context(change())
            error = self.check.error()
            teller = Teller(self.model, self.stack)
            graphs = [self._graph(teller, row) for row in self.rows]
            walls = [self._wall(teller, row).ms for row in self.rows]
        return Found(tuple(graphs), tuple(walls), error)

    def _graph(self, teller: Teller, row: KVCache) -> float:
        """Milliseconds of the captured pass: the median."""
        told(teller, row)
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

    def show(self, name: str, found: Found) -> None:
        layers = len(self.stack.layers)
        each = "/".join(f"{1000 * (ms - self.head) / layers:.1f}" for ms in found.graph)
        graph = "/".join(f"{ms:.3f}" for ms in found.graph)
        walls = "/".join(f"{ms:.3f}" for ms in found.wall)
        times = f"{each:>11} us a layer  graph {graph}  wall {walls} ms"
        print(f"{times}  err {found.error:.1e}  {name}", flush=True)

    def attempt(self, name: str, changes: tuple[Change, ...]) -> Found | None:
        try:
            return self.measure(changes)
        except Exception as error:
            print(f"FAILED {name}: {type(error).__name__}: {str(error)[:300]}", flush=True)
            return None


# --- cuts


def attention_cuts() -> Iterator[tuple[str, Change]]:
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


def vector_cuts() -> Iterator[tuple[str, Change]]:
    """The product before the heads and the one behind attention: windowed layers, then full."""
    for outputs, depth, form in (
        (8192, 2816, vector.Cut(4, 2048)),
        (8192, 2816, vector.Cut(2, 4096)),
        (8192, 2816, vector.Cut(2, 1024)),
        (8192, 2816, vector.Cut(2, 2048)),
        (2816, 4096, vector.Cut(2, 4096)),
        (2816, 4096, vector.Cut(4, 4096, 8)),
        (2816, 4096, vector.Cut(1, 4096, 2)),
        (9216, 2816, vector.Cut(2, 1024)),
        (2816, 8192, vector.Cut(4, 4096, 8)),
    ):
        if form != vector.cut(outputs, depth, is_gated=False):
            name = f"product {outputs} of {depth}: {form}"
            yield name, partial(vector_cut, (outputs, depth), form)


@contextmanager
def vector_cut(size: tuple[int, int], form: vector.Cut) -> Iterator[None]:
    before = vector.cut

    def cut(outputs: int, depth: int, *, is_gated: bool, is_8: bool = False) -> vector.Cut:
        is_meant = (outputs, depth) == size and not is_gated
        return form if is_meant else before(outputs, depth, is_gated=is_gated, is_8=is_8)

    with patch.object(vector, "cut", cut):
        yield


def try_cuts(bench: Bench, best: Found, end: float) -> tuple[Change, ...]:
    """What makes it faster than the best so far, one on top of the other."""
    kept: tuple[Change, ...] = ()
    for name, change in [*vector_cuts(), *attention_cuts()]:
        if time.monotonic() > end:
            print("# no time for", name)
            continue
        found = bench.attempt(name, (*kept, change))
        if found is None:
            continue
        is_better = found.score < GAIN * best.score
        bench.show(f"{name}{' kept' if is_better else ''}", found)
        if is_better:
            kept, best = (*kept, change), found
    return kept


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quant", choices=("none", "fp8", "nvfp4"), default="none")
    parser.add_argument("--seconds", type=float, default=40)
    parser.add_argument("--layers", type=int, default=30)
    parser.add_argument("--profile", action="store_true", help="the kernels of a token, as it is")
    return parser.parse_args()


@torch.inference_mode()
def main() -> None:
    arguments = parse()
    began = time.monotonic()
    check = Check(built(shallow(2), arguments.quant, even=False))  # attention counts in full
    bench = Bench(built(shallow(arguments.layers), arguments.quant), check)
    is_early = switch_early(True)
    print(f"# {arguments.quant}: ready after {time.monotonic() - began:.1f} s, early {is_early}")
    print(f"# head {1000 * bench.head:.0f} us; before the token: {CONTEXTS}", flush=True)
    end = time.monotonic() + arguments.seconds
    now = bench.attempt("as it is", ())
    if now is not None:
        bench.show("as it is", now)
        kept = try_cuts(bench, now, end)
        if kept and (last := bench.attempt("all that was kept", kept)) is not None:
            bench.show("all that was kept", last)
    print(f"# {time.monotonic() - began:.1f} s", flush=True)
    if arguments.profile:
        with switched(True):
            teller = Teller(bench.model, bench.stack)
            count, table = profile(lambda: told(teller, bench.rows[-1]))
        print(f"{count} launches\n{table}")


if __name__ == "__main__":
    main()
