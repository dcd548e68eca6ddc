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
    rollout: float = 0.0  # share of the canvases told a guess that one step of the sampler changes

    def __post_init__(self) -> None:
        if not 0 <= self.rollout <= 1:
            raise ConfigError(f"[loss] rollout is {self.rollout}; it is a share, from 0 to 1")
