"""How to cut attention, and what the row statistics take, on a GPU.

    python bench/gpu_attention.py [canvas full token prefill stats] [--seconds 6]

Tries forms of each case for some seconds and prints the best few: microseconds, 10^12 operations a
second, greatest and root-mean-square error against float32, and both of the path that PyTorch alone
takes (`plain`), all in units of the result's own root mean square. Keys come from several sets, so
that they are not all in the cache. All forms are first compiled in as many processes as there are
cores; each part then runs in a process of its own, so that a fault ends only that part. What is
found goes by hand into `ops/kernels/attention.py`.
"""

import argparse
import itertools
import multiprocessing
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from gpu_measure import micros_of
from torch import Tensor

from dgemma.ops.attention import Segment, attention_reference
from dgemma.ops.attention import attention as plain_attention
from dgemma.ops.kernels.attention import Cut, attention, cut, merge

HALF, DEVICE = torch.bfloat16, "cuda"
HEADS, CACHE = 16, 160e6  # query heads; bytes of keys that no cache holds
VOCAB, CAP = 262_144, 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """`length` queries behind `past` keys; a window makes it causal (0: no limit)."""

    part: str
    length: int
    past: int
    width: int
    window: int | None = None

    @property
    def kv_heads(self) -> int:
        return 8 if self.width == 256 else 2

    @property
    def name(self) -> str:
        kind = "" if self.window is None else f" causal {self.window}"
        return f"{self.width} {self.length}+{self.past}{kind}"

    @property
    def seen(self) -> float:
        """Pairs of a query and a key that it sees."""
        first, last = self.past + 1, self.past + self.length
        if self.window is None:
            return self.length * last
        if self.window == 0:
            return (first + last) * self.length / 2
        return sum(min(self.window, n) for n in range(first, last + 1))


CASES = [
    Case(part="canvas", length=256, past=512, width=256),
    Case(part="canvas", length=256, past=1023, width=256),
    Case(part="full", length=256, past=768, width=512),
    Case(part="full", length=256, past=32768, width=512),
    Case(part="token", length=1, past=1023, width=256, window=1024),
    Case(part="token", length=1, past=1023, width=512, window=0),
    Case(part="token", length=1, past=32768, width=512, window=0),
    Case(part="prefill", length=256, past=1023, width=256, window=1024),
    Case(part="prefill", length=8192, past=0, width=256, window=1024),
    Case(part="prefill", length=256, past=768, width=512, window=0),
    Case(part="prefill", length=8192, past=0, width=512, window=0),
]


def forms(case: Case) -> list[Cut]:
    """The default, and the likeliest others; only the number of parts costs no compilation."""
    if case.length == 1:
        shapes = [(16, 32, 4, 3, 1), (16, 64, 4, 2, 1), (16, 16, 4, 4, 1), (16, 16, 2, 4, 1)]
        shapes += [(16, 32, 4, 2, 1), (16, 32, 2, 3, 1), (16, 32, 8, 3, 1)]
        parts: tuple[int, ...] = (16, 32, 8) if case.width == 256 else (66, 32, 128)
    elif case.width == 256:
        shapes = [(128, 64, 8, 2, 1), (128, 32, 8, 3, 1), (64, 64, 4, 2, 1), (64, 32, 4, 2, 1)]
        shapes += [(128, 32, 8, 2, 1), (64, 64, 8, 2, 1), (64, 32, 4, 3, 1)]
        parts = (4, 2, 3, 8) if case.length == 256 else (1,)
    else:
        shapes = [(0, 0, 8, 0, 1), (64, 32, 8, 2, 1), (128, 32, 8, 2, 2), (64, 32, 4, 2, 2)]
        parts = (2, 1, 4) if case.length == 256 else (1,)
    found = [cut(case.length * HEADS // case.kv_heads, case.kv_heads, case.width)]
    for part, (queries, keys, warps, stages, slices) in itertools.product(parts, shapes):
        form = Cut(queries=queries, keys=keys, warps=warps, stages=stages, slices=slices)
        form = replace(form, parts=part, wide=queries == 0, half=case.length > 1)
        found.append(form)
        if part == parts[0] and not form.wide:
            found.append(replace(form, edges=False))
        if part == parts[0] and case.length == 256:
            found.append(replace(form, half=False))
    return list(dict.fromkeys(found))


# --- running


class Inputs:
    """Queries, and keys in several sets."""

    def __init__(self, case: Case, *, few: bool = False) -> None:
        torch.manual_seed(0)
        past = min(case.past, 64) if few else case.past
        shape = (past + case.length, case.kv_heads, case.width)
        self.case, size = case, 4 * shape[0] * shape[1] * shape[2]
        self.q_LNH = normal(case.length, HEADS, case.width) * case.width**-0.5
        sets = 1 if few else max(1, min(24, round(CACHE / size)))
        self.sets = [(normal(*shape), normal(*shape)) for _ in range(sets)]
        self.places = [
            torch.tensor([0, 0, 0, k.data_ptr(), v.data_ptr(), shape[0]], device=DEVICE)
            for k, v in self.sets
        ]

    def run(self, form: Cut, index: int = 0) -> Tensor:
        case = self.case
        return attention(self.q_LNH, self.places[index], case.kv_heads, case.window, form)

    def segment(self) -> Segment:
        k_SMH, v_SMH = self.sets[0]
        mask_LS = None
        if self.case.window is not None:
            place_L = self.case.past + torch.arange(self.case.length, device=DEVICE)
            back = place_L[:, None] - torch.arange(len(k_SMH), device=DEVICE)[None]
            mask_LS = (back >= 0) & (back < (self.case.window or 1 << 30))
        return Segment(k_SMH, v_SMH, mask_LS)

    def reference(self) -> tuple[Tensor, Tensor]:
        """In float32, and by PyTorch alone; of long inputs the last 512 queries."""
        seen, last = self.segment(), slice(-512, None)
        mask_LS = None if seen.mask_LS is None else seen.mask_LS[last]
        some = Segment(seen.k_SMH.float(), seen.v_SMH.float(), mask_LS)
        exact = attention_reference(self.q_LNH[last].float(), [some])
        some = Segment(seen.k_SMH, seen.v_SMH, mask_LS)
        return exact, plain_attention(self.q_LNH[last], [some])


def normal(*shape: int) -> Tensor:
    return torch.empty(shape, dtype=HALF, device=DEVICE).normal_()


def micros(work: Callable[[int], object], sets: int) -> float:
    """Time of one call; all sets take turns, several times if they are few."""
    return micros_of([partial(work, index) for index in range(sets)], -(-8 // sets))


def errors(got: Tensor, want: Tensor) -> str:
    """Greatest and root mean square, in units of what is wanted."""
    off, unit = got[-len(want) :].float() - want, want.square().mean().sqrt()
    largest, usual = off.abs().max() / unit, off.square().mean().sqrt() / unit
    return f"max {largest.item():.2e} rms {usual.item():.3e}"


def brief(form: Cut) -> str:
    shape = "wide" if form.wide else f"{form.queries}x{form.keys} w{form.warps} s{form.stages}"
    flags = f"{'' if form.edges else ' all-masked'}{'' if form.half else ' fp32-parts'}"
    return f"{shape} slices {form.slices} parts {form.parts}{flags}"


def search(case: Case, seconds: float) -> None:
    inputs = Inputs(case)
    exact, plain = inputs.reference()
    print(f"# {case.name}: {len(inputs.sets)} sets; plain {errors(plain, exact)}", flush=True)
    found, end = [], time.monotonic() + seconds
    for form in forms(case):
        if time.monotonic() > end:
            print(f"# {case.name}: out of time before {brief(form)}")
            break
        try:
            off = errors(inputs.run(form), exact)
            is_same = torch.equal(inputs.run(form), inputs.run(form))
            took = micros(lambda i, form=form: inputs.run(form, i), len(inputs.sets))  # type: ignore[misc]
        except Exception as error:  # too much shared memory, or a shape it cannot compile
            print(f"# failed: {brief(form)}: {type(error).__name__} {str(error)[:160]!r}")
            continue
        found.append((took, form, off + ("" if is_same else " NOT THE SAME TWICE")))
    default = forms(case)[0]
    for rank, (took, form, off) in enumerate(sorted(found, key=lambda one: one[0])):
        if rank < 6 or form == default or (form.wide and form.parts <= 2):
            rate = 4e-6 * case.seen * HEADS * case.width / took
            mark = "*" if form == default else " "
            print(f"{case.name:22}{mark}{took:8.1f} us {rate:5.0f} TF/s {off} | {brief(form)}")
    if case.length in (1, 256):
        _merge_time(inputs, default)


def _merge_time(inputs: Inputs, form: Cut) -> None:
    shape = (form.parts, *inputs.q_LNH.shape)
    dtype = torch.float16 if form.half else torch.float32
    out, log = torch.zeros(shape, device=DEVICE, dtype=dtype), torch.zeros(shape[:3], device=DEVICE)
    took = micros(lambda _: merge(out, log, torch.empty_like(inputs.q_LNH)), 8)
    print(
        f"{inputs.case.name:22} {took:8.1f} us of them the merge of {form.parts} parts", flush=True
    )


# --- row statistics


def stats() -> None:
    """Each kernel on flat logits, on sharp ones, and on some between."""
    for name, lead, count in (("flat", 0.0, 5), ("sharp", 24.0, 5), ("between", 17.0, 100)):
        raw = torch.empty(256, VOCAB, dtype=HALF, device=DEVICE).normal_(0, 2.0)
        raw[:, torch.randperm(VOCAB, device=DEVICE)[:count]] += lead
        for what, work in _stats_of(name, raw):
            try:
                print(f"stats {name:8} {what:24} {micros(work, 1):8.1f} us", flush=True)
            except Exception as error:
                print(f"# failed: {what}: {type(error).__name__} {str(error)[:160]!r}")


Works = Iterator[tuple[str, Callable[[int], object]]]


def _stats_of(name: str, raw: Tensor) -> Works:
    from dgemma.ops.kernels import row_stats, sparse

    heat = torch.linspace(0.4, 0.8, 256, device=DEVICE)
    uniform = torch.rand(256, dtype=torch.float64, device=DEVICE)
    ask = (heat, uniform, torch.zeros(256, dtype=torch.long, device=DEVICE))
    marks = row_stats.row_marks(raw, CAP, heat)
    merged = row_stats.row_merge(raw, CAP, ask, marks)
    found = sparse.survivors(raw, CAP, heat, marks, merged)
    table = torch.empty(VOCAB, 2816, dtype=HALF, device=DEVICE).normal_()
    p = (CAP * torch.tanh(raw.double() / CAP) / heat[:, None]).softmax(-1)
    off = (merged.entropy_T - torch.special.entr(p).sum(-1)).abs().max().item()
    likely = (p >= row_stats.SPARE).sum(-1)
    is_right = torch.equal(merged.top_T, raw.argmax(-1))
    print(
        f"# stats {name}: entropy off {off:.1e} (<= 2e-5), top {is_right}; likely tokens"
        f" {likely.min().item()} to {likely.max().item()}, found {found[2].max().item()},"
        f" mass {found[3].min().item():.5f} to {found[3].max().item():.5f}"
    )
    del p
    yield "marks", lambda _: row_stats.row_marks(raw, CAP, heat)
    yield "merge", lambda _: row_stats.row_merge(raw, CAP, ask, marks)
    yield "survivors", lambda _: sparse.survivors(raw, CAP, heat, marks, merged)
    yield "soft mean", lambda _: sparse.soft_mean(table, *found[:3])
    if name == "flat":
        yield from _marks_forms(raw, heat, marks)


def _marks_forms(raw: Tensor, heat: Tensor, marks: Any) -> Works:
    from dgemma.ops.kernels import row_stats

    out = (marks.peak_TC, marks.sum_TC, marks.moment_TC)
    for chunk, each, warps in (
        (2048, 4, 4),
        (2048, 8, 8),
        (2048, 2, 2),
        (2048, 1, 1),
        (2048, 2, 4),
    ):

        def work(_: int, chunk: int = chunk, each: int = each, warps: int = warps) -> None:
            row_stats._marks[(VOCAB // chunk // each, 256)](
                raw, heat, *out, VOCAB, VOCAB // chunk,
                CAP=CAP, W=chunk, EACH=each, EVEN=True, num_warps=warps,
            )  # fmt: skip

        yield f"marks {chunk} x {each} w{warps}", work


# --- processes


def compile_one(case: Case, form: Cut) -> None:
    """Run it once on few keys: the compiled kernels stay in Triton's cache on disk."""
    try:
        with torch.inference_mode():
            Inputs(case, few=True).run(form)
            torch.cuda.synchronize()
    except Exception:
        return  # is told where it is measured


def compile_all(parts: list[str]) -> None:
    """Every form once, and every number of parts once."""
    tasks: dict[Any, tuple[Case, Cut]] = {}
    for case in CASES:
        for form in forms(case) if case.part in parts else []:
            small = replace(case, length=min(case.length, 256))
            shape = (case.width, small.length)
            tasks.setdefault((*shape, case.window, replace(form, parts=0)), (small, form))
            tasks.setdefault((*shape, form.parts, form.half), (small, form))
    begin, context = time.monotonic(), multiprocessing.get_context("spawn")
    workers = max(1, min(12, (os.cpu_count() or 2) - 2))
    try:
        with ProcessPoolExecutor(workers, mp_context=context) as pool:
            list(pool.map(compile_one, *zip(*dict.fromkeys(tasks.values()), strict=True)))
    except Exception as error:  # a worker that died: what is missing is compiled later
        print(f"# compiling ended early: {type(error).__name__}")
    print(f"# {len(tasks)} forms compiled in {time.monotonic() - begin:.0f} s", flush=True)


PARTS = ["canvas", "full", "token", "prefill", "stats"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("parts", nargs="*", default=PARTS, help=f"of {', '.join(PARTS)}")
    parser.add_argument("--seconds", type=float, default=5.0, help="for each case")
    parser.add_argument("--alone", action="store_true", help="here, with nothing compiled before")
    arguments = parser.parse_args()
    if not arguments.alone:
        if set(arguments.parts) - {"stats"}:
            compile_all(arguments.parts)
        for part in arguments.parts:
            command = [
                sys.executable,
                __file__,
                part,
                "--alone",
                "--seconds",
                str(arguments.seconds),
            ]
            try:
                subprocess.run(command, check=False, timeout=60 + 5 * arguments.seconds)
            except subprocess.TimeoutExpired:
                print(f"# {part}: stopped, it took too long", flush=True)
        return
    with torch.inference_mode():
        for part in arguments.parts:
            if part == "stats":
                stats()
            for case in CASES:
                if case.part == part:
                    search(case, arguments.seconds)
                    torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
