"""Kernels are launched by one function, which under `compile_only` compiles them instead."""

import re
from pathlib import Path
from threading import Thread
from typing import Any

import torch

import dgemma.backends.cuda
from tests.kernels.test_interpreted import needs_triton

KERNELS = Path(dgemma.backends.cuda.__file__).parent / "kernels"


class Kernel:
    """Notes how it is called."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return lambda *args, **kwargs: self.calls.append(("launch", grid, args, kwargs))

    def warmup(self, *args: Any, grid: tuple[int, ...], **kwargs: Any) -> None:
        self.calls.append(("compile", grid, args, kwargs))


@needs_triton
def test_a_kernel_is_compiled_instead_of_launched_in_this_thread_alone() -> None:
    from dgemma.backends.cuda.kernels.common import compile_only, launch

    kernel, given = Kernel(), ((1, 2), {"num_warps": 4})

    def call() -> None:
        launch(kernel, (3, 1))(*given[0], **given[1])

    call()
    with compile_only():
        call()
        other = Thread(target=call)
        other.start()
        other.join()
    call()
    assert [name for name, *_ in kernel.calls] == ["launch", "compile", "launch", "launch"]
    assert all(rest == [(3, 1), *given] for _, *rest in kernel.calls)


def test_no_kernel_is_launched_past_that_function() -> None:
    for path in KERNELS.glob("*.py"):
        if path.name != "common.py":
            assert not re.search(r"^\s+_\w+\[", path.read_text(), re.MULTILINE), path.name


@needs_triton
def test_the_pool_compiles_after_its_start_and_nothing_after_its_stop() -> None:
    from dgemma.backends.cuda.precompile import CompilePool

    class Compiled:
        run = None

    done: list[int] = []

    def compile_() -> Compiled:
        done.append(1)
        return Compiled()

    for is_stopped in (False, True):
        with CompilePool(torch.device("cpu")) as pool:
            future = pool.submit(compile_)
            assert not future.done() and len(done) == int(is_stopped)
            pool.stop() if is_stopped else pool.start.set()
            assert (future.exception() is not None) == is_stopped
        assert pool.count == 1
    assert len(done) == 1
