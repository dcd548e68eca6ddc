"""Compiles the kernels of a first start in parallel, before any is launched.

The passes of a shallow model run once under `compile_only`, which submits every kernel to a thread
pool (`triton.AsyncCompileMode`) instead of launching it; memory that kernels would have filled is
zero. Kernels that fail here are compiled at their first launch.
"""

import logging
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextvars import copy_context
from functools import partial
from threading import Event
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from dgemma.backends.cuda.backend import CudaBackend
from dgemma.backends.cuda.canvas_pool import CanvasPool
from dgemma.backends.cuda.graphs import CANVAS_BUCKETS, COMMIT_BUCKETS
from dgemma.backends.cuda.kernels.common import compile_only
from dgemma.backends.cuda.passes import MAX_SEQUENCES, DecodePass, DenoisePass
from dgemma.backends.cuda.selftest import shallow
from dgemma.model.gemma import Gemma

MAX_WORKERS = 16  # each compilation takes about 200 MB
MAX_WAIT = 60.0  # seconds; bounds a launch that waits for its own compilation
ALLOCATIONS = ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided")
# Batches whose kernels a first start compiles: (canvases, commits).
# The prompt of the self-test is one of eight commits.
BATCHES = ((1, 0), (1, 1), (0, 1), (0, 4), (0, 8), (2, 0), (4, 0), (8, 0))
SHORT_BATCHES = ((1, 0),)  # with short segments

logger = logging.getLogger("dgemma")


def precompile(model: Gemma) -> int:
    """Compile the kernels that a model's passes will launch; return how many."""

    def submit() -> None:
        with Zeros():  # type: ignore[no-untyped-call]
            _run_passes(model)

    return compile_in_parallel(submit, model.embed_tokens.weight.device)


def compile_in_parallel(submit: Callable[[], None], device: torch.device) -> int:
    """Compile all kernels that `submit` launches; return their number."""
    try:
        from triton import AsyncCompileMode
    except ImportError:
        return 0

    def gather(pool: "CompilePool") -> int:
        with AsyncCompileMode(pool, ignore_errors=True):  # waits at its end
            try:
                with compile_only():
                    submit()
            except BaseException:
                pool.stop()  # otherwise the exit above would not return
                raise
            pool.start.set()
        return pool.count

    with CompilePool(device) as pool:
        try:
            # Triton keeps its compile mode in a context variable: change only a copy.
            return copy_context().run(gather, pool)
        finally:
            pool.stop()


@torch.inference_mode()
def _run_passes(model: Gemma) -> None:
    backend = CudaBackend(shallow(model))
    for run in _passes(backend):
        try:
            run()
        except Exception as error:
            logger.debug("not compiled beforehand: %s", error)


def _passes(backend: CudaBackend) -> Iterator[Callable[[], object]]:
    short = [(pool, SHORT_BATCHES) for pool in backend.pools.values() if pool is not backend.pool]
    for pool, batches in ((backend.pool, BATCHES), *short):
        yield from _denoising(backend, pool, batches)
    for count in (1, 4, MAX_SEQUENCES):
        yield DecodePass(backend.passes, backend.decoder.buffers, count).step


def _denoising(
    backend: CudaBackend, pool: CanvasPool, batches: Sequence[tuple[int, int]]
) -> Iterator[Callable[[], object]]:
    for canvases, commits in batches:
        if canvases > backend.max_batch_size or (canvases and backend.passes.self_cond is None):
            continue
        assert canvases in (0, *CANVAS_BUCKETS) and commits in COMMIT_BUCKETS
        denoise = DenoisePass(backend.passes, pool.buffers, canvases, commits)
        yield partial(_step, denoise) if canvases else denoise.commit


def _step(denoise: DenoisePass) -> None:
    stats = denoise.step()
    for sparse in (True, False):
        denoise.soft_embed(stats, sparse=sparse)


class Zeros(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Fills newly allocated memory with zeros."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        tensor = func(*args, **(kwargs or {}))
        if func.overloadpacket.__name__ in ALLOCATIONS:
            (tensor.view(torch.uint8) if tensor.dtype.itemsize == 1 else tensor).zero_()
        return tensor


class CompilePool(ThreadPoolExecutor):
    """Threads that compile the kernels submitted by Triton, but only after `start`.

    Earlier they would slow down the submitting thread. After `stop` nothing is compiled.
    """

    def __init__(self, device: torch.device) -> None:
        workers = min(MAX_WORKERS, os.cpu_count() or 1)
        super().__init__(workers, "compile", partial(_set_device, device))
        self.start, self.is_stopped, self.count = Event(), False, 0

    def submit(self, compile_: Callable[[], Any]) -> Future[Any]:  # type: ignore[override]
        self.count += 1
        return super().submit(self._compile, compile_)

    def stop(self) -> None:
        self.is_stopped = True
        self.start.set()

    def _compile(self, compile_: Callable[[], Any]) -> Any:
        self.start.wait(MAX_WAIT)
        if self.is_stopped:
            raise RuntimeError("precompilation was stopped")
        kernel = compile_()
        _ = kernel.run  # loads the kernel; Triton 3.6 calls a C compiler for it
        return kernel


def _set_device(device: torch.device) -> None:
    """Set the device of a thread, which loads kernels onto its current device."""
    if device.type == "cuda":
        torch.cuda.set_device(torch.cuda.current_device() if device.index is None else device)
