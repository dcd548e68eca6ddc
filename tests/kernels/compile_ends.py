"""Kernels at both ends of a pass, to be compiled by `compile_all.py`."""

from compile_card import (
    BYTE,
    CANVAS,
    DOUBLE,
    FLOAT,
    FP8,
    HALF,
    INT,
    LONG,
    WIDTH,
    Case,
    fp8_operand,
)

from dgemma.backends.cuda.configs import SOFT, fitted
from dgemma.backends.cuda.kernels import (
    device,
    embed,
    logit_stats,
    sampler_update,
    soft_embed_fp8,
    soft_embed_topk,
)
from dgemma.quant.soft_table import NEAR, SHARE

VOCAB = 1 << 18
PAIRS = 128 + 64  # of RoPE, of both layer types
# Where soft embeddings go.
INTO = {"soft_ELD": HALF, "tokens_EL": LONG, "pinned_EL": BYTE, "entry_I": INT, "scale": "fp32"}
INTO |= {"tokens_stride": "i32", "pinned_stride": "i32"}


def end_cases() -> list[Case]:
    """Return kernels of all families at both ends."""
    return [*embed_cases(), *stats_cases(), *soft_cases(), *soft_fp8_cases(), *sampler_cases()]


def embed_cases() -> list[Case]:
    """Return embeddings of passes with canvases and without, and what makes the stack's input."""
    longs = "canvas_EL commit_EL start_E"
    floats = "freq_F cos_TF sin_TF"
    ints = "canvas_stride commit_stride start_stride count canvas_tokens steps"
    types = {**dict.fromkeys(longs.split(), LONG), **dict.fromkeys(floats.split(), FLOAT)}
    types |= {"entry_I": INT, "start_F": INT, "width_F": INT, "scale": "fp32", "eps": "fp32"}
    types |= dict.fromkeys("table_VD weight_D vector_TD normed_TD".split(), HALF)
    types |= dict.fromkeys(ints.split(), "i32")
    temperatures = "temperature_EN draw_temperature_E temperature_T draw_temperature_T"
    step = {"soft_ELD": HALF, "step_E": LONG, "uniform_ENL": DOUBLE, "uniform_T": DOUBLE}
    step |= {"held_T": LONG, **dict.fromkeys(temperatures.split(), FLOAT)}
    sizes = {"D": WIDTH, "F": PAIRS, "BLOCK": 4096, "PAIRS": embed.PAIRS}
    canvas, token = {"L": CANVAS, "HAS_CANVAS": True}, {"L": 1, "HAS_CANVAS": False}
    added = {"x_TD": HALF, "part_CD": HALF, "out_TD": HALF, "eps": "fp32", "canvas_tokens": "i32"}
    no_step = dict.fromkeys(step, LONG)  # anything stands in for it
    return [
        Case("embed canvases", embed._embed, {**types, **step}, {**sizes, **canvas}, 8),
        Case("embed tokens", embed._embed, {**types, **no_step}, {**sizes, **token}, 8),
        Case("add and norm", embed._add_and_norm, added, sizes, 8),
    ]


def stats_cases() -> list[Case]:
    """Return row statistics, and the search for likely tokens."""
    sizes = {"CAP": 30.0, "W": logit_stats.CHUNK, "CHUNKS": 128, "C": 128, "S": 128}
    sizes |= {"EACH": 4, "EVEN": True, "MOST": logit_stats.most_entropy(VOCAB), "L": CANVAS}
    sizes |= {n: getattr(logit_stats, n) for n in ("SPARE", "READ", "MISSED", "SMALL", "COLDEST")}
    sizes |= {"TOKENS": logit_stats.most_tokens()}
    row = {"raw_TV": HALF, "temperature_T": FLOAT, "vocab": "i32"}
    marks = {"peak_TC": FLOAT, "sum_TC": FLOAT, "moment_TC": FLOAT, "draw_sum_TC": FLOAT}
    marks |= {"draw_temperature_T": FLOAT, "flat_C": INT}
    totals = {"peak_T": FLOAT, "total_T": FLOAT, "least_T": FLOAT}
    merge = {"uniform_T": DOUBLE, "held_T": LONG, "draw_T": LONG, "top_T": LONG}
    floats = {"entropy_T": FLOAT, "top_p_T": FLOAT, "held_p_T": FLOAT, "next_T": FLOAT}
    merged = {**row, **marks, **merge, **floats, **totals}
    likely = {"id_TS": INT, "p_TS": FLOAT, "count_T": INT, "mass_T": FLOAT}
    seen = {**row, **totals, "peak_TC": FLOAT, "count_TG": INT, "mass_TG": FLOAT}
    grouped = {**sizes, "EACH": soft_embed_topk.AT_ONCE, "COLUMN": soft_embed_topk.COLUMN, "G": 32}
    return [
        Case("marks", logit_stats._marks, {**row, **marks, "chunks": "i32"}, sizes),
        Case("merge", logit_stats._merge, merged, sizes, 8),
        Case("probabilities", logit_stats._probabilities, {**row, **totals}, sizes),
        Case("likely", soft_embed_topk._likely, {**seen, "flat_C": INT}, grouped, 8),
        Case("survivors", soft_embed_topk._survivors, {**seen, **likely}, grouped, 8),
    ]


def soft_cases() -> list[Case]:
    """Return the sparse soft embedding."""
    into = {**INTO, "table_VD": HALF}
    mean = {**into, "id_TS": INT, "p_TS": FLOAT, "count_T": INT}
    sizes = {"D": WIDTH, "S": 128, "BLOCK": soft_embed_topk.BLOCK, "EACH": 16, "L": CANVAS}
    return [
        Case("soft mean", soft_embed_topk._soft_mean, mean, sizes),
        Case("pin mean", soft_embed_topk._pin_mean, {**into, "mean_TD": HALF}, sizes),
    ]


def soft_fp8_cases() -> list[Case]:
    """Return the dense soft embedding in fp8."""
    form = fitted(SOFT)
    row = {
        "temperature_T": FLOAT,
        "peak_T": FLOAT,
        "total_T": FLOAT,
        "top_T": LONG,
        "factor_ST": FLOAT,
    }
    row |= {"peak_TC": FLOAT, "next_T": FLOAT}
    shares = {**row, "raw_TV": HALF, "beside_V": FLOAT, "unit_1": FLOAT, "numbers_TV": FP8}
    rounding = {"CAP": 30.0, "SHARE": SHARE, "W": soft_embed_fp8.AT_ONCE}
    rounding |= {"CHUNKS": 128, "NEAR": NEAR, "REACH": soft_embed_fp8.reach(SHARE)}
    product = {
        "numbers_TV": fp8_operand(form.rows, form.depth),
        "numbers_DV": fp8_operand(form.outputs, form.depth),
    }
    product |= {"factor_ST": FLOAT, "out_STD": HALF, "rows": "i32"}
    cut = {"D": WIDTH, "SHARE": SHARE, "BM": form.rows, "BN": form.outputs, "BK": form.depth}
    cut |= {"V": VOCAB, "TMA": device.has_tma()}
    adding = {**INTO, "weight_VD": HALF, "parts_STD": HALF, "top_T": LONG, "top_p_T": FLOAT}
    sizes = {"D": WIDTH, "PARTS": 36, "BLOCK": soft_embed_topk.BLOCK, "L": CANVAS}
    of_soft = soft_embed_fp8
    return [
        Case("soft fp8 shares", of_soft._shares, {**shares, "vocab": "i32"}, rounding),
        Case("soft fp8 product", of_soft._product, product, cut, form.warps, form.stages),
        Case("soft fp8 sum", of_soft._add_up, adding, sizes),
    ]


def sampler_cases() -> list[Case]:
    """Return the update of canvases, of the released length and of the greatest."""
    longs = "draw_T top_T noise_ENL tokens_EL guess_EL steady_E step_E"
    types = {**dict.fromkeys(longs.split(), LONG), "entry_C": INT}
    types |= {"found_T": FLOAT, "entropy_EL": FLOAT, "count_TG": INT, "mass_TG": FLOAT}
    types |= dict.fromkeys("pinned_EL kept_EL settled_E flags_E2".split(), BYTE)
    types |= {"rule_E3": FLOAT, **dict.fromkeys("stride_1 stride_8 stride_4".split(), "i32")}
    types["num_noise"] = "i32"
    found = []
    for length in (CANVAS, sampler_update.MAX_LENGTH):
        sizes = {"L": length, "P": length, "B": sampler_update.PAIRS // length}
        sizes |= {"GROUPS": 32, "G": 32, "S": logit_stats.SURVIVORS, "MASS": logit_stats.MASS}
        found.append(Case(f"sampler update {length}", sampler_update._update, types, sizes, 8))
    return found
