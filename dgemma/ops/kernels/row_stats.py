"""Row statistics in one pass over the head's output, which stays in 16 bits.

Each warp reads a chunk of one row and leaves its peak and the sums of exp(x) and x exp(x) behind
the peak. A second kernel, one program a row, merges them: entropy, argmax, and the draw; the chunk
of the peak and the one that the running sum points to are read again. Probabilities, where they are
wanted, replace the head's output.

T positions, V vocabulary, C chunks of W tokens each.
"""

import math
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

CHUNK = 2048  # tokens summed up by one warp
SPARE = 1e-5  # a token below this probability does not enter the sparse soft embedding
SURVIVORS = 128  # most tokens of a position that do
ENOUGH = 0.99  # a position whose likely tokens cannot hold as much is not searched for them
AT_ONCE = 4  # chunks that are searched by one program
LOG2_E = tl.constexpr(1.4426950408889634)


@dataclass(frozen=True, slots=True, kw_only=True)
class Marks:
    """What the first pass leaves of each chunk; positions in units of the capped logit."""

    peak_TC: Tensor
    sum_TC: Tensor  # of exp(x), x the heated logit behind the chunk's peak
    moment_TC: Tensor  # of x exp(x)


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
    _marks[(triton.cdiv(chunks, 4), rows)](
        raw_TV,
        heat_T,
        peak_TC,
        sum_TC,
        moment_TC,
        vocab,
        chunks,
        CAP=softcap or 0.0,
        W=CHUNK,
        EACH=4,
        EVEN=vocab % (4 * CHUNK) == 0,
        num_warps=4,
    )
    return Marks(peak_TC=peak_TC, sum_TC=sum_TC, moment_TC=moment_TC)


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
    vocab,
    chunks,
    CAP: tl.constexpr,
    W: tl.constexpr,
    EACH: tl.constexpr,
    EVEN: tl.constexpr,
):
    """A chunk for each warp, so that no sum has to wait for another warp."""
    row = tl.program_id(1)
    c = tl.program_id(0) * EACH + tl.arange(0, EACH)
    v = c[:, None] * W + tl.arange(0, W)[None, :]
    at = raw_TV + row.to(tl.int64) * vocab + v
    # Base 2 and one factor throughout; the sum of x exp(x) is put right at its end.
    scale = _scale(tl.load(heat_T + row), CAP) * LOG2_E
    if EVEN:
        y = _capped(tl.load(at), CAP)
        peak = tl.max(y, 1)
        x = (y - peak[:, None]) * scale
        e = tl.exp2(x)
    else:
        is_token = v < vocab
        y = _capped(tl.load(at, mask=is_token, other=0.0), CAP)
        peak = tl.where(c < chunks, tl.max(tl.where(is_token, y, float("-inf")), 1), 0.0)
        x = tl.where(is_token, (y - peak[:, None]) * scale, 0.0)
        e = tl.where(is_token, tl.exp2(x), 0.0)
    at_TC = row * chunks + c
    tl.store(peak_TC + at_TC, peak, mask=c < chunks)
    tl.store(sum_TC + at_TC, tl.sum(e, 1), mask=c < chunks)
    tl.store(moment_TC + at_TC, tl.sum(x * e, 1) / LOG2_E, mask=c < chunks)


@triton.jit
def _merge(
    raw_TV,
    heat_T,
    uniform_T,
    held_T,
    peak_TC,
    sum_TC,
    moment_TC,
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
    start = row.to(tl.int64) * vocab
    w = tl.arange(0, W)
    # The first of equals, as everywhere.
    v = tl.min(tl.where(peaks == peak, c, CHUNKS), 0) * W + w
    raw = tl.load(raw_TV + start + v, mask=v < vocab, other=float("-inf")).to(tl.float32)
    # A row of NaN has no peak: its token is of no use, but one that can be looked up.
    top = tl.minimum(tl.min(tl.where(raw == tl.max(raw, 0), v, 2147483647), 0), vocab - 1)
    # With the peak at zero the sum is 1 / p(top): H = log Z - E[x].
    z = total.to(tl.float32)
    tl.store(entropy_T + row, tl.log(z) - (moment / total).to(tl.float32))
    tl.store(top_p_T + row, 1.0 / z)
    tl.store(top_T + row, top)
    tl.store(peak_T + row, peak)
    tl.store(total_T + row, z)
    held = _capped(tl.load(raw_TV + start + tl.load(held_T + row)), CAP)
    tl.store(held_p_T + row, tl.exp((held - peak) * scale) / z)
    # The draw: the token whose interval of the running sum holds `uniform` times the total.
    target = tl.load(uniform_T + row) * total
    chunk = tl.sum(((cdf <= target) & is_chunk).to(tl.int32), 0)
    chunk = tl.minimum(chunk, CHUNKS - 1)
    before = tl.sum(tl.where(c < chunk, weights, 0.0), 0)
    v = chunk * W + w
    is_token = v < vocab
    raw = tl.load(raw_TV + start + v, mask=is_token, other=float("-inf")).to(tl.float32)
    e = tl.where(is_token, tl.exp((_capped(raw, CAP) - peak) * scale), 0.0).to(tl.float64)
    inside = tl.sum((tl.cumsum(e, 0) <= target - before).to(tl.int32), 0)
    # Rounding may put the target past the chunk's end: then its likeliest token is taken.
    likeliest = tl.min(tl.where(raw == tl.max(raw, 0), v, 2147483647), 0)
    draw = chunk * W + inside
    draw = tl.minimum(tl.where((inside < W) & (draw < vocab), draw, likeliest), vocab - 1)
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
    scale = _scale(tl.load(heat_T + row), CAP)
    peak = tl.load(peak_T + row)
    total = tl.load(total_T + row)
    c = tl.program_id(1) * EACH + tl.arange(0, EACH)
    top = tl.load(peak_TC + row * CHUNKS + c, mask=c < CHUNKS, other=float("-inf"))
    is_read = tl.exp((top - peak) * scale) / total >= LEAST
    v = c[:, None] * W + tl.arange(0, W)[None, :]
    is_token = is_read[:, None] & (v < vocab)
    raw = tl.load(raw_TV + row.to(tl.int64) * vocab + v, mask=is_token, other=0.0)
    p = tl.exp((_capped(raw, CAP) - peak) * scale) / total
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
