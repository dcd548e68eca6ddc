"""The protocol of a backend: it executes the engine's forward passes.

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

LOGIT_POSITIONS = 64  # of a canvas whose logits are held at once


@dataclass(frozen=True, slots=True)
class TokenDraw:
    """Temperature and random number of the next draw of an AR sequence."""

    temperature: float = 0.0  # 0 takes the likeliest token
    uniform: float = 0.0  # decides the draw, in [0, 1)


@dataclass(frozen=True, slots=True, eq=False)
class ImageRows:
    """Soft tokens of a picture among the tokens to commit: their first index, and features."""

    begin: int
    features_SD: Tensor  # they replace the embeddings of S tokens

    @property
    def end(self) -> int:
        return self.begin + len(self.features_SD)


@dataclass(frozen=True, slots=True)
class CanvasQuery:
    """Positions of a canvas whose tokens are to be scored by the canvas's next step.

    `penalty` nats are taken off the logit of each target: see `copy_bias` of the edit program.
    """

    tokens: tuple[int, ...]  # of the canvas
    positions: tuple[int, ...]
    targets: tuple[int, ...]  # at those positions
    penalty: float = 0.0


@dataclass(frozen=True, slots=True)
class CanvasScore:
    """Log-probabilities at the positions of a query."""

    targets: tuple[float, ...]
    best: tuple[float, ...]  # of the likeliest token


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardInput:
    """One request's tokens in a pass: some to commit, then a canvas or a draw."""

    cache: KVCache
    tokens: tuple[int, ...] = ()  # to commit after what is cached
    images: tuple[ImageRows, ...] = ()  # among those tokens, whole and in order
    state: CanvasState | None = None  # a canvas to step, after those
    query: CanvasQuery | None = None  # to be scored by that step
    draw: TokenDraw | None = None  # of the token after the last one committed
    needs_logits: bool = False  # for a constraint, which draws by itself
    targets: tuple[int, ...] = ()  # score them: target i is predicted by tokens[: i + 1]
    draws: tuple[TokenDraw, ...] = ()  # of a token beside each target, instead of the likeliest


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardOutput:
    state: CanvasState | None = None
    canvas_score: CanvasScore | None = None  # of the query
    token: int | None = None
    logprob: float | None = None  # of the token at temperature 1; NaN if any logit is
    logits_V: Tensor | None = None  # valid until the next pass
    logprobs: tuple[float, ...] = ()  # of the targets
    best: tuple[tuple[int, float], ...] = ()  # token chosen there, its log-probability
    hidden_ND: Tensor | None = None  # hidden states there, for a drafter; valid until the next pass


class Backend(Protocol):
    """Executes passes of a model on its device."""

    model: Gemma
    name: str
    max_batch_size: int  # canvases that a pass steps at once

    def run(self, inputs: Sequence[ForwardInput]) -> list[ForwardOutput]:
        """Run one pass for all inputs: commits first, so that a canvas sees its own commit."""

    def encode(self, tokens_T: Tensor, batch: ForwardBatch) -> Tensor:
        """Return the hidden states of tokens in the causal mode."""

    def forward(self, embeds_TD: Tensor, batch: ForwardBatch) -> Tensor:
        """Run the stack on the caller's embeddings."""


def score_canvas(query: CanvasQuery, logits_at: LogitsAt) -> CanvasScore:
    """Score the tokens of a query, a bounded number of positions at a time."""
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
    """Commit tokens after the cached tokens, `chunk` at a time; returns the last hidden state."""
    hidden_TD = torch.empty(0)
    for piece_T in torch.split(tokens_T, chunk):
        batch = ForwardBatch([Segment(cache, len(piece_T), commit=True)])
        hidden_TD = backend.encode(piece_T, batch)
        batch.close()
    return hidden_TD[-1:]
