"""Experts for a few tokens, choice by choice: with 16, 8 and 4 bits, any shape."""

import pytest
import torch
from torch import Tensor

from dgemma.backends.cuda.configs import MoeDecodeConfig
from dgemma.backends.cuda.kernels import moe
from dgemma.backends.cuda.kernels import moe_decode as kernels
from dgemma.backends.cuda.moe import Fp8Moe
from dgemma.model.moe import gelu_and_mul
from dgemma.quant.fp4_experts import lay_stacked
from dgemma.quant.fp8 import quantize
from dgemma.quant.fp8_experts import Fp8Experts

CUTS = {
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


@pytest.mark.parametrize(("tokens", "cut"), [(1, "whole"), (3, "odd"), (2, "small")])
def test_a_few_tokens_agree_with_the_definition(tokens: int, cut: str) -> None:
    x, ids, up, down = case(tokens, 72, 40)
    hidden = kernels.gate_up(x, ids, up, CUTS[cut])
    got = kernels.down(hidden, ids, down, CUTS[cut])
    torch.testing.assert_close(got, wanted(x, ids, up, down), atol=2e-6, rtol=1e-5)


def test_8_bit_weights_meet_whole_rows() -> None:
    x, ids, up, down = case(2, 64, 48)
    up_8, down_8 = quantize(up), quantize(down)
    got = Fp8Moe(Fp8Experts.packed(up_8, down_8)).outputs(x, ids, None, torch.float32)
    want = wanted(x, ids, up_8.whole(), down_8.whole())
    torch.testing.assert_close(got, want, atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize(("cut", "tokens", "width"), [("whole", 1, 128), ("odd", 2, 192)])
def test_4_bit_weights_are_what_they_stand_for(cut: str, tokens: int, width: int) -> None:
    x, ids, up, down = case(tokens, width, 64)
    up_4, down_4 = lay_stacked(up, 2), lay_stacked(down, 1)
    hidden = kernels.gate_up_4(x, ids, up_4, CUTS[cut])
    got = kernels.down_4(hidden, ids, down_4, CUTS[cut])
    heavy = [torch.stack([laid.whole(e) for e in range(4)]) for laid in (up_4, down_4)]
    torch.testing.assert_close(got, wanted(x, ids, *heavy), atol=2e-6, rtol=1e-5)


def test_one_token_takes_this_way_and_many_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    taken = []
    real = kernels.expert_outputs

    def watch(*arguments: Tensor) -> Tensor:
        taken.append(len(arguments[0]))
        return real(*arguments)

    monkeypatch.setattr(kernels, "expert_outputs", watch)
    for tokens in (1, kernels.FEW, kernels.FEW + 1):
        x, ids, up, down = case(tokens, 64, 32)
        got = moe.expert_outputs(x, ids, up, down)
        torch.testing.assert_close(got, wanted(x, ids, up, down), atol=2e-6, rtol=1e-5)
    assert taken == [1, kernels.FEW]
