"""`dgemma quantize`: writes what the releases hold, states what was lost, and never writes over."""

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from dgemma.cli import main
from dgemma.config import ModelConfig
from dgemma.errors import CheckpointError, UsageError
from dgemma.weights.hub import NANO_DIRECTORY
from dgemma.weights.load import Checkpoint, load_model, random_model
from dgemma.weights.quant_schemes import SCHEMES
from dgemma.weights.quantize import (
    QuantizeResult,
    agreement,
    compare,
    pack_fp8,
    quantize_checkpoint,
)
from dgemma.weights.save import save_checkpoint
from tests.weights.packed import SMALL, Writer
from tests.weights.sample import SIBLING, tensor_bytes

LAYOUTS = list(SCHEMES)
# What normal weights lose: 3 bits of mantissa, 1 bit of mantissa.
USUAL = {"fp8": 0.026, "nvfp4": 0.094}
DENSE = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj", "mlp.")


def make(directory: Path, config: ModelConfig = SMALL, seed: int = 0) -> Path:
    model = random_model(config, seed)
    save_checkpoint(Checkpoint(model=model), directory)
    return directory


def convert(
    tmp_path: Path, layout: str, config: ModelConfig = SMALL
) -> tuple[Path, Path, QuantizeResult]:
    source, out = make(tmp_path / "source", config), tmp_path / layout
    return source, out, quantize_checkpoint(source, out, SCHEMES[layout])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_names_types_and_shapes_are_those_of_the_release(tmp_path: Path, layout: str) -> None:
    _, out, _ = convert(tmp_path, layout)
    released = Writer(layout).save(tmp_path / "released")
    ours, theirs = (
        {name: tuple(kind[:2]) for name, kind in tensor_bytes(path).items()}
        for path in (out, released)
    )
    assert ours.keys() == theirs.keys()
    assert [(n, ours[n], theirs[n]) for n in ours if ours[n] != theirs[n]] == []


@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_is_read_back_is_near_and_the_rest_is_the_same(tmp_path: Path, layout: str) -> None:
    source, out, written = convert(tmp_path, layout)
    before = load_model(source).model.state_dict()
    after = load_model(out, dtype=torch.float32).model.state_dict()
    for name, weight in before.items():
        is_packed = ".experts." in name or (layout == "fp8" and any(d in name for d in DENSE))
        if not is_packed:
            assert torch.equal(after[name], weight.bfloat16().float()), name
            continue
        lost = ((after[name] - weight).square().mean() / weight.square().mean()).sqrt().item()
        assert lost == pytest.approx(USUAL[layout], rel=0.15), name
    parts = {"experts"} if layout == "nvfp4" else {"experts", "mlp", "self_attn"}
    assert {(loss.layer, loss.part) for loss in written.losses} == {
        (layer, part) for layer in range(3) for part in parts
    }
    assert all(loss.relative == pytest.approx(USUAL[layout], rel=0.1) for loss in written.losses)


def test_the_stated_loss_is_that_of_the_files(tmp_path: Path) -> None:
    source, out, written = convert(tmp_path, "nvfp4")
    name = "layers.1.experts."
    change = size = 0.0
    before = load_model(source).model.state_dict()
    after = load_model(out, dtype=torch.float32).model.state_dict()
    for part in ("gate_up_proj", "down_proj"):
        change += (after[name + part] - before[name + part]).double().square().sum().item()
        size += before[name + part].double().square().sum().item()
    stated = next(loss.relative for loss in written.losses if loss.layer == 1)
    assert stated == pytest.approx((change / size) ** 0.5, rel=1e-9)


def test_a_row_keeps_its_largest_value_and_zeros_stay_zero() -> None:
    weight = torch.randn(40, 64, generator=torch.Generator().manual_seed(0))
    weight[3] = 0
    packed = pack_fp8(weight)
    whole = packed[".weight"].float() * packed[".weight_scale"].float()
    assert whole.isfinite().all()
    assert not whole[3].any()
    # Three bits of mantissa: a sixteenth at most, for all that is not tiny.
    is_large = weight.abs() > weight.abs().amax(-1, keepdim=True) / 1000
    assert ((whole - weight).abs() <= weight.abs() / 16)[is_large].all()


def test_the_same_checkpoint_gives_the_same_bytes_in_any_number_of_files(tmp_path: Path) -> None:
    source, out, _ = convert(tmp_path, "nvfp4")
    seen: list[tuple[int, int]] = []
    quantize_checkpoint(
        source,
        tmp_path / "again",
        SCHEMES["nvfp4"],
        max_shard_bytes=20_000,
        on_tensor=lambda done, total: seen.append((done, total)),
    )
    assert len(list((tmp_path / "again").glob("*.safetensors"))) > 3
    assert tensor_bytes(out) == tensor_bytes(tmp_path / "again")
    assert seen == [(n, len(seen)) for n in range(1, len(seen) + 1)]
    assert len(seen) == len(tensor_bytes(out))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_sibling_is_quantized_alike(tmp_path: Path, layout: str) -> None:
    config = replace(SIBLING, hidden_size=48, moe_intermediate_size=32, vision=None)
    source, out, _ = convert(tmp_path, layout, config)
    found = compare(source, out)
    assert found.positions == 64
    assert 0 < found.kl < 0.1


def test_nothing_is_written_over_or_quantized_twice(tmp_path: Path) -> None:
    source, out, _ = convert(tmp_path, "fp8")
    before = tensor_bytes(out)
    with pytest.raises(UsageError, match="already holds a checkpoint"):
        quantize_checkpoint(source, out, SCHEMES["fp8"])
    with pytest.raises(UsageError, match="already holds a checkpoint"):
        quantize_checkpoint(source, source, SCHEMES["fp8"])
    with pytest.raises(UsageError, match="is stored as fp8 already"):
        quantize_checkpoint(out, tmp_path / "twice", SCHEMES["nvfp4"])
    assert tensor_bytes(out) == before
    assert not (tmp_path / "twice").exists()


def test_what_cannot_be_quantized_is_refused_by_name_and_leaves_nothing(tmp_path: Path) -> None:
    source = make(tmp_path / "odd", replace(SMALL, moe_intermediate_size=12))
    with pytest.raises(UsageError, match=r"experts\.down_proj has rows of 12 numbers"):
        quantize_checkpoint(source, tmp_path / "out", SCHEMES["nvfp4"])
    model = random_model(SMALL, 0)
    model.layers[1].experts.down_proj[2, 3, 4] = float("nan")  # type: ignore[union-attr]
    save_checkpoint(Checkpoint(model=model), tmp_path / "broken")
    with pytest.raises(CheckpointError, match=r"layers\.1\.experts\.down_proj holds NaN"):
        quantize_checkpoint(tmp_path / "broken", tmp_path / "out", SCHEMES["fp8"])
    assert list((tmp_path / "out").iterdir()) == []


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_weights_pass_through_one_by_one(tmp_path: Path) -> None:
    """The memory that is not a view of the source stays far below the model's 150 MB."""
    config = replace(SMALL, hidden_size=256, moe_intermediate_size=256, num_experts=32)
    make(tmp_path / "source", replace(config, layer_types=SMALL.layer_types * 2))
    peak = start = own_memory()

    def watch(done: int, total: int) -> None:
        nonlocal peak
        if done % 50 == 0:
            peak = max(peak, own_memory())

    written = quantize_checkpoint(
        tmp_path / "source", tmp_path / "out", SCHEMES["nvfp4"], on_tensor=watch
    )
    assert written.source_bytes > 150e6
    assert peak - start < 30e6


def own_memory() -> int:
    """Bytes of this process that are no mapped files."""
    status = Path("/proc/self/status").read_text()
    return 1024 * int(status.split("RssAnon:")[1].split()[0])


def test_agreement_of_a_model_with_itself_is_full_and_with_another_is_not() -> None:
    first, second = random_model(SMALL, 0), random_model(SMALL, 1)
    same = agreement(first, first, seed=0)
    assert (same.kl, same.worst_kl, same.top_1) == (0, 0, 1)
    other = agreement(first, second, seed=0)
    assert other.kl > 0.5 and other.top_1 < 0.9
    assert same.positions == other.positions == 4 * SMALL.canvas_length


@pytest.mark.skipif(not NANO_DIRECTORY.is_dir(), reason="the built-in model is not here")
@pytest.mark.parametrize(
    ("layout", "kl", "loss"), [("fp8", 0.022, 0.0275), ("nvfp4", 0.035, 0.0955)]
)
def test_the_built_in_model_is_quantized_and_says_how_far_it_moved(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    layout: str,
    kl: float,
    loss: float,
) -> None:
    """0.014 and 0.028 nats; experts of one layer in a wrong order would be 0.037 to 0.15."""
    out = tmp_path / "out"
    call = ["dgemma", "quantize", "nano", str(out), "--to", layout, "--json"]
    monkeypatch.setattr(sys, "argv", call)
    with pytest.raises(SystemExit) as caught:
        main()
    assert not caught.value.code
    report = json.loads(capsys.readouterr().out)
    found = report["agreement"]
    assert 0 < found["kl"] < kl and found["top_1"] > 0.9
    assert all(0.9 * loss < each["relative"] < loss for each in report["losses"])
    assert report["bytes"] == sum(len(kind[2]) for kind in tensor_bytes(out).values())
    assert (out / "tokenizer.json").read_bytes() == (NANO_DIRECTORY / "tokenizer.json").read_bytes()
    monkeypatch.setattr(sys, "argv", [*call[:-2], "int3"])
    with pytest.raises(SystemExit) as caught:
        main()
    assert caught.value.code == 2
    assert "--to 'int3' is not known; use nvfp4 or fp8" in capsys.readouterr().err
