"""Eager passes over segments of any length: scoring, self-tests, and whoever brings embeddings.

T tokens of the caller, P of them padded to segments of one stride, D width.
"""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dgemma.backends.cuda.fused import Batch
from dgemma.backends.cuda.kernels.attention import CANVAS, CAUSAL, MIXED, Segments
from dgemma.backends.cuda.passes import PassModel
from dgemma.model.forward_batch import ForwardBatch
from dgemma.model.rope import rope_cos_sin


def run_segments(
    passes: PassModel, embeds_TD: Tensor, batch: ForwardBatch, table_IX6: NDArray[np.int64]
) -> Tensor:
    """Run the fused stack on a batch; segments shorter than the longest are padded."""
    device = embeds_TD.device
    counts = [segment.count for segment in batch.segments]
    stride = max(counts)
    index_P, back_T = _padding(counts, stride, device)
    is_causal = [int(segment.commit) for segment in batch.segments]
    kind = CAUSAL if all(is_causal) else MIXED if any(is_causal) else CANVAS
    segments = Segments(
        entry_I=torch.arange(len(counts), dtype=torch.int32, device=device),
        count_E=torch.tensor(counts, device=device),
        causal_E=torch.tensor(is_causal, dtype=torch.int32, device=device),
        stride=stride,
        kind=kind,
    )
    table_EX6 = torch.from_numpy(table_IX6).to(device)
    cos_sin = rope_cos_sin(passes.model.config, batch.positions_T)
    if index_P is None:
        return passes.fused.forward(embeds_TD, cos_sin, Batch(segments, table_EX6))
    padded = {k: (c[index_P], s[index_P]) for k, (c, s) in cos_sin.items()}
    hidden_PD = passes.fused.forward(embeds_TD[index_P], padded, Batch(segments, table_EX6))
    return hidden_PD[back_T]


def _padding(
    counts: list[int], stride: int, device: torch.device
) -> tuple[Tensor | None, Tensor | None]:
    """Which token each padded row repeats, and where each token is; None where all are equal."""
    if all(count == stride for count in counts):
        return None, None
    starts = np.cumsum([0, *counts[:-1]])
    pairs = list(zip(starts, counts, strict=True))
    index = np.concatenate([start + np.minimum(np.arange(stride), n - 1) for start, n in pairs])
    back = np.concatenate([i * stride + np.arange(n) for i, (_, n) in enumerate(pairs)])
    return torch.from_numpy(index).to(device), torch.from_numpy(back).to(device)
