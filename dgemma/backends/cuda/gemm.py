"""GEMMs of the layers, by the kernel that suits the weight format and the number of rows.

One or two rows use a GEMV that streams the weight. With fp8 weights, larger inputs are quantized
per row; the kernels between GEMMs write them quantized already. Cards without fp8 arithmetic get
16-bit weights at load (`weights.inference`).

T tokens, K experts per token, A = T * K assignments, D width, I inputs, O outputs, S splits.
"""

from functools import cache
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dgemma.backends.cuda.configs import MAX_GEMM_ROWS, GemmConfig
from dgemma.backends.cuda.kernels import gemm_fp8, gemv, moe, moe_decode, moe_packed, residual_norm
from dgemma.backends.cuda.kernels.moe import Buckets
from dgemma.backends.cuda.kernels.unpack import PackedWeight
from dgemma.backends.cuda.streaming import ExpertStream, StreamedExperts
from dgemma.model.gemma import Experts
from dgemma.quant import QTensor
from dgemma.quant.fp8 import VOCAB_PIECE, Fp8Experts, LinearWeight, has_e4m3
from dgemma.quant.gguf_tiles import TiledBlockExperts
from dgemma.quant.nvfp4 import Nvfp4Experts

MAX_GEMV_ROWS = 2
ALIGNMENT = 16  # bytes, for both dimensions of an fp8 GEMM

Rows = Tensor | QTensor

_has_e4m3 = cache(has_e4m3)  # called by every GEMM


def quantize_rows(x_TI: Tensor) -> QTensor:
    """Quantize to fp8: scale = absmax of the row / FP8_MAX."""
    return QTensor(*residual_norm.quantize(x_TI))


def use_gemv(x_TI: Tensor) -> bool:
    """True for so few rows that streaming the weight dominates."""
    return len(x_TI) <= MAX_GEMV_ROWS and x_TI.is_contiguous()


def accepts_fp8(x_TI: Tensor, weight: LinearWeight) -> bool:
    """True if rows of this shape are quantized for such a weight, and may be passed quantized."""
    return weight.is_fp8 and not use_gemv(x_TI)


def gemm(
    x: Rows, weight: LinearWeight, dtype: torch.dtype, config: GemmConfig | None = None
) -> Tensor:
    """Return x @ weight.T in `dtype`; with a split-K config the split sums, [S, T, O]."""
    if isinstance(x, Tensor):
        if use_gemv(x):
            return gemv.gemv(x, *weight)
        if weight.scale_O is None:
            return F.linear(x, weight.values_OI)
        x = quantize_rows(x)
    assert weight.scale_O is not None, "quantized rows are for quantized weights"
    stored = QTensor(weight.values_OI, weight.scale_O)
    is_aligned = stored.values.shape[1] % ALIGNMENT == 0
    if config is not None and len(x.values) <= MAX_GEMM_ROWS and is_aligned:
        return gemm_fp8.gemm(x, stored, dtype, config)
    if has_scaled_mm(stored.values):
        return _scaled_mm(x, stored, dtype)
    return F.linear(x.dequantize(), stored.dequantize()).to(dtype)


def gemm_gelu_mul(x: Rows, weight: LinearWeight, dtype: torch.dtype) -> Rows:
    """Return gelu(gate) * up; the weight holds gate first. The result is fp8 if the rows are."""
    if isinstance(x, Tensor) and use_gemv(x):
        return gemv.gemv_gelu_mul(x, *weight)
    out = residual_norm.gelu_and_mul(gemm(x, weight, dtype), fp8_out=isinstance(x, QTensor))
    return QTensor(*out) if isinstance(out, tuple) else out


def lm_head(hidden_TD: Tensor, weight: LinearWeight, out_TV: Tensor) -> Tensor:
    """Write logits, before the soft cap."""
    if weight.scale_O is None:
        return torch.mm(hidden_TD, weight.values_OI.t(), out=out_TV)
    x, stored = quantize_rows(hidden_TD), QTensor(weight.values_OI, weight.scale_O)
    if has_scaled_mm(stored.values):
        return _scaled_mm(x, stored, out_TV.dtype, out_TV)
    rows_TD = x.dequantize()
    pieces = zip(*(torch.split(t, VOCAB_PIECE) for t in (*stored, out_TV.t())), strict=True)
    for values, scale, out_PT in pieces:
        out_PT.copy_(F.linear(rows_TD, QTensor(values, scale).dequantize()).t())
    return out_TV


def has_scaled_mm(values_OI: Tensor) -> bool:
    is_aligned = all(size % ALIGNMENT == 0 for size in values_OI.shape)
    return values_OI.device.type == "cuda" and is_aligned and _has_e4m3(values_OI.device)


def _scaled_mm(
    x: QTensor, stored: QTensor, dtype: torch.dtype, out_TO: Tensor | None = None
) -> Tensor:
    out = {} if out_TO is None else {"out": out_TO}
    return torch._scaled_mm(
        x.values,
        stored.values.t(),
        scale_a=x.scale[:, None],
        scale_b=stored.scale[None],
        out_dtype=dtype,
        use_fast_accum=True,
        **out,
    )


# --- experts


class MoeKernels(Protocol):
    """Runs the experts of one layer."""

    def accepts_fp8(self, x_TD: Tensor) -> bool:
        """True if rows of this shape may be passed quantized to fp8."""

    def outputs(
        self, x: Rows, topk_ids_TK: Tensor, buckets: Buckets | None, dtype: torch.dtype
    ) -> Tensor:
        """Compute each assignment's output, [A, D], unweighted. `buckets`: sorted assignments."""


def moe_kernels(experts: nn.Module, dtype: torch.dtype) -> MoeKernels | None:
    """Return the kernels for a weight format and an activation dtype, or None."""
    if isinstance(experts, StreamedExperts):  # replaced by `_stream_experts`
        return moe_kernels(experts.host, dtype)
    if isinstance(experts, Experts):
        weights = (experts.gate_up_proj, experts.down_proj)
        return HalfMoe(experts) if all(weight.shape[2] % 8 == 0 for weight in weights) else None
    if isinstance(experts, Fp8Experts):
        # TMA needs row sizes that are a multiple of 16 bytes.
        is_aligned = all(weight.values.shape[2] % 16 == 0 for weight in experts.stored)
        return Fp8Moe(experts) if is_aligned else None
    # Unpacked values are bfloat16; the interpreter tests them in float32.
    is_known = dtype in (torch.bfloat16, torch.float32)
    if isinstance(experts, Nvfp4Experts | TiledBlockExperts) and is_known:
        return HalfMoe(experts)
    return None


def is_decode(x_TD: Tensor) -> bool:
    """True for so few tokens that experts run one assignment at a time."""
    return len(x_TD) <= moe_decode.MAX_TOKENS


class HalfMoe:
    """Experts with 16-bit activations and 16-bit, NVFP4 or GGUF weights."""

    def __init__(self, experts: Experts | Nvfp4Experts | TiledBlockExperts) -> None:
        self.plain: tuple[Tensor, Tensor] | None = None
        self.packed: tuple[PackedWeight, PackedWeight] | None = None
        if isinstance(experts, Nvfp4Experts):
            self.packed = (experts.gate_up, experts.down)
        elif isinstance(experts, TiledBlockExperts):
            self.packed = experts.both
        else:
            self.plain = (experts.gate_up_proj, experts.down_proj)

    def accepts_fp8(self, x_TD: Tensor) -> bool:
        return False

    def outputs(
        self, x: Rows, topk_ids_TK: Tensor, buckets: Buckets | None, dtype: torch.dtype
    ) -> Tensor:
        assert isinstance(x, Tensor)
        if self.packed is not None:
            if is_decode(x):
                return moe_decode.expert_outputs_packed(x, topk_ids_TK, *self.packed)
            return moe_packed.expert_outputs(x, topk_ids_TK, *self.packed, buckets)
        assert self.plain is not None
        if is_decode(x):
            return moe_decode.expert_outputs(x, topk_ids_TK, *self.plain)
        return moe.expert_outputs(x, topk_ids_TK, *self.plain, buckets)


class Fp8Moe:
    """Experts with fp8 weights; activations are quantized per row unless there are very few."""

    def __init__(self, experts: Fp8Experts) -> None:
        self.gate_up, self.down = experts.stored

    def accepts_fp8(self, x_TD: Tensor) -> bool:
        return not is_decode(x_TD)

    def outputs(
        self, x: Rows, topk_ids_TK: Tensor, buckets: Buckets | None, dtype: torch.dtype
    ) -> Tensor:
        gate_up, down = self.gate_up, self.down
        if isinstance(x, Tensor):
            if is_decode(x):
                weights, scales = (gate_up.values, down.values), (gate_up.scale, down.scale)
                return moe_decode.expert_outputs(x, topk_ids_TK, *weights, scales)
            x = quantize_rows(x)
        return moe.expert_outputs_fp8(x, topk_ids_TK, gate_up, down, dtype, buckets)


class StreamedMoe:
    """Experts in host memory: staged for many tokens, read in place for a few."""

    def __init__(self, stream: ExpertStream, index: int, dtype: torch.dtype) -> None:
        self.stream, self.index = stream, index
        layer = stream.layers[index]
        host, staged = moe_kernels(layer.host, dtype), moe_kernels(layer.staged(index), dtype)
        assert host is not None and staged is not None
        self.host, self.staged = host, staged

    def accepts_fp8(self, x_TD: Tensor) -> bool:
        return self.host.accepts_fp8(x_TD)

    def outputs(
        self, x: Rows, topk_ids_TK: Tensor, buckets: Buckets | None, dtype: torch.dtype
    ) -> Tensor:
        if is_decode(x if isinstance(x, Tensor) else x.values):
            return self.host.outputs(x, topk_ids_TK, buckets, dtype)
        self.stream.acquire(self.index)
        out_AD = self.staged.outputs(x, topk_ids_TK, buckets, dtype)
        self.stream.release(self.index)
        return out_AD
