"""Compiles the experts' kernels with 4-bit weights, and all for one token, for an H100 or H200.

As `compile_all.py`. Where weights are unpacked for the matrix unit, what that costs depends on how
the compiler lays them over threads: a conversion inside the loop would cost more than the product.
"""

from typing import Any

from compile_all import (
    EIGHT,
    FLOAT,
    HALF,
    INNER,
    INT,
    LONG,
    SPILLED,
    TOP_K,
    WIDTH,
    Case,
    compiled,
    told,
    usage,
)

from dgemma.ops.kernels import attention, attention_1, enter_1, experts_1, experts_4, mlp_1
from dgemma.ops.kernels.tiles import TABLE_4

WORDS = {"words": "*i16", "scales": INT, "out": HALF}
BUCKETS = {"choice_ES": INT, "count_E": INT, "capacity": "i32"}


def four_bit_cases() -> list[Case]:
    found = []
    # A canvas, whose steps are one product each, and more rows, whose are four.
    entries = [entry for _, entry in TABLE_4[:2]]
    tiles = [("gate_up", entry.gate_up) for entry in entries]
    for part, tile in [*tiles, *(("down", entry.down) for entry in entries)]:
        options = experts_4._options(tile, fast=True) | {"EARLY": True}
        constants = {"D": WIDTH, "I": INNER, "TOP": TOP_K, "E": 128, "P": 128, **options}
        x, factor = ("x", "factor_E2") if part == "gate_up" else ("hidden", "factor_E")
        types = {x: HALF, factor: FLOAT, **WORDS, **BUCKETS}
        kernel = experts_4._gate_up_4 if part == "gate_up" else experts_4._down_4
        name = f"{part} 4 bits, {tile.rows} rows"
        found.append(Case(name, kernel, types, constants, tile.warps, tile.stages))
    return found


def one_token_cases() -> list[Case]:
    found = []
    for bits, kind in ((16, "*bf16"), (8, "*fp8e4nv"), (4, "*i16")):
        cuts = experts_1.TABLE[bits]
        for part, cut in (("gate_up", cuts.gate_up), ("down", cuts.down)):
            x = "x" if part == "gate_up" else "hidden"
            types = {x: HALF, "ids": LONG, "out": HALF}
            if bits == 4:
                types |= {**WORDS, "factor_E2" if part == "gate_up" else "factor_E": FLOAT}
            else:
                types |= {"weights": kind, "factor": FLOAT}
            # The depth is unrolled: half of it shows that it compiles, in a third of the time.
            sizes = {"D": WIDTH // 2, "I": INNER, "TOP": TOP_K}
            constants = {**sizes, "BN": cut.columns, "BK": cut.depth}
            constants |= {"FAST": True, "HAS_FACTOR": bits == 8}
            kernel = getattr(experts_1, f"_{part}_4" if bits == 4 else f"_{part}")
            found.append(Case(f"{part} {bits} bits, one", kernel, types, constants, cut.warps))
    return found


def token_cases() -> list[Case]:
    """One token: the dense part beside the experts, and how it enters."""
    found = []
    shared = {"ids": INT, "dense_factor": FLOAT, "factor": FLOAT, "rows": "i32"}
    for bits, kind in ((16, HALF), (8, EIGHT), (4, "*i16")):
        cut = mlp_1.TABLE[bits]
        stored = {"weights": kind, "scales": INT if bits == 4 else kind}
        types = {**shared, **stored, "dense_weight": HALF if bits == 16 else EIGHT}
        # The depth is unrolled: half of it shows that it compiles, in a third of the time.
        sizes = {"DENSE_8": bits < 16, "BITS": bits, "TOP": TOP_K, "D": WIDTH // 2, "I": INNER}
        sizes |= {"W": 3 * INNER, "S": 3, "SHARE": 1024, "WHOLE": 1024, "FAST": True, "EARLY": True}
        first = dict.fromkeys(("dense_TD", "expert_TD", "dense_TW", "hidden_AI"), HALF)
        options = {"BN": cut.columns, "BK": cut.depth}
        name = f"both {bits} bits"
        case = Case(name, mlp_1._gate_up, types | first, sizes | options, cut.warps)
        second = {"dense_TW": HALF, "hidden_AI": HALF, "dense_STD": FLOAT, "out_AD": HALF}
        options = {"BN": cut.down_columns}
        found += [case, Case(name, mlp_1._down, types | second, sizes | options, cut.down_warps)]
    halves = dict.fromkeys(("qkv_X", "q_weight_H", "k_weight_H", "coming"), HALF)
    floats = dict.fromkeys(("cos_P", "sin_P", "out_PNH", "log_PN"), FLOAT)
    types = {**halves, **floats, "place_6": LONG, "eps": "fp32"}
    for keys, width, window in ((8, 256, 1024), (2, 512, 0)):
        form = attention.cut(16 // keys, keys, width)
        sizes = {"N": 16, "M": keys, "H": width, "HAS_VALUE": window > 0, "WINDOW": window}
        sizes |= {"FETCH": 1 << 20, "PIECE": 64, "KEYS_AHEAD": True, "THREADS": 32 * form.warps}
        sizes |= {"BM": form.queries, "BN": form.keys, "EARLY": True}
        kernel = attention_1._attend_1
        found.append(Case(f"attention_1 {width}", kernel, types, sizes, form.warps, form.stages))
    halves = dict.fromkeys(("table_VD", "weight_D", "x_1D", "normed_1D"), HALF)
    floats = dict.fromkeys(("frequency_F", "cos_F", "sin_F"), FLOAT)
    types = {"token_1": LONG, "start_1": LONG, "scale": "fp32", "eps": "fp32", "count": "i32"}
    sizes = {"D": WIDTH, "BLOCK": 4096, "PAIRS": enter_1.TURNS, "EARLY": True}
    return [*found, Case("enter", enter_1._enter, {**halves, **floats, **types}, sizes, 8)]


def waits(case: Case, made: Any) -> int:
    """How often a kernel's text waits; each way through it once, and before it stores anything."""
    text = made.asm["ptx"]
    before = text[: text.index("griddepcontrol.wait")]
    assert "st.global" not in before, f"{case.name}: does not wait"
    assert text.index("ret;") > text.rindex("griddepcontrol.wait"), f"{case.name}: leaves early"
    return text.count("griddepcontrol.wait")


if __name__ == "__main__":
    for case in four_bit_cases():
        made = compiled(case)
        print(told(case, made), flush=True)
        text = made.asm["ttgir"]
        loop = text[text.index("warp_group_dot") : text.rindex("warp_group_dot ")]
        # Where parts are put together for one product, registers are renamed: nothing is stored.
        moves = ("local_store", "local_alloc") if case.constants["WHOLE"] else ("convert_layout",)
        assert not any(move in loop for move in moves), f"{case.name}: weights are laid out twice"
        assert "local_load" in text
    for case in one_token_cases():
        print(told(case, compiled(case)), flush=True)
    for case in token_cases():
        made = compiled(case)
        registers, spilled = usage(made.asm["cubin"])
        assert spilled <= SPILLED, f"{case.name}: {spilled} bytes spilled"
        is_one = case.kernel in (enter_1._enter, attention_1._attend_1)
        assert waits(case, made) == (1 if is_one else 2)
        print(f"{case.name:24} compiled: {registers} registers, {spilled} spilled", flush=True)
