"""Attention of one sequence over keys in several buffers, without concatenating them.

The keys are in a few segments (a shared prefix, committed tokens, tokens of this pass). On a CPU
each segment is attended to in place and the partial results are merged by log-sum-exp. Elsewhere no
public kernel returns a log-sum-exp, so segments are concatenated. Query heads that share a key head
are folded into the query length, so keys are never repeated.

L queries, S keys, N query heads, M key heads, G = N / M, H head width.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True, slots=True)
class KVSegment:
    """Contiguous keys and values, and the mask of keys each query sees (None: all of them)."""

    k_SMH: Tensor
    v_SMH: Tensor
    mask_LS: Tensor | None = None


def attention(q_LNH: Tensor, segments: list[KVSegment]) -> Tensor:
    """Attend to all segments with one softmax. The scale is 1: queries and keys are normalized."""
    if len(segments) == 1:
        return _attend(q_LNH, segments[0])
    if can_merge(q_LNH, segments):
        return _merge_partials(q_LNH, segments)
    return _attend(q_LNH, concat(q_LNH, segments))


def attention_reference(q_LNH: Tensor, segments: list[KVSegment]) -> Tensor:
    """Define the op: concatenate the segments, softmax over all visible keys in float32."""
    merged = concat(q_LNH, segments)
    groups = q_LNH.shape[1] // merged.k_SMH.shape[1]
    k_SNH = merged.k_SMH.repeat_interleave(groups, dim=1)
    v_SNH = merged.v_SMH.repeat_interleave(groups, dim=1)
    logits_NLS = torch.einsum("lnh,snh->nls", q_LNH.float(), k_SNH.float())
    if merged.mask_LS is not None:
        logits_NLS = logits_NLS.masked_fill(~merged.mask_LS, float("-inf"))
    out_LNH = torch.einsum("nls,snh->lnh", logits_NLS.softmax(-1), v_SNH.float())
    return out_LNH.to(q_LNH.dtype)


def can_merge(q_LNH: Tensor, segments: list[KVSegment]) -> bool:
    """True if partial results can be merged: on a CPU, where the kernel returns log-sum-exps.

    For a query without visible keys the kernel returns 0, not minus infinity. So only the last
    segment, where each query sees itself, may have a mask.
    """
    return q_LNH.device.type == "cpu" and all(s.mask_LS is None for s in segments[:-1])


def concat(q_LNH: Tensor, segments: list[KVSegment]) -> KVSegment:
    """Concatenate all segments into one."""
    masks = [s.mask_LS if s.mask_LS is not None else _full_mask(q_LNH, s) for s in segments]
    is_masked = any(s.mask_LS is not None for s in segments)
    return KVSegment(
        torch.cat([s.k_SMH for s in segments]),
        torch.cat([s.v_SMH for s in segments]),
        torch.cat(masks, dim=1) if is_masked else None,
    )


def _full_mask(q_LNH: Tensor, segment: KVSegment) -> Tensor:
    shape = (q_LNH.shape[0], segment.k_SMH.shape[0])
    return torch.ones(shape, dtype=torch.bool, device=q_LNH.device)


def _attend(q_LNH: Tensor, segment: KVSegment) -> Tensor:
    q_MXH, k_MSH, v_MSH, mask_XS = _fold(q_LNH, segment)
    out_MXH = F.scaled_dot_product_attention(q_MXH, k_MSH, v_MSH, attn_mask=mask_XS, scale=1.0)
    return _unfold(out_MXH, q_LNH)


def _merge_partials(q_LNH: Tensor, segments: list[KVSegment]) -> Tensor:
    outs, lses = zip(*[_attend_with_lse(q_LNH, segment) for segment in segments], strict=True)
    weight_PMX = torch.stack(lses).softmax(0)
    out_MXH = torch.einsum("pmx,pmxh->mxh", weight_PMX, torch.stack(outs).float())
    return _unfold(out_MXH[None].to(q_LNH.dtype), q_LNH)


def _attend_with_lse(q_LNH: Tensor, segment: KVSegment) -> tuple[Tensor, Tensor]:
    q_MXH, k_MSH, v_MSH, mask_XS = _fold(q_LNH, segment)
    if mask_XS is not None:
        mask_XS = torch.zeros_like(mask_XS, dtype=q_LNH.dtype).masked_fill(~mask_XS, float("-inf"))
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        q_MXH, k_MSH, v_MSH, 0.0, False, attn_mask=mask_XS, scale=1.0
    )
    return out[0], lse[0]


def _fold(q_LNH: Tensor, segment: KVSegment) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Fold the G query heads of a key head into the length: X = G * L queries, batch 1."""
    length, _, width = q_LNH.shape
    kv_heads = segment.k_SMH.shape[1]
    q_MXH = q_LNH.view(length, kv_heads, -1, width).permute(1, 2, 0, 3).reshape(kv_heads, -1, width)
    groups = q_MXH.shape[1] // length
    mask_XS = None if segment.mask_LS is None else segment.mask_LS.repeat(groups, 1)
    k_MSH, v_MSH = segment.k_SMH.transpose(0, 1), segment.v_SMH.transpose(0, 1)
    return q_MXH[None], k_MSH[None], v_MSH[None], mask_XS


def _unfold(out_MXH: Tensor, q_LNH: Tensor) -> Tensor:
    length, heads, width = q_LNH.shape
    out_MGLH = out_MXH[0].view(out_MXH.shape[1], -1, length, width)
    return out_MGLH.permute(2, 0, 1, 3).reshape(length, heads, width)
