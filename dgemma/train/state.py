"""Where a run stands, and its files: everything the next step depends on, and nothing else.

Batches and noise are functions of the seed and the step, so weights, optimizers, the number of
steps taken, sequences that are carried from one to the next, and what is not reported yet are all.
A file is written beside its place and renamed: it is whole or absent.

    DIRECTORY/state-00001000.pt     to go on from
    DIRECTORY/metrics.jsonl         one line a report
    DIRECTORY/recipe.json           the recipe the run was begun with
    DIRECTORY/checkpoint/           the model, in the released layout; or adapter/
"""

import os
import re
from pathlib import Path
from typing import Any

import torch

from dgemma.errors import CheckpointError

METRICS, RECIPE = "metrics.jsonl", "recipe.json"
STATE = re.compile(r"state-(\d{8})\.pt")


def states(directory: Path) -> list[tuple[int, Path]]:
    """The saved states of a run by step, oldest first."""
    found = [(STATE.fullmatch(path.name), path) for path in directory.glob("state-*.pt")]
    return sorted((int(match[1]), path) for match, path in found if match)


def save_state(
    directory: Path, step: int, state: dict[str, Any], *, keep: int, is_writer: bool = True
) -> Path:
    """Write a state, and delete all but the newest `keep`; only one process of several writes."""
    path = directory / f"state-{step:08d}.pt"
    if not is_writer:
        return path
    directory.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".part")
    with partial.open("wb") as file:
        torch.save({"step": step, **state}, file)
        file.flush()
        os.fsync(file.fileno())
    partial.rename(path)
    for _, old in states(directory)[: -max(1, keep)]:
        old.unlink()
    return path


def forget(directory: Path) -> None:
    """Delete what a run has left of its course; a finished model stays."""
    for path in [path for _, path in states(directory)] + [
        directory / name for name in (METRICS, RECIPE)
    ]:
        path.unlink(missing_ok=True)


def load_state(path: Path) -> dict[str, Any]:
    try:
        state = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except (OSError, RuntimeError, EOFError, ValueError) as error:
        raise CheckpointError(
            f"{path} cannot be read ({error}); delete it to go on from the state before"
        ) from None
    assert isinstance(state, dict)
    return state
