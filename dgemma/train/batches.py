"""Batches: examples of several sources, mixed by weight, packed, and prefetched to the device.

A batch is a function of (seed, step) alone: nothing is kept between batches, so a run that is
resumed, or spread over several processes, gets the same ones. Worker processes make them while the
device is at work.

B packed sequences, T rows in each, F fields of a row.
"""

import signal
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from dgemma.errors import UsageError
from dgemma.train.corruption import Corruption, RowArray
from dgemma.train.distributed import ProcessGroup
from dgemma.train.objective import LossCounts, to_device
from dgemma.train.packing import (
    EXAMPLE,
    FIELDS,
    PADDING,
    Batch,
    Example,
    PackingLayout,
    RowCounts,
    count_real_rows,
    pack_example,
)
from dgemma.train.sources import Source

EXAMPLES_PER_DRAW = 16
MAX_MISFITS = 32  # consecutive examples that fit nowhere: the batch is full


@dataclass(frozen=True, slots=True, kw_only=True)
class MixtureComponent:
    """A data source and its settings in the mixture."""

    source: Source
    weight: float  # relative share of rows
    canvas_lengths: Mapping[int, float]  # length: relative frequency
    copies: int = 1  # copies of each canvas
    train_on_prompt: bool = True
    causal_fraction: float = 1.0
    corruption: Corruption


@dataclass(frozen=True, slots=True, kw_only=True)
class Mixture:
    components: Sequence[MixtureComponent]
    sequences: int
    rows: int  # of each sequence
    seed: int

    def __post_init__(self) -> None:
        if not self.components or min(c.weight for c in self.components) <= 0:
            raise UsageError("a mixture needs at least one source, each with a weight above 0")

    def batch(self, step: int) -> RowArray:
        """Make the rows of one batch, [F, B, T]."""
        rng = np.random.default_rng((self.seed, step))
        batch = np.empty((len(FIELDS), self.sequences, self.rows), np.int32)
        batch[:] = PADDING[:, None, None]
        used_B, misfits, number = np.zeros(self.sequences, np.int64), 0, 0
        for rows in self._packed_examples(rng):
            fitting = np.flatnonzero(self.rows - used_B >= rows.shape[1])
            if not len(fitting):
                misfits += 1
                if misfits == MAX_MISFITS:
                    break
                continue
            # A random sequence, not the first that fits: every second one is self-conditioned, and
            # all sources must be in both kinds alike.
            chosen = int(fitting[rng.integers(len(fitting))])
            window = slice(int(used_B[chosen]), int(used_B[chosen]) + rows.shape[1])
            batch[:, chosen, window] = rows
            batch[EXAMPLE, chosen, window] = number
            used_B[chosen], misfits, number = window.stop, 0, number + 1
        if number == 0:
            raise UsageError(
                f"no example fits into {self.rows} rows; raise rows or shorten the examples"
            )
        return batch

    def _packed_examples(self, rng: np.random.Generator) -> Iterator[RowArray]:
        """Yield examples endlessly, next from the source furthest below its share of rows."""
        weights = np.array([component.weight for component in self.components])
        used = rng.random(len(weights)) * self.rows * weights / weights.max()
        drawn: list[list[Example]] = [[] for _ in self.components]
        # Attempts before the first success. A source is due after at most as many as a sequence has
        # rows, so after four times as many there is none that ever succeeds.
        attempts = 4 * self.rows
        while attempts:
            chosen = int(np.argmin(used / weights))
            component = self.components[chosen]
            if not drawn[chosen]:
                pairs = component.source.draw(rng, EXAMPLES_PER_DRAW)
                drawn[chosen] = [Example(*pair) for pair in pairs]
            rows = self._pack(drawn[chosen].pop(), component, rng)
            # An example without rows counts a little too, or a bad source would be drawn forever.
            used[chosen] += 1 if rows is None else rows.shape[1]
            if rows is not None:
                yield rows
                attempts = -1
            elif attempts > 0:
                attempts -= 1
        raise UsageError(
            f"not one canvas could be made of {4 * self.rows} examples: their prompts leave no "
            f"room in {self.rows} rows, or their texts are shorter than a canvas; raise rows, or "
            "train shorter canvases"
        )

    def _pack(
        self, example: Example, component: MixtureComponent, rng: np.random.Generator
    ) -> RowArray | None:
        lengths = list(component.canvas_lengths)
        frequencies = np.array(list(component.canvas_lengths.values()))
        length = lengths[int(rng.choice(len(lengths), p=frequencies / frequencies.sum()))]
        layout = PackingLayout(
            canvas_length=length,
            max_rows=self.rows,
            copies=component.copies,
            train_on_prompt=component.train_on_prompt,
            causal_fraction=component.causal_fraction,
        )
        return pack_example(example, layout, component.corruption, rng)


@dataclass(frozen=True, slots=True)
class MixedBatches:
    """Batches of fresh examples, followed by the sequences that replace the oldest persistent ones.

    See `PersistentCanvases` in `train/onpolicy.py`.
    """

    fresh: Mixture
    new_sequences: Mixture
    steps: int  # training steps for which a sequence persists

    @property
    def sequences(self) -> int:
        """Number of fresh sequences, of which every second one is self-conditioned."""
        return self.fresh.sequences

    @property
    def num_persistent(self) -> int:
        return self.new_sequences.sequences * self.steps

    def batch(self, step: int) -> RowArray:
        return np.concatenate([self.fresh.batch(step), self.new_sequences.batch(step)], axis=1)

    def initial(self) -> RowArray:
        """Make the persistent sequences at the start of a run."""
        return replace(self.new_sequences, sequences=self.num_persistent).batch(0)


# --- prefetching


class HostBatch(NamedTuple):
    rows: RowArray
    counts: RowCounts
    real_rows: list[int]  # per sequence: rows that belong to an example


class BatchDataset(Dataset[HostBatch]):
    """Batches by step, made and counted in a worker process.

    Workers send them through pipes: shared memory is often small.
    """

    def __init__(self, mixture: Mixture | MixedBatches) -> None:
        self.mixture = mixture

    def __getitem__(self, step: int) -> HostBatch:
        rows = self.mixture.batch(step)
        return HostBatch(rows, RowCounts.of(rows), count_real_rows(rows))


def _identity(batch: HostBatch) -> HostBatch:
    return batch


def _ignore_interrupts(worker: int) -> None:
    """Leave Ctrl-C to the training process, which ends its workers."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


@dataclass(frozen=True, slots=True)
class DeviceBatch:
    """A batch on the device, in micro-batches."""

    micro_batches: list[Batch]
    counts: LossCounts
    real_rows: list[int]  # per sequence of the whole batch: rows that belong to an example


@dataclass(frozen=True, slots=True, kw_only=True)
class LoaderConfig:
    workers: int  # processes that make batches
    grad_accum_steps: int
    group: ProcessGroup
    device: torch.device


class Prefetcher:
    """The batches of a run from step `first` on; holds at most one prefetched batch."""

    def __init__(self, mixture: Mixture | MixedBatches, first: int, config: LoaderConfig) -> None:
        self.config = config
        loader: Any = DataLoader(
            BatchDataset(mixture),
            # The last step may not be known yet.
            sampler=range(first, 1 << 40),
            batch_size=None,
            collate_fn=_identity,  # type: ignore[arg-type]
            num_workers=config.workers,
            prefetch_factor=4 if config.workers else None,
            worker_init_fn=_ignore_interrupts,
        )
        self.host_batches: Iterator[HostBatch] = iter(loader)
        self.fetched: list[DeviceBatch] = []

    def prefetch(self) -> None:
        """Fetch the next batch while the device is busy."""
        if not self.fetched:
            self.fetched.append(self._load(next(self.host_batches)))

    def take(self) -> DeviceBatch:
        self.prefetch()
        return self.fetched.pop()

    def _load(self, host: HostBatch) -> DeviceBatch:
        """Queue the copies to the device without synchronizing."""
        group, device = self.config.group, self.config.device
        chunks = torch.from_numpy(host.rows).chunk(self.config.grad_accum_steps, dim=1)
        batches = [Batch.of(to_device(group.slice_batch(rows), device), device) for rows in chunks]
        return DeviceBatch(batches, LossCounts.of(host.counts, device, len(chunks)), host.real_rows)
