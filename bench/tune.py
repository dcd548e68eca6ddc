"""Sweep over kernel configs at the released shapes on a GPU: the fastest of each kernel.

    python bench/tune.py [attention moe moe_decode gemm_fp8 gemv router soft_embed]
                         [--seconds 30] [--top 5] [--limit 64] [--tokens 1024 2048] [--bits 8]
    TRITON_INTERPRET=1 python bench/tune.py --tiny --limit 2      # on a CPU: does it run?

The config in use comes first and is marked with *; the others of its space follow in random order
until the seconds of a case are over. All of a case are compiled beforehand, several at a time.
Weights and keys are read from several copies in turn, so that they are not in the L2 cache. Errors
are in units of the root mean square of what float32 gives on the same stored numbers. The results
go by hand into `dgemma/backends/cuda/configs.py`, and count only if `bench/step.py` agrees.

T tokens, E experts, V vocabulary, N query heads, H head width.
"""

import argparse
import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
from common import INTERPRETED, Facts, Sizes, finish, head, kernel_us, max_error
from kernels import dequantize, gigabytes, head_shapes, route, segment_of
from torch import Tensor

from dgemma.backends.cuda import configs as cuda_configs
from dgemma.backends.cuda.configs import MoeConfig, moe_config
from dgemma.backends.cuda.kernels import (
    attention,
    gemm_fp8,
    gemv,
    logit_stats,
    moe,
    moe_decode,
    moe_packed,
    router,
    soft_embed_fp8,
)
from dgemma.model.attention import KVSegment, attention_reference
from dgemma.model.gemma import TokenTable
from dgemma.model.moe import gelu_and_mul
from dgemma.quant import QTensor
from dgemma.quant.fp8 import LinearWeight, quantize, quantize_stacked
from dgemma.quant.head import Fp8HeadTable
from dgemma.quant.nvfp4 import quantize_tiled

L2_BYTES = 400e6  # of weights that are read in turn
MAX_COPIES = 30
LAST_QUERIES = 512  # of a prefill that are compared
GEMVS_4 = (moe_decode.gate_up_packed, moe_decode.down_packed)

Config = Any  # a dataclass of the kernel's own


@dataclass(frozen=True, slots=True)
class Case:
    """A kernel with the same inputs on several copies of its weights."""

    name: str
    works: Sequence[Callable[[Config], Tensor]]
    used: Config
    space: Sequence[Config]
    want: Tensor
    gbytes: float
    tflop: float = 0.0


def copies(make: Callable[[], Any], num_bytes: float) -> list[Any]:
    count = 1 if INTERPRETED else max(2, min(MAX_COPIES, round(L2_BYTES / num_bytes)))
    return [make() for _ in range(count)]


def brief(config: Config) -> str:
    """Print the fields that differ from their defaults."""
    shown = [
        f"{f.name}={getattr(config, f.name)}"
        for f in fields(config)
        if getattr(config, f.name) != f.default
    ]
    return " ".join(shown)


# --- cases


def attention_cases(sizes: Sizes) -> Iterator[Case]:
    length, queries = sizes.config.canvas_length, sizes.config.num_attention_heads
    shapes = [(length, 3 * length, False), (1, 4 * length, True), (length, 4 * length, True)]
    shapes += [] if INTERPRETED else [(length, 128 * length, False), (32 * length, 0, True)]
    for (keys, width, window, _), (rows, past, causal) in product(head_shapes(sizes), shapes):
        past = min(past, window - 1) if window else past
        q = sizes.normal(rows, queries, width, scale=width**-0.5)
        size = (past + rows, keys, width)
        pairs = copies(
            lambda s=size: (sizes.normal(*s), sizes.normal(*s)), 4.0 * size[0] * keys * width
        )  # type: ignore[misc]
        given = [segment_of(sizes, rows, pair, causal=causal) for pair in pairs]
        last, mask = q[-LAST_QUERIES:], None
        if causal:
            position = past + torch.arange(rows, device=sizes.device)[-LAST_QUERIES:, None]
            back = position - torch.arange(size[0], device=sizes.device)
            mask = (back >= 0) & (back < (window or 1 << 30))
        k, v = (part.float() for part in pairs[0])
        want = attention_reference(last.float(), [KVSegment(k, v, mask)])
        works = [
            lambda config, g=g, q=q, m=keys, w=window: attention.reduce_splits(  # type: ignore[misc]
                *attention.attend(q, *g, m, w, config), q.dtype
            )[-LAST_QUERIES:]
            for g in given
        ]
        space = [
            cuda_configs.AttentionConfig(
                queries=a, keys=b, warps=w, stages=s, splits=p, v_slices=c, fp16_splits=rows > 1
            )
            for a, b, w, s, p, c in product(
                (16,) if rows == 1 else (64, 128),
                (16, 32, 64),
                (4, 8),
                (2, 3),
                (1, 2, 4, 8, 16, 32, 66),
                (1, 2),
            )
            if (c == 1 or width > 256) and (p <= 8 or rows == 1)
        ]
        used = cuda_configs.attention_config(rows * queries // keys, keys, width)
        pairs_seen = rows * (past + (rows + 1) / 2 if causal else past + rows)
        yield Case(
            f"attention {width} {rows}+{past}{' causal' if causal else ''}",
            works, used, space, want, gigabytes(*pairs[0], q, q),
            4e-12 * pairs_seen * queries * width,
        )  # fmt: skip


def tile_space(bits: int, used: MoeConfig) -> list[MoeConfig]:
    """Tiles near the one in use: as many rows, or half or twice as many."""
    rows = sorted({max(16, used.rows // 2), used.rows, min(256, 2 * used.rows)})
    shapes = product(rows, (32, 64, 128, 256), (64, 128, 256), (4, 8), (2, 3, 4, 6))
    if bits == 4:
        extra = [{"one_dot": w, "unroll": u} for w, u in ((False, 1), (True, 1), (True, 2))]
    else:
        extra = [
            {"swap_ab": s, "tma": t, "tail": n}
            for s, t, n in product((True, False), (True, False), (0, 32))
        ]
    return [
        MoeConfig(rows=r, columns=c, depth=d, warps=w, stages=s, **more)
        for (r, c, d, w, s), more in product(shapes, extra)
        if r * c <= 128 * 256 and more.get("tail", 0) < r
    ]


def stored_experts(sizes: Sizes, bits: int, part: int) -> tuple[Any, float]:
    """One layer's expert weights in so many bits, and their bytes."""
    config = sizes.config
    width, inner = config.hidden_size, config.moe_intermediate_size
    size = ((2 * inner, width), (width, inner))[part]
    weight = sizes.weight(config.num_experts, *size)
    if bits == 16:
        return weight, weight.nbytes
    if bits == 8:
        found = quantize_stacked(weight)
        return found, found.values.nbytes
    tiled = quantize_tiled(weight, 2 - part)
    return tiled, tiled.words_EW.nbytes + tiled.scales_EW.nbytes


def expert_weight(stored: Any, bits: int, expert: int) -> Tensor:
    if bits == 4:
        return stored.dequantize(expert)  # type: ignore[no-any-return]
    if bits == 8:
        return QTensor(*(part[expert] for part in stored)).dequantize()
    return dequantize(stored[expert])


def wanted(stored: Any, bits: int, part: int, rows: Tensor, ids_TK: Tensor) -> Tensor:
    """Compute every assignment in float32, from rows of tokens (part 0) or assignments (part 1)."""
    flat_A, outs = ids_TK.flatten(), {}
    for expert in flat_A.unique().tolist():
        index_A = (flat_A == expert).nonzero()[:, 0]
        given = rows[index_A // ids_TK.shape[1] if part == 0 else index_A].float()
        found = given @ expert_weight(stored, bits, expert).T
        outs[expert] = index_A, gelu_and_mul(found) if part == 0 else found
    width = next(iter(outs.values()))[1].shape[1]
    out = torch.empty(len(flat_A), width, device=rows.device)
    for index_A, found in outs.values():
        out[index_A] = found
    return out


def moe_cases(
    sizes: Sizes, tokens_of: Sequence[int] | None = None, bits_of: Sequence[int] = (16, 8, 4)
) -> Iterator[Case]:
    """Both GEMMs of the experts, for a canvas, for two, and for sixteen or a long prefill."""
    config, length = sizes.config, sizes.config.canvas_length
    top_k, count = config.top_k_experts, config.num_experts
    usual = (length,) if INTERPRETED else (length, 2 * length, 16 * length)
    for tokens, bits, part in product(tokens_of or usual, bits_of, (0, 1)):
        width = (config.hidden_size, config.moe_intermediate_size)[part]
        x = sizes.normal(tokens if part == 0 else tokens * top_k, width)
        rows, scale = quantize(x) if bits == 8 else (x, None)  # type: ignore[assignment]
        ids_TK = route(sizes, tokens)
        buckets = moe.sort_by_expert(ids_TK, count)
        first, num_bytes = stored_experts(sizes, bits, part)
        layers = [
            first,
            *(
                one
                for one, _ in copies(lambda b=bits, p=part: stored_experts(sizes, b, p), num_bytes)[
                    1:
                ]
            ),
        ]  # type: ignore[misc]

        def run(
            weight: Any,
            config: MoeConfig,
            given: tuple[Any, ...] = (rows, scale, buckets, part, bits),
        ) -> Tensor:
            x, scale, buckets, part, bits = given
            if bits == 4:
                if part == 0:
                    return moe_packed.gate_up(x, weight, buckets, top_k, config)
                return moe_packed.down(x, weight, buckets, config)
            scales = None
            if bits == 8:
                weight, columns = weight
                scales = moe.Scales(scale, columns, sizes.dtype)
            if part == 0:
                return moe.gate_up(x, weight, buckets, top_k, config, scales)
            return moe.down(x, weight, buckets, config, scales)

        both = moe_config(tokens * top_k, count, bits)
        used = both.gate_up if part == 0 else both.down
        hit = len(ids_TK.unique()) / count
        exact = rows if scale is None else QTensor(rows, scale).dequantize()
        flop = (
            2e-12
            * ids_TK.numel()
            * width
            * ((2 * config.moe_intermediate_size, config.hidden_size)[part])
        )
        yield Case(
            f"moe {('gate_up', 'down')[part]} {bits} bits x{tokens}",
            [lambda config, w=w, run=run: run(w, config) for w in layers],  # type: ignore[misc]
            used, tile_space(bits, used), wanted(first, bits, part, exact, ids_TK),
            hit * num_bytes / 1e9, flop,
        )  # fmt: skip


def moe_decode_cases(sizes: Sizes) -> Iterator[Case]:
    """Both GEMVs of one token's experts; tokens in turn that together use every expert."""
    config = sizes.config
    top_k, count = config.top_k_experts, config.num_experts
    tokens = torch.randperm(count, device=sizes.device).view(-1, 1, top_k)
    for bits, part in product((16, 8, 4), (0, 1)):
        width = (config.hidden_size, config.moe_intermediate_size)[part]
        x = sizes.normal(1 if part == 0 else top_k, width)
        stored, num_bytes = stored_experts(sizes, bits, part)

        def run(
            ids: Tensor,
            config: cuda_configs.MoeDecodeConfig,
            given: tuple[Any, ...] = (x, stored, bits, part),
        ) -> Tensor:
            x, stored, bits, part = given
            if bits == 4:
                return GEMVS_4[part](x, ids, stored, config)
            weight, scale = stored if bits == 8 else (stored, None)
            return (moe_decode.gate_up, moe_decode.down)[part](x, ids, weight, config, scale)

        table = cuda_configs.MOE_DECODE[bits]
        space = [
            cuda_configs.MoeDecodeConfig(columns=c, depth=d, warps=w)
            for c, d, w in product((2, 4, 8, 16, 32, 64), (64, 128, 256, 512), (2, 4, 8))
        ]
        yield Case(
            f"moe_decode {('gate_up', 'down')[part]} {bits} bits",
            [lambda config, ids=ids, run=run: run(ids, config) for ids in tokens],  # type: ignore[misc]
            table.gate_up if part == 0 else table.down,
            space, wanted(stored, bits, part, x, tokens[0]), num_bytes * top_k / count / 1e9,
        )  # fmt: skip


def gemm_space(
    used: cuda_configs.GemmConfig, splits: Sequence[int]
) -> list[cuda_configs.GemmConfig]:
    shapes = product((64, 128, 256), (64, 128, 256), (64, 128), (4, 8), (3, 4, 6), splits)
    return [
        replace(used, rows=r, outputs=o, depth=d, warps=w, stages=s, splits=p)
        for r, o, d, w, s, p in shapes
    ]


def gemm_fp8_cases(sizes: Sizes) -> Iterator[Case]:
    rows = sizes.config.canvas_length
    configs = {"qkv": cuda_configs.QKV, "out": cuda_configs.OUT, "down": cuda_configs.DOWN}
    for name, (outputs, depth) in sizes.gemms.items():
        used = configs.get(name.split()[0])
        if used is None:
            continue
        x = quantize(sizes.normal(rows, depth))
        given = copies(lambda o=outputs, d=depth: quantize(sizes.weight(o, d)), outputs * depth)  # type: ignore[misc]

        def run(weight: QTensor, config: cuda_configs.GemmConfig, x: QTensor = x) -> Tensor:
            return gemm_fp8.gemm(x, weight, sizes.dtype, config)

        splits = (1,) if used.splits == 1 else (1, 2, 3, 4)
        yield Case(
            f"gemm_fp8 {name}",
            [lambda config, w=w, run=run: run(w, config) for w in given],  # type: ignore[misc]
            used, gemm_space(used, splits), x.dequantize() @ given[0].dequantize().T,
            gigabytes(x.values, given[0].values), 2e-12 * rows * outputs * depth,
        )  # fmt: skip


def gemv_cases(sizes: Sizes) -> Iterator[Case]:
    """One row by each merged weight, 16-bit and fp8, and by the LM head."""
    vocab, width = sizes.config.vocab_size, sizes.config.hidden_size
    shapes = {**sizes.gemms, "LM head": (vocab, width)}
    for (name, (outputs, depth)), is_fp8 in product(shapes.items(), (False, True)):

        def make(o: int = outputs, d: int = depth, fp8: bool = is_fp8) -> LinearWeight:
            weight = sizes.weight(o, d)
            return LinearWeight(*quantize(weight)) if fp8 else LinearWeight(weight)

        given = copies(make, (2.0 - is_fp8) * outputs * depth)
        x, is_gated = sizes.normal(1, depth), name == "gate_up"
        want = x.float() @ dequantize(given[0]).T
        work = gemv.gemv_gelu_mul if is_gated else gemv.gemv
        half = outputs // 2 if is_gated else outputs
        space = [
            cuda_configs.GemvConfig(o, c, w)
            for o, c, w in product((1, 2, 4, 8, 16), (256, 512, 1024, 2048, 4096), (2, 4, 8))
        ]
        yield Case(
            f"gemv{' fp8' if is_fp8 else ''} {name}",
            [lambda config, w=w, x=x, work=work: work(x, *w, config) for w in given],  # type: ignore[misc]
            cuda_configs.gemv_config(half, depth, is_gated=is_gated, is_fp8=is_fp8),
            space, gelu_and_mul(want) if is_gated else want, gigabytes(given[0].values_OI),
        )  # fmt: skip


def router_cases(sizes: Sizes) -> Iterator[Case]:
    config = sizes.config
    experts, width = config.num_experts, config.hidden_size
    scale_E = torch.ones(experts, dtype=sizes.dtype, device=sizes.device)
    for rows in (config.canvas_length, 8 * config.canvas_length):
        x = sizes.normal(rows, width)
        given = [sizes.weight(experts, width) for _ in range(1 if INTERPRETED else 8)]

        def run(weight: Tensor, config_: cuda_configs.RouterConfig, x: Tensor = x) -> Tensor:
            logits = router.router_logits(x, weight, config_)
            return router.topk(logits, scale_E, config.top_k_experts, config_.topk_warps)[1]

        p_TK = (x.float() @ given[0].float().T).softmax(-1).topk(config.top_k_experts).values
        space = [
            cuda_configs.RouterConfig(rows=r, columns=c, k_split=s, depth=d, stages=g, topk_warps=k)
            for r, c, s, d, g, k in product(
                (16, 32, 64, 128), (64, 128), (128, 256, 512, 1408), (64, 128), (2, 3), (1, 2, 4)
            )
            if d <= s
        ]
        yield Case(
            f"router {rows}",
            [lambda config, w=w, run=run: run(w, config) for w in given],  # type: ignore[misc]
            cuda_configs.router_config(rows, experts, width), space,
            p_TK / p_TK.sum(-1, keepdim=True), gigabytes(x, given[0]),
        )  # fmt: skip


def soft_embed_cases(sizes: Sizes) -> Iterator[Case]:
    """The GEMM of the dense soft embedding in fp8."""
    length, vocab = sizes.config.canvas_length, sizes.config.vocab_size
    source = TokenTable(0, sizes.config.hidden_size)
    source.weight = torch.nn.Parameter(
        sizes.weight(vocab, sizes.config.hidden_size), requires_grad=False
    )
    soft = Fp8HeadTable(source, soft=True).soft
    assert soft is not None
    raw_TV, one_T = sizes.normal(length, vocab), torch.ones(length, device=sizes.device)
    zero_T = torch.zeros(length, dtype=torch.long, device=sizes.device)
    query = logit_stats.TokenQuery(
        temperature_T=one_T,
        draw_temperature_T=one_T,
        uniform_T=0.5 * one_T.double(),
        current_T=zero_T,
    )
    stats = logit_stats.logit_stats(raw_TV, None, query, length)
    probs = soft_embed_fp8.quantize_probs(stats, soft)
    used = cuda_configs.SOFT_EMBED
    want = soft_embed_fp8.split_sums(probs, soft, sizes.dtype, used).float()
    yield Case(
        "soft_embed fp8",
        [lambda config: soft_embed_fp8.split_sums(probs, soft, sizes.dtype, config)],
        used, gemm_space(used, (1,)), want.sum(0), gigabytes(soft.values_DV, probs.values_TV),
        2e-12 * length * vocab * sizes.config.hidden_size,
    )  # fmt: skip


CASES: dict[str, Callable[[Sizes], Iterator[Case]]] = {
    "attention": attention_cases,
    "moe": moe_cases,
    "moe_decode": moe_decode_cases,
    "gemm_fp8": gemm_fp8_cases,
    "gemv": gemv_cases,
    "router": router_cases,
    "soft_embed": soft_embed_cases,
}


# --- the sweep


def order(case: Case, limit: int) -> list[Config]:
    others = [config for config in case.space if config != case.used]
    random.Random(0).shuffle(others)
    return [case.used, *others][:limit]


def precompile(case: Case, configs: Sequence[Config], seconds: float) -> None:
    """Compile configs several at a time; what fails here is compiled when it is launched."""
    from dgemma.backends.cuda.precompile import compile_in_parallel

    def submit() -> None:
        end = time.monotonic() + seconds
        for config in configs:
            if time.monotonic() < end:
                _ignore_errors(lambda config=config: case.works[0](config))  # type: ignore[misc]

    compile_in_parallel(submit, torch.device("cuda", torch.cuda.current_device()))


def _ignore_errors(work: Callable[[], object]) -> None:
    try:
        work()
    except Exception:
        return


def sweep(case: Case, arguments: argparse.Namespace) -> Facts:
    """Try configs for some seconds; returns the fastest and the one in use."""
    configs = order(case, arguments.limit)
    if not INTERPRETED:
        _ignore_errors(lambda: precompile(case, configs, arguments.seconds))
    found: list[tuple[float, float, Config]] = []
    failed: list[str] = []
    end = time.monotonic() + arguments.seconds
    for number, config in enumerate(configs):
        if number and time.monotonic() > end:
            break
        try:
            got = case.works[0](config)
            got = got.float().sum(0) if got.dim() > case.want.dim() else got
            error = max_error(got, case.want)
            works = [lambda work=work, c=config: work(c) for work in case.works]  # type: ignore[misc]
            found.append((kernel_us(works, 2), error, config))
        except Exception as problem:  # too much shared memory, or a shape that does not compile
            failed.append(f"{brief(config)}: {type(problem).__name__}: {str(problem)[:100]}")
    print(f"# {case.name}: {len(found)} of {len(case.space)} measured, {len(failed)} failed")
    for text in failed[:2]:
        print(f"#   {text}")
    ranked = sorted(found, key=lambda one: one[0])
    lines = []
    for rank, (us, error, config) in enumerate(ranked):
        if rank < arguments.top or config == case.used:
            mark = "*" if config == case.used else " "
            gb_s, tflop_s = case.gbytes / us * 1e6, case.tflop / us * 1e6
            rates = f"{gb_s:6.0f} GB/s {tflop_s:5.0f} TFLOP/s"
            print(
                f"{case.name:30}{mark}{us:9.1f} us {rates} err {error:.1e}  {brief(config)}",
                flush=True,
            )
            lines.append({"us": us, "error": error, "config": brief(config), "used": mark == "*"})
    return {"case": case.name, "measured": len(found), "failed": len(failed), "best": lines}


@torch.inference_mode()
def main(given: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("kernels", nargs="*", help=f"of {', '.join(CASES)}; default: all")
    parser.add_argument("--seconds", type=float, default=30.0, help="of each case")
    parser.add_argument("--top", type=int, default=5)
    parser.add_argument("--limit", type=int, default=64, help="configs of each case")
    parser.add_argument("--tokens", nargs="+", type=int, help="of moe; default: three sizes")
    parser.add_argument("--bits", nargs="+", type=int, default=[16, 8, 4], help="of moe's weights")
    parser.add_argument("--tiny", action="store_true", help="tiny shapes in Triton's interpreter")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args(given)
    cases = {**CASES, "moe": partial(moe_cases, tokens_of=arguments.tokens, bits_of=arguments.bits)}
    unknown = set(arguments.kernels) - set(CASES)
    if unknown:
        parser.error(f"no such kernel: {', '.join(sorted(unknown))}")
    sizes = Sizes.choose(tiny=arguments.tiny)
    torch.manual_seed(0)
    torch.backends.cuda.matmul.allow_tf32 = False
    results = []
    for name in arguments.kernels or CASES:
        try:
            for case in cases[name](sizes):
                results.append(sweep(case, arguments))
        except Exception as error:  # one kernel that fails must not end the others
            print(f"BROKEN {name}: {type(error).__name__}: {str(error)[:1000]}", flush=True)
    finish({**head("tune", sizes.device), "results": results}, arguments.out)


if __name__ == "__main__":
    main()
