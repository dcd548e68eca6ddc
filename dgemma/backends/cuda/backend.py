"""The CUDA backend: captured passes for every kind of request, in any batch.

A pass has canvases to step and segments to commit; AR tokens have separate passes (`DecodeRunner`).
Canvases keep their state in static buffers between steps and are copied out after each, so that the
engine sees values. Constraints, and rules other than `EntropyBound`, run on the CPU between the
captured step and the captured soft embedding.

L tokens of a segment, V vocabulary.
"""

import logging
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from dgemma.backends.base import ForwardInput, ForwardOutput, score_canvas
from dgemma.backends.cuda.canvas_pool import MAX_COMMITS, CanvasPool, Commit
from dgemma.backends.cuda.device import current_device
from dgemma.backends.cuda.graphs import CANVAS_BUCKETS, COMMIT_BUCKETS, Graphs, bucket
from dgemma.backends.cuda.kernels.sampler_update import MAX_LENGTH
from dgemma.backends.cuda.passes import (
    DecodeRunner,
    DenoisePass,
    PassModel,
    StepStats,
    has_plain_self_conditioning,
    run_segments,
)
from dgemma.backends.reference import ReferenceBackend, commit_segment, embed_commits, score
from dgemma.device import usable_memory
from dgemma.diffusion.canvas import Canvas
from dgemma.diffusion.denoise import CanvasState, update_canvas
from dgemma.diffusion.logit_stats import PositionStats
from dgemma.diffusion.sampler import EntropyBound
from dgemma.model.forward_batch import ForwardBatch, Segment
from dgemma.model.gemma import Gemma, soft_cap

MAX_BATCH_SIZE = CANVAS_BUCKETS[-1]  # canvases per pass
SHORT_LENGTH = 128  # padded length of short canvases, and of commits without a canvas
MIN_STEPS = 64  # initial size of the noise buffers
MIN_FILLED = 0.25  # of a captured pass, else texts are encoded eagerly
SMALL_GPU, SMALL_BATCH_SIZE = 40e9, 4  # GPUs below so many bytes of memory step fewer canvases

logger = logging.getLogger("dgemma")


class CudaBackend:
    """Executes passes with fused kernels and CUDA graphs."""

    name = "cuda"

    def __init__(self, model: Gemma, max_canvases: int | None = None) -> None:
        self.model, self.device = model, model.embed_tokens.weight.device
        self.reference = ReferenceBackend(model)
        self.passes = PassModel(model)
        self._has_warned = False
        self.graphs = Graphs(self.device)
        self.length = model.config.canvas_length
        self.max_batch_size = max_canvases or max_batch_size(self.device)
        self._allocate(MIN_STEPS)
        self.decoder = DecodeRunner(self.passes, self.graphs)

    def _allocate(self, max_steps: int) -> None:
        """Allocate the static buffers and drop captures of the old ones."""
        self.graphs.clear()
        self.max_steps = max_steps
        self.pools = {
            length: CanvasPool(
                self.passes,
                length=length,
                num_canvases=self.max_batch_size,
                max_steps=max_steps,
            )
            for length in sorted({min(SHORT_LENGTH, self.length), self.length})
        }

    @property
    def pool(self) -> CanvasPool:
        """The pool for full-length canvases."""
        return self.pools[self.length]

    def _pool_for(self, inputs: Sequence[ForwardInput]) -> CanvasPool:
        """Return the pool with the shortest segments that hold all canvases, or else all texts."""
        canvases = [item.state.canvas.length for item in inputs if item.state is not None]
        longest = max(canvases or [len(item.tokens) for item in inputs], default=0)
        return next((p for length, p in self.pools.items() if longest <= length), self.pool)

    def run(self, inputs: Sequence[ForwardInput]) -> list[ForwardOutput]:
        lengths = [(item.cache, item.cache.length) for item in inputs]
        with torch.inference_mode(), current_device(self.device):
            try:
                scored = iter(self._score([item for item in inputs if item.targets]))
                others = iter(self._run([item for item in inputs if not item.targets]))
            except Exception:  # a failed pass commits nothing
                for cache, length in lengths:
                    cache.length = length
                raise
        return [next(scored if item.targets else others) for item in inputs]

    def _run(self, inputs: Sequence[ForwardInput]) -> list[ForwardOutput]:
        outputs: dict[int, ForwardOutput] = {}
        stepping, drawing = [], []
        commits: list[Commit] = []
        inputs = [self._commit_images(item) for item in inputs]
        self._ensure_steps(inputs)
        pool = self._pool_for(inputs)
        for index, item in enumerate(inputs):
            if not self._can_run(item):
                (outputs[index],) = self._run_by_reference(item)
                continue
            commits += self._commits(pool, item)
            if item.state is not None:
                stepping.append(index)
            elif item.draw is not None:
                drawing.append(index)
            else:
                outputs[index] = ForwardOutput()
        stepped = self._step(pool, [inputs[i] for i in stepping], commits)
        outputs.update(zip(stepping, stepped, strict=True))
        for item in filter(self._can_run, inputs):
            item.cache.length += len(item.tokens) - (item.draw is not None)
        drawn = self.decoder.run([inputs[i] for i in drawing])
        outputs.update(zip(drawing, drawn, strict=True))
        return [outputs[index] for index in range(len(inputs))]

    def _ensure_steps(self, inputs: Sequence[ForwardInput]) -> None:
        """Reallocate the noise buffers if a canvas takes more steps than they hold."""
        steps = [item.state.sampler.max_denoising_steps for item in inputs if item.state]
        if max(steps, default=0) > self.max_steps:
            self._allocate(2 * max(steps))

    def _can_run(self, item: ForwardInput) -> bool:
        """False for keys that the kernels cannot address: a shared prefix with a shared prefix.

        Also for a token drawn right after a picture, whose pass is not captured.
        """
        if item.draw is not None and item.images and item.images[-1].end == len(item.tokens):
            return False
        prefix = item.cache.shared_prefix
        return prefix is None or prefix.shared_prefix is None

    def _commit_images(self, item: ForwardInput) -> ForwardInput:
        """Commit up to the last picture eagerly; return the tokens left for captured passes.

        Tokens of a picture see each other; captured passes have causal commits only.
        """
        if not item.images or not self._can_run(item):
            return item
        end = item.images[-1].end
        seen = ForwardInput(cache=item.cache, tokens=item.tokens[:end], images=item.images)
        batch = ForwardBatch([commit_segment(seen)])
        self.forward(embed_commits(self.model, [seen]), batch)
        batch.close()
        return replace(item, tokens=item.tokens[end:], images=())

    def _run_by_reference(self, item: ForwardInput) -> list[ForwardOutput]:
        if not self._has_warned:
            logger.warning(
                "a nested shared prefix, or a draw after a picture, runs on the reference backend, "
                "uncaptured"
            )
        self._has_warned = True
        return self.reference.run([item])

    # --- canvases and commits

    def _commits(self, pool: CanvasPool, item: ForwardInput) -> list[Commit]:
        """Split the tokens to commit into segments, except the last token of a draw
        (`DecodeRunner`).
        """
        tokens, cache = item.tokens, item.cache
        canvas = 0 if item.state is None else item.state.canvas.length
        cache.reserve(len(tokens) + canvas)
        if item.draw is not None:
            tokens = tokens[:-1]
        return pool.pieces(cache, cache.length, tokens)

    def _step(
        self, pool: CanvasPool, stepping: Sequence[ForwardInput], commits: list[Commit]
    ) -> list[ForwardOutput]:
        """Step all canvases, at most `max_batch_size` per pass; commits join the first pass."""
        while len(commits) > (MAX_COMMITS if stepping else 0):
            self._commit(pool, commits[:MAX_COMMITS])
            commits = commits[MAX_COMMITS:]
        outputs: list[ForwardOutput] = []
        for begin in range(0, len(stepping), self.max_batch_size):
            batch = stepping[begin : begin + self.max_batch_size]
            outputs += self._pass(pool, batch, commits)
            commits = []
        return outputs

    def _commit(self, pool: CanvasPool, commits: Sequence[Commit]) -> Tensor:
        """Run a pass without canvases; its hidden states are valid until the next pass."""
        committing = pool.write_commits(commits)
        pool.buffers.set_entries(committing)
        denoise = pool.pass_of(0, len(committing))
        return self.graphs.run(("step", denoise), denoise.commit)

    def _pass(
        self, pool: CanvasPool, stepping: Sequence[ForwardInput], commits: Sequence[Commit]
    ) -> list[ForwardOutput]:
        entries = pool.place(stepping)
        canvases = bucket(len(stepping), CANVAS_BUCKETS)
        padding = [pool.buffers.padding] * (canvases - len(entries))
        committing = pool.write_commits(commits)
        pool.buffers.set_entries([*entries, *padding, *committing])
        for entry in entries:  # reloaded if the pass fails
            pool.residents[entry] = None
        denoise = pool.pass_of(canvases, len(committing))
        stats = self.graphs.run(("step", denoise), denoise.step)
        self._synchronize()
        flags = pool.buffers.flags_E2[entries].tolist()
        scores = {
            index: score_canvas(item.query, partial(self._logits, stats, index * pool.length))
            for index, item in enumerate(stepping)
            if item.query is not None
        }
        states = [item.state for item in stepping if item.state is not None]
        updated = self._update_on_cpu(pool, stats, states, entries)
        for index, canvas in updated.items():
            flags[index][0] = bool(canvas.converged)
        continuing = [
            covers_mass
            for (has_converged, covers_mass), state in zip(flags, states, strict=True)
            if not has_converged and state.canvas.num_steps + 1 < state.sampler.max_denoising_steps
        ]
        if continuing:
            self._soft_embed(denoise, stats, sparse=all(continuing))
        stepped = enumerate(pool.copy_out(stepping, entries, flags, updated))
        return [ForwardOutput(state=state, canvas_score=scores.get(i)) for i, state in stepped]

    def _soft_embed(self, denoise: DenoisePass, stats: StepStats, *, sparse: bool) -> None:
        soft_embed = partial(denoise.soft_embed, stats, sparse=sparse)
        if self.graphs.is_captured(("step", denoise)):
            self.graphs.run(("sparse" if sparse else "dense", denoise), soft_embed)
        else:  # the statistics of an eager step have another address each time
            soft_embed()

    def _update_on_cpu(
        self,
        pool: CanvasPool,
        stats: StepStats,
        states: Sequence[CanvasState],
        entries: Sequence[int],
    ) -> dict[int, Canvas]:
        """Apply rules and constraints without a kernel, on CPU tensors.

        Returns the canvases by index in the pass.
        """
        updated: dict[int, Canvas] = {}
        if not any(map(_needs_host, states)):
            return updated
        names, merged = PositionStats.__slots__, stats.logits.merged
        columns = torch.stack([getattr(merged, name).double() for name in names]).cpu()
        for index, state in enumerate(states):
            if not _needs_host(state):
                continue
            canvas, first = state.canvas, index * pool.length
            here = zip(names, columns[:, first : first + canvas.length], strict=True)
            tokens = ("draw_T", "top_T")
            position_stats = PositionStats(
                **{n: c.long() if n in tokens else c.float() for n, c in here}
            )
            host_state = replace(state, canvas=canvas_to_cpu(canvas), noise=state.noise.to_cpu())
            logits_at = partial(self._logits, stats, first)
            updated[index] = update_canvas(host_state, position_stats, logits_at)
            pool.buffers.write_state(entries[index], updated[index])
        return updated

    def _logits(self, stats: StepStats, first: int, positions: Sequence[int]) -> Tensor:
        """Read the logits of positions of the canvas that starts at row `first`."""
        raw_NV = stats.logits.raw_TV[[first + position for position in positions]]
        return soft_cap(raw_NV, self.passes.softcap)

    def _synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()

    # --- scores

    def _score(self, scoring: Sequence[ForwardInput]) -> list[ForwardOutput]:
        """Encode texts in one pass and return the log-probabilities of their targets."""
        if not scoring:
            return []
        batch = ForwardBatch([Segment(g.cache, len(g.tokens), commit=True) for g in scoring])
        tokens = [token for item in scoring for token in item.tokens]
        hidden_TD = self.encode(torch.tensor(tokens, device=self.device), batch)
        texts = torch.split(hidden_TD, [len(item.tokens) for item in scoring])
        outputs = [
            score(self.model, hidden_ND[-len(item.targets) :], item)
            for hidden_ND, item in zip(texts, scoring, strict=True)
        ]
        batch.close()
        return outputs

    def encode(self, tokens_T: Tensor, batch: ForwardBatch) -> Tensor:
        longest = max(segment.count for segment in batch.segments)
        pool = next((p for length, p in self.pools.items() if longest <= length), self.pool)
        commits = _encoded(pool, tokens_T, batch)
        if commits is None:
            return self.forward(self.model.embed(tokens_T), batch)
        with torch.inference_mode(), current_device(self.device):
            hidden_TD = self._commit(pool, commits)
            rows = [
                k * pool.length + i for k, c in enumerate(commits) for i in range(len(c.tokens))
            ]
            return hidden_TD[torch.tensor(rows, device=self.device)]

    def forward(self, embeds_TD: Tensor, batch: ForwardBatch) -> Tensor:
        with current_device(self.device):
            table = batch.kv_table()
            if table is None or torch.is_grad_enabled():
                return self.reference.forward(embeds_TD, batch)
            return run_segments(self.passes, embeds_TD, batch, table)


def _encoded(pool: CanvasPool, tokens_T: Tensor, batch: ForwardBatch) -> list[Commit] | None:
    """Split commits into segments of a captured pass; None if they do not fit one."""
    pieces = sum(-(-segment.count // pool.length) for segment in batch.segments)
    is_causal = all(segment.commit for segment in batch.segments)
    if not is_causal or pieces > MAX_COMMITS or batch.kv_table() is None:
        return None
    if MIN_FILLED * bucket(pieces, COMMIT_BUCKETS) * pool.length > len(tokens_T):
        return None  # mostly padding: eager segments are cheaper
    tokens, commits = tokens_T.tolist(), list[Commit]()
    for segment, start in zip(batch.segments, batch.starts, strict=True):
        text, tokens = tokens[: segment.count], tokens[segment.count :]
        commits += pool.pieces(segment.cache, start, text)
    return commits


def max_batch_size(device: torch.device) -> int:
    if device.type != "cuda":
        return MAX_BATCH_SIZE
    return MAX_BATCH_SIZE if usable_memory(device) >= SMALL_GPU else SMALL_BATCH_SIZE


def can_hold(model: Gemma) -> bool:
    """True if the sampler kernel takes the canvases and self-conditioning has no adapter."""
    module = model.self_conditioning
    if module is None:
        return True
    return has_plain_self_conditioning(module) and model.config.canvas_length <= MAX_LENGTH


def _needs_host(state: CanvasState) -> bool:
    return state.constraint is not None or type(state.sampler.rule) is not EntropyBound


def canvas_to_cpu(canvas: Canvas) -> Canvas:
    """Copy a canvas to CPU tensors, without its soft embeddings."""
    names = (
        "tokens_L",
        "pinned_L",
        "accepted_L",
        "guess_L",
        "entropy_L",
        "converged",
        "stable_steps",
    )
    return replace(canvas, soft_LD=None, **{name: getattr(canvas, name).cpu() for name in names})
