"""The mean of two checkpoints of one shape, of which one was trained from the other.

    python -m recipes.nano_mean out/nano/deep out/nano/tenth out/nano/mean [--share 0.5]

A short run at a high rate goes far from where it began, and what it has forgotten lies on the way:
the mean of both ends can be better than either at nearly all that is asked (LOG.md has the losses).
"""

import argparse
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from dgemma.errors import UsageError
from dgemma.weights.download import find_checkpoint
from dgemma.weights.load import Checkpoint, fill, load_model
from dgemma.weights.names import skeleton
from dgemma.weights.save import save_checkpoint


def mean(first: Checkpoint, second: Checkpoint, share: float) -> Checkpoint:
    """With so much of the second; the rest of what a checkpoint says is the first's."""
    if not 0 <= share <= 1:
        raise UsageError(f"a share of {share}; it is from 0, the first alone, to 1, the second")
    if first.config != second.config:
        raise UsageError("the two checkpoints have other shapes; a mean needs the same")
    others: Mapping[str, Tensor] = second.model.state_dict()
    weights = {
        name: torch.lerp(weight, others[name], share)
        for name, weight in first.model.state_dict().items()
    }
    return replace(first, model=fill(skeleton(first.config), weights))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("first", help="a directory, or nano")
    parser.add_argument("second", help="the same")
    parser.add_argument("into", type=Path)
    parser.add_argument("--share", type=float, default=0.5, help="of the second")
    given = parser.parse_args()
    directories = [find_checkpoint(name) for name in (given.first, given.second)]
    both = [load_model(directory, dtype=torch.float32) for directory in directories]
    made = mean(*both, given.share)
    save_checkpoint(made, given.into, tokenizer_from=directories[0], overwrite=True)
    print(f"{given.into}: {given.share:g} of {given.second}, the rest of {given.first}")


if __name__ == "__main__":
    main()
