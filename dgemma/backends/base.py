"""The protocol of a backend, which executes forward passes, and its inputs and outputs.

N positions, V vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from dgemma.diffusion.denoise import CanvasState
from dgemma.diffusion.sampler import LogitsAt
from dgemma.model.forward_batch import ForwardBatch, Segment
from dgemma.model.gemma import Gemma
from dgemma.model.kv_cache import KVCache

LOGIT_POSITIONS = 64  # canvas positions whose logits are in memory at once


@dataclass(frozen=True, slots=True)
class TokenDraw:
    """Temperature and random number of one AR draw."""

    temperature: float = 0.0  # 0: argmax
    uniform: float = 0.0  # random number in [0, 1)


@dataclass(frozen=True, slots=True, eq=False)
class ImageRows:
    """Features of a picture among the tokens to commit, and the index of its first token."""

    begin: int
    features_SD: Tensor  # replace the embeddings of S tokens

    @property
    def end(self) -> int:
        return self.begin + len(self.features_SD)


@dataclass(frozen=True, slots=True)
class CanvasQuery:
    """Canvas positions whose tokens are scored by the canvas's next step.

    `penalty` nats are subtracted from each target's logit: see `copy_bias` in the edit program.
    """

    tokens: tuple[int, ...]  # tokens on the canvas
    positions: tuple[int, ...]
    targets: tuple[int, ...]  # target token of each position
    penalty: float = 0.0


@dataclass(frozen=True, slots=True)
class CanvasScore:
    """Log-probabilities at the positions of a query."""

    targets: tuple[float, ...]
    best: tuple[float, ...]  # log-probability of the argmax


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardInput:
    """One request's part of a pass: tokens to commit, then a canvas or a draw."""

    cache: KVCache
    tokens: tuple[int, ...] = ()  # to commit after the cached tokens
    images: tuple[ImageRows, ...] = ()  # pictures among those tokens, whole and in order
    state: CanvasState | None = None  # canvas to step after the commit
    query: CanvasQuery | None = None  # positions to score in that step
    draw: TokenDraw | None = None  # draw of the token after the last committed one
    needs_logits: bool = False  # return logits: a constraint chooses the token
    targets: tuple[int, ...] = ()  # tokens to score; target i is predicted by tokens[: i + 1]
    draws: tuple[TokenDraw, ...] = ()  # draws at the target positions, instead of the argmax


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardOutput:
    state: CanvasState | None = None
    canvas_score: CanvasScore | None = None  # answer to the query
    token: int | None = None
    logprob: float | None = None  # of the token, at temperature 1; NaN if any logit is NaN
    logits_V: Tensor | None = None  # valid until the next pass
    logprobs: tuple[float, ...] = ()  # log-probability of each target
    best: tuple[tuple[int, float], ...] = ()  # token chosen at each target, its log-probability
    hidden_ND: Tensor | None = None  # hidden states of those positions; valid until the next pass


class Backend(Protocol):
    """Executes passes of a model on its device."""

    model: Gemma
    name: str
    max_batch_size: int  # canvases per pass

    def run(self, inputs: Sequence[ForwardInput]) -> list[ForwardOutput]:
        """Run one pass for all inputs. Commits come first: a canvas sees its request's commit."""

    def encode(self, tokens_T: Tensor, batch: ForwardBatch) -> Tensor:
        """Return hidden states of tokens in causal mode."""

    def forward(self, embeds_TD: Tensor, batch: ForwardBatch) -> Tensor:
        """Run the layer stack on embeddings."""


def score_canvas(query: CanvasQuery, logits_at: LogitsAt) -> CanvasScore:
    """Score the tokens of a query, a limited number of positions at a time."""
    targets, best = [], []
    for begin in range(0, len(query.positions), LOGIT_POSITIONS):
        group = slice(begin, begin + LOGIT_POSITIONS)
        logits_NV = logits_at(query.positions[group])
        target_N1 = torch.tensor(query.targets[group], device=logits_NV.device)[:, None]
        penalty_N1 = torch.full_like(target_N1, -query.penalty, dtype=logits_NV.dtype)
        logprob_NV = logits_NV.scatter_add(-1, target_N1, penalty_N1).log_softmax(-1)
        targets += logprob_NV.gather(-1, target_N1)[:, 0].tolist()
        best += logprob_NV.amax(-1).tolist()
    return CanvasScore(tuple(targets), tuple(best))


@torch.inference_mode()
def prefill(backend: Backend, cache: KVCache, tokens_T: Tensor, chunk: int) -> Tensor:
    """Commit tokens in chunks; return the last hidden state."""
    hidden_TD = torch.empty(0)
    for piece_T in torch.split(tokens_T, chunk):
        batch = ForwardBatch([Segment(cache, len(piece_T), commit=True)])
        hidden_TD = backend.encode(piece_T, batch)
        batch.close()
    return hidden_TD[-1:]
