"""One forward pass for many requests: some commit tokens, some step a canvas, some do both.

A request that is alone in it is served by a captured pass, where there is one for what it wants.

T tokens of the pass, V vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dgemma.cache import KVCache, Pass, Span
from dgemma.denoise import Row, enter_rows, move_rows
from dgemma.graph.steppers import Fast
from dgemma.model import Gemma


@dataclass(frozen=True, slots=True)
class Work:
    """What one request brings to a pass."""

    cache: KVCache
    tokens: tuple[int, ...] = ()  # to commit behind what is cached
    row: Row | None = None  # a canvas to step, behind those
    wants_logits: bool = False  # of the token after the last one committed


@dataclass(frozen=True, slots=True)
class Outcome:
    row: Row | None
    logits_V: Tensor | None


@torch.inference_mode()
def run(model: Gemma, works: Sequence[Work], fast: Fast | None = None) -> list[Outcome]:
    """Run all works in one pass: commits first, so that a row's canvas sees what it just wrote."""
    if fast is not None and len(works) == 1:
        outcome = _captured(fast, works[0])
        if outcome is not None:
            return [outcome]
    return _run_together(model, works)


def _captured(fast: Fast, work: Work) -> Outcome | None:
    """What a captured pass makes of a request; None, and nothing done, if none serves it."""
    tokens, row, cache = work.tokens, work.row, work.cache
    if row is not None:
        after = fast.first(tokens, row, cache) if tokens else fast.step(row, cache)
        return None if after is None else Outcome(after, None)
    if not work.wants_logits:
        return Outcome(None, None) if fast.commit(tokens, cache) else None
    logits_V = fast.tell(tokens[0], cache) if len(tokens) == 1 else None
    return None if logits_V is None else Outcome(None, logits_V)


def _run_together(model: Gemma, works: Sequence[Work]) -> list[Outcome]:
    committing = [work for work in works if work.tokens]
    rows = [work.row for work in works if work.row is not None]
    spans = [Span(work.cache, len(work.tokens), commit=True) for work in committing]
    spans += [Span(w.cache, w.row.canvas.length, commit=False) for w in works if w.row is not None]
    context = Pass(spans)
    entering = [model.embed(_tokens(committing, model))] if committing else []
    entering += [enter_rows(model, rows)] if rows else []
    hidden_TD = model.stack(torch.cat(entering), context)
    ends = dict(zip(map(id, committing), _ends(committing), strict=True))
    first = sum(len(work.tokens) for work in committing)
    moved = iter(move_rows(model, hidden_TD[first:], rows) if rows else [])
    read = [ends[id(work)] - 1 for work in works if work.wants_logits]
    logits = iter(model.logits(hidden_TD[read]).unbind() if read else ())
    outcomes = [
        Outcome(
            next(moved) if work.row is not None else None,
            next(logits) if work.wants_logits else None,
        )
        for work in works
    ]
    context.close()  # last: a pass that failed has committed nothing
    return outcomes


def _tokens(committing: Sequence[Work], model: Gemma) -> Tensor:
    ids = [token for work in committing for token in work.tokens]
    return torch.tensor(ids, device=model.embed_tokens.weight.device)


def _ends(committing: Sequence[Work]) -> list[int]:
    """Where each committed span ends in the pass."""
    ends, end = [], 0
    for work in committing:
        end += len(work.tokens)
        ends.append(end)
    return ends
