"""An fp8 LM head and fp8 soft embeddings, in addition to the 16-bit token table.

The logits of a canvas are compute-bound, and fp8 GEMMs take half the time; those of a single token
are bound by the table's bytes, of which fp8 has half. Tokens are still looked up in the 16-bit
table. Soft embeddings use a transposed copy of the fp8 table, if there is one:

    mean = p_top w_top + sum over splits of  s_split (q_split @ v_split)

The most likely token's vector w_top is not quantized. All other probabilities, times the scales of
their vectors' values v, are quantized to e4m3 (q), in each split of the vocabulary relative to the
largest in the chunks that overlap it: these are known before any probability is read. Small
probabilities keep their precision unless a value 5e5 times larger is in the same split. See
docs/decisions/026-weight-formats.md for the effect on answers.

T positions, V vocabulary, D width, S splits, C chunks.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from dgemma.model.gemma import Gemma, TokenTable
from dgemma.quant.fp8 import E4M3, FP8_MAX, VOCAB_PIECE, LinearWeight, fp8_logits, quantize

# Tokens of a split. At the released width 36 splits of 22 programs each fill the 132 SMs of an H100
# or H200 to the end; and a sum of so few products bears the MMA's limited fp8 accumulation.
VOCAB_SPLIT = 57 * 128
ALIGNMENT = 16  # bytes; of a row of the transposed table
CHUNK = 2048  # tokens with one known maximum, as the logit statistics leave them
MIN_PEAK = 1e-30  # smallest peak of a split, for splits without probability


class SoftTable(NamedTuple):
    """A vocabulary's embeddings in e4m3, transposed for sums over the vocabulary."""

    values_DV: Tensor
    rel_scale_V: Tensor  # scale per token, relative to the largest, which is FP8_MAX
    unit_scale_1: Tensor  # scale that a relative scale of 1 stands for
    split: int = VOCAB_SPLIT

    @classmethod
    def transpose(cls, values_VD: Tensor, scale_V: Tensor) -> "SoftTable":
        """Copy the LM head's values transposed: MMAs sum along contiguous memory."""
        values_DV = values_VD.view(torch.uint8).t().contiguous().view(E4M3)
        unit_scale_1 = scale_V.max()[None] / FP8_MAX
        return cls(values_DV, scale_V / unit_scale_1, unit_scale_1)


def can_transpose(vocab: int) -> bool:
    """True if a vocabulary of this size has the alignment that the kernels need."""
    return vocab % ALIGNMENT == 0


def soft_embed_reference(p_TV: Tensor, weight_VD: Tensor, table: SoftTable) -> Tensor:
    """Define the fp8 soft embedding, in float32."""
    top_p_T, top_T = p_TV.float().max(-1)
    rest_TV = p_TV.float().scatter(-1, top_T[:, None], 0.0)
    mean_TD = top_p_T[:, None] * weight_VD[top_T].float()
    splits = (torch.split(x, table.split, dim=-1) for x in (rest_TV, *table[:2]))
    peaks = _split_peaks(rest_TV, table.split)
    for p_TW, values_DW, rel_scale_W, peak_T1 in zip(*splits, peaks, strict=True):
        quantized_TW = (p_TW / peak_T1 * rel_scale_W).to(E4M3).float()
        mean_TD += peak_T1 * table.unit_scale_1 * (quantized_TW @ values_DW.float().t())
    return mean_TD.to(weight_VD.dtype)


def _split_peaks(rest_TV: Tensor, split: int) -> Iterator[Tensor]:
    """Return for each split the largest probability of all overlapping chunks, [T, 1]."""
    peak_TC, vocab = chunk_peaks(rest_TV), rest_TV.shape[1]
    for begin in range(0, vocab, split):
        last = min(begin + split, vocab) - 1
        near_TC = peak_TC[:, begin // CHUNK : last // CHUNK + 1]
        yield near_TC.amax(-1, keepdim=True).clamp(min=MIN_PEAK)


def chunk_peaks(p_TV: Tensor) -> Tensor:
    """Return the largest probability in each chunk of the vocabulary, [T, C]."""
    padded_TV = F.pad(p_TV, (0, -p_TV.shape[1] % CHUNK)).contiguous()
    return padded_TV.view(len(p_TV), -1, CHUNK).amax(-1)


class Fp8HeadTable(TokenTable):
    """A token table with an added fp8 LM head, which checkpoints do not contain.

    `soft`: also with fp8 soft embeddings, if the vocabulary's size allows it.
    """

    head_values: Tensor
    head_scale: Tensor
    soft_values: Tensor | None
    soft_rel_scale: Tensor | None
    soft_unit_scale: Tensor | None

    @torch.no_grad()
    def __init__(self, source: TokenTable, *, soft: bool = False) -> None:
        with torch.device("meta"):
            super().__init__(*source.weight.shape)
        self.weight = source.weight
        values_VD = torch.empty_like(source.weight, dtype=E4M3)
        scale_V = source.weight.new_empty(len(source.weight), dtype=torch.float32)
        # In pieces: quantization takes float32.
        pieces = (torch.split(x, VOCAB_PIECE) for x in (source.weight, values_VD, scale_V))
        for weight, values, scale in zip(*pieces, strict=True):
            quantized = quantize(weight)
            values.copy_(quantized.values)
            scale.copy_(quantized.scale)
        self.register_buffer("head_values", values_VD, persistent=False)
        self.register_buffer("head_scale", scale_V, persistent=False)
        has_soft = soft and can_transpose(len(values_VD))
        table = SoftTable.transpose(values_VD, scale_V)[:3] if has_soft else (None, None, None)
        for name, tensor in zip(("values", "rel_scale", "unit_scale"), table, strict=True):
            self.register_buffer(f"soft_{name}", tensor, persistent=False)

    @property
    def soft(self) -> SoftTable | None:
        if self.soft_values is None or self.soft_rel_scale is None or self.soft_unit_scale is None:
            return None
        return SoftTable(self.soft_values, self.soft_rel_scale, self.soft_unit_scale)

    @property
    def head(self) -> LinearWeight:
        return LinearWeight(self.head_values, self.head_scale)

    def raw_logits(self, hidden_TD: Tensor) -> Tensor:
        return fp8_logits(hidden_TD, self.head)

    def soft_embed(self, p_TV: Tensor) -> Tensor:
        if self.soft is None:
            return super().soft_embed(p_TV)
        return soft_embed_reference(p_TV, self.weight, self.soft) * self.scale


def quantize_head(model: Gemma, *, soft: bool = False) -> Gemma:
    """Replace a model's LM head by an fp8 one, in place, for inference only.

    `soft`: also with fp8 soft embeddings, if the vocabulary's size allows it.
    """
    model.requires_grad_(False)
    model.embed_tokens = Fp8HeadTable(model.embed_tokens, soft=soft)
    return model
