"""A head in 8 bits in steps and single tokens by kernel, beside the same model without kernels."""

import pytest
import torch
from torch import Tensor

from dgemma.denoise import denoise
from dgemma.graph.check_ends import head_off
from dgemma.graph.memory import Shape
from dgemma.graph.step import Stepper
from dgemma.graph.token import Teller
from dgemma.ops import dense
from dgemma.ops.fast import switched
from dgemma.ops.fp8 import quantize
from dgemma.ops.kernels import vector
from dgemma.ops.quantized import Quantized
from dgemma.sampler import Sampler
from dgemma.stack import Stack
from dgemma.weights.head import shrink_head
from tests.kernels import small


def rounded(x_TD: Tensor) -> Quantized:
    with switched(()):
        return quantize(x_TD)


@pytest.mark.usefixtures("small_cuts")
def test_steps_read_it_as_the_plain_path_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dense, "quantize", rounded)  # the interpreter's rounding has no carry
    of, sampler = shrink_head(small.model()), Sampler(max_steps=1)
    rows, row = small.cache(of, 7), small.row(sampler, 0)
    with switched(True):
        mine = Stepper(of, Stack(of), Shape(4, 1, sampler.rule)).step(row, rows)
    assert mine is not None
    *_, (want,) = denoise(of, [rows], [row])
    assert torch.equal(mine.canvas.guess_L, want.canvas.guess_L)
    torch.testing.assert_close(mine.canvas.entropy_L, want.canvas.entropy_L, atol=1e-3, rtol=1e-3)
    *_, (other,) = denoise(small.model(), [rows], [row])
    assert (other.canvas.entropy_L - want.canvas.entropy_L).abs().max() > 1e-2


@torch.inference_mode()
def test_single_tokens_read_it_unrounded() -> None:
    of = shrink_head(small.model())
    teller = Teller(of, Stack(of))
    hidden_1D = torch.randn(1, 32, generator=torch.Generator().manual_seed(0))
    with switched(True):
        teller._read(hidden_1D)
    weight, cap = of.embed_tokens.head, of.config.final_logit_softcapping
    assert weight.factor_O is not None and cap is not None
    raw_1V = hidden_1D @ (weight.numbers_OI.float() * weight.factor_O[:, None]).T
    want_1V = torch.tanh(raw_1V / cap) * cap
    torch.testing.assert_close(teller.logits_1V, want_1V, atol=1e-4, rtol=1e-4)


@torch.inference_mode()
def test_it_is_checked_before_it_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    of = shrink_head(small.model())
    assert head_off(of) == ""
    assert head_off(small.model()) == ""  # in 16 bits there is nothing to check
    product = vector.product
    monkeypatch.setattr(vector, "product", lambda *given: product(*given) * 1.5)
    assert head_off(of).startswith("wrong: the head in 8 bits, by 0.")
    assert head_off(of).endswith("1 rows")
