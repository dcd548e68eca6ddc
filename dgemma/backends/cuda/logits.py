"""Logits, their statistics, and soft embeddings, by kernels.

The soft embedding is the mean over a few likely tokens where these hold nearly all of every
position's probability, and over the whole vocabulary where they do not. The host chooses when it
sees the flag; both are made from what the statistics have left on the device.

T positions, V vocabulary, S likely tokens, D width.
"""

from dataclasses import dataclass

from torch import Tensor

from dgemma.backends.cuda.kernels import logit_stats as kernels
from dgemma.backends.cuda.kernels import soft_embed_fp8
from dgemma.backends.cuda.kernels.logit_stats import Marks, Merged
from dgemma.backends.cuda.kernels.soft_embed_topk import (
    Into,
    Likely,
    likely,
    pin_mean,
    soft_mean,
    survivors,
)
from dgemma.diffusion.logit_stats import RowStats
from dgemma.model.gemma import TokenTable
from dgemma.quant.fp8 import Weight
from dgemma.quant.fp8_head import Fp8HeadTable
from dgemma.quant.soft_table import SoftTable


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenQuery:
    """Per-position inputs of the statistics."""

    temperature_T: Tensor
    draw_temperature_T: Tensor  # of the draw alone, beside the temperature
    uniform_T: Tensor
    held_T: Tensor


@dataclass(frozen=True, slots=True)
class LogitStats:
    """Statistics of each position, and what soft embeddings are made of."""

    stats: RowStats
    raw_TV: Tensor  # logits before the soft cap
    softcap: float | None
    temperature_T: Tensor
    marks: Marks
    merged: Merged
    likely: Likely | None  # None: not searched for


def logit_stats(
    raw_TV: Tensor, softcap: float | None, query: TokenQuery, length: int, *, search: bool = True
) -> LogitStats:
    """Compute statistics of canvases of `length` positions; the logits are left as they are."""
    heats = (query.temperature_T, query.draw_temperature_T)
    marks = kernels.row_marks(raw_TV, softcap, heats, length)
    merged = kernels.row_merge(raw_TV, softcap, (*heats, query.uniform_T, query.held_T), marks)
    stats = RowStats(**{name: getattr(merged, name) for name in RowStats.__slots__})
    found = likely(raw_TV, softcap, query.temperature_T, marks, merged) if search else None
    return LogitStats(stats, raw_TV, softcap, query.temperature_T, marks, merged, found)


def soft_embed_sparse(table: TokenTable, found: LogitStats, into: Into) -> None:
    """Write the mean embedding over the likely tokens of each position."""
    given = (found.raw_TV, found.softcap, found.temperature_T, found.marks, found.merged)
    id_TS, p_TS, count_T, _ = survivors(*given, found.likely)
    soft_mean(table.weight, id_TS, p_TS, count_T, into)


def soft_embed_dense(table: TokenTable, found: LogitStats, into: Into) -> None:
    """Write the mean embedding over the whole vocabulary, in fp8 where the table has it so."""
    soft = soft_table_of(table)
    given = (found.raw_TV, found.softcap, found.temperature_T)
    if soft is not None:
        shares = soft_embed_fp8.shares(*given, found.marks, found.merged, soft)
        soft_embed_fp8.mean(shares, soft, table.weight, into)
        return
    p_TV = kernels.probabilities_(*given, found.merged).to(table.weight.dtype)
    pin_mean(table.weight, p_TV @ table.weight, into)


def soft_table_of(table: TokenTable) -> SoftTable | None:
    return table.soft if isinstance(table, Fp8HeadTable) else None


def lm_head_of(table: TokenTable) -> Weight:
    return table.head if isinstance(table, Fp8HeadTable) else Weight(table.weight)
