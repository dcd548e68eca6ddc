"""Which form is chosen, and what is refused before anything is loaded."""

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from dgemma.cli import main
from dgemma.config import RELEASED, load_config
from dgemma.errors import UsageError
from dgemma.roofline import memory
from dgemma.weights import inference
from dgemma.weights.gguf_memory import blocks_of_type, gguf_bytes, plan_gguf, tiled_bytes
from dgemma.weights.hub import NANO_DIRECTORY, ModelOptions
from dgemma.weights.inference import (
    QuantChoice,
    Timing,
    choose_quant,
    gguf_choice,
    needed_bytes,
    plan_load,
    time_int8,
)
from dgemma.weights.layer_formats import Quant
from dgemma.weights.load import load_model
from tests.weights.packed import Writer
from tests.weights.test_layer_formats import WIDE
from tests.weights.test_quantize import make

CPU, GPU = torch.device("cpu"), torch.device("cuda")
HALF, SINGLE = torch.bfloat16, torch.float32


def capability(major: int, minor: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (major, minor))


def test_numbers_decide_for_the_built_in_model_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    timing = time_int8(load_config(NANO_DIRECTORY), SINGLE)
    assert timing.int8 > 0
    assert timing.plain > 0
    monkeypatch.setattr(torch.cpu, "_is_vnni_supported", lambda: True)
    for ratio, want in (
        (inference.MIN_SPEEDUP + 0.1, "int8"),
        (inference.MIN_SPEEDUP - 0.1, "none"),
    ):
        monkeypatch.setattr(inference, "time_int8", lambda *_, r=ratio: Timing(1.0, r))
        found = choose_quant("auto", NANO_DIRECTORY, CPU, SINGLE)
        assert found.quant == want
        assert f"{ratio:.1f} times as fast as float32" in found.reason
        # Who asks for a number type gets it.
        assert choose_quant("auto", NANO_DIRECTORY, CPU, SINGLE, exact=True).quant == "none"
        decided = plan_load(NANO_DIRECTORY, ModelOptions(device="cpu", dtype="float32"))
        assert decided.choice.quant == "none"


def test_only_clear_cases_are_rounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inference, "time_int8", lambda *_: Timing(1.0, 3.0))
    monkeypatch.setattr(torch.cpu, "_is_vnni_supported", lambda: True)
    assert choose_quant("auto", NANO_DIRECTORY, CPU, HALF).quant == "none"
    assert choose_quant("auto", NANO_DIRECTORY, CPU, SINGLE).quant == "int8"
    monkeypatch.setattr(torch.cpu, "_is_vnni_supported", lambda: False)
    found = choose_quant("auto", NANO_DIRECTORY, CPU, SINGLE)
    assert found.quant == "none"
    assert "no instructions" in found.reason


def test_timing_both_ways_takes_the_models_threads_and_widths_into_account() -> None:
    inference._timed.cache_clear()
    config = load_config(NANO_DIRECTORY)
    time_int8(config, SINGLE)
    time_int8(config, SINGLE)
    assert inference._timed.cache_info().misses == 1
    time_int8(replace(config, hidden_size=128), SINGLE)
    assert inference._timed.cache_info().misses == 2


def test_other_checkpoints_are_never_rounded_unasked(tmp_path: Path) -> None:
    plain = make(tmp_path / "plain", WIDE)
    assert choose_quant("auto", plain, CPU, SINGLE) == QuantChoice(
        "none", "nothing is rounded unasked"
    )
    assert choose_quant("int8", plain, CPU, SINGLE).quant == "int8"
    packed = Writer("nvfp4", WIDE).save(tmp_path / "packed")
    found = choose_quant("auto", packed, CPU, SINGLE)
    assert found.quant == "none"
    assert found.reason.startswith("stored as nvfp4, dequantized: ")


def test_a_gpu_takes_the_checkpoints_own_form(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    packed = Writer("nvfp4", WIDE).save(tmp_path / "packed")
    monkeypatch.setattr(inference, "unsupported_reason", lambda device: None)
    monkeypatch.setattr(inference, "_free", lambda device: 1e9)
    capability(9, 0, monkeypatch)
    assert choose_quant("auto", packed, GPU, HALF) == QuantChoice("stored", "stored as nvfp4")
    assert choose_quant("nvfp4", packed, GPU, HALF).quant == "nvfp4"
    assert choose_quant("none", packed, GPU, HALF).quant == "none"
    capability(8, 6, monkeypatch)
    assert choose_quant("auto", packed, GPU, HALF) == QuantChoice("stored", "stored as nvfp4")
    eight = Writer("fp8", WIDE).save(tmp_path / "eight")
    found = choose_quant("auto", eight, GPU, HALF)
    assert found == QuantChoice("none", "stored as fp8, dequantized: the GPU has no fp8 arithmetic")
    monkeypatch.setattr(inference, "_free", lambda device: 1e5)
    with pytest.raises(UsageError, match="of the GPU's memory are free"):
        choose_quant("none", packed, GPU, HALF)


def test_what_a_device_cannot_do_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = make(tmp_path, WIDE)
    with pytest.raises(UsageError, match="int8 is for CPUs; on a GPU use fp8 or nvfp4"):
        choose_quant("int8", plain, GPU, HALF)
    capability(8, 6, monkeypatch)
    with pytest.raises(UsageError, match=r"capability 8\.9.*this one has 8\.6; use --quant nvfp4"):
        choose_quant("fp8", plain, GPU, HALF)
    monkeypatch.setattr(inference, "_free", lambda device: 1e9)
    found = choose_quant("nvfp4", plain, GPU, HALF)
    assert (found.quant, found.fp8_head) == ("nvfp4_bf16", False)
    with pytest.raises(UsageError, match="quant 'int4' is not known; use auto, none, int8"):
        choose_quant("int4", plain, CPU, SINGLE)


def test_an_adapter_wants_plain_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = make(tmp_path / "plain", WIDE)
    with pytest.raises(UsageError, match="an adapter cannot be put on weights in fp8; merge it"):
        plan_load(plain, ModelOptions(device="cpu", quant="fp8"), adapted=True)
    packed = Writer("fp8", WIDE).save(tmp_path / "packed")
    monkeypatch.setattr(inference, "unsupported_reason", lambda device: None)
    assert plan_load(packed, ModelOptions(device="cpu")).choice.quant == "stored"
    assert plan_load(packed, ModelOptions(device="cpu"), adapted=True).choice.quant == "none"


@pytest.mark.parametrize(
    ("quant", "stored", "low", "high"),
    [
        ("none", None, 50.5e9, 52e9),
        ("fp8", None, 26e9, 27.5e9),
        ("nvfp4", None, 16e9, 17.5e9),  # with the driver's share, 18e9 are allowed
        ("stored", "nvfp4", 18e9, 19e9),
        ("stored", "fp8", 26e9, 27.5e9),
    ],
)
def test_the_released_model_needs_so_much(
    quant: Quant, stored: None, low: float, high: float
) -> None:
    assert low < needed_bytes(RELEASED, quant, stored, HALF) < high


@pytest.mark.parametrize("quant", ["none", "fp8", "nvfp4", "stored"])
def test_the_estimate_of_weights_is_that_of_a_loaded_model(tmp_path: Path, quant: Quant) -> None:
    directory = make(tmp_path / "plain", WIDE)
    stored = None
    if quant == "stored":
        directory, stored = Writer("nvfp4", WIDE).save(tmp_path / "nvfp4"), "nvfp4"
    model = load_model(directory, dtype=HALF, quant=quant).model
    held = sum(weight.numel() * weight.dtype.itemsize for weight in model.state_dict().values())
    kind = inference._weight_format(quant, stored, HALF)  # type: ignore[arg-type]
    weights = memory(WIDE, 0, kind, inference.WITHOUT_DRIVER).weights
    # The factors of outputs are left out, which are many in a small model.
    assert weights == pytest.approx(held, rel=0.001 if quant == "none" else 0.08)


def test_a_model_too_large_is_refused_with_what_would_fit() -> None:
    def refuse(quant: Quant, free: float, stored: str | None = None) -> str:
        with pytest.raises(UsageError) as caught:
            inference._check_memory(RELEASED, quant, stored, HALF, free)  # type: ignore[arg-type]
        return str(caught.value)

    said = refuse("none", 30e9)
    assert "needs 51.1 GB in bfloat16 with a context of 4096 tokens, and 30.0 GB" in said
    assert said.endswith("--quant fp8 needs 26.6 GB; --quant nvfp4 needs 16.6 GB")
    assert "--quant fp8 needs 26.6 GB, too much as well" in refuse("none", 24e9)
    assert refuse("nvfp4", 12e9).endswith("--device cpu may have the room, or a larger GPU")
    assert "--quant auto needs 18.3 GB" in refuse("none", 24e9, "nvfp4")
    inference._check_memory(RELEASED, "nvfp4", None, HALF, 17.5e9)


@pytest.mark.parametrize("command", [["generate", "Hello"], ["info"], ["sudoku", "0" * 81]])
def test_commands_take_the_option(
    command: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["dgemma", *command, "--quant", "int4"])
    with pytest.raises(SystemExit) as caught:
        main()
    shown = capsys.readouterr()
    sentence = "quant 'int4' is not known; use auto, none, int8, fp8, nvfp4"
    if command == ["info"]:
        assert f"refused: {sentence}" in shown.out
    else:
        assert caught.value.code == 2
        assert sentence in shown.err


def test_info_says_which_form_and_why(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = ["dgemma", "info", "--device", "cpu", "--json"]
    for more, want in ((["--quant", "int8"], "int8 (asked for)"), ([], "times as fast as")):
        monkeypatch.setattr(sys, "argv", [*asked, *more])
        with pytest.raises(SystemExit):
            main()
        assert want in json.loads(capsys.readouterr().out)["weights"]


# --- GGUF files on a GPU


SIZES = [555_000_000, 460_000_000] * 15  # of the experts of a Q4_K_M, by layer


@pytest.mark.parametrize(
    ("free", "has_fp8", "quant", "num_streamed"),
    [
        (24e9, True, "gguf", 0),
        (21e9, True, "gguf_fp8", 0),
        (21e9, False, "gguf", 5),
        (15.5e9, True, "gguf_fp8", 12),
        (11.5e9, True, "gguf_fp8", 20),
    ],
)
def test_a_gguf_file_is_held_as_the_memory_of_a_gpu_allows(
    free: float, has_fp8: bool, quant: str, num_streamed: int
) -> None:
    choice = gguf_choice(RELEASED, SIZES, free, has_fp8=has_fp8)
    assert choice.quant == quant
    assert abs(len(choice.streamed) - num_streamed) <= 1
    assert ("streamed from host memory" in choice.reason) == bool(num_streamed)
    resident = sum(size for layer, size in enumerate(SIZES) if layer not in choice.streamed)
    staged = 2 * max((SIZES[layer] for layer in choice.streamed), default=0)
    others = gguf_bytes(RELEASED, SIZES, choice.quant, 4096) - sum(SIZES)
    assert others + resident + staged <= free


# Driver, runtime and kernels, measured on an H200; the rest is torch's.
OUTSIDE_TORCH = 0.8e9


@pytest.mark.parametrize(("limit", "streamed"), [(21.5e9, 0), (16e9, 13), (12e9, 20)])
def test_a_q4_k_m_of_the_released_size_stays_within_a_card(limit: float, streamed: int) -> None:
    """What a start and a request of 4k tokens need was measured; see bench/results."""
    sizes = tiled_bytes(RELEASED, blocks_of_type(RELEASED, "Q4_K_M"))
    assert sizes is not None and sum(sizes) == pytest.approx(15.41e9, rel=1e-3)
    plan = plan_gguf(RELEASED, sizes, limit - OUTSIDE_TORCH, has_fp8=True, context=4096)
    assert (plan.quant, len(plan.streamed)) == ("gguf_fp8", streamed)
    resident = sum(size for layer, size in enumerate(sizes) if layer not in plan.streamed)
    staging = 2 * max((sizes[layer] for layer in plan.streamed), default=0)
    dense, tables = 1.67e9, 1.48e9 + 0.06e9  # fp8; tokens, norms, router, self-conditioning
    left = limit - OUTSIDE_TORCH - resident - staging - dense - tables
    # Measured within 12 GB: KV cache, logits and captured passes took 1.1 GB in all.
    assert left > 1.1e9 + 0.5e9


def test_a_gpu_too_small_even_for_streaming_is_refused() -> None:
    with pytest.raises(UsageError, match="with the experts of all layers in host memory"):
        gguf_choice(RELEASED, SIZES, 4e9, has_fp8=True)
