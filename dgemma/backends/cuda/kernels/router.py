"""The router in two launches: a split-K GEMM for the logits, then the top-k of each row.

The GEMM is small, 256 rows by 128 experts, so its depth is split to fill the GPU. The second kernel
adds the splits in a fixed order, takes the top-k, and sorts the assignments by expert on the way.
The order of an expert's rows depends on timing; each row's output does not depend on it.

T tokens, D width, E experts, K of them per token, S splits.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from dgemma.backends.cuda.configs import RouterConfig, router_config
from dgemma.backends.cuda.kernels.common import REGISTERS, gdc_wait, launch, pdl_kwargs
from dgemma.backends.cuda.kernels.moe import Buckets

TAKEN = tl.constexpr(-(1 << 31))  # below every sort key


@dataclass(frozen=True, slots=True)
class RouterLogits:
    """Logits in splits, still to be added; zeroed counts if assignments are to be sorted."""

    logits_STE: Tensor
    count_E: Tensor | None = None


def router_logits(
    x_TD: Tensor, weight_ED: Tensor, config: RouterConfig | None = None
) -> RouterLogits:
    """Compute the logits of every expert, in splits."""
    (rows, width), num_experts = x_TD.shape, len(weight_ED)
    config = config or router_config(rows, num_experts, width)
    splits = triton.cdiv(width, config.k_split)
    logits_STE = torch.empty(splits, rows, num_experts, dtype=torch.float32, device=x_TD.device)
    count_E = torch.empty(num_experts, dtype=torch.int32, device=x_TD.device)
    grid = (triton.cdiv(rows, config.rows), triton.cdiv(num_experts, config.columns), splits)
    launch(_router_logits, grid)(
        x_TD,
        weight_ED,
        logits_STE,
        count_E,
        rows,
        D=width,
        E=num_experts,
        K_SPLIT=config.k_split,
        BM=config.rows,
        BN=config.columns,
        BK=config.depth,
        COUNTS=triton.next_power_of_2(num_experts),
        num_warps=config.warps,
        num_stages=config.stages,
        **pdl_kwargs(),
    )
    return RouterLogits(logits_STE, count_E)


def topk(
    logits: RouterLogits, scale_E: Tensor, top_k: int, warps: int = 1
) -> tuple[Tensor, Tensor, Buckets | None]:
    """Return ids and weights of each token's experts, and the assignments sorted if counted."""
    splits, rows, num_experts = logits.logits_STE.shape
    ids_TK = torch.empty(rows, top_k, dtype=torch.int32, device=scale_E.device)
    weights_TK = torch.empty(rows, top_k, dtype=torch.float32, device=scale_E.device)
    buckets = None
    if logits.count_E is not None:
        buckets = Buckets(ids_TK.new_empty(num_experts, rows), logits.count_E)
    is_ranked = rows == 1 and buckets is None
    launch(_topk, (rows,))(
        logits.logits_STE,
        scale_E,
        ids_TK,
        weights_TK,
        ids_TK if buckets is None else buckets.assignment_ES,
        ids_TK if buckets is None else buckets.count_E,
        rows,
        top_k,
        S=splits,
        E=num_experts,
        K=top_k,
        SORT=buckets is not None,
        RANKS=is_ranked,
        SS=triton.next_power_of_2(splits),
        BLOCK=triton.next_power_of_2(num_experts),
        KS=triton.next_power_of_2(top_k),
        num_warps=8 if is_ranked else warps,
        maxnreg=REGISTERS,
        **pdl_kwargs(),
    )
    return ids_TK, weights_TK, buckets


@triton.jit
def _router_logits(
    x_TD,
    weight_ED,
    logits_STE,
    count_E,
    rows,
    D: tl.constexpr,
    E: tl.constexpr,
    K_SPLIT: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    COUNTS: tl.constexpr,
    PDL: tl.constexpr,
):
    split = tl.program_id(2)
    m = tl.program_id(0) * BM + tl.arange(0, BM)
    n = tl.program_id(1) * BN + tl.arange(0, BN)
    prefetch: tl.constexpr = K_SPLIT == BK  # all of the weight that a program reads
    if prefetch:
        w = _load_weight(weight_ED, n, split * K_SPLIT + tl.arange(0, BK), D, E)
    gdc_wait(PDL)
    if (tl.program_id(0) == 0) & (tl.program_id(1) == 0) & (split == 0):
        e = tl.arange(0, COUNTS)
        tl.store(count_E + e, tl.zeros((COUNTS,), dtype=tl.int32), mask=e < E)
    total = tl.zeros((BM, BN), dtype=tl.float32)
    for offset in range(0, K_SPLIT, BK):
        k = split * K_SPLIT + offset + tl.arange(0, BK)
        at = m.to(tl.int64)[:, None] * D + k[None, :]
        x = tl.load(x_TD + at, mask=(m < rows)[:, None] & (k < D)[None, :], other=0.0)
        if not prefetch:
            w = _load_weight(weight_ED, n, k, D, E)
        total = tl.dot(x, tl.trans(w), total)
    at = (split * rows + m).to(tl.int64)[:, None] * E + n[None, :]
    tl.store(logits_STE + at, total, mask=(m < rows)[:, None] & (n < E)[None, :])


@triton.jit
def _load_weight(weight_ED, n, k, D: tl.constexpr, E: tl.constexpr):
    at = n[:, None] * D + k[None, :]
    return tl.load(weight_ED + at, mask=(n < E)[:, None] & (k < D)[None, :], other=0.0)


@triton.jit(do_not_specialize=["top_k"])
def _topk(
    logits_STE,
    scale_E,
    ids_TK,
    weights_TK,
    assignment_ES,
    count_E,
    rows,
    top_k,
    S: tl.constexpr,
    E: tl.constexpr,
    K: tl.constexpr,
    SORT: tl.constexpr,
    RANKS: tl.constexpr,
    SS: tl.constexpr,
    BLOCK: tl.constexpr,
    KS: tl.constexpr,
    PDL: tl.constexpr,
):
    e = tl.arange(0, BLOCK)
    scale = tl.load(scale_E + e, mask=e < E, other=0.0).to(tl.float32)
    gdc_wait(PDL)
    row = tl.program_id(0)
    s = tl.arange(0, SS)
    k = tl.arange(0, KS)
    at = (s * rows + row).to(tl.int64)[:, None] * E + e[None, :]
    splits = tl.load(logits_STE + at, mask=(s < S)[:, None] & (e < E)[None, :], other=0.0)
    logits = tl.sum(splits.to(tl.float32), 0)
    # NaN ranks last, but before padding and experts already taken: no expert is taken twice.
    logits = tl.where(logits > -3e38, logits, -3e38)
    if RANKS:
        logits = tl.where(e < E, logits, float("-inf"))
        # Rank of every expert at once; the order is that of the loop below.
        better = logits[None, :] > logits[:, None]
        better = better | ((logits[None, :] == logits[:, None]) & (e[None, :] < e[:, None]))
        rank = tl.sum(better.to(tl.int32), 1)
        is_best = rank < K
        weights = tl.where(is_best, tl.exp(logits - tl.max(logits, 0)), 0.0)
        weights = weights / tl.sum(weights, 0) * scale
        tl.store(ids_TK + row * K + rank, e, mask=is_best)
        tl.store(weights_TK + row * K + rank, weights, mask=is_best)
    else:
        # Integer keys in the order of the logits: a warp reduces their maximum in one instruction,
        # where floats take ten. Adding zero makes -0 and +0 equal.
        key = _sort_key((logits + 0.0).to(tl.int32, bitcast=True))
        key = tl.where(e < E, key, TAKEN)
        scale = scale.to(tl.int32, bitcast=True)
        ids = tl.zeros((KS,), dtype=tl.int32)
        keys = tl.zeros((KS,), dtype=tl.int32)
        scales = tl.zeros((KS,), dtype=tl.int32)
        # A runtime bound: unrolled K times, the instructions would be fetched K times.
        for index in range(top_k):
            best = tl.max(key, 0)
            expert = tl.min(tl.where(key == best, e, BLOCK - 1), 0)
            ids = tl.where(k == index, expert, ids)
            keys = tl.where(k == index, best, keys)
            scales = tl.where(k == index, tl.sum(tl.where(e == expert, scale, 0), 0), scales)
            key = tl.where(e == expert, TAKEN, key)
        best = tl.where(k < K, _sort_key(keys).to(tl.float32, bitcast=True), float("-inf"))
        # The full softmax cancels out of the renormalized weights.
        weights = tl.exp(best - tl.max(best, 0))
        weights = weights / tl.sum(weights, 0) * scales.to(tl.float32, bitcast=True)
        tl.store(ids_TK + row * K + k, ids, mask=k < K)
        tl.store(weights_TK + row * K + k, weights, mask=k < K)
        if SORT:
            number = tl.atomic_add(count_E + ids, 1, mask=k < K, sem="relaxed")
            tl.store(assignment_ES + ids * rows + number, row * K + k, mask=k < K)


@triton.jit
def _sort_key(bits):
    """Map a float's bits to an integer of the same order, and back."""
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)
