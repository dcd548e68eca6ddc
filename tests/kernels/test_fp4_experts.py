"""Four bits in the kernels' order: nothing is lost or added; and the module that has them."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from dgemma.errors import UsageError
from dgemma.model.gemma import Experts
from dgemma.model.moe import moe_reference
from dgemma.quant.fp4_experts import Fp4Experts, lay_stacked
from dgemma.quant.nvfp4 import E4M3, Packed, factor_of, quantize
from dgemma.quant.nvfp4_tiles import DEPTH, MASK, ROWS, blocks, empty, lay, unmix
from dgemma.weights.packed import Form, shrink_model
from dgemma.weights.random import random_model
from tests.kernels.small import SMALL

CPU = torch.device("cpu")


def normal(seed: int, *shape: int, scale: float = 1.0) -> Tensor:
    return scale * torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def packed(seed: int, outputs: int, inputs: int) -> Packed:
    """Every kind of number and scale, the least and zero among them."""
    generator = torch.Generator().manual_seed(seed)
    numbers = torch.randint(256, (outputs, inputs // 2), generator=generator).to(torch.uint8)
    scale = torch.randint(0x7F, (outputs, inputs // 16), generator=generator).to(torch.uint8)
    scale[0, :4] = torch.tensor([0, 1, 7, 0x7E])
    return Packed(numbers, scale.view(E4M3), torch.tensor(0.37))


def test_a_word_holds_each_four_numbers_once() -> None:
    words = torch.arange(1 << 16)
    bits = unmix(words)
    assert not (bits & ~MASK).any()
    assert len(torch.unique(bits, dim=0)) == 1 << 16


def test_what_was_packed_is_what_the_words_stand_for_exactly() -> None:
    room = empty(2, 4 * ROWS, 3 * DEPTH, 2, CPU)
    given = [[packed(10 * e + part, 2 * ROWS, 3 * DEPTH) for part in range(2)] for e in range(2)]
    for expert, parts in enumerate(given):
        for part, matrix in enumerate(parts):
            lay(matrix, room, expert, part)
    for expert, parts in enumerate(given):
        want = torch.cat([matrix.whole() for matrix in parts])
        assert torch.equal(room.whole(expert), want)
    size = 2 * 4 * ROWS * 3 * DEPTH
    stored = sum(t.numel() * t.element_size() for t in (room.words_EW, room.scales_EW))
    assert 8 * stored == 4.5 * size


def test_number_times_scale_is_a_bfloat16() -> None:
    """So a matrix unit of 16 bits multiplies exactly what the checkpoint holds."""
    room = empty(1, ROWS, DEPTH, 1, CPU)
    lay(packed(1, ROWS, DEPTH)._replace(factor=torch.tensor(2.0**-7)), room, 0)
    whole = room.whole(0)
    assert torch.equal(whole, whole.bfloat16().float())


def test_a_block_is_one_run_of_memory() -> None:
    matrix = packed(3, 2 * ROWS, 2 * DEPTH)
    words, scales = blocks(matrix)
    assert words.shape == (2, 2, ROWS, 16)
    assert scales.shape == (2, 2, ROWS)
    one = Packed(matrix.numbers_OI[ROWS:, DEPTH // 2 :], matrix.scale_OG[ROWS:, 4:], matrix.factor)
    assert torch.equal(blocks(one)[0][0, 0], words[1, 1])
    assert torch.equal(blocks(one)[1][0, 0], scales[1, 1])


def experts(width: int = 128, inner: int = 64, count: int = 3) -> Experts:
    made = Experts.__new__(Experts)
    torch.nn.Module.__init__(made)
    up = normal(1, count, 2 * inner, width, scale=width**-0.5)
    made.gate_up_proj = torch.nn.Parameter(up)
    made.down_proj = torch.nn.Parameter(normal(2, count, width, inner, scale=inner**-0.5))
    return made.requires_grad_(False)


def test_the_module_computes_what_its_numbers_stand_for() -> None:
    part = Fp4Experts.quantized(experts())
    x, scores = normal(3, 7, 128), normal(4, 7, 3).softmax(-1)
    share, ids = scores.topk(2)
    heavy = [torch.stack([laid.whole(e) for e in range(3)]) for laid in (part.gate_up, part.down)]
    want = moe_reference(x, ids, share, *heavy)
    torch.testing.assert_close(part(x, ids, share), want, atol=1e-6, rtol=1e-5)
    source = experts()
    off = (heavy[0] - source.gate_up_proj).square().mean() / source.gate_up_proj.square().mean()
    assert 0.05 < off.sqrt() < 0.15  # what four bits cost


def test_a_checkpoints_own_numbers_are_taken_over_exactly() -> None:
    source = experts()
    each = []
    for up, down in zip(source.gate_up_proj, source.down_proj, strict=True):
        # As others write it: gate and up have factors of their own.
        matrices = (*up.chunk(2), down)
        each.append(tuple(quantize(matrix, factor_of(matrix)) for matrix in matrices))
    part = Fp4Experts.packed(each, 3, CPU)
    for index, (gate, up, down) in enumerate(each):
        assert torch.equal(part.gate_up.whole(index), torch.cat([gate.whole(), up.whole()]))
        assert torch.equal(part.down.whole(index), down.whole())


def test_a_model_is_turned_in_place_and_changes_a_little() -> None:
    config = replace(SMALL, hidden_size=64, moe_intermediate_size=64)
    model = random_model(config, seed=0).requires_grad_(False)
    x, ids = normal(5, 4, 64), torch.tensor([[0, 1], [2, 3], [1, 2], [3, 0]])
    share = normal(6, 4, 2).softmax(-1)
    exact = model.layers[0].experts(x, ids, share)
    shrink_model(model, Form(experts="nvfp4"))
    got = model.layers[0].experts(x, ids, share)
    assert isinstance(model.layers[1].experts, Fp4Experts)
    off = (got - exact).square().mean().sqrt() / exact.square().mean().sqrt()
    assert 0.01 < off < 0.4


def test_laying_needs_whole_blocks() -> None:
    weight = normal(1, 2, 2 * ROWS, DEPTH)
    assert lay_stacked(weight, 2).outputs == 2 * ROWS
    with pytest.raises(UsageError, match="multiples of 16 outputs and 64 inputs, not 8 and 64"):
        lay_stacked(normal(1, 2, ROWS, DEPTH), 2)
