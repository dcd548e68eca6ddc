"""Kernels of the experts, to be compiled by `compile_all.py`.

Where 4-bit weights are unpacked for the matrix unit, what that costs depends on how the compiler
lays them over threads: on Hopper a conversion inside the loop would cost more than the product.
"""

from typing import Any

from compile_card import FLOAT, HALF, INNER, INT, LONG, TOP_K, WIDTH, Card, Case

from dgemma.backends.cuda.configs import MOE_DECODE, MoeTable, moe_table
from dgemma.backends.cuda.kernels import moe, moe_decode, moe_nvfp4

WORDS = {"words": "*i16", "scales": INT, "global_scale_EH": FLOAT, "out": HALF}
NVFP4_GEMM = moe_nvfp4._grouped_gemm_nvfp4
BUCKETS = {"assignment_ES": INT, "count_E": INT, "capacity": "i32"}
SIZES = {
    "gate_up": {"GATED": True, "K": WIDTH, "N": INNER, "TOP_K": TOP_K, "E": 128, "P": 128},
    "down": {"GATED": False, "K": INNER, "N": WIDTH, "TOP_K": 1, "E": 128, "P": 128},
}


def entries(bits: int, *, everything: bool) -> MoeTable:
    """Return all configs, or those of a canvas and of very many rows."""
    table = moe_table(bits)
    return table if everything else tuple(e for e in table if e.max_rows in (24.0, float("inf")))


def moe_cases(bits: int, *, everything: bool = True) -> list[Case]:
    """Return grouped GEMMs with 16-bit or fp8 weights."""
    found, kind = [], {16: "bf16", 8: "fp8e4nv"}[bits]
    for entry in entries(bits, everything=everything):
        for part, config in (("gate_up", entry.gate_up), ("down", entry.down)):
            types = {"x": f"*{kind}", "out": HALF, **BUCKETS}
            types |= {"row_scale": FLOAT, "column_scale": FLOAT}
            block = f"tensordesc<{kind}[{config.columns},{config.depth}]>"
            types["weights"] = block if config.tma else f"*{kind}"
            constants = _constants(part, moe._kwargs(config, is_fp8=bits == 8))
            if bits == 8:
                del constants["PDL"]  # as the card has it
            name, kernel = f"moe {part} {bits} bits <= {entry.max_rows:g} rows", moe._grouped_gemm
            found.append(Case(name, kernel, types, constants, config.warps, config.stages))
    return found


def sort_cases() -> list[Case]:
    """Return the sort of assignments by expert."""
    types = {"ids": INT, "num_assignments": "i32", **BUCKETS}
    return [Case("moe sort", moe._sort_by_expert, types, {"STEPS": 2, "BLOCK": moe.SCAN})]


def nvfp4_cases(*, everything: bool = True) -> list[Case]:
    """Return grouped GEMMs with NVFP4 weights."""
    found = []
    types = {"x": HALF, **WORDS, **BUCKETS}
    for entry in entries(4, everything=everything):
        for part, config in (("gate_up", entry.gate_up), ("down", entry.down)):
            constants = _constants(part, moe_nvfp4._kwargs(config, ptx=True))
            del constants["PDL"]
            name, kernel = f"moe {part} 4 bits <= {entry.max_rows:g} rows", NVFP4_GEMM
            found.append(Case(name, kernel, types, constants, config.warps, config.stages))
    return found


def decode_cases() -> list[Case]:
    """Return the experts of single tokens, for each form of weights."""
    found = []
    for bits, kind in ((16, "*bf16"), (8, "*fp8e4nv"), (4, "*i16")):
        table = MOE_DECODE[bits]
        for part, config in (("gate_up", table.gate_up), ("down", table.down)):
            types = {"x": HALF, "ids": LONG, "out": HALF}
            types |= WORDS if bits == 4 else {"weights": kind, "scale": FLOAT}
            sizes = {**SIZES[part], "BN": config.columns, "BK": config.depth}
            # The depth is unrolled: less of it shows that it compiles, in a fraction of the time.
            sizes["K" if part == "gate_up" else "N"] = 768
            constants = {**sizes, "USE_PTX": True, "HAS_SCALE": bits == 8}
            constants["maxnreg"] = config.registers
            kernel = moe_decode._gemv_nvfp4 if bits == 4 else moe_decode._gemv
            name = f"moe decode {part} {bits} bits"
            found.append(Case(name, kernel, types, constants, config.warps))
    return found


def check_layout(case: Case, card: Card, made: Any) -> None:
    """Fail if NVFP4 weights change their layout on the way to Hopper's MMA."""
    if card.capability != (9, 0) or case.kernel is not NVFP4_GEMM:
        return
    text = made.asm["ttgir"]
    loop = text[text.index("warp_group_dot") : text.rindex("warp_group_dot ")]
    # With one MMA per step registers are renamed: nothing is stored.
    moves = ("local_store", "local_alloc") if case.constants["ONE_DOT"] else ("convert_layout",)
    assert not any(move in loop for move in moves), f"{case.name}: weights change their layout"
    assert "local_load" in text


def _constants(part: str, kwargs: dict[str, Any]) -> dict[str, Any]:
    used = {k: v for k, v in kwargs.items() if k.isupper() or k == "maxnreg"}
    return {**SIZES[part], **used}
