"""RMSNorm and rotary position embedding, for the text stack and the image tower.

RoPE rotates the pairs (i, i + H/2); a layer may leave its last pairs unrotated.

T tokens, N heads, H head width, P = H / 2 pairs.
"""

from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

from dgemma.config import AttentionShape, LayerType, ModelConfig

CosSin = dict[LayerType, tuple[Tensor, Tensor]]  # cos_TP and sin_TP of each layer type


def rms_norm(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """RMSNorm of the last dimension: statistics and weight in float32, result in x's dtype."""
    scale = None if weight is None else weight.float()
    if is_cpu_inference(x):
        return _rms_norm_cpu(x, scale, eps)
    return F.rms_norm(x.float(), x.shape[-1:], scale, eps).to(x.dtype)


def is_cpu_inference(x: Tensor) -> bool:
    """True on a CPU in inference mode: no autograd and no compiler record the ops.

    False in training's no-grad self-conditioning pass, which must round like its gradient pass.
    """
    if x.device.type != "cpu" or torch.compiler.is_compiling():
        return False
    return torch.is_inference_mode_enabled()


def _rms_norm_cpu(x: Tensor, scale: Tensor | None, eps: float) -> Tensor:
    """Compute the same values with fewer and shorter passes over memory than `F.rms_norm`."""
    y = x.float()
    length = torch.linalg.vector_norm(y, dim=-1, keepdim=True)
    y = y * torch.addcmul(scalar(eps), length, length, value=1 / x.shape[-1]).rsqrt_()
    return (y if scale is None else y.mul_(scale)).to(x.dtype)


@cache
@torch.inference_mode(False)
def scalar(value: float) -> Tensor:
    """Return a 0-d tensor: small CPU ops are several times faster with it than with a number."""
    return torch.tensor(value)


@cache
@torch.inference_mode(False)
def inverse_frequencies(shape: AttentionShape, device: torch.device) -> Tensor:
    """Inverse frequencies of all pairs: exponents over the whole head, zero past the fraction.

    This is "proportional" RoPE, the usual RoPE if the fraction is 1. Cached per device: a
    host-to-device copy would stall every pass.
    """
    rotated = int(shape.rotary_fraction * shape.head_dim // 2)
    exponents = torch.arange(0, 2 * rotated, 2, dtype=torch.float32) / shape.head_dim
    unrotated = torch.zeros(shape.head_dim // 2 - rotated)
    return torch.cat([1.0 / shape.rope_theta**exponents, unrotated]).to(device)


def layer_frequencies(config: ModelConfig, device: torch.device) -> dict[LayerType, Tensor]:
    """Inverse frequencies of each layer type, in order of first appearance."""
    types = config.layer_types
    return {
        layer_type: inverse_frequencies(config.attention(types.index(layer_type)), device)
        for layer_type in dict.fromkeys(types)
    }


def cos_sin(positions_T: Tensor, freq_P: Tensor) -> tuple[Tensor, Tensor]:
    """Return cosine and sine of each position and pair."""
    angles_TP = positions_T.float()[:, None] * freq_P
    return angles_TP.cos(), angles_TP.sin()


def rope_cos_sin(config: ModelConfig, positions_T: Tensor) -> CosSin:
    """Return cosine and sine per layer type, computed once per pass."""
    tables = layer_frequencies(config, positions_T.device)
    return {layer_type: cos_sin(positions_T, freq_P) for layer_type, freq_P in tables.items()}


def apply_rope(x_TNH: Tensor, cos_TP: Tensor, sin_TP: Tensor) -> Tensor:
    """Rotate each pair by its angle."""
    first, second = x_TNH.chunk(2, dim=-1)
    cos_T1P, sin_T1P = cos_TP[:, None].to(x_TNH.dtype), sin_TP[:, None].to(x_TNH.dtype)
    if x_TNH.dtype == torch.float32 and is_cpu_inference(x_TNH):
        # Half the time without a concatenation. In 16 bits each op rounds, as on a GPU.
        out_TNH = torch.empty_like(x_TNH)
        first_out, second_out = out_TNH.chunk(2, dim=-1)
        torch.mul(first, cos_T1P, out=first_out).addcmul_(second, sin_T1P, value=-1)
        torch.mul(second, cos_T1P, out=second_out).addcmul_(first, sin_T1P)
        return out_TNH
    return torch.cat(
        [first * cos_T1P - second * sin_T1P, second * cos_T1P + first * sin_T1P], dim=-1
    )
