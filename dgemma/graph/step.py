"""Denoising steps of one row on memory that never moves.

Everything that changes from step to step or from block to block is read from device memory: tokens,
noise, temperatures, the number of the step, positions, and where the keys lie. One capture serves
all rows, lengths and blocks. The host launches a step, waits for it, and reads two flags: whether
the canvas has settled, and whether its likely tokens are few enough for the sparse soft embedding.

Without kernels the same steps are taken by definition, which is how this is tested.

N steps, L canvas length, D width, V vocabulary.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from dgemma.cache import KVCache, Pass, Span
from dgemma.canvas import Canvas
from dgemma.denoise import Row
from dgemma.graph.capture import Graphs
from dgemma.model import Gemma
from dgemma.ops.fast import is_on
from dgemma.ops.row_stats import Query, RowStats, row_stats
from dgemma.sampler import Rule, advance
from dgemma.stack import ByTable, Places, Stack

MASS = 1 - 2e-3  # of a position, that the sparse soft embedding must hold; bfloat16 loses as much


@dataclass(frozen=True, slots=True)
class Shape:
    """What a capture is for."""

    length: int
    steps: int
    rule: Rule


class Memory:
    """What a step reads and writes."""

    @torch.inference_mode(False)
    def __init__(self, model: Gemma, shape: Shape) -> None:
        table_VD = model.embed_tokens.weight
        device, length = table_VD.device, shape.length

        def empty(*size: int, dtype: torch.dtype = torch.long) -> Tensor:
            return torch.zeros(size, dtype=dtype, device=device)

        self.tokens_L, self.guess_L, self.positions_L = (empty(length) for _ in range(3))
        self.pinned_L, self.kept_L = (empty(length, dtype=torch.bool) for _ in range(2))
        self.entropy_L = empty(length, dtype=torch.float32)
        self.settled = torch.zeros((), dtype=torch.bool, device=device)
        self.steady_steps = torch.zeros((), dtype=torch.long, device=device)
        self.soft_LD = empty(length, table_VD.shape[1], dtype=table_VD.dtype)
        self.uniform_NL = empty(shape.steps + 1, length, dtype=torch.float64)
        self.noise_NL = empty(shape.steps + 1, length)
        self.heat_N = empty(shape.steps, dtype=torch.float32)
        self.index_1 = empty(1)  # steps taken
        self.table_IX6 = empty(1, model.config.num_hidden_layers, 6)
        self.flags_2 = empty(2, dtype=torch.bool)  # settled; sparse soft embedding will do
        self.seen_2 = torch.zeros(2, dtype=torch.bool, pin_memory=device.type == "cuda")

    def load(self, row: Row, context: Pass, places: Places | None) -> None:
        """Begin with a row as it stands."""
        canvas, sampler = row.canvas, row.sampler
        for name in ("tokens_L", "guess_L", "pinned_L", "kept_L", "entropy_L"):
            getattr(self, name).copy_(getattr(canvas, name))
        self.settled.copy_(canvas.settled)
        self.steady_steps.copy_(canvas.steady_steps)
        if canvas.soft_LD is None:
            self.soft_LD.zero_()  # contributes exactly nothing
        elif canvas.soft_LD is not self.soft_LD:
            self.soft_LD.copy_(canvas.soft_LD)
        count = sampler.max_steps
        self.uniform_NL[: count + 1].copy_(row.noise.uniform_NL)
        self.noise_NL[: count + 1].copy_(row.noise.tokens_NL)
        heats = [sampler.heat(count - n) for n in range(count)]
        self.heat_N[:count].copy_(torch.tensor(heats))
        self.index_1.fill_(canvas.num_steps)
        self.positions_L.copy_(context.positions_T)
        if places is not None:
            self.table_IX6.copy_(places.table_IX6)

    def canvas(self, num_steps: int) -> Canvas:
        """The canvas in this memory, not copied."""
        return Canvas(
            tokens_L=self.tokens_L,
            pinned_L=self.pinned_L,
            kept_L=self.kept_L,
            guess_L=self.guess_L,
            entropy_L=self.entropy_L,
            soft_LD=self.soft_LD,
            settled=self.settled,
            steady_steps=self.steady_steps,
            num_steps=num_steps,
        )

    def keep(self, canvas: Canvas) -> None:
        for name in ("tokens_L", "guess_L", "kept_L", "entropy_L", "settled", "steady_steps"):
            getattr(self, name).copy_(getattr(canvas, name))


class Stepper:
    """Takes steps with one row at a time. Rows may change at any step; going on is cheapest."""

    def __init__(self, model: Gemma, stack: Stack, shape: Shape) -> None:
        self.model, self.stack, self.shape = model, stack, shape
        self.memory = Memory(model, shape)
        self.context: Pass | None = None  # of the row in memory
        # The canvas in memory, its row, and how that stood.
        self.current: tuple[Canvas, KVCache, int, tuple[tuple[int, int], ...]] | None = None
        self.graphs = Graphs()
        self.raw_LV = torch.empty(0)  # the head's output of the last step, or its probabilities
        self.found: tuple[Tensor, ...] = ()  # likely tokens, their probabilities and number
        self.merged: Callable[[], Tensor] | None = None

    def takes(self, row: Row) -> bool:
        """Whether this row's steps can be taken here."""
        shape = self.shape
        fits = row.canvas.length == shape.length and row.sampler.max_steps <= shape.steps
        is_plain = row.walker is None and row.sampler.temperature == 1
        return fits and is_plain and row.sampler.rule == shape.rule

    @torch.inference_mode()
    def step(self, row: Row, cache: KVCache) -> Row | None:
        """The row after one more step; None if its keys lie in more places than can be read.

        Its soft embedding is this stepper's memory, and changes with the next step.
        """
        if not self._is_current(row, cache) and not self._load(row, cache):
            return None
        self._run("step", self._step)
        settled, is_sparse = self._flags()
        num_steps = row.canvas.num_steps + 1
        if not settled and num_steps < row.sampler.max_steps:
            kind = "sparse" if is_sparse else "dense"
            self._run(kind, self._sparse if is_sparse else self._dense)
        held = self.memory.canvas(num_steps)
        names = ("tokens_L", "guess_L", "kept_L", "entropy_L", "settled", "steady_steps")
        own = {name: getattr(held, name).clone() for name in names}
        canvas = replace(row.canvas, **own, soft_LD=held.soft_LD, num_steps=num_steps)
        self.current = (canvas, cache, cache.length, cache.layout)
        return replace(row, canvas=canvas)

    def _is_current(self, row: Row, cache: KVCache) -> bool:
        if self.current is None:
            return False
        canvas, kept, length, layout = self.current
        is_here = canvas is row.canvas and kept is cache
        return is_here and length == cache.length and layout == cache.layout

    def _load(self, row: Row, cache: KVCache) -> bool:
        self.context = Pass([Span(cache, self.shape.length, commit=False)])
        places = None
        if self.has_kernels:
            places = Places.of(self.context)
            if places is None:
                return False
        self.memory.load(row, self.context, places)
        return True

    @property
    def has_kernels(self) -> bool:
        return is_on(self.memory.soft_LD)

    def _flags(self) -> tuple[bool, bool]:
        if self.memory.flags_2.device.type == "cuda":
            torch.cuda.current_stream().synchronize()
            settled, is_sparse = self.memory.seen_2.tolist()
        else:
            settled, is_sparse = self.memory.flags_2.tolist()
        return settled, is_sparse

    def _run(self, name: str, work: Callable[[], None]) -> None:
        """Do it, by a graph where there is one."""
        if not self.has_kernels:
            work()
            return
        kept = list(vars(self.memory).values())
        self.graphs.run(name, work, [*kept, self.raw_LV] if name == "dense" else kept)

    def _step(self) -> None:
        """One step, on the memory alone."""
        memory, model = self.memory, self.model
        entered_LD = model.enter(memory.tokens_L, memory.soft_LD)
        hidden_LD = self._stack(entered_LD)
        heat_L = memory.heat_N.index_select(0, memory.index_1).expand(self.shape.length)
        uniform_L = memory.uniform_NL.index_select(0, memory.index_1 + 1)[0]
        noise_L = memory.noise_NL.index_select(0, memory.index_1 + 1)[0]
        query = Query(heat_T=heat_L.contiguous(), uniform_T=uniform_L, held_T=memory.tokens_L)
        stats, is_sparse = self._read_out(model.head(hidden_LD), query)
        memory.keep(advance(memory.canvas(0), stats, noise_L, self.shape.rule))
        memory.index_1.add_(1)
        memory.flags_2.copy_(torch.stack([memory.settled, is_sparse]))
        memory.seen_2.copy_(memory.flags_2, non_blocking=True)

    def _stack(self, entered_LD: Tensor) -> Tensor:
        assert self.context is not None
        if not self.has_kernels:
            return self.model.stack(entered_LD, self.context)
        turns = self.model.turns(self.memory.positions_L)
        places = Places([self.shape.length], [False], self.memory.table_IX6)
        return self.stack.run(entered_LD, turns, ByTable(places, self.stack))

    def _read_out(self, raw_LV: Tensor, query: Query) -> tuple[RowStats, Tensor]:
        """Statistics; what the soft embedding needs is kept aside."""
        softcap = self.model.config.final_logit_softcapping
        if not self.has_kernels:
            stats, self.raw_LV = row_stats(raw_LV, softcap, query)
            return stats, torch.zeros_like(self.memory.settled)
        from dgemma.ops.kernels import row_stats as kernels

        marks = kernels.row_marks(raw_LV, softcap, query.heat_T)
        ask = (query.heat_T, query.uniform_T, query.held_T)
        merged = kernels.row_merge(raw_LV, softcap, ask, marks)
        *found, mass_L = kernels.survivors(raw_LV, softcap, query.heat_T, marks, merged)
        self.raw_LV, self.found = raw_LV, tuple(found)
        self.merged = lambda: kernels.probabilities_(raw_LV, softcap, query.heat_T, merged)
        stats = RowStats(**{name: getattr(merged, name) for name in RowStats.__slots__})
        return stats, (mass_L >= MASS).all()

    def _dense(self) -> None:
        p_LV = self.raw_LV if self.merged is None else self.merged()
        self._soften(self.model.embed_soft(p_LV))

    def _sparse(self) -> None:
        from dgemma.ops.kernels.row_stats import soft_mean

        table = self.model.embed_tokens
        id_LS, p_LS, count_L = self.found
        self._soften(soft_mean(table.weight, id_LS, p_LS, count_L) * table.scale)

    def _soften(self, soft_LD: Tensor) -> None:
        """A pinned position is conditioned on its own token, as a converged one would be."""
        memory = self.memory
        own_LD = self.model.embed(memory.tokens_L)
        memory.soft_LD.copy_(torch.where(memory.pinned_L[:, None], own_LD, soft_LD))
