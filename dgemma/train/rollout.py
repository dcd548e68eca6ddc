"""Canvases as the sampler leaves them: steps of it, taken inside training.

Noise makes canvases whose tokens are clean or random. The sampler's own hold what it has drawn,
some of it wrong, among fresh noise, and are told a guess of its heat. So a share of the canvases
that are told a guess are brought a step further by that guess: where it is sure, its draw; else
new noise; the clean text is asked for as before. Several steps in a row lead to where the sampler
gets stuck, which noise alone never shows.

This is for texts that have one right form, such as a puzzle's solution. Where many would do, a draw
is rarely what the text at hand says, and whoever is asked for that one learns to doubt every draw:
such sources give their canvases no lot.

How sure is sure, the heat and every draw follow from a canvas's lot, a number of its own, and the
number of the step, so a batch gives the same canvases on any machine.

T rows, V vocabulary.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from dgemma.diffusion.logit_stats import draw
from dgemma.diffusion.philox import Words, philox
from dgemma.train.context import Batch
from dgemma.train.rows import NOTHING

KEY = (0x5EED, 0)
HEATS = (0.4, 1.0)  # the released sampler's last, and none
SURE = (0.005, 0.7)  # nats of entropy under which a draw is kept; the last: two tokens alike


class Lots(NamedTuple):
    """What chance has in store for each row."""

    is_rolled: Tensor
    heat: Tensor
    sure: Tensor
    draw: Tensor  # evenly in [0, 1)
    noise: Tensor  # tokens
    token: Tensor  # that stands there, and stays in rows that are not rolled


def lots(batch: Batch, share: float, vocab_size: int, step: Tensor) -> Lots:
    """`share`: of the canvases that are rolled out; `step`, of no dimension, counts from 0."""
    has_lot = batch.lot.flatten() > NOTHING
    lot, position = batch.lot.flatten().clamp(min=0), batch.position.flatten()
    nothing = torch.zeros_like(lot)
    chosen, heat, sure, _ = _even(philox((lot, nothing, nothing, nothing), KEY))
    even, noise, _, _ = _even(philox((lot, position, nothing + 1, nothing + step), KEY))
    is_free = (batch.is_canvas & (batch.pinned == 0)).flatten()
    is_rolled = is_free & has_lot & (chosen < share)
    low, high = (math.log(value) for value in SURE)
    return Lots(
        is_rolled=is_rolled,
        heat=torch.where(is_rolled, HEATS[0] + (HEATS[1] - HEATS[0]) * heat, 1.0),
        sure=(low + (high - low) * sure).exp(),
        draw=even,
        noise=(noise * vocab_size).long(),
        token=batch.token.flatten(),
    )


def fresh_noise(batch: Batch, vocab_size: int, step: Tensor) -> Tensor:
    """Tokens for canvases that begin again."""
    lot = batch.lot.flatten().clamp(min=0)
    nothing = torch.zeros_like(lot)
    counter = (lot, batch.position.flatten(), nothing + 2, nothing + step)
    return (_even(philox(counter, KEY))[0] * vocab_size).long()


def roll(p_TV: Tensor, lots: Lots) -> Tensor:
    """The tokens after a step in which the rows had these chances."""
    entropy_T = -(p_TV * p_TV.clamp(min=1e-30).log()).sum(-1)
    stepped_T = torch.where(entropy_T < lots.sure, draw(p_TV, lots.draw), lots.noise)
    return torch.where(lots.is_rolled, stepped_T, lots.token)


def _even(words: Words) -> list[Tensor]:
    """Evenly in [0, 1), of the 24 bits that float32 holds."""
    return [(word >> 8).float() / (1 << 24) for word in words]
