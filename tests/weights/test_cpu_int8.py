"""Products in whole numbers: exact where they can be, and near where activations are rounded."""

import pytest
import torch
from torch import nn

from dgemma.backends.cpu import (
    Int8Experts,
    Int8Table,
    MergedAttention,
    MergedFeedForward,
    MergedLinear,
    gelu_and_mul_cpu,
    int8_experts,
    int8_grouped,
    int8_linear,
    int8_reference,
    make_int8,
    pack_int8,
    quantize_rows,
)
from dgemma.engine import Engine, SamplingParams
from dgemma.model.forward_batch import ForwardBatch, Segment
from dgemma.model.gemma import Attention, Experts, Gemma, Router
from dgemma.model.kv_cache import Capacity, KVCache
from dgemma.model.moe import gelu_and_mul
from dgemma.quant import QTensor, quantize_int8
from dgemma.weights.files import read_headers
from dgemma.weights.hub import NANO_DIRECTORY, ModelOptions
from dgemma.weights.inference import load_for_inference
from dgemma.weights.load import load_model, random_model
from dgemma.weights.lora import LoRALinear, attach, new_adapter
from dgemma.weights.quantize import agreement
from tests.tiny import CPU, TINY


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("rows", [1, 3, 17, 128])
@pytest.mark.parametrize("shape", [(61, 12), (7, 33), (320, 512), (8192, 16)])
def test_a_product_is_its_definition_to_the_bit(rows: int, shape: tuple[int, int]) -> None:
    weight = quantize_int8(draw(*shape))
    x = draw(rows, shape[1], seed=1)
    have = int8_linear(weight)(x)
    assert torch.equal(have, int8_reference(x, weight))
    exact = x.double() @ (weight.values.double() * weight.scale[:, None].double()).T
    assert (have - exact).norm() < 0.02 * exact.norm()
    if rows > 1:  # a row alone gives what it gave among others
        assert torch.equal(int8_linear(weight)(x[1:2]), have[1:2])


def test_rows_of_any_size_are_rounded_within_half_a_step() -> None:
    x = draw(9, 40) * torch.logspace(-20, 20, 9)[:, None]
    x[3] = 0
    rows = quantize_rows(x)
    # Rows below what a model ever holds become zero.
    assert rows.values.abs().amax(-1).tolist() == [0, 0, 127, 0, 127, 127, 127, 127, 127]
    off = (rows.dequantize() - x).abs() / rows.scale[:, None]
    assert off[rows.values.any(-1)].max() <= 0.5001


def test_experts_are_products_of_their_own_rows() -> None:
    weight = quantize_int8(draw(5, 24, 32))
    expert_A = torch.tensor([4, 0, 0, 2, 4, 4, 0])
    x = draw(7, 32, seed=2)
    expert_A, order = expert_A.sort(stable=True)
    have = int8_grouped(weight)(quantize_rows(x[order]), expert_A)
    for row, source, expert in zip(have, order.tolist(), expert_A, strict=True):
        own = QTensor(*(part[expert] for part in weight))
        assert torch.equal(row, int8_reference(x[source][None], own)[0])


@pytest.mark.parametrize("inner", [7, 16, 40])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_experts_are_weighted_products_of_one_token_with_one_expert(
    inner: int, dtype: torch.dtype
) -> None:
    up, down = quantize_int8(draw(5, 2 * inner, 32)), quantize_int8(draw(5, 32, inner, seed=1))
    x, ids = draw(37, 32, seed=2).to(dtype), draw(37, 4, seed=3).topk(2).indices  # none to the last
    share = draw(37, 2, seed=4).softmax(-1)
    products = int8_grouped(up), int8_grouped(down)
    have_TD = int8_experts(x, ids, share, *products)
    assert have_TD.dtype == dtype
    want_TD = torch.zeros(37, 32)
    for choice, expert in enumerate(ids.flatten().tolist()):
        both = [QTensor(*(part[expert] for part in weight)) for weight in (up, down)]
        row = x[choice // 2][None].float()
        for weight, hidden in zip(both, (gelu_and_mul_cpu, lambda out: out), strict=True):
            row = hidden(int8_reference(row, weight))
        want_TD[choice // 2] += share.flatten()[choice] * row[0]
    near = {"rtol": 1e-5, "atol": 1e-3} if dtype == torch.float32 else {"rtol": 0.01, "atol": 0.1}
    torch.testing.assert_close(have_TD, want_TD.to(dtype), **near)
    # A token alone gives what it gave among others.
    assert torch.equal(int8_experts(x[5:6], ids[5:6], share[5:6], *products), have_TD[5:6])


def canvas_logits(model: Gemma) -> torch.Tensor:
    """Of a canvas behind a prompt."""
    cache = KVCache(model.config, Capacity(tokens=24), torch.float32, CPU)
    with torch.inference_mode():
        run = ForwardBatch([Segment(cache, 9, commit=True)])
        model.encode(torch.arange(9), run)
        run.close()
        tokens_T = torch.arange(20, 28)
        run = ForwardBatch([Segment(cache, 8, commit=False)])
        return model.logits(model.denoise(tokens_T, model.embed(tokens_T), run))


def replace_separately(module: nn.Module) -> None:
    """The plain way: one module for each product, between them what the model has there."""
    for parent in [m for m in module.modules() if not isinstance(m, Router)]:
        for name, child in list(parent.named_children()):
            if isinstance(child, nn.Linear | Experts):
                is_linear = isinstance(child, nn.Linear)
                setattr(
                    parent,
                    name,
                    MergedLinear(make_int8, child) if is_linear else Int8Experts(child),
                )


def test_merged_linears_give_the_bits_of_separate_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    assert {TINY.attention(layer).has_value for layer in range(2)} == {True, False}
    monkeypatch.setattr("dgemma.backends.cpu.gelu_and_mul_cpu", gelu_and_mul)
    merged, separate = pack_int8(random_model(TINY, seed=3)), random_model(TINY, seed=3)
    separate.embed_tokens = Int8Table(separate.embed_tokens)
    replace_separately(separate)
    for layer in merged.layers:
        assert isinstance(layer.self_attn, MergedAttention)
        assert isinstance(layer.mlp, MergedFeedForward)
    assert torch.equal(canvas_logits(merged), canvas_logits(separate))


def test_what_is_adapted_is_not_joined_and_gives_the_same_bits() -> None:
    plain, adapted = random_model(TINY, seed=3), random_model(TINY, seed=3)
    # Of a new adapter, which changes nothing yet.
    targets = ["layers.0.self_attn.k_proj", "layers.1.self_attn.o_proj", "router.proj"]
    pack_int8(attach(adapted, new_adapter(adapted, targets, 4, 8.0, seed=0)))
    for layer in adapted.layers:
        assert isinstance(layer.self_attn, Attention)
        assert isinstance(layer.mlp, MergedFeedForward)
        assert isinstance(layer.router.proj.base, nn.Linear)
    assert torch.equal(canvas_logits(adapted), canvas_logits(pack_int8(plain)))


def test_the_built_in_model_loses_little_of_its_answers_and_of_8_bit_weights_nothing() -> None:
    plain, files = load_model(NANO_DIRECTORY).model, read_headers(NANO_DIRECTORY)
    for name, weight in plain.state_dict().items():
        if weight.dim() > 1:
            lost = (quantize_int8(weight).dequantize() - weight).norm() / weight.norm()
            assert lost < (0.02 if files[f"model.decoder.{name}"].dtype == "U8" else 1e-9), name
    small = load_model(NANO_DIRECTORY, quant="int8").model
    moved = agreement(plain, small, seed=0)
    # On an AVX2 CPU 5.6e-3; one layer with its gates and values swapped: 1.1e-2 to 9.8e-2.
    assert moved.kl < 9e-3
    assert moved.top_1 > 0.95
    assert moved.worst_kl > 0, "nothing was rounded"


def test_all_products_but_the_routers_are_swapped_either_way(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    loaded = load_model(NANO_DIRECTORY, quant="int8").model
    packed = pack_int8(load_model(NANO_DIRECTORY).model)
    for model in (loaded, packed):
        plain = {name for name, child in model.named_modules() if type(child) is nn.Linear}
        assert plain == {f"layers.{number}.router.proj" for number in range(len(model.layers))}
        assert isinstance(model.embed_tokens, Int8Table)
        assert all(isinstance(layer.experts, Int8Experts) for layer in model.layers)
    # Equal to the bit or not, which one short pass says as well as several.
    monkeypatch.setattr("dgemma.weights.quantize.PROMPT_LENGTH", 8)
    monkeypatch.setattr("dgemma.weights.quantize.NUM_STEPS", 1)
    assert agreement(loaded, packed, seed=1).worst_kl == 0


def test_an_adapter_stands_beside_whole_numbers() -> None:
    model = load_model(NANO_DIRECTORY).model
    adapter = new_adapter(model, ["q_proj", "down_proj"], 4, 8.0, seed=0)
    found = load_for_inference(
        NANO_DIRECTORY, ModelOptions(device="cpu", quant="int8"), adapter
    ).model
    for name in adapter.targets:
        module = found.get_submodule(name)
        assert isinstance(module, LoRALinear)
        assert isinstance(module.base, MergedLinear)


def test_the_engine_answers_with_it() -> None:
    engine = Engine.load(NANO_DIRECTORY, device="cpu", quant="int8")
    assert engine.dtype == torch.float32
    done = engine.generate(
        "Write a story.", SamplingParams(seed=0, max_tokens=12, canvas_length=16)
    )
    assert done.tokens > 0
