"""Compiles the kernels at both ends of a pass for an H100 or H200, as `compile_all.py`."""

from compile_all import DOUBLE, EIGHT, FLOAT, HALF, INT, LONG, WIDTH, Case, compiled, told

from dgemma.ops.kernels import cuts, enter, enter_1, move, row_stats, soft_8, sparse
from dgemma.ops.soft_table import NEAR, SHARE, SMALLEST

BYTE = "*u8"
CANVAS = 256
EARLY = {"EARLY": True}


def stats_cases() -> list[Case]:
    sizes = {"CAP": 30.0, "W": row_stats.CHUNK, "CHUNKS": 128, "C": 128, "S": 128}
    sizes |= {"EACH": 4, "EVEN": True, "MOST": row_stats.most_entropy(1 << 18), **EARLY}
    sizes |= {name: getattr(row_stats, name) for name in ("SPARE", "READ", "MISSED")}
    sizes |= {"TOKENS": row_stats.most_tokens(), "SMALL": row_stats.SMALL}
    row = {"raw_TV": HALF, "heat_T": FLOAT, "vocab": "i32"}
    marks = {"peak_TC": FLOAT, "sum_TC": FLOAT, "moment_TC": FLOAT, "flat_1": INT}
    totals = {"peak_T": FLOAT, "total_T": FLOAT, "least_T": FLOAT}
    merge = {"uniform_T": DOUBLE, "held_T": LONG, "draw_T": LONG, "top_T": LONG}
    floats = {"entropy_T": FLOAT, "top_p_T": FLOAT, "held_p_T": FLOAT, "next_T": FLOAT}
    merged = {**row, **marks, **merge, **floats, **totals}
    likely = {"id_TS": INT, "p_TS": FLOAT, "count_T": INT, "mass_T": FLOAT}
    seen = {**row, **totals, "peak_TC": FLOAT, "count_TG": INT, "mass_TG": FLOAT}
    grouped = {**sizes, "EACH": sparse.AT_ONCE, "COLUMN": sparse.COLUMN, "G": 32}
    return [
        Case("marks", row_stats._marks, {**row, **marks, "chunks": "i32"}, sizes),
        Case("merge", row_stats._merge, merged, sizes, 8),
        Case("probabilities", row_stats._probabilities, {**row, **totals}, sizes),
        Case("likely", sparse._likely, {**seen, "flat_1": INT}, grouped, 8),
        Case("survivors", sparse._survivors, {**seen, **likely}, grouped, 8),
    ]


def soft_cases() -> list[Case]:
    into = {"table_VD": HALF, "tokens_T": LONG, "pinned_T": BYTE, "soft_TD": HALF, "scale": "fp32"}
    mean = {**into, "id_TS": INT, "p_TS": FLOAT, "count_T": INT}
    sizes = {"D": WIDTH, "S": 128, "BLOCK": sparse.BLOCK, "EACH": 16, "HAS_PINS": True, **EARLY}
    return [
        Case("soft mean", sparse._soft_mean, mean, sizes),
        Case("pin mean", sparse._pin_mean, {**into, "mean_TD": HALF}, sizes),
    ]


def soft_8_cases() -> list[Case]:
    form = cuts.SOFT
    row = {"heat_T": FLOAT, "peak_T": FLOAT, "total_T": FLOAT, "top_T": LONG, "factor_ST": FLOAT}
    row |= {"peak_TC": FLOAT, "next_T": FLOAT}
    shares = {**row, "from_TV": HALF, "beside_V": FLOAT, "unit_1": FLOAT, "numbers_TV": EIGHT}
    rounding = {"LEAST": SMALLEST, "CAP": 30.0, "SHARE": SHARE, "W": soft_8.AT_ONCE, **EARLY}
    rounding |= {"CHUNKS": 128, "NEAR": NEAR, "REACH": soft_8.reach(SHARE)}
    product = {
        "numbers_TV": f"tensordesc<fp8e4nv[{form.rows},{form.depth}]>",
        "numbers_DV": f"tensordesc<fp8e4nv[{form.outputs},{form.depth}]>",
    }
    product |= {"factor_ST": FLOAT, "out_STD": HALF, "rows": "i32"}
    cut = {"D": WIDTH, "SHARE": SHARE, "BM": form.rows, "BN": form.outputs, "BK": form.depth}
    into = {"weight_VD": HALF, "tokens_T": LONG, "pinned_T": BYTE, "soft_TD": HALF, "scale": "fp32"}
    adding = {**into, "parts_STD": HALF, "top_T": LONG, "top_p_T": FLOAT}
    sizes = {"D": WIDTH, "PARTS": 36, "BLOCK": sparse.BLOCK, "HAS_PINS": True, **EARLY}
    return [
        *(
            Case(name, soft_8._shares, {**shares, "vocab": "i32"}, {**rounding, "IS_RAW": is_raw})
            for name, is_raw in (("shares", True), ("shares of p", False))
        ),
        Case("soft 8", soft_8._product, product, {**cut, **EARLY}, form.warps, form.stages),
        Case("soft 8 added up", soft_8._add_up, adding, sizes),
    ]


def move_cases() -> list[Case]:
    types = {name: LONG for name in ("draw_L", "top_L", "noise_NL", "tokens_L", "guess_L")}
    types |= {"found_L": FLOAT, "entropy_L": FLOAT, "count_LG": INT, "mass_LG": FLOAT}
    types |= {"pinned_L": BYTE, "kept_L": BYTE, "settled_0": BYTE, "seen_2": BYTE}
    types |= {"steady_0": LONG, "index_1": LONG, "settle_steps": "i32"}
    types |= {"bound": "fp32", "settle_entropy": "fp32"}
    found = []
    for length in (CANVAS, move.LONGEST):
        sizes = {"L": length, "P": length, "B": move.PAIRS // length, "GROUPS": 32, "G": 32}
        sizes |= {"S": row_stats.SURVIVORS, "MASS": row_stats.MASS, **EARLY}
        found.append(Case(f"move {length}", move._move, types, sizes, 8))
    return found


def enter_cases() -> list[Case]:
    halves = "table_VD soft_LD weight_D vector_LD normed_LD out_TD x_TD part_TD"
    types = {**dict.fromkeys(halves.split(), HALF), "tokens_L": LONG, "block_L": LONG}
    types |= {"index_1": LONG, "heat_N": FLOAT, "uniform_NL": DOUBLE, "heat_L": FLOAT}
    types |= {"uniform_L": DOUBLE, "scale": "fp32", "eps": "fp32"}
    sizes = {"L": CANVAS, "D": WIDTH, "BLOCK": 4096, **EARLY}
    found = [
        Case(name.strip("_"), getattr(enter, name), types, sizes, 8)
        for name in ("_conditioned", "_unconditioned", "_add_and_norm")
    ]
    one = {"token_1": LONG, "start_1": LONG, "table_VD": HALF, "weight_D": HALF, "x_1D": HALF}
    one |= {"normed_1D": HALF, **dict.fromkeys(("frequency_F", "cos_F", "sin_F"), FLOAT)}
    one |= {"scale": "fp32", "eps": "fp32", "count": "i32"}
    return [*found, Case("one token", enter_1._enter, one, {**sizes, "PAIRS": enter_1.TURNS}, 8)]


if __name__ == "__main__":
    for case in stats_cases() + soft_cases() + soft_8_cases() + move_cases() + enter_cases():
        print(told(case, compiled(case)), flush=True)
