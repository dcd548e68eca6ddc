"""Canvas policy of a reply: canvas length, sampler, initial tokens, and the output check.

All canvases of a reply are alike, unless the checkpoint has a preset for long replies (`long_reply`
in config.json, decision 015): shorter canvases with another sampler, or draft tokens from canvases
that the causal mode verifies. A reply that ends in its first canvas keeps that canvas, since its
parts may depend on each other, like the cells of a grid.
"""

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from dgemma.config import GenerationConfig, ModelConfig
from dgemma.diffusion.canvas import Canvas
from dgemma.diffusion.rules import with_reach
from dgemma.diffusion.sampler import Rule, Sampler, released_sampler
from dgemma.engine.params import SamplingParams, with_temperature

LENGTH_MULTIPLE = 8  # lengths are rounded to it: each is captured as its own CUDA graph
MIN_END_FRACTION = 1 / 8  # fraction of end tokens in a first canvas that ends the reply
MAX_LAST_RATIO = 1.5  # length of the last canvas relative to a short one
NOT_A_NUMBER = "not a number"
MAX_LOOP_PERIOD = 8  # tokens in a repeated phrase
MIN_LOOP_LENGTH = 32  # tokens that must repeat to count as a loop
MAX_ALIGNED = 512  # tokens compared to align with an old version


@dataclass(frozen=True, slots=True)
class CanvasPreset:
    length: int
    sampler: Sampler
    num_speculative_tokens: int = 0  # first tokens, a draft; 0: the canvas is committed


@dataclass(frozen=True, slots=True)
class CanvasPolicy:
    """Canvas presets of one reply: the usual one, and an optional one for long replies."""

    usual: CanvasPreset
    long: CanvasPreset | None = None
    shortens: bool = False  # limit canvases to the tokens left

    @property
    def num_speculative_tokens(self) -> int:
        return 0 if self.long is None else self.long.num_speculative_tokens

    @property
    def speculative_temperature(self) -> float:
        """Temperature at which the causal mode draws the tokens of a long reply."""
        return (
            0.0 if self.long is None or not self.num_speculative_tokens else self.long.sampler.t_max
        )

    def without_speculation(self) -> "CanvasPolicy":
        return replace(self, long=None) if self.num_speculative_tokens else self

    def next_canvas(self, num_left: int, num_free: int, *, is_long: bool = False) -> CanvasPreset:
        """Return the preset of the next canvas.

        `num_left` tokens may still be written and `num_free` KV slots are left; `is_long`: the
        reply does not end in its first canvas.
        """
        if self.long is None or not is_long:
            if not self.shortens:
                return self.usual
            left = -(-num_left // LENGTH_MULTIPLE) * LENGTH_MULTIPLE
            return replace(self.usual, length=min(self.usual.length, left))
        short = self.long.length
        length = max(short, -(-num_left // LENGTH_MULTIPLE) * LENGTH_MULTIPLE)
        if length > short * MAX_LAST_RATIO:
            return self.long
        return replace(self.long, length=min(length, num_free))

    def restarts(self, canvas: Canvas, end_ids: Collection[int]) -> bool:
        """True if the first canvas restarts with the long preset: no end is predicted."""
        if self.long is None or canvas.num_steps != 1:
            return False
        num_ends = sum(token in end_ids for token in canvas.guess_L.tolist())
        # After an end, the rest of a canvas is end tokens; a few at the very end prove nothing.
        has_end = num_ends >= MIN_END_FRACTION * canvas.length
        return not (has_end or bool(canvas.pinned_L.any()))


def canvas_policy(
    params: SamplingParams,
    sampler: Sampler,
    config: ModelConfig,
    generation: GenerationConfig,
    rule: Rule | None = None,
) -> CanvasPolicy:
    """Return the policy of a request. A request with its own canvas settings has no long preset.

    `sampler` and `generation` belong to the request's preset; `rule` replaces the one for long
    replies.
    """
    length = params.canvas_length or config.canvas_length
    long = generation.long_reply or config.long_reply
    sampler = with_temperature(params.sampler or sampler, params.temperature)
    usual = CanvasPreset(length, sampler)
    is_set = params.canvas_length or params.initial_canvas or params.constraint is not None
    if long is None or is_set or long.canvas_length >= length:
        return CanvasPolicy(usual)
    if long.num_speculative_tokens and (params.sampler or rule or params.mode != "diffusion"):
        return CanvasPolicy(usual)
    released = released_sampler(long.applied(generation))
    if rule is not None:
        released = replace(released, rule=rule)
    elif long.reach:
        released = with_reach(released, long.reach)
    sampler = with_temperature(params.sampler or released, params.temperature)
    return CanvasPolicy(
        usual, CanvasPreset(long.canvas_length, sampler, long.num_speculative_tokens)
    )


def output_fault(
    ids: Sequence[int], entropy: Sequence[float], stops: Collection[int], *, is_first: bool
) -> str:
    """Return why a finished canvas must be retried, or an empty string.

    A canvas that begins with a stop token ends the reply, unless it is the first one.
    """
    if any(math.isnan(value) for value in entropy):
        return NOT_A_NUMBER
    body = ids[: next((i for i, token in enumerate(ids) if token in stops), len(ids))]
    if is_first and not body:
        return "empty"
    return "repetition" if has_loop(body) else ""


def has_loop(ids: Sequence[int]) -> bool:
    """True if at least half of the text is a short phrase repeated at its end."""
    span = max(MIN_LOOP_LENGTH, len(ids) // 2)
    if len(ids) < span + MAX_LOOP_PERIOD:
        return False
    tail = ids[len(ids) - span - MAX_LOOP_PERIOD :]
    return any(
        all(tail[i] == tail[i - period] for i in range(MAX_LOOP_PERIOD, len(tail)))
        for period in range(1, MAX_LOOP_PERIOD + 1)
    )


def resume_index(old: Sequence[int], written: Sequence[int]) -> int:
    """Return the index at which to continue in an old version of the text.

    Aligns by the last tokens common to both texts; without any, by the token count. Only the last
    tokens written are compared with the old version around them.
    """
    from difflib import SequenceMatcher

    offset = max(0, len(written) - MAX_ALIGNED)  # of the window
    old_offset = max(0, offset - MAX_ALIGNED)
    tail = written[offset:]
    near = old[old_offset : old_offset + 3 * MAX_ALIGNED]
    blocks = SequenceMatcher(None, near, tail, autojunk=False).get_matching_blocks()
    common = [block for block in blocks if block.size]
    if not common:
        return len(written)
    last = common[-1]
    return old_offset + last.a + len(tail) - last.b
