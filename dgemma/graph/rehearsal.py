"""A first start compiles its kernels several at a time, before any of them is launched.

What a start launches is gone through once on the device itself, but no kernel of ours is launched:
Triton notes what it would compile, with the very arguments, and then does so in threads. Where
these run its own code, or other programs', they need not wait for each other; a fifth of the time
is Python's. The check and the captures that follow find their kernels made.

The memory that kernels would have filled is zero then: numbers of tokens or experts that anything
else reads from it exist. What the passes give means nothing, and nothing is decided here. What
fails is left out: it is compiled when it is launched, as if nothing had been tried before.
"""

import logging
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import copy_context
from copy import copy
from functools import partial
from threading import Event, get_ident
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from dgemma.config import LayerType
from dgemma.graph.check import launching
from dgemma.graph.memory import Shape
from dgemma.graph.step import Stepper
from dgemma.graph.token import Committer, Teller
from dgemma.model import Gemma
from dgemma.ops.fast import FAMILIES, switched
from dgemma.sampler import EntropyBound
from dgemma.stack import Fused, Stack

MOST_WORKERS = 16  # each may take some 200 MB while it compiles
STEPS = 1  # of the memory that steps are rehearsed on; kernels do not depend on it
OURS = "dgemma."
MADE = ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided")

logger = logging.getLogger("dgemma")


def rehearse(model: Gemma, stack: Stack, prompts: Sequence[int]) -> int:
    """Compile what checks and captures will launch; how many kernels were asked for.

    `prompts` are the sizes of captured commits. Nothing happens where Triton is too old for it.
    """
    try:
        from triton import AsyncCompileMode
    except ImportError:
        return 0

    def gather(compilers: Compilers) -> int:
        with AsyncCompileMode(compilers, ignore_errors=True):  # waits at its end
            try:
                with unlaunched(), Zeros():  # type: ignore[no-untyped-call]
                    _go_through(model, stack, prompts)
            except BaseException:
                compilers.stop()  # or that end would not come
                raise
            compilers.go.set()
        return compilers.count

    with Compilers(model.embed_tokens.weight.device) as compilers:
        try:
            # Triton notes in a context variable that it compiles elsewhere: in this copy alone.
            return copy_context().run(gather, compilers)
        finally:
            compilers.stop()


# --- what is gone through


@torch.inference_mode()
def _go_through(model: Gemma, stack: Stack, prompts: Sequence[int]) -> None:
    for part in [*_captured(model, _shallow(stack), prompts), *launching(model, stack)]:
        try:
            part()
        except Exception as error:
            # An op that this device does not have, or no memory: the check will say so.
            logger.debug("not compiled beforehand: %s", error)


def _captured(model: Gemma, stack: Stack, prompts: Sequence[int]) -> Iterator[Callable[[], object]]:
    """What is captured, with all kernels."""

    def commit(count: int) -> None:
        with switched(FAMILIES):
            committer = Teller(model, stack) if count == 1 else Committer(model, stack, count)
            committer.work()

    def steps() -> None:
        shape = Shape(model.config.canvas_length, STEPS, EntropyBound())
        with switched(FAMILIES):
            Stepper(model, stack, shape).work()

    for count in (1, *prompts):
        yield partial(commit, count)
    if model.self_conditioning is not None:
        yield steps


def _shallow(stack: Stack) -> Stack:
    """One layer of each kind: the others launch the same."""
    kinds: dict[LayerType, Fused] = {}
    for layer in stack.layers:
        kinds.setdefault(layer.attention.kind, layer)
    shallow = copy(stack)
    shallow.layers = list(kinds.values())
    return shallow


# --- compiling instead of launching


@contextmanager
def unlaunched() -> Iterator[None]:
    """In this thread kernels of ours are compiled, not launched; nobody else's is called."""
    from triton.runtime.jit import JITFunction

    usual, own = JITFunction.run, get_ident()

    def run(kernel: Any, *given: Any, grid: Any, warmup: bool, **named: Any) -> Any:
        if get_ident() != own:
            return usual(kernel, *given, grid=grid, warmup=warmup, **named)
        if not kernel.fn.__module__.startswith(OURS):
            raise RuntimeError(f"it calls {kernel.fn.__module__}.{kernel.fn.__qualname__}")
        return usual(kernel, *given, grid=grid, warmup=True, **named)

    JITFunction.run = run
    try:
        yield
    finally:
        JITFunction.run = usual


class Zeros(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Memory that is not yet written holds zeros."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if func.overloadpacket.__name__ in MADE:
            (made.view(torch.uint8) if made.dtype.itemsize == 1 else made).zero_()
        return made


class Compilers(ThreadPoolExecutor):
    """Threads that compile what Triton hands them, but not before `go`.

    They would slow down the one that still gathers. Once stopped, all that waits is left out.
    """

    def __init__(self, device: torch.device) -> None:
        workers = min(MOST_WORKERS, os.cpu_count() or 1)
        super().__init__(workers, "compile", partial(_settle, device))
        self.go, self.is_stopped, self.count = Event(), False, 0

    def submit(self, compile_: Callable[[], Any]) -> Future[Any]:  # type: ignore[override]
        self.count += 1
        return super().submit(self._compile, compile_)

    def stop(self) -> None:
        self.is_stopped = True
        self.go.set()

    def _compile(self, compile_: Callable[[], Any]) -> Any:
        self.go.wait()
        if self.is_stopped:
            raise RuntimeError("it was left out")
        kernel = compile_()
        _ = kernel.run  # loads it, for which Triton 3.6 calls a C compiler
        return kernel


def _settle(device: torch.device) -> None:
    """A thread loads kernels onto its current device."""
    if device.type == "cuda":
        torch.cuda.set_device(device)
