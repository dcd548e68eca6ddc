"""Compiles the kernels of a first start several at a time, before any of them is launched.

The passes of a shallow model run once on the device with every kernel of ours replaced by its
compilation in a thread pool (`triton.AsyncCompileMode`). Memory that kernels would have filled is
zero. Whatever fails here is left out, and compiled when it is first launched.
"""

import logging
import os
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import copy_context
from functools import partial
from threading import Event, get_ident
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from dgemma.backends.cuda.backend import COMMIT_BUCKETS, MAX_ROWS, ROW_BUCKETS, CudaBackend
from dgemma.backends.cuda.buffers import GraphBuffers
from dgemma.backends.cuda.passes import DecodePass, DenoisePass
from dgemma.backends.cuda.selftest import shallow
from dgemma.model.gemma import Gemma

MAX_WORKERS = 16  # each may take some 200 MB while it compiles
OURS = "dgemma."
MADE = ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided")
# Batches whose kernels a first start compiles: (canvases, commits).
BATCHES = ((1, 0), (1, 1), (0, 1), (0, 4), (2, 0), (4, 0), (8, 0), (16, 0), (16, 1))

logger = logging.getLogger("dgemma")


def precompile(model: Gemma) -> int:
    """Compile what the passes of a model will launch; returns how many kernels were asked for."""
    try:
        from triton import AsyncCompileMode
    except ImportError:
        return 0

    def gather(compilers: "Compilers") -> int:
        with AsyncCompileMode(compilers, ignore_errors=True):  # waits at its end
            try:
                with unlaunched(), Zeros():  # type: ignore[no-untyped-call]
                    _go_through(model)
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


@torch.inference_mode()
def _go_through(model: Gemma) -> None:
    backend = CudaBackend(shallow(model))
    for work in _passes(backend):
        try:
            work()
        except Exception as error:
            logger.debug("not compiled beforehand: %s", error)


def _passes(backend: CudaBackend) -> Iterator[Callable[[], object]]:
    buffers: GraphBuffers = backend.buffers
    for canvases, commits in BATCHES:
        if canvases > backend.max_rows or (canvases and backend.passes.self_cond is None):
            continue
        assert canvases in (0, *ROW_BUCKETS) and commits in COMMIT_BUCKETS
        found = DenoisePass(backend.passes, buffers, canvases, commits)
        yield found.step
        if canvases:
            yield partial(found.soft_embed, sparse=True)
            yield partial(found.soft_embed, sparse=False)
    for count in (1, 4, MAX_ROWS):
        yield DecodePass(backend.passes, backend.decode_buffers, count).step


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
        workers = min(MAX_WORKERS, os.cpu_count() or 1)
        super().__init__(workers, "compile", partial(_set_device, device))
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


def _set_device(device: torch.device) -> None:
    """A thread loads kernels onto its current device."""
    if device.type == "cuda":
        torch.cuda.set_device(device)
