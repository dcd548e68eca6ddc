"""A short check of soft embeddings in 8 bits, beside their definition; see `check.py`.

What fails here takes no family of kernels with it: soft embeddings are then made of the token table
itself, which is always there.

L positions, V vocabulary, D width.
"""

import logging

import torch
from torch import Tensor

from dgemma.graph.reading import dense_mean_8, read_by_kernels
from dgemma.model import Gemma, TokenTable
from dgemma.ops.fast import switched
from dgemma.ops.row_stats import Query
from dgemma.ops.soft import soft_mean_reference

ROWS = 64
NEAR = 0.02  # of a position's mean vector, relative
KINDS = 4  # of distributions: from nearly even to nearly decided

logger = logging.getLogger("dgemma")


@torch.inference_mode()
def soft_off(model: Gemma) -> str:
    """What is wrong with soft embeddings in 8 bits, by some positions; nothing if nothing is."""
    table, cap = model.embed_tokens, model.config.final_logit_softcapping
    if table.soft is None:
        return ""
    raw_LV, query = _drawn(table, min(ROWS, model.config.canvas_length))
    with switched({"row_stats"}):
        got_LD, again_LD = _by_kernels(table, raw_LV, cap, query)
    p_LV = exactly(raw_LV, cap, query)
    want_LD = soft_mean_reference(p_LV, table.weight, table.soft).float() * table.scale
    for name, found_LD in (("of scores", got_LD), ("of probabilities", again_LD)):
        off_L = (found_LD.float() - want_LD).norm(dim=-1) / want_LD.norm(dim=-1)
        off = float(off_L.max()) if bool(off_L.isfinite().all()) else float("inf")
        logger.debug("soft embeddings in 8 bits, %s: off by %.2g at worst", name, off)
        if off > NEAR:
            return f"wrong: those made {name}, by {off:.2g} at worst"
    return ""


def exactly(raw_LV: Tensor, cap: float | None, query: Query) -> Tensor:
    """The probabilities that the head's output stands for, in float32."""
    logits_LV = raw_LV.float() if cap is None else cap * torch.tanh(raw_LV.float() / cap)
    return (logits_LV / query.heat_T[:, None]).softmax(-1)


def _by_kernels(
    table: TokenTable, raw_LV: Tensor, cap: float | None, query: Query
) -> tuple[Tensor, Tensor]:
    """As a captured step makes them, and as other steps do, of probabilities that are there."""
    from dgemma.ops.kernels.sparse import Into

    reading = read_by_kernels(raw_LV.clone(), cap, query)
    soft_LD = table.weight.new_empty(len(raw_LV), table.weight.shape[1])
    no_pins_L = torch.zeros_like(query.held_T).bool()
    dense_mean_8(table, reading, Into(soft_LD, query.held_T, no_pins_L, table.scale))
    return soft_LD, table.mean(reading.dense())


def _drawn(table: TokenTable, length: int) -> tuple[Tensor, Query]:
    """Scores of every kind; those of the last tokens count as much as any."""
    device, vocab = table.weight.device, len(table.weight)
    generator = torch.Generator(device).manual_seed(0)
    rows_L = torch.arange(length, device=device)
    raw_LV = torch.randn(length, vocab, generator=generator, device=device, dtype=torch.float32)
    raw_LV *= (1 + 2 * (rows_L % KINDS))[:, None]
    query = Query(
        heat_T=0.4 + 0.4 * rows_L / length,
        uniform_T=torch.full((length,), 0.5, dtype=torch.float64, device=device),
        held_T=rows_L % vocab,
    )
    return raw_LV.to(table.weight.dtype), query
