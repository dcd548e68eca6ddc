"""Programmatic dependent launch (PDL): a kernel starts while its predecessor still runs.

A kernel launched so calls `gdc_wait` before it reads what an earlier kernel wrote, and before it
writes anything, since an earlier one may still read there; weights, which never change, it may read
before. Every program waits, also one with nothing to do. With PDL, kernel N starts only after N-1
has passed its own wait: before `gdc_wait`, N may therefore read what N-2 wrote, but must not write.
Hopper and later have it; the interpreter and older GPUs do not.
"""

from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl

# Registers per thread of memory-bound kernels. Given these, the compiler issues all loads before
# it computes; left alone it saves registers and waits for memory three or four times.
REGISTERS = 128


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


@triton.jit
def gdc_wait(PDL: tl.constexpr):
    """Wait for earlier kernels' writes and reads; lets the next kernel start."""
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
