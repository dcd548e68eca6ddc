"""A text of fixed layout with slots, as token ids: filled without running the tokenizer.

Works for any tokenizer that gives each slot's value a token of its own, whether it joins it with
the space before it ("▁5") or not ("▁", "5"); any other is refused.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from dgemma.errors import CheckpointError

TRIALS = 4  # random fillings compared with the tokenizer's own encoding


@dataclass(frozen=True, slots=True)
class Slots:
    """Token ids of a layout, where its slots are, and which token writes each value in each."""

    ids: tuple[int, ...]
    positions: tuple[int, ...]  # of each slot in `ids`
    tokens: tuple[tuple[int, ...], ...]  # [slot][value]

    def fill(self, values: Sequence[int]) -> list[int]:
        """The ids with these values in the slots."""
        ids = list(self.ids)
        for position, tokens, value in zip(self.positions, self.tokens, values, strict=True):
            ids[position] = tokens[value]
        return ids


def find_slots(encode: Callable[[Sequence[int]], Sequence[int]], slots: int, values: int) -> Slots:
    """Find the slots of a layout that `encode` writes out for given values, 0 to `values` - 1."""
    fillings = [tuple(encode([value] * slots)) for value in range(values)]
    if len({len(ids) for ids in fillings}) > 1:
        raise _refusal()
    columns = list(zip(*fillings, strict=True))
    positions = tuple(p for p, column in enumerate(columns) if len(set(column)) > 1)
    if len(positions) != slots:
        raise _refusal()
    found = Slots(fillings[0], positions, tuple(columns[p] for p in positions))
    rng = random.Random(0)
    for _ in range(TRIALS):
        filling = [rng.randrange(values) for _ in range(slots)]
        if found.fill(filling) != list(encode(filling)):
            raise _refusal()
    return found


def _refusal() -> CheckpointError:
    return CheckpointError(
        "this tokenizer joins a cell of the grid with its neighbours; "
        "use a model whose tokenizer splits digits"
    )
