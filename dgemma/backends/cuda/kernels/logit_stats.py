"""Row statistics in one pass over the head's output, which stays in 16 bits.

Each warp reads a chunk of one row and leaves its peak and the sums of exp(x) and x exp(x) behind
the peak. A second kernel, one program a row, merges them: entropy, argmax, and the draw; the chunk
of the peak and the one that the running sum points to are read again. It also says which tokens are
likely, and whether any row is so flat that no few of them can hold it, which spares `sparse.py` its
search. Probabilities, where they are wanted, replace the head's output.

T positions, V vocabulary, C chunks of W tokens each.
"""

import math
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from dgemma.backends.cuda.kernels.pdl import gdc_wait, pdl_kwargs

CHUNK = 2048  # tokens summed up by one warp
SURVIVORS = 128  # most tokens of a position that enter the sparse soft embedding
SPARE = 1e-5  # a token below this probability does not enter it
READ = 0.9 * SPARE  # a chunk whose peak is below holds no likely token, however its peak is rounded
MASS = 1 - 2e-3  # of a position, that its likely tokens must hold; bfloat16 loses as much
MISSED = 1.01 * (1 - MASS)  # a position that has as much in chunks without likely tokens is flat
ENOUGH = 0.99  # a position whose likeliest so many tokens cannot hold as much is flat
COLDEST = 1e-3  # a draw temperature below it takes the likeliest token
SMALL = 1e-3  # peaks below it are taken for as much, where tokens are counted
LOG2_E = tl.constexpr(1.4426950408889634)


@dataclass(frozen=True, slots=True, kw_only=True)
class Marks:
    """Chunk statistics of the first pass; peaks are capped logits."""

    peak_TC: Tensor
    sum_TC: Tensor  # of exp(x), x the heated logit behind the chunk's peak
    draw_sum_TC: Tensor  # of exp(x / draw temperature)
    moment_TC: Tensor  # of x exp(x)
    # int, for each canvas; zero here, set by the second pass if a row is flat, and by a search that
    # finds too many likely tokens together.
    flat_C: Tensor
    length: int  # rows of a canvas


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
    next_T: Tensor  # the peak's chunk has this one without it
    least_T: Tensor  # from this number of the head's output on a token is likely


def row_marks(
    raw_TV: Tensor, softcap: float | None, temperatures: tuple[Tensor, Tensor], length: int
) -> Marks:
    """The first pass; temperatures of the distribution and of draws; `length`: of a canvas."""
    temperature_T, draw_temperature_T = temperatures
    rows, vocab = raw_TV.shape
    chunks = triton.cdiv(vocab, CHUNK)
    peak_TC, sum_TC, moment_TC, draw_TC = (temperature_T.new_empty(rows, chunks) for _ in range(4))
    flat_C = torch.empty(triton.cdiv(rows, length), dtype=torch.int32, device=raw_TV.device)
    _marks[(triton.cdiv(chunks, 4), rows)](
        raw_TV,
        temperature_T,
        draw_temperature_T,
        peak_TC,
        sum_TC,
        moment_TC,
        draw_TC,
        flat_C,
        vocab,
        chunks,
        L=length,
        CAP=softcap or 0.0,
        W=CHUNK,
        EACH=4,
        EVEN=vocab % (4 * CHUNK) == 0,
        COLDEST=COLDEST,
        num_warps=4,
        **pdl_kwargs(),
    )
    return Marks(
        peak_TC=peak_TC,
        sum_TC=sum_TC,
        moment_TC=moment_TC,
        draw_sum_TC=draw_TC,
        flat_C=flat_C,
        length=length,
    )


def row_merge(
    raw_TV: Tensor,
    softcap: float | None,
    query: tuple[Tensor, Tensor, Tensor, Tensor],
    marks: Marks,
) -> Merged:
    """The second: statistics and draws; a query is both temperatures, uniform and held token."""
    temperature_T, draw_temperature_T, uniform_T, held_T = query
    rows, vocab = raw_TV.shape
    chunks = marks.peak_TC.shape[1]
    draw_T, top_T = (torch.empty_like(held_T) for _ in range(2))
    floats = [torch.empty_like(temperature_T) for _ in range(7)]
    _merge[(rows,)](
        raw_TV,
        temperature_T,
        draw_temperature_T,
        uniform_T,
        held_T,
        marks.peak_TC,
        marks.sum_TC,
        marks.moment_TC,
        marks.draw_sum_TC,
        draw_T,
        top_T,
        *floats,
        marks.flat_C,
        vocab,
        L=marks.length,
        COLDEST=COLDEST,
        MOST=most_entropy(vocab),
        TOKENS=most_tokens(),
        SMALL=SMALL,
        SPARE=SPARE,
        READ=READ,
        MISSED=MISSED,
        CAP=softcap or 0.0,
        W=CHUNK,
        CHUNKS=chunks,
        C=triton.next_power_of_2(chunks),
        num_warps=8,
        **pdl_kwargs(),
    )
    names = ("entropy_T", "top_p_T", "held_p_T", "peak_T", "total_T", "next_T", "least_T")
    return Merged(draw_T=draw_T, top_T=top_T, **dict(zip(names, floats, strict=True)))


def most_entropy(vocab: int) -> float:
    """Nats that a position can have whose likely tokens hold enough: both shares spread evenly."""
    parts = ((ENOUGH, min(SURVIVORS, vocab)), (1 - ENOUGH, vocab))
    return sum(share * math.log(count / share) for share, count in parts)


def most_tokens() -> float:
    """Most tokens that `_tokens_needed` may count where the survivors hold enough."""
    return SURVIVORS + (1 - ENOUGH) / SMALL


def probabilities_(
    raw_TV: Tensor, softcap: float | None, temperature_T: Tensor, merged: Merged
) -> Tensor:
    """Turn the head's output, in place, into the probabilities it stands for."""
    rows, vocab = raw_TV.shape
    _probabilities[(triton.cdiv(vocab, CHUNK), rows)](
        raw_TV, temperature_T, merged.peak_T, merged.total_T, vocab, CAP=softcap or 0.0, W=CHUNK
    )
    return raw_TV


@triton.jit
def capped(raw, CAP: tl.constexpr):
    """c tanh(x / c) = 2c sigmoid(2x / c) - c; no statistic sees the constant."""
    if CAP > 0:
        y = tl.sigmoid(raw.to(tl.float32) * (2.0 / CAP))
    else:
        y = raw.to(tl.float32)
    return y


@triton.jit
def scale_of(temperature, CAP: tl.constexpr):
    if CAP > 0:
        scale = 2.0 * CAP / temperature
    else:
        scale = 1.0 / temperature
    return scale


@triton.jit
def _marks(
    raw_TV,
    temperature_T,
    draw_temperature_T,
    peak_TC,
    sum_TC,
    moment_TC,
    draw_sum_TC,
    flat_C,
    vocab,
    chunks,
    L: tl.constexpr,
    CAP: tl.constexpr,
    W: tl.constexpr,
    EACH: tl.constexpr,
    EVEN: tl.constexpr,
    COLDEST: tl.constexpr,
    PDL: tl.constexpr,
):
    """A chunk for each warp, so that no sum has to wait for another warp."""
    gdc_wait(PDL)
    row = tl.program_id(1)
    if (row % L == 0) & (tl.program_id(0) == 0):
        tl.store(flat_C + row // L, 0)
    c = tl.program_id(0) * EACH + tl.arange(0, EACH)
    v = c[:, None] * W + tl.arange(0, W)[None, :]
    at = raw_TV + row.to(tl.int64) * vocab + v
    # Base 2 and one factor throughout; the sum of x exp(x) is put right at its end.
    scale = scale_of(tl.load(temperature_T + row), CAP) * LOG2_E
    if EVEN:
        y = capped(tl.load(at), CAP)
        peak = tl.max(y, 1)
        x = (y - peak[:, None]) * scale
        e = tl.exp2(x)
    else:
        is_token = v < vocab
        y = capped(tl.load(at, mask=is_token, other=0.0), CAP)
        peak = tl.where(c < chunks, tl.max(tl.where(is_token, y, float("-inf")), 1), 0.0)
        x = tl.where(is_token, (y - peak[:, None]) * scale, 0.0)
        e = tl.where(is_token, tl.exp2(x), 0.0)
    at_TC = row * chunks + c
    sums = tl.sum(e, 1)
    tl.store(peak_TC + at_TC, peak, mask=c < chunks)
    tl.store(sum_TC + at_TC, sums, mask=c < chunks)
    tl.store(moment_TC + at_TC, tl.sum(x * e, 1) / LOG2_E, mask=c < chunks)
    draw_temperature = tl.load(draw_temperature_T + row)
    if draw_temperature != 1.0:
        e = tl.exp2(x / tl.maximum(draw_temperature, COLDEST))
        if not EVEN:
            e = tl.where(v < vocab, e, 0.0)
        sums = tl.sum(e, 1)
    tl.store(draw_sum_TC + at_TC, sums, mask=c < chunks)


@triton.jit
def _tokens_needed(weight, share, total, SMALL: tl.constexpr):
    """Least number of tokens that hold a row's probability, by its chunks' sums and peaks.

    Whoever holds all but d of it needs as many, less d / SMALL: in a chunk of peak q a mass m takes
    m / q tokens or more, and each token left out spares 1 / SMALL of its mass at most.
    """
    return tl.sum(weight / tl.maximum(share, SMALL * total), 0)


@triton.jit
def _least(probability, peak, total, scale, CAP: tl.constexpr):
    """Logit before the cap at which a token has this probability: counting then needs no exp."""
    y = peak + tl.log(probability * total) / scale
    if CAP > 0:
        inside = tl.minimum(tl.maximum(y, 1e-30), 1.0 - 6e-8)
        raw = 0.5 * CAP * tl.log(inside / (1.0 - inside))
        raw = tl.where(y <= 0.0, -3e38, tl.where(y >= 1.0, float("inf"), raw))
    else:
        raw = tl.maximum(y, -3e38)  # a token that is not there has less
    return raw


@triton.jit
def _merge(
    raw_TV,
    temperature_T,
    draw_temperature_T,
    uniform_T,
    held_T,
    peak_TC,
    sum_TC,
    moment_TC,
    draw_sum_TC,
    draw_T,
    top_T,
    entropy_T,
    top_p_T,
    held_p_T,
    peak_T,
    total_T,
    next_T,
    least_T,
    flat_C,
    vocab,
    L: tl.constexpr,
    COLDEST: tl.constexpr,
    MOST: tl.constexpr,
    TOKENS: tl.constexpr,
    SMALL: tl.constexpr,
    SPARE: tl.constexpr,
    READ: tl.constexpr,
    MISSED: tl.constexpr,
    CAP: tl.constexpr,
    W: tl.constexpr,
    CHUNKS: tl.constexpr,
    C: tl.constexpr,
    PDL: tl.constexpr,
):
    gdc_wait(PDL)
    row = tl.program_id(0)
    scale = scale_of(tl.load(temperature_T + row), CAP)
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
    total = tl.sum(weights, 0)
    moment = tl.sum(((moments + shift * sums) * share).to(tl.float64), 0)
    start = row.to(tl.int64) * vocab
    w = tl.arange(0, W)
    # The first of equals, as everywhere.
    v = tl.min(tl.where(peaks == peak, c, CHUNKS), 0) * W + w
    raw = tl.load(raw_TV + start + v, mask=v < vocab, other=float("-inf")).to(tl.float32)
    # A row of NaN has no peak: its token is of no use, but one that can be looked up.
    top = tl.minimum(tl.min(tl.where(raw == tl.max(raw, 0), v, 2147483647), 0), vocab - 1)
    # With the peak at zero the sum is 1 / p(top): H = log Z - E[x].
    z = total.to(tl.float32)
    entropy = tl.log(z) - (moment / total).to(tl.float32)
    weight = weights.to(tl.float32)
    missed = tl.sum(tl.where(share < READ * z, weight, 0.0), 0)
    is_spread = _tokens_needed(weight, share, z, SMALL) > TOKENS
    if (entropy > MOST) | is_spread | (missed > MISSED * z):
        tl.atomic_max(flat_C + row // L, 1)
    tl.store(entropy_T + row, entropy)
    tl.store(top_p_T + row, 1.0 / z)
    tl.store(top_T + row, top)
    tl.store(peak_T + row, peak)
    tl.store(total_T + row, z)
    tl.store(least_T + row, _least(SPARE, peak, z, scale, CAP))
    tl.store(next_T + row, capped(tl.max(tl.where(v == top, float("-inf"), raw), 0), CAP))
    held = capped(tl.load(raw_TV + start + tl.load(held_T + row)), CAP)
    tl.store(held_p_T + row, tl.exp((held - peak) * scale) / z)
    # The draw: the token whose interval of the running sum holds `uniform` times the total.
    draw_temperature = tl.load(draw_temperature_T + row)
    hot = tl.maximum(draw_temperature, COLDEST)
    if draw_temperature != 1.0:
        share = tl.where(is_chunk, tl.exp(shift / hot), 0.0)
        sums = tl.load(draw_sum_TC + at, mask=is_chunk, other=0.0)
        weights = (sums * share).to(tl.float64)
        total = tl.sum(weights, 0)
    cdf = tl.cumsum(weights, 0)
    target = tl.load(uniform_T + row) * total
    chunk = tl.sum(((cdf <= target) & is_chunk).to(tl.int32), 0)
    chunk = tl.minimum(chunk, CHUNKS - 1)
    before = tl.sum(tl.where(c < chunk, weights, 0.0), 0)
    v = chunk * W + w
    is_token = v < vocab
    raw = tl.load(raw_TV + start + v, mask=is_token, other=float("-inf")).to(tl.float32)
    e = tl.where(is_token, tl.exp((capped(raw, CAP) - peak) * scale / hot), 0.0).to(tl.float64)
    inside = tl.sum((tl.cumsum(e, 0) <= target - before).to(tl.int32), 0)
    # Rounding may put the target past the chunk's end: then its likeliest token is taken.
    likeliest = tl.min(tl.where(raw == tl.max(raw, 0), v, 2147483647), 0)
    draw = chunk * W + inside
    draw = tl.minimum(tl.where((inside < W) & (draw < vocab), draw, likeliest), vocab - 1)
    draw = tl.where(draw_temperature < COLDEST, top, draw)
    tl.store(draw_T + row, draw)


@triton.jit
def _probabilities(
    raw_TV, temperature_T, peak_T, total_T, vocab, CAP: tl.constexpr, W: tl.constexpr
):
    row = tl.program_id(1)
    v = tl.program_id(0) * W + tl.arange(0, W)
    at = raw_TV + row.to(tl.int64) * vocab + v
    y = capped(tl.load(at, mask=v < vocab, other=0.0), CAP)
    x = (y - tl.load(peak_T + row)) * scale_of(tl.load(temperature_T + row), CAP)
    p = tl.exp(x) / tl.load(total_T + row)
    tl.store(at, p.to(raw_TV.dtype.element_ty), mask=v < vocab)
