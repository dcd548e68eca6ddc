"""Sampling parameters of a request, and the checks that need no device.

Parameters and cost of programs with canvases stand at the end.
"""

import time
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from dgemma.config import DEFAULT_MODE, MODES, PRESETS, Mode, ModelConfig, Preset
from dgemma.constrain.matcher import Constraint
from dgemma.diffusion.canvas import NO_PINS, Noise, Pins
from dgemma.diffusion.sampler import Sampler
from dgemma.engine.events import Committed
from dgemma.errors import PromptTooLong, UsageError, require
from dgemma.text.detokenizer import StopStrings


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """Parameters of one reply. None means the checkpoint's value, or no limit.

    Pins, canvas length, preset, sampler and drafts need a canvas; AR mode refuses them.
    """

    mode: Mode = DEFAULT_MODE  # hybrid: thoughts in AR; auto: what is faster here
    max_tokens: int | None = None
    seed: int | None = None  # None draws one, reported in Done
    choice: int = 0  # index among several replies with the same prompt and seed
    preset: Preset | None = None  # named sampler values; `sampler` overrides them
    sampler: Sampler | None = None
    # Temperature of draws, in all modes. None: 0 (greedy) in AR, the sampler's on canvases.
    temperature: float | None = None
    canvas_length: int | None = None  # up to the model's canvas length
    stop: tuple[str, ...] = ()
    stop_sequence: tuple[int, ...] = ()  # AR: tokens that end the reply and stay in it
    pins: Pins = NO_PINS  # on the first canvas
    initial_canvas: tuple[int, ...] = ()  # tokens to start from instead of noise; -1: noise
    constraint: Constraint | None = None  # compiled by Engine.constraint
    drafts: bool = False  # report the canvas after each step
    commits: bool = False  # report committed tokens, so that another engine can continue
    committed: tuple[Committed, ...] = ()  # reply so far, by another engine
    retries: int = 2  # further attempts at a canvas that fails the output check
    max_seconds: float | None = None
    max_steps: int | None = None  # of all canvases together; an AR token is a step
    max_blocks: int | None = None  # canvases


def check_params(params: SamplingParams) -> None:
    """Refuse parameters that no model can honour; callable before a model is loaded."""
    _check_mode(params)
    check_preset(params.preset)
    if params.constraint is not None and params.stop:
        raise UsageError("a stop string would cut constrained text; leave it out")
    StopStrings(params.stop)  # validates the stop strings
    Noise(seed=params.seed or 0, choice=params.choice)
    limits = {
        "max tokens": params.max_tokens,
        "max seconds": params.max_seconds,
        "max steps": params.max_steps,
        "max blocks": params.max_blocks,
    }
    for name, limit in limits.items():
        require(limit is None or limit > 0, name, limit, "above 0")
    with_temperature(Sampler(), params.temperature)  # validates the temperature
    require(params.retries >= 0, "retries", params.retries, "0 or more")
    if params.constraint is not None and params.committed:
        raise UsageError("constrained text cannot be continued; write it again")


def check_preset(preset: str | None) -> None:
    """Refuse an unknown preset."""
    if preset not in (None, *PRESETS):
        raise UsageError(f"preset {preset!r} is not known; use {', '.join(PRESETS)}")


def _check_mode(params: SamplingParams) -> None:
    mode = params.mode
    if mode not in MODES:
        raise UsageError(f"mode {mode!r} is not known; use {', '.join(MODES)}")
    if mode == "hybrid" and (params.pins != NO_PINS or params.initial_canvas):
        raise UsageError(
            "hybrid mode cannot honour pins or an initial canvas: where it begins is not known"
        )
    of_canvases = {
        "pins": params.pins != NO_PINS,
        "an initial canvas": bool(params.initial_canvas),
        "canvas length": params.canvas_length is not None,
        "a sampler": params.sampler is not None,
        "a preset": params.preset is not None,
        "drafts": params.drafts,
    }
    names = [name for name, is_set in of_canvases.items() if is_set]
    if params.stop_sequence and (mode != "ar" or params.constraint is not None):
        raise UsageError("a stop sequence is for AR mode without a constraint; leave it out")
    if mode == "ar" and names:
        raise UsageError(f"AR mode has no canvas, so it cannot honour {', '.join(names)}")


@dataclass(frozen=True, slots=True)
class ReplyLimits:
    """Tokens and KV slots of a reply."""

    max_tokens: int
    max_length: int  # KV slots of prompt and reply


def reply_limits(
    params: SamplingParams, num_prompt: int, config: ModelConfig, max_new_tokens: int, *, fit: bool
) -> ReplyLimits:
    """Return the limits of a reply; refuses what this model cannot do.

    `max_new_tokens` is the checkpoint's limit. With `fit`, max_tokens is lowered to fit the
    context; if nothing fits, the request is refused with its numbers.
    """
    require_denoiser(config, f"mode {params.mode} is not possible; use ar", params.mode != "ar")
    model_length, limit = config.canvas_length, config.max_position_embeddings
    length = model_length if params.canvas_length is None else params.canvas_length
    allowed = f"1 to {model_length} for this model"
    require(1 <= length <= model_length, "canvas length", length, allowed)
    if num_prompt == 0:
        raise UsageError("the prompt is empty; give at least one token")
    # An AR thought, or a grammar that commits part of a canvas, may end between canvas boundaries.
    is_open = params.mode in ("hybrid", "auto") or (
        params.mode != "ar" and params.constraint is not None
    )
    unit, spare = 1 if params.mode == "ar" else length, length if is_open else 0
    max_tokens = params.max_tokens or max_new_tokens
    num_free = (limit - num_prompt - spare) // unit * unit
    if fit and num_free > 0:
        max_tokens = min(max_tokens, num_free)
    _check_tokens(params, min(length, max_tokens), config.vocab_size)
    capacity = -(-max_tokens // unit) * unit + spare
    if num_prompt + capacity > limit:
        rounded = " (rounded up to whole canvases)" if capacity != max_tokens else ""
        raise PromptTooLong(
            f"the prompt has {num_prompt} tokens and the answer may take {capacity}{rounded}, "
            f"but the context holds {limit}; shorten the prompt or lower max tokens"
        )
    return ReplyLimits(max_tokens, num_prompt + capacity)


def _check_tokens(params: SamplingParams, length: int, vocab: int) -> None:
    for position, token in zip(params.pins.positions, params.pins.tokens, strict=True):
        require(0 <= position < length, "a pin's position", position, f"0 to {length - 1}")
        require(0 <= token < vocab, "a pinned token", token, f"0 to {vocab - 1}")
    for token in params.initial_canvas:
        require(-1 <= token < vocab, "a token", token, f"0 to {vocab - 1}, or -1 for noise")
    for token in (token for commit in params.committed for token in commit.ids):
        require(0 <= token < vocab, "a committed token", token, f"0 to {vocab - 1}")


def require_denoiser(config: ModelConfig, consequence: str, is_needed: bool = True) -> None:
    """Refuse an AR-only checkpoint where a canvas is needed."""
    if is_needed and not config.can_denoise:
        raise UsageError(f"this checkpoint has no denoiser, so {consequence}")


def with_temperature(sampler: Sampler, temperature: float | None) -> Sampler:
    return sampler if temperature is None else replace(sampler, temperature=temperature)


# --- programs with canvases


@dataclass(frozen=True, slots=True, kw_only=True)
class CanvasParams:
    """Parameters of the canvases of a program."""

    seed: int | None = None  # None draws one, reported with the result
    sampler: Sampler | None = None  # None: the model's
    drafts: bool = False  # report a canvas after each step


@dataclass(frozen=True, slots=True, kw_only=True)
class CanvasResult:
    """Cost of a program."""

    prompt_tokens: int  # shown to the model
    steps: int  # of all canvases together
    canvases: int
    seconds: float
    seed: int


@dataclass(slots=True, kw_only=True)
class Cost:
    """Counters of a program that runs."""

    seed: int
    prompt_tokens: int = 0
    steps: int = 0
    canvases: int = 0
    seconds: float = field(default_factory=lambda: -time.perf_counter())

    def fields(self) -> dict[str, Any]:
        """Return the fields of a `CanvasResult` that ends now."""
        return {**asdict(self), "seconds": self.seconds + time.perf_counter()}
