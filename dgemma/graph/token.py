"""One token after the other, the autoregressive mode, on memory that never moves.

The host writes the token, its position and where the keys lie into one piece of memory; the device
commits it and leaves the logits of what comes next.

V vocabulary, X layers.
"""

import torch
from torch import Tensor

from dgemma.cache import KVCache, Pass, Span
from dgemma.graph.capture import Graphs
from dgemma.model import Gemma
from dgemma.ops.fast import is_on
from dgemma.stack import ByTable, Places, Stack


class Teller:
    """Commits single tokens of any row."""

    @torch.inference_mode(False)
    def __init__(self, model: Gemma, stack: Stack) -> None:
        self.model, self.stack = model, stack
        weight, size = model.embed_tokens.weight, 6 * model.config.num_hidden_layers + 2
        self.given = torch.zeros(size, dtype=torch.long, device=weight.device)
        is_cuda = weight.device.type == "cuda"
        self.staged = torch.zeros(size, dtype=torch.long, pin_memory=is_cuda)
        self.copied = torch.cuda.Event() if is_cuda else None  # type: ignore[no-untyped-call]
        vocab = model.config.vocab_size
        self.logits_1V = torch.zeros(1, vocab, dtype=torch.float32, device=weight.device)
        self.graphs = Graphs()

    @torch.inference_mode()
    def tell(self, token: int, cache: KVCache) -> Tensor | None:
        """Commit a token; the logits behind it, [V], until the next call.

        None, and nothing is committed, if the row's keys lie in more places than can be read.
        """
        if not is_on(self.logits_1V):
            context = Pass([Span(cache, 1, commit=True)])
            hidden_1D = self.model.encode(self.given.new_tensor([token]), context)
            self.logits_1V.copy_(self.model.logits(hidden_1D))
            context.close()
            return self.logits_1V[0]
        cache.reserve(1)
        places = cache.places(cache.length, 1)
        if places is None:
            return None
        self._give(token, cache.length, places)
        self.graphs.run("token", self._work, [self.given, self.logits_1V])
        cache.length += 1
        return self.logits_1V[0]

    def _give(self, token: int, position: int, places: list[list[int]]) -> None:
        if self.copied is not None:
            self.copied.synchronize()  # what was staged last has been read
        self.staged.numpy()[:] = [token, position, *(n for row in places for n in row)]
        self.given.copy_(self.staged, non_blocking=True)
        if self.copied is not None:
            self.copied.record()

    def _work(self) -> None:
        model = self.model
        table_1X6 = self.given[2:].view(1, -1, 6)
        turns = model.turns(self.given[1:2])
        attend = ByTable(Places([1], [True], table_1X6), self.stack)
        hidden_1D = self.stack.run(model.embed(self.given[:1]), turns, attend)
        self.logits_1V.copy_(model.logits(hidden_1D))
