"""What each source of a recipe has: of the rows, of the denoising loss, of the causal one.

    PYTHONPATH=. python bench/train_shares.py recipes/nano_more.toml [--sequences 16]

The losses are means over the rows that are asked for something, with their weights, and sources ask
for more or less of theirs: a weight in a recipe is a share of the rows alone. `in holes` is the
part of the denoising loss that is asked in canvases with holes. Needs the recipe's data.
"""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from dgemma.train.build import opened
from dgemma.train.carry import Beside
from dgemma.train.mix import Mixture
from dgemma.train.recipe import DataSource, Recipe
from dgemma.train.rows import (
    CANVAS,
    EXAMPLE,
    NOTHING,
    PINNED,
    TARGET,
    WEIGHT,
    Ints,
    Tally,
    real_rows,
)


@dataclass(frozen=True, slots=True)
class Asked:
    """What a source asks for, by row."""

    canvas: float
    holes: float  # of these, in canvases with holes
    clean: float

    @classmethod
    def of(cls, rows: Ints) -> "Asked":
        tally = Tally.of(rows)
        real = sum(real_rows(rows))
        return cls(tally.canvas / real, in_holes(rows) / real, tally.clean / real)


def in_holes(rows: Ints) -> int:
    """What is asked in canvases that have given tokens."""
    is_canvas = rows[CANVAS] > NOTHING
    sequence, _ = np.nonzero(is_canvas)
    fields = rows[EXAMPLE][is_canvas], rows[CANVAS][is_canvas]
    _, which = np.unique(np.stack([sequence, *fields]), axis=1, return_inverse=True)
    has_given = np.zeros(len(which), bool)
    has_given[which[rows[PINNED][is_canvas] > 0]] = True
    is_asked = rows[TARGET][is_canvas] > NOTHING
    return int(rows[WEIGHT][is_canvas][is_asked & has_given[which]].sum())


@dataclass(frozen=True, slots=True)
class Group:
    """Sources that share some of the sequences by their weights."""

    mixture: Mixture
    sources: Sequence[DataSource]
    sequences: int


def names_of(sources: Sequence[DataSource]) -> list[str]:
    return [
        source.puzzle or Path(source.file or "").stem + (" as fill" if source.as_fill else "")
        for source in sources
    ]


def groups_of(recipe: Recipe, mixture: Mixture | Beside) -> list[Group]:
    if isinstance(mixture, Mixture):
        return [Group(mixture, recipe.data, mixture.sequences)]
    rolled, others = ([d for d in recipe.data if d.rollout is r] for r in (True, False))
    return [
        Group(mixture.newcomers, rolled, mixture.carried),
        Group(mixture.fresh, others, mixture.fresh.sequences),
    ]


def show(groups: Sequence[Group], sequences: int) -> None:
    found, weights, names = [], [], list[str]()
    for group in groups:
        whole = sum(source.weight for source in group.sources)
        names += names_of(group.sources)
        for source, ingredient in zip(group.sources, group.mixture.ingredients, strict=True):
            alone = replace(group.mixture, ingredients=[ingredient], sequences=sequences)
            found.append(Asked.of(alone.batch(0)))
            weights.append(group.sequences * source.weight / whole)
    rows = np.array(weights)
    asked = rows[:, None] * np.array([(one.canvas, one.holes, one.clean) for one in found])
    canvas, _, clean = asked.sum(0)
    shares = 100 * np.column_stack([rows / rows.sum(), asked / (canvas, canvas, clean)])
    print(f"{'% of':16} {'rows':>7} {'denoise':>8} {'in holes':>9} {'causal':>7}")
    for name, line in zip(names, shares, strict=True):
        print(f"{name:16} {line[0]:7.1f} {line[1]:8.1f} {line[2]:9.1f} {line[3]:7.1f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("recipe", type=Path)
    parser.add_argument("--sequences", type=int, default=16, help="packed rows of each source")
    given = parser.parse_args()
    with opened(given.recipe) as (recipe, _, mixture):
        show(groups_of(recipe, mixture), given.sequences)


if __name__ == "__main__":
    main()
