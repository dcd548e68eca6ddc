"""Whether the tensors of a checkpoint are those its config asks for: by name, shape, and copies.

A difference is refused by name, never repaired. Reads data only to compare copies.
"""

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from dgemma.config import ModelConfig
from dgemma.errors import CheckpointError
from dgemma.weights.files import StoredTensor, listing
from dgemma.weights.mapped import Tensors
from dgemma.weights.names import Entry, stored_names, tied_names


def check_names(
    config: ModelConfig, stored: Mapping[str, StoredTensor], directory: Path
) -> dict[str, Entry]:
    """The table's entry for each stored tensor, or a refusal that names those that do not fit."""
    table, tied = stored_names(config), tied_names(config)
    vision = {name for name, entry in table.items() if entry.group == "vision"}
    has_vision = not vision.isdisjoint(stored)
    known = table | tied
    entries = {name: known[name] for name in stored if name in known}
    findings = {
        "it lacks": [name for name in table if name not in stored and name not in vision],
        "of the image tower, which may only be absent as a whole, it lacks": [
            name for name in table if has_vision and name in vision and name not in stored
        ],
        "it has the unknown": [name for name in stored if name not in known],
        "other shapes have": [
            f"{name} ({list(stored[name].shape)}, not {list(entry.shape)})"
            for name, entry in entries.items()
            if entry.shape != stored[name].shape
        ],
    }
    problems = [f"{what} {listing(names)}" for what, names in findings.items() if names]
    if problems:
        raise CheckpointError(f"{directory} does not fit its config.json: {'; '.join(problems)}")
    return entries


def check_copies(entries: Mapping[str, Entry], tensors: Tensors, directory: Path) -> None:
    """Weights stored twice must be equal bit for bit."""
    copies = {name: e.of for name, e in entries.items() if e.group in ("twin", "tied")}
    unequal = [
        f"{name} differs from {original}"
        for name, original in copies.items()
        if not _are_same_bits(tensors[name], tensors[original])
    ]
    if unequal:
        raise CheckpointError(
            f"{directory}: {listing(unequal)}; each pair is one weight, and which is meant cannot "
            "be guessed"
        )


def _are_same_bits(a: Tensor, b: Tensor) -> bool:
    return a.dtype == b.dtype and torch.equal(a.view(torch.uint8), b.view(torch.uint8))
