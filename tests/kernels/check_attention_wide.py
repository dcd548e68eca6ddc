"""The Gluon kernel's source on fakes of what it calls: the interpreter has no Gluon.

Copies to shared memory happen either at once or as late as waiting allows, so that a value that is
read too early or overwritten too soon shows. Layouts and the barriers between warps do not.
"""

import ctypes
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from dgemma.backends.cuda.configs import AttentionConfig
from dgemma.backends.cuda.kernels import attention, attention_wide
from dgemma.backends.cuda.kernels.attention import CANVAS, CAUSAL, MIXED
from tests.kernels import check_attention as plain

CASES = [
    # length, heads, key heads, width, past, own, window (None: a canvas), splits
    (40, 4, 1, 32, 0, 40, None, 1),
    (40, 4, 1, 32, 70, 240, None, 3),
    (40, 4, 2, 16, 130, 66, 0, 2),
    (70, 4, 2, 16, 7, 270, 90, 2),
    (1, 4, 1, 16, 30, 1, None, 4),
]


class Number(int):
    """A scalar of a kernel, and of what it computes from it."""

    def to(self, kind: Any) -> Any:
        return Pointer(MEMORY[int(self)], 0) if kind == "pointer" else self

    def __floordiv__(self, other: Any) -> Any:
        return wrapped(int(self) // other)

    def __mod__(self, other: Any) -> Any:
        return wrapped(int(self) % other)


def wrapped(found: Any) -> Any:
    return Number(found) if isinstance(found, int) else found


MEMORY: dict[int, Tensor] = {}


class Pointer:
    def __init__(self, memory: Tensor, at: Any) -> None:
        self.memory, self.at = memory, at
        self.dtype = SimpleNamespace(element_ty=memory.dtype)

    def __add__(self, more: Any) -> "Pointer":
        return Pointer(self.memory, self.at + more)


class Shared:
    """Shared memory; nothing of it is a number before it is written."""

    def __init__(self, dtype: torch.dtype, shape: list[int], _: Any) -> None:
        self.held = torch.full(shape, float("nan"), dtype=dtype)

    def store(self, value: Tensor) -> None:
        self.held.copy_(value)

    def permute(self, order: tuple[int, int]) -> Any:
        return SimpleNamespace(held=self.held.permute(order))


class Copies:
    """Asynchronous copies in groups, done when issued or as late as the wait."""

    def __init__(self, *, late: bool) -> None:
        self.late, self.open, self.groups = late, list[Any](), list[Any]()

    def fetch(self, shared: Shared, pointer: Pointer) -> None:
        def copy() -> None:
            shared.held.copy_(pointer.memory[pointer.at])

        if self.late:
            shared.held.fill_(float("nan"))
            self.open.append(copy)
        else:
            copy()

    def commit_group(self) -> None:
        self.groups.append(self.open)
        self.open = []

    def wait_group(self, left: int) -> None:
        while len(self.groups) > left:
            for copy in self.groups.pop(0):
                copy()


def product(a: Any, b: Any, acc: Tensor, *, use_acc: bool = True, is_async: bool) -> Tensor:
    assert is_async
    made = a.held.float() @ b.held.float()
    return acc + made if use_acc else made


def load(pointer: Pointer) -> Number:
    return Number(pointer.memory[pointer.at].item())


def store(pointer: Pointer, value: Tensor, mask: Tensor) -> None:
    pointer.memory[pointer.at[mask]] = value[mask]


def either(condition: Any, a: Any, b: Any) -> Any:
    if isinstance(condition, Tensor):
        return torch.where(condition, a, b)
    return a if condition else b


def extreme(pick: Any, of: Any) -> Any:
    def taken(a: Any, b: Any) -> Any:
        if isinstance(a, Tensor):
            return of(a, torch.as_tensor(b, dtype=a.dtype))
        return Number(pick(a, b))

    return taken


def language(ids: list[int], sizes: tuple[int, ...]) -> Any:
    return SimpleNamespace(
        constexpr=int,
        int32=torch.int32,
        int64=torch.int64,
        float32=torch.float32,
        pointer_type=lambda _: "pointer",
        NVMMADistributedLayout=lambda **_: None,
        NVMMASharedLayout=lambda **_: None,
        BlockedLayout=lambda *_: None,
        SliceLayout=lambda *_: None,
        program_id=lambda axis: Number(ids[axis]),
        num_programs=lambda axis: Number(sizes[axis]),
        cdiv=lambda a, b: -(-a // b),
        multiple_of=lambda x, _: x,
        load=load,
        store=store,
        where=either,
        minimum=extreme(min, torch.minimum),
        maximum=extreme(max, torch.maximum),
        arange=lambda a, b, layout: torch.arange(a, b, dtype=torch.int32),
        full=lambda shape, value, dtype, _: torch.full(shape, value, dtype=dtype),
        zeros=lambda shape, dtype, _: torch.zeros(shape, dtype=dtype),
        convert_layout=lambda x, _: x,
        allocate_shared_memory=Shared,
        max=lambda x, axis: x.amax(axis),
        sum=lambda x, axis: x.sum(axis),
        exp2=torch.exp2,
        log2=torch.log2,
    )


def launched(late: bool, patch: pytest.MonkeyPatch) -> "Kernel":
    """Something that is called as the kernel is, and goes through its programs."""
    body = attention_wide._attend.fn
    for name in ("_fetch_block", "_hide"):
        patch.setattr(attention_wide, name, getattr(attention_wide, name).fn)
    patch.setattr(attention_wide, "LOG2_E", 1.4426950408889634)
    patch.setattr(attention_wide, "_barrier", lambda: None)
    patch.setattr(attention_wide, "fence_async_shared", lambda: None)
    patch.setattr(attention_wide, "warpgroup_mma", product)
    patch.setattr(attention_wide, "warpgroup_mma_wait", lambda left, deps: deps[0])

    def go(sizes: tuple[int, ...], *given: Any, num_warps: int, **constants: Any) -> None:
        pointers = [Pointer(flat(g), 0) if isinstance(g, Tensor) else g for g in given]
        for ids in torch.cartesian_prod(*(torch.arange(n) for n in sizes)).tolist():
            copies = Copies(late=late)
            patch.setattr(attention_wide, "gl", language(ids, sizes))
            patch.setattr(attention_wide, "async_copy", copies)
            patch.setattr(attention_wide, "_fetch", copies.fetch)
            body(*pointers, **constants)

    return Kernel(go)


class Kernel:
    def __init__(self, go: Any) -> None:
        self.go = go

    def __getitem__(self, sizes: tuple[int, ...]) -> Any:
        return lambda *given, **options: self.go(sizes, *given, **options)


@pytest.fixture(params=[False, True])
def kernel(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel on fakes; copies are done at once, or late."""
    monkeypatch.setattr(attention_wide, "_attend", launched(request.param, monkeypatch))
    attend = attention.attend

    def map_memory(
        q_TNH: Tensor, table_E6: Tensor, segments: attention.Segments, kv_heads: int, *rest: Any
    ) -> tuple[Tensor, Tensor]:
        """Map addresses to the memory they are addresses of."""
        for keys, values, count in table_E6.reshape(-1, 3).tolist():
            for address in (keys, values):
                MEMORY[address] = at(address, count * kv_heads * q_TNH.shape[2])
        return attend(q_TNH, table_E6, segments, kv_heads, *rest)

    monkeypatch.setattr(attention, "attend", map_memory)


def wide(splits: int) -> AttentionConfig:
    return AttentionConfig(queries=64, keys=64, warps=8, stages=1, splits=splits, wide=True)


@pytest.mark.usefixtures("kernel")
@pytest.mark.parametrize("case", CASES)
def test_the_wide_kernel_agrees_with_the_definition(case: tuple[int, ...]) -> None:
    got, want = plain.both(case[:7], wide(case[7]))
    torch.testing.assert_close(got, want, atol=4e-6, rtol=1e-5)


@pytest.mark.usefixtures("kernel")
@pytest.mark.parametrize("window", [0, 6])
@pytest.mark.parametrize("kind", [CANVAS, CAUSAL, MIXED])
def test_segments_of_a_pass_are_attended_in_one_launch(kind: int, window: int) -> None:
    """As by the other kernel, with padding among them."""
    plain.Given(plain.BATCHES[kind], (4, 1, 16), window, stride=20).check(kind, wide(2))


def at(address: int, size: int) -> Tensor:
    if address == 0:
        return torch.empty(0)
    return torch.frombuffer((ctypes.c_float * size).from_address(address), dtype=torch.float32)


def flat(given: Tensor) -> Tensor:
    """All memory from a tensor's first number on, whatever its strides."""
    size = given.untyped_storage().nbytes() // given.element_size() - given.storage_offset()
    return given.as_strided((size,), (1,))
