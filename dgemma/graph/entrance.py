"""How canvases enter a captured pass: by few kernels where there are any, else as defined.

Also fetched there: the heat of the step at hand, and the numbers that decide its draws.

L canvas length, D width.
"""

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from dgemma.graph.memory import Memory
from dgemma.model import Gemma, SelfConditioning
from dgemma.ops.dense import Weight, gated_product, product
from dgemma.stack import join_weights

if TYPE_CHECKING:
    from dgemma.ops.kernels.enter import Table


class Entrance:
    """Of a model's canvases; by kernels if its self-conditioning has plain weights."""

    def __init__(self, model: Gemma) -> None:
        self.model = model
        self.gate_up: Weight | None = None  # joined when it is first wanted

    def enter(self, memory: Memory, *, by_kernels: bool) -> Tensor:
        """A canvas that is conditioned on its last step."""
        part = self.model.self_conditioning
        assert part is not None, "an autoregressive model has no canvas mode"
        if not by_kernels or not _is_plain(part):
            fetch(memory)
            return self.model.enter(memory.tokens_L, memory.soft_LD)
        from dgemma.ops.kernels import enter

        if self.gate_up is None:
            self.gate_up = _joined(part)
        norm = (part.pre_norm.weight, part.pre_norm.eps)
        x_LD, soft_LD = enter.conditioned(
            memory.tokens_L, memory.soft_LD, self._table(), norm, memory.numbers()
        )
        hidden = gated_product(soft_LD, self.gate_up, x_LD.dtype)
        told_LD = product(hidden, Weight(part.down_proj.weight), x_LD.dtype)
        return enter.add_and_norm(x_LD, told_LD, part.eps)

    def enter_behind(self, memory: Memory, *, by_kernels: bool) -> Tensor:
        """A block that is committed, and a fresh canvas behind it."""
        model = self.model
        assert model.self_conditioning is not None, "an autoregressive model has no canvas mode"
        if not by_kernels:
            fetch(memory)
            entered = [model.embed(memory.block_L), model.enter(memory.tokens_L, None)]
            return torch.cat(entered)
        from dgemma.ops.kernels import enter

        eps = model.self_conditioning.eps
        return enter.unconditioned(
            memory.block_L, memory.tokens_L, self._table(), eps, memory.numbers()
        )

    def _table(self) -> "Table":
        from dgemma.ops.kernels.enter import Table

        table = self.model.embed_tokens
        return Table(table.weight, table.scale)


def fetch(memory: Memory) -> None:
    """The numbers of the step at hand; row 0 of the noise was the fresh canvas's."""
    memory.heat_L.copy_(memory.heat_N.index_select(0, memory.index_1).expand_as(memory.heat_L))
    memory.uniform_L.copy_(memory.uniform_NL.index_select(0, memory.index_1 + 1)[0])


def _is_plain(part: SelfConditioning) -> bool:
    return all(type(p) is nn.Linear for p in (part.gate_proj, part.up_proj, part.down_proj))


@torch.inference_mode(False)
def _joined(part: SelfConditioning) -> Weight:
    """Both weights in one; where they were joined before, for another capture, as they lie."""
    return join_weights([part.gate_proj, part.up_proj])
