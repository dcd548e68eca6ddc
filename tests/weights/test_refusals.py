"""Every kind of damage is refused before any work, in a sentence that names the culprit."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from dgemma.errors import CheckpointError
from dgemma.weights.files import read_header
from dgemma.weights.load import load_model
from tests.weights.sample import header, write

NORM = "model.decoder.norm.weight"
FILE = "model.safetensors"
INDEX = "model.safetensors.index.json"
Tensors = dict[str, torch.Tensor]


def refused(directory: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        load_model(directory)
    message = str(caught.value)
    assert "\n" not in message
    return message


def change_tensors(directory: Path, change: Callable[[Tensors], Any]) -> None:
    tensors = load_file(directory / FILE)
    change(tensors)
    save_file(tensors, directory / FILE)


def change_header(path: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    raw, data = header(path)
    change(raw)
    write(path, raw, data)


def change_index(directory: Path, change: Callable[[dict[str, str]], Any]) -> None:
    raw = json.loads((directory / INDEX).read_text())
    change(raw["weight_map"])
    (directory / INDEX).write_text(json.dumps(raw))


def test_a_missing_tensor_is_named(mine: Path) -> None:
    change_tensors(mine, lambda tensors: tensors.pop(NORM))
    assert f"lacks {NORM}" in refused(mine)


def test_a_missing_encoder_layer_scalar_is_named(mine: Path) -> None:
    name = "model.encoder.language_model.layers.2.layer_scalar"
    change_tensors(mine, lambda tensors: tensors.pop(name))
    assert f"lacks {name}" in refused(mine)


def test_many_missing_tensors_are_named_in_part_and_counted(mine: Path) -> None:
    def drop(tensors: Tensors) -> None:
        for name in [name for name in tensors if ".layers.1." in name and "decoder" in name]:
            del tensors[name]

    message = refused(_changed(mine, drop))
    assert "model.decoder.layers.1.self_attn.q_proj.weight" in message
    assert re.search(r"and \d+ more", message)


def test_an_unknown_tensor_is_named(mine: Path) -> None:
    extra = {"model.decoder.layers.3.norm.weight": torch.zeros(3)}
    change_tensors(mine, lambda tensors: tensors.update(extra))
    assert "unknown model.decoder.layers.3.norm.weight" in refused(mine)


def test_a_value_projection_on_a_full_layer_is_unknown(mine: Path) -> None:
    name = "model.decoder.layers.2.self_attn.v_proj.weight"
    change_tensors(mine, lambda tensors: tensors.update({name: torch.zeros(16, 32)}))
    assert f"unknown {name}" in refused(mine)


def test_a_misshapen_tensor_is_named_with_both_shapes(mine: Path) -> None:
    change_tensors(mine, lambda tensors: tensors.update({NORM: torch.zeros(31)}))
    assert f"{NORM} ([31], not [32])" in refused(mine)


def test_a_transposed_tensor_of_the_right_size_is_misshapen(mine: Path) -> None:
    name = "model.decoder.layers.0.mlp.up_proj.weight"
    change_tensors(mine, lambda tensors: tensors.update({name: tensors[name].T.contiguous()}))
    assert f"{name} ([32, 24], not [24, 32])" in refused(mine)


def test_part_of_the_vision_tower_is_refused_by_what_is_missing(mine: Path) -> None:
    name = "model.encoder.vision_tower.std_scale"
    change_tensors(mine, lambda tensors: tensors.pop(name))
    message = refused(mine)
    assert name in message and "as a whole" in message


def test_vision_tensors_beside_a_config_without_vision_are_unknown(mine: Path) -> None:
    raw = json.loads((mine / "config.json").read_text())
    del raw["vision_config"]
    (mine / "config.json").write_text(json.dumps(raw))
    assert "unknown model.encoder.embed_vision" in refused(mine)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int8, torch.float64])
def test_another_type_is_refused_by_name(dtype: torch.dtype, mine: Path) -> None:
    change_tensors(mine, lambda tensors: tensors.update({NORM: tensors[NORM].to(dtype)}))
    message = refused(mine)
    assert NORM in message and "BF16, F16, F32" in message


@pytest.mark.parametrize("lost_bytes", [1, 4, 5000])
def test_a_truncated_file_is_named_with_its_first_lost_tensor(lost_bytes: int, mine: Path) -> None:
    path = mine / FILE
    raw, data = header(path)
    raw.pop("__metadata__")
    first_lost = min(
        (entry["data_offsets"][1], name)
        for name, entry in raw.items()
        if entry["data_offsets"][1] > len(data) - lost_bytes
    )[1]
    path.write_bytes(path.read_bytes()[:-lost_bytes])
    message = refused(mine)
    assert str(path) in message and first_lost in message and "cut short" in message


@pytest.mark.parametrize("length", [0, 3, 8, 100, 1000])
def test_a_file_cut_within_its_header_is_named(length: int, mine: Path) -> None:
    path = mine / FILE
    path.write_bytes(path.read_bytes()[:length])
    assert str(path) in refused(mine)


def test_a_file_with_bytes_behind_the_last_tensor_is_named(mine: Path) -> None:
    with (mine / FILE).open("ab") as file:
        file.write(b"more")
    message = refused(mine)
    assert FILE in message and "4 bytes after" in message


@pytest.mark.parametrize(
    "content",
    [
        b"garbage that is no header at all, and long enough to look like a file",
        b"\x10" + bytes(7) + b"not json at all!",
        b"\x02" + bytes(7) + b"[]",
        b"\x04" + bytes(7) + b"\xff\xfe\xfd\xfc",
        b"\x02" + bytes(7) + b"{}",
    ],
    ids=["garbage", "no json", "no object", "no utf-8", "empty"],
)
def test_a_garbage_header_is_named(content: bytes, mine: Path) -> None:
    (mine / FILE).write_bytes(content)
    assert str(mine) in refused(mine)


@pytest.mark.parametrize(
    "entry",
    [
        "F32",
        {"dtype": "F32", "shape": [32]},
        {"dtype": "F32", "shape": [32], "data_offsets": [0]},
        {"dtype": "F32", "shape": [-32], "data_offsets": [0, 128]},
        {"dtype": "F32", "shape": [True], "data_offsets": [0, 4]},
        {"dtype": "F32", "shape": [31], "data_offsets": [0, 128]},
        {"dtype": ["F32"], "shape": [32], "data_offsets": [0, 128]},
        {"dtype": "F32", "shape": 32, "data_offsets": [0, 128]},
        {"dtype": "F32", "shape": [32], "data_offsets": [128, 0]},
    ],
)
def test_a_malformed_header_entry_is_named(entry: Any, mine: Path) -> None:
    change_header(mine / FILE, lambda raw: raw.update({NORM: entry}))
    message = refused(mine)
    assert NORM in message and FILE in message


def test_a_tensor_listed_twice_in_one_header_is_named(tmp_path: Path) -> None:
    entry = '{"dtype":"F32","shape":[1],"data_offsets":[0,4]}'
    text = f'{{"a":{entry},"a":{entry}}}'.encode()
    (tmp_path / FILE).write_bytes(len(text).to_bytes(8, "little") + text + bytes(4))
    with pytest.raises(CheckpointError, match="lists 'a' more than once"):
        read_header(tmp_path / FILE)


@pytest.mark.parametrize("shift", [-4, 4])
def test_overlaps_and_gaps_between_tensors_are_refused(shift: int, tmp_path: Path) -> None:
    raw = {
        "first": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]},
        "second": {"dtype": "F32", "shape": [2], "data_offsets": [8 + shift, 16 + shift]},
    }
    write(tmp_path / FILE, raw, bytes(16 + shift))
    with pytest.raises(CheckpointError, match="second begins at byte"):
        read_header(tmp_path / FILE)


def test_an_index_that_names_a_missing_shard_is_refused(my_shards: Path) -> None:
    shard = sorted(my_shards.glob("model-*"))[1]
    shard.unlink()
    message = refused(my_shards)
    assert shard.name in message and INDEX in message


def test_an_index_that_names_a_tensor_its_shard_lacks_is_refused(my_shards: Path) -> None:
    shard = sorted(my_shards.glob("model-*"))[0].name
    change_index(my_shards, lambda weight_map: weight_map.update({"ghost.weight": shard}))
    message = refused(my_shards)
    assert f"ghost.weight in {shard}" in message


def test_a_tensor_its_index_does_not_list_is_refused(my_shards: Path) -> None:
    change_index(my_shards, lambda weight_map: weight_map.pop(NORM))
    message = refused(my_shards)
    assert f"does not list {NORM}" in message


def test_a_tensor_in_two_shards_is_refused(my_shards: Path) -> None:
    first, second = sorted(my_shards.glob("model-*"))[:2]
    tensors = load_file(second)
    name, tensor = next(iter(load_file(first).items()))
    save_file({**tensors, name: tensor}, second)
    message = refused(my_shards)
    assert f"two shards hold {name}" in message


@pytest.mark.parametrize("shard", ["../model.safetensors", "/etc/passwd", "", "..", 3])
def test_an_index_may_only_name_files_beside_it(shard: Any, my_shards: Path) -> None:
    change_index(my_shards, lambda weight_map: weight_map.update({NORM: shard}))
    assert repr(shard) in refused(my_shards)


@pytest.mark.parametrize("content", ["{", "[]", "{}", '{"weight_map": []}', '{"weight_map": {}}'])
def test_a_damaged_index_is_named(content: str, my_shards: Path) -> None:
    (my_shards / INDEX).write_text(content)
    assert INDEX in refused(my_shards)


def test_two_sets_of_weights_in_one_directory_are_refused(my_shards: Path, single: Path) -> None:
    (my_shards / FILE).write_bytes((single / FILE).read_bytes())
    message = refused(my_shards)
    assert f"both {FILE} and {INDEX}" in message


def test_shards_without_an_index_are_refused(my_shards: Path) -> None:
    (my_shards / INDEX).unlink()
    message = refused(my_shards)
    assert INDEX in message and "model-00001-of-" in message


def test_a_directory_without_weights_says_what_was_looked_for(mine: Path) -> None:
    (mine / FILE).unlink()
    message = refused(mine)
    assert FILE in message and INDEX in message and "download" in message


def test_a_directory_that_does_not_exist_is_named(tmp_path: Path) -> None:
    message = refused(tmp_path / "nowhere")
    assert str(tmp_path / "nowhere") in message and "config.json" in message


def test_a_weight_file_that_is_a_directory_is_not_one(mine: Path) -> None:
    (mine / FILE).unlink()
    (mine / FILE).mkdir()
    assert FILE in refused(mine)


@given(damage=st.lists(st.tuples(st.integers(0, 6000), st.integers(0, 255)), max_size=4))
def test_a_damaged_header_is_read_or_refused_but_never_trips_the_reader(
    damage: list[tuple[int, int]], single: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    content = bytearray((single / FILE).read_bytes())
    for position, byte in damage:
        content[position] = byte
    path = tmp_path_factory.getbasetemp() / "damaged.safetensors"
    path.write_bytes(content)
    try:
        tensors = read_header(path)
    except CheckpointError as error:
        assert str(path) in str(error)
    else:
        assert all(tensor.stop <= len(content) for tensor in tensors.values())


@pytest.mark.parametrize("number", ["1e999", "9" * 5000, "NaN", "4.0"])
def test_numbers_that_are_no_counts_are_refused(number: str, tmp_path: Path) -> None:
    text = f'{{"a":{{"dtype":"F32","shape":[1],"data_offsets":[0,{number}]}}}}'.encode()
    (tmp_path / FILE).write_bytes(len(text).to_bytes(8, "little") + text + bytes(4))
    with pytest.raises(CheckpointError, match=FILE):
        read_header(tmp_path / FILE)


def _changed(directory: Path, change: Callable[[Tensors], Any]) -> Path:
    change_tensors(directory, change)
    return directory
