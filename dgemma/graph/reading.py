"""What a captured step reads off the head's output: statistics, and what a soft embedding needs.

The soft embedding is the mean over a few likely tokens where these hold nearly all of every
position's probability, and over the whole vocabulary where they do not. Which of the two, the host
decides when it sees the flag; both are made from what the reading has left on the device.

L positions, V vocabulary, S likely tokens, D width.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from dgemma.model import TokenTable
from dgemma.ops.row_stats import Query, RowStats, row_stats, stats_by_kernels

if TYPE_CHECKING:
    from dgemma.ops.kernels.soft_8 import Shares
    from dgemma.ops.kernels.sparse import Into, Likely
    from dgemma.ops.soft_table import SoftTable


@dataclass(frozen=True, slots=True)
class Reading:
    """What a step has read, and how to make of it what the host asks for when it sees the flag."""

    stats: RowStats
    dense: Callable[[], Tensor]  # makes probabilities, [L, V], in the place of the head's output
    likely: "Likely | None" = None  # none searched for: the whole vocabulary always
    sparse: Callable[[], tuple[Tensor, ...]] = tuple  # likely tokens [L, S], their p and number
    shares: "Callable[[SoftTable], Shares] | None" = None  # `dense` in 8 bits; the output stays

    def is_sparse(self) -> Tensor:
        """Whether the sparse soft embedding will do; bool, 0-d."""
        if self.likely is None:
            return torch.zeros((), dtype=torch.bool, device=self.stats.top_T.device)
        return self.likely.suffice()


def read(raw_LV: Tensor, softcap: float | None, query: Query) -> Reading:
    """By definition: probabilities at once, and the whole vocabulary always."""
    stats, p_LV = row_stats(raw_LV, softcap, query)
    return Reading(stats, lambda: p_LV)


def read_by_kernels(raw_LV: Tensor, softcap: float | None, query: Query) -> Reading:
    """Probabilities only when they are asked for: `raw_LV` is left as it is until then."""
    from dgemma.ops.kernels.row_stats import probabilities_
    from dgemma.ops.kernels.soft_8 import shares
    from dgemma.ops.kernels.sparse import likely, survivors

    stats, marks, merged = stats_by_kernels(raw_LV, softcap, query)
    heat_L = query.heat_T
    found = likely(raw_LV, softcap, heat_L, marks, merged)
    return Reading(
        stats,
        lambda: probabilities_(raw_LV, softcap, heat_L, merged),
        found,
        lambda: survivors(raw_LV, softcap, heat_L, marks, merged, found)[:3],
        lambda table: shares(raw_LV, softcap, heat_L, marks, merged, table),
    )


def sparse_mean(table: TokenTable, reading: Reading, into: "Into") -> None:
    """The mean vector over the likely tokens of each position, put where it goes."""
    from dgemma.ops.kernels.sparse import soft_mean

    id_LS, p_LS, count_L = reading.sparse()
    soft_mean(table.weight, id_LS, p_LS, count_L, into)


def dense_mean(table: TokenTable, reading: Reading, into: "Into") -> None:
    """The same over the whole vocabulary, in as many bits as the table has for it."""
    by = dense_mean_16 if table.soft is None else dense_mean_8
    by(table, reading, into)


def dense_mean_8(table: TokenTable, reading: Reading, into: "Into") -> None:
    """In 8 bits, where the table has such."""
    from dgemma.ops.kernels import soft_8

    assert table.soft is not None and reading.shares is not None
    soft_8.mean(reading.shares(table.soft), table.soft, table.weight, into)


def dense_mean_16(table: TokenTable, reading: Reading, into: "Into") -> None:
    """As the table itself is stored."""
    from dgemma.ops.kernels.sparse import pin_mean

    p_LV = reading.dense().to(table.weight.dtype)
    pin_mean(table.weight, p_LV @ table.weight, into)
