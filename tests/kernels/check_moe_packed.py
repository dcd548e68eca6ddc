"""Experts in NVFP4 and in GGUF blocks by kernel agree with their dequantized weights."""

import pytest
import torch
from torch import Tensor

from dgemma.backends.cuda.configs import MOE_4, MoeConfig
from dgemma.backends.cuda.gemm import HalfMoe, moe_kernels
from dgemma.backends.cuda.kernels import moe_packed as kernels
from dgemma.backends.cuda.kernels.moe import sort_by_expert
from dgemma.model.moe import expert_outputs, gelu_and_mul
from dgemma.quant.gguf_tiles import (
    TILE_FORMATS,
    TiledBlockExperts,
    TiledBlocks,
    tile_blocks,
    tiled_grouped,
)
from dgemma.quant.nvfp4 import Nvfp4Experts, TiledNvfp4, nvfp4_grouped, quantize_tiled
from tests.kernels.small import random_stack

WIDTH, INNER, COUNT = 128, 64, 3
# More columns than there are, and deeper than an expert is wide.
CONFIGS = {
    "plain": MoeConfig(rows=16, columns=16, depth=64),
    "deep": MoeConfig(rows=16, columns=32, depth=128),
    "odd": MoeConfig(rows=16, columns=128, depth=256),
    "whole": MoeConfig(rows=16, columns=32, depth=64, one_dot=True),
    "whole odd": MoeConfig(rows=16, columns=128, depth=256, one_dot=True),
    "unrolled": MoeConfig(rows=16, columns=32, depth=64, one_dot=True, unroll=2),
    "unrolled odd": MoeConfig(rows=16, columns=64, depth=64, unroll=3),
}


def normal(seed: int, *shape: int, scale: float = 1.0) -> Tensor:
    return scale * torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def weights() -> tuple[TiledNvfp4, TiledNvfp4]:
    up = normal(2, COUNT, 2 * INNER, WIDTH, scale=WIDTH**-0.5)
    up[1, :7] *= 1e-3  # scales much smaller than others
    up[2, 3, :16] = 0.0
    return quantize_tiled(up, 2), quantize_tiled(
        normal(3, COUNT, WIDTH, INNER, scale=INNER**-0.5), 1
    )


def wanted(x: Tensor, ids: Tensor, up: TiledNvfp4, down: TiledNvfp4) -> Tensor:
    rows = [
        gelu_and_mul(x[c // ids.shape[1]] @ up.dequantize(e).T) @ down.dequantize(e).T
        for c, e in enumerate(ids.flatten().tolist())
    ]
    return torch.stack(rows)


@pytest.mark.parametrize(
    ("tokens", "name"),
    [
        (1, "plain"),
        (7, "deep"),
        (25, "plain"),
        (5, "odd"),
        (7, "whole"),
        (5, "whole odd"),
        (7, "unrolled"),
        (5, "unrolled odd"),
    ],
)
def test_gemms_in_nvfp4_are_those_with_dequantized_weights(tokens: int, name: str) -> None:
    up, down = weights()
    x, ids = normal(4, tokens, WIDTH), normal(1, tokens, COUNT).topk(2).indices
    buckets = sort_by_expert(ids, COUNT)
    hidden = kernels.gate_up(x, up, buckets, 2, CONFIGS[name])
    got = kernels.down(hidden, down, buckets, CONFIGS[name])
    torch.testing.assert_close(got, wanted(x, ids, up, down), atol=2e-6, rtol=1e-5)


def test_every_tile_of_the_table_gives_the_same() -> None:
    up, down = weights()
    x, ids = normal(4, 3, WIDTH), normal(1, 3, COUNT).topk(2).indices
    want, buckets = wanted(x, ids, up, down), sort_by_expert(ids, COUNT)
    for entry in MOE_4:
        hidden = kernels.gate_up(x, up, buckets, 2, entry.gate_up)
        got = kernels.down(hidden, down, buckets, entry.down)
        torch.testing.assert_close(got, want, atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize("tokens", [3, 9])
def test_the_module_s_kernels_compute_what_it_defines(tokens: int) -> None:
    """One assignment at a time, and grouped by expert."""
    up, down = weights()
    part = Nvfp4Experts(up, down)
    experts = moe_kernels(part, torch.float32)
    assert moe_kernels(part, torch.float16) is None  # weights are unpacked to bfloat16
    x, ids = normal(4, tokens, WIDTH), normal(1, tokens, COUNT).topk(2).indices
    assert isinstance(experts, HalfMoe)
    assert not experts.accepts_fp8(x)
    want = expert_outputs(x, ids, nvfp4_grouped(up), nvfp4_grouped(down))
    for buckets in (None, sort_by_expert(ids, COUNT)):
        got = experts.outputs(x, ids, buckets, torch.float32)
        torch.testing.assert_close(got, want, atol=2e-6, rtol=1e-5)


# --- GGUF blocks

DEPTHS = {"Q4_K": 256, "Q5_K": 256, "Q6_K": 256}  # of the others, 192: three blocks of 64


def block_weights(name: str) -> tuple[TiledBlocks, TiledBlocks]:
    depth = DEPTHS.get(name, 192)
    sizes = ((2 * INNER, depth), (48, depth))
    tiled = (
        tile_blocks(random_stack(name, COUNT, *size, seed=seed), "cpu")
        for seed, size in enumerate(sizes)
    )
    return next(tiled), next(tiled)


@pytest.mark.parametrize("name", TILE_FORMATS)
@pytest.mark.parametrize("config", ["plain", "whole odd", "unrolled odd"])
def test_gemms_of_blocks_are_those_with_dequantized_weights(name: str, config: str) -> None:
    up, down = block_weights(name)
    ids = normal(1, 5, COUNT).topk(2).indices
    buckets = sort_by_expert(ids, COUNT)
    x = normal(4, 5, up.inputs)
    hidden = kernels.gate_up(x, up, buckets, 2, CONFIGS[config])
    experts = ids.flatten().tolist()
    want = torch.stack(
        [gelu_and_mul(x[a // 2] @ up.dequantize(e).T) for a, e in enumerate(experts)]
    )
    torch.testing.assert_close(hidden, want, atol=2e-6, rtol=1e-4)
    rows = normal(5, 10, down.inputs)
    got = kernels.down(rows, down, buckets, CONFIGS[config])
    want = torch.stack([rows[a] @ down.dequantize(e).T for a, e in enumerate(experts)])
    torch.testing.assert_close(got, want, atol=2e-6, rtol=1e-4)


@pytest.mark.parametrize("tokens", [2, 9])
def test_a_layer_of_mixed_blocks_has_kernels(tokens: int) -> None:
    """Q4_K and Q5_0, as in a Q4_K_M; one assignment at a time, and grouped by expert."""
    gate_up = random_stack("Q4_K", COUNT, 2 * INNER, 256)
    part = TiledBlockExperts.from_blocks(gate_up, random_stack("Q5_0", COUNT, 256, INNER), "cpu")
    experts = moe_kernels(part, torch.float32)
    assert moe_kernels(part, torch.float16) is None
    x, ids = normal(4, tokens, 256), normal(1, tokens, COUNT).topk(2).indices
    assert isinstance(experts, HalfMoe)
    want = expert_outputs(x, ids, *(tiled_grouped(tiled) for tiled in part.both))
    got = experts.outputs(x, ids, None, torch.float32)
    torch.testing.assert_close(got, want, atol=2e-6, rtol=1e-4)
