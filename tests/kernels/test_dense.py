"""Dense products in 8 bits, without kernels: the module, the wiring, and what may be joined."""

import torch
from torch import Tensor, nn

from dgemma.cache import Pass, Span
from dgemma.model import Gemma
from dgemma.ops.dense import Fp8Linear, gated_product, head_logits, product
from dgemma.ops.experts import gated
from dgemma.ops.fp8 import quantize
from dgemma.ops.quantized import Quantized
from dgemma.stack import Stack, can_fuse
from dgemma.weights.packed import FORMS, Form, shrink_model
from tests.kernels import small


def denoised(of: Gemma) -> Tensor:
    context = Pass([Span(small.cache(of, 9), 4, commit=False)])
    with torch.inference_mode():
        return of.denoise(torch.arange(4), None, context)


def test_an_8_bit_product_is_that_of_what_its_numbers_stand_for() -> None:
    linear = nn.Linear(32, 12, bias=False)
    eight = Fp8Linear.of(linear)
    assert eight.weight.shape == (12, 32)
    assert eight.weight.dtype == torch.float8_e4m3fn
    assert eight.weight_scale.shape == (12, 1)
    assert sorted(eight.state_dict()) == ["weight", "weight_scale"]
    x_TI = torch.randn(5, 32, generator=torch.Generator().manual_seed(0))
    rows = quantize(x_TI)
    want = rows.whole() @ (eight.weight.float() * eight.weight_scale).T
    torch.testing.assert_close(eight(x_TI), want)
    # Rows that come quantized are not quantized again, and what is made of them is quantized too.
    assert torch.equal(product(rows, eight.stored, torch.float32), eight(x_TI))
    made = gated_product(rows, eight.stored, torch.float32)
    assert isinstance(made, Quantized)
    assert torch.equal(made.numbers.float(), quantize(gated(want)).numbers.float())


def test_a_dense_part_in_8_bits_changes_the_model_a_little_and_runs_in_the_joined_stack() -> None:
    of = small.model(sharpness=1.0)
    exact = denoised(of)
    shrink_model(of, Form(dense="fp8"))
    assert isinstance(of.layers[0].self_attn.q_proj, Fp8Linear)
    assert isinstance(of.layers[0].router.proj, nn.Linear)
    assert of.layers[1].self_attn.v_proj is None
    plain = denoised(of)
    off = (plain - exact).square().mean().sqrt() / exact.square().mean().sqrt()
    assert 1e-3 < off < 0.2  # so small a model turns some choices of experts
    assert can_fuse(of)
    before = {name: weight.clone() for name, weight in of.state_dict().items()}
    stack = of.runner = Stack(of)
    after = of.state_dict()
    assert before.keys() == after.keys()
    assert all(torch.equal(before[n].float(), after[n].float()) for n in before)
    qkv = stack.layers[0].qkv
    assert qkv.factor_O is not None
    assert of.layers[0].self_attn.q_proj.weight.data_ptr() == qkv.numbers_OI.data_ptr()
    torch.testing.assert_close(denoised(of), plain, atol=2e-3, rtol=2e-3)


def test_a_layer_is_joined_when_it_is_made_and_not_again() -> None:
    of = shrink_model(small.model(), Form(dense="fp8"))
    parts = [of.layers[0].self_attn.k_proj, of.layers[0].mlp.up_proj]
    places = [(part.weight.data_ptr(), part.weight_scale.data_ptr()) for part in parts]
    first, second = Stack(of).layers[0], Stack(of).layers[0]
    assert places == [(part.weight.data_ptr(), part.weight_scale.data_ptr()) for part in parts]
    assert first.qkv.numbers_OI.data_ptr() == second.qkv.numbers_OI.data_ptr()
    keys = slice(64, 96)
    assert torch.equal(first.qkv.numbers_OI[keys].float(), parts[0].weight.float())
    assert first.qkv.factor_O is not None
    assert torch.equal(first.qkv.factor_O[keys], parts[0].weight_scale[:, 0])


def test_every_mix_of_kinds_can_be_joined_but_not_within_one_product() -> None:
    assert can_fuse(shrink_model(small.model(), FORMS["fp8"]))
    assert can_fuse(shrink_model(small.model(), Form(experts="fp8")))
    of = small.model()
    part = of.layers[0].self_attn
    part.o_proj = Fp8Linear.of(part.o_proj)
    assert can_fuse(of)
    part.k_proj = Fp8Linear.of(part.k_proj)
    assert not can_fuse(of)


def test_logits_are_those_of_the_model() -> None:
    of = small.model()
    hidden_TD = torch.randn(3, 32, generator=torch.Generator().manual_seed(0))
    out_TV = torch.empty(3, 96)
    with torch.inference_mode():
        cap = of.config.final_logit_softcapping
        head_logits(hidden_TD, of.embed_tokens.head, cap, out_TV)
        assert torch.equal(out_TV, of.logits(hidden_TD))
