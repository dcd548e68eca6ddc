"""Compiles the kernels at the released shapes for several GPUs, without one.

A line for each: shared memory, registers, bytes spilled. Fails where a kernel does not compile,
wants more of these than the card has, or touches with PDL what it should wait for. Arguments are
names of cards, all of whose kernels are compiled; without any, all cards, but only some with all
kernels, others with those whose configs depend on the card.
"""

import multiprocessing
import sys
from time import perf_counter
from typing import Any

import triton.language as tl
from compile_card import (
    CARDS,
    EXPERTS,
    FLOAT,
    FP8,
    HALF,
    INT,
    LONG,
    TOP_K,
    WIDTH,
    Card,
    Case,
    compiled,
    fp8_operand,
    usage_line,
)
from compile_ends import end_cases
from compile_experts import check_layout, decode_cases, moe_cases, packed_cases, sort_cases

from dgemma.backends.cuda import device
from dgemma.backends.cuda.configs import (
    DOWN,
    OUT,
    QKV,
    attention_config,
    for_device,
    gemv_config,
    heads_config,
    router_config,
)
from dgemma.backends.cuda.kernels import (
    attention,
    attention_wide,
    gemm_fp8,
    gemv,
    qk_norm_rope,
    residual_norm,
    router,
)
from dgemma.backends.cuda.kernels.common import REGISTERS

WORKERS = 2
COMPLETE = ("sm_86", "sm_90")
# Tokens of a segment, and the kind of segments; those of both kinds are what takes most.
ALL_KINDS = ((256, 0), (256, 1), (256, 2), (1, 1))
SOME_KINDS = ((256, 2), (1, 1))
SEGMENTS = {"table_E6": LONG, "table_stride": "i32", "entry_I": INT, "count_E": LONG}
SEGMENTS |= {"count_stride": "i32", "stride": "i32"}
HEADS = ((8, 256, 1024), (2, 512, 0))  # key heads, their width and window


def one(
    name: str, types: dict[str, str], constants: dict[str, Any]
) -> tuple[dict[str, str], dict[str, Any]]:
    """Return types and constants of a launch that has 1 for an argument, which is then constant."""
    return {n: kind for n, kind in types.items() if n != name}, {**constants, name: 1}


def attention_cases(card: Card, *, everything: bool) -> list[Case]:
    types = {**SEGMENTS, "q_TNH": HALF, "causal_E": INT, "lse_PTN": FLOAT, "tokens": "i32"}
    types["splits"] = "i32"
    found = []
    for keys, width, window in HEADS:
        for length, kind in ALL_KINDS if everything else SOME_KINDS:
            form = attention_config(length * 16 // keys, keys, width)
            sizes = {"N": 16, "M": keys, "H": width, "KIND": kind, "WINDOW": window}
            out = {"out_PTNH": "*fp16" if form.fp16_splits else FLOAT}
            name = f"attention {width}, {length} x kind {kind}"
            if card.capability == (9, 0) and width > 256 and length > 1:
                wide = {**sizes, "BM": 64, "BN": 64}
                found.append(Case(f"wide {name}", attention_wide._attend, types | out, wide, 8))
                if kind != 2:  # without Gluon alone
                    continue
            sizes |= {"BM": form.queries, "BN": form.keys, "V_SLICES": form.v_slices}
            sizes |= {"MASK_EDGES": form.mask_edges, "PDL": card.has_pdl and length == 1}
            given = one("stride", types | out, sizes) if length == 1 else (types | out, sizes)
            found.append(Case(name, attention._attend, *given, form.warps, form.stages))
    return found


def reduce_cases() -> list[Case]:
    splits = {"out_PTNH": "*fp16", "lse_PTN": FLOAT, "out_TNH": HALF}
    exact = {**splits, "out_PTNH": FLOAT}
    few = {"H": 512, "ROWS": 4, "SPLITS": 4}
    many = {"H": 512, "BLOCK": 128, "SPLITS": 66, "P": 128}
    types = {"out_PTNH": "*fp16", "lse_PTN": FLOAT, "out_TX": FP8, "scale_T": FLOAT}
    types["length"] = "i32"
    heads = {"N": 16, "NS": 16, "DTYPE": tl.bfloat16, "maxnreg": REGISTERS}
    fp8 = attention._reduce_splits_fp8
    return [
        Case("reduce parts", attention._reduce_splits, splits | {"rows": "i32"}, few),
        Case("reduce many parts", attention._reduce_many_splits, exact, many),
        *(
            Case(f"reduce fp8 {w}", fp8, types, {**heads, "H": w, "SPLITS": p}, 8)
            for w, p in ((256, 4), (512, 2))
        ),
    ]


def norm_cases() -> list[Case]:
    wide = {"D": WIDTH, "K": TOP_K, "BLOCK": 4096, "HAS_WEIGHT": True}
    limited = {**wide, "maxnreg": REGISTERS}
    bf16 = {"FP8_OUT": False, "FP8_EXPERTS": False, "SPLITS": 1}
    fp8 = {"FP8_OUT": True, "FP8_EXPERTS": True, "SPLITS": 3}
    halves = "x_TD attended_TD post_D dense_D expert_D router_D out_TD dense_TD expert_TD router_TD"
    join = {**dict.fromkeys(halves.split(), HALF), "eps": "fp32"}
    join |= {"dense_T": FLOAT, "expert_T": FLOAT}
    join_8 = {**join, "attended_TD": FLOAT, "dense_TD": FP8, "expert_TD": FP8}
    halves = "x_TD dense_TD out_AD dense_D expert_D both_D scalar next_D out_TD next_TD"
    close = {**dict.fromkeys(halves.split(), HALF), "topk_weights_TK": FLOAT, "eps": "fp32"}
    close["scale_T"] = FLOAT
    close_8 = {**close, "dense_TD": FLOAT, "next_TD": FP8}
    norm = {"x_TD": HALF, "weight_D": HALF, "out_TD": HALF, "eps": "fp32"}
    gated = {"gate_up_TX": HALF, "out_TI": HALF, "scale_T": FLOAT}
    gated_8, of = {**gated, "out_TI": FP8}, residual_norm
    return [
        Case("norm", of._norm, norm, {**wide, **bf16}, 8),
        Case("join", of._residual_add_norm, join, {**wide, **bf16}, 8),
        Case("join fp8", of._residual_add_norm, join_8, {**wide, **fp8}, 8),
        Case("close", of._layer_epilogue, close, {**limited, **bf16}, 8),
        Case("close fp8", of._layer_epilogue, close_8, {**limited, **fp8}, 8),
        Case("gated", of._gelu_and_mul, gated, {"I": 2112, "BLOCK": 1024, **bf16}),
        Case("gated fp8", of._gelu_and_mul, gated_8, {"I": 2112, "BLOCK": 4096, **fp8}, 8),
    ]


def heads_cases() -> list[Case]:
    halves = "qkv_TX q_weight_H k_weight_H q_TNH"
    types = {**SEGMENTS, **dict.fromkeys(halves.split(), HALF), "eps": "fp32"}
    types |= {"cos_TP": FLOAT, "sin_TP": FLOAT}
    found = []
    for keys, width, _ in HEADS:
        has_value = width == 256
        form = heads_config(16, keys)
        sizes = {"X": (16 + keys * (1 + has_value)) * width, "N": 16, "M": keys, "H": width}
        sizes |= {"HAS_VALUE": has_value, "HEADS": form.heads}
        found.append(Case(f"heads {width}", qk_norm_rope._qk_norm_rope, types, sizes, form.warps))
    return found


def gemm_cases() -> list[Case]:
    found = []
    for name, form, out in (
        ("qkv", for_device(QKV), HALF),
        ("out", for_device(OUT), FLOAT),
        ("down", for_device(DOWN), FLOAT),
    ):
        types = {"x_TK": fp8_operand(form.rows, form.depth)}
        types["weight_NK"] = fp8_operand(form.outputs, form.depth)
        types |= {"scale_T": FLOAT, "scale_N": FLOAT, "out_STN": out, "rows": "i32"}
        sizes = {"K": 4096, "N": WIDTH, "K_SPLIT": 1408, "BM": form.rows, "BN": form.outputs}
        sizes |= {"BK": form.depth, "TMA": device.has_tma()}
        case = Case(f"gemm fp8 {name}", gemm_fp8._gemm, types, sizes, form.warps, form.stages)
        found.append(case)
    return found


def quantize_cases() -> list[Case]:
    types = {"x_TD": HALF, "out_TD": FP8, "scale_T": FLOAT, "rows": "i32"}
    sizes = ({"D": 4096, "ROWS": 1, "BLOCK": 4096}, {"D": 704, "ROWS": 4, "BLOCK": 1024})
    return [Case(f"quantize {s['ROWS']}", residual_norm._quantize, types, s) for s in sizes]


def router_cases() -> list[Case]:
    logits = {"x_TD": HALF, "weight_ED": HALF, "logits_STE": FLOAT, "count_E": INT, "rows": "i32"}
    topk = {"logits_STE": FLOAT, "scale_E": HALF, "ids_TK": INT, "weights_TK": FLOAT}
    topk |= {"assignment_ES": INT, "count_E": INT, "rows": "i32", "top_k": "i32"}
    chosen = {"S": 22, "SS": 32, "E": EXPERTS, "BLOCK": EXPERTS, "K": TOP_K, "KS": TOP_K}
    chosen |= {"SORT": True, "RANKS": False, "maxnreg": REGISTERS}
    ranked = {**chosen, "S": 1, "SS": 1, "SORT": False, "RANKS": True}
    found = [
        Case("router choice", router._topk, topk, chosen, 1),
        Case("router ranks", router._topk, *one("rows", topk, ranked), 8),
    ]
    for rows in (256, 4096):
        form = router_config(rows, EXPERTS, WIDTH)
        sizes = {"D": WIDTH, "E": EXPERTS, "K_SPLIT": form.k_split, "BM": form.rows}
        sizes |= {"BN": form.columns, "BK": form.depth, "COUNTS": EXPERTS}
        name = f"router parts {rows}"
        found.append(Case(name, router._router_logits, logits, sizes, form.warps, form.stages))
    return found


def gemv_cases() -> list[Case]:
    """Few rows: a plain product, a gated one in fp8, the head, and joining with routing."""
    found = []
    for name, outputs, depth, how in (
        ("qkv", 8192, WIDTH, {}),
        ("o", WIDTH, 4096, {}),
        ("o fp8", 2816, 8192, {"HAS_SCALE": True}),
        ("gate_up", 2112, WIDTH, {"GATED": True}),
        ("gate_up fp8", 2112, WIDTH, {"GATED": True, "HAS_SCALE": True}),
        ("head", 262144, WIDTH, {"CAP": 30.0}),
        ("head fp8", 262144, WIDTH, {"CAP": 30.0, "HAS_SCALE": True}),
    ):
        form = gemv_config(outputs, depth, is_gated="GATED" in how, is_fp8="HAS_SCALE" in how)
        types = {"x_TD": HALF, "scale_X": FLOAT, "rows": "i32"}
        types["weight_XD"] = FP8 if "HAS_SCALE" in how else HALF
        types["out_TX"] = FLOAT if "CAP" in how else HALF
        sizes = {"D": depth, "X": outputs, "BN": form.outputs, "CHUNK": form.chunk}
        usual = {"GATED": False, "HAS_SCALE": False, "CAP": 0.0}
        given = one("rows", types, {**sizes, **usual, **how})
        found.append(Case(f"gemv {name}", gemv._gemv, *given, form.warps))
    halves = "x_TD attended_TD post_D dense_D expert_D router_D router_ED out_TD dense_TD expert_TD"
    join = {**dict.fromkeys(halves.split(), HALF), "logits_TE": FLOAT, "eps": "fp32"}
    sizes = {"D": WIDTH, "E": EXPERTS, "BN": 4, "BLOCK": 4096}
    return [*found, Case("gemv join", gemv._residual_add_norm_router, join, sizes)]


def cases(card: Card, *, everything: bool) -> list[Case]:
    """Return what to compile for a card: all kernels, or those whose configs depend on the card."""
    with card.assumed():
        moe_16, moe_8 = (moe_cases(bits, everything=everything) for bits in (16, 8))
        found = [*attention_cases(card, everything=everything), *moe_16, *moe_8]
        found += [*packed_cases(everything=everything), *gemm_cases()]
        others = [*reduce_cases(), *norm_cases(), *heads_cases(), *quantize_cases()]
        others += [*router_cases(), *gemv_cases(), *sort_cases(), *decode_cases(), *end_cases()]
        if everything:
            found += others
        elif card.name == "sm_89":  # what sm_86 leaves out
            found += [case for case in [*moe_cases(8), *others] if case.has_fp8]
        else:
            found += [case for case in others if case.name == "soft fp8 product"]
    distinct = {case.key: case for case in found if card.has_fp8 or not case.has_fp8}
    return list(distinct.values())


def line_of(job: tuple[Card, Case]) -> str:
    """Compile a case, and return what to say of it."""
    card, case = job
    try:
        made = compiled(case, card)
        check_layout(case, card, made)
        return usage_line(case, card, made)
    except Exception as error:
        return f"FAILED {card.name} {case.name}: {str(error) or repr(error)}"


def main(names: list[str]) -> int:
    """Compile for cards; returns how many kernels have failed."""
    jobs = [
        (CARDS[name], case)
        for name in names or CARDS
        for case in cases(CARDS[name], everything=bool(names) or name in COMPLETE)
    ]
    began, failed = perf_counter(), []
    # Forked, workers know the cases; these need not be sent, which kernels cannot be.
    with multiprocessing.get_context("fork").Pool(WORKERS, _know, (jobs,)) as pool:
        for line in pool.imap(_nth, range(len(jobs))):
            print(line, flush=True)
            failed += [line] if line.startswith("FAILED") else []
    print(f"{len(jobs) - len(failed)} of {len(jobs)} well, in {perf_counter() - began:.0f} s")
    for line in failed:
        print(line[:100].split("\n")[0])
    return len(failed)


def _know(jobs: list[tuple[Card, Case]]) -> None:
    global known
    known = jobs


def _nth(index: int) -> str:
    return line_of(known[index])


if __name__ == "__main__":
    sys.exit(1 if main(sys.argv[1:]) else 0)
