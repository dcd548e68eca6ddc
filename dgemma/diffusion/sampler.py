"""The sampler: which positions to accept, which to renoise, and when a canvas has converged.

Pure functions of the [L] statistics of one canvas: no model, no vocabulary-sized tensor and no
random generator. The defaults are the released ones. With them `EntropyBound` is the reference
rule: given the same noise it produces the same tokens as transformers. Other rules are in `rules`.

L canvas length.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from math import inf
from typing import Protocol

import torch
from torch import Tensor

from dgemma.config import GenerationConfig
from dgemma.diffusion.canvas import Canvas
from dgemma.diffusion.logit_stats import PositionStats
from dgemma.errors import UsageError, require

DEFAULTS = GenerationConfig()  # the defaults of every parameter


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
    entropy_bound: float = DEFAULTS.entropy_bound
    # Mean entropy per position below which a canvas may converge, in nats.
    confidence_threshold: float = DEFAULTS.confidence_threshold
    # Steps for which the guess must have been unchanged.
    stability_threshold: int = DEFAULTS.stability_threshold

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
    decision = rule.decide(canvas, stats)
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
    max_denoising_steps: int = DEFAULTS.max_denoising_steps
    t_max: float = DEFAULTS.t_max  # temperature of the first step, which falls linearly...
    t_min: float = DEFAULTS.t_min  # ...to this one, reached one step after the last
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


def released_sampler(config: GenerationConfig) -> Sampler:
    """Return the sampler of a generation_config."""
    rule = EntropyBound(
        entropy_bound=config.entropy_bound,
        confidence_threshold=config.confidence_threshold,
        stability_threshold=config.stability_threshold,
    )
    return Sampler(
        rule=rule,
        max_denoising_steps=config.max_denoising_steps,
        t_max=config.t_max,
        t_min=config.t_min,
    )
