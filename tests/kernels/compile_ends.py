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

from dgemma.backends.cuda import device
from dgemma.backends.cuda.configs import SOFT_EMBED, for_device
from dgemma.backends.cuda.kernels import (
    embed,
    logit_stats,
    sampler_update,
    soft_embed_fp8,
    soft_embed_topk,
)
from dgemma.quant.head import CHUNK, VOCAB_SPLIT

VOCAB = 1 << 18
PAIRS = 128 + 64  # of RoPE, of both layer types
# Destination of soft embeddings.
OUT = {"soft_ELD": HALF, "tokens_EL": LONG, "pinned_EL": BYTE, "entry_I": INT, "scale": "fp32"}
OUT |= {"tokens_stride": "i32", "pinned_stride": "i32"}


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
    step |= {"current_T": LONG, **dict.fromkeys(temperatures.split(), FLOAT)}
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
    """Return logit statistics, and the search for candidates."""
    sizes = {"CAP": 30.0, "W": logit_stats.CHUNK, "CHUNKS": 128, "C": 128, "S": 128}
    sizes |= {"PER_PROGRAM": 4, "EVEN": True, "L": CANVAS}
    sizes |= {"MAX_ENTROPY": logit_stats.max_entropy(VOCAB), "MAX_TOKENS": logit_stats.max_tokens()}
    names = "MIN_PROB MIN_CHUNK_PROB MAX_MISSED MIN_COUNTED_PROB MIN_TEMPERATURE"
    sizes |= {name: getattr(logit_stats, name) for name in names.split()}
    row = {"raw_TV": HALF, "temperature_T": FLOAT, "vocab": "i32"}
    chunks = {"peak_TC": FLOAT, "sum_TC": FLOAT, "moment_TC": FLOAT, "draw_sum_TC": FLOAT}
    chunks |= {"draw_temperature_T": FLOAT, "flat_C": INT}
    totals = {"peak_T": FLOAT, "total_T": FLOAT, "min_logit_T": FLOAT}
    merge = {"uniform_T": DOUBLE, "current_T": LONG, "draw_T": LONG, "top_T": LONG}
    floats = {"entropy_T": FLOAT, "top_p_T": FLOAT, "current_p_T": FLOAT, "second_T": FLOAT}
    merged = {**row, **chunks, **merge, **floats, **totals}
    candidates = {"id_TS": INT, "p_TS": FLOAT, "count_T": INT, "mass_T": FLOAT}
    seen = {**row, **totals, "peak_TC": FLOAT, "count_TG": INT, "mass_TG": FLOAT}
    grouped = {**sizes, "PER_PROGRAM": soft_embed_topk.CHUNKS_PER_PROGRAM, "G": 32}
    grouped["COLUMN"] = soft_embed_topk.COLUMN
    count, gather = soft_embed_topk._count_candidates, soft_embed_topk._gather_candidates
    return [
        Case("marks", logit_stats._chunk_stats, {**row, **chunks, "chunks": "i32"}, sizes),
        Case("merge", logit_stats._merge_chunks, merged, sizes, 8),
        Case("probabilities", logit_stats._probabilities, {**row, **totals}, sizes),
        Case("likely", count, {**seen, "flat_C": INT}, grouped, 8),
        Case("survivors", gather, {**seen, **candidates}, grouped, 8),
    ]


def soft_cases() -> list[Case]:
    """Return the sparse soft embedding."""
    out = {**OUT, "table_VD": HALF}
    mean = {**out, "id_TS": INT, "p_TS": FLOAT, "count_T": INT}
    sizes = {"D": WIDTH, "S": 128, "BLOCK": soft_embed_topk.BLOCK, "STEP": 16, "L": CANVAS}
    return [
        Case("soft mean", soft_embed_topk._mean_of_candidates, mean, sizes),
        Case("pin mean", soft_embed_topk._store_mean, {**out, "mean_TD": HALF}, sizes),
    ]


def soft_fp8_cases() -> list[Case]:
    """Return the dense soft embedding in fp8."""
    form = for_device(SOFT_EMBED)
    row = {
        "temperature_T": FLOAT,
        "peak_T": FLOAT,
        "total_T": FLOAT,
        "top_T": LONG,
        "scale_ST": FLOAT,
    }
    row |= {"peak_TC": FLOAT, "second_T": FLOAT}
    probs = {**row, "raw_TV": HALF, "rel_scale_V": FLOAT, "unit_scale_1": FLOAT, "values_TV": FP8}
    rounding = {"CAP": 30.0, "SPLIT": VOCAB_SPLIT, "W": soft_embed_fp8.TOKENS_PER_STEP}
    near = soft_embed_fp8.chunks_per_split(VOCAB_SPLIT)
    rounding |= {"CHUNKS": 128, "CHUNK": CHUNK, "NEAR": near}
    product = {
        "values_TV": fp8_operand(form.rows, form.depth),
        "values_DV": fp8_operand(form.outputs, form.depth),
    }
    product |= {"scale_ST": FLOAT, "out_STD": HALF, "rows": "i32"}
    block = {"D": WIDTH, "BM": form.rows, "BN": form.outputs, "BK": form.depth}
    block |= {"V": VOCAB, "SPLIT": VOCAB_SPLIT, "TMA": device.has_tma()}
    adding = {**OUT, "weight_VD": HALF, "sums_STD": HALF, "top_T": LONG, "top_p_T": FLOAT}
    sizes = {"D": WIDTH, "SPLITS": 36, "BLOCK": soft_embed_topk.BLOCK, "L": CANVAS}
    of_soft = soft_embed_fp8
    return [
        Case("soft fp8 shares", of_soft._quantize_probs, {**probs, "vocab": "i32"}, rounding),
        Case("soft fp8 product", of_soft._split_sums, product, block, form.warps, form.stages),
        Case("soft fp8 sum", of_soft._add_splits, adding, sizes),
    ]


def sampler_cases() -> list[Case]:
    """Return the update of canvases, of the released and of the maximal length."""
    longs = "draw_T top_T noise_ENL tokens_EL guess_EL stable_E step_E"
    types = {**dict.fromkeys(longs.split(), LONG), "entry_C": INT}
    types |= {"entropy_T": FLOAT, "entropy_EL": FLOAT, "count_TG": INT, "mass_TG": FLOAT}
    types |= dict.fromkeys("pinned_EL accepted_EL converged_E flags_E2".split(), BYTE)
    types |= {"rule_E3": FLOAT, **dict.fromkeys("stride_1 stride_8 stride_4".split(), "i32")}
    types["num_noise"] = "i32"
    found = []
    for length in (CANVAS, sampler_update.MAX_LENGTH):
        sizes = {"L": length, "P": length, "B": sampler_update.PAIRS // length}
        sizes |= {"GROUPS": 32, "G": 32, "S": logit_stats.MAX_CANDIDATES}
        sizes["MIN_MASS"] = logit_stats.MIN_MASS
        found.append(Case(f"sampler update {length}", sampler_update._update, types, sizes, 8))
    return found
