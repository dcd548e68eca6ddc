"""Beam search in the causal mode: the likeliest continuations of a prefix.

It does not see what stands behind a hole, but it is the surer writer of the two modes. So its texts
are proposals (`engine.proposals`): the search for a hole's text scores them together with what
follows.

W texts side by side, V vocabulary.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dgemma.backends.base import Backend
from dgemma.engine.score import Encoded
from dgemma.model.forward_batch import ForwardBatch, Segment
from dgemma.model.kv_cache import KVCache

READ = 256  # of the likeliest tokens behind a text, in search of those that are allowed

Ids = tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """Constraints on the texts that are searched for."""

    least: int  # tokens
    most: int
    width: int  # texts kept after each token, and found at most
    after: int | None  # the token that stands behind them; None: any
    allowed: Callable[[int, int], bool]  # whether a token may stand at a place
    ends: Callable[[int], bool]  # whether nothing may stand behind a token
    by_total: bool = False  # whether the best is the likeliest, or that with the best mean


@dataclass(frozen=True, slots=True)
class Beam:
    """A text on its way."""

    ids: Ids
    total: float  # log-probability of its tokens
    cache: KVCache
    next_V: Tensor  # log-probabilities of the token behind it

    def worth(self, wanted: Wanted) -> float:
        """Log-probability of its tokens and of the one that stands behind it, or their mean.

        In a text that says the same again and again most tokens are all but sure: of texts of any
        length the best mean is that of a long repetition.
        """
        after, total, count = wanted.after, self.total, len(self.ids)
        if after is not None:
            total, count = total + float(self.next_V[after]), count + 1
        return total if wanted.by_total else total / count


@torch.inference_mode()
def likeliest(
    backend: Backend, prefix: Encoded, wanted: Wanted, between: Callable[[], None]
) -> list[Ids]:
    """The likeliest texts of the wanted lengths that the search came by, the best first.

    `between`: called before each further token, so that others need not wait for all of them.
    """
    first_V = backend.model.logits(prefix.last_1D)[0].float().log_softmax(-1)
    beams = [Beam((), 0.0, prefix.cache.fork(wanted.most), first_V)]
    found: dict[Ids, float] = {}
    for place in range(wanted.most):
        if place:
            between()
        beams = _grow(backend, beams, place, wanted)
        if place + 1 >= wanted.least:
            found |= {beam.ids: beam.worth(wanted) for beam in beams}
    return sorted(found, key=found.__getitem__, reverse=True)[: wanted.width]


def _grow(backend: Backend, beams: Sequence[Beam], place: int, wanted: Wanted) -> list[Beam]:
    """The likeliest texts that are a token longer."""
    longer: list[tuple[float, Beam, int]] = []
    for beam in beams:
        if beam.ids and wanted.ends(beam.ids[-1]):
            continue
        p, tokens = (x.tolist() for x in beam.next_V.topk(min(READ, len(beam.next_V))))
        allowed = [i for i, token in enumerate(tokens) if wanted.allowed(token, place)]
        longer += [(beam.total + p[i], beam, tokens[i]) for i in allowed[: wanted.width]]
    longer = sorted(longer, key=lambda one: one[0], reverse=True)[: wanted.width]
    if not longer:
        return []
    caches = _caches([beam for _, beam, _ in longer])
    context = ForwardBatch([Segment(cache, 1, commit=True) for cache in caches])
    tokens_W = torch.tensor([token for _, _, token in longer], device=caches[0].device)
    hidden_WD = backend.encode(tokens_W, context)
    next_WV = backend.model.logits(hidden_WD).float().log_softmax(-1)
    context.close()
    return [
        Beam((*beam.ids, token), total, cache, next_V)
        for (total, beam, token), cache, next_V in zip(longer, caches, next_WV, strict=True)
    ]


def _caches(parents: Sequence[Beam]) -> list[KVCache]:
    """A row for each text: the first child of a text takes over its row, others get a fork."""
    taken: set[int] = set()
    caches = []
    for beam in parents:
        is_first = id(beam) not in taken
        taken.add(id(beam))
        caches.append(beam.cache if is_first else beam.cache.clone())
    return caches
