"""Canvases that go on from step to step: what the sampler does in a row, learned from on the way.

A rollout asks the model several times before the pass that it learns from, and gets no further than
a few steps. Here a sequence stays for many steps. Each pass over it is both: its losses move the
weights, and its guess is the step of the sampler that makes the canvases of the next pass and what
these are told. No pass is made for the guess alone, and canvases come as far as the sampler takes
them, to where it gets stuck above all: those that are solved begin again from noise, those that are
not stay. (Deep supervision with a carry: arXiv:2506.21734, arXiv:2510.04871.)

As with rollouts, this is for texts that have one right form.

B packed sequences, T rows of all of them, D width.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dgemma.train.context import Batch
from dgemma.train.feed import Loaded
from dgemma.train.mix import Mixture
from dgemma.train.objective import Counts, Guess, Losses, Objective
from dgemma.train.rollout import fresh_noise
from dgemma.train.rows import FIELDS, NOTHING, Ints, real_rows


@dataclass(frozen=True, slots=True)
class Beside:
    """Batches of new texts, and behind them the sequences that come to stay for some steps."""

    fresh: Mixture
    newcomers: Mixture
    steps: int  # that they stay

    @property
    def sequences(self) -> int:
        """Of new texts, of which every second one is told a guess."""
        return self.fresh.sequences

    @property
    def carried(self) -> int:
        return self.newcomers.sequences * self.steps

    def batch(self, step: int) -> Ints:
        return np.concatenate([self.fresh.batch(step), self.newcomers.batch(step)], axis=1)

    def first(self) -> Ints:
        """Those that are there when a run begins."""
        return replace(self.newcomers, sequences=self.carried).batch(0)


class Carry:
    """The sequences that stay. All of it changes but how many `leaving`."""

    def __init__(self, rows: Ints, leaving: int, like: Tensor) -> None:
        """`rows`: those that a run begins with, of which in a step so many leave; `like`: a weight
        as wide as the model, for where and in what numbers they are told.
        """
        self.batch = Batch.of(torch.from_numpy(rows), like.device)
        self.leaving = leaving
        self.oldest = 0  # the first of those that leave next
        count, width = self.batch.token.numel(), like.shape[-1]
        self.told_TD = like.new_zeros(count, width)  # what rows are told in the next pass
        # Of rows, whether their canvas was right by the last guess.
        self.right_T = like.new_zeros(count, dtype=torch.bool)
        self.real = real_rows(rows)  # of each sequence

    def take_in(self, newcomers: Batch, real: Sequence[int]) -> None:
        """Let new sequences in, which have been told nothing, for as many of the oldest."""
        place = slice(self.oldest, self.oldest + self.leaving)
        for name in FIELDS:
            getattr(self.batch, name)[place] = getattr(newcomers, name)
        for kept in (self.told_TD, self.right_T):
            kept.view(len(self.real), -1)[place] = 0
        self.real[place] = real
        self.oldest = place.stop % len(self.real)

    def go_on(self, guess: Guess, noise_T: Tensor) -> None:
        """To the next step of the sampler; a canvas that was right and still is begins again."""
        assert guess.top is not None, "a guess that takes no step"
        is_right_T = all_right(self.batch, guess.top)
        token, told_TD = onward(self.batch, guess, noise_T, is_right_T & self.right_T)
        self.batch, self.told_TD = replace(self.batch, token=token), told_TD
        self.right_T = is_right_T & ~self.right_T

    def state(self) -> dict[str, Any]:
        rows = torch.stack([getattr(self.batch, name) for name in FIELDS]).int()
        told_TD, right_T = self.told_TD.cpu(), self.right_T.cpu()
        return {"rows": rows.cpu(), "told": told_TD, "right": right_T, "oldest": self.oldest}

    def restore(self, state: Mapping[str, Any]) -> None:
        self.batch = Batch.of(state["rows"], self.told_TD.device)
        self.told_TD = state["told"].to(self.told_TD)
        self.right_T = state["right"].to(self.right_T)
        self.oldest, self.real = int(state["oldest"]), real_rows(state["rows"].numpy())


def onward(batch: Batch, guess: Guess, noise_T: Tensor, done_T: Tensor) -> tuple[Tensor, Tensor]:
    """Tokens after a step and what is told of it; what is done is noise, and told nothing."""
    assert guess.token is not None, "a guess that takes no step"
    is_free_T = (batch.pinned == 0).flatten()
    token_T = torch.where(done_T & is_free_T, noise_T, guess.token.flatten())
    return token_T.view_as(batch.token), torch.where(done_T[:, None], 0, guess.told)


def all_right(batch: Batch, token: Tensor) -> Tensor:
    """For each row whether its canvas would have all that it is asked for; of clean rows, no."""
    is_wrong_T = ((token != batch.target) & (batch.target > NOTHING)).flatten()
    lot_T = batch.lot.flatten()
    # Canvases lie one behind the other, each with a lot of its own.
    number_T = (lot_T != lot_T.roll(1)).cumsum(0)
    wrong = torch.zeros(len(lot_T) + 1, dtype=torch.long, device=lot_T.device)
    wrong = wrong.index_add(0, number_T, is_wrong_T.long())
    return (wrong[number_T] == 0) & batch.is_canvas.flatten()


def carried_losses(objective: Objective, loaded: Loaded, carry: Carry, step: int) -> Losses:
    """What new texts and the sequences that stay lose, those that came behind the texts among
    them; who stays then goes on.
    """
    (arrived,), count = loaded.parts, len(loaded.real) - carry.leaving
    fresh, newcomers = arrived.parted(count)
    carry.take_in(newcomers, loaded.real[count:])
    batch = fresh.beside(carry.batch)
    losses, hidden_TD = objective.carried(batch, carry.told_TD, Counts.counted(batch))
    number = torch.full((), step, device=hidden_TD.device)
    with torch.no_grad():
        guess = objective.read(carry.batch, hidden_TD, number, 1.0)
        noise_T = fresh_noise(carry.batch, objective.model.config.vocab_size, number)
        carry.go_on(guess, noise_T)
    return losses
