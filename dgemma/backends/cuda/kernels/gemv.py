"""GEMV for one row or very few: the weight is streamed, and each output is a sum of its own.

Such a GEMM takes as long as its weight takes to be read. A program computes a few outputs over the
whole depth; enough of them run in parallel to saturate the memory, and nothing is split-K. Rows
beyond the first read the weight from the cache. Weights are 16-bit, or fp8 with a scale for each
output; activations are never quantized here.

T rows, D depth, X outputs, I outputs of a gated GEMV, E experts.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from dgemma.backends.cuda.configs import GemvConfig, gemv_config
from dgemma.backends.cuda.kernels.common import (
    gdc_wait,
    gelu_mul,
    inverse_rms,
    launch,
    pdl_kwargs,
)


def gemv(
    x_TD: Tensor, weight_XD: Tensor, scale_X: Tensor | None = None, config: GemvConfig | None = None
) -> Tensor:
    """Return x @ weight.T."""
    out_TX = x_TD.new_empty(len(x_TD), len(weight_XD))
    _launch(x_TD, (weight_XD, scale_X), out_TX, config)
    return out_TX


def gemv_gelu_mul(
    x_TD: Tensor, weight_XD: Tensor, scale_X: Tensor | None = None, config: GemvConfig | None = None
) -> Tensor:
    """Return gelu(gate) * up for a weight that holds the gate half first."""
    out_TI = x_TD.new_empty(len(x_TD), len(weight_XD) // 2)
    _launch(x_TD, (weight_XD, scale_X), out_TI, config, is_gated=True)
    return out_TI


def logits(
    x_TD: Tensor,
    weight: tuple[Tensor, Tensor | None],
    softcap: float | None,
    out_TV: Tensor,
) -> Tensor:
    """Write soft-capped float32 logits to `out_TV`."""
    _launch(x_TD, weight, out_TV, None, softcap=softcap or 0.0)
    return out_TV


def _launch(
    x_TD: Tensor,
    weight: tuple[Tensor, Tensor | None],
    out_TX: Tensor,
    config: GemvConfig | None,
    *,
    is_gated: bool = False,
    softcap: float = 0.0,
) -> None:
    (rows, depth), outputs = x_TD.shape, out_TX.shape[1]
    weight_XD, scale_X = weight
    config = config or gemv_config(outputs, depth, is_gated=is_gated, is_fp8=scale_X is not None)
    # One dimension: a second one is limited to 65535 programs.
    launch(_gemv, (rows * triton.cdiv(outputs, config.outputs),))(
        x_TD,
        weight_XD,
        out_TX if scale_X is None else scale_X,
        out_TX,
        rows,
        HAS_SCALE=scale_X is not None,
        D=depth,
        X=outputs,
        GATED=is_gated,
        CAP=softcap,
        BN=config.outputs,
        CHUNK=config.chunk,
        num_warps=config.warps,
        **pdl_kwargs(),
    )


def residual_add_norm_router(
    x_TD: Tensor,
    attended_TD: Tensor,
    weights: tuple[Tensor, Tensor, Tensor, Tensor],
    router_ED: Tensor,
    eps: float,
) -> tuple[tuple[Tensor, Tensor, Tensor], Tensor]:
    """Compute `residual_norm.residual_add_norm` and the router's logits, as one split, [1, T, E].

    Every program normalizes the row again, which is cheaper than another launch.
    """
    rows, width = x_TD.shape
    num_experts, outputs = len(router_ED), 4
    out_TD, dense_TD, expert_TD = (torch.empty_like(x_TD) for _ in range(3))
    logits_1TE = torch.empty(1, rows, num_experts, dtype=torch.float32, device=x_TD.device)
    launch(_residual_add_norm_router, (rows, triton.cdiv(num_experts, outputs)))(
        x_TD,
        attended_TD,
        *weights,
        router_ED,
        out_TD,
        dense_TD,
        expert_TD,
        logits_1TE,
        eps,
        D=width,
        E=num_experts,
        BN=outputs,
        BLOCK=triton.next_power_of_2(width),
        num_warps=4,
        **pdl_kwargs(),
    )
    return (out_TD, dense_TD, expert_TD), logits_1TE


@triton.jit
def _weight_tile(
    weight, n, d, X: tl.constexpr, D: tl.constexpr, BN: tl.constexpr, CHUNK: tl.constexpr
):
    """Load [BN, CHUNK] of a weight; masked only where a tile can exceed it."""
    at = n.to(tl.int64)[:, None] * D + d[None, :]
    if (X % BN == 0) & (D % CHUNK == 0):
        w = tl.load(weight + at)
    else:
        w = tl.load(weight + at, mask=(n < X)[:, None] & (d < D)[None, :], other=0.0)
    return w


@triton.jit
def _gemv(
    x_TD,
    weight_XD,
    scale_X,
    out_TX,
    rows,
    D: tl.constexpr,
    X: tl.constexpr,
    GATED: tl.constexpr,
    HAS_SCALE: tl.constexpr,
    CAP: tl.constexpr,
    BN: tl.constexpr,
    CHUNK: tl.constexpr,
    PDL: tl.constexpr,
):
    # Rows of the same outputs are neighbours: all but the first find the weight in the cache.
    row = tl.program_id(0) % rows
    n = (tl.program_id(0) // rows) * BN + tl.arange(0, BN)
    d = tl.arange(0, CHUNK)
    x_D = x_TD + row.to(tl.int64) * D
    up_XD = weight_XD + X * D
    # The first tile is loaded while the previous kernel ends.
    w = _weight_tile(weight_XD, n, d, X, D, BN, CHUNK)
    if GATED:
        v = _weight_tile(up_XD, n, d, X, D, BN, CHUNK)
        ups = tl.zeros((BN, CHUNK), dtype=tl.float32)
    total = tl.zeros((BN, CHUNK), dtype=tl.float32)
    gdc_wait(PDL)
    for step in tl.static_range((D + CHUNK - 1) // CHUNK):
        here = step * CHUNK + d
        if step > 0:
            w = _weight_tile(weight_XD, n, here, X, D, BN, CHUNK)
            if GATED:
                v = _weight_tile(up_XD, n, here, X, D, BN, CHUNK)
        x = tl.load(x_D + here, mask=here < D, other=0.0).to(tl.float32)[None, :]
        total += w.to(tl.float32) * x
        if GATED:
            ups += v.to(tl.float32) * x
    y = tl.sum(total, 1)
    if HAS_SCALE:
        y *= tl.load(scale_X + n, mask=n < X, other=0.0)
    if GATED:
        up = tl.sum(ups, 1)
        if HAS_SCALE:
            up *= tl.load(scale_X + X + n, mask=n < X, other=0.0)
        y = gelu_mul(y, up)
    if CAP > 0:
        y = 2.0 * CAP * tl.sigmoid(y * (2.0 / CAP)) - CAP
    tl.store(out_TX + row.to(tl.int64) * X + n, y.to(out_TX.dtype.element_ty), mask=n < X)


@triton.jit
def _residual_add_norm_router(
    x_TD,
    attended_TD,
    post_D,
    dense_D,
    expert_D,
    router_D,
    router_ED,
    out_TD,
    dense_TD,
    expert_TD,
    logits_TE,
    eps,
    D: tl.constexpr,
    E: tl.constexpr,
    BN: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1) * BN + tl.arange(0, BN)
    d = tl.arange(0, BLOCK)
    is_in = d < D
    dtype: tl.constexpr = out_TD.dtype.element_ty
    w = _weight_tile(router_ED, n, d, E, D, BN, BLOCK)
    post = tl.load(post_D + d, mask=is_in, other=0.0).to(tl.float32)
    router_weight = tl.load(router_D + d, mask=is_in, other=0.0).to(tl.float32)
    dense_weight = tl.load(dense_D + d, mask=is_in, other=0.0)
    expert_weight = tl.load(expert_D + d, mask=is_in, other=0.0)
    gdc_wait(PDL)
    at = row * D + d
    attended = tl.load(attended_TD + at, mask=is_in, other=0.0).to(tl.float32)
    x = tl.load(x_TD + at, mask=is_in, other=0.0).to(tl.float32)
    x = (x + attended * inverse_rms(attended, D, eps) * post).to(dtype)
    if tl.program_id(1) == 0:
        tl.store(out_TD + at, x, mask=is_in)
    x = x.to(tl.float32)
    x = x * inverse_rms(x, D, eps)
    if tl.program_id(1) == 0:
        dense = x * dense_weight.to(tl.float32)
        tl.store(dense_TD + at, dense.to(dtype), mask=is_in)
        expert = x * expert_weight.to(tl.float32)
        tl.store(expert_TD + at, expert.to(dtype), mask=is_in)
    router = (x * router_weight * D**-0.5).to(dtype).to(tl.float32)
    logits = tl.sum(w.to(tl.float32) * router[None, :], 1)
    tl.store(logits_TE + row * E + n, logits, mask=n < E)
