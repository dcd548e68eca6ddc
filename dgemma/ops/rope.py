"""Rotary positions. Pairs are (i, i + H/2); a head may leave its last frequencies unturned.

T tokens, N heads, H head width, P = H / 2 pairs.
"""

import torch
from torch import Tensor


def frequencies(head_dim: int, theta: float, rotary_fraction: float) -> Tensor:
    """Turns per position of each pair: exponents over the whole head, zero beyond the fraction.

    This is "proportional" rotary embedding; with a fraction of 1 it is the usual one.
    """
    turning = int(rotary_fraction * head_dim // 2)
    exponents = torch.arange(0, 2 * turning, 2, dtype=torch.float32) / head_dim
    return torch.cat([1.0 / theta**exponents, torch.zeros(head_dim // 2 - turning)])


def turns(positions_T: Tensor, frequencies_P: Tensor) -> tuple[Tensor, Tensor]:
    """Cosine and sine of every position and pair, computed once a pass for all layers."""
    angles_TP = positions_T.float()[:, None] * frequencies_P.to(positions_T.device)
    return angles_TP.cos(), angles_TP.sin()


def rotate(x_TNH: Tensor, cos_TP: Tensor, sin_TP: Tensor) -> Tensor:
    """Turn each pair by its angle."""
    first, second = x_TNH.chunk(2, dim=-1)
    cos_T1P, sin_T1P = cos_TP[:, None].to(x_TNH.dtype), sin_TP[:, None].to(x_TNH.dtype)
    return torch.cat(
        [first * cos_T1P - second * sin_T1P, second * cos_T1P + first * sin_T1P], dim=-1
    )
