"""The likely tokens of each position, and the mean of their vectors: the sparse soft embedding.

Where few tokens hold nearly all of a position's probability, its mean embedding is made from these
alone. Chunks that can hold none, by the peaks that `row_stats.py` has left of them, are not read.

T positions, V vocabulary, C chunks of W tokens each, G groups of chunks, S places, D width.
"""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from dgemma.ops.kernels.row_stats import CHUNK, Marks, Merged, capped, scale_of

SPARE = 1e-5  # a token below this probability does not enter the sparse soft embedding
SURVIVORS = 128  # most tokens of a position that do
ENOUGH = 0.99  # a position whose likely tokens cannot hold as much is not searched for them
AT_ONCE = 4  # chunks that are searched by one program


def survivors(
    raw_TV: Tensor, softcap: float | None, heat_T: Tensor, marks: Marks, merged: Merged
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The likely tokens of each position: ids and probabilities, how many, and their mass.

    Only chunks whose peak is likely enough are read. Where the mass falls short, or more tokens
    are likely than there is place, the dense mean has to be taken instead; see `soft_mean`. Where
    that is plain from the marks alone nothing is read, and the mass is zero.
    """
    rows, vocab = raw_TV.shape
    chunks = marks.peak_TC.shape[1]
    groups = triton.cdiv(chunks, AT_ONCE)
    id_TS = torch.empty(rows, SURVIVORS, dtype=torch.int32, device=raw_TV.device)
    p_TS = torch.empty(rows, SURVIVORS, dtype=torch.float32, device=raw_TV.device)
    count_T = torch.empty(rows, dtype=torch.int32, device=raw_TV.device)
    mass_T = torch.empty_like(heat_T)
    count_TG = torch.empty(rows, groups, dtype=torch.int32, device=raw_TV.device)
    mass_TG = heat_T.new_empty(rows, groups)
    given = (raw_TV, heat_T, merged.peak_T, merged.total_T, marks.peak_TC)
    cut = {"LEAST": SPARE, "CAP": softcap or 0.0, "W": CHUNK, "CHUNKS": chunks, "EACH": AT_ONCE}
    _likely[(rows, groups)](
        *given,
        merged.entropy_T,
        count_TG,
        mass_TG,
        vocab,
        MOST=_most_entropy(vocab),
        num_warps=8,
        **cut,
    )
    _survivors[(rows, groups)](
        *given,
        count_TG,
        mass_TG,
        id_TS,
        p_TS,
        count_T,
        mass_T,
        vocab,
        G=triton.next_power_of_2(groups),
        S=SURVIVORS,
        num_warps=8,
        **cut,
    )
    return id_TS, p_TS, count_T, mass_T


def _most_entropy(vocab: int) -> float:
    """Nats that a position can have whose likely tokens hold enough: both shares spread evenly."""
    parts = ((ENOUGH, min(SURVIVORS, vocab)), (1 - ENOUGH, vocab))
    return sum(share * math.log(count / share) for share, count in parts)


def soft_mean(table_VD: Tensor, id_TS: Tensor, p_TS: Tensor, count_T: Tensor) -> Tensor:
    """The mean of the survivors' vectors, some at a time in their order."""
    rows, width = len(id_TS), table_VD.shape[1]
    block = 256
    soft_TD = table_VD.new_empty(rows, width)
    _soft_mean[(rows, triton.cdiv(width, block))](
        table_VD, id_TS, p_TS, count_T, soft_TD, D=width, S=id_TS.shape[1], BLOCK=block, EACH=16
    )
    return soft_TD


@triton.jit
def _group(
    raw_TV,
    heat_T,
    peak_T,
    total_T,
    peak_TC,
    vocab,
    LEAST: tl.constexpr,
    CAP: tl.constexpr,
    W: tl.constexpr,
    CHUNKS: tl.constexpr,
    EACH: tl.constexpr,
):
    """Tokens of this program's chunks, their probabilities, and which of them are likely.

    Chunks whose peak is not likely are not read.
    """
    row = tl.program_id(0)
    scale = scale_of(tl.load(heat_T + row), CAP)
    peak = tl.load(peak_T + row)
    total = tl.load(total_T + row)
    c = tl.program_id(1) * EACH + tl.arange(0, EACH)
    top = tl.load(peak_TC + row * CHUNKS + c, mask=c < CHUNKS, other=float("-inf"))
    is_read = tl.exp((top - peak) * scale) / total >= LEAST
    v = c[:, None] * W + tl.arange(0, W)[None, :]
    is_token = is_read[:, None] & (v < vocab)
    raw = tl.load(raw_TV + row.to(tl.int64) * vocab + v, mask=is_token, other=0.0)
    p = tl.exp((capped(raw, CAP) - peak) * scale) / total
    return v, p, is_token & (p >= LEAST)


@triton.jit
def _likely(
    raw_TV,
    heat_T,
    peak_T,
    total_T,
    peak_TC,
    entropy_T,
    count_TG,
    mass_TG,
    vocab,
    MOST: tl.constexpr,
    LEAST: tl.constexpr,
    CAP: tl.constexpr,
    W: tl.constexpr,
    CHUNKS: tl.constexpr,
    EACH: tl.constexpr,
):
    """How many likely tokens there are in some chunks, and their mass; none in hopeless rows."""
    at = tl.program_id(0) * tl.num_programs(1) + tl.program_id(1)
    if tl.load(entropy_T + tl.program_id(0)) <= MOST:
        _, p, is_likely = _group(
            raw_TV, heat_T, peak_T, total_T, peak_TC, vocab, LEAST, CAP, W, CHUNKS, EACH
        )
        tl.store(count_TG + at, tl.sum(tl.sum(is_likely.to(tl.int32), 1), 0))
        tl.store(mass_TG + at, tl.sum(tl.sum(tl.where(is_likely, p, 0.0), 1), 0))
    else:
        tl.store(count_TG + at, 0)
        tl.store(mass_TG + at, 0.0)


@triton.jit
def _survivors(
    raw_TV,
    heat_T,
    peak_T,
    total_T,
    peak_TC,
    count_TG,
    mass_TG,
    id_TS,
    p_TS,
    count_T,
    mass_T,
    vocab,
    G: tl.constexpr,
    S: tl.constexpr,
    LEAST: tl.constexpr,
    CAP: tl.constexpr,
    W: tl.constexpr,
    CHUNKS: tl.constexpr,
    EACH: tl.constexpr,
):
    """Put the likely tokens of some chunks into their places; a row with too many has none."""
    row = tl.program_id(0)
    group = tl.program_id(1)
    groups = tl.num_programs(1)
    g = tl.arange(0, G)
    counts = tl.load(count_TG + row * groups + g, mask=g < groups, other=0)
    count = tl.sum(counts, 0)
    if group == 0:
        masses = tl.load(mass_TG + row * groups + g, mask=g < groups, other=0.0)
        tl.store(mass_T + row, tl.where(count <= S, tl.sum(masses, 0), 0.0))
        tl.store(count_T + row, tl.where(count <= S, count, 0))
    if (count <= S) & (tl.sum(tl.where(g == group, counts, 0), 0) > 0):
        v, p, is_likely = _group(
            raw_TV, heat_T, peak_T, total_T, peak_TC, vocab, LEAST, CAP, W, CHUNKS, EACH
        )
        likely = is_likely.to(tl.int32)
        found = tl.sum(likely, 1)
        before = tl.sum(tl.where(g < group, counts, 0), 0) + tl.cumsum(found, 0) - found
        place = before[:, None] + tl.cumsum(likely, 1) - 1
        tl.store(id_TS + row * S + place, v, mask=is_likely)
        tl.store(p_TS + row * S + place, p, mask=is_likely)


@triton.jit
def _soft_mean(
    table_VD,
    id_TS,
    p_TS,
    count_T,
    soft_TD,
    D: tl.constexpr,
    S: tl.constexpr,
    BLOCK: tl.constexpr,
    EACH: tl.constexpr,
):
    row = tl.program_id(0)
    d = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    count = tl.load(count_T + row)
    for first in range(0, count, EACH):
        s = first + tl.arange(0, EACH)
        token = tl.load(id_TS + row * S + s, mask=s < count, other=0).to(tl.int64)
        p = tl.load(p_TS + row * S + s, mask=s < count, other=0.0)
        is_in = (s < count)[:, None] & (d < D)[None, :]
        vector = tl.load(table_VD + token[:, None] * D + d[None, :], mask=is_in, other=0.0)
        total += tl.sum(p[:, None] * vector.to(tl.float32), 0)
    tl.store(soft_TD + row * D + d, total.to(soft_TD.dtype.element_ty), mask=d < D)
