"""How a single token enters the stack: its vector, that normed, and its turns, in one launch.

D width, V vocabulary, F pairs of all kinds of layers, one kind behind the other.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from dgemma.ops.kernels.enter import Table
from dgemma.ops.kernels.launch import after, early
from dgemma.ops.kernels.pieces import inverse_rms

TURNS = 128  # pairs of a program


def enter(
    token_1: Tensor, start_1: Tensor, table: Table, norm: tuple[Tensor, float], frequency_F: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The token's vector and that normed, [1, D], cosine and sine of all pairs, [F].

    `norm`: its weight and epsilon.
    """
    weight_D, eps = norm
    count, width = len(frequency_F), len(weight_D)
    x_1D = table.weight_VD.new_empty(1, width)
    normed_1D = torch.empty_like(x_1D)
    cos_F, sin_F = torch.empty_like(frequency_F), torch.empty_like(frequency_F)
    block = triton.next_power_of_2(width)
    _enter[(1 + triton.cdiv(count, TURNS),)](
        token_1,
        start_1,
        table.weight_VD,
        weight_D,
        frequency_F,
        x_1D,
        normed_1D,
        cos_F,
        sin_F,
        table.scale,
        eps,
        count,
        D=width,
        BLOCK=block,
        PAIRS=TURNS,
        num_warps=max(1, min(8, block // 512)),
        **early(),
    )
    return x_1D, normed_1D, cos_F, sin_F


@triton.jit
def _enter(
    token_1,
    start_1,
    table_VD,
    weight_D,
    frequency_F,
    x_1D,
    normed_1D,
    cos_F,
    sin_F,
    scale,
    eps,
    count,
    D: tl.constexpr,
    BLOCK: tl.constexpr,
    PAIRS: tl.constexpr,
    EARLY: tl.constexpr,
):
    after(EARLY)
    if tl.program_id(0) == 0:
        d = tl.arange(0, BLOCK)
        kind: tl.constexpr = x_1D.dtype.element_ty
        weight = tl.load(weight_D + d, mask=d < D, other=0.0).to(tl.float32)
        token = tl.load(token_1)
        x = tl.load(table_VD + token * D + d, mask=d < D, other=0.0).to(tl.float32)
        x = (x * scale).to(kind)
        tl.store(x_1D + d, x, mask=d < D)
        x = x.to(tl.float32)
        x = x * inverse_rms(x, D, eps) * weight
        tl.store(normed_1D + d, x.to(kind), mask=d < D)
    else:
        f = (tl.program_id(0) - 1) * PAIRS + tl.arange(0, PAIRS)
        angle = tl.load(start_1).to(tl.float32) * tl.load(frequency_F + f, mask=f < count, other=0)
        tl.store(cos_F + f, tl.cos(angle), mask=f < count)
        tl.store(sin_F + f, tl.sin(angle), mask=f < count)
