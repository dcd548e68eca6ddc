"""Row statistics in one pass over the head's output, which stays in 16 bits.

Each program reads a chunk of one row and leaves its peak, where that is, and the sums of exp(x) and
x exp(x) behind the peak. A second kernel, one program a row, merges them: entropy, argmax, and the
draw, for which only the chunk that the running sum points to is read again. Probabilities, where
they are wanted, replace the head's output.

T positions, V vocabulary, C chunks of W tokens each.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

CHUNK = 2048  # tokens read by one program
SPARE = 1e-5  # a token below this probability does not enter the sparse soft embedding
SURVIVORS = 128  # most tokens of a position that do


@dataclass(frozen=True, slots=True, kw_only=True)
class Marks:
    """What the first pass leaves of each chunk; positions in units of the capped logit."""

    peak_TC: Tensor
    sum_TC: Tensor  # of exp(x), x the heated logit behind the chunk's peak
    moment_TC: Tensor  # of x exp(x)
    top_TC: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Merged:
    """The statistics of each position, and what its probabilities are made from."""

    draw_T: Tensor
    top_T: Tensor
    entropy_T: Tensor
    top_p_T: Tensor
    held_p_T: Tensor
    peak_T: Tensor
    total_T: Tensor  # sum of exp(x), x behind the row's peak


def row_marks(raw_TV: Tensor, softcap: float | None, heat_T: Tensor) -> Marks:
    """The first pass."""
    rows, vocab = raw_TV.shape
    chunks = triton.cdiv(vocab, CHUNK)
    peak_TC, sum_TC, moment_TC = (heat_T.new_empty(rows, chunks) for _ in range(3))
    top_TC = torch.empty(rows, chunks, dtype=torch.int32, device=raw_TV.device)
    _marks[(chunks, rows)](
        raw_TV,
        heat_T,
        peak_TC,
        sum_TC,
        moment_TC,
        top_TC,
        vocab,
        chunks,
        CAP=softcap or 0.0,
        W=CHUNK,
    )
    return Marks(peak_TC=peak_TC, sum_TC=sum_TC, moment_TC=moment_TC, top_TC=top_TC)


def row_merge(
    raw_TV: Tensor, softcap: float | None, query: tuple[Tensor, Tensor, Tensor], marks: Marks
) -> Merged:
    """The second: statistics and draws; a query is heat, uniform number and held token."""
    heat_T, uniform_T, held_T = query
    rows, vocab = raw_TV.shape
    chunks = marks.peak_TC.shape[1]
    draw_T, top_T = (torch.empty_like(held_T) for _ in range(2))
    floats = [torch.empty_like(heat_T) for _ in range(5)]
    _merge[(rows,)](
        raw_TV,
        heat_T,
        uniform_T,
        held_T,
        marks.peak_TC,
        marks.sum_TC,
        marks.moment_TC,
        marks.top_TC,
        draw_T,
        top_T,
        *floats,
        vocab,
        CAP=softcap or 0.0,
        W=CHUNK,
        CHUNKS=chunks,
        C=triton.next_power_of_2(chunks),
        num_warps=8,
    )
    names = ("entropy_T", "top_p_T", "held_p_T", "peak_T", "total_T")
    return Merged(draw_T=draw_T, top_T=top_T, **dict(zip(names, floats, strict=True)))


def probabilities_(raw_TV: Tensor, softcap: float | None, heat_T: Tensor, merged: Merged) -> Tensor:
    """Turn the head's output, in place, into the probabilities it stands for."""
    rows, vocab = raw_TV.shape
    _probabilities[(triton.cdiv(vocab, CHUNK), rows)](
        raw_TV, heat_T, merged.peak_T, merged.total_T, vocab, CAP=softcap or 0.0, W=CHUNK
    )
    return raw_TV


def survivors(
    raw_TV: Tensor, softcap: float | None, heat_T: Tensor, marks: Marks, merged: Merged
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The likely tokens of each position: ids and probabilities, how many, and their mass.

    Only chunks whose peak is likely enough are read. Where the mass falls short, or more tokens
    are likely than there is place, the dense mean has to be taken instead; see `soft_mean`.
    """
    rows, vocab = raw_TV.shape
    chunks = marks.peak_TC.shape[1]
    id_TS = torch.empty(rows, SURVIVORS, dtype=torch.int32, device=raw_TV.device)
    p_TS = torch.empty(rows, SURVIVORS, dtype=torch.float32, device=raw_TV.device)
    count_T = torch.empty(rows, dtype=torch.int32, device=raw_TV.device)
    mass_T = torch.empty_like(heat_T)
    _survivors[(rows,)](
        raw_TV,
        heat_T,
        merged.peak_T,
        merged.total_T,
        marks.peak_TC,
        id_TS,
        p_TS,
        count_T,
        mass_T,
        vocab,
        LEAST=SPARE,
        CAP=softcap or 0.0,
        W=CHUNK,
        CHUNKS=chunks,
        S=SURVIVORS,
    )
    return id_TS, p_TS, count_T, mass_T


def soft_mean(table_VD: Tensor, id_TS: Tensor, p_TS: Tensor, count_T: Tensor) -> Tensor:
    """The mean of the survivors' vectors, in their order."""
    rows, width = len(id_TS), table_VD.shape[1]
    block = 512
    soft_TD = table_VD.new_empty(rows, width)
    _soft_mean[(rows, triton.cdiv(width, block))](
        table_VD, id_TS, p_TS, count_T, soft_TD, D=width, S=id_TS.shape[1], BLOCK=block
    )
    return soft_TD


@triton.jit
def _capped(raw, CAP: tl.constexpr):
    """c tanh(x / c) = 2c sigmoid(2x / c) - c; no statistic sees the constant."""
    if CAP > 0:
        y = tl.sigmoid(raw.to(tl.float32) * (2.0 / CAP))
    else:
        y = raw.to(tl.float32)
    return y


@triton.jit
def _scale(heat, CAP: tl.constexpr):
    if CAP > 0:
        scale = 2.0 * CAP / heat
    else:
        scale = 1.0 / heat
    return scale


@triton.jit
def _marks(
    raw_TV,
    heat_T,
    peak_TC,
    sum_TC,
    moment_TC,
    top_TC,
    vocab,
    chunks,
    CAP: tl.constexpr,
    W: tl.constexpr,
):
    chunk = tl.program_id(0)
    row = tl.program_id(1)
    v = chunk * W + tl.arange(0, W)
    is_token = v < vocab
    raw = tl.load(raw_TV + row.to(tl.int64) * vocab + v, mask=is_token, other=0.0)
    y = tl.where(is_token, _capped(raw, CAP), float("-inf"))
    peak = tl.max(y, 0)
    # The first of equals, as everywhere.
    top = tl.min(tl.where(y == peak, v, 2147483647), 0)
    x = tl.where(is_token, (y - peak) * _scale(tl.load(heat_T + row), CAP), 0.0)
    e = tl.where(is_token, tl.exp(x), 0.0)
    at = row * chunks + chunk
    tl.store(peak_TC + at, peak)
    tl.store(sum_TC + at, tl.sum(e, 0))
    tl.store(moment_TC + at, tl.sum(x * e, 0))
    tl.store(top_TC + at, top)


@triton.jit
def _merge(
    raw_TV,
    heat_T,
    uniform_T,
    held_T,
    peak_TC,
    sum_TC,
    moment_TC,
    top_TC,
    draw_T,
    top_T,
    entropy_T,
    top_p_T,
    held_p_T,
    peak_T,
    total_T,
    vocab,
    CAP: tl.constexpr,
    W: tl.constexpr,
    CHUNKS: tl.constexpr,
    C: tl.constexpr,
):
    row = tl.program_id(0)
    scale = _scale(tl.load(heat_T + row), CAP)
    c = tl.arange(0, C)
    is_chunk = c < CHUNKS
    at = row * CHUNKS + c
    peaks = tl.load(peak_TC + at, mask=is_chunk, other=float("-inf"))
    peak = tl.max(peaks, 0)
    shift = tl.where(is_chunk, (peaks - peak) * scale, 0.0)
    share = tl.where(is_chunk, tl.exp(shift), 0.0)
    sums = tl.load(sum_TC + at, mask=is_chunk, other=0.0)
    moments = tl.load(moment_TC + at, mask=is_chunk, other=0.0)
    weights = (sums * share).to(tl.float64)
    cdf = tl.cumsum(weights, 0)
    total = tl.sum(weights, 0)
    moment = tl.sum(((moments + shift * sums) * share).to(tl.float64), 0)
    tops = tl.load(top_TC + at, mask=is_chunk, other=2147483647)
    top = tl.min(tl.where(peaks == peak, tops, 2147483647), 0)
    # With the peak at zero the sum is 1 / p(top): H = log Z - E[x].
    z = total.to(tl.float32)
    tl.store(entropy_T + row, tl.log(z) - (moment / total).to(tl.float32))
    tl.store(top_p_T + row, 1.0 / z)
    tl.store(top_T + row, top)
    tl.store(peak_T + row, peak)
    tl.store(total_T + row, z)
    start = row.to(tl.int64) * vocab
    held = _capped(tl.load(raw_TV + start + tl.load(held_T + row)), CAP)
    tl.store(held_p_T + row, tl.exp((held - peak) * scale) / z)
    # The draw: the token whose interval of the running sum holds `uniform` times the total.
    target = tl.load(uniform_T + row) * total
    chunk = tl.sum(((cdf <= target) & is_chunk).to(tl.int32), 0)
    chunk = tl.minimum(chunk, CHUNKS - 1)
    before = tl.sum(tl.where(c < chunk, weights, 0.0), 0)
    w = tl.arange(0, W)
    v = chunk * W + w
    is_token = v < vocab
    y = _capped(tl.load(raw_TV + start + v, mask=is_token, other=0.0), CAP)
    e = tl.where(is_token, tl.exp((y - peak) * scale), 0.0).to(tl.float64)
    inside = tl.sum((tl.cumsum(e, 0) <= target - before).to(tl.int32), 0)
    # Rounding may put the target past the chunk's end: then its likeliest token is taken.
    likeliest = tl.sum(tl.where(c == chunk, tops, 0), 0)
    draw = chunk * W + inside
    draw = tl.where((inside < W) & (draw < vocab), draw, likeliest)
    tl.store(draw_T + row, draw)


@triton.jit
def _probabilities(raw_TV, heat_T, peak_T, total_T, vocab, CAP: tl.constexpr, W: tl.constexpr):
    row = tl.program_id(1)
    v = tl.program_id(0) * W + tl.arange(0, W)
    at = raw_TV + row.to(tl.int64) * vocab + v
    y = _capped(tl.load(at, mask=v < vocab, other=0.0), CAP)
    x = (y - tl.load(peak_T + row)) * _scale(tl.load(heat_T + row), CAP)
    p = tl.exp(x) / tl.load(total_T + row)
    tl.store(at, p.to(raw_TV.dtype.element_ty), mask=v < vocab)


@triton.jit
def _survivors(
    raw_TV,
    heat_T,
    peak_T,
    total_T,
    peak_TC,
    id_TS,
    p_TS,
    count_T,
    mass_T,
    vocab,
    LEAST: tl.constexpr,
    CAP: tl.constexpr,
    W: tl.constexpr,
    CHUNKS: tl.constexpr,
    S: tl.constexpr,
):
    row = tl.program_id(0)
    scale = _scale(tl.load(heat_T + row), CAP)
    peak = tl.load(peak_T + row)
    total = tl.load(total_T + row)
    count = 0
    mass = 0.0
    for chunk in range(CHUNKS):
        here = tl.exp((tl.load(peak_TC + row * CHUNKS + chunk) - peak) * scale) / total
        if (here >= LEAST) & (count < S):
            v = chunk * W + tl.arange(0, W)
            is_token = v < vocab
            raw = tl.load(raw_TV + row.to(tl.int64) * vocab + v, mask=is_token, other=0.0)
            p = tl.exp((_capped(raw, CAP) - peak) * scale) / total
            is_likely = is_token & (p >= LEAST)
            place = count + tl.cumsum(is_likely.to(tl.int32), 0) - 1
            is_kept = is_likely & (place < S)
            tl.store(id_TS + row * S + place, v, mask=is_kept)
            tl.store(p_TS + row * S + place, p, mask=is_kept)
            count += tl.sum(is_likely.to(tl.int32), 0)
            mass += tl.sum(tl.where(is_kept, p, 0.0), 0)
    tl.store(count_T + row, tl.minimum(count, S))
    tl.store(mass_T + row, mass)


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
):
    row = tl.program_id(0)
    d = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for s in range(tl.load(count_T + row)):
        token = tl.load(id_TS + row * S + s).to(tl.int64)
        vector = tl.load(table_VD + token * D + d, mask=d < D, other=0.0)
        total += tl.load(p_TS + row * S + s) * vector.to(tl.float32)
    tl.store(soft_TD + row * D + d, total.to(soft_TD.dtype.element_ty), mask=d < D)
