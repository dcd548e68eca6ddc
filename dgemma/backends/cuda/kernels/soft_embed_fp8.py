"""The soft embedding over the whole vocabulary in fp8 (`quant/head.py` defines it).

Three launches: probabilities are computed from the logits and quantized in one pass, since the
largest of a split's chunks are known; one GEMM for each split of the vocabulary; their sum, in a
fixed order, plus the most likely token's own vector. The table is the left operand, the tall side
of the MMA, so that it is read once.

T positions, V vocabulary, C chunks of it, D width, S splits.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from dgemma.backends.cuda.configs import SOFT_EMBED, GemmConfig, for_device
from dgemma.backends.cuda.kernels.common import gdc_wait, launch, pdl_kwargs
from dgemma.backends.cuda.kernels.gemm_fp8 import (
    block_kwargs,
    dot_split,
    num_tiles,
    operand,
    program_tile,
    store_split,
)
from dgemma.backends.cuda.kernels.logit_stats import LogitStats, capped, logit_scale
from dgemma.backends.cuda.kernels.soft_embed_topk import BLOCK, SoftEmbedOut, store_soft
from dgemma.quant.fp8 import E4M3
from dgemma.quant.head import CHUNK, SoftTable

TOKENS_PER_STEP = 1024  # of the quantization


@dataclass(frozen=True, slots=True)
class QuantizedProbs:
    """Probabilities in e4m3, zero for the most likely token, which is not rounded."""

    values_TV: Tensor
    scale_ST: Tensor  # of a split, times the table's unit scale
    top_T: Tensor
    top_p_T: Tensor


def quantize_probs(stats: LogitStats, table: SoftTable) -> QuantizedProbs:
    """Quantize the probabilities of logits, which are unchanged."""
    rows, vocab = stats.raw_TV.shape
    splits, device = triton.cdiv(vocab, table.split), stats.raw_TV.device
    values_TV = torch.empty(rows, vocab, dtype=E4M3, device=device)
    scale_ST = torch.empty(splits, rows, dtype=torch.float32, device=device)
    launch(_quantize_probs, (splits, rows))(
        *stats.arguments,
        stats.chunks.peak_TC,
        stats.merged.second_T,
        stats.merged.top_T,
        table.rel_scale_V,
        table.unit_scale_1,
        values_TV,
        scale_ST,
        vocab,
        CAP=stats.softcap or 0.0,
        SPLIT=table.split,
        CHUNKS=triton.cdiv(vocab, CHUNK),
        CHUNK=CHUNK,
        NEAR=chunks_per_split(table.split),
        W=TOKENS_PER_STEP,
        num_warps=4,
        **pdl_kwargs(),
    )
    return QuantizedProbs(values_TV, scale_ST, stats.merged.top_T, stats.merged.top_p_T)


def chunks_per_split(split: int) -> int:
    """Number of chunks read for a split, at least all that overlap it; a power of two."""
    count = (split + CHUNK - 2) // CHUNK + 1
    return 1 << (count - 1).bit_length()


def mean(
    probs: QuantizedProbs,
    table: SoftTable,
    weight_VD: Tensor,
    out: SoftEmbedOut,
    config: GemmConfig = SOFT_EMBED,
) -> None:
    """Write the mean vectors, scaled."""
    sums_STD = split_sums(probs, table, weight_VD.dtype, config)
    splits, rows, width = sums_STD.shape
    launch(_add_splits, (rows, triton.cdiv(width, BLOCK)))(
        sums_STD,
        probs.top_T,
        probs.top_p_T,
        weight_VD,
        *out.arguments,
        SPLITS=splits,
        **out.kwargs,
    )


def split_sums(
    probs: QuantizedProbs, table: SoftTable, dtype: torch.dtype, config: GemmConfig = SOFT_EMBED
) -> Tensor:
    """Sum over each split of the vocabulary, [S, T, D]."""
    config = for_device(config)
    (splits, rows), (width, vocab) = probs.scale_ST.shape, table.values_DV.shape
    assert table.split % config.depth == 0, "a split would read into the next one"
    out_STD = torch.empty(splits, rows, width, dtype=dtype, device=probs.scale_ST.device)
    launch(_split_sums, (num_tiles(rows, width, config) * splits,))(
        operand(probs.values_TV, config.rows, config.depth),
        probs.scale_ST,
        operand(table.values_DV, config.outputs, config.depth),
        out_STD,
        rows,
        V=vocab,
        D=width,
        SPLIT=table.split,
        **block_kwargs(config),
    )
    return out_STD


@triton.jit
def _quantize_probs(
    raw_TV,
    temperature_T,
    peak_T,
    total_T,
    peak_TC,
    second_T,
    top_T,
    rel_scale_V,
    unit_scale_1,
    values_TV,
    scale_ST,
    vocab,
    CAP: tl.constexpr,
    SPLIT: tl.constexpr,
    CHUNKS: tl.constexpr,
    CHUNK: tl.constexpr,
    NEAR: tl.constexpr,
    W: tl.constexpr,
    PDL: tl.constexpr,
):
    gdc_wait(PDL)
    split = tl.program_id(0)
    row = tl.program_id(1)
    start = row.to(tl.int64) * vocab
    top = tl.load(top_T + row).to(tl.int32)
    begin = split * SPLIT
    # The vocabulary is a multiple of 16, as TMA needs it.
    end = tl.multiple_of(tl.minimum(begin + SPLIT, vocab), 16)
    c = begin // CHUNK + tl.arange(0, NEAR)
    is_near = c * CHUNK < end
    near = tl.load(peak_TC + row * CHUNKS + c, mask=is_near, other=float("-inf"))
    near = tl.where((c == top // CHUNK) & is_near, tl.load(second_T + row), near)
    largest = tl.max(near, 0)
    scale = logit_scale(tl.load(temperature_T + row), CAP)
    p = tl.exp((largest - tl.load(peak_T + row)) * scale) / tl.load(total_T + row)
    tl.store(scale_ST + split * tl.num_programs(1) + row, p * tl.load(unit_scale_1))
    for offset in range(0, SPLIT, W):
        v = begin + offset + tl.arange(0, W)
        raw = tl.load(raw_TV + start + v, mask=v < end, other=0.0)
        value = tl.exp((capped(raw, CAP) - largest) * scale)
        value *= tl.load(rel_scale_V + v, mask=v < end, other=0.0)
        value = tl.where(v == top, 0.0, value)
        tl.store(values_TV + start + v, value.to(values_TV.dtype.element_ty), mask=v < end)


@triton.jit
def _split_sums(
    values_TV,
    scale_ST,
    values_DV,
    out_STD,
    rows,
    V: tl.constexpr,
    D: tl.constexpr,
    SPLIT: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    TMA: tl.constexpr,
    PDL: tl.constexpr,
):
    first_m, first_n, split = program_tile(rows, D, BM, BN)
    gdc_wait(PDL)
    total = dot_split(
        values_DV, values_TV, first_n, first_m, split, rows, D, V, SPLIT, BM, BN, BK, TMA
    )
    n = first_n + tl.arange(0, BN)
    m = first_m + tl.arange(0, BM)
    total *= tl.load(scale_ST + split * rows + m, mask=m < rows, other=0.0)[None, :]
    store_split(out_STD, total, m, n, split, rows, D)


@triton.jit
def _add_splits(
    sums_STD,
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
    SPLITS: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    gdc_wait(PDL)
    row = tl.program_id(0)
    d = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    top = tl.load(top_T + row).to(tl.int64)
    vector = tl.load(weight_VD + top * D + d, mask=d < D, other=0.0).to(tl.float32)
    total = tl.load(top_p_T + row) * vector
    for split in range(SPLITS):
        at = (split * tl.num_programs(0) + row).to(tl.int64) * D + d
        total += tl.load(sums_STD + at, mask=d < D, other=0.0).to(tl.float32)
    # Rounded before it is scaled, as in the definition.
    mean = total.to(soft_ELD.dtype.element_ty)
    canvas = (tokens_EL, pinned_EL, entry_I, tokens_stride, pinned_stride)
    store_soft(mean, weight_VD, soft_ELD, canvas, scale, row, d, L, D)
