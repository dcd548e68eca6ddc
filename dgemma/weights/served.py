"""A checkpoint made ready to answer: its form chosen, loaded, adapted, and laid out for its device.

The order matters: an adapter goes on plain modules, and packing comes last.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import TypedDict

import torch

from dgemma.backends.cpu.pack import pack
from dgemma.backends.cpu.pack_int8 import pack_int8
from dgemma.device import choose_device, choose_dtype
from dgemma.errors import UsageError
from dgemma.quant.fp8_head import shrink_head
from dgemma.weights.adapter import Adapter, attach, merge
from dgemma.weights.choose import Choice, choose_quant
from dgemma.weights.load import Checkpoint, Progress, load_model


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """Where and how to run, in the words of the command line."""

    device: str = "auto"
    dtype: str = "auto"
    quant: str = "auto"


class Where(TypedDict, total=False):
    """The same, as arguments."""

    device: str
    dtype: str
    quant: str


@dataclass(frozen=True, slots=True)
class Decided:
    """What came of it on this machine."""

    device: torch.device
    dtype: torch.dtype
    choice: Choice


def decide(directory: Path, wanted: Wanted, *, adapted: bool = False) -> Decided:
    """Choose device, number type and form; what cannot be is refused here."""
    device = choose_device(wanted.device)
    dtype, is_free = choose_dtype(wanted.dtype, device), wanted.dtype == "auto"
    choice = choose_quant(wanted.quant, directory, device, dtype, exact=not is_free)
    if adapted and choice.quant not in ("none", "int8"):
        if wanted.quant != "auto":
            raise UsageError(
                f"an adapter cannot be put on weights in {choice.quant}; merge it first with "
                f"`dgemma export MODEL DIRECTORY --adapter ADAPTER`, and load that with --quant "
                f"{choice.quant}"
            )
        choice = choose_quant("none", directory, device, dtype)
    # Between 8-bit products all is exact to begin with, and quicker in float32.
    return Decided(device, torch.float32 if choice.quant == "int8" and is_free else dtype, choice)


def load_served(
    directory: Path,
    wanted: Wanted,
    adapter: Adapter | None = None,
    on_tensor: Progress | None = None,
) -> Checkpoint:
    """Load a checkpoint to run it; the model can be neither trained nor saved."""
    decided = decide(directory, wanted, adapted=adapter is not None)
    is_int8, device, dtype = decided.choice.quant == "int8", decided.device, decided.dtype
    quant = "none" if is_int8 and adapter is not None else decided.choice.quant
    found = load_model(directory, device=device, dtype=dtype, quant=quant, on_tensor=on_tensor)
    if decided.choice.head_8:
        shrink_head(found.model, soft=decided.choice.soft_8)
    if adapter is not None:
        # The fused kernels take plain linears: on a GPU an adapter is merged into the weights.
        (merge if device.type == "cuda" else attach)(found.model, adapter)
        if is_int8:
            pack_int8(found.model)
    # Packing does nothing where a form of fewer bits stands already.
    if quant == "none" and not is_int8:
        pack(found.model)
    return found
