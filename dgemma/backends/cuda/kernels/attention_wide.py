"""Attention of heads of 512, with explicit layouts (Gluon); `attention.py` launches it.

The output of 64 queries fills the registers of two warp groups, and one block each of queries, keys
and values fills shared memory. Triton's own pipeline needs two of each, and so halves the blocks;
here the next keys are copied during the GEMM of probabilities and values, and the next values
during that of queries and keys. Each warp group has half of a block's keys, and half of the values'
width.

Only for 16-bit queries on Hopper; the interpreter has no Gluon.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    warpgroup_mma,
    warpgroup_mma_wait,
)

LOG2_E = gl.constexpr(1.4426950408889634)
# Two names that changed between Triton 3.6 and 3.9.
_fetch = getattr(async_copy, "async_load", None) or async_copy.async_copy_global_to_shared
_barrier = getattr(gl, "barrier", None) or gl.thread_barrier


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
    pointer: gl.constexpr,
    layout: gl.constexpr,
):
    """Start to copy a block; past the end the last key is copied again, and masked later."""
    prefix_blocks = gl.cdiv(counts[0], BN)
    in_prefix = block < prefix_blocks
    base = gl.multiple_of(gl.where(in_prefix, bases[0], bases[1]).to(pointer), 16)
    start = gl.where(in_prefix, block, block - prefix_blocks) * BN
    s = start + gl.arange(0, BN, layout=gl.SliceLayout(1, layout))
    s = gl.minimum(s, gl.where(in_prefix, counts[0], counts[1]) - 1)
    h = gl.arange(0, H, layout=gl.SliceLayout(0, layout))
    at = (s.to(gl.int64) * M + kv) * H
    _fetch(shared, base + at[:, None] + h[None, :])
    async_copy.commit_group()


@gluon.jit
def _hide(scores, is_key, position, s, is_causal, KIND: gl.constexpr, WINDOW: gl.constexpr):
    """Mask padding, keys after the query, and keys before its window."""
    is_visible = is_key[None, :] & (position >= 0)[:, None]
    if KIND > 0:
        distance = position[:, None] - s[None, :]
        is_in_window = distance >= 0
        if WINDOW > 0:
            is_in_window = is_in_window & (distance < WINDOW)
        if KIND == 2:
            is_in_window = is_in_window | (is_causal == 0)
        is_visible = is_visible & is_in_window
    return gl.where(is_visible, scores, float("-inf"))


@gluon.jit(do_not_specialize=["splits", "tokens"])
def _attend(
    q_TNH,
    table_E6,
    table_stride,
    entry_I,
    count_E,
    count_stride,
    causal_E,
    out_PTNH,
    lse_PTN,
    stride,
    tokens,
    splits,
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
    pointer: gl.constexpr = gl.pointer_type(dtype)
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
    segment = gl.program_id(2) // splits
    split = gl.program_id(2) % splits
    entry = gl.load(entry_I + segment).to(gl.int64)
    kv_6 = table_E6 + entry * table_stride
    length = gl.load(count_E + entry * count_stride).to(gl.int32)
    if KIND == 2:
        is_causal = gl.load(causal_E + entry)
    else:
        is_causal = KIND
    first = gl.program_id(0) * BM
    if KIND == 1:
        first = (gl.num_programs(0) - 1 - gl.program_id(0)) * BM
    # The range of blocks is that of `attention.py`.
    prefix_count = gl.load(kv_6 + 2).to(gl.int32)
    own_count = gl.load(kv_6 + 5).to(gl.int32)
    keys = (gl.load(kv_6), gl.load(kv_6 + 3))
    values = (gl.load(kv_6 + 1), gl.load(kv_6 + 4))
    counts = (prefix_count, own_count)
    prefix_blocks = gl.cdiv(prefix_count, BN)
    start_position = prefix_count + own_count - length
    first_position = start_position + first // G
    last_position = start_position + (first + BM - 1) // G
    first_block = 0
    end_block = prefix_blocks + gl.cdiv(own_count, BN)
    if KIND > 0:
        causal_end = prefix_blocks + gl.cdiv(gl.maximum(last_position + 1 - prefix_count, 0), BN)
        end_block = gl.where(is_causal != 0, gl.minimum(end_block, causal_end), end_block)
        if WINDOW > 0:
            earliest = gl.maximum(first_position - (WINDOW - 1), 0)
            in_own = prefix_blocks + gl.maximum(earliest - prefix_count, 0) // BN
            first_block = gl.where(earliest < prefix_count, earliest // BN, in_own)
            # Queries beyond the segment's tokens may see nothing.
            first_block = gl.where(is_causal != 0, gl.minimum(first_block, end_block), 0)
    begin = first_block + split * (end_block - first_block) // splits
    end = first_block + (split + 1) * (end_block - first_block) // splits

    q_s = gl.allocate_shared_memory(dtype, [BM, H], tiled)
    k_s = gl.allocate_shared_memory(dtype, [BN, H], tiled)
    v_s = gl.allocate_shared_memory(dtype, [BN, H], tiled)
    p_s = gl.allocate_shared_memory(dtype, [BM, BN], tiled)
    x = gl.minimum(first + gl.arange(0, BM, layout=gl.SliceLayout(1, read)), stride * G - 1)
    row = (segment * stride + x // G) * N + kv * G + x % G
    h = gl.arange(0, H, layout=gl.SliceLayout(0, read))
    _fetch(q_s, q_TNH + row.to(gl.int64)[:, None] * H + h[None, :])
    if begin < end:
        _fetch_block(k_s, keys, counts, begin, kv, M, H, BN, pointer, read)
        _fetch_block(v_s, values, counts, begin, kv, M, H, BN, pointer, read)
    peak = gl.full([BM], float("-inf"), gl.float32, rows)
    sums = gl.zeros([BM, BN], gl.float32, score_layout)
    nothing = gl.zeros([BM, BN], gl.float32, score_layout)
    out = gl.zeros([BM, H], gl.float32, out_layout)
    position = start_position + (first + gl.arange(0, BM, layout=rows)) // G
    for block in range(begin, end):
        async_copy.wait_group(1)
        fence_async_shared()
        _barrier()
        scores_on = warpgroup_mma(q_s, k_s.permute((1, 0)), nothing, use_acc=False, is_async=True)
        scores = warpgroup_mma_wait(0, deps=[scores_on])
        _barrier()
        after = gl.minimum(block + 1, end - 1)
        _fetch_block(k_s, keys, counts, after, kv, M, H, BN, pointer, read)

        in_prefix = block < prefix_blocks
        start = gl.where(in_prefix, block, block - prefix_blocks) * BN
        count = gl.where(in_prefix, prefix_count, own_count)
        before = gl.where(in_prefix, 0, prefix_count)
        is_edge = start + BN > count
        if KIND > 0:
            has_hidden = before + start + BN - 1 > first_position
            if WINDOW > 0:
                has_hidden = has_hidden | (before + start <= last_position - WINDOW)
            is_edge = is_edge | (has_hidden & (is_causal != 0))
        if is_edge:
            s = start + gl.arange(0, BN, layout=gl.SliceLayout(0, score_layout))
            scores = _hide(scores, s < count, position, before + s, is_causal, KIND, WINDOW)
        new_peak = gl.maximum(peak, gl.max(scores, 1))
        safe = gl.where(new_peak == float("-inf"), 0.0, new_peak) * LOG2_E
        decay = gl.exp2(peak * LOG2_E - safe)
        p = gl.exp2(scores * LOG2_E - safe[:, None])
        sums = sums * decay[:, None] + p
        peak = new_peak
        p_s.store(p.to(dtype))
        out = out * gl.convert_layout(decay, out_rows)[:, None]
        async_copy.wait_group(1)
        fence_async_shared()
        _barrier()
        out_on = warpgroup_mma(p_s, v_s, out, is_async=True)
        out = warpgroup_mma_wait(0, deps=[out_on])
        _barrier()
        _fetch_block(v_s, values, counts, after, kv, M, H, BN, pointer, read)
    async_copy.wait_group(0)
    total = gl.sum(sums, 1)
    safe_total = gl.where(total > 0, total, 1.0)
    lse = gl.where(total > 0, peak * LOG2_E + gl.log2(safe_total), float("-inf"))
    query = first + gl.arange(0, BM, layout=rows)
    at = split * tokens * N + (segment * stride + query // G) * N + kv * G + query % G
    gl.store(lse_PTN + at, lse, mask=query < stride * G)
    out = out / gl.convert_layout(safe_total, out_rows)[:, None]
    query = first + gl.arange(0, BM, layout=out_rows)
    at = split.to(gl.int64) * tokens * N + (segment * stride + query // G) * N + kv * G + query % G
    w = gl.arange(0, H, layout=gl.SliceLayout(0, out_layout))
    result = out.to(out_PTNH.dtype.element_ty)
    is_stored = (query < stride * G)[:, None] & (w >= 0)[None, :]
    gl.store(out_PTNH + at[:, None] * H + w[None, :], result, mask=is_stored)
