"""Kernels of the experts, to be compiled by `compile_all.py`.

Where 4-bit weights are unpacked for the matrix unit, what that costs depends on how the compiler
lays them over threads: on Hopper a conversion inside the loop would cost more than the product.
"""

from typing import Any

from compile_card import FLOAT, HALF, INNER, INT, LONG, TOP_K, WIDTH, Card, Case, Types

from dgemma.backends.cuda.configs import MOE_DECODE, MoeConfig, MoeTable, for_bits, moe_table
from dgemma.backends.cuda.kernels import moe, moe_decode, moe_packed
from dgemma.quant.gguf_tiles import TILE_FORMATS

PLANES = {"words": "*i16", "extra": "*i8", "scales": INT, "above": INT, "out": HALF}
PLANES |= {"global_scale_EH": FLOAT}
PACKED_GEMM = moe_packed._grouped_gemm_packed
NVFP4 = {"BITS": 4, "SCALES": "nvfp4", "USE_PTX": True}
# Formats of blocks that the experts of K-quants have, by GEMM: 704 is not a multiple of 256.
BLOCKS = {
    "gate_up": ("Q4_K", "Q5_K", "Q6_K", "Q8_0"),
    "down": ("Q5_0", "Q5_1", "Q8_0"),
}
BUCKETS = {"assignment_ES": INT, "count_E": INT, "capacity": "i32"}
SIZES = {
    "gate_up": {"GATED": True, "K": WIDTH, "N": INNER, "TOP_K": TOP_K, "E": 128, "P": 128},
    "down": {"GATED": False, "K": INNER, "N": WIDTH, "TOP_K": 1, "E": 128, "P": 128},
}
LARGE = ("Q4_K", "Q5_0", "Q6_K")  # compiled for many rows too


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


def packed_cases(*, everything: bool = True) -> list[Case]:
    """Return grouped GEMMs with NVFP4 weights, and with GGUF blocks for a canvas."""
    found = []
    for entry in entries(4, everything=everything):
        for part, config in (("gate_up", entry.gate_up), ("down", entry.down)):
            limit = f"<= {entry.max_rows:g} rows"
            found.append(_packed(f"moe {part} nvfp4 {limit}", part, config, NVFP4))
            for name in BLOCKS[part]:
                if entry.max_rows == 24 or (everything and name in LARGE):
                    found.append(_packed(f"moe {part} {name} {limit}", part, config, _form(name)))
    return found


def _form(name: str) -> dict[str, Any]:
    form = TILE_FORMATS[name]
    return {"BITS": form.bits, "SCALES": form.scales, "USE_PTX": True}


def _packed(name: str, part: str, config: MoeConfig, form: dict[str, Any]) -> Case:
    config = for_bits(config, form["BITS"])
    constants = {**_constants(part, moe_packed._kwargs(config)), **form}
    del constants["PDL"]
    types = {"x": HALF, **PLANES, **BUCKETS, "words": _word(form)}
    return Case(name, PACKED_GEMM, types, constants, config.warps, config.stages)


def _word(form: dict[str, Any]) -> str:
    return INT if form["BITS"] == 8 else "*i16"


def decode_cases() -> list[Case]:
    """Return the experts of single tokens, for each form of weights."""
    found = []
    for bits, kind in ((16, "*bf16"), (8, "*fp8e4nv")):
        types = {"weights": kind, "scale": FLOAT}
        for part in SIZES:
            form = {"HAS_SCALE": bits == 8}
            found.append(_decode(f"{bits} bits", part, bits, types, form))
    for part in SIZES:
        found.append(_decode("nvfp4", part, 4, PLANES, NVFP4))
        for name in BLOCKS[part]:
            form = _form(name)
            found.append(_decode(name, part, 4, {**PLANES, "words": _word(form)}, form))
    return found


def _decode(name: str, part: str, bits: int, types: Types, form: dict[str, Any]) -> Case:
    table = MOE_DECODE[bits]
    config = table.gate_up if part == "gate_up" else table.down
    sizes = {**SIZES[part], "BN": config.columns, "BK": config.depth, **form}
    # The depth is unrolled: less of it shows that it compiles, in a fraction of the time.
    sizes["K" if part == "gate_up" else "N"] = 768
    constants = {**sizes, "maxnreg": config.registers}
    kernel = moe_decode._gemv_packed if bits == 4 else moe_decode._gemv
    types = {"x": HALF, "ids": LONG, "out": HALF, **types}
    return Case(f"moe decode {part} {name}", kernel, types, constants, config.warps)


def check_layout(case: Case, card: Card, made: Any) -> None:
    """Fail if packed weights change their layout on the way to Hopper's MMA."""
    if card.capability != (9, 0) or case.kernel is not PACKED_GEMM:
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
