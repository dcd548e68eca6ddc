"""Checkpoints saved here load in transformers, come back unchanged, and are whole or absent."""

import json
import os
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import DiffusionGemmaForBlockDiffusion, Gemma4ForConditionalGeneration

from dgemma.config import GenerationConfig, load_config, load_generation_config
from dgemma.errors import CheckpointError, UsageError
from dgemma.weights import safetensors_io, save
from dgemma.weights.files import HUB_METADATA, file_digest, verify_digests
from dgemma.weights.load import Checkpoint, load_model, random_model
from dgemma.weights.names import stored_names
from dgemma.weights.save import save_checkpoint
from tests.weights.sample import (
    CONFIG,
    SIBLING,
    header,
    our_logits,
    some_ids,
    tensor_bytes,
    their_logits,
)

SMALL_SHARDS = 20_000  # bytes
FEW_SHARDS = 100_000
INDEX = "model.safetensors.index.json"


@pytest.fixture
def checkpoint(single: Path) -> Checkpoint:
    return load_model(single)


@pytest.mark.parametrize("max_shard_bytes", [SMALL_SHARDS, 10**9])
def test_transformers_loads_what_is_saved_here(
    max_shard_bytes: int, checkpoint: Checkpoint, theirs: Any, tmp_path: Path
) -> None:
    save_checkpoint(checkpoint, tmp_path, max_shard_bytes=max_shard_bytes)
    loaded, info = DiffusionGemmaForBlockDiffusion.from_pretrained(
        tmp_path, output_loading_info=True
    )
    assert not info["missing_keys"] and not info["unexpected_keys"]
    for name, tensor in theirs.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], tensor), name
    ids, canvas = some_ids(29), some_ids(8, seed=1)
    ours = our_logits(checkpoint.model, ids, canvas)
    torch.testing.assert_close(their_logits(loaded, ids, canvas), ours, atol=1e-4, rtol=0)


def test_transformers_loads_a_saved_sibling(sibling: Any, tmp_path: Path) -> None:
    sibling.save_pretrained(tmp_path / "theirs")
    save_checkpoint(load_model(tmp_path / "theirs"), tmp_path / "ours")
    loaded = Gemma4ForConditionalGeneration.from_pretrained(tmp_path / "ours")
    ids = some_ids(29)
    assert torch.equal(their_logits(loaded, ids, None), their_logits(sibling, ids, None))
    assert tensor_bytes(tmp_path / "ours") == tensor_bytes(tmp_path / "theirs")


@pytest.mark.parametrize("max_shard_bytes", [1, SMALL_SHARDS, 10**9])
def test_saving_and_loading_again_and_again_changes_no_byte(
    max_shard_bytes: int, checkpoint: Checkpoint, single: Path, tmp_path: Path
) -> None:
    save_checkpoint(checkpoint, tmp_path / "first", max_shard_bytes=max_shard_bytes)
    again = load_model(tmp_path / "first")
    save_checkpoint(again, tmp_path / "second", max_shard_bytes=max_shard_bytes)
    assert tensor_bytes(tmp_path / "first") == tensor_bytes(single)
    first, second = (
        {path.name: path.read_bytes() for path in (tmp_path / name).iterdir()}
        for name in ("first", "second")
    )
    assert first == second
    assert load_config(tmp_path / "second") == checkpoint.config
    assert again.generation == checkpoint.generation


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_the_saved_config_tells_the_type_of_the_saved_weights(
    dtype: torch.dtype, single: Path, theirs: Any, tmp_path: Path
) -> None:
    save_checkpoint(load_model(single, dtype=dtype), tmp_path)
    raw = json.loads((tmp_path / "config.json").read_text())
    assert f"torch.{raw['dtype']}" == str(dtype)
    for name, tensor in load_file(tmp_path / "model.safetensors").items():
        assert torch.equal(tensor, theirs.state_dict()[name].to(dtype)), name
    loaded = DiffusionGemmaForBlockDiffusion.from_pretrained(tmp_path)
    assert loaded.dtype == dtype


def test_the_index_counts_as_the_released_one(checkpoint: Checkpoint, tmp_path: Path) -> None:
    save_checkpoint(checkpoint, tmp_path, max_shard_bytes=SMALL_SHARDS)
    raw = json.loads((tmp_path / INDEX).read_text())
    tensors = tensor_bytes(tmp_path)
    shards = sorted(path.name for path in tmp_path.glob("*.safetensors"))
    count = len(shards)
    assert count > 3
    assert shards == [f"model-{i:05d}-of-{count:05d}.safetensors" for i in range(1, count + 1)]
    assert raw["weight_map"].keys() == tensors.keys() == stored_names(CONFIG).keys()
    total = sum(len(data) for _, _, data in tensors.values())
    buffers = 2 * CONFIG.num_hidden_layers + 2 * 12
    digests = {name: file_digest(tmp_path / name) for name in shards}
    assert raw["metadata"].pop("sha256") == digests
    assert raw["metadata"] == {"total_size": total, "total_parameters": total // 4 - buffers}


def test_shards_keep_to_their_limit(checkpoint: Checkpoint, tmp_path: Path) -> None:
    save_checkpoint(checkpoint, tmp_path, max_shard_bytes=SMALL_SHARDS)
    for path in tmp_path.glob("*.safetensors"):
        raw, data = header(path)
        assert raw["__metadata__"] == {"format": "pt"}
        assert len(data) <= SMALL_SHARDS or len(raw) == 2


def test_large_tensors_are_aligned_when_mapped(checkpoint: Checkpoint, tmp_path: Path) -> None:
    save_checkpoint(checkpoint, tmp_path, max_shard_bytes=SMALL_SHARDS)
    loaded = load_model(tmp_path)
    for name, weight in {**loaded.model.state_dict(), **loaded.vision}.items():
        if weight.numel() * 4 % 64 == 0:
            assert weight.data_ptr() % 64 == 0, name


def test_a_model_without_vision_or_files_can_be_saved(tmp_path: Path) -> None:
    config = replace(CONFIG, vision=None, dtype="bfloat16")
    generation = GenerationConfig(max_denoising_steps=7, stop_ids=(1, 6))
    model = random_model(config, 3, dtype=torch.bfloat16)
    save_checkpoint(Checkpoint(model=model, generation=generation), tmp_path)
    loaded = load_model(tmp_path)
    assert loaded.config == config and loaded.generation == generation and loaded.vision == {}
    assert load_generation_config(tmp_path) == generation
    for name, weight in loaded.model.state_dict().items():
        assert torch.equal(weight, model.state_dict()[name])


def test_tokenizer_and_template_come_along(checkpoint: Checkpoint, tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    names = ["tokenizer.json", "chat_template.jinja", "processor_config.json"]
    for name in names:
        (source / name).write_text(f"contents of {name}")
    (source / "notes.txt").write_text("stays behind")
    save_checkpoint(checkpoint, tmp_path / "saved", tokenizer_from=source)
    for name in names:
        assert (tmp_path / "saved" / name).read_text() == f"contents of {name}"
    expected = {*names, "config.json", "generation_config.json", "model.safetensors"}
    assert {path.name for path in (tmp_path / "saved").iterdir()} == expected


def test_an_existing_checkpoint_is_kept_unless_told(checkpoint: Checkpoint, tmp_path: Path) -> None:
    save_checkpoint(checkpoint, tmp_path)
    before = (tmp_path / "model.safetensors").stat().st_ino
    with pytest.raises(UsageError, match=r"already holds a checkpoint.*model\.safetensors"):
        save_checkpoint(checkpoint, tmp_path)
    assert (tmp_path / "model.safetensors").stat().st_ino == before


@pytest.mark.parametrize("first", [1, SMALL_SHARDS, 10**9])
@pytest.mark.parametrize("second", [1, SMALL_SHARDS, 10**9])
def test_overwriting_leaves_nothing_of_the_old_checkpoint(
    first: int, second: int, checkpoint: Checkpoint, tmp_path: Path
) -> None:
    old = Checkpoint(model=random_model(CONFIG, 1))
    save_checkpoint(old, tmp_path, max_shard_bytes=first)
    save_checkpoint(checkpoint, tmp_path, max_shard_bytes=second, overwrite=True)
    assert tensor_bytes(tmp_path).keys() == stored_names(CONFIG).keys()
    loaded = load_model(tmp_path).model.state_dict()
    for name, weight in checkpoint.model.state_dict().items():
        assert torch.equal(loaded[name], weight)


def test_a_checkpoint_can_overwrite_the_files_its_weights_are_views_of(mine: Path) -> None:
    before = tensor_bytes(mine)
    save_checkpoint(load_model(mine), mine, overwrite=True)
    assert tensor_bytes(mine) == before


@pytest.mark.parametrize("files_before", range(4))
def test_an_interrupted_write_leaves_the_directory_as_it_was(
    files_before: int, checkpoint: Checkpoint, mine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = {path.name: path.read_bytes() for path in mine.iterdir()}
    written: list[Path] = []
    write = safetensors_io.write_safetensors

    def interrupted(path: Path, *rest: Any) -> None:
        if len(written) == files_before:
            path.write_bytes(b"half a file")
            raise KeyboardInterrupt
        written.append(path)
        write(path, *rest)

    monkeypatch.setattr(save, "write_safetensors", interrupted)
    with pytest.raises(KeyboardInterrupt):
        save_checkpoint(checkpoint, mine, max_shard_bytes=SMALL_SHARDS, overwrite=True)
    assert {path.name: path.read_bytes() for path in mine.iterdir()} == before


CHANGES = {"os.rename", "os.link", "os.remove", "os.mkdir", "os.rmdir", "os.truncate", "open"}
_crash: list[int] = []  # operations left until the crash; empty: no crash


class Crash(BaseException):
    """The process ends here: from now on every change of the file system fails."""


def _count_down(event: str, arguments: tuple[Any, ...]) -> None:
    if not _crash or event not in CHANGES:
        return
    if event == "open" and not (isinstance(arguments[2], int) and arguments[2] & os.O_WRONLY):
        return
    _crash[0] -= 1
    if _crash[0] < 0:
        raise Crash


@pytest.fixture(scope="module")
def audit() -> None:
    sys.addaudithook(_count_down)


@pytest.mark.parametrize(("before", "after"), [(FEW_SHARDS, FEW_SHARDS), (10**9, FEW_SHARDS)])
def test_a_crash_at_any_operation_leaves_the_old_or_the_new_checkpoint(
    before: int, after: int, checkpoint: Checkpoint, tmp_path: Path, audit: None
) -> None:
    old = Checkpoint(model=random_model(CONFIG, 1), vision=checkpoint.vision)
    save_checkpoint(old, tmp_path / "old", max_shard_bytes=before)
    weights = [model.model.state_dict()["norm.weight"] for model in (old, checkpoint)]
    seen = []
    for operations in range(1000):
        directory = shutil.copytree(tmp_path / "old", tmp_path / str(operations))
        _crash[:] = [operations]
        try:
            save_checkpoint(checkpoint, directory, max_shard_bytes=after, overwrite=True)
            break
        except Crash:
            pass
        finally:
            _crash.clear()
        found = load_model(directory).model.state_dict()["norm.weight"]
        seen.append([torch.equal(found, each) for each in weights].index(True))
        # The next save finds its way, and leaves nothing of the interrupted one.
        save_checkpoint(old, directory, max_shard_bytes=after, overwrite=True)
        assert not list(directory.glob(".s*"))
        assert torch.equal(load_model(directory).model.state_dict()["norm.weight"], weights[0])
        shutil.rmtree(directory)
    assert seen == sorted(seen) and set(seen) == {0, 1} and len(seen) > 15


def test_a_save_that_still_runs_is_no_remnant(checkpoint: Checkpoint, tmp_path: Path) -> None:
    """Two saves to one directory: the second does not remove what the first is writing."""
    running: list[Path] = []

    def write_in_turn(hidden: Path) -> list[str]:
        running.append(hidden)
        save_checkpoint(checkpoint, tmp_path, overwrite=True)
        assert hidden.is_dir()
        (hidden / "config.json").write_text("{}")
        return ["config.json"]

    save.save_atomically(tmp_path, write_in_turn)
    assert running and not list(tmp_path.glob(".s*"))
    (tmp_path / ".saving-old").mkdir()
    save_checkpoint(checkpoint, tmp_path, overwrite=True)
    assert not list(tmp_path.glob(".s*"))


def test_damage_is_found_by_the_digests_of_the_index(
    checkpoint: Checkpoint, tmp_path: Path
) -> None:
    save_checkpoint(checkpoint, tmp_path, max_shard_bytes=SMALL_SHARDS)
    shards = sorted(tmp_path.glob("*.safetensors"))
    assert list(verify_digests(tmp_path)) == [path.name for path in shards]
    data = bytearray(shards[1].read_bytes())
    data[len(data) // 2] ^= 1
    shards[1].write_bytes(data)
    load_model(tmp_path)  # a bit of a weight is no error of the format
    with pytest.raises(CheckpointError, match=f"{shards[1].name} is damaged: its SHA-256 is"):
        verify_digests(tmp_path)


def test_a_download_is_compared_with_the_digests_of_the_hub(mine: Path, tmp_path: Path) -> None:
    """Either by the name of the blob in the cache, or by the ETag beside a directory's files."""
    file = mine / "model.safetensors"
    assert verify_digests(mine) == {}
    digest = file_digest(file)
    stated = mine / HUB_METADATA / f"{file.name}.metadata"
    stated.parent.mkdir(parents=True)
    for etag, is_right in ((digest, True), ("0" * 64, False)):
        stated.write_text(f"commit\n{etag}\n1.0\n")
        if is_right:
            assert verify_digests(mine) == {file.name: digest}
            continue
        with pytest.raises(CheckpointError, match="is damaged"):
            verify_digests(mine)
    shutil.rmtree(mine / ".cache")
    file.rename(tmp_path / ("1" * 64))
    file.symlink_to(tmp_path / ("1" * 64))
    with pytest.raises(CheckpointError, match="is damaged"):
        verify_digests(mine)


def test_a_file_in_the_way_is_named(checkpoint: Checkpoint, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="file"):
        save_checkpoint(checkpoint, tmp_path / "file" / "model")


def test_weights_of_several_types_are_not_saved(checkpoint: Checkpoint, tmp_path: Path) -> None:
    checkpoint.model.norm.weight.data = checkpoint.model.norm.weight.data.half()
    with pytest.raises(CheckpointError, match=r"torch\.float16, torch\.float32"):
        save_checkpoint(checkpoint, tmp_path)


def test_an_incomplete_vision_tower_is_not_saved(checkpoint: Checkpoint, tmp_path: Path) -> None:
    name = "model.encoder.vision_tower.std_bias"
    vision = {key: value for key, value in checkpoint.vision.items() if key != name}
    with pytest.raises(CheckpointError, match=name):
        save_checkpoint(replace(checkpoint, vision=vision), tmp_path)


def test_a_shard_size_of_nothing_is_refused(checkpoint: Checkpoint, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="max_shard_bytes"):
        save_checkpoint(checkpoint, tmp_path, max_shard_bytes=0)


def test_the_saved_names_of_a_sibling_have_no_second_layer_scalar(tmp_path: Path) -> None:
    save_checkpoint(Checkpoint(model=random_model(SIBLING, 0)), tmp_path)
    assert not any("encoder.language_model" in name for name in tensor_bytes(tmp_path))
