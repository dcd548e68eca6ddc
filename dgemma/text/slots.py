"""Token ids of a text with slots, filled without running the tokenizer.

Works for any tokenizer that encodes each slot's value as one token, with the space before it ("▁5")
or without ("▁", "5"); any other is refused.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from dgemma.errors import CheckpointError

NUM_CHECKS = 4  # random fillings compared with the tokenizer's own encoding


@dataclass(frozen=True, slots=True)
class SlotTemplate:
    """Token ids of a text, the positions of its slots, and the token of each value in each slot."""

    ids: tuple[int, ...]
    positions: tuple[int, ...]  # of each slot in `ids`
    tokens: tuple[tuple[int, ...], ...]  # [slot][value]

    def fill(self, values: Sequence[int]) -> list[int]:
        """Return the ids with these values in the slots."""
        ids = list(self.ids)
        for position, tokens, value in zip(self.positions, self.tokens, values, strict=True):
            ids[position] = tokens[value]
        return ids


def find_slots(
    encode: Callable[[Sequence[int]], Sequence[int]], slots: int, values: int
) -> SlotTemplate:
    """Find the slots of the text that `encode` writes for values from 0 to `values` - 1."""
    fillings = [tuple(encode([value] * slots)) for value in range(values)]
    if len({len(ids) for ids in fillings}) > 1:
        raise _refusal()
    columns = list(zip(*fillings, strict=True))
    positions = tuple(p for p, column in enumerate(columns) if len(set(column)) > 1)
    if len(positions) != slots:
        raise _refusal()
    template = SlotTemplate(fillings[0], positions, tuple(columns[p] for p in positions))
    rng = random.Random(0)
    for _ in range(NUM_CHECKS):
        filling = [rng.randrange(values) for _ in range(slots)]
        if template.fill(filling) != list(encode(filling)):
            raise _refusal()
    return template


def _refusal() -> CheckpointError:
    return CheckpointError(
        "this tokenizer merges a cell of the grid with its neighbours; "
        "use a model whose tokenizer splits digits"
    )
