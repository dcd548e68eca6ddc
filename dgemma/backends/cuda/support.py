"""Devices that the CUDA backend runs on."""

import os
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from importlib.util import find_spec

import torch

PLAIN = "DGEMMA_PLAIN"  # set to anything, no kernel of ours is used
INTERPRET = "TRITON_INTERPRET"  # "1": kernels run on the CPU, slowly, to be tested
MIN_CAPABILITY = (8, 0)


def unsupported_reason(device: torch.device, dtype: torch.dtype = torch.bfloat16) -> str | None:
    """Say why the kernels cannot run weights of a dtype on a device; None if they can."""
    if os.environ.get(PLAIN):
        return f"{PLAIN} is set"
    if not has_triton():
        return "triton is not installed"
    if os.environ.get(INTERPRET) == "1":
        return None if device.type == "cpu" else f"{INTERPRET} is set"
    if device.type != "cuda" or torch.version.hip is not None:
        name = "AMD GPUs" if device.type == "cuda" else device.type
        return f"the kernels are for NVIDIA GPUs, not for {name}"
    if torch.cuda.get_device_capability(device) < MIN_CAPABILITY:
        return "the GPU has no bfloat16 arithmetic"
    if dtype not in (torch.bfloat16, torch.float16):
        return f"the kernels are for 16-bit weights, not for {str(dtype).removeprefix('torch.')}"
    return None


@cache
def has_triton() -> bool:
    return find_spec("triton") is not None


def current_device(device: torch.device) -> AbstractContextManager[object]:
    """Make a GPU the current one: Triton launches there, wherever the memory is."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()
