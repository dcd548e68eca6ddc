"""The soft embedding over the whole vocabulary in 8-bit floats; `ops/soft.py` says what it is.

Three launches: probabilities, rounded, are made of the head's output (or of probabilities that are
there) at one look, since what a part is rounded beside is known from its chunks; a product for each
part of the vocabulary; and their sum, in a fixed order, with the likeliest token's own vector. A
part's product is one program's for some of the width: nothing is rescaled on the way. Vectors stand
on the left, the matrix unit's tall side, so that each is read once; both sides come through the
copy engine where there is one.

T positions, V vocabulary, C chunks of it, D width, S parts.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from dgemma.backends.cuda.configs import SOFT, GemmConfig, fitted
from dgemma.backends.cuda.kernels import device
from dgemma.backends.cuda.kernels.gemm_fp8 import load_block, operand
from dgemma.backends.cuda.kernels.logit_stats import CHUNK, Marks, Merged, capped, scale_of
from dgemma.backends.cuda.kernels.pdl import gdc_wait, pdl_kwargs
from dgemma.backends.cuda.kernels.soft_embed_topk import BLOCK, Into, store_soft
from dgemma.quant.fp8 import E4M3
from dgemma.quant.soft_table import NEAR, SoftTable

AT_ONCE = 1024  # probabilities that are rounded at a time
assert CHUNK == NEAR, "row statistics leave peaks of other chunks than the definition's"


@dataclass(frozen=True, slots=True)
class Shares:
    """Rounded probabilities, without those of the likeliest tokens, which are kept as they are."""

    numbers_TV: Tensor
    factor_ST: Tensor  # what a rounded 1 stands for, times a vector's numbers
    top_T: Tensor
    top_p_T: Tensor


def shares(
    raw_TV: Tensor,
    softcap: float | None,
    temperature_T: Tensor,
    marks: Marks,
    merged: Merged,
    table: SoftTable,
) -> Shares:
    """Quantize the probabilities of logits, which stay as they are."""
    rows, vocab = raw_TV.shape
    parts = triton.cdiv(vocab, table.share)
    numbers_TV = torch.empty(rows, vocab, dtype=E4M3, device=raw_TV.device)
    factor_ST = torch.empty(parts, rows, dtype=torch.float32, device=raw_TV.device)
    _shares[(parts, rows)](
        raw_TV,
        temperature_T,
        merged.peak_T,
        merged.total_T,
        marks.peak_TC,
        merged.next_T,
        merged.top_T,
        table.beside_V,
        table.unit_1,
        numbers_TV,
        factor_ST,
        vocab,
        CAP=softcap or 0.0,
        SHARE=table.share,
        CHUNKS=triton.cdiv(vocab, NEAR),
        NEAR=NEAR,
        REACH=reach(table.share),
        W=AT_ONCE,
        num_warps=4,
        **pdl_kwargs(),
    )
    return Shares(numbers_TV, factor_ST, merged.top_T, merged.top_p_T)


def reach(share: int) -> int:
    """Number of chunks read for a part, at least all that overlap it; a power of two."""
    count = (share + NEAR - 2) // NEAR + 1
    return 1 << (count - 1).bit_length()


def mean(
    found: Shares, table: SoftTable, weight_VD: Tensor, into: Into, form: GemmConfig = SOFT
) -> None:
    """Write the mean vectors, scaled."""
    parts_STD = product(found, table, weight_VD.dtype, form)
    parts, rows, width = parts_STD.shape
    _add_up[(rows, triton.cdiv(width, BLOCK))](
        parts_STD,
        found.top_T,
        found.top_p_T,
        weight_VD,
        *into.arguments,
        into.scale,
        L=into.length,
        D=width,
        PARTS=parts,
        BLOCK=BLOCK,
        **pdl_kwargs(),
    )


def product(found: Shares, table: SoftTable, dtype: torch.dtype, form: GemmConfig = SOFT) -> Tensor:
    """Partial sums over each part of the vocabulary, [S, T, D]."""
    form = fitted(form)
    (parts, rows), (width, vocab) = found.factor_ST.shape, table.numbers_DV.shape
    assert table.share % form.depth == 0, "a part would read into the next one"
    out_STD = torch.empty(parts, rows, width, dtype=dtype, device=found.factor_ST.device)
    _product[(triton.cdiv(rows, form.rows) * triton.cdiv(width, form.outputs) * parts,)](
        operand(found.numbers_TV, form.rows, form.depth),
        found.factor_ST,
        operand(table.numbers_DV, form.outputs, form.depth),
        out_STD,
        rows,
        V=vocab,
        D=width,
        SHARE=table.share,
        BM=form.rows,
        BN=form.outputs,
        BK=form.depth,
        TMA=device.has_tma(),
        num_warps=form.warps,
        num_stages=form.stages,
        **pdl_kwargs(),
    )
    return out_STD


@triton.jit
def _shares(
    raw_TV,
    temperature_T,
    peak_T,
    total_T,
    peak_TC,
    next_T,
    top_T,
    beside_V,
    unit_1,
    numbers_TV,
    factor_ST,
    vocab,
    CAP: tl.constexpr,
    SHARE: tl.constexpr,
    CHUNKS: tl.constexpr,
    NEAR: tl.constexpr,
    REACH: tl.constexpr,
    W: tl.constexpr,
    PDL: tl.constexpr,
):
    gdc_wait(PDL)
    part = tl.program_id(0)
    row = tl.program_id(1)
    start = row.to(tl.int64) * vocab
    top = tl.load(top_T + row).to(tl.int32)
    begin = part * SHARE
    # The vocabulary is a multiple of 16, as the copy engine wants it.
    end = tl.multiple_of(tl.minimum(begin + SHARE, vocab), 16)
    c = begin // NEAR + tl.arange(0, REACH)
    is_near = c * NEAR < end
    near = tl.load(peak_TC + row * CHUNKS + c, mask=is_near, other=float("-inf"))
    near = tl.where((c == top // NEAR) & is_near, tl.load(next_T + row), near)
    greatest = tl.max(near, 0)
    scale = scale_of(tl.load(temperature_T + row), CAP)
    p = tl.exp((greatest - tl.load(peak_T + row)) * scale) / tl.load(total_T + row)
    tl.store(factor_ST + part * tl.num_programs(1) + row, p * tl.load(unit_1))
    for offset in range(0, SHARE, W):
        v = begin + offset + tl.arange(0, W)
        given = tl.load(raw_TV + start + v, mask=v < end, other=0.0)
        beside = tl.exp((capped(given, CAP) - greatest) * scale)
        beside *= tl.load(beside_V + v, mask=v < end, other=0.0)
        beside = tl.where(v == top, 0.0, beside)
        tl.store(numbers_TV + start + v, beside.to(numbers_TV.dtype.element_ty), mask=v < end)


@triton.jit
def _product(
    numbers_TV,
    factor_ST,
    numbers_DV,
    out_STD,
    rows,
    V: tl.constexpr,
    D: tl.constexpr,
    SHARE: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    TMA: tl.constexpr,
    PDL: tl.constexpr,
):
    # Programs of the same part are neighbours: they find its probabilities in the cache.
    blocks = (rows + BM - 1) // BM
    tiles: tl.constexpr = (D + BN - 1) // BN
    number = tl.program_id(0)
    first_m = number % blocks * BM
    first_n = number // blocks % tiles * BN
    part = number // blocks // tiles
    gdc_wait(PDL)
    total = tl.zeros((BN, BM), dtype=tl.float32)
    for offset in range(0, SHARE, BK):  # behind the last token there are zeros
        v = part * SHARE + offset
        vectors = load_block(numbers_DV, first_n, v, D, V, BN, BK, TMA)
        p = load_block(numbers_TV, first_m, v, rows, V, BM, BK, TMA)
        total = tl.dot(vectors, tl.trans(p), total)
    n = first_n + tl.arange(0, BN)
    m = first_m + tl.arange(0, BM)
    total *= tl.load(factor_ST + part * rows + m, mask=m < rows, other=0.0)[None, :]
    at = (part * rows + m).to(tl.int64)[:, None] * D + n[None, :]
    is_here = (m < rows)[:, None] & (n < D)[None, :]
    tl.store(out_STD + at, tl.trans(total.to(out_STD.dtype.element_ty)), mask=is_here)


@triton.jit
def _add_up(
    parts_STD,
    top_T,
    top_p_T,
    weight_VD,
    soft_ELD,
    tokens_EL,
    pinned_EL,
    entry_I,
    tokens_stride,
    pinned_stride,
    scale,
    L: tl.constexpr,
    D: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    gdc_wait(PDL)
    row = tl.program_id(0)
    d = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    top = tl.load(top_T + row).to(tl.int64)
    own = tl.load(weight_VD + top * D + d, mask=d < D, other=0.0).to(tl.float32)
    total = tl.load(top_p_T + row) * own
    for part in range(PARTS):
        at = (part * tl.num_programs(0) + row).to(tl.int64) * D + d
        total += tl.load(parts_STD + at, mask=d < D, other=0.0).to(tl.float32)
    # Rounded before it is scaled, as by definition.
    mean = total.to(soft_ELD.dtype.element_ty)
    store_soft(
        mean,
        weight_VD,
        soft_ELD,
        tokens_EL,
        pinned_EL,
        entry_I,
        tokens_stride,
        pinned_stride,
        scale,
        row,
        d,
        L,
        D,
    )
