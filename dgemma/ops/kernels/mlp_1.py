"""The dense part and the experts of very few tokens, side by side in two launches.

Both read the same stream, and neither the other's results: a launch has programs of both. Those of
the dense part come first. What they read, weights and rows, is there before the experts are even
chosen, so they stream while that is done. In the second launch every program has all of its
weights under way before it waits for the first one's results. The dense part's second product is
cut where its depth is a multiple of an expert's, so that programs of both kinds are as large; what
comes next adds the parts up.

T tokens, K experts per token, A = T * K choices, E experts, D width, I expert width, W width of the
dense part, S parts of its second product.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from dgemma.ops.kernels.experts_1 import add_4, sums, sums_4, vector, vectors_4
from dgemma.ops.kernels.launch import after, early
from dgemma.ops.kernels.pieces import activate
from dgemma.ops.kernels.unpack_4 import is_compiled, load_scales, load_words
from dgemma.ops.nvfp4_order import Laid


@dataclass(frozen=True, slots=True)
class Cut:
    """Outputs of a program in either launch, inputs at a time in the first, and warps."""

    columns: int = 4  # of both halves
    depth: int = 256
    warps: int = 2
    down_columns: int = 8
    down_warps: int = 4


# By bits of an expert's weight; `bench/gpu_token.py` tries others.
TABLE = {16: Cut(), 8: Cut(8, 256, 2, 16, 4), 4: Cut(8, 256, 2, 16, 4)}

# Numbers, and a factor for each output of 8-bit ones; or 4-bit ones.
Flat = tuple[Tensor, Tensor | None]
Stored = Flat | Laid


def both(
    rows: tuple[Tensor, Tensor],
    ids_TK: Tensor,
    dense: tuple[Flat, Flat],
    experts: tuple[Stored, Stored],
    cut: Cut | None = None,
) -> tuple[Tensor, Tensor]:
    """What the dense part gives, [S, T, D] in float32, and each choice, [A, D], not yet weighted.

    `rows` are what the dense part and the experts read; `dense` and `experts`: first and second
    weights, gate rows before up rows.
    """
    cut = cut or TABLE[_bits(experts[0])]
    hidden = _first(rows, ids_TK, dense[0], experts[0], cut)
    return _second(hidden, ids_TK, dense[1], experts[1], cut)


def _bits(stored: Stored) -> int:
    return 4 if isinstance(stored, Laid) else min(16, 8 * stored[0].element_size())


def _first(
    rows: tuple[Tensor, Tensor], ids_TK: Tensor, dense: Flat, expert: Stored, cut: Cut
) -> tuple[Tensor, Tensor]:
    """gelu(gate) * up of the dense part, [T, W], and of every choice, [A, I]."""
    dense_TD, expert_TD = (x_TD.contiguous() for x_TD in rows)
    count, width = dense_TD.shape
    weight, inner = _given(expert), _outputs(expert) // 2
    wide = len(dense[0]) // 2
    dense_TW = dense_TD.new_empty(count, wide)
    hidden_AI = dense_TD.new_empty(ids_TK.numel(), inner)
    programs = count * triton.cdiv(wide, cut.columns)
    programs += ids_TK.numel() * triton.cdiv(inner, cut.columns)
    _gate_up[(programs,)](
        dense_TD,
        expert_TD,
        ids_TK.contiguous(),
        *_flat(dense),
        *weight,
        dense_TW,
        hidden_AI,
        count,
        W=wide,
        I=inner,
        BK=cut.depth,
        BN=cut.columns,
        num_warps=cut.warps,
        **_common(dense, expert, ids_TK, width),
    )
    return dense_TW, hidden_AI


def _second(
    hidden: tuple[Tensor, Tensor], ids_TK: Tensor, dense: Flat, expert: Stored, cut: Cut
) -> tuple[Tensor, Tensor]:
    dense_TW, hidden_AI = hidden
    (count, wide), inner = dense_TW.shape, hidden_AI.shape[1]
    width, parts = len(dense[0]), wide // inner if wide % inner == 0 else 1
    dense_STD = dense_TW.new_empty(parts, count, width, dtype=torch.float32)
    out_AD = dense_TW.new_empty(len(hidden_AI), width)
    programs = (parts * count + len(hidden_AI)) * triton.cdiv(width, cut.down_columns)
    _down[(programs,)](
        dense_TW,
        hidden_AI,
        ids_TK.contiguous(),
        *_flat(dense),
        *_given(expert),
        dense_STD,
        out_AD,
        count,
        W=wide,
        I=inner,
        S=parts,
        SHARE=triton.next_power_of_2(wide // parts),
        WHOLE=max(64, triton.next_power_of_2(inner)),
        BN=cut.down_columns,
        num_warps=cut.down_warps,
        **_common(dense, expert, ids_TK, width),
    )
    return dense_STD, out_AD


def _common(dense: Flat, expert: Stored, ids_TK: Tensor, width: int) -> dict[str, int | bool]:
    return {
        "DENSE_8": dense[1] is not None,
        "BITS": _bits(expert),
        "TOP": ids_TK.shape[1],
        "D": width,
        "FAST": is_compiled(),
        **early(),
    }


def _flat(stored: Flat) -> tuple[Tensor, Tensor]:
    """What has no factor stands in for it."""
    numbers, factor = stored
    return numbers, numbers if factor is None else factor


def _given(stored: Stored) -> tuple[Tensor, Tensor, Tensor]:
    """Numbers, scales of 4-bit ones, and factors."""
    if isinstance(stored, Laid):
        return stored.words_EW, stored.scales_EW, stored.factor_EH
    numbers, factor = _flat(stored)
    return numbers, numbers, factor


def _outputs(stored: Stored) -> int:
    return stored.outputs if isinstance(stored, Laid) else stored[0].shape[1]


@triton.jit
def _gate_up(
    dense_TD,
    expert_TD,
    ids,
    dense_weight,
    dense_factor,
    weights,
    scales,
    factor,
    dense_TW,
    hidden_AI,
    rows,
    DENSE_8: tl.constexpr,
    BITS: tl.constexpr,
    TOP: tl.constexpr,
    D: tl.constexpr,
    W: tl.constexpr,
    I: tl.constexpr,  # noqa: E741
    FAST: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    EARLY: tl.constexpr,
):
    program = tl.program_id(0)
    own = rows * ((W + BN - 1) // BN)
    if program < own:
        row = program % rows
        n = program // rows * BN + tl.arange(0, BN)
        gate, up = sums(dense_TD + row * D, dense_weight, n, D, W, BN, BK)
        if DENSE_8:
            gate *= tl.load(dense_factor + n, mask=n < W, other=0.0)
            up *= tl.load(dense_factor + W + n, mask=n < W, other=0.0)
        hidden = activate(gate, up).to(dense_TW.dtype.element_ty)
        after(EARLY)
        tl.store(dense_TW + row * W + n, hidden, mask=n < W)
    else:
        choice = (program - own) % (rows * TOP)
        n = (program - own) // (rows * TOP) * BN + tl.arange(0, BN)
        after(EARLY)
        expert = tl.load(ids + choice).to(tl.int64)
        x = expert_TD + choice // TOP * D
        if BITS == 4:
            words = weights + expert * (2 * I * D // 4)
            gate, up = sums_4(x, words, scales + expert * (2 * I * D // 64), n, D, I, FAST, BN, BK)
            gate *= tl.load(factor + 2 * expert)
            up *= tl.load(factor + 2 * expert + 1)
        else:
            gate, up = sums(x, weights + expert * (2 * I * D), n, D, I, BN, BK)
            if BITS == 8:
                gate *= tl.load(factor + expert * 2 * I + n, mask=n < I, other=0.0)
                up *= tl.load(factor + expert * 2 * I + I + n, mask=n < I, other=0.0)
        hidden = activate(gate, up).to(hidden_AI.dtype.element_ty)
        tl.store(hidden_AI + choice * I + n, hidden, mask=n < I)


@triton.jit
def _tile(weights, n, N: tl.constexpr, K: tl.constexpr, ROW: tl.constexpr, BK: tl.constexpr):
    """K inputs, at most BK, of outputs n; a row of the weight has ROW of them."""
    k = tl.arange(0, BK)
    at = weights + n[:, None] * ROW + k[None, :]
    return tl.load(at, mask=(n < N)[:, None] & (k < K)[None, :], other=0.0)


@triton.jit
def _times(tile, x, n, K: tl.constexpr, BK: tl.constexpr):
    here = vector(x, n, tl.arange(0, BK), K, K == BK)
    return tl.sum(tile.to(tl.float32) * here, 1)


@triton.jit
def _down(
    dense_TW,
    hidden_AI,
    ids,
    dense_weight,
    dense_factor,
    weights,
    scales,
    factor,
    dense_STD,
    out_AD,
    rows,
    DENSE_8: tl.constexpr,
    BITS: tl.constexpr,
    TOP: tl.constexpr,
    D: tl.constexpr,
    W: tl.constexpr,
    I: tl.constexpr,  # noqa: E741
    S: tl.constexpr,
    SHARE: tl.constexpr,
    WHOLE: tl.constexpr,
    FAST: tl.constexpr,
    BN: tl.constexpr,
    EARLY: tl.constexpr,
):
    depth: tl.constexpr = W // S
    program = tl.program_id(0)
    own = rows * S * ((D + BN - 1) // BN)
    if program < own:
        line = program % (rows * S)  # parts, and rows within a part
        first = line // rows * depth
        n = program // (rows * S) * BN + tl.arange(0, BN)
        tile = _tile(dense_weight + first, n, D, depth, W, SHARE)
        if DENSE_8:
            scale = tl.load(dense_factor + n, mask=n < D, other=0.0)
        after(EARLY)
        y = _times(tile, dense_TW + line % rows * W + first, n, depth, SHARE)
        if DENSE_8:
            y *= scale
        tl.store(dense_STD + line * D + n, y, mask=n < D)
    else:
        choice = (program - own) % (rows * TOP)
        n = (program - own) // (rows * TOP) * BN + tl.arange(0, BN)
        # The experts were chosen before the first launch, which is over when this one has waited.
        expert = tl.load(ids + choice).to(tl.int64)
        hidden = hidden_AI + choice * I
        if BITS == 4:
            blocks: tl.constexpr = WHOLE // 64
            dtype: tl.constexpr = hidden_AI.dtype.element_ty
            words = load_words(weights + expert * (D * I // 4), n, 0, D, I, blocks, False)
            scale_4 = load_scales(scales + expert * (D * I // 64), n, 0, D, I, blocks, False)
            whole = tl.load(factor + expert)
            after(EARLY)
            here = vectors_4(hidden, n, 0, I, blocks)
            total = tl.zeros((BN, WHOLE // 4), dtype=tl.float32)
            y = tl.sum(add_4(total, here, words, scale_4, BN, blocks, dtype, FAST), 1) * whole
        else:
            tile = _tile(weights + expert * (D * I), n, D, I, I, WHOLE)
            if BITS == 8:
                scale = tl.load(factor + expert * D + n, mask=n < D, other=0.0)
            after(EARLY)
            y = _times(tile, hidden, n, I, WHOLE)
            if BITS == 8:
                y *= scale
        tl.store(out_AD + choice * D + n, y.to(out_AD.dtype.element_ty), mask=n < D)
