"""Predictions: the op table gives the known totals of the released model; its own rules hold."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from dgemma.cli import app
from dgemma.config import RELEASED, ModelConfig
from dgemma.errors import UsageError
from dgemma.roofline import (
    BF16,
    DEVICES,
    FORMATS,
    FOUR_BIT,
    FP8,
    Pass,
    cache_elements,
    cost,
    floor,
    memory,
    ops,
    passes,
    predict,
    stored_parameters,
)
from dgemma.weights.load import count_parameters
from tests.tiny import TINY
from tests.weights.gguf_tiny import tiny_keys, tiny_tensors, write_tiny

STEP, COMMIT, TOKEN = passes(RELEASED, 1024)
H200 = DEVICES["h200"]
# As the published table counts them: with the head in 8 bits too.
ALL_FP8, ALL_FOUR_BIT = replace(FP8, head=8), replace(FOUR_BIT, head=8)


@pytest.mark.parametrize("config", [RELEASED, TINY], ids=["released", "tiny"])
def test_the_table_holds_every_weight_of_the_model_once(config: ModelConfig) -> None:
    counted = count_parameters(config)
    assert sum(stored_parameters(config).values()) == counted.total


def test_the_released_totals_are_the_known_ones() -> None:
    assert sum(stored_parameters(RELEASED).values()) == pytest.approx(25.25e9, rel=1e-3)
    assert count_parameters(RELEASED).active == pytest.approx(3.84e9, rel=1e-3)
    step = cost(RELEASED, STEP, BF16)
    assert step.flop == pytest.approx(2532e9, rel=1e-3)
    assert step.weight_bytes == pytest.approx(51_977e6, rel=1e-3)
    assert cost(RELEASED, STEP, ALL_FP8).weight_bytes == pytest.approx(25_988e6, rel=1e-3)
    assert cost(RELEASED, STEP, ALL_FOUR_BIT).weight_bytes == pytest.approx(15_997e6, rel=1e-3)
    assert cost(RELEASED, COMMIT, BF16).weight_bytes == pytest.approx(49.0e9, rel=1e-3)


def test_single_ops_are_those_of_the_known_table() -> None:
    gflop = {op.name: op.flop / 1e9 for op in ops(RELEASED, STEP)}
    known = {
        "self-conditioning": 9.1,
        "qkv sliding": 295,
        "qkv full": 66,
        "attention sliding": 134,
        "attention full": 54,
        "dense MLP": 274,
        "router": 5.5,
        "experts gate and up": 487,
        "experts down": 244,
        "head": 378,
        "soft embedding": 378,
    }
    assert {name: gflop[name] for name in known} == pytest.approx(known, rel=0.01)
    assert gflop["output sliding"] + gflop["output full"] == pytest.approx(207, rel=0.01)


@pytest.mark.parametrize(("fmt", "known"), [(BF16, 13.3), (ALL_FP8, 7.06), (ALL_FOUR_BIT, 4.74)])
def test_the_floors_on_an_h200_are_the_known_ones(fmt: object, known: float) -> None:
    assert isinstance(fmt, type(BF16))
    assert 1e3 * floor(ops(RELEASED, STEP), fmt, H200) == pytest.approx(known, rel=0.01)


def test_the_cache_of_the_released_model_grows_only_in_its_full_layers() -> None:
    per_token = 2 * (cache_elements(RELEASED, 20_000) - cache_elements(RELEASED, 10_000)) / 10_000
    assert per_token == 20_480
    assert 2 * cache_elements(replace(RELEASED, canvas_length=1), 1023) == 1024 * 225_280


def test_one_row_reads_its_own_experts_and_a_canvas_reads_all() -> None:
    def share(run: Pass) -> float:
        return next(op.read for op in ops(RELEASED, run) if op.group == "experts")

    assert share(TOKEN) == pytest.approx(8 / 128)
    assert share(STEP) == pytest.approx(1, abs=1e-6)
    assert 1e3 * floor(ops(RELEASED, TOKEN), BF16, H200) == pytest.approx(1.8, rel=0.05)


def test_break_even_is_where_both_modes_take_equally_long() -> None:
    for device in DEVICES.values():
        for fmt in FORMATS:
            predicted = predict(RELEASED, 1024, fmt, device)
            block = predicted.break_even * predicted.step + predicted.commit
            assert block == pytest.approx(256 * predicted.token)
            assert predicted.step > predicted.step_floor > 0


def test_the_longest_context_fits_and_one_more_does_not() -> None:
    device = DEVICES["rtx5090"]
    predicted = predict(RELEASED, 1024, FP8, device)
    assert predicted.fits and 1024 < predicted.max_context < RELEASED.max_position_embeddings
    room = 1e9 * device.memory
    assert memory(RELEASED, predicted.max_context, FP8, device).total <= room
    assert memory(RELEASED, predicted.max_context + 1, FP8, device).total > room
    assert not predict(RELEASED, 1024, BF16, device).fits


def test_no_speed_is_printed_for_what_cannot_run() -> None:
    rows = json.loads(fit("--json").stdout)["rows"]
    found = {(row["device"], row["weights"]): row for row in rows}
    for row in rows:
        assert (row["step_ms"] is None) == (not row["fits"] or row["obstacle"] != "")
        assert (row["tokens_per_second"] is None) == (row["step_ms"] is None)
    assert found["rtx3090", "fp8"]["obstacle"] == "the GPU has no fp8 arithmetic"
    # Without fp8 the dense part stays in 16 bits, and still fits a 24 GB card.
    assert found["rtx3090", "4-bit"]["step_ms"] is not None
    assert found["rtx3090", "4-bit"]["weights_gb"] > found["rtx4090", "4-bit"]["weights_gb"]
    assert "reference backend" in found["m4max", "bf16"]["obstacle"]
    assert found["rtx4090", "bf16"]["obstacle"] == "does not fit"
    assert " -  " in fit("--device", "rtx3090").stdout


def test_what_cannot_be_predicted_is_refused() -> None:
    with pytest.raises(UsageError, match="one token at a time"):
        predict(replace(TINY, family="gemma4"), 16, BF16, H200)
    with pytest.raises(UsageError, match="outside this model's 0 to 262144"):
        predict(RELEASED, 300_000, BF16, H200)


def fit(*arguments: str) -> subprocess.CompletedProcess[str]:
    script = "from dgemma.cli import main; main()"
    call = [sys.executable, "-c", script, "fit", *arguments]
    return subprocess.run(call, capture_output=True, text=True, check=False)


def test_the_command_says_predicted_everywhere() -> None:
    done = fit("--device", "rtx4090", "--context", "4096", "--json")
    report = json.loads(done.stdout)
    assert report["kind"] == "predicted" and report["context"] == 4096
    assert {row["kind"] for row in report["rows"]} == {"predicted"}
    assert [row["weights"] for row in report["rows"]] == ["bf16", "fp8", "4-bit", "Q4_K_M"]
    assert [row["fits"] for row in report["rows"]] == [False, False, True, True]
    assert fit("-m", "nano").stdout.startswith("predicted, not measured: nano")


def test_an_unknown_device_is_refused_with_those_known() -> None:
    done = fit("--device", "abacus")
    assert done.returncode == 2
    assert "'abacus' is not known; use one of auto, all, h200, h100, rtx5090" in done.stderr


def fit_here(*arguments: str) -> str:
    """Run the command in this process, which is faster; raises what it raises."""
    done = CliRunner().invoke(app, ["fit", *arguments])
    if isinstance(done.exception, Exception):
        raise done.exception
    return done.stdout


def test_the_released_model_is_known_by_its_hub_ids() -> None:
    """Nothing is downloaded: the hub cache of a test machine is empty."""
    known = json.loads(fit_here("--device", "h200", "--json"))["rows"]
    for name in ("google/diffusiongemma-26B-A4B-it", "nvidia/diffusiongemma-26B-A4B-it-NVFP4"):
        assert json.loads(fit_here(name, "--device", "h200", "--json"))["rows"] == known
    with pytest.raises(UsageError, match="give one of them"):
        fit_here("nano", "-m", "released")


def test_auto_predicts_for_this_machine() -> None:
    row = json.loads(fit_here("nano", "--device", "auto", "--json"))["rows"][0]
    assert row["device"] == "auto" and row["fits"] and row["step_ms"] > row["step_floor_ms"] > 0
    assert row["device_gb"] > 1
    if not torch.cuda.is_available() and row["device_gb"] < 50:
        found = fit_here("--device", "auto", "--gguf", "BF16")
        assert "No form of this model has a predicted speed here" in found


def row_of(device: str, *arguments: str) -> dict[str, Any]:
    """Return the prediction of the GGUF file, which is the last."""
    rows: list[dict[str, Any]] = json.loads(fit_here("--device", device, "--json", *arguments))[
        "rows"
    ]
    return rows[-1]


@pytest.mark.parametrize(
    ("device", "streamed", "step", "token"),
    # Measured on an H200, whose memory was taken to be that of the smaller cards.
    [("h200", 0, 11.56, 2.94), ("16", 13, 114.7, 11.3), ("12", 20, 193.8, 17.4)],
)
def test_a_packed_gguf_file_is_predicted_as_it_was_measured(
    monkeypatch: pytest.MonkeyPatch, device: str, streamed: int, step: float, token: float
) -> None:
    for size in (16, 12):
        monkeypatch.setitem(DEVICES, str(size), replace(H200, memory=size))
    row = row_of(device, "--context", "4096")
    assert row["weights"] == "Q4_K_M" and abs(row["streamed_layers"] - streamed) <= 1
    assert row["step_ms"] == pytest.approx(step, rel=0.1)
    assert row["ar_token_ms"] == pytest.approx(token, rel=0.3)
    assert row["memory_gb"] <= row["device_gb"]


def test_cards_of_12_to_24_gb_hold_a_q4_k_m_or_stream_it() -> None:
    layers = {name: row_of(name)["streamed_layers"] for name in ("rtx4090", "rtx5080", "rtx3060")}
    assert layers["rtx4090"] == 0 < layers["rtx5080"] < layers["rtx3060"] <= 30
    slow, fast = row_of("rtx4060ti"), row_of("rtx5080")
    assert slow["streamed_gb"] == fast["streamed_gb"] and slow["step_ms"] > 2 * fast["step_ms"]
    assert "13 layers streamed, 6.8 GB a step" in fit_here("--device", "rtx5080")
    assert row_of("rtx5080", "--gguf", "Q4_0")["streamed_layers"] < layers["rtx5080"]
    assert row_of("rtx4090", "--gguf", "F16")["obstacle"] == "does not fit"  # no kernels
    assert "reference backend" in row_of("m4max")["obstacle"]


def test_a_gguf_file_on_a_cpu_stays_mapped_unless_it_is_small(tmp_path: Path) -> None:
    row = row_of("cpu")
    assert 19e9 < 1e9 * row["memory_gb"] < 22e9 and 10e3 < row["step_ms"] < 100e3
    path = write_tiny(tmp_path / "tiny.gguf", tiny_keys(), tiny_tensors())
    small = row_of("cpu", str(path), "--context", "64")
    assert small["weights"] == "GGUF" and small["memory_gb"] < 1
    assert row_of("h200", str(path), "--context", "64")["step_ms"] > 0
    with pytest.raises(UsageError, match="has types of its own"):
        fit_here(str(path), "--gguf", "Q8_0")
    with pytest.raises(UsageError, match="'Q9' is not known"):
        fit_here("--gguf", "Q9")
