"""JSON Schema constraints: which schemas are accepted, which texts fit, and the cost of a step.

    python bench/structure.py accept   [--hard] [--refused FILE]
    python bench/structure.py generate [--hard] [--model nano|random] [--mode diffusion]
    python bench/structure.py overhead [--tokenizer DIR] [--count 60]
    python bench/structure.py steps    [--model nano|random] [--count 40]
        (all: [--data DIR] [--max-tokens 256] [--steps 24] [--first 0] [--threads 1])

The schemas are those of JSONSchemaBench; `--hard` takes those with oneOf, not, dependencies and the
like. `accept` compiles all of them for nano's vocabulary. `generate --count 300` takes the same 300
each time, 60 of each part, with `--first` so that it can be run in pieces; a finished text is
validated by `jsonschema`, its formats as annotations. `random` is a tiny model of random weights
with nano's tokenizer. `overhead` is the cost of a step outside the model with a tokenizer of
262,144 tokens and a tiny random model, which agrees with no grammar: the worst case. `steps` runs
the same prompts with and without their schemas.
"""

import argparse
import json
import lzma
import statistics
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import torch
from common import shape
from jsonschema import ValidationError
from jsonschema.validators import validator_for

from dgemma import Engine, SamplingParams
from dgemma.config import GenerationConfig, Mode, load_generation_config
from dgemma.constrain.constrained_canvas import ConstrainedCanvas
from dgemma.constrain.grammar import schema_grammar
from dgemma.constrain.matcher import Constraint
from dgemma.constrain.vocabulary import vocabulary
from dgemma.diffusion.canvas import NO_PINS, Canvas, initial_canvas
from dgemma.diffusion.logit_stats import PositionStats
from dgemma.diffusion.sampler import StepView
from dgemma.engine.events import Done
from dgemma.errors import UsageError
from dgemma.eval.data import SHARED
from dgemma.text.tokenizer import Tokenizer
from dgemma.weights.hub import find_checkpoint
from dgemma.weights.load import random_model

FILE = "jsonschemabench.jsonl.xz"
RELEASED = SHARED.parent / "checkpoint"
PART = 60  # schemas of each part
HARD = frozenset(
    "not if oneOf dependencies dependentRequired dependentSchemas propertyNames minProperties "
    "maxProperties contains uniqueItems".split()
)


class Case(NamedTuple):
    part: str
    name: str
    schema: dict[str, Any]

    @property
    def prompt(self) -> str:
        about = self.schema.get("title") or self.schema.get("description") or self.name
        return f"Give an example as JSON: {about!s:.120}"


def read_cases(data: Path) -> list[Case]:
    with lzma.open(data / "eval" / FILE, "rt", encoding="utf-8") as lines:
        return [Case(**json.loads(line)) for line in lines]


def is_hard(schema: Any) -> bool:
    """Return True if a schema uses a keyword that llguidance lacks or supports in part."""
    if isinstance(schema, dict):
        return bool(schema.keys() & HARD) or any(map(is_hard, schema.values()))
    return isinstance(schema, list) and any(map(is_hard, schema))


def stratified(cases: Sequence[Case]) -> list[Case]:
    """Return the same sample each time: PART schemas of each part, interleaved."""
    parts = defaultdict(list)
    for case in cases:
        parts[case.part].append(case)
    chosen = [Random(0).sample(parts[part], PART) for part in sorted(parts)]
    return [case for row in zip(*chosen, strict=True) for case in row]


def load(model: str) -> Engine:
    if model != "random":
        return Engine.load(model, device="cpu", dtype="float32")
    directory = find_checkpoint("nano")
    return random_engine(Tokenizer.load(directory), load_generation_config(directory), canvas=64)


def random_engine(tokenizer: Tokenizer, generation: GenerationConfig, canvas: int) -> Engine:
    sizes = {"vocab_size": tokenizer.vocab_size, "sliding_window": 256, "canvas_length": canvas}
    config = replace(shape("tiny", layers=2), **sizes, vision=None)
    return Engine(random_model(config, seed=1).eval(), tokenizer, None, generation)


def accept(arguments: argparse.Namespace) -> None:
    """Count schemas that can be compiled, and the reasons of the others."""
    engine = load("random")
    cases, refused = read_cases(arguments.data), []
    cases = [case for case in cases if is_hard(case.schema)] if arguments.hard else cases
    seconds = []
    for case in cases:
        begin = time.perf_counter()
        try:
            engine.constraint(schema=case.schema)
            seconds.append(time.perf_counter() - begin)
        except UsageError as error:
            refused.append((case, str(error).removeprefix("the schema cannot be held to: ")))
    fraction = 1 - len(refused) / len(cases)
    print(f"accepted {len(cases) - len(refused)} of {len(cases)} ({100 * fraction:.2f} %)")
    print(f"read and compiled in {1000 * statistics.mean(seconds):.1f} ms, ", end="")
    print(f"at most {1000 * max(seconds):.0f} ms")
    for part, count in Counter(case.part for case in cases).items():
        of_part = sum(case.part == part for case, _ in refused)
        print(f"  {part}: {count - of_part} of {count}")
    for reason, count in Counter(words[:90] for _, words in refused).most_common():
        print(f"  {count:4} refused: {reason}")
    if arguments.refused:
        lines = sorted(f"{case.part} {case.name}: {words}" for case, words in refused)
        arguments.refused.write_text("\n".join(lines) + "\n", encoding="utf-8")


def validate(text: str, schema: dict[str, Any]) -> str:
    """Return the reason why a text does not fit; empty if it does."""
    try:
        validator_for(schema)(schema).validate(json.loads(text))
    except (ValidationError, ValueError) as error:
        return f"{type(error).__name__}: {str(error).splitlines()[0]:.150}"
    except Exception as error:  # the validator cannot read the schema
        return f"not validated: {type(error).__name__}: {error!s:.100}"
    return ""


def options(engine: Engine, arguments: argparse.Namespace, mode: Mode, seed: int) -> SamplingParams:
    sampler = None if mode == "ar" else replace(engine.sampler, max_denoising_steps=arguments.steps)
    temperature = 0.7 if mode == "ar" else None
    return SamplingParams(
        mode=mode,
        max_tokens=arguments.max_tokens,
        seed=seed,
        sampler=sampler,
        temperature=temperature,
        retries=0,
    )


def generate(arguments: argparse.Namespace) -> None:
    """Count texts that are finished, and those of them that fit."""
    engine = load(arguments.model)
    cases = read_cases(arguments.data)
    hard = [case for case in cases if is_hard(case.schema)]
    cases = Random(0).sample(hard, len(hard)) if arguments.hard else stratified(cases)
    end = min(arguments.first + arguments.count, len(cases))
    counts: Counter[str] = Counter()
    reasons: Counter[str] = Counter()
    begin, slowest, tokens = time.perf_counter(), 0.0, 0
    for number in range(arguments.first, end):
        case = cases[number]
        started = time.perf_counter()
        try:
            settings = options(engine, arguments, arguments.mode, number)
            done = engine.generate(case.prompt, settings, schema=case.schema)
        except UsageError:
            counts["refused"] += 1
            continue
        slowest = max(slowest, time.perf_counter() - started)
        tokens += done.tokens
        record(case, done, counts, reasons)
    print(f"{arguments.model}, {arguments.mode}, schemas {arguments.first} to {end - 1}: ", end="")
    print(", ".join(f"{name} {count}" for name, count in counts.items()))
    for reason, count in reasons.items():
        print(f"  {count} {reason}")
    print(f"  {tokens} tokens, {time.perf_counter() - begin:.0f} s, slowest {slowest:.1f} s")


def record(case: Case, done: Done, counts: Counter[str], reasons: Counter[str]) -> None:
    if done.fault:
        counts["unfinished"] += 1
        words = "".join("N" if c.isdigit() else c for c in done.fault)
        reasons[f"{done.finish}: {words.replace('NN', 'N').replace('NN', 'N')}"] += 1
        return
    counts["finished"] += 1
    wrong = validate(done.text, case.schema)
    counts["finished and fits" if not wrong else "DOES NOT FIT"] += 1
    if wrong:
        reasons[f"{case.name}: {wrong}"] += 1


class Clock:
    """Measures the cost of a constraint outside the model; reading logits is the model's time.

    CPU time of this thread, so that other work on the machine does not count.
    """

    def __init__(self) -> None:
        self.steps: list[float] = []
        self.tokens: list[float] = []
        self._in_model = 0.0
        self._apply, self._next_token = ConstrainedCanvas.apply, ConstrainedCanvas.next_token

    def __enter__(self) -> "Clock":
        def apply(text: ConstrainedCanvas, canvas: Canvas, view: StepView) -> Canvas:
            self._in_model, begin = 0.0, time.thread_time()
            updated = self._apply(text, canvas, replace(view, logits=self._timed(view.logits)))
            self.steps.append(time.thread_time() - begin - self._in_model)
            return updated

        def next_token(text: ConstrainedCanvas, logits_V: torch.Tensor, draw: Any) -> int:
            self._in_model, begin = 0.0, time.thread_time()
            token = self._next_token(text, logits_V, self._timed(draw))
            self.tokens.append(time.thread_time() - begin - self._in_model)
            return token

        self._patch(apply, next_token)
        return self

    def __exit__(self, *_: object) -> None:
        self._patch(self._apply, self._next_token)

    def _patch(self, apply: Any, next_token: Any) -> None:
        ConstrainedCanvas.apply = apply  # type: ignore[method-assign]
        ConstrainedCanvas.next_token = next_token  # type: ignore[method-assign]

    def _timed(self, work: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*arguments: Any) -> Any:
            begin = time.thread_time()
            result = work(*arguments)
            self._in_model += time.thread_time() - begin
            return result

        return timed


def overhead(arguments: argparse.Namespace) -> None:
    """Print the milliseconds of a step outside the model, with the released vocabulary."""
    tokenizer = Tokenizer.load(arguments.tokenizer)
    engine = random_engine(tokenizer, load_generation_config(arguments.tokenizer), canvas=256)
    begin = time.thread_time()
    vocabulary(tokenizer, engine.stop_ids.ids)
    built = time.thread_time() - begin
    print(f"{tokenizer.vocab_size} tokens: known to llguidance after {built:.1f} s, once")
    cases = list(accepted(arguments))
    compiled, searched = [], []
    for case in cases:
        begin = time.thread_time()
        constraint = engine.constraint(schema=case.schema)
        compiled.append(time.thread_time() - begin)
        begin = time.thread_time()
        _ = constraint.shortest
        searched.append(time.thread_time() - begin)
    print(f"schema to grammar           {spread(compiled)}")
    print(f"its shortest text           {spread(searched)}")
    agreeing(engine, cases, arguments)
    with Clock() as clock:
        for number, case in enumerate(cases[: arguments.count // 4]):
            for mode in ("diffusion", "ar"):
                settings = options(engine, arguments, mode, number)
                engine.generate(case.prompt, settings, schema=case.schema)
    print(f"a step, random model        {spread(clock.steps)}")
    print(f"an AR token, random model   {spread(clock.tokens)}")


def agreeing(engine: Engine, cases: Sequence[Case], arguments: argparse.Namespace) -> None:
    """Time steps of a model that converges to a text nano wrote, in the released vocabulary."""
    nano, generator = load("nano"), torch.Generator().manual_seed(0)
    with Clock() as clock:
        for number, case in enumerate(cases):
            settings = options(nano, arguments, "ar", number)
            done = nano.generate(case.prompt, settings, schema=case.schema)
            if not done.fault:
                settle(engine, engine.constraint(schema=case.schema), done.text, generator)
    print(f"a step, model that agrees   {spread(clock.steps)}")


def settle(engine: Engine, constraint: Constraint, text: str, generator: torch.Generator) -> None:
    """Constrain a canvas whose positions become confident at random, a tenth in each step."""
    size, length = engine.model.config.vocab_size, engine.model.config.canvas_length
    shuffle_L = torch.rand(length, generator=generator)
    noise_L = torch.randint(size, (length,), generator=generator)
    canvas = replace(initial_canvas(noise_L), soft_LD=torch.zeros(length, 1))
    constrained = ConstrainedCanvas(constraint)
    constrained.start(2 * length)
    constrained.begin_block(NO_PINS, 24)
    text_L = remaining(engine, [], text)

    def logits_at(positions: Sequence[int]) -> torch.Tensor:
        logits_TV = torch.randn(len(positions), size, generator=generator)
        return logits_TV.scatter_(1, text_L[list(positions)][:, None], 20.0)

    for step in range(1, 25):
        known_L = shuffle_L < step / 10
        p_L = torch.where(known_L, 0.97, 0.3)
        stats = PositionStats(
            draw_T=text_L, top_T=text_L, entropy_T=1 - p_L, top_p_T=p_L, current_p_T=p_L
        )
        view = StepView(stats, noise_L, logits_at)
        canvas = constrained.apply(replace(canvas, num_steps=step), view)
        if canvas.converged:
            return
        text_L = remaining(engine, constrained.state.block, text)


def remaining(engine: Engine, written: Sequence[int], text: str) -> torch.Tensor:
    """Return a canvas of the text after these tokens: forced ones may be split differently."""
    rest = text[len(engine.tokenizer.decode(written)) :]
    length = engine.model.config.canvas_length
    ids = [*written, *engine.tokenizer.encode(rest), *[engine.stop_ids.ids[0]] * length]
    return torch.tensor(ids[:length])


def spread(seconds: Sequence[float]) -> str:
    ms = sorted(1000 * second for second in seconds)
    late = ms[int(0.95 * (len(ms) - 1))]
    return (
        f"mean {statistics.mean(ms):7.2f} ms, median {statistics.median(ms):7.2f}, "
        f"95 % {late:7.2f}, most {ms[-1]:8.2f} ({len(ms)})"
    )


def accepted(arguments: argparse.Namespace) -> Iterator[Case]:
    for case in stratified(read_cases(arguments.data))[: arguments.count]:
        try:
            schema_grammar(case.schema)
        except UsageError:
            continue
        yield case


def steps(arguments: argparse.Namespace) -> None:
    """Run the same prompts with and without schemas: steps per block, tokens per step."""
    engine = load(arguments.model)
    for name in ("free", "held"):
        dones = []
        for number, case in enumerate(accepted(arguments)):
            schema = case.schema if name == "held" else None
            settings = options(engine, arguments, "diffusion", number)
            dones.append(engine.generate(case.prompt, settings, schema=schema))
        blocks, steps = sum(d.blocks for d in dones), sum(d.steps for d in dones)
        tokens, seconds = sum(d.tokens for d in dones), sum(d.seconds for d in dones)
        print(
            f"{arguments.model}, {name}: {len(dones)} texts, {blocks} blocks, "
            f"{steps / max(blocks, 1):.1f} steps a block, {tokens / steps:.2f} tokens a step, "
            f"{1000 * seconds / steps:.0f} ms a step, {seconds:.0f} s"
        )


def main() -> None:
    works = {"accept": accept, "generate": generate, "overhead": overhead, "steps": steps}
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("work", choices=works)
    parser.add_argument("--data", type=Path, default=SHARED)
    parser.add_argument("--tokenizer", type=Path, default=RELEASED)
    parser.add_argument("--model", default="nano")
    parser.add_argument("--mode", choices=["diffusion", "ar"], default="diffusion")
    parser.add_argument("--count", type=int, default=60)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--max-tokens", type=int, default=256)
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--refused", type=Path)
    parser.add_argument("--hard", action="store_true")
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    works[arguments.work](arguments)


if __name__ == "__main__":
    main()
