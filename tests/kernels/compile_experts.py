"""Compiles the experts' kernels with 4-bit weights, and for one token, for an H100 or H200.

As `compile_all.py`. Where weights are unpacked for the matrix unit, what that costs depends on how
the compiler lays them over threads: a conversion inside the loop would cost more than the product.
"""

from compile_all import FLOAT, HALF, INNER, INT, LONG, TOP_K, WIDTH, Case, compiled, told

from dgemma.ops.kernels import experts_1, experts_4
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
