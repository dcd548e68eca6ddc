"""Attention over keys where they lie: a shared past, if there is one, and the row's own buffer.

Where the keys are is read from device memory, so that one captured graph serves every row and
length. Six int64 numbers say it:

    past keys, past values, their number,  own keys, own values, their number

The first two of each half are addresses of [slots, M, H] memory. The queries are the last tokens
of the row's own keys. Their heads share key heads in groups of G, which are laid side by side: a
program takes some of the X = L * G queries of one key head and one part of the keys; the parts of
a query are merged by a second kernel, in their order. A single part is written as it is. What an
8-bit product reads next is written in 8 bits (`merge_8.py`).

L queries, N query heads, M key heads, H head width, P parts.
"""

import os
from dataclasses import dataclass, replace
from functools import cache
from importlib.util import find_spec
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from dgemma.ops.kernels import merge_8
from dgemma.ops.kernels.experts import quantize
from dgemma.ops.kernels.launch import PROCESSORS, after, early, not_early

LOG2_E = tl.constexpr(1.4426950408889634)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """How the work is cut."""

    queries: int
    keys: int
    warps: int
    stages: int
    parts: int = 1  # of the keys
    slices: int = 1  # of the values' width; each needs all of the scores
    edges: bool = True  # hidden keys are looked for only in blocks that may hold some
    half: bool = True  # parts wait in float16 where the queries have 16 bits
    wide: bool = False  # by `wide_attention.py`, which has its own blocks of 64


def cut(queries: int, kv_heads: int, width: int) -> Cut:
    """For so many queries of each key head. Few do not fill a GPU: the keys are shared out too."""
    if queries <= 16:
        form = Cut(queries=16, keys=32, warps=4, stages=3, half=False)
        return replace(form, parts=max(1, PROCESSORS // kv_heads))
    if width > 256 and _has_wide():
        form = Cut(queries=64, keys=64, warps=8, stages=1, wide=True)
    elif width > 256:
        form = Cut(queries=128, keys=32, warps=8, stages=2, slices=2)
    else:
        form = Cut(queries=128, keys=64, warps=8, stages=2)
    programs = kv_heads * triton.cdiv(queries, form.queries) * form.slices
    return replace(form, parts=max(1, min(8, PROCESSORS // programs)))


@cache
def _has_wide() -> bool:
    """Hopper's matrix instructions, and a Triton that lets us name them."""
    if os.environ.get("TRITON_INTERPRET") == "1" or not torch.cuda.is_available():
        return False
    has_gluon = find_spec("triton.experimental.gluon") is not None
    return has_gluon and torch.cuda.get_device_capability()[0] == 9


def attention(
    q_LNH: Tensor, place_6: Tensor, kv_heads: int, window: int | None, form: Cut | None = None
) -> Tensor:
    """Attention with scale 1. Without a window every query sees all keys that `place_6` names.

    With one (0: no limit) a query sees its own key and the `window - 1` before it: the causal mode.
    """
    return _whole(*_attended(q_LNH, place_6, (kv_heads, window), form), q_LNH)


def attention_8(
    q_LNH: Tensor, place_6: Tensor, kv_heads: int, window: int | None, form: Cut | None = None
) -> tuple[Tensor, Tensor]:
    """The same for an 8-bit product: rows of all heads in 8 bits (e4m3), and their factors."""
    out_PLNH, log_PLN = _attended(q_LNH, place_6, (kv_heads, window), form)
    if 1 < len(out_PLNH) <= merge_8.MOST:
        return merge_8.merge(out_PLNH, log_PLN, q_LNH.dtype)
    return quantize(_whole(out_PLNH, log_PLN, q_LNH).flatten(1))


def _attended(
    q_LNH: Tensor, place_6: Tensor, heads_and_window: tuple[int, int | None], form: Cut | None
) -> tuple[Tensor, Tensor]:
    """What each part of the keys gives, and what it stands for."""
    length, heads, width = q_LNH.shape
    kv_heads, window = heads_and_window
    form = form or cut(length * (heads // kv_heads), kv_heads, width)
    out = _parts(q_LNH, form)
    if form.wide:
        from dgemma.ops.kernels import wide_attention

        wide_attention.attend(q_LNH, place_6, out, kv_heads, window)
    else:
        _launch(q_LNH, place_6, out, heads_and_window, form)
    return out


def _whole(out_PLNH: Tensor, log_PLN: Tensor, q_LNH: Tensor) -> Tensor:
    if len(out_PLNH) == 1:
        return out_PLNH[0]
    out_LNH = torch.empty_like(q_LNH)
    merge(out_PLNH, log_PLN, out_LNH)
    return out_LNH


def _launch(
    q_LNH: Tensor,
    place_6: Tensor,
    out: tuple[Tensor, Tensor],
    heads_and_window: tuple[int, int | None],
    form: Cut,
) -> None:
    length, heads, width = q_LNH.shape
    kv_heads, window = heads_and_window
    programs = triton.cdiv(length * (heads // kv_heads), form.queries)
    _attend[(programs, kv_heads * form.slices, form.parts)](
        q_LNH,
        place_6,
        *out,
        length,
        form.parts,
        N=heads,
        M=kv_heads,
        H=width,
        CAUSAL=window is not None,
        WINDOW=window or 0,
        BM=form.queries,
        BN=form.keys,
        SLICES=form.slices,
        EDGES=form.edges,
        num_warps=form.warps,
        num_stages=form.stages,
        **_early(length),
    )


def _early(length: int) -> dict[str, Any]:
    """A single token's kernels are launched early: they are short, and wait for little."""
    return early() if length == 1 else not_early()


def _parts(q_LNH: Tensor, form: Cut) -> tuple[Tensor, Tensor]:
    """Memory for the parts, and for their sums; a single one is the result itself.

    What waits is a mean of values, which come normalised: float16 holds it, to 11 bits.
    """
    size, device = (form.parts, *q_LNH.shape), q_LNH.device
    log_PLN = torch.empty(size[:-1], dtype=torch.float32, device=device)
    dtype = torch.float16 if form.half and q_LNH.dtype.itemsize == 2 else torch.float32
    if form.parts == 1:
        dtype = q_LNH.dtype
    return torch.empty(size, dtype=dtype, device=device), log_PLN


def merge(out_PLNH: Tensor, log_PLN: Tensor, out_LNH: Tensor) -> None:
    """The parts as one: a mean of theirs by the sums they stand for."""
    parts, length, heads = log_PLN.shape
    rows, width = length * heads, out_LNH.shape[-1]
    given = (out_PLNH, log_PLN, out_LNH)
    if rows < PROCESSORS:
        # Few rows have many parts: a row is shared out, and its parts are read at once.
        block, many = min(width, 128), triton.next_power_of_2(parts)
        _merge_few[(rows, width // block)](
            *given, H=width, BLOCK=block, PARTS=parts, P=many, num_warps=4, **_early(length)
        )
        return
    _merge[(triton.cdiv(rows, 4),)](
        *given, rows, H=width, ROWS=4, PARTS=parts, num_warps=4, **_early(length)
    )


@triton.jit(do_not_specialize=["parts"])
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
    EDGES: tl.constexpr,
    EARLY: tl.constexpr,
):
    W: tl.constexpr = H // SLICES
    G: tl.constexpr = N // M
    kv = tl.program_id(1) // SLICES
    side = tl.program_id(1) % SLICES
    part = tl.program_id(2)
    first = tl.program_id(0) * BM
    if CAUSAL:  # the last queries see most: they come first
        first = (tl.num_programs(0) - 1 - tl.program_id(0)) * BM
    x = first + tl.arange(0, BM)
    is_query = x < length * G
    row = (x // G) * N + kv * G + x % G
    h = tl.arange(0, H)
    w = side * W + tl.arange(0, W)
    kind: tl.constexpr = tl.pointer_type(q_LNH.dtype.element_ty)
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
    if CAUSAL:
        # The last query of this program sees nothing behind itself.
        high = tl.minimum(
            high, past_blocks + tl.cdiv(tl.maximum(last_place + 1 - past_count, 0), BN)
        )
        if WINDOW > 0:
            # Nor the first anything that its window has left.
            earliest = tl.maximum(first_place - (WINDOW - 1), 0)
            in_own = past_blocks + tl.maximum(earliest - past_count, 0) // BN
            low = tl.where(earliest < past_count, earliest // BN, in_own)
    begin = low + part * (high - low) // parts
    end = low + (part + 1) * (high - low) // parts
    after(EARLY)  # where the keys lie was said before the pass began
    q = tl.load(
        q_LNH + row.to(tl.int64)[:, None] * H + h[None, :], mask=is_query[:, None], other=0.0
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
        if CAUSAL:
            is_edge = is_edge | (before + start + BN - 1 > first_place)
            if WINDOW > 0:
                is_edge = is_edge | (before + start <= last_place - WINDOW)
        if EDGES:
            if is_edge:
                scores = _hide(scores, is_key, place, before + s, CAUSAL, WINDOW)
        else:
            scores = _hide(scores, is_key, place, before + s, CAUSAL, WINDOW)
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
    at = part.to(tl.int64) * length * N + row
    kept = out.to(out_PLNH.dtype.element_ty)
    tl.store(out_PLNH + at[:, None] * H + w[None, :], kept, mask=is_query[:, None])
    tl.store(log_PLN + at, log, mask=is_query)  # every slice has the same


@triton.jit
def _hide(scores, is_key, place, s, CAUSAL: tl.constexpr, WINDOW: tl.constexpr):
    """Minus infinity for what is no key, comes behind the query, or has left its window."""
    is_seen = is_key[None, :]
    if CAUSAL:
        back = place[:, None] - s[None, :]
        is_seen = is_seen & (back >= 0)
        if WINDOW > 0:
            is_seen = is_seen & (back < WINDOW)
    return tl.where(is_seen, scores, float("-inf"))


@triton.jit
def _merge(
    out_PLNH,
    log_PLN,
    out_LNH,
    rows,
    H: tl.constexpr,
    ROWS: tl.constexpr,
    PARTS: tl.constexpr,
    EARLY: tl.constexpr,
):
    after(EARLY)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    is_row = row < rows
    h = tl.arange(0, H)
    peak = tl.load(log_PLN + row, mask=is_row, other=0.0)
    for part in tl.static_range(1, PARTS):
        peak = tl.maximum(peak, tl.load(log_PLN + part * rows + row, mask=is_row, other=0.0))
    total = tl.zeros((ROWS,), dtype=tl.float32)
    out = tl.zeros((ROWS, H), dtype=tl.float32)
    for part in tl.static_range(PARTS):
        log = tl.load(log_PLN + part * rows + row, mask=is_row, other=0.0)
        share = tl.exp2(log - peak)
        total += share
        at = (part * rows + row).to(tl.int64) * H
        one = tl.load(out_PLNH + at[:, None] + h[None, :], mask=is_row[:, None], other=0.0)
        out += share[:, None] * one.to(tl.float32)
    at = out_LNH + row.to(tl.int64)[:, None] * H + h[None, :]
    tl.store(at, (out / total[:, None]).to(out_LNH.dtype.element_ty), mask=is_row[:, None])


@triton.jit
def _merge_few(
    out_PLNH,
    log_PLN,
    out_LNH,
    H: tl.constexpr,
    BLOCK: tl.constexpr,
    PARTS: tl.constexpr,
    P: tl.constexpr,
    EARLY: tl.constexpr,
):
    after(EARLY)
    row, rows = tl.program_id(0), tl.num_programs(0)
    h = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    p = tl.arange(0, P)
    log = tl.load(log_PLN + p * rows + row, mask=p < PARTS, other=float("-inf"))
    share = tl.exp2(log - tl.max(log, 0))
    at = (p * rows + row).to(tl.int64) * H
    part = tl.load(out_PLNH + at[:, None] + h[None, :], mask=(p < PARTS)[:, None], other=0.0)
    out = tl.sum(share[:, None] * part.to(tl.float32), 0) / tl.sum(share, 0)
    tl.store(out_LNH + row.to(tl.int64) * H + h, out.to(out_LNH.dtype.element_ty))
