"""Root-mean-square norm: statistics and weight in float32, result in the input's type."""

import torch.nn.functional as F
from torch import Tensor

from dgemma.ops.fast import is_on


def rms_norm(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """Scale the last dimension to unit mean square, times an optional weight."""
    if is_on(x) and x.is_contiguous() and x.numel():
        from dgemma.ops.kernels import layer

        return layer.norm(x, weight, eps)
    scale = None if weight is None else weight.float()
    return F.rms_norm(x.float(), x.shape[-1:], scale, eps).to(x.dtype)
