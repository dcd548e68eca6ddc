"""Which kernels of ours may be used: decided once for a device, and asked by every op.

Kernels come in four families, and each is on or off as a whole: `experts`, `attention` (from the
heads' norms to what attention gives), `row_stats` (both ends of a step: the head's output to
statistics, the canvas that comes of them, its soft embeddings, how it enters the next step and how
a single token enters), and `layer` for all that lies between. Who builds an engine checks them on
the model at hand and calls `decide` (see `graph/steppers.py`); until then all are off. An op asks
`is_on`, which reads nothing but that decision.
"""

import os
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from functools import cache
from importlib.util import find_spec
from typing import Literal, get_args

import torch
from torch import Tensor

Family = Literal["experts", "attention", "layer", "row_stats"]
FAMILIES: tuple[Family, ...] = get_args(Family)

OFF = "DGEMMA_PLAIN"  # set to anything, no kernel of ours is used
INTERPRET = "TRITON_INTERPRET"  # "1": kernels run on the CPU, slowly, to be tested
LEAST_CAPABILITY = (8, 0)

_on: dict[torch.device, frozenset[Family]] = {}  # what was decided, device by device
_NONE: frozenset[Family] = frozenset()


def is_on(x: Tensor, family: Family = "layer") -> bool:
    """Whether kernels of a family run on this tensor's device, now: nobody wants gradients."""
    if not _on or torch.compiler.is_compiling() or torch.is_grad_enabled():
        return False
    # What was decided was found of a model in 16 bits; another on the same device may have 32.
    if x.dtype == torch.float32 and x.device.type == "cuda" and family != "row_stats":
        return False
    return family in _on.get(x.device, _NONE)


def infers_on_cpu(x: Tensor) -> bool:
    """Whether plain code may take fewer passes over this, and round in another order: on a CPU,
    where neither a gradient nor a graph is made of it. A training run's guess is not such a one."""
    if x.device.type != "cpu" or torch.compiler.is_compiling():
        return False
    return torch.is_inference_mode_enabled()


def has_all(device: torch.device) -> bool:
    """Whether every family is on: what a captured pass needs."""
    return len(decided(device)) == len(FAMILIES)


def decide(device: torch.device, families: Collection[Family]) -> None:
    """Let these families, and no others, run on a device from now on."""
    _on[device] = frozenset(families)


def decided(device: torch.device) -> frozenset[Family]:
    """The families that are on."""
    return _on.get(device, _NONE)


@contextmanager
def switched(on: bool | Collection[Family]) -> Iterator[None]:
    """All families, none or some on every device that can run them, for a while: to compare."""
    families = frozenset(FAMILIES if on else ()) if isinstance(on, bool) else frozenset(on)
    before = dict(_on)
    _on.clear()
    _on.update({device: families for device in _devices() if reason_against(device) is None})
    try:
        yield
    finally:
        _on.clear()
        _on.update(before)


def reason_against(device: torch.device, dtype: torch.dtype = torch.bfloat16) -> str | None:
    """Why there are no kernels for weights of a type on a device; None if there are."""
    if os.environ.get(OFF):
        return f"{OFF} is set"
    if not has_triton():
        return "triton is not installed"
    if os.environ.get(INTERPRET) == "1":
        return None if device.type == "cpu" else f"{INTERPRET} is set"
    if device.type != "cuda" or torch.version.hip is not None:
        return f"kernels are for NVIDIA GPUs, not for {device.type}"
    if device.index not in (None, torch.cuda.current_device()):
        # Triton launches there, wherever the memory lies.
        return f"kernels run on the current GPU alone: set CUDA_VISIBLE_DEVICES={device.index}"
    if torch.cuda.get_device_capability(device) < LEAST_CAPABILITY:
        return "the GPU has no bfloat16 arithmetic"
    if dtype not in (torch.bfloat16, torch.float16):
        return f"kernels are for 16-bit weights, not for {str(dtype).removeprefix('torch.')}"
    return None


@cache
def has_triton() -> bool:
    return find_spec("triton") is not None


def _devices() -> list[torch.device]:
    count = torch.cuda.device_count()
    return [torch.device("cpu"), *(torch.device("cuda", index) for index in range(count))]
