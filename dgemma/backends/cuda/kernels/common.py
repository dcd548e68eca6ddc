"""Launches with PDL, and device functions that several kernels share.

Programmatic dependent launch (PDL) starts a kernel while its predecessor still runs. Such a kernel
calls `gdc_wait` before it reads what an earlier kernel wrote, and before it writes anything, since
an earlier one may still read there; weights, which never change, it may read before. Every program
waits, also one with nothing to do. Kernel N starts only after N-1 has passed its own wait: before
`gdc_wait`, N may therefore read what N-2 wrote, but must not write. Hopper and later have PDL; the
interpreter and older GPUs do not.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache, partial
from typing import Any

import torch
import triton
import triton.language as tl

# Registers per thread of memory-bound kernels. Given these, the compiler issues all loads before
# it computes; by default it saves registers and waits for memory three or four times.
REGISTERS = 128
FP8_MAX, FP8_MIN_AMAX = tl.constexpr(448.0), tl.constexpr(1e-12)  # as in `quant/fp8.py`

_is_compile_only: ContextVar[bool] = ContextVar("is_compile_only", default=False)


def launch(kernel: Any, grid: tuple[int, ...]) -> Callable[..., Any]:
    """Return the launcher of a kernel on a grid; under `compile_only`, one that compiles it."""
    if _is_compile_only.get():
        return partial(kernel.warmup, grid=grid)
    return kernel[grid]  # type: ignore[no-any-return]


@contextmanager
def compile_only() -> Iterator[None]:
    """Compile kernels instead of launching them, in this thread."""
    token = _is_compile_only.set(True)
    try:
        yield
    finally:
        _is_compile_only.reset(token)


def pdl_kwargs() -> dict[str, Any]:
    """Launch arguments of a kernel that waits by `gdc_wait`."""
    return {"PDL": True, "launch_pdl": True} if has_pdl() else no_pdl_kwargs()


def no_pdl_kwargs() -> dict[str, Any]:
    """Launch arguments of a kernel that starts when its predecessors have ended."""
    return {"PDL": False}


def has_pdl() -> bool:
    """True if the current GPU and this Triton have it."""
    if not torch.cuda.is_available() or torch.version.hip is not None:
        return False
    return _has_pdl(torch.cuda.current_device())


@cache
def _has_pdl(index: int) -> bool:
    names = ("gdc_wait", "gdc_launch_dependents")
    has_calls = all(hasattr(getattr(tl.extra, "cuda", None), name) for name in names)
    return has_calls and torch.cuda.get_device_capability(index) >= (9, 0)


def row_warps(block: int) -> int:
    """Warps of a program that has a whole row of `block` elements."""
    return max(1, min(8, block // 512))


@triton.jit
def gdc_wait(PDL: tl.constexpr):
    """Wait for earlier kernels' writes and reads; lets the next kernel start."""
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def gelu_mul(gate, up):
    """gelu(gate) * up. By tanh: (1 + tanh(z)) / 2 is sigmoid(2 z)."""
    z = 0.7978845608028654 * (gate + 0.044715 * gate * gate * gate)
    return gate * tl.sigmoid(2.0 * z) * up


@triton.jit
def inverse_rms(x, D, eps):
    """1 / RMS of a row; x is zero outside its row."""
    return tl.rsqrt(tl.sum(x * x, 0) / D + eps)


@triton.jit
def fp8_scale(x):
    """Scale of a row in e4m3: absmax / 448; x is zero outside its row."""
    return tl.maximum(tl.max(tl.abs(x), 0), FP8_MIN_AMAX) / FP8_MAX
