"""GEMMs outside the experts, with 16-bit or fp8 weights, by whichever kernel suits the rows.

One or two rows go to a GEMV that streams the weight. With fp8 weights rows are quantized too, per
row, unless they are that few; the kernels between GEMMs write them quantized already. Cards without
fp8 arithmetic are given 16-bit weights at load (`weights.choose`).

T tokens, I inputs, O outputs, S parts of a split GEMM.
"""

from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

from dgemma.backends.cuda.configs import MAX_GEMM_ROWS, GemmConfig
from dgemma.backends.cuda.kernels import gemm_fp8, gemv, moe, residual_norm
from dgemma.quant.fp8 import PIECE, Weight, has_e4m3
from dgemma.quant.qtensor import Quantized

MAX_GEMV_ROWS = 2
ALIGNMENT = 16  # bytes; of both dimensions of an fp8 GEMM

Rows = Tensor | Quantized

_has_e4m3 = cache(has_e4m3)  # asked by every GEMM


def quantize_rows(x_TI: Tensor) -> Quantized:
    """Quantize to fp8: scale = absmax of the row / FP8_MAX."""
    return Quantized(*moe.quantize(x_TI))


def use_gemv(x_TI: Tensor) -> bool:
    """True for rows so few that the weight is streamed past them."""
    return len(x_TI) <= MAX_GEMV_ROWS and x_TI.is_contiguous()


def accepts_fp8(x_TI: Tensor, weight: Weight) -> bool:
    """True if rows of this shape are quantized for such a weight, and may come so already."""
    return weight.is_8 and not use_gemv(x_TI)


def gemm(x: Rows, weight: Weight, dtype: torch.dtype, config: GemmConfig | None = None) -> Tensor:
    """Return x @ weight.T in `dtype`; with a split-K config the partial sums, [S, T, O]."""
    if isinstance(x, Tensor):
        if use_gemv(x):
            return gemv.product(x, *weight)
        if weight.factor_O is None:
            return F.linear(x, weight.numbers_OI)
        x = quantize_rows(x)
    assert weight.factor_O is not None, "quantized rows are for quantized weights"
    stored = Quantized(weight.numbers_OI, weight.factor_O)
    is_aligned = stored.numbers.shape[1] % ALIGNMENT == 0
    if config is not None and len(x.numbers) <= MAX_GEMM_ROWS and is_aligned:
        return gemm_fp8.product(x, stored, dtype, config)
    if has_scaled_mm(stored.numbers):
        return _scaled_mm(x, stored, dtype)
    return F.linear(x.whole(), stored.whole()).to(dtype)


def gemm_gelu_mul(x: Rows, weight: Weight, dtype: torch.dtype) -> Rows:
    """Return gelu(gate) * up for a weight that holds the gate half first; fp8 if the rows were."""
    if isinstance(x, Tensor) and use_gemv(x):
        return gemv.gated_product(x, *weight)
    out = residual_norm.gelu_and_mul(gemm(x, weight, dtype), fp8_out=isinstance(x, Quantized))
    return Quantized(*out) if isinstance(out, tuple) else out


def lm_head(hidden_TD: Tensor, weight: Weight, out_TV: Tensor) -> Tensor:
    """Write logits before the soft cap."""
    if weight.factor_O is None:
        return torch.mm(hidden_TD, weight.numbers_OI.t(), out=out_TV)
    x, stored = quantize_rows(hidden_TD), Quantized(weight.numbers_OI, weight.factor_O)
    if has_scaled_mm(stored.numbers):
        return _scaled_mm(x, stored, out_TV.dtype, out_TV)
    rows_TD = x.whole()
    parts = zip(*(torch.split(part, PIECE) for part in (*stored, out_TV.t())), strict=True)
    for values, scale, out_PT in parts:
        out_PT.copy_(F.linear(rows_TD, Quantized(values, scale).whole()).t())
    return out_TV


def has_scaled_mm(values_OI: Tensor) -> bool:
    is_aligned = all(size % ALIGNMENT == 0 for size in values_OI.shape)
    return values_OI.device.type == "cuda" and is_aligned and _has_e4m3(values_OI.device)


def _scaled_mm(
    x: Quantized, stored: Quantized, dtype: torch.dtype, out_TO: Tensor | None = None
) -> Tensor:
    into = {} if out_TO is None else {"out": out_TO}
    return torch._scaled_mm(
        x.numbers,
        stored.numbers.t(),
        scale_a=x.factor[:, None],
        scale_b=stored.factor[None],
        out_dtype=dtype,
        use_fast_accum=True,
        **into,
    )
