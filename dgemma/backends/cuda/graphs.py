"""CUDA graphs: static memory of captured passes, and their capture.

A segment of a pass reads one *entry* of the buffers: the first `num_canvases` entries hold
canvases, the next is padding, the others hold tokens to commit. A pass lists its entries in
`entry_I`, so that canvases can be batched in any way without moving their state.

A pass runs eagerly the first time and is captured the second time. The eager run compiles kernels
and initializes libraries, and its result counts, so that no buffer is restored. A shape that occurs
once is never captured.

E entries, L tokens of a segment, N steps, D width, X layers, M numbers of an entry.
"""

import logging
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import cache
from threading import get_ident
from typing import Any, NamedTuple, TypeVar, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dgemma.backends.cuda.kernels.attention import CANVAS, CAUSAL, MIXED, Segments
from dgemma.backends.cuda.kernels.embed import EmbedTokens, StepInputs
from dgemma.backends.cuda.kernels.sampler_update import CanvasStates
from dgemma.diffusion.canvas import BlockNoise, Canvas
from dgemma.diffusion.sampler import EntropyBound, Sampler
from dgemma.model.gemma import Gemma

CANVAS_BUCKETS = (1, 2, 3, 4, 6, 8, 12, 16)  # canvases, or AR sequences, per captured pass
COMMIT_BUCKETS = (0, 1, 2, 4, 8, 16)
# The state of a canvas, contiguous per entry: one copy moves it to the host or back.
FIELDS = {
    "tokens_L": torch.long,
    "guess_L": torch.long,
    "stable_steps": torch.long,
    "entropy_L": torch.float32,
    "accepted_L": torch.uint8,
    "pinned_L": torch.uint8,  # 1: pinned; 2: open, without self-conditioning
    "converged": torch.uint8,
}
ALIGNMENT = 64  # bytes

R = TypeVar("R")
Pool = Any  # torch's handle of the memory pool that captures share; they never run concurrently

logger = logging.getLogger("dgemma")


@dataclass(frozen=True, slots=True)
class StateField:
    dtype: torch.dtype
    offset: int  # bytes
    count: int

    def view(self, state_EB: Tensor) -> Tensor:
        """Return a view of all entries, [E, count]."""
        size = self.count * self.dtype.itemsize
        return state_EB[:, self.offset : self.offset + size].view(self.dtype)


def bucket(count: int, buckets: Sequence[int]) -> int:
    """Return the smallest bucket that holds `count`."""
    return next(size for size in buckets if size >= count)


def state_fields(length: int) -> tuple[dict[str, StateField], int]:
    """Layout of a canvas's state, and its size in bytes."""
    fields, end = {}, 0
    for name, dtype in FIELDS.items():
        count = length if name.endswith("_L") else 1
        fields[name] = StateField(dtype, end, count)
        end += -(-count * dtype.itemsize // ALIGNMENT) * ALIGNMENT
    return fields, end


class GraphBuffers:
    """Static memory of captured passes: KV tables, tokens and canvases."""

    @torch.inference_mode(False)
    def __init__(
        self, model: Gemma, *, length: int, num_canvases: int, num_commits: int, max_steps: int
    ) -> None:
        table_VD, layers = model.embed_tokens.weight, model.config.num_hidden_layers
        self.device = device = table_VD.device
        self.length, self.num_canvases, self.max_steps = length, num_canvases, max_steps
        self.padding, entries = num_canvases, num_canvases + 1 + num_commits
        self.first_commit = num_canvases + 1

        def zeros(*size: int, dtype: torch.dtype = torch.long) -> Tensor:
            return torch.zeros(size, dtype=dtype, device=device)

        # KV table, first position, token count; tokens of commits.
        self.table_size = 6 * layers
        self.meta_EM = zeros(entries, self.table_size + 2 + length)
        self.table_EX6 = self.meta_EM[:, : self.table_size].view(entries, layers, 6)
        self.start_E = self.meta_EM[:, self.table_size]
        self.count_E = self.meta_EM[:, self.table_size + 1]
        self.commit_EL = self.meta_EM[:, self.table_size + 2 :]
        self.entry_I = zeros(num_canvases + num_commits, dtype=torch.int32)
        self.causal_E = zeros(entries, dtype=torch.int32)
        self.causal_E[self.first_commit :] = 1
        self.fields, num_bytes = state_fields(length)
        num_entries = num_canvases + 1
        self.state_EB = zeros(num_entries, num_bytes, dtype=torch.uint8)
        self.views = {name: field.view(self.state_EB) for name, field in self.fields.items()}
        self.soft_ELD = zeros(num_entries, length, table_VD.shape[1], dtype=table_VD.dtype)
        self.uniform_ENL = zeros(num_entries, max_steps + 1, length, dtype=torch.float64)
        self.noise_ENL = zeros(num_entries, max_steps + 1, length)
        self.temperature_EN = torch.ones(num_entries, max_steps, device=device)
        self.draw_temperature_E = torch.ones(num_entries, device=device)
        self.rule_E3 = torch.ones(num_entries, 3, device=device)
        self.step_E = zeros(num_entries)
        positions = num_canvases * length
        self.temperature_T = torch.ones(positions, device=device)
        self.draw_temperature_T = torch.ones(positions, device=device)
        self.uniform_T = zeros(positions, dtype=torch.float64)
        self.current_T = zeros(positions)
        # Read by the host after a step: has converged; candidates cover the mass.
        self.flags_E2 = torch.zeros(
            num_entries, 2, dtype=torch.bool, pin_memory=device.type == "cuda"
        )
        self.noise: list[BlockNoise | None] = [None] * num_entries  # noise loaded into each entry
        self.samplers: list[Sampler | None] = [None] * num_entries

    def segments(self, num_canvases: int, num_commits: int) -> Segments:
        kind = CANVAS if not num_commits else MIXED if num_canvases else CAUSAL
        return Segments(
            entry_I=self.entry_I[: num_canvases + num_commits],
            count_E=self.count_E,
            causal_E=self.causal_E,
            stride=self.length,
            kind=kind,
        )

    def tokens(self, num_canvases: int, num_commits: int) -> EmbedTokens:
        return EmbedTokens(
            entry_I=self.entry_I[: num_canvases + num_commits],
            canvas_EL=self.views["tokens_L"],
            commit_EL=self.commit_EL,
            start_E=self.start_E,
            length=self.length,
            num_canvases=num_canvases,
        )

    def step_inputs(self) -> StepInputs:
        names = StepInputs.__slots__
        return StepInputs(**{name: getattr(self, name) for name in names})

    def canvas_states(self) -> CanvasStates:
        views = self.views
        return CanvasStates(
            tokens_EL=views["tokens_L"],
            guess_EL=views["guess_L"],
            accepted_EL=views["accepted_L"],
            entropy_EL=views["entropy_L"],
            pinned_EL=views["pinned_L"],
            converged_E=views["converged"][:, 0],
            stable_E=views["stable_steps"][:, 0],
            step_E=self.step_E,
            noise_ENL=self.noise_ENL,
            rule_E3=self.rule_E3,
            flags_E2=self.flags_E2,
        )

    def set_entries(self, entries: list[int]) -> None:
        """Set the entries of the next pass."""
        entry_I = torch.tensor(entries, dtype=torch.int32)
        self.entry_I[: len(entries)].copy_(entry_I, non_blocking=True)

    def write_kv_table(
        self, entry: int, table_X6: NDArray[np.int64], start: int, count: int
    ) -> None:
        """Write a canvas's KV table, first position and length."""
        meta = torch.from_numpy(np.concatenate([table_X6.ravel(), (start, count)]))
        self.meta_EM[entry, : self.table_size + 2].copy_(meta, non_blocking=True)

    def write_commits(self, meta_KM: NDArray[np.int64]) -> None:
        """Write entries of commits: KV tables, positions, counts, tokens."""
        first = self.first_commit
        self.meta_EM[first : first + len(meta_KM)].copy_(
            torch.from_numpy(meta_KM), non_blocking=True
        )

    def load(self, entry: int, canvas: Canvas, sampler: Sampler, noise: BlockNoise) -> None:
        """Load a canvas into an entry."""
        self.write_state(entry, canvas)
        if canvas.soft_LD is None:
            self.soft_ELD[entry].zero_()  # exactly no self-conditioning
        else:
            self.soft_ELD[entry, : canvas.length].copy_(canvas.soft_LD)
        count = sampler.max_denoising_steps
        if self.noise[entry] is not noise:
            self.uniform_ENL[entry, : count + 1, : canvas.length].copy_(noise.uniform_NL)
            self.noise_ENL[entry, : count + 1, : canvas.length].copy_(noise.tokens_NL)
            self.noise[entry] = noise
        if self.samplers[entry] != sampler:
            self._load_sampler(entry, sampler)
        self.step_E[entry].fill_(canvas.num_steps)

    def _load_sampler(self, entry: int, sampler: Sampler) -> None:
        count, rule = sampler.max_denoising_steps, sampler.rule
        temperatures = [sampler.temperature_at(count - n) for n in range(count)]
        self.temperature_EN[entry, :count].copy_(torch.tensor(temperatures))
        self.draw_temperature_E[entry].fill_(sampler.temperature)
        if isinstance(rule, EntropyBound):
            thresholds = (rule.entropy_bound, rule.confidence_threshold, rule.stability_threshold)
            self.rule_E3[entry].copy_(torch.tensor(thresholds))
        self.samplers[entry] = sampler

    def write_state(self, entry: int, canvas: Canvas) -> None:
        """Write a canvas in one copy; positions beyond its length are pinned."""
        count = canvas.length
        if canvas.tokens_L.device.type == "cpu" and self.device.type == "cuda":
            state_1B = torch.zeros(1, self.state_EB.shape[1], dtype=torch.uint8)
            views = {name: field.view(state_1B)[0] for name, field in self.fields.items()}
        else:
            state_1B, views = None, {name: view[entry] for name, view in self.views.items()}
        for name, view in views.items():
            if not name.endswith("_L"):
                view[0] = getattr(canvas, name)
                continue
            view[:count] = getattr(canvas, name)
            view[count:] = 1 if name == "pinned_L" else 0
        if canvas.reopened_L is not None:
            views["pinned_L"][:count].masked_fill_(canvas.reopened_L, 2)
        if state_1B is not None:
            self.state_EB[entry].copy_(state_1B[0])

    def canvas(self, state_B: Tensor, before: Canvas) -> Canvas:
        """Return the canvas of a copied state, without soft embeddings."""
        views = {name: field.view(state_B[None])[0] for name, field in self.fields.items()}
        count = before.length
        return Canvas(
            tokens_L=views["tokens_L"][:count],
            pinned_L=before.pinned_L,  # a step adds no pins
            accepted_L=views["accepted_L"][:count].view(torch.bool),
            guess_L=views["guess_L"][:count],
            entropy_L=views["entropy_L"][:count],
            soft_LD=None,
            converged=views["converged"][0].view(torch.bool),
            stable_steps=views["stable_steps"][0],
            num_steps=before.num_steps + 1,
        )


@cache
def capture_stream(device: int) -> torch.cuda.Stream:
    """Return one stream for all captures, since libraries keep 32 MiB per stream.

    Default priority: with PDL, high-priority kernels would occupy SMs needed by the side stream
    they depend on.
    """
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


class Captured(NamedTuple):
    """A captured pass and its output."""

    graph: torch.cuda.CUDAGraph
    output: object


class Graphs:
    """Captured passes of one device. A pass must use the same memory each time."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.pool: Pool | None = torch.cuda.graph_pool_handle() if device.type == "cuda" else None
        self.captured: dict[Hashable, Captured | None] = {}
        # Keys with the thread that ran them eagerly: library handles are per thread.
        self.seen: set[tuple[Hashable, int]] = set()

    def run(self, key: Hashable, work: Callable[[], R]) -> R:
        """Run a pass: replay it if captured, capture it if it has run before.

        Returns the result of `work`; a captured pass returns the same memory each time.
        """
        has_run = (key, get_ident()) in self.seen
        if has_run and key not in self.captured and self.pool is not None:
            self.captured[key] = self._try_capture(work)
        captured = self.captured.get(key)
        if captured is None:
            output = work()
            self.seen.add((key, get_ident()))
            return output
        captured.graph.replay()
        return cast(R, captured.output)

    def _try_capture(self, work: Callable[[], object]) -> Captured | None:
        """Capture a pass; on failure warn and return None, and the pass runs eagerly."""
        try:
            return self._capture(work)
        except RuntimeError as error:
            reason = str(error).partition("\n")[0]
            logger.warning("a pass is not captured, and slower for it: %s", reason)
            if not any(self.captured.values()):
                self._renew_pool()
            return None

    def is_captured(self, key: Hashable) -> bool:
        return self.captured.get(key) is not None

    def clear(self) -> None:
        """Drop all captures and their memory pool."""
        self.captured.clear()
        self.seen.clear()
        self._renew_pool()

    def _renew_pool(self) -> None:
        if self.pool is not None:
            self.pool = torch.cuda.graph_pool_handle()

    def _capture(self, work: Callable[[], object]) -> Captured:
        torch.cuda.synchronize(self.device)
        torch.cuda.empty_cache()  # the capture needs memory cached by eager runs
        graph = torch.cuda.CUDAGraph()
        stream = capture_stream(torch.cuda.current_device())
        # Do not block other threads, such as a server's.
        mode = "thread_local"
        capture = torch.cuda.graph(graph, pool=self.pool, stream=stream, capture_error_mode=mode)
        # A capture that fails to end leaves its stream current.
        with torch.cuda.stream(stream), capture:
            output = work()
        return Captured(graph, output)
