"""Compiles every kernel at the released shapes for an H100 or H200, which need not be there.

A line for each: shared memory, registers, bytes spilled. Fails where a kernel does not compile,
wants more shared memory than there is, or is launched early and touches what it should wait for.
"""

import re
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.experimental.gluon._runtime import GluonASTSource

from dgemma.ops.kernels import (
    attention,
    buckets,
    cuts,
    dense_8,
    experts,
    heads,
    layer,
    merge_8,
    router,
    vector,
    wide_attention,
)
from dgemma.ops.kernels.launch import REGISTERS
from dgemma.ops.kernels.tiles import TABLE, TABLE_8

HOPPER = GPUTarget("cuda", 90, 32)
SHARED = 227 * 1024  # bytes that one program may use there
SPILLED = 256  # bytes of a thread's registers that may go to memory
HALF, FLOAT, INT, LONG, DOUBLE = "*bf16", "*fp32", "*i32", "*i64", "*fp64"
EIGHT = "*fp8e4nv"
WIDTH, INNER, EXPERTS, TOP_K = 2816, 704, 128, 8
# What may not come before the wait of a kernel that is launched early, nor loads, but of weights.
NOT_YET = ("st.global", "atom.", "red.global", "cp.async", "bra", "ret;")
# These read what never changes, or was written before the kernel that they wait for.
READ_WEIGHTS = (
    heads._heads,
    dense_8._product,
    vector._product,
    vector._join,
    layer._close,
    router._parts,
    router._choose,
    attention._attend,
)
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
            is_8 = kind != "bf16"
            options = experts._options(tile, eight=is_8)
            options = {k: v for k, v in options.items() if k.isupper()} | {"EARLY": is_8}
            constants = {"D": WIDTH, "I": INNER, "TOP": TOP_K, "E": 128, "P": 128, **options}
            kernel = experts._gate_up if part == "gate_up" else experts._down
            case = Case(f"{part} {name}", kernel, types, constants, tile.warps, tile.stages)
            found.append(case)
    fill = {"ids": INT, "choice_ES": INT, "count_E": INT, "num_choices": "i32", "capacity": "i32"}
    combine = {"out_AD": HALF, "share_TK": FLOAT, "mixed_TD": HALF}
    found.append(Case("buckets", buckets._buckets, fill, {"STEPS": 2, "BLOCK": 1024}))
    found.append(
        Case("combine", experts._combine, combine, {"D": WIDTH, "TOP": TOP_K, "BLOCK": 1024})
    )
    return found


def attention_cases() -> list[Case]:
    types = {"q_LNH": HALF, "place_6": LONG, "out_PLNH": FLOAT, "log_PLN": FLOAT, "length": "i32"}
    types["parts"] = "i32"
    found = []
    # Each width and each kind once, and a single token: what takes long here is these.
    for length, keys, width, is_causal in (
        (256, 8, 256, False),
        (256, 2, 512, True),
        (1, 8, 256, True),
    ):
        form = attention.cut(length * 16 // keys, keys, width)
        constants = {
            "N": 16,
            "M": keys,
            "H": width,
            "CAUSAL": is_causal,
            "WINDOW": 0,
            "BM": form.queries,
            "BN": form.keys,
            "SLICES": form.slices,
            "EDGES": form.edges,
            "EARLY": True,
        }
        name = f"attention {length} {width}{' causal' if is_causal else ''}"
        case = Case(name, attention._attend, types, constants, form.warps, form.stages)
        found.append(case)
    parts = {"out_PLNH": FLOAT, "log_PLN": FLOAT, "out_LNH": HALF}
    many = {"H": 512, "ROWS": 4, "PARTS": 4, "EARLY": True}
    few = {"H": 512, "BLOCK": 128, "PARTS": 66, "P": 128, "EARLY": True}
    wide = {"N": 16, "M": 2, "H": 512, "CAUSAL": True, "WINDOW": 0, "BM": 64, "BN": 64}
    found.append(Case("wide attention", wide_attention._attend, types, wide, 8))
    found.append(Case("merge parts", attention._merge, parts | {"rows": "i32"}, many))
    found += merge_8_cases()
    return [*found, Case("merge many parts", attention._merge_few, parts, few)]


def merge_8_cases() -> list[Case]:
    types = {"out_PLNH": "*fp16", "log_PLN": FLOAT, "out_LX": EIGHT, "factor_L": FLOAT}
    types["length"] = "i32"
    heads = {"N": 16, "NS": 16, "KIND": tl.bfloat16, "EARLY": True, "maxnreg": REGISTERS}
    return [
        Case(f"merge 8 {w}", merge_8._merge, types, {**heads, "H": w, "PARTS": p}, 8)
        for w, p in ((256, 4), (512, 2))
    ]


def layer_cases() -> list[Case]:
    wide = {"D": WIDTH, "K": TOP_K, "BLOCK": 4096, "HAS_WEIGHT": True}
    told_registers = {**wide, "maxnreg": REGISTERS}
    late = {"EIGHT": False, "EXPERTS_EIGHT": False, "PARTS": 1, "EARLY": False}
    soon = {"EIGHT": True, "EXPERTS_EIGHT": True, "PARTS": 3, "EARLY": True}
    halves = "x_TD attended_TD post_D dense_D expert_D router_D out_TD dense_TD expert_TD router_TD"
    join = {**dict.fromkeys(halves.split(), HALF), "eps": "fp32"}
    join |= {"dense_T": FLOAT, "expert_T": FLOAT}
    join_8 = {**join, "attended_TD": FLOAT, "dense_TD": EIGHT, "expert_TD": EIGHT}
    halves = "x_TD dense_TD out_AD dense_D expert_D both_D scalar next_D out_TD next_TD"
    close = {**dict.fromkeys(halves.split(), HALF), "share_TK": FLOAT, "eps": "fp32"}
    close["factor_T"] = FLOAT
    close_8 = {**close, "dense_TD": FLOAT, "next_TD": EIGHT}
    norm = {"x_TD": HALF, "weight_D": HALF, "out_TD": HALF, "eps": "fp32"}
    gated = {"gate_up_TX": HALF, "out_TI": HALF, "factor_T": FLOAT}
    return [
        Case("norm", layer._norm, norm, {**wide, **late}, 8),
        Case("join", layer._join, join, {**wide, **late}, 8),
        Case("join 8", layer._join, join_8, {**wide, **soon}, 8),
        Case("close", layer._close, close, {**told_registers, **late}, 8),
        Case("close 8", layer._close, close_8, {**told_registers, **soon}, 8),
        Case("gated", layer._gated, gated, {"I": 2112, "BLOCK": 1024, **late}),
        Case(
            "gated 8",
            layer._gated,
            {**gated, "out_TI": EIGHT},
            {"I": 2112, "BLOCK": 4096, **soon},
            8,
        ),
    ]


def head_cases() -> list[Case]:
    halves = "qkv_TX q_weight_H k_weight_H q_TNH"
    types = {**dict.fromkeys(halves.split(), HALF), "cos_TP": FLOAT, "sin_TP": FLOAT}
    types |= {"place_6": LONG, "length": "i32", "eps": "fp32"}
    found = []
    for keys, width, has_value in ((8, 256, True), (2, 512, False)):
        norms = {"q_weight": None, "k_weight": None, "has_value": has_value}
        form = heads.cut(heads.Heads(queries=16, keys=keys, width=width, **norms))
        sizes = {"X": (16 + keys * (1 + has_value)) * width, "N": 16, "M": keys, "H": width}
        sizes |= {"HAS_VALUE": has_value, "HEADS": form.heads, "EARLY": True}
        found.append(Case(f"heads {width}", heads._heads, types, sizes, form.warps))
    return found


def cut_cases() -> list[Case]:
    found = []
    for name, form, out in (("qkv", cuts.QKV, HALF), ("out", cuts.OUT, FLOAT)):
        types = {
            "x_TI": f"tensordesc<fp8e4nv[{form.rows},{form.depth}]>",
            "weight_OI": f"tensordesc<fp8e4nv[{form.outputs},{form.depth}]>",
        }
        types |= {"factor_T": FLOAT, "factor_O": FLOAT, "out_STO": out, "rows": "i32"}
        sizes = {"O": WIDTH, "SHARE": 1408, "BM": form.rows, "BN": form.outputs}
        sizes |= {"BK": form.depth, "EARLY": True}
        case = Case(f"{name} 8", dense_8._product, types, sizes, form.warps, form.stages)
        found.append(case)
    quantize = {"x_TD": HALF, "out_TD": EIGHT, "factor_T": FLOAT}
    sizes = {"D": 4096, "BLOCK": 4096, "EARLY": True}
    return [*found, Case("quantize", experts._quantize, quantize, sizes)]


def router_cases() -> list[Case]:
    form = router.cut(256, EXPERTS, WIDTH)
    parts = {"x_TD": HALF, "weight_ED": HALF, "part_STE": FLOAT, "count_E": INT, "rows": "i32"}
    sizes = {"D": WIDTH, "E": EXPERTS, "SHARE": form.share, "BM": form.rows, "BN": form.columns}
    sizes |= {"BK": form.depth, "COUNTS": EXPERTS, "EARLY": True}
    choose = {"part_STE": FLOAT, "scale_E": HALF, "ids_TK": INT, "share_TK": FLOAT, "rows": "i32"}
    choose |= {"choice_ES": INT, "count_E": INT, "places": "i32"}
    chosen = {"S": 22, "SS": 32, "E": EXPERTS, "BLOCK": EXPERTS, "K": TOP_K, "KS": TOP_K}
    chosen |= {"FILL": True, "RANKS": False, "EARLY": True, "maxnreg": REGISTERS}
    ranked = {**chosen, "S": 1, "SS": 1, "FILL": False, "RANKS": True}
    return [
        Case("router parts", router._parts, parts, sizes, form.warps, form.stages),
        Case("router choice", router._choose, choose, chosen, 1),
        Case("router ranks", router._choose, choose, ranked, 8),
    ]


def vector_cases() -> list[Case]:
    """Few rows: a plain product, a gated one in 8 bits, the head, and joining with routing."""
    found = []
    for name, outputs, depth, how in (
        ("qkv", 8192, WIDTH, {}),
        ("o", WIDTH, 4096, {}),
        ("o 8", 2816, 8192, {"HAS_FACTOR": True}),
        ("gate_up 8", 2112, WIDTH, {"GATED": True, "HAS_FACTOR": True}),
        ("head", 262144, WIDTH, {"CAP": 30.0}),
        ("head 8", 262144, WIDTH, {"CAP": 30.0, "HAS_FACTOR": True}),
    ):
        form = vector.cut(outputs, depth, is_gated="GATED" in how)
        types = {"x_TD": HALF, "factor_X": FLOAT, "rows": "i32"}
        types["weight_XD"] = EIGHT if "HAS_FACTOR" in how else HALF
        types["out_TX"] = FLOAT if "CAP" in how else HALF
        sizes = {"D": depth, "X": outputs, "BN": form.outputs, "CHUNK": form.chunk, "EARLY": True}
        usual = {"GATED": False, "HAS_FACTOR": False, "CAP": 0.0}
        constants = {**sizes, **usual, **how}
        found.append(Case(f"vector {name}", vector._product, types, constants, form.warps))
    halves = "x_TD attended_TD post_D dense_D expert_D router_D router_ED out_TD dense_TD expert_TD"
    join = {**dict.fromkeys(halves.split(), HALF), "part_TE": FLOAT, "eps": "fp32"}
    sizes = {"D": WIDTH, "E": EXPERTS, "BN": 4, "BLOCK": 4096, "EARLY": True}
    return [*found, Case("vector join", vector._join, join, sizes)]


def compiled(case: Case) -> Any:
    names = case.kernel.arg_names
    signature = {name: case.types.get(name, "constexpr") for name in names}
    constants = {(i,): case.constants[n] for i, n in enumerate(names) if n not in case.types}
    # The released vocabulary is a multiple of 16, which a launch sees too.
    aligned = [i for i, n in enumerate(names) if case.types.get(n, "")[:1] == "*" or n == "vocab"]
    made_by = GluonASTSource if case.kernel is wide_attention._attend else ASTSource
    source = made_by(
        fn=case.kernel,
        signature=signature,
        constexprs=constants,
        attrs={(i,): [["tt.divisibility", 16]] for i in aligned},
    )
    options = {"num_warps": case.warps, "num_stages": case.stages}
    options["maxnreg"] = case.constants.get("maxnreg")
    return triton.compile(source, target=HOPPER, options=options)


def told(case: Case, made: Any) -> str:
    """What a kernel takes; refused if it is too much."""
    registers, spilled = usage(made.asm["cubin"])
    shared = made.metadata.shared
    assert shared <= SHARED, f"{case.name}: {shared} bytes of shared memory"
    assert spilled <= SPILLED, f"{case.name}: {spilled} bytes spilled"
    if "EARLY" in case.kernel.arg_names and case.constants["EARLY"]:
        before, *waits = made.asm["ptx"].split("griddepcontrol.wait")
        wrong = NOT_YET if case.kernel in READ_WEIGHTS else (*NOT_YET, "ld.global")
        assert waits, f"{case.name}: launched early, it never waits"
        assert not any(word in before for word in wrong), f"{case.name}: does not wait"
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
    for case in (
        expert_cases()
        + attention_cases()
        + layer_cases()
        + head_cases()
        + cut_cases()
        + router_cases()
        + vector_cases()
    ):
        print(told(case, compiled(case)), flush=True)
