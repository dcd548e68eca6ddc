"""Root-mean-square norm: statistics and weight in float32, result in the input's type."""

import torch
import torch.nn.functional as F
from torch import Tensor

from dgemma.ops.fast import is_on


def rms_norm(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """Scale the last dimension to unit mean square, times an optional weight."""
    if is_on(x) and x.is_contiguous() and x.numel():
        from dgemma.ops.kernels import layer

        return layer.norm(x, weight, eps)
    scale = None if weight is None else weight.float()
    if x.device.type == "cpu" and not torch.is_grad_enabled():
        return _on_cpu(x, scale, eps)
    return F.rms_norm(x.float(), x.shape[-1:], scale, eps).to(x.dtype)


def _on_cpu(x: Tensor, scale: Tensor | None, eps: float) -> Tensor:
    """The same numbers, in fewer passes than a CPU's `F.rms_norm` takes."""
    y = x.float()
    y = y * y.square().mean(-1, keepdim=True).add_(eps).rsqrt_()
    return (y if scale is None else y.mul_(scale)).to(x.dtype)
