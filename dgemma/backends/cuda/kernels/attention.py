"""Attention of all segments of a pass in one launch, over keys in two buffers (split-KV).

A segment is up to `stride` tokens of one sequence. Its keys are in a shared prefix and in the
sequence's own buffer, whose addresses are read from device memory, so that one captured graph
serves every batch. A KV table entry has six int64 for each layer:

    prefix keys, prefix values, their number,  own keys, own values, their number

The first two of each half are addresses of [slots, M, H] memory. The queries are the last `count`
tokens of the own keys. The G query heads of a key head are folded into the query length: a program
takes some of the stride * G queries of one key head of a segment, and one split of the keys. A
second kernel reduces the splits in their order; a single one is written as it is. For an fp8 GEMM
the reduction quantizes its rows, rounded to the residual's dtype first.

T tokens, N query heads, M key heads, H head width, X = N * H, P splits, I segments, E entries.
"""

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from dgemma.backends.cuda import device
from dgemma.backends.cuda.configs import AttentionConfig, attention_config
from dgemma.backends.cuda.kernels.common import (
    REGISTERS,
    fp8_scale,
    gdc_wait,
    launch,
    no_pdl_kwargs,
    pdl_kwargs,
)
from dgemma.backends.cuda.kernels.residual_norm import quantize

LOG2_E = tl.constexpr(1.4426950408889634)
CANVAS, CAUSAL, MIXED = 0, 1, 2  # kinds of segments in a pass
MAX_FP8_SPLITS = 8  # with more, the reduction and the quantization are two kernels
# Of a split without keys: its log-sum-exp is raised to the first, its sum to the second.
MIN_LSE, MIN_SUM = tl.constexpr(-1e30), tl.constexpr(1e-30)
TRITON_DTYPES = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}


@dataclass(frozen=True, slots=True, kw_only=True)
class Segments:
    """The segments of a pass, `stride` tokens each, and their table entries."""

    entry_I: Tensor  # int32
    count_E: Tensor  # int64, strided: tokens of a segment; queries beyond are padding
    causal_E: Tensor  # int32: 1 if causal; read where the kind is MIXED
    stride: int
    kind: int

    @property
    def num_tokens(self) -> int:
        return len(self.entry_I) * self.stride


def attend(
    q_TNH: Tensor,
    table_E6: Tensor,
    segments: Segments,
    kv_heads: int,
    window: int,
    config: AttentionConfig | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention with scale 1 over each split of the keys: outputs and log-sum-exps (base 2).

    A canvas sees all keys of its table entry; a causal query its own key and the `window - 1`
    before it (0: no limit).
    """
    heads, width = q_TNH.shape[1:]
    queries = segments.stride * (heads // kv_heads)
    config = config or attention_config(queries, kv_heads, width, len(segments.entry_I))
    out = _empty_splits(q_TNH, config)
    block = 64 if config.wide else config.queries
    grid = (triton.cdiv(queries, block), kv_heads, config.splits * len(segments.entry_I))
    arguments = (
        q_TNH,
        table_E6,
        table_E6.stride(0),
        segments.entry_I,
        segments.count_E,
        segments.count_E.stride(0),
        segments.causal_E,
        *out,
        segments.stride,
        len(q_TNH),
        config.splits,
    )
    sizes = {"N": heads, "M": kv_heads, "H": width, "KIND": segments.kind, "WINDOW": window}
    if config.wide:
        from dgemma.backends.cuda.kernels import attention_wide

        launch(attention_wide._attend, grid)(*arguments, **sizes, BM=64, BN=64, num_warps=8)
        return out
    launch(_attend, (grid[0], kv_heads * config.v_slices, grid[2]))(
        *arguments,
        **sizes,
        BM=config.queries,
        BN=config.keys,
        V_SLICES=config.v_slices,
        MASK_EDGES=config.mask_edges,
        num_warps=config.warps,
        num_stages=config.stages,
        **_pdl(segments.stride),
    )
    return out


def _pdl(stride: int) -> dict[str, Any]:
    """Use PDL for single tokens: their kernels are short, and wait for little."""
    return pdl_kwargs() if stride == 1 else no_pdl_kwargs()


def _empty_splits(q_TNH: Tensor, config: AttentionConfig) -> tuple[Tensor, Tensor]:
    """Allocate the splits' outputs and log-sum-exps; a single split is the result itself.

    Outputs are means of values, which are normalized: float16 holds them to 11 bits.
    """
    size, on = (config.splits, *q_TNH.shape), q_TNH.device
    lse_PTN = torch.empty(size[:-1], dtype=torch.float32, device=on)
    is_half = config.fp16_splits and q_TNH.dtype.itemsize == 2
    dtype = torch.float16 if is_half else torch.float32
    if config.splits == 1:
        dtype = q_TNH.dtype
    return torch.empty(size, dtype=dtype, device=on), lse_PTN


def reduce_splits(out_PTNH: Tensor, lse_PTN: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the mean of the splits' outputs, weighted by their exp-sums, [T, N, H]."""
    if len(out_PTNH) == 1:
        return out_PTNH[0]
    splits, length, heads, width = out_PTNH.shape
    rows, out_TNH = length * heads, out_PTNH.new_empty(out_PTNH.shape[1:], dtype=dtype)
    tensors = (out_PTNH, lse_PTN, out_TNH)
    if rows < device.num_sms():
        # Few rows have many splits: several programs share a row and read all splits at once.
        block, padded = min(width, 128), triton.next_power_of_2(splits)
        launch(_reduce_many_splits, (rows, width // block))(
            *tensors, H=width, BLOCK=block, SPLITS=splits, P=padded, num_warps=4, **_pdl(length)
        )
    else:
        launch(_reduce_splits, (triton.cdiv(rows, 4),))(
            *tensors, rows, H=width, ROWS=4, SPLITS=splits, num_warps=4, **_pdl(length)
        )
    return out_TNH


def reduce_splits_fp8(
    out_PTNH: Tensor, lse_PTN: Tensor, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Reduce and quantize: rows of all heads in e4m3, [T, X], and their scales.

    Rows are rounded to `dtype` in between, whether by one kernel or by two.
    """
    splits, length, heads, width = out_PTNH.shape
    if not 1 < splits <= MAX_FP8_SPLITS:
        return quantize(reduce_splits(out_PTNH, lse_PTN, dtype).flatten(1))
    out_TX = out_PTNH.new_empty(length, heads * width, dtype=torch.float8_e4m3fn)
    scale_T = out_PTNH.new_empty(length, dtype=torch.float32)
    launch(_reduce_splits_fp8, (length,))(
        out_PTNH,
        lse_PTN,
        out_TX,
        scale_T,
        length,
        N=heads,
        NS=triton.next_power_of_2(heads),
        H=width,
        SPLITS=splits,
        DTYPE=TRITON_DTYPES[dtype],
        num_warps=8,
        maxnreg=REGISTERS,
        **pdl_kwargs(),
    )
    return out_TX, scale_T


@triton.jit(do_not_specialize=["splits", "tokens"])
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
    N: tl.constexpr,
    M: tl.constexpr,
    H: tl.constexpr,
    KIND: tl.constexpr,
    WINDOW: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    V_SLICES: tl.constexpr,
    MASK_EDGES: tl.constexpr,
    PDL: tl.constexpr,
):
    W: tl.constexpr = H // V_SLICES
    G: tl.constexpr = N // M
    kv = tl.program_id(1) // V_SLICES
    v_slice = tl.program_id(1) % V_SLICES
    segment = tl.program_id(2) // splits
    split = tl.program_id(2) % splits
    entry = tl.load(entry_I + segment).to(tl.int64)
    kv_6 = table_E6 + entry * table_stride
    length = tl.load(count_E + entry * count_stride).to(tl.int32)
    if KIND == 2:
        is_causal = tl.load(causal_E + entry) != 0
    else:
        is_causal = KIND == 1
    first = tl.program_id(0) * BM
    if KIND == 1:  # the last queries see most: they come first
        first = (tl.num_programs(0) - 1 - tl.program_id(0)) * BM
    x = first + tl.arange(0, BM)
    is_query = x < stride * G
    row = (segment * stride + x // G) * N + kv * G + x % G
    h = tl.arange(0, H)
    w = v_slice * W + tl.arange(0, W)
    pointer: tl.constexpr = tl.pointer_type(q_TNH.dtype.element_ty)
    prefix_keys = tl.load(kv_6)
    prefix_values = tl.load(kv_6 + 1)
    prefix_count = tl.load(kv_6 + 2).to(tl.int32)
    own_keys = tl.load(kv_6 + 3)
    own_values = tl.load(kv_6 + 4)
    own_count = tl.load(kv_6 + 5).to(tl.int32)
    # Each split is a run of whole blocks of the two buffers in sequence.
    prefix_blocks = tl.cdiv(prefix_count, BN)
    start_position = prefix_count + own_count - length  # of the first query
    first_position = start_position + first // G
    last_position = start_position + (first + BM - 1) // G
    first_block = 0
    end_block = prefix_blocks + tl.cdiv(own_count, BN)
    if KIND > 0:
        if is_causal:
            # The last query of this program sees nothing after itself.
            causal_count = tl.maximum(last_position + 1 - prefix_count, 0)
            end_block = tl.minimum(end_block, prefix_blocks + tl.cdiv(causal_count, BN))
            if WINDOW > 0:
                # The first query sees nothing before its window.
                earliest = tl.maximum(first_position - (WINDOW - 1), 0)
                in_own = prefix_blocks + tl.maximum(earliest - prefix_count, 0) // BN
                first_block = tl.where(earliest < prefix_count, earliest // BN, in_own)
                # Queries beyond the segment's tokens may see nothing.
                first_block = tl.minimum(first_block, end_block)
    begin = first_block + split * (end_block - first_block) // splits
    end = first_block + (split + 1) * (end_block - first_block) // splits
    gdc_wait(PDL)  # the KV table was written before the pass
    q = tl.load(
        q_TNH + row.to(tl.int64)[:, None] * H + h[None, :], mask=is_query[:, None], other=0.0
    )
    position = start_position + x // G
    peak = tl.full((BM,), float("-inf"), dtype=tl.float32)
    total = tl.zeros((BM,), dtype=tl.float32)
    out = tl.zeros((BM, W), dtype=tl.float32)
    for block in range(begin, end):
        in_prefix = block < prefix_blocks
        start = tl.where(in_prefix, block, block - prefix_blocks) * BN
        count = tl.where(in_prefix, prefix_count, own_count)
        keys = tl.multiple_of(tl.where(in_prefix, prefix_keys, own_keys).to(pointer), 16)
        values = tl.multiple_of(tl.where(in_prefix, prefix_values, own_values).to(pointer), 16)
        s = start + tl.arange(0, BN)
        is_key = s < count
        at = (s.to(tl.int64) * M + kv) * H
        k = tl.load(keys + at[:, None] + h[None, :], mask=is_key[:, None], other=0.0)
        scores = tl.dot(q, tl.trans(k))
        before = tl.where(in_prefix, 0, prefix_count)
        is_edge = start + BN > count
        if KIND > 0:
            has_hidden = before + start + BN - 1 > first_position
            if WINDOW > 0:
                has_hidden = has_hidden | (before + start <= last_position - WINDOW)
            is_edge = is_edge | (has_hidden & is_causal)
        if MASK_EDGES:
            if is_edge:
                scores = _hide(scores, is_key, position, before + s, is_causal, KIND, WINDOW)
        else:
            scores = _hide(scores, is_key, position, before + s, is_causal, KIND, WINDOW)
        new_peak = tl.maximum(peak, tl.max(scores, 1))
        # The peak is minus infinity until a key is visible; zero avoids inf - inf.
        safe = tl.where(new_peak == float("-inf"), 0.0, new_peak) * LOG2_E
        decay = tl.exp2(peak * LOG2_E - safe)
        p = tl.exp2(scores * LOG2_E - safe[:, None])
        total = total * decay + tl.sum(p, 1)
        v = tl.load(values + at[:, None] + w[None, :], mask=is_key[:, None], other=0.0)
        out = tl.dot(p.to(v.dtype), v, out * decay[:, None])
        peak = new_peak
    safe_total = tl.where(total > 0, total, 1.0)
    lse = tl.where(total > 0, peak * LOG2_E + tl.log2(safe_total), float("-inf"))
    out = out / safe_total[:, None]
    at = split.to(tl.int64) * tokens * N + row
    result = out.to(out_PTNH.dtype.element_ty)
    tl.store(out_PTNH + at[:, None] * H + w[None, :], result, mask=is_query[:, None])
    tl.store(lse_PTN + at, lse, mask=is_query)  # every slice has the same


@triton.jit
def _hide(scores, is_key, position, s, is_causal, KIND: tl.constexpr, WINDOW: tl.constexpr):
    """Mask padding, keys after the query, and keys before its window."""
    is_visible = is_key[None, :]
    if KIND > 0:
        distance = position[:, None] - s[None, :]
        is_in_window = distance >= 0
        if WINDOW > 0:
            is_in_window = is_in_window & (distance < WINDOW)
        if KIND == 2:
            is_in_window = is_in_window | (is_causal == 0)
        is_visible = is_visible & is_in_window
    return tl.where(is_visible, scores, float("-inf"))


@triton.jit
def _weighted_splits(
    out_PTNH, lse_PTN, row, rows, is_row, h, ROWS: tl.constexpr, SPLITS: tl.constexpr
):
    """Reduce the splits of some rows, in their order: [ROWS, H] in float32."""
    peak = tl.load(lse_PTN + row, mask=is_row, other=0.0)
    for split in tl.static_range(1, SPLITS):
        peak = tl.maximum(peak, tl.load(lse_PTN + split * rows + row, mask=is_row, other=0.0))
    peak = tl.maximum(peak, MIN_LSE)  # padding has no keys in any split
    H: tl.constexpr = h.shape[0]
    total = tl.zeros((ROWS,), dtype=tl.float32)
    out = tl.zeros((ROWS, H), dtype=tl.float32)
    for split in tl.static_range(SPLITS):
        lse = tl.load(lse_PTN + split * rows + row, mask=is_row, other=0.0)
        weight = tl.exp2(lse - peak)
        total += weight
        at = (split * rows + row).to(tl.int64) * H
        values = tl.load(out_PTNH + at[:, None] + h[None, :], mask=is_row[:, None], other=0.0)
        out += weight[:, None] * values.to(tl.float32)
    return out / tl.maximum(total, MIN_SUM)[:, None]


@triton.jit
def _reduce_splits(
    out_PTNH,
    lse_PTN,
    out_TNH,
    rows,
    H: tl.constexpr,
    ROWS: tl.constexpr,
    SPLITS: tl.constexpr,
    PDL: tl.constexpr,
):
    gdc_wait(PDL)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    is_row = row < rows
    h = tl.arange(0, H)
    out = _weighted_splits(out_PTNH, lse_PTN, row, rows, is_row, h, ROWS, SPLITS)
    at = out_TNH + row.to(tl.int64)[:, None] * H + h[None, :]
    tl.store(at, out.to(out_TNH.dtype.element_ty), mask=is_row[:, None])


@triton.jit
def _reduce_many_splits(
    out_PTNH,
    lse_PTN,
    out_TNH,
    H: tl.constexpr,
    BLOCK: tl.constexpr,
    SPLITS: tl.constexpr,
    P: tl.constexpr,
    PDL: tl.constexpr,
):
    gdc_wait(PDL)
    row, rows = tl.program_id(0), tl.num_programs(0)
    h = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    p = tl.arange(0, P)
    lse = tl.load(lse_PTN + p * rows + row, mask=p < SPLITS, other=float("-inf"))
    weight = tl.exp2(lse - tl.maximum(tl.max(lse, 0), MIN_LSE))
    at = (p * rows + row).to(tl.int64) * H
    values = tl.load(out_PTNH + at[:, None] + h[None, :], mask=(p < SPLITS)[:, None], other=0.0)
    total = tl.sum(weight[:, None] * values.to(tl.float32), 0)
    out = total / tl.maximum(tl.sum(weight, 0), MIN_SUM)
    tl.store(out_TNH + row.to(tl.int64) * H + h, out.to(out_TNH.dtype.element_ty))


@triton.jit
def _reduce_splits_fp8(
    out_PTNH,
    lse_PTN,
    out_TX,
    scale_T,
    length,
    N: tl.constexpr,
    NS: tl.constexpr,
    H: tl.constexpr,
    SPLITS: tl.constexpr,
    DTYPE: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program per token, with all of its heads."""
    gdc_wait(PDL)
    token = tl.program_id(0)
    n = tl.arange(0, NS)
    h = tl.arange(0, H)
    is_head = n < N
    row = token * N + n
    out = _weighted_splits(out_PTNH, lse_PTN, row, length * N, is_head, h, NS, SPLITS)
    x = out.to(DTYPE).to(tl.float32)
    scale = fp8_scale(tl.max(tl.abs(x), 1))
    tl.store(scale_T + token, scale)
    at = row.to(tl.int64)[:, None] * H + h[None, :]
    tl.store(out_TX + at, (x / scale).to(tl.float8e4nv), mask=is_head[:, None])
