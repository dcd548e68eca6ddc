"""Fp8 GEMMs of a canvas, in blocks that fill the GPU: split-K where there are few outputs.

Weights are the left operand, the tall side of the MMA; both operands are read by TMA where there is
one. The sums of a split-K GEMM are float32 and are added in a fixed order by the kernel that reads
them (`residual_norm.py`), which has whole rows anyway.

T rows, K inputs, N outputs, S splits.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from dgemma.backends.cuda import device
from dgemma.backends.cuda.configs import GemmConfig, for_device
from dgemma.backends.cuda.kernels.common import gdc_wait, launch, pdl_kwargs


def gemm(
    x: tuple[Tensor, Tensor], weight: tuple[Tensor, Tensor], dtype: torch.dtype, config: GemmConfig
) -> Tensor:
    """Return x @ weight.T: [T, N] in `dtype` or, with split-K, the sums [S, T, N] in float32.

    Both are e4m3 values with their scales, of each row and of each output.
    """
    config = for_device(config)
    (x_TK, scale_T), (weight_NK, scale_N) = x, weight
    (rows, depth), outputs = x_TK.shape, len(weight_NK)
    k_split = triton.cdiv(triton.cdiv(depth, config.splits), config.depth) * config.depth
    splits = triton.cdiv(depth, k_split)
    if config.splits == 1:
        out = torch.empty(rows, outputs, dtype=dtype, device=x_TK.device)
    else:
        out = torch.empty(splits, rows, outputs, dtype=torch.float32, device=x_TK.device)
    launch(_gemm, (num_tiles(rows, outputs, config) * splits,))(
        operand(x_TK, config.rows, config.depth),
        scale_T,
        operand(weight_NK, config.outputs, config.depth),
        scale_N,
        out,
        rows,
        K=depth,
        N=outputs,
        K_SPLIT=k_split,
        **block_kwargs(config),
    )
    return out


def num_tiles(rows: int, outputs: int, config: GemmConfig) -> int:
    return int(triton.cdiv(rows, config.rows) * triton.cdiv(outputs, config.outputs))


def operand(matrix_RK: Tensor, rows: int, depth: int) -> Tensor | TensorDescriptor:
    """Return a matrix as `_load_block` takes it."""
    if device.has_tma():
        return TensorDescriptor.from_tensor(matrix_RK, [rows, depth])
    assert matrix_RK.is_contiguous()
    return matrix_RK


def block_kwargs(config: GemmConfig) -> dict[str, Any]:
    """Launch arguments of a kernel that uses `dot_split`."""
    block = {"BM": config.rows, "BN": config.outputs, "BK": config.depth}
    options = {"num_warps": config.warps, "num_stages": config.stages}
    return {**block, "TMA": device.has_tma(), **options, **pdl_kwargs()}


@triton.jit
def _gemm(
    x_TK,
    scale_T,
    weight_NK,
    scale_N,
    out_STN,
    rows,
    K: tl.constexpr,
    N: tl.constexpr,
    K_SPLIT: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    TMA: tl.constexpr,
    PDL: tl.constexpr,
):
    first_m, first_n, split = program_tile(rows, N, BM, BN)
    n = first_n + tl.arange(0, BN)
    column_scale = tl.load(scale_N + n, mask=n < N, other=0.0)
    gdc_wait(PDL)
    total = dot_split(
        weight_NK, x_TK, first_n, first_m, split, rows, N, K, K_SPLIT, BM, BN, BK, TMA
    )
    m = first_m + tl.arange(0, BM)
    row_scale = tl.load(scale_T + m, mask=m < rows, other=0.0)
    total *= column_scale[:, None]
    total *= row_scale[None, :]
    store_split(out_STN, total, m, n, split, rows, N)


@triton.jit
def program_tile(rows, N: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr):
    """First row and output of this program's tile, and its split.

    Programs of the same outputs are neighbours: all but the first find them in the L2 cache.
    """
    blocks = (rows + BM - 1) // BM
    tiles: tl.constexpr = (N + BN - 1) // BN
    number = tl.program_id(0)
    return number % blocks * BM, number // blocks % tiles * BN, number // blocks // tiles


@triton.jit
def dot_split(
    weight_NK,
    x_TK,
    first_n,
    first_m,
    split,
    rows,
    N: tl.constexpr,
    K: tl.constexpr,
    K_SPLIT: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    TMA: tl.constexpr,
):
    """Sum weight @ x.T over the inputs of a split: [BN, BM]; inputs past the end are zero."""
    total = tl.zeros((BN, BM), dtype=tl.float32)
    for offset in range(0, K_SPLIT, BK):
        k = split * K_SPLIT + offset
        w = _load_block(weight_NK, first_n, k, N, K, BN, BK, TMA)
        x = _load_block(x_TK, first_m, k, rows, K, BM, BK, TMA)
        total = tl.dot(w, tl.trans(x), total)
    return total


@triton.jit
def store_split(out_STN, total, m, n, split, rows, N: tl.constexpr):
    """Store a [BN, BM] tile of a split."""
    at = (split * rows + m).to(tl.int64)[:, None] * N + n[None, :]
    is_here = (m < rows)[:, None] & (n < N)[None, :]
    tl.store(out_STN + at, tl.trans(total.to(out_STN.dtype.element_ty)), mask=is_here)


@triton.jit
def _load_block(matrix_RK, r, k, R, K, BR: tl.constexpr, BK: tl.constexpr, TMA: tl.constexpr):
    """Load [BR, BK] of a matrix from row `r` and column `k` on; zeros past its end."""
    if TMA:
        block = matrix_RK.load([r, k])
    else:
        row = r + tl.arange(0, BR)
        column = k + tl.arange(0, BK)
        at = row.to(tl.int64)[:, None] * K + column[None, :]
        block = tl.load(matrix_RK + at, mask=(row < R)[:, None] & (column < K)[None, :], other=0.0)
    return block
