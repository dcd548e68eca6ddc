"""Experts of a few tokens, one assignment at a time: 16-bit, fp8 and NVFP4 weights, any shape."""

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from dgemma.backends.cuda.configs import MoeDecodeConfig
from dgemma.backends.cuda.gemm import Fp8Moe, HalfMoe
from dgemma.backends.cuda.kernels import moe_decode as kernels
from dgemma.model.moe import gelu_and_mul
from dgemma.quant.fp8 import Fp8Experts, quantize
from dgemma.quant.nvfp4 import quantize_tiled

CONFIGS = {
    "whole": MoeDecodeConfig(columns=8, depth=64),
    "odd": MoeDecodeConfig(columns=16, depth=128),
    "small": MoeDecodeConfig(columns=16, depth=64, warps=1),
}


def normal(seed: int, *shape: int, scale: float = 1.0) -> Tensor:
    return scale * torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def case(tokens: int, width: int, inner: int) -> tuple[Tensor, ...]:
    ids = normal(1, tokens, 4).topk(2).indices
    up = normal(2, 4, 2 * inner, width, scale=width**-0.5)
    down = normal(3, 4, width, inner, scale=inner**-0.5)
    return normal(4, tokens, width), ids, up, down


def wanted(x: Tensor, ids: Tensor, up: Tensor, down: Tensor) -> Tensor:
    rows = [
        gelu_and_mul(x[c // 2] @ up[e].T) @ down[e].T for c, e in enumerate(ids.flatten().tolist())
    ]
    return torch.stack(rows)


@pytest.mark.parametrize(("tokens", "name"), [(1, "whole"), (3, "odd"), (2, "small")])
def test_a_few_tokens_agree_with_the_definition(tokens: int, name: str) -> None:
    x, ids, up, down = case(tokens, 72, 40)
    hidden = kernels.gate_up(x, ids, up, CONFIGS[name])
    got = kernels.down(hidden, ids, down, CONFIGS[name])
    torch.testing.assert_close(got, wanted(x, ids, up, down), atol=2e-6, rtol=1e-5)


def test_fp8_weights_meet_unquantized_rows() -> None:
    x, ids, up, down = case(2, 64, 48)
    up_8, down_8 = quantize(up), quantize(down)
    got = Fp8Moe(Fp8Experts(up_8, down_8)).outputs(x, ids, None, torch.float32)
    want = wanted(x, ids, up_8.dequantize(), down_8.dequantize())
    torch.testing.assert_close(got, want, atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize(("name", "tokens", "width"), [("whole", 1, 128), ("odd", 2, 192)])
def test_nvfp4_weights_are_their_dequantized_values(name: str, tokens: int, width: int) -> None:
    x, ids, up, down = case(tokens, width, 64)
    up_4, down_4 = quantize_tiled(up, 2), quantize_tiled(down, 1)
    hidden = kernels.gate_up_packed(x, ids, up_4, CONFIGS[name])
    got = kernels.down_packed(hidden, ids, down_4, CONFIGS[name])
    weights = [torch.stack([w.dequantize(e) for e in range(4)]) for w in (up_4, down_4)]
    torch.testing.assert_close(got, wanted(x, ids, *weights), atol=2e-6, rtol=1e-5)


def test_few_tokens_use_the_gemv_and_more_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    taken = []
    real = kernels.expert_outputs

    def watch(*arguments: Tensor) -> Tensor:
        taken.append(len(arguments[0]))
        return real(*arguments)

    monkeypatch.setattr(kernels, "expert_outputs", watch)
    for tokens in (1, kernels.MAX_TOKENS, kernels.MAX_TOKENS + 1):
        x, ids, up, down = case(tokens, 64, 32)
        experts = SimpleNamespace(gate_up_proj=up, down_proj=down)
        got = HalfMoe(experts).outputs(x, ids, None, x.dtype)  # type: ignore[arg-type]
        torch.testing.assert_close(got, wanted(x, ids, up, down), atol=2e-6, rtol=1e-5)
    assert taken == [1, kernels.MAX_TOKENS]
