"""Quantize weights to GGUF blocks: the inverse of the decoders in `gguf`.

F32, F16, BF16, Q8_0, Q5_0 and Q4_0 give the bytes of ggml's reference quantizers. Q4_K and Q6_K
search scales as llama.cpp does: of about twenty candidate roundings each group keeps the one whose
least-squares fit has the smallest error, weighted towards large weights.

R blocks, N weights of a block, G groups of a block that share a scale, S weights of a group.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from dgemma.quant.gguf import FORMATS, BlockFormat

BY_NAME = {block.name: block for block in FORMATS.values()}
CHUNK_WEIGHTS = 1 << 20  # weights quantized at once: the search needs a few copies
Q4_MAX, Q6_MAX = 15, 32
SCALE_BITS_MAX = 63  # of a 6-bit scale or minimum
Q4_K_RANGES = tuple(0.1 * step - 1 for step in range(21))  # added to the 15 steps of a range
Q6_K_RANGES = tuple(0.1 * step for step in range(-9, 10))
TINY = 1e-15


def encode(weight: Tensor, block: BlockFormat) -> Tensor:
    """Quantize a weight to packed bytes, uint8 [rows, bytes of a row], on its device.

    The last dimension must be a multiple of the block's.
    """
    rows_RN = weight.reshape(-1, weight.shape[-1])
    num_rows = max(1, CHUNK_WEIGHTS // rows_RN.shape[1])
    packed = [
        ENCODERS[block.name](chunk.float().reshape(-1, block.num_weights)).view(len(chunk), -1)
        for chunk in torch.split(rows_RN, num_rows)
    ]
    return torch.cat(packed)


def _bytes(values: Tensor) -> Tensor:
    return values.contiguous().view(torch.uint8)


def _half(scale_R1: Tensor) -> Tensor:
    return _bytes(scale_R1.to(torch.float16))


def _inverse(scale: Tensor) -> Tensor:
    return torch.where(scale == 0, 0.0, 1 / scale)


def _round_away(values: Tensor) -> Tensor:
    """Round halves away from zero, as C's roundf."""
    size = values.abs().floor()
    size += (values.abs() - size >= 0.5).float()
    return size.copysign(values)


def _largest(values: Tensor) -> Tensor:
    """Return the value of largest magnitude along the last dimension."""
    return values.gather(-1, values.abs().argmax(-1, keepdim=True))


def _pair_nibbles(values: Tensor) -> Tensor:
    """Pack 4-bit values: the first half of the last dimension low, the second half high."""
    low, high = values.to(torch.uint8).chunk(2, -1)
    return low | high << 4


def _q8_0(weight_RN: Tensor) -> Tensor:
    scale_R1 = weight_RN.abs().amax(-1, keepdim=True) / 127
    values_RN = _round_away(weight_RN * _inverse(scale_R1)).to(torch.int8)
    return torch.cat([_half(scale_R1), values_RN.view(torch.uint8)], -1)


def _q4_0(weight_RN: Tensor) -> Tensor:
    scale_R1 = _largest(weight_RN) / -8
    values_RN = (weight_RN * _inverse(scale_R1) + 8.5).trunc().clamp(0, 15)
    return torch.cat([_half(scale_R1), _pair_nibbles(values_RN)], -1)


def _q5_0(weight_RN: Tensor) -> Tensor:
    scale_R1 = _largest(weight_RN) / -16
    values_RN = (weight_RN * _inverse(scale_R1) + 16.5).trunc().clamp(0, 31).to(torch.uint8)
    bit_N = torch.arange(8, dtype=torch.uint8, device=weight_RN.device)
    fifth_R48 = (values_RN >> 4).view(-1, 4, 8) << bit_N
    fifth_R4 = fifth_R48.sum(-1).to(torch.uint8)
    return torch.cat([_half(scale_R1), fifth_R4, _pair_nibbles(values_RN & 15)], -1)


def _q4_k(weight_RN: Tensor) -> Tensor:
    """Eight groups of 32 with a 6-bit scale and minimum each."""
    weight_RGS = weight_RN.view(-1, 8, 32)
    scale_RG, min_RG = _search_affine(weight_RGS)
    scale_R1 = (scale_RG.amax(-1, keepdim=True) / SCALE_BITS_MAX).half().float()
    min_R1 = (min_RG.amax(-1, keepdim=True) / SCALE_BITS_MAX).half().float()
    scale_6 = (scale_RG * _inverse(scale_R1)).round().clamp(0, SCALE_BITS_MAX)
    min_6 = (min_RG * _inverse(min_R1)).round().clamp(0, SCALE_BITS_MAX)
    step_RG1, low_RG1 = (scale_R1 * scale_6)[..., None], (min_R1 * min_6)[..., None]
    values_RGS = ((weight_RGS + low_RG1) * _inverse(step_RG1)).round().clamp(0, Q4_MAX)
    packed_R = _pair_nibbles(values_RGS.view(-1, 4, 64)).flatten(1)
    return torch.cat([_half(scale_R1), _half(min_R1), _pack_6(scale_6, min_6), packed_R], -1)


def _pack_6(scale_RG: Tensor, min_RG: Tensor) -> Tensor:
    """Pack eight 6-bit scales and minimums into twelve bytes."""
    scale, low = scale_RG.to(torch.uint8), min_RG.to(torch.uint8)
    first = scale[:, :4] | scale[:, 4:] >> 4 << 6
    second = low[:, :4] | low[:, 4:] >> 4 << 6
    return torch.cat([first, second, scale[:, 4:] & 15 | (low[:, 4:] & 15) << 4], -1)


def _search_affine(weight_RGS: Tensor) -> tuple[Tensor, Tensor]:
    """Find scale and minimum of each group: weight = scale * q - minimum, q from 0 to 15."""
    low = weight_RGS.amin(-1, keepdim=True).clamp(max=0)
    span = weight_RGS.amax(-1, keepdim=True) - low
    # Larger weights count more, as in llama.cpp's quantizer.
    importance = weight_RGS.square().mean(-1, keepdim=True).sqrt() + weight_RGS.abs()
    shifted = weight_RGS - low
    weighted = importance * weight_RGS
    sum_i, sum_x = importance.sum(-1, keepdim=True), weighted.sum(-1, keepdim=True)
    best_scale, best_low = span / Q4_MAX, low
    best_error = torch.full_like(low, torch.inf)
    for added in Q4_K_RANGES:
        q = (shifted * ((Q4_MAX + added) * _inverse(span))).round_().clamp_(0, Q4_MAX)
        iq = importance * q
        sum_q = iq.sum(-1, keepdim=True)
        sum_qq = iq.mul_(q).sum(-1, keepdim=True)
        sum_qx = (q * weighted).sum(-1, keepdim=True)
        scale, offset = _fit_line(sum_i, sum_x, sum_q, sum_qq, sum_qx)
        error = (q.mul_(scale).add_(offset).sub_(weight_RGS)).square_().mul_(importance)
        error = error.sum(-1, keepdim=True)
        is_better = (error < best_error) & (scale > 0)
        best_error = torch.where(is_better, error, best_error)
        best_scale = torch.where(is_better, scale, best_scale)
        best_low = torch.where(is_better, offset, best_low)
    return best_scale.squeeze(-1), -best_low.squeeze(-1)


def _fit_line(
    sum_i: Tensor, sum_x: Tensor, sum_q: Tensor, sum_qq: Tensor, sum_qx: Tensor
) -> tuple[Tensor, Tensor]:
    """Weighted least squares of x = scale * q + offset; the offset may not be positive."""
    inverse = _inverse(sum_i * sum_qq - sum_q.square())
    scale = (sum_i * sum_qx - sum_x * sum_q) * inverse
    offset = (sum_qq * sum_x - sum_q * sum_qx) * inverse
    is_above = offset > 0
    scale = torch.where(is_above, sum_qx * _inverse(sum_qq), scale)
    return scale, torch.where(is_above, 0.0, offset)


def _q6_k(weight_RN: Tensor) -> Tensor:
    """Sixteen groups of 16 with an int8 scale each."""
    weight_RGS = weight_RN.view(-1, 16, 16)
    scale_RG = _search_scale(weight_RGS)
    scale_R1 = (_largest(scale_RG) / -128).half().float()
    scale_8 = (scale_RG * _inverse(scale_R1)).round().clamp(-128, 127)
    step_RG1 = (scale_R1 * scale_8)[..., None]
    values_RGS = (weight_RGS * _inverse(step_RG1)).round().clamp(-Q6_MAX, Q6_MAX - 1)
    values_R = (values_RGS + Q6_MAX).to(torch.uint8).view(-1, 2, 4, 32)
    first, second, third, fourth = values_R.unbind(2)
    low = torch.cat([first & 15 | (third & 15) << 4, second & 15 | (fourth & 15) << 4], -1)
    high = first >> 4 | second >> 4 << 2 | third >> 4 << 4 | fourth >> 4 << 6
    scales = scale_8.to(torch.int8).view(torch.uint8)
    return torch.cat([low.flatten(1), high.flatten(1), scales, _half(scale_R1)], -1)


def _search_scale(weight_RGS: Tensor) -> Tensor:
    """Find the scale of each group: weight = scale * q, q from -32 to 31."""
    largest = _largest(weight_RGS)
    largest = torch.where(largest.abs() < TINY, 0.0, largest)
    importance = weight_RGS.square()
    best_gain, best_scale = torch.zeros_like(largest), torch.zeros_like(largest)
    weighted = importance * weight_RGS
    for added in Q6_K_RANGES:
        q = (weight_RGS * (-(Q6_MAX + added) * _inverse(largest))).round_()
        q = q.clamp_(-Q6_MAX, Q6_MAX - 1)
        sum_qx = (q * weighted).sum(-1, keepdim=True)
        sum_qq = q.square_().mul_(importance).sum(-1, keepdim=True)
        scale = sum_qx * _inverse(sum_qq)
        gain = scale * sum_qx  # reduction of the squared error by the fit
        is_better = gain > best_gain
        best_gain = torch.where(is_better, gain, best_gain)
        best_scale = torch.where(is_better, scale, best_scale)
    return best_scale.squeeze(-1)


ENCODERS: dict[str, Callable[[Tensor], Tensor]] = {
    "F32": _bytes,
    "F16": _half,
    "BF16": lambda weight_RN: _bytes(weight_RN.to(torch.bfloat16)),
    "Q8_0": _q8_0,
    "Q4_0": _q4_0,
    "Q5_0": _q5_0,
    "Q4_K": _q4_k,
    "Q6_K": _q6_k,
}
