"""The logits of one position, and which tokens are allowed there.

V vocabulary.
"""

import numpy as np
import torch
from torch import Tensor

from dgemma.constrain.closing import Allowed

FEW = 4  # up to this part of a vocabulary it is quicker to pick the allowed than to mask the others
HIDDEN = 1e30  # a logit so far below the others is none


def likeliest(logits_V: Tensor, allowed: Allowed) -> tuple[int, float]:
    """The likeliest allowed token, and its probability among them."""
    ids = np.flatnonzero(allowed)
    if len(ids) <= len(allowed) // FEW:
        p, index = logits_V[torch.from_numpy(ids).to(logits_V.device)].softmax(-1).max(-1)
        return int(ids[int(index)]), float(p)
    # Sums have no branches, which nothing could predict here; numpy finds a maximum ten times as
    # fast.
    allowed_V = torch.from_numpy(allowed).to(logits_V.device).to(logits_V.dtype)
    masked_V = allowed_V.sub_(1).mul_(HIDDEN).add_(logits_V)
    token = int(masked_V.numpy().argmax() if masked_V.is_cpu else masked_V.argmax())
    return token, float(masked_V.softmax(-1)[token])


def masked(logits_V: Tensor, allowed: Allowed) -> Tensor:
    """Logits of what is allowed."""
    allowed_V = torch.from_numpy(allowed).to(logits_V.device)
    return torch.where(allowed_V, logits_V, -torch.inf)
