"""The current GPU, as far as the choice of kernel configs depends on it.

Without one (kernels run by the interpreter, or compiled ahead of time) it is an H200, for which
configs were tuned.
"""

from functools import cache

import torch

HOPPER, HOPPER_SMS = (9, 0), 132


def capability() -> tuple[int, int]:
    """Return the compute capability of the current device."""
    return _facts(torch.cuda.current_device())[0] if torch.cuda.is_available() else HOPPER


def num_sms() -> int:
    """Return the multiprocessors of the current device: grids aim for as many programs."""
    return _facts(torch.cuda.current_device())[1] if torch.cuda.is_available() else HOPPER_SMS


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
def _facts(index: int) -> tuple[tuple[int, int], int]:
    found = torch.cuda.get_device_properties(index)
    return (found.major, found.minor), found.multi_processor_count
