"""CUDA devices: whether the backend supports them, and properties that kernel configs need.

Without a GPU (kernels run by the interpreter, or compiled ahead of time) the device counts as an
H200, for which the configs were tuned. Triton need not be installed.
"""

import os
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from importlib.util import find_spec

import torch

from dgemma.errors import UsageError

PLAIN = "DGEMMA_PLAIN"  # any value: use the reference backend
SELFTEST = "DGEMMA_SELFTEST"  # "warn": use the kernels even if the self-test fails
INTERPRET = "TRITON_INTERPRET"  # "1": kernels run on the CPU, slowly, for tests
MIN_CAPABILITY = (8, 0)
HOPPER, HOPPER_SMS = (9, 0), 132


def unsupported_reason(device: torch.device, dtype: torch.dtype = torch.bfloat16) -> str | None:
    """Return why the kernels cannot run weights of a dtype on a device, or None."""
    if os.environ.get(PLAIN):
        return f"{PLAIN} is set"
    if not has_triton():
        return "triton is not installed"
    if is_interpreted():
        return None if device.type == "cpu" else f"{INTERPRET} is set"
    if device.type != "cuda" or torch.version.hip is not None:
        name = "AMD GPUs" if device.type == "cuda" else device.type
        return f"the kernels are for NVIDIA GPUs, not for {name}"
    if torch.cuda.get_device_capability(device) < MIN_CAPABILITY:
        return "the GPU has no bfloat16 arithmetic"
    if dtype not in (torch.bfloat16, torch.float16):
        return f"the kernels are for 16-bit weights, not for {str(dtype).removeprefix('torch.')}"
    return None


def ignores_selftest() -> bool:
    """True if the user wants the kernels even if the self-test fails."""
    value = os.environ.get(SELFTEST, "")
    if value not in ("", "warn"):
        raise UsageError(f"{SELFTEST} is {value!r}; set it to warn, or unset it")
    return value == "warn"


@cache
def has_triton() -> bool:
    return find_spec("triton") is not None


def is_interpreted() -> bool:
    """True if Triton's interpreter runs the kernels."""
    return os.environ.get(INTERPRET) == "1"


def current_device(device: torch.device) -> AbstractContextManager[object]:
    """Make a GPU the current one: Triton launches there, wherever the tensors are."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def capability() -> tuple[int, int]:
    """Return the compute capability of the current device."""
    return _properties(torch.cuda.current_device())[0] if torch.cuda.is_available() else HOPPER


def num_sms() -> int:
    """Return the number of SMs: grids aim for as many programs."""
    return _properties(torch.cuda.current_device())[1] if torch.cuda.is_available() else HOPPER_SMS


def has_tma() -> bool:
    """True if tensor descriptors are read by TMA."""
    return capability() >= HOPPER


def has_small_shared_memory() -> bool:
    """True if a program has 99 KB of shared memory, as on GeForce and workstation cards.

    An A100 has 163 KB, Hopper and datacenter Blackwell have 227 KB.
    """
    major, minor = capability()
    return major >= 12 or (major == 8 and minor in (6, 9))


@cache
def _properties(index: int) -> tuple[tuple[int, int], int]:
    gpu = torch.cuda.get_device_properties(index)
    return (gpu.major, gpu.minor), gpu.multi_processor_count
