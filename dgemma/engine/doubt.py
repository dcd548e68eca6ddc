"""Per-token surprisal of a text on a canvas: an edit opens the positions that score highest.

Two measures, each the better at its task (docs/fill-and-edit.md has the numbers). With an
instruction in the prompt: how surprising the token is, to the causal mode and to a canvas from
which every other token is left out. Without one: how clearly the canvas as it is prefers another
token, the bias to copy what stands there taken away.

T positions of a pass, N tokens in question, V vocabulary.
"""

from collections.abc import Sequence
from math import log
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from dgemma.diffusion.canvas import Noise
from dgemma.engine.trials import SharedPrefix
from dgemma.model.forward_batch import ForwardBatch, Segment

if TYPE_CHECKING:
    from dgemma.model.gemma import Gemma

CLEAN_SHARE = 0.95  # of a canvas's tokens that are taken to be right when the copy bias is removed
READ = 64  # positions whose logits are held at once
HALVES = 2


def surprise(shared: SharedPrefix, tokens: Sequence[int], count: int, seed: int) -> list[float]:
    """Nats of surprise at the first `count` tokens of a canvas, both modes together."""
    causal = [-p for p in shared.score([tokens[:count]])[0].logprobs]
    left_out = _left_out(shared, tokens, count, seed)
    return [a + b for a, b in zip(causal, left_out, strict=True)]


@torch.inference_mode()
def _left_out(shared: SharedPrefix, tokens: Sequence[int], count: int, seed: int) -> list[float]:
    """Surprise at each token where it and every other one are noise, in two canvases at once."""
    model, device = shared.engine.model, shared.engine.device
    clean_L = torch.tensor(tokens, device=device)
    noise = Noise(seed=seed).block(0, 0, len(tokens), model.config.vocab_size, device)
    place_L = torch.arange(len(tokens), device=device)
    canvases, asked = [], []
    for half in range(HALVES):
        is_out_L = (place_L % HALVES == half) & (place_L < count)
        canvases.append(torch.where(is_out_L, noise.tokens_NL[0], clean_L))
        asked.append(is_out_L)
    spans = [Segment(shared.cache.fork(len(tokens)), len(tokens), commit=False) for _ in canvases]
    hidden_TD = _denoised(shared, torch.cat(canvases), ForwardBatch(spans))
    is_asked_T = torch.cat(asked)
    held_T = clean_L.repeat(HALVES)[is_asked_T]
    surprise_N = -_logprobs(model, hidden_TD[is_asked_T], held_T, 0.0)[0]
    place_N = place_L.repeat(HALVES)[is_asked_T]
    return surprise_N[place_N.argsort()].tolist()


@torch.inference_mode()
def preference(shared: SharedPrefix, tokens: Sequence[int], count: int) -> list[float]:
    """By how many nats the canvas prefers another token, at its first `count` positions."""
    model = shared.engine.model
    clean_L = torch.tensor(tokens, device=shared.engine.device)
    span = Segment(shared.cache.fork(len(tokens)), len(tokens), commit=False)
    hidden_TD = _denoised(shared, clean_L, ForwardBatch([span]))
    held_N, best_N = _logprobs(
        model, hidden_TD[:count], clean_L[:count], copy_bias(model.config.vocab_size)
    )
    return (best_N - held_N).tolist()


def _denoised(shared: SharedPrefix, tokens_T: Tensor, batch: ForwardBatch) -> Tensor:
    """Hidden states of canvases without self-conditioning."""
    backend = shared.engine.backend
    return backend.forward(backend.model.enter(tokens_T, None), batch)


def copy_bias(vocab: int) -> float:
    """What a token gains in logits by standing on the canvas already.

    A canvas model's answer is p(clean | canvas), the position's own token included. With `a` the
    share of tokens that are clean, the answer without it has that token's logit lowered by
    log(1 + vocab * a / (1 - a)) (arXiv:2605.22765).
    """
    return log(1 + vocab * CLEAN_SHARE / (1 - CLEAN_SHARE))


def _logprobs(
    model: "Gemma", hidden_TD: Tensor, held_T: Tensor, bias: float
) -> tuple[Tensor, Tensor]:
    """Log-probability of the held and of the likeliest token, the held one's logit lowered."""
    held, best = [], []
    for states_TD, token_T in zip(
        torch.split(hidden_TD, READ), torch.split(held_T, READ), strict=True
    ):
        logits_TV = model.logits(states_TD)
        lowered_T1 = torch.full_like(token_T, -bias, dtype=logits_TV.dtype)[:, None]
        logprob_TV = logits_TV.scatter_add(-1, token_T[:, None], lowered_T1).log_softmax(-1)
        held.append(logprob_TV.gather(-1, token_T[:, None])[:, 0])
        best.append(logprob_TV.amax(-1))
    return torch.cat(held), torch.cat(best)
