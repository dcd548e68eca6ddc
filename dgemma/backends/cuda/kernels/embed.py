"""Inputs of a pass: embeddings of its tokens, RoPE tables, and per-token inputs of a step.

One launch for all segments. Canvas segments come first: their normalized self-conditioning goes
through its MLP, after which `add_and_norm` computes the input of the stack. Embeddings of other
segments are used as they are; without canvases they are also normalized for the first layer. Each
value is rounded where the reference rounds it.

T tokens, L of a segment, E table entries, N steps, D width, V vocabulary, F RoPE pairs of all
layer types, one type after the other.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from dgemma.backends.cuda.kernels.common import (
    gdc_wait,
    inverse_rms,
    launch,
    pdl_kwargs,
    row_warps,
)

PAIRS = 128  # RoPE pairs of a program


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbedTokens:
    """Tokens and positions of the segments."""

    entry_I: Tensor  # int32: table entry of each segment
    canvas_EL: Tensor  # int64, strided: tokens of canvases
    commit_EL: Tensor  # the same for other segments
    start_E: Tensor  # int64, strided: position of a segment's first token
    length: int  # of a segment
    num_canvases: int  # segments, which come first


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeTables:
    """Inverse frequencies of all layer types, and the tables of a pass."""

    freq_F: Tensor
    start_F: Tensor  # int32: index of the first pair of a pair's layer type
    width_F: Tensor  # int32: pairs of that type
    cos_TF: Tensor  # flat: one [T, width] table after the other
    sin_TF: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class StepInputs:
    """Per-row state that a denoising step reads, and the per-token query it becomes."""

    soft_ELD: Tensor
    step_E: Tensor  # int64: steps taken
    temperature_EN: Tensor
    uniform_ENL: Tensor  # float64
    draw_temperature_E: Tensor
    temperature_T: Tensor
    uniform_T: Tensor
    draw_temperature_T: Tensor
    current_T: Tensor  # int64


@dataclass(frozen=True, slots=True)
class Table:
    """The token embeddings."""

    weight_VD: Tensor
    scale: float


def embed(
    tokens: EmbedTokens,
    table: Table,
    rope: RopeTables,
    norm: tuple[Tensor, float],
    step: StepInputs | None = None,
) -> tuple[Tensor, Tensor]:
    """Return embeddings [T, D], and normalized self-conditioning of canvases, [T, D].

    Without canvases the second is the first layer's normalized input; `norm`: weight and epsilon.
    """
    weight_VD, width = table.weight_VD, table.weight_VD.shape[1]
    count, pairs = len(tokens.entry_I) * tokens.length, len(rope.freq_F)
    vector_TD, normed_TD = weight_VD.new_empty(count, width), weight_VD.new_empty(count, width)
    block = triton.next_power_of_2(width)
    names = StepInputs.__slots__
    # Without canvases the pointers are not read: any tensor will do.
    inputs = [tokens.start_E] * len(names) if step is None else [getattr(step, n) for n in names]
    steps = 0 if step is None else step.temperature_EN.shape[1]
    launch(_embed, (count, 1 + triton.cdiv(pairs, PAIRS)))(
        tokens.entry_I,
        tokens.canvas_EL,
        tokens.canvas_EL.stride(0),
        tokens.commit_EL,
        tokens.commit_EL.stride(0),
        tokens.start_E,
        tokens.start_E.stride(0),
        weight_VD,
        norm[0],
        vector_TD,
        normed_TD,
        rope.freq_F,
        rope.start_F,
        rope.width_F,
        rope.cos_TF,
        rope.sin_TF,
        *inputs,
        table.scale,
        norm[1],
        count,
        tokens.num_canvases * tokens.length,
        steps,
        L=tokens.length,
        D=width,
        F=pairs,
        HAS_CANVAS=step is not None,
        BLOCK=block,
        PAIRS=PAIRS,
        num_warps=row_warps(block),
        **pdl_kwargs(),
    )
    return vector_TD, normed_TD


def add_and_norm(x_TD: Tensor, part_CD: Tensor, eps: float) -> Tensor:
    """Add self-conditioning to the first C rows and normalize the sums; other rows are copied."""
    width, out_TD = x_TD.shape[1], torch.empty_like(x_TD)
    block = triton.next_power_of_2(width)
    launch(_add_and_norm, (len(x_TD),))(
        x_TD,
        part_CD,
        out_TD,
        eps,
        len(part_CD),
        D=width,
        BLOCK=block,
        num_warps=row_warps(block),
        **pdl_kwargs(),
    )
    return out_TD


@triton.jit(do_not_specialize=["count", "canvas_tokens", "steps"])
def _embed(
    entry_I,
    canvas_EL,
    canvas_stride,
    commit_EL,
    commit_stride,
    start_E,
    start_stride,
    table_VD,
    weight_D,
    vector_TD,
    normed_TD,
    freq_F,
    start_F,
    width_F,
    cos_TF,
    sin_TF,
    soft_ELD,
    step_E,
    temperature_EN,
    uniform_ENL,
    draw_temperature_E,
    temperature_T,
    uniform_T,
    draw_temperature_T,
    current_T,
    scale,
    eps,
    count,
    canvas_tokens,
    steps,
    L: tl.constexpr,
    D: tl.constexpr,
    F: tl.constexpr,
    HAS_CANVAS: tl.constexpr,
    BLOCK: tl.constexpr,
    PAIRS: tl.constexpr,
    PDL: tl.constexpr,
):
    gdc_wait(PDL)
    t = tl.program_id(0)
    index = t % L
    entry = tl.load(entry_I + t // L).to(tl.int64)
    if tl.program_id(1) == 0:
        d = tl.arange(0, BLOCK)
        dtype: tl.constexpr = vector_TD.dtype.element_ty
        if t < canvas_tokens:
            token = tl.load(canvas_EL + entry * canvas_stride + index)
        else:
            token = tl.load(commit_EL + entry * commit_stride + index)
        x = tl.load(table_VD + token * D + d, mask=d < D, other=0.0).to(tl.float32)
        x = (x * scale).to(dtype)
        tl.store(vector_TD + t * D + d, x, mask=d < D)
        if HAS_CANVAS:
            if t < canvas_tokens:
                soft = tl.load(soft_ELD + (entry * L + index) * D + d, mask=d < D, other=0.0)
                _store_normed(soft.to(tl.float32), weight_D, normed_TD, t, d, eps, D)
                step = tl.minimum(tl.load(step_E + entry), steps - 1)  # padding steps without end
                tl.store(temperature_T + t, tl.load(temperature_EN + entry * steps + step))
                tl.store(draw_temperature_T + t, tl.load(draw_temperature_E + entry))
                # Row 0 of the noise is the fresh canvas.
                noise = uniform_ENL + (entry * (steps + 1) + step + 1) * L + index
                tl.store(uniform_T + t, tl.load(noise))
                tl.store(current_T + t, token)
        else:
            _store_normed(x.to(tl.float32), weight_D, normed_TD, t, d, eps, D)
    else:
        f = (tl.program_id(1) - 1) * PAIRS + tl.arange(0, PAIRS)
        is_pair = f < F
        position = (tl.load(start_E + entry * start_stride) + index).to(tl.float32)
        angle = position * tl.load(freq_F + f, mask=is_pair, other=0.0)
        start = tl.load(start_F + f, mask=is_pair, other=0)
        width = tl.load(width_F + f, mask=is_pair, other=0)
        at = start * count + t * width + f - start
        tl.store(cos_TF + at, tl.cos(angle), mask=is_pair)
        tl.store(sin_TF + at, tl.sin(angle), mask=is_pair)


@triton.jit
def _store_normed(x, weight_D, normed_TD, t, d, eps, D: tl.constexpr):
    weight = tl.load(weight_D + d, mask=d < D, other=0.0).to(tl.float32)
    normed = x * inverse_rms(x, D, eps) * weight
    tl.store(normed_TD + t * D + d, normed.to(normed_TD.dtype.element_ty), mask=d < D)


@triton.jit(do_not_specialize=["canvas_tokens"])
def _add_and_norm(
    x_TD,
    part_CD,
    out_TD,
    eps,
    canvas_tokens,
    D: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    gdc_wait(PDL)
    d = tl.arange(0, BLOCK)
    t = tl.program_id(0)
    at = t * D + d
    x = tl.load(x_TD + at, mask=d < D, other=0.0).to(tl.float32)
    if t < canvas_tokens:
        x += tl.load(part_CD + at, mask=d < D, other=0.0).to(tl.float32)
        x = x.to(x_TD.dtype.element_ty).to(tl.float32)
        x = x * inverse_rms(x, D, eps)
    tl.store(out_TD + at, x.to(out_TD.dtype.element_ty), mask=d < D)
