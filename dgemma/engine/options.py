"""Options of a request, and the same checked and complete: a plan."""

import secrets
from dataclasses import dataclass, replace
from typing import Literal

from dgemma.config import GenerationConfig, ModelConfig
from dgemma.constrain.matcher import Guide
from dgemma.diffusion.canvas import NO_PINS, Noise, Pins
from dgemma.diffusion.sampler import Sampler, released_sampler
from dgemma.errors import PromptTooLong, UsageError
from dgemma.text.chat import Prompt
from dgemma.text.stream import StopStrings

Mode = Literal["diffusion", "ar", "hybrid"]
MODES: tuple[Mode, ...] = ("diffusion", "ar", "hybrid")


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Options of a request. None: as the checkpoint says, or no limit where one is meant.

    What a mode cannot honour is refused: pins, canvas length, sampler and drafts are for canvases.
    """

    mode: Mode = "diffusion"  # hybrid: the thought in AR, the answer in diffusion
    max_tokens: int | None = None
    seed: int | None = None  # None draws one, reported when done
    choice: int = 0  # which of several answers to the same prompt and seed
    sampler: Sampler | None = None
    # Of draws, in every mode. None: 0 for single tokens (greedy), the sampler's own on canvases.
    temperature: float | None = None
    canvas_length: int | None = None  # up to the model's own
    stop: tuple[str, ...] = ()
    pins: Pins = NO_PINS  # of the first canvas
    # An old version of the reply, to start from instead of noise; -1 where there is to be noise.
    canvas: tuple[int, ...] = ()
    guide: Guide | None = None  # what the text must look like: see Engine.guide
    drafts: bool = False  # whether to report the canvas after each step
    retries: int = 2  # how often a canvas that went wrong is done again; 0: never
    max_seconds: float | None = None
    max_steps: int | None = None  # of all canvases together, AR tokens included


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """A request, checked and complete."""

    prompt: Prompt
    mode: Mode
    max_tokens: int
    canvas_length: int
    shortest_canvas: int  # those of a long reply; the same: none is shorter
    sampler: Sampler
    long_sampler: Sampler  # of short canvases
    noise: Noise
    options: Options
    room: int  # tokens the request may come to, its last canvas included


def make_plan(
    prompt: Prompt,
    options: Options,
    config: ModelConfig,
    generation: GenerationConfig,
    sampler: Sampler,
) -> Plan:
    """Check a request against the model; refuse it before any work starts."""
    check_options(options)
    if options.mode != "ar" and not config.can_denoise:
        raise UsageError(
            f"this checkpoint has no denoiser, so mode {options.mode} is not possible; use ar"
        )
    length = _canvas_length(options.canvas_length, config)
    max_tokens = generation.max_new_tokens if options.max_tokens is None else options.max_tokens
    _check_pins(options.pins, length, max_tokens, config.vocab_size)
    for token in options.canvas:
        allowed = f"0 to {config.vocab_size - 1}, or -1 for noise"
        _require(-1 <= token < config.vocab_size, "a token", token, allowed)
    answer = max_tokens if options.mode == "ar" else -(-max_tokens // length) * length
    if options.mode == "hybrid" or (options.mode == "diffusion" and options.guide is not None):
        answer += length  # the thought need not end where a canvas would
    _check_context(len(prompt.ids), answer, config.max_position_embeddings)
    seed = secrets.randbits(32) if options.seed is None else options.seed
    return Plan(
        prompt=prompt,
        mode=options.mode,
        max_tokens=max_tokens,
        room=len(prompt.ids) + answer,
        canvas_length=length,
        shortest_canvas=_shortest_canvas(options, config, length),
        sampler=_tempered(options.sampler or sampler, options),
        long_sampler=_tempered(
            options.sampler or _long_sampler(config, generation, sampler), options
        ),
        noise=Noise(seed=seed, choice=options.choice),
        options=options,
    )


def check_options(options: Options) -> None:
    """Refuse what no model could do; needs none, so it can be called before one is loaded."""
    _check_mode(options)
    if options.guide is not None and options.stop:
        raise UsageError("a stop string would cut a text that is held to a grammar; leave it out")
    StopStrings(options.stop)  # refuses what cannot be a stop string
    Noise(seed=options.seed or 0, choice=options.choice)
    limits = {
        "max tokens": options.max_tokens,
        "max seconds": options.max_seconds,
        "max steps": options.max_steps,
    }
    for name, limit in limits.items():
        _require(limit is None or limit > 0, name, limit, "above 0")
    _tempered(Sampler(), options)  # refuses what cannot be a temperature
    _require(options.retries >= 0, "retries", options.retries, "0 or more")


def _check_mode(options: Options) -> None:
    mode = options.mode
    if mode not in MODES:
        raise UsageError(f"mode {mode!r} is not known; use {', '.join(MODES)}")
    if mode == "hybrid" and (options.pins != NO_PINS or options.canvas):
        raise UsageError(
            "hybrid mode cannot honour pins or a first canvas: where it begins is not known"
        )
    of_canvases = {
        "pins": options.pins != NO_PINS,
        "a first canvas": bool(options.canvas),
        "canvas length": options.canvas_length is not None,
        "a sampler": options.sampler is not None,
        "drafts": options.drafts,
    }
    given = [name for name, is_given in of_canvases.items() if is_given]
    if mode == "ar" and given:
        raise UsageError(f"AR mode has no canvas, so it cannot honour {', '.join(given)}")


def _canvas_length(wanted: int | None, config: ModelConfig) -> int:
    own = config.canvas_length
    length = own if wanted is None else wanted
    _require(1 <= length <= own, "canvas length", length, f"1 to {own} for this model")
    return length


def _shortest_canvas(options: Options, config: ModelConfig, length: int) -> int:
    """What a canvas may shrink to: what the model was trained for, unless the request has a say."""
    has_say = options.canvas_length is not None or options.canvas or options.guide is not None
    long = config.long_reply
    return length if has_say or long is None else min(length, long.canvas_length)


def _long_sampler(config: ModelConfig, generation: GenerationConfig, usual: Sampler) -> Sampler:
    long = config.long_reply
    if long is None:
        return usual
    return released_sampler(long.applied(generation), reach=long.reach)


def _tempered(sampler: Sampler, options: Options) -> Sampler:
    given = options.temperature
    return sampler if given is None else replace(sampler, temperature=given)


def _check_pins(pins: Pins, length: int, max_tokens: int, vocab: int) -> None:
    for position, token in zip(pins.positions, pins.tokens, strict=True):
        limit = min(length, max_tokens)
        _require(0 <= position < limit, "a pin's position", position, f"0 to {limit - 1}")
        _require(0 <= token < vocab, "a pinned token", token, f"0 to {vocab - 1}")


def _check_context(prompt: int, answer: int, limit: int) -> None:
    if prompt == 0:
        raise UsageError("the prompt is empty; give at least one token")
    if prompt + answer > limit:
        raise PromptTooLong(
            f"the prompt has {prompt} tokens and the answer may take {answer}, but the context "
            f"holds {limit}; shorten the prompt or lower max tokens"
        )


def _require(holds: bool, what: str, value: object, allowed: str) -> None:
    if not holds:
        raise UsageError(f"{what} is {value}; it must be {allowed}")
