"""RMSNorm: statistics and weight in float32, result in the input's dtype."""

from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """Scale the last dimension to unit mean square, times an optional weight."""
    scale = None if weight is None else weight.float()
    if is_cpu_inference(x):
        return _rms_norm_cpu(x, scale, eps)
    return F.rms_norm(x.float(), x.shape[-1:], scale, eps).to(x.dtype)


def is_cpu_inference(x: Tensor) -> bool:
    """True on a CPU in inference mode, where neither autograd nor a compiler records the ops.

    False for the no-grad self-conditioning pass of training, which must round as its gradient pass.
    """
    if x.device.type != "cpu" or torch.compiler.is_compiling():
        return False
    return torch.is_inference_mode_enabled()


def _rms_norm_cpu(x: Tensor, scale: Tensor | None, eps: float) -> Tensor:
    """Compute the same values in fewer and shorter passes than `F.rms_norm` takes on a CPU."""
    y = x.float()
    length = torch.linalg.vector_norm(y, dim=-1, keepdim=True)
    y = y * torch.addcmul(scalar(eps), length, length, value=1 / x.shape[-1]).rsqrt_()
    return (y if scale is None else y.mul_(scale)).to(x.dtype)


@cache
@torch.inference_mode(False)
def scalar(value: float) -> Tensor:
    """Return a 0-d tensor: small CPU ops take it several times as fast as a Python number."""
    return torch.tensor(value)
