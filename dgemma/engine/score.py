"""Log-probabilities of texts after a prompt, which is encoded once; texts share passes.

T tokens of the pass, V vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dgemma.backends.base import Backend, prefill
from dgemma.errors import PromptTooLong, UsageError
from dgemma.model.forward_batch import ForwardBatch, Segment
from dgemma.model.gemma import Gemma
from dgemma.model.kv_cache import Capacity, KVCache

CHUNK = 512  # positions encoded and read out at once


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """Log-probabilities of a text's tokens, in nats."""

    ids: tuple[int, ...]
    logprobs: tuple[float, ...]

    @property
    def total(self) -> float:
        return sum(self.logprobs)

    @property
    def mean(self) -> float:
        return self.total / len(self.logprobs)


@dataclass(frozen=True, slots=True)
class Encoded:
    """A prompt in the cache, and the hidden state of its last token."""

    cache: KVCache
    last_1D: Tensor


@torch.inference_mode()
def score(backend: Backend, prompt: Sequence[int], texts: Sequence[Sequence[int]]) -> list[Score]:
    """Score texts that all go on from the same prompt: it is encoded once and shared."""
    model = backend.model
    _check(model, len(prompt), texts)
    weight = model.embed_tokens.weight
    room = Capacity(tokens=len(prompt), segment=CHUNK)
    shared = KVCache(model.config, room, weight.dtype, weight.device)
    last_1D = prefill(backend, shared, torch.tensor(prompt, device=weight.device), CHUNK)
    return score_after(backend, Encoded(shared, last_1D), texts)


@torch.inference_mode()
def score_after(backend: Backend, prompt: Encoded, texts: Sequence[Sequence[int]]) -> list[Score]:
    """Score texts behind a prompt that is encoded already; its cache may not change afterwards."""
    model, shared, last_1D = backend.model, prompt.cache, prompt.last_1D
    _check(model, shared.length, texts)
    weight = model.embed_tokens.weight
    # The last token of a text predicts nothing that is asked for, so it is not encoded.
    branches = {i: shared.fork(len(text)) for i, text in enumerate(texts) if len(text) > 1}
    hidden = _encode(backend, [(branches[i], texts[i][:-1]) for i in branches])
    after = dict(zip(branches, hidden, strict=True))
    scores = []
    for i, text in enumerate(texts):
        states_LD = torch.cat([last_1D, after[i]]) if i in after else last_1D
        logprobs = _logprobs(model, states_LD, torch.tensor(text, device=weight.device))
        scores.append(Score(ids=tuple(text), logprobs=tuple(logprobs.tolist())))
    return scores


def _check(model: Gemma, prompt: int, texts: Sequence[Sequence[int]]) -> None:
    if not prompt or not texts or not all(texts):
        raise UsageError("scoring needs a prompt and texts of at least one token each")
    longest, limit = prompt + max(map(len, texts)), model.config.max_position_embeddings
    if longest > limit:
        raise PromptTooLong(
            f"prompt and text have {longest} tokens, but the context holds {limit}; shorten one"
        )


def _encode(backend: Backend, parts: Sequence[tuple[KVCache, Sequence[int]]]) -> list[Tensor]:
    """Hidden states of every text: short ones together in passes, long ones in pieces."""
    hidden: list[Tensor] = []
    for packed in _pack(parts):
        if len(packed) > 1:
            hidden += _encode_together(backend, packed)
            continue
        cache, tokens = packed[0]
        pieces = [tokens[i : i + CHUNK] for i in range(0, len(tokens), CHUNK)]
        hidden.append(torch.cat([_encode_together(backend, [(cache, p)])[0] for p in pieces]))
    return hidden


def _pack(
    parts: Sequence[tuple[KVCache, Sequence[int]]],
) -> list[list[tuple[KVCache, Sequence[int]]]]:
    """Texts in order, as many to a pass as fit; one that is longer has its own."""
    packed: list[list[tuple[KVCache, Sequence[int]]]] = []
    room = 0
    for cache, tokens in parts:
        if len(tokens) > room:
            packed.append([])
            room = CHUNK
        packed[-1].append((cache, tokens))
        room -= len(tokens)
    return packed


def _encode_together(
    backend: Backend, parts: Sequence[tuple[KVCache, Sequence[int]]]
) -> list[Tensor]:
    counts = [len(tokens) for _, tokens in parts]
    context = ForwardBatch([Segment(cache, len(tokens), commit=True) for cache, tokens in parts])
    ids = [token for _, tokens in parts for token in tokens]
    hidden_TD = backend.encode(torch.tensor(ids, device=context.positions_T.device), context)
    context.close()
    return list(torch.split(hidden_TD, counts))


def _logprobs(model: Gemma, states_LD: Tensor, text_L: Tensor) -> Tensor:
    """Log-probability of each token under the state before it, a bounded number at a time."""
    pieces = zip(torch.split(states_LD, CHUNK), torch.split(text_L, CHUNK), strict=True)
    return torch.cat(
        [
            model.logits(states).log_softmax(-1).gather(-1, text[:, None])[:, 0]
            for states, text in pieces
        ]
    )
