"""Canvases in static buffers of one segment length, and the passes over them.

L tokens of a segment, M numbers of an entry, K commits, C canvases.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from weakref import ref

import numpy as np
import torch

from dgemma.backends.base import ForwardInput
from dgemma.backends.cuda.graphs import COMMIT_BUCKETS, GraphBuffers, bucket
from dgemma.backends.cuda.passes import DenoisePass, PassModel
from dgemma.diffusion.canvas import Canvas
from dgemma.diffusion.denoise import CanvasState
from dgemma.model.kv_cache import KVCache

MAX_COMMITS = COMMIT_BUCKETS[-1]  # per pass


@dataclass(frozen=True, slots=True)
class Resident:
    """The canvas in a buffer entry, and the state of its KV cache when it was loaded."""

    canvas: Canvas
    cache: "ref[KVCache]"
    length: int
    num_moves: int

    def is_current(self, state: CanvasState, cache: KVCache) -> bool:
        is_same = self.canvas is state.canvas and self.cache() is cache
        return is_same and (self.length, self.num_moves) == (cache.length, cache.num_moves)


@dataclass(frozen=True, slots=True)
class Commit:
    """Up to L tokens of one sequence to commit."""

    cache: KVCache
    start: int
    tokens: tuple[int, ...]


class CanvasPool:
    """Canvases and commits in segments of one length.

    Canvases stay in their entries between steps and are copied out after each.
    """

    def __init__(self, model: PassModel, *, length: int, num_canvases: int, max_steps: int) -> None:
        self.model, self.length, self.num_canvases = model, length, num_canvases
        self.passes: dict[tuple[int, int], DenoisePass] = {}
        self.residents: list[Resident | None] = [None] * num_canvases
        self.buffers = GraphBuffers(
            model.model,
            length=length,
            num_canvases=num_canvases,
            num_commits=MAX_COMMITS,
            max_steps=max_steps,
        )

    def pass_of(self, canvases: int, commits: int) -> DenoisePass:
        key = (canvases, commits)
        if key not in self.passes:
            self.passes[key] = DenoisePass(self.model, self.buffers, canvases, commits)
        return self.passes[key]

    def pieces(self, cache: KVCache, start: int, tokens: Sequence[int]) -> list[Commit]:
        """Split the tokens to commit, from a position on, into segments."""
        return [
            Commit(cache, start + begin, tuple(tokens[begin : begin + self.length]))
            for begin in range(0, len(tokens), self.length)
        ]

    def write_commits(self, commits: Sequence[Commit]) -> list[int]:
        """Write commits to entries; return the entries, padded to a bucket."""
        buffers = self.buffers
        num_commits = bucket(len(commits), COMMIT_BUCKETS)
        first, padding = buffers.first_commit, buffers.padding
        entries = [*range(first, first + len(commits)), *[padding] * (num_commits - len(commits))]
        meta_KM = np.zeros((len(commits), buffers.meta_EM.shape[1]), dtype=np.int64)
        head = buffers.table_size
        for meta_M, commit in zip(meta_KM, commits, strict=True):
            count = len(commit.tokens)
            table_X6 = commit.cache.kv_table(commit.start, count)
            assert table_X6 is not None
            meta_M[:head], meta_M[head : head + 2] = table_X6.ravel(), (commit.start, count)
            # Padded with real tokens, which spread over the experts like a prompt.
            meta_M[head + 2 :] = np.resize(np.array(commit.tokens), self.length)
        if commits:
            buffers.write_commits(meta_KM)
        return entries

    def place(self, stepping: Sequence[ForwardInput]) -> list[int]:
        """Load canvases into entries; unchanged ones stay where they are."""
        entries: list[int | None] = [self._resident(item) for item in stepping]
        taken = {entry for entry in entries if entry is not None}
        # Free entries first: canvases of another batch may return to their entries.
        by_use = sorted(range(self.num_canvases), key=lambda e: self.residents[e] is not None)
        free = iter([entry for entry in by_use if entry not in taken])
        for index, item in enumerate(stepping):
            if entries[index] is not None:
                continue
            entry = entries[index] = next(free)
            state, cache = item.state, item.cache
            assert state is not None
            start = cache.length + len(item.tokens)
            table_X6 = cache.kv_table(start, state.canvas.length)
            assert table_X6 is not None
            self.residents[entry] = None
            self.buffers.write_kv_table(entry, table_X6, start, state.canvas.length)
            self.buffers.load(entry, state.canvas, state.sampler, state.noise)
        return [entry for entry in entries if entry is not None]

    def _resident(self, item: ForwardInput) -> int | None:
        state = item.state
        assert state is not None
        for entry, resident in enumerate(self.residents):
            if resident is not None and resident.is_current(state, item.cache) and not item.tokens:
                return entry
        return None

    def copy_out(
        self,
        stepping: Sequence[ForwardInput],
        entries: list[int],
        flags: list[list[bool]],
        updated: dict[int, Canvas],
    ) -> list[CanvasState]:
        """Return the states after a step; `updated`: canvases changed on the CPU."""
        buffers, states = self.buffers, []
        entry_C = buffers.entry_I[: len(entries)]
        state_CB, soft_CLD = (
            x.index_select(0, entry_C) for x in (buffers.state_EB, buffers.soft_ELD)
        )
        for index, (item, entry) in enumerate(zip(stepping, entries, strict=True)):
            state, cache = item.state, item.cache
            assert state is not None
            canvas = updated.get(index) or buffers.canvas(state_CB[index], state.canvas)
            # Already on the CPU: reading it does not synchronize.
            converged = torch.tensor(flags[index][0])
            soft_LD = soft_CLD[index, : canvas.length]
            canvas = replace(canvas, soft_LD=soft_LD, converged=converged, reopened_L=None)
            end = cache.length + len(item.tokens)
            self.residents[entry] = Resident(canvas, ref(cache), end, cache.num_moves)
            states.append(replace(state, canvas=canvas))
        return states
