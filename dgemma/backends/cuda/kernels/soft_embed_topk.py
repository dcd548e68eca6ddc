"""The sparse soft embedding: candidate tokens of each position and the mean of their vectors.

Where few tokens hold nearly all of a position's probability, its soft embedding is computed from
these candidates alone. Chunks that can hold none, by their largest logit (`logit_stats.py`), are
not read. Candidates are found by comparing raw logits: only theirs are exponentiated.

T positions, V vocabulary, C chunks of W tokens each, G groups of chunks, S candidates, D width.
"""

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from dgemma.backends.cuda.kernels.common import gdc_wait, launch, pdl_kwargs
from dgemma.backends.cuda.kernels.logit_stats import (
    MAX_CANDIDATES,
    MIN_CHUNK_PROB,
    MIN_MASS,
    LogitStats,
    capped,
    logit_scale,
)
from dgemma.quant.head import CHUNK

CHUNKS_PER_PROGRAM = 4  # searched for candidates
COLUMN = 8  # adjacent tokens that a thread of the search has
BLOCK = 256  # width of a program of the mean


@dataclass(frozen=True, slots=True)
class Candidates:
    """Number of candidates in each group of chunks, and their probability mass.

    Where a position is flat nothing is read, and both are zero: the dense mean is needed. So it is
    once a group has more than MAX_CANDIDATES: it has a count but no mass, and groups searched after
    it may be skipped, with zeros.
    """

    count_TG: Tensor
    mass_TG: Tensor

    def covers_mass(self) -> Tensor:
        """True (0-d) if the candidates of every position are few and hold MIN_MASS."""
        is_few_T = self.count_TG.sum(1) <= MAX_CANDIDATES
        return (is_few_T & (self.mass_TG.sum(1) >= MIN_MASS)).all()


@dataclass(frozen=True, slots=True)
class SoftEmbedOut:
    """Destination of soft embeddings; a pinned position is conditioned on its own token instead."""

    soft_ELD: Tensor
    tokens_EL: Tensor  # strided
    pinned_EL: Tensor  # 1: its own token; 2: no self-conditioning; 0: the mean
    entry_I: Tensor  # int32: table entry of each canvas
    scale: float  # of the table's vectors

    @property
    def arguments(self) -> tuple[object, ...]:
        """Arguments of a kernel that calls `store_soft`."""
        flags_EL = flag_bytes(self.pinned_EL)
        strides = (self.tokens_EL.stride(0), flags_EL.stride(0))
        return self.soft_ELD, self.tokens_EL, flags_EL, self.entry_I, *strides, self.scale

    @property
    def kwargs(self) -> dict[str, Any]:
        length, width = self.soft_ELD.shape[1:]
        return {"L": length, "D": width, "BLOCK": BLOCK, **pdl_kwargs()}


def count_candidates(stats: LogitStats) -> Candidates:
    """Search each position for candidates, in chunks whose largest probability allows any."""
    rows, vocab = stats.raw_TV.shape
    groups = triton.cdiv(stats.chunks.peak_TC.shape[1], CHUNKS_PER_PROGRAM)
    count_TG = torch.empty(rows, groups, dtype=torch.int32, device=stats.raw_TV.device)
    mass_TG = stats.temperature_T.new_empty(rows, groups)
    launch(_count_candidates, (rows, groups))(
        *_arguments(stats),
        stats.chunks.flat_C,
        count_TG,
        mass_TG,
        vocab,
        L=stats.chunks.length,
        S=MAX_CANDIDATES,
        COLUMN=COLUMN,
        **_chunk_kwargs(stats),
        **pdl_kwargs(),
    )
    return Candidates(count_TG, mass_TG)


def gather_candidates(
    stats: LogitStats, candidates: Candidates
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return ids and probabilities of each position's candidates, their number, and their mass."""
    (rows, vocab), groups = stats.raw_TV.shape, candidates.count_TG.shape[1]
    device = stats.raw_TV.device
    id_TS = torch.empty(rows, MAX_CANDIDATES, dtype=torch.int32, device=device)
    p_TS = torch.empty(rows, MAX_CANDIDATES, dtype=torch.float32, device=device)
    count_T = torch.empty(rows, dtype=torch.int32, device=device)
    mass_T = torch.empty_like(stats.temperature_T)
    launch(_gather_candidates, (rows, groups))(
        *_arguments(stats),
        candidates.count_TG,
        candidates.mass_TG,
        id_TS,
        p_TS,
        count_T,
        mass_T,
        vocab,
        G=triton.next_power_of_2(groups),
        S=MAX_CANDIDATES,
        **_chunk_kwargs(stats),
    )
    return id_TS, p_TS, count_T, mass_T


def _arguments(stats: LogitStats) -> tuple[Tensor, ...]:
    return *stats.arguments, stats.merged.min_logit_T, stats.chunks.peak_TC


def _chunk_kwargs(stats: LogitStats) -> dict[str, Any]:
    return {
        "MIN_CHUNK_PROB": MIN_CHUNK_PROB,
        "CAP": stats.softcap or 0.0,
        "W": CHUNK,
        "CHUNKS": stats.chunks.peak_TC.shape[1],
        "PER_PROGRAM": CHUNKS_PER_PROGRAM,
        "num_warps": 8,
    }


def mean_of_candidates(
    table_VD: Tensor, id_TS: Tensor, p_TS: Tensor, count_T: Tensor, out: SoftEmbedOut
) -> None:
    """Write the mean of the candidates' vectors, summed in their order, scaled."""
    rows, width = len(id_TS), table_VD.shape[1]
    launch(_mean_of_candidates, (rows, triton.cdiv(width, BLOCK)))(
        table_VD, id_TS, p_TS, count_T, *out.arguments, S=id_TS.shape[1], STEP=16, **out.kwargs
    )


def store_mean(table_VD: Tensor, mean_TD: Tensor, out: SoftEmbedOut) -> None:
    """Write a mean over the whole vocabulary, scaled."""
    rows, width = mean_TD.shape
    launch(_store_mean, (rows, triton.cdiv(width, BLOCK)))(
        table_VD, mean_TD, *out.arguments, **out.kwargs
    )


def flag_bytes(flags_T: Tensor) -> Tensor:
    return flags_T.view(torch.uint8) if flags_T.dtype == torch.bool else flags_T


@triton.jit
def _read_chunks(
    softmax,
    peak_TC,
    MIN_CHUNK_PROB: tl.constexpr,
    CAP: tl.constexpr,
    CHUNKS: tl.constexpr,
    PER_PROGRAM: tl.constexpr,
):
    """Return this program's chunks, and which of them may hold candidates."""
    row = tl.program_id(0)
    c = tl.program_id(1) * PER_PROGRAM + tl.arange(0, PER_PROGRAM)
    top = tl.load(peak_TC + row * CHUNKS + c, mask=c < CHUNKS, other=float("-inf"))
    return c, _prob(top, softmax, CAP) >= MIN_CHUNK_PROB


@triton.jit
def _prob(y, softmax, CAP: tl.constexpr):
    """Probabilities of capped logits."""
    temperature_T, peak_T, total_T = softmax
    row = tl.program_id(0)
    scale = logit_scale(tl.load(temperature_T + row), CAP)
    return tl.exp((y - tl.load(peak_T + row)) * scale) / tl.load(total_T + row)


@triton.jit
def _count_candidates(
    raw_TV,
    temperature_T,
    peak_T,
    total_T,
    min_logit_T,
    peak_TC,
    flat_C,
    count_TG,
    mass_TG,
    vocab,
    L: tl.constexpr,
    S: tl.constexpr,
    COLUMN: tl.constexpr,
    MIN_CHUNK_PROB: tl.constexpr,
    CAP: tl.constexpr,
    W: tl.constexpr,
    CHUNKS: tl.constexpr,
    PER_PROGRAM: tl.constexpr,
    PDL: tl.constexpr,
):
    """Count the candidates of some chunks, and sum their mass."""
    gdc_wait(PDL)
    row = tl.program_id(0)
    at = row * tl.num_programs(1) + tl.program_id(1)
    # Loaded before the flag is tested, so that the two latencies overlap.
    softmax = (temperature_T, peak_T, total_T)
    c, is_read = _read_chunks(softmax, peak_TC, MIN_CHUNK_PROB, CAP, CHUNKS, PER_PROGRAM)
    min_logit = tl.load(min_logit_T + row)
    count = 0
    mass = 0.0
    # Volatile: other programs write it, and L1 is not coherent.
    if tl.load(flat_C + row // L, volatile=True) == 0:
        w = tl.arange(0, W // COLUMN)[:, None] * COLUMN + tl.arange(0, COLUMN)[None, :]
        v = c[:, None, None] * W + w[None, :, :]
        is_token = is_read[:, None, None] & (v < vocab)
        at_V = raw_TV + row.to(tl.int64) * vocab + v
        raw = tl.load(at_V, mask=is_token, other=float("-inf")).to(tl.float32)
        count = tl.sum(_column_sum((raw >= min_logit).to(tl.int32)), 0)
        if count > S:
            # Programs that see this in time skip their search: the dense mean is needed.
            tl.atomic_max(flat_C + row // L, 1)
        elif count > 0:
            mass = _mass(raw, min_logit, softmax, CAP)
    tl.store(count_TG + at, count)
    tl.store(mass_TG + at, mass)


@triton.jit
def _column_sum(number):
    return tl.sum(tl.sum(number, 2), 0)


@triton.jit
def _column_max(raw):
    return tl.max(tl.max(raw, 2), 0)


@triton.jit
def _mass(raw, min_logit, softmax, CAP: tl.constexpr):
    """Sum the candidates' probabilities: the largest of every column, then the next largest.

    A column is what one thread holds and has few candidates, so that few rounds do.
    """
    top = _column_max(raw)
    mass = tl.zeros_like(top)
    while tl.max(top, 0) >= min_logit:
        equals = _column_sum((raw == top[None, :, None]).to(tl.float32))
        p = _prob(capped(top, CAP), softmax, CAP)
        mass += tl.where(top >= min_logit, equals * p, 0.0)
        top = _column_max(tl.where(raw < top[None, :, None], raw, float("-inf")))
    return tl.sum(mass, 0)


@triton.jit
def _gather_candidates(
    raw_TV,
    temperature_T,
    peak_T,
    total_T,
    min_logit_T,
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
    MIN_CHUNK_PROB: tl.constexpr,
    CAP: tl.constexpr,
    W: tl.constexpr,
    CHUNKS: tl.constexpr,
    PER_PROGRAM: tl.constexpr,
):
    """Compact the candidates of some chunks; a row with too many has none."""
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
        softmax = (temperature_T, peak_T, total_T)
        c, is_read = _read_chunks(softmax, peak_TC, MIN_CHUNK_PROB, CAP, CHUNKS, PER_PROGRAM)
        v = c[:, None] * W + tl.arange(0, W)[None, :]
        is_token = is_read[:, None] & (v < vocab)
        at_V = raw_TV + row.to(tl.int64) * vocab + v
        raw = tl.load(at_V, mask=is_token, other=float("-inf")).to(tl.float32)
        is_candidate = raw >= tl.load(min_logit_T + row)
        p = _prob(capped(raw, CAP), softmax, CAP)
        flags = is_candidate.to(tl.int32)
        in_chunk = tl.sum(flags, 1)
        before = tl.sum(tl.where(g < group, counts, 0), 0) + tl.cumsum(in_chunk, 0) - in_chunk
        slot = before[:, None] + tl.cumsum(flags, 1) - 1
        tl.store(id_TS + row * S + slot, v, mask=is_candidate)
        tl.store(p_TS + row * S + slot, p, mask=is_candidate)


@triton.jit
def _mean_of_candidates(
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
    STEP: tl.constexpr,
    PDL: tl.constexpr,
):
    gdc_wait(PDL)
    row = tl.program_id(0)
    d = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    count = tl.load(count_T + row)
    for first in range(0, count, STEP):
        s = first + tl.arange(0, STEP)
        token = tl.load(id_TS + row * S + s, mask=s < count, other=0).to(tl.int64)
        p = tl.load(p_TS + row * S + s, mask=s < count, other=0.0)
        is_in = (s < count)[:, None] & (d < D)[None, :]
        vector = tl.load(table_VD + token[:, None] * D + d[None, :], mask=is_in, other=0.0)
        total += tl.sum(p[:, None] * vector.to(tl.float32), 0)
    # Rounded before it is scaled, as in the definition.
    mean = total.to(soft_ELD.dtype.element_ty)
    canvas = (tokens_EL, pinned_EL, entry_I, tokens_stride, pinned_stride)
    store_soft(mean, table_VD, soft_ELD, canvas, scale, row, d, L, D)


@triton.jit
def _store_mean(
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
    canvas = (tokens_EL, pinned_EL, entry_I, tokens_stride, pinned_stride)
    store_soft(mean, table_VD, soft_ELD, canvas, scale, row, d, L, D)


@triton.jit
def store_soft(mean, table_VD, soft_ELD, canvas, scale, row, d, L: tl.constexpr, D: tl.constexpr):
    """Store the self-conditioning of one position, scaled; see `SoftEmbedOut`.

    A pinned position is conditioned on its own token, as a converged one would be.
    """
    tokens_EL, pinned_EL, entry_I, tokens_stride, pinned_stride = canvas
    entry = tl.load(entry_I + row // L).to(tl.int64)
    pinned = tl.load(pinned_EL + entry * pinned_stride + row % L)
    if pinned == 1:
        token = tl.load(tokens_EL + entry * tokens_stride + row % L)
        mean = tl.load(table_VD + token * D + d, mask=d < D, other=0.0).to(mean.dtype)
    elif pinned == 2:
        mean = tl.zeros_like(mean)
    to = soft_ELD + (entry * L + row % L) * D + d
    tl.store(to, (mean.to(tl.float32) * scale).to(soft_ELD.dtype.element_ty), mask=d < D)
