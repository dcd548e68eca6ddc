"""The sampler: positions to accept, positions to renoise, and the test for convergence.

Everything here is pure and works on the [L] values of one canvas; it never sees a model, a tensor
of vocabulary size or a random generator. The defaults are the released ones, and the entropy rule
with them is the reference: given the same noise, its tokens are ours.

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
    """A rule's decision on one step."""

    kept_L: Tensor  # positions accepted in this step; all others are renoised
    tokens_L: Tensor  # their tokens
    guess_L: Tensor  # what would be committed now
    converged: Tensor  # bool, 0-d; a canvas that is all pins converges whatever the rule says


LogitsAt = Callable[[Sequence[int]], Tensor]  # maps positions to their logits, [n, V]


@dataclass(frozen=True, slots=True)
class StepView:
    """Statistics and logits of a step, for a constraint."""

    stats: PositionStats
    noise_L: Tensor  # tokens of positions that were not accepted
    logits: LogitsAt


class Rule(Protocol):
    """Decides which positions of a canvas keep their token; pinned ones keep theirs in any case."""

    def decide(self, canvas: Canvas, stats: PositionStats) -> Decision: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class EntropyBound:
    """The reference rule: each step accepts the most certain positions that fit the bound."""

    # Nats that the accepted positions may have together.
    entropy_bound: float = RELEASED.entropy_bound
    # Mean nats per position below which a canvas may converge.
    confidence_threshold: float = RELEASED.confidence_threshold
    # Steps for which the guess must have stayed the same.
    stability_threshold: int = RELEASED.stability_threshold

    def __post_init__(self) -> None:
        bound, confidence = self.entropy_bound, self.confidence_threshold
        require(bound > 0, "entropy bound", bound, "above 0")
        require(confidence > 0, "confidence threshold", confidence, "above 0")
        stability = self.stability_threshold
        require(stability >= 0, "stability threshold", stability, "0 or more")

    def decide(self, canvas: Canvas, stats: PositionStats) -> Decision:
        open_L = ~canvas.pinned_L
        kept_L = accept_mask(
            stats.entropy_T.masked_fill(canvas.pinned_L, torch.inf), self.entropy_bound
        )
        mean = (stats.entropy_T * open_L).sum() / open_L.sum().clamp(min=1)
        is_stable = stable_steps(canvas, stats.top_T) >= self.stability_threshold
        return Decision(
            kept_L, stats.draw_T, stats.top_T, is_stable & (mean < self.confidence_threshold)
        )


def accept_mask(entropy_L: Tensor, bound: float) -> Tensor:
    """Mark the most certain positions, as many as may be accepted together.

    With entropies sorted h1 <= h2 <= ..., position k is accepted while h1 + ... + h(k-1) <= bound
    (arXiv:2505.24857). The first is always accepted, so every step moves. Ties are taken in order
    of position: so does the reference on a GPU for more than 32; else its sort leaves them open.
    """
    sorted_L, order_L = entropy_L.sort(stable=True)
    within_L = sorted_L.cumsum(0) - sorted_L <= bound
    return torch.zeros_like(within_L).scatter(0, order_L, within_L)


def stable_steps(canvas: Canvas, guess_L: Tensor) -> Tensor:
    """Count the steps in a row after which the guess was this one."""
    same = torch.where(canvas.pinned_L, True, guess_L == canvas.guess_L).all()
    return torch.where(same, canvas.stable_steps + 1, 0)


def advance(canvas: Canvas, stats: PositionStats, noise_L: Tensor, rule: Rule) -> Canvas:
    """Take one step: accept positions, renoise the others, leave pins alone."""
    decision = _checked(rule.decide(canvas, stats), rule, canvas.length)
    pinned_L = canvas.pinned_L
    moved_L = torch.where(decision.kept_L, decision.tokens_L, noise_L)
    return replace(
        canvas,
        tokens_L=torch.where(pinned_L, canvas.tokens_L, moved_L),
        kept_L=decision.kept_L | pinned_L,
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
    t_max: float = RELEASED.t_max  # temperature of the first step, falling linearly towards...
    t_min: float = RELEASED.t_min  # ...this one, which a step after the last would have
    temperature: float = 1.0  # of draws alone, on top of the schedule; 0 takes the likeliest token

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
        """Return the scheduled temperature with `steps_left` steps to go (inclusive)."""
        fraction = steps_left / self.max_denoising_steps
        return self.t_min + (self.t_max - self.t_min) * fraction


@dataclass(frozen=True, slots=True, kw_only=True)
class SpacedEntropyBound(EntropyBound):
    """The entropy rule for a loose bound: uncertain positions are not accepted side by side.

    The bound counts how much entropy is accepted and not where, but neighbours that are drawn
    independently contradict each other: where a word would fit two positions, both take it ("the
    frog frog"). Among uncertain positions within `reach` of each other only the most certain is
    accepted in a step, and no uncertain position near one with the same token. The others are
    renoised for one more step, in which they see it.
    """

    min_entropy: float = 0.1  # nats above which a position is uncertain
    reach: int = 2  # positions to either side that are near

    def __post_init__(self) -> None:
        EntropyBound.__post_init__(self)  # zero-argument super() does not work with slots=True
        require(self.min_entropy >= 0, "min entropy", self.min_entropy, "0 or more")
        require(self.reach >= 1, "reach", self.reach, "1 or more")

    def decide(self, canvas: Canvas, stats: PositionStats) -> Decision:
        decision = EntropyBound.decide(self, canvas, stats)
        entropy_L = stats.entropy_T.masked_fill(~decision.kept_L, torch.inf)
        is_uncertain_L = entropy_L > self.min_entropy
        conflicts_LL = is_uncertain_L | (decision.tokens_L == decision.tokens_L[:, None])
        is_deferred_L = (more_certain_neighbours(entropy_L, self.reach) & conflicts_LL).any(1)
        return replace(decision, kept_L=decision.kept_L & ~(is_uncertain_L & is_deferred_L))


def more_certain_neighbours(entropy_L: Tensor, reach: int) -> Tensor:
    """Mark in row i, [L, L], the positions within reach of i that are more certain than i.

    Of equally certain positions the first counts as the more certain.
    """
    index_L = torch.arange(len(entropy_L), device=entropy_L.device)
    is_before_LL = index_L < index_L[:, None]
    is_near_LL = (index_L - index_L[:, None]).abs() <= reach
    entropy_L1 = entropy_L[:, None]
    is_tie_LL = (entropy_L == entropy_L1) & is_before_LL
    return is_near_LL & ((entropy_L < entropy_L1) | is_tie_LL)


@dataclass(frozen=True, slots=True, kw_only=True)
class Confidence:
    """A faster rule: confident tokens stay until a clearly better one is seen.

    A position is accepted once the probability of its likeliest token passes `threshold` (the most
    certain open one always is), replaced when another token passes `edit`, and opened again when
    its own falls below `drop`. Hard freezing, with no way back, is reported to leave artefacts.
    """

    threshold: float = 0.9
    edit: float = 0.9
    drop: float = 0.3

    def __post_init__(self) -> None:
        for name in ("threshold", "edit", "drop"):
            value = getattr(self, name)
            require(0 <= value <= 1, f"confidence {name}", value, "from 0 to 1")

    def decide(self, canvas: Canvas, stats: PositionStats) -> Decision:
        held_L = canvas.kept_L & ~canvas.pinned_L
        open_L = ~canvas.kept_L & ~canvas.pinned_L
        most_certain_L = stats.top_p_T.masked_fill(~open_L, -1.0)
        new_L = open_L & (
            (stats.top_p_T > self.threshold) | (most_certain_L == most_certain_L.max())
        )
        edit_L = held_L & (stats.top_T != canvas.tokens_L) & (stats.top_p_T > self.edit)
        drop_L = held_L & ~edit_L & (stats.held_p_T < self.drop)
        kept_L = (held_L & ~drop_L) | new_L
        tokens_L = torch.where(new_L | edit_L, stats.top_T, canvas.tokens_L)
        guess_L = torch.where(kept_L, tokens_L, stats.top_T)
        return Decision(kept_L, tokens_L, guess_L, ~(open_L | edit_L | drop_L).any())


def released_sampler(config: GenerationConfig, *, reach: int = 0) -> Sampler:
    """Return the sampler of a generation_config; with `reach`, its rule is the spaced one."""
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
    "kept_L": torch.bool,
    "tokens_L": torch.int64,
    "guess_L": torch.int64,
    "converged": torch.bool,
}


def _checked(decision: Any, rule: Rule, length: int) -> Decision:
    """Refuse what is no decision on a canvas of this length."""
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
