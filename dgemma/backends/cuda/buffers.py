"""Static memory of captured passes: KV tables, tokens, and the canvases of all rows.

An *entry* is what a segment of a pass reads: entries 0 to R - 1 hold canvases, entry R is padding,
the others hold tokens to commit. A pass names its entries in `entry_I`, so that rows may be batched
in any way without moving their state.

R rows, E entries, L tokens of a segment, N steps, D width, X layers, M numbers of an entry.
"""

from dataclasses import dataclass

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

# A canvas's state in bytes, in one run for each entry: one copy brings it to the host or back.
FIELDS = {
    "tokens_L": torch.long,
    "guess_L": torch.long,
    "steady_steps": torch.long,
    "entropy_L": torch.float32,
    "kept_L": torch.uint8,
    "pinned_L": torch.uint8,  # 1: pinned; 2: open, without self-conditioning
    "settled": torch.uint8,
}
ALIGNMENT = 64  # bytes


@dataclass(frozen=True, slots=True)
class StateField:
    dtype: torch.dtype
    offset: int  # bytes
    count: int

    def view(self, state_EB: Tensor) -> Tensor:
        """View of all entries, [E, count]."""
        size = self.count * self.dtype.itemsize
        return state_EB[:, self.offset : self.offset + size].view(self.dtype)


def state_fields(length: int) -> tuple[dict[str, StateField], int]:
    """Layout of a canvas's state, and its size in bytes."""
    fields, end = {}, 0
    for name, dtype in FIELDS.items():
        count = length if name.endswith("_L") else 1
        fields[name] = StateField(dtype, end, count)
        end += -(-count * dtype.itemsize // ALIGNMENT) * ALIGNMENT
    return fields, end


class GraphBuffers:
    """The memory, and what is known of the rows in it."""

    @torch.inference_mode(False)
    def __init__(
        self, model: Gemma, *, length: int, num_rows: int, num_commits: int, max_steps: int
    ) -> None:
        table_VD, layers = model.embed_tokens.weight, model.config.num_hidden_layers
        self.device = device = table_VD.device
        self.length, self.num_rows, self.max_steps = length, num_rows, max_steps
        self.padding, entries = num_rows, num_rows + 1 + num_commits
        self.first_commit = num_rows + 1

        def zeros(*size: int, dtype: torch.dtype = torch.long) -> Tensor:
            return torch.zeros(size, dtype=dtype, device=device)

        # KV table, position of the first token, number of tokens; of commits, their tokens.
        self.table_size = 6 * layers
        self.meta_EM = zeros(entries, self.table_size + 2 + length)
        self.table_EX6 = self.meta_EM[:, : self.table_size].view(entries, layers, 6)
        self.start_E = self.meta_EM[:, self.table_size]
        self.count_E = self.meta_EM[:, self.table_size + 1]
        self.commit_EL = self.meta_EM[:, self.table_size + 2 :]
        self.entry_I = zeros(num_rows + num_commits, dtype=torch.int32)
        self.causal_E = zeros(entries, dtype=torch.int32)
        self.causal_E[self.first_commit :] = 1
        self.fields, num_bytes = state_fields(length)
        rows = num_rows + 1
        self.state_EB = zeros(rows, num_bytes, dtype=torch.uint8)
        self.views = {name: field.view(self.state_EB) for name, field in self.fields.items()}
        self.soft_ELD = zeros(rows, length, table_VD.shape[1], dtype=table_VD.dtype)
        self.uniform_ENL = zeros(rows, max_steps + 1, length, dtype=torch.float64)
        self.noise_ENL = zeros(rows, max_steps + 1, length)
        self.temperature_EN = torch.ones(rows, max_steps, device=device)
        self.draw_temperature_E = torch.ones(rows, device=device)
        self.rule_E3 = torch.ones(rows, 3, device=device)
        self.step_E = zeros(rows)
        positions = num_rows * length
        self.temperature_T = torch.ones(positions, device=device)
        self.draw_temperature_T = torch.ones(positions, device=device)
        self.uniform_T = zeros(positions, dtype=torch.float64)
        self.held_T = zeros(positions)
        # What the host reads of a step: converged; the likely tokens suffice.
        self.flags_E2 = torch.zeros(rows, 2, dtype=torch.bool, pin_memory=device.type == "cuda")
        self.noise: list[BlockNoise | None] = [None] * rows  # whose noise each entry holds
        self.samplers: list[Sampler | None] = [None] * rows

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
            kept_EL=views["kept_L"],
            entropy_EL=views["entropy_L"],
            pinned_EL=views["pinned_L"],
            settled_E=views["settled"][:, 0],
            steady_E=views["steady_steps"][:, 0],
            step_E=self.step_E,
            noise_ENL=self.noise_ENL,
            rule_E3=self.rule_E3,
            flags_E2=self.flags_E2,
        )

    def name_entries(self, entries: list[int]) -> None:
        """Say which entries the next pass reads."""
        given = torch.tensor(entries, dtype=torch.int32)
        self.entry_I[: len(entries)].copy_(given, non_blocking=True)

    def place(self, entry: int, table_X6: NDArray[np.int64], start: int, count: int) -> None:
        """Write where a canvas's keys are, and where it begins."""
        meta = torch.from_numpy(np.concatenate([table_X6.ravel(), (start, count)]))
        self.meta_EM[entry, : self.table_size + 2].copy_(meta, non_blocking=True)

    def place_commits(self, meta_KM: NDArray[np.int64]) -> None:
        """Write whole entries of commits: tables, positions, counts, tokens."""
        first = self.first_commit
        self.meta_EM[first : first + len(meta_KM)].copy_(
            torch.from_numpy(meta_KM), non_blocking=True
        )

    def load(self, entry: int, canvas: Canvas, sampler: Sampler, noise: BlockNoise) -> None:
        """Bring a row into an entry as it stands."""
        self.write_state(entry, canvas)
        if canvas.soft_LD is None:
            self.soft_ELD[entry].zero_()  # contributes exactly nothing
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
        heats = torch.tensor([sampler.temperature_at(count - n) for n in range(count)])
        self.temperature_EN[entry, :count].copy_(heats)
        self.draw_temperature_E[entry].fill_(sampler.temperature)
        if isinstance(rule, EntropyBound):
            numbers = (rule.entropy_bound, rule.confidence_threshold, rule.stability_threshold)
            self.rule_E3[entry].copy_(torch.tensor(numbers))
        self.samplers[entry] = sampler

    def write_state(self, entry: int, canvas: Canvas) -> None:
        """Write a canvas, from the host in one copy; positions beyond it are pinned."""
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
        """A canvas out of a copied state; without soft embeddings."""
        views = {name: field.view(state_B[None])[0] for name, field in self.fields.items()}
        count = before.length
        return Canvas(
            tokens_L=views["tokens_L"][:count],
            pinned_L=before.pinned_L,  # a step adds no pins
            kept_L=views["kept_L"][:count].view(torch.bool),
            guess_L=views["guess_L"][:count],
            entropy_L=views["entropy_L"][:count],
            soft_LD=None,
            settled=views["settled"][0].view(torch.bool),
            steady_steps=views["steady_steps"][0],
            num_steps=before.num_steps + 1,
        )
