"""Give a trained `nano` another shape: a wider dense block, which every token runs, and narrower
experts, of the same size in all.

    python -m recipes.nano_widen nano out/nano/wide --dense 960 --experts 80

Each expert keeps the neurons that say most. What the others read, new neurons of the dense block
read from now on, and say nothing yet: the new model is the old one with pruned experts, and is
trained further (`recipes/nano_more.toml`) to be better than it.

E experts, M neurons of one, F of the dense block, D width.
"""

import argparse
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from dgemma.config import ModelConfig
from dgemma.errors import UsageError
from dgemma.weights.download import find_checkpoint
from dgemma.weights.load import Checkpoint, fill, load_model
from dgemma.weights.names import skeleton
from dgemma.weights.save import save_checkpoint

Weights = dict[str, Tensor]
SPREAD = 0.02  # of new numbers, where there is nothing to take them from


def widened(found: Checkpoint, dense: int, inner: int, seed: int = 0) -> Checkpoint:
    """The checkpoint with `dense` neurons in the dense block and `inner` in each expert."""
    config = found.model.config
    _check(config, dense, inner)
    weights = dict(found.model.state_dict())
    for layer in range(config.num_hidden_layers):
        weights |= _layer(weights, f"layers.{layer}.", dense, inner)
    weights |= _self_conditioning(weights, dense, torch.Generator().manual_seed(seed))
    shape = replace(config, intermediate_size=dense, moe_intermediate_size=inner)
    return replace(found, model=fill(skeleton(shape), weights))


def _check(config: ModelConfig, dense: int, inner: int) -> None:
    old, width = config.intermediate_size, config.moe_intermediate_size
    spare = config.num_experts * (width - inner)
    if not 0 < inner <= width or not old <= dense <= old + spare:
        raise UsageError(
            f"{dense} neurons in the dense block and {inner} in each of {config.num_experts} "
            f"experts; experts have {width} and cannot grow, and the dense block, of {old}, can "
            "take up no more than they lose"
        )


def _layer(weights: Mapping[str, Tensor], at: str, dense: int, inner: int) -> Weights:
    gate_up, down_EDM = (weights[f"{at}experts.{n}"] for n in ("gate_up_proj", "down_proj"))
    gate_EMD, up_EMD = gate_up.chunk(2, dim=1)
    # What a neuron can say: the product of its weights' lengths.
    say_EM = gate_EMD.norm(dim=2) * up_EMD.norm(dim=2) * down_EDM.norm(dim=1)
    order_EM = say_EM.argsort(dim=1, descending=True)
    kept_EM, freed_EM = order_EM[:, :inner], order_EM[:, inner:]
    kept = [_rows(x, kept_EM) for x in (gate_EMD, up_EMD, down_EDM.mT)]
    # The loudest of those that are freed, from all experts alike: as many as there is room for.
    freed = [_rows(x, freed_EM).transpose(0, 1).flatten(0, 1) for x in (gate_EMD, up_EMD)]
    # Experts read the stream through a norm of their own.
    norms = [weights[f"{at}pre_feedforward_layernorm{n}.weight"] for n in ("_2", "")]
    mlp = {n: weights[f"{at}mlp.{n}_proj.weight"] for n in ("gate", "up", "down")}
    room = dense - len(mlp["gate"])
    new = [x[:room] * (norms[0] / norms[1]) for x in freed]
    return {
        f"{at}experts.gate_up_proj": torch.cat(kept[:2], dim=1),
        f"{at}experts.down_proj": kept[2].mT.contiguous(),
        f"{at}mlp.gate_proj.weight": torch.cat([mlp["gate"], new[0]]),
        f"{at}mlp.up_proj.weight": torch.cat([mlp["up"], new[1]]),
        f"{at}mlp.down_proj.weight": _silent(mlp["down"], room),
    }


def _rows(x_EMD: Tensor, chosen_EN: Tensor) -> Tensor:
    return x_EMD.gather(1, chosen_EN[:, :, None].expand(-1, -1, x_EMD.shape[2]))


def _silent(down_DF: Tensor, count: int) -> Tensor:
    """With so many neurons more, which say nothing."""
    return torch.cat([down_DF, down_DF.new_zeros(len(down_DF), count)], dim=1)


def _self_conditioning(
    weights: Mapping[str, Tensor], dense: int, generator: torch.Generator
) -> Weights:
    """It is as wide as the dense block; its new neurons read at random."""
    made: Weights = {}
    for name in ("gate", "up"):
        key = f"self_conditioning.{name}_proj.weight"
        old_FD = weights[key]
        new = torch.randn(dense - len(old_FD), old_FD.shape[1], generator=generator) * SPREAD
        made[key] = torch.cat([old_FD, new.to(old_FD)])
    key = "self_conditioning.down_proj.weight"
    made[key] = _silent(weights[key], dense - weights[key].shape[1])
    return made


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("checkpoint", help="a directory, or nano")
    parser.add_argument("into", type=Path)
    parser.add_argument("--dense", type=int, required=True, help="neurons of the dense block")
    parser.add_argument("--experts", type=int, required=True, help="neurons of each expert")
    given = parser.parse_args()
    directory = find_checkpoint(given.checkpoint)
    made = widened(load_model(directory, dtype=torch.float32), given.dense, given.experts)
    save_checkpoint(made, given.into, tokenizer_from=directory, overwrite=True)
    print(f"{given.into}: {sum(w.numel() for w in made.model.parameters()):,} weights")


if __name__ == "__main__":
    main()
