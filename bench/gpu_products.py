"""Checks of the experts' kernels and of the 8-bit products outside of them, for `gpu_check.py`."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
from gpu_measure import (
    CANVAS,
    DEVICE,
    HALF,
    INNER,
    NUM_EXPERTS,
    TOP_K,
    WIDTH,
    Result,
    largest,
    micros,
    normal,
)
from shapes import RELEASED
from torch import Tensor

from dgemma.ops import experts as plain_experts
from dgemma.ops.dense import Weight, product
from dgemma.ops.experts import mix
from dgemma.ops.fast import switched
from dgemma.ops.fp8 import fp8_choices, quantize
from dgemma.ops.kernels import cuts, dense_8, experts
from dgemma.ops.kernels.buckets import buckets
from dgemma.ops.kernels.experts_1 import FEW
from dgemma.ops.kernels.tiles import tiles
from dgemma.ops.quantized import Quantized
from dgemma.weights.fp8 import quantize_stacked

# Of 8-bit experts: hidden rows, rounded to 16 bits before, now and then become another 8-bit number
# than in float32; rows that are not quantized do not.
MISS_8, MISS_FEW = 0.25, 0.05


# --- experts


@dataclass(frozen=True, slots=True)
class ExpertCase:
    x_TD: Tensor
    ids_TK: Tensor
    share_TK: Tensor
    gate_up_EID: Tensor
    down_EDI: Tensor

    def exact(self) -> Tensor:
        """In float32, one expert's weights at a time."""
        out_TD = torch.zeros(self.x_TD.shape, device=DEVICE)
        for expert in range(NUM_EXPERTS):
            token, k = (self.ids_TK == expert).nonzero(as_tuple=True)
            if len(token):
                rows = self.x_TD[token].float() @ self.gate_up_EID[expert].float().T
                rows = plain_experts.gated(rows) @ self.down_EDI[expert].float().T
                out_TD.index_add_(0, token, rows * self.share_TK[token, k, None])
        return out_TD

    def plain(self) -> Tensor:
        gate_up = plain_experts.grouped_linear(self.gate_up_EID)
        down = plain_experts.grouped_linear(self.down_EDI)
        return plain_experts.experts(self.x_TD, self.ids_TK, self.share_TK, gate_up, down)

    def fast(self) -> Tensor:
        return experts.experts(
            self.x_TD, self.ids_TK, self.share_TK, self.gate_up_EID, self.down_EDI
        )

    @property
    def gbytes(self) -> float:
        hit = len(self.ids_TK.unique())
        weights = (self.gate_up_EID[0].numel() + self.down_EDI[0].numel()) * hit
        return 2 * (weights + self.ids_TK.numel() * (2 * WIDTH + 2 * INNER)) / 1e9


def routing(tokens: int, kind: str) -> tuple[Tensor, Tensor]:
    bias = {"even": 0.0, "skewed": 1.0, "degenerate": 100.0}[kind]
    scores = normal(tokens, NUM_EXPERTS, dtype=torch.float32)
    scores += bias * normal(NUM_EXPERTS, dtype=torch.float32)
    share_TK, ids_TK = scores.softmax(-1).topk(TOP_K)
    return ids_TK, share_TK / share_TK.sum(-1, keepdim=True)


def expert_weights() -> tuple[Tensor, Tensor]:
    gate_up_EID = normal(NUM_EXPERTS, 2 * INNER, WIDTH, scale=WIDTH**-0.5)
    return gate_up_EID, normal(NUM_EXPERTS, WIDTH, INNER, scale=INNER**-0.5)


def expert_results() -> Iterator[Result]:
    weights = expert_weights()
    cases = [(CANVAS, "even"), (CANVAS, "skewed"), (CANVAS, "degenerate")]
    for tokens, kind in [*cases, (1, "even"), (512, "even"), (4096, "even")]:
        case = ExpertCase(normal(tokens, WIDTH), *routing(tokens, kind), *weights)
        exact, repeats = case.exact(), 10 if tokens <= 512 else 3
        error, plain = largest(case.fast(), exact), largest(case.plain(), exact)
        is_same = torch.equal(case.fast(), case.fast())
        passed = error <= 1.1 * plain and is_same
        times = micros(case.fast, repeats), micros(case.plain, repeats)
        yield Result(f"experts {tokens} {kind}", error, plain, passed, *times, case.gbytes)
    case = ExpertCase(normal(CANVAS, WIDTH), *routing(CANVAS, "even"), *weights)
    into = buckets(case.ids_TK, NUM_EXPERTS)
    tile = tiles(CANVAS * TOP_K, NUM_EXPERTS)
    hidden = experts.gate_up(case.x_TD, weights[0], into, TOP_K, tile.gate_up)
    out = experts.down(hidden, weights[1], into, tile.down)
    parts: dict[str, tuple[Callable[[], object], float]] = {
        "  buckets": (lambda: buckets(case.ids_TK, NUM_EXPERTS), 1e-5),
        "  gate_up": (
            lambda: experts.gate_up(case.x_TD, weights[0], into, TOP_K, tile.gate_up),
            2 * weights[0].numel() / 1e9,
        ),
        "  down": (
            lambda: experts.down(hidden, weights[1], into, tile.down),
            2 * weights[1].numel() / 1e9,
        ),
        "  combine": (lambda: experts.combine(out, case.share_TK), 2 * out.numel() / 1e9),
    }
    for name, (work, gbytes) in parts.items():
        yield Result(name, 0.0, 0.0, True, micros(work), float("nan"), gbytes)


def fp8_results() -> Iterator[Result]:
    """On the same 8-bit numbers; `plain` is what 8 bits cost bf16 weights."""
    weights = expert_weights()
    up, down = (quantize_stacked(weight) for weight in weights)
    for tokens in (CANVAS, 1, 512, 4096):
        case = ExpertCase(normal(tokens, WIDTH), *routing(tokens, "even"), *weights)
        exact = _exactly(case, up, down)
        loss = largest(exact, case.exact())

        def fast(case: ExpertCase = case) -> Tensor:
            with switched(True):
                out_AD = fp8_choices(case.x_TD, case.ids_TK, up, down)
            return experts.combine(out_AD, case.share_TK)

        error = largest(fast(), exact)
        passed = error <= (MISS_FEW if tokens <= FEW else MISS_8) and torch.equal(fast(), fast())
        took = micros(fast, 10 if tokens <= 512 else 3)
        gbytes = case.gbytes / 2
        yield Result(f"experts fp8 {tokens}", error, loss, passed, took, float("nan"), gbytes)


def _exactly(case: ExpertCase, up: Quantized, down: Quantized) -> Tensor:
    """In float32, with rows in as many bits as the path for so many of them has."""
    if len(case.x_TD) <= FEW:
        return replace(case, gate_up_EID=up.whole(), down_EDI=down.whole()).exact()
    with switched(False):
        return mix(fp8_choices(case.x_TD.float(), case.ids_TK, up, down), case.share_TK)


# --- products outside the experts


def cut_results() -> Iterator[Result]:
    """A canvas's 8-bit products by our kernel; `plain` is the library's."""
    dense = RELEASED.intermediate_size
    for name, outputs, depth, form in (
        ("qkv", 8192, WIDTH, cuts.QKV),
        ("out", WIDTH, 4096, cuts.OUT),
        ("out full", WIDTH, 8192, cuts.OUT),
        ("down", WIDTH, dense, cuts.DOWN),
    ):
        x, weight = quantize(normal(CANVAS, depth)), quantize(normal(outputs, depth))
        exact = x.whole() @ weight.whole().T

        def fast(x: Quantized = x, weight: Quantized = weight, form: cuts.Cut = form) -> Tensor:
            return dense_8.product(x, weight, HALF, form)

        def plain(x: Quantized = x, weight: Quantized = weight) -> Tensor:
            with switched(True):
                return product(x, Weight(*weight), HALF)

        got = fast().sum(0) if form.parts > 1 else fast()
        error, usual = largest(got, exact), largest(plain(), exact)
        passed = error <= 1.1 * usual and torch.equal(fast(), fast())
        gbytes = 1e-9 * (outputs + CANVAS) * depth
        yield Result(f"8 bits {name}", error, usual, passed, micros(fast), micros(plain), gbytes)
