"""What an adapter is: pairs of low-rank matrices by the module they change, and their scale.

R rank, I inputs and O outputs of a module.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor

from dgemma.config import Family
from dgemma.errors import CheckpointError, ConfigError
from dgemma.weights.files import listing
from dgemma.weights.mapped import DTYPES

NO_TARGETS = {"experts", "gate_up_proj", "embed_tokens", "lm_head"}
NO_TARGET = "the experts' stacked weights and the embedding table take no adapter"


class Pair(NamedTuple):
    """The two matrices of one module."""

    a_RI: Tensor
    b_OR: Tensor


Pairs = Mapping[str, Pair]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Adapter:
    """Pairs by the name of their module in `Gemma`, all of one rank and number type."""

    family: Family
    rank: int
    alpha: float
    use_rslora: bool = False
    base_model: str | None = None  # the model it is for, as the file says; None: it does not
    pairs: Pairs

    def __post_init__(self) -> None:
        check_numbers(self.rank, self.alpha)
        if not self.pairs:
            raise CheckpointError("an adapter needs a pair of tensors for at least one module")
        self._check_shapes()
        dtypes = {half.dtype for pair in self.pairs.values() for half in pair}
        if len(dtypes) > 1 or not dtypes <= set(DTYPES.values()):
            raise CheckpointError(
                f"the tensors are {listing(sorted(map(str, dtypes)))}; they must all be one of "
                f"{listing(map(str, DTYPES.values()))}"
            )

    def _check_shapes(self) -> None:
        wrong = [
            f"{name} ({list(a_RI.shape)} and {list(b_OR.shape)})"
            for name, (a_RI, b_OR) in self.pairs.items()
            if a_RI.dim() != 2 or b_OR.dim() != 2 or {len(a_RI), b_OR.shape[1]} != {self.rank}
        ]
        if wrong:
            raise CheckpointError(
                f"A and B must be [{self.rank}, inputs] and [outputs, {self.rank}], which they are "
                f"not in {listing(wrong)}"
            )

    @property
    def scale(self) -> float:
        return self.alpha / (math.sqrt(self.rank) if self.use_rslora else self.rank)

    @property
    def targets(self) -> tuple[str, ...]:
        """Names of the adapted modules in `Gemma`."""
        return tuple(self.pairs)


def check_numbers(rank: Any, alpha: Any) -> None:
    if type(rank) is not int or rank <= 0:
        raise ConfigError(f"the rank (r) must be a positive whole number, not {rank!r}")
    if type(alpha) not in (int, float) or not 0 < alpha < math.inf:
        raise ConfigError(f"alpha (lora_alpha) must be a positive number, not {alpha!r}")


def ends_in(name: str, target: str) -> bool:
    """Whether a target means a module: by its whole name, or by the end of it at a dot."""
    return f".{name}".endswith(f".{target}")
