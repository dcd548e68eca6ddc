"""Quantized weights: what each form costs in quality, and how it loads.

    python bench/quant.py quality [--forms float32 bfloat16 int8 fp8 nvfp4] [--out FILE.md]
        [--heldout DIR] [--texts 8] [--puzzles 16] [--calls 24] [--skip 0] [--rounds 9]
    python bench/quant.py load [--layers 2] [--vocab 32768] [--directory DIR] [--device cuda]
        [--small]
    python bench/quant.py gguf FILE.gguf [--make] [--tiny] [--dtype bfloat16] [--device cuda]
        [--only resident nvfp4 kernels streamed]

quality  The built-in model on a CPU, each form compared with the first. KL divergence (nats) and
         equal argmax are of held-out stories: a prompt of 256 tokens read causally, and after it a
         canvas of the next 128, half of it noise, seen twice, the second time with
         self-conditioning. Losses are of the same texts. Sudoku is by diffusion from the text alone
         (givens free, no restart), by number of givens; JSON calls are by diffusion. The same seeds
         for every form. On a CPU fp8 and nvfp4 are computed by definition, so only float32,
         bfloat16 and int8 are timed, in rounds that alternate. Below the table: the change of each
         form's steps from the first form's, case by case, with 95 % intervals. nvfp4 has experts in
         four bits and the dense part in fp8. `fp8+head` has the LM head in fp8 too, `fp8+soft` head
         and soft embeddings; `bits:4,6` stores experts in 4 bits and the rest in 6; `gguf:Q4_K_M`
         is the model exported so and read back. `--skip` takes other cases; `--puzzles 0 --calls 0`
         leaves the tasks out. The last line is JSON.
load     A checkpoint of the released widths with few layers and random weights, written plain and
         in both released layouts, and loaded in each form it can have: seconds, peak and held
         memory, and KL divergence from bfloat16 (of packed files, from the same numbers
         dequantized).
gguf     A GGUF file of the released size: load time, a step, an AR token, memory; on a GPU each
         kernel and streaming too. `--make` writes random blocks first: 16.8 GB, some minutes.
"""

import argparse
import json
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import _gguf
import torch
from common import RELEASED, TINY, Facts, finish, head, in_turn, new_state, reset_memory, wait
from torch import Tensor

from dgemma.backends.base import ForwardInput, prefill
from dgemma.backends.choose import choose_backend
from dgemma.config import FULL, SLIDING, ModelConfig
from dgemma.engine import Engine
from dgemma.eval.answers import read_pairs, replies_by_mode, set_batch_size
from dgemma.eval.data import HELDOUT, Data
from dgemma.eval.likelihood import causal_losses, denoising_losses
from dgemma.eval.measure import Z, ratio
from dgemma.eval.replies import parse_json, read_puzzles
from dgemma.model.forward_batch import ForwardBatch, Segment
from dgemma.model.gemma import Gemma
from dgemma.model.kv_cache import Capacity, KVCache
from dgemma.programs.infill.infill import end_id
from dgemma.programs.sudoku.solve import SudokuParams, solve
from dgemma.quant import quantize_int8
from dgemma.quant.head import quantize_head
from dgemma.weights.gguf_write import export_gguf
from dgemma.weights.hub import find_checkpoint
from dgemma.weights.int_layout import Bits, quantize_groups
from dgemma.weights.layer_formats import LayerFormat, Quant, quantize_model
from dgemma.weights.load import Checkpoint, load_model, random_model
from dgemma.weights.quant_schemes import NVFP4, SCHEMES
from dgemma.weights.quantize import agreement, between, quantize_checkpoint
from dgemma.weights.save import save_checkpoint

PROMPT, CANVAS, LEVEL = 256, 128, 0.5
CPU = torch.device("cpu")
HEAD, SOFT, BITS, GGUF = "+head", "+soft", "bits:", "gguf:"
TIMED = ("float32", "bfloat16", "int8")
EACH = ", steps of each"


@dataclass(frozen=True, slots=True)
class Cases:
    """Cases that every form is given."""

    texts: list[Tensor]  # prompt and canvas, end to end
    puzzles: dict[str, list[str]]  # by number of givens
    data: Data
    calls: int
    skip: int  # calls before the first


# --- quality


def load_form(form: str, model: str) -> Engine:
    """Load an engine on the CPU whose weights have this form."""
    if form.endswith((HEAD, SOFT)):
        engine = load_form(form.rpartition("+")[0], model)
        quantize_head(engine.model, soft=form.endswith(SOFT))
        return engine
    if form in ("float32", "bfloat16"):
        return Engine.load(model, device="cpu", dtype=form, quant="none")
    if form == "int8":
        return Engine.load(model, device="cpu", quant="int8")
    if form == "fp8":
        return Engine.load(model, device="cpu", dtype="float32", quant="fp8")
    if form.startswith(GGUF):
        with tempfile.TemporaryDirectory() as place:
            path = Path(place) / f"{form.removeprefix(GGUF)}.gguf"
            export_gguf(find_checkpoint(model), path, path.stem)
            return Engine.load(path, device="cpu", dtype="float32", quant="none")
    engine = Engine.load(model, device="cpu", dtype="float32", quant="none")
    if form.startswith(BITS):
        plain = load_model(find_checkpoint(model), dtype=torch.float32).model
        experts, rest = map(int, form.removeprefix(BITS).split(","))
        store(plain, Bits(experts=experts, rest=rest))
        return Engine(plain, engine.tokenizer, engine.template, engine.generation_config)
    with tempfile.TemporaryDirectory() as place:
        quantize_checkpoint(find_checkpoint(model), Path(place) / "nvfp4", NVFP4)
        small = load_model(Path(place) / "nvfp4", dtype=torch.float32).model
        quantize_model(small, LayerFormat(dense="fp8"))
        return Engine(small, engine.tokenizer, engine.template, engine.generation_config)


def store(model: Gemma, bits: Bits) -> None:
    """Round weights as storing and loading them in so many bits would."""
    for name, weight in model.state_dict().items():
        if weight.dim() > 1:
            count = bits.of(name, weight.shape)
            found = quantize_int8(weight) if count == 8 else quantize_groups(weight, count)
            weight.copy_(found.dequantize())


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
    """Logits of a prompt, and of a half-noised canvas without and with self-conditioning."""
    generator = torch.Generator().manual_seed(0)
    clean_L = text_T[PROMPT:]
    is_noise = torch.rand(clean_L.shape, generator=generator) < LEVEL
    noise_L = torch.randint(model.config.vocab_size, clean_L.shape, generator=generator)
    canvas_L = torch.where(is_noise, noise_L, clean_L)
    cache = KVCache(model.config, Capacity(tokens=PROMPT), model.embed_tokens.weight.dtype, CPU)
    writing = ForwardBatch([Segment(cache, PROMPT, commit=True)])
    causal_TV = model.logits(model.encode(text_T[:PROMPT], writing))
    writing.close()
    reading = ForwardBatch([Segment(cache, CANVAS, commit=False)])
    first_TV = model.logits(model.denoise(canvas_L, None, reading))
    soft_TD = model.soft_embed(first_TV.softmax(-1))
    second_TV = model.logits(model.denoise(canvas_L, soft_TD, reading))
    return torch.cat([causal_TV, first_TV, second_TV])


def answers(engine: Engine, cases: Cases) -> dict[str, Any]:
    """Losses and task scores of one form; scores as (right, of how many)."""
    set_batch_size(engine, 8)
    texts = [text.tolist() for text in cases.texts]
    causal = [loss for each in causal_losses(engine.model, texts) for loss in each]
    noised = denoising_losses(engine.model, texts, LEVEL, end_id(engine), 0)
    found: dict[str, Any] = {
        "next-token loss": statistics.fmean(causal),
        "denoising loss": statistics.fmean(loss for one in noised for loss in one.self_conditioned),
    }
    for givens, puzzles in cases.puzzles.items():
        if not puzzles:
            continue
        solved = solve(engine, puzzles, SudokuParams(pinned=False, seed=0))
        found[f"Sudoku {givens}"] = (sum(one.is_right for one in solved), len(solved))
        found[f"Sudoku {givens}, steps"] = statistics.fmean(one.steps for one in solved)
        found[f"Sudoku {givens}{EACH}"] = [one.steps for one in solved]
    if not cases.calls:
        return found
    pairs = read_pairs(cases.data, "json_calls.jsonl", cases.skip + cases.calls)[cases.skip :]
    replies = next(iter(replies_by_mode(engine, pairs, "json_calls", 0)))
    both = zip(replies.texts, pairs, strict=True)
    right = [parse_json(a) == parse_json(pair.reply) for a, pair in both]
    found["JSON calls"] = (sum(right), len(right))
    found["JSON calls, steps"] = statistics.fmean(replies.steps)
    found[f"JSON calls{EACH}"] = list(replies.steps)
    return found


def step_timer(model: Gemma) -> Callable[[], float]:
    """Return the timing of one denoising step after a prompt, in milliseconds."""
    backend, vocab = choose_backend(model), model.config.vocab_size
    cache = KVCache(model.config, Capacity(tokens=2 * PROMPT), model.embed_tokens.weight.dtype, CPU)
    generator = torch.Generator().manual_seed(0)
    prefill(backend, cache, torch.randint(vocab, (PROMPT,), generator=generator), PROMPT)
    (first,) = backend.run([ForwardInput(cache=cache, state=new_state(model))])

    def timed() -> float:
        begin = time.perf_counter()
        backend.run([ForwardInput(cache=cache, state=first.state)])
        return 1000 * (time.perf_counter() - begin)

    return timed


def step_times(engines: dict[str, Engine], rounds: int) -> dict[str, float]:
    """Milliseconds a step, the median of rounds that alternate."""
    works = {form: step_timer(engine.model) for form, engine in engines.items() if form in TIMED}
    return {form: statistics.median(times) for form, times in in_turn(works, rounds).items()}


def grown(before: list[float], after: list[float]) -> str:
    """Relative change of the mean of paired numbers, with its 95 % interval."""
    change, error = ratio([(b - a, a) for a, b in zip(before, after, strict=True)])
    low, high = 100 * (change - Z * error), 100 * (change + Z * error)
    return f"{100 * change:+.1f} % ({low:+.1f} to {high:+.1f})"


def growth(results: dict[str, dict[str, Any]]) -> Iterator[str]:
    """Change of each form's steps from the first form's, case by case."""
    first, *others = results
    for name in [name for name in results[first] if name.endswith(EACH)]:
        for form in others:
            change = grown(results[first][name], results[form][name])
            yield f"{name.removesuffix(EACH)}, steps of {form} against {first}: {change}"


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
            "same argmax %": 100 * statistics.fmean(one.top_1 for one in near),
            **answers(engine, cases),
        }
        print(f"{form}: {time.perf_counter() - begin:.0f} s, {results[form]}", flush=True)
    return results


def quality(arguments: argparse.Namespace) -> None:
    begin = time.perf_counter()
    engines = {form: load_form(form, arguments.model) for form in arguments.forms}
    cases = read_cases(next(iter(engines.values())), arguments)
    results = measure(engines, cases, arguments.rounds)
    lines = [*table(results), "", *growth(results)]
    print("\n".join(lines))
    facts = {
        **head("quant quality"),
        "seconds": round(time.perf_counter() - begin),
        "sizes": [arguments.texts, arguments.puzzles, arguments.calls],
    }
    if arguments.out is not None:
        arguments.out.write_text("\n".join(lines) + f"\n\n{json.dumps(facts)}\n", encoding="utf-8")
    finish({**facts, "results": results})


# --- load

# Forms that each file can be loaded in; the first is what the others are compared with.
FILES: dict[str, tuple[Quant, ...]] = {
    "plain": ("none", "fp8", "nvfp4"),
    "fp8": ("none", "own"),
    "nvfp4": ("none", "own", "nvfp4"),
}


def config_of(arguments: argparse.Namespace) -> ModelConfig:
    kinds = (SLIDING,) * (arguments.layers - 1) + (FULL,)
    if arguments.small:
        return replace(TINY, layer_types=kinds, hidden_size=128, vision=None)
    return replace(RELEASED, layer_types=kinds, vocab_size=arguments.vocab)


def write_files(config: ModelConfig, directory: Path, device: torch.device) -> dict[str, Path]:
    model = random_model(config, 0, device=device, dtype=torch.bfloat16).cpu()
    save_checkpoint(Checkpoint(model=model), directory / "plain")
    for name, scheme in SCHEMES.items():
        quantize_checkpoint(directory / "plain", directory / name, scheme)
    return {name: directory / name for name in FILES}


def load_timed(directory: Path, quant: Quant, device: torch.device) -> tuple[Gemma, str]:
    """Load a model; returns seconds and memory in words too."""
    is_gpu = device.type == "cuda"
    reset_memory(device)
    before = torch.cuda.memory_allocated() if is_gpu else 0
    begin = time.perf_counter()
    model = load_model(directory, device=device, dtype=torch.bfloat16, quant=quant).model
    wait(device)
    text = f"{time.perf_counter() - begin:6.2f} s"
    if is_gpu:
        peak = (torch.cuda.max_memory_allocated() - before) / 1e9
        text += f", peak {peak:.3f}, held {(torch.cuda.memory_allocated() - before) / 1e9:.3f} GB"
    return model, text


def load(arguments: argparse.Namespace) -> None:
    config, device = config_of(arguments), torch.device(arguments.device)
    directory = Path(tempfile.mkdtemp(dir=arguments.directory))
    facts: Facts = head("quant load", device)
    try:
        files = write_files(config, directory, device)
        for name, quants in FILES.items():
            reference, text = load_timed(files[name], quants[0], device)
            facts[f"{name} {quants[0]}"] = text
            print(f"{name:6} {quants[0]:6} {text}", flush=True)
            for quant in quants[1:]:
                facts[f"{name} {quant}"] = compared(files[name], quant, reference)
                print(f"{name:6} {quant:6} {facts[f'{name} {quant}']}", flush=True)
            del reference
    finally:
        shutil.rmtree(directory)
    finish(facts)


def compared(directory: Path, quant: Quant, reference: Gemma) -> str:
    device = reference.embed_tokens.weight.device
    try:
        model, text = load_timed(directory, quant, device)
        near = agreement(reference, model, 0, device)
    except Exception as error:  # one form that fails must not hide the others
        return f"{type(error).__name__}: {str(error).splitlines()[0][:120]}"
    return f"{text}: KL {near.kl:.1e}, worst {near.worst_kl:.1e}, same argmax {near.top_1:.3f}"


def parse(given: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    commands = parser.add_subparsers(required=True)
    one = commands.add_parser("quality", help="answers, losses and tasks of each form")
    one.set_defaults(run=quality)
    one.add_argument("--model", default="nano")
    one.add_argument("--forms", nargs="+", default=["float32", "bfloat16", "int8", "fp8", "nvfp4"])
    one.add_argument("--heldout", type=Path, default=HELDOUT)
    for name, usual in (("texts", 8), ("puzzles", 16), ("calls", 24), ("skip", 0), ("rounds", 9)):
        one.add_argument(f"--{name}", type=int, default=usual)
    one.add_argument("--out", type=Path)
    one = commands.add_parser("load", help="seconds, memory and divergence by file and form")
    one.set_defaults(run=load)
    one.add_argument("--layers", type=int, default=2)
    one.add_argument("--vocab", type=int, default=32768)
    one.add_argument("--small", action="store_true", help="narrow, for a CPU")
    one.add_argument("--directory", type=Path)
    one.add_argument("--device", default="cuda")
    one = commands.add_parser("gguf", help="a GGUF file: load, step, token, memory")
    one.set_defaults(run=_gguf.measure_file)
    _gguf.add_arguments(one)
    return parser.parse_args(given)


def main(given: Sequence[str] | None = None) -> None:
    arguments = parse(given)
    arguments.run(arguments)


if __name__ == "__main__":
    main()
