"""How strongly each source of a recipe pulls at the weights, and how much of its pull is chance.

    PYTHONPATH=. python bench/train_gradients.py recipes/nano_more.toml [--only sudoku,code2]

For each source alone, of `--rounds` batches: its losses, the mean length of their gradients over
the layers' matrices, and the mean cosine between those of different batches. What agrees is what is
learned from; the rest is chance that a step of the optimizer is moved by all the same. A source
whose agreeing part is far shorter than the others' chance needs a `canvas_weight`. Needs the
recipe's data and its checkpoint.
"""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from pathlib import Path
from statistics import mean

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.train_shares import names_of
from dgemma.model import Gemma
from dgemma.train.build import opened
from dgemma.train.context import Batch
from dgemma.train.mix import Mixture
from dgemma.train.objective import Counts, Objective


@dataclass(frozen=True, slots=True)
class Pull:
    """Of one loss of a source."""

    loss: float
    length: float
    agreement: float

    @classmethod
    def of(cls, losses: Sequence[Tensor], gradients: Sequence[Tensor]) -> "Pull":
        pairs = [float(F.cosine_similarity(a, b, dim=0)) for a, b in combinations(gradients, 2)]
        lengths = [float(g.norm()) for g in gradients]
        return cls(mean(float(loss) for loss in losses), mean(lengths), mean(pairs))


def matrices(model: Gemma) -> list[nn.Parameter]:
    """Those of the layers, and no other weight with a gradient."""
    model.requires_grad_(False)
    named = model.named_parameters()
    found = [w for name, w in named if name.startswith("layers.") and w.ndim > 1]
    return [w.requires_grad_() for w in found]


def gradient(loss: Tensor, weights: Sequence[nn.Parameter]) -> Tensor:
    found = torch.autograd.grad(loss, weights, retain_graph=True, materialize_grads=True)
    return torch.cat([g.flatten() for g in found])


def pulls(objective: Objective, alone: Mixture, rounds: int) -> tuple[Pull, Pull]:
    """Of the denoising loss and of the causal one."""
    weights = matrices(objective.model)
    losses, gradients = [], []
    for step in range(rounds):
        batch = Batch.of(torch.from_numpy(alone.batch(step)), "cpu")
        found = objective(batch, Counts.counted(batch))
        losses.append((found.denoise.detach(), found.causal.detach()))
        gradients.append([gradient(loss, weights) for loss in (found.denoise, found.causal)])
    both = zip(zip(*losses, strict=True), zip(*gradients, strict=True), strict=True)
    denoise, causal = (Pull.of(*part) for part in both)
    return denoise, causal


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("recipe", type=Path)
    parser.add_argument("--checkpoint", help="instead of the recipe's")
    parser.add_argument("--only", help="names of sources, parted by commas")
    parser.add_argument("--sequences", type=int, default=4, help="of a batch; even")
    parser.add_argument("--rounds", type=int, default=3, help="batches of each source; 2 or more")
    given = parser.parse_args()
    if given.rounds < 2:
        parser.error(f"--rounds is {given.rounds}; what agrees is seen in 2 batches or more")
    chosen = [] if given.checkpoint is None else [f"model.checkpoint={given.checkpoint}"]
    with opened(given.recipe, [*chosen, "batch.carried=0"]) as (recipe, base, mixture):
        assert isinstance(mixture, Mixture)
        names = names_of(recipe.data)
        only = given.only.split(",") if given.only else names
        if unknown := set(only) - set(names):
            parser.error(f"--only names {sorted(unknown)}; the recipe has {', '.join(names)}")
        objective = Objective(base.model, recipe.loss)
        print(f"{'loss, length, agreement':24} {'denoising':>21} {'causal':>21}")
        for name, ingredient in zip(names, mixture.ingredients, strict=True):
            if name not in only:
                continue
            alone = replace(mixture, ingredients=[ingredient], sequences=given.sequences)
            parts = pulls(objective, alone, given.rounds)
            cells = [f"{p.loss:7.3f} {p.length:6.3f} {p.agreement:6.2f}" for p in parts]
            print(f"{name:24} {cells[0]} {cells[1]}", flush=True)


if __name__ == "__main__":
    main()
