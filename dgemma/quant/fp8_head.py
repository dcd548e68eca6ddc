"""The head in 8-bit floats, beside the token table, which stays as it is.

A canvas's scores are bound by arithmetic, and 8-bit products take half the time; a single token's
are bound by the table's bytes, of which there are half. Tokens are looked up in the table itself,
and soft embeddings made of it, unless the same 8-bit numbers are there for these too, turned. See
docs/decisions/027-head.md and 028-soft.md for what it costs in answers.

V vocabulary, D width.
"""

import torch
from torch import Tensor

from dgemma.model.gemma import Gemma, TokenTable
from dgemma.quant.fp8 import E4M3, PIECE, Weight, fp8_logits, quantize
from dgemma.quant.soft_embed import soft_mean_reference as soft_mean
from dgemma.quant.soft_table import SoftTable, can_turn


class Fp8HeadTable(TokenTable):
    """A token table whose scores are products in e4m3; a checkpoint of it would not hold these.

    `soft`: so are its means, where the vocabulary's size lets them.
    """

    head_8: Tensor
    head_factor: Tensor
    soft_8: Tensor | None
    soft_beside: Tensor | None
    soft_unit: Tensor | None

    @torch.no_grad()
    def __init__(self, source: TokenTable, *, soft: bool = False) -> None:
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
        has_soft = soft and can_turn(len(numbers_VD))
        self._keep_soft(SoftTable.of(numbers_VD, factor_V) if has_soft else None)

    def _keep_soft(self, table: SoftTable | None) -> None:
        parts = (None, None, None) if table is None else table[:3]
        for name, part in zip(("soft_8", "soft_beside", "soft_unit"), parts, strict=True):
            self.register_buffer(name, part, persistent=False)

    @property
    def soft(self) -> SoftTable | None:
        if self.soft_8 is None or self.soft_beside is None or self.soft_unit is None:
            return None
        return SoftTable(self.soft_8, self.soft_beside, self.soft_unit)

    @property
    def head(self) -> Weight:
        return Weight(self.head_8, self.head_factor)

    def score(self, hidden_TD: Tensor) -> Tensor:
        return fp8_logits(hidden_TD, self.head)

    def mean(self, p_TV: Tensor) -> Tensor:
        if self.soft is None:
            return super().mean(p_TV)
        return soft_mean(p_TV, self.weight, self.soft) * self.scale


def shrink_head(model: Gemma, *, soft: bool = False) -> Gemma:
    """Give a model a head in 8 bits, in place; it can then only be run.

    `soft`: soft embeddings too, where the vocabulary's size lets them.
    """
    model.requires_grad_(False)
    model.embed_tokens = Fp8HeadTable(model.embed_tokens, soft=soft)
    return model
