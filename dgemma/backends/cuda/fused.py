"""Fused execution of the layer stack: merged QKV and gate/up GEMMs, one kernel between GEMMs.

Computes what `Gemma.stack` defines, on segments of a fixed stride (`kernels.attention.Segments`).
Merged weights share memory with the model's modules, which hold views.

T tokens of a pass, D width, X outputs of a merged GEMM, E KV table entries.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache, partial
from threading import get_ident
from typing import NamedTuple, cast

import torch
from torch import Tensor, nn

from dgemma.backends.cuda import configs
from dgemma.backends.cuda.gemm import (
    MoeKernels,
    Rows,
    StreamedMoe,
    accepts_fp8,
    gemm,
    gemm_gelu_mul,
    is_decode,
    moe_kernels,
    quantize_rows,
    use_gemv,
)
from dgemma.backends.cuda.kernels import attention, gemv, residual_norm, router
from dgemma.backends.cuda.kernels.attention import Segments
from dgemma.backends.cuda.kernels.moe import Buckets
from dgemma.backends.cuda.kernels.qk_norm_rope import Heads, qk_norm_rope
from dgemma.backends.cuda.merge import (
    gate_up,
    is_mergeable,
    layers_of,
    merge_weights,
    qkv,
    weight_of,
)
from dgemma.backends.cuda.streaming import ExpertStream, StreamedExperts
from dgemma.config import LayerType
from dgemma.model.forward_batch import ForwardBatch
from dgemma.model.gemma import Gemma, Layer
from dgemma.model.norm_rope import CosSin
from dgemma.quant import QTensor
from dgemma.quant.fp8 import LinearWeight


class Routing(NamedTuple):
    """The experts of each token, their weights, and the assignments sorted by expert."""

    ids_TK: Tensor
    weights_TK: Tensor
    buckets: Buckets | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class FusedLayer:
    """The weights of one layer as the kernels need them."""

    index: int
    layer_type: LayerType
    window: int
    heads: Heads
    qkv: LinearWeight
    out: LinearWeight
    gate_up: LinearWeight
    down: LinearWeight
    router: tuple[Tensor, Tensor, int]  # weight, scale of each expert, top-k
    experts: MoeKernels
    attention_norms: tuple[Tensor, Tensor, Tensor, Tensor]  # post, dense, experts, router scale
    ffn_norms: tuple[Tensor, Tensor, Tensor, Tensor, Tensor]  # dense, experts, both, scalar, next


@dataclass(frozen=True, slots=True)
class AttnBatch:
    """The segments of a pass and their KV table."""

    segments: Segments
    table_EX6: Tensor  # int64: entries, layers
    images: ForwardBatch | None = (
        None  # layers where their tokens see each other attend by its masks
    )


class FusedModel:
    """Runs the layer stack with kernels only."""

    def __init__(self, model: Gemma) -> None:
        self.config, self.eps = model.config, model.config.rms_norm_eps
        layers = layers_of(model)
        norms = [*(layer.input_layernorm.weight for layer in layers), model.norm.weight]
        self.input_norm_D = norms[0]
        self.layers = [
            fuse(layer, index, next_D)
            for index, (layer, next_D) in enumerate(zip(layers, norms[1:], strict=True))
        ]
        self.stream = self._stream_experts([layer.experts for layer in layers])

    def _stream_experts(self, experts: list[nn.Module]) -> ExpertStream | None:
        """Use kernels that wait for the copies of experts in host memory."""
        indices = [index for index, part in enumerate(experts) if isinstance(part, StreamedExperts)]
        if not indices:
            return None
        stream = ExpertStream([cast(StreamedExperts, experts[index]) for index in indices])
        for number, index in enumerate(indices):
            kernels = StreamedMoe(stream, number, self.input_norm_D.dtype)
            self.layers[index] = replace(self.layers[index], experts=kernels)
        return stream

    def forward(
        self, x_TD: Tensor, cos_sin: CosSin, batch: AttnBatch, normed_TD: Tensor | None = None
    ) -> Tensor:
        """Run all layers and the final norm. `normed_TD`: normalized input of the first layer."""
        decode = use_gemv(x_TD)
        if self.stream is not None and not is_decode(x_TD):
            self.stream.begin()
        if normed_TD is None:
            normed_TD = residual_norm.norm(x_TD, self.input_norm_D, self.eps)
        is_fp8 = not decode and self.layers[0].qkv.is_fp8
        normed: Rows = quantize_rows(normed_TD) if is_fp8 else normed_TD
        del normed_TD
        for layer, following in zip(self.layers, [*self.layers[1:], None], strict=True):
            fp8_out = not decode and following is not None and following.qkv.is_fp8
            qkv_TX = gemm(normed, layer.qkv, x_TD.dtype, configs.QKV)
            attended = self._attend(layer, qkv_TX, cos_sin, batch)
            x_TD, normed = self._after_attention(layer, x_TD, attended, fp8_out=fp8_out)
            del qkv_TX, attended  # free this layer's memory before the next one
        assert isinstance(normed, Tensor)
        return normed

    def _attend(self, layer: FusedLayer, qkv_TX: Tensor, cos_sin: CosSin, batch: AttnBatch) -> Rows:
        table_E6, segments = batch.table_EX6[:, layer.index], batch.segments
        rope = cos_sin[layer.layer_type]
        q_TNH = qk_norm_rope(qkv_TX, layer.heads, rope, table_E6, segments, self.eps)
        if batch.images is not None and batch.images.has_images(layer.index):
            attended_TX = batch.images.attend_written(layer.index, q_TNH).flatten(1)
            return quantize_rows(attended_TX) if accepts_fp8(qkv_TX, layer.out) else attended_TX
        splits = attention.attend(q_TNH, table_E6, segments, layer.heads.keys, layer.window)
        if accepts_fp8(qkv_TX, layer.out):
            return QTensor(*attention.reduce_splits_fp8(*splits, q_TNH.dtype))
        return attention.reduce_splits(*splits, q_TNH.dtype).flatten(1)

    def _after_attention(
        self, layer: FusedLayer, x_TD: Tensor, attended: Rows, *, fp8_out: bool
    ) -> tuple[Tensor, Rows]:
        """Return the residual after the layer, and its normalization for the next layer."""
        dtype = x_TD.dtype
        out = gemm(attended, layer.out, dtype, configs.OUT)
        norms, (weight_ED, scale_E, top_k) = layer.attention_norms, layer.router
        dense: Tensor | tuple[Tensor, Tensor]
        expert: Tensor | tuple[Tensor, Tensor]
        route: Callable[[], Routing]
        if use_gemv(x_TD):  # one launch with the router's GEMV
            (x_TD, dense, expert), logits_1TE = gemv.residual_add_norm_router(
                x_TD, out, norms, weight_ED, self.eps
            )
            routing = Routing(*router.topk(router.RouterLogits(logits_1TE), scale_E, top_k))
            route = lambda: routing  # noqa: E731
        else:
            fp8_experts = layer.experts.accepts_fp8(x_TD)
            fp8 = {"fp8_out": layer.gate_up.is_fp8, "fp8_experts": fp8_experts}
            x_TD, dense, expert, router_TD = residual_norm.residual_add_norm(
                x_TD, out, norms, self.eps, **fp8
            )
            route = partial(_route, layer, router_TD)
        dense_TD, mixed = self._feed_forward(layer, _rows(dense), _rows(expert), route, dtype)
        x_TD, normed = residual_norm.layer_epilogue(
            x_TD, dense_TD, mixed, layer.ffn_norms, self.eps, fp8_out=fp8_out
        )
        return x_TD, _rows(normed)

    def _feed_forward(
        self,
        layer: FusedLayer,
        dense: Rows,
        expert: Rows,
        route: Callable[[], Routing],
        dtype: torch.dtype,
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """Return the dense MLP's output, and the experts' outputs with the router's weights."""
        device = layer.gate_up.values_OI.device
        try:
            with _on_side_stream(device):
                hidden = gemm_gelu_mul(dense, layer.gate_up, dtype)
                dense_TD = gemm(hidden, layer.down, dtype, configs.DOWN)
            routing = route()
            out_AD = layer.experts.outputs(expert, routing.ids_TK, routing.buckets, dtype)
        finally:  # a capture cannot end with an unjoined stream
            _join_side_stream(device)
        return dense_TD, (out_AD, routing.weights_TK)


def _route(layer: FusedLayer, router_TD: Tensor) -> Routing:
    weight_ED, scale_E, top_k = layer.router
    return Routing(*router.topk(router.router_logits(router_TD, weight_ED), scale_E, top_k))


def _rows(rows: Tensor | tuple[Tensor, Tensor]) -> Rows:
    return QTensor(*rows) if isinstance(rows, tuple) else rows


# --- the dense MLP runs in parallel with the experts


@cache
def _side_stream(device: torch.device, thread: int) -> torch.cuda.Stream:
    """Return one stream for all models, since libraries keep up to 63 MB per stream.

    One per thread: a capture of another thread must not be joined.
    """
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


@contextmanager
def _on_side_stream(device: torch.device) -> Iterator[None]:
    """Run work on the side stream, ordered after earlier launches, until it is joined."""
    if device.type != "cuda":
        yield
        return
    side = _side_stream(device, get_ident())
    side.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(side):
        yield


def _join_side_stream(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.current_stream(device).wait_stream(_side_stream(device, get_ident()))


# --- weights


def can_fuse(model: Gemma) -> bool:
    """True if all linears are plain or fp8 without adapters, and the experts have kernels."""
    dtype = model.embed_tokens.weight.dtype
    return all(
        is_mergeable(layer) and moe_kernels(layer.experts, dtype) is not None
        for layer in layers_of(model)
    )


def fuse(layer: Layer, index: int, next_D: Tensor) -> FusedLayer:
    attn, experts = layer.self_attn, moe_kernels(layer.experts, layer.input_layernorm.weight.dtype)
    assert experts is not None
    scale = layer.router.per_expert_scale
    return FusedLayer(
        index=index,
        layer_type=attn.layer_type,
        window=attn.shape.window or 0,
        heads=Heads(
            queries=attn.q_proj.weight.shape[0] // attn.shape.head_dim,
            keys=attn.shape.num_kv_heads,
            width=attn.shape.head_dim,
            q_weight=attn.q_norm.weight,
            k_weight=attn.k_norm.weight,
            has_value=attn.v_proj is not None,
        ),
        qkv=merge_weights(qkv(layer)),
        out=weight_of(attn.o_proj),
        gate_up=merge_weights(gate_up(layer)),
        down=weight_of(layer.mlp.down_proj),
        router=(layer.router.proj.weight, scale, layer.router.top_k),
        experts=experts,
        attention_norms=(
            layer.post_attention_layernorm.weight,
            layer.pre_feedforward_layernorm.weight,
            layer.pre_feedforward_layernorm_2.weight,
            layer.router.scale,
        ),
        ffn_norms=(
            layer.post_feedforward_layernorm_1.weight,
            layer.post_feedforward_layernorm_2.weight,
            layer.post_feedforward_layernorm.weight,
            layer.layer_scalar,
            next_D,
        ),
    )
