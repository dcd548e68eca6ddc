"""How likely texts are after a prompt: the prompt is encoded once, then all texts in one pass.

T tokens of the pass, V vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dgemma.cache import KVCache, Pass, Room, Span
from dgemma.denoise import commit
from dgemma.errors import PromptTooLong, UsageError
from dgemma.model import Gemma

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
def score(model: Gemma, prompt: Sequence[int], texts: Sequence[Sequence[int]]) -> list[Score]:
    """Score texts that all go on from the same prompt: it is encoded once and shared."""
    _check(model, len(prompt), texts)
    weight = model.embed_tokens.weight
    room = Room(tokens=len(prompt), span=CHUNK)
    shared = KVCache(model.config, room, weight.dtype, weight.device)
    last_1D = commit(model, shared, torch.tensor(prompt, device=weight.device), CHUNK)
    return score_after(model, Encoded(shared, last_1D), texts)


@torch.inference_mode()
def score_after(model: Gemma, prompt: Encoded, texts: Sequence[Sequence[int]]) -> list[Score]:
    """Score texts behind a prompt that is encoded already; its cache may not change afterwards."""
    shared, last_1D = prompt.cache, prompt.last_1D
    _check(model, shared.length, texts)
    weight = model.embed_tokens.weight
    # The last token of a text predicts nothing that is asked for, so it is not encoded.
    branches = {i: shared.branch(len(text)) for i, text in enumerate(texts) if len(text) > 1}
    hidden = _encode(model, [(branches[i], texts[i][:-1]) for i in branches])
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


def _encode(model: Gemma, parts: Sequence[tuple[KVCache, Sequence[int]]]) -> list[Tensor]:
    """Hidden states of every text: short ones together in a pass, long ones in pieces."""
    if sum(len(tokens) for _, tokens in parts) <= CHUNK:
        return _encode_together(model, parts) if parts else []
    pieces = [
        [
            _encode_together(model, [(cache, tokens[i : i + CHUNK])])[0]
            for i in range(0, len(tokens), CHUNK)
        ]
        for cache, tokens in parts
    ]
    return [torch.cat(states) for states in pieces]


def _encode_together(model: Gemma, parts: Sequence[tuple[KVCache, Sequence[int]]]) -> list[Tensor]:
    counts = [len(tokens) for _, tokens in parts]
    context = Pass([Span(cache, len(tokens), commit=True) for cache, tokens in parts])
    ids = [token for _, tokens in parts for token in tokens]
    hidden_TD = model.encode(torch.tensor(ids, device=context.positions_T.device), context)
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
