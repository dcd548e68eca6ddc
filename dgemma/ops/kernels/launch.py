"""Launching a kernel while the one before it still ends ("programmatic dependent launch").

A kernel that is launched so waits, by `after`, before it reads what an earlier kernel wrote, and
before it writes anything, since an earlier one may still read what is there; what never changes
(weights) it may read before. Every program waits, also one with nothing to do. `after` also lets
the next kernel come, which waits in its turn: since every such kernel waits for its predecessor's
end, it waits for all before that. And it is not let in before its predecessor has waited: so what
the kernel before the predecessor wrote can be read, though nothing be written, before `after`.
Off until it is switched on; the interpreter and GPUs before Hopper do not have it.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

PROCESSORS = 132  # of an H100 or H200: so many programs at least are wanted
FETCHED = 24 << 20  # bytes at most that are asked for ahead: half of the second cache
_state = {"early": False}


def early() -> dict[str, Any]:
    """What a launch is given besides its arguments."""
    if _state["early"]:
        return {"EARLY": True, "launch_pdl": True}
    return not_early()


def not_early() -> dict[str, Any]:
    """The same for a kernel that waits for all before it to end."""
    return {"EARLY": False}


def switch_early(on: bool) -> bool:
    """Launch early from now on, where that can be done; returns whether it is."""
    _state["early"] = on and can_launch_early()
    return _state["early"]


@contextmanager
def launching(*, early: bool) -> Iterator[bool]:
    """The same for a while, to compare."""
    before = _state["early"]
    try:
        yield switch_early(early)
    finally:
        _state["early"] = before


@cache
def can_launch_early() -> bool:
    """Whether the GPU and this Triton have it."""
    if not torch.cuda.is_available() or torch.version.hip is not None:
        return False
    has_calls = all(
        hasattr(getattr(tl.extra, "cuda", None), name)
        for name in ("gdc_wait", "gdc_launch_dependents")
    )
    return has_calls and torch.cuda.get_device_capability() >= (9, 0)


def can_fetch(wanted: bool) -> bool:
    """Whether what is wanted can be asked for by `fetch`: GPUs that launch early have it."""
    return wanted and _state["early"]


def share(coming: Tensor | None, programs: int, warps: int) -> tuple[int, int]:
    """Bytes to be asked for by so many programs, and those of each thread; all of 16 at a time."""
    size = 0 if coming is None else min(FETCHED, coming.nbytes) // 16 * 16
    return size, triton.cdiv(size, 16 * 32 * warps * programs) * 16


@triton.jit
def after(EARLY: tl.constexpr):
    """What earlier kernels wrote can be read from here on, and what they read can be written."""
    if EARLY:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def fetch(memory, program, BYTES: tl.constexpr, PIECE: tl.constexpr, THREADS: tl.constexpr):
    """Ask for memory that a kernel behind this one reads, a piece by each thread of each program.

    Past the end the last piece is asked for again. Of no bytes nothing is.
    """
    if BYTES > 0:
        piece = (program * THREADS + tl.arange(0, THREADS)).to(tl.int64)
        at = tl.minimum(piece * PIECE, BYTES - PIECE)
        bring(memory.to(tl.int64) + at, PIECE, THREADS)


@triton.jit
def bring(address, SIZE: tl.constexpr, COUNT: tl.constexpr):
    """Ask that so many bytes at each address come to the second cache; nothing waits for it.

    Both are multiples of 16.
    """
    size = tl.full((COUNT,), SIZE, dtype=tl.int32)
    tl.inline_asm_elementwise(
        "{ cp.async.bulk.prefetch.L2.global [$1], $2; mov.b32 $0, 0; }",
        "=r,l,r",
        [address, size],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )
