"""Quantized models on the CUDA backend agree with the reference."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from dgemma.backends.base import Backend, ForwardInput, TokenDraw
from dgemma.backends.cuda import fused
from dgemma.backends.cuda.backend import CudaBackend
from dgemma.backends.cuda.configs import GemmConfig
from dgemma.backends.cuda.gemm import Fp8Moe
from dgemma.backends.cuda.kernels import attention, gemm_fp8
from dgemma.backends.cuda.merge import layers_of
from dgemma.backends.cuda.selftest import experts_format
from dgemma.backends.cuda.streaming import Staging, StreamedExperts
from dgemma.backends.reference import ReferenceBackend
from dgemma.config import FULL, SLIDING
from dgemma.diffusion.canvas import Canvas
from dgemma.diffusion.sampler import Sampler
from dgemma.model.forward_batch import ForwardBatch, Segment
from dgemma.model.gemma import Gemma
from dgemma.quant import QTensor
from dgemma.quant.head import quantize_head
from dgemma.weights.layer_formats import LAYER_FORMATS, LayerFormat, quantize_model
from dgemma.weights.load import random_model
from tests.kernels import small
from tests.kernels.small import SMALL

pytestmark = pytest.mark.usefixtures("small_configs")
# Widths that four bits can hold, and all depths multiples of 16.
WIDE = replace(SMALL, hidden_size=64, moe_intermediate_size=64, intermediate_size=32)


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> set[tuple[Any, int]]:
    """Shapes of fp8 GEMMs by kernel and their parts; whether experts got fp8 rows.

    Configs are small ones with as many parts.
    """
    found: set[tuple[Any, int]] = set()
    kernel, gemm, outputs = gemm_fp8.gemm, fused.gemm, Fp8Moe.outputs

    def watch(x: Any, weight: Any, dtype: torch.dtype, config: GemmConfig) -> Tensor:
        out = kernel(x, weight, dtype, config)
        found.add((tuple(weight.values.shape), len(out) if out.dim() == 3 else 1))
        return out

    def small_gemm(x: Any, weight: Any, dtype: torch.dtype, config: GemmConfig) -> Tensor:
        return gemm(x, weight, dtype, replace(config, rows=16, outputs=64, depth=16))

    def experts(self: Fp8Moe, x: Any, *given: Any) -> Tensor:
        found.add(("experts", int(isinstance(x, QTensor))))
        return outputs(self, x, *given)

    monkeypatch.setattr(gemm_fp8, "gemm", watch)
    monkeypatch.setattr(fused, "gemm", small_gemm)
    monkeypatch.setattr(Fp8Moe, "outputs", experts)
    return found


def encoded(backend: Backend) -> Tensor:
    """Hidden states of a commit and a canvas after a prompt."""
    cache = small.cache(backend.model, 7)
    batch = ForwardBatch([Segment(cache, 5, commit=True), Segment(cache, 4, commit=False)])
    with torch.inference_mode():
        return backend.encode(torch.arange(9), batch)


def off(got: Tensor, want: Tensor) -> float:
    return float((got.float() - want.float()).norm() / want.float().norm())


def stepped(backend: Backend) -> tuple[Canvas, Tensor]:
    """A canvas after a commit and its first step, and the logits after single tokens."""
    caches = [small.cache(backend.model, n) for n in (7, 5)]
    state = small.new_state(Sampler(max_denoising_steps=2), 0)
    (first,) = backend.run([ForwardInput(cache=caches[0], tokens=(5, 9, 2, 7), state=state)])
    given = ForwardInput(cache=caches[1], tokens=(3,), draw=TokenDraw(), needs_logits=True)
    (second,) = backend.run([given])
    assert first.state is not None and second.logits_V is not None
    return first.state.canvas, second.logits_V.clone()


GEMMS = {((128, 64), 1), ((160, 64), 1), ((64, 64), 2), ((64, 128), 3), ((64, 32), 2)}


@pytest.mark.parametrize(
    ("form", "more"),
    [
        # A single token's rows are not quantized.
        (LAYER_FORMATS["fp8"], {("experts", 0), ("experts", 1)}),
        (LAYER_FORMATS["nvfp4"], set()),
        (LayerFormat(experts="fp8"), {("experts", 0), ("experts", 1)}),
        (LAYER_FORMATS["gguf_fp8"], set()),
    ],
    ids=["fp8", "nvfp4", "experts in fp8", "gguf"],
)
def test_a_quantized_model_is_near_the_reference(
    form: LayerFormat, more: set[tuple[Any, int]], seen: set[tuple[Any, int]]
) -> None:
    """Rows of GEMMs are quantized by the kernels before them, and rounded as by definition."""
    model = quantize_model(random_model(WIDE, seed=0), form)
    want_TD, (canvas, want_V) = encoded(ReferenceBackend(model)), stepped(ReferenceBackend(model))
    mine = CudaBackend(model)
    got_TD, (got, got_V) = encoded(mine), stepped(mine)
    # A last bit may round to another fp8 number, which a few rows carry on.
    assert off(got_TD, want_TD) < 0.05
    assert (got.entropy_L - canvas.entropy_L).abs().max() < 0.05
    assert got.soft_LD is not None and canvas.soft_LD is not None
    assert off(got.soft_LD, canvas.soft_LD) < 0.05
    assert off(got_V, want_V) < 0.1  # by definition a single row is quantized too
    assert seen == (GEMMS if form.dense == "fp8" else set()) | more


def test_attention_rounds_its_rows_for_an_fp8_gemm_as_the_gemm_would(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Segments after a prefix; in two parts that are reduced, and in one."""
    model = quantize_model(small.model(), LayerFormat(dense="fp8"))
    mine, reduce, rows = CudaBackend(model), attention.reduce_splits_fp8, list[int]()

    def watch(out_PTNH: Tensor, *given: Any) -> tuple[Tensor, Tensor]:
        rows.append(out_PTNH.shape[1])
        return reduce(out_PTNH, *given)

    monkeypatch.setattr(attention, "reduce_splits_fp8", watch)
    got_TD = encoded(mine)
    assert rows == [10, 10]  # both segments as long as the longer, in both layers
    monkeypatch.setattr(fused, "accepts_fp8", lambda *_: False)
    assert torch.equal(encoded(mine), got_TD)
    assert len(rows) == 2


def test_a_model_in_16_bits_has_no_use_for_fp8_kernels(seen: set[tuple[Any, int]]) -> None:
    model = small.model()
    got_TD = encoded(CudaBackend(model))
    torch.testing.assert_close(got_TD, encoded(ReferenceBackend(model)), atol=1e-4, rtol=1e-4)
    assert not seen


def test_steps_read_an_fp8_head_rounded_and_single_tokens_unrounded() -> None:
    """As the reference does; it would read a single token's row rounded too."""
    model, plain = quantize_head(small.model()), small.model()
    got, got_V = stepped(CudaBackend(model))
    want, _ = stepped(ReferenceBackend(model))
    assert torch.equal(got.guess_L, want.guess_L)
    torch.testing.assert_close(got.entropy_L, want.entropy_L, atol=1e-3, rtol=1e-3)
    other, _ = stepped(ReferenceBackend(plain))
    assert (other.entropy_L - want.entropy_L).abs().max() > 1e-2
    # The same weights without any rounding of rows.
    weight = model.embed_tokens.head
    assert weight.scale_O is not None
    dequantized_VD = weight.values_OI.float() * weight.scale_O[:, None]
    plain.embed_tokens.raw_logits = as_head(dequantized_VD)  # type: ignore[method-assign]
    want_V = stepped(ReferenceBackend(plain))[1]
    torch.testing.assert_close(got_V, want_V, atol=1e-3, rtol=1e-3)


def as_head(weight_VD: Tensor) -> Callable[[Tensor], Tensor]:
    return lambda hidden_TD: hidden_TD @ weight_VD.T


def test_the_model_is_the_same_after_its_weights_were_merged() -> None:
    model: Gemma = quantize_model(random_model(WIDE, seed=0), LAYER_FORMATS["fp8"])
    before = encoded(ReferenceBackend(model))
    CudaBackend(model)
    assert torch.equal(encoded(ReferenceBackend(model)), before)


def test_streamed_experts_give_the_same_as_resident_ones() -> None:
    """Two staging buffers serve three layers; single tokens read host memory."""
    config = replace(WIDE, layer_types=(SLIDING, SLIDING, SLIDING, FULL))
    model = quantize_model(random_model(config, seed=0), LAYER_FORMATS["gguf"])
    want_TD, (want, want_V) = encoded(CudaBackend(model)), stepped(CudaBackend(model))
    staging = Staging(small.CPU)
    for layer in layers_of(model)[1:]:
        layer.experts = StreamedExperts(layer.experts, staging)  # type: ignore[assignment]
    mine = CudaBackend(model)
    assert torch.equal(encoded(mine), want_TD)
    got, got_V = stepped(mine)
    assert torch.equal(got.entropy_L, want.entropy_L)
    assert torch.equal(got_V, want_V)
    assert off(encoded(ReferenceBackend(model)), want_TD) < 1e-4
    assert experts_format(layers_of(model)[1]) == "TiledBlockExperts Q5_0 Q5_0 streamed"
