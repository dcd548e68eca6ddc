"""A single token's heads and its attention in one launch: `heads.py` and `attention.py` as one.

A program norms and turns the queries of its key head itself, which costs less than another launch.
The token's own key is in no buffer yet: the last part's program makes it, writes it to its slot,
and adds it to what it found, apart from the keys in memory. Only for the causal mode.

N query heads, M key heads, H head width, G queries of a key head, P parts of the keys.
"""

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from dgemma.ops.kernels import attention as several
from dgemma.ops.kernels.attention import LOG2_E, _hide, _slots
from dgemma.ops.kernels.heads import Heads
from dgemma.ops.kernels.launch import after, bring, can_fetch, early, fetch, share
from dgemma.ops.kernels.ways import ways


def attention(
    qkv_1X: Tensor,
    shape: Heads,
    turns: tuple[Tensor, Tensor],
    place_6: Tensor,
    how: tuple[float, int],
    coming: Tensor | None = None,
) -> Tensor:
    """What attention gives, [1, N, H]; keys and values are written to their slots.

    `how`: epsilon of the norms, and the window (0: no limit). `coming` as in `attention.py`.
    """
    (eps, window), width = how, shape.width
    form = several.cut(shape.queries // shape.keys, shape.keys, width)
    out_1NH = qkv_1X.new_empty(1, shape.queries, width)
    out_P1NH, log_P1N = several._parts(out_1NH, form)
    size, piece = share(coming, shape.keys * form.parts, form.warps)
    _attend_1[(shape.keys, form.parts)](
        qkv_1X,
        shape.q_weight,
        shape.k_weight,
        *turns,
        place_6,
        out_P1NH,
        log_P1N,
        qkv_1X if coming is None else coming,
        eps,
        N=shape.queries,
        M=shape.keys,
        H=width,
        HAS_VALUE=shape.has_value,
        WINDOW=window,
        FETCH=size,
        PIECE=piece,
        **_sizes(form),
        **early(),
    )
    if form.parts > 1:
        several.merge(out_P1NH, log_P1N, out_1NH)
    return out_1NH


def _sizes(form: several.Cut) -> dict[str, Any]:
    return {
        "BM": form.queries,
        "BN": form.keys,
        "KEYS_AHEAD": can_fetch(ways().keys),
        "THREADS": 32 * form.warps,
        "num_warps": form.warps,
        "num_stages": form.stages,
    }


@triton.jit
def _attend_1(
    qkv_X,
    q_weight_H,
    k_weight_H,
    cos_P,
    sin_P,
    place_6,
    out_PNH,
    log_PN,
    coming,
    eps,
    N: tl.constexpr,
    M: tl.constexpr,
    H: tl.constexpr,
    HAS_VALUE: tl.constexpr,
    WINDOW: tl.constexpr,
    FETCH: tl.constexpr,
    PIECE: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    KEYS_AHEAD: tl.constexpr,
    THREADS: tl.constexpr,
    EARLY: tl.constexpr,
):
    G: tl.constexpr = N // M
    kv, part, parts = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    fetch(coming, kv * parts + part, FETCH, PIECE, THREADS)
    past_keys = tl.load(place_6)
    past_values = tl.load(place_6 + 1)
    past_count = tl.load(place_6 + 2).to(tl.int32)
    own_keys = tl.load(place_6 + 3)
    own_values = tl.load(place_6 + 4)
    own_count = tl.load(place_6 + 5).to(tl.int32) - 1  # but for the token's own
    past_blocks = tl.cdiv(past_count, BN)
    here = past_count + own_count  # where the token stands
    low = 0
    if WINDOW > 0:
        earliest = tl.maximum(here - (WINDOW - 1), 0)
        in_own = past_blocks + tl.maximum(earliest - past_count, 0) // BN
        low = tl.where(earliest < past_count, earliest // BN, in_own)
    high = past_blocks + tl.cdiv(own_count, BN)
    begin = low + part * (high - low) // parts
    end = low + (part + 1) * (high - low) // parts
    size: tl.constexpr = H * qkv_X.dtype.element_ty.primitive_bitwidth // 8  # of a head, in bytes
    if KEYS_AHEAD:
        i = begin * BN + tl.arange(0, THREADS)
        in_first, slot = _slots(tl.minimum(i, end * BN - 1), past_blocks, past_count, own_count, BN)
        slot = (slot.to(tl.int64) * M + kv) * size
        bring(tl.where(in_first, past_keys, own_keys) + slot, size, THREADS)
        bring(tl.where(in_first, past_values, own_values) + slot, size, THREADS)
    kind: tl.constexpr = qkv_X.dtype.element_ty
    memory: tl.constexpr = tl.pointer_type(kind)
    h = tl.arange(0, H)
    x = tl.arange(0, BM)
    row = kv * G + x
    after(EARLY)
    q = _turned(qkv_X, row, x < G, q_weight_H, cos_P, sin_P, eps, H).to(kind)
    peak = tl.full((BM,), float("-inf"), dtype=tl.float32)
    total = tl.zeros((BM,), dtype=tl.float32)
    out = tl.zeros((BM, H), dtype=tl.float32)
    for block in range(begin, end):
        in_past = block < past_blocks
        start = tl.where(in_past, block, block - past_blocks) * BN
        count = tl.where(in_past, past_count, own_count)
        keys = tl.multiple_of(tl.where(in_past, past_keys, own_keys).to(memory), 16)
        values = tl.multiple_of(tl.where(in_past, past_values, own_values).to(memory), 16)
        s = start + tl.arange(0, BN)
        is_key = s < count
        at = (s.to(tl.int64) * M + kv) * H
        k = tl.load(keys + at[:, None] + h[None, :], mask=is_key[:, None], other=0.0)
        scores = tl.dot(q, tl.trans(k))
        place = here + x * 0
        scores = _hide(scores, is_key, place, tl.where(in_past, 0, past_count) + s, True, WINDOW)
        new_peak = tl.maximum(peak, tl.max(scores, 1))
        # Before anything was seen the peak is minus infinity; take zero, and nothing is added.
        safe = tl.where(new_peak == float("-inf"), 0.0, new_peak) * LOG2_E
        fade = tl.exp2(peak * LOG2_E - safe)
        p = tl.exp2(scores * LOG2_E - safe[:, None])
        total = total * fade + tl.sum(p, 1)
        v = tl.load(values + at[:, None] + h[None, :], mask=is_key[:, None], other=0.0)
        out = tl.dot(p.to(v.dtype), v, out * fade[:, None])
        peak = new_peak
    if part == parts - 1:
        one = tl.arange(0, 1)
        k = _turned(qkv_X, N + kv + one, one == 0, k_weight_H, cos_P, sin_P, eps, H).to(kind)
        v = _normed(qkv_X, N + (M if HAS_VALUE else 0) + kv + one, eps, H).to(kind)
        at = (own_count.to(tl.int64) * M + kv) * H + h[None, :]
        tl.store(own_keys.to(memory) + at, k)
        tl.store(own_values.to(memory) + at, v)
        score = tl.sum(q.to(tl.float32) * k.to(tl.float32), 1)
        new_peak = tl.maximum(peak, score)
        fade = tl.exp2((peak - new_peak) * LOG2_E)
        p = tl.exp2((score - new_peak) * LOG2_E)
        total = total * fade + p
        out = out * fade[:, None] + p[:, None] * v.to(tl.float32)
        peak = new_peak
    some = tl.where(total > 0, total, 1.0)
    log = tl.where(total > 0, peak * LOG2_E + tl.log2(some), float("-inf"))
    out = (out / some[:, None]).to(out_PNH.dtype.element_ty)
    at = part * N + row
    tl.store(out_PNH + at.to(tl.int64)[:, None] * H + h[None, :], out, mask=(x < G)[:, None])
    tl.store(log_PN + at, log, mask=x < G)


@triton.jit
def _normed(qkv_X, row, eps, H: tl.constexpr):
    x = tl.load(qkv_X + row[:, None] * H + tl.arange(0, H)[None, :]).to(tl.float32)
    return x * tl.rsqrt(tl.sum(x * x, 1) / H + eps)[:, None]


@triton.jit
def _turned(qkv_X, row, is_row, weight_H, cos_P, sin_P, eps, H: tl.constexpr):
    """Heads normed and turned. Each number meets its pair's other one, which is read beside it."""
    P: tl.constexpr = H // 2
    h = tl.arange(0, H)
    other = (h + P) % H
    mask = is_row[:, None]
    x = tl.load(qkv_X + row[:, None] * H + h[None, :], mask=mask, other=0.0).to(tl.float32)
    y = tl.load(qkv_X + row[:, None] * H + other[None, :], mask=mask, other=0.0).to(tl.float32)
    cos = tl.load(cos_P + h % P)
    sin = tl.load(sin_P + h % P)
    sin = tl.where(h < P, -sin, sin)
    scale = tl.rsqrt(tl.sum(x * x, 1) / H + eps)
    x = x * scale[:, None] * (tl.load(weight_H + h).to(tl.float32) * cos)[None, :]
    return x + y * scale[:, None] * (tl.load(weight_H + other).to(tl.float32) * sin)[None, :]
