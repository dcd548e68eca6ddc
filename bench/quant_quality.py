"""What fewer bits cost the built-in model: answers, losses and tasks, each form beside float32.

    python bench/quant_quality.py [--forms float32,bfloat16,int8,fp8,nvfp4] [--out FILE.md]
        [--heldout DIR] [--texts 8] [--puzzles 16] [--calls 24] [--skip 0] [--rounds 9]

Divergence (KL, nats) and equal guesses are against float32, on held-out stories: a prompt of 256
tokens read causally, and behind it a canvas of the next 128, half of it noise, seen twice, the
second time with self-conditioning. Losses are of the same texts. Sudoku is by diffusion from the
text alone (givens free, no restart), by number of givens; JSON calls are by diffusion. The same
seeds for every form. On a CPU 8- and 4-bit floats are computed by their definition, so only the
steps of float32, bfloat16 and int8 are timed, in rounds that alternate. Below the table stands by
how much each form's steps differ from the first form's, case by case, with 95 % intervals. The last
line is JSON. `--skip` asks other cases.

nvfp4 is: experts in four bits with exact activations, which is their rounded weights multiplied
out, and the dense part in fp8. `fp8+head` and the like have the head in 8 bits too, `fp8+soft` head
and soft embeddings.
"""

import argparse
import json
import platform
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dgemma.cache import KVCache, Pass, Room, Span
from dgemma.canvas import NO_PINS, Noise
from dgemma.denoise import commit, start, step
from dgemma.engine import Engine
from dgemma.engine.fill import end_id
from dgemma.eval.answers import tune
from dgemma.eval.data import Data
from dgemma.eval.likelihood import causal_losses, denoising_losses
from dgemma.eval.measure import Z, ratio
from dgemma.eval.sudoku import How
from dgemma.eval.tasks.json_calls import parsed
from dgemma.eval.tasks.replies import answer, read_pairs
from dgemma.eval.tasks.sudoku import read_puzzles, solve_together
from dgemma.model import Gemma
from dgemma.sampler import Sampler
from dgemma.weights.agreement import between
from dgemma.weights.download import find_checkpoint
from dgemma.weights.head import shrink_head
from dgemma.weights.layouts import NVFP4
from dgemma.weights.load import load_model
from dgemma.weights.packed import Form, shrink_model
from dgemma.weights.quantize import quantize_checkpoint

PROMPT, CANVAS, LEVEL = 256, 128, 0.5
MAX_STEPS = 48
CPU = torch.device("cpu")
HEAD, SOFT = "+head", "+soft"
TIMED = ("float32", "bfloat16", "int8")
EACH = ", steps of each"


@dataclass(frozen=True, slots=True)
class Cases:
    """What every form is asked."""

    texts: list[Tensor]  # prompt and canvas, end to end
    puzzles: dict[str, list[str]]  # by number of givens
    data: Data
    calls: int
    skip: int  # calls before the first that is asked


def load(form: str, model: str) -> Engine:
    """An engine on the CPU whose weights have this form, `+head` and `+soft` included."""
    if form.endswith((HEAD, SOFT)):
        engine = load(form.rpartition("+")[0], model)
        shrink_head(engine.model, soft=form.endswith(SOFT))
        return engine
    if form in ("float32", "bfloat16"):
        return Engine.load(model, device="cpu", dtype=form, quant="none")
    if form == "int8":
        return Engine.load(model, device="cpu", quant="int8")
    if form == "fp8":
        return Engine.load(model, device="cpu", dtype="float32", quant="fp8")
    engine = Engine.load(model, device="cpu", dtype="float32", quant="none")
    with tempfile.TemporaryDirectory() as place:
        quantize_checkpoint(find_checkpoint(model), Path(place) / "nvfp4", NVFP4)
        small = load_model(Path(place) / "nvfp4", dtype=torch.float32).model
        shrink_model(small, Form(dense="fp8"))
        return Engine(small, engine.tokenizer, engine.template, engine.generation)


def read_cases(engine: Engine, arguments: argparse.Namespace) -> Cases:
    data = Data(arguments.heldout, arguments.heldout)
    bos = engine.model.config.bos_token_id
    ids = ([bos, *engine.tokenizer.encode(text)] for text in data.texts("stories.jsonl", None))
    texts = [torch.tensor(each[: PROMPT + CANVAS]) for each in ids if len(each) >= PROMPT + CANVAS]
    files = sorted(arguments.heldout.glob("sudoku_*.txt"), reverse=True)
    puzzles = {
        path.stem.removeprefix("sudoku_"): read_puzzles(path)[arguments.skip :][: arguments.puzzles]
        for path in files
    }
    texts = texts[: arguments.texts]
    return Cases(texts, puzzles, data, arguments.calls, arguments.skip)


@torch.inference_mode()
def logits_of(model: Gemma, text_T: Tensor) -> Tensor:
    """Logits of a prompt, and of the half-noised canvas behind it without and with a last step."""
    generator = torch.Generator().manual_seed(0)
    clean_L = text_T[PROMPT:]
    is_noise = torch.rand(clean_L.shape, generator=generator) < LEVEL
    noise_L = torch.randint(model.config.vocab_size, clean_L.shape, generator=generator)
    canvas_L = torch.where(is_noise, noise_L, clean_L)
    cache = KVCache(model.config, Room(tokens=PROMPT), model.embed_tokens.weight.dtype, CPU)
    writing = Pass([Span(cache, PROMPT, commit=True)])
    causal_TV = model.logits(model.encode(text_T[:PROMPT], writing))
    writing.close()
    reading = Pass([Span(cache, CANVAS, commit=False)])
    first_TV = model.logits(model.denoise(canvas_L, None, reading))
    soft_TD = model.embed_soft(first_TV.softmax(-1))
    second_TV = model.logits(model.denoise(canvas_L, soft_TD, reading))
    return torch.cat([causal_TV, first_TV, second_TV])


def answers(engine: Engine, cases: Cases) -> dict[str, Any]:
    """Losses and task scores of one form; shares as right ones of how many."""
    tune(engine, 8)
    texts = [text.tolist() for text in cases.texts]
    causal = [loss for each in causal_losses(engine.model, texts) for loss in each]
    noised = denoising_losses(engine.model, texts, LEVEL, end_id(engine), 0)
    found: dict[str, Any] = {
        "next-token loss": statistics.fmean(causal),
        "denoising loss": statistics.fmean(loss for one in noised for loss in one.conditioned),
    }
    for givens, puzzles in cases.puzzles.items():
        solved = solve_together(engine, puzzles, How(pinned=False, seed=0))
        found[f"Sudoku {givens}"] = (sum(one.is_right for one in solved), len(solved))
        found[f"Sudoku {givens}, steps"] = statistics.fmean(one.steps for one in solved)
        found[f"Sudoku {givens}{EACH}"] = [one.steps for one in solved]
    pairs = read_pairs(cases.data, "json_calls.jsonl", cases.skip + cases.calls)[cases.skip :]
    replies = next(iter(answer(engine, pairs, "json_calls", 0)))
    both = zip(replies.answers, pairs, strict=True)
    right = [parsed(a) == parsed(pair.reply) for a, pair in both]
    found["JSON calls"] = (sum(right), len(right))
    found["JSON calls, steps"] = statistics.fmean(replies.steps)
    found[f"JSON calls{EACH}"] = list(replies.steps)
    return found


def stepper(model: Gemma) -> Callable[[], object]:
    """One denoising step behind a prompt, again and again."""
    cache = KVCache(model.config, Room(tokens=2 * PROMPT), model.embed_tokens.weight.dtype, CPU)
    generator = torch.Generator().manual_seed(0)
    vocab, length = model.config.vocab_size, model.config.canvas_length
    commit(model, cache, torch.randint(vocab, (PROMPT,), generator=generator), chunk=PROMPT)
    context = Pass([Span(cache, length, commit=False)])
    noise = Noise(seed=1).block(0, MAX_STEPS, length, vocab, CPU)
    (row,) = step(model, context, [start(Sampler(max_steps=MAX_STEPS), noise, NO_PINS)])
    return lambda: step(model, context, [row])


def step_times(engines: dict[str, Engine], rounds: int) -> dict[str, float]:
    """Milliseconds a step, the median of rounds that alternate; the first warms up."""
    works = {form: stepper(engine.model) for form, engine in engines.items() if form in TIMED}
    times: dict[str, list[float]] = {form: [] for form in works}
    for _ in range(rounds + 1):
        for form, work in works.items():
            begin = time.perf_counter()
            work()
            times[form].append(1000 * (time.perf_counter() - begin))
    return {form: statistics.median(values[1:]) for form, values in times.items()}


def grown(before: list[float], after: list[float]) -> str:
    """By how much the mean of paired numbers grew, with its 95 % interval."""
    change, error = ratio([(b - a, a) for a, b in zip(before, after, strict=True)])
    low, high = 100 * (change - Z * error), 100 * (change + Z * error)
    return f"{100 * change:+.1f} % ({low:+.1f} to {high:+.1f})"


def growth(results: dict[str, dict[str, Any]]) -> Iterator[str]:
    """Steps of each form beside the first form's, case by case."""
    first, *others = results
    for name in [name for name in results[first] if name.endswith(EACH)]:
        for form in others:
            change = grown(results[first][name], results[form][name])
            yield f"{name.removesuffix(EACH)}, steps of {form} beside {first}: {change}"


def table(results: dict[str, dict[str, Any]]) -> Iterator[str]:
    """Markdown: a row for each measure, a column for each form."""
    yield "| | " + " | ".join(results) + " |"
    yield "|---" * (1 + len(results)) + "|"
    for name in next(iter(results.values())):
        if name.endswith(EACH):
            continue
        yield (
            f"| {name} | " + " | ".join(cell(found.get(name)) for found in results.values()) + " |"
        )


def cell(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, tuple):
        return f"{value[0]} of {value[1]}"
    return f"{value:.1e}" if 0 < abs(value) < 0.01 else f"{value:.4g}"


def measure(engines: dict[str, Engine], cases: Cases, rounds: int) -> dict[str, dict[str, Any]]:
    times = step_times(engines, rounds)
    first = next(iter(engines.values())).model
    wanted = [logits_of(first, text) for text in cases.texts]
    results: dict[str, dict[str, Any]] = {}
    for form, engine in engines.items():
        begin = time.perf_counter()
        near = [
            between([want, logits_of(engine.model, text)])
            for want, text in zip(wanted, cases.texts, strict=True)
        ]
        results[form] = {
            "step ms": times.get(form),
            "KL, mean": statistics.fmean(one.kl for one in near),
            "KL, worst": max(one.worst_kl for one in near),
            "same guess %": 100 * statistics.fmean(one.top_1 for one in near),
            **answers(engine, cases),
        }
        print(f"{form}: {time.perf_counter() - begin:.0f} s, {results[form]}", flush=True)
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="nano")
    parser.add_argument("--forms", default="float32,bfloat16,int8,fp8,nvfp4")
    parser.add_argument("--heldout", type=Path, default=Path("out/nano/heldout"))
    parser.add_argument("--texts", type=int, default=8)
    parser.add_argument("--puzzles", type=int, default=16)
    parser.add_argument("--calls", type=int, default=24)
    parser.add_argument("--skip", type=int, default=0)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    begin = time.perf_counter()
    engines = {form: load(form, arguments.model) for form in arguments.forms.split(",")}
    cases = read_cases(next(iter(engines.values())), arguments)
    results = measure(engines, cases, arguments.rounds)
    lines = [*table(results), "", *growth(results)]
    print("\n".join(lines))
    facts = {
        "bench": "quant_quality",
        "date": str(date.today()),
        "machine": platform.processor() or platform.machine(),
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "seconds": round(time.perf_counter() - begin),
        "sizes": [arguments.texts, arguments.puzzles, arguments.calls],
    }
    if arguments.out is not None:
        arguments.out.write_text("\n".join(lines) + f"\n\n{json.dumps(facts)}\n", encoding="utf-8")
    print(json.dumps({**facts, "results": results}))


if __name__ == "__main__":
    main()
