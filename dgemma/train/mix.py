"""Batches: examples of several sources, mixed by weight and packed side by side.

A batch is a function of (seed, step) alone: nothing is kept between batches, so a run that is
resumed, or spread over several processes, sees the same ones.

B packed sequences, T rows in each, F fields of a row.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from dgemma.errors import UsageError
from dgemma.train.rows import EXAMPLE, FIELDS, PADDING, Corruption, Example, Ints, Layout, lay_out
from dgemma.train.store import Store

DRAW = 16  # examples taken from a source at once
MISSES = 32  # examples in a row that found no room: the batch is full


class Source(Protocol):
    def draw(
        self, rng: np.random.Generator, count: int
    ) -> Sequence[tuple[NDArray[np.integer], NDArray[np.integer]]]: ...


@dataclass(frozen=True, slots=True)
class StoreSource:
    """Examples of a store, drawn evenly and with replacement."""

    store: Store

    def __post_init__(self) -> None:
        if len(self.store) == 0:
            raise UsageError("a token store has no examples; were they all too long?")

    def draw(self, rng: np.random.Generator, count: int) -> list[Example]:
        return [Example(*self.store[int(i)]) for i in rng.integers(len(self.store), size=count)]


def room_notes(store: Store, layout: Layout) -> list[str]:
    """What a person should know of pairs too long for their rows, with the shortest canvas."""
    reply_E = np.diff(store.starts_E) - store.prompts_E
    canvases_E = (layout.max_rows - store.prompts_E) // layout.canvas_rows
    is_pair_E = store.prompts_E > 0  # plain text is cut anywhere
    unused_E = is_pair_E & (canvases_E < 1)
    cut_E = is_pair_E & ~unused_E & (canvases_E * layout.canvas_length < reply_E)
    why = f"{layout.max_rows} rows, which a text shares with its canvases; raise [batch] rows"
    return [
        f"{count} of {len(store)} {what} {why}"
        for count, what in (
            (int(unused_E.sum()), "examples are not used: no canvas has room behind the prompt in"),
            (int(cut_E.sum()), "replies are learned without their ends, which have no room in"),
        )
        if count
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class Ingredient:
    """A source and how it is used."""

    source: Source
    weight: float  # its share of the rows, relative to the others
    canvas_lengths: Mapping[int, float]  # with their relative frequencies
    copies: int = 1  # of each canvas
    learn_prompt: bool = True
    causal_share: float = 1.0
    corruption: Corruption


@dataclass(frozen=True, slots=True, kw_only=True)
class Mixture:
    ingredients: Sequence[Ingredient]
    sequences: int
    rows: int  # of each sequence
    seed: int

    def __post_init__(self) -> None:
        if not self.ingredients or min(i.weight for i in self.ingredients) <= 0:
            raise UsageError("a mixture needs at least one source, each with a weight above 0")

    def batch(self, step: int) -> Ints:
        """The rows of one batch, [F, B, T]."""
        rng = np.random.default_rng((self.seed, step))
        batch = np.empty((len(FIELDS), self.sequences, self.rows), np.int32)
        batch[:] = PADDING[:, None, None]
        used_B, misses, number = np.zeros(self.sequences, np.int64), 0, 0
        for rows in self._examples(rng):
            room_B = self.rows - used_B
            fitting = np.flatnonzero(room_B >= rows.shape[1])
            if not len(fitting):
                misses += 1
                if misses == MISSES:
                    break
                continue
            # A sequence at random, not the first: every second one is conditioned, and the kinds
            # of examples must meet both alike.
            chosen = int(fitting[rng.integers(len(fitting))])
            place = slice(int(used_B[chosen]), int(used_B[chosen]) + rows.shape[1])
            batch[:, chosen, place] = rows
            batch[EXAMPLE, chosen, place] = number
            used_B[chosen], misses, number = place.stop, 0, number + 1
        if number == 0:
            raise UsageError(
                f"no example fits into {self.rows} rows; raise rows or shorten the examples"
            )
        return batch

    def _examples(self, rng: np.random.Generator) -> Iterator[Ints]:
        """Laid-out examples without end; the source that is most behind its share comes next."""
        weights = np.array([i.weight for i in self.ingredients])
        used = rng.random(len(weights)) * self.rows * weights / weights.max()
        waiting: list[list[Example]] = [[] for _ in self.ingredients]
        # Tries until the first success. A source has its turn after at most as many as a sequence
        # has rows, so after four times as many there is none that ever has one.
        tries = 4 * self.rows
        while tries:
            chosen = int(np.argmin(used / weights))
            ingredient = self.ingredients[chosen]
            if not waiting[chosen]:
                waiting[chosen] = [Example(*pair) for pair in ingredient.source.draw(rng, DRAW)]
            rows = self._lay_out(waiting[chosen].pop(), ingredient, rng)
            # An example that gives no rows still counts a little, or a poor source never ends.
            used[chosen] += 1 if rows is None else rows.shape[1]
            if rows is not None:
                yield rows
                tries = -1
            elif tries > 0:
                tries -= 1
        raise UsageError(
            f"not one canvas could be made of {4 * self.rows} examples: their prompts leave no "
            f"room in {self.rows} rows, or their texts are shorter than a canvas; raise rows, or "
            "train shorter canvases"
        )

    def _lay_out(
        self, example: Example, ingredient: Ingredient, rng: np.random.Generator
    ) -> Ints | None:
        lengths = list(ingredient.canvas_lengths)
        shares = np.array(list(ingredient.canvas_lengths.values()))
        length = lengths[int(rng.choice(len(lengths), p=shares / shares.sum()))]
        layout = Layout(
            canvas_length=length,
            max_rows=self.rows,
            copies=ingredient.copies,
            learn_prompt=ingredient.learn_prompt,
            causal_share=ingredient.causal_share,
        )
        return lay_out(example, layout, ingredient.corruption, rng)
