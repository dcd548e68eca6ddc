"""Products of a canvas with 8-bit weights, cut so that every processor has a share.

Weights stand on the left, the matrix unit's tall side; both sides come through the copy engine,
where there is one. The depth may be cut in parts, float32, which are added up in a fixed order by
what reads them: the kernels between the products go through whole rows anyway.

T rows, I inputs, O outputs, S parts.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from dgemma.backends.cuda.configs import GemmConfig, fitted
from dgemma.backends.cuda.kernels import device
from dgemma.backends.cuda.kernels.pdl import gdc_wait, pdl_kwargs


def product(
    x: tuple[Tensor, Tensor], weight: tuple[Tensor, Tensor], dtype: torch.dtype, form: GemmConfig
) -> Tensor:
    """x @ weight.T: [T, O] in the type asked for, or, cut in parts, [S, T, O] in float32.

    Both are in 8 bits, with a factor for each row of the one and each output of the other.
    """
    form = fitted(form)
    (x_TI, factor_T), (weight_OI, factor_O) = x, weight
    (rows, depth), outputs = x_TI.shape, len(weight_OI)
    share = triton.cdiv(triton.cdiv(depth, form.parts), form.depth) * form.depth
    parts = triton.cdiv(depth, share)
    if form.parts == 1:
        out = torch.empty(rows, outputs, dtype=dtype, device=x_TI.device)
    else:
        out = torch.empty(parts, rows, outputs, dtype=torch.float32, device=x_TI.device)
    _product[(triton.cdiv(rows, form.rows) * triton.cdiv(outputs, form.outputs) * parts,)](
        operand(x_TI, form.rows, form.depth),
        factor_T,
        operand(weight_OI, form.outputs, form.depth),
        factor_O,
        out,
        rows,
        I=depth,
        O=outputs,
        SHARE=share,
        BM=form.rows,
        BN=form.outputs,
        BK=form.depth,
        TMA=device.has_tma(),
        num_warps=form.warps,
        num_stages=form.stages,
        **pdl_kwargs(),
    )
    return out


def operand(matrix_RK: Tensor, rows: int, depth: int) -> Tensor | TensorDescriptor:
    """Return what `load_block` reads."""
    if device.has_tma():
        return TensorDescriptor.from_tensor(matrix_RK, [rows, depth])
    assert matrix_RK.is_contiguous()
    return matrix_RK


@triton.jit
def load_block(matrix_RK, r, k, R, K, BR: tl.constexpr, BK: tl.constexpr, TMA: tl.constexpr):
    """[BR, BK] of a matrix from row `r` and column `k` on; zeros behind its end."""
    if TMA:
        block = matrix_RK.load([r, k])
    else:
        row = r + tl.arange(0, BR)
        column = k + tl.arange(0, BK)
        at = row.to(tl.int64)[:, None] * K + column[None, :]
        block = tl.load(matrix_RK + at, mask=(row < R)[:, None] & (column < K)[None, :], other=0.0)
    return block


@triton.jit
def _product(
    x_TI,
    factor_T,
    weight_OI,
    factor_O,
    out_STO,
    rows,
    I: tl.constexpr,  # noqa: E741
    O: tl.constexpr,  # noqa: E741
    SHARE: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    TMA: tl.constexpr,
    PDL: tl.constexpr,
):
    # Programs of the same weights are neighbours: all but the first find them in the cache.
    blocks = (rows + BM - 1) // BM
    tiles: tl.constexpr = (O + BN - 1) // BN
    number = tl.program_id(0)
    first_m = number % blocks * BM
    first_n = number // blocks % tiles * BN
    part = number // blocks // tiles
    n = first_n + tl.arange(0, BN)
    column = tl.load(factor_O + n, mask=n < O, other=0.0)
    gdc_wait(PDL)
    total = tl.zeros((BN, BM), dtype=tl.float32)
    for offset in range(0, SHARE, BK):  # behind the last input there are zeros
        k = part * SHARE + offset
        w = load_block(weight_OI, first_n, k, O, I, BN, BK, TMA)
        x = load_block(x_TI, first_m, k, rows, I, BM, BK, TMA)
        total = tl.dot(w, tl.trans(x), total)
    m = first_m + tl.arange(0, BM)
    row = tl.load(factor_T + m, mask=m < rows, other=0.0)
    total *= column[:, None]
    total *= row[None, :]
    at = (part * rows + m).to(tl.int64)[:, None] * O + n[None, :]
    is_here = (m < rows)[:, None] & (n < O)[None, :]
    tl.store(out_STO + at, tl.trans(total.to(out_STO.dtype.element_ty)), mask=is_here)
