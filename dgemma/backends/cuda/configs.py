"""Configs of the kernels: how much one program takes, its warps, and loads in flight.

Tuned on an H200 at the released shapes (`bench/tune.py`); these are used on any Hopper GPU, and on
Blackwell ones with as much shared memory. Other cards get smaller blocks, which fit 99 KB of shared
memory and the registers of their matrix instructions (RTX 30, 40 and 50 series; an A100 too, but
for attention). These were compiled for every card, and measured on none: see
`tests/kernels/compile_all.py`.
"""

import os
from dataclasses import dataclass, replace
from functools import cache
from importlib.util import find_spec
from math import gcd

import torch
import triton

from dgemma.backends.cuda.kernels import device
from dgemma.backends.cuda.support import INTERPRET


def is_hopper_like() -> bool:
    """True if the current device has the shared memory and TMA of an H200."""
    return device.has_tma() and not device.has_small_shared_memory()


# Attention ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionConfig:
    """Queries and keys of a program's blocks, and in how many parts keys are split."""

    queries: int
    keys: int
    warps: int
    stages: int
    parts: int = 1  # of the keys
    slices: int = 1  # of the values' width; each needs all of the scores
    edges: bool = True  # hidden keys are looked for only in blocks that may hold some
    half: bool = True  # parts wait in float16 where the queries have 16 bits
    wide: bool = False  # by `attention_wide.py`, which has its own blocks of 64


def attention_config(queries: int, kv_heads: int, width: int, segments: int = 1) -> AttentionConfig:
    """Choose by the queries of each key head. Few do not fill a GPU: keys are split."""
    num_sms = device.num_sms()
    if queries <= 16:
        stages = 2 if width > 256 and device.has_small_shared_memory() else 3
        form = AttentionConfig(queries=16, keys=32, warps=4, stages=stages, half=False)
        return replace(form, parts=max(1, num_sms // (kv_heads * segments)))
    form = _attention_blocks(width)
    programs = kv_heads * triton.cdiv(queries, form.queries) * form.slices * segments
    return replace(form, parts=max(1, min(8, num_sms // programs)))


def _attention_blocks(width: int) -> AttentionConfig:
    if device.has_small_shared_memory():
        keys = 16 if width > 256 else 32
        return AttentionConfig(queries=64, keys=keys, warps=8, stages=2)
    if width > 256 and _has_wide():
        return AttentionConfig(queries=64, keys=64, warps=8, stages=1, wide=True)
    if width > 256 and not device.has_tma():  # an A100
        return AttentionConfig(queries=64, keys=32, warps=8, stages=2)
    if width > 256:
        return AttentionConfig(queries=128, keys=32, warps=8, stages=2, slices=2)
    return AttentionConfig(queries=128, keys=64, warps=8, stages=2)


def _has_wide() -> bool:
    """True on Hopper with a Triton that has Gluon."""
    if os.environ.get(INTERPRET) == "1" or not torch.cuda.is_available():
        return False
    return device.capability()[0] == 9 and _has_gluon()


@cache
def _has_gluon() -> bool:
    return find_spec("triton.experimental.gluon") is not None


@dataclass(frozen=True, slots=True)
class HeadsConfig:
    """Heads of a program of `qk_norm_rope.py`, a power of two, and its warps."""

    heads: int
    warps: int


def heads_config(query_heads: int, kv_heads: int) -> HeadsConfig:
    """At most fp8_out heads, as many as every kind can be divided by; a warp has two of them."""
    together = gcd(8, query_heads, kv_heads)
    return HeadsConfig(together, max(1, together // 2))


# Experts ------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class MoeConfig:
    """Block of a grouped GEMM. What is best depends on the GEMM and on the rows per expert."""

    rows: int  # of one expert, taken together
    columns: int  # of the output; of both halves where there are two
    depth: int  # of the inner dimension at a time
    warps: int = 4
    stages: int = 3  # loads in flight
    swap: bool = False  # weights on the left: they fill the tall side of the matrix unit
    tma: bool = False  # weights through the copy engine
    registers: int | None = None  # at most, of a thread: more programs share a processor then
    whole: bool = False  # 4-bit weights only: a step's depth in one product instead of four
    unroll: int = 1  # 4-bit weights only: steps of the depth in one turn of the loop


@dataclass(frozen=True, slots=True)
class MoeConfigs:
    """Both GEMMs of the experts."""

    gate_up: MoeConfig
    down: MoeConfig


# Entries have the greatest number of rows per expert, were they spread evenly, that they are for.
MoeTable = tuple[tuple[float, MoeConfigs], ...]

MOE_16: MoeTable = (
    (
        1.0,
        MoeConfigs(
            MoeConfig(rows=16, columns=32, depth=128, stages=4),
            MoeConfig(rows=16, columns=64, depth=64, stages=4),
        ),
    ),
    (
        24.0,
        MoeConfigs(
            MoeConfig(rows=32, columns=64, depth=128, stages=2, tma=True),
            MoeConfig(rows=32, columns=64, depth=64, stages=4, swap=True, tma=True),
        ),
    ),
    (
        96.0,
        MoeConfigs(
            MoeConfig(rows=64, columns=64, depth=64, stages=3),
            MoeConfig(rows=64, columns=128, depth=64, stages=3),
        ),
    ),
    (
        float("inf"),
        MoeConfigs(
            MoeConfig(rows=128, columns=128, depth=64, warps=8, stages=4, swap=True, tma=True),
            MoeConfig(rows=256, columns=128, depth=64, warps=8, stages=4, swap=True, tma=True),
        ),
    ),
)

MOE_8: MoeTable = (
    (
        1.0,
        MoeConfigs(
            MoeConfig(rows=16, columns=32, depth=256, stages=3, tma=True),
            MoeConfig(rows=16, columns=64, depth=64, stages=4, tma=True),
        ),
    ),
    (
        24.0,
        MoeConfigs(
            MoeConfig(rows=32, columns=64, depth=128, stages=3, swap=True, tma=True),
            MoeConfig(rows=32, columns=64, depth=128, stages=3, swap=True, tma=True),
        ),
    ),
    (
        96.0,
        MoeConfigs(
            MoeConfig(rows=64, columns=64, depth=128, stages=3, tma=True),
            MoeConfig(rows=64, columns=128, depth=128, stages=3, tma=True),
        ),
    ),
    (
        float("inf"),
        MoeConfigs(
            MoeConfig(rows=128, columns=64, depth=128, stages=3, swap=True, tma=True),
            MoeConfig(rows=128, columns=128, depth=128, stages=3, tma=True),
        ),
    ),
)

# Weights of 4 bits are always on the left and never through the copy engine: for every card.
MOE_4: MoeTable = (
    (
        24.0,
        MoeConfigs(
            MoeConfig(rows=32, columns=64, depth=64, stages=3, whole=True, unroll=2),
            MoeConfig(rows=32, columns=128, depth=64, stages=4, registers=96, whole=True),
        ),
    ),
    (
        96.0,
        MoeConfigs(
            MoeConfig(rows=64, columns=64, depth=64, stages=3, whole=True, unroll=2),
            MoeConfig(rows=64, columns=128, depth=64, stages=3),
        ),
    ),
    (
        float("inf"),
        MoeConfigs(
            MoeConfig(rows=128, columns=64, depth=64, stages=4),
            MoeConfig(rows=128, columns=128, depth=64, stages=3),
        ),
    ),
)

# For cards without a copy engine, or with little shared memory.
SMALL_MOE_16: MoeTable = (
    MOE_16[0],
    (
        24.0,
        MoeConfigs(
            MoeConfig(rows=32, columns=64, depth=64, stages=3),
            MoeConfig(rows=32, columns=64, depth=64, stages=4),
        ),
    ),
    MOE_16[2],
    (
        float("inf"),
        MoeConfigs(
            MoeConfig(rows=128, columns=64, depth=64, warps=8, stages=3),
            MoeConfig(rows=128, columns=128, depth=64, warps=8, stages=3),
        ),
    ),
)

SMALL_MOE_8: MoeTable = (
    (
        1.0,
        MoeConfigs(
            MoeConfig(rows=16, columns=32, depth=256, stages=3),
            MoeConfig(rows=16, columns=64, depth=64, stages=4),
        ),
    ),
    (
        24.0,
        MoeConfigs(
            MoeConfig(rows=32, columns=64, depth=128, stages=3),
            MoeConfig(rows=32, columns=64, depth=128, stages=3),
        ),
    ),
    (
        96.0,
        MoeConfigs(
            MoeConfig(rows=64, columns=64, depth=128, stages=3),
            MoeConfig(rows=64, columns=128, depth=128, stages=3),
        ),
    ),
    (
        float("inf"),
        MoeConfigs(
            MoeConfig(rows=128, columns=64, depth=128, warps=8, stages=3),
            MoeConfig(rows=128, columns=128, depth=128, warps=8, stages=3),
        ),
    ),
)

MOE = {16: MOE_16, 8: MOE_8, 4: MOE_4}
SMALL_MOE = {16: SMALL_MOE_16, 8: SMALL_MOE_8, 4: MOE_4}


def moe_table(bits: int) -> MoeTable:
    """Return the configs for weights of so many bits on the current device."""
    return (MOE if is_hopper_like() else SMALL_MOE)[bits]


def moe_config(num_choices: int, num_experts: int, bits: int = 16) -> MoeConfigs:
    """Choose by the rows of an expert, were they spread evenly."""
    share = num_choices / num_experts
    return next(entry for most, entry in moe_table(bits) if share <= most)


@dataclass(frozen=True, slots=True, kw_only=True)
class MoeDecodeConfig:
    """Block of a program of `moe_decode.py`."""

    columns: int  # outputs; of both halves where there are two
    depth: int  # inputs at a time
    warps: int = 4
    registers: int | None = None  # at most, of a thread


@dataclass(frozen=True, slots=True)
class MoeDecodeConfigs:
    """Both products of the experts."""

    gate_up: MoeDecodeConfig
    down: MoeDecodeConfig


# By bits of a weight.
MOE_DECODE = {
    16: MoeDecodeConfigs(
        MoeDecodeConfig(columns=4, depth=256, warps=2), MoeDecodeConfig(columns=8, depth=128)
    ),
    8: MoeDecodeConfigs(
        MoeDecodeConfig(columns=8, depth=256, warps=2),
        MoeDecodeConfig(columns=16, depth=128, warps=2),
    ),
    4: MoeDecodeConfigs(
        MoeDecodeConfig(columns=8, depth=256, warps=2), MoeDecodeConfig(columns=32, depth=128)
    ),
}


# Router -------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class RouterConfig:
    """Rows and experts of a program, its share of the depth, and a step of it."""

    rows: int = 64
    columns: int = 128
    share: int = 128
    depth: int = 64
    warps: int = 4
    stages: int = 2
    choosers: int = 1  # warps of the second kernel


def router_config(rows: int, num_experts: int, width: int) -> RouterConfig:
    """Fewer parts the more rows there are: the parts have to be written and read."""
    form = RouterConfig(columns=min(128, max(16, triton.next_power_of_2(num_experts))))
    blocks = triton.cdiv(rows, form.rows) * triton.cdiv(num_experts, form.columns)
    share, num_sms = form.share, device.num_sms()
    while share < width and blocks * triton.cdiv(width, 2 * share) >= num_sms:
        share *= 2
    # A share of one step has its weight read before the kernel waits.
    depth = share if share == form.share else form.depth
    return RouterConfig(columns=form.columns, share=share, depth=depth)


# Products outside the experts ---------------------------------------------------------------------

MAX_GEMM_ROWS = 512  # a canvas behind a commit; with more, the library has enough programs too


@dataclass(frozen=True, slots=True)
class GemmConfig:
    """Rows and outputs of a program of an fp8 GEMM, and a step of its depth.

    `parts`: so many programs share the depth, and what reads the product adds them up.
    """

    rows: int = 128
    outputs: int = 64
    depth: int = 128
    parts: int = 1
    warps: int = 4
    stages: int = 4  # loads in flight


# Kept where whole layers ran faster so (`bench/tune.py`). The dense part's first product is not
# among them: alone it would be faster too, but it runs beside the experts.
QKV = GemmConfig()  # what follows it does not add parts up
OUT = GemmConfig(parts=3)  # of attention
DOWN = GemmConfig(parts=2)  # of the dense part
# A part of the soft embedding (`soft_embed_fp8.py`), by `bench/tune.py`: all positions
# of a canvas, so that the table is read once. How many parts there are, the table says.
SOFT = GemmConfig(rows=256, outputs=128, depth=128, warps=8, stages=4)

SMALL_GEMM = {SOFT: GemmConfig(rows=128, outputs=128, depth=128, warps=8, stages=3)}


def fitted(form: GemmConfig) -> GemmConfig:
    """Return the current device's variant of one of the configs above."""
    return form if is_hopper_like() else SMALL_GEMM.get(form, form)


@dataclass(frozen=True, slots=True)
class GemvConfig:
    """Outputs of a program, numbers of a row that it takes at once, and its warps."""

    outputs: int
    chunk: int
    warps: int = 4


# By outputs and depth, for 16 bits. Windowed layers of the released model, before the heads and
# behind attention; found by `bench/tune.py`: 2.68 to 2.62 ms a token.
GEMV = {(8192, 2816): GemvConfig(2, 1024), (2816, 4096): GemvConfig(4, 4096, warps=8)}


def gemv_config(outputs: int, depth: int, *, is_gated: bool, is_8: bool = False) -> GemvConfig:
    """Enough programs for every processor to have several, and whole rows in flight."""
    longest = triton.next_power_of_2(depth)
    if is_gated:
        return GemvConfig(2, min(512, longest), warps=2)
    if (outputs, depth) in GEMV and not is_8:
        return GEMV[outputs, depth]
    if outputs >= 1 << 16:
        return GemvConfig(2, min(2048, longest))
    if outputs >= 6144:
        return GemvConfig(4, min(2048, longest))
    return GemvConfig(2, min(4096, longest))
