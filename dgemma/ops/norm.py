"""Root-mean-square norm: statistics and weight in float32, result in the input's type."""

from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

from dgemma.ops.fast import infers_on_cpu, is_on


def rms_norm(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """Scale the last dimension to unit mean square, times an optional weight."""
    if is_on(x) and x.is_contiguous() and x.numel():
        from dgemma.ops.kernels import layer

        return layer.norm(x, weight, eps)
    scale = None if weight is None else weight.float()
    if infers_on_cpu(x):
        return _on_cpu(x, scale, eps)
    return F.rms_norm(x.float(), x.shape[-1:], scale, eps).to(x.dtype)


def _on_cpu(x: Tensor, scale: Tensor | None, eps: float) -> Tensor:
    """The same numbers, in fewer and shorter passes than a CPU's `F.rms_norm` takes."""
    y = x.float()
    length = torch.linalg.vector_norm(y, dim=-1, keepdim=True)
    y = y * torch.addcmul(_number(eps), length, length, value=1 / x.shape[-1]).rsqrt_()
    return (y if scale is None else y.mul_(scale)).to(x.dtype)


@cache
@torch.inference_mode(False)
def _number(value: float) -> Tensor:
    """As a tensor, which small passes add several times as fast as a plain number."""
    return torch.tensor(value)
