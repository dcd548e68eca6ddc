"""Experts by kernel: any routing, any shape, weights on either side, always the same bits."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from dgemma.backends.cuda.configs import MOE_8, MOE_16, MoeConfig, moe_config
from dgemma.backends.cuda.gemm import Fp8Moe, HalfMoe, moe_kernels
from dgemma.backends.cuda.kernels import moe as kernels
from dgemma.backends.cuda.kernels.moe import sort_by_expert
from dgemma.model.gemma import Experts
from dgemma.model.moe import expert_outputs, gelu_and_mul, moe_reference, weighted_sum
from dgemma.quant import QTensor
from dgemma.quant.fp8 import Fp8Experts, fp8_grouped, quantize

CONFIG = MoeConfig(rows=16, columns=16, depth=16)
CONFIGS = {
    "plain": CONFIG,
    "swapped": replace(CONFIG, swap_ab=True),
    "deep": replace(CONFIG, depth=32),
    "tma": replace(CONFIG, tma=True, swap_ab=True),
    "tail": replace(CONFIG, rows=32, tail=16),
}


def normal(seed: int, *shape: int, scale: float = 1.0) -> Tensor:
    return scale * torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def case(tokens: int, dtype: torch.dtype, *, bias: float = 0.0) -> tuple[Tensor, ...]:
    """5 experts of 24 to 40 wide; with a bias all tokens choose the same two."""
    width, inner, count = (40, 24, 5) if dtype == torch.float32 else (48, 32, 5)
    scores = normal(1, tokens, count) + bias * torch.arange(count)
    weights_TK, ids_TK = scores.softmax(-1).topk(2)
    gate_up = normal(2, count, 2 * inner, width, scale=width**-0.5)
    down = normal(3, count, width, inner, scale=inner**-0.5)
    x = normal(4, tokens, width)
    return x.to(dtype), ids_TK, weights_TK, gate_up.to(dtype), down.to(dtype)


def by_tile(
    x: Tensor, ids: Tensor, weight: Tensor, weights: list[Tensor], config: MoeConfig
) -> Tensor:
    buckets = sort_by_expert(ids, len(weights[0]))
    hidden = kernels.gate_up(x, weights[0], buckets, ids.shape[1], config)
    return weighted_sum(kernels.down(hidden, weights[1], buckets, config), weight)


@pytest.mark.parametrize(
    ("tokens", "bias", "name"),
    [(1, 0.0, "plain"), (7, 0.0, "deep"), (21, 9.0, "swapped"), (7, 0.0, "tma"), (40, 9.0, "tail")],
)
def test_experts_agree_with_their_definition(tokens: int, bias: float, name: str) -> None:
    x, ids, weight, *weights = case(tokens, torch.float32, bias=bias)
    want = moe_reference(x, ids, weight, *weights)
    got = by_tile(x, ids, weight, weights, CONFIGS[name])
    torch.testing.assert_close(got, want, atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize("name", ["plain", "tma"])
def test_half_precision_loses_no_more_than_its_rounding(name: str) -> None:
    x, ids, weight, *weights = case(9, torch.float16)
    want = moe_reference(x.float(), ids, weight, *(w.float() for w in weights))
    got = by_tile(x, ids, weight, weights, CONFIGS[name])
    torch.testing.assert_close(got.float(), want, atol=3e-3, rtol=3e-3)


def test_buckets_hold_every_assignment_once_in_order() -> None:
    ids = torch.tensor([[2, 0], [0, 1], [2, 1], [2, 0]])
    found = sort_by_expert(ids, 4)
    assert found.count_E.tolist() == [3, 2, 3, 0]
    rows = [
        row[:count] for row, count in zip(found.assignment_ES.tolist(), [3, 2, 3, 0], strict=True)
    ]
    assert rows == [[1, 2, 7], [3, 5], [0, 4, 6], []]


def test_more_assignments_than_one_scan_has(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "SCAN", 16)
    _, ids = normal(1, 37, 3).topk(2)
    found = sort_by_expert(ids, 3)
    for expert, count in enumerate(found.count_E.tolist()):
        want = (ids.flatten() == expert).nonzero()[:, 0].tolist()
        assert found.assignment_ES[expert, :count].tolist() == want


def test_the_table_of_tiles_covers_every_number_of_rows() -> None:
    x, ids, _, *weights = case(3, torch.float32)
    for entry in MOE_16:
        buckets = sort_by_expert(ids, 5)
        hidden = kernels.gate_up(x, weights[0], buckets, 2, entry.gate_up)
        want = torch.stack(
            [
                gelu_and_mul(x[c // 2] @ weights[0][e].T)
                for c, e in enumerate(ids.flatten().tolist())
            ]
        )
        torch.testing.assert_close(hidden, want, atol=2e-6, rtol=1e-5)
    assert moe_config(8, 128) == MOE_16[0]
    assert moe_config(2048, 128) == MOE_16[1]
    assert moe_config(1 << 20, 128, 8) == MOE_8[-1]


def test_rows_are_quantized_as_by_definition() -> None:
    x = normal(1, 4, 40) * torch.tensor([2.0, 1.0, 2**-9, 2**5])[:, None]
    got, scale = kernels.quantize(x)
    want = quantize(x)
    assert torch.equal(got.float(), want.values.float())
    assert torch.equal(scale, want.scale)
    assert not kernels.quantize(torch.zeros(1, 8))[0].float().any()


@pytest.mark.parametrize("name", ["plain", "swapped"])
def test_fp8_products_are_exact_on_what_was_quantized(name: str) -> None:
    x, ids, _, up, down = case(7, torch.float32)
    x_8, up_8, down_8 = quantize(x), quantize(up), quantize(down)
    buckets = sort_by_expert(ids, len(up))
    scales = kernels.Scales(x_8.scale, up_8.scale, torch.float32)
    hidden = kernels.gate_up(x_8.values, up_8.values, buckets, 2, CONFIGS[name], scales)
    rows = [(c // 2, e) for c, e in enumerate(ids.flatten().tolist())]
    rows_TD, weight_EOI = x_8.dequantize(), up_8.dequantize()
    want = torch.stack([gelu_and_mul(rows_TD[t] @ weight_EOI[e].T) for t, e in rows])
    torch.testing.assert_close(hidden, want, atol=2e-6, rtol=1e-5)
    hidden_8 = quantize(want)
    scales = kernels.Scales(hidden_8.scale, down_8.scale, torch.float32)
    out = kernels.down(hidden_8.values, down_8.values, buckets, CONFIGS[name], scales)
    rows_TD, weight_EOI = hidden_8.dequantize(), down_8.dequantize()
    want = torch.stack([rows_TD[c] @ weight_EOI[e].T for c, (_, e) in enumerate(rows)])
    torch.testing.assert_close(out, want, atol=2e-6, rtol=1e-5)


def fp8_case(tokens: int) -> tuple[Tensor, Tensor, Fp8Experts]:
    x, ids, _, up, down = case(tokens, torch.float16)
    return x.float(), ids, Fp8Experts(quantize(up), quantize(down))


def test_fp8_experts_by_kernel_are_their_definition() -> None:
    x, ids, part = fp8_case(5)
    want = expert_outputs(x, ids, *(fp8_grouped(weight) for weight in part.stored))
    got = Fp8Moe(part).outputs(x, ids, None, torch.float32)
    # A last bit of what is between the GEMMs may round to another of the few fp8 numbers.
    assert (got - want).norm() < 0.01 * want.norm()


def test_fp8_experts_take_rows_that_are_quantized_already() -> None:
    x, ids, part = fp8_case(5)
    experts = Fp8Moe(part)
    assert experts.accepts_fp8(x)
    assert not experts.accepts_fp8(x[:4])  # so few stay as they are
    want = experts.outputs(x, ids, None, torch.float32)
    rows = QTensor(*kernels.quantize(x))
    for buckets in (None, sort_by_expert(ids, 5)):
        assert torch.equal(experts.outputs(rows, ids, buckets, torch.float32), want)


def test_every_form_of_experts_has_its_kernels_where_its_shape_fits() -> None:
    x, ids, weight, *weights = case(7, torch.float32)
    plain = experts_of(*weights)
    found = moe_kernels(plain, x.dtype)
    assert isinstance(found, HalfMoe)
    assert not found.accepts_fp8(x)
    for buckets in (None, sort_by_expert(ids, 5)):
        got = weighted_sum(found.outputs(x, ids, buckets, torch.float32), weight)
        torch.testing.assert_close(
            got, moe_reference(x, ids, weight, *weights), atol=2e-6, rtol=1e-5
        )
    assert isinstance(moe_kernels(fp8_case(5)[2], x.dtype), Fp8Moe)
    # Rows of 40 and 24 bytes are no multiples of 16, and of 12 numbers no multiple of 8.
    assert moe_kernels(Fp8Experts.quantized(plain), x.dtype) is None
    assert moe_kernels(experts_of(weights[0], weights[1][..., :12]), x.dtype) is None
    assert moe_kernels(torch.nn.Identity(), x.dtype) is None


def experts_of(up: Tensor, down: Tensor) -> Experts:
    made = Experts.__new__(Experts)
    torch.nn.Module.__init__(made)
    made.gate_up_proj = torch.nn.Parameter(up, requires_grad=False)
    made.down_proj = torch.nn.Parameter(down, requires_grad=False)
    return made
