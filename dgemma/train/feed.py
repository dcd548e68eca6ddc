"""Batches on their way to the device: made by other processes, fetched while it is at work."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch.utils.data import DataLoader, Dataset

from dgemma.train.context import Batch
from dgemma.train.distributed import Group
from dgemma.train.interrupt import leave_to_parent
from dgemma.train.objective import Counts, to_device
from dgemma.train.rows import Ints, Tally, real_rows


class Batching(Protocol):
    """What makes batches."""

    def batch(self, step: int) -> Ints: ...


class Made(NamedTuple):
    rows: Ints
    tally: Tally
    real: list[int]  # rows of each sequence that belong to an example


class Batches(Dataset[Made]):
    """Made in other processes, which hand them over through pipes: shared memory is often small.

    They are counted there too, so that the training process has nothing to compute.
    """

    def __init__(self, mixture: Batching) -> None:
        self.mixture = mixture

    def __getitem__(self, step: int) -> Made:
        rows = self.mixture.batch(step)
        return Made(rows, Tally.of(rows), real_rows(rows))


def as_it_is(made: Made) -> Made:
    return made


@dataclass(frozen=True, slots=True)
class Loaded:
    """A batch on the device, in the parts that it is worked through in."""

    parts: list[Batch]
    counts: Counts
    real: list[int]  # rows of each sequence of the whole batch that belong to an example


@dataclass(frozen=True, slots=True, kw_only=True)
class Feeding:
    """How batches are made and cut."""

    workers: int  # processes that make them
    parts: int
    group: Group
    device: torch.device


class Feed:
    """The batches of a run from step `first` on. `ahead` changes: one that was fetched early."""

    def __init__(self, mixture: Batching, first: int, feeding: Feeding) -> None:
        self.feeding = feeding
        loader: Any = DataLoader(
            Batches(mixture),
            # The last step may not be known yet.
            sampler=range(first, 1 << 40),
            batch_size=None,
            collate_fn=as_it_is,  # type: ignore[arg-type]
            num_workers=feeding.workers,
            prefetch_factor=4 if feeding.workers else None,
            worker_init_fn=leave_to_parent,
        )
        self.made: Iterator[Made] = iter(loader)
        self.ahead: Loaded | None = None

    def look_ahead(self) -> None:
        """Fetch the next batch now, while the device has other things to do."""
        if self.ahead is None:
            self.ahead = self._load(next(self.made))

    def take(self) -> Loaded:
        self.look_ahead()
        found, self.ahead = self.ahead, None
        assert found is not None
        return found

    def _load(self, made: Made) -> Loaded:
        """Copies are queued on the device; nobody waits for them."""
        group, device = self.feeding.group, self.feeding.device
        parts = torch.from_numpy(made.rows).chunk(self.feeding.parts, dim=1)
        batches = [Batch.of(to_device(group.part(part), device), device) for part in parts]
        return Loaded(batches, Counts.of(made.tally, device, len(parts)), made.real)
