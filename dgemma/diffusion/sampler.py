"""The sampler: which positions to accept, which to renoise, and when a canvas has converged.

Pure functions of the [L] statistics of one canvas: no model, no vocabulary-sized tensor and no
random generator. The defaults are the released ones. With them `EntropyBound` is the reference
rule: given the same noise it produces the same tokens as transformers.

L canvas length.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from math import inf
from typing import Any, Protocol

import torch
from torch import Tensor

from dgemma.config import GenerationConfig
from dgemma.diffusion.canvas import Canvas
from dgemma.diffusion.logit_stats import PositionStats
from dgemma.errors import UsageError, require

RELEASED = GenerationConfig()  # the defaults of every parameter


@dataclass(frozen=True, slots=True)
class Decision:
    """The decision of a rule on one step."""

    accepted_L: Tensor  # positions accepted in this step; all others are renoised
    tokens_L: Tensor  # tokens of the accepted positions
    guess_L: Tensor  # what would be committed now
    converged: Tensor  # bool, 0-d; ignored if all positions are pinned


LogitsAt = Callable[[Sequence[int]], Tensor]  # maps positions to their logits, [n, V]


@dataclass(frozen=True, slots=True)
class StepView:
    """Statistics and logits of a step, as a constraint sees them."""

    stats: PositionStats
    noise_L: Tensor  # noise for positions that are not accepted
    logits: LogitsAt


class Rule(Protocol):
    """Decides which positions of a canvas are accepted. Pinned positions never change."""

    def decide(self, canvas: Canvas, stats: PositionStats) -> Decision: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class EntropyBound:
    """The reference rule: accept the most certain positions whose entropies fit the bound."""

    # Bound on the sum of the accepted positions' entropies, in nats.
    entropy_bound: float = RELEASED.entropy_bound
    # Mean entropy per position below which a canvas may converge, in nats.
    confidence_threshold: float = RELEASED.confidence_threshold
    # Steps for which the guess must have been unchanged.
    stability_threshold: int = RELEASED.stability_threshold

    def __post_init__(self) -> None:
        bound, confidence = self.entropy_bound, self.confidence_threshold
        require(bound > 0, "entropy bound", bound, "above 0")
        require(confidence > 0, "confidence threshold", confidence, "above 0")
        stability = self.stability_threshold
        require(stability >= 0, "stability threshold", stability, "0 or more")

    def decide(self, canvas: Canvas, stats: PositionStats) -> Decision:
        open_L = ~canvas.pinned_L
        accepted_L = accept_mask(
            stats.entropy_T.masked_fill(canvas.pinned_L, torch.inf), self.entropy_bound
        )
        mean = (stats.entropy_T * open_L).sum() / open_L.sum().clamp(min=1)
        is_stable = stable_steps(canvas, stats.top_T) >= self.stability_threshold
        return Decision(
            accepted_L, stats.draw_T, stats.top_T, is_stable & (mean < self.confidence_threshold)
        )


def accept_mask(entropy_L: Tensor, bound: float) -> Tensor:
    """Mark the most certain positions whose entropies fit the bound.

    With entropies sorted h1 <= h2 <= ..., position k is accepted while h1 + ... + h(k-1) <= bound
    (arXiv:2505.24857). The first is always accepted, so every step makes progress. Ties are broken
    by position, as in the reference on a GPU for more than 32 positions; otherwise the reference's
    sort is unstable.
    """
    sorted_L, order_L = entropy_L.sort(stable=True)
    within_L = sorted_L.cumsum(0) - sorted_L <= bound
    return torch.zeros_like(within_L).scatter(0, order_L, within_L)


def stable_steps(canvas: Canvas, guess_L: Tensor) -> Tensor:
    """Count the consecutive steps with the same guess."""
    same = torch.where(canvas.pinned_L, True, guess_L == canvas.guess_L).all()
    return torch.where(same, canvas.stable_steps + 1, 0)


def advance(canvas: Canvas, stats: PositionStats, noise_L: Tensor, rule: Rule) -> Canvas:
    """Take one step: accept positions, renoise the others, leave pins alone."""
    decision = _checked(rule.decide(canvas, stats), rule, canvas.length)
    pinned_L = canvas.pinned_L
    moved_L = torch.where(decision.accepted_L, decision.tokens_L, noise_L)
    return replace(
        canvas,
        tokens_L=torch.where(pinned_L, canvas.tokens_L, moved_L),
        accepted_L=decision.accepted_L | pinned_L,
        guess_L=torch.where(pinned_L, canvas.tokens_L, decision.guess_L),
        entropy_L=stats.entropy_T.masked_fill(pinned_L, 0.0),
        converged=decision.converged | pinned_L.all(),
        stable_steps=stable_steps(canvas, decision.guess_L),
        num_steps=canvas.num_steps + 1,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampler:
    """Denoising parameters of one request."""

    rule: Rule = field(default_factory=EntropyBound)
    max_denoising_steps: int = RELEASED.max_denoising_steps
    t_max: float = RELEASED.t_max  # temperature of the first step, which falls linearly...
    t_min: float = RELEASED.t_min  # ...to this one, reached one step after the last
    temperature: float = 1.0  # of draws only, on top of the schedule; 0: argmax

    def __post_init__(self) -> None:
        if isinstance(self.rule, type) or not callable(getattr(self.rule, "decide", None)):
            raise UsageError(
                f"the rule is {self.rule!r}; it must be an object with decide(canvas, stats)"
            )
        steps, t_max, t_min = self.max_denoising_steps, self.t_max, self.t_min
        require(steps >= 1, "max denoising steps", steps, "1 or more")
        require(0 <= self.temperature < inf, "temperature", self.temperature, "0 or more")
        require(0 < t_min < inf, "t_min", t_min, "above 0")
        require(t_min <= t_max < inf, "t_max", t_max, "t_min or more")

    def temperature_at(self, steps_left: int) -> float:
        """Return the scheduled temperature with `steps_left` steps left, this one included."""
        fraction = steps_left / self.max_denoising_steps
        return self.t_min + (self.t_max - self.t_min) * fraction


@dataclass(frozen=True, slots=True, kw_only=True)
class SpacedEntropyBound(EntropyBound):
    """The entropy rule for a loose bound: do not accept uncertain neighbours in the same step.

    The bound limits how much entropy is accepted but not where. Neighbours drawn independently may
    contradict each other: where a word fits two positions, both take it ("the frog frog"). Of the
    uncertain positions within `reach` of each other only the most certain is accepted in a step,
    and no uncertain position is accepted next to one with the same token. The others are renoised
    and see the accepted ones in the next step.
    """

    min_entropy: float = 0.1  # entropy above which a position is uncertain, in nats
    reach: int = 2  # neighbours on each side to compare with

    def __post_init__(self) -> None:
        EntropyBound.__post_init__(self)  # zero-argument super() does not work with slots=True
        require(self.min_entropy >= 0, "min entropy", self.min_entropy, "0 or more")
        require(self.reach >= 1, "reach", self.reach, "1 or more")

    def decide(self, canvas: Canvas, stats: PositionStats) -> Decision:
        decision = EntropyBound.decide(self, canvas, stats)
        entropy_L = stats.entropy_T.masked_fill(~decision.accepted_L, torch.inf)
        is_uncertain_L = entropy_L > self.min_entropy
        conflicts_LL = is_uncertain_L | (decision.tokens_L == decision.tokens_L[:, None])
        is_deferred_L = (more_certain_neighbours(entropy_L, self.reach) & conflicts_LL).any(1)
        return replace(decision, accepted_L=decision.accepted_L & ~(is_uncertain_L & is_deferred_L))


def more_certain_neighbours(entropy_L: Tensor, reach: int) -> Tensor:
    """Mark in row i of [L, L] the positions within reach of i that are more certain than i.

    Of two equally certain positions the first counts as more certain.
    """
    index_L = torch.arange(len(entropy_L), device=entropy_L.device)
    is_before_LL = index_L < index_L[:, None]
    is_near_LL = (index_L - index_L[:, None]).abs() <= reach
    entropy_L1 = entropy_L[:, None]
    is_tie_LL = (entropy_L == entropy_L1) & is_before_LL
    return is_near_LL & ((entropy_L < entropy_L1) | is_tie_LL)


@dataclass(frozen=True, slots=True, kw_only=True)
class Confidence:
    """A faster rule: accept by the argmax's probability, and revise accepted tokens.

    A position is accepted once its argmax has a probability above `threshold` (the most certain
    open position always is), replaced when another token exceeds `edit`, and reopened when its
    current token falls below `drop`. Without reopening, early mistakes would stay.
    """

    threshold: float = 0.9
    edit: float = 0.9
    drop: float = 0.3

    def __post_init__(self) -> None:
        for name in ("threshold", "edit", "drop"):
            value = getattr(self, name)
            require(0 <= value <= 1, f"confidence {name}", value, "from 0 to 1")

    def decide(self, canvas: Canvas, stats: PositionStats) -> Decision:
        held_L = canvas.accepted_L & ~canvas.pinned_L
        open_L = ~canvas.accepted_L & ~canvas.pinned_L
        most_certain_L = stats.top_p_T.masked_fill(~open_L, -1.0)
        new_L = open_L & (
            (stats.top_p_T > self.threshold) | (most_certain_L == most_certain_L.max())
        )
        edit_L = held_L & (stats.top_T != canvas.tokens_L) & (stats.top_p_T > self.edit)
        drop_L = held_L & ~edit_L & (stats.current_p_T < self.drop)
        accepted_L = (held_L & ~drop_L) | new_L
        tokens_L = torch.where(new_L | edit_L, stats.top_T, canvas.tokens_L)
        guess_L = torch.where(accepted_L, tokens_L, stats.top_T)
        return Decision(accepted_L, tokens_L, guess_L, ~(open_L | edit_L | drop_L).any())


def released_sampler(config: GenerationConfig, *, reach: int = 0) -> Sampler:
    """Return the sampler of a generation_config; `reach` > 0 selects `SpacedEntropyBound`."""
    limits: dict[str, Any] = {
        "entropy_bound": config.entropy_bound,
        "confidence_threshold": config.confidence_threshold,
        "stability_threshold": config.stability_threshold,
    }
    return Sampler(
        rule=SpacedEntropyBound(**limits, reach=reach) if reach else EntropyBound(**limits),
        max_denoising_steps=config.max_denoising_steps,
        t_max=config.t_max,
        t_min=config.t_min,
    )


DECISION_DTYPES = {
    "accepted_L": torch.bool,
    "tokens_L": torch.int64,
    "guess_L": torch.int64,
    "converged": torch.bool,
}


def _checked(decision: Any, rule: Rule, length: int) -> Decision:
    """Refuse a value that is not a `Decision` for a canvas of this length."""
    name = f"{type(rule).__name__}.decide"
    if not isinstance(decision, Decision):
        raise UsageError(f"{name} returned a {type(decision).__name__}; it must be a Decision")
    for part, dtype in DECISION_DTYPES.items():
        value, shape = getattr(decision, part), () if part == "converged" else (length,)
        given = (value.dtype, tuple(value.shape)) if isinstance(value, Tensor) else None
        if given != (dtype, shape):
            shown = repr(value) if given is None else f"{given[0]} of shape {list(given[1])}"
            raise UsageError(
                f"{name} returned {part} as {shown}; it must be a tensor of {dtype} and "
                f"shape {list(shape)}"
            )
    return decision
