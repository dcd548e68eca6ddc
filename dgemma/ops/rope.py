"""Rotary positions. Pairs are (i, i + H/2); a head may leave its last frequencies unturned.

T tokens, N heads, H head width, P = H / 2 pairs.
"""

from functools import cache

import torch
from torch import Tensor

from dgemma.config import AttentionShape, ModelConfig
from dgemma.ops.fast import infers_on_cpu


@cache
@torch.inference_mode(False)
def frequencies(shape: AttentionShape, device: torch.device) -> Tensor:
    """Turns per position of each pair: exponents over the whole head, zero beyond the fraction.

    This is "proportional" rotary embedding; with a fraction of 1 it is the usual one. Kept for each
    device, since a copy to it would make every pass wait.
    """
    turning = int(shape.rotary_fraction * shape.head_dim // 2)
    exponents = torch.arange(0, 2 * turning, 2, dtype=torch.float32) / shape.head_dim
    still = torch.zeros(shape.head_dim // 2 - turning)
    return torch.cat([1.0 / shape.rope_theta**exponents, still]).to(device)


def turns(positions_T: Tensor, frequencies_P: Tensor) -> tuple[Tensor, Tensor]:
    """Cosine and sine of every position and pair, computed once a pass for all layers."""
    angles_TP = positions_T.float()[:, None] * frequencies_P
    return angles_TP.cos(), angles_TP.sin()


def frequencies_by_kind(config: ModelConfig, device: torch.device) -> dict[str, Tensor]:
    """The frequencies of each kind of layer."""
    kinds = config.layer_types
    return {
        kind: frequencies(config.attention(kinds.index(kind)), device)
        for kind in dict.fromkeys(kinds)
    }


def turns_by_kind(config: ModelConfig, positions_T: Tensor) -> dict[str, tuple[Tensor, Tensor]]:
    """The turns of each kind of layer."""
    found = frequencies_by_kind(config, positions_T.device)
    return {kind: turns(positions_T, frequencies_P) for kind, frequencies_P in found.items()}


def rotate(x_TNH: Tensor, cos_TP: Tensor, sin_TP: Tensor) -> Tensor:
    """Turn each pair by its angle."""
    first, second = x_TNH.chunk(2, dim=-1)
    cos_T1P, sin_T1P = cos_TP[:, None].to(x_TNH.dtype), sin_TP[:, None].to(x_TNH.dtype)
    if x_TNH.dtype == torch.float32 and infers_on_cpu(x_TNH):
        # Half the time: no pass joins the halves. In 16 bits each product is rounded, as elsewhere.
        turned_TNH = torch.empty_like(x_TNH)
        first_out, second_out = turned_TNH.chunk(2, dim=-1)
        torch.mul(first, cos_T1P, out=first_out).addcmul_(second, sin_T1P, value=-1)
        torch.mul(second, cos_T1P, out=second_out).addcmul_(first, sin_T1P)
        return turned_TNH
    return torch.cat(
        [first * cos_T1P - second * sin_T1P, second * cos_T1P + first * sin_T1P], dim=-1
    )
