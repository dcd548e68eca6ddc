"""The denoising step: four operations in a fixed order, and the state of a canvas between two.

`denoise_step` is the only step in this package. `reference_step.ReferenceStep` implements its
operations with the model's modules; the CUDA backend implements them on static buffers and captures
the step as a CUDA graph. There, canvases with a constraint or a custom rule are updated on the CPU
by `update_canvas`.

T positions of a pass, L of one canvas, D width, N steps.
"""

from dataclasses import dataclass
from typing import Protocol, TypeVar

from torch import Tensor

from dgemma.diffusion.canvas import BlockNoise, Canvas, Pins, initial_canvas
from dgemma.diffusion.logit_stats import PositionStats
from dgemma.diffusion.rules import checked
from dgemma.diffusion.sampler import LogitsAt, Sampler, StepView, advance

Embeds = TypeVar("Embeds")
OpsStats = TypeVar("OpsStats")
Stepped = TypeVar("Stepped", covariant=True)


class CanvasConstraint(Protocol):
    """Constrains a canvas after each step: a grammar pins tokens here."""

    def apply(self, canvas: Canvas, view: StepView) -> Canvas:
        """Return the canvas with added pins, and `reopened_L` set at rejected guesses."""


@dataclass(frozen=True, slots=True)
class CanvasState:
    """A canvas between two steps, its sampler and its noise."""

    canvas: Canvas
    sampler: Sampler
    noise: BlockNoise
    constraint: CanvasConstraint | None = None

    @property
    def is_done(self) -> bool:
        """True if converged or out of steps. Reading it synchronizes the device."""
        return self.canvas.num_steps >= self.sampler.max_denoising_steps or bool(
            self.canvas.converged
        )

    @property
    def noise_row(self) -> int:
        """Return the noise of the next step; row 0 is the initial canvas."""
        return self.canvas.num_steps + 1

    @property
    def temperature(self) -> float:
        """Return the scheduled temperature of the next step."""
        steps_left = self.sampler.max_denoising_steps - self.canvas.num_steps
        return self.sampler.temperature_at(steps_left)


def start(
    sampler: Sampler, noise: BlockNoise, pins: Pins, constraint: CanvasConstraint | None = None
) -> CanvasState:
    """Return a canvas before its first step."""
    canvas = initial_canvas(noise.tokens_NL[0], pins)
    return CanvasState(canvas, checked(sampler), noise, constraint)


class StepOps(Protocol[Embeds, OpsStats, Stepped]):
    """The four operations of a step, implemented by each backend."""

    def embed(self) -> Embeds:
        """Embed the tokens to commit, and the canvases with self-conditioning."""

    def forward(self, embeds: Embeds, /) -> Tensor:
        """Run the layer stack; return the hidden states of the pass."""

    def logit_stats(self, hidden_TD: Tensor) -> OpsStats:
        """Compute the statistics of each canvas position: the only vocabulary-sized work."""

    def advance(self, stats: OpsStats) -> Stepped:
        """Apply each sampler: accept positions, renoise the others, test for convergence."""


def denoise_step(ops: StepOps[Embeds, OpsStats, Stepped]) -> Stepped:
    """Take one step with each canvas of a pass."""
    embeds = ops.embed()
    hidden_TD = ops.forward(embeds)
    stats = ops.logit_stats(hidden_TD)
    return ops.advance(stats)


def update_canvas(state: CanvasState, stats: PositionStats, logits_at: LogitsAt) -> Canvas:
    """Apply the sampler's rule, then the constraint. Soft embeddings are added later."""
    noise_L = state.noise.tokens_NL[state.noise_row]
    canvas = advance(state.canvas, stats, noise_L, state.sampler.rule)
    if state.constraint is None:
        return canvas
    return state.constraint.apply(canvas, StepView(stats, noise_L, logits_at))
