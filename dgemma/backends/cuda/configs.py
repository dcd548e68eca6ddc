"""Kernel configs: block sizes, warps and pipeline stages.

Tuned on an H200 at the released shapes (`bench/tune.py`), and used on all Hopper GPUs and on
Blackwell GPUs with as much shared memory. Other cards get smaller blocks, which fit 99 KB of shared
memory and the registers of their MMA instructions (RTX 30, 40 and 50 series; A100 except for
attention). Those were compiled for every card but not measured: see `tests/kernels/compile_all.py`.
"""

from dataclasses import dataclass, replace
from functools import cache
from importlib.util import find_spec
from math import gcd

import torch
import triton

from dgemma.backends.cuda import device


def is_hopper_like() -> bool:
    """True if the current device has the shared memory and TMA of an H200."""
    return device.has_tma() and not device.has_small_shared_memory()


# Attention ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionConfig:
    """Blocks of queries and keys of a program, and the number of key splits."""

    queries: int
    keys: int
    warps: int
    stages: int
    splits: int = 1  # split-KV
    v_slices: int = 1  # slices of the values' width; each computes all scores
    mask_edges: bool = True  # mask only blocks that may hold hidden keys
    fp16_splits: bool = True  # store split outputs in float16 if the queries have 16 bits
    wide: bool = False  # use `attention_wide.py`, with 64 x 64 blocks


def attention_config(queries: int, kv_heads: int, width: int, segments: int = 1) -> AttentionConfig:
    """Choose by the number of queries per key head: few do not fill a GPU, so keys are split."""
    num_sms = device.num_sms()
    if queries <= 16:
        stages = 2 if width > 256 and device.has_small_shared_memory() else 3
        config = AttentionConfig(queries=16, keys=32, warps=4, stages=stages, fp16_splits=False)
        return replace(config, splits=max(1, num_sms // (kv_heads * segments)))
    config = _attention_blocks(width)
    programs = kv_heads * triton.cdiv(queries, config.queries) * config.v_slices * segments
    return replace(config, splits=max(1, min(8, num_sms // programs)))


def _attention_blocks(width: int) -> AttentionConfig:
    if device.has_small_shared_memory():
        keys = 16 if width > 256 else 32
        return AttentionConfig(queries=64, keys=keys, warps=8, stages=2)
    if width > 256 and _has_wide():
        return AttentionConfig(queries=64, keys=64, warps=8, stages=1, wide=True)
    if width > 256 and not device.has_tma():  # an A100
        return AttentionConfig(queries=64, keys=32, warps=8, stages=2)
    if width > 256:
        return AttentionConfig(queries=128, keys=32, warps=8, stages=2, v_slices=2)
    return AttentionConfig(queries=128, keys=64, warps=8, stages=2)


def _has_wide() -> bool:
    """True on Hopper with a Triton that has Gluon."""
    if device.is_interpreted() or not torch.cuda.is_available():
        return False
    return device.capability()[0] == 9 and _has_gluon()


@cache
def _has_gluon() -> bool:
    return find_spec("triton.experimental.gluon") is not None


@dataclass(frozen=True, slots=True)
class HeadsConfig:
    """Heads per program of `qk_norm_rope.py`, a power of two, and its warps."""

    heads: int
    warps: int


def heads_config(query_heads: int, kv_heads: int) -> HeadsConfig:
    """Return the most heads, up to eight, that divide both counts; two per warp."""
    heads = gcd(8, query_heads, kv_heads)
    return HeadsConfig(heads, max(1, heads // 2))


# Experts ------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class MoeConfig:
    """Blocks of a grouped GEMM. The best depend on the GEMM and on the rows per expert."""

    rows: int  # rows of one expert
    columns: int  # output columns; of both halves for gate and up
    depth: int  # inner dimension per step
    warps: int = 4
    stages: int = 3
    swap_ab: bool = False  # weights on the left, the tall side of the MMA
    tma: bool = False  # weights by TMA
    tail: int = 0  # smaller tile for an expert's last rows; not for NVFP4
    registers: int | None = None  # register limit per thread, for occupancy
    one_dot: bool = False  # packed only: one MMA per step instead of four
    unroll: int = 1  # packed only: steps per loop iteration
    share_scales: bool = True  # Q4_K only: scales are computed once for four threads that need them


@dataclass(frozen=True, slots=True)
class MoeConfigs:
    """Both GEMMs of the experts, up to `max_rows` rows per expert under even routing."""

    gate_up: MoeConfig
    down: MoeConfig
    max_rows: float = float("inf")


def _without_tma(configs: MoeConfigs) -> MoeConfigs:
    gate_up, down = (
        replace(c, swap_ab=False, tma=False, tail=0) for c in (configs.gate_up, configs.down)
    )
    return replace(configs, gate_up=gate_up, down=down)


MoeTable = tuple[MoeConfigs, ...]  # by max_rows

MOE_16: MoeTable = (
    MoeConfigs(
        MoeConfig(rows=16, columns=32, depth=128, stages=4),
        MoeConfig(rows=16, columns=64, depth=64, stages=4),
        max_rows=1,
    ),
    MoeConfigs(
        MoeConfig(rows=32, columns=64, depth=128, stages=2, tma=True),
        MoeConfig(rows=32, columns=64, depth=64, stages=4, swap_ab=True, tma=True),
        max_rows=24,
    ),
    MoeConfigs(
        MoeConfig(rows=64, columns=64, depth=64, tail=32),
        MoeConfig(rows=64, columns=128, depth=64, tail=32),
        max_rows=96,
    ),
    MoeConfigs(
        MoeConfig(
            rows=128, columns=128, depth=64, warps=8, stages=4, swap_ab=True, tma=True, tail=32
        ),
        MoeConfig(
            rows=256, columns=128, depth=64, warps=8, stages=4, swap_ab=True, tma=True, tail=64
        ),
    ),
)

MOE_8: MoeTable = (
    MoeConfigs(
        MoeConfig(rows=16, columns=32, depth=256, tma=True),
        MoeConfig(rows=16, columns=64, depth=64, stages=4, tma=True),
        max_rows=1,
    ),
    MoeConfigs(
        MoeConfig(rows=32, columns=64, depth=128, swap_ab=True, tma=True),
        MoeConfig(rows=32, columns=64, depth=128, swap_ab=True, tma=True),
        max_rows=24,
    ),
    MoeConfigs(
        MoeConfig(rows=64, columns=64, depth=128, tma=True, tail=32),
        MoeConfig(rows=64, columns=128, depth=128, tma=True, tail=32),
        max_rows=96,
    ),
    MoeConfigs(
        MoeConfig(rows=128, columns=64, depth=128, swap_ab=True, tma=True, tail=32),
        MoeConfig(rows=128, columns=128, depth=128, tma=True, tail=32),
    ),
)

# Packed weights are always the left operand and never read by TMA: one table for all cards.
MOE_4: MoeTable = (
    MoeConfigs(
        MoeConfig(rows=32, columns=64, depth=64, one_dot=True, unroll=2),
        MoeConfig(rows=32, columns=128, depth=64, stages=4, registers=96, one_dot=True),
        max_rows=24,
    ),
    MoeConfigs(
        MoeConfig(rows=64, columns=64, depth=64, one_dot=True, unroll=2),
        MoeConfig(rows=64, columns=128, depth=64),
        max_rows=96,
    ),
    MoeConfigs(
        MoeConfig(rows=128, columns=64, depth=64, stages=4, share_scales=False),
        MoeConfig(rows=128, columns=128, depth=64),
    ),
)

# For cards without TMA, or with little shared memory.
SMALL_MOE_16: MoeTable = (
    MOE_16[0],
    MoeConfigs(
        MoeConfig(rows=32, columns=64, depth=64),
        MoeConfig(rows=32, columns=64, depth=64, stages=4),
        max_rows=24,
    ),
    _without_tma(MOE_16[2]),
    MoeConfigs(
        MoeConfig(rows=128, columns=64, depth=64, warps=8),
        MoeConfig(rows=128, columns=128, depth=64, warps=8),
    ),
)
SMALL_MOE_8: MoeTable = (
    *map(_without_tma, MOE_8[:3]),
    MoeConfigs(
        MoeConfig(rows=128, columns=64, depth=128, warps=8),
        MoeConfig(rows=128, columns=128, depth=128, warps=8),
    ),
)

MOE = {16: MOE_16, 8: MOE_8, 4: MOE_4}  # by bits of a weight
SMALL_MOE = {16: SMALL_MOE_16, 8: SMALL_MOE_8, 4: MOE_4}


def moe_table(bits: int) -> MoeTable:
    """Return the configs for a weight width in bits on the current device."""
    return (MOE if is_hopper_like() else SMALL_MOE)[bits]


def moe_config(num_assignments: int, num_experts: int, bits: int = 16) -> MoeConfigs:
    """Choose by the number of rows per expert under even routing."""
    rows = num_assignments / num_experts
    return next(configs for configs in moe_table(bits) if rows <= configs.max_rows)


def for_bits(config: MoeConfig, bits: int) -> MoeConfig:
    """Give large tiles of five- and six-bit weights more warps and fewer stages.

    They need more registers. Five-bit blocks share bytes in pairs and are unrolled twice.
    """
    is_large = config.rows >= 128
    return replace(config, warps=8, stages=2) if bits in (5, 6) and is_large else config


@dataclass(frozen=True, slots=True, kw_only=True)
class MoeDecodeConfig:
    """Blocks of a program of `moe_decode.py`."""

    columns: int  # outputs; of both halves for gate and up
    depth: int  # inputs per step
    warps: int = 4
    registers: int | None = None  # register limit per thread


@dataclass(frozen=True, slots=True)
class MoeDecodeConfigs:
    """Both GEMVs of the experts."""

    gate_up: MoeDecodeConfig
    down: MoeDecodeConfig


MOE_DECODE = {  # by bits of a weight
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
    """Rows, experts and inputs per program of the split-K GEMM; warps of the top-k."""

    rows: int = 64
    columns: int = 128
    k_split: int = 128  # inputs of a split
    depth: int = 64  # inputs per step
    warps: int = 4
    stages: int = 2
    topk_warps: int = 1


def router_config(rows: int, num_experts: int, width: int) -> RouterConfig:
    """Use fewer splits for more rows, since split sums are written and read again."""
    config = RouterConfig(columns=min(128, max(16, triton.next_power_of_2(num_experts))))
    blocks = triton.cdiv(rows, config.rows) * triton.cdiv(num_experts, config.columns)
    k_split, num_sms = config.k_split, device.num_sms()
    while k_split < width and blocks * triton.cdiv(width, 2 * k_split) >= num_sms:
        k_split *= 2
    # A split of one step can read its weight before the PDL wait.
    depth = k_split if k_split == config.k_split else config.depth
    return RouterConfig(columns=config.columns, k_split=k_split, depth=depth)


# GEMMs outside the experts ------------------------------------------------------------------------

MAX_GEMM_ROWS = 512  # a canvas after a commit; with more rows cuBLAS fills the GPU too


@dataclass(frozen=True, slots=True)
class GemmConfig:
    """Blocks of an fp8 GEMM; with split-K, the consumer kernel adds the splits."""

    rows: int = 128
    outputs: int = 64
    depth: int = 128  # inputs per step
    splits: int = 1
    warps: int = 4
    stages: int = 4


# Used where whole layers ran faster with them (`bench/tune.py`). The gate/up GEMM of the dense MLP
# is faster with them alone, but runs in parallel with the experts.
QKV = GemmConfig()  # its consumer does not add splits
OUT = GemmConfig(splits=3)  # attention output projection
DOWN = GemmConfig(splits=2)  # down projection of the dense MLP
# The soft embedding (`soft_embed_fp8.py`): all positions of a canvas, so that the table is read
# once. The table decides the number of splits.
SOFT_EMBED = GemmConfig(rows=256, outputs=128, depth=128, warps=8, stages=4)

SMALL_GEMM = {SOFT_EMBED: GemmConfig(rows=128, outputs=128, depth=128, warps=8, stages=3)}


def for_device(config: GemmConfig) -> GemmConfig:
    """Return the current device's variant of a config above."""
    return config if is_hopper_like() else SMALL_GEMM.get(config, config)


@dataclass(frozen=True, slots=True)
class GemvConfig:
    """Outputs per program, inputs per step, and warps."""

    outputs: int
    chunk: int
    warps: int = 4


# By outputs and inputs, for 16 bits: QKV and output projection of the released sliding layers
# (`bench/tune.py`: 2.68 to 2.62 ms a token).
GEMV = {(8192, 2816): GemvConfig(2, 1024), (2816, 4096): GemvConfig(4, 4096, warps=8)}


def gemv_config(outputs: int, depth: int, *, is_gated: bool, is_fp8: bool = False) -> GemvConfig:
    """Use several programs per SM, and keep whole rows in flight."""
    padded = triton.next_power_of_2(depth)
    if is_gated:
        return GemvConfig(2, min(512, padded), warps=2)
    if (outputs, depth) in GEMV and not is_fp8:
        return GEMV[outputs, depth]
    if outputs >= 1 << 16:
        return GemvConfig(2, min(2048, padded))
    if outputs >= 6144:
        return GemvConfig(4, min(2048, padded))
    return GemvConfig(2, min(4096, padded))
