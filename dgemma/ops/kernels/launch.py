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

PROCESSORS = 132  # of an H100 or H200: so many programs at least are wanted
# Of a thread of kernels that wait for memory more than they compute. Told so many, the compiler
# asks for all they read before it computes; left alone, it saves registers that nobody else wants,
# and such a kernel waits for memory three or four times instead of once or twice.
REGISTERS = 128
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


@triton.jit
def after(EARLY: tl.constexpr):
    """What earlier kernels wrote can be read from here on, and what they read can be written."""
    if EARLY:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
