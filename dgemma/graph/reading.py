"""What a captured step reads off the head's output: statistics, and what a soft embedding needs.

The soft embedding is the mean over a few likely tokens where these hold nearly all of every
position's probability, and over the whole vocabulary where they do not. Which of the two, the host
decides when it sees the flag; both are made from what the reading has left on the device.

L positions, V vocabulary, S likely tokens, D width.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from dgemma.model import TokenTable
from dgemma.ops.row_stats import Query, RowStats, row_stats

MASS = 1 - 2e-3  # of a position, that the sparse soft embedding must hold; bfloat16 loses as much


@dataclass(frozen=True, slots=True)
class Reading:
    stats: RowStats
    is_sparse: Tensor  # bool, 0-d
    dense: Callable[[], Tensor]  # makes probabilities, [L, V], in the place of the head's output
    found: tuple[Tensor, ...] = ()  # likely tokens [L, S], their probabilities and number


def read(raw_LV: Tensor, softcap: float | None, query: Query) -> Reading:
    """By definition: probabilities at once, and the whole vocabulary always."""
    stats, p_LV = row_stats(raw_LV, softcap, query)
    return Reading(stats, torch.zeros((), dtype=torch.bool, device=raw_LV.device), lambda: p_LV)


def read_by_kernels(raw_LV: Tensor, softcap: float | None, query: Query) -> Reading:
    """Probabilities only when they are asked for: `raw_LV` is left as it is until then."""
    from dgemma.ops.kernels import row_stats as kernels
    from dgemma.ops.kernels.sparse import survivors

    marks = kernels.row_marks(raw_LV, softcap, query.heat_T)
    ask = (query.heat_T, query.uniform_T, query.held_T)
    merged = kernels.row_merge(raw_LV, softcap, ask, marks)
    *found, mass_L = survivors(raw_LV, softcap, query.heat_T, marks, merged)
    return Reading(
        RowStats(**{name: getattr(merged, name) for name in RowStats.__slots__}),
        (mass_L >= MASS).all(),
        lambda: kernels.probabilities_(raw_LV, softcap, query.heat_T, merged),
        tuple(found),
    )


def sparse_mean(table: TokenTable, reading: Reading) -> Tensor:
    """The mean vector over the likely tokens of each position, [L, D]."""
    from dgemma.ops.kernels.sparse import soft_mean

    id_LS, p_LS, count_L = reading.found
    return soft_mean(table.weight, id_LS, p_LS, count_L) * table.scale
