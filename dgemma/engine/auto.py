"""Mode `auto`: choose between AR and diffusion for each reply, by their measured cost.

`BreakEven` holds the measured costs on this machine. An unconstrained reply begins in AR. After
some tokens the first step of a canvas predicts the remaining length, and the reply continues by
diffusion if that is faster. The number of AR tokens before that step minimizes the worst slowdown
against the better mode over all possible reply lengths (decision 041).
"""

import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from pathlib import Path
from statistics import mean, median, mode
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

from dgemma import __version__
from dgemma.device import choose_device, describe_device, load_result, store_result
from dgemma.diffusion.canvas import NO_PINS, Canvas
from dgemma.engine.events import Done, Draft
from dgemma.weights.hub import ModelOptions

if TYPE_CHECKING:
    from dgemma.engine.engine import Engine
    from dgemma.engine.params import SamplingParams

GOAL = 1.2  # largest accepted slowdown against the better mode
MAX_LENGTH = 1024  # tokens; beyond, the ratio of both costs is constant
MAX_FIRST = 64  # AR tokens before the first canvas
CONSTRAINED_FACTOR = 2  # assumed length of a constrained text, relative to the shortest one

Seconds = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class CanvasCost:
    """Length of a canvas, its mean number of steps, and seconds per step."""

    length: int
    steps: float
    step_seconds: float

    @property
    def seconds(self) -> float:
        return self.steps * self.step_seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Number of AR tokens before a canvas is tried (None: AR only), and the worst slowdown."""

    num_first: int | None
    worst: float


@dataclass(frozen=True, slots=True, kw_only=True)
class BreakEven:
    """Measured costs of both modes for one checkpoint on one machine, in seconds."""

    prompt_seconds: float  # prefill of a short prompt and its first AR token
    token_seconds: float  # one AR token
    canvas_seconds: float  # added to the prompt's pass by a canvas's first step
    canvas: CanvasCost  # in a reply that fills its canvases
    is_restarted: bool  # the first step is on a longer canvas that is discarded
    constrained_seconds: float  # a short JSON text under a schema, by diffusion

    @classmethod
    def from_json(cls, raw: dict[str, Any]) -> "BreakEven":
        return cls(**{**raw, "canvas": CanvasCost(**raw["canvas"])})

    def ar(self, num_N: Seconds) -> Seconds:
        """Return the seconds of replies of these lengths in AR."""
        return self.prompt_seconds + (num_N - 1) * self.token_seconds

    def diffusion(self, num_N: Seconds) -> Seconds:
        """Return the seconds of replies of these lengths by diffusion."""
        known = 0.0 if self.is_restarted else self.canvas.step_seconds
        begin = self.prompt_seconds + self.canvas_seconds - known
        return begin + self._canvases(num_N)

    def _canvases(self, num_N: Seconds) -> Seconds:
        return np.ceil(num_N / self.canvas.length) * self.canvas.seconds

    def auto(self, num_N: Seconds, num_first: int | None) -> Seconds:
        """Return the seconds under a plan, if a first step predicts the remaining length."""
        if num_first is None:
            return self.ar(num_N)
        rest_N, first_step = num_N - num_first, self.canvas.step_seconds
        if num_first == 0:
            goes_on_N, canvases_N = self.is_faster(num_N), self.diffusion(num_N)
            declined = self.prompt_seconds + self.canvas_seconds + self.token_seconds
            return np.where(goes_on_N, canvases_N, declined + self.ar(num_N) - self.prompt_seconds)
        begin = self.prompt_seconds + (num_first - 1) * self.token_seconds
        goes_on_N = self.is_faster(rest_N)
        declined_N = self.ar(num_N) + first_step
        after_N = np.where(goes_on_N, begin + self._canvases(rest_N), declined_N)
        return np.where(rest_N > 0, after_N, self.ar(num_N))

    def is_faster(self, rest_N: Seconds) -> NDArray[np.bool_]:
        """True where a canvas after its first step finishes before AR of that many tokens."""
        rest_N = np.minimum(rest_N, self.canvas.length)
        return rest_N * self.token_seconds > self.canvas.seconds - self.canvas.step_seconds

    def better(self, num_N: Seconds) -> Seconds:
        return np.minimum(self.ar(num_N), self.diffusion(num_N))

    @property
    def tokens(self) -> int | None:
        """Shortest reply that is faster by diffusion, up to MAX_LENGTH."""
        num_N = lengths(MAX_LENGTH)
        is_faster_N = self.diffusion(num_N) < self.ar(num_N)
        return int(num_N[is_faster_N.argmax()]) if is_faster_N.any() else None

    def describe(self) -> str:
        """Describe the break-even in one sentence."""
        plan, canvas = self.plan(MAX_LENGTH), self.canvas
        faster = "never faster" if self.tokens is None else f"faster from {self.tokens} tokens on"
        begins = "stays in AR" if plan.num_first is None else f"begins with {plan.num_first} in AR"
        return (
            f"AR {1000 * self.token_seconds:.3g} ms a token; a canvas of {canvas.length}: "
            f"{canvas.steps:.3g} steps of {1000 * canvas.step_seconds:.3g} ms; diffusion is "
            f"{faster}; auto {begins} (at most {plan.worst:.2f}x the faster mode's time)"
        )

    def plan(self, max_tokens: int) -> Plan:
        """Plan an unconstrained reply of at most `max_tokens` tokens."""
        return _plan(self, min(max_tokens, MAX_LENGTH))

    def diffuses_constrained(self, shortest: int, max_tokens: int) -> bool:
        """True if a constrained text is written by diffusion, given its shortest length."""
        num = min(CONSTRAINED_FACTOR * shortest, max_tokens)
        return self.constrained_seconds < num * self.token_seconds


def lengths(most: int) -> Seconds:
    return np.arange(1, most + 1, dtype=np.float64)


@lru_cache(maxsize=256)
def _plan(costs: BreakEven, most: int) -> Plan:
    """Return the fastest plan within the goal or, if there is none, the one nearest to it."""
    num_N = lengths(most)
    better_N = costs.better(num_N)
    ranked = []
    for num_first in (None, *range(min(MAX_FIRST, most))):
        ratio_N = costs.auto(num_N, num_first) / better_N
        worst = float(ratio_N.max())
        ranked.append((max(worst, GOAL), float(ratio_N.mean()), worst, num_first))
    best = min(ranked, key=lambda plan: plan[:2])
    return Plan(num_first=best[3], worst=best[2])


@dataclass(frozen=True, slots=True)
class AutoSwitch:
    """The mode decisions of one reply; a value, replaced as the reply is written."""

    costs: BreakEven
    try_at: int | None  # number of AR tokens before a canvas; None: AR only
    has_switched: bool = False  # the rest is written by diffusion

    @classmethod
    def of(
        cls, costs: BreakEven | None, params: "SamplingParams", max_tokens: int
    ) -> "AutoSwitch | None":
        """Plan a reply by its request; None in other modes."""
        if params.mode != "auto":
            return None
        assert costs is not None, "Engine.generation has them"
        if params.pins != NO_PINS or params.initial_canvas:
            return cls(costs, 0, has_switched=True)
        if params.constraint is None:
            return cls(costs, costs.plan(max_tokens).num_first)
        shortest = params.constraint.shortest
        num_tokens = 0 if shortest is None else len(shortest.tokens)
        is_diffused = costs.diffuses_constrained(num_tokens, max_tokens)
        return cls(costs, 0 if is_diffused else None, has_switched=is_diffused)

    def is_ar(self, num_written: int) -> bool:
        return not self.has_switched and (self.try_at is None or num_written < self.try_at)

    def resumed(self, num_written: int, *, is_block: bool) -> "AutoSwitch":
        """Continue after tokens committed by another engine."""
        try_at = self.try_at
        if try_at is not None:
            try_at = max(try_at, num_written + try_at)
        return replace(self, try_at=try_at, has_switched=self.has_switched or is_block)

    def after_step(
        self, canvas: Canvas, end_ids: Collection[int], num_written: int
    ) -> "AutoSwitch":
        """Decide after a canvas's first step: return to AR if it predicts a short rest."""
        if self.has_switched:
            return self
        num_ends = sum(token in end_ids for token in canvas.guess_L.tolist())
        rest = canvas.length - num_ends
        if bool(self.costs.is_faster(np.array([float(rest)]))[0]):
            return replace(self, has_switched=True)
        # Try again if the reply becomes much longer than predicted.
        return replace(self, try_at=num_written + 2 * max(rest, num_written))


# --- measured on this machine

STORY = "Write a long story about a girl, her dog and a lost ball."
QUESTION = "What colour is the sky?"
SCHEMA = (
    '{"type":"object","properties":{"name":{"type":"string","maxLength":20},"age":{"type":"integer",'
    '"maximum":120},"city":{"type":"string","maxLength":20}},"required":["name","age","city"],'
    '"additionalProperties":false}'
)
AR_TOKENS, CONSTRAINED_TOKENS = 24, 64
NUM_CANVASES = 3  # of a story
MAX_SECONDS = 20.0  # of each sample
SEED = 1


def measure(engine: "Engine") -> BreakEven:
    """Time a story in both modes and a JSON object under a schema, after a warm-up.

    Other load on the machine can only slow a sample down, so the fastest ones count.
    """
    from dgemma.engine.params import SamplingParams

    def run(prompt: str, **params: Any) -> "tuple[Done, list[CanvasCost]]":
        engine.prefixes.clear()
        options = {"seed": SEED, "retries": 0, "max_seconds": MAX_SECONDS, **params}
        return _timed(engine, prompt, SamplingParams(**options))

    constraint = engine.constraint(schema=SCHEMA)
    run(STORY, mode="ar", max_tokens=3)
    in_ar = [run(STORY, mode="ar", max_tokens=AR_TOKENS)[0]]
    _, begun = run(STORY, max_steps=4)
    story, canvases = run(STORY, max_tokens=NUM_CANVASES * begun[-1].length)
    in_ar += [run(STORY, mode="ar", max_tokens=AR_TOKENS)[0] for _ in range(2)]
    run(QUESTION, max_tokens=CONSTRAINED_TOKENS, constraint=constraint, max_steps=3)
    constrained, _ = run(QUESTION, max_tokens=CONSTRAINED_TOKENS, constraint=constraint)
    prompt_seconds = min(done.prefill_seconds for done in in_ar)
    return BreakEven(
        prompt_seconds=prompt_seconds,
        token_seconds=min((d.seconds - d.prefill_seconds) / max(d.steps - 1, 1) for d in in_ar),
        canvas_seconds=max(story.prefill_seconds - prompt_seconds, 0.0),
        canvas=_mean(canvases),
        is_restarted=_mean(canvases).length < engine.model.config.canvas_length,
        constrained_seconds=constrained.seconds - constrained.prefill_seconds,
    )


def _timed(
    engine: "Engine", prompt: str, params: "SamplingParams"
) -> "tuple[Done, list[CanvasCost]]":
    """Answer a prompt; return the cost of each canvas that was not restarted."""
    params = replace(params, drafts=params.mode != "ar")
    begun, canvases = time.perf_counter(), list[list[tuple[int, int, float]]]()
    for event in engine.stream(prompt, params):
        now = time.perf_counter()
        if isinstance(event, Draft):
            if event.step == 1 and canvases and canvases[-1][-1][0] == event.block:
                canvases.pop()  # it may be short or failed
            if event.step == 1:
                canvases.append([])
            canvases[-1].append((event.block, len(event.ids), now - begun))
        begun = now
    assert isinstance(event, Done)
    return event, [_cost(steps) for steps in canvases]


def _cost(steps: Sequence[tuple[int, int, float]]) -> CanvasCost:
    """Return a canvas's cost by its faster steps; the first one may include prefill."""
    seconds = sorted([seconds for _, _, seconds in steps][1:] or [steps[0][2]])
    return CanvasCost(length=steps[0][1], steps=len(steps), step_seconds=seconds[len(seconds) // 4])


def _mean(costs: Sequence[CanvasCost]) -> CanvasCost:
    """Average the canvases of the most frequent length; the last may be shorter."""
    length = mode(cost.length for cost in costs)
    same = [cost for cost in costs if cost.length == length]
    return CanvasCost(
        length=length,
        steps=mean(cost.steps for cost in same),
        step_seconds=median(cost.step_seconds for cost in same),
    )


# --- stored on this machine

CACHE = "break-even"


def identity(path: Path, options: ModelOptions) -> dict[str, str]:
    """Return the cache key of a measurement: checkpoint, options, device and versions."""
    files = sorted(path.iterdir()) if path.is_dir() else [path]
    newest = max((file.stat().st_mtime_ns for file in files), default=0)
    return {
        "checkpoint": f"{path.resolve()} {newest}",
        "adapter": "" if options.adapter is None else str(options.adapter.resolve()),
        "device": describe_device(choose_device(options.device)),
        "dtype": options.dtype,
        "quant": options.quant,
        "dgemma": __version__,
        "torch": torch.__version__,
    }


def load_break_even(key: Mapping[str, str]) -> BreakEven | None:
    """Load an earlier measurement; None if there is none or its file is damaged."""
    raw = load_result(CACHE, key)
    try:
        return None if raw is None else BreakEven.from_json(raw)
    except (TypeError, KeyError):
        return None


def store_break_even(key: Mapping[str, str], costs: BreakEven) -> None:
    store_result(CACHE, key, asdict(costs))
