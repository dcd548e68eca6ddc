"""Attention of all segments of a pass in one launch, over keys where they lie.

A segment is up to `stride` tokens of one sequence. It reads its keys in two places, a shared prefix
and the sequence's own buffer, whose addresses are read from device memory, so that one captured
graph serves every batch. Six int64 numbers of a KV table entry say where a layer's keys are:

    prefix keys, prefix values, their number,  own keys, own values, their number

The first two of each half are addresses of [slots, M, H] memory. The queries are the last `count`
tokens of the own keys. Query heads share key heads in groups of G, laid side by side: a program
takes some of the stride * G queries of one key head of a segment, and one part of the keys
(split-KV); a second kernel reduces the parts in their order. A single part is written as it is.
What an fp8 GEMM reads next is written in fp8 (`splitkv_reduce.py`).

T tokens, N query heads, M key heads, H head width, P parts, I segments, E table entries.
"""

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from dgemma.backends.cuda.configs import AttentionConfig, attention_config
from dgemma.backends.cuda.kernels import device, splitkv_reduce
from dgemma.backends.cuda.kernels.helpers import LEAST, TINY
from dgemma.backends.cuda.kernels.moe import quantize
from dgemma.backends.cuda.kernels.pdl import gdc_wait, no_pdl_kwargs, pdl_kwargs

LOG2_E = tl.constexpr(1.4426950408889634)
CANVAS, CAUSAL, MIXED = 0, 1, 2  # kinds of segments in a pass


@dataclass(frozen=True, slots=True, kw_only=True)
class Segments:
    """The segments of a pass, `stride` tokens apart, and what table entry each has."""

    entry_I: Tensor  # int32
    count_E: Tensor  # int64, rows may be apart: tokens of a segment; queries beyond are not used
    causal_E: Tensor  # int32: 1 if causal; read where the kind is MIXED
    stride: int
    kind: int

    @property
    def num_tokens(self) -> int:
        return len(self.entry_I) * self.stride


def attention(
    q_TNH: Tensor,
    table_E6: Tensor,
    segments: Segments,
    kv_heads: int,
    window: int,
    form: AttentionConfig | None = None,
) -> Tensor:
    """Attention with scale 1. A canvas sees all keys of its table entry.

    A causal query sees its own key and the `window - 1` before it (0: no limit).
    """
    return _whole(*_attended(q_TNH, table_E6, segments, (kv_heads, window), form), q_TNH)


def attention_fp8(
    q_TNH: Tensor,
    table_E6: Tensor,
    segments: Segments,
    kv_heads: int,
    window: int,
    form: AttentionConfig | None = None,
) -> tuple[Tensor, Tensor]:
    """The same for an fp8 GEMM: rows of all heads in e4m3, and their scales."""
    out_PTNH, log_PTN = _attended(q_TNH, table_E6, segments, (kv_heads, window), form)
    if 1 < len(out_PTNH) <= splitkv_reduce.MOST:
        return splitkv_reduce.merge(out_PTNH, log_PTN, q_TNH.dtype)
    return quantize(_whole(out_PTNH, log_PTN, q_TNH).flatten(1))


def _attended(
    q_TNH: Tensor,
    table_E6: Tensor,
    segments: Segments,
    heads_and_window: tuple[int, int],
    form: AttentionConfig | None,
) -> tuple[Tensor, Tensor]:
    """Partial outputs of each part of the keys, and the logarithms of their sums."""
    _, heads, width = q_TNH.shape
    kv_heads, _ = heads_and_window
    queries = segments.stride * (heads // kv_heads)
    form = form or attention_config(queries, kv_heads, width, len(segments.entry_I))
    out = _parts(q_TNH, form)
    if form.wide:
        from dgemma.backends.cuda.kernels import attention_wide

        attention_wide.attend(q_TNH, table_E6, segments, out, heads_and_window)
    else:
        _launch(q_TNH, table_E6, segments, out, heads_and_window, form)
    return out


def _whole(out_PTNH: Tensor, log_PTN: Tensor, q_TNH: Tensor) -> Tensor:
    if len(out_PTNH) == 1:
        return out_PTNH[0]
    out_TNH = torch.empty_like(q_TNH)
    merge(out_PTNH, log_PTN, out_TNH)
    return out_TNH


def _launch(
    q_TNH: Tensor,
    table_E6: Tensor,
    segments: Segments,
    out: tuple[Tensor, Tensor],
    heads_and_window: tuple[int, int],
    form: AttentionConfig,
) -> None:
    tokens, heads, width = q_TNH.shape
    kv_heads, window = heads_and_window
    programs = triton.cdiv(segments.stride * (heads // kv_heads), form.queries)
    _attend[(programs, kv_heads * form.slices, form.parts * len(segments.entry_I))](
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
        form.parts,
        N=heads,
        M=kv_heads,
        H=width,
        KIND=segments.kind,
        WINDOW=window,
        BM=form.queries,
        BN=form.keys,
        SLICES=form.slices,
        EDGES=form.edges,
        num_warps=form.warps,
        num_stages=form.stages,
        **_pdl(segments.stride),
    )


def _pdl(stride: int) -> dict[str, Any]:
    """Use PDL for single tokens: their kernels are short, and wait for little."""
    return pdl_kwargs() if stride == 1 else no_pdl_kwargs()


def _parts(q_TNH: Tensor, form: AttentionConfig) -> tuple[Tensor, Tensor]:
    """Memory for the parts, and for their sums; a single one is the result itself.

    What waits is a mean of values, which come normalised: float16 holds it, to 11 bits.
    """
    size, device = (form.parts, *q_TNH.shape), q_TNH.device
    log_PTN = torch.empty(size[:-1], dtype=torch.float32, device=device)
    dtype = torch.float16 if form.half and q_TNH.dtype.itemsize == 2 else torch.float32
    if form.parts == 1:
        dtype = q_TNH.dtype
    return torch.empty(size, dtype=dtype, device=device), log_PTN


def merge(out_PTNH: Tensor, log_PTN: Tensor, out_TNH: Tensor) -> None:
    """The parts as one: a mean of theirs by the sums they stand for."""
    parts, length, heads = log_PTN.shape
    rows, width = length * heads, out_TNH.shape[-1]
    given = (out_PTNH, log_PTN, out_TNH)
    if rows < device.num_sms():
        # Few rows have many parts: a row is shared out, and its parts are read at once.
        block, many = min(width, 128), triton.next_power_of_2(parts)
        _merge_few[(rows, width // block)](
            *given, H=width, BLOCK=block, PARTS=parts, P=many, num_warps=4, **_pdl(length)
        )
        return
    _merge[(triton.cdiv(rows, 4),)](
        *given, rows, H=width, ROWS=4, PARTS=parts, num_warps=4, **_pdl(length)
    )


@triton.jit(do_not_specialize=["parts", "tokens"])
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
    N: tl.constexpr,
    M: tl.constexpr,
    H: tl.constexpr,
    KIND: tl.constexpr,
    WINDOW: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    SLICES: tl.constexpr,
    EDGES: tl.constexpr,
    PDL: tl.constexpr,
):
    W: tl.constexpr = H // SLICES
    G: tl.constexpr = N // M
    kv = tl.program_id(1) // SLICES
    side = tl.program_id(1) % SLICES
    segment = tl.program_id(2) // parts
    part = tl.program_id(2) % parts
    entry = tl.load(entry_I + segment).to(tl.int64)
    place_6 = table_E6 + entry * table_stride
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
    w = side * W + tl.arange(0, W)
    kind: tl.constexpr = tl.pointer_type(q_TNH.dtype.element_ty)
    past_keys = tl.load(place_6)
    past_values = tl.load(place_6 + 1)
    past_count = tl.load(place_6 + 2).to(tl.int32)
    own_keys = tl.load(place_6 + 3)
    own_values = tl.load(place_6 + 4)
    own_count = tl.load(place_6 + 5).to(tl.int32)
    # Each part is a run of whole blocks of the two buffers, one behind the other.
    past_blocks = tl.cdiv(past_count, BN)
    zeroth = past_count + own_count - length  # where the first query stands
    first_place = zeroth + first // G
    last_place = zeroth + (first + BM - 1) // G
    low = 0
    high = past_blocks + tl.cdiv(own_count, BN)
    if KIND > 0:
        if is_causal:
            # The last query of this program sees nothing behind itself.
            high = tl.minimum(
                high, past_blocks + tl.cdiv(tl.maximum(last_place + 1 - past_count, 0), BN)
            )
            if WINDOW > 0:
                # Nor the first anything that its window has left.
                earliest = tl.maximum(first_place - (WINDOW - 1), 0)
                in_own = past_blocks + tl.maximum(earliest - past_count, 0) // BN
                low = tl.where(earliest < past_count, earliest // BN, in_own)
                # Queries beyond the segment's tokens may have nothing left to see.
                low = tl.minimum(low, high)
    begin = low + part * (high - low) // parts
    end = low + (part + 1) * (high - low) // parts
    gdc_wait(PDL)  # where the keys lie was said before the pass began
    q = tl.load(
        q_TNH + row.to(tl.int64)[:, None] * H + h[None, :], mask=is_query[:, None], other=0.0
    )
    place = zeroth + x // G
    peak = tl.full((BM,), float("-inf"), dtype=tl.float32)
    total = tl.zeros((BM,), dtype=tl.float32)
    out = tl.zeros((BM, W), dtype=tl.float32)
    for block in range(begin, end):
        in_past = block < past_blocks
        start = tl.where(in_past, block, block - past_blocks) * BN
        count = tl.where(in_past, past_count, own_count)
        keys = tl.multiple_of(tl.where(in_past, past_keys, own_keys).to(kind), 16)
        values = tl.multiple_of(tl.where(in_past, past_values, own_values).to(kind), 16)
        s = start + tl.arange(0, BN)
        is_key = s < count
        at = (s.to(tl.int64) * M + kv) * H
        k = tl.load(keys + at[:, None] + h[None, :], mask=is_key[:, None], other=0.0)
        scores = tl.dot(q, tl.trans(k))
        before = tl.where(in_past, 0, past_count)
        is_edge = start + BN > count
        if KIND > 0:
            hides = before + start + BN - 1 > first_place
            if WINDOW > 0:
                hides = hides | (before + start <= last_place - WINDOW)
            is_edge = is_edge | (hides & is_causal)
        if EDGES:
            if is_edge:
                scores = _hide(scores, is_key, place, before + s, is_causal, KIND, WINDOW)
        else:
            scores = _hide(scores, is_key, place, before + s, is_causal, KIND, WINDOW)
        new_peak = tl.maximum(peak, tl.max(scores, 1))
        # Before anything was seen the peak is minus infinity; take zero, and nothing is added.
        safe = tl.where(new_peak == float("-inf"), 0.0, new_peak) * LOG2_E
        fade = tl.exp2(peak * LOG2_E - safe)
        p = tl.exp2(scores * LOG2_E - safe[:, None])
        total = total * fade + tl.sum(p, 1)
        v = tl.load(values + at[:, None] + w[None, :], mask=is_key[:, None], other=0.0)
        out = tl.dot(p.to(v.dtype), v, out * fade[:, None])
        peak = new_peak
    some = tl.where(total > 0, total, 1.0)
    log = tl.where(total > 0, peak * LOG2_E + tl.log2(some), float("-inf"))
    out = out / some[:, None]
    at = part.to(tl.int64) * tokens * N + row
    kept = out.to(out_PTNH.dtype.element_ty)
    tl.store(out_PTNH + at[:, None] * H + w[None, :], kept, mask=is_query[:, None])
    tl.store(log_PTN + at, log, mask=is_query)  # every slice has the same


@triton.jit
def _hide(scores, is_key, place, s, is_causal, KIND: tl.constexpr, WINDOW: tl.constexpr):
    """Minus infinity for what is no key, comes behind the query, or has left its window."""
    is_seen = is_key[None, :]
    if KIND > 0:
        back = place[:, None] - s[None, :]
        is_near = back >= 0
        if WINDOW > 0:
            is_near = is_near & (back < WINDOW)
        if KIND == 2:
            is_near = is_near | (is_causal == 0)
        is_seen = is_seen & is_near
    return tl.where(is_seen, scores, float("-inf"))


@triton.jit
def _merge(
    out_PTNH,
    log_PTN,
    out_TNH,
    rows,
    H: tl.constexpr,
    ROWS: tl.constexpr,
    PARTS: tl.constexpr,
    PDL: tl.constexpr,
):
    gdc_wait(PDL)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    is_row = row < rows
    h = tl.arange(0, H)
    peak = tl.load(log_PTN + row, mask=is_row, other=0.0)
    for part in tl.static_range(1, PARTS):
        peak = tl.maximum(peak, tl.load(log_PTN + part * rows + row, mask=is_row, other=0.0))
    peak = tl.maximum(peak, LEAST)  # padding has no keys in any part
    total = tl.zeros((ROWS,), dtype=tl.float32)
    out = tl.zeros((ROWS, H), dtype=tl.float32)
    for part in tl.static_range(PARTS):
        log = tl.load(log_PTN + part * rows + row, mask=is_row, other=0.0)
        share = tl.exp2(log - peak)
        total += share
        at = (part * rows + row).to(tl.int64) * H
        one = tl.load(out_PTNH + at[:, None] + h[None, :], mask=is_row[:, None], other=0.0)
        out += share[:, None] * one.to(tl.float32)
    at = out_TNH + row.to(tl.int64)[:, None] * H + h[None, :]
    tl.store(
        at,
        (out / tl.maximum(total, TINY)[:, None]).to(out_TNH.dtype.element_ty),
        mask=is_row[:, None],
    )


@triton.jit
def _merge_few(
    out_PTNH,
    log_PTN,
    out_TNH,
    H: tl.constexpr,
    BLOCK: tl.constexpr,
    PARTS: tl.constexpr,
    P: tl.constexpr,
    PDL: tl.constexpr,
):
    gdc_wait(PDL)
    row, rows = tl.program_id(0), tl.num_programs(0)
    h = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    p = tl.arange(0, P)
    log = tl.load(log_PTN + p * rows + row, mask=p < PARTS, other=float("-inf"))
    share = tl.exp2(log - tl.maximum(tl.max(log, 0), LEAST))
    at = (p * rows + row).to(tl.int64) * H
    part = tl.load(out_PTNH + at[:, None] + h[None, :], mask=(p < PARTS)[:, None], other=0.0)
    out = tl.sum(share[:, None] * part.to(tl.float32), 0) / tl.maximum(tl.sum(share, 0), TINY)
    tl.store(out_TNH + row.to(tl.int64) * H + h, out.to(out_TNH.dtype.element_ty))
