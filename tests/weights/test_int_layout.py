"""Weights in eight bits: near the originals, exact products, strict files, and nobody misled."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import DiffusionGemmaForBlockDiffusion

from dgemma.errors import CheckpointError, UsageError
from dgemma.quant import quantize_int8
from dgemma.weights.int_layout import to_int_layout
from dgemma.weights.load import Checkpoint, load_model, random_model
from dgemma.weights.names import stored_names
from dgemma.weights.save import save_checkpoint, save_int8
from tests.weights.sample import CONFIG, our_logits, some_ids, their_logits

INDEX = "int8.safetensors.index.json"
PLAIN_INDEX = "model.safetensors.index.json"
UP = "model.decoder.layers.0.mlp.up_proj.weight"
EXPERTS = "model.decoder.layers.1.experts.gate_up_proj"
NORM = "model.decoder.norm.weight"
SMALL_SHARDS = 20_000  # bytes
Tensors = dict[str, Tensor]


@pytest.fixture
def checkpoint(single: Path) -> Checkpoint:
    return load_model(single)


@pytest.fixture
def stored(checkpoint: Checkpoint, tmp_path: Path) -> Path:
    """A checkpoint in eight bits, in one shard, free to be damaged."""
    directory = tmp_path / "int8"
    save_int8(checkpoint, directory)
    return directory


def shard(directory: Path) -> Path:
    (path,) = directory.glob("*.safetensors")
    return path


def contents(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir()}


def change(directory: Path, change: Callable[[Tensors], Any]) -> Path:
    """Change the tensors of the one shard, and its index with them."""
    tensors = load_file(shard(directory))
    change(tensors)
    save_file(tensors, shard(directory))
    raw = json.loads((directory / INDEX).read_text())
    raw["weight_map"] = dict.fromkeys(tensors, shard(directory).name)
    (directory / INDEX).write_text(json.dumps(raw))
    return directory


def refused(directory: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        load_model(directory)
    message = str(caught.value)
    assert "\n" not in message and str(directory) in message
    return message


def check_shorter_scale(stored: Path, scale: str, kind: str) -> None:
    """Refuse scales of one row too few, by name and shape."""
    shape = list(load_file(shard(stored))[scale].shape)
    change(stored, lambda tensors: tensors.update({scale: tensors[scale][:-1].contiguous()}))
    assert f"{scale} ({kind} {[shape[0] - 1, *shape[1:]]}, not {kind} {shape})" in refused(stored)


# --- numbers


@given(
    shape=st.lists(st.integers(1, 9), min_size=2, max_size=3),
    seed=st.integers(0, 1000),
    size=st.sampled_from([1e-30, 1e-6, 0.02, 1.0, 1e30]),
)
def test_a_weight_comes_back_within_half_a_step(shape: list[int], seed: int, size: float) -> None:
    weight = size * torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    whole, scale = quantize_int8(weight)
    assert whole.dtype == torch.int8 and scale.dtype == torch.float32
    assert whole.shape == weight.shape and scale.shape == weight.shape[:-1]
    assert (whole.abs().amax(-1) == 127).all()
    steps = (weight.double() / scale.double()[..., None] - whole).abs()
    assert steps.max() <= 0.5 + 1e-4
    assert (scale <= weight.abs().amax(-1) / 127 * (1 + 2**-15)).all()


@given(seed=st.integers(0, 1000))
def test_products_are_exact_and_give_themselves_again(seed: int) -> None:
    weight = torch.randn(17, 33, generator=torch.Generator().manual_seed(seed))
    whole, scale = quantize_int8(weight)
    values = whole * scale[:, None]
    assert torch.equal(values.double(), whole.double() * scale.double()[:, None])
    again, its_scale = quantize_int8(values)
    assert torch.equal(again, whole) and torch.equal(its_scale, scale)


def test_rows_of_zeros_and_the_smallest_numbers_stay_finite() -> None:
    weight = torch.zeros(3, 4)
    weight[1, 2], weight[2, 0] = 1e-44, 3e38
    whole, scale = quantize_int8(weight)
    assert (scale > 0).all() and scale.isfinite().all()
    assert torch.equal(whole[0], torch.zeros(4, dtype=torch.int8))
    assert ((whole * scale[:, None])[2] / 3e38 - torch.eye(4)[0]).abs().max() < 1e-4


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_is_no_number_is_not_stored(value: float) -> None:
    weight = torch.ones(3, 4)
    weight[2, 1] = value
    with pytest.raises(CheckpointError, match=r"some\.weight holds NaN or infinity"):
        to_int_layout({"some.weight": weight})


# --- files


def test_files_hold_whole_numbers_beside_the_scales_of_their_rows(
    stored: Path, checkpoint: Checkpoint
) -> None:
    tensors = load_file(shard(stored))
    names = stored_names(CONFIG)
    large = {name for name, entry in names.items() if len(entry.shape) > 1}
    assert tensors.keys() == names.keys() | {f"{name}.row_scale" for name in large}
    for name, tensor in tensors.items():
        assert tensor.dtype == (torch.int8 if name in large else torch.float32), name
    experts = tensors[EXPERTS]
    assert tensors[f"{EXPERTS}.row_scale"].shape == experts.shape[:2] and experts.dim() == 3
    assert torch.equal(tensors[NORM], checkpoint.model.norm.weight)
    raw = json.loads((stored / INDEX).read_text())
    assert raw["metadata"]["total_parameters"] == sum(
        tensors[name].numel()
        for name in names
        if not name.endswith(("scalar", "std_bias", "std_scale"))
    )


@pytest.mark.parametrize("dtype", [None, torch.float32, torch.bfloat16])
def test_what_is_loaded_is_the_product(stored: Path, dtype: torch.dtype | None) -> None:
    tensors = load_file(shard(stored))
    loaded = load_model(stored, dtype=dtype, verify=True)
    for name, weight in loaded.model.state_dict().items():
        expected = tensors[f"model.decoder.{name}"].float()
        if expected.dim() > 1:
            expected = expected * tensors[f"model.decoder.{name}.row_scale"].unsqueeze(-1)
        assert weight.dtype == (dtype or torch.float32)
        assert torch.equal(weight, expected.to(weight.dtype)), name
    table = "model.encoder.vision_tower.patch_embedder.position_embedding_table"
    expected = tensors[table] * tensors[f"{table}.row_scale"].unsqueeze(-1)
    assert torch.equal(loaded.vision[table], expected)


def test_weights_stay_near_the_originals(stored: Path, checkpoint: Checkpoint) -> None:
    originals = checkpoint.model.state_dict()
    for name, weight in load_model(stored).model.state_dict().items():
        change = (weight - originals[name]).norm() / originals[name].norm()
        assert (0 < change < 0.01) if weight.dim() > 1 else change == 0, name


@pytest.mark.parametrize("max_shard_bytes", [1, SMALL_SHARDS, 10**9])
def test_storing_again_changes_no_byte(
    max_shard_bytes: int, checkpoint: Checkpoint, tmp_path: Path
) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    save_int8(checkpoint, first, max_shard_bytes=max_shard_bytes)
    save_int8(load_model(first), second, max_shard_bytes=max_shard_bytes)
    assert contents(first) == contents(second)
    sizes = [path.stat().st_size for path in first.glob("int8-*")]
    assert (len(sizes) == 1) == (max_shard_bytes == 10**9)
    if max_shard_bytes == SMALL_SHARDS:
        assert max(sizes) < SMALL_SHARDS + 10_000  # its header


def test_a_model_of_any_type_is_stored(single: Path, tmp_path: Path) -> None:
    halves = load_model(single, dtype=torch.bfloat16)
    save_int8(halves, tmp_path)
    loaded = load_model(tmp_path)
    assert loaded.config.dtype == "float32"
    assert torch.equal(loaded.model.norm.weight, halves.model.norm.weight.float())


def test_progress_counts_the_bytes_of_the_files(stored: Path) -> None:
    seen: list[tuple[int, int]] = []
    load_model(stored, on_tensor=lambda done, total: seen.append((done, total)))
    assert seen == sorted(seen) and seen[-1][0] == seen[-1][1]
    assert seen[-1][1] < sum(w.numel() for w in random_model(CONFIG, 0).state_dict().values()) * 1.2


def test_transformers_computes_alike_once_it_is_saved_in_the_released_layout(
    stored: Path, tmp_path: Path
) -> None:
    loaded = load_model(stored)
    save_checkpoint(loaded, tmp_path / "plain")
    theirs, info = DiffusionGemmaForBlockDiffusion.from_pretrained(
        tmp_path / "plain", output_loading_info=True
    )
    assert not info["missing_keys"] and not info["unexpected_keys"]
    ids, canvas = some_ids(29), some_ids(8, seed=1)
    ours = our_logits(loaded.model, ids, canvas)
    torch.testing.assert_close(ours, their_logits(theirs, ids, canvas), atol=1e-4, rtol=0)


def test_transformers_refuses_the_directory_itself(stored: Path) -> None:
    with pytest.raises(OSError, match=r"no file named model\.safetensors"):
        DiffusionGemmaForBlockDiffusion.from_pretrained(stored)


def test_a_checkpoint_is_kept_unless_told(stored: Path, checkpoint: Checkpoint) -> None:
    before = contents(stored)
    for save in (save_int8, save_checkpoint):
        with pytest.raises(UsageError, match=f"already holds a checkpoint.*{INDEX}"):
            save(checkpoint, stored)
    assert contents(stored) == before


def test_one_layout_leaves_nothing_of_the_other(stored: Path, checkpoint: Checkpoint) -> None:
    configs = {"config.json", "generation_config.json"}
    other = replace(checkpoint, model=random_model(CONFIG, 5))
    save_checkpoint(other, stored, max_shard_bytes=SMALL_SHARDS, overwrite=True)
    names = contents(stored).keys()
    assert PLAIN_INDEX in names and not [name for name in names if name.startswith("int8")]
    assert torch.equal(load_model(stored).model.norm.weight, other.model.norm.weight)
    save_int8(checkpoint, stored, overwrite=True)
    assert contents(stored).keys() == configs | {INDEX, "int8-00001-of-00001.safetensors"}
    assert torch.equal(load_model(stored).model.norm.weight, checkpoint.model.norm.weight)


# --- refusals


def test_whole_numbers_without_scales_are_refused(stored: Path) -> None:
    change(stored, lambda tensors: tensors.pop(f"{UP}.row_scale"))
    assert f"it lacks {UP}.row_scale" in refused(stored)


def test_scales_without_whole_numbers_are_refused(stored: Path) -> None:
    change(stored, lambda tensors: tensors.pop(UP))
    assert f"there is no 8-bit tensor for {UP}.row_scale" in refused(stored)


def test_scales_of_a_float_tensor_are_refused(stored: Path) -> None:
    change(stored, lambda tensors: tensors.update({UP: tensors[UP].float()}))
    assert f"there is no 8-bit tensor for {UP}.row_scale" in refused(stored)


@pytest.mark.parametrize("name", [UP, EXPERTS])
def test_scales_of_another_shape_are_refused(name: str, stored: Path) -> None:
    check_shorter_scale(stored, f"{name}.row_scale", "F32")


def test_one_scale_for_a_whole_expert_is_refused(stored: Path) -> None:
    scale = f"{EXPERTS}.row_scale"
    change(stored, lambda tensors: tensors.update({scale: tensors[scale][:, 0].contiguous()}))
    assert f"{scale} (F32 [4], not F32 [4, 24])" in refused(stored)


def test_scales_of_another_type_are_refused(stored: Path) -> None:
    scale = f"{UP}.row_scale"
    change(stored, lambda tensors: tensors.update({scale: tensors[scale].to(torch.int8)}))
    message = refused(stored)
    assert scale in message and "8-bit tensors should have two dimensions" in message


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 0.0, -1.0])
def test_scales_that_are_none_are_refused(value: float, stored: Path) -> None:
    change(stored, lambda tensors: tensors[f"{UP}.row_scale"][3:4].fill_(value))
    assert f"{UP}.row_scale should hold positive numbers" in refused(stored)


def test_whole_numbers_of_another_shape_are_refused(stored: Path) -> None:
    change(stored, lambda tensors: tensors.update({UP: tensors[UP][:, 1:].contiguous()}))
    assert f"{UP} ([24, 31], not [24, 32])" in refused(stored)


def test_a_vector_of_whole_numbers_is_refused(stored: Path) -> None:
    change(stored, lambda tensors: tensors.update({NORM: tensors[NORM].to(torch.int8)}))
    assert f"8-bit tensors should have two dimensions or more, but not so {NORM} ([32])" in refused(
        stored
    )


def test_a_missing_tensor_with_its_scales_is_named(stored: Path) -> None:
    def drop(tensors: Tensors) -> None:
        del tensors[UP], tensors[f"{UP}.row_scale"]

    assert f"does not fit its config.json: it lacks {UP}" in refused(change(stored, drop))


def test_other_types_are_refused_in_this_layout(stored: Path) -> None:
    change(stored, lambda tensors: tensors.update({NORM: tensors[NORM].bfloat16()}))
    message = refused(stored)
    assert f"{NORM} is stored as BF16; this build reads I8, U8, F16, F32" in message


def test_whole_numbers_are_refused_in_the_released_layout(stored: Path) -> None:
    shard(stored).rename(stored / "model.safetensors")
    (stored / INDEX).unlink()
    assert "is stored as I8; this build reads BF16, F16, F32" in refused(stored)


def test_shards_without_their_index_are_refused(stored: Path) -> None:
    (stored / INDEX).unlink()
    message = refused(stored)
    assert INDEX in message and "only int8-00001-of-00001.safetensors" in message


def test_two_layouts_in_one_directory_are_refused(stored: Path, single: Path) -> None:
    (stored / "model.safetensors").write_bytes((single / "model.safetensors").read_bytes())
    assert f"holds both model.safetensors and {INDEX}" in refused(stored)


def test_a_shard_cut_short_is_refused(stored: Path) -> None:
    shard(stored).write_bytes(shard(stored).read_bytes()[:-4])
    assert "is cut short" in refused(stored)
