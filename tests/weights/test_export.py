"""What is exported is whole: adapters merged, a tower for those who want one, nothing lost."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import DiffusionGemmaForBlockDiffusion

from dgemma.weights.load import load_model
from dgemma.weights.lora import merge, new_adapter
from dgemma.weights.lora_files import save_adapter
from dgemma.weights.names import stored_names
from dgemma.weights.save import blank_vision, export, save_checkpoint, save_int8
from tests.command import Call, caller
from tests.weights.sample import CONFIG, SIBLING, tensor_bytes


@pytest.fixture
def call(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Call:
    return caller(monkeypatch, capsys, ["export"])


def test_the_released_layout_stays_as_it_is(single: Path, tmp_path: Path) -> None:
    export(single, tmp_path)
    assert tensor_bytes(tmp_path) == tensor_bytes(single)


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_eight_bits_become_floats(dtype: torch.dtype | None, single: Path, tmp_path: Path) -> None:
    save_int8(load_model(single), tmp_path / "int8")
    export(tmp_path / "int8", tmp_path / "plain", dtype=dtype)
    expected = load_model(tmp_path / "int8", dtype=dtype).model.state_dict()
    loaded = load_model(tmp_path / "plain")
    assert loaded.config.dtype == str(dtype or torch.float32).removeprefix("torch.")
    for name, weight in loaded.model.state_dict().items():
        assert torch.equal(weight, expected[name]), name
    assert loaded.vision.keys() == blank_vision(CONFIG).keys()
    assert any(tensor.any() for tensor in loaded.vision.values())


def test_a_tower_that_is_not_there_is_written_as_zeros(single: Path, tmp_path: Path) -> None:
    checkpoint = load_model(single)
    save_checkpoint(replace(checkpoint, vision={}), tmp_path / "text")
    export(tmp_path / "text", tmp_path / "whole")
    assert tensor_bytes(tmp_path / "whole").keys() == stored_names(CONFIG).keys()
    assert not any(tensor.any() for tensor in load_model(tmp_path / "whole").vision.values())
    _, info = DiffusionGemmaForBlockDiffusion.from_pretrained(
        tmp_path / "whole", output_loading_info=True
    )
    assert not info["missing_keys"] and not info["unexpected_keys"]


def test_a_config_without_a_tower_gets_none() -> None:
    assert blank_vision(replace(SIBLING, vision=None)) == {}


def test_an_adapter_is_merged(single: Path, tmp_path: Path) -> None:
    model = load_model(single).model
    adapter = new_adapter(model, ["q_proj"], rank=2, alpha=4, seed=0)
    for pair in adapter.pairs.values():
        pair.b_OR.fill_(0.1)
    save_adapter(adapter, tmp_path / "adapter")
    export(single, tmp_path / "merged", adapter=tmp_path / "adapter")
    plain = model.layers[0].self_attn.q_proj.weight.clone()
    expected = merge(model, adapter).state_dict()
    loaded = load_model(tmp_path / "merged").model.state_dict()
    assert not torch.equal(loaded["layers.0.self_attn.q_proj.weight"], plain)
    assert all(torch.equal(weight, expected[name]) for name, weight in loaded.items())


def test_the_command_writes_and_says_where(call: Call, single: Path, tmp_path: Path) -> None:
    target = tmp_path / "there"
    assert call(single, target, "--dtype", "bfloat16") == (0, f"{target}\n", "")
    assert load_model(target).model.norm.weight.dtype == torch.bfloat16
    code, _, error = call(single, target)
    assert code == 2 and "already holds a checkpoint" in error
    assert load_model(target).model.norm.weight.dtype == torch.bfloat16
    assert call(single, target, "--overwrite")[0] == 0
    assert load_model(target).model.norm.weight.dtype == torch.float32


def test_a_model_is_not_written_over_itself(call: Call, mine: Path) -> None:
    before = {path.name: path.read_bytes() for path in mine.iterdir()}
    code, _, error = call(mine, mine, "--overwrite")
    assert code == 2 and "is the model itself" in error
    assert {path.name: path.read_bytes() for path in mine.iterdir()} == before


def test_another_type_is_refused_before_any_work(call: Call, tmp_path: Path) -> None:
    code, _, error = call("never/loaded", tmp_path, "--dtype", "int8")
    assert code == 2 and "use auto, float32, bfloat16, float16" in error
    assert not list(tmp_path.iterdir())
