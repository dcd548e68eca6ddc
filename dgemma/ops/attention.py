"""Attention of one row over keys that lie in several places, without joining them.

The keys of a row are a few segments (a shared prefix, the row's own past, the tokens of this
pass). On a CPU each is attended to where it lies, and the partial results are merged by their
log-sum-exp; elsewhere, where no public kernel returns one, several segments are joined first.
Query heads that share a key head are folded into the query length, so keys are never repeated.

L queries, S keys, N query heads, M key heads, G = N / M, H head width.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Segment:
    """Keys and values in one place, and which of them each query sees (None: all of them)."""

    k_SMH: Tensor
    v_SMH: Tensor
    mask_LS: Tensor | None = None


def attention(q_LNH: Tensor, segments: list[Segment]) -> Tensor:
    """Attend to all segments at once. The scale is 1: queries and keys come normalised."""
    if len(segments) == 1:
        return _one(q_LNH, segments[0])
    if can_merge(q_LNH, segments):
        return _merged(q_LNH, segments)
    return _one(q_LNH, joined(q_LNH, segments))


def attention_reference(q_LNH: Tensor, segments: list[Segment]) -> Tensor:
    """The definition: join the segments, one softmax over all visible keys, in float32."""
    whole = joined(q_LNH, segments)
    groups = q_LNH.shape[1] // whole.k_SMH.shape[1]
    k_SNH = whole.k_SMH.repeat_interleave(groups, dim=1)
    v_SNH = whole.v_SMH.repeat_interleave(groups, dim=1)
    scores_NLS = torch.einsum("lnh,snh->nls", q_LNH.float(), k_SNH.float())
    if whole.mask_LS is not None:
        scores_NLS = scores_NLS.masked_fill(~whole.mask_LS, float("-inf"))
    out_LNH = torch.einsum("nls,snh->lnh", scores_NLS.softmax(-1), v_SNH.float())
    return out_LNH.to(q_LNH.dtype)


def can_merge(q_LNH: Tensor, segments: list[Segment]) -> bool:
    """Whether the partial results can be merged: on the CPU, whose kernel returns log-sum-exps.

    A row that sees nothing of a segment gets a log-sum-exp of 0 from that kernel instead of
    minus infinity, so only the last segment, where each query sees itself, may have a mask.
    """
    return q_LNH.device.type == "cpu" and all(s.mask_LS is None for s in segments[:-1])


def joined(q_LNH: Tensor, segments: list[Segment]) -> Segment:
    """All segments as one, copied."""
    masks = [s.mask_LS if s.mask_LS is not None else _see_all(q_LNH, s) for s in segments]
    is_masked = any(s.mask_LS is not None for s in segments)
    return Segment(
        torch.cat([s.k_SMH for s in segments]),
        torch.cat([s.v_SMH for s in segments]),
        torch.cat(masks, dim=1) if is_masked else None,
    )


def _see_all(q_LNH: Tensor, segment: Segment) -> Tensor:
    shape = (q_LNH.shape[0], segment.k_SMH.shape[0])
    return torch.ones(shape, dtype=torch.bool, device=q_LNH.device)


def _one(q_LNH: Tensor, segment: Segment) -> Tensor:
    q_MXH, k_MSH, v_MSH, mask_XS = _fold(q_LNH, segment)
    out_MXH = F.scaled_dot_product_attention(q_MXH, k_MSH, v_MSH, attn_mask=mask_XS, scale=1.0)
    return _unfold(out_MXH, q_LNH)


def _merged(q_LNH: Tensor, segments: list[Segment]) -> Tensor:
    outs, logs = zip(*[_partial(q_LNH, segment) for segment in segments], strict=True)
    share_PMX = torch.stack(logs).softmax(0)
    out_MXH = torch.einsum("pmx,pmxh->mxh", share_PMX, torch.stack(outs).float())
    return _unfold(out_MXH[None].to(q_LNH.dtype), q_LNH)


def _partial(q_LNH: Tensor, segment: Segment) -> tuple[Tensor, Tensor]:
    q_MXH, k_MSH, v_MSH, mask_XS = _fold(q_LNH, segment)
    if mask_XS is not None:
        mask_XS = torch.zeros_like(mask_XS, dtype=q_LNH.dtype).masked_fill(~mask_XS, float("-inf"))
    out, log = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        q_MXH, k_MSH, v_MSH, 0.0, False, attn_mask=mask_XS, scale=1.0
    )
    return out[0], log[0]


def _fold(q_LNH: Tensor, segment: Segment) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Lay the G queries of one key head behind one another: X = G * L queries, batch of one."""
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
