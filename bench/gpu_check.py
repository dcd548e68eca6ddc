"""Every kernel beside its definition at the released shapes, on a GPU: error, time, bandwidth.

    python bench/gpu_check.py [--only experts] [--out FILE]

Random weights. Errors are against float32 arithmetic on the same 16-bit inputs; `plain` is the
error of the path that PyTorch alone takes, and a kernel passes if its own is at most 1.1 times
that (or below the floor given). Bytes are what has to be read and written at least; the share is of
the measured copy bandwidth. Of the row statistics, entropy may be 1.5 times off; the number that
decides a draw must lie in the drawn token's interval of the running sum in float64, or within 1e-6
of it (a quarter of the interval of one of 262,144 equal tokens). 8-bit experts are held against
float32 arithmetic on the numbers that their path multiplies, and may be off by a quarter of the
output's root mean square, or a twentieth where rows stay in 16 bits; `plain` is what 8 bits cost.
Attention is judged by its root-mean-square error: the greatest of a million says which of two
equally good results was luckier (it may be 1.5 times the plain one's). Last comes what an engine
does at its start (`graph/check.py`), with the model in the package, whose shapes are small ones,
and at the released shapes.
"""

import argparse
import json
import logging
from collections.abc import Callable, Iterator
from dataclasses import asdict
from datetime import date
from pathlib import Path

import torch
from gpu_measure import (
    CANVAS,
    CAP,
    DEVICE,
    HALF,
    NUM_EXPERTS,
    TOP_K,
    VOCAB,
    WIDTH,
    Result,
    copy_bandwidth,
    eager_micros,
    largest,
    micros,
    normal,
)
from gpu_ours import built
from gpu_products import cut_results, expert_results, fp8_results
from shapes import RELEASED, shallow
from torch import Tensor

import dgemma
from dgemma.device import describe_device
from dgemma.graph.check import check
from dgemma.model import Gemma
from dgemma.ops import row_stats as plain_stats
from dgemma.ops.attention import Segment, attention_reference
from dgemma.ops.attention import attention as plain_attention
from dgemma.ops.dense import gated
from dgemma.ops.fast import switched
from dgemma.ops.fused import CloseWeights, JoinWeights, close, join, route
from dgemma.ops.kernels import attention, heads, row_stats, sparse
from dgemma.ops.kernels.launch import launching
from dgemma.ops.norm import rms_norm
from dgemma.ops.rope import rotate
from dgemma.stack import Stack
from dgemma.weights.load import load_model
from dgemma.weights.packed import Quant

NANO = Path(dgemma.__file__).parent / "models" / "nano"
QUANTS: tuple[Quant, ...] = ("none", "fp8", "nvfp4")
BOTH_KINDS = 2  # layers, one of each
DRAW_MISS = 1e-6  # in probability


# --- row statistics


def stats_results() -> Iterator[Result]:
    for name, lead in (("flat", 0.0), ("sharp", 24.0)):
        raw_TV = normal(CANVAS, VOCAB, scale=2.0)
        raw_TV[:, :5] += lead
        query = plain_stats.Query(
            heat_T=torch.linspace(0.4, 0.8, CANVAS, device=DEVICE),
            uniform_T=torch.rand(CANVAS, dtype=torch.float64, device=DEVICE),
            held_T=torch.randint(VOCAB, (CANVAS,), device=DEVICE),
        )
        yield from _stats(name, raw_TV, query)


def _stats(name: str, raw_TV: Tensor, query: plain_stats.Query) -> Iterator[Result]:
    ask = (query.heat_T, query.uniform_T, query.held_T)
    exact = plain_stats.row_stats_reference(raw_TV, CAP, query)
    old, p_TV = plain_stats.row_stats(raw_TV.float(), CAP, query)
    marks = row_stats.row_marks(raw_TV, CAP, query.heat_T)
    new = row_stats.row_merge(raw_TV, CAP, ask, marks)
    error = (new.entropy_T - exact.entropy_T).abs().max().item()
    plain = (old.entropy_T - exact.entropy_T).abs().max().item()
    is_top = torch.equal(new.top_T, exact.top_T)
    missed, usual = (
        plain_stats.draw_misses(raw_TV, CAP, query, x.draw_T).max().item() for x in (new, old)
    )
    others = (new.draw_T != exact.draw_T).sum().item()
    print(f"# {name}: draws miss by {missed:.1e} (plain {usual:.1e}), {others} unlike float64's")
    passed = error <= max(2e-5, 1.5 * plain) and is_top and missed <= DRAW_MISS

    def fast() -> object:
        return row_stats.row_merge(raw_TV, CAP, ask, row_stats.row_marks(raw_TV, CAP, query.heat_T))

    size = 2 * raw_TV.numel() / 1e9
    slow = eager_micros(lambda: plain_stats.row_stats(raw_TV.float(), CAP, query))
    yield Result(f"row stats {name} (entropy)", error, plain, passed, micros(fast), slow, size)
    got_TV = row_stats.probabilities_(raw_TV.clone(), CAP, query.heat_T, new)
    error, plain = ((x.float() - p_TV).abs().max().item() for x in (got_TV, p_TV.to(HALF)))
    passed = error <= 1.1 * plain + 1e-6
    scratch = raw_TV.clone()
    took = micros(lambda: row_stats.probabilities_(scratch, CAP, query.heat_T, new))
    nan = float("nan")
    yield Result("  probabilities", error, plain, passed, took, nan, 2 * size)
    table_VD = normal(VOCAB, WIDTH)
    exact_TD = p_TV @ table_VD.float()
    dense = largest(got_TV @ table_VD, exact_TD)
    took = micros(lambda: got_TV @ table_VD)
    yield Result("  dense soft mean", dense, dense, True, took, nan, size + 2 * VOCAB * WIDTH / 1e9)
    found = sparse.survivors(raw_TV, CAP, query.heat_T, marks, new)
    mass = found[3].min().item()
    error = largest(sparse.soft_mean(table_VD, *found[:3]), exact_TD)
    print(f"# {name}: least mass kept {mass:.6f}, most tokens {found[2].max().item()}")
    passed = mass < row_stats.MASS or error <= 1.1 * dense + 2e-3
    took = micros(
        lambda: sparse.soft_mean(
            table_VD, *sparse.survivors(raw_TV, CAP, query.heat_T, marks, new)[:3]
        )
    )
    yield Result("  sparse soft mean", error, dense, passed, took, nan, 2e-9 * WIDTH * CANVAS)


# --- attention


def attention_results() -> Iterator[Result]:
    shapes = ((16, 8, 256, 1024), (16, 2, 512, None), (8, 2, 64, 256))  # the last one: nano's
    for q_heads, kv_heads, width, window in shapes:
        for length, keys, is_causal in ((256, 768, False), (256, 32768, False), (512, 4096, True)):
            past = keys if window is None else min(keys, window - 1)
            name = f"attention {width} {length}+{past}{' causal' if is_causal else ''}"
            q_LNH = normal(length, q_heads, width, scale=width**-0.5)
            k_SMH, v_SMH = (normal(past + length, kv_heads, width) for _ in range(2))
            mask_LS = None
            if is_causal:
                back = past + torch.arange(length, device=DEVICE)[:, None]
                back = back - torch.arange(past + length, device=DEVICE)[None]
                mask_LS = (back >= 0) & (back < (window or 1 << 30))
            yield _attention(name, q_LNH, Segment(k_SMH, v_SMH, mask_LS), window)


def _attention(name: str, q_LNH: Tensor, seen: Segment, window: int | None) -> Result:
    keys, heads = seen.k_SMH.shape[:2]
    addresses = [seen.k_SMH.data_ptr(), seen.v_SMH.data_ptr(), keys]
    place_6 = torch.tensor([0, 0, 0, *addresses], device=DEVICE)
    limit = None if seen.mask_LS is None else (window or 0)

    def fast() -> Tensor:
        return attention.attention(q_LNH, place_6, heads, limit)

    whole = Segment(seen.k_SMH.float(), seen.v_SMH.float(), seen.mask_LS)
    exact = attention_reference(q_LNH.float(), [whole])
    new, old = fast(), plain_attention(q_LNH, [seen])
    error, plain = largest(new, exact), largest(old, exact)
    usual, old_usual = (
        ((x.float() - exact).square().mean() / exact.square().mean()).sqrt().item()
        for x in (new, old)
    )
    print(f"# {name}: root mean square error {usual:.3e} (plain {old_usual:.3e})")
    passed = usual <= 1.1 * old_usual and error <= 1.5 * plain
    times = micros(fast), micros(lambda: plain_attention(q_LNH, [seen]))
    gbytes = 2 * (2 * seen.k_SMH.numel() + 2 * q_LNH.numel()) / 1e9
    return Result(name, error, plain, passed, *times, gbytes)


# --- the small ones


def layer_results() -> Iterator[Result]:
    """Beside the definition in 16 bits; `plain` is its error against float32."""
    x, y, z = (normal(CANVAS, WIDTH) for _ in range(3))
    weights = [1 + normal(WIDTH, scale=0.1) for _ in range(5)]
    out_AD, (_, share_TK) = normal(CANVAS * TOP_K, WIDTH), even_shares()
    scalar = normal(1)
    joining, closing = JoinWeights(*weights[:4]), CloseWeights(*weights[:3], scalar, weights[4])
    wide = normal(CANVAS, 2 * RELEASED.intermediate_size)
    logits, scale = normal(CANVAS, NUM_EXPERTS), 1 + normal(NUM_EXPERTS, scale=0.1)
    row = 2 * CANVAS * WIDTH / 1e9
    works: dict[str, tuple[Callable[[torch.dtype], tuple[Tensor, ...]], float]] = {
        "norm": (lambda t: (rms_norm(x.to(t), weights[0].to(t), 1e-6),), 2 * row),
        "join": (
            lambda t: join(x.to(t), y.to(t), JoinWeights(*(w.to(t) for w in joining)), 1e-6),
            6 * row,
        ),
        "close": (
            lambda t: close(
                x.to(t),
                z.to(t),
                (out_AD.to(t), share_TK),
                CloseWeights(*(w.to(t) for w in closing)),
                1e-6,
            ),
            (4 + TOP_K) * row,
        ),
        "gated": (lambda t: (gated(wide.to(t)),), 3e-9 * wide.numel()),
        "route": (lambda t: chosen(logits.to(t), scale.to(t)), 3e-9 * logits.numel()),
    }
    for name, (work, gbytes) in works.items():
        with switched(False):
            exact, old = work(torch.float32), work(HALF)
            slow = micros(lambda work=work: work(HALF))  # type: ignore[misc]
        with switched(True):
            new = work(HALF)
            took = micros(lambda work=work: work(HALF))  # type: ignore[misc]
        error = max(largest(a, b) for a, b in zip(new, exact, strict=True))
        plain = max(largest(a, b) for a, b in zip(old, exact, strict=True))
        yield Result(name, error, plain, error <= 1.1 * plain + 1e-6, took, slow, gbytes)
    for kind in (256, 512):
        yield _heads(kind)


def chosen(logits_TE: Tensor, scale_E: Tensor) -> tuple[Tensor, Tensor]:
    """Scores of the chosen experts, which of equals may be either, and their plain shares."""
    ids_TK, share_TK = route(logits_TE, scale_E, TOP_K)
    return logits_TE.gather(1, ids_TK.long()), share_TK / scale_E[ids_TK]


def even_shares() -> tuple[Tensor, Tensor]:
    logits_TE = normal(CANVAS, NUM_EXPERTS, dtype=torch.float32)
    return route(logits_TE, torch.ones(NUM_EXPERTS, device=DEVICE), TOP_K)


def _heads(width: int) -> Result:
    """Norms, turns and the writing of keys and values."""
    keys, has_value = (8, True) if width == 256 else (2, False)
    count = 16 + keys * (1 + has_value)
    qkv_TX = normal(CANVAS, count * width)
    slots = [normal(CANVAS + 64, keys, width) for _ in range(2)]
    q_weight, k_weight = (1 + normal(width, scale=0.1) for _ in range(2))
    angles_TP = torch.rand(CANVAS, width // 2, device=DEVICE) * 6
    turns = angles_TP.cos(), angles_TP.sin()
    shape = heads.Heads(
        queries=16,
        keys=keys,
        width=width,
        q_weight=q_weight,
        k_weight=k_weight,
        has_value=has_value,
    )
    place_6 = torch.tensor([0, 0, 0, *(s.data_ptr() for s in slots), CANVAS + 64], device=DEVICE)

    def fast() -> tuple[Tensor, Tensor, Tensor]:
        q_TNH = heads.heads(qkv_TX, shape, turns, place_6, 1e-6)
        return q_TNH, slots[0][64:], slots[1][64:]

    def plain(dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
        parts = qkv_TX.to(dtype).view(CANVAS, count, width)
        q, k = parts[:, :16], parts[:, 16 : 16 + keys]
        v = parts[:, 16 + keys :] if has_value else k
        q = rotate(rms_norm(q, q_weight.to(dtype), 1e-6), *turns)
        return q, rotate(rms_norm(k, k_weight.to(dtype), 1e-6), *turns), rms_norm(v, None, 1e-6)

    exact = plain(torch.float32)
    errors = [
        max(largest(a, b) for a, b in zip(got, exact, strict=True)) for got in (fast(), plain(HALF))
    ]
    times = micros(fast), micros(lambda: plain(HALF))
    return Result(
        f"heads {width}", *errors, errors[0] <= 1.1 * errors[1], *times, 4e-9 * qkv_TX.numel()
    )


# --- an engine's start


def start_results() -> Iterator[Result]:
    """The check that decides which kernels run: trained weights of small shapes, random large."""
    logging.basicConfig(format="# %(message)s")
    logging.getLogger("dgemma").setLevel(logging.DEBUG)  # how far off each was
    for quant in QUANTS[:2]:
        model = load_model(NANO, device=DEVICE, dtype=HALF, quant=quant).model
        yield _started(f"nano {quant}", model)
    for quant in QUANTS:
        yield _started(f"released {quant}", built(shallow(BOTH_KINDS), quant))


def _started(name: str, model: Gemma) -> Result:
    with launching(early=True):
        verdicts = check(model, Stack(model))
    for family, reason in verdicts.items():
        print(f"# {name}, {family}: {reason or 'passed'}")
    nan = float("nan")
    return Result(f"start {name}", nan, nan, not any(verdicts.values()), nan, nan, nan)


CHECKS: dict[str, Callable[[], Iterator[Result]]] = {
    "experts": expert_results,
    "fp8": fp8_results,
    "cuts": cut_results,
    "row_stats": stats_results,
    "attention": attention_results,
    "layer": layer_results,
    "start": start_results,
}


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", choices=list(CHECKS))
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    torch.manual_seed(0)
    torch.backends.cuda.matmul.allow_tf32 = False
    copy = copy_bandwidth()
    print(f"# {date.today()} {describe_device(DEVICE)}, torch {torch.__version__}, copy {copy:.0f}")
    print(
        f"{'kernel':30} {'error':>9} {'plain':>9} {'':4} {'us':>9} {'plain us':>9} {'GB/s':>7} copy"
    )
    results = []
    for name, results_of in CHECKS.items():
        if arguments.only not in (None, name):
            continue
        try:
            for result in results_of():
                print(result.line(copy), flush=True)
                results.append(result)
        except Exception as error:  # one broken kernel must not hide the others
            print(f"BROKEN {name}: {type(error).__name__}: {str(error)[:2000]}")
        torch.cuda.empty_cache()
    if arguments.out is not None:
        facts = {"copy_gb_s": copy, "results": [asdict(result) for result in results]}
        arguments.out.write_text(json.dumps(facts) + "\n", encoding="utf-8")
    failed = [result.name for result in results if not result.passed]
    print("all pass" if not failed else f"FAILED: {', '.join(failed)}")


if __name__ == "__main__":
    main()
