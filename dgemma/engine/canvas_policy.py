"""The canvases of a reply: length and sampler, initial tokens, and the check of a finished one.

All canvases are alike, unless the checkpoint has a preset for long replies (`long_reply` in its
config.json, decision 015): shorter canvases with a sampler of their own, or drafts on canvases that
the causal mode verifies. A reply that ends in its first canvas keeps that one: its parts may depend
on each other, as the cells of a grid do.
"""

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from dgemma.config import GenerationConfig, ModelConfig
from dgemma.diffusion.canvas import Canvas
from dgemma.diffusion.sampler import Rule, Sampler, released_sampler
from dgemma.engine.params import SamplingParams, with_temperature

LENGTH_MULTIPLE = 8  # of shortened canvases: each length is captured as a CUDA graph by itself
MIN_END_FRACTION = 1 / 8  # of a first canvas filled with end tokens, if the reply ends in it
MAX_LAST_RATIO = 1.5  # of the last canvas to a short one; a longer rest takes another canvas
NOT_A_NUMBER = "not a number"
MAX_LOOP_PERIOD = 8  # tokens in a phrase that is repeated
MIN_LOOP_LENGTH = 32  # tokens that must repeat before it counts as a loop
MAX_ALIGNED = 512  # tokens that are compared with an old version to continue from it


@dataclass(frozen=True, slots=True)
class CanvasPreset:
    length: int
    sampler: Sampler
    draft_length: int = 0  # first tokens that are a draft; 0: the canvas is committed


@dataclass(frozen=True, slots=True)
class CanvasPolicy:
    """Presets of one reply: the usual one, and one for long replies if there is any."""

    usual: CanvasPreset
    long: CanvasPreset | None = None
    shortens: bool = False  # canvases are no longer than what may still be written

    @property
    def draft_length(self) -> int:
        return 0 if self.long is None else self.long.draft_length

    @property
    def draft_temperature(self) -> float:
        """Temperature at which the causal mode draws the tokens of a long reply."""
        return self.long.sampler.t_max if self.long is not None and self.draft_length else 0.0

    def without_drafts(self) -> "CanvasPolicy":
        return replace(self, long=None) if self.draft_length else self

    def next_canvas(self, num_left: int, num_free: int, *, is_long: bool = False) -> CanvasPreset:
        """Return the next canvas's preset.

        `num_left` tokens may still be written, `num_free` slots are left in the KV cache;
        `is_long`: the reply is known not to end in its first canvas.
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
        """True if the first canvas starts again: its first step predicts no end in it."""
        if self.long is None or canvas.num_steps != 1:
            return False
        num_ends = sum(token in end_ids for token in canvas.guess_L.tolist())
        # After an end, the rest of a canvas is end tokens; a few at its very end mean little.
        has_end = num_ends >= MIN_END_FRACTION * canvas.length
        return not (has_end or bool(canvas.pinned_L.any()))


def canvas_policy(
    params: SamplingParams,
    sampler: Sampler,
    config: ModelConfig,
    generation: GenerationConfig,
    rule: Rule | None = None,
) -> CanvasPolicy:
    """Return the policy of a request; one that sets its canvases has no preset for long replies.

    `sampler` and `generation` are those of the request's preset; `rule`: instead of the one for
    long replies.
    """
    length = params.canvas_length or config.canvas_length
    long = generation.long_reply or config.long_reply
    sampler = with_temperature(params.sampler or sampler, params.temperature)
    usual = CanvasPreset(length, sampler)
    is_set = params.canvas_length or params.initial_canvas or params.constraint is not None
    if long is None or is_set or long.canvas_length >= length:
        return CanvasPolicy(usual)
    if long.draft_length and (params.sampler or rule or params.mode != "diffusion"):
        return CanvasPolicy(usual)
    released = released_sampler(long.applied(generation), reach=long.reach)
    released = released if rule is None else replace(released, rule=rule)
    sampler = with_temperature(params.sampler or released, params.temperature)
    return CanvasPolicy(usual, CanvasPreset(long.canvas_length, sampler, long.draft_length))


def output_fault(
    ids: Sequence[int], entropy: Sequence[float], stops: Collection[int], *, is_first: bool
) -> str:
    """Return why a finished canvas should be done again, or nothing.

    A canvas that begins with a stop is the plain end of a reply, unless it is the first.
    """
    if any(math.isnan(value) for value in entropy):
        return NOT_A_NUMBER
    body = ids[: next((i for i, token in enumerate(ids) if token in stops), len(ids))]
    if is_first and not body:
        return "empty"
    return "repetition" if has_loop(body) else ""


def has_loop(ids: Sequence[int]) -> bool:
    """True if the text ends in a short phrase over and over, for at least half of its length."""
    span = max(MIN_LOOP_LENGTH, len(ids) // 2)
    if len(ids) < span + MAX_LOOP_PERIOD:
        return False
    tail = ids[len(ids) - span - MAX_LOOP_PERIOD :]
    return any(
        all(tail[i] == tail[i - period] for i in range(MAX_LOOP_PERIOD, len(tail)))
        for period in range(1, MAX_LOOP_PERIOD + 1)
    )


def resume_index(old: Sequence[int], written: Sequence[int]) -> int:
    """Index at which an old version continues after what was written, which need not be as long.

    It follows the last tokens that both have in common; without any, the count of tokens. Only the
    last tokens that were written are compared, and those of the old version around them.
    """
    from difflib import SequenceMatcher

    offset = max(0, len(written) - MAX_ALIGNED)  # of what is compared
    old_offset = max(0, offset - MAX_ALIGNED)
    tail = written[offset:]
    near = old[old_offset : old_offset + 3 * MAX_ALIGNED]
    blocks = SequenceMatcher(None, near, tail, autojunk=False).get_matching_blocks()
    common = [block for block in blocks if block.size]
    if not common:
        return len(written)
    last = common[-1]
    return old_offset + last.a + len(tail) - last.b
