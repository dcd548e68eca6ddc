"""Probabilities of a few given answers, in one pass after the prompt.

Two ways to ask. `causal` reads each label token by token, its end included: the exact probability
of the AR mode. `canvas` reads what a single step of the denoiser says of a canvas that is noise
where the label would stand and ended behind it: one reading serves all labels of a length, and a
label's tokens count as if they were independent.

V vocabulary.
"""

from collections.abc import Sequence
from typing import Literal

import torch

from dgemma.backends.base import Backend, prefill
from dgemma.backends.reference import embed_canvases
from dgemma.diffusion.canvas import Noise, Pins
from dgemma.diffusion.denoise import Row, start
from dgemma.diffusion.sampler import Sampler
from dgemma.engine.score import CHUNK, score
from dgemma.errors import UsageError
from dgemma.model.forward_batch import ForwardBatch, Segment
from dgemma.model.gemma import Gemma
from dgemma.model.kv_cache import Capacity, KVCache

Reading = Literal["causal", "canvas"]
READS = 4  # canvases of different noise read for labels of one length
WIDTH = 16  # of a canvas that is read; wider only for longer labels


def choose(
    backend: Backend,
    prompt: Sequence[int],
    labels: Sequence[Sequence[int]],
    end: int,
    reading: Reading,
) -> list[float]:
    """The probability of each label, given that the answer is one of them."""
    if not labels or not all(labels):
        raise UsageError("there are no labels, or an empty one; give texts to choose from")
    if len(set(map(tuple, labels))) < len(labels):
        raise UsageError("a label is given twice; give each once")
    if reading == "causal":
        totals = [s.total for s in score(backend, prompt, [[*label, end] for label in labels])]
        return torch.tensor(totals, dtype=torch.float64).softmax(-1).tolist()
    if reading != "canvas":
        raise UsageError(f"reading {reading!r} is not known; use causal or canvas")
    return _read(backend, prompt, labels, end)


@torch.inference_mode()
def _read(
    backend: Backend, prompt: Sequence[int], labels: Sequence[Sequence[int]], end: int
) -> list[float]:
    model = backend.model
    lengths = sorted({len(label) for label in labels})
    _check(model, lengths[-1])
    weight = model.embed_tokens.weight
    room = Capacity(tokens=len(prompt), segment=CHUNK)
    cache = KVCache(model.config, room, weight.dtype, weight.device)
    prefill(backend, cache, torch.tensor(prompt, device=weight.device), CHUNK)
    rows = [_row(model, length, end, read) for length in lengths for read in range(READS)]
    spans = [Segment(cache.fork(r.canvas.length), r.canvas.length, commit=False) for r in rows]
    hidden_TD = backend.forward(embed_canvases(model, rows), ForwardBatch(spans))
    parts = torch.split(hidden_TD, [row.canvas.length for row in rows])
    totals = torch.empty(READS, len(labels), dtype=torch.float64)
    for number, length in enumerate(lengths):
        for read in range(READS):
            hidden_LD = parts[number * READS + read][:length]
            logprob_LV = model.logits(hidden_LD).log_softmax(-1)
            for index, label in enumerate(labels):
                if len(label) == length:
                    at_L = torch.tensor(label, device=weight.device)[:, None]
                    totals[read, index] = logprob_LV.gather(-1, at_L).sum()
    return totals.softmax(-1).mean(0).tolist()


def _row(model: Gemma, length: int, end: int, read: int) -> Row:
    """A canvas of noise for a label of so many tokens, ended behind it."""
    width = min(max(WIDTH, length + 1), model.config.canvas_length)
    device = model.embed_tokens.weight.device
    noise = Noise(choice=read).block(0, 0, width, model.config.vocab_size, device)
    places = tuple(range(length, width))
    return start(Sampler(), noise, Pins(places, (end,) * len(places)))


def _check(model: Gemma, longest: int) -> None:
    if not model.config.can_denoise:
        raise UsageError("this checkpoint has no denoiser, so no canvas can be read; use causal")
    if longest > model.config.canvas_length:
        raise UsageError(
            f"a label has {longest} tokens; a canvas of this model holds "
            f"{model.config.canvas_length}; use causal"
        )
