"""Weights in four to six bits: packed and back, exact products, strict files, the same answers."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import Tensor

from dgemma.backends.cpu import Int8Experts, int8_experts, int8_grouped
from dgemma.engine import Engine, SamplingParams
from dgemma.errors import CheckpointError, UsageError
from dgemma.quant import quantize_int8
from dgemma.weights import inference
from dgemma.weights.int_layout import (
    GROUP,
    INT8,
    PLANE_BITS,
    Bits,
    GroupQuantized,
    pack_planes,
    quantize_groups,
    to_int_layout,
    unpack_planes,
)
from dgemma.weights.load import load_model
from dgemma.weights.names import stored_names
from dgemma.weights.save import export, save_int8
from recipes.nano import ship
from tests.weights.sample import CONFIG, header
from tests.weights.test_int_layout import INDEX, change, check_shorter_scale, refused, shard

UP = "model.decoder.layers.0.mlp.up_proj.weight"
DOWN = "model.decoder.layers.0.mlp.down_proj.weight"  # 24 inputs, which are no groups of 32
EXPERTS = "model.decoder.layers.1.experts.gate_up_proj"
ROUTER = "model.decoder.layers.1.router.proj.weight"
NORM = "model.decoder.norm.weight"
SMALL = Bits(experts=4, rest=6)
Tensors = dict[str, Tensor]


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.fixture
def stored(single: Path, tmp_path: Path) -> Path:
    """A checkpoint in few bits, in one shard, free to be damaged."""
    save_int8(load_model(single), tmp_path / "few", bits=SMALL)
    return tmp_path / "few"


def whole_slowly(planes: Tensor, factor: Tensor) -> Tensor:
    """What packed numbers stand for, bit by bit in the words of the format."""
    bits, rows, num_bytes = planes.shape
    weight = np.zeros((rows, 8 * num_bytes), np.float64)
    for row in range(rows):
        for i in range(8 * num_bytes):
            at = [(int(planes[k, row, i // 8]) >> (i % 8)) & 1 for k in range(bits)]
            number = sum(bit << k for k, bit in enumerate(at)) - 2 ** (bits - 1)
            weight[row, i] = number * float(factor[row, i // 32])
    return torch.from_numpy(weight)


# --- numbers


@given(
    bits=st.integers(1, 8),
    rows=st.lists(st.integers(0, 3), max_size=2),
    count=st.integers(1, 70),
    seed=st.integers(0, 1000),
)
def test_what_is_packed_comes_back(bits: int, rows: list[int], count: int, seed: int) -> None:
    half = 2 ** (bits - 1)
    numbers = torch.randint(-half, half, (*rows, count), generator=generator(seed)).to(torch.int8)
    planes = pack_planes(numbers, bits)
    assert planes.dtype == torch.uint8 and planes.shape == (bits, *rows, -(-count // 8))
    found = unpack_planes(planes, count)
    assert found.dtype == torch.int8 and torch.equal(found, numbers)


@pytest.mark.parametrize("bits", [*PLANE_BITS, 8])
def test_products_are_exact_and_as_the_format_says(bits: int) -> None:
    weight = 0.02 * torch.randn(5, 2 * GROUP, generator=generator(bits))
    numbers, factor = quantize_groups(weight, bits)
    whole = GroupQuantized(numbers, factor).dequantize()
    assert whole.dtype == torch.float32
    assert torch.equal(whole.double(), whole_slowly(pack_planes(numbers, bits), factor))


@given(
    shape=st.lists(st.integers(1, 4), min_size=1, max_size=2),
    seed=st.integers(0, 1000),
    size=st.sampled_from([1e-3, 0.02, 1.0, 1e4]),
    bits=st.sampled_from(PLANE_BITS),
)
def test_a_group_is_as_near_as_its_largest_value_lets_it_be(
    shape: list[int], seed: int, size: float, bits: int
) -> None:
    weight = size * torch.randn(*shape, 2 * GROUP, generator=generator(seed))
    quantized = quantize_groups(weight, bits)
    assert quantized.values.shape == weight.shape
    assert quantized.scale.shape == (*shape, 2) and quantized.scale.dtype == torch.float16
    whole = quantized.dequantize()
    groups, errors = (x.view(-1, GROUP) for x in (weight, whole - weight))
    # As if the largest value were the last step of all; what cutting it off gains comes on top.
    step = groups.abs().amax(-1) / 2 ** (bits - 1)
    assert (errors.norm(dim=-1) < 0.7 * GROUP**0.5 * step).all()
    assert errors.norm() < 0.36 * GROUP**0.5 * step.norm()
    # And what is stored is stored again as it is.
    again = quantize_groups(whole, bits)
    assert torch.equal(again.values, quantized.values)
    assert torch.equal(again.scale, quantized.scale)


def test_cutting_off_the_largest_value_pays_where_one_stands_out() -> None:
    weight = torch.randn(64, GROUP, generator=generator(0))
    weight[:, 0] = 4.0
    numbers, factor = quantize_groups(weight, 4)
    assert (factor < 0).all(), "the largest takes the side with one number more"
    assert (factor.abs() < 0.5 * (1 - 1e-3)).float().mean() > 0.2
    plain = GroupQuantized(
        (weight / 0.5).round().clamp(-8, 7).to(torch.int8), torch.full((64, 1), 0.5)
    )
    assert (GroupQuantized(numbers, factor).dequantize() - weight).norm() < (
        plain.dequantize() - weight
    ).norm()


def test_a_sign_in_the_factor_pays() -> None:
    weight = torch.randn(4096, GROUP, generator=generator(1))
    error = (quantize_groups(weight, 4).dequantize() - weight).norm()
    best_R1 = torch.full((len(weight), 1), torch.inf)
    for steps in torch.linspace(6.5, 11, 19):  # that the largest value would be, without one
        factor_R1 = (weight.abs().amax(-1, keepdim=True) / steps).half().float()
        whole = (weight / factor_R1).round().clamp(-8, 7) * factor_R1
        best_R1 = best_R1.minimum((whole - weight).norm(dim=-1, keepdim=True))
    assert error < 0.96 * best_R1.norm()


def test_groups_of_zeros_and_the_smallest_numbers_stay_finite() -> None:
    weight = torch.zeros(3, GROUP)
    weight[1, 2], weight[2, 0] = 1e-30, 3e5
    numbers, factor = quantize_groups(weight, 4)
    assert factor.isfinite().all() and (factor != 0).all()
    assert not numbers[:2].any()
    assert GroupQuantized(numbers, factor).dequantize()[2, 0] / 3e5 == pytest.approx(1, rel=1e-3)


def test_what_cannot_be_stored_so_is_refused_by_name() -> None:
    wide = torch.ones(3, GROUP)
    wide[2, 1] = float("nan")
    with pytest.raises(CheckpointError, match=r"some\.weight holds NaN.*stored in 6 bits"):
        to_int_layout({"some.weight": wide}, SMALL)
    wide[2, 1] = 1e7
    with pytest.raises(CheckpointError, match=r"some\.weight holds values beyond.*store it in 8"):
        to_int_layout({"some.weight": wide}, SMALL)
    assert to_int_layout({"some.weight": wide}, INT8)["some.weight"].dtype == torch.int8


@pytest.mark.parametrize("bits", [0, 3, 7, 16])
def test_other_bits_are_refused(bits: int) -> None:
    for bad in (lambda: Bits(experts=bits), lambda: Bits(rest=bits)):
        with pytest.raises(UsageError, match=f"stored in 4, 5, 6 or 8 bits, not in {bits}"):
            bad()


# --- files


def test_files_hold_planes_beside_the_factors_of_their_groups(stored: Path) -> None:
    tensors, entries = load_file(shard(stored)), stored_names(CONFIG)
    for name, entry in entries.items():
        tensor, shape = tensors.pop(name), entry.shape
        if len(shape) < 2:
            assert tensor.dtype == torch.float32, name
        elif shape[-1] % GROUP or ".router." in name:
            assert tensor.dtype == torch.int8 and tensor.shape == shape, name
            assert tensors.pop(f"{name}.row_scale").shape == shape[:-1]
        else:
            bits = 4 if ".experts." in name else 6
            assert tensor.dtype == torch.uint8, name
            assert tensor.shape == (bits, *shape[:-1], shape[-1] // 8), name
            factor = tensors.pop(f"{name}.group_scale")
            assert factor.dtype == torch.float16
            assert factor.shape == (*shape[:-1], shape[-1] // GROUP)
    assert not tensors
    raw = json.loads((stored / INDEX).read_text())
    buffers = ("scalar", "std_bias", "std_scale")
    assert raw["metadata"]["total_parameters"] == sum(
        np.prod(entry.shape) for name, entry in entries.items() if not name.endswith(buffers)
    )


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_what_is_loaded_is_what_is_stored(stored: Path, dtype: torch.dtype | None) -> None:
    tensors = load_file(shard(stored))
    loaded = load_model(stored, dtype=dtype, verify=True).model.state_dict()
    up = whole_slowly(tensors[UP], tensors[f"{UP}.group_scale"]).float()
    assert torch.equal(loaded["layers.0.mlp.up_proj.weight"], up.to(dtype or torch.float32))
    for expert, have in enumerate(loaded["layers.1.experts.gate_up_proj"]):
        factor = tensors[f"{EXPERTS}.group_scale"][expert]
        want = whole_slowly(tensors[EXPERTS][:, expert], factor).float()
        assert torch.equal(have, want.to(have.dtype))
    for name in (DOWN, ROUTER):
        want = tensors[name] * tensors[f"{name}.row_scale"][:, None]
        assert torch.equal(
            loaded[name.removeprefix("model.decoder.")], want.to(dtype or want.dtype)
        )


@pytest.mark.parametrize(
    "bits", [Bits(experts=e, rest=r) for e in (*PLANE_BITS, 8) for r in (5, 8)]
)
def test_storing_again_changes_no_byte(bits: Bits, single: Path, tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    save_int8(load_model(single), first, bits=bits)
    save_int8(load_model(first), second, bits=bits)
    for path in first.iterdir():
        assert path.read_bytes() == (second / path.name).read_bytes(), path.name


def test_more_bits_are_nearer(single: Path, tmp_path: Path) -> None:
    plain = load_model(single).model.state_dict()
    lost = []
    for bits in (*PLANE_BITS, 8):
        save_int8(load_model(single), tmp_path / str(bits), bits=Bits(experts=bits, rest=bits))
        found = load_model(tmp_path / str(bits)).model.state_dict()
        name = "layers.1.experts.gate_up_proj"
        lost.append(float((found[name] - plain[name]).norm() / plain[name].norm()))
    assert lost == sorted(lost, reverse=True)
    assert [round(x, 2) for x in lost] == [0.08, 0.04, 0.02, 0.01]


def test_the_engine_answers_as_with_the_plain_checkpoint_of_these_weights(
    checkpoint: Path, tmp_path: Path
) -> None:
    few, plain = tmp_path / "few", tmp_path / "plain"
    save_int8(load_model(checkpoint), few, bits=SMALL, tokenizer_from=checkpoint)
    assert header(shard(few))[0]["model.decoder.embed_tokens.weight"]["dtype"] == "U8"
    export(few, plain)
    weights, want = (load_model(path).model.state_dict() for path in (few, plain))
    assert weights.keys() == want.keys()
    assert all(torch.equal(weight, want[name]) for name, weight in weights.items())
    engines = [Engine.load(path, device="cpu", dtype="float32") for path in (few, plain)]
    answers = [engine.generate("Hi", SamplingParams(seed=3, max_tokens=24)) for engine in engines]
    assert answers[0].text == answers[1].text and answers[0].steps == answers[1].steps


def test_8_bit_products_round_what_the_numbers_stand_for(
    stored: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = load_model(stored).model
    small = load_model(stored, quant="int8").model
    experts = small.layers[1].experts
    assert isinstance(experts, Int8Experts)
    x_TD = torch.randn(6, CONFIG.hidden_size, generator=generator(0))
    ids_TK = torch.tensor([[0, 1], [1, 2], [2, 3], [3, 0], [0, 2], [1, 3]])
    whole = plain.layers[1].experts
    products = [
        int8_grouped(quantize_int8(weight)) for weight in (whole.gate_up_proj, whole.down_proj)
    ]
    share_TK = torch.rand(6, 2, generator=generator(1))
    want_TD = int8_experts(x_TD, ids_TK, share_TK, *products)
    assert torch.equal(experts(x_TD, ids_TK, share_TK), want_TD)
    monkeypatch.setattr(inference, "time_int8", lambda *_: inference.Timing(1.0, 3.0))
    monkeypatch.setattr(torch.cpu, "_is_vnni_supported", lambda: True)
    found = inference.choose_quant("auto", stored, torch.device("cpu"), torch.float32)
    assert found.quant == "int8"


def test_shipping_takes_the_most_bits_that_fit(
    single: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shipped = [ship.ship(single, tmp_path / "one", [bits]) for bits in ship.LADDER]
    sizes = [one.total for one in shipped]
    assert sizes == sorted(sizes, reverse=True) and len(set(sizes)) == len(sizes)
    for one in shipped:
        monkeypatch.setattr(ship, "MAX_BYTES", one.total)
        assert ship.ship(single, tmp_path / "most") == one
    monkeypatch.setattr(ship, "MAX_BYTES", sizes[-1] - 1)
    with pytest.raises(CheckpointError, match=f"{sizes[-1]} bytes, {one.bits}, more than"):
        ship.ship(single, tmp_path / "none")
    assert not (tmp_path / "none").exists()


@pytest.mark.parametrize("options", [[], ["--bits", "5", "--expert-bits", "4"]])
def test_the_command_says_what_it_shipped(
    options: list[str],
    single: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("sys.argv", ["ship", str(single), "--into", str(tmp_path / "n"), *options])
    ship.main()
    said = "experts in 4 bits, the rest in 5" if options else "experts in 8 bits, the rest in 8"
    assert capsys.readouterr().out.endswith(f"in all, of at most 32,000,000; {said}\n")
    assert load_model(tmp_path / "n").model.config.num_experts == CONFIG.num_experts


def test_half_of_the_bits_is_no_answer(single: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["ship", str(single), "--bits", "6"])
    with pytest.raises(UsageError, match="--bits and --expert-bits, or neither"):
        ship.main()


# --- refusals


@pytest.mark.parametrize("planes", [3, 7])
def test_another_number_of_planes_is_refused(planes: int, stored: Path) -> None:
    def cut(tensors: Tensors) -> None:
        tensors[UP] = torch.zeros(planes, *tensors[UP].shape[1:], dtype=torch.uint8)

    message = refused(change(stored, cut))
    assert "should have 4, 5 or 6 planes of two dimensions or more" in message
    assert f"but not so {UP} ([{planes}, 24, 4])" in message


def test_rows_that_are_no_groups_are_refused(stored: Path) -> None:
    change(stored, lambda t: t.update({UP: t[UP][..., 1:].contiguous()}))
    assert f"whose rows are multiples of 4 bytes, but not so {UP} ([6, 24, 3])" in refused(stored)


@pytest.mark.parametrize("shape", [(), (4,), (4, 4)])
def test_planes_of_less_than_two_dimensions_are_refused(shape: Any, stored: Path) -> None:
    change(stored, lambda t: t.update({UP: torch.zeros(shape, dtype=torch.uint8)}))
    assert f"but not so {UP} ({list(shape)})" in refused(stored)


def test_planes_without_factors_are_refused(stored: Path) -> None:
    change(stored, lambda t: t.pop(f"{UP}.group_scale"))
    assert f"it lacks {UP}.group_scale" in refused(stored)


def test_factors_without_planes_are_refused(stored: Path) -> None:
    change(stored, lambda t: t.pop(UP))
    assert f"there is no packed tensor for {UP}.group_scale" in refused(stored)


def test_planes_with_the_scales_of_rows_are_refused(stored: Path) -> None:
    change(stored, lambda t: t.update({f"{UP}.row_scale": torch.ones(24)}))
    assert f"there is no 8-bit tensor for {UP}.row_scale" in refused(stored)


@pytest.mark.parametrize("name", [UP, EXPERTS])
def test_factors_of_another_shape_are_refused(name: str, stored: Path) -> None:
    check_shorter_scale(stored, f"{name}.group_scale", "F16")


def test_factors_of_another_type_are_refused(stored: Path) -> None:
    scale = f"{UP}.group_scale"
    change(stored, lambda t: t.update({scale: t[scale].float()}))
    assert f"{scale} (F32 [24, 1], not F16 [24, 1])" in refused(stored)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 0.0])
def test_factors_that_are_none_are_refused(value: float, stored: Path) -> None:
    change(stored, lambda t: t[f"{UP}.group_scale"][3:4].fill_(value))
    assert f"{UP}.group_scale should hold numbers other than zero" in refused(stored)


def test_planes_of_another_shape_than_the_configs_are_refused(stored: Path) -> None:
    def shorten(tensors: Tensors) -> None:
        tensors[UP] = tensors[UP][:, 1:].contiguous()
        tensors[f"{UP}.group_scale"] = tensors[f"{UP}.group_scale"][1:].contiguous()

    assert f"{UP} ([23, 32], not [24, 32])" in refused(change(stored, shorten))


def test_halves_are_no_weights_in_this_layout(stored: Path) -> None:
    change(stored, lambda t: t.update({NORM: t[NORM].half()}))
    assert f"what is not a scale should be F32, but not so {NORM} (F16)" in refused(stored)


def test_a_shard_cut_short_is_refused(stored: Path) -> None:
    shard(stored).write_bytes(shard(stored).read_bytes()[:-4])
    assert "is cut short" in refused(stored)


def test_planes_are_refused_in_the_released_layout(stored: Path) -> None:
    change(stored, lambda t: [t.pop(name) for name in list(t) if t[name].dtype == torch.int8])
    shard(stored).rename(stored / "model.safetensors")
    (stored / INDEX).unlink()
    assert "is stored as U8; this build reads BF16, F16, F32" in refused(stored)
