"""Cost of every kind of request on one GPU, through the engine, on random weights.

    python bench/paths.py [--quant fp8|nvfp4|none] [--only single temperature schema ...] [--out F]
    python bench/paths.py --only --agree 500 --soak 2000 --http      # without the table
    python bench/paths.py --tiny --agree 40 --soak 80 --http --start # a CPU, in a minute

One process and one model of the released shapes: a single request, the same with temperature,
drafts, pins and an old version, a JSON schema, requests at once, AR, a long prompt and a schema
arriving, a hole filled, an image tower and requests with a picture. A fixed number of steps is
taken on each canvas, since random weights never converge: times are valid for a step and say
nothing about the number of steps. `at most` is the target of a row. Ratios are to the single plain
request, those of AR to a single AR request. With `--tokenizer` grammars run on the released
vocabulary instead of one in which most words of a schema are spelled byte by byte. Exits 1 if a
part or a check fails; a missed target is no failure.
"""

import argparse
import dataclasses
import os
import random
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

from _paths_checks import agree, agree_nano, soak
from _paths_common import (
    WARM_RUNS,
    Bench,
    EvalPrompt,
    FillParams,
    Pins,
    Report,
    Run,
    median,
)
from _paths_http import http_table
from _paths_image import images

from dgemma import fill
from dgemma.device import bound_kernel_cache

COLUMNS = ("request", "ms a step or token", "ratio", "tokens/s in all", "at most")
SINGLE_MS = {"none": 15.4, "fp8": 9.2, "nvfp4": 8.3}
AR_MS = {"none": 2.9}
VARIANT, SCHEMA, OVER_AR, FAST_FILL_S = 1.05, 1.3, 3.0, 0.30
BATCH = {2: 1.4, 4: 2.0, 8: 3.2, 16: 5.5}
AR_BATCH = {4: 1.8, 16: 3.5}
RUNNING = 4  # canvases that run when a long prompt arrives
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 4, "maxLength": 40},
        "role": {"enum": ["engineer", "designer", "manager", "analyst"]},
        "email": {"type": "string", "minLength": 4, "maxLength": 40},
        "age": {"type": "integer", "minimum": 18, "maximum": 99},
        "active": {"type": "boolean"},
        "note": {"type": "string", "minLength": 4, "maxLength": 120},
    },
    "required": ["name", "role", "email", "age", "active", "note"],
    "additionalProperties": False,
}
SOURCE = """import csv
from pathlib import Path


def read_rows(path: Path) -> list[dict[str, str]]:
    with path.open(encoding="utf-8", newline="") as lines:
        return list(csv.DictReader(lines))


def total(rows: list[dict[str, str]], column: str) -> float:
    result = 0.0
    for row in rows:
        <|fill|>
    return result


def mean(rows: list[dict[str, str]], column: str) -> float:
    return total(rows, column) / max(1, len(rows))
"""


def schema(people: int) -> dict[str, Any]:
    """An object with a list of people: about 60 tokens for each of them."""
    team = {"type": "array", "minItems": people, "maxItems": people, "items": PERSON}
    return {
        "type": "object",
        "properties": {"team": {"type": "string", "maxLength": 40}, "people": team},
        "required": ["team", "people"],
        "additionalProperties": False,
    }


def target(limit: float, found: float, unit: str = "x") -> str:
    """A target beside whether it is met."""
    return f"{limit:g}{unit} {'met' if found <= limit else 'MISSED'}"


def absolute(bench: Bench, limits: dict[str, float]) -> float | None:
    """The target in milliseconds; the tiny model has none."""
    return None if bench.arguments.tiny else limits.get(bench.arguments.quant)


def single(bench: Bench, report: Report) -> None:
    run, limit = bench.single, absolute(bench, SINGLE_MS)
    ms = run.ms_per_step
    goal = "" if limit is None else target(limit, ms, " ms")
    report.row("diffusion, 1 request", ms, "1x", run.tokens_per_s, goal)
    (done,) = run.dones
    report.extra(
        f"Single request: prefill {1000 * done.prefill_seconds:.1f} ms, {done.tokens} tokens in"
        f" {done.steps} steps of {done.blocks} canvases."
    )
    if memory := bench.peak_memory():
        report.extra(f"Memory up to the first part: {memory}.")


def variants(bench: Bench, report: Report) -> None:
    """One request with an option that must not leave the fast path."""
    base, rng = bench.single.ms_per_step, random.Random(0)
    length = bench.canvas_length

    def draw(count: int) -> tuple[int, ...]:
        return tuple(rng.randrange(256, bench.vocab - 1) for _ in range(count))

    positions = tuple(range(0, length, 8))
    kinds: dict[str, dict[str, Any]] = {
        "temperature 0.7": {"temperature": 0.7},
        "drafts": {"drafts": True},
        f"{len(positions)} pins on the first canvas": {
            "pins": Pins(positions, draw(len(positions)))
        },
        "an old version to start from": {"initial_canvas": draw(bench.arguments.tokens)},
    }
    for name, changes in kinds.items():
        run = bench.repeat(
            lambda changes=changes: [bench.plain(**changes)],  # type: ignore[misc]
            bench.arguments.runs,
            lambda run: run.ms_per_step,
        )
        ratio = run.ms_per_step / base
        goal = target(VARIANT, ratio)
        report.row(f"diffusion, {name}", run.ms_per_step, f"{ratio:.2f}x", run.tokens_per_s, goal)


def constrained(bench: Bench, report: Report) -> None:
    """Time a reply constrained by a JSON schema, in diffusion and in AR."""
    work = bench.arguments
    begin = time.perf_counter()
    constraint = bench.engine.constraint(schema=schema(work.people))
    seconds = time.perf_counter() - begin
    limits = {"constraint": constraint, "max_tokens": work.schema_tokens}
    canvas = bench.repeat(lambda: [bench.plain(**limits)], work.runs, lambda run: run.ms_per_step)
    ratio = canvas.ms_per_step / bench.single.ms_per_step
    rate, goal = canvas.tokens_per_s, target(SCHEMA, ratio)
    report.row("diffusion, JSON schema", canvas.ms_per_step, f"{ratio:.2f}x", rate, goal)
    base = bench.ar_single.pass_ms
    ar = bench.repeat(
        lambda: [bench.ar(work.schema_tokens, constraint=constraint)], 1, lambda run: run.pass_ms
    )
    ratio = ar.pass_ms / base
    report.row("AR, JSON schema", ar.pass_ms, f"{ratio:.2f}x of AR", ar.tokens_per_s, "")
    times = canvas.tokens_per_s / max(1e-9, ar.tokens_per_s)
    least = f"at least {OVER_AR:g}x {'met' if times >= OVER_AR else 'MISSED'}"
    report.row("JSON schema, diffusion over AR", "", f"{times:.2f}x tokens/s", "", least)
    canvas_done, ar_done = canvas.dones[0], ar.dones[0]
    report.extra(
        f"JSON schema: schema compiled in {seconds:.2f} s;"
        f" diffusion {canvas_done.tokens} tokens in {canvas_done.steps} steps of"
        f" {canvas_done.blocks} canvases ({canvas_done.finish}), AR {ar_done.tokens} tokens"
        f" ({ar_done.finish})."
    )


def batches(bench: Bench, report: Report) -> None:
    base, tokens = bench.single.ms_per_step, bench.arguments.batch_tokens
    for count, limit in BATCH.items():

        def make(count: int = count) -> list[EvalPrompt]:
            return [bench.plain(max_tokens=tokens, seed=seed) for seed in range(count)]

        run = bench.repeat(make, 1, lambda run: run.pass_ms)
        ratio = run.pass_ms / base
        goal, name = target(limit, ratio), f"diffusion, {count} requests"
        report.row(name, run.pass_ms, f"{ratio:.2f}x", run.tokens_per_s, goal)


def autoregressive(bench: Bench, report: Report) -> None:
    first = bench.ar_single
    ms, limit = first.pass_ms, absolute(bench, AR_MS)
    goal = "" if limit is None else target(limit, ms, " ms")
    report.row("AR, 1 request", ms, "1x of AR", first.tokens_per_s, goal)
    for count, most in AR_BATCH.items():
        for _ in range(WARM_RUNS):
            bench.run([bench.ar(8) for _ in range(count)])
        run = bench.run([bench.ar(bench.arguments.ar_tokens) for _ in range(count)])
        ratio = run.pass_ms / ms
        goal, name = target(most, ratio), f"AR, {count} requests"
        report.row(name, run.pass_ms, f"{ratio:.2f}x of AR", run.tokens_per_s, goal)


def arrival(bench: Bench, report: Report) -> None:
    """Requests that arrive while canvases run: the longest gap between two steps of these."""
    work = bench.arguments
    numbers = iter(range(work.people + 1, work.people + 2 + WARM_RUNS))

    def prompt() -> EvalPrompt:
        return EvalPrompt(bench.prompt(work.long), bench.diffusion(2, max_tokens=1))

    def new_grammar() -> EvalPrompt:
        constraint = bench.engine.constraint(schema=schema(next(numbers)))
        return bench.plain(constraint=constraint, max_tokens=2 * work.schema_tokens)

    known = bench.engine.constraint(schema=schema(work.people))
    kinds: dict[str, Callable[[], EvalPrompt]] = {
        f"a prompt of {work.long}": prompt,
        "a JSON schema new to the engine": new_grammar,
        "a known JSON schema": lambda: bench.plain(constraint=known, max_tokens=work.schema_tokens),
    }
    for name, make in kinds.items():
        for _ in range(WARM_RUNS):
            gaps(bench, make())
        usual, longest, is_over = gaps(bench, make())
        name += "" if is_over or make is not prompt else " (NOT READ TO ITS END: raise --tokens)"
        ratio = f"{longest / usual:.2f}x of their step"
        report.row(f"longest gap of {RUNNING} canvases, {name} arriving", longest, ratio, "", "")


def long_prompt(bench: Bench, report: Report) -> None:
    """Time to read a long prompt alone, to the first token."""
    length = bench.arguments.long

    def make() -> list[EvalPrompt]:
        return [EvalPrompt(bench.prompt(length), bench.diffusion(2, max_tokens=1))]

    run = bench.repeat(make, min(3, bench.arguments.runs), lambda run: run.seconds)
    ms = 1000 * run.dones[0].prefill_seconds
    report.row(f"prefill of {length} tokens", ms, "", length / max(1e-9, ms / 1000), "")


def gaps(bench: Bench, arriving: EvalPrompt) -> tuple[float, float, bool]:
    """Median and longest milliseconds between two steps of a running canvas, by its drafts.

    The median is of the time before the request arrives, the longest gap of the time after; the
    last value is True if it ended.
    """
    engine = bench.engine
    running = [bench.plain(drafts=seed == 0, seed=seed) for seed in range(RUNNING)]
    requests = [engine.submit(engine.generation(one.prompt, one.params)) for one in running]
    watched, ends = requests[0], list[float]()

    def advance() -> None:
        seen, end = len(watched.events), bench.step().end
        if len(watched.events) > seen:
            ends.append(end)

    while len(ends) < bench.arguments.steps and not watched.is_over:
        advance()
    usual, first = median(_gaps(ends)), len(ends) - 1
    late = engine.submit(engine.generation(arriving.prompt, arriving.params))
    while not late.is_over and not watched.is_over:
        advance()
    is_over = late.is_over
    for request in [*requests, late]:
        engine.cancel(request)
    bench.forget()
    return usual, max(_gaps(ends[first:]), default=float("nan")), is_over


def _gaps(ends: Sequence[float]) -> list[float]:
    return [1000 * (after - before) for before, after in pairwise(ends)]


def fills(bench: Bench, report: Report) -> None:
    """One hole of a text of a few lines, by each effort there is."""
    names = {one.name for one in dataclasses.fields(FillParams)}
    efforts: list[dict[str, Any]] = [{}]
    if "effort" in names:
        efforts = [{"effort": "fast"}, {"effort": "thorough"}]
    steps = bench.arguments.fill_steps
    limits: dict[str, Any] = {"max_tokens": min(32, bench.canvas_length // 2)}
    if steps:
        limits["sampler"] = bench.sampler(steps)
    for effort in efforts:
        times, found = [], None
        for seed in range(WARM_RUNS + bench.arguments.fills):
            found = fill(bench.engine, SOURCE, FillParams(seed=seed, **limits, **effort))
            times.append(found.seconds)
            bench.forget()
        assert found is not None
        seconds, kind = median(times[WARM_RUNS:]), effort.get("effort", "the only effort")
        goal = target(FAST_FILL_S, seconds, " s") if kind == "fast" else ""
        size = f"{found.canvases} canvases, {found.steps} steps in all"
        name = f"fill of one hole, {kind} ({size})"
        report.row(name, f"{1000 * seconds:,.0f} a fill", "", "", goal)


def start(bench: Bench, report: Report) -> None:
    """Seconds until requests are fast: the engine's start, then what the first requests add."""

    def added(make: Callable[[], EvalPrompt]) -> float:
        runs: list[Run] = [bench.run([make()]) for _ in range(2)]
        return runs[0].seconds - runs[1].seconds

    report.note(
        f"Start: weights made in {bench.load_seconds:.1f} s, engine ready in"
        f" {bench.start_seconds:.2f} s (self-test of kernels included), the first diffusion request"
        f" takes {added(bench.plain):.2f} s more than the second, the first AR request"
        f" {added(lambda: bench.ar(16)):.2f} s more."
    )


PARTS: dict[str, Callable[[Bench, Report], None]] = {
    "single": single,
    "temperature": variants,
    "schema": constrained,
    "batch": batches,
    "ar": autoregressive,
    "prefill": long_prompt,
    "arrival": arrival,
    "fill": fills,
    "image": images,
}
# Sizes of a run on a GPU, and of one that only proves that the script works.
SIZES = {
    "prompt": (1024, 48),
    "tokens": (1024, 64),
    "batch_tokens": (512, 32),
    "ar_tokens": (192, 16),
    "steps": (16, 4),
    "long": (8192, 1200),
    "people": (4, 2),
    "schema_tokens": (1024, 480),
    "runs": (3, 1),
    "fills": (5, 1),
    "fill_steps": (8, 2),
    "image_text": (32, 8),  # tokens after a picture
}


def parse(given: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quant", choices=["none", "bf16", "fp8", "nvfp4"], help="default fp8")
    parser.add_argument("--only", nargs="*", choices=list(PARTS), default=list(PARTS))
    parser.add_argument("--agree", type=int, default=0, help="requests alone and in batches")
    parser.add_argument("--soak", type=int, default=0, help="requests of all kinds, some cancelled")
    parser.add_argument("--http", action="store_true", help="both modes by number of clients")
    parser.add_argument("--start", action="store_true", help="seconds until requests are fast")
    parser.add_argument("--tiny", action="store_true", help="a tiny model: does the script work?")
    parser.add_argument("--layers", type=int, help="fewer of them")
    parser.add_argument("--head", type=int, choices=[8, 16], default=8, help="of fp8 and nvfp4")
    parser.add_argument("--soft", type=int, choices=[8, 16], default=8, help="with 8-bit heads")
    parser.add_argument("--tokenizer", type=Path, help="directory of the released tokenizer")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--clients", nargs="+", type=int, default=[1, 2, 4, 8, 16, 32, 64])
    for name, (usual, _) in SIZES.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, help=f"default {usual}")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args(given)
    for name, sizes in SIZES.items():
        if getattr(arguments, name) is None:
            setattr(arguments, name, sizes[arguments.tiny])
    quant = arguments.quant or ("none" if arguments.tiny else "fp8")
    arguments.quant = {"bf16": "none"}.get(quant, quant)
    return arguments


def main(given: Sequence[str] | None = None) -> int:
    arguments = parse(given)
    bound_kernel_cache(os.environ)  # as the server does; without it a CPU's memory grows for long
    bench, report = Bench(arguments), Report(arguments.out)
    begin = time.perf_counter()
    report.write(*bench.header())
    if arguments.start:
        start(bench, report)
    if arguments.only:
        report.table("Requests", COLUMNS)
        for name in arguments.only:
            attempt(name, report, partial(PARTS[name], bench, report))
        report.close_table()
    if arguments.agree:
        attempt("agree", report, partial(agree, bench, report, arguments.agree))
        attempt("nano", report, partial(agree_nano, bench, report, arguments.agree))
    if arguments.soak:
        attempt("soak", report, partial(soak, bench, report, arguments.soak))
    if arguments.http:
        attempt("http", report, partial(http_table, bench, report, arguments.clients))
    parts = ", ".join(f"{name} {seconds:.1f}" for name, seconds in report.seconds.items())
    report.note(f"{time.perf_counter() - begin:.0f} s in all after loading; parts: {parts} s.")
    for failure in report.failures:
        report.note(f"FAILED: {failure}")
    return 1 if report.failures else 0


def attempt(name: str, report: Report, work: Callable[[], None]) -> None:
    """Run one part; if it fails, the others still run."""
    begin = time.perf_counter()
    try:
        work()
    except Exception as error:
        traceback.print_exc()
        report.failures.append(f"{name}: {type(error).__name__}: {error!s:.200}")
    report.seconds[name] = time.perf_counter() - begin


if __name__ == "__main__":
    sys.exit(main())
