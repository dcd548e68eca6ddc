"""Statistics of each position's logits in one pass over the LM head's output, which stays 16-bit.

Each warp reads a chunk of one row and writes its largest logit and the sums of exp(x) and x exp(x),
x relative to it. A second kernel, one program per row, merges the chunks: entropy, argmax, and the
draw; the chunk of the argmax and the one that the draw falls into are read again. It also writes
the logit from which on a token is a candidate for the sparse soft embedding, and a flag if a row is
so flat that few candidates cannot cover it, which spares `soft_embed_topk.py` its search.
Probabilities, where they are needed, replace the logits.

T positions, V vocabulary, C chunks of W tokens each.
"""

import math
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from dgemma.backends.cuda.kernels.common import gdc_wait, launch, pdl_kwargs
from dgemma.diffusion.logit_stats import MIN_TEMPERATURE
from dgemma.quant.head import CHUNK

MAX_CANDIDATES = 128  # tokens of a position in the sparse soft embedding
MIN_PROB = 1e-5  # of a candidate
MIN_CHUNK_PROB = 0.9 * MIN_PROB  # a chunk whose largest is below has no candidate, even rounded
MIN_MASS = 1 - 2e-3  # of a position, in its candidates; bfloat16 loses as much
MAX_MISSED = 1.01 * (1 - MIN_MASS)  # a position with more in chunks without candidates is flat
FLAT_MASS = 0.99  # a position whose MAX_CANDIDATES most likely tokens cannot hold as much is flat
MIN_COUNTED_PROB = 1e-3  # smaller ones are raised to it where `_tokens_needed` counts
LOG2_E = tl.constexpr(1.4426950408889634)


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkStats:
    """Chunk statistics of the first pass; peaks are capped logits."""

    peak_TC: Tensor
    sum_TC: Tensor  # of exp(x), x = (logit - peak) / temperature
    draw_sum_TC: Tensor  # of exp(x / draw temperature)
    moment_TC: Tensor  # of x exp(x)
    # int, for each canvas; zeroed here, set by the second pass if a row is flat, and by a search
    # that finds too many candidates.
    flat_C: Tensor
    length: int  # rows of a canvas


@dataclass(frozen=True, slots=True, kw_only=True)
class MergedStats:
    """Statistics of each position, and what its probabilities are computed from."""

    draw_T: Tensor
    top_T: Tensor
    entropy_T: Tensor
    top_p_T: Tensor
    current_p_T: Tensor
    peak_T: Tensor
    total_T: Tensor  # sum of exp(x), x relative to the row's peak
    second_T: Tensor  # peak of the argmax's chunk without the argmax
    min_logit_T: Tensor  # of a candidate, before the soft cap


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenQuery:
    """Per-position inputs of the statistics."""

    temperature_T: Tensor
    draw_temperature_T: Tensor  # of the draw alone, on top of the temperature
    uniform_T: Tensor
    current_T: Tensor


@dataclass(frozen=True, slots=True)
class LogitStats:
    """Logits of some canvases with their statistics, from which soft embeddings are computed."""

    raw_TV: Tensor  # before the soft cap
    softcap: float | None
    temperature_T: Tensor
    chunks: ChunkStats
    merged: MergedStats

    @property
    def arguments(self) -> tuple[Tensor, ...]:
        """Tensors from which a kernel computes probabilities."""
        return self.raw_TV, self.temperature_T, self.merged.peak_T, self.merged.total_T


def logit_stats(
    raw_TV: Tensor, softcap: float | None, query: TokenQuery, length: int
) -> LogitStats:
    """Compute statistics and draws of canvases of `length` positions; the logits are unchanged."""
    chunks = chunk_stats(raw_TV, softcap, query, length)
    merged = merge_chunks(raw_TV, softcap, query, chunks)
    return LogitStats(raw_TV, softcap, query.temperature_T, chunks, merged)


def chunk_stats(
    raw_TV: Tensor, softcap: float | None, query: TokenQuery, length: int
) -> ChunkStats:
    """First pass; `length`: of a canvas."""
    rows, vocab = raw_TV.shape
    chunks = triton.cdiv(vocab, CHUNK)
    names = ("peak_TC", "sum_TC", "moment_TC", "draw_sum_TC")
    sums = {name: query.temperature_T.new_empty(rows, chunks) for name in names}
    flat_C = torch.empty(triton.cdiv(rows, length), dtype=torch.int32, device=raw_TV.device)
    launch(_chunk_stats, (triton.cdiv(chunks, 4), rows))(
        raw_TV,
        query.temperature_T,
        query.draw_temperature_T,
        *sums.values(),
        flat_C,
        vocab,
        chunks,
        L=length,
        CAP=softcap or 0.0,
        W=CHUNK,
        PER_PROGRAM=4,
        EVEN=vocab % (4 * CHUNK) == 0,
        MIN_TEMPERATURE=MIN_TEMPERATURE,
        num_warps=4,
        **pdl_kwargs(),
    )
    return ChunkStats(**sums, flat_C=flat_C, length=length)


def merge_chunks(
    raw_TV: Tensor, softcap: float | None, query: TokenQuery, stats: ChunkStats
) -> MergedStats:
    """Second pass: statistics and draws of each position."""
    rows, vocab = raw_TV.shape
    chunks = stats.peak_TC.shape[1]
    tokens = {name: torch.empty_like(query.current_T) for name in ("draw_T", "top_T")}
    names = ("entropy_T", "top_p_T", "current_p_T", "peak_T", "total_T", "second_T", "min_logit_T")
    floats = {name: torch.empty_like(query.temperature_T) for name in names}
    launch(_merge_chunks, (rows,))(
        raw_TV,
        query.temperature_T,
        query.draw_temperature_T,
        query.uniform_T,
        query.current_T,
        stats.peak_TC,
        stats.sum_TC,
        stats.moment_TC,
        stats.draw_sum_TC,
        *tokens.values(),
        *floats.values(),
        stats.flat_C,
        vocab,
        L=stats.length,
        MIN_TEMPERATURE=MIN_TEMPERATURE,
        MAX_ENTROPY=max_entropy(vocab),
        MAX_TOKENS=max_tokens(),
        MIN_COUNTED_PROB=MIN_COUNTED_PROB,
        MIN_PROB=MIN_PROB,
        MIN_CHUNK_PROB=MIN_CHUNK_PROB,
        MAX_MISSED=MAX_MISSED,
        CAP=softcap or 0.0,
        W=CHUNK,
        CHUNKS=chunks,
        C=triton.next_power_of_2(chunks),
        num_warps=8,
        **pdl_kwargs(),
    )
    return MergedStats(**tokens, **floats)


def max_entropy(vocab: int) -> float:
    """Largest entropy of a position that is not flat: candidates and the rest each uniform."""
    uniforms = ((FLAT_MASS, min(MAX_CANDIDATES, vocab)), (1 - FLAT_MASS, vocab))
    return sum(mass * math.log(count / mass) for mass, count in uniforms)


def max_tokens() -> float:
    """Largest count by `_tokens_needed` of a position that is not flat."""
    return MAX_CANDIDATES + (1 - FLAT_MASS) / MIN_COUNTED_PROB


def probabilities_(stats: LogitStats) -> Tensor:
    """Replace logits by their probabilities, in place."""
    rows, vocab = stats.raw_TV.shape
    launch(_probabilities, (triton.cdiv(vocab, CHUNK), rows))(
        *stats.arguments, vocab, CAP=stats.softcap or 0.0, W=CHUNK
    )
    return stats.raw_TV


@triton.jit
def capped(raw, CAP: tl.constexpr):
    """Soft cap: c tanh(x / c) = 2c sigmoid(2x / c) - c; statistics ignore scale and offset."""
    if CAP > 0:
        y = tl.sigmoid(raw.to(tl.float32) * (2.0 / CAP))
    else:
        y = raw.to(tl.float32)
    return y


@triton.jit
def logit_scale(temperature, CAP: tl.constexpr):
    if CAP > 0:
        scale = 2.0 * CAP / temperature
    else:
        scale = 1.0 / temperature
    return scale


@triton.jit
def _chunk_stats(
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
    PER_PROGRAM: tl.constexpr,
    EVEN: tl.constexpr,
    MIN_TEMPERATURE: tl.constexpr,
    PDL: tl.constexpr,
):
    """One chunk per warp, so that no reduction crosses warps."""
    gdc_wait(PDL)
    row = tl.program_id(1)
    if (row % L == 0) & (tl.program_id(0) == 0):
        tl.store(flat_C + row // L, 0)
    c = tl.program_id(0) * PER_PROGRAM + tl.arange(0, PER_PROGRAM)
    v = c[:, None] * W + tl.arange(0, W)[None, :]
    at = raw_TV + row.to(tl.int64) * vocab + v
    # Base 2 throughout; the sum of x exp(x) is converted at its end.
    scale = logit_scale(tl.load(temperature_T + row), CAP) * LOG2_E
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
    at_C = row * chunks + c
    sums = tl.sum(e, 1)
    tl.store(peak_TC + at_C, peak, mask=c < chunks)
    tl.store(sum_TC + at_C, sums, mask=c < chunks)
    tl.store(moment_TC + at_C, tl.sum(x * e, 1) / LOG2_E, mask=c < chunks)
    draw_temperature = tl.load(draw_temperature_T + row)
    if draw_temperature != 1.0:
        e = tl.exp2(x / tl.maximum(draw_temperature, MIN_TEMPERATURE))
        if not EVEN:
            e = tl.where(v < vocab, e, 0.0)
        sums = tl.sum(e, 1)
    tl.store(draw_sum_TC + at_C, sums, mask=c < chunks)


@triton.jit
def _tokens_needed(weight, ratio, total, MIN_COUNTED_PROB: tl.constexpr):
    """Lower bound on the tokens that hold a row's probability, by its chunks' sums and peaks.

    In a chunk of peak q a mass m takes at least m / q tokens. To hold all but d of the mass takes
    as many, less d / MIN_COUNTED_PROB: no token left out saves more per mass.
    """
    return tl.sum(weight / tl.maximum(ratio, MIN_COUNTED_PROB * total), 0)


@triton.jit
def _min_logit(probability, peak, total, scale, CAP: tl.constexpr):
    """Logit before the cap that has this probability: candidates are counted without exp."""
    y = peak + tl.log(probability * total) / scale
    if CAP > 0:
        inside = tl.minimum(tl.maximum(y, 1e-30), 1.0 - 6e-8)
        raw = 0.5 * CAP * tl.log(inside / (1.0 - inside))
        raw = tl.where(y <= 0.0, -3e38, tl.where(y >= 1.0, float("inf"), raw))
    else:
        raw = tl.maximum(y, -3e38)  # padding has less
    return raw


@triton.jit
def _merge_chunks(
    raw_TV,
    temperature_T,
    draw_temperature_T,
    uniform_T,
    current_T,
    peak_TC,
    sum_TC,
    moment_TC,
    draw_sum_TC,
    draw_T,
    top_T,
    entropy_T,
    top_p_T,
    current_p_T,
    peak_T,
    total_T,
    second_T,
    min_logit_T,
    flat_C,
    vocab,
    L: tl.constexpr,
    MIN_TEMPERATURE: tl.constexpr,
    MAX_ENTROPY: tl.constexpr,
    MAX_TOKENS: tl.constexpr,
    MIN_COUNTED_PROB: tl.constexpr,
    MIN_PROB: tl.constexpr,
    MIN_CHUNK_PROB: tl.constexpr,
    MAX_MISSED: tl.constexpr,
    CAP: tl.constexpr,
    W: tl.constexpr,
    CHUNKS: tl.constexpr,
    C: tl.constexpr,
    PDL: tl.constexpr,
):
    gdc_wait(PDL)
    row = tl.program_id(0)
    scale = logit_scale(tl.load(temperature_T + row), CAP)
    c = tl.arange(0, C)
    is_chunk = c < CHUNKS
    at = row * CHUNKS + c
    peaks = tl.load(peak_TC + at, mask=is_chunk, other=float("-inf"))
    peak = tl.max(peaks, 0)
    shift = tl.where(is_chunk, (peaks - peak) * scale, 0.0)
    ratio = tl.where(is_chunk, tl.exp(shift), 0.0)
    sums = tl.load(sum_TC + at, mask=is_chunk, other=0.0)
    moments = tl.load(moment_TC + at, mask=is_chunk, other=0.0)
    weights = (sums * ratio).to(tl.float64)
    total = tl.sum(weights, 0)
    moment = tl.sum(((moments + shift * sums) * ratio).to(tl.float64), 0)
    start = row.to(tl.int64) * vocab
    w = tl.arange(0, W)
    # Ties: the first.
    v = tl.min(tl.where(peaks == peak, c, CHUNKS), 0) * W + w
    raw = tl.load(raw_TV + start + v, mask=v < vocab, other=float("-inf")).to(tl.float32)
    # A row of NaN has no peak: any valid token will do.
    top = tl.minimum(tl.min(tl.where(raw == tl.max(raw, 0), v, 2147483647), 0), vocab - 1)
    # With the peak at zero the sum is 1 / p(top): H = log Z - E[x].
    z = total.to(tl.float32)
    entropy = tl.log(z) - (moment / total).to(tl.float32)
    weight = weights.to(tl.float32)
    missed = tl.sum(tl.where(ratio < MIN_CHUNK_PROB * z, weight, 0.0), 0)
    is_spread = _tokens_needed(weight, ratio, z, MIN_COUNTED_PROB) > MAX_TOKENS
    if (entropy > MAX_ENTROPY) | is_spread | (missed > MAX_MISSED * z):
        tl.atomic_max(flat_C + row // L, 1)
    tl.store(entropy_T + row, entropy)
    tl.store(top_p_T + row, 1.0 / z)
    tl.store(top_T + row, top)
    tl.store(peak_T + row, peak)
    tl.store(total_T + row, z)
    tl.store(min_logit_T + row, _min_logit(MIN_PROB, peak, z, scale, CAP))
    tl.store(second_T + row, capped(tl.max(tl.where(v == top, float("-inf"), raw), 0), CAP))
    held = capped(tl.load(raw_TV + start + tl.load(current_T + row)), CAP)
    tl.store(current_p_T + row, tl.exp((held - peak) * scale) / z)
    # Inverse CDF: the token whose interval of the running sum holds `uniform` times the total.
    draw_temperature = tl.load(draw_temperature_T + row)
    temperature = tl.maximum(draw_temperature, MIN_TEMPERATURE)
    if draw_temperature != 1.0:
        ratio = tl.where(is_chunk, tl.exp(shift / temperature), 0.0)
        sums = tl.load(draw_sum_TC + at, mask=is_chunk, other=0.0)
        weights = (sums * ratio).to(tl.float64)
        total = tl.sum(weights, 0)
    cdf = tl.cumsum(weights, 0)
    target = tl.load(uniform_T + row) * total
    chunk = tl.sum(((cdf <= target) & is_chunk).to(tl.int32), 0)
    chunk = tl.minimum(chunk, CHUNKS - 1)
    before = tl.sum(tl.where(c < chunk, weights, 0.0), 0)
    v = chunk * W + w
    is_token = v < vocab
    raw = tl.load(raw_TV + start + v, mask=is_token, other=float("-inf")).to(tl.float32)
    e = tl.exp((capped(raw, CAP) - peak) * scale / temperature)
    e = tl.where(is_token, e, 0.0).to(tl.float64)
    inside = tl.sum((tl.cumsum(e, 0) <= target - before).to(tl.int32), 0)
    # Rounding may put the target past the chunk's end: its most likely token is taken.
    most_likely = tl.min(tl.where(raw == tl.max(raw, 0), v, 2147483647), 0)
    draw = chunk * W + inside
    draw = tl.minimum(tl.where((inside < W) & (draw < vocab), draw, most_likely), vocab - 1)
    draw = tl.where(draw_temperature < MIN_TEMPERATURE, top, draw)
    tl.store(draw_T + row, draw)


@triton.jit
def _probabilities(
    raw_TV, temperature_T, peak_T, total_T, vocab, CAP: tl.constexpr, W: tl.constexpr
):
    row = tl.program_id(1)
    v = tl.program_id(0) * W + tl.arange(0, W)
    at = raw_TV + row.to(tl.int64) * vocab + v
    y = capped(tl.load(at, mask=v < vocab, other=0.0), CAP)
    x = (y - tl.load(peak_T + row)) * logit_scale(tl.load(temperature_T + row), CAP)
    p = tl.exp(x) / tl.load(total_T + row)
    tl.store(at, p.to(raw_TV.dtype.element_ty), mask=v < vocab)
