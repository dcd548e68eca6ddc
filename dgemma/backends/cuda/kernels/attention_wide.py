"""Attention of wide heads: what `attention.py` does, with the layouts written out (Gluon).

A head of 512 fills the registers of two warp groups with the output of 64 queries, and shared
memory with one block each of queries, keys and values. The compiler's own pipeline wants two of
each, and so halves the blocks; here the next keys are fetched while probabilities and values are
multiplied, and the next values while queries and keys are. Each warp group has half of the keys of
a block, and half of the values' width.

Only for 16-bit queries on Hopper; the interpreter knows no Gluon.
"""

from typing import TYPE_CHECKING

import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    warpgroup_mma,
    warpgroup_mma_wait,
)

if TYPE_CHECKING:
    from dgemma.backends.cuda.kernels.attention import Segments

LOG2_E = gl.constexpr(1.4426950408889634)
# Two names that changed between Triton 3.6 and 3.9.
_fetch = getattr(async_copy, "async_load", None) or async_copy.async_copy_global_to_shared
_barrier = getattr(gl, "barrier", None) or gl.thread_barrier


def attend(
    q_TNH: Tensor,
    table_E6: Tensor,
    segments: "Segments",
    out: tuple[Tensor, Tensor],
    heads_and_window: tuple[int, int],
) -> None:
    """Write the parts of the result and the logarithms (base 2) of their sums."""
    tokens, heads, width = q_TNH.shape
    kv_heads, window = heads_and_window
    parts, count = len(out[1]), len(segments.entry_I)
    _attend[(triton.cdiv(segments.stride * (heads // kv_heads), 64), kv_heads, parts * count)](
        q_TNH,
        table_E6,
        table_E6.stride(0),
        segments.entry_I,
        segments.count_E,
        segments.count_E.stride(0),
        segments.causal_E,
        *out,
        segments.stride,
        tokens,
        parts,
        N=heads,
        M=kv_heads,
        H=width,
        KIND=segments.kind,
        WINDOW=window,
        BM=64,
        BN=64,
        num_warps=8,
    )


@gluon.jit
def _fetch_block(
    shared,
    bases,
    counts,
    block,
    kv,
    M: gl.constexpr,
    H: gl.constexpr,
    BN: gl.constexpr,
    kind: gl.constexpr,
    layout: gl.constexpr,
):
    """Begin to fetch a block. Behind the last key that one is fetched again; it is hidden later."""
    past_blocks = gl.cdiv(counts[0], BN)
    in_past = block < past_blocks
    base = gl.multiple_of(gl.where(in_past, bases[0], bases[1]).to(kind), 16)
    start = gl.where(in_past, block, block - past_blocks) * BN
    s = start + gl.arange(0, BN, layout=gl.SliceLayout(1, layout))
    s = gl.minimum(s, gl.where(in_past, counts[0], counts[1]) - 1)
    h = gl.arange(0, H, layout=gl.SliceLayout(0, layout))
    at = (s.to(gl.int64) * M + kv) * H
    _fetch(shared, base + at[:, None] + h[None, :])
    async_copy.commit_group()


@gluon.jit
def _hide(scores, is_key, place, s, is_causal, KIND: gl.constexpr, WINDOW: gl.constexpr):
    """Minus infinity for what is no key, comes behind the query, or has left its window."""
    is_seen = is_key[None, :] & (place >= 0)[:, None]
    if KIND > 0:
        back = place[:, None] - s[None, :]
        is_near = back >= 0
        if WINDOW > 0:
            is_near = is_near & (back < WINDOW)
        if KIND == 2:
            is_near = is_near | (is_causal == 0)
        is_seen = is_seen & is_near
    return gl.where(is_seen, scores, float("-inf"))


@gluon.jit(do_not_specialize=["parts", "tokens"])
def _attend(
    q_TNH,
    table_E6,
    table_stride,
    entry_I,
    count_E,
    count_stride,
    causal_E,
    out_PTNH,
    log_PTN,
    stride,
    tokens,
    parts,
    N: gl.constexpr,
    M: gl.constexpr,
    H: gl.constexpr,
    KIND: gl.constexpr,
    WINDOW: gl.constexpr,
    BM: gl.constexpr,
    BN: gl.constexpr,
):
    G: gl.constexpr = N // M
    dtype: gl.constexpr = q_TNH.dtype.element_ty
    kind: gl.constexpr = gl.pointer_type(dtype)
    score_layout: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 2], instr_shape=[16, BN // 2, 16]
    )
    out_layout: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 2], instr_shape=[16, H // 2, 16]
    )
    rows: gl.constexpr = gl.SliceLayout(1, score_layout)
    out_rows: gl.constexpr = gl.SliceLayout(1, out_layout)
    read: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [8, 1], [1, 0])
    tiled: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    kv = gl.program_id(1)
    segment = gl.program_id(2) // parts
    part = gl.program_id(2) % parts
    entry = gl.load(entry_I + segment).to(gl.int64)
    place_6 = table_E6 + entry * table_stride
    length = gl.load(count_E + entry * count_stride).to(gl.int32)
    if KIND == 2:
        is_causal = gl.load(causal_E + entry)
    else:
        is_causal = KIND
    first = gl.program_id(0) * BM
    if KIND == 1:
        first = (gl.num_programs(0) - 1 - gl.program_id(0)) * BM
    # The blocks that this program reads, as in `attention.py`.
    past_count = gl.load(place_6 + 2).to(gl.int32)
    own_count = gl.load(place_6 + 5).to(gl.int32)
    keys = (gl.load(place_6), gl.load(place_6 + 3))
    values = (gl.load(place_6 + 1), gl.load(place_6 + 4))
    counts = (past_count, own_count)
    past_blocks = gl.cdiv(past_count, BN)
    zeroth = past_count + own_count - length
    first_place = zeroth + first // G
    last_place = zeroth + (first + BM - 1) // G
    low = 0
    high = past_blocks + gl.cdiv(own_count, BN)
    if KIND > 0:
        reach = past_blocks + gl.cdiv(gl.maximum(last_place + 1 - past_count, 0), BN)
        high = gl.where(is_causal != 0, gl.minimum(high, reach), high)
        if WINDOW > 0:
            earliest = gl.maximum(first_place - (WINDOW - 1), 0)
            in_own = past_blocks + gl.maximum(earliest - past_count, 0) // BN
            low = gl.where(earliest < past_count, earliest // BN, in_own)
            # Queries beyond the segment's tokens may have nothing left to see.
            low = gl.where(is_causal != 0, gl.minimum(low, high), 0)
    begin = low + part * (high - low) // parts
    end = low + (part + 1) * (high - low) // parts

    q_s = gl.allocate_shared_memory(dtype, [BM, H], tiled)
    k_s = gl.allocate_shared_memory(dtype, [BN, H], tiled)
    v_s = gl.allocate_shared_memory(dtype, [BN, H], tiled)
    p_s = gl.allocate_shared_memory(dtype, [BM, BN], tiled)
    x = gl.minimum(first + gl.arange(0, BM, layout=gl.SliceLayout(1, read)), stride * G - 1)
    row = (segment * stride + x // G) * N + kv * G + x % G
    h = gl.arange(0, H, layout=gl.SliceLayout(0, read))
    _fetch(q_s, q_TNH + row.to(gl.int64)[:, None] * H + h[None, :])
    if begin < end:
        _fetch_block(k_s, keys, counts, begin, kv, M, H, BN, kind, read)
        _fetch_block(v_s, values, counts, begin, kv, M, H, BN, kind, read)
    peak = gl.full([BM], float("-inf"), gl.float32, rows)
    sums = gl.zeros([BM, BN], gl.float32, score_layout)
    nothing = gl.zeros([BM, BN], gl.float32, score_layout)
    out = gl.zeros([BM, H], gl.float32, out_layout)
    place = zeroth + (first + gl.arange(0, BM, layout=rows)) // G
    for block in range(begin, end):
        async_copy.wait_group(1)
        fence_async_shared()
        _barrier()
        scores_on = warpgroup_mma(q_s, k_s.permute((1, 0)), nothing, use_acc=False, is_async=True)
        scores = warpgroup_mma_wait(0, deps=[scores_on])
        _barrier()
        after = gl.minimum(block + 1, end - 1)
        _fetch_block(k_s, keys, counts, after, kv, M, H, BN, kind, read)

        in_past = block < past_blocks
        start = gl.where(in_past, block, block - past_blocks) * BN
        count = gl.where(in_past, past_count, own_count)
        before = gl.where(in_past, 0, past_count)
        is_edge = start + BN > count
        if KIND > 0:
            hides = before + start + BN - 1 > first_place
            if WINDOW > 0:
                hides = hides | (before + start <= last_place - WINDOW)
            is_edge = is_edge | (hides & (is_causal != 0))
        if is_edge:
            s = start + gl.arange(0, BN, layout=gl.SliceLayout(0, score_layout))
            scores = _hide(scores, s < count, place, before + s, is_causal, KIND, WINDOW)
        new_peak = gl.maximum(peak, gl.max(scores, 1))
        safe = gl.where(new_peak == float("-inf"), 0.0, new_peak) * LOG2_E
        fade = gl.exp2(peak * LOG2_E - safe)
        p = gl.exp2(scores * LOG2_E - safe[:, None])
        sums = sums * fade[:, None] + p
        peak = new_peak
        p_s.store(p.to(dtype))
        out = out * gl.convert_layout(fade, out_rows)[:, None]
        async_copy.wait_group(1)
        fence_async_shared()
        _barrier()
        out_on = warpgroup_mma(p_s, v_s, out, is_async=True)
        out = warpgroup_mma_wait(0, deps=[out_on])
        _barrier()
        _fetch_block(v_s, values, counts, after, kv, M, H, BN, kind, read)
    async_copy.wait_group(0)
    total = gl.sum(sums, 1)
    some = gl.where(total > 0, total, 1.0)
    log = gl.where(total > 0, peak * LOG2_E + gl.log2(some), float("-inf"))
    mine = first + gl.arange(0, BM, layout=rows)
    at = part * tokens * N + (segment * stride + mine // G) * N + kv * G + mine % G
    gl.store(log_PTN + at, log, mask=mine < stride * G)
    out = out / gl.convert_layout(some, out_rows)[:, None]
    mine = first + gl.arange(0, BM, layout=out_rows)
    at = part.to(gl.int64) * tokens * N + (segment * stride + mine // G) * N + kv * G + mine % G
    w = gl.arange(0, H, layout=gl.SliceLayout(0, out_layout))
    kept = out.to(out_PTNH.dtype.element_ty)
    is_kept = (mine < stride * G)[:, None] & (w >= 0)[None, :]
    gl.store(out_PTNH + at[:, None] * H + w[None, :], kept, mask=is_kept)
