"""The released quantized layouts are read exactly, and refused by name where they are not whole."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dgemma.config import load_config
from dgemma.errors import CheckpointError, ConfigError
from dgemma.quant import nvfp4
from dgemma.weights.files import read_headers
from dgemma.weights.load import load_model
from dgemma.weights.names import check_names, stored_names
from dgemma.weights.quant_schemes import FP8, NVFP4, QuantScheme, expert_slices, read_scheme
from dgemma.weights.quantized_tensors import open_checkpoint
from tests.weights.packed import COMPRESSED, MODELOPT, SMALL, Writer, e2m1, e4m3
from tests.weights.sample import SHARED, our_logits, some_ids

LAYOUTS = ["nvfp4", "fp8"]
EXPERT = "model.decoder.layers.1.experts.2.up_proj"
BYTES = {"U8": 1, "F8_E4M3": 1, "F32": 4, "BF16": 2}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_weight_is_that_of_the_formats_definition(
    tmp_path: Path, layout: str, dtype: torch.dtype
) -> None:
    writer = Writer(layout)
    model = load_model(writer.save(tmp_path), dtype=dtype, verify=True).model
    weights = model.state_dict()
    assert {"model.decoder." + name for name in weights} == writer.values.keys()
    for name, value in writer.values.items():
        # Exact in float64, rounded once to float32, as the loader's product is.
        want = torch.from_numpy(value).float().to(dtype)
        assert torch.equal(weights[name.removeprefix("model.decoder.")], want), name


@pytest.mark.parametrize("layout", LAYOUTS)
def test_by_default_weights_take_the_type_of_those_beside_them(tmp_path: Path, layout: str) -> None:
    checkpoint = load_model(Writer(layout).save(tmp_path))
    assert {w.dtype for w in checkpoint.model.state_dict().values()} == {torch.bfloat16}
    logits = our_logits(checkpoint.model, some_ids(9), some_ids(8, 1))
    assert logits.isfinite().all()


def test_four_bits_under_a_scale_are_exact_in_bfloat16() -> None:
    codes = torch.arange(16, dtype=torch.uint8)
    scales = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    values = nvfp4.unpack(codes)[::2]
    assert np.array_equal(values.numpy(), e2m1(codes.numpy()))
    assert np.array_equal(scales.numpy(), e4m3(np.arange(127, dtype=np.uint8)))
    products = values[:, None] * scales
    assert torch.equal(products.bfloat16().float(), products)


def test_four_bit_numbers_are_the_nearest_and_ties_are_even() -> None:
    values = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    x = torch.linspace(-6, 6, 16 * 300)
    packed = nvfp4.quantize(x[None], torch.tensor(1 / 448))
    # The factor and the groups' largest values make scales that are not one: compare in place.
    whole = packed.dequantize()[0].double().numpy()
    step = np.repeat(packed.scale_OG.float().numpy()[0], 16) / np.float32(448)
    sign = np.sign(x.numpy())
    grid = sign[:, None] * values[None] * step[:, None].astype(float)
    best = np.abs(x.double().numpy()[:, None] - grid).min(1)
    assert np.abs(whole - x.double().numpy()) == pytest.approx(best, abs=1e-6)
    halves = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0] * 2)
    even = nvfp4.quantize(halves[None], torch.tensor(1.0))
    assert nvfp4.unpack(even.values_OI)[0, :8].tolist() == [0, 1, 1, 2, 2, 4, 4, 6]


def damaged(layout: str, change: Callable[[dict[str, torch.Tensor]], object]) -> Writer:
    writer = Writer(layout)
    change(writer.stored)
    return writer


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda t: t.pop(EXPERT + ".weight_scale"), f"it lacks {EXPERT}.weight_scale"),
        (
            lambda t: [t.pop(name) for name in list(t) if name.startswith(EXPERT)],
            f"it lacks {EXPERT}.weight",
        ),
        (
            lambda t: t.update({EXPERT + ".weight_scale": t[EXPERT + ".weight_scale"][:-1]}),
            f"not as they should be {EXPERT}.weight_scale",
        ),
        (
            lambda t: t.update({EXPERT + ".weight_scale": t[EXPERT + ".weight_scale"].double()}),
            f"{EXPERT}.weight_scale is stored as F64",
        ),
        (
            lambda t: t.update({"model.decoder.norm.input_scale": torch.ones(())}),
            "nothing belongs to model.decoder.norm.input_scale",
        ),
        (
            lambda t: t.update({"model.decoder.extra.weight": torch.ones(2).bfloat16()}),
            "it has the unknown model.decoder.extra.weight",
        ),
        (
            lambda t: t.update(
                {
                    name.replace("experts.2", "experts.4"): t[name].clone()
                    for name in list(t)
                    if ".experts.2." in name
                }
            ),
            "a model of 4 experts has no model.decoder.layers.0.experts.4.down_proj.weight",
        ),
        (
            lambda t: t[EXPERT + ".weight_scale"].view(torch.uint8).fill_(0xFF),
            f"{EXPERT}.weight_scale should hold positive numbers",
        ),
    ],
)
def test_what_is_not_whole_is_refused_by_name(
    tmp_path: Path, layout: str, change: Any, sentence: str
) -> None:
    directory = damaged(layout, change).save(tmp_path)
    with pytest.raises(CheckpointError) as caught:
        load_model(directory)
    assert sentence in str(caught.value)


def test_the_factor_and_the_input_scale_of_four_bits_are_required(tmp_path: Path) -> None:
    for ending in (".weight_scale_2", ".input_scale"):
        with pytest.raises(CheckpointError, match=f"it lacks {EXPERT}{ending}"):
            load_model(damaged("nvfp4", lambda t: t.pop(EXPERT + ending)).save(tmp_path))  # noqa: B023


def test_nan_among_eight_bit_numbers_is_refused(tmp_path: Path) -> None:
    def spoil(tensors: dict[str, torch.Tensor]) -> None:
        tensors[EXPERT + ".weight"].view(torch.uint8)[3, 3] = 0x7F

    with pytest.raises(CheckpointError, match=f"{EXPERT}.weight holds NaN"):
        load_model(damaged("fp8", spoil).save(tmp_path))


def test_without_its_config_a_packed_checkpoint_is_refused(tmp_path: Path) -> None:
    directory = Writer("nvfp4").save(tmp_path)
    raw = json.loads((directory / "config.json").read_text())
    del raw["quantization_config"]
    (directory / "config.json").write_text(json.dumps(raw))
    with pytest.raises(CheckpointError, match="stored as"):
        load_model(directory)
    # Older writers say it in a file of its own.
    said = {"quant_algo": "NVFP4", "group_size": 16, "kv_cache_quant_algo": "FP8"}
    said_file = {"producer": {"name": "modelopt"}, "quantization": {**said, "exclude_modules": []}}
    (directory / "hf_quant_config.json").write_text(json.dumps(said_file))
    assert load_model(directory).config == SMALL


@pytest.mark.parametrize(
    ("said", "sentence"),
    [
        ({**MODELOPT, "quant_algo": "W4A8_AWQ"}, "quant_algo is 'W4A8_AWQ'"),
        ({**MODELOPT, "svd_rank": 8}, "does not know svd_rank"),
        ({**COMPRESSED, "format": "nvfp4-pack-quantized"}, "format is 'nvfp4-pack-quantized'"),
        ({**COMPRESSED, "transform_config": {"r1": {}}}, "transform_config is set"),
        ({**COMPRESSED, "config_groups": None}, "config_groups is missing"),
        (
            {**COMPRESSED, "config_groups": {"g": {"weights": {"strategy": "block"}}}},
            "g.weights has {'strategy': 'block'}; this build reads {'strategy': 'channel'}",
        ),
        ({"quant_method": "gptq"}, "quant_method is 'gptq'"),
        ([], "must be an object, not a list"),
    ],
)
def test_other_layouts_are_refused_by_name(tmp_path: Path, said: Any, sentence: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": said}))
    with pytest.raises(ConfigError) as caught:
        read_scheme(tmp_path)
    assert sentence in str(caught.value)


# --- the released ones at their true size, in files of holes


def released(
    directory: Path, scheme: QuantScheme, said: dict[str, Any]
) -> dict[str, tuple[str, Any]]:
    """Write a checkpoint of holes with all names of a release; its types and shapes by name."""
    raw = json.loads((SHARED / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**raw, "quantization_config": said}))
    tensors: dict[str, tuple[str, Any]] = {}
    for name, entry in stored_names(load_config(directory)).items():
        modules = expert_slices(name, entry.shape) or {name.removesuffix(".weight"): entry.shape}
        for module, shape in modules.items():
            if scheme.is_packed(module):
                beside = scheme.tensors(shape).items()
                tensors |= {module + end: (want.dtypes[0], want.shape) for end, want in beside}
            else:
                tensors[name] = ("BF16", entry.shape)
    names = list(tensors)
    shards = [names[start : start + 8000] for start in range(0, len(names), 8000)]
    files = {f"model-{i:05d}-of-{len(shards):05d}.safetensors": s for i, s in enumerate(shards, 1)}
    for file, inside in files.items():
        write_holes(directory / file, {name: tensors[name] for name in inside})
    weight_map = {name: file for file, inside in files.items() for name in inside}
    index = directory / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": weight_map}))
    return tensors


def write_holes(path: Path, tensors: dict[str, tuple[str, Any]]) -> None:
    header, position = {}, 0
    for name, (dtype, shape) in tensors.items():
        stop = position + BYTES[dtype] * int(np.prod(shape))
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [position, stop]}
        position = stop
    text = json.dumps(header).encode()
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + position)


@pytest.mark.skipif(not SHARED.is_dir(), reason="the released config.json is not here")
@pytest.mark.skipif(sys.platform != "linux", reason="needs sparse files")
@pytest.mark.parametrize(
    ("scheme", "said", "packed"),
    [(NVFP4, MODELOPT, 30 * 128 * 3), (FP8, COMPRESSED, 11_725)],
    ids=LAYOUTS,
)
def test_the_released_names_and_sizes_are_read(
    tmp_path: Path, scheme: QuantScheme, said: dict[str, Any], packed: int
) -> None:
    tensors = released(tmp_path, scheme, said)
    stored = read_headers(tmp_path, BYTES)
    is_packed = [n for n in stored if n.endswith(".weight") and stored[n].dtype == scheme.packed]
    assert len(is_packed) == packed
    if scheme is NVFP4:  # as NVIDIA's index says
        assert len(tensors) == 47_067
        assert sum(tensor.num_bytes for tensor in stored.values()) == 18_818_050_776
    config = load_config(tmp_path)
    opened = open_checkpoint(tmp_path, config)
    assert len(check_names(config, opened.stored, tmp_path)) == 1047
    last = opened.stored["model.decoder.layers.29.experts.gate_up_proj"]
    assert last.shape == (128, 1408, 2816)
