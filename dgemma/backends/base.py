"""The seam between the engine and what executes its passes."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from dgemma.diffusion.denoise import Row
from dgemma.model.forward_batch import ForwardBatch, Segment
from dgemma.model.gemma import Gemma
from dgemma.model.kv_cache import KVCache


@dataclass(frozen=True, slots=True)
class TokenDraw:
    """Temperature and random number of the next draw of an AR sequence."""

    temperature: float = 0.0  # 0 takes the likeliest token
    uniform: float = 0.0  # decides the draw, in [0, 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardInput:
    """Tokens that one request brings to a pass: some to commit, then a canvas or a draw."""

    cache: KVCache
    tokens: tuple[int, ...] = ()  # to commit after what is cached
    row: Row | None = None  # a canvas to step, after those
    draw: TokenDraw | None = None  # of the token after the last one committed
    needs_logits: bool = False  # for a constraint, which draws by itself


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardOutput:
    row: Row | None = None
    token: int | None = None
    logprob: float | None = None  # causal, untouched by the temperature; NaN if any logit is
    logits_V: Tensor | None = None  # valid until the next pass


class Backend(Protocol):
    """Executes passes of a model on its device."""

    model: Gemma
    name: str
    max_rows: int  # canvases that a pass steps at once

    def run(self, inputs: Sequence[ForwardInput]) -> list[ForwardOutput]:
        """Run one pass for all inputs: commits first, so that a canvas sees its own commit."""

    def encode(self, tokens_T: Tensor, batch: ForwardBatch) -> Tensor:
        """Return the hidden states of tokens in the causal mode."""

    def forward(self, embeds_TD: Tensor, batch: ForwardBatch) -> Tensor:
        """Run the stack on embeddings that the caller made."""


@torch.inference_mode()
def prefill(backend: Backend, cache: KVCache, tokens_T: Tensor, chunk: int) -> Tensor:
    """Commit tokens after what is cached, `chunk` at a time; returns the last hidden state."""
    hidden_TD = torch.empty(0)
    for piece_T in torch.split(tokens_T, chunk):
        batch = ForwardBatch([Segment(cache, len(piece_T), commit=True)])
        hidden_TD = backend.encode(piece_T, batch)
        batch.close()
    return hidden_TD[-1:]
