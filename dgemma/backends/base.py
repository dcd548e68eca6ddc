"""The protocol of a backend: it executes the engine's forward passes."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from dgemma.diffusion.denoise import CanvasState
from dgemma.model.forward_batch import ForwardBatch, Segment
from dgemma.model.gemma import Gemma
from dgemma.model.kv_cache import KVCache


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


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardInput:
    """One request's tokens in a pass: some to commit, then a canvas or a draw."""

    cache: KVCache
    tokens: tuple[int, ...] = ()  # to commit after what is cached
    images: tuple[ImageRows, ...] = ()  # among those tokens, whole and in order
    state: CanvasState | None = None  # a canvas to step, after those
    draw: TokenDraw | None = None  # of the token after the last one committed
    needs_logits: bool = False  # for a constraint, which draws by itself
    targets: tuple[int, ...] = ()  # score them: target i is predicted by tokens[: i + 1]
    draws: tuple[TokenDraw, ...] = ()  # of a token beside each target, instead of the likeliest


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardOutput:
    state: CanvasState | None = None
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


@torch.inference_mode()
def prefill(backend: Backend, cache: KVCache, tokens_T: Tensor, chunk: int) -> Tensor:
    """Commit tokens after the cached tokens, `chunk` at a time; returns the last hidden state."""
    hidden_TD = torch.empty(0)
    for piece_T in torch.split(tokens_T, chunk):
        batch = ForwardBatch([Segment(cache, len(piece_T), commit=True)])
        hidden_TD = backend.encode(piece_T, batch)
        batch.close()
    return hidden_TD[-1:]
