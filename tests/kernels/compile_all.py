"""Compiles every kernel at the released shapes for an H100 or H200, which need not be there.

A line for each: shared memory, registers, bytes spilled. Fails where a kernel does not compile or
wants more shared memory than there is.
"""

import re
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from dgemma.ops.kernels import attention, experts, layer, row_stats
from dgemma.ops.kernels.tiles import TABLE, TABLE_8

HOPPER = GPUTarget("cuda", 90, 32)
SHARED = 227 * 1024  # bytes that one program may use there
SPILLED = 256  # bytes of a thread's registers that may go to memory
HALF, FLOAT, INT, LONG, DOUBLE = "*bf16", "*fp32", "*i32", "*i64", "*fp64"
WIDTH, INNER, EXPERTS, TOP_K = 2816, 704, 128, 8
Types = dict[str, str]


@dataclass(frozen=True)
class Case:
    name: str
    kernel: Any
    types: Types
    constants: dict[str, Any]
    warps: int = 4
    stages: int = 3


def expert_cases() -> list[Case]:
    found = []
    tables = {"bf16": TABLE, "fp8e4nv": TABLE_8}
    # One token, and a canvas; the others differ from these in size alone.
    entries = [(kind, most, entry) for kind, table in tables.items() for most, entry in table[:2]]
    for kind, most, entry in entries:
        name = f"{kind} {most:g} rows"
        for part, tile in (("gate_up", entry.gate_up), ("down", entry.down)):
            shared = {"out": HALF, "choice_ES": INT, "count_E": INT, "capacity": "i32"}
            shared |= {"row_scale": FLOAT, "column_scale": FLOAT}
            block = f"tensordesc<{kind}[{tile.columns},{tile.depth}]>"
            types = {"x" if part == "gate_up" else "hidden": f"*{kind}", **shared}
            types["weights"] = block if tile.tma else f"*{kind}"
            options = {k: v for k, v in experts._options(tile).items() if k.isupper()}
            options["HAS_SCALES"] = kind != "bf16"
            constants = {"D": WIDTH, "I": INNER, "TOP": TOP_K, **options}
            kernel = experts._gate_up if part == "gate_up" else experts._down
            case = Case(f"{part} {name}", kernel, types, constants, tile.warps, tile.stages)
            found.append(case)
    buckets = {"ids": INT, "choice_ES": INT, "count_E": INT, "num_choices": "i32"}
    combine = {"out_AD": HALF, "share_TK": FLOAT, "mixed_TD": HALF}
    found.append(
        Case(
            "buckets", experts._buckets, {**buckets, "capacity": "i32"}, {"STEPS": 2, "BLOCK": 1024}
        )
    )
    found.append(
        Case("combine", experts._combine, combine, {"D": WIDTH, "TOP": TOP_K, "BLOCK": 1024})
    )
    return found


def stats_cases() -> list[Case]:
    sizes = {"CAP": 30.0, "W": row_stats.CHUNK, "CHUNKS": 128, "C": 128, "S": 128, "LEAST": 1e-5}
    row = {"raw_TV": HALF, "heat_T": FLOAT, "vocab": "i32"}
    marks = {"peak_TC": FLOAT, "sum_TC": FLOAT, "moment_TC": FLOAT, "top_TC": INT}
    totals = {"peak_T": FLOAT, "total_T": FLOAT}
    merge = {"uniform_T": DOUBLE, "held_T": LONG, "draw_T": LONG, "top_T": LONG}
    floats = {"entropy_T": FLOAT, "top_p_T": FLOAT, "held_p_T": FLOAT}
    likely = {"id_TS": INT, "p_TS": FLOAT, "count_T": INT}
    mean = {"table_VD": HALF, "soft_TD": HALF, **likely}
    return [
        Case("marks", row_stats._marks, {**row, **marks, "chunks": "i32"}, sizes),
        Case("merge", row_stats._merge, {**row, **marks, **merge, **floats, **totals}, sizes, 8),
        Case("probabilities", row_stats._probabilities, {**row, **totals}, sizes),
        Case(
            "survivors",
            row_stats._survivors,
            {**row, **totals, **likely, "peak_TC": FLOAT, "mass_T": FLOAT},
            sizes,
        ),
        Case("soft mean", row_stats._soft_mean, mean, {"D": WIDTH, "S": 128, "BLOCK": 512}),
    ]


def attention_cases() -> list[Case]:
    types = {"q_LNH": HALF, "place_6": LONG, "out_PLNH": FLOAT, "log_PLN": FLOAT, "length": "i32"}
    types["parts"] = "i32"
    found = []
    # Each width once, and each kind once: what takes long here is these.
    for keys, width, is_causal in ((8, 256, False), (2, 512, True)):
        form = attention.cut(256 * 16 // keys, keys, width)
        constants = {
            "N": 16,
            "M": keys,
            "H": width,
            "CAUSAL": is_causal,
            "WINDOW": 0,
            "BM": form.queries,
            "BN": form.keys,
            "SLICES": form.slices,
        }
        name = f"attention {width}{' causal' if is_causal else ''}"
        case = Case(name, attention._attend, types, constants, form.warps, form.stages)
        found.append(case)
    merge = {"out_PLNH": FLOAT, "log_PLN": FLOAT, "out_LNH": HALF, "rows": "i32"}
    found.append(Case("merge parts", attention._merge, merge, {"H": 512, "PARTS": 4}, 2))
    return found


def layer_cases() -> list[Case]:
    wide = {"D": WIDTH, "K": TOP_K, "BLOCK": 4096, "HAS_WEIGHT": True}
    halves = "x_TD attended_TD post_D dense_D expert_D router_D out_TD dense_TD expert_TD router_TD"
    join = {**dict.fromkeys(halves.split(), HALF), "eps": "fp32"}
    halves = "x_TD dense_TD out_AD dense_D expert_D both_D scalar next_D out_TD next_TD"
    close = {**dict.fromkeys(halves.split(), HALF), "share_TK": FLOAT, "eps": "fp32"}
    norm = {"x_TD": HALF, "weight_D": HALF, "out_TD": HALF, "eps": "fp32"}
    route = {"logits_TE": HALF, "scale_E": HALF, "ids_TK": INT, "share_TK": FLOAT}
    halves = "qkv_TX q_weight_H k_weight_H q_TNH"
    heads = {**dict.fromkeys(halves.split(), HALF), "cos_TP": FLOAT, "sin_TP": FLOAT}
    heads |= {"place_6": LONG, "length": "i32", "eps": "fp32"}
    sliding = {"X": 8192, "N": 16, "M": 8, "H": 256, "HAS_VALUE": True}
    full = {"X": 9216, "N": 16, "M": 2, "H": 512, "HAS_VALUE": False}
    gated = {"gate_up_TX": HALF, "out_TI": HALF}
    return [
        Case("norm", layer._norm, norm, wide, 8),
        Case("join", layer._join, join, wide, 8),
        Case("close", layer._close, close, wide, 8),
        Case(
            "route",
            layer._route,
            route,
            {"E": EXPERTS, "K": TOP_K, "BLOCK": EXPERTS, "KS": TOP_K},
            1,
        ),
        Case("gated", layer._gated, gated, {"I": 2112, "BLOCK": 1024}),
        Case("heads sliding", layer._heads, heads, sliding, 2),
        Case("heads full", layer._heads, heads, full, 2),
    ]


def compile_case(case: Case) -> str:
    names = case.kernel.arg_names
    signature = {name: case.types.get(name, "constexpr") for name in names}
    constants = {(i,): case.constants[n] for i, n in enumerate(names) if n not in case.types}
    aligned = [i for i, n in enumerate(names) if case.types.get(n, "").startswith("*")]
    source = ASTSource(
        fn=case.kernel,
        signature=signature,
        constexprs=constants,
        attrs={(i,): [["tt.divisibility", 16]] for i in aligned},
    )
    options = {"num_warps": case.warps, "num_stages": case.stages}
    made = triton.compile(source, target=HOPPER, options=options)
    registers, spilled = usage(made.asm["cubin"])
    shared = made.metadata.shared
    assert shared <= SHARED, f"{case.name}: {shared} bytes of shared memory"
    assert spilled <= SPILLED, f"{case.name}: {spilled} bytes spilled"
    return f"{case.name:24} compiled: {shared:7} shared, {registers} registers, {spilled} spilled"


def usage(binary: bytes) -> tuple[int, int]:
    tools = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(binary)
        file.flush()
        command = [str(tools / "cuobjdump"), "-res-usage", file.name]
        out = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+)", out)
    assert found is not None, out
    return int(found[1]), int(found[2])


if __name__ == "__main__":
    for case in expert_cases() + stats_cases() + attention_cases() + layer_cases():
        print(compile_case(case), flush=True)
