"""The CUDA backend: every kind of request rides a captured pass, in batches of any composition.

A pass holds canvases (to step) and segments to commit; single AR tokens have a pass of their own.
Rows keep their state in static buffers between steps and are copied out after each, so that the
engine sees values. Rules other than `EntropyBound`, and constraints, run on the host between the
captured step and the captured soft embedding.

L tokens of a segment, V vocabulary.
"""

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from weakref import ref

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dgemma.backends.base import ForwardInput, ForwardOutput
from dgemma.backends.cuda.buffers import GraphBuffers
from dgemma.backends.cuda.capture import Graphs
from dgemma.backends.cuda.kernels.sampler_update import MAX_LENGTH
from dgemma.backends.cuda.passes import (
    DecodePass,
    DenoisePass,
    PassModel,
    has_plain_self_conditioning,
    run_segments,
)
from dgemma.backends.cuda.support import current_device
from dgemma.backends.reference import ReferenceBackend
from dgemma.diffusion.canvas import Canvas
from dgemma.diffusion.denoise import Row, update_canvas
from dgemma.diffusion.logit_stats import RowStats
from dgemma.diffusion.sampler import EntropyBound
from dgemma.model.forward_batch import ForwardBatch
from dgemma.model.gemma import Gemma, soft_cap
from dgemma.model.kv_cache import KVCache

MAX_ROWS = 16  # canvases, or AR sequences, of one pass
ROW_BUCKETS = (1, 2, 3, 4, 6, 8, 12, 16)
COMMIT_BUCKETS = (0, 1, 2, 4, 8, 16)
MAX_COMMITS = COMMIT_BUCKETS[-1]
MIN_STEPS = 64  # steps that the noise buffers hold at least
MIN_FILLED = 0.25  # of a captured pass of commits, for texts to be encoded by it
SMALL_GPU, SMALL_ROWS = 40e9, 4  # bytes, and canvases of a pass where there are fewer

# A sequence and what its KV table depends on. A weak reference: another cache may have the same id.
CacheState = tuple["ref[KVCache]", int, int]

logger = logging.getLogger("dgemma")


@dataclass(frozen=True, slots=True)
class Resident:
    """The row that an entry of the buffers holds, and the state of its KV cache then."""

    canvas: Canvas
    cache: "ref[KVCache]"
    length: int
    num_moves: int

    def is_current(self, row: Row, cache: KVCache) -> bool:
        is_same = self.canvas is row.canvas and self.cache() is cache
        return is_same and (self.length, self.num_moves) == (cache.length, cache.num_moves)


@dataclass(frozen=True, slots=True)
class Commit:
    """Up to L tokens of one sequence, to be committed."""

    cache: KVCache
    start: int
    tokens: tuple[int, ...]


class CudaBackend:
    """Executes passes by fused kernels and CUDA graphs."""

    name = "cuda"

    def __init__(self, model: Gemma) -> None:
        self.model, self.device = model, model.embed_tokens.weight.device
        self.reference = ReferenceBackend(model)
        self.passes = PassModel(model)
        self._has_warned = False
        self.graphs = Graphs(self.device)
        self.length = model.config.canvas_length
        self.max_rows = max_rows(self.device)
        self._allocate(MIN_STEPS)
        self.decode_buffers = GraphBuffers(
            model, length=1, num_rows=0, num_commits=MAX_ROWS, max_steps=1
        )
        self.decodes: dict[int, DecodePass] = {}
        self._next_meta: tuple[list[CacheState], NDArray[np.int64]] | None = None

    def _allocate(self, max_steps: int) -> None:
        """Make the buffers; captures of other buffers are dropped."""
        self.graphs.clear()
        self.denoises: dict[tuple[int, int], DenoisePass] = {}
        self.residents: list[Resident | None] = [None] * self.max_rows
        self.buffers = GraphBuffers(
            self.model,
            length=self.length,
            num_rows=self.max_rows,
            num_commits=MAX_COMMITS,
            max_steps=max_steps,
        )

    def run(self, inputs: Sequence[ForwardInput]) -> list[ForwardOutput]:
        with torch.inference_mode(), current_device(self.device):
            return self._run(inputs)

    def _run(self, inputs: Sequence[ForwardInput]) -> list[ForwardOutput]:
        outputs: list[ForwardOutput | None] = [None] * len(inputs)
        stepping, drawing = [], []
        commits: list[Commit] = []
        for index, given in enumerate(inputs):
            if not self._can_run(given):
                (outputs[index],) = self._run_by_reference(given)
                continue
            commits += self._commits(given)
            if given.row is not None:
                stepping.append(index)
            elif given.draw is not None:
                drawing.append(index)
            else:
                outputs[index] = ForwardOutput()
        stepped = self._step([inputs[i] for i in stepping], commits)
        for index, row in zip(stepping, stepped, strict=True):
            outputs[index] = ForwardOutput(row=row)
        lengths = [(given.cache, given.cache.length) for given in inputs]
        for given in filter(self._can_run, inputs):  # a pass that failed has committed nothing
            given.cache.length += len(given.tokens) - (given.draw is not None)
        try:
            drawn = list(self._draw([inputs[i] for i in drawing]))
        except Exception:
            for cache, length in lengths:
                cache.length = length
            raise
        for index, output in zip(drawing, drawn, strict=True):
            outputs[index] = output
        return [output for output in outputs if output is not None]

    def _can_run(self, given: ForwardInput) -> bool:
        """False where kernels cannot read the keys: a shared prefix with one of its own."""
        prefix = given.cache.shared_prefix
        return prefix is None or prefix.shared_prefix is None

    def _run_by_reference(self, given: ForwardInput) -> list[ForwardOutput]:
        if not self._has_warned:
            logger.warning("a nested shared prefix runs on the reference backend, uncaptured")
        self._has_warned = True
        return self.reference.run([given])

    # --- canvases and commits

    def _commits(self, given: ForwardInput) -> list[Commit]:
        """Cut the tokens to commit into segments; a drawn sequence keeps its last token."""
        tokens, cache = given.tokens, given.cache
        canvas = 0 if given.row is None else given.row.canvas.length
        cache.reserve(len(tokens) + canvas)
        if given.draw is not None:
            tokens = tokens[:-1]
        pieces = range(0, len(tokens), self.length)
        return [
            Commit(cache, cache.length + begin, tokens[begin : begin + self.length])
            for begin in pieces
        ]

    def _step(self, stepping: Sequence[ForwardInput], commits: list[Commit]) -> list[Row]:
        """Step all canvases, in passes of at most `max_rows`; commits ride along with the first."""
        while len(commits) > MAX_COMMITS:
            self._pass([], commits[:MAX_COMMITS])
            commits = commits[MAX_COMMITS:]
        if not stepping:
            if commits:
                self._pass([], commits)
            return []
        rows: list[Row] = []
        for begin in range(0, len(stepping), self.max_rows):
            rows += self._pass(stepping[begin : begin + self.max_rows], commits)
            commits = []
        return rows

    def _pass(self, stepping: Sequence[ForwardInput], commits: Sequence[Commit]) -> list[Row]:
        entries = self._place(stepping)
        canvases = _bucket(len(stepping), ROW_BUCKETS) if stepping else 0
        padding = [self.buffers.padding]
        num_commits = _bucket(len(commits), COMMIT_BUCKETS)
        first = self.buffers.first_commit
        named = [*entries, *padding * (canvases - len(entries))]
        named += [*range(first, first + len(commits)), *padding * (num_commits - len(commits))]
        if commits:
            self.buffers.place_commits(self._meta(commits))
        self.buffers.name_entries(named)
        for entry in entries:  # if the pass fails, its rows are loaded again
            self.residents[entry] = None
        found = self._denoise_pass(canvases, num_commits)
        self.graphs.run(("step", canvases, num_commits), found.step)
        if not stepping:
            return []
        return self._finish(found, stepping, entries, (canvases, num_commits))

    def _denoise_pass(self, canvases: int, commits: int) -> DenoisePass:
        key = (canvases, commits)
        if key not in self.denoises:
            self.denoises[key] = DenoisePass(self.passes, self.buffers, canvases, commits)
        return self.denoises[key]

    def _meta(self, commits: Sequence[Commit]) -> NDArray[np.int64]:
        buffers = self.buffers
        meta_KM = np.zeros((len(commits), buffers.meta_EM.shape[1]), dtype=np.int64)
        for meta_M, commit in zip(meta_KM, commits, strict=True):
            count = len(commit.tokens)
            table_X6 = commit.cache.kv_table(commit.start, count)
            assert table_X6 is not None
            head = buffers.table_size
            meta_M[:head], meta_M[head : head + 2] = table_X6.ravel(), (commit.start, count)
            # The same tokens again fill it up: they spread over the experts as a prompt does.
            meta_M[head + 2 :] = np.resize(np.array(commit.tokens), self.length)
        return meta_KM

    def _place(self, stepping: Sequence[ForwardInput]) -> list[int]:
        """Bring all rows into entries; those that have not moved since the last step stay."""
        most = max(
            (given.row.sampler.max_denoising_steps for given in stepping if given.row), default=0
        )
        if most > self.buffers.max_steps:
            self._allocate(2 * most)
        entries: list[int | None] = [self._resident(given) for given in stepping]
        taken = {entry for entry in entries if entry is not None}
        # Free entries first: rows of another batch may come back to theirs.
        by_use = sorted(range(self.max_rows), key=lambda entry: self.residents[entry] is not None)
        free = iter([entry for entry in by_use if entry not in taken])
        for index, given in enumerate(stepping):
            if entries[index] is not None:
                continue
            entry = entries[index] = next(free)
            row, cache = given.row, given.cache
            assert row is not None
            start = cache.length + len(given.tokens)
            table_X6 = cache.kv_table(start, row.canvas.length)
            assert table_X6 is not None
            self.residents[entry] = None
            self.buffers.place(entry, table_X6, start, row.canvas.length)
            self.buffers.load(entry, row.canvas, row.sampler, row.noise)
        return [entry for entry in entries if entry is not None]

    def _resident(self, given: ForwardInput) -> int | None:
        row = given.row
        assert row is not None
        for entry, resident in enumerate(self.residents):
            if resident is not None and resident.is_current(row, given.cache) and not given.tokens:
                return entry
        return None

    def _finish(
        self,
        found: DenoisePass,
        stepping: Sequence[ForwardInput],
        entries: list[int],
        key: tuple[int, int],
    ) -> list[Row]:
        """Read the flags, run what runs on the host, make the soft embeddings, copy rows out."""
        rows = [given.row for given in stepping if given.row is not None]
        self._synchronize()
        flags = self.buffers.flags_E2[entries].tolist()
        on_host = [index for index, row in enumerate(rows) if _needs_host(row)]
        updated = self._update_on_host(found, [(i, entries[i], rows[i]) for i in on_host])
        for index, canvas in updated.items():
            flags[index][0] = bool(canvas.settled)
        goes_on = [
            not flag[0] and row.canvas.num_steps + 1 < row.sampler.max_denoising_steps
            for flag, row in zip(flags, rows, strict=True)
        ]
        if any(goes_on):
            sparse = all(flag[1] for flag, on in zip(flags, goes_on, strict=True) if on)
            name = "sparse" if sparse else "dense"
            if self.graphs.is_captured(("step", *key)):
                self.graphs.run((name, *key), lambda: found.soft_embed(sparse=sparse))
            else:  # an eager step leaves its statistics at another address each time
                found.soft_embed(sparse=sparse)
        return self._copy_out(stepping, entries, flags, updated)

    def _update_on_host(
        self, found: DenoisePass, given: Sequence[tuple[int, int, Row]]
    ) -> dict[int, Canvas]:
        """Apply rules and constraints that have no kernel, on host tensors."""
        updated: dict[int, Canvas] = {}
        if not given:
            return updated
        assert found.stats is not None
        stats = found.stats.stats
        columns = torch.stack([getattr(stats, n).double() for n in RowStats.__slots__]).cpu()
        for index, entry, row in given:
            canvas = row.canvas
            own = slice(index * self.length, index * self.length + canvas.length)
            names = zip(RowStats.__slots__, columns[:, own], strict=True)
            here = {n: c.long() if n in ("draw_T", "top_T") else c.float() for n, c in names}

            def look(positions: Sequence[int], first: int = own.start) -> Tensor:
                return self._logits(found, [first + position for position in positions])

            host_row = replace(row, canvas=on_host(canvas), noise=row.noise.on_host())
            updated[index] = update_canvas(host_row, RowStats(**here), look)
            self.buffers.write_state(entry, updated[index])
        return updated

    def _logits(self, found: DenoisePass, positions: list[int]) -> Tensor:
        """Capped logits of some positions of the last step."""
        assert found.stats is not None
        return soft_cap(found.stats.raw_TV[positions], self.passes.softcap)

    def _copy_out(
        self,
        stepping: Sequence[ForwardInput],
        entries: list[int],
        flags: list[list[bool]],
        updated: dict[int, Canvas],
    ) -> list[Row]:
        buffers, rows = self.buffers, []
        entry_C = buffers.entry_I[: len(entries)]
        state_CB, soft_CLD = (
            x.index_select(0, entry_C) for x in (buffers.state_EB, buffers.soft_ELD)
        )
        for index, (given, entry) in enumerate(zip(stepping, entries, strict=True)):
            row, cache = given.row, given.cache
            assert row is not None
            canvas = updated.get(index) or buffers.canvas(state_CB[index], row.canvas)
            settled = torch.tensor(flags[index][0])  # known already: nobody has to wait for it
            soft_LD = soft_CLD[index, : canvas.length]
            canvas = replace(canvas, soft_LD=soft_LD, settled=settled, reopened_L=None)
            end = cache.length + len(given.tokens)
            self.residents[entry] = Resident(canvas, ref(cache), end, cache.num_moves)
            rows.append(replace(row, canvas=canvas))
        return rows

    def _synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()

    # --- AR tokens

    def _draw(self, drawing: Sequence[ForwardInput]) -> Iterator[ForwardOutput]:
        for begin in range(0, len(drawing), MAX_ROWS):
            yield from self._decode(drawing[begin : begin + MAX_ROWS])

    def _decode(self, drawing: Sequence[ForwardInput]) -> Iterator[ForwardOutput]:
        buffers = self.decode_buffers
        count = _bucket(len(drawing), ROW_BUCKETS)
        if count not in self.decodes:
            self.decodes[count] = DecodePass(self.passes, buffers, count)
        decode = self.decodes[count]
        meta_KM = self._decode_meta(drawing)
        meta_KM[:, -1] = [given.tokens[-1] for given in drawing]
        buffers.place_commits(meta_KM)
        draws = [given.draw for given in drawing if given.draw is not None]
        pairs = torch.tensor(
            [[d.temperature for d in draws], [d.uniform for d in draws]], dtype=torch.float64
        )
        decode.draw_2B[:, : len(draws)].copy_(pairs, non_blocking=True)
        first = buffers.first_commit
        padding = [buffers.padding] * (count - len(drawing))
        buffers.name_entries([*range(first, first + len(drawing)), *padding])
        self.graphs.run(("decode", count), decode.step)
        for given in drawing:
            given.cache.length += 1
        self._look_ahead(drawing)
        tokens, logprobs = decode.drawn_2B.tolist()
        for index, given in enumerate(drawing):
            if given.needs_logits:
                yield ForwardOutput(logits_V=decode.logits_BV[index].clone())
            else:
                yield ForwardOutput(token=int(tokens[index]), logprob=logprobs[index])

    def _decode_meta(self, drawing: Sequence[ForwardInput]) -> NDArray[np.int64]:
        """Tables of each sequence's next token; usually looked up while the last pass ran."""
        caches = [given.cache for given in drawing]
        key = [_state_of(cache) for cache in caches]
        if self._next_meta is not None and self._next_meta[0] == key:
            return self._next_meta[1]
        for cache in caches:
            cache.reserve(1)
        return self._token_meta(caches)

    def _token_meta(self, caches: Sequence[KVCache]) -> NDArray[np.int64]:
        rows = []
        for cache in caches:
            table_X6 = cache.kv_table(cache.length, 1)
            assert table_X6 is not None
            rows.append(np.concatenate([table_X6.ravel(), (cache.length, 1, 0)]))
        return np.stack(rows)

    def _look_ahead(self, drawing: Sequence[ForwardInput]) -> None:
        """Look up the next tokens' tables while the device still works on these."""
        caches = [given.cache for given in drawing]
        self._next_meta = None
        if all(cache.has_slots(1) and not cache.is_shared for cache in caches):
            key = [_state_of(cache) for cache in caches]
            self._next_meta = (key, self._token_meta(caches))

    # --- passes that others drive

    def encode(self, tokens_T: Tensor, batch: ForwardBatch) -> Tensor:
        commits = self._encoded(tokens_T, batch)
        if commits is None:
            return self.forward(self.model.embed(tokens_T), batch)
        with torch.inference_mode(), current_device(self.device):
            self._pass([], commits)
            hidden_TD = self.denoises[0, _bucket(len(commits), COMMIT_BUCKETS)].hidden_TD
            assert hidden_TD is not None
            rows = [
                k * self.length + i for k, c in enumerate(commits) for i in range(len(c.tokens))
            ]
            return hidden_TD[torch.tensor(rows, device=self.device)]

    def _encoded(self, tokens_T: Tensor, batch: ForwardBatch) -> list[Commit] | None:
        """Cut a batch of commits into segments of a captured pass; None if it does not fit one."""
        pieces = sum(-(-segment.count // self.length) for segment in batch.segments)
        is_causal = all(segment.commit for segment in batch.segments)
        if not is_causal or pieces > MAX_COMMITS or batch.kv_table() is None:
            return None
        if MIN_FILLED * _bucket(pieces, COMMIT_BUCKETS) * self.length > len(tokens_T):
            return None  # mostly padding: segments of their own length are cheaper
        tokens, commits = tokens_T.tolist(), []
        for segment, start in zip(batch.segments, batch.starts, strict=True):
            own, tokens = tokens[: segment.count], tokens[segment.count :]
            for begin in range(0, len(own), self.length):
                piece = tuple(own[begin : begin + self.length])
                commits.append(Commit(segment.cache, start + begin, piece))
        return commits

    def forward(self, embeds_TD: Tensor, batch: ForwardBatch) -> Tensor:
        with current_device(self.device):
            table = batch.kv_table()
            if table is None or torch.is_grad_enabled():
                return self.reference.forward(embeds_TD, batch)
            return run_segments(self.passes, embeds_TD, batch, table)


def max_rows(device: torch.device) -> int:
    if device.type != "cuda":
        return MAX_ROWS
    memory = torch.cuda.get_device_properties(device).total_memory
    return MAX_ROWS if memory >= SMALL_GPU else SMALL_ROWS


def can_hold(model: Gemma) -> bool:
    """True if canvases fit the sampler's kernel and self-conditioning has no adapter."""
    part = model.self_conditioning
    if part is None:
        return True
    return has_plain_self_conditioning(part) and model.config.canvas_length <= MAX_LENGTH


def _state_of(cache: KVCache) -> CacheState:
    return ref(cache), cache.length, cache.num_moves


def _needs_host(row: Row) -> bool:
    return row.walker is not None or type(row.sampler.rule) is not EntropyBound


def on_host(canvas: Canvas) -> Canvas:
    """Copy a canvas to host memory, without its soft embeddings."""
    names = ("tokens_L", "pinned_L", "kept_L", "guess_L", "entropy_L", "settled", "steady_steps")
    return replace(canvas, soft_LD=None, **{name: getattr(canvas, name).cpu() for name in names})


def _bucket(count: int, buckets: Sequence[int]) -> int:
    return next(size for size in buckets if size >= count)
