"""Functions written once: as they stand the reference, compiled by numba where it is installed."""

from collections.abc import Callable, Sequence
from types import FunctionType
from typing import Any


def compile_all(parts: Sequence[Callable[..., Any]]) -> dict[str, Callable[..., Any]]:
    """The functions by name, in machine code if numba is here; a caller stands after its callees.

    A call among them must reach the compiled one, which numba looks up among the globals.
    """
    plain: dict[str, Any] = {part.__name__: part for part in parts}
    try:
        from numba import njit
    except ImportError:
        return plain
    fast: dict[str, Callable[..., Any]] = {}
    for name, part in plain.items():
        fast[name] = njit(FunctionType(part.__code__, {**part.__globals__, **fast}, name))
    return fast
