"""Per-position statistics of the logits: the only vocabulary-sized work of a step.

Probabilities overwrite the LM head's output in place; all other results are a few numbers per
position. Draws are exact inverse-CDF draws from one uniform number: the cumulative sum over chunks
selects a chunk, and only that chunk is read again.

T positions, V vocabulary, C chunks of W tokens each.
"""

from dataclasses import dataclass, replace
from math import gcd

import torch
import torch.nn.functional as F
from torch import Tensor

CHUNK = 128  # tokens summed together; the draw re-reads one chunk per position
MIN_TEMPERATURE = 1e-3  # below it the argmax is taken
SCRATCH_ELEMENTS = 1 << 20  # logits in a group of positions


@dataclass(frozen=True, slots=True, kw_only=True)
class Query:
    """Inputs of the statistics, per position."""

    temperature_T: Tensor  # temperature, float32
    uniform_T: Tensor  # random number of the draw, float64 in [0, 1)
    current_T: Tensor  # current token of the canvas
    draw_temperature_T: Tensor | None = None  # divides the logits of the draw only; None: 1

    def at(self, positions: slice) -> "Query":
        tempered = self.draw_temperature_T is not None
        names = self.__slots__ if tempered else self.__slots__[:-1]
        return Query(**{name: getattr(self, name)[positions] for name in names})


@dataclass(frozen=True, slots=True, kw_only=True)
class PositionStats:
    """Statistics of the soft-capped, temperature-scaled distribution at each position."""

    draw_T: Tensor  # token drawn
    top_T: Tensor  # argmax
    entropy_T: Tensor  # in nats
    top_p_T: Tensor  # probability of the argmax
    current_p_T: Tensor  # probability of the canvas's current token

    def at(self, positions: slice) -> "PositionStats":
        return PositionStats(**{name: getattr(self, name)[positions] for name in self.__slots__})

    @classmethod
    def join(cls, parts: list["PositionStats"]) -> "PositionStats":
        names = cls.__slots__
        return cls(**{name: torch.cat([getattr(part, name) for part in parts]) for name in names})


@dataclass(frozen=True, slots=True)
class HostStats:
    """Argmax, its probability and the entropy of each position as Python numbers."""

    tops: list[int]
    top_p: list[float]
    entropy: list[float]

    @classmethod
    def read(cls, stats: PositionStats) -> "HostStats":
        columns = (stats.top_T.double(), stats.top_p_T.double(), stats.entropy_T.double())
        tops, top_p, entropy = torch.stack(columns).tolist()  # one device synchronization
        return cls([int(token) for token in tops], top_p, entropy)


def position_stats(
    raw_TV: Tensor, softcap: float | None, query: Query
) -> tuple[PositionStats, Tensor]:
    """Compute statistics and probabilities; the probabilities overwrite `raw_TV`."""
    stats, p_TV = _by_groups(raw_TV, softcap, query)
    return (stats if query.draw_temperature_T is None else _redraw(stats, p_TV, query)), p_TV


def _redraw(stats: PositionStats, p_TV: Tensor, query: Query) -> PositionStats:
    """Draw again at the temperature of draws; 0 takes the argmax."""
    assert query.draw_temperature_T is not None
    # Relative to the peak, so that nothing underflows.
    weight_TV = p_TV.float() / p_TV.amax(-1, keepdim=True).float()
    weight_TV.pow_(1 / query.draw_temperature_T.clamp(min=MIN_TEMPERATURE)[:, None])
    draw_T = draw(weight_TV, query.uniform_T)
    is_greedy_T = query.draw_temperature_T < MIN_TEMPERATURE
    return replace(stats, draw_T=torch.where(is_greedy_T, stats.top_T, draw_T))


def _by_groups(raw_TV: Tensor, softcap: float | None, query: Query) -> tuple[PositionStats, Tensor]:
    p_TV = raw_TV if raw_TV.dtype == torch.float32 else raw_TV.float()
    # A GPU takes all positions at once; on a CPU a group should stay in the cache.
    is_cpu = p_TV.device.type == "cpu"
    group = max(1, SCRATCH_ELEMENTS // p_TV.shape[-1]) if is_cpu else len(p_TV)
    parts = []
    for start in range(0, len(p_TV), group):
        positions = slice(start, start + group)
        parts.append(_group_stats(p_TV[positions], softcap, query.at(positions)))
    return PositionStats.join(parts), p_TV


def position_stats_reference(raw_TV: Tensor, softcap: float | None, query: Query) -> PositionStats:
    """Define the statistics, in float64."""
    p_TV = _exact(raw_TV, softcap, query.temperature_T)
    return PositionStats(
        draw_T=_draw_reference(p_TV, query),
        top_T=p_TV.argmax(-1),
        entropy_T=torch.special.entr(p_TV).sum(-1).float(),
        top_p_T=p_TV.amax(-1).float(),
        current_p_T=p_TV.gather(-1, query.current_T[:, None])[:, 0].float(),
    )


def _draw_reference(p_TV: Tensor, query: Query) -> Tensor:
    if query.draw_temperature_T is not None:
        p_TV = (p_TV.log() / query.draw_temperature_T[:, None]).softmax(-1)
    return (p_TV.cumsum(-1) <= query.uniform_T[:, None]).sum(-1).clamp(max=p_TV.shape[-1] - 1)


def draw_misses(raw_TV: Tensor, softcap: float | None, query: Query, draw_T: Tensor) -> Tensor:
    """Distance of each uniform number from the CDF interval of its token, in probability (float64).

    Zero for exact draws. In flat distributions the intervals are as narrow as the rounding of the
    CDF, so a neighbouring token is a valid draw; this distance separates that case from a wrong
    one.
    """
    cdf_TV = _exact(raw_TV, softcap, query.temperature_T).cumsum(-1)
    high_T = cdf_TV.gather(-1, draw_T[:, None])[:, 0]
    low_T = F.pad(cdf_TV, (1, 0)).gather(-1, draw_T[:, None])[:, 0]
    return torch.maximum(low_T - query.uniform_T, query.uniform_T - high_T).clamp(min=0)


def _exact(raw_TV: Tensor, softcap: float | None, temperature_T: Tensor) -> Tensor:
    """Probabilities in float64."""
    logits_TV = raw_TV.double()
    if softcap is not None:
        logits_TV = softcap * torch.tanh(logits_TV / softcap)
    return (logits_TV / temperature_T[:, None]).softmax(-1)


def _group_stats(x_TV: Tensor, softcap: float | None, query: Query) -> PositionStats:
    """Turn the raw logits of a few positions into probabilities in place; return the statistics."""
    scale_T = 1 / query.temperature_T
    if softcap is not None:
        # c tanh(x / c) = 2c sigmoid(2x / c) - c; a constant offset changes no statistic.
        x_TV.mul_(2 / softcap).sigmoid_()
        scale_T = 2 * softcap / query.temperature_T
    width = gcd(x_TV.shape[-1], CHUNK)
    top_T = _argmax(x_TV.view(len(x_TV), -1, width))
    # Scaled after the peak is subtracted, so that large logits lose no digits.
    x_TV.sub_(x_TV.gather(-1, top_T[:, None])).mul_(scale_T[:, None])
    p_TV = x_TV.softmax(-1)
    p_TCW = p_TV.view(len(p_TV), -1, width)
    cdf_TC = wide(p_TCW.sum(-1)).cumsum(-1)
    # The float32 softmax of a large vocabulary sums to 1 only within about 1e-5.
    total_T = cdf_TC[:, -1].float()
    top_p_T = (p_TV.gather(-1, top_T[:, None])[:, 0] / total_T).clamp(max=1.0)
    # H = log Z - E[x]: with the peak at zero Z is 1 / p(top), and a small H loses no digits.
    entropy_T = -top_p_T.log() - torch.linalg.vecdot(p_TV, x_TV) / total_T
    x_TV.copy_(p_TV)
    return PositionStats(
        draw_T=_draw(p_TCW, cdf_TC, query.uniform_T),
        top_T=top_T,
        entropy_T=entropy_T,
        top_p_T=top_p_T,
        current_p_T=p_TV.gather(-1, query.current_T[:, None])[:, 0] / total_T,
    )


def _argmax(x_TCW: Tensor) -> Tensor:
    """Index of the largest entry. Chunk maxima first: the plain argmax is not vectorised on CPU."""
    chunk_T = x_TCW.amax(-1).argmax(-1)
    return chunk_T * x_TCW.shape[-1] + _chunk(x_TCW, chunk_T).argmax(-1)


def wide(x: Tensor, device: torch.device | None = None) -> Tensor:
    """Convert to float64, or to float32 on a device that has no float64."""
    device = device or x.device
    return x.to(torch.float32 if device.type == "mps" else torch.float64).to(device)


def draw_token(logits_V: Tensor, temperature: float, uniform: float) -> tuple[int, float]:
    """Draw a token from capped logits; return it and its log-probability at temperature 1."""
    logprob_V = logits_V.log_softmax(-1)
    token = logits_V.argmax()
    if temperature > 0:
        query = Query(
            temperature_T=logits_V.new_full((1,), temperature),
            uniform_T=wide(torch.tensor([uniform], dtype=torch.float64), logits_V.device),
            current_T=token[None],
        )
        token = position_stats(logits_V[None].clone(), None, query)[0].draw_T[0]
    # One read for both: each read synchronizes.
    number, logprob = torch.stack([wide(token), wide(logprob_V[token])]).tolist()
    return int(number), logprob


def draw(p_TV: Tensor, uniform_T: Tensor) -> Tensor:
    """Draw a token at each position in proportion to weights, which need not be normalized."""
    p_TCW = p_TV.view(len(p_TV), -1, gcd(p_TV.shape[-1], CHUNK))
    return _draw(p_TCW, wide(p_TCW.sum(-1)).cumsum(-1), uniform_T)


def _draw(p_TCW: Tensor, cdf_TC: Tensor, uniform_T: Tensor) -> Tensor:
    """Return the token whose CDF interval contains `uniform` times the total."""
    target_T = uniform_T * cdf_TC[:, -1]
    chunk_T = (cdf_TC <= target_T[:, None]).sum(-1).clamp(max=cdf_TC.shape[-1] - 1)
    p_TW = wide(_chunk(p_TCW, chunk_T))
    before_T = F.pad(cdf_TC, (1, 0)).gather(-1, chunk_T[:, None])[:, 0]
    inside_T = (p_TW.cumsum(-1) <= (target_T - before_T)[:, None]).sum(-1)
    # Rounding may put the target past the chunk's end; then take the chunk's argmax.
    inside_T = torch.where(inside_T < p_TW.shape[-1], inside_T, p_TW.argmax(-1))
    return chunk_T * p_TCW.shape[-1] + inside_T


def _chunk(x_TCW: Tensor, chunk_T: Tensor) -> Tensor:
    index = chunk_T[:, None, None].expand(-1, 1, x_TCW.shape[-1])
    return x_TCW.gather(1, index)[:, 0]
