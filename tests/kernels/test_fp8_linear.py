"""fp8 linears without kernels: the module, merged weights, and the layers that can be fused."""

import pytest
import torch
from torch import Tensor, nn

from dgemma.backends.cuda.merge import gate_up, is_mergeable, merge_weights, qkv
from dgemma.backends.reference import ReferenceBackend
from dgemma.model.forward_batch import ForwardBatch, Segment
from dgemma.model.gemma import Gemma, Layer
from dgemma.quant.fp8 import Fp8Linear, quantize
from dgemma.weights.layer_formats import LAYER_FORMATS, LayerFormat, quantize_model
from tests.kernels import small
from tests.kernels.test_interpreted import needs_triton


def denoised(of: Gemma) -> Tensor:
    batch = ForwardBatch([Segment(small.cache(of, 9), 4, commit=False)])
    with torch.inference_mode():
        return ReferenceBackend(of).forward(of.embed_canvas(torch.arange(4), None), batch)


def layer_of(of: Gemma) -> Layer:
    layer = of.layers[0]
    assert isinstance(layer, Layer)
    return layer


def test_an_fp8_linear_multiplies_what_its_numbers_stand_for() -> None:
    linear = nn.Linear(32, 12, bias=False)
    fp8 = Fp8Linear.quantized(linear)
    assert fp8.weight.shape == (12, 32)
    assert fp8.weight.dtype == torch.float8_e4m3fn
    assert fp8.weight_scale.shape == (12, 1)
    assert sorted(fp8.state_dict()) == ["weight", "weight_scale"]
    x_TI = torch.randn(5, 32, generator=torch.Generator().manual_seed(0))
    want = quantize(x_TI).dequantize() @ (fp8.weight.float() * fp8.weight_scale).T
    torch.testing.assert_close(fp8(x_TI), want)
    off = (fp8(x_TI) - linear(x_TI)).norm() / linear(x_TI).norm()
    assert 1e-3 < off < 0.1
    assert fp8.stored.is_fp8
    assert torch.equal(fp8.stored.scale_O, fp8.weight_scale[:, 0])


def test_attention_and_mlp_in_fp8_change_the_model_a_little() -> None:
    of = small.model(sharpness=1.0)
    exact = denoised(of)
    quantize_model(of, LayerFormat(dense="fp8"))
    assert isinstance(layer_of(of).self_attn.q_proj, Fp8Linear)
    assert isinstance(layer_of(of).router.proj, nn.Linear)
    assert of.layers[1].self_attn.v_proj is None
    off = (denoised(of) - exact).square().mean().sqrt() / exact.square().mean().sqrt()
    assert 1e-3 < off < 0.2  # so small a model sends some rows to other experts


@pytest.mark.parametrize("form", [LayerFormat(), LayerFormat(dense="fp8")])
def test_merged_weights_are_the_same_weights_in_one_piece_of_memory(form: LayerFormat) -> None:
    of = small.model()
    quantize_model(of, form)
    before = {name: weight.clone() for name, weight in of.state_dict().items()}
    want = denoised(of)
    for layer in of.layers:
        assert isinstance(layer, Layer)
        for group in (qkv(layer), gate_up(layer)):
            merged = merge_weights(group)
            assert merged.is_fp8 == (form.dense == "fp8")
            parts = [part.weight for part in group]
            assert len(merged.values_OI) == sum(map(len, parts))
            place = merged.values_OI.data_ptr()
            for part in group:
                assert part.weight.data_ptr() == place
                place += part.weight.nbytes
            whole = torch.cat([part.float() for part in parts])
            assert torch.equal(merged.values_OI.float(), whole)
            if merged.scale_O is not None:
                scales = [part.weight_scale for part in group if isinstance(part, Fp8Linear)]
                assert torch.equal(merged.scale_O, torch.cat(scales)[:, 0])
                assert scales[0].data_ptr() == merged.scale_O.data_ptr()
            again = merge_weights(group)
            assert again.values_OI.data_ptr() == merged.values_OI.data_ptr()
    after = of.state_dict()
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name].float(), after[name].float()) for name in before)
    assert torch.equal(denoised(of), want)


def test_a_layer_is_merged_when_it_is_quantized_and_not_again() -> None:
    of = quantize_model(small.model(), LayerFormat(dense="fp8"))
    layer = layer_of(of)
    parts = [layer.self_attn.k_proj, layer.mlp.up_proj]
    addresses = [(part.weight.data_ptr(), part.weight_scale.data_ptr()) for part in parts]
    merged = merge_weights(qkv(layer))
    merge_weights(gate_up(layer))
    assert addresses == [(part.weight.data_ptr(), part.weight_scale.data_ptr()) for part in parts]
    keys = slice(64, 96)
    assert torch.equal(merged.values_OI[keys].float(), parts[0].weight.float())
    assert merged.scale_O is not None
    assert torch.equal(merged.scale_O[keys], parts[0].weight_scale[:, 0])


def test_linears_of_every_kind_are_merged_but_not_two_kinds_in_one_group() -> None:
    of = small.model()
    layer = layer_of(of)
    assert is_mergeable(layer)
    layer.self_attn.o_proj = Fp8Linear.quantized(layer.self_attn.o_proj)
    assert is_mergeable(layer)
    layer.self_attn.k_proj = Fp8Linear.quantized(layer.self_attn.k_proj)
    assert not is_mergeable(layer)


class Adapted(nn.Linear):
    """A linear with something added to it."""


def adapted(source: nn.Linear) -> nn.Linear:
    made = Adapted(source.in_features, source.out_features, bias=False)
    made.weight = source.weight
    return made


@pytest.mark.parametrize("name", ["self_attn.v_proj", "mlp.down_proj", "router.proj"])
def test_a_layer_with_an_adapter_is_not_mergeable(name: str) -> None:
    layer = layer_of(small.model())
    owner, _, leaf = name.rpartition(".")
    setattr(layer.get_submodule(owner), leaf, adapted(layer.get_submodule(name)))
    assert not is_mergeable(layer)


def test_a_layer_packed_for_a_cpu_is_not_mergeable() -> None:
    of = quantize_model(small.model(), LAYER_FORMATS["int8"])
    assert not is_mergeable(layer_of(of))


@needs_triton
def test_models_whose_linears_and_experts_have_kernels_can_be_fused() -> None:
    from dgemma.backends.cuda.fused import can_fuse

    assert can_fuse(small.model())
    assert can_fuse(quantize_model(small.model(), LAYER_FORMATS["fp8"]))
    assert can_fuse(quantize_model(small.model(), LayerFormat(experts="fp8")))
    of = small.model()
    layer_of(of).mlp.up_proj = adapted(layer_of(of).mlp.up_proj)
    assert not can_fuse(of)
    of = small.model()
    of.layers[1].experts = nn.Identity()
    assert not can_fuse(of)


@needs_triton
def test_self_conditioning_with_an_adapter_and_long_canvases_cannot_be_held() -> None:
    from dataclasses import replace

    from dgemma.backends.cuda.backend import can_hold
    from dgemma.backends.cuda.kernels.sampler_update import MAX_LENGTH

    of = small.model()
    assert can_hold(of)
    of.config = replace(of.config, canvas_length=MAX_LENGTH + 1)
    assert not can_hold(of)
    of = small.model()
    assert of.self_conditioning is not None
    of.self_conditioning.up_proj = adapted(of.self_conditioning.up_proj)
    assert not can_hold(of)
    of.self_conditioning = None
    assert can_hold(of)
