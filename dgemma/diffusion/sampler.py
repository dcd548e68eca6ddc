"""The sampler: positions to accept, positions to renoise, and the test for convergence.

Everything here is pure and works on one row's [L] values; it never sees a model, a vocabulary-sized
tensor or a random generator. The defaults are the released ones, and the entropy rule with them is
the reference: given the same noise, its tokens are ours.

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
from dgemma.diffusion.logit_stats import RowStats
from dgemma.errors import UsageError


@dataclass(frozen=True, slots=True)
class Decision:
    """A rule's decision on one step."""

    kept_L: Tensor  # positions decided in this step; all others become noise
    tokens_L: Tensor  # their tokens
    guess_L: Tensor  # what would be committed now
    settled: Tensor  # bool, 0-d; a canvas that is all pins settles whatever the rule says


Look = Callable[[Sequence[int]], Tensor]  # maps positions to their logits, [n, V]


@dataclass(frozen=True, slots=True)
class View:
    """Statistics of a step, as a constraint sees them."""

    stats: RowStats
    noise_L: Tensor  # what stands where nothing was decided
    look: Look


class Rule(Protocol):
    """Decides which positions of a canvas may hold their token. Pinned ones are not its concern."""

    def decide(self, canvas: Canvas, stats: RowStats) -> Decision: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class EntropyBound:
    """The reference rule: decide the surest positions anew each step, as many as fit the bound."""

    entropy_bound: float = 0.1  # nats that the decided positions may leave open together
    confidence_threshold: float = 0.005  # mean nats per position below which a canvas may settle
    stability_threshold: int = 1  # steps the guess must have stayed the same

    def __post_init__(self) -> None:
        _require(self.entropy_bound > 0, "entropy bound", self.entropy_bound, "above 0")
        _require(
            self.confidence_threshold > 0,
            "confidence threshold",
            self.confidence_threshold,
            "above 0",
        )
        _require(
            self.stability_threshold >= 0,
            "stability threshold",
            self.stability_threshold,
            "0 or more",
        )

    def decide(self, canvas: Canvas, stats: RowStats) -> Decision:
        open_L = ~canvas.pinned_L
        kept_L = keepers(
            stats.entropy_T.masked_fill(canvas.pinned_L, torch.inf), self.entropy_bound
        )
        mean = (stats.entropy_T * open_L).sum() / open_L.sum().clamp(min=1)
        steady = steady_steps(canvas, stats.top_T) >= self.stability_threshold
        return Decision(
            kept_L, stats.draw_T, stats.top_T, steady & (mean < self.confidence_threshold)
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Apart(EntropyBound):
    """The entropy rule for a loose bound: what is decided together is sure, or stands apart.

    The bound counts how much is open and not where, but positions that draw side by side, each for
    itself, contradict each other: where one word would fit two places, both take it ("the frog
    frog"). Here of doubtful positions near each other only the surest is decided in a step, and
    none beside its own like. The others are noise for one more step, in which they see it.
    """

    doubt: float = 0.1  # nats of entropy above which a position is in doubt
    reach: int = 2  # positions to either side that are near

    def __post_init__(self) -> None:
        EntropyBound.__post_init__(self)  # super() is at a loss in a class that is made with slots
        _require(self.doubt >= 0, "doubt", self.doubt, "0 or more")
        _require(self.reach >= 1, "reach", self.reach, "1 or more")

    def decide(self, canvas: Canvas, stats: RowStats) -> Decision:
        together = EntropyBound.decide(self, canvas, stats)
        entropy_L = stats.entropy_T.masked_fill(~together.kept_L, torch.inf)
        is_doubtful_L = entropy_L > self.doubt
        disturbs_LL = is_doubtful_L | (together.tokens_L == together.tokens_L[:, None])
        is_late_L = (near_and_surer(entropy_L, self.reach) & disturbs_LL).any(1)
        return replace(together, kept_L=together.kept_L & ~(is_doubtful_L & is_late_L))


@dataclass(frozen=True, slots=True, kw_only=True)
class Confidence:
    """A faster rule: confident tokens stay, until a clearly better one is seen.

    A position is decided once its likeliest token passes `threshold` (the surest open one always
    is), replaced when another token passes `edit`, and opened again when its own falls below
    `drop`. Hard freezing, with no way back, is reported to leave artefacts.
    """

    threshold: float = 0.9
    edit: float = 0.9
    drop: float = 0.3

    def __post_init__(self) -> None:
        for name in ("threshold", "edit", "drop"):
            value = getattr(self, name)
            _require(0 <= value <= 1, f"confidence {name}", value, "from 0 to 1")

    def decide(self, canvas: Canvas, stats: RowStats) -> Decision:
        held_L = canvas.kept_L & ~canvas.pinned_L
        open_L = ~canvas.kept_L & ~canvas.pinned_L
        surest_L = stats.top_p_T.masked_fill(~open_L, -1.0)
        new_L = open_L & ((stats.top_p_T > self.threshold) | (surest_L == surest_L.max()))
        edit_L = held_L & (stats.top_T != canvas.tokens_L) & (stats.top_p_T > self.edit)
        drop_L = held_L & ~edit_L & (stats.held_p_T < self.drop)
        kept_L = (held_L & ~drop_L) | new_L
        tokens_L = torch.where(new_L | edit_L, stats.top_T, canvas.tokens_L)
        guess_L = torch.where(kept_L, tokens_L, stats.top_T)
        return Decision(kept_L, tokens_L, guess_L, ~(open_L | edit_L | drop_L).any())


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampler:
    """The knobs of one request's denoising."""

    rule: Rule = field(default_factory=EntropyBound)
    max_denoising_steps: int = 48
    t_max: float = 0.8  # temperature of the first step, falling evenly towards...
    t_min: float = 0.4  # ...this one, which a step beyond the last would have
    temperature: float = 1.0  # of draws alone, beside the schedule; 0 takes the likeliest token

    def __post_init__(self) -> None:
        _require(
            self.max_denoising_steps >= 1,
            "max denoising steps",
            self.max_denoising_steps,
            "1 or more",
        )
        _require(0 <= self.temperature < inf, "temperature", self.temperature, "0 or more")
        _require(0 < self.t_min < inf, "t_min", self.t_min, "above 0")
        _require(
            self.t_min <= self.t_max < inf,
            "t_max",
            self.t_max,
            "t_min or more",
        )

    def temperature_at(self, steps_left: int) -> float:
        """The temperature when so many steps are left, this one included."""
        share = steps_left / self.max_denoising_steps
        return self.t_min + (self.t_max - self.t_min) * share


def released_sampler(config: GenerationConfig, *, reach: int = 0) -> Sampler:
    """The sampler a checkpoint's generation_config describes; with a reach, its rule is `Apart`."""
    limits: dict[str, Any] = {
        "entropy_bound": config.entropy_bound,
        "confidence_threshold": config.confidence_threshold,
        "stability_threshold": config.stability_threshold,
    }
    return Sampler(
        rule=Apart(**limits, reach=reach) if reach else EntropyBound(**limits),
        max_denoising_steps=config.max_denoising_steps,
        t_max=config.t_max,
        t_min=config.t_min,
    )


def keepers(entropy_L: Tensor, bound: float) -> Tensor:
    """Mark the surest positions, as many as may be decided together.

    With entropies sorted h1 <= h2 <= ..., position k is kept while h1 + ... + h(k-1) <= bound
    (arXiv:2505.24857). The first is always kept, so every step moves. Equal ones count in order of
    position: so does the reference on a GPU, for more than 32; else its sort leaves them open.
    """
    sorted_L, order_L = entropy_L.sort(stable=True)
    within_L = sorted_L.cumsum(0) - sorted_L <= bound
    return torch.zeros_like(within_L).scatter(0, order_L, within_L)


def near_and_surer(entropy_L: Tensor, reach: int) -> Tensor:
    """For each position, [L, L], which others are within reach of it and surer than it.

    Of equally sure ones the first is the surer.
    """
    place_L = torch.arange(len(entropy_L), device=entropy_L.device)
    before_LL = place_L < place_L[:, None]
    is_near_LL = (place_L - place_L[:, None]).abs() <= reach
    own_L1 = entropy_L[:, None]
    return is_near_LL & ((entropy_L < own_L1) | ((entropy_L == own_L1) & before_LL))


def steady_steps(canvas: Canvas, guess_L: Tensor) -> Tensor:
    """For how many steps in a row the guess has been this one."""
    same = torch.where(canvas.pinned_L, True, guess_L == canvas.guess_L).all()
    return torch.where(same, canvas.steady_steps + 1, 0)


def advance(canvas: Canvas, stats: RowStats, noise_L: Tensor, rule: Rule) -> Canvas:
    """One step: hold what is decided, renoise the rest, leave pins alone."""
    decision = rule.decide(canvas, stats)
    pinned_L = canvas.pinned_L
    moved_L = torch.where(decision.kept_L, decision.tokens_L, noise_L)
    return replace(
        canvas,
        tokens_L=torch.where(pinned_L, canvas.tokens_L, moved_L),
        kept_L=decision.kept_L | pinned_L,
        guess_L=torch.where(pinned_L, canvas.tokens_L, decision.guess_L),
        entropy_L=stats.entropy_T.masked_fill(pinned_L, 0.0),
        settled=decision.settled | pinned_L.all(),
        steady_steps=steady_steps(canvas, decision.guess_L),
        num_steps=canvas.num_steps + 1,
    )


def _require(holds: bool, what: str, value: float, allowed: str) -> None:
    if not holds:
        raise UsageError(f"{what} is {value}; it must be {allowed}")
