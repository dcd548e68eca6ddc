"""One denoising step of all canvases of a pass, whatever memory and kernels it runs on.

A backend supplies the four operations; a CUDA graph is this step captured on static buffers.
Canvases with a constraint, or with a rule of their own, are updated by `update_canvas` on the host.

T positions of all canvases, L of one, D width.
"""

from dataclasses import dataclass
from typing import Protocol, TypeVar

from torch import Tensor

from dgemma.diffusion.canvas import BlockNoise, Canvas, Pins, initial_canvas
from dgemma.diffusion.logit_stats import PositionStats
from dgemma.diffusion.sampler import LogitsAt, Sampler, StepView, advance

OpsStats = TypeVar("OpsStats")


class CanvasConstraint(Protocol):
    """Constrains a canvas after each step: a grammar pins tokens here."""

    def apply(self, canvas: Canvas, view: StepView) -> Canvas:
        """Return the canvas with pins added, and `reopened_L`: positions of rejected guesses."""


@dataclass(frozen=True, slots=True)
class CanvasState:
    """A canvas between two steps, its sampler and its noise."""

    canvas: Canvas
    sampler: Sampler
    noise: BlockNoise
    constraint: CanvasConstraint | None = None

    @property
    def is_done(self) -> bool:
        """True if converged or out of steps; reading the flag waits for the device."""
        return self.canvas.num_steps >= self.sampler.max_denoising_steps or bool(
            self.canvas.converged
        )


def start(
    sampler: Sampler, noise: BlockNoise, pins: Pins, constraint: CanvasConstraint | None = None
) -> CanvasState:
    """Return a canvas before its first step."""
    return CanvasState(initial_canvas(noise.tokens_NL[0], pins), sampler, noise, constraint)


class StepOps(Protocol[OpsStats]):
    """The operations of a step on a backend's memory."""

    def embed(self) -> Tensor:
        """Embed all tokens of the pass; canvases with their self-conditioning."""

    def forward(self, embeds_TD: Tensor) -> Tensor:
        """Run the stack; returns the hidden states of the canvases."""

    def logit_stats(self, hidden_TD: Tensor) -> OpsStats:
        """Compute statistics of each position's distribution: the only vocabulary-sized work."""

    def advance(self, stats: OpsStats) -> None:
        """Let the sampler accept positions, renoise the others and test for convergence."""


def denoise_step(ops: StepOps[OpsStats]) -> OpsStats:
    """Take one step with every canvas of a pass."""
    stats = ops.logit_stats(ops.forward(ops.embed()))
    ops.advance(stats)
    return stats


def update_canvas(state: CanvasState, stats: PositionStats, logits_at: LogitsAt) -> Canvas:
    """Apply the sampler's rule, then the constraint if there is one; soft embeddings come later."""
    noise_L = state.noise.tokens_NL[state.canvas.num_steps + 1]
    canvas = advance(state.canvas, stats, noise_L, state.sampler.rule)
    if state.constraint is None:
        return canvas
    return state.constraint.apply(canvas, StepView(stats, noise_L, logits_at))
