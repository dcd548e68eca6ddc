"""Canvases as the sampler leaves them: one step of it, taken inside training.

Noise makes canvases whose tokens are clean or random. The sampler's own hold what it has drawn,
some of it wrong, among fresh noise, and are told a guess of its heat. So a share of the canvases
that are told a guess are brought one step further by that guess: where it is sure, its draw; else
new noise; the clean text is asked for as before.

How sure is sure, the heat and every draw follow from a canvas's lot, a number of its own, so a
batch gives the same canvases on any machine.

T rows, V vocabulary.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from dgemma.ops.philox import Words, philox
from dgemma.train.context import Batch

KEY = (0x5EED, 0)
HEATS = (0.4, 1.0)  # the released sampler's last, and none
CHUNK = 64  # tokens
SURE = (0.005, 0.7)  # nats of entropy under which a draw is kept; the last: two tokens alike


class Lots(NamedTuple):
    """What chance has in store for each row."""

    is_rolled: Tensor
    heat: Tensor
    sure: Tensor
    draw: Tensor  # evenly in [0, 1)
    noise: Tensor  # tokens
    token: Tensor  # that stands there, and stays in rows that are not rolled


def lots(batch: Batch, share: float, vocab_size: int) -> Lots:
    """`share`: of the canvases that are rolled out."""
    lot, position = batch.lot.flatten(), batch.position.flatten()
    nothing = torch.zeros_like(lot)
    chosen, heat, sure, _ = _even(philox((lot, nothing, nothing, nothing), KEY))
    draw, noise, _, _ = _even(philox((lot, position, nothing + 1, nothing), KEY))
    is_free = (batch.is_canvas & (batch.pinned == 0)).flatten()
    is_rolled = is_free & (chosen < share)
    low, high = (math.log(value) for value in SURE)
    return Lots(
        is_rolled=is_rolled,
        heat=torch.where(is_rolled, HEATS[0] + (HEATS[1] - HEATS[0]) * heat, 1.0),
        sure=(low + (high - low) * sure).exp(),
        draw=draw,
        noise=(noise * vocab_size).long(),
        token=batch.token.flatten(),
    )


def roll(p_TV: Tensor, lots: Lots) -> Tensor:
    """The tokens after a step in which the rows had these chances."""
    entropy_T = -(p_TV * p_TV.clamp(min=1e-30).log()).sum(-1)
    stepped_T = torch.where(entropy_T < lots.sure, pick(p_TV, lots.draw), lots.noise)
    return torch.where(lots.is_rolled, stepped_T, lots.token)


def pick(p_TV: Tensor, draw_T: Tensor) -> Tensor:
    """The token in whose share of [0, 1), laid end to end, each draw falls.

    First among sums of chunks, then within one chunk: running sums over the whole vocabulary would
    be written to memory, at a sixth of a training step's time.
    """
    size = math.gcd(p_TV.shape[1], CHUNK)
    p_TCW = p_TV.view(len(p_TV), -1, size)
    place_T = draw_T * p_TCW.sum(-1).sum(-1)
    chunk_T, before_T = _find(p_TCW.sum(-1), place_T)
    own_TW = p_TCW.gather(1, chunk_T[:, None, None].expand(-1, 1, size))[:, 0]
    token_T, _ = _find(own_TW, place_T - before_T)
    return chunk_T * size + token_T


def _find(p_TC: Tensor, place_T: Tensor) -> tuple[Tensor, Tensor]:
    """Which share a place falls in, and what lies before that share."""
    ends_TC = p_TC.cumsum(-1)
    # Rounding may put a place beyond the end; then it is the last share that is not empty.
    last_T = (ends_TC < ends_TC[:, -1:]).sum(-1)
    found_T = torch.minimum((ends_TC <= place_T[:, None]).sum(-1), last_T)
    own_T1 = found_T[:, None]
    return found_T, (ends_TC.gather(1, own_T1) - p_TC.gather(1, own_T1))[:, 0]


def _even(words: Words) -> list[Tensor]:
    """Evenly in [0, 1), of the 24 bits that float32 holds."""
    return [(word >> 8).float() / (1 << 24) for word in words]
