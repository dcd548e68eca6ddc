"""NVFP4 in tiles: nothing is lost or added; and the module that has them."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from dgemma.errors import UsageError
from dgemma.model.gemma import Experts
from dgemma.model.moe import moe_reference
from dgemma.quant.nvfp4 import (
    E4M3,
    TILE_DEPTH,
    TILE_ROWS,
    VALUE_MASK,
    Nvfp4Experts,
    Nvfp4Tensor,
    TiledNvfp4,
    global_scale_of,
    quantize,
    quantize_tiled,
    to_tiles,
    unpack_words,
)
from dgemma.weights.layer_formats import LayerFormat, quantize_model
from dgemma.weights.load import random_model
from tests.kernels.small import SMALL

CPU = torch.device("cpu")


def normal(seed: int, *shape: int, scale: float = 1.0) -> Tensor:
    return scale * torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def packed(seed: int, outputs: int, inputs: int) -> Nvfp4Tensor:
    """Every kind of number and scale, the least and zero among them."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randint(256, (outputs, inputs // 2), generator=generator).to(torch.uint8)
    scale = torch.randint(0x7F, (outputs, inputs // 16), generator=generator).to(torch.uint8)
    scale[0, :4] = torch.tensor([0, 1, 7, 0x7E])
    return Nvfp4Tensor(values, scale.view(E4M3), torch.tensor(0.37))


def test_a_word_holds_each_four_numbers_once() -> None:
    words = torch.arange(1 << 16)
    bits = unpack_words(words)
    assert not (bits & ~VALUE_MASK).any()
    assert len(torch.unique(bits, dim=0)) == 1 << 16


def test_what_was_packed_is_what_the_words_stand_for_exactly() -> None:
    tiled = TiledNvfp4.empty(2, 4 * TILE_ROWS, 3 * TILE_DEPTH, 2, CPU)
    given = [
        [packed(10 * e + part, 2 * TILE_ROWS, 3 * TILE_DEPTH) for part in range(2)]
        for e in range(2)
    ]
    for expert, parts in enumerate(given):
        for part, matrix in enumerate(parts):
            tiled.write(matrix, expert, part)
    for expert, parts in enumerate(given):
        want = torch.cat([matrix.dequantize() for matrix in parts])
        assert torch.equal(tiled.dequantize(expert), want)
    size = 2 * 4 * TILE_ROWS * 3 * TILE_DEPTH
    stored = sum(t.numel() * t.element_size() for t in (tiled.words_EW, tiled.scales_EW))
    assert 8 * stored == 4.5 * size


def test_number_times_scale_is_a_bfloat16() -> None:
    """So a matrix unit of 16 bits multiplies exactly what the checkpoint holds."""
    tiled = TiledNvfp4.empty(1, TILE_ROWS, TILE_DEPTH, 1, CPU)
    tiled.write(packed(1, TILE_ROWS, TILE_DEPTH)._replace(global_scale=torch.tensor(2.0**-7)), 0)
    whole = tiled.dequantize(0)
    assert torch.equal(whole, whole.bfloat16().float())


def test_a_tile_is_contiguous() -> None:
    matrix = packed(3, 2 * TILE_ROWS, 2 * TILE_DEPTH)
    words, scales = to_tiles(matrix)
    assert words.shape == (2, 2, TILE_ROWS, 16)
    assert scales.shape == (2, 2, TILE_ROWS)
    last = Nvfp4Tensor(
        matrix.values_OI[TILE_ROWS:, TILE_DEPTH // 2 :],
        matrix.scale_OG[TILE_ROWS:, 4:],
        matrix.global_scale,
    )
    assert torch.equal(to_tiles(last)[0][0, 0], words[1, 1])
    assert torch.equal(to_tiles(last)[1][0, 0], scales[1, 1])


def experts(width: int = 128, inner: int = 64, count: int = 3) -> Experts:
    made = Experts.__new__(Experts)
    torch.nn.Module.__init__(made)
    up = normal(1, count, 2 * inner, width, scale=width**-0.5)
    made.gate_up_proj = torch.nn.Parameter(up)
    made.down_proj = torch.nn.Parameter(normal(2, count, width, inner, scale=inner**-0.5))
    return made.requires_grad_(False)


def test_the_module_computes_what_its_numbers_stand_for() -> None:
    part = Nvfp4Experts.quantized(experts())
    x, scores = normal(3, 7, 128), normal(4, 7, 3).softmax(-1)
    topk_weights, ids = scores.topk(2)
    weights = [
        torch.stack([weight.dequantize(e) for e in range(3)])
        for weight in (part.gate_up, part.down)
    ]
    want = moe_reference(x, ids, topk_weights, *weights)
    torch.testing.assert_close(part(x, ids, topk_weights), want, atol=1e-6, rtol=1e-5)
    source = experts()
    off = (weights[0] - source.gate_up_proj).square().mean() / source.gate_up_proj.square().mean()
    assert 0.05 < off.sqrt() < 0.15  # what four bits cost


def test_a_checkpoints_own_numbers_are_taken_over_exactly() -> None:
    source = experts()
    each = []
    for up, down in zip(source.gate_up_proj, source.down_proj, strict=True):
        # As others write it: gate and up have factors of their own.
        matrices = (*up.chunk(2), down)
        each.append(tuple(quantize(matrix, global_scale_of(matrix)) for matrix in matrices))
    part = Nvfp4Experts.from_tensors(each, 3, CPU)
    for index, (gate, up, down) in enumerate(each):
        assert torch.equal(
            part.gate_up.dequantize(index), torch.cat([gate.dequantize(), up.dequantize()])
        )
        assert torch.equal(part.down.dequantize(index), down.dequantize())


def test_a_model_is_turned_in_place_and_changes_a_little() -> None:
    config = replace(SMALL, hidden_size=64, moe_intermediate_size=64)
    model = random_model(config, seed=0).requires_grad_(False)
    x, ids = normal(5, 4, 64), torch.tensor([[0, 1], [2, 3], [1, 2], [3, 0]])
    topk_weights = normal(6, 4, 2).softmax(-1)
    exact = model.layers[0].experts(x, ids, topk_weights)
    quantize_model(model, LayerFormat(experts="nvfp4"))
    got = model.layers[0].experts(x, ids, topk_weights)
    assert isinstance(model.layers[1].experts, Nvfp4Experts)
    off = (got - exact).square().mean().sqrt() / exact.square().mean().sqrt()
    assert 0.01 < off < 0.4


def test_tiling_needs_whole_tiles() -> None:
    weight = normal(1, 2, 2 * TILE_ROWS, TILE_DEPTH)
    assert quantize_tiled(weight, 2).outputs == 2 * TILE_ROWS
    with pytest.raises(UsageError, match="multiples of 16 outputs and 64 inputs, not 8 and 64"):
        quantize_tiled(normal(1, 2, TILE_ROWS, TILE_DEPTH), 2)
