"""How the parts of the loss are weighed."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Weighting:
    causal: float = 1.0  # of the next-token loss, beside the canvases' own
    balance: float = 0.01  # of the uneven use of experts
