"""The heads between a layer's joined product and attention: normed, turned, put in their places.

A program has several heads of one token, all of one kind: queries, keys, or values where these are
not the raw keys.

T tokens, N query heads, M key heads, H head width, P half of it, X all of a row.
"""

from dataclasses import dataclass
from math import gcd

import triton
import triton.language as tl
from torch import Tensor

from dgemma.ops.kernels.launch import after, early


@dataclass(frozen=True, slots=True, kw_only=True)
class Heads:
    """The shape of a layer's heads, and the weights of their norms."""

    queries: int
    keys: int
    width: int
    q_weight: Tensor
    k_weight: Tensor
    has_value: bool  # otherwise values are the raw keys


@dataclass(frozen=True, slots=True)
class Cut:
    """Heads of a program, a power of two, and its warps. Found by `bench/gpu_cuts.py`."""

    heads: int
    warps: int


def cut(shape: Heads) -> Cut:
    """At most eight heads, as many as every kind can be divided by; a warp has two of them."""
    together = gcd(8, shape.queries, shape.keys)
    return Cut(together, max(1, together // 2))


def heads(
    qkv_TX: Tensor,
    shape: Heads,
    turns: tuple[Tensor, Tensor],
    place_6: Tensor,
    eps: float,
    form: Cut | None = None,
) -> Tensor:
    """Norm and turn the heads; returns the queries, writes keys and values to their slots.

    `place_6` as in `kernels/attention.py`: the slots are the last of the row's own.
    """
    form = form or cut(shape)
    length, count = len(qkv_TX), qkv_TX.shape[1] // shape.width
    q_TNH = qkv_TX.new_empty(length, shape.queries, shape.width)
    _heads[(length, count // form.heads)](
        qkv_TX,
        shape.q_weight,
        shape.k_weight,
        *turns,
        place_6,
        q_TNH,
        length,
        eps,
        X=qkv_TX.shape[1],
        N=shape.queries,
        M=shape.keys,
        H=shape.width,
        HAS_VALUE=shape.has_value,
        HEADS=form.heads,
        num_warps=form.warps,
        **early(),
    )
    return q_TNH


@triton.jit
def _heads(
    qkv_TX,
    q_weight_H,
    k_weight_H,
    cos_TP,
    sin_TP,
    place_6,
    q_TNH,
    length,
    eps,
    X: tl.constexpr,
    N: tl.constexpr,
    M: tl.constexpr,
    H: tl.constexpr,
    HAS_VALUE: tl.constexpr,
    HEADS: tl.constexpr,
    EARLY: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    begin = tl.program_id(1) * HEADS
    P: tl.constexpr = H // 2
    p = tl.arange(0, P)
    head = tl.arange(0, HEADS)
    # The norms' weights never change: they are read before the kernel waits.
    weight_H = k_weight_H if begin >= N else q_weight_H
    weight = tl.load(weight_H + p).to(tl.float32)[None, :]
    other = tl.load(weight_H + P + p).to(tl.float32)[None, :]
    after(EARLY)
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
    kind: tl.constexpr = q_TNH.dtype.element_ty
    if begin < N:
        to = q_TNH + (token * N + begin + head)[:, None] * H + p[None, :]
        tl.store(to, a.to(kind))
        tl.store(to + P, b.to(kind))
    else:
        slot = tl.load(place_6 + 5) - length + token
        keys = tl.multiple_of(tl.load(place_6 + 3).to(tl.pointer_type(kind)), 16)
        values = tl.multiple_of(tl.load(place_6 + 4).to(tl.pointer_type(kind)), 16)
        offset = (slot * M + (begin - N) % M + head)[:, None] * H + p[None, :]
        if begin < N + M:
            tl.store(keys + offset, a.to(kind))
            tl.store(keys + offset + P, b.to(kind))
        if (begin >= N + M) | (not HAS_VALUE):
            tl.store(values + offset, first.to(kind))
            tl.store(values + offset + P, second.to(kind))
