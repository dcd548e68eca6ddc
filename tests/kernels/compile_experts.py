"""Kernels of the experts, to be compiled by `compile_all.py`.

Where 4-bit weights are unpacked for the matrix unit, what that costs depends on how the compiler
lays them over threads: on Hopper a conversion inside the loop would cost more than the product.
"""

from typing import Any

from compile_card import FLOAT, HALF, INNER, INT, LONG, TOP_K, WIDTH, Card, Case

from dgemma.backends.cuda.configs import MOE_DECODE, MoeTable, moe_table
from dgemma.backends.cuda.kernels import moe, moe_decode, moe_nvfp4, moe_sort

WORDS = {"words": "*i16", "scales": INT, "out": HALF}
BUCKETS = {"choice_ES": INT, "count_E": INT, "capacity": "i32"}
SIZES = {"D": WIDTH, "I": INNER, "TOP": TOP_K, "E": 128, "P": 128}


def entries(bits: int, *, everything: bool) -> MoeTable:
    """Return all configs, or those of a canvas and of very many rows."""
    found = moe_table(bits)
    return found if everything else tuple(e for e in found if e[0] in (24.0, float("inf")))


def moe_cases(bits: int, *, everything: bool = True) -> list[Case]:
    """Return grouped GEMMs with 16-bit or fp8 weights."""
    found, kind = [], {16: "bf16", 8: "fp8e4nv"}[bits]
    for most, entry in entries(bits, everything=everything):
        for part, tile in (("gate_up", entry.gate_up), ("down", entry.down)):
            shared = {"out": HALF, **BUCKETS, "row_scale": FLOAT, "column_scale": FLOAT}
            block = f"tensordesc<{kind}[{tile.columns},{tile.depth}]>"
            types = {"x" if part == "gate_up" else "hidden": f"*{kind}", **shared}
            types["weights"] = block if tile.tma else f"*{kind}"
            constants = _constants(moe._options(tile, fp8_out=bits == 8))
            if bits == 8:
                del constants["PDL"]  # as the card has it
            name = f"moe {part} {bits} bits <= {most:g} rows"
            kernel = moe._gate_up if part == "gate_up" else moe._down
            found.append(Case(name, kernel, types, constants, tile.warps, tile.stages))
    return found


def sort_cases() -> list[Case]:
    """Return the sort of assignments by expert."""
    fill = {"ids": INT, "num_choices": "i32", **BUCKETS}
    return [Case("moe sort", moe_sort._buckets, fill, {"STEPS": 2, "BLOCK": moe_sort.SCAN})]


def nvfp4_cases(*, everything: bool = True) -> list[Case]:
    """Return grouped GEMMs with NVFP4 weights."""
    found = []
    for most, entry in entries(4, everything=everything):
        for part, tile in (("gate_up", entry.gate_up), ("down", entry.down)):
            constants = _constants(moe_nvfp4._options(tile, fast=True))
            del constants["PDL"]
            x, factor = ("x", "factor_E2") if part == "gate_up" else ("hidden", "factor_E")
            types = {x: HALF, factor: FLOAT, **WORDS, **BUCKETS}
            kernel = moe_nvfp4._gate_up_4 if part == "gate_up" else moe_nvfp4._down_4
            name = f"moe {part} 4 bits <= {most:g} rows"
            found.append(Case(name, kernel, types, constants, tile.warps, tile.stages))
    return found


def decode_cases() -> list[Case]:
    """Return the experts of single tokens, for each form of weights."""
    found = []
    for bits, kind in ((16, "*bf16"), (8, "*fp8e4nv"), (4, "*i16")):
        cuts = MOE_DECODE[bits]
        for part, cut in (("gate_up", cuts.gate_up), ("down", cuts.down)):
            x = "x" if part == "gate_up" else "hidden"
            types = {x: HALF, "ids": LONG, "out": HALF}
            if bits == 4:
                types |= {**WORDS, "factor_E2" if part == "gate_up" else "factor_E": FLOAT}
            else:
                types |= {"weights": kind, "factor": FLOAT}
            # The depth is unrolled: less of it shows that it compiles, in a fraction of the time.
            sizes = {"D": 768, "I": INNER, "TOP": TOP_K, "BN": cut.columns, "BK": cut.depth}
            constants = {**sizes, "FAST": True, "HAS_FACTOR": bits == 8, "maxnreg": cut.registers}
            kernel = getattr(moe_decode, f"_{part}_4" if bits == 4 else f"_{part}")
            found.append(
                Case(f"moe decode {part} {bits} bits", kernel, types, constants, cut.warps)
            )
    return found


def check_layout(case: Case, card: Card, made: Any) -> None:
    """Fail if NVFP4 weights are laid out twice on their way to Hopper's matrix unit."""
    if card.capability != (9, 0) or case.kernel not in (moe_nvfp4._gate_up_4, moe_nvfp4._down_4):
        return
    text = made.asm["ttgir"]
    loop = text[text.index("warp_group_dot") : text.rindex("warp_group_dot ")]
    # Where parts are put together for one product, registers are renamed: nothing is stored.
    moves = ("local_store", "local_alloc") if case.constants["WHOLE"] else ("convert_layout",)
    assert not any(move in loop for move in moves), f"{case.name}: weights are laid out twice"
    assert "local_load" in text


def _constants(options: dict[str, Any]) -> dict[str, Any]:
    kept = {k: v for k, v in options.items() if k.isupper() or k == "maxnreg"}
    return {**SIZES, **kept}
