"""The experts' GEMMs, grouped by expert: each weight tile is read once, for all of its tokens.

A canvas of 256 tokens reaches all 128 experts of the released model, 16 rows each: a step reads
every expert weight for little arithmetic, so it is memory-bound. Assignments are sorted by expert;
a program takes one tile of an expert's outputs and a block of its rows. Only the device knows how
many row blocks there are: programs look theirs up.

T tokens, K experts per token, A = T * K assignments (number t * K + k), E experts, S slots of an
expert, D width, I expert width.
"""

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from dgemma.backends.cuda.configs import MoeConfig, moe_config
from dgemma.backends.cuda.kernels.common import (
    gdc_wait,
    gelu_mul,
    launch,
    no_pdl_kwargs,
    pdl_kwargs,
)
from dgemma.backends.cuda.kernels.residual_norm import quantize

SCAN = 1024  # assignments per step of the sort


@dataclass(frozen=True, slots=True)
class Buckets:
    """The assignments of each expert."""

    assignment_ES: Tensor  # int32; undefined past an expert's count
    count_E: Tensor  # int32

    @property
    def arguments(self) -> tuple[object, ...]:
        """Arguments of a kernel that calls `row_block`, and the slots of an expert."""
        return self.assignment_ES, self.count_E, self.assignment_ES.shape[1]

    @property
    def kwargs(self) -> dict[str, int]:
        count = len(self.count_E)
        return {"E": count, "P": triton.next_power_of_2(count)}

    def max_row_blocks(self, num_assignments: int, config: MoeConfig) -> int:
        """Upper bound on the row blocks of all experts; programs without one exit."""
        return len(self.count_E) + num_assignments // config.rows


@dataclass(frozen=True, slots=True)
class Scales:
    """Scales of an fp8 GEMM: one for each row and each output."""

    rows: Tensor  # of tokens, or of assignments
    columns_EO: Tensor
    dtype: torch.dtype  # of the result


def expert_outputs(
    x_TD: Tensor,
    ids_TK: Tensor,
    gate_up_EID: Tensor,
    down_EDI: Tensor,
    buckets: Buckets | None = None,
) -> Tensor:
    """Compute the output of each (token, expert) assignment, [A, D], not yet weighted."""
    config = moe_config(ids_TK.numel(), len(gate_up_EID))
    buckets = buckets or sort_by_expert(ids_TK, len(gate_up_EID))
    hidden_AI = gate_up(x_TD.contiguous(), gate_up_EID, buckets, ids_TK.shape[1], config.gate_up)
    return down(hidden_AI, down_EDI, buckets, config.down)


def expert_outputs_fp8(
    x: tuple[Tensor, Tensor],
    ids_TK: Tensor,
    gate_up_8: tuple[Tensor, Tensor],
    down_8: tuple[Tensor, Tensor],
    dtype: torch.dtype,
    buckets: Buckets | None = None,
) -> Tensor:
    """Compute `expert_outputs` with e4m3 weights and activations, each with its scales."""
    config = moe_config(ids_TK.numel(), len(gate_up_8[0]), 8)
    buckets = buckets or sort_by_expert(ids_TK, len(gate_up_8[0]))
    scales = Scales(x[1], gate_up_8[1], dtype)
    hidden_AI = gate_up(x[0], gate_up_8[0], buckets, ids_TK.shape[1], config.gate_up, scales)
    hidden_8, scale_A = quantize(hidden_AI)
    return down(hidden_8, down_8[0], buckets, config.down, Scales(scale_A, down_8[1], dtype))


def gate_up(
    x_TD: Tensor,
    weight_EXD: Tensor,
    buckets: Buckets,
    top_k: int,
    config: MoeConfig,
    scales: Scales | None = None,
) -> Tensor:
    """gelu(gate) * up of every assignment, [A, I]; the gate half comes first in a weight."""
    return _grouped(x_TD, weight_EXD, buckets, config, scales, top_k)


def down(
    hidden_AI: Tensor,
    weight_EDI: Tensor,
    buckets: Buckets,
    config: MoeConfig,
    scales: Scales | None = None,
) -> Tensor:
    """Output of every assignment, [A, D], not yet weighted."""
    return _grouped(hidden_AI, weight_EDI, buckets, config, scales)


def _grouped(
    x: Tensor,
    weight_EOK: Tensor,
    buckets: Buckets,
    config: MoeConfig,
    scales: Scales | None,
    gated_top_k: int | None = None,
) -> Tensor:
    """Launch the grouped GEMM of assignments or, with a top-k, the gated one of tokens."""
    is_gated, top_k = gated_top_k is not None, gated_top_k or 1
    outputs, depth = weight_EOK.shape[1] // (1 + is_gated), weight_EOK.shape[2]
    dtype = x.dtype if scales is None else scales.dtype
    out_AN = x.new_empty(len(x) * top_k, outputs, dtype=dtype)
    blocks = buckets.max_row_blocks(len(out_AN), config)
    launch(_grouped_gemm, (blocks * triton.cdiv(outputs, config.columns),))(
        x,
        _weights(weight_EOK, config),
        out_AN,
        out_AN if scales is None else scales.rows,
        out_AN if scales is None else scales.columns_EO,
        *buckets.arguments,
        GATED=is_gated,
        TOP_K=top_k,
        K=depth,
        N=outputs,
        **buckets.kwargs,
        **_kwargs(config, is_fp8=scales is not None),
    )
    return out_AN


def _weights(weight_EOK: Tensor, config: MoeConfig) -> Tensor | TensorDescriptor:
    """A tile may exceed its expert's outputs: what it computes there is not stored."""
    if not config.tma:
        return weight_EOK
    return TensorDescriptor.from_tensor(weight_EOK.flatten(0, 1), [config.columns, config.depth])


def _kwargs(config: MoeConfig, *, is_fp8: bool) -> dict[str, Any]:
    # PDL was measured with fp8 weights; 16-bit configs were tuned without.
    return {
        **(pdl_kwargs() if is_fp8 else no_pdl_kwargs()),
        "HAS_SCALES": is_fp8,
        "BM": config.rows,
        "BN": config.columns,
        "BK": config.depth,
        "TAIL": config.tail,
        "SWAP_AB": config.swap_ab,
        "TMA": config.tma,
        "num_warps": config.warps,
        "num_stages": config.stages,
    }


def sort_by_expert(ids_TK: Tensor, num_experts: int) -> Buckets:
    """Sort assignments by expert, in order; each expert's program scans all, without a sync."""
    num_tokens, top_k = ids_TK.shape
    # A token chooses an expert at most once.
    assignment_ES = torch.empty(num_experts, num_tokens, dtype=torch.int32, device=ids_TK.device)
    count_E = torch.empty(num_experts, dtype=torch.int32, device=ids_TK.device)
    launch(_sort_by_expert, (num_experts,))(
        ids_TK.contiguous(),
        assignment_ES,
        count_E,
        num_tokens * top_k,
        num_tokens,
        STEPS=triton.cdiv(num_tokens * top_k, SCAN),
        BLOCK=SCAN,
    )
    return Buckets(assignment_ES, count_E)


@triton.jit
def _sort_by_expert(
    ids, assignment_ES, count_E, num_assignments, capacity, STEPS: tl.constexpr, BLOCK: tl.constexpr
):
    expert = tl.program_id(0)
    total = 0
    for i in range(STEPS):
        assignment = i * BLOCK + tl.arange(0, BLOCK)
        here = tl.load(ids + assignment, mask=assignment < num_assignments, other=-1)
        mine = (here == expert).to(tl.int32)
        slot = total + tl.cumsum(mine, 0) - 1
        tl.store(assignment_ES + expert * capacity + slot, assignment, mask=mine > 0)
        total += tl.sum(mine, 0)
    tl.store(count_E + expert, total)


@triton.jit
def row_block(count_E, number, E: tl.constexpr, P: tl.constexpr, BM: tl.constexpr):
    """Return the expert of a row block, its first row, and the number of the expert's rows.

    P is E rounded up to a power of two. Blocks of one expert are neighbours, so that the second to
    read a weight finds it in the L2 cache.
    """
    e = tl.arange(0, P)
    count = tl.load(count_E + e, mask=e < E, other=0)
    end = tl.cumsum((count + BM - 1) // BM, 0)
    is_before = end <= number
    expert = tl.sum(is_before.to(tl.int32), 0)
    begin = (number - tl.max(tl.where(is_before, end, 0), 0)) * BM
    return expert, begin, tl.sum(tl.where(e == expert, count, 0), 0)


@triton.jit
def _load_weight(
    weights, first, columns, offset, N, K, BN: tl.constexpr, BK: tl.constexpr, TMA: tl.constexpr
):
    """Load [BN, BK] of a matrix whose rows from `first` on are the N outputs."""
    if TMA:
        tile = weights.load([first + columns, offset])
    else:
        n = columns + tl.arange(0, BN)
        k = offset + tl.arange(0, BK)
        at = (first + n).to(tl.int64)[:, None] * K + k[None, :]
        if K % BK == 0:
            tile = tl.load(weights + at, mask=(n < N)[:, None], other=0.0)
        else:
            tile = tl.load(weights + at, mask=(n < N)[:, None] & (k < K)[None, :], other=0.0)
    return tile


@triton.jit
def _load_rows(x, row, is_row, offset, K, BK: tl.constexpr):
    k = offset + tl.arange(0, BK)
    at = row.to(tl.int64)[:, None] * K + k[None, :]
    if K % BK == 0:
        rows = tl.load(x + at, mask=is_row[:, None], other=0.0)
    else:
        rows = tl.load(x + at, mask=is_row[:, None] & (k < K)[None, :], other=0.0)
    return rows


@triton.jit
def _dot(rows, tile, total, SWAP_AB: tl.constexpr):
    if SWAP_AB:
        total = tl.dot(tile, tl.trans(rows), total)
    else:
        total = tl.dot(rows, tl.trans(tile), total)
    return total


@triton.jit
def _grouped_gemm(
    x,
    weights,
    out,
    row_scale,
    column_scale,
    assignment_ES,
    count_E,
    capacity,
    GATED: tl.constexpr,
    HAS_SCALES: tl.constexpr,
    TOP_K: tl.constexpr,
    E: tl.constexpr,
    P: tl.constexpr,
    K: tl.constexpr,
    N: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    TAIL: tl.constexpr,
    SWAP_AB: tl.constexpr,
    TMA: tl.constexpr,
    PDL: tl.constexpr,
):
    """GATED: gelu(gate) * up of tokens, whose weights are [2 N, K]; otherwise of assignments.

    An expert's last block takes tiles of TAIL rows if that is enough: under even routing the number
    of rows is often just above a multiple of BM.
    """
    gdc_wait(PDL)
    tiles: tl.constexpr = (N + BN - 1) // BN
    columns = (tl.program_id(0) % tiles) * BN
    expert, begin, count = row_block(count_E, tl.program_id(0) // tiles, E, P, BM)
    slots = assignment_ES + expert * capacity
    left = count - begin
    if left > TAIL:
        _expert_tile(
            x, weights, out, row_scale, column_scale, slots, expert, begin, count, columns,
            GATED, HAS_SCALES, TOP_K, K, N, BM, BN, BK, SWAP_AB, TMA,
        )  # fmt: skip
    elif TAIL > 0:
        if left > 0:
            _expert_tile(
                x, weights, out, row_scale, column_scale, slots, expert, begin, count, columns,
                GATED, HAS_SCALES, TOP_K, K, N, TAIL, BN, BK, True, TMA,
            )  # fmt: skip


@triton.jit
def _expert_tile(
    x,
    weights,
    out,
    row_scale,
    column_scale,
    slots,
    expert,
    begin,
    count,
    columns,
    GATED: tl.constexpr,
    HAS_SCALES: tl.constexpr,
    TOP_K: tl.constexpr,
    K: tl.constexpr,
    N: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    SWAP_AB: tl.constexpr,
    TMA: tl.constexpr,
):
    """Compute BM rows of an expert, from `begin` on, by BN of its outputs."""
    first = expert * (2 * N if GATED else N)
    n = columns + tl.arange(0, BN)
    m = begin + tl.arange(0, BM)
    is_row = m < count
    assignment = tl.load(slots + m, mask=is_row, other=0)
    row = assignment // TOP_K if GATED else assignment
    if SWAP_AB:
        total = tl.zeros((BN, BM), dtype=tl.float32)
        ups = tl.zeros((BN, BM), dtype=tl.float32)
    else:
        total = tl.zeros((BM, BN), dtype=tl.float32)
        ups = tl.zeros((BM, BN), dtype=tl.float32)
    for offset in range(0, K, BK):
        rows = _load_rows(x, row, is_row, offset, K, BK)
        tile = _load_weight(weights, first, columns, offset, N, K, BN, BK, TMA)
        if GATED:
            up_tile = _load_weight(weights, first + N, columns, offset, N, K, BN, BK, TMA)
        total = _dot(rows, tile, total, SWAP_AB)
        if GATED:
            ups = _dot(rows, up_tile, ups, SWAP_AB)
    if SWAP_AB:
        total = tl.trans(total)
        ups = tl.trans(ups)
    if HAS_SCALES:
        scale = tl.load(row_scale + row, mask=is_row, other=0.0)[:, None]
        total *= scale * tl.load(column_scale + first + n, mask=n < N, other=0.0)[None, :]
        if GATED:
            up = first + N
            ups *= scale * tl.load(column_scale + up + n, mask=n < N, other=0.0)[None, :]
    if GATED:
        total = gelu_mul(total, ups)
    at = assignment.to(tl.int64)[:, None] * N + n[None, :]
    is_here = is_row[:, None] & (n < N)[None, :]
    tl.store(out + at, total.to(out.dtype.element_ty), mask=is_here)
