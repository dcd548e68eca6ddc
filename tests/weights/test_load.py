"""Checkpoints written by transformers load here, give the same logits, and cost no second copy."""

import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from dgemma.config import load_config
from dgemma.errors import CheckpointError, UsageError
from dgemma.weights.load import load_model
from dgemma.weights.names import stored_names, tied_names
from tests.weights.sample import (
    CONFIG,
    SIBLING,
    header,
    our_logits,
    some_ids,
    their_logits,
    write,
)


@pytest.mark.parametrize("layout", ["single", "sharded"])
def test_a_checkpoint_of_transformers_gives_its_logits(
    layout: str, theirs: Any, request: pytest.FixtureRequest
) -> None:
    directory = request.getfixturevalue(layout)
    assert (len(list(directory.glob("*.safetensors"))) > 1) == (layout == "sharded")
    checkpoint = load_model(directory)
    ids, canvas = some_ids(29), some_ids(8, seed=1)
    ours = our_logits(checkpoint.model, ids, canvas)
    torch.testing.assert_close(ours, their_logits(theirs, ids, canvas), atol=1e-4, rtol=0)


def test_every_tensor_arrives_as_it_was(single: Path, theirs: Any) -> None:
    checkpoint = load_model(single)
    state = theirs.state_dict()
    for name, weight in checkpoint.model.state_dict().items():
        assert torch.equal(weight, state["model.decoder." + name]), name
    assert checkpoint.vision.keys() == {
        name for name, entry in stored_names(CONFIG).items() if entry.group == "vision"
    }
    for name, weight in checkpoint.vision.items():
        assert torch.equal(weight, state[name]), name


def test_what_is_loaded_is_ready_to_run_and_not_to_train(single: Path) -> None:
    checkpoint = load_model(single)
    assert not checkpoint.model.training
    assert not any(weight.requires_grad for weight in checkpoint.model.parameters())
    assert checkpoint.config == load_config(single)
    assert checkpoint.directory == single


def test_the_autoregressive_sibling_loads_and_gives_its_logits(
    sibling: Any, tmp_path: Path
) -> None:
    sibling.save_pretrained(tmp_path)
    checkpoint = load_model(tmp_path)
    assert checkpoint.config.family == "gemma4"
    assert checkpoint.model.self_conditioning is None
    assert checkpoint.vision.keys() == {
        name for name, entry in stored_names(SIBLING).items() if entry.group == "vision"
    }
    ids = some_ids(29)
    ours, theirs = our_logits(checkpoint.model, ids, None), their_logits(sibling, ids, None)
    torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=0)


@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("wanted", [None, torch.bfloat16, torch.float16, torch.float32])
def test_weights_take_the_wanted_type(
    stored: torch.dtype, wanted: torch.dtype | None, mine: Path
) -> None:
    path = mine / "model.safetensors"
    before = {name: tensor.to(stored) for name, tensor in load_file(path).items()}
    save_file(before, path)
    checkpoint = load_model(mine, dtype=wanted)
    for name, weight in checkpoint.model.state_dict().items():
        expected = before["model.decoder." + name].to(wanted or stored)
        assert weight.dtype == expected.dtype
        assert torch.equal(weight, expected)
    assert {weight.dtype for weight in checkpoint.vision.values()} == {stored}


@pytest.mark.skipif(sys.platform != "linux", reason="reads the maps of /proc")
def test_weights_that_need_no_change_stay_views_of_their_file(sharded: Path) -> None:
    checkpoint = load_model(sharded, dtype=torch.float32)
    files = [line.split() for line in Path("/proc/self/maps").read_text().splitlines()]
    ranges = [
        [int(end, 16) for end in fields[0].split("-")]
        for fields in files
        if len(fields) == 6 and fields[5].startswith(str(sharded))
    ]
    tensors = [*checkpoint.model.state_dict().values(), *checkpoint.vision.values()]
    for tensor in tensors:
        assert any(start <= tensor.data_ptr() < stop for start, stop in ranges)


def test_writing_to_a_weight_does_not_reach_the_file(mine: Path) -> None:
    before = (mine / "model.safetensors").read_bytes()
    weight = load_model(mine).model.embed_tokens.weight
    weight.fill_(7.0)
    assert weight[0, 0] == 7.0
    assert (mine / "model.safetensors").read_bytes() == before


def test_a_header_of_odd_length_is_read_all_the_same(mine: Path, theirs: Any) -> None:
    raw, data = header(mine / "model.safetensors")
    for padding in range(1, 5):
        write(mine / "model.safetensors", raw, data, padding)
        weight = load_model(mine).model.embed_tokens.weight
        assert torch.equal(weight, theirs.state_dict()["model.decoder.embed_tokens.weight"])


def test_progress_ends_with_all_bytes_of_the_text_model(single: Path) -> None:
    seen: list[tuple[int, int]] = []
    checkpoint = load_model(single, on_tensor=lambda done, total: seen.append((done, total)))
    weights = checkpoint.model.state_dict().values()
    total = sum(weight.numel() * weight.element_size() for weight in weights)
    assert len(seen) == len(weights)
    assert seen[-1] == (total, total)
    assert seen == sorted(seen)


def test_redundant_copies_are_accepted_when_equal(mine: Path, theirs: Any) -> None:
    everything = {name: tensor.clone() for name, tensor in theirs.state_dict().items()}
    assert tied_names(CONFIG).keys() < everything.keys()
    save_file(everything, mine / "model.safetensors")
    checkpoint = load_model(mine)
    weight = checkpoint.model.embed_tokens.weight
    assert torch.equal(weight, everything["model.decoder.embed_tokens.weight"])


@pytest.mark.parametrize(
    "name", ["lm_head.weight", "model.encoder.language_model.layers.1.mlp.up_proj.weight"]
)
def test_redundant_copies_are_refused_when_one_bit_differs(
    name: str, mine: Path, theirs: Any
) -> None:
    tensors = load_file(mine / "model.safetensors")
    tensors[name] = theirs.state_dict()[name].clone()
    tensors[name].view(torch.int32)[0, 0] ^= 1
    save_file(tensors, mine / "model.safetensors")
    with pytest.raises(CheckpointError, match=name):
        load_model(mine)


def test_layer_scalars_that_differ_are_refused(mine: Path) -> None:
    tensors = load_file(mine / "model.safetensors")
    name = "model.encoder.language_model.layers.1.layer_scalar"
    tensors[name] += 1e-6
    save_file(tensors, mine / "model.safetensors")
    with pytest.raises(CheckpointError, match=rf"{name} differs from model\.decoder\.layers\.1"):
        load_model(mine)


def test_a_checkpoint_without_its_vision_is_accepted(mine: Path) -> None:
    tensors = load_file(mine / "model.safetensors")
    kept = {name: t for name, t in tensors.items() if "vision" not in name}
    save_file(kept, mine / "model.safetensors")
    assert load_model(mine).vision == {}


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize(
    "name", ["model.decoder.norm.weight", "model.encoder.vision_tower.std_bias"]
)
def test_verification_names_what_is_not_finite(name: str, value: float, mine: Path) -> None:
    tensors = load_file(mine / "model.safetensors")
    tensors[name][3] = value
    save_file(tensors, mine / "model.safetensors")
    load_model(mine)
    with pytest.raises(CheckpointError, match=name):
        load_model(mine, verify=True)


def test_verification_names_what_the_wanted_type_cannot_hold(mine: Path) -> None:
    tensors = load_file(mine / "model.safetensors")
    tensors["model.decoder.norm.weight"][3] = 1e6
    save_file(tensors, mine / "model.safetensors")
    load_model(mine, verify=True)
    with pytest.raises(CheckpointError, match=r"model\.decoder\.norm\.weight.*float16"):
        load_model(mine, dtype=torch.float16, verify=True)


def test_mixed_types_are_refused_until_one_is_named(mine: Path) -> None:
    tensors = load_file(mine / "model.safetensors")
    name = "model.decoder.layers.1.router.scale"
    tensors[name] = tensors[name].bfloat16()
    save_file(tensors, mine / "model.safetensors")
    with pytest.raises(CheckpointError, match=name):
        load_model(mine)
    model = load_model(mine, dtype=torch.float32).model
    assert {weight.dtype for weight in model.state_dict().values()} == {torch.float32}


def test_other_types_than_floats_are_refused(single: Path) -> None:
    with pytest.raises(UsageError, match=r"torch\.int8"):
        load_model(single, dtype=torch.int8)


def test_a_checkpoint_may_be_removed_while_its_weights_are_used(mine: Path) -> None:
    weight = load_model(mine).model.embed_tokens.weight
    shutil.rmtree(mine)
    assert torch.isfinite(weight).all()
