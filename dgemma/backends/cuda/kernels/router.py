"""The router in two launches: parts of the scores by all of the GPU, then the choice row by row.

The product is small, 256 rows by 128 experts, and its depth is split so that every SM has a
share. The second kernel adds the parts up, always in the same order, takes the best, and hands the
choices out to the experts on its way. In which order an expert gets its rows is left to chance;
each row's product stands alone, so no result depends on it.

T tokens, D width, E experts, K of them per token, S parts of the depth.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from dgemma.backends.cuda.configs import RouterConfig, router_config
from dgemma.backends.cuda.kernels.moe_sort import Buckets
from dgemma.backends.cuda.kernels.pdl import REGISTERS, gdc_wait, pdl_kwargs

TAKEN = tl.constexpr(-(1 << 31))  # less than any score's number


@dataclass(frozen=True, slots=True)
class Parts:
    """Scores in parts that are still to be added up; counts that are zero, or none to be made."""

    part_STE: Tensor
    count_E: Tensor | None = None


def parts(x_TD: Tensor, weight_ED: Tensor, form: RouterConfig | None = None) -> Parts:
    """The scores of every expert, in parts."""
    rows, width = x_TD.shape
    num_experts = len(weight_ED)
    form = form or router_config(rows, num_experts, width)
    count = triton.cdiv(width, form.share)
    part_STE = torch.empty(count, rows, num_experts, dtype=torch.float32, device=x_TD.device)
    count_E = torch.empty(num_experts, dtype=torch.int32, device=x_TD.device)
    grid = (triton.cdiv(rows, form.rows), triton.cdiv(num_experts, form.columns), count)
    _parts[grid](
        x_TD,
        weight_ED,
        part_STE,
        count_E,
        rows,
        D=width,
        E=num_experts,
        SHARE=form.share,
        BM=form.rows,
        BN=form.columns,
        BK=form.depth,
        COUNTS=triton.next_power_of_2(num_experts),
        num_warps=form.warps,
        num_stages=form.stages,
        **pdl_kwargs(),
    )
    return Parts(part_STE, count_E)


def choose(
    found: Parts, scale_E: Tensor, top_k: int, warps: int = 1
) -> tuple[Tensor, Tensor, Buckets | None]:
    """The likeliest experts of each token, their shares, and each expert's choices if counted."""
    count, rows, num_experts = found.part_STE.shape
    device = scale_E.device
    ids_TK = torch.empty(rows, top_k, dtype=torch.int32, device=device)
    share_TK = torch.empty(rows, top_k, dtype=torch.float32, device=device)
    into = None
    if found.count_E is not None:
        choice_ES = torch.empty(num_experts, rows, dtype=torch.int32, device=device)
        into = Buckets(choice_ES, found.count_E)
    is_ranked = rows == 1 and into is None
    _choose[(rows,)](
        found.part_STE,
        scale_E,
        ids_TK,
        share_TK,
        ids_TK if into is None else into.choice_ES,
        ids_TK if into is None else into.count_E,
        rows,
        top_k,
        S=count,
        E=num_experts,
        K=top_k,
        FILL=into is not None,
        RANKS=is_ranked,
        SS=triton.next_power_of_2(count),
        BLOCK=triton.next_power_of_2(num_experts),
        KS=triton.next_power_of_2(top_k),
        num_warps=8 if is_ranked else warps,
        maxnreg=REGISTERS,
        **pdl_kwargs(),
    )
    return ids_TK, share_TK, into


@triton.jit
def _parts(
    x_TD,
    weight_ED,
    part_STE,
    count_E,
    rows,
    D: tl.constexpr,
    E: tl.constexpr,
    SHARE: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    COUNTS: tl.constexpr,
    PDL: tl.constexpr,
):
    part = tl.program_id(2)
    m = tl.program_id(0) * BM + tl.arange(0, BM)
    n = tl.program_id(1) * BN + tl.arange(0, BN)
    ahead: tl.constexpr = SHARE == BK  # all of the weight that a program reads
    if ahead:
        w = _weight(weight_ED, n, part * SHARE + tl.arange(0, BK), D, E)
    gdc_wait(PDL)
    if (tl.program_id(0) == 0) & (tl.program_id(1) == 0) & (part == 0):
        e = tl.arange(0, COUNTS)
        tl.store(count_E + e, tl.zeros((COUNTS,), dtype=tl.int32), mask=e < E)
    total = tl.zeros((BM, BN), dtype=tl.float32)
    for offset in range(0, SHARE, BK):
        k = part * SHARE + offset + tl.arange(0, BK)
        at = m.to(tl.int64)[:, None] * D + k[None, :]
        x = tl.load(x_TD + at, mask=(m < rows)[:, None] & (k < D)[None, :], other=0.0)
        if not ahead:
            w = _weight(weight_ED, n, k, D, E)
        total = tl.dot(x, tl.trans(w), total)
    at = (part * rows + m).to(tl.int64)[:, None] * E + n[None, :]
    tl.store(part_STE + at, total, mask=(m < rows)[:, None] & (n < E)[None, :])


@triton.jit
def _weight(weight_ED, n, k, D: tl.constexpr, E: tl.constexpr):
    at = n[:, None] * D + k[None, :]
    return tl.load(weight_ED + at, mask=(n < E)[:, None] & (k < D)[None, :], other=0.0)


@triton.jit(do_not_specialize=["places"])
def _choose(
    part_STE,
    scale_E,
    ids_TK,
    share_TK,
    choice_ES,
    count_E,
    rows,
    places,
    S: tl.constexpr,
    E: tl.constexpr,
    K: tl.constexpr,
    FILL: tl.constexpr,
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
    part = tl.load(part_STE + at, mask=(s < S)[:, None] & (e < E)[None, :], other=0.0)
    logits = tl.sum(part.to(tl.float32), 0)
    # What is no number is worth least, but still more than what is no expert or already taken: a
    # token never chooses an expert twice, whatever its scores.
    logits = tl.where(logits > -3e38, logits, -3e38)
    if RANKS:
        logits = tl.where(e < E, logits, float("-inf"))
        # How many are better, for all at once: the order is the same as below.
        better = logits[None, :] > logits[:, None]
        better = better | ((logits[None, :] == logits[:, None]) & (e[None, :] < e[:, None]))
        rank = tl.sum(better.to(tl.int32), 1)
        is_best = rank < K
        shares = tl.where(is_best, tl.exp(logits - tl.max(logits, 0)), 0.0)
        shares = shares / tl.sum(shares, 0) * scale
        tl.store(ids_TK + row * K + rank, e, mask=is_best)
        tl.store(share_TK + row * K + rank, shares, mask=is_best)
    else:
        # Whole numbers in the order of the scores: a warp finds their greatest in one instruction,
        # where floats take ten. Zero is added because there are two of them.
        key = _turned((logits + 0.0).to(tl.int32, bitcast=True))
        key = tl.where(e < E, key, TAKEN)
        scale = scale.to(tl.int32, bitcast=True)
        ids = tl.zeros((KS,), dtype=tl.int32)
        keys = tl.zeros((KS,), dtype=tl.int32)
        scales = tl.zeros((KS,), dtype=tl.int32)
        # Told at run time how often: written out K times, its instructions are fetched K times.
        for place in range(places):
            best = tl.max(key, 0)
            where = tl.min(tl.where(key == best, e, BLOCK - 1), 0)
            ids = tl.where(k == place, where, ids)
            keys = tl.where(k == place, best, keys)
            scales = tl.where(k == place, tl.sum(tl.where(e == where, scale, 0), 0), scales)
            key = tl.where(e == where, TAKEN, key)
        best = tl.where(k < K, _turned(keys).to(tl.float32, bitcast=True), float("-inf"))
        # Of the softmax only ratios are left once the shares are made to add up to one.
        shares = tl.exp(best - tl.max(best, 0))
        shares = shares / tl.sum(shares, 0) * scales.to(tl.float32, bitcast=True)
        tl.store(ids_TK + row * K + k, ids, mask=k < K)
        tl.store(share_TK + row * K + k, shares, mask=k < K)
        if FILL:
            number = tl.atomic_add(count_E + ids, 1, mask=k < K, sem="relaxed")
            tl.store(choice_ES + ids * rows + number, row * K + k, mask=k < K)


@triton.jit
def _turned(bits):
    """A float's bits as a whole number that is ordered as floats are, and back."""
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)
