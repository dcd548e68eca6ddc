"""The reference's own generation, recorded: noise, canvases, step counts, accepted counts."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from transformers import DiffusionGemmaForBlockDiffusion
from transformers.models.diffusion_gemma import generation_diffusion_gemma as generation

from dgemma.diffusion.canvas import BlockNoise


@dataclass
class Block:
    """One block of a whole batch, as the reference saw it."""

    fresh_BL: Tensor
    draws: list[Tensor] = field(default_factory=list)  # uniform numbers that give its draws
    renoise: list[Tensor] = field(default_factory=list)
    steps_B: Tensor = field(default_factory=lambda: torch.zeros(0))
    accepted: list[Tensor] = field(default_factory=list)  # counts per step; -1 for finished rows
    canvas_BL: Tensor = field(default_factory=lambda: torch.zeros(0))  # before any trimming

    def noise(self, row: int, max_steps: int) -> BlockNoise:
        """The noise of one row in our form; steps the reference never took stay zero."""
        length = self.fresh_BL.shape[1]
        uniform_NL = torch.zeros(max_steps + 1, length, dtype=torch.float64)
        tokens_NL = torch.zeros(max_steps + 1, length, dtype=torch.long)
        tokens_NL[0] = self.fresh_BL[row]
        for step, (draw, tokens) in enumerate(zip(self.draws, self.renoise, strict=True), start=1):
            uniform_NL[step], tokens_NL[step] = draw[row], tokens[row]
        return BlockNoise(uniform_NL, tokens_NL)


def uniform_of(probabilities_RV: Tensor, token_R: Tensor) -> Tensor:
    """The middle of the interval of the running sum that belongs to each drawn token."""
    p_RV = probabilities_RV.double()
    cdf_RV = p_RV.cumsum(-1)
    middle_RV = (cdf_RV - p_RV / 2) / cdf_RV[:, -1:]
    return middle_RV.gather(-1, token_R)[:, 0]


@contextmanager
def recording(model: DiffusionGemmaForBlockDiffusion) -> Iterator[list[Block]]:
    """Record every block generated inside. The reference runs unchanged, on its own generator."""
    blocks: list[Block] = []
    draw_canvas = generation.EntropyBoundSampler.initialize_canvas
    multinomial, take_step, finalize = (
        torch.multinomial,
        model._denoising_step,
        model._finalize_canvas,
    )
    in_step = False

    def initialize(self: Any, batch_size: int, device: Any) -> Tensor:
        canvas = draw_canvas(self, batch_size, device)
        if in_step:
            blocks[-1].renoise.append(canvas.clone())
        else:
            blocks.append(Block(canvas.clone(), steps_B=torch.zeros(batch_size, dtype=torch.long)))
        return canvas

    def draw(probabilities: Tensor, num_samples: int) -> Tensor:
        token = multinomial(probabilities, num_samples=num_samples)
        shape = blocks[-1].fresh_BL.shape
        blocks[-1].draws.append(uniform_of(probabilities, token).view(shape))
        return token

    def step(**given: Any) -> Any:
        nonlocal in_step
        in_step, moving_B = True, ~given["finished_denoising"].clone()
        result = take_step(**given)
        in_step = False
        blocks[-1].steps_B += moving_B
        count_B = given["sampler"].accepted_token_mask.sum(-1)
        blocks[-1].accepted.append(torch.where(moving_B, count_B, -1))
        return result

    def finish(**given: Any) -> Any:
        blocks[-1].canvas_BL = given["input_ids"][:, -given["canvas_length"] :].clone()
        return finalize(**given)

    with (
        mock.patch.object(generation.EntropyBoundSampler, "initialize_canvas", initialize),
        mock.patch.object(torch, "multinomial", draw),
        mock.patch.object(model, "_denoising_step", step),
        mock.patch.object(model, "_finalize_canvas", finish),
    ):
        yield blocks
