"""fp8 GEMMs of a canvas by kernel: exact on quantized values, with and without split-K."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from dgemma.backends.cuda.configs import DOWN, MAX_GEMM_ROWS, OUT, QKV, GemmConfig
from dgemma.backends.cuda.gemm import MAX_GEMV_ROWS, gemm, gemm_gelu_mul, lm_head
from dgemma.backends.cuda.kernels import gemm_fp8
from dgemma.model.moe import gelu_and_mul
from dgemma.quant import QTensor
from dgemma.quant.fp8 import VOCAB_PIECE, LinearWeight, fp8_logits, quantize

SMALL = GemmConfig(rows=16, outputs=16, depth=16)


def normal(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(
    ("rows", "outputs", "depth", "config"),
    [
        (5, 24, 48, SMALL),  # outputs and rows beyond the last
        (18, 40, 80, replace(SMALL, splits=2)),  # five steps in parts of three
        (18, 16, 80, replace(SMALL, splits=3)),
        (3, 20, 48, replace(SMALL, depth=32)),  # a step beyond the depth
        (5, 70, 272, QKV),
        (5, 70, 272, OUT),
        (5, 70, 272, DOWN),
    ],
)
def test_products_are_exact_on_what_was_quantized(
    rows: int, outputs: int, depth: int, config: GemmConfig
) -> None:
    weight, x = quantize(normal(1, outputs, depth)), quantize(normal(2, rows, depth))
    got = gemm_fp8.gemm(x, weight, torch.float32, config)
    if config.splits > 1:
        assert got.shape == (config.splits, rows, outputs)
        assert got.flatten(1).any(1).all()  # each has a share of the depth
        got = got.sum(0)
    torch.testing.assert_close(got, x.dequantize() @ weight.dequantize().T, atol=5e-5, rtol=1e-5)


def test_a_product_takes_a_config_for_fp8_weights_and_some_rows_only() -> None:
    fp8, plain = LinearWeight(*quantize(normal(1, 16, 32))), LinearWeight(normal(1, 16, 32))
    odd, split_k = LinearWeight(*quantize(normal(1, 16, 24))), replace(SMALL, splits=2)

    def splits(rows: int, weight: LinearWeight, config: GemmConfig | None = split_k) -> int:
        found = gemm(normal(2, rows, weight.values_OI.shape[1]), weight, torch.float32, config)
        return len(found) if found.dim() == 3 else 0

    few = MAX_GEMV_ROWS
    assert (splits(few + 1, fp8), splits(MAX_GEMM_ROWS, fp8)) == (2, 2)
    assert (splits(few, fp8), splits(MAX_GEMM_ROWS + 1, fp8)) == (0, 0)
    assert (splits(5, plain), splits(5, odd), splits(5, fp8, None)) == (0, 0, 0)
    x = quantize(normal(2, 5, 32))
    got = gemm(x, fp8, torch.float32, split_k).sum(0)
    torch.testing.assert_close(got, gemm(x, fp8, torch.float32, None), atol=2e-5, rtol=1e-5)


def test_a_gated_product_is_quantized_if_its_rows_were() -> None:
    """So that the GEMM after it need not; rows that came in 16 bits stay so."""
    stored = quantize(normal(1, 32, 16) / 4)
    weight, x = LinearWeight(*stored), quantize(normal(2, 5, 16))
    want = gelu_and_mul(x.dequantize() @ stored.dequantize().T)
    got = gemm_gelu_mul(x, weight, torch.float32)
    assert isinstance(got, QTensor)
    torch.testing.assert_close(got.scale, quantize(want).scale, atol=0, rtol=1e-4)
    assert ((got.dequantize() - want).abs() <= want.abs() / 15.9 + got.scale[:, None] / 500).all()
    plain = gemm_gelu_mul(normal(2, 5, 16), LinearWeight(stored.dequantize()), torch.float32)
    assert isinstance(plain, Tensor)


@pytest.mark.parametrize("vocab", [24, VOCAB_PIECE + 8])
def test_an_fp8_head_writes_its_logits_a_piece_of_the_vocabulary_at_a_time(vocab: int) -> None:
    hidden_TD, weight = normal(1, 3, 16), LinearWeight(*quantize(normal(2, vocab, 16)))
    out_TV = torch.empty(3, vocab)
    lm_head(hidden_TD, weight, out_TV)
    torch.testing.assert_close(out_TV, fp8_logits(hidden_TD, weight), atol=1e-5, rtol=1e-5)


def test_a_head_in_16_bits_is_a_product() -> None:
    hidden_TD, weight_VD = normal(1, 3, 16), normal(2, 24, 16)
    out_TV = torch.empty(3, 24)
    lm_head(hidden_TD, LinearWeight(weight_VD), out_TV)
    assert torch.equal(out_TV, hidden_TD @ weight_VD.T)
