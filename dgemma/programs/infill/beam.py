"""Beam search in causal mode, for a hole that is alone on its canvas.

The causal mode does not see the text after the hole, but writes better than one canvas. Its texts
are candidates, which the search scores together with the text that follows.

V vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING

from torch import Tensor

from dgemma.backends.base import ForwardInput, ForwardOutput, TokenDraw
from dgemma.engine.request import Prefix, Task
from dgemma.model.kv_cache import KVCache
from dgemma.programs.infill.document import LINE_ENDS, is_own_line
from dgemma.programs.infill.healing import HealingVariant, Ids
from dgemma.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from dgemma.engine.core import EngineCore

MAX_BEAM_TOKENS = 48
READ_TOKENS = 256  # most likely next tokens of a beam to filter


@dataclass(frozen=True, slots=True, kw_only=True)
class BeamConstraints:
    """Constraints on the texts of a beam search."""

    variant: HealingVariant  # treatment of the hole's boundaries
    edge: str  # end of the text before the hole
    piece: str  # text after the hole
    single_line: bool
    min_tokens: int
    max_tokens: int
    width: int  # beams per token, and most texts returned
    by_total: bool = False  # rank by total log-probability instead of the mean

    @property
    def num_tokens(self) -> int | None:
        """Tokens of the hole, if they are known."""
        return self.max_tokens if self.min_tokens == self.max_tokens else None

    @property
    def next_token(self) -> int | None:
        """The token after the hole, used to score texts of unknown length; None: any."""
        after = self.variant.holes[0].after
        return after[0] if after and self.num_tokens is None else None

    def allows(self, tokenizer: Tokenizer, token: int, index: int) -> bool:
        """True if a token is allowed at this index of the hole."""
        if tokenizer.is_control(token):
            return False
        if self.is_ended_by(tokenizer, token):
            # A hole that is a whole line ends with its last token.
            return is_own_line(self.edge, self.piece) and self.num_tokens in (None, index + 1)
        required = self.variant.holes[0].required_prefix
        return index > 0 or tokenizer.token_bytes(token).startswith(required)

    def is_ended_by(self, tokenizer: Tokenizer, token: int) -> bool:
        """True if a token ends the single line of the hole."""
        data = tokenizer.token_bytes(token)
        return self.single_line and any(mark.encode() in data for mark in LINE_ENDS)


@dataclass(frozen=True, slots=True, eq=False)
class Beam:
    """A partial text. Its last token is not in its cache yet."""

    ids: Ids
    total: float  # sum of log-probabilities
    cache: KVCache


class BeamSearch(Task):
    """Finds the most likely texts after a prefix; the result is sorted."""

    prefix: Prefix

    def __init__(self, tokenizer: Tokenizer, prefix: Prefix, constraints: BeamConstraints) -> None:
        self.tokenizer, self.constraints = tokenizer, constraints
        self.max_tokens = min(constraints.max_tokens, MAX_BEAM_TOKENS)
        self.first_tokens = (prefix.ids[-1], *constraints.variant.ids)  # of the first pass
        num_tokens = self.max_tokens + len(self.first_tokens)
        super().__init__(constraints.width * num_tokens, prefix)
        self.ranks: dict[Ids, float] = {}
        self.beams: list[Beam] = []
        if self.max_tokens < constraints.min_tokens:
            self.finish([])

    def start(self, engine: "EngineCore", deadline: float) -> None:
        num_tokens = len(self.first_tokens) + self.max_tokens
        self.beams = [Beam((), 0.0, self.prefix.fork(num_tokens))]

    def inputs(self) -> list[ForwardInput]:
        return [
            ForwardInput(
                cache=beam.cache,
                tokens=beam.ids[-1:] or self.first_tokens,
                draw=TokenDraw(),
                needs_logits=True,
            )
            for beam in self.beams
        ]

    def process(self, inputs: Sequence[ForwardInput], outputs: Sequence[ForwardOutput]) -> None:
        predictions = [_logprobs(output) for output in outputs]
        for beam, logprob_V in zip(self.beams, predictions, strict=True):
            if beam.ids and len(beam.ids) >= self.constraints.min_tokens:
                self.ranks[beam.ids] = self._rank(beam, logprob_V)
        num_written = len(self.beams[0].ids)
        self.beams = self._grow(predictions, num_written) if num_written < self.max_tokens else []
        if not self.beams:
            ranked = sorted(self.ranks, key=self.ranks.__getitem__, reverse=True)
            self.finish(ranked[: self.constraints.width])

    def _rank(self, beam: Beam, logprob_V: Tensor) -> float:
        """Log-probability of the tokens and the one after the hole, or their mean.

        Repetition makes tokens nearly certain, so with unknown lengths the best mean would be a
        long repetition.
        """
        total, count = beam.total, len(beam.ids)
        if self.constraints.next_token is not None:
            total, count = total + float(logprob_V[self.constraints.next_token]), count + 1
        return total if self.constraints.by_total else total / count

    def _grow(self, predictions: Sequence[Tensor], index: int) -> list[Beam]:
        """Return the most likely texts that are one token longer."""
        constraints, longer = self.constraints, list[tuple[float, Beam, int]]()
        for beam, logprob_V in zip(self.beams, predictions, strict=True):
            if beam.ids and constraints.is_ended_by(self.tokenizer, beam.ids[-1]):
                continue
            top = logprob_V.topk(min(READ_TOKENS, len(logprob_V)))
            pairs = zip(top.values.tolist(), top.indices.tolist(), strict=True)
            allowed = (p for p in pairs if constraints.allows(self.tokenizer, p[1], index))
            best = islice(allowed, constraints.width)
            longer += [(beam.total + logprob, beam, token) for logprob, token in best]
        longer = sorted(longer, key=lambda child: child[0], reverse=True)[: constraints.width]
        return self._fork(longer)

    def _fork(self, longer: Sequence[tuple[float, Beam, int]]) -> list[Beam]:
        """Make the new beams: the first child of a beam takes over its cache, others copy it."""
        parents: set[Beam] = set()
        beams = []
        for total, beam, token in longer:
            cache = self.prefix.clone(beam.cache) if beam in parents else beam.cache
            parents.add(beam)
            beams.append(Beam((*beam.ids, token), total, cache))
        return beams

    def close(self, engine: "EngineCore") -> None:
        self.beams = []


def _logprobs(output: ForwardOutput) -> Tensor:
    assert output.logits_V is not None
    return output.logits_V.float().log_softmax(-1)
