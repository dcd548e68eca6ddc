"""Commits on memory that never moves: many tokens, or one after the other (the AR mode).

The host writes the tokens, their first position and where the keys lie into one piece of memory;
the device commits them and, for single tokens, leaves the logits of what comes next. Fewer tokens
than a commit is for are followed by others, whose keys lie behind the row's end and are forgotten:
nothing that is kept sees them.

T tokens of a commit, D width, V vocabulary, X layers, F pairs that turn, of all kinds of layers.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from dgemma.cache import KVCache, Pass, Span
from dgemma.graph.ahead import Ahead, Numbers
from dgemma.graph.capture import Graphs, Pool
from dgemma.model import Gemma, Turns
from dgemma.ops.dense import head_logits
from dgemma.ops.fast import has_all
from dgemma.ops.rope import frequencies_by_kind
from dgemma.stack import ByTable, Places, Stack


class Committer:
    """Commits up to so many tokens at a time, of any row."""

    @torch.inference_mode(False)
    def __init__(self, model: Gemma, stack: Stack, count: int, pool: Pool | None = None) -> None:
        self.model, self.stack, self.count = model, stack, count
        self.device = model.embed_tokens.weight.device
        # The places come first: kernels like the addresses they are given to be even.
        self.end, is_cuda = 6 * model.config.num_hidden_layers, self.device.type == "cuda"
        size = self.end + 1 + count
        self.given = torch.zeros(size, dtype=torch.long, device=self.device)
        self.offsets_T = torch.arange(count, device=self.device)
        self.staged = torch.zeros(size, dtype=torch.long, pin_memory=is_cuda)
        self.copied = torch.cuda.Event() if is_cuda else None  # type: ignore[no-untyped-call]
        self.kept = [self.given]
        self.ahead = Ahead(count)
        self.graphs = Graphs(pool)

    @torch.inference_mode()
    def commit(self, tokens: Sequence[int], cache: KVCache, *, captured: bool = True) -> bool:
        """Commit tokens; False, and nothing is, if the keys lie in more places than can be read.

        Not captured, the same work is launched piece by piece.
        """
        assert 0 < len(tokens) <= self.count
        if not has_all(self.device):
            context = Pass([Span(cache, len(tokens), commit=True)])
            self._read(self.model.encode(self.given.new_tensor(tokens), context))
            context.close()
            return True
        numbers = self.ahead.take(cache)
        if numbers is None:
            return False
        # The same tokens again fill it up: they are spread over the experts as a prompt is.
        self._give(numbers, (list(tokens) * -(-self.count // len(tokens)))[: self.count])
        if captured:
            self.graphs.run("commit", self.work, self.kept)
        else:
            self.work()
        cache.length += len(tokens)
        self.ahead.prepare(cache)
        return True

    def _give(self, numbers: Numbers, tokens: list[int]) -> None:
        if self.copied is not None:
            self.copied.synchronize()  # what was staged last has been read
        staged, behind = self.staged.numpy(), len(numbers)
        staged[:behind], staged[behind:] = numbers, tokens
        self.given.copy_(self.staged, non_blocking=True)
        if self.copied is not None:
            self.copied.record()

    def work(self) -> None:
        """What is captured: the commit of what was given last, on the memory alone."""
        table, start_1, tokens_T = self._parts()
        attend = ByTable(Places([self.count], [True], table.view(1, -1, 6)), self.stack)
        x_TD, turns, normed_TD = self.enter(start_1, tokens_T)
        self._read(self.stack.run(x_TD, turns, attend, normed_TD))

    def enter(self, start_1: Tensor, tokens_T: Tensor) -> tuple[Tensor, Turns, Tensor | None]:
        """Vectors, turns, and the vectors as the first layer reads them, if they are at hand."""
        model = self.model
        return model.embed(tokens_T), model.turns(start_1 + self.offsets_T), None

    def _parts(self) -> tuple[Tensor, Tensor, Tensor]:
        """Places, first position and tokens, in the memory that was given."""
        places, start_1, tokens_T = torch.split(self.given, [self.end, 1, self.count])
        return places, start_1, tokens_T

    def _read(self, hidden_TD: Tensor) -> None:
        """Nothing of a block is read but its keys."""


class Teller(Committer):
    """Commits single tokens, and tells what comes next."""

    @torch.inference_mode(False)
    def __init__(self, model: Gemma, stack: Stack, pool: Pool | None = None) -> None:
        super().__init__(model, stack, 1, pool)
        vocab = model.config.vocab_size
        self.logits_1V = torch.zeros(1, vocab, dtype=torch.float32, device=self.device)
        self.kept = [*self.kept, self.logits_1V]
        self.pairs = frequencies_by_kind(model.config, self.device)
        self.frequency_F = torch.cat(list(self.pairs.values()))

    def tell(self, token: int, cache: KVCache) -> Tensor | None:
        """Commit a token; the logits behind it, [V], until the next call.

        None, and nothing is committed, if the row's keys lie in more places than can be read.
        """
        return self.logits_1V[0] if self.commit([token], cache) else None

    def enter(self, start_1: Tensor, tokens_T: Tensor) -> tuple[Tensor, Turns, Tensor]:
        from dgemma.ops.kernels import enter_1
        from dgemma.ops.kernels.enter import Table

        tokens, stack = self.model.embed_tokens, self.stack
        table, norm = Table(tokens.weight, tokens.scale), (stack.first_D, stack.eps)
        x_1D, normed_1D, *turns = enter_1.enter(tokens_T, start_1, table, norm, self.frequency_F)
        sizes = [len(pairs) for pairs in self.pairs.values()]
        cos, sin = (torch.split(part_F[None], sizes, dim=1) for part_F in turns)
        return x_1D, dict(zip(self.pairs, zip(cos, sin, strict=True), strict=True)), normed_1D

    def _read(self, hidden_TD: Tensor) -> None:
        if not has_all(self.device):
            self.logits_1V.copy_(self.model.logits(hidden_TD))
            return
        weight, cap = self.model.embed_tokens.head, self.model.config.final_logit_softcapping
        head_logits(hidden_TD, weight, cap, self.logits_1V)
