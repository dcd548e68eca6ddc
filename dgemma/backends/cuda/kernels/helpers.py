"""Small formulas that several kernels compute alike, inside a kernel."""

import triton
import triton.language as tl

LARGEST_8, LEAST_8 = tl.constexpr(448.0), tl.constexpr(1e-12)  # as in `quant/fp8.py`
# Of split-KV sums: a logarithm below all, and a divisor for a sum over no keys.
LEAST, TINY = tl.constexpr(-1e30), tl.constexpr(1e-30)


@triton.jit
def activate(gate, up):
    """gelu(gate) * up. By tanh: half of one plus tanh(z) is sigmoid(2 z)."""
    z = 0.7978845608028654 * (gate + 0.044715 * gate * gate * gate)
    return gate * tl.sigmoid(2.0 * z) * up


@triton.jit
def inverse_rms(x, D, eps):
    """One over the root mean square; x is zero outside its row."""
    return tl.rsqrt(tl.sum(x * x, 0) / D + eps)


@triton.jit
def factor_8(x):
    """Scale of a row in e4m3: absmax / 448; x is zero outside its row."""
    return tl.maximum(tl.max(tl.abs(x), 0), LEAST_8) / LARGEST_8
