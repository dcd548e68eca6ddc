"""The likely tokens of each position, and the mean of their vectors: the sparse soft embedding.

Where few tokens hold nearly all of a position's probability, its mean embedding is made from these
alone. Chunks that can hold none, by the peaks that `row_stats.py` has left of them, are not read.

T positions, V vocabulary, C chunks of W tokens each, G groups of chunks, S places, D width.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from dgemma.ops.kernels.launch import after, early
from dgemma.ops.kernels.row_stats import CHUNK, SURVIVORS, Marks, Merged, capped, scale_of

SPARE = 1e-5  # a token below this probability does not enter the sparse soft embedding
MASS = 1 - 2e-3  # of a position, that its likely tokens must hold; bfloat16 loses as much
AT_ONCE = 4  # chunks that are searched by one program
BLOCK = 256  # numbers of a vector that one program makes


@dataclass(frozen=True, slots=True)
class Likely:
    """How many likely tokens there are in each group of chunks, and their mass.

    Where any position is flat nothing was read, and all is zero: the dense mean is wanted then.
    """

    count_TG: Tensor
    mass_TG: Tensor

    def suffice(self) -> Tensor:
        """Whether the likely tokens of every position are few and hold enough; bool, 0-d."""
        few_T = self.count_TG.sum(1) <= SURVIVORS
        return (few_T & (self.mass_TG.sum(1) >= MASS)).all()


@dataclass(frozen=True, slots=True)
class Into:
    """Where a soft embedding goes: a pinned position is told of its own token instead."""

    soft_TD: Tensor
    tokens_T: Tensor
    pinned_T: Tensor
    scale: float  # of the table's vectors


def likely(
    raw_TV: Tensor, softcap: float | None, heat_T: Tensor, marks: Marks, merged: Merged
) -> Likely:
    """Search each position for likely tokens. Only chunks whose peak is likely enough are read."""
    rows, vocab = raw_TV.shape
    groups = triton.cdiv(marks.peak_TC.shape[1], AT_ONCE)
    count_TG = torch.empty(rows, groups, dtype=torch.int32, device=raw_TV.device)
    mass_TG = heat_T.new_empty(rows, groups)
    _likely[(rows, groups)](
        raw_TV,
        heat_T,
        merged.peak_T,
        merged.total_T,
        marks.peak_TC,
        marks.flat_1,
        count_TG,
        mass_TG,
        vocab,
        num_warps=8,
        **_cut(softcap, marks),
        **early(),
    )
    return Likely(count_TG, mass_TG)


def survivors(
    raw_TV: Tensor,
    softcap: float | None,
    heat_T: Tensor,
    marks: Marks,
    merged: Merged,
    found: Likely | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The likely tokens of each position: ids and probabilities, how many, and their mass.

    Of use where they suffice; see `Likely`. `found`: what the search has given already.
    """
    found = found or likely(raw_TV, softcap, heat_T, marks, merged)
    rows, vocab = raw_TV.shape
    groups = found.count_TG.shape[1]
    id_TS = torch.empty(rows, SURVIVORS, dtype=torch.int32, device=raw_TV.device)
    p_TS = torch.empty(rows, SURVIVORS, dtype=torch.float32, device=raw_TV.device)
    count_T = torch.empty(rows, dtype=torch.int32, device=raw_TV.device)
    mass_T = torch.empty_like(heat_T)
    _survivors[(rows, groups)](
        raw_TV,
        heat_T,
        merged.peak_T,
        merged.total_T,
        marks.peak_TC,
        found.count_TG,
        found.mass_TG,
        id_TS,
        p_TS,
        count_T,
        mass_T,
        vocab,
        G=triton.next_power_of_2(groups),
        S=SURVIVORS,
        num_warps=8,
        **_cut(softcap, marks),
    )
    return id_TS, p_TS, count_T, mass_T


def _cut(softcap: float | None, marks: Marks) -> dict[str, float]:
    chunks = marks.peak_TC.shape[1]
    return {"LEAST": SPARE, "CAP": softcap or 0.0, "W": CHUNK, "CHUNKS": chunks, "EACH": AT_ONCE}


def soft_mean(
    table_VD: Tensor, id_TS: Tensor, p_TS: Tensor, count_T: Tensor, into: Into | None = None
) -> Tensor:
    """The mean of the survivors' vectors, some at a time in their order; scaled where it goes."""
    rows, width = len(id_TS), table_VD.shape[1]
    has_pins = into is not None
    if into is None:
        into = Into(table_VD.new_empty(rows, width), count_T, count_T, 1.0)
    _soft_mean[(rows, triton.cdiv(width, BLOCK))](
        table_VD,
        id_TS,
        p_TS,
        count_T,
        into.tokens_T,
        flag_bytes(into.pinned_T),
        into.soft_TD,
        into.scale,
        D=width,
        S=id_TS.shape[1],
        BLOCK=BLOCK,
        EACH=16,
        HAS_PINS=has_pins,
        **early(),
    )
    return into.soft_TD


def pin_mean(table_VD: Tensor, mean_TD: Tensor, into: Into) -> None:
    """Scale a mean over the whole vocabulary, and put it where it goes."""
    rows, width = mean_TD.shape
    _pin_mean[(rows, triton.cdiv(width, BLOCK))](
        table_VD,
        mean_TD,
        into.tokens_T,
        flag_bytes(into.pinned_T),
        into.soft_TD,
        into.scale,
        D=width,
        BLOCK=BLOCK,
        **early(),
    )


def flag_bytes(flags_T: Tensor) -> Tensor:
    return flags_T.view(torch.uint8) if flags_T.dtype == torch.bool else flags_T


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
    flat_1,
    count_TG,
    mass_TG,
    vocab,
    LEAST: tl.constexpr,
    CAP: tl.constexpr,
    W: tl.constexpr,
    CHUNKS: tl.constexpr,
    EACH: tl.constexpr,
    EARLY: tl.constexpr,
):
    """How many likely tokens there are in some chunks, and their mass."""
    after(EARLY)
    at = tl.program_id(0) * tl.num_programs(1) + tl.program_id(1)
    if tl.load(flat_1) == 0:
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
    tokens_T,
    pinned_T,
    soft_TD,
    scale,
    D: tl.constexpr,
    S: tl.constexpr,
    BLOCK: tl.constexpr,
    EACH: tl.constexpr,
    HAS_PINS: tl.constexpr,
    EARLY: tl.constexpr,
):
    after(EARLY)
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
    mean = total.to(soft_TD.dtype.element_ty)
    if HAS_PINS:
        mean = own_if_pinned(table_VD, tokens_T, pinned_T, mean, d, D)
    # Rounded before it is scaled, as by definition.
    mean = mean.to(tl.float32) * scale
    tl.store(soft_TD + row * D + d, mean.to(soft_TD.dtype.element_ty), mask=d < D)


@triton.jit
def _pin_mean(
    table_VD,
    mean_TD,
    tokens_T,
    pinned_T,
    soft_TD,
    scale,
    D: tl.constexpr,
    BLOCK: tl.constexpr,
    EARLY: tl.constexpr,
):
    after(EARLY)
    d = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    at = tl.program_id(0) * D + d
    mean = tl.load(mean_TD + at, mask=d < D, other=0.0)
    mean = own_if_pinned(table_VD, tokens_T, pinned_T, mean, d, D).to(tl.float32) * scale
    tl.store(soft_TD + at, mean.to(soft_TD.dtype.element_ty), mask=d < D)


@triton.jit
def own_if_pinned(table_VD, tokens_T, pinned_T, mean, d, D: tl.constexpr):
    """A pinned position is conditioned on its own token, as a converged one would be."""
    row = tl.program_id(0)
    if tl.load(pinned_T + row) != 0:
        token = tl.load(tokens_T + row).to(tl.int64)
        mean = tl.load(table_VD + token * D + d, mask=d < D, other=0.0).to(mean.dtype)
    return mean
