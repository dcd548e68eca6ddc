"""Products of one row, or of very few: the weight is streamed, and each output is a sum of its own.

Such a product takes as long as its weight takes to be read. A program takes a few outputs over the
whole depth; enough of them run side by side to keep the memory busy, and no part is summed twice.
Rows beyond the first read the weight again, from the cache. Weights are 16-bit, or 8-bit with a
factor for each output; rows are never quantized here.

T rows, D depth, X outputs, I outputs of a gated product, E experts.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from dgemma.backends.cuda.configs import GemvConfig, gemv_config
from dgemma.backends.cuda.kernels.helpers import activate, inverse_rms
from dgemma.backends.cuda.kernels.pdl import gdc_wait, pdl_kwargs


def product(
    x_TD: Tensor, weight_XD: Tensor, factor_X: Tensor | None = None, form: GemvConfig | None = None
) -> Tensor:
    """x @ weight.T."""
    out_TX = x_TD.new_empty(len(x_TD), len(weight_XD))
    _launch(x_TD, (weight_XD, factor_X), out_TX, form)
    return out_TX


def gated_product(
    x_TD: Tensor, weight_XD: Tensor, factor_X: Tensor | None = None, form: GemvConfig | None = None
) -> Tensor:
    """gelu(gate) * up for a weight that holds the gate half first."""
    out_TI = x_TD.new_empty(len(x_TD), len(weight_XD) // 2)
    _launch(x_TD, (weight_XD, factor_X), out_TI, form, is_gated=True)
    return out_TI


def scores(
    x_TD: Tensor,
    weight: tuple[Tensor, Tensor | None],
    cap: float | None,
    out_TV: Tensor,
    form: GemvConfig | None = None,
) -> Tensor:
    """Soft-capped float32 logits, written to `out_TV`."""
    _launch(x_TD, weight, out_TV, form, cap=cap or 0.0)
    return out_TV


def _launch(
    x_TD: Tensor,
    weight: tuple[Tensor, Tensor | None],
    out_TX: Tensor,
    form: GemvConfig | None,
    *,
    is_gated: bool = False,
    cap: float = 0.0,
) -> None:
    (rows, depth), outputs = x_TD.shape, out_TX.shape[1]
    weight_XD, factor_X = weight
    form = form or gemv_config(outputs, depth, is_gated=is_gated, is_8=factor_X is not None)
    # One dimension: a second one could hold 65535 programs only.
    _product[(rows * triton.cdiv(outputs, form.outputs),)](
        x_TD,
        weight_XD,
        out_TX if factor_X is None else factor_X,
        out_TX,
        rows,
        D=depth,
        X=outputs,
        GATED=is_gated,
        HAS_FACTOR=factor_X is not None,
        CAP=cap,
        BN=form.outputs,
        CHUNK=form.chunk,
        num_warps=form.warps,
        **pdl_kwargs(),
    )


def residual_add_norm(
    x_TD: Tensor,
    attended_TD: Tensor,
    weights: tuple[Tensor, Tensor, Tensor, Tensor],
    router_ED: Tensor,
    eps: float,
) -> tuple[tuple[Tensor, Tensor, Tensor], Tensor]:
    """`layer.join` and the router's product with it, whose scores are returned as one part, [1TE].

    Each program norms the row again, which is cheaper than another launch.
    """
    rows, width = x_TD.shape
    num_experts, outputs = len(router_ED), 4
    out_TD, dense_TD, expert_TD = (torch.empty_like(x_TD) for _ in range(3))
    part_1TE = torch.empty(1, rows, num_experts, dtype=torch.float32, device=x_TD.device)
    _residual_add_norm[(rows, triton.cdiv(num_experts, outputs))](
        x_TD,
        attended_TD,
        *weights,
        router_ED,
        out_TD,
        dense_TD,
        expert_TD,
        part_1TE,
        eps,
        D=width,
        E=num_experts,
        BN=outputs,
        BLOCK=triton.next_power_of_2(width),
        num_warps=4,
        **pdl_kwargs(),
    )
    return (out_TD, dense_TD, expert_TD), part_1TE


@triton.jit
def _slab(weight, n, d, X: tl.constexpr, D: tl.constexpr, BN: tl.constexpr, CHUNK: tl.constexpr):
    """[BN, CHUNK] of a weight; masked only where a tile can reach past it."""
    at = n.to(tl.int64)[:, None] * D + d[None, :]
    if (X % BN == 0) & (D % CHUNK == 0):
        w = tl.load(weight + at)
    else:
        w = tl.load(weight + at, mask=(n < X)[:, None] & (d < D)[None, :], other=0.0)
    return w


@triton.jit
def _product(
    x_TD,
    weight_XD,
    factor_X,
    out_TX,
    rows,
    D: tl.constexpr,
    X: tl.constexpr,
    GATED: tl.constexpr,
    HAS_FACTOR: tl.constexpr,
    CAP: tl.constexpr,
    BN: tl.constexpr,
    CHUNK: tl.constexpr,
    PDL: tl.constexpr,
):
    # Programs of the same outputs follow each other: the weight is then in the cache for the rest.
    row = tl.program_id(0) % rows
    n = (tl.program_id(0) // rows) * BN + tl.arange(0, BN)
    d = tl.arange(0, CHUNK)
    x_D = x_TD + row.to(tl.int64) * D
    up_XD = weight_XD + X * D
    # The first of the weight is under way while the kernel before this one ends.
    w = _slab(weight_XD, n, d, X, D, BN, CHUNK)
    if GATED:
        v = _slab(up_XD, n, d, X, D, BN, CHUNK)
        ups = tl.zeros((BN, CHUNK), dtype=tl.float32)
    total = tl.zeros((BN, CHUNK), dtype=tl.float32)
    gdc_wait(PDL)
    for step in tl.static_range((D + CHUNK - 1) // CHUNK):
        here = step * CHUNK + d
        if step > 0:
            w = _slab(weight_XD, n, here, X, D, BN, CHUNK)
            if GATED:
                v = _slab(up_XD, n, here, X, D, BN, CHUNK)
        x = tl.load(x_D + here, mask=here < D, other=0.0).to(tl.float32)[None, :]
        total += w.to(tl.float32) * x
        if GATED:
            ups += v.to(tl.float32) * x
    y = tl.sum(total, 1)
    if HAS_FACTOR:
        y *= tl.load(factor_X + n, mask=n < X, other=0.0)
    if GATED:
        up = tl.sum(ups, 1)
        if HAS_FACTOR:
            up *= tl.load(factor_X + X + n, mask=n < X, other=0.0)
        y = activate(y, up)
    if CAP > 0:
        y = 2.0 * CAP * tl.sigmoid(y * (2.0 / CAP)) - CAP
    tl.store(out_TX + row.to(tl.int64) * X + n, y.to(out_TX.dtype.element_ty), mask=n < X)


@triton.jit
def _residual_add_norm(
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
    part_TE,
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
    kind: tl.constexpr = out_TD.dtype.element_ty
    w = _slab(router_ED, n, d, E, D, BN, BLOCK)
    post = tl.load(post_D + d, mask=is_in, other=0.0).to(tl.float32)
    of_router = tl.load(router_D + d, mask=is_in, other=0.0).to(tl.float32)
    of_dense = tl.load(dense_D + d, mask=is_in, other=0.0)
    of_expert = tl.load(expert_D + d, mask=is_in, other=0.0)
    gdc_wait(PDL)
    at = row * D + d
    attended = tl.load(attended_TD + at, mask=is_in, other=0.0).to(tl.float32)
    x = tl.load(x_TD + at, mask=is_in, other=0.0).to(tl.float32)
    x = (x + attended * inverse_rms(attended, D, eps) * post).to(kind)
    if tl.program_id(1) == 0:
        tl.store(out_TD + at, x, mask=is_in)
    x = x.to(tl.float32)
    x = x * inverse_rms(x, D, eps)
    if tl.program_id(1) == 0:
        dense = x * of_dense.to(tl.float32)
        tl.store(dense_TD + at, dense.to(kind), mask=is_in)
        expert = x * of_expert.to(tl.float32)
        tl.store(expert_TD + at, expert.to(kind), mask=is_in)
    router = (x * of_router * D**-0.5).to(kind).to(tl.float32)
    scores = tl.sum(w.to(tl.float32) * router[None, :], 1)
    tl.store(part_TE + row * E + n, scores, mask=n < E)
