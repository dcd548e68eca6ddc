"""The head in 8-bit floats, beside the token table, which stays as it is.

A canvas's scores are bound by arithmetic, and 8-bit products take half the time; a single token's
are bound by the table's bytes, of which there are half. Tokens are looked up, and soft embeddings
made, in the table itself. See docs/decisions/027-head.md for what it costs in answers.

V vocabulary, D width.
"""

import torch
from torch import Tensor

from dgemma.model import Gemma, TokenTable
from dgemma.ops.dense import PIECE, Weight, scores
from dgemma.ops.fp8 import E4M3, quantize


class Fp8HeadTable(TokenTable):
    """A token table whose scores are products in e4m3; a checkpoint of it would not hold these."""

    head_8: Tensor
    head_factor: Tensor

    @torch.no_grad()
    def __init__(self, source: TokenTable) -> None:
        with torch.device("meta"):
            super().__init__(*source.weight.shape)
        self.weight = source.weight
        numbers_VD = torch.empty_like(source.weight, dtype=E4M3)
        factor_V = source.weight.new_empty(len(source.weight), dtype=torch.float32)
        # In pieces: on the way to 8 bits numbers take 32.
        pieces = (torch.split(part, PIECE) for part in (source.weight, numbers_VD, factor_V))
        for weight, numbers, factor in zip(*pieces, strict=True):
            found = quantize(weight)
            numbers.copy_(found.numbers)
            factor.copy_(found.factor)
        self.register_buffer("head_8", numbers_VD, persistent=False)
        self.register_buffer("head_factor", factor_V, persistent=False)

    @property
    def head(self) -> Weight:
        return Weight(self.head_8, self.head_factor)

    def score(self, hidden_TD: Tensor) -> Tensor:
        return scores(hidden_TD, self.head)


def shrink_head(model: Gemma) -> Gemma:
    """Give a model a head in 8 bits, in place; it can then only be run."""
    model.requires_grad_(False)
    model.embed_tokens = Fp8HeadTable(model.embed_tokens)
    return model
