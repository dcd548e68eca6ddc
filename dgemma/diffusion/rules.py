"""Rules beside the reference one, which is `sampler.EntropyBound`, and the check of custom rules.

L canvas length.
"""

from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor

from dgemma.diffusion.canvas import Canvas
from dgemma.diffusion.logit_stats import PositionStats
from dgemma.diffusion.sampler import Decision, EntropyBound, Rule, Sampler
from dgemma.errors import UsageError, require


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


def with_reach(sampler: Sampler, reach: int) -> Sampler:
    """Return a sampler of the entropy rule with the same bounds and `SpacedEntropyBound`."""
    assert isinstance(sampler.rule, EntropyBound)
    return replace(sampler, rule=SpacedEntropyBound(**asdict(sampler.rule), reach=reach))


# --- custom rules

DECISION_DTYPES = {
    "accepted_L": torch.bool,
    "tokens_L": torch.int64,
    "guess_L": torch.int64,
    "converged": torch.bool,
}


@dataclass(frozen=True, slots=True)
class CheckedRule:
    """A custom rule, and a check of what it returns."""

    rule: Rule

    def decide(self, canvas: Canvas, stats: PositionStats) -> Decision:
        decision: Any = self.rule.decide(canvas, stats)
        _check_decision(decision, f"{type(self.rule).__name__}.decide", canvas.length)
        return decision  # type: ignore[no-any-return]


def checked(sampler: Sampler) -> Sampler:
    """Wrap the rule of a sampler in `CheckedRule` unless it is one of ours."""
    if type(sampler.rule) in (EntropyBound, SpacedEntropyBound, Confidence, CheckedRule):
        return sampler
    return replace(sampler, rule=CheckedRule(sampler.rule))


def _check_decision(decision: Any, name: str, length: int) -> None:
    """Refuse a value that is not a `Decision` for a canvas of this length."""
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
