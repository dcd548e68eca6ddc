"""What the sampler needs to know of each position: the only vocabulary-sized work of a step.

One pass over the head's output turns it, in place, into unnormalised probabilities; everything
else is a handful of numbers per position. The draw is an exact inverse-CDF draw from one uniform
number: the running sums of chunks pick a chunk, then only that chunk is looked at.

T positions, V vocabulary, C chunks of W tokens each.
"""

from dataclasses import dataclass
from math import gcd

import torch
from torch import Tensor

CHUNK = 128  # tokens summed together; the draw re-reads one chunk per position
SCRATCH_ELEMENTS = 1 << 18  # rows are taken in groups of this many numbers, to stay in cache


@dataclass(frozen=True, slots=True, kw_only=True)
class Query:
    """What is asked of each position."""

    heat_T: Tensor  # temperature, float32
    uniform_T: Tensor  # the number that decides the draw, float64 in [0, 1)
    held_T: Tensor  # the token now on the canvas


@dataclass(frozen=True, slots=True, kw_only=True)
class RowStats:
    """Statistics of the heated, soft-capped distribution at each position."""

    draw_T: Tensor  # a token drawn from it
    top_T: Tensor  # its likeliest token
    entropy_T: Tensor  # in nats
    top_p_T: Tensor  # probability of the likeliest token
    held_p_T: Tensor  # probability of the token now on the canvas

    def rows(self, start: int, stop: int) -> "RowStats":
        return RowStats(**{name: getattr(self, name)[start:stop] for name in self.__slots__})


@dataclass(frozen=True, slots=True)
class Weights:
    """Probabilities over the vocabulary, up to a factor per position."""

    weight_TV: Tensor
    total_T: Tensor


def row_stats(raw_TV: Tensor, softcap: float | None, query: Query) -> tuple[RowStats, Weights]:
    """Statistics and weights of each position. `raw_TV` is consumed: the weights take its place."""
    weight_TV = raw_TV if raw_TV.dtype == torch.float32 else raw_TV.float()
    group = max(1, SCRATCH_ELEMENTS // weight_TV.shape[-1])
    parts = []
    for start in range(0, len(weight_TV), group):
        rows = slice(start, start + group)
        parts.append(_group_stats(weight_TV[rows], softcap, _rows(query, rows)))
    stats = [torch.cat(column) for column in zip(*parts, strict=True)]
    top_T, draw_T, entropy_T, held_p_T, total_T = stats
    return RowStats(
        draw_T=draw_T,
        top_T=top_T,
        entropy_T=entropy_T,
        top_p_T=1.0 / total_T,  # the likeliest token has weight e^0
        held_p_T=held_p_T,
    ), Weights(weight_TV, total_T)


def row_stats_reference(raw_TV: Tensor, softcap: float | None, query: Query) -> RowStats:
    """The definition, in float64."""
    logits_TV = raw_TV.double()
    if softcap is not None:
        logits_TV = softcap * torch.tanh(logits_TV / softcap)
    p_TV = (logits_TV / query.heat_T[:, None]).softmax(-1)
    return RowStats(
        draw_T=(p_TV.cumsum(-1) <= query.uniform_T[:, None]).sum(-1).clamp(max=p_TV.shape[-1] - 1),
        top_T=p_TV.argmax(-1),
        entropy_T=torch.special.entr(p_TV).sum(-1).float(),
        top_p_T=p_TV.amax(-1).float(),
        held_p_T=p_TV.gather(-1, query.held_T[:, None])[:, 0].float(),
    )


def _rows(query: Query, rows: slice) -> Query:
    return Query(
        heat_T=query.heat_T[rows], uniform_T=query.uniform_T[rows], held_T=query.held_T[rows]
    )


def _group_stats(x_TV: Tensor, softcap: float | None, query: Query) -> tuple[Tensor, ...]:
    """Turn a few rows of head output into weights, in place, and return their statistics."""
    if softcap is None:
        x_TV /= query.heat_T[:, None]
    else:
        x_TV.div_(softcap).tanh_().mul_(softcap / query.heat_T[:, None])
    x_TCW = x_TV.view(len(x_TV), -1, gcd(x_TV.shape[-1], CHUNK))
    top_T = _argmax(x_TCW)
    x_TV -= x_TV.gather(-1, top_T[:, None])
    shifted_TV = x_TV.clone()
    x_TV.exp_()
    sums_TC = x_TCW.sum(-1)
    total_T = sums_TC.sum(-1)
    # H = log Z - E[x]: with the peak at zero neither term loses digits when H is small.
    entropy_T = total_T.log() - torch.linalg.vecdot(shifted_TV, x_TV) / total_T
    draw_T = _draw(x_TCW, sums_TC, query.uniform_T)
    held_p_T = x_TV.gather(-1, query.held_T[:, None])[:, 0] / total_T
    return top_T, draw_T, entropy_T, held_p_T, total_T


def _argmax(x_TCW: Tensor) -> Tensor:
    """Index of the largest entry. Chunk maxima first: the plain argmax is not vectorised on CPU."""
    chunk_T = x_TCW.amax(-1).argmax(-1)
    return chunk_T * x_TCW.shape[-1] + _chunk(x_TCW, chunk_T).argmax(-1)


def _draw(weight_TCW: Tensor, sums_TC: Tensor, uniform_T: Tensor) -> Tensor:
    """The token whose interval of the running sum holds `uniform` times the total."""
    cdf_TC = sums_TC.double().cumsum(-1)
    target_T = uniform_T * cdf_TC[:, -1]
    chunk_T = (cdf_TC <= target_T[:, None]).sum(-1).clamp(max=cdf_TC.shape[-1] - 1)
    weight_TW = _chunk(weight_TCW, chunk_T).double()
    before_T = cdf_TC.gather(-1, chunk_T[:, None])[:, 0] - weight_TW.sum(-1)
    inner_TW = weight_TW.cumsum(-1) + before_T[:, None]
    inside_T = (inner_TW <= target_T[:, None]).sum(-1)
    # Rounding may put the target past the chunk's end: then its likeliest token is taken.
    inside_T = torch.where(inside_T < weight_TW.shape[-1], inside_T, weight_TW.argmax(-1))
    return chunk_T * weight_TCW.shape[-1] + inside_T


def _chunk(x_TCW: Tensor, chunk_T: Tensor) -> Tensor:
    index = chunk_T[:, None, None].expand(-1, 1, x_TCW.shape[-1])
    return x_TCW.gather(1, index)[:, 0]
