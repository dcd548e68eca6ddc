"""A first start's kernels are compiled beforehand, for a GPU that need not be there.

Run by `test_rehearsal.py` in a process of its own: Triton is given a driver that launches nothing,
and writes down what it was asked to launch.
"""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from threading import Thread
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver

from dgemma.cache import KVCache, Room
from dgemma.config import ModelConfig
from dgemma.graph import rehearsal
from dgemma.graph.check import launching
from dgemma.graph.rehearsal import Zeros, rehearse, unlaunched
from dgemma.graph.steppers import Fast
from dgemma.model import Gemma
from dgemma.ops import fast
from dgemma.ops.fast import FAMILIES, decide
from dgemma.ops.kernels import layer
from dgemma.sampler import EntropyBound, Sampler
from dgemma.stack import Stack
from dgemma.weights.random import random_model
from tests.kernels import small
from tests.kernels.small import CPU, SMALL

CONFIG = replace(SMALL, hidden_size=64, head_dim=32, global_head_dim=64, dtype="bfloat16")
PROPERTIES = {"max_shared_mem": 227 * 1024}
Launched = list[str]


NAMES: Launched = []


class Pretended:
    """A Hopper GPU, so Triton believes. Kept to the end: kernels are given back to it."""

    utils = SimpleNamespace(
        get_device_properties=lambda device: PROPERTIES,
        load_binary=lambda *given: (object(), object(), 32, 0, 1024),
        unload_module=lambda *given: None,
    )

    def launcher_cls(self, source: Any, metadata: Any) -> Any:
        return lambda *given: NAMES.append(metadata.name)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)


driver.set_active(Pretended())


@pytest.fixture(autouse=True)
def launched(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Launched:
    """Names of the kernels that were launched."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(fast, "_on", {})
    monkeypatch.setattr(fast, "reason_against", lambda device, dtype=None: None)
    layer._norm.device_caches.clear()
    NAMES.clear()
    return NAMES


@pytest.fixture
def heard(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """For each kernel that was not in memory: whether it was on disk."""
    found: list[bool] = []
    listener = lambda **told: found.append(told["cache_hit"])  # noqa: E731
    monkeypatch.setattr(knobs.compilation, "listener", listener)
    return found


@triton.jit
def _broken(x):
    tl.static_assert(False, "it is broken")


@triton.jit
def _elsewhere(x):
    tl.store(x, 1.0)


def norm(width: int) -> None:
    layer.norm(torch.ones(2, width), torch.ones(width), 1e-6)


def rehearse_only(monkeypatch: pytest.MonkeyPatch, *work: Any) -> int:
    def go_through(*given: Any) -> None:
        for one in work:
            one()

    monkeypatch.setattr(rehearsal, "_go_through", go_through)
    model = SimpleNamespace(embed_tokens=SimpleNamespace(weight=torch.zeros(1)))
    return rehearse(model, None, ())  # type: ignore[arg-type]


def test_what_is_rehearsed_is_compiled_once_and_not_launched(
    monkeypatch: pytest.MonkeyPatch, launched: Launched, heard: list[bool]
) -> None:
    widths = (32, 64, 32)
    assert rehearse_only(monkeypatch, *(lambda width=w: norm(width) for w in widths)) == 2
    assert (heard, launched) == ([False, False], [])
    norm(32)
    norm(64)
    assert (len(heard), launched) == (2, ["_norm", "_norm"])  # from memory
    layer._norm.device_caches.clear()
    norm(32)
    assert heard[2:] == [True]  # another process finds it on disk
    norm(128)
    assert heard[3:] == [False]


def test_a_kernel_that_does_not_compile_fails_when_it_is_launched(
    monkeypatch: pytest.MonkeyPatch, launched: Launched
) -> None:
    monkeypatch.setattr(_broken.fn, "__module__", "dgemma.broken")
    work = (lambda: _broken[(1,)](torch.zeros(1)), lambda: norm(32))
    assert rehearse_only(monkeypatch, *work) == 2
    norm(32)
    assert launched == ["_norm"]
    with pytest.raises(triton.CompilationError, match="it is broken"):
        _broken[(1,)](torch.zeros(1))


def test_a_rehearsal_that_is_broken_off_leaves_all_as_it_was(
    monkeypatch: pytest.MonkeyPatch, launched: Launched, heard: list[bool]
) -> None:
    def stop() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        rehearse_only(monkeypatch, lambda: norm(32), stop)
    assert heard == []
    norm(32)
    assert (launched, heard) == (["_norm"], [False])


def test_other_threads_launch_and_other_kernels_end_a_part(launched: Launched) -> None:
    with unlaunched():
        other = Thread(target=norm, args=(32,))
        other.start()
        other.join()
        assert launched == ["_norm"]
        norm(32)
        with pytest.raises(RuntimeError, match="_elsewhere"):
            _elsewhere[(1,)](torch.zeros(1))
    assert launched == ["_norm"]
    norm(32)
    assert launched == ["_norm", "_norm"]


def test_memory_that_no_kernel_filled_is_zero() -> None:
    types = (torch.bfloat16, torch.int32, torch.long, torch.bool, torch.float8_e4m3fn)
    with torch.inference_mode(), Zeros():
        for dtype in types:
            like = torch.empty(1000, 3, dtype=dtype)
            for made in (like, torch.empty_like(like.t()), like.new_empty(7)):
                assert not made.float().any()
        assert torch.full((2,), 3).tolist() == [3, 3]


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Iterator[set[tuple[str, str]]]:
    """Kernels that would be compiled, each with what it is specialized for; none is."""
    found: set[tuple[str, str]] = set()

    def hook(*, key: str, fn: Any, **told: Any) -> bool:
        found.add((f"{fn.module}.{fn.name}", key))
        return True

    monkeypatch.setattr(knobs.runtime, "jit_cache_hook", hook)
    yield found


def model_of(config: ModelConfig) -> Gemma:
    return random_model(config, 0, dtype=torch.bfloat16).requires_grad_(False)


def test_all_that_captured_passes_launch_is_rehearsed(asked: set[tuple[str, str]]) -> None:
    model = model_of(CONFIG)
    with unlaunched(), Zeros():
        rehearsal._go_through(model, Stack(model), (256,))
    rehearsed = set(asked)
    asked.clear()
    decide(CPU, FAMILIES)
    captured = Fast(model)
    cache = KVCache(CONFIG, Room(tokens=600, span=300), torch.bfloat16, CPU)
    row = small.row(Sampler(rule=EntropyBound(), max_steps=5), 1)
    with unlaunched(), Zeros():
        assert captured.commit(range(90), cache)
        assert captured.tell(7, cache) is not None
        row = captured.step(row, cache) or pytest.fail("no step")
        assert captured.step(row, cache) is not None
        assert captured.first(range(4), small.row(row.sampler, 2), cache) is not None
    assert len(asked) > 30
    assert asked <= rehearsed


def test_a_layer_alone_with_each_family_is_rehearsed(asked: set[tuple[str, str]]) -> None:
    model = model_of(CONFIG)
    with unlaunched(), Zeros(), torch.inference_mode():
        for part in launching(model, Stack(model)):
            part()  # none raises
    names = {name.rpartition(".")[2] for name, _ in asked}
    wanted = "_buckets _gate_up _down _attend _heads _norm _join _close _marks _likely _move"
    assert set(wanted.split()) <= names
