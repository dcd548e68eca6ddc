"""Whether an op may take its kernel: where there is a GPU for it, and nobody wants gradients."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from importlib.util import find_spec

import torch
from torch import Tensor

OFF = "DGEMMA_PLAIN"  # set to anything, no kernel of ours is used
INTERPRET = "TRITON_INTERPRET"  # "1": kernels run on the CPU, slowly, to be tested

_switch = {"on": False}  # until `bench/gpu_check.py` has passed on the GPU at hand


def is_on(x: Tensor) -> bool:
    """Whether kernels run on this tensor's device, now."""
    if not _switch["on"] or torch.is_grad_enabled() or torch.compiler.is_compiling():
        return False
    return reason_against(x.device) is None


def reason_against(device: torch.device) -> str | None:
    """Why there are no kernels for a device; None if there are."""
    if os.environ.get(OFF):
        return f"{OFF} is set"
    if not has_triton():
        return "triton is not installed"
    if os.environ.get(INTERPRET) == "1":
        return None if device.type == "cpu" else f"{INTERPRET} is set"
    if device.type != "cuda" or torch.version.hip is not None:
        return f"kernels are for NVIDIA GPUs, not for {device.type}"
    if torch.cuda.get_device_capability(device) < (8, 0):
        return "the GPU has no bfloat16 arithmetic"
    return None


@cache
def has_triton() -> bool:
    return find_spec("triton") is not None


def switch(on: bool) -> None:
    """Let ops take their kernels, or not."""
    _switch["on"] = on


@contextmanager
def switched(on: bool) -> Iterator[None]:
    """The same for a while, to compare."""
    before = _switch["on"]
    switch(on)
    try:
        yield
    finally:
        switch(before)
