"""Denoising steps of one row on memory that never moves.

Everything that changes from step to step or from block to block is read from device memory: tokens,
noise, temperatures, the number of the step, positions, and where the keys lie. One capture serves
all rows, lengths and blocks. The host launches a step, waits for it, and reads two flags: whether
the canvas has settled, and whether its likely tokens are few enough for the sparse soft embedding.

A canvas's first step may be taken in the pass that commits the block before it.

Without kernels the same steps are taken by definition, which is how this is tested.

L canvas length, D width, V vocabulary.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING
from weakref import ref

import torch
from torch import Tensor

from dgemma.cache import KVCache, Pass, Span
from dgemma.canvas import Canvas
from dgemma.denoise import Row
from dgemma.graph.capture import Graphs, Pool
from dgemma.graph.entrance import Entrance
from dgemma.graph.memory import Memory, Shape
from dgemma.graph.moving import move
from dgemma.graph.reading import Reading, dense_mean, read, read_by_kernels, sparse_mean
from dgemma.model import Gemma
from dgemma.ops.dense import scores
from dgemma.ops.fast import has_all
from dgemma.ops.row_stats import Query
from dgemma.stack import ByTable, Places, Stack

if TYPE_CHECKING:
    from dgemma.ops.kernels.sparse import Into

__all__ = ["Memory", "Shape", "Stepper"]

Layout = tuple[tuple[int, int], ...]  # of a cache: where its memory lies


class Stepper:
    """Takes steps with one row at a time. Rows may change at any step; going on is cheapest."""

    def __init__(self, model: Gemma, stack: Stack, shape: Shape, pool: Pool | None = None) -> None:
        self.model, self.stack, self.shape = model, stack, shape
        self.memory, self.entrance = Memory(model, shape), Entrance(model)
        self.context: Pass | None = None  # of the row in memory, if no kernels run
        # The canvas in memory, its row, and how that stood. The row is not kept alive for it.
        self.current: tuple[Canvas, ref[KVCache], int, Layout] | None = None
        self.graphs = Graphs(pool)
        self.readings: dict[str, Reading] = {}  # of each kind of step, the last
        self.raw_LV: Tensor | None = None  # where all kinds of steps leave the head's output

    def takes(self, row: Row) -> bool:
        """Whether this row's steps can be taken here."""
        shape = self.shape
        fits = row.canvas.length == shape.length and row.sampler.max_steps <= shape.steps
        is_plain = row.walker is None and row.sampler.temperature == 1
        return fits and is_plain and row.sampler.rule == shape.rule

    @torch.inference_mode()
    def step(self, row: Row, cache: KVCache) -> Row | None:
        """The row after one more step; None if its keys lie in more places than can be read."""
        if not self._is_current(row, cache):
            context = Pass([Span(cache, self.shape.length, commit=False)])
            if not self._load(row, context):
                return None
        self._run("step", self._step)
        return self._after("step", row, cache, self._flags())

    @torch.inference_mode()
    def first(self, tokens: Sequence[int], row: Row, cache: KVCache) -> Row | None:
        """Commit a block of a canvas's length, and take the first step of the canvas behind it.

        None, and nothing is committed, if the keys lie in more places than can be read.
        """
        length = self.shape.length
        assert len(tokens) == length and row.canvas.num_steps == 0
        context = Pass([Span(cache, length, commit=True), Span(cache, length, commit=False)])
        if not self._load(row, context):
            return None
        self.memory.block_L.copy_(torch.tensor(tokens))
        self._run("first", self._first)
        flags = self._flags()
        context.close()  # last: a pass that failed has committed nothing
        if not self.has_kernels:
            self.context = Pass([Span(cache, length, commit=False)])
        return self._after("first", row, cache, flags)

    def work(self) -> None:
        """All that is captured, once: both kinds of steps, and both kinds of soft embeddings.

        On the memory as it is. By kernels alone, which need no row there.
        """
        self._step()
        self._first()
        reading = self.readings["step"]
        self._sparse(reading)
        self._dense(reading)

    def _after(self, source: str, row: Row, cache: KVCache, flags: tuple[bool, bool]) -> Row:
        """Make the soft embedding, if another step follows, and hand out copies of it all."""
        settled, is_sparse = flags
        num_steps = row.canvas.num_steps + 1
        if not settled and num_steps < row.sampler.max_steps:
            kind = "sparse" if is_sparse else "dense"
            soften = self._sparse if is_sparse else self._dense
            name = kind if source == "step" else f"{kind}_{source}"
            self._run(name, lambda: soften(self.readings[source]))
        own = self.memory.copies()
        # The host knows it already: whoever asks need not wait for the soft embedding.
        own["settled"] = torch.tensor(settled)
        canvas = replace(row.canvas, **own, num_steps=num_steps)
        self.current = (canvas, ref(cache), cache.length, cache.layout)
        return replace(row, canvas=canvas)

    def _is_current(self, row: Row, cache: KVCache) -> bool:
        if self.current is None:
            return False
        canvas, kept, length, layout = self.current
        is_here = canvas is row.canvas and kept() is cache
        is_ready = self.has_kernels or self.context is not None
        return is_here and is_ready and length == cache.length and layout == cache.layout

    def _load(self, row: Row, context: Pass) -> bool:
        places = Places.of(context) if self.has_kernels else None
        if self.has_kernels and places is None:
            return False
        self.current, self.context = None, None if self.has_kernels else context
        self.memory.load(row)
        if places is not None:
            self.memory.place(context, places, self.model.turns(context.positions_T))
        return True

    @property
    def has_kernels(self) -> bool:
        return has_all(self.memory.soft_LD.device)

    def _flags(self) -> tuple[bool, bool]:
        if self.memory.tokens_L.device.type == "cuda":
            torch.cuda.current_stream().synchronize()
        settled, is_sparse = self.memory.seen_2.tolist()
        return settled, is_sparse

    def _run(self, name: str, work: Callable[[], None]) -> None:
        """Do it, by a graph where there is one."""
        if not self.has_kernels:  # a capture would read places that were not written
            work()
            return
        if self.graphs.again(name):
            return
        kept = self.memory.all
        if name.startswith("dense") and self.raw_LV is not None:
            kept.append(self.raw_LV)
        self.graphs.run(name, work, kept)

    def _step(self) -> None:
        """One step, on the memory alone."""
        entered_LD = self.entrance.enter(self.memory, by_kernels=self.has_kernels)
        self._move("step", self._stack(entered_LD))

    def _first(self) -> None:
        """The first step of a canvas, in the pass that commits the block before it."""
        entered_TD = self.entrance.enter_behind(self.memory, by_kernels=self.has_kernels)
        self._move("first", self._stack(entered_TD)[self.shape.length :])

    def _stack(self, entered_TD: Tensor) -> Tensor:
        """All layers, over the canvas alone or a block and the canvas behind it."""
        if not self.has_kernels:
            assert self.context is not None
            return self.model.stack(entered_TD, self.context)
        memory, length = self.memory, self.shape.length
        spans = len(entered_TD) // length
        is_causal = [True, False][-spans:]
        places = Places([length] * spans, is_causal, memory.table_2X6[-spans:])
        turns = memory.turns_of(len(entered_TD))
        return self.stack.run(entered_TD, turns, ByTable(places, self.stack))

    def _move(self, source: str, hidden_LD: Tensor) -> None:
        """What a step makes of the canvas's hidden states."""
        memory = self.memory
        query = Query(heat_T=memory.heat_L, uniform_T=memory.uniform_L, held_T=memory.tokens_L)
        by = read_by_kernels if self.has_kernels else read
        softcap = self.model.config.final_logit_softcapping
        reading = self.readings[source] = by(self._head(hidden_LD), softcap, query)
        move(memory, reading, self.shape.rule)

    def _head(self, hidden_LD: Tensor) -> Tensor:
        if not self.has_kernels:
            return self.model.head(hidden_LD)
        table_VD = self.model.embed_tokens.weight
        if self.raw_LV is None:
            with torch.inference_mode(False):
                self.raw_LV = table_VD.new_empty(len(hidden_LD), len(table_VD))
        return scores(hidden_LD, self.model.embed_tokens.head, self.raw_LV)

    def _dense(self, reading: Reading) -> None:
        model, memory = self.model, self.memory
        if self.has_kernels:
            dense_mean(model.embed_tokens, reading, self._into())
            return
        soft_LD = model.embed_soft(reading.dense())
        own_LD = model.embed(memory.tokens_L)
        # A pinned position is conditioned on its own token, as a converged one would be.
        memory.soft_LD.copy_(torch.where(memory.pinned_L[:, None], own_LD, soft_LD))

    def _sparse(self, reading: Reading) -> None:
        sparse_mean(self.model.embed_tokens, reading, self._into())

    def _into(self) -> "Into":
        from dgemma.ops.kernels.sparse import Into

        memory = self.memory
        scale = self.model.embed_tokens.scale
        return Into(memory.soft_LD, memory.tokens_L, memory.pinned_L, scale)
