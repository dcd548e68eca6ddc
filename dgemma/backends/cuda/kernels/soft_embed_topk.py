"""The likely tokens of each position, and the mean of their vectors: the sparse soft embedding.

Where few tokens hold nearly all of a position's probability, its mean embedding is made from these
alone. Chunks that can hold none, by the peaks that `row_stats.py` has left of them, are not read.
Which tokens are likely is seen from the head's output as it is: only of these is an exp taken.

T positions, V vocabulary, C chunks of W tokens each, G groups of chunks, S places, D width.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from dgemma.backends.cuda.kernels.logit_stats import (
    CHUNK,
    MASS,
    READ,
    SURVIVORS,
    Marks,
    Merged,
    capped,
    scale_of,
)
from dgemma.backends.cuda.kernels.pdl import gdc_wait, pdl_kwargs

AT_ONCE = 4  # chunks that are searched by one program
COLUMN = 8  # neighbours among which a thread of such a program looks for likely tokens
BLOCK = 256  # numbers of a vector that one program makes


@dataclass(frozen=True, slots=True)
class Likely:
    """Number of likely tokens in each group of chunks, and their mass.

    Where any position is flat nothing was read, and all is zero: the dense mean is wanted then. So
    it is once a group holds more than survive: that one says how many, but no mass, and groups that
    are searched after it may be left out, with zeros.
    """

    count_TG: Tensor
    mass_TG: Tensor

    def suffice(self) -> Tensor:
        """True (0-d) if the likely tokens of every position are few and hold enough mass."""
        few_T = self.count_TG.sum(1) <= SURVIVORS
        return (few_T & (self.mass_TG.sum(1) >= MASS)).all()


@dataclass(frozen=True, slots=True)
class Into:
    """Destination of soft embeddings; a pinned position is conditioned on its own token instead."""

    soft_ELD: Tensor
    tokens_EL: Tensor  # rows may be apart
    pinned_EL: Tensor  # 1: its own token; 2: no self-conditioning; 0: the mean
    entry_I: Tensor  # int32: table entry of each canvas
    scale: float  # of the table's vectors

    @property
    def arguments(self) -> tuple[object, ...]:
        """As `store_soft` reads them."""
        flags_EL = flag_bytes(self.pinned_EL)
        strides = (self.tokens_EL.stride(0), flags_EL.stride(0))
        return self.soft_ELD, self.tokens_EL, flags_EL, self.entry_I, *strides

    @property
    def length(self) -> int:
        return self.soft_ELD.shape[1]


def likely(
    raw_TV: Tensor, softcap: float | None, temperature_T: Tensor, marks: Marks, merged: Merged
) -> Likely:
    """Search each position for likely tokens. Only chunks whose peak is likely enough are read."""
    rows, vocab = raw_TV.shape
    groups = triton.cdiv(marks.peak_TC.shape[1], AT_ONCE)
    count_TG = torch.empty(rows, groups, dtype=torch.int32, device=raw_TV.device)
    mass_TG = temperature_T.new_empty(rows, groups)
    _likely[(rows, groups)](
        raw_TV,
        temperature_T,
        merged.peak_T,
        merged.total_T,
        merged.least_T,
        marks.peak_TC,
        marks.flat_C,
        count_TG,
        mass_TG,
        vocab,
        L=marks.length,
        S=SURVIVORS,
        COLUMN=COLUMN,
        num_warps=8,
        **_cut(softcap, marks),
        **pdl_kwargs(),
    )
    return Likely(count_TG, mass_TG)


def survivors(
    raw_TV: Tensor,
    softcap: float | None,
    temperature_T: Tensor,
    marks: Marks,
    merged: Merged,
    found: Likely | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The likely tokens of each position: ids and probabilities, how many, and their mass.

    Of use where they suffice; see `Likely`. `found`: what the search has given already.
    """
    found = found or likely(raw_TV, softcap, temperature_T, marks, merged)
    rows, vocab = raw_TV.shape
    groups = found.count_TG.shape[1]
    id_TS = torch.empty(rows, SURVIVORS, dtype=torch.int32, device=raw_TV.device)
    p_TS = torch.empty(rows, SURVIVORS, dtype=torch.float32, device=raw_TV.device)
    count_T = torch.empty(rows, dtype=torch.int32, device=raw_TV.device)
    mass_T = torch.empty_like(temperature_T)
    _survivors[(rows, groups)](
        raw_TV,
        temperature_T,
        merged.peak_T,
        merged.total_T,
        merged.least_T,
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
    return {"READ": READ, "CAP": softcap or 0.0, "W": CHUNK, "CHUNKS": chunks, "EACH": AT_ONCE}


def soft_mean(table_VD: Tensor, id_TS: Tensor, p_TS: Tensor, count_T: Tensor, into: Into) -> None:
    """Write the mean of the survivors' vectors, some at a time in their order, scaled."""
    rows, width = len(id_TS), table_VD.shape[1]
    _soft_mean[(rows, triton.cdiv(width, BLOCK))](
        table_VD,
        id_TS,
        p_TS,
        count_T,
        *into.arguments,
        into.scale,
        L=into.length,
        D=width,
        S=id_TS.shape[1],
        BLOCK=BLOCK,
        EACH=16,
        **pdl_kwargs(),
    )


def pin_mean(table_VD: Tensor, mean_TD: Tensor, into: Into) -> None:
    """Write a mean over the whole vocabulary, scaled."""
    rows, width = mean_TD.shape
    _pin_mean[(rows, triton.cdiv(width, BLOCK))](
        table_VD,
        mean_TD,
        *into.arguments,
        into.scale,
        L=into.length,
        D=width,
        BLOCK=BLOCK,
        **pdl_kwargs(),
    )


def flag_bytes(flags_T: Tensor) -> Tensor:
    return flags_T.view(torch.uint8) if flags_T.dtype == torch.bool else flags_T


@triton.jit
def _chunks(
    temperature_T,
    peak_T,
    total_T,
    peak_TC,
    READ: tl.constexpr,
    CAP: tl.constexpr,
    CHUNKS: tl.constexpr,
    EACH: tl.constexpr,
):
    """This program's chunks, and which of them may hold likely tokens: others are not read."""
    row = tl.program_id(0)
    c = tl.program_id(1) * EACH + tl.arange(0, EACH)
    top = tl.load(peak_TC + row * CHUNKS + c, mask=c < CHUNKS, other=float("-inf"))
    return c, _p(top, temperature_T, peak_T, total_T, CAP) >= READ


@triton.jit
def _p(y, temperature_T, peak_T, total_T, CAP: tl.constexpr):
    """Probabilities of capped numbers."""
    row = tl.program_id(0)
    scale = scale_of(tl.load(temperature_T + row), CAP)
    return tl.exp((y - tl.load(peak_T + row)) * scale) / tl.load(total_T + row)


@triton.jit
def _likely(
    raw_TV,
    temperature_T,
    peak_T,
    total_T,
    least_T,
    peak_TC,
    flat_C,
    count_TG,
    mass_TG,
    vocab,
    L: tl.constexpr,
    S: tl.constexpr,
    COLUMN: tl.constexpr,
    READ: tl.constexpr,
    CAP: tl.constexpr,
    W: tl.constexpr,
    CHUNKS: tl.constexpr,
    EACH: tl.constexpr,
    PDL: tl.constexpr,
):
    """Count the likely tokens of some chunks, and sum their mass."""
    gdc_wait(PDL)
    row = tl.program_id(0)
    at = row * tl.num_programs(1) + tl.program_id(1)
    # Asked for before the flag is seen, so that it is not waited for twice.
    c, is_read = _chunks(temperature_T, peak_T, total_T, peak_TC, READ, CAP, CHUNKS, EACH)
    least = tl.load(least_T + row)
    count = 0
    mass = 0.0
    # Not from a cache that is not told of what other programs write.
    if tl.load(flat_C + row // L, volatile=True) == 0:
        w = tl.arange(0, W // COLUMN)[:, None] * COLUMN + tl.arange(0, COLUMN)[None, :]
        v = c[:, None, None] * W + w[None, :, :]
        is_token = is_read[:, None, None] & (v < vocab)
        at_V = raw_TV + row.to(tl.int64) * vocab + v
        raw = tl.load(at_V, mask=is_token, other=float("-inf")).to(tl.float32)
        count = tl.sum(_over_column((raw >= least).to(tl.int32)), 0)
        if count > S:
            # Whoever reads this in time need not search: that few do not suffice is certain.
            tl.atomic_max(flat_C + row // L, 1)
        elif count > 0:
            mass = _mass(raw, least, temperature_T, peak_T, total_T, CAP)
    tl.store(count_TG + at, count)
    tl.store(mass_TG + at, mass)


@triton.jit
def _over_column(number):
    return tl.sum(tl.sum(number, 2), 0)


@triton.jit
def _most(raw):
    return tl.max(tl.max(raw, 2), 0)


@triton.jit
def _mass(raw, least, temperature_T, peak_T, total_T, CAP: tl.constexpr):
    """The mass of likely tokens: in all columns at once the greatest number, then the next.

    A column is what one thread holds, in which there are few, so that it ends after few rounds.
    """
    top = _most(raw)
    mass = tl.zeros_like(top)
    while tl.max(top, 0) >= least:
        equals = _over_column((raw == top[None, :, None]).to(tl.float32))
        p = _p(capped(top, CAP), temperature_T, peak_T, total_T, CAP)
        mass += tl.where(top >= least, equals * p, 0.0)
        top = _most(tl.where(raw < top[None, :, None], raw, float("-inf")))
    return tl.sum(mass, 0)


@triton.jit
def _survivors(
    raw_TV,
    temperature_T,
    peak_T,
    total_T,
    least_T,
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
    READ: tl.constexpr,
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
        c, is_read = _chunks(temperature_T, peak_T, total_T, peak_TC, READ, CAP, CHUNKS, EACH)
        v = c[:, None] * W + tl.arange(0, W)[None, :]
        is_token = is_read[:, None] & (v < vocab)
        at_V = raw_TV + row.to(tl.int64) * vocab + v
        raw = tl.load(at_V, mask=is_token, other=float("-inf")).to(tl.float32)
        is_likely = raw >= tl.load(least_T + row)
        p = _p(capped(raw, CAP), temperature_T, peak_T, total_T, CAP)
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
    soft_ELD,
    tokens_EL,
    pinned_EL,
    entry_I,
    tokens_stride,
    pinned_stride,
    scale,
    L: tl.constexpr,
    D: tl.constexpr,
    S: tl.constexpr,
    BLOCK: tl.constexpr,
    EACH: tl.constexpr,
    PDL: tl.constexpr,
):
    gdc_wait(PDL)
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
    # Rounded before it is scaled, as by definition.
    mean = total.to(soft_ELD.dtype.element_ty)
    store_soft(
        mean,
        table_VD,
        soft_ELD,
        tokens_EL,
        pinned_EL,
        entry_I,
        tokens_stride,
        pinned_stride,
        scale,
        row,
        d,
        L,
        D,
    )


@triton.jit
def _pin_mean(
    table_VD,
    mean_TD,
    soft_ELD,
    tokens_EL,
    pinned_EL,
    entry_I,
    tokens_stride,
    pinned_stride,
    scale,
    L: tl.constexpr,
    D: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    gdc_wait(PDL)
    row = tl.program_id(0)
    d = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mean = tl.load(mean_TD + row * D + d, mask=d < D, other=0.0)
    store_soft(
        mean,
        table_VD,
        soft_ELD,
        tokens_EL,
        pinned_EL,
        entry_I,
        tokens_stride,
        pinned_stride,
        scale,
        row,
        d,
        L,
        D,
    )


@triton.jit
def store_soft(
    mean,
    table_VD,
    soft_ELD,
    tokens_EL,
    pinned_EL,
    entry_I,
    tokens_stride,
    pinned_stride,
    scale,
    row,
    d,
    L: tl.constexpr,
    D: tl.constexpr,
):
    """Store the self-conditioning of one position, scaled; see `Into`.

    A pinned position is conditioned on its own token, as a converged one would be.
    """
    entry = tl.load(entry_I + row // L).to(tl.int64)
    pinned = tl.load(pinned_EL + entry * pinned_stride + row % L)
    if pinned == 1:
        token = tl.load(tokens_EL + entry * tokens_stride + row % L)
        mean = tl.load(table_VD + token * D + d, mask=d < D, other=0.0).to(mean.dtype)
    elif pinned == 2:
        mean = tl.zeros_like(mean)
    to = soft_ELD + (entry * L + row % L) * D + d
    tl.store(to, (mean.to(tl.float32) * scale).to(soft_ELD.dtype.element_ty), mask=d < D)
