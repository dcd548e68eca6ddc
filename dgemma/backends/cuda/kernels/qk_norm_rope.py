"""QK norm, RoPE and the KV cache write, between the merged QKV GEMM and attention.

A program has several heads of one token, all queries, all keys, or all values where these are not
the raw keys.

T tokens, N query heads, M key heads, H head width, P half of it, X all of a row.
"""

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from dgemma.backends.cuda.configs import heads_config
from dgemma.backends.cuda.kernels.attention import Segments
from dgemma.backends.cuda.kernels.common import gdc_wait, launch, pdl_kwargs


@dataclass(frozen=True, slots=True, kw_only=True)
class Heads:
    """The shape of a layer's heads, and the weights of their norms."""

    queries: int
    keys: int
    width: int
    q_weight: Tensor
    k_weight: Tensor
    has_value: bool  # otherwise values are the raw keys


def qk_norm_rope(
    qkv_TX: Tensor,
    shape: Heads,
    cos_sin: tuple[Tensor, Tensor],
    table_E6: Tensor,
    segments: Segments,
    eps: float,
) -> Tensor:
    """Normalize and rotate the heads; returns the queries, writes keys and values to the KV cache.

    Their slots are the last `count` of a segment's own keys (`attention.py`); padding is not
    written.
    """
    config = heads_config(shape.queries, shape.keys)
    length, count = len(qkv_TX), qkv_TX.shape[1] // shape.width
    q_TNH = qkv_TX.new_empty(length, shape.queries, shape.width)
    launch(_qk_norm_rope, (length, count // config.heads))(
        qkv_TX,
        shape.q_weight,
        shape.k_weight,
        *cos_sin,
        table_E6,
        table_E6.stride(0),
        segments.entry_I,
        segments.count_E,
        segments.count_E.stride(0),
        q_TNH,
        segments.stride,
        eps,
        X=qkv_TX.shape[1],
        N=shape.queries,
        M=shape.keys,
        H=shape.width,
        HAS_VALUE=shape.has_value,
        HEADS=config.heads,
        num_warps=config.warps,
        **pdl_kwargs(),
    )
    return q_TNH


@triton.jit
def _qk_norm_rope(
    qkv_TX,
    q_weight_H,
    k_weight_H,
    cos_TP,
    sin_TP,
    table_E6,
    table_stride,
    entry_I,
    count_E,
    count_stride,
    q_TNH,
    stride,
    eps,
    X: tl.constexpr,
    N: tl.constexpr,
    M: tl.constexpr,
    H: tl.constexpr,
    HAS_VALUE: tl.constexpr,
    HEADS: tl.constexpr,
    PDL: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    begin = tl.program_id(1) * HEADS
    P: tl.constexpr = H // 2
    p = tl.arange(0, P)
    head = tl.arange(0, HEADS)
    # Weights never change: they are loaded before the wait.
    weight_H = k_weight_H if begin >= N else q_weight_H
    weight = tl.load(weight_H + p).to(tl.float32)[None, :]
    other = tl.load(weight_H + P + p).to(tl.float32)[None, :]
    gdc_wait(PDL)
    at = qkv_TX + token * X + (begin + head)[:, None] * H + p[None, :]
    first = tl.load(at).to(tl.float32)
    second = tl.load(at + P).to(tl.float32)
    cos = tl.load(cos_TP + token * P + p)[None, :]
    sin = tl.load(sin_TP + token * P + p)[None, :]
    scale = tl.rsqrt((tl.sum(first * first, 1) + tl.sum(second * second, 1)) / H + eps)
    first = first * scale[:, None]
    second = second * scale[:, None]
    a = first * weight * cos - second * other * sin
    b = second * other * cos + first * weight * sin
    dtype: tl.constexpr = q_TNH.dtype.element_ty
    if begin < N:
        to = q_TNH + (token * N + begin + head)[:, None] * H + p[None, :]
        tl.store(to, a.to(dtype))
        tl.store(to + P, b.to(dtype))
    else:
        segment = token // stride
        index = token - segment * stride
        entry = tl.load(entry_I + segment).to(tl.int64)
        kv_6 = table_E6 + entry * table_stride
        length = tl.load(count_E + entry * count_stride)
        slot = tl.load(kv_6 + 5) - length + index
        keys = tl.multiple_of(tl.load(kv_6 + 3).to(tl.pointer_type(dtype)), 16)
        values = tl.multiple_of(tl.load(kv_6 + 4).to(tl.pointer_type(dtype)), 16)
        offset = (slot * M + (begin - N) % M + head)[:, None] * H + p[None, :]
        if index < length:
            if begin < N + M:
                tl.store(keys + offset, a.to(dtype))
                tl.store(keys + offset + P, b.to(dtype))
            if (begin >= N + M) | (not HAS_VALUE):
                tl.store(values + offset, first.to(dtype))
                tl.store(values + offset + P, second.to(dtype))
