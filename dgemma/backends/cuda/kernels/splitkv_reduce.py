"""The parts of attention as one, written in 8 bits: what an 8-bit product reads of all heads.

A program takes a token with all of its heads. It adds up the parts in their order, as
`attention.py` does, and rounds to the stream's type, so that the row is what it would be in
between; the greatest of the row gives its factor, as everywhere.

L tokens, N heads, H head width, P parts, X = N * H.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from dgemma.backends.cuda.kernels.helpers import LEAST, TINY, factor_8
from dgemma.backends.cuda.kernels.pdl import REGISTERS, gdc_wait, pdl_kwargs

MOST = 8  # parts; more are merged first, and rounded by another kernel
ROUNDED = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}


def merge(out_PLNH: Tensor, log_PLN: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Rows of all heads in 8 bits (e4m3), [L, X], and their factors; `dtype` is the stream's."""
    parts, length, heads, width = out_PLNH.shape
    size, device = (length, heads * width), out_PLNH.device
    out_LX = torch.empty(size, dtype=torch.float8_e4m3fn, device=device)
    factor_L = torch.empty(length, dtype=torch.float32, device=device)
    _merge[(length,)](
        out_PLNH,
        log_PLN,
        out_LX,
        factor_L,
        length,
        N=heads,
        NS=triton.next_power_of_2(heads),
        H=width,
        PARTS=parts,
        KIND=ROUNDED[dtype],
        num_warps=8,
        maxnreg=REGISTERS,
        **pdl_kwargs(),
    )
    return out_LX, factor_L


@triton.jit
def _merge(
    out_PLNH,
    log_PLN,
    out_LX,
    factor_L,
    length,
    N: tl.constexpr,
    NS: tl.constexpr,
    H: tl.constexpr,
    PARTS: tl.constexpr,
    KIND: tl.constexpr,
    PDL: tl.constexpr,
):
    gdc_wait(PDL)
    token = tl.program_id(0)
    n = tl.arange(0, NS)
    h = tl.arange(0, H)
    is_head = n < N
    row = token * N + n
    rows = length * N
    peak = tl.load(log_PLN + row, mask=is_head, other=0.0)
    for part in tl.static_range(1, PARTS):
        peak = tl.maximum(peak, tl.load(log_PLN + part * rows + row, mask=is_head, other=0.0))
    peak = tl.maximum(peak, LEAST)  # padding has no keys in any part
    total = tl.zeros((NS,), dtype=tl.float32)
    out = tl.zeros((NS, H), dtype=tl.float32)
    for part in tl.static_range(PARTS):
        log = tl.load(log_PLN + part * rows + row, mask=is_head, other=0.0)
        share = tl.exp2(log - peak)
        total += share
        at = (part * rows + row).to(tl.int64) * H
        one = tl.load(out_PLNH + at[:, None] + h[None, :], mask=is_head[:, None], other=0.0)
        out += share[:, None] * one.to(tl.float32)
    x = (out / tl.maximum(total, TINY)[:, None]).to(KIND).to(tl.float32)
    factor = factor_8(tl.max(tl.abs(x), 1))
    tl.store(factor_L + token, factor)
    at = row.to(tl.int64)[:, None] * H + h[None, :]
    tl.store(out_LX + at, (x / factor).to(tl.float8e4nv), mask=is_head[:, None])
