"""Merged weights of linears with the same input: one GEMM instead of two or three.

The modules keep views of the merged weight. Does not need Triton, since layers are merged while
they are loaded.
"""

from itertools import pairwise
from typing import cast

import torch
from torch import Tensor, nn

from dgemma.model.gemma import Attention, FeedForward, Gemma, Layer
from dgemma.quant.fp8 import Fp8Linear, LinearWeight

PlainLinear = nn.Linear | Fp8Linear


def layers_of(model: Gemma) -> list[Layer]:
    return cast(list[Layer], list(model.layers))


def is_mergeable(layer: Layer) -> bool:
    """True if the linears of each group are all plain or all fp8, without adapters."""
    blocks: list[nn.Module] = [layer.self_attn, layer.mlp]
    if not all(type(block) in (Attention, FeedForward) for block in blocks):
        return False  # packed for a CPU
    groups = (qkv(layer), gate_up(layer), [layer.self_attn.o_proj], [layer.mlp.down_proj])
    kinds = [{type(module) for module in group} for group in groups]
    is_known = all(kind in ({nn.Linear}, {Fp8Linear}) for kind in kinds)
    return is_known and type(layer.router.proj) is nn.Linear


def merge_layer(layer: Layer) -> None:
    """Merge the weights of a layer during loading, so that freed memory serves the next layer."""
    for group in (qkv(layer), gate_up(layer)):
        merge_weights(group)


def qkv(layer: Layer) -> list[PlainLinear]:
    attn = layer.self_attn
    return [p for p in (attn.q_proj, attn.k_proj, attn.v_proj) if p is not None]


def gate_up(layer: Layer) -> list[PlainLinear]:
    return [layer.mlp.gate_proj, layer.mlp.up_proj]


def weight_of(source: PlainLinear) -> LinearWeight:
    return source.stored if isinstance(source, Fp8Linear) else LinearWeight(source.weight)


@torch.no_grad()
def merge_weights(linears: list[PlainLinear]) -> LinearWeight:
    """Concatenate the weights of several linears and make each linear hold a view."""
    weights = [linear.weight for linear in linears]
    is_done, values_XD = _is_contiguous(weights), _concat(weights)
    scales_X1 = [linear.weight_scale for linear in linears if isinstance(linear, Fp8Linear)]
    scale_X1 = _concat(scales_X1) if scales_X1 else None
    end = 0
    for linear in linears:
        rows = slice(end, end := end + len(linear.weight))
        if isinstance(linear, Fp8Linear):
            assert scale_X1 is not None
            linear.weight, linear.weight_scale = values_XD[rows], scale_X1[rows]
        elif not is_done:
            requires_grad = linear.weight.requires_grad
            linear.weight = nn.Parameter(values_XD[rows], requires_grad=requires_grad)
    return LinearWeight(values_XD, None if scale_X1 is None else scale_X1[:, 0])


def _concat(weights: list[Tensor]) -> Tensor:
    """Concatenate, as bytes if the dtype has no arithmetic; contiguous inputs become a view."""
    if _is_contiguous(weights):
        rows = sum(len(weight) for weight in weights)
        return weights[0].detach().as_strided((rows, weights[0].shape[1]), weights[0].stride())
    if weights[0].dtype.itemsize > 1:
        return torch.cat(weights)
    return torch.cat([weight.view(torch.uint8) for weight in weights]).view(weights[0].dtype)


def _is_contiguous(weights: list[Tensor]) -> bool:
    """True if the tensors follow each other in one allocation."""
    extents = [(w.untyped_storage().data_ptr(), w.data_ptr(), w.nbytes) for w in weights]
    is_whole = all(weight.is_contiguous() for weight in weights)
    return is_whole and all(a[0] == b[0] and a[1] + a[2] == b[1] for a, b in pairwise(extents))
