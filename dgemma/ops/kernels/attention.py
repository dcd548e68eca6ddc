"""Attention over keys where they lie: a shared past, if there is one, and the row's own buffer.

Where the keys are is read from device memory, so that one captured graph serves every row and
length. Six int64 numbers say it:

    past keys, past values, their number,  own keys, own values, their number

The first two of each half are addresses of [slots, M, H] memory. The queries are the last tokens
of the row's own keys. Their heads share key heads in groups of G, which are laid side by side: a
program takes some of the X = L * G queries of one key head and one part of the keys; the parts of
a query are merged by a second kernel, in their order.

L queries, N query heads, M key heads, H head width, P parts.
"""

from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl
from torch import Tensor

PROCESSORS = 132  # of an H100 or H200; one program at a time fits into each


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """How the work is cut."""

    queries: int
    keys: int
    warps: int
    stages: int
    parts: int = 1  # of the keys
    slices: int = 1  # of the values' width; each needs all of the scores


def cut(queries: int, kv_heads: int, width: int) -> Cut:
    """A canvas alone does not fill a GPU: then the keys are shared out too."""
    form = Cut(queries=64, keys=64, warps=8, stages=2)
    if width > 256:
        form = Cut(queries=64, keys=32, warps=8, stages=2)
    programs = kv_heads * triton.cdiv(queries, form.queries) * form.slices
    return replace(form, parts=max(1, min(8, PROCESSORS // programs)))


def attention(
    q_LNH: Tensor, place_6: Tensor, kv_heads: int, window: int | None, form: Cut | None = None
) -> Tensor:
    """Attention with scale 1. Without a window every query sees all keys that `place_6` names.

    With one (0: no limit) a query sees its own key and the `window - 1` before it: the causal mode.
    """
    length, heads, width = q_LNH.shape
    groups = heads // kv_heads
    form = form or cut(length * groups, kv_heads, width)
    parts = form.parts
    out_PLNH = torch.empty(parts, *q_LNH.shape, dtype=torch.float32, device=q_LNH.device)
    log_PLN = torch.empty(parts, length, heads, dtype=torch.float32, device=q_LNH.device)
    _attend[(triton.cdiv(length * groups, form.queries), kv_heads * form.slices, parts)](
        q_LNH,
        place_6,
        out_PLNH,
        log_PLN,
        length,
        parts,
        N=heads,
        M=kv_heads,
        H=width,
        CAUSAL=window is not None,
        WINDOW=window or 0,
        BM=form.queries,
        BN=form.keys,
        SLICES=form.slices,
        num_warps=form.warps,
        num_stages=form.stages,
    )
    out_LNH = torch.empty_like(q_LNH)
    _merge[(length * heads,)](
        out_PLNH, log_PLN, out_LNH, length * heads, H=width, PARTS=parts, num_warps=2
    )
    return out_LNH


@triton.jit
def _segment(
    state,
    q,
    keys,
    values,
    count,
    kv,
    side,
    begin,
    end,
    before,
    query,
    M: tl.constexpr,
    H: tl.constexpr,
    W: tl.constexpr,
    CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr,
    BN: tl.constexpr,
):
    """Go on with blocks [begin, end) of one buffer; `before` keys come before its first."""
    peak, total, out = state
    h = tl.arange(0, H)
    w = side * W + tl.arange(0, W)
    for block in range(begin, end):
        s = block * BN + tl.arange(0, BN)
        is_key = s < count
        at = (s.to(tl.int64) * M + kv) * H
        k = tl.load(keys + at[:, None] + h[None, :], mask=is_key[:, None], other=0.0)
        scores = tl.dot(q, tl.trans(k))
        if CAUSAL:
            back = query[:, None] - (before + s)[None, :]
            is_seen = is_key[None, :] & (back >= 0)
            if WINDOW > 0:
                is_seen = is_seen & (back < WINDOW)
            scores = tl.where(is_seen, scores, float("-inf"))
        else:
            scores = tl.where(is_key[None, :], scores, float("-inf"))
        new_peak = tl.maximum(peak, tl.max(scores, 1))
        # Before anything was seen the peak is minus infinity; take zero, and nothing is added.
        safe = tl.where(new_peak == float("-inf"), 0.0, new_peak)
        fade = tl.exp(peak - safe)
        p = tl.exp(scores - safe[:, None])
        total = total * fade + tl.sum(p, 1)
        v = tl.load(values + at[:, None] + w[None, :], mask=is_key[:, None], other=0.0)
        out = tl.dot(p.to(v.dtype), v, out * fade[:, None])
        peak = new_peak
    return peak, total, out


@triton.jit
def _attend(
    q_LNH,
    place_6,
    out_PLNH,
    log_PLN,
    length,
    parts,
    N: tl.constexpr,
    M: tl.constexpr,
    H: tl.constexpr,
    CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    SLICES: tl.constexpr,
):
    W: tl.constexpr = H // SLICES
    kv = tl.program_id(1) // SLICES
    side = tl.program_id(1) % SLICES
    part = tl.program_id(2)
    G: tl.constexpr = N // M
    x = tl.program_id(0) * BM + tl.arange(0, BM)
    is_query = x < length * G
    l_ = x // G
    row = l_ * N + kv * G + x % G
    h = tl.arange(0, H)
    q = tl.load(q_LNH + row[:, None] * H + h[None, :], mask=is_query[:, None], other=0.0)
    kind: tl.constexpr = tl.pointer_type(q_LNH.dtype.element_ty)
    past_keys = tl.multiple_of(tl.load(place_6 + 0).to(kind), 16)
    past_values = tl.multiple_of(tl.load(place_6 + 1).to(kind), 16)
    past_count = tl.load(place_6 + 2).to(tl.int32)
    own_keys = tl.multiple_of(tl.load(place_6 + 3).to(kind), 16)
    own_values = tl.multiple_of(tl.load(place_6 + 4).to(kind), 16)
    own_count = tl.load(place_6 + 5).to(tl.int32)
    # Each part is a run of whole blocks of the two buffers, one behind the other.
    past_blocks = tl.cdiv(past_count, BN)
    blocks = past_blocks + tl.cdiv(own_count, BN)
    begin = part * blocks // parts
    end = (part + 1) * blocks // parts
    query = past_count + own_count - length + l_
    if CAUSAL:
        # The last query of this program sees nothing behind itself.
        latest = past_count + own_count - length + (tl.program_id(0) * BM + BM - 1) // G
        reach = past_blocks + tl.cdiv(tl.maximum(latest + 1 - past_count, 0), BN)
        end = tl.minimum(end, reach)
        if WINDOW > 0:
            # Nor the first anything that its window has left.
            earliest = past_count + own_count - length + (tl.program_id(0) * BM) // G - (WINDOW - 1)
            in_past = tl.maximum(earliest, 0) // BN
            in_own = past_blocks + tl.maximum(earliest - past_count, 0) // BN
            begin = tl.maximum(begin, tl.where(earliest < past_count, in_past, in_own))
    peak = tl.full((BM,), float("-inf"), dtype=tl.float32)
    total = tl.zeros((BM,), dtype=tl.float32)
    out = tl.zeros((BM, W), dtype=tl.float32)
    state = (peak, total, out)
    past_end = tl.minimum(end, past_blocks)
    state = _segment(
        state, q, past_keys, past_values, past_count, kv, side, begin, past_end, 0, query,
        M, H, W, CAUSAL, WINDOW, BN,
    )  # fmt: skip
    own_begin = tl.maximum(begin - past_blocks, 0)
    state = _segment(
        state, q, own_keys, own_values, own_count, kv, side, own_begin,
        end - past_blocks, past_count, query, M, H, W, CAUSAL, WINDOW, BN,
    )  # fmt: skip
    peak, total, out = state
    log = tl.where(total > 0, peak + tl.log(tl.where(total > 0, total, 1.0)), float("-inf"))
    out = out / tl.where(total > 0, total, 1.0)[:, None]
    at = part * length * N + row
    w = side * W + tl.arange(0, W)
    tl.store(out_PLNH + at.to(tl.int64)[:, None] * H + w[None, :], out, mask=is_query[:, None])
    tl.store(log_PLN + at, log, mask=is_query)  # every slice has the same


@triton.jit
def _merge(out_PLNH, log_PLN, out_LNH, rows, H: tl.constexpr, PARTS: tl.constexpr):
    row = tl.program_id(0)
    h = tl.arange(0, H)
    peak = tl.load(log_PLN + row)
    for part in tl.static_range(1, PARTS):
        peak = tl.maximum(peak, tl.load(log_PLN + part * rows + row))
    total = 0.0
    out = tl.zeros((H,), dtype=tl.float32)
    for part in tl.static_range(PARTS):
        share = tl.exp(tl.load(log_PLN + part * rows + row) - peak)
        total += share
        at = (part * rows + row).to(tl.int64) * H
        out += share * tl.load(out_PLNH + at + h)
    tl.store(out_LNH + row.to(tl.int64) * H + h, (out / total).to(out_LNH.dtype.element_ty))
