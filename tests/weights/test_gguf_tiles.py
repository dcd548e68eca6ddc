"""GGUF blocks in the order of the kernels hold the same weights, bit for bit."""

import pytest
import torch
from torch import Tensor

from dgemma.errors import UsageError
from dgemma.quant.gguf import BlockTensor, BlockWeight
from dgemma.quant.gguf_tiles import (
    BLOCK_FORMATS,
    TILE_FORMATS,
    TiledBlockExperts,
    can_tile_blocks,
    tile_blocks,
    tiled_grouped,
)

EXPERTS, OUTPUTS, INPUTS = 3, 32, 512


def random_blocks(name: str, outputs: int = OUTPUTS, inputs: int = INPUTS, seed: int = 0) -> Tensor:
    """Draw every bit; scales are small numbers of any sign."""
    block = BLOCK_FORMATS[name]
    generator = torch.Generator().manual_seed(seed)
    count = EXPERTS * outputs * inputs // block.num_weights
    packed = torch.randint(256, (count, block.num_bytes), dtype=torch.uint8, generator=generator)
    halves = (torch.randn(count, 2, generator=generator) * 1e-4).half().view(torch.uint8)
    where = {"Q6_K": (208, 2), "Q4_0": (0, 2), "Q5_0": (0, 2), "Q8_0": (0, 2)}
    start, size = where.get(name, (0, 4))
    packed[:, start : start + size] = halves[:, :size]
    return packed.flatten()


def stack(name: str, outputs: int = OUTPUTS, inputs: int = INPUTS, seed: int = 0) -> BlockWeight:
    packed = random_blocks(name, outputs, inputs, seed)
    return BlockWeight((BlockTensor(packed, BLOCK_FORMATS[name], (EXPERTS, outputs, inputs)),))


@pytest.mark.parametrize("name", TILE_FORMATS)
def test_tiles_hold_the_weights_of_the_blocks(name: str) -> None:
    weight = stack(name)
    want, tiled = weight.dequantize(), tile_blocks(weight, "cpu")
    for expert in range(EXPERTS):
        assert torch.equal(tiled.dequantize(expert), want[expert])
    size = sum(plane.nbytes for plane in tiled.planes)
    assert size <= weight.num_bytes * 1.03  # Q4_K's scales take bytes instead of six bits
    # Random bytes have -128 in Q8_0, which kernels of bfloat16 cannot hold.
    assert tiled.is_exact == (name == "Q8_0")


@pytest.mark.parametrize("name", ["Q4_K", "Q5_1", "Q8_0"])
def test_a_scale_beyond_a_kernel_s_bfloat16_is_found(name: str) -> None:
    weight = stack(name)
    rows = weight.tensors[0].packed.view(-1, BLOCK_FORMATS[name].num_bytes)
    if name == "Q8_0":
        rows[:, 2:][rows[:, 2:] == 128] = 1
    assert not tile_blocks(weight, "cpu").is_exact
    rows[7, :2] = torch.tensor([2.0]).half().view(torch.uint8)
    if name == "Q4_K":
        rows[7, 4] |= 1  # a scale that is not zero
    assert tile_blocks(weight, "cpu").is_exact


def test_separate_gate_and_up_are_one_weight() -> None:
    gate, up = stack("Q5_K", seed=1), stack("Q5_K", seed=2)
    both = BlockWeight((*gate.tensors, *up.tensors))
    tiled = tile_blocks(both, "cpu")
    assert torch.equal(tiled.dequantize(1), both.dequantize()[1])
    other = BlockWeight((*gate.tensors, *stack("Q4_K").tensors))
    assert not can_tile_blocks(other)
    with pytest.raises(UsageError, match="Q4_K, Q5_K have no GPU kernels"):
        tile_blocks(other, "cpu")


def test_a_layer_s_experts_are_those_of_its_weights() -> None:
    gate_up, down = stack("Q4_K", 128, 256), stack("Q5_0", 256, 64)
    module = TiledBlockExperts.from_blocks(gate_up, down, "cpu")
    for tiled, weight in zip(module.both, (gate_up, down), strict=True):
        assert torch.equal(tiled.dequantize(2), weight.dequantize()[2])
        x = torch.randn(3, tiled.inputs, generator=torch.Generator().manual_seed(4))
        got = tiled_grouped(tiled)(x, torch.tensor([0, 2, 2]))
        want = torch.stack([x[i] @ weight.dequantize()[e].T for i, e in enumerate((0, 2, 2))])
        torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-4)
