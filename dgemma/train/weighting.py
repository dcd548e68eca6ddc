"""How the parts of the loss are weighed, and what of them has a gradient."""

from dataclasses import dataclass

from dgemma.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class Weighting:
    causal: float = 1.0  # of the next-token loss, beside the canvases' own
    balance: float = 0.01  # of the uneven use of experts
    # Whether what is told of the guess, a mean of token vectors, has a gradient into the vectors,
    # as it has in transformers. It costs the memory of the guess, rows / 2 times the vocabulary.
    guess_gradient: bool = False
    rollout: float = 0.0  # share of the canvases told a guess that steps of the sampler change
    rollout_steps: int = 1  # most of these steps: each number up to it comes in turn

    @property
    def depths(self) -> range:
        """Guesses, one told the other, that the canvases which are told one may have had."""
        return range(1, self.rollout_steps + 1)

    def __post_init__(self) -> None:
        for name in ("causal", "balance"):
            if getattr(self, name) < 0:
                raise ConfigError(f"[loss] {name} is {getattr(self, name)}; it must be 0 or more")
        if not 0 <= self.rollout <= 1:
            raise ConfigError(f"[loss] rollout is {self.rollout}; it is a share, from 0 to 1")
        if self.rollout_steps < 1:
            raise ConfigError(f"[loss] rollout_steps is {self.rollout_steps}; it must be 1 or more")
        if self.rollout_steps > 1 and self.rollout == 0:
            # Guesses told of guesses, about tokens that stay: a sampler never gives such canvases.
            raise ConfigError(
                f"[loss] rollout_steps is {self.rollout_steps}, but rollout is 0: no canvas would "
                "take these steps; give rollout, a share above 0, or leave rollout_steps out"
            )
