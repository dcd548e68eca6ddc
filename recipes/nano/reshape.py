"""Make a checkpoint to train on from: more layers, or the average of two checkpoints.

    python -m recipes.nano.reshape deepen nano out/nano/first --layers 12
    python -m recipes.nano.reshape average out/nano/first out/nano/run10/checkpoint out/nano/deep

`deepen` repeats the last layers. The first copy of each has its residual output scaled down to a
tenth, so that the deeper model computes nearly what the old one did.

`average` interpolates weights linearly. A short run at a high learning rate moves far and forgets
on the way; the average of its two ends can be better than either (HISTORY.md, run 10).
"""

import argparse
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from dgemma.errors import UsageError
from dgemma.weights.hub import find_checkpoint
from dgemma.weights.load import Checkpoint, fill, load_model
from dgemma.weights.names import skeleton
from dgemma.weights.save import save_checkpoint

COPY_SCALE = 0.1  # of a copied layer's residual output: 0 would leave it without a gradient
OUTPUT_NORMS = ("post_attention_layernorm.weight", "post_feedforward_layernorm.weight")


def deepen(checkpoint: Checkpoint, num_layers: int) -> Checkpoint:
    """Return the model with its last layers repeated, so that it has `num_layers`."""
    config = checkpoint.config
    num_old = config.num_hidden_layers
    num_new = num_layers - num_old
    if not 0 <= num_new <= num_old:
        raise UsageError(
            f"{num_layers} layers; there are {num_old}, each of which can be repeated once: give "
            f"{num_old} to {2 * num_old}"
        )
    first = num_old - num_new
    layer_types = config.layer_types + config.layer_types[first:]
    weights = _repeat_layers(checkpoint.model.state_dict(), num_old, first)
    deeper = replace(config, layer_types=layer_types)
    return replace(checkpoint, model=fill(skeleton(deeper), weights))


def _repeat_layers(weights: Mapping[str, Tensor], num_old: int, first: int) -> dict[str, Tensor]:
    """Insert scaled-down copies of layers `first` and up before those layers."""
    repeated = {name: weight for name, weight in weights.items() if not name.startswith("layers.")}
    for position, layer in enumerate([*range(num_old), *range(first, num_old)]):
        is_copy = first <= position < num_old
        prefix = f"layers.{layer}."
        for name in [name for name in weights if name.startswith(prefix)]:
            suffix = name.removeprefix(prefix)
            weight = weights[name]
            if is_copy and suffix in OUTPUT_NORMS:
                weight = weight * COPY_SCALE
            if is_copy and suffix == "layer_scalar":
                weight = torch.ones_like(weight)
            repeated[f"layers.{position}.{suffix}"] = weight
    return repeated


def average(first: Checkpoint, second: Checkpoint, weight: float) -> Checkpoint:
    """Return the first checkpoint with (1 - weight) * first + weight * second as its weights."""
    if not 0 <= weight <= 1:
        raise UsageError(f"a weight of {weight}; it is from 0, the first alone, to 1, the second")
    if first.config != second.config:
        raise UsageError("the two checkpoints have different shapes; an average needs equal ones")
    others = second.model.state_dict()
    weights = {
        name: torch.lerp(tensor, others[name], weight)
        for name, tensor in first.model.state_dict().items()
    }
    return replace(first, model=fill(skeleton(first.config), weights))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    command = commands.add_parser("deepen", help="repeat the last layers")
    command.add_argument("checkpoint", help="a directory, or nano")
    command.add_argument("out", type=Path)
    command.add_argument("--layers", type=int, required=True, help="number of layers to have")
    command = commands.add_parser("average", help="interpolate two checkpoints of one shape")
    command.add_argument("checkpoint", help="a directory, or nano")
    command.add_argument("second", help="the same")
    command.add_argument("out", type=Path)
    command.add_argument("--weight", type=float, default=0.5, help="of the second")
    options = parser.parse_args()
    directory = find_checkpoint(options.checkpoint)
    old = load_model(directory, dtype=torch.float32)
    if options.command == "deepen":
        new = deepen(old, options.layers)
    else:
        second = load_model(find_checkpoint(options.second), dtype=torch.float32)
        new = average(old, second, options.weight)
    save_checkpoint(new, options.out, tokenizer_from=directory, overwrite=True)
    print(f"{options.out}: {sum(w.numel() for w in new.model.parameters()):,} weights")


if __name__ == "__main__":
    main()
