"""Root-mean-square norm: statistics and weight in float32, result in the input's type."""

import torch.nn.functional as F
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """Scale the last dimension to unit mean square, times an optional weight."""
    scale = None if weight is None else weight.float()
    return F.rms_norm(x.float(), x.shape[-1:], scale, eps).to(x.dtype)
