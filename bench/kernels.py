"""Every CUDA kernel against its definition at the released shapes: error, time, bandwidth.

    python bench/kernels.py [--only moe attention ...] [--out FILE]
    TRITON_INTERPRET=1 python bench/kernels.py --tiny      # errors alone, on a CPU

Random inputs. Errors are against float32 arithmetic on the same stored numbers, in units of the
result's root mean square unless said otherwise; `plain` is the error of PyTorch in the working
dtype, and a kernel passes if its own is at most 1.1 times that, or within the bound of its check.
GB are what must be read and written at least; the last column is relative to the measured copy
bandwidth. `selftest` is the comparison with which an engine starts, on nano and at the released
shapes; `agreement` compares logits of three layers by kernels, by PyTorch and by transformers with
float32. Exits 1 if a check fails.

T tokens, L canvas length, D width, I expert width, E experts, K of a token, A = T * K assignments,
V vocabulary, N query heads, M key heads, H head width, S keys.
"""

import argparse
import logging
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import torch
import torch.nn.functional as F
from common import (
    INTERPRETED,
    Facts,
    Sizes,
    build,
    copy_bandwidth,
    finish,
    head,
    kernel_us,
    max_error,
    new_state,
    random_tokens,
    row_error,
    shape,
)
from torch import Tensor

from dgemma.backends.base import ForwardInput
from dgemma.backends.cuda import configs as cuda_configs
from dgemma.backends.cuda import passes
from dgemma.backends.cuda.backend import CudaBackend
from dgemma.backends.cuda.gemm import (
    Fp8Moe,
    HalfMoe,
    MoeKernels,
    gemm,
    lm_head,
    quantize_rows,
)
from dgemma.backends.cuda.kernels import attention as attention_kernels
from dgemma.backends.cuda.kernels import (
    gemm_fp8,
    gemv,
    moe_decode,
    qk_norm_rope,
    residual_norm,
)
from dgemma.backends.cuda.kernels import router as router_kernels
from dgemma.backends.cuda.kernels.logit_stats import (
    LogitStats,
    TokenQuery,
    logit_stats,
    probabilities_,
)
from dgemma.backends.cuda.kernels.moe import sort_by_expert
from dgemma.backends.cuda.kernels.soft_embed_topk import SoftEmbedOut, count_candidates
from dgemma.backends.cuda.selftest import selftest
from dgemma.backends.reference import ReferenceBackend
from dgemma.diffusion import logit_stats as definition
from dgemma.model.attention import KVSegment, attention_reference
from dgemma.model.attention import attention as plain_attention
from dgemma.model.forward_batch import ForwardBatch, Segment
from dgemma.model.gemma import Experts, Gemma, TokenTable
from dgemma.model.kv_cache import Capacity, KVCache
from dgemma.model.moe import gelu_and_mul
from dgemma.model.norm_rope import apply_rope, rms_norm
from dgemma.quant import QTensor
from dgemma.quant.fp8 import Fp8Experts, LinearWeight, quantize, quantize_stacked
from dgemma.quant.head import Fp8HeadTable, soft_embed_reference
from dgemma.quant.nvfp4 import Nvfp4Experts, quantize_tiled
from dgemma.weights.hub import find_checkpoint
from dgemma.weights.load import load_model

EPS, SOFTCAP = 1e-6, 30.0
NAN = float("nan")
SLACK = 1e-5  # of the comparison with PyTorch's error
# Of fp8 experts: hidden rows, rounded to 16 bits first, sometimes become another fp8 number than in
# float32; rows that are not quantized do not.
FP8_BOUND, FP8_DECODE_BOUND = 0.25, 0.05
ROUNDING_BOUND = 0.13  # one step of e4m3
ENTROPY_BOUND, DRAW_BOUND = 2e-5, 1e-6  # nats; probability
HEAD_ROWS = 8192  # of the vocabulary's end that a head is compared on

Outputs = Tensor | tuple[Tensor, ...]
Work = Callable[[], Any]


def absolute(got: Tensor, want: Tensor) -> float:
    return float((got.double() - want.double()).abs().max())


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """A kernel, its definition in float32, and PyTorch's way in the working dtype."""

    name: str
    kernel: Work
    want: Outputs
    plain: Work | None = None
    read: Callable[[Any], Outputs] | None = None  # of the kernel's result, outside its time
    gbytes: float = NAN  # least traffic
    bound: float | None = None  # of the error, instead of PyTorch's own
    metric: Callable[[Tensor, Tensor], float] = max_error
    timed: bool = True

    def error(self, got: Outputs) -> float:
        pairs = zip(_tuple(got), _tuple(self.want), strict=True)
        return max(self.metric(a, b) for a, b in pairs)

    def run(self) -> Facts:
        got = self.kernel()
        error = self.error(got if self.read is None else self.read(got))
        plain = NAN if self.plain is None else self.error(self.plain())
        bound = self.bound if self.bound is not None else 1.1 * plain + SLACK
        is_timed = self.timed and not INTERPRETED
        plain_us = kernel_us([self.plain]) if is_timed and self.plain is not None else NAN
        return {
            "name": self.name,
            "error": error,
            "plain": plain,
            "passed": error <= bound,
            "us": kernel_us([self.kernel]) if is_timed else NAN,
            "plain_us": plain_us,
            "gbytes": self.gbytes,
        }


def _tuple(value: Outputs) -> tuple[Tensor, ...]:
    return (value,) if isinstance(value, Tensor) else value


def gigabytes(*tensors: Tensor) -> float:
    return sum(tensor.nbytes for tensor in tensors) / 1e9


def dequantize(weight: Tensor | tuple[Tensor, Tensor | None]) -> Tensor:
    """Dequantize to float32."""
    if isinstance(weight, Tensor):
        return weight.float()
    values, scale = weight
    return values.float() if scale is None else values.float() * scale[..., None]


# --- experts


def route(sizes: Sizes, tokens: int, skew: float = 0.0) -> Tensor:
    """Draw the experts of each token; `skew` makes some likelier."""
    experts = sizes.config.num_experts
    scores = sizes.normal(tokens, experts, dtype=torch.float32)
    scores += skew * sizes.normal(experts, dtype=torch.float32)
    return scores.topk(sizes.config.top_k_experts).indices


def exact_experts(
    x_TD: Tensor, ids_TK: Tensor, weight_of: Callable[[int, int], Tensor], *, fp8: bool = False
) -> Tensor:
    """Compute each assignment's output in float32; `fp8`: rows are quantized before each GEMM."""
    flat_A, top_k = ids_TK.flatten(), ids_TK.shape[1]
    out_AD = torch.empty(len(flat_A), x_TD.shape[1], device=x_TD.device)
    for expert in flat_A.unique().tolist():
        index_A = (flat_A == expert).nonzero()[:, 0]
        rows = x_TD[index_A // top_k]
        rows = quantize(rows).dequantize() if fp8 else rows.float()
        hidden = gelu_and_mul(rows @ weight_of(0, expert).T)
        hidden = quantize(hidden.to(x_TD.dtype)).dequantize() if fp8 else hidden
        out_AD[index_A] = hidden @ weight_of(1, expert).T
    return out_AD


def moe_checks(sizes: Sizes) -> Iterator[Check]:
    config, length = sizes.config, sizes.config.canvas_length
    count, width, inner = config.num_experts, config.hidden_size, config.moe_intermediate_size
    up, down = sizes.weight(count, 2 * inner, width), sizes.weight(count, width, inner)
    up_8, down_8 = quantize_stacked(up), quantize_stacked(down)
    up_4, down_4 = quantize_tiled(up, 2), quantize_tiled(down, 1)
    plain = cast(Experts, SimpleNamespace(gate_up_proj=up, down_proj=down))
    moe_16, moe_8 = HalfMoe(plain), Fp8Moe(Fp8Experts(up_8, down_8))
    moe_4 = HalfMoe(Nvfp4Experts(up_4, down_4))
    cases = [(length, 0.0), (length, 1.0), (1, 0.0), (2 * length, 0.0), (16 * length, 0.0)]
    for tokens, skew in cases[:3] if INTERPRETED else cases:
        x_TD, ids_TK = sizes.normal(tokens, width), route(sizes, tokens, skew)
        name = f"{tokens}{' skewed' if skew else ''}"
        hit = len(ids_TK.unique()) / count
        rows = ids_TK.numel() * 2 * (width + inner) * x_TD.element_size() / 1e9
        exact = partial(exact_experts, x_TD, ids_TK)

        def outputs(kernels: MoeKernels, x: Tensor = x_TD, ids: Tensor = ids_TK) -> Work:
            return lambda: kernels.outputs(x, ids, None, x.dtype)

        want = exact(lambda part, e: (up, down)[part][e].float())
        yield Check(
            name=f"experts {name}",
            kernel=outputs(moe_16),
            want=want,
            plain=partial(plain_experts, x_TD, ids_TK, up, down),
            gbytes=hit * gigabytes(up, down) + rows,
        )
        is_fp8 = tokens > moe_decode.MAX_TOKENS
        yield Check(
            name=f"experts fp8 {name}",
            kernel=outputs(moe_8),
            want=exact(lambda part, e: expert_weight((up_8, down_8)[part], e), fp8=is_fp8),
            bound=FP8_BOUND if is_fp8 else FP8_DECODE_BOUND,
            gbytes=hit * gigabytes(*up_8, *down_8) + rows,
        )
        yield Check(
            name=f"experts nvfp4 {name}",
            kernel=outputs(moe_4),
            want=exact(lambda part, e: (up_4, down_4)[part].dequantize(e)),
            bound=FP8_DECODE_BOUND,
            gbytes=hit * gigabytes(*up_4[:2], *down_4[:2]) + rows,
        )
    ids_TK = route(sizes, length)
    buckets = sort_by_expert(ids_TK, count)
    want_E = torch.bincount(ids_TK.flatten(), minlength=count)
    yield Check(
        name="sort by expert",
        kernel=partial(sort_by_expert, ids_TK, count),
        read=lambda found: found.count_E,
        want=want_E,
        bound=0.0,
        metric=absolute,
        gbytes=gigabytes(ids_TK, buckets.assignment_ES),
    )


def expert_weight(weight: QTensor, expert: int) -> Tensor:
    return QTensor(weight.values[expert], weight.scale[expert]).dequantize()


def plain_experts(x_TD: Tensor, ids_TK: Tensor, up: Tensor, down: Tensor) -> Tensor:
    """One GEMM for each expert, in the working dtype."""
    flat_A = ids_TK.flatten()
    order_A = flat_A.argsort(stable=True)
    rows = x_TD[order_A // ids_TK.shape[1]]
    if x_TD.device.type == "cpu":
        ends = torch.bincount(flat_A, minlength=len(up)).cumsum(0).tolist()
        parts = zip([0, *ends[:-1]], ends, up, down, strict=True)
        found = [gelu_and_mul(rows[a:b] @ u.T) @ d.T for a, b, u, d in parts]
        return torch.empty_like(rows).index_copy_(0, order_A, torch.cat(found))
    experts = torch.arange(len(up), device=flat_A.device)  # bincount cannot be captured
    offs = (flat_A[:, None] == experts).sum(0).cumsum(0).int()
    hidden = gelu_and_mul(torch._grouped_mm(rows, up.transpose(1, 2), offs=offs))
    out = torch._grouped_mm(hidden, down.transpose(1, 2), offs=offs)
    return torch.empty_like(out).index_copy_(0, order_A, out)


# --- GEMMs


def gemm_checks(sizes: Sizes) -> Iterator[Check]:
    """fp8 GEMMs of a canvas by our kernel; `plain` is the library's."""
    rows = sizes.config.canvas_length
    configs = {"qkv": cuda_configs.QKV, "out": cuda_configs.OUT, "down": cuda_configs.DOWN}
    for name, (outputs, depth) in sizes.gemms.items():
        config = configs.get(name.split()[0])
        x, weight = quantize(sizes.normal(rows, depth)), quantize(sizes.weight(outputs, depth))
        if config is None:
            continue
        yield Check(
            name=f"gemm fp8 {name}",
            kernel=partial(gemm_fp8.gemm, x, weight, sizes.dtype, config),
            want=x.dequantize() @ weight.dequantize().T,
            plain=partial(gemm, x, LinearWeight(*weight), sizes.dtype),
            read=lambda found: found.sum(0) if found.dim() == 3 else found,
            gbytes=gigabytes(x.values, weight.values),
        )


def gemv_checks(sizes: Sizes) -> Iterator[Check]:
    """GEMVs of one token, 16-bit and fp8, and the LM head of a token and of a canvas."""
    for name, (outputs, depth) in sizes.gemms.items():
        x_1D, values = sizes.normal(1, depth), sizes.weight(outputs, depth)
        is_gated = name == "gate_up"
        for weight in (LinearWeight(values), LinearWeight(*quantize(values))):
            product = x_1D.float() @ dequantize(weight).T
            linear = partial(_gated_linear if is_gated else F.linear, x_1D, values)
            yield Check(
                name=f"gemv{' fp8' if weight.is_fp8 else ''} {name}",
                kernel=partial(gemv.gemv_gelu_mul if is_gated else gemv.gemv, x_1D, *weight),
                want=gelu_and_mul(product) if is_gated else product,
                plain=None if weight.is_fp8 else linear,
                # Rounding alone; a gated product is many times its root mean square.
                bound=(0.04 if is_gated else 0.02) if weight.is_fp8 else None,
                gbytes=gigabytes(weight.values_OI),
            )
    yield from head_checks(sizes)


def _gated_linear(x_1D: Tensor, values: Tensor) -> Tensor:
    return gelu_and_mul(F.linear(x_1D, values))


def head_checks(sizes: Sizes) -> Iterator[Check]:
    vocab, width = sizes.config.vocab_size, sizes.config.hidden_size
    table = TokenTable(0, width)
    table.weight = torch.nn.Parameter(sizes.weight(vocab, width), requires_grad=False)
    last = slice(-HEAD_ROWS, None)
    for name, weight in (("16", LinearWeight(table.weight)), ("fp8", Fp8HeadTable(table).head)):
        end = LinearWeight(*(None if part is None else part[last] for part in weight))  # type: ignore[arg-type]
        x_1D, out_1V = sizes.normal(1, width), torch.empty(1, vocab, device=sizes.device)
        raw_1V = x_1D.float() @ dequantize(end).T
        yield Check(
            name=f"LM head {name}, 1 row",
            kernel=lambda x=x_1D, w=weight, out=out_1V: gemv.logits(x, w, SOFTCAP, out)[:, last],  # type: ignore[misc]
            want=torch.tanh(raw_1V / SOFTCAP) * SOFTCAP,
            bound=1e-3,
            gbytes=gigabytes(weight.values_OI),
        )
        for count in (1, 2):
            x_TD = sizes.normal(count * sizes.config.canvas_length, width)
            out_TV = torch.empty(len(x_TD), vocab, dtype=sizes.dtype, device=sizes.device)
            rows = dequantize(quantize_rows(x_TD)) if weight.is_fp8 else x_TD.float()
            yield Check(
                name=f"LM head {name}, {len(x_TD)} rows",
                kernel=lambda x=x_TD, w=weight, out=out_TV: lm_head(x, w, out)[:, last],  # type: ignore[misc]
                want=rows @ dequantize(end).T,
                bound=0.05,
                gbytes=gigabytes(weight.values_OI, out_TV),
            )


# --- router, norms, heads


def router_checks(sizes: Sizes) -> Iterator[Check]:
    config = sizes.config
    weight_ED = sizes.weight(config.num_experts, config.hidden_size)
    scale_E = 1 + sizes.normal(config.num_experts, scale=0.1)
    for rows in (config.canvas_length, 8 * config.canvas_length):
        x_TD = sizes.normal(rows, config.hidden_size)

        def kernel(x: Tensor = x_TD) -> Tensor:
            logits = router_kernels.router_logits(x, weight_ED)
            return router_kernels.topk(logits, scale_E, config.top_k_experts)[1]

        def plain(x: Tensor = x_TD, dtype: torch.dtype = sizes.dtype) -> Tensor:
            p_TE = F.linear(x.to(dtype), weight_ED.to(dtype)).softmax(-1, dtype=torch.float32)
            weights_TK, ids_TK = p_TE.topk(config.top_k_experts)
            return weights_TK / weights_TK.sum(-1, keepdim=True) * scale_E.float()[ids_TK]

        # Near-ties may fall either way, and have the scale of another expert then.
        yield Check(
            name=f"router {rows}",
            kernel=kernel,
            want=plain(dtype=torch.float32),
            plain=plain,
            bound=0.5,
            gbytes=gigabytes(x_TD, weight_ED),
        )


def norm_checks(sizes: Sizes) -> Iterator[Check]:
    config = sizes.config
    rows, width = config.canvas_length, config.hidden_size
    x, y, z = (sizes.normal(rows, width) for _ in range(3))
    ones = [1 + sizes.normal(width, scale=0.1) for _ in range(5)]
    scalar, wide = sizes.normal(1), sizes.normal(rows, 2 * config.intermediate_size)
    out_AD = sizes.normal(rows * config.top_k_experts, width)
    weights_TK = torch.rand(rows, config.top_k_experts, device=sizes.device)
    row = gigabytes(x)

    def residual_add_norm(t: torch.dtype) -> Outputs:
        first = x.to(t) + rms_norm(y.to(t), ones[0].to(t), EPS)
        dense, experts = (rms_norm(first, ones[i].to(t), EPS) for i in (1, 2))
        return first, dense, experts, rms_norm(first, None, EPS) * ones[3].to(t) * width**-0.5

    def layer_epilogue(t: torch.dtype) -> Outputs:
        outputs = out_AD.to(t).view(rows, -1, width)
        mixed = (outputs.float() * weights_TK[..., None]).sum(1).to(t)
        both = rms_norm(z.to(t), ones[0].to(t), EPS) + rms_norm(mixed, ones[1].to(t), EPS)
        after = (x.to(t) + rms_norm(both, ones[2].to(t), EPS)) * scalar.to(t)
        return after, rms_norm(after, ones[4].to(t), EPS)

    ffn_norms = (*ones[:3], scalar, ones[4])
    mixed = (out_AD, weights_TK)
    works: dict[str, tuple[Callable[..., Outputs], Callable[[torch.dtype], Outputs], float]] = {
        "norm": (
            partial(residual_norm.norm, x, ones[0], EPS),
            lambda t: rms_norm(x.to(t), ones[0].to(t), EPS),
            2 * row,
        ),
        "residual, 3 norms": (
            partial(residual_norm.residual_add_norm, x, y, tuple(ones[:4]), EPS),
            residual_add_norm,
            6 * row,
        ),
        "layer end": (
            partial(residual_norm.layer_epilogue, x, z, mixed, ffn_norms, EPS),
            layer_epilogue,
            4 * row + gigabytes(out_AD),
        ),
        "gelu and mul": (
            partial(residual_norm.gelu_and_mul, wide),
            lambda t: gelu_and_mul(wide.to(t)),
            1.5 * gigabytes(wide),
        ),
    }
    yield Check(
        name="quantize to fp8",
        kernel=partial(quantize_rows, x),
        read=dequantize,
        want=x,
        metric=row_error,
        bound=ROUNDING_BOUND,
        gbytes=1.5 * row,
    )
    for name, (kernel, plain, gbytes) in works.items():
        want = plain(torch.float32)
        yield Check(
            name=name, kernel=kernel, want=want, plain=partial(plain, sizes.dtype), gbytes=gbytes
        )
        if name == "norm":
            continue

        is_single = isinstance(want, Tensor)
        yield Check(
            name=f"{name}, fp8 out",
            kernel=partial(kernel, fp8_out=True),
            read=dequantize if is_single else lambda found: dequantize(found[1]),
            want=want if isinstance(want, Tensor) else want[1],
            metric=row_error,
            bound=ROUNDING_BOUND,
            gbytes=gbytes,
        )


def segment_of(
    sizes: Sizes, length: int, keys: tuple[Tensor, Tensor], *, causal: bool
) -> tuple[Tensor, attention_kernels.Segments]:
    """KV table and segments of one sequence; the queries are the last `length` of the keys."""
    k, v = keys
    table_E6 = torch.tensor([[0, 0, 0, k.data_ptr(), v.data_ptr(), len(k)]], device=sizes.device)
    kind = attention_kernels.CAUSAL if causal else attention_kernels.CANVAS
    return table_E6, attention_kernels.Segments(
        entry_I=torch.zeros(1, dtype=torch.int32, device=sizes.device),
        count_E=torch.tensor([length], device=sizes.device),
        causal_E=torch.tensor([int(causal)], dtype=torch.int32, device=sizes.device),
        stride=length,
        kind=kind,
    )


def head_shapes(sizes: Sizes) -> Iterator[tuple[int, int, int, bool]]:
    """Key heads, width, window (0: none) and values of both kinds of layer."""
    for layer in (0, len(sizes.config.layer_types) - 1):
        kind = sizes.config.attention(layer)
        yield kind.num_kv_heads, kind.head_dim, kind.window or 0, kind.has_value


def heads_checks(sizes: Sizes) -> Iterator[Check]:
    """QK norm, RoPE, and keys and values written to the cache."""
    rows, queries = sizes.config.canvas_length, sizes.config.num_attention_heads
    for keys, width, _, has_value in head_shapes(sizes):
        count = queries + keys * (1 + has_value)
        qkv_TX = sizes.normal(rows, count * width)
        slots = [sizes.normal(rows + 8, keys, width) for _ in range(2)]
        q_weight, k_weight = (1 + sizes.normal(width, scale=0.1) for _ in range(2))
        angles_TP = 6 * torch.rand(rows, width // 2, device=sizes.device)
        cos_sin = angles_TP.cos(), angles_TP.sin()
        shape_ = qk_norm_rope.Heads(
            queries=queries,
            keys=keys,
            width=width,
            q_weight=q_weight,
            k_weight=k_weight,
            has_value=has_value,
        )
        table, segments = segment_of(sizes, rows, (slots[0], slots[1]), causal=False)

        def kernel(
            given: tuple[object, ...] = (qkv_TX, shape_, cos_sin, table, segments, EPS),
            slots: list[Tensor] = slots,
        ) -> Outputs:
            q_TNH = qk_norm_rope.qk_norm_rope(*given)  # type: ignore[arg-type]
            return q_TNH, slots[0][8:], slots[1][8:]

        def plain(t: torch.dtype) -> Outputs:
            parts = qkv_TX.to(t).view(rows, count, width)  # noqa: B023
            q, k = parts[:, :queries], parts[:, queries : queries + keys]  # noqa: B023
            v = parts[:, queries + keys :] if has_value else k  # noqa: B023
            rotated = [
                apply_rope(rms_norm(part, weight.to(t), EPS), *cos_sin)  # noqa: B023
                for part, weight in ((q, q_weight), (k, k_weight))  # noqa: B023
            ]
            return *rotated, rms_norm(v, None, EPS)

        yield Check(
            name=f"QK norm and RoPE {width}",
            kernel=kernel,
            want=plain(torch.float32),
            plain=partial(plain, sizes.dtype),
            gbytes=2 * gigabytes(qkv_TX),
        )


def attention_checks(sizes: Sizes) -> Iterator[Check]:
    length, queries = sizes.config.canvas_length, sizes.config.num_attention_heads
    cases = [(length, 3 * length, False), (2 * length, 16 * length, True), (1, 4 * length, True)]
    cases += [] if INTERPRETED else [(length, 128 * length, False)]
    for keys, width, window, _ in head_shapes(sizes):
        for rows, past, causal in cases:
            past = min(past, window - 1) if window else past
            q_LNH = sizes.normal(rows, queries, width, scale=width**-0.5)
            k_SMH, v_SMH = (sizes.normal(past + rows, keys, width) for _ in range(2))
            mask_LS = None
            if causal:
                position_L = past + torch.arange(rows, device=sizes.device)
                back_LS = position_L[:, None] - torch.arange(past + rows, device=sizes.device)
                mask_LS = (back_LS >= 0) & (back_LS < (window or 1 << 30))
            table, segments = segment_of(sizes, rows, (k_SMH, v_SMH), causal=causal)
            given = (q_LNH, table, segments, keys, window)

            def attend(reduce: Callable[..., Any], given: tuple[Any, ...] = given) -> Outputs:
                return reduce(*attention_kernels.attend(*given), sizes.dtype)  # type: ignore[no-any-return]

            exact = KVSegment(k_SMH.float(), v_SMH.float(), mask_LS)
            want = attention_reference(q_LNH.float(), [exact])
            seen = KVSegment(k_SMH, v_SMH, mask_LS)
            name = f"attention {width} {rows}+{past}{' causal' if causal else ''}"
            gbytes = gigabytes(k_SMH, v_SMH, q_LNH, q_LNH)
            # By the root mean square: the greatest of a million says which was luckier.
            yield Check(
                name=name,
                kernel=partial(attend, attention_kernels.reduce_splits),
                want=want,
                plain=partial(plain_attention, q_LNH, [seen]),
                metric=rms_error,
                gbytes=gbytes,
            )
            if rows > 1:
                yield Check(
                    name=f"{name} fp8 out",
                    kernel=partial(attend, attention_kernels.reduce_splits_fp8),
                    read=dequantize,
                    want=want.flatten(1),
                    metric=row_error,
                    bound=ROUNDING_BOUND,
                    gbytes=gbytes,
                )


def rms_error(got: Tensor, want: Tensor) -> float:
    got, want = got.float(), want.float()
    return float(((got - want).square().mean() / want.square().mean()).sqrt())


# --- logits


LEADS = {"flat": 0.0, "sharp": 24.0}  # of five tokens before the others


def logit_checks(sizes: Sizes) -> Iterator[Check]:
    """Statistics of a canvas's logits, and soft embeddings by all three ways."""
    config, length, vocab = sizes.config, sizes.config.canvas_length, sizes.config.vocab_size
    table = TokenTable(0, config.hidden_size)
    table.weight = torch.nn.Parameter(sizes.weight(vocab, config.hidden_size), requires_grad=False)
    table_8 = Fp8HeadTable(table, soft=True)
    for kind, lead in LEADS.items():
        raw_TV = sizes.normal(length, vocab, scale=2.0)
        raw_TV[:, :5] += lead
        temperature_T = torch.linspace(0.4, 0.8, length, device=sizes.device)
        uniform_T = torch.rand(length, dtype=torch.float64, device=sizes.device)
        current_T = random_tokens(vocab, length, sizes.device)
        query = TokenQuery(
            temperature_T=temperature_T,
            draw_temperature_T=torch.ones_like(temperature_T),
            uniform_T=uniform_T,
            current_T=current_T,
        )
        reference_query = definition.Query(
            temperature_T=temperature_T, uniform_T=uniform_T, current_T=current_T
        )
        exact = definition.position_stats_reference(raw_TV, SOFTCAP, reference_query)
        kernel = partial(logit_stats, raw_TV, SOFTCAP, query, length)
        stats = kernel()
        yield Check(
            name=f"logit stats {kind} (nats)",
            kernel=kernel,
            read=lambda stats: stats.merged.entropy_T,
            want=exact.entropy_T,
            plain=None,
            metric=absolute,
            bound=ENTROPY_BOUND,
            gbytes=gigabytes(raw_TV),
        )
        misses_T = definition.draw_misses(raw_TV, SOFTCAP, reference_query, stats.merged.draw_T)
        yield Check(
            name=f"  draws {kind} (probability)",
            kernel=lambda misses_T=misses_T: misses_T,  # type: ignore[misc]
            want=torch.zeros_like(misses_T),
            metric=absolute,
            bound=DRAW_BOUND,
            timed=False,
        )
        p_TV = definition.position_stats(raw_TV.float().clone(), SOFTCAP, reference_query)[1]
        yield from soft_checks(sizes, (table, table_8), stats, p_TV, kind)


def soft_checks(
    sizes: Sizes,
    tables: tuple[TokenTable, Fp8HeadTable],
    stats: LogitStats,
    p_TV: Tensor,
    kind: str,
) -> Iterator[Check]:
    table, table_8 = tables
    length, width = len(p_TV), table.weight.shape[1]
    soft_ELD = torch.empty(1, length, width, dtype=sizes.dtype, device=sizes.device)
    flags_EL = torch.zeros(1, length, dtype=torch.uint8, device=sizes.device)
    entry_I = torch.zeros(1, dtype=torch.int32, device=sizes.device)
    out = SoftEmbedOut(soft_ELD, flags_EL.long(), flags_EL, entry_I, table.scale)
    want = mean_of(p_TV, table.weight) * table.scale

    def sparse() -> Tensor:
        passes.soft_embed_sparse(table, passes.StepStats(stats, candidates), out)
        return soft_ELD[0]

    def dense_fp8() -> Tensor:
        passes.soft_embed_dense(table_8, stats, out)
        return soft_ELD[0]

    candidates = count_candidates(stats)
    if bool(candidates.covers_mass()):
        yield Check(
            name=f"  soft embedding {kind}, top tokens",
            kernel=sparse,
            want=want,
            metric=row_error,
            bound=0.02,
            gbytes=2 * gigabytes(soft_ELD),
        )
    assert table_8.soft is not None
    fp8_want = soft_embed_reference(p_TV, table.weight.float(), table_8.soft) * table.scale
    yield Check(
        name=f"  soft embedding {kind}, fp8",
        kernel=dense_fp8,
        want=fp8_want,
        metric=row_error,
        bound=0.05,
        gbytes=gigabytes(stats.raw_TV, table_8.soft.values_DV),
    )
    # Last, since it writes over the logits.
    scratch = replace(stats, raw_TV=stats.raw_TV.clone())

    def probabilities() -> Tensor:
        scratch.raw_TV.copy_(stats.raw_TV)
        return probabilities_(scratch)

    yield Check(
        name=f"  probabilities {kind}",
        kernel=probabilities,
        want=p_TV,
        metric=absolute,
        bound=4e-3 if sizes.dtype == torch.bfloat16 else 1e-5,
        gbytes=4 * gigabytes(stats.raw_TV),
    )

    def dense() -> Tensor:
        scratch.raw_TV.copy_(stats.raw_TV)
        passes.soft_embed_dense(table, scratch, out)
        return soft_ELD[0]

    yield Check(
        name=f"  soft embedding {kind}, 16-bit",
        kernel=dense,
        want=want,
        metric=row_error,
        bound=0.02,
        gbytes=4 * gigabytes(stats.raw_TV) + gigabytes(table.weight),
    )


def mean_of(p_TV: Tensor, weight_VD: Tensor) -> Tensor:
    """Mean embedding in float32, a piece of the vocabulary at a time."""
    pieces = zip(torch.split(p_TV, 8192, dim=1), torch.split(weight_VD, 8192), strict=True)
    return torch.stack([p.float() @ part.float() for p, part in pieces]).sum(0)


# --- passes


def pass_checks(sizes: Sizes) -> Iterator[Check]:
    """Parts of a captured step outside the layers: embedding, sampler; timed alone."""
    model = _model(sizes, "none", 2)
    backend, cache = CudaBackend(model), _cache(model, 64)
    tokens = tuple(random_tokens(model.config.vocab_size, 64, sizes.device).tolist())
    backend.run([ForwardInput(cache=cache, tokens=tokens)])
    state = new_state(model)
    backend.run([ForwardInput(cache=cache, state=state)])
    denoise = backend._denoise_pass(1, 0)
    embeds = denoise.embed().clone()
    stats = denoise.stats
    assert stats is not None
    zero = torch.zeros(1, device=sizes.device)

    def advance() -> Tensor:
        denoise.advance(stats)
        backend.buffers.step_E.zero_()
        return zero

    yield Check(
        name="embed with self-conditioning", kernel=denoise.embed, want=embeds, bound=0.0,
        metric=absolute, gbytes=3 * gigabytes(embeds),
    )  # fmt: skip
    yield Check(name="sampler update", kernel=advance, want=zero, bound=0.0, metric=absolute)


def _model(sizes: Sizes, quant: str, layers: int) -> Gemma:
    name = "tiny" if INTERPRETED else "released"
    given = {"device": sizes.device, "dtype": sizes.dtype}
    return build(shape(name, layers), quant, **given)  # type: ignore[arg-type]


def _cache(model: Gemma, tokens: int) -> KVCache:
    weight, length = model.embed_tokens.weight, model.config.canvas_length
    capacity = Capacity(tokens=tokens + 2 * length, segment=tokens + length)
    return KVCache(model.config, capacity, weight.dtype, weight.device)


def selftest_checks(sizes: Sizes) -> Iterator[Check]:
    """The comparison of backends with which an engine starts."""
    logging.basicConfig(format="# %(message)s")
    logging.getLogger("dgemma").setLevel(logging.DEBUG)
    zero = torch.zeros(1)
    for quant in ("none", "fp8") if not INTERPRETED else ():
        nano = load_model(
            find_checkpoint("nano"), device=sizes.device, dtype=sizes.dtype, quant=quant
        ).model
        yield _selftest(f"self-test nano {quant}", nano, zero)
    for quant in ("none", "fp8", "nvfp4") if not INTERPRETED else ("none",):
        yield _selftest(f"self-test {quant}", _model(sizes, quant, 2), zero)


def _selftest(name: str, model: Gemma, zero: Tensor) -> Check:
    def kernel() -> Tensor:
        wrong = selftest(model)
        if wrong:
            print(f"# {name}: {wrong}")
        return zero + bool(wrong)

    return Check(name=name, kernel=kernel, want=zero, bound=0.0, metric=absolute, timed=False)


def agreement_checks(sizes: Sizes) -> Iterator[Check]:
    """Logits of a canvas after a prompt: kernels, PyTorch and transformers against float32."""
    model, prompt = _model(sizes, "none", 3), 2 * sizes.config.canvas_length
    tokens_T = random_tokens(
        model.config.vocab_size, prompt + model.config.canvas_length, sizes.device
    )
    given = (tokens_T[:prompt], tokens_T[prompt:])
    name = "tiny" if INTERPRETED else "released"
    exact = build(shape(name, 3), device=sizes.device, dtype=torch.float32)
    exact.load_state_dict({k: w.float() for k, w in model.state_dict().items()})
    want = canvas_logits(ReferenceBackend(exact), *given)
    plain = canvas_logits(ReferenceBackend(model), *given)
    del exact
    try:
        theirs = transformers_logits(model, *given)
        print(f"# transformers: error {rms_error(theirs, want):.2e}", flush=True)
    except Exception as error:  # another version of it may have to be called in another way
        print(f"# transformers: {type(error).__name__}: {str(error)[:200]}", flush=True)
    got = canvas_logits(CudaBackend(model), *given)
    yield Check(
        name="logits of 3 layers",
        kernel=lambda: got,
        want=want,
        plain=lambda: plain,
        metric=rms_error,
        bound=1.5 * rms_error(plain, want) + SLACK,
        timed=False,
    )


def canvas_logits(
    backend: CudaBackend | ReferenceBackend, prompt_T: Tensor, canvas_L: Tensor
) -> Tensor:
    model = backend.model
    cache = _cache(model, len(prompt_T))
    commit = ForwardBatch([Segment(cache, len(prompt_T), commit=True)])
    backend.encode(prompt_T, commit)
    commit.close()
    batch = ForwardBatch([Segment(cache, len(canvas_L), commit=False)])
    return model.logits(backend.forward(model.embed_canvas(canvas_L, None), batch)).float()


def transformers_logits(model: Gemma, prompt_T: Tensor, canvas_L: Tensor) -> Tensor:
    from _step_peer import transformers_model
    from transformers import DynamicCache

    peer = transformers_model(model)
    cache = DynamicCache(config=peer.config.get_text_config())
    peer.model.encoder(input_ids=prompt_T[None], past_key_values=cache)
    out: Tensor = peer(decoder_input_ids=canvas_L[None], past_key_values=cache).logits
    return out[0].float()


CHECKS: dict[str, Callable[[Sizes], Iterator[Check]]] = {
    "moe": moe_checks,
    "gemm": gemm_checks,
    "gemv": gemv_checks,
    "router": router_checks,
    "norms": norm_checks,
    "heads": heads_checks,
    "attention": attention_checks,
    "logits": logit_checks,
    "passes": pass_checks,
    "selftest": selftest_checks,
    "agreement": agreement_checks,
}


def line(result: Facts, copy: float) -> str:
    rate = result["gbytes"] / result["us"] * 1e6
    verdict = "pass" if result["passed"] else "FAIL"
    return (
        f"{result['name']:34} {result['error']:9.2e} {result['plain']:9.2e} {verdict:4}"
        f" {result['us']:9.1f} {result['plain_us']:9.1f} {rate:7.0f} {100 * rate / copy:5.1f} %"
    )


@torch.inference_mode()
def main(given: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=list(CHECKS), default=list(CHECKS))
    parser.add_argument("--tiny", action="store_true", help="tiny shapes in Triton's interpreter")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args(given)
    sizes = Sizes.choose(tiny=arguments.tiny)
    torch.manual_seed(0)
    torch.backends.cuda.matmul.allow_tf32 = False
    copy = copy_bandwidth(sizes.device)
    facts = {**head("kernels", sizes.device), "copy_gb_s": round(copy)}
    columns = f"{'error':>9} {'plain':>9} {'':4} {'us':>9} {'plain us':>9} {'GB/s':>7} copy"
    print(f"{'kernel':34} {columns}")
    results: list[Facts] = []
    failed: list[str] = []
    for name in arguments.only:
        try:
            for check in CHECKS[name](sizes):
                result = check.run()
                print(line(result, copy), flush=True)
                results.append(result)
                failed += [] if result["passed"] else [check.name]
        except Exception as error:  # one broken kernel must not hide the others
            print(f"BROKEN {name}: {type(error).__name__}: {str(error)[:2000]}")
            failed.append(name)
        if sizes.device.type == "cuda":
            torch.cuda.empty_cache()
    print("all pass" if not failed else f"FAILED: {', '.join(failed)}")
    finish({**facts, "failed": failed, "results": results}, arguments.out)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
