"""Checks of `bench/paths.py`: requests alone against batches, and a soak with cancels."""

import json
import random
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from _paths_common import Bench, Done, EvalPrompt, Pins, Report, SamplingParams, done_of

from dgemma import Engine

ROWS = 16  # requests that a pass takes
AGREE_STEPS = 8
SHORT_PROMPT = 64
ROUNDS = 4  # of a soak; memory is read after each
SAMPLE = 50  # requests of a soak that run alone as well
CANCELLED = 0.1  # share of a soak's requests
GROWTH = {"cuda": 1.01, "cpu": 1.10}  # of memory from the first round to the last, at most
LOST_AFTER = 5000  # passes without an end
PINNED = (1, 3, 5)  # positions of a request's marker
KINDS = ("diffusion", "temperature", "AR", "schema", "AR schema")


NOUNS = ("dog", "frog", "king", "boat", "tree", "teacher", "storm", "cake", "bear", "garden")
ASKS = (
    "Write a story about a {}.",
    'Change {} to moon. "The {} is small."',
    "Tell me about a {} and a {}.",
    "Write a sentence with the word {}.",
)


def agree_nano(bench: Bench, report: Report, number: int) -> None:
    """Do as `agree` with the built-in model, whose logits are not flat."""
    for quant in ("none", "fp8") if bench.device.type == "cuda" else ("none",):
        where = {"device": bench.device.type, "dtype": "auto", "quant": quant}
        engine, rng = Engine.load("nano", **where), random.Random(0)
        asked = [
            engine.user_prompt(rng.choice(ASKS).replace("{}", rng.choice(NOUNS)))
            for _ in range(number)
        ]
        params = [SamplingParams(seed=seed, max_tokens=64) for seed in range(number)]
        alone = [engine.generate(p, o) for p, o in zip(asked, params, strict=True)]
        together: list[Done] = []
        while len(together) < number:
            part = slice(len(together), len(together) + rng.randint(2, ROWS))
            together += engine.generate_all(asked[part], params[part])
        differ = sum(a.ids != b.ids for a, b in zip(alone, together, strict=True))
        report.note(
            f"Agreement of nano ({engine.backend.name}, {engine.dtype}, {quant}): {number} requests"
            f" of up to 64 tokens, alone and in batches of 2 to {ROWS}: {differ} differ"
            f" ({100 * differ / number:.2f} %)."
        )


def agree(bench: Bench, report: Report, number: int) -> None:
    """Run requests alone and in batches with the same seeds, and count those that differ.

    Logits of random weights are flat: rounding alone changes what is drawn.
    """
    length, rng = bench.canvas_length, random.Random(0)
    requests = []
    for seed in range(number):
        params = bench.diffusion(AGREE_STEPS, max_tokens=length, seed=seed)
        requests.append(EvalPrompt(bench.prompt(rng.randint(8, SHORT_PROMPT)), params))
    alone = [bench.run([request]).dones[0] for request in requests]
    together: list[Done] = []
    while len(together) < number:
        size = rng.randint(2, ROWS)
        together += bench.run(requests[len(together) : len(together) + size]).dones
    pairs = list(zip(alone, together, strict=True))
    differ = sum(one.ids != other.ids for one, other in pairs)
    positions = sum(
        a != b for one, other in pairs for a, b in zip(one.ids, other.ids, strict=False)
    )
    tokens = sum(one.tokens for one in alone)
    report.note(
        f"Agreement: {number} requests of {AGREE_STEPS} steps on one canvas, alone and in batches"
        f" of 2 to {ROWS}: {differ} differ ({100 * differ / number:.2f} %), at {positions} of"
        f" {tokens} tokens ({100 * positions / max(1, tokens):.3f} %)."
    )


@dataclass(slots=True)
class Case:
    """One request of a soak; its marker must come back in its result."""

    number: int
    kind: str
    request: EvalPrompt
    marker: tuple[int, ...] = ()  # pinned tokens
    cancel_after: int | None = None  # passes
    age: int = 0
    done: Done | None = None
    fault: str = ""

    def error(self) -> str:
        """Return the reason why the result is not this request's own, or nothing."""
        done, params = self.done, self.request.params
        if done is None:
            return self.fault or "lost"
        facts = (done.seed, done.prompt_tokens, done.mode)
        if facts != (params.seed, len(self.request.prompt.ids), params.mode):
            return f"crossed: seed, prompt tokens and mode are {facts}"
        if self.kind in ("schema", "AR schema"):
            is_own = done.finish == "stop" and json.loads(done.text)["id"] == f"r{self.number}"
            return "" if is_own else f"{done.finish} with {done.text!r:.80} {done.fault}"
        ids = iter(done.ids)
        if not all(token in ids for token in self.marker):
            return "its pinned tokens are not in the result"
        return "" if done.finish in ("length", "stop") else f"finish is {done.finish}"

    @property
    def size(self) -> tuple[Any, ...]:
        """Facts that 16-bit arithmetic does not change."""
        assert self.done is not None
        is_free = self.kind not in ("schema", "AR schema")
        return (self.done.prompt_tokens, self.done.finish, self.done.tokens if is_free else 0)


def make_cases(bench: Bench, number: int) -> list[Case]:
    rng, cases = random.Random(0), []
    for index in range(number):
        kind = rng.choice(KINDS)
        prompt = bench.prompt(rng.randint(4, 4 * SHORT_PROMPT))
        params, marker = params_of(bench, kind, index, rng)
        after = rng.randrange(8) if rng.random() < CANCELLED else None
        cases.append(Case(index, kind, EvalPrompt(prompt, params), marker, after))
    return cases


def params_of(
    bench: Bench, kind: str, number: int, rng: random.Random
) -> tuple[SamplingParams, tuple[int, ...]]:
    """Return the parameters of a kind of request, and its marker in pinned tokens."""
    tokens, canvas = rng.randint(8, 48), rng.choice([1, 2]) * bench.canvas_length
    if kind == "AR":
        return SamplingParams(mode="ar", seed=number, max_tokens=tokens), ()
    if "schema" in kind:
        form = {"id": {"const": f"r{number}"}, "n": {"enum": [1, 22, 333]}}
        schema = {"type": "object", "properties": form, "required": list(form)}
        constraint = bench.engine.constraint(schema={**schema, "additionalProperties": False})
        if kind == "AR schema":
            return SamplingParams(mode="ar", seed=number, max_tokens=96, constraint=constraint), ()
        return bench.diffusion(
            rng.randint(3, 8), seed=number, max_tokens=96, constraint=constraint
        ), ()
    base = bench.vocab - 1 - 256  # three digits to this base tell all requests apart
    marker = tuple(256 + number // base**power % base for power in range(len(PINNED)))
    params = bench.diffusion(rng.randint(3, 8), seed=number, max_tokens=min(tokens, canvas))
    params = replace(params, pins=Pins(PINNED, marker))
    return (replace(params, temperature=0.7) if kind == "temperature" else params), marker


def soak(bench: Bench, report: Report, number: int) -> None:
    """Run mixed batches with random cancels: nothing lost, nothing crossed, memory flat."""
    cases, rng = make_cases(bench, number), random.Random(1)
    begin, levels = time.perf_counter(), list[float]()
    for part in range(ROUNDS):
        drive(bench, cases[part::ROUNDS], rng)
        levels.append(round(bench.memory_mib(), 1))
    seconds = time.perf_counter() - begin
    stayed = [case for case in cases if case.cancel_after is None or case.done is not None]
    wrong = [f"{case.kind} {case.number}: {error}" for case in stayed if (error := case.error())]
    sample = [case for case in stayed if case.done is not None]
    sample = random.Random(2).sample(sample, min(SAMPLE, len(sample)))
    same, sizes = alone(bench, sample)
    kinds = dict(Counter(case.kind for case in stayed))
    report.note(
        f"Soak: {number} requests in {seconds:.0f} s, {number - len(stayed)} cancelled, {kinds};"
        f" of {len(sample)} that ran alone as well {same} have the same tokens."
    )
    report.check("Soak, none lost or crossed", not wrong, f"{len(wrong)} wrong {wrong[:5]}")
    report.check("Soak, same sizes alone", not sizes, f"{len(sizes)} differ {sizes[:5]}")
    flat = levels[-1] <= levels[0] * GROWTH[bench.device.type]
    report.check("Soak, memory flat", flat, f"{levels} MiB after each of {ROUNDS} rounds")


def drive(bench: Bench, cases: Sequence[Case], rng: random.Random) -> None:
    """Let requests in and out between passes; their number changes all the time."""
    engine, waiting = bench.engine, list(reversed(cases))
    live: list[tuple[Case, Any]] = []
    while waiting or live:
        for _ in range(min(len(waiting), rng.randint(1, ROWS + 8) - len(live))):
            case = waiting.pop()
            task = engine.generation(case.request.prompt, case.request.params)
            live.append((case, engine.submit(task)))
        engine.step()
        for case, request in live:
            case.age += 1
            if request.is_over:
                try:
                    case.done = done_of(request)
                except Exception as error:
                    case.fault = f"{type(error).__name__}: {error}"
            elif case.age > limit(case):
                engine.cancel(request)
        live = [(case, request) for case, request in live if not request.is_over]


def limit(case: Case) -> int:
    """Passes after which a request is cancelled; one that is not meant to be is lost by then."""
    return LOST_AFTER if case.cancel_after is None else case.cancel_after


def alone(bench: Bench, sample: Sequence[Case]) -> tuple[int, list[str]]:
    """Run some requests by themselves: how many have the same tokens, and whose sizes differ."""
    same, differ = 0, []
    for case in sample:
        (done,) = bench.run([case.request]).dones
        assert case.done is not None
        same += done.ids == case.done.ids
        other = replace(case, done=done)
        if other.size != case.size:
            differ.append(f"{case.kind} {case.number}: {case.size} and {other.size}")
    return same, differ
